"""The commands of `mmrl index`: a retrieval index is built."""

from __future__ import annotations

import typer

from mmrl.cli.completion import SETTINGS

index_app = typer.Typer(rich_markup_mode=None, help="Build a retrieval index.")


@index_app.command("build", **SETTINGS, options_metavar="corpus=A[,B] index=DIR [KEY=VALUE ...]")
def index_build(context: typer.Context) -> None:
    """Build an index of a corpus; a build that was stopped goes on.

    \b
    Keys:
      corpus=A,B                      files, folders or names of a corpus
      index=DIR                       folder that is made
      retriever=bm25|dense            bm25
      k1= b=                          bm25
      stemmer=porter|english|…        bm25: takes the endings of words off (34 languages); none
      stopwords=english|none|…        bm25: words that are left out (12 languages)
      model= device= batch_size=      dense: the encoder, where it runs, texts at once
      faiss=flat|hnsw                 dense: exact, or a graph
      encoder=own|contriever|e5       dense: how texts become vectors; own: as the model's files say
      normalise=                      dense: vectors of length 1
      query_prompt= passage_prompt=   dense: text in front of queries and passages

    \b
    Examples:
      mmrl index build corpus=passages.jsonl index=indexes/bm25
      mmrl index build corpus=passages.jsonl index=indexes/e5 retriever=dense model=intfloat/e5-base-v2
    """
    from mmrl.cli.arguments import read_arguments
    from mmrl.config.retriever import build_schema

    arguments = read_arguments("mmrl index build", build_schema(context.args), context.args)
    from mmrl.commands.index import build

    build(arguments)
