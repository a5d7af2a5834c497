"""Command-line commands, one function each: arguments, help, and the call of the code that runs.

Those that may end with another exit code than 0 return it.

Every body imports what it runs, so that help and the other commands load neither torch nor Hydra.
"""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from mmrl.cli.completion import SETTINGS, Commands
from mmrl.cli.index import index_app
from mmrl.errors import ConfigError, MmrlError

WORKER = "worker"
"""The hidden command of one process of a run of several."""
HYDRA_FLAGS = """\b
Flags:
  -m                   a sweep (mmrl train): a key takes several values, one run for every combination
  --config-dir FOLDER  configs of your own, before conf/ here and the shipped ones
  --cfg job|full       print what conf/ and the words set, or every key, and stop"""
JsonFlag = Annotated[bool, typer.Option("--json", help="JSON instead of a table.")]

# Errors and help are plain text: rich would read `run.report_to=[wandb]` as markup.
app = typer.Typer(
    cls=Commands,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
)


def _version(wanted: bool) -> None:
    if wanted:
        from mmrl import __version__
        from mmrl.commands.version import versions_and_devices
        from mmrl.report.text import align

        print(f"mmrl {__version__}\n{align(versions_and_devices())}")
        raise typer.Exit


@app.callback(options_metavar="COMMAND", subcommand_metavar="[KEY=VALUE ...]")
def mmrl(
    version: Annotated[
        bool, typer.Option("-V", "--version", callback=_version, is_eager=True, help="Versions and devices.")
    ] = False,
) -> None:
    """Train language-model programs by reinforcement learning.

    `mmrl COMMAND --help` has the keys and examples of one command. `mmrl train` alone does the main job:
    algo=mhgpo_rr task=hotpotqa model=tiny, in minutes on two cores.
    """


@app.command(**SETTINGS, options_metavar="[KEY=VALUE ...] [-m]", epilog=HYDRA_FLAGS)
def train(context: typer.Context) -> int:
    """Train; ends with a table before/after and a report.

    \b
    Keys (docs/keys-*.md list them all):
      task= algo= model= hardware= engine=   what a run is composed of; `mmrl --help` lists the choices
      experiment=                            settings of your own under one name: conf/experiment/NAME.yaml
      train.* algo.* task.* model.* eval.*   any setting of these parts: train.steps=100 algo.group_size=8
      seed=                                  of every random choice
      run.dir=                               the run's folder; default: outputs/TASK/ALGO/TIME_sSEED; in a sweep with
                                             folders of their own ('run.dir=outputs/x/s${seed}') finished runs
                                             stay and unfinished ones continue
      plugins=[PACKAGE]                      packages that add tasks or algorithms
      from=RUN_DIR                           start from the policy of that run, weights and prompts; its model, task
                                             and plugins where none are typed
      resume=RUN_DIR                         continue a stopped run; no other key with it but train.steps=+N, which
                                             takes N further steps, also of a finished run

    \b
    Examples:
      mmrl train
      mmrl train algo=grpo task=2wiki train.steps=50 seed=1
      mmrl train -m algo=mhgpo_rr,grpo seed=0,1,2
      mmrl train resume=outputs/hotpotqa/mhgpo_rr/RUN
      mmrl train resume=outputs/hotpotqa/mhgpo_rr/RUN train.steps=+100
    """
    from mmrl.cli import configs, hydra, overrides

    line = overrides.read_line(context.args, command_keys=("resume", "from"))
    if "resume" in line.command_keys:
        overrides.refuse_beside_resume(line, "train.steps")
        from mmrl.run import session
        from mmrl.system.files import user_path

        folder = user_path(line.command_keys["resume"])
        if line.overrides:
            with session.extended(folder, overrides.value_text(line.overrides[0]) or ""):
                return session.resume(folder)
        return session.resume(folder)
    if line.prints:
        configs.print_config("train", line)
        return 0
    if line.multirun:
        line = hydra.with_swept_params(line)
    jobs = configs.train_configs(line)
    if line.multirun:
        from mmrl.sets.sweep import sweep

        return sweep(jobs, lambda job: configs.swept(line, job), searched=overrides.is_search(line))
    from mmrl import run

    return run.train(jobs[0])[1]


