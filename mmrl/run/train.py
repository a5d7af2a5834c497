"""`mmrl train`: check, settle, build, evaluate, run the stages in turn, evaluate again, summarise.

Called by `cli` once `check` has passed. Every process of a run goes this way; the main one writes and prints.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from mmrl import engines
from mmrl.config import RunConfig, TrainCommandConfig, validate_stored
from mmrl.errors import CheckpointError, ConfigError, MmrlError
from mmrl.report.rundir import RunDir
from mmrl.run.build import BuiltRun, build_run, build_task, check_model
from mmrl.run.check import check_all
from mmrl.run.launch import adopt, must_start, released, start, stoppable
from mmrl.run.settle import import_plugins, in_folder, placed, refuse_absent, settle, stored_config
from mmrl.system.processes import Processes, join, launched
from mmrl.tasks.base import Task


def train(config: TrainCommandConfig, command: Sequence[str]) -> int:
    """Start a new run. Returns the exit code."""
    config = settle(config)
    check_model(config.model)
    if must_start(config.hardware):
        config = placed(config)
        assert config.run.dir is not None
        job = {"config": config.model_dump(mode="json"), "command": list(command)}
        return start(job, config.hardware, config.run.dir)
    return _begin(config, command)


def resume(folder: Path) -> int:
    """Continue a stopped or killed run from its newest complete checkpoint, to the numbers it would have had."""
    from mmrl.models.policy import newest_checkpoint

    config = stored_config(folder, TrainCommandConfig)
    refuse_absent(config)
    if must_start(config.hardware):
        return start({"resume": str(folder)}, config.hardware, str(folder))
    processes = _join(config)
    checkpoint: Path | None = None
    if not processes.main:
        checkpoint = processes.first(checkpoint)
        return _run(config, RunDir.read(folder), checkpoint, processes)
    with RunDir.open(folder, command=["mmrl", "train", f"resume={folder}"]) as rundir:
        if rundir.summary:
            raise CheckpointError(f"{folder}: this run is finished; look at it with: mmrl show {folder}")
        check_all([in_folder(config, None)])  # the one problem it would have is that its directory is full
        checkpoint = processes.first(newest_checkpoint(rundir.checkpoints))
        rundir.truncate_after(step_number(checkpoint))
        return _run(config, rundir, checkpoint, processes)


def work(job: Mapping[str, Any]) -> int:
    """One process of a run that `start` has started: begin it, or continue it."""
    if "resume" in job:
        return resume(Path(job["resume"]))
    import_plugins(job["config"].get("plugins", ()))
    return _begin(validate_stored(TrainCommandConfig, job["config"]), job["command"])


def _begin(config: TrainCommandConfig, command: Sequence[str]) -> int:
    """Start a run in this process, which may be one of several."""
    processes = _join(config)
    config = processes.first(placed(config) if processes.main else config)
    assert config.run.dir is not None
    if not processes.main:
        processes.barrier()  # the main process has made the folder
        return _run(config, RunDir.read(config.run.dir), None, processes)
    with RunDir.create(config.run.dir, config.model_dump(mode="json"), command) as rundir:
        processes.barrier()
        return _run(config, rundir, None, processes)


def _join(config: TrainCommandConfig) -> Processes:
    """Meet the other processes of the run."""
    hardware = config.hardware
    if launched() is not None:
        adopt(hardware)
    processes = join(hardware.processes * hardware.nodes, hardware.device)
    return replace(processes, one_samples=processes.world > 1 and engines.serves_all(config.engine.name))


def step_number(checkpoint: Path | None) -> int:
    """Steps done at `checkpoint-<steps>`; 0 without one."""
    return int(checkpoint.name.rpartition("-")[2]) if checkpoint else 0


def _run(config: TrainCommandConfig, rundir: RunDir, checkpoint: Path | None, processes: Processes) -> int:
    """Build the parts, evaluate, go through the stages, evaluate, report."""
    from mmrl.report.console import finish
    from mmrl.report.progress import Progress
    from mmrl.report.trackers import trackers
    from mmrl.stages.step_log import StepLog

    started = time.perf_counter()
    task = build_task(config.task, config.seed)
    tracked = config if processes.main else config.model_copy(update={"run": RunConfig()})
    console = None if processes.main else Console(quiet=True)
    done = step_number(checkpoint)
    with (
        Progress(
            config, total=config.train.steps, main_metric=task.main_metric, first_step=done, console=console
        ) as progress,
        stoppable(),
        released(task),
        trackers(tracked, rundir, progress.note) as opened,
    ):
        progress.note(_start_text(config, task, rundir, done))
        log = StepLog(rundir=rundir, progress=progress, trackers=opened, processes=processes)
        log.prefetched = bool(config.train.staleness)
        built: BuiltRun | None = None
        try:
            built = build_run(config, task, log, checkpoint)
            before = built.evaluations.baseline()
            for stage in built.stages:
                stage.run(checkpoint)
            after = built.evaluations.items(config.train.steps)
        except (MmrlError, KeyboardInterrupt) as error:
            if built is not None or not isinstance(error, ConfigError):  # a wrong setting would stop it again
                progress.note(f"stopped; continue with: mmrl train resume={rundir.path}")
            raise
        finally:
            if built is not None:
                built.close()
        if not processes.main:
            return 0
        seconds = time.perf_counter() - started
        facts = {**task.describe(), **built.describe()}
        text = finish(rundir, config, facts, before, after, seconds=seconds, main_metric=task.main_metric)
    print(text)
    return 0


def _start_text(config: TrainCommandConfig, task: Task, rundir: RunDir, done: int) -> str:
    """What is about to happen, in three lines."""
    facts = ", ".join(f"{key} {value}" for key, value in task.describe().items())
    verb = f"continuing from step {done}" if done else "starting"
    return (
        f"{verb}: {config.algo.name} on {task.name} with {config.model.name} "
        f"({config.hardware.device}, {config.hardware.threads} threads), {config.train.steps} steps of "
        f"{config.train.batch_size} examples\n{facts}\nrun directory: {rundir.path}"
    )
