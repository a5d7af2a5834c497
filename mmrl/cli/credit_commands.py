"""The commands that credit recorded rollouts again; they load no task, no model and no torch."""

from __future__ import annotations

import typer

from mmrl.cli.app import SETTINGS, JsonFlag, app
from mmrl.errors import ConfigError


@app.command(
    context_settings=SETTINGS,
    options_metavar="rollouts=FILE algo=A[,B] | run=RUN_DIR step=N [algo=A,B] [KEY=VALUE ...]",
)
def credit(context: typer.Context, as_json: JsonFlag = False) -> int:
    """Print rewards, groups, advantages and weights of recorded rollouts; no task, no model, no torch.

    Of a run's step: what it was trained on, with all settings of the run, compared with its journal.

    \b
    Keys:
      rollouts=FILE   a forest file, or one step of a run's journal
      run=RUN_DIR     a training run, in place of a file
      step=N          the step of that run
      algo=A,B        algorithms, side by side; a run's own keeps the run's settings, and is the one if left out
      algo.*          settings of the algorithms: algo.group_size=4
      seed=           of the algorithm's own choices; of a run: the run's
      plugins=        packages that add algorithms

    \b
    Examples:
      mmrl credit algo=mhgpo_fof rollouts=forest.json
      mmrl credit run=outputs/hotpotqa/mhgpo_rr/RUN step=40
      mmrl credit run=outputs/hotpotqa/mhgpo_rr/RUN step=40 algo=mhgpo_rr,grpo --json
    """
    from mmrl.cli.hydra import credit_request
    from mmrl.run.credit import credit_command

    return credit_command(credit_request(context.args), as_json)


@app.command(context_settings=SETTINGS, options_metavar="RUN_DIR [step=N] [algo=A,B] [KEY=VALUE ...]")
def replay(context: typer.Context, as_json: JsonFlag = False) -> int:
    """Derive a run's credit again from its journal: whether it is what was trained on; no task, no model, no torch.

    With algo=, also what other algorithms would have credited on the same rollouts, and how like it that is.

    \b
    Keys:
      step=N      that step alone; else every step
      algo=A,B    algorithms to compare; the run's own only with settings of its own changed
      algo.*      settings of them: algo.group_size=4
      seed=       of their own choices; the run's
      plugins=    packages that add algorithms

    \b
    Examples:
      mmrl replay outputs/hotpotqa/mhgpo_rr/RUN
      mmrl replay outputs/hotpotqa/mhgpo_rr/RUN algo=mhgpo_fof,grpo
      mmrl replay outputs/hotpotqa/mhgpo_rr/RUN step=40 algo=mhgpo_rr algo.loss_mean=token --json
    """
    from mmrl.cli.hydra import credit_request
    from mmrl.run.replay import replay_command

    named = [word for word in context.args if "=" not in word and not word.startswith("-")]
    if len(named) != 1:
        raise ConfigError(f"RUN_DIR: got {len(named) or 'none'}, expected the folder of one training run")
    rest = [word for word in context.args if word != named[0]]
    return replay_command(credit_request([f"run={named[0]}", *rest], command="replay"), as_json)
