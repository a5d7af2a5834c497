"""The way of one run, which the command line, sweeps and `mmrl.api` go; a room for each step.

    words, arguments
      │  cli.configs: overrides → sections; start.inherit: what the run of `from=` has → `config.validate`
    StageConfig             valid section by section; `typed` says what the user set
      │  check.check_all: across sections; data, servers, packages; nothing is written before
    Checked
      │  start.started: weights and prompts of the run of `from=`; settle.settle: device, threads, engine, day
    Settled                 all that a run is built from and its directory keeps
      │  session.begin: the model can be had → other processes (launch, ray_launch) → RunDir
      │  session.session: kinds.build_stage → checkup → evaluate → improve → evaluate → report
    run directory           session.resume: from its config, through all of this again, to the same bits

`eval` goes it for `mmrl eval`: EvalRunConfig → Checked → Settled → items → summary.
"""

from __future__ import annotations

from pathlib import Path

from mmrl.config import EvalRunConfig, StageConfig


def train(config: StageConfig) -> tuple[Path, int]:
    """Check a config and run it. Returns the run directory and the exit code."""
    from mmrl.run.check import check_all

    (checked,) = check_all([config])
    # After the checks: it imports pandas, which a refused config need not wait for.
    from mmrl.run.session import begin

    return begin(checked)


def evaluate(config: EvalRunConfig) -> Path:
    """Check the config of an evaluation and run it. Returns its directory."""
    from mmrl.run.check import check_all

    (checked,) = check_all([config])
    from mmrl.run.eval import evaluate_policy

    return evaluate_policy(checked)