@app.command("eval", **SETTINGS, options_metavar="policy=P [KEY=VALUE ...]", epilog=HYDRA_FLAGS)
def evaluate(context: typer.Context) -> None:
    """Evaluate a run, checkpoint, adapter, model folder or hub id on any task; each item is stored.

    \b
    Keys (docs/keys-*.md list them all):
      policy=                        what is evaluated; `tiny`: the shipped model
      task= split=train|dev|test     on which examples; without task= as in the policy's own run; split=dev
      eval.items= eval.samples=      how many examples, and how often each; also eval.temperature=
      model= hardware= engine=       how the policy is loaded and samples
      experiment= seed= run.dir=     as in `mmrl train`
      resume=EVAL_DIR                continue a stopped evaluation; no other key with it

    \b
    Examples:
      mmrl eval policy=tiny
      mmrl eval policy=outputs/hotpotqa/mhgpo_rr/RUN task=2wiki split=test
    """
    from mmrl.cli import configs, overrides

    line = overrides.read_line(context.args, command_keys=("resume",))
    if "resume" in line.command_keys:
        overrides.refuse_beside_resume(line)
        from mmrl.run.eval import resume_evaluation
        from mmrl.system.files import user_path

        return resume_evaluation(user_path(line.command_keys["resume"]))
    if line.prints:
        return configs.print_config("eval", line)
    if line.multirun:
        raise ConfigError("-m: not for mmrl eval; run one for each")
    from mmrl import run

    run.evaluate(configs.eval_configs(line)[0])


@app.command(**SETTINGS, options_metavar="RUN_DIR [example=ID] [step=N [--json]]")
def show(context: typer.Context, as_json: JsonFlag = False) -> None:
    """Print a run's curves, an evaluation's scores, the tree of calls of an example, or a step's rollouts as JSON.

    \b
    Keys:
      example=ID   the calls of that example; of an item of an evaluation its scores too
      step=N       of that step (0: before training); with --json: its rollouts, in the form that `mmrl credit` reads

    \b
    Examples:
      mmrl show outputs/hotpotqa/mhgpo_rr/RUN
      mmrl show outputs/hotpotqa/mhgpo_rr/RUN step=40 example=5a7a0
      mmrl show outputs/hotpotqa/mhgpo_rr/RUN step=40 --json > rollouts.json
    """
    from mmrl.cli.arguments import ShowArguments, read_arguments

    arguments = read_arguments("mmrl show", ShowArguments, context.args, name="run_dir")
    path = Path(arguments.run_dir)
    if as_json:
        if arguments.step is None or arguments.example is not None:
            raise ConfigError("--json: writes the rollouts of one step; give step=N, and no example")
        from mmrl.store.forest import dump_forest
        from mmrl.store.journal import read_step
        from mmrl.store.rundir import RunDir
        from mmrl.system.files import dumps

        print(dumps(dump_forest(read_step(RunDir.read(path), arguments.step)[0])))
        return
    from mmrl.report.console import show_run

    print(show_run(path, example=arguments.example, step=arguments.step))


@app.command()
def report(run_dir: Path) -> None:
    """Write a run's report.html again, from what is in its folder.

    \b
    Examples:
      mmrl report outputs/hotpotqa/mhgpo_rr/RUN
    """
    from mmrl.report.html import report_run

    print(report_run(run_dir))


