"""`mmrl plan` and `mmrl doctor`: what a run will do and cost, and what is wrong with it, before it starts."""

from __future__ import annotations

import typer

from mmrl.cli.app import SETTINGS, JsonFlag, app
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
      mmrl plan experiment=mhgpo/table1/mhgpo_rr device=h200
      mmrl plan model=llama31_8b_instruct device=h100 lengths=rewriter:300/40
    """
    from mmrl.cli import hydra, overrides

    line = overrides.read_line(context.args, own=("lengths", "dry", "device"))
    if line.switches:
        raise ConfigError("mmrl plan: takes one run and no flags but --json")
    config = hydra.weight_config("mmrl plan", line)
    from mmrl.run.plan import PlanRequest, make_plan

    made = make_plan(config, PlanRequest.read(line.own))
    print(made.as_json() if as_json else made.text())
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
    from mmrl.cli import hydra, overrides

    line = overrides.read_line(context.args, own=("examples",))
    if line.switches:
        raise ConfigError("mmrl doctor: takes one run and no flags but --json")
    config = hydra.weight_config("mmrl doctor", line)
    from mmrl.run.check import check_all

    check_all([config.in_folder(None)], line.keys)
    # only now: it loads what draws and counts, and a typing mistake need not wait
    from mmrl.run.doctor import doctor as examine
    from mmrl.run.doctor import examples_of

    return examine(config, examples_of(line.own), as_json=as_json)
