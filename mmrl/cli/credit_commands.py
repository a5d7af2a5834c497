"""The commands that credit recorded rollouts again; they load no task, no model and no torch."""

from __future__ import annotations

import typer

from mmrl.cli.app import SETTINGS, JsonFlag, app


@app.command(
    context_settings=SETTINGS,
    options_metavar="rollouts=FILE algo=A[,B] | run=RUN_DIR [step=N] [algo=A,B] [KEY=VALUE ...]",
)
def credit(context: typer.Context, as_json: JsonFlag = False) -> int:
    """Print rewards, groups, advantages and weights of recorded rollouts; no task, no model, no torch.

    Of a run's step: what it was trained on, with all settings of the run, compared with its journal. Without a step:
    whether each step's credit is what it was trained on, and how like it that of other algorithms is.

    \b
    Keys:
      rollouts=FILE   a forest file, or one step of a run's journal
      run=RUN_DIR     a training run, in place of a file
      step=N          a step of that run; all of them
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
      mmrl credit run=outputs/hotpotqa/mhgpo_rr/RUN algo=mhgpo_fof,grpo
    """
    from mmrl.cli.hydra import credit_request
    from mmrl.run.credit import credit_command

    return credit_command(credit_request(context.args), as_json)