@app.command(**SETTINGS, options_metavar="[RUN_DIR ...] [KEY=VALUE ...]")
def compare(context: typer.Context) -> int:
    """Show runs side by side: one figure, tables, which algorithm learned.

    Of run directories, or of algorithms on tasks: missing runs start, unfinished ones continue, finished ones stay.

    \b
    Keys:
      algo=A,B task=T,U            what is run; without task= the experiment's or hotpotqa; A+B: B starts from what A
                                   has made, such as prompts, then weights; a row for each; one seed unless typed
      set=NAME                     or a set of rows and columns: conf/set/NAME.yaml, as the shipped mini and tasks
      seed=0,1,2 jobs=N            seeds; runs at once, one thread each; jobs=1
      rows=A,B columns=T,U         some rows and columns of a set, by name
      do=run|plan|show             run; the command of each run; what is there
      through=COMMAND              that starts each run, on machines that share this folder: 'srun --gpus-per-node=8'
      name=NAME out=FOLDER         of the page's folder, outputs/sets/NAME; or that folder
      any other key                a setting of every run, as in `mmrl train`; A.KEY= of one algorithm
      --config-dir FOLDER          configs of your own

    \b
    Examples:
      mmrl compare algo=mhgpo_rr,grpo seed=0,1,2 jobs=2
      mmrl compare algo=miprov2+mmgrpo task=banking77 miprov2.algo.auto=light mmgrpo.train.steps=50
      mmrl compare set=mini columns=tool_agent seed=0
      mmrl compare outputs/hotpotqa/mhgpo_rr/RUN outputs/hotpotqa/grpo/RUN
    """
    from mmrl.cli import configs, overrides
    from mmrl.sets import command

    keys, single = tuple(command.SetKeys.model_fields), "mmrl compare, which takes lists as they are: seed=0,1"
    line = overrides.read_line(context.args, command_keys=keys, names=True, single=single)
    problems: list[str] = []
    section = line.section(command.SetKeys, problems)
    request = command.SetRequest(line.names, section, line.words, line.config_dir, problems=problems)
    return command.compare(request, configs.set_config)


@app.command(
    **SETTINGS,
    options_metavar="rollouts=FILE algo=A[,B] | run=RUN_DIR step=N [algo=A,B] [KEY=VALUE ...]",
)
def credit(context: typer.Context, as_json: JsonFlag = False) -> int:
    """Print rewards, groups, advantages and weights of recorded rollouts; no task, no model, no torch.

    Of a run's step: what it was trained on, with all settings of the run, compared with its journal.

    \b
    Keys:
      rollouts=FILE   a forest file, or one step of a run's journal
      run=RUN_DIR     a training run, in place of a file
      step=N          a step of that run
      algo=A,B        algorithms, side by side; a run's own keeps the run's settings, and is the one if left out
      algo.*          settings of the algorithms: algo.group_size=4
      page=FILE       also a page (.html), or its picture alone (.svg): calls against algorithms
      seed=           of the algorithm's own choices; of a run: the run's
      plugins=        packages that add algorithms

    \b
    Examples:
      mmrl credit algo=mhgpo_fof rollouts=forest.json
      mmrl credit algo=grpo,dr_mas,gigpo,ccpo rollouts=forest.json page=credit.html
      mmrl credit run=outputs/hotpotqa/mhgpo_rr/RUN step=40
      mmrl credit run=outputs/hotpotqa/mhgpo_rr/RUN step=40 algo=mhgpo_rr,grpo --json
    """
    from mmrl.cli.hydra import credit_request
    from mmrl.commands.credit import credit_command

    return credit_command(credit_request(context.args), as_json)


@app.command(**SETTINGS, options_metavar="algo=A[,B] [KEY=VALUE ...]")
def audit(context: typer.Context) -> None:
    """Measure which credit is right: what calls were truly worth, and how far each algorithm is from it.

    Plays the program on from recorded calls, again and again. The same command goes on with an audit that was stopped.
    Ends with a table, audit.json and a page.

    \b
    Keys:
      algo=A,B               rows; A.KEY= is a setting of one of them: grpo.algo.group_size=8
      policy=RUN_DIR         or a checkpoint in it: whose policy is audited; without it model=
      examples=N             32; of the train split
      decisions=N            4; audited calls for each example
      continuations=N        16; of each of them, and half as many other replies in its place, twice each
      batches=N              16; gradients of each row
      budgets=1,4            calls behind a gradient, in units of the dearest row's batch
      reference=N            64; rollouts of each example behind the gradient that they are compared with
      truth=outcome|reward   reward: what the rows optimise, penalties and turn rewards included
      out=FOLDER             default: one below outputs/audits, by the settings
      any other key          as in `mmrl train`: task= model= seed= algo.group_size=8

    \b
    Examples:
      mmrl audit algo=grpo,mmgrpo,mhgpo_fof,mhgpo_rr task=hotpotqa algo.group_size=4
      mmrl audit algo=mhgpo_fof,mhgpo_rr policy=outputs/hotpotqa/mhgpo_rr/RUN
      mmrl audit algo=grpo,mmgrpo task=dspy task.program=mine:Answerer task.metric=mine:metric examples=8
    """
    from mmrl.audit.settings import AuditKeys
    from mmrl.cli import configs, overrides

    line = overrides.read_line(context.args, command_keys=tuple(AuditKeys.model_fields), single="mmrl audit")
    problems: list[str] = []
    keys = line.section(AuditKeys, problems)
    from mmrl.commands.audit import audit as run_audit
    from mmrl.sets.words import as_typed

    try:
        rows = configs.audit_configs(line, keys.algo, keys.policy, problems)
        run_audit(rows, keys, ["mmrl", "audit", *context.args])
    except ConfigError as error:
        raise ConfigError(as_typed(problem, line.words, keys.algo) for problem in error.problems) from error


