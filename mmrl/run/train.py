"""`mmrl train`: check, settle, build, evaluate, run the stages in turn, evaluate again, summarise.

Called by `cli` once `check` has passed. Every process of a run goes this way; the main one writes and prints.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from mmrl import engines
from mmrl.config import HardwareConfig, RunConfig, SftCommandConfig, TrainCommandConfig, validate_stored
from mmrl.errors import CheckpointError, ConfigError, MmrlError, storage
from mmrl.models.policy import damage
from mmrl.report.rundir import RunDir, step_of
from mmrl.report.stats import modules_in
from mmrl.run.build import RECORD, BuiltRun, build_run, build_task, check_model
from mmrl.run.check import check_all
from mmrl.run.doctor import look_before
from mmrl.run.launch import adopt, must_start, released, start
from mmrl.run.settle import (
    import_plugins,
    refuse_changes,
    run_folder,
    schema_of,
    settle,
    stored_config,
)
from mmrl.system.files import JsonObject, plain
from mmrl.system.processes import ALONE, Processes, join, launched, lost_a_process
from mmrl.system.stop import print_resume, stoppable
from mmrl.tasks.base import Task

STEADY = ("constant", "constant_with_warmup")
"""Schedules that do not depend on the number of steps."""


def train(config: TrainCommandConfig, command: Sequence[str], resumed: bool = False) -> int:
    """Start a run, or continue the one in `run.dir`. Returns the exit code.

    Args:
        command: what was typed, for the run directory.
        resumed: continue from the newest complete checkpoint, to the numbers that the run would have had.
    """
    config = settle(config)
    # Before a folder is made: a model that cannot be had must leave none behind. A run that is continued has had it.
    if not resumed:
        check_model(config.model)
    hardware = config.hardware
    # Several processes and no launcher: this one only starts them and waits, so it must not join them.
    starts = must_start(hardware.processes, hardware.nodes)
    processes = ALONE if starts else _join(hardware, config.engine.name)
    if processes.main:  # or every process of a launcher would make a folder of its own
        suffix = f"_s{config.seed}"
        config = config.in_folder(run_folder(config.run.dir, config.task.name, config.algo.name, suffix=suffix))
    # The processes of other machines may settle to other threads; the main one's config is the run's.
    config = processes.first(config)
    stored, folder = plain(config.model_dump(mode="json")), config.run.dir
    assert folder is not None
    if starts:
        return start({"config": stored, "command": list(command), "resumed": resumed}, hardware, folder)
    if not resumed:
        with _created(folder, stored, command, processes) as rundir:
            return _run(config, rundir, None, processes)
    with _reopened(Path(folder), processes) as rundir:
        checkpoint: Path | None = None
        if processes.main:
            from mmrl.trainer.checkpoint import prune  # it imports torch, which a refused config need not wait for

            # Data and servers may have changed since; its own folder is full by now, which must not count.
            check_all([config.in_folder(None)])
            with storage(rundir.path):
                checkpoint = reread(stored, config.train.steps, rundir)
                prune(rundir.checkpoints, config.train.keep, config.train.saves_after)
        checkpoint = processes.first(checkpoint)
        if step_number(checkpoint) == config.train.steps and processes.first(bool(rundir.summary)):
            return _report(rundir) if processes.main else 0
        return _run(config, rundir, checkpoint, processes)


def extend(folder: Path, typed: str) -> None:
    """`resume=RUN train.steps=+100`: let a run, finished or not, continue to another number of steps.

    `config.yaml` stays as it was; `segments.jsonl` gets a line: the new number of steps, the steps done, and the
    summary that the run had then. The steps of an extended run equal, bit for bit, those of a run started with all of
    them, for learning rates that do not fall towards its end; with others an extension is refused. Its record may have
    one more evaluation, the one after what was then the last step.

    Args:
        folder: the run directory.
        typed: `+N` for N further steps than the run has now, or their number, which is more than are done.

    Raises:
        ConfigError: no such number, or a schedule that depends on it.
        CheckpointError: it is no training run, or another process has it.
    """
    supervised = schema_of(RunDir.read(folder).config) is SftCommandConfig
    schema: type[TrainCommandConfig | SftCommandConfig] = SftCommandConfig if supervised else TrainCommandConfig
    config = stored_config(folder, schema, reading=True).train
    if not re.fullmatch(r"\+?[0-9]{1,9}", typed):
        raise ConfigError(f"train.steps: got '{typed}', expected +N (further steps) or a number of steps")
    steps = int(typed) + (config.steps if typed.startswith("+") else 0)
    # Not an extension: the run may have been killed on its way to this very number.
    if steps == config.steps:
        return
    # Its learning rate at every step depends on the last one, so the steps done so far would have been others.
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


def work(job: JsonObject) -> int:
    """One process of a run that `start` has started: begin it, or continue it."""
    import_plugins(job["config"].get("plugins", ()))
    try:
        return train(validate_stored(TrainCommandConfig, job["config"]), job["command"], job["resumed"])
    except RuntimeError as error:
        if not lost_a_process(error):
            raise
        raise MmrlError("another process of the run has ended, so this one cannot go on") from None


def _join(hardware: HardwareConfig, engine: str) -> Processes:
    """Meet the other processes of the run."""
    if launched() is not None:
        adopt(hardware)
    processes = join(hardware.processes * hardware.nodes, hardware.device)
    return replace(processes, one_samples=processes.world > 1 and engines.serves_all(engine))


@contextmanager
def _created(folder: str, config: JsonObject, command: Sequence[str], processes: Processes) -> Iterator[RunDir]:
    """The directory of a new run, locked by the main process."""
    if not processes.main:
        processes.barrier()  # the main process has made the folder
        yield RunDir.read(folder)
        return
    with RunDir.create(folder, config, command) as rundir:
        processes.barrier()
        yield rundir


@contextmanager
def _reopened(folder: Path, processes: Processes) -> Iterator[RunDir]:
    """The directory of a run that is continued, locked by the main process.

    Raises:
        CheckpointError: the run is finished, or another process has it.
    """
    if not processes.main:
        yield RunDir.read(folder)
        return
    with RunDir.open(folder, command=["mmrl", "train", f"resume={folder}"]) as rundir:
        if rundir.finished:
            raise CheckpointError(f"{folder}: this run is finished; look at it with: mmrl show {folder}")
        yield rundir


def reread(config: JsonObject, steps: int, rundir: RunDir) -> Path | None:
    """The newest checkpoint that can be continued from, with the run's files as they were at its step.

    What is damaged is named: a checkpoint gives way to the one before it, an evaluation that can be made again is.
    Files of later steps are dropped, since those steps are done again.

    Args:
        config: the run's, as it would be stored now.
        steps: `train.steps`.

    Returns:
        None where no step was saved yet.

    Raises:
        CheckpointError: nothing is left to continue from, or the config is another one.
    """
    from mmrl.trainer.checkpoint import every_checkpoint, saved_extra, set_aside, sweep, unusable

    refused: list[Path] = []
    problems: list[str] = []
    sweep(rundir.checkpoints)
    for checkpoint in every_checkpoint(rundir.checkpoints):
        step, fault = step_number(checkpoint), unusable(checkpoint)
        record = {} if fault else saved_extra(checkpoint).get(RECORD, {})
        changed: dict[Path, str] = {}
        moved: list[str] = []
        if record:
            moved = refuse_changes(rundir, record["config"], config, checkpoint.name)
            changed = rundir.changed_since(record)
        # The weights before training are there before the checkpoint is loaded, those of the last step after it.
        evaluated = {0, step} if step == steps else {0}
        again = [path for path in changed if path.parent.name == "eval" and step_of(path) in evaluated]
        problems += [fault] if fault else [f"{path} {text}" for path, text in changed.items() if path not in again]
        if not fault and len(again) == len(changed):
            break
        refused.append(checkpoint)
    else:
        if refused:
            raise CheckpointError(
                f"{'; '.join(dict.fromkeys(problems))}, so that no checkpoint is left to continue from; restore what "
                f"is named from a copy, or delete {rundir.checkpoints} to train again from step 1"
            )
        rundir.begin_again()
        return None
    for problem in dict.fromkeys(problems):
        print(f"warning: {problem}; continuing from {checkpoint.name}", file=sys.stderr)
    for older in every_checkpoint(rundir.checkpoints):
        if step_number(older) < step and (fault := damage(older)):
            print(f"warning: {fault}; {checkpoint.name} is whole, so it is not needed", file=sys.stderr)
    if moved:
        print(f"warning: {rundir.path}/config.yaml: since {checkpoint.name}: {', '.join(moved)}", file=sys.stderr)
    for path in again:
        print(f"warning: {path} {changed[path]}; it is evaluated again", file=sys.stderr)
        path.unlink(missing_ok=True)
    for path in refused:
        set_aside(path)
    if step < steps:
        (rundir.path / "summary.json").unlink(missing_ok=True)  # of a run whose end is done again
    rundir.truncate_after(step, record or None)
    return checkpoint


def _report(rundir: RunDir) -> int:
    """Write what alone is missing of a run that was killed while its report was drawn."""
    from mmrl.report.html import report_run

    print(f"report         {report_run(rundir.path)}")
    return 0


def step_number(checkpoint: Path | None) -> int:
    """Steps done at `checkpoint-<steps>`; 0 without one."""
    return int(checkpoint.name.rpartition("-")[2]) if checkpoint else 0


def _run(config: TrainCommandConfig, rundir: RunDir, checkpoint: Path | None, processes: Processes) -> int:
    """Build the parts, evaluate, go through the stages, evaluate, report."""
    # Here, since they import numpy and rich, which a refused config need not wait for.
    from mmrl.report.console import finish
    from mmrl.report.progress import Progress
    from mmrl.report.trackers import trackers
    from mmrl.stages.step_log import StepLog

    started = time.perf_counter()
    task = build_task(config.task, config.seed)
    metric, steps, done = task.main_metric, config.train.steps, step_number(checkpoint)
    # What the other processes would show or send, the main one does: they have a quiet display and no trackers.
    shown, console = (config.run, None) if processes.main else (RunConfig(), Console(quiet=True))
    name = shown.name or f"{config.algo.name}-{task.name}-s{config.seed}"
    live = shown.progress
    sent = {"name": name, "group": f"{config.algo.name}-{task.name}", "device": config.hardware.device}
    with (
        Progress(total=steps, title=name, live=live, main_metric=metric, first_step=done, console=console) as progress,
        stoppable(in_a_group=processes.world > 1) as stop,
        released(task),
        trackers(shown, rundir, **sent, warn=progress.note) as opened,
    ):
        place = f"{config.model.name} ({config.hardware.device}, {config.hardware.threads} threads)"
        work = f"{config.algo.name} on {task.name} with {place}, {steps} steps of {config.train.batch_size} examples"
        progress.note(_start_text(work, task, rundir.path, done))
        log = StepLog(rundir=rundir, progress=progress, trackers=opened, processes=processes, stop=stop)
        log.prefetched = bool(config.train.staleness)
        # None while the parts are built: what fails then has nothing to close.
        built: BuiltRun | None = None
        try:
            with storage(rundir.path):
                built = build_run(config, task, log, checkpoint)
                try:
                    look_before(built, log, checkpoint)
                    before = built.evaluations.baseline()
                    for stage in built.stages:
                        stage.run(checkpoint)
                    after = built.evaluations.final()
                finally:
                    built.close()
                if not processes.main:
                    return 0
                facts = {**task.describe(), **built.describe(), **_never_called(task.program.modules, rundir)}
                text = finish(
                    rundir,
                    facts,
                    before,
                    after,
                    seed=config.seed,
                    split=config.eval.split,
                    bootstrap=config.eval.bootstrap,
                    seconds=time.perf_counter() - started,
                    main_metric=metric,
                )
        except (MmrlError, KeyboardInterrupt) as error:
            if built is not None or not isinstance(error, ConfigError):  # a wrong setting would stop it again
                print_resume(error, f"mmrl train resume={rundir.resumed_as}", progress.note)
            raise
    print(text)
    return 0 if rundir.finished else 1


def _never_called(modules: Sequence[str], rundir: RunDir) -> dict[str, str]:
    """A fact for the summary where modules of the program have made no call in any step: nothing trained them."""
    never = [module for module in modules if module not in modules_in(rundir.history())]
    return {"never called": f"{', '.join(never)} (in no step of training)"} if never else {}


def _start_text(work: str, task: Task, folder: Path, done: int) -> str:
    """What is about to happen, in three lines."""
    facts = ", ".join(f"{key} {value}" for key, value in task.describe().items())
    verb = f"continuing from step {done}" if done else "starting"
    return f"{verb}: {work}\n{facts}\nrun directory: {folder}"
