"""`mmrl train resume=RUN train.steps=+100`: a run goes on beyond the steps that it was started with.

`config.yaml` stays as it was. `segments.jsonl` has a line for each extension: the new number of steps, the steps that
were done, and the summary that the run had then. Training goes on from the newest checkpoint as any resume does, so the
steps of an extended run equal, bit for bit, those of a run that was started with all of them; its record may have one
more evaluation, the one after what was then the last step. That holds for learning rates that do not fall towards the
end of the run; with the others an extension is refused.
"""

from __future__ import annotations

import re
from pathlib import Path

from mmrl.config import TrainCommandConfig
from mmrl.errors import ConfigError
from mmrl.report.rundir import RunDir
from mmrl.run.settle import stored_config
from mmrl.run.train import resume

STEADY = ("constant", "constant_with_warmup")
"""Schedules that do not depend on the number of steps."""


def extend(folder: Path, typed: str) -> int:
    """Continue a run, finished or not, to another number of steps. Returns the exit code.

    Args:
        folder: the run directory.
        typed: `+N` for N further steps than the run has now, or their number, which is more than are done.

    Raises:
        ConfigError: no such number, or a schedule that depends on it.
        CheckpointError: it is no training run, or another process has it.
    """
    config = stored_config(folder, TrainCommandConfig).train
    if not re.fullmatch(r"\+?[0-9]{1,9}", typed):
        raise ConfigError(f"train.steps: got '{typed}', expected +N (further steps) or a number of steps")
    steps = int(typed) + (config.steps if typed.startswith("+") else 0)
    if steps == config.steps:
        return resume(folder)
    if config.schedule not in STEADY:
        raise ConfigError(
            f"train.steps: {folder} has train.schedule={config.schedule}, which ends at step {config.steps}: with more "
            f"steps it is another run; start one: mmrl train train.steps={steps} …"
        )
    with RunDir.open(folder) as run:
        done = max((int(record["step"]) for record in run.history()), default=0)
        if steps <= done:
            raise ConfigError(
                f"train.steps: got {typed}, but {folder} has done {done} steps; expected +N (further steps), or more "
                f"than {done}"
            )
        run.add_segment(steps, done, ["mmrl", "train", f"resume={folder}", f"train.steps={typed}"])
    return resume(folder)