@app.command(**SETTINGS, options_metavar="RUN_DIR out=FOLDER [KEY=VALUE ...]")
def export(context: typer.Context) -> None:
    """Write a run's weights for other libraries: tokenizer, chat template, DSPy prompts and a model card beside them.

    Nothing that exists is overwritten. It ends with the lines that load the folder in transformers, vLLM, DSPy and
    openai.

    \b
    Keys:
      out=FOLDER                 folder that is made
      checkpoint=last|best|N     last; best: by the run's main metric, of the steps that were evaluated
      form=merged|adapter        of LoRA runs; merged, and adapter where modules have adapters of their own

    \b
    Examples:
      mmrl export outputs/hotpotqa/mhgpo_rr/RUN out=exported/hotpotqa
      mmrl export outputs/hotpotqa/mhgpo_rr/RUN out=exported/adapter form=adapter checkpoint=best
      mmrl export outputs/dspy/mmgrpo/RUN out=exported/agent
    """
    from mmrl.cli.arguments import read_arguments
    from mmrl.commands.export import ExportArguments
    from mmrl.commands.export import export as write

    write(read_arguments("mmrl export", ExportArguments, context.args, name="run_dir"))


@app.command(**SETTINGS, options_metavar="policy=P [KEY=VALUE ...]")
def serve(context: typer.Context) -> None:
    """Serve a policy over HTTP in OpenAI's protocol, until Ctrl-C; prints how to call it.

    \b
    Keys:
      policy=                    a run, checkpoint, adapter, model folder or hub id; `tiny`: the shipped model
      host= port=                127.0.0.1 and 8000; port=0: a free one
      token_env=NAME             environment variable with the token that every request must bring; needed with any
                                 host that other machines reach
      name=                      the model's name in requests: policy; with weights per module policy/MODULE
      model= hardware= engine=   how the policy is loaded and samples, as in `mmrl eval`

    \b
    Examples:
      mmrl serve policy=outputs/hotpotqa/mhgpo_rr/RUN
      mmrl serve policy=tiny port=0
      mmrl serve policy=RUN host=0.0.0.0 token_env=SERVE_TOKEN engine=vllm_server
    """
    from mmrl.cli import configs, overrides
    from mmrl.commands.serve import ServeArguments, serve_policy

    line = overrides.read_line(context.args, command_keys=tuple(ServeArguments.model_fields), single="mmrl serve")
    config, arguments = configs.with_section(line, ServeArguments, configs.eval_configs)
    serve_policy(config, arguments)


@app.command("new-task", **SETTINGS, options_metavar="NAME [kind=async|dspy] [dir=FOLDER]")
def new_task(context: typer.Context) -> None:
    """Write a task package of your own: data, program, tool, reward, test.

    \b
    Keys:
      kind=async|dspy   a plain async function, or a DSPy module
      dir=FOLDER        that the package and conf/task/NAME.yaml are written into; the current one

    \b
    Examples:
      mmrl new-task triage
      mmrl new-task triage kind=dspy dir=tasks
    """
    from mmrl.cli.new_task import create

    create(context.args)


