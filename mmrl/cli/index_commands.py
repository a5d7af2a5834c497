"""`mmrl index ...` and `mmrl serve-retriever` as `mmrl.cli.commands` has the others: what they take, what help says."""

from __future__ import annotations

import typer

from mmrl.cli.app import SETTINGS, app

index_app = typer.Typer(rich_markup_mode=None, help="A retrieval index: sizes first, then built; looked into.")


@index_app.command("build", context_settings=SETTINGS, options_metavar="corpus=A[,B] index=DIR [KEY=VALUE ...]")
def index_build(context: typer.Context) -> int:
    """Build an index of a corpus; sizes are printed first, and a build that was stopped goes on.

    \b
    Keys:
      corpus=A,B                      files, folders or names of a corpus
      index=DIR                       folder that is made
      retriever=bm25|dense|colbert    bm25
      k1= b=                          bm25
      stemmer=porter|english|…        bm25: takes the endings of words off (31 languages); none
      stopwords=english|none|…        bm25: words that are left out (12 languages)
      model= device= batch_size=      dense, colbert: the encoder, where it runs, texts at once
      faiss=flat|hnsw                 dense, colbert
      encoder=own|contriever|e5       dense: how texts become vectors; own: as the model's files say
      pooling= normalise=             dense: the same for a model that does not say it
      query_prompt= passage_prompt=   dense: text in front of queries and passages
      plan=true                       print sizes and stop

    \b
    Examples:
      mmrl index build corpus=passages.jsonl index=indexes/bm25
      mmrl index build corpus=passages.jsonl index=indexes/e5 retriever=dense model=intfloat/e5-base-v2 plan=true
    """
    from mmrl.cli.index import build

    return build(context.args)


@index_app.command("info", context_settings=SETTINGS, options_metavar="index=DIR")
def index_info(context: typer.Context) -> int:
    """Print what an index holds.

    \b
    Examples:
      mmrl index info index=indexes/bm25
    """
    from mmrl.cli.index import info

    return info(context.args)


@index_app.command("search", context_settings=SETTINGS, options_metavar="index=DIR query=TEXT [KEY=VALUE ...]")
def index_search(context: typer.Context) -> int:
    """Search an index.

    \b
    Keys:
      index=DIR query=TEXT   what is searched for
      top_k=                 passages; 5
      device= batch_size=    dense, colbert
      candidates=            colbert: nearest tokens of each query token

    \b
    Examples:
      mmrl index search index=indexes/bm25 query="capital of France" top_k=3
    """
    from mmrl.cli.index import search

    return search(context.args)


@index_app.command("check", context_settings=SETTINGS, options_metavar="index=DIR data=FILE [KEY=VALUE ...]")
def index_check(context: typer.Context) -> int:
    """Print how many gold titles of a question file an index holds, and how many it finds.

    \b
    Keys:
      index=DIR data=FILE    records of HotpotQA, 2WikiMultihopQA, MuSiQue, PopQA or HoVer, by file or hub id
      top_k=2,5,10           numbers of passages in which a title counts as found
      items=                 the first so many questions; all
      device= batch_size=    dense, colbert
      candidates=            colbert: nearest tokens of each query token

    \b
    Examples:
      mmrl index check index=indexes/bm25 data=hotpot_dev_distractor_v1.json top_k=2,10
    """
    from mmrl.cli.index import check

    return check(context.args)


@app.command("serve-retriever", context_settings=SETTINGS, options_metavar="index=DIR [KEY=VALUE ...]")
def serve_retriever(context: typer.Context) -> int:
    """Serve an index over HTTP, in Search-R1's and DSPy's protocols, until Ctrl-C.

    \b
    Keys:
      index=DIR             what is served
      host= port=           127.0.0.1 and 8000; port=0: a free one
      token_env=NAME        environment variable with the token that every request must bring; needed with any host
                            that other machines reach
      max_batch=            queries of one search
      parent=PID            end when this process is gone
      device= batch_size=   dense, colbert
      candidates=           colbert: nearest tokens of each query token

    \b
    Examples:
      mmrl serve-retriever index=indexes/bm25 port=8000
    """
    from mmrl.cli.index import serve

    return serve(context.args)
