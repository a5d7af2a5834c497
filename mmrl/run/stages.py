"""Runs of several stages, each from the policy of the one before: ordinary runs, one after the other.

Such a run is a folder whose `stages/1_NAME`, `stages/2_NAME` … are run directories of their own, gone through in turn
by the code that runs a stage alone (`run.session`). What it has of its own is a summary: the evaluations of all stages
in one history, what each stage has cost and gained, and `policy.json`, the policy of the last stage that has ended.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from mmrl.config import StageConfig
from mmrl.errors import CheckpointError, storage
from mmrl.models.policy import STAGES, prompts_of, write_policy
from mmrl.report.rundir import RunDir, holds_only_leftovers, step_of
from mmrl.report.stage_costs import gather
from mmrl.run import session
from mmrl.run.check import check_all
from mmrl.run.settle import run_folder, stored_config
from mmrl.run.start import restarted, started
from mmrl.system.files import plain, read_jsonl


def begin(config: StageConfig, command: Sequence[str], resumed: bool = False) -> int:
    """Start a checked run, or continue the one in `run.dir`. Returns the exit code."""
    if config.in_turn != (config,):
        return _in_turn(config, command, resumed)
    if config.start is not None and not resumed:
        config = started(config, Path(config.start.run))
    return session.begin(config, command, resumed)


def resume(folder: Path) -> int:
    """Continue a stopped or killed run, to the numbers that it would have had."""
    config = restarted(stored_config(folder, StageConfig), folder)
    return begin(config, ["mmrl", "train", f"resume={folder}"], resumed=True)


def _in_turn(config: StageConfig, command: Sequence[str], resumed: bool) -> int:
    """All stages of a run, from the first that has not ended."""
    folder = run_folder(config.run.dir, config.task.name, config.algo.name, suffix=f"_s{config.seed}")
    config = config.in_folder(folder)
    stored = plain(config.model_dump(mode="json"))
    opened = RunDir.open(folder, command) if resumed else RunDir.create(folder, stored, command)
    with opened as rundir:
        if rundir.finished:
            raise CheckpointError(f"{folder}: this run is finished; look at it with: mmrl show {folder}")
        stages: list[Path] = []
        for number, stage in enumerate(config.in_turn, start=1):
            path = rundir.path / STAGES / f"{number}_{stage.algo.name}"
            print(f"-- stage {number} of {len(config.in_turn)}: {stage.algo.name}")
            if code := _one(stage, path, stages[-1] if stages else None, command):
                return code
            stages.append(path)
            with storage(rundir.path):
                # After every stage: a run that was killed between two can be evaluated and exported.
                write_policy(rundir.path, weights=str(path), prompts=prompts_of(str(path))[1], task=config.task.name)
                gather(rundir, stages)
        return _finish(config, rundir, stages)


def _one(stage: StageConfig, path: Path, before: Path | None, command: Sequence[str]) -> int:
    """One stage: started, continued, or left as it is where it has ended."""
    if (path / "config.yaml").is_file():
        if (run := RunDir.read(path)).finished:
            # Later stages begin with these files, so damage must not pass into them.
            if changed := run.ledger.changed(None):
                file, problem = next(iter(changed.items()))
                raise CheckpointError(f"{file} {problem}; restore it from a copy, or start a new run")
            print(f"ended before: {path}")
            return 0
        return resume(path)
    if path.is_dir():  # a kill came before its config was written
        if not holds_only_leftovers(path):
            raise CheckpointError(f"{path}: has no config.yaml; restore it from a copy, or move the folder away")
        shutil.rmtree(path)
    made = stage if before is None else started(stage, before)
    if before is not None:
        check_all([made.in_folder(None)])  # prompts and weights are there only now
    return begin(made.in_folder(str(path)), command)


def _finish(config: StageConfig, rundir: RunDir, stages: Sequence[Path]) -> int:
    """Summary and report of all stages."""
    from mmrl.report.console import finish

    last = max(step for file in (rundir.path / "eval").glob("step-*.jsonl") if (step := step_of(file)) is not None)
    split, metric = config.eval.split, str(RunDir.read(stages[-1]).summary.get("main_metric"))
    summaries = [RunDir.read(path).summary for path in stages]
    text = finish(
        rundir,
        {**dict(summaries[-1].get("facts") or {}), "stages": ", ".join(path.name for path in stages)},
        read_jsonl(rundir.eval_path(0, split)),
        read_jsonl(rundir.eval_path(last, split)),
        seed=config.seed,
        split=split,
        bootstrap=config.eval.bootstrap,
        seconds=sum(float(summary.get("seconds") or 0.0) for summary in summaries),
        main_metric=metric,
    )
    print(text)
    return 0 if rundir.finished else 1