@app.command(**SETTINGS, options_metavar="[KEY=VALUE ...] [device=NAME] [dry=N]")
def plan(context: typer.Context, as_json: JsonFlag = False) -> None:
    """Print what a training run will do and cost, before it starts.

    \b
    Keys:
      device=h200                   the device that is planned for: a GPU by name, or cpu
      dry=N                         count tokens in rollouts of N examples; 0: from declared lengths
      lengths=MODULE:P/C[,...]      tokens of prompt and completion of each module
      run=RUN_DIR                   or those of a run's last step
      any other key                 as in `mmrl train`

    \b
    Examples:
      mmrl plan
      mmrl plan model=llama31_8b_instruct hardware=h100x8 device=h200
      mmrl plan model=llama31_8b_instruct device=h100 lengths=rewriter:300/40
    """
    from mmrl.cli import configs, overrides
    from mmrl.commands.plan import PlanArguments, planned

    line = overrides.read_line(context.args, command_keys=("from", *PlanArguments.model_fields), single="mmrl plan")
    config, arguments = configs.with_section(line, PlanArguments, partial(configs.train_configs, trains=False))
    print(planned(config, arguments, as_json=as_json))


@app.command(**SETTINGS, options_metavar="[KEY=VALUE ...] [examples=N]")
def doctor(context: typer.Context, as_json: JsonFlag = False) -> int:
    """Say what is wrong with a model, or a run before it trains, with the setting to change.

    With keys of model, engine and hardware alone: how that model is computed, adapted and asked, and how exactly. With
    others, or none: plays a few examples of that run with its model, program and reward. Exit code 1 where training
    would be useless.

    \b
    Keys:
      examples=N      training examples that are played; 8
      any other key   as in `mmrl train`

    \b
    Examples:
      mmrl doctor model=hf model.path=FOLDER
      mmrl doctor task=hotpotqa algo=mhgpo_rr examples=4
      mmrl doctor task=dspy task.program=mine:Answerer task.metric=mine:metric --json
    """
    from mmrl.cli import configs, overrides
    from mmrl.cli.arguments import DoctorArguments
    from mmrl.config import RlRunConfig

    line = overrides.read_line(context.args, command_keys=("from", "examples"), single="mmrl doctor")
    config, arguments = configs.with_section(line, DoctorArguments, partial(configs.train_configs, trains=False))
    if not isinstance(config, RlRunConfig):
        raise ConfigError(f"algo: got {config.algo.name}, and mmrl doctor looks at one stage of reinforcement learning")
    from mmrl.run.check import check_all

    check_all([config.in_folder(None)])
    keys = {key.partition(".")[0] for key in (*line.keys, *line.command_keys)}
    if keys and keys <= {"model", "engine", "hardware"}:
        from mmrl.commands.model_doctor import examine_model

        examine_model(config, as_json=as_json)
        return 0
    # only now: it loads what draws and counts, and a typing mistake need not wait
    from mmrl.commands.doctor import doctor as examine

    return examine(config, arguments.examples, as_json=as_json)


app.add_typer(
    index_app,
    name="index",
    options_metavar="build",
    subcommand_metavar="[KEY=VALUE ...]",
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.command("serve-retriever", **SETTINGS, options_metavar="index=DIR [KEY=VALUE ...]")
def serve_retriever(context: typer.Context) -> None:
    """Serve an index over HTTP, in Search-R1's protocol, until Ctrl-C.

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
    from mmrl.commands.index import serve

    serve(arguments)


@app.command(WORKER, hidden=True)
def worker() -> int:
    """Run one process of a run of several; `mmrl train` starts it, with its job in an environment variable."""
    from mmrl.run.launch import JOB
    from mmrl.run.session import work

    try:
        if JOB not in os.environ:
            raise ConfigError(f"{JOB}: missing; `mmrl train` starts this")
        return work(json.loads(os.environ.pop(JOB)))
    except MmrlError:
        if (rank := os.environ.get("RANK", "0")) != "0":
            print(f"process {rank}:", file=sys.stderr)
        raise
