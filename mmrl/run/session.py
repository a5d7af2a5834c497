"""Run of `mmrl train`, whatever improves its policy: settle, build, evaluate, improve, evaluate, summarise.

Every process of a run goes this way; the main one writes and prints.
"""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from mmrl import engines
from mmrl.config import (
    EngineConfig,
    HardwareConfig,
    RlRunConfig,
    RootConfig,
    RunConfig,
    StageConfig,
    Typed,
    WeightRunConfig,
    validate_stored,
)
from mmrl.errors import CheckpointError, ConfigError, MmrlError, ProcessLost, continue_with, located, storage
from mmrl.run.before import take_over
from mmrl.run.build import build_task, check_model, evaluated
from mmrl.run.check import Checked, check_all
from mmrl.run.checkup import check_before_training
from mmrl.run.inputs import inputs_of
from mmrl.run.kinds import build_stage, kind_of
from mmrl.run.launch import drop_wrapping, must_start, released, start, wrapping
from mmrl.run.ray_launch import start_on_ray
from mmrl.run.settle import Settled, import_plugins, refuse_edits, settle, stored_config
from mmrl.run.start import config_of_resumed, keep_checkpoints, started, with_teachers
from mmrl.stages import Stage
from mmrl.store.journal import read_step
from mmrl.store.policy import every_checkpoint
from mmrl.store.rundir import RunDir
from mmrl.system import ray_cluster
from mmrl.system.files import JsonObject, plain, read_jsonl
from mmrl.system.memo import read_replies
from mmrl.system.notebook import global_state_kept
from mmrl.system.processes import ALONE, Processes, join, launched, lost_a_process
from mmrl.system.stop import stoppable

STEADY = ("constant", "constant_with_warmup")
"""Schedules that do not depend on the number of steps."""


def resume(folder: Path) -> int:
    """Continue a stopped or killed run, to the numbers that it would have had. Returns the exit code."""
    config = stored_config(folder, StageConfig)
    refuse_edits(folder, config)
    parent_found = config_of_resumed(config, folder).as_typed(Typed(command=("mmrl", "train", f"resume={folder}")))
    return begin(Checked(parent_found), resumed=True)[1]


def begin(checked: Checked[StageConfig], resumed: bool = False) -> tuple[Path, int]:
    """Start a run, or continue the one in `run.dir`. Returns its directory and the exit code."""
    inherited = with_teachers(started(checked.config))
    keep_checkpoints(inherited)
    credited = isinstance(inherited, RlRunConfig)
    # A process that a launcher has started, Ray too, joins the others below.
    on_ray = credited and inherited.hardware.ray is not None and launched() is None
    settled = settle(inherited, ray_cluster.connect(inherited.hardware) if on_ray else None)
    if on_ray:
        ray_cluster.refuse_cluster(settled.config)
    # Before a folder is made: a model that cannot be had must leave none behind. A run that is continued has had it.
    if not resumed:
        check_model(settled.config)
    hardware = settled.config.hardware
    # Several processes and no launcher: this one only starts them and waits, so it must not join them.
    drop_wrapping()
    starts = credited and (on_ray or must_start(hardware.processes, hardware.nodes))
    processes = _join(hardware, settled.config.engine) if credited and not starts else ALONE
    if processes.main:  # or every process of a launcher would make a folder of its own
        settled = settled.in_folder(inherited.algo.name, suffix=f"_s{inherited.seed}")
    # The processes of other machines may settle to other threads; the main one's config is the run's.
    settled = processes.first(settled)
    stored, folder, command = plain(settled.config.model_dump(mode="json")), settled.folder, inherited.typed.command
    if starts:
        job = {"config": stored, "command": list(command), "resumed": resumed}
        return folder, (start_on_ray if on_ray else start)(job, hardware, str(folder))
    with _opened(folder, stored, command, processes, resumed) as rundir:
        checkpoint = processes.first(_rewind(settled.config, rundir) if resumed and processes.main else None)
        # It was killed while its report was drawn, which alone is missing.
        if checkpoint is not None and processes.first(bool(rundir.summary)):
            if processes.main:
                from mmrl.report.html import report_run

                print(f"report         {report_run(rundir.path)}")
            return folder, 0
        return folder, session(settled, rundir, checkpoint, processes)


def _rewind(config: StageConfig, rundir: RunDir) -> Path | None:
    """Restore a run's files to the newest checkpoint, which it goes on from; None where no step was saved yet.

    Later steps are dropped, and done again to the same bits. Prompts have no checkpoint: their optimiser runs again
    from its seed, and a memo has the replies that it had.
    """
    # Data and servers may have changed since; its own folder is full by now, which must not count.
    checked = config.in_folder(None)
    if rundir.eval_path(0, config.eval.split).exists():  # what it took over is its own by now
        checked = checked.model_copy(update={"run": checked.run.model_copy(update={"before": None})})
    with located(f"{rundir.path}/config.yaml: "):
        check_all([checked])
    with storage(rundir.path):
        if not isinstance(config, WeightRunConfig):
            from mmrl.report.trials import FOLDER, MEMO

            # Before a model loads; the stage would come to it later. What has no digests of its data has split a file
            # into other parts, without a shuffle.
            other_parts = "inputs" not in rundir.environment and "train" in config.task.data.files
            if other_parts or (rundir.path / FOLDER / "rollouts.jsonl").exists():
                raise CheckpointError(
                    f"{rundir.path}: an earlier version of mmrl began this search, and what it stored does not fit any "
                    "more; start a new run"
                )
            read_replies(rundir.path / FOLDER / MEMO)
            (rundir.path / "summary.json").unlink(missing_ok=True)
            return None
        from mmrl.trainer.checkpoint import prune, sweep  # it imports torch, which a refused config need not wait for

        sweep(rundir.checkpoints)
        checkpoint = next(reversed(every_checkpoint(rundir.checkpoints)), None)
        if checkpoint is None:
            rundir.forget_training()
            return None
        _require_whole(config, rundir, checkpoint)
        if step_number(checkpoint) < config.train.steps:
            (rundir.path / "summary.json").unlink(missing_ok=True)  # of a run whose end is done again
        rundir.truncate_after(step_number(checkpoint))
        prune(rundir.checkpoints, config.train.keep, config.train.saves_after)
        return checkpoint


@contextmanager
def extended(folder: Path, steps_text: str) -> Iterator[None]:
    """Continue a run, finished or not, to another number of steps (`resume=RUN train.steps=+100`).

    `config.yaml` stays as it was; `segments.jsonl` gets a line: the new number of steps, the steps done, and the
    summary that the run had then. The steps of an extended run equal, bit for bit, those of a run started with all of
    them, for learning rates that do not fall towards its end; with others an extension is refused. Its record may have
    one more evaluation, the one after what was then the last step.

    Args:
        folder: the run directory.
        steps_text: `+N` for N further steps than the run has now, or their number, which is more than are done.

    Raises:
        ConfigError: no such number, or a schedule that depends on it.
        CheckpointError: it is no training run, or another process has it.
    """
    config = stored_config(folder, WeightRunConfig, reading=True).train
    if not re.fullmatch(r"\+?[0-9]{1,9}", steps_text):
        raise ConfigError(f"train.steps: got '{steps_text}', expected +N (further steps) or a number of steps")
    steps = int(steps_text) + (config.steps if steps_text.startswith("+") else 0)
    # Not an extension: the run may have been killed on its way to this very number.
    if steps == config.steps:
        yield
        return
    # Its learning rate at every step depends on the last one, so the steps done so far would have been others.
    if config.schedule not in STEADY:
        raise ConfigError(f"train.steps: train.schedule={config.schedule} ends at step {config.steps}; start a new run")
    with RunDir.open(folder) as run:
        done = max((int(record["step"]) for record in run.history()), default=0)
        if steps <= done:
            raise ConfigError(f"train.steps: got {steps_text}, but {folder} has done {done}; expected more, or +N")
        run.add_segment(steps, done, ["mmrl", "train", f"resume={folder}", f"train.steps={steps_text}"])
    try:
        yield
    except MmrlError as error:
        # Refused before its first step: the same command, typed again once that is mended, must mean the same.
        if error.exit_code == ConfigError.exit_code and all(record["step"] <= done for record in run.history()):
            run.drop_segment()
        raise


def work(job: JsonObject) -> int:
    """Begin or continue a run in one of the processes that `start` has started."""
    import_plugins(job["config"].get("plugins", ()))
    try:
        config = validate_stored(RlRunConfig, job["config"]).as_typed(Typed(command=tuple(job["command"])))
        return begin(Checked(config), job["resumed"])[1]
    except RuntimeError as error:
        if not lost_a_process(error):
            raise
        raise ProcessLost("another process of the run has ended, so this one cannot go on") from None


def _join(hardware: HardwareConfig, engine: EngineConfig) -> Processes:
    """Connect to the other processes of the run."""
    if launched() is not None:  # by a launcher of the user's, which does not say how accelerate is to wrap the model
        os.environ.update(wrapping(hardware))
    processes = join(hardware.processes * hardware.nodes, hardware.device)
    # What mmrl starts, a server or the router before several, listens on the main process's machine only; on Ray it may
    # come back elsewhere, and nobody says which processes share a machine.
    local = engines.serves_all(engine.name) and not getattr(engine, "router", None) and len(engine.servers) != 1
    return replace(processes, samplers=(1 if hardware.ray is not None else hardware.processes) if local else 0)


@contextmanager
def _opened(
    folder: Path, config: JsonObject, command: Sequence[str], processes: Processes, resumed: bool
) -> Iterator[RunDir]:
    """Open the directory of a run, new or continued, locked by the main process.

    Raises:
        CheckpointError: the run is finished, or another process has it.
    """
    if not processes.main:
        if not resumed:
            processes.barrier()  # the main process has made the folder
        yield RunDir.read(folder)
        return
    command_line = ["mmrl", "train", f"resume={folder}"]
    new = None if resumed else RunDir.create(folder, config, command, inputs_of(config))
    with new or RunDir.open(folder, command_line) as rundir:
        if not resumed:
            processes.barrier()
        elif rundir.finished:
            raise CheckpointError(f"{folder}: this run is finished; look at it with: mmrl show {folder}")
        yield rundir


def _require_whole(config: WeightRunConfig, rundir: RunDir, checkpoint: Path) -> None:
    """Refuse a damaged checkpoint, and a run whose files do not hold each step up to it once.

    Raises:
        CheckpointError: names the file, and the checkpoints whose steps would be done again without it.
    """
    from mmrl.stages.evaluate import has_scores, read_items
    from mmrl.trainer.checkpoint import unusable

    split, done = config.eval.split, step_number(checkpoint)
    step = done
    try:
        if fault := unusable(checkpoint):
            raise CheckpointError(fault)
        step = 1
        history = {record["step"]: record for record in rundir.history()}
        lines = Counter(line["step"] for line in read_jsonl(rundir.metrics_path) if "time/step" in line)
        for step in range(1, done + 1):
            if lines[step] != 1:
                raise CheckpointError(f"{rundir.metrics_path}: has {lines[step]} lines of step {step}, expected 1")
            if isinstance(config, RlRunConfig) and read_step(rundir, step)[0].step != step:
                raise CheckpointError(f"{rundir.journal_path(step)}: is of another step")
            # Those before training and after the last step are read again, and completed, by the stage.
            if step < config.train.steps and has_scores(history[step], split):
                results, items = rundir.eval_path(step, split), history[step][f"eval/{split}/n"]
                if (count := len(read_items(results))) != items:
                    raise CheckpointError(f"{results}: has {count} items, expected {items:.0f}")
    except MmrlError as error:
        raise CheckpointError(
            f"{error}; restore it from a copy, or delete the checkpoints from step {step} on, and the run does those "
            "steps again"
        ) from None


def step_number(checkpoint: Path | None) -> int:
    """Return the steps done at `checkpoint-<steps>`; 0 without one."""
    return int(checkpoint.name.rpartition("-")[2]) if checkpoint else 0


def session(
    settled: Settled[StageConfig], rundir: RunDir, checkpoint: Path | None, processes: Processes = ALONE
) -> int:
    """Build the stage, evaluate, improve, evaluate, report. Returns the exit code."""
    config = settled.config
    # Imported here: numpy and rich are slow to load, and a refused config should not wait for them.
    from mmrl.report.console import finish
    from mmrl.report.progress import Progress
    from mmrl.report.stats import counted
    from mmrl.report.trackers import trackers
    from mmrl.stages.evaluate import Evaluations
    from mmrl.stages.rl import RlStage
    from mmrl.stages.step_log import StepLog

    started = time.perf_counter()
    task = build_task(config.task, config.seed)
    metric, steps, done = task.main_metric, kind_of(config).steps(config, task), step_number(checkpoint)
    # Only the main process shows and sends anything; the others have a quiet display and no trackers.
    display, console = (config.run, None) if processes.main else (RunConfig(), Console(quiet=True))
    name = display.name or f"{config.algo.name}-{task.name}-s{config.seed}"
    live = display.progress
    history = [record for record in rundir.history() if record["step"] <= done] if processes.main else []
    sent = {"name": name, "group": f"{config.algo.name}-{task.name}", "device": config.hardware.device}
    with (
        Progress(
            total=steps, title=name, live=live, main_metric=metric, first_step=done, history=history, console=console
        ) as progress,
        stoppable(in_a_group=processes.world > 1) as stop,
        global_state_kept(),
        released(task),
        trackers(display, rundir, **sent, warn=progress.note) as opened,
    ):
        opening = f"continuing from step {done}" if done else "continuing" if rundir.history() else "starting"
        where = f"{config.model.name} ({config.hardware.device}, {counted(config.hardware.threads or 1, 'thread')})"
        batch = counted(config.train.batch_size, "example") if isinstance(config, WeightRunConfig) else ""
        size = f", {counted(steps, 'step')} of {batch}" if batch else ""
        facts = ", ".join(f"{key} {value}" for key, value in task.describe().items())
        work = f"{config.algo.name} on {task.name} with {where}{size}"
        progress.note(f"{opening}: {work}\n{facts}\nrun directory: {rundir.path}")
        progress.status("loading the model")
        log = StepLog(rundir=rundir, progress=progress, trackers=opened, processes=processes, stop=stop)
        # None while the parts are built: a failure then leaves nothing to close.
        stage: Stage[RootConfig] | None = None
        try:
            with storage(rundir.path):
                if processes.main:
                    rundir.note_main_metric(metric)
                    if isinstance(config, WeightRunConfig):  # an optimiser of prompts notes its last trial
                        rundir.note_resumed(done)
                stage = build_stage(config, task, log)
                try:
                    examples, subset = evaluated(task, config, config.eval.split)
                    evaluations = Evaluations(examples=examples, last_step=steps, stage=stage)
                    if processes.main and (reason := take_over(config, rundir, examples[: config.eval.items])):
                        progress.note(reason)
                    if isinstance(stage, RlStage) and checkpoint is None:
                        check_before_training(stage, log)
                    before = evaluations.baseline()
                    stage.improve(evaluations, checkpoint)
                    after = evaluations.final()
                finally:
                    stage.close()
                if not processes.main:
                    return 0
                text = finish(
                    rundir,
                    {**task.describe(), **subset, **stage.describe()},
                    before,
                    after,
                    seconds=time.perf_counter() - started,
                    main_metric=metric,
                )
        except (MmrlError, KeyboardInterrupt) as error:
            # A wrong setting would stop it again; a damaged file has its own way out, in the error.
            goes_on = not isinstance(error, CheckpointError) and (
                stage is not None or not isinstance(error, ConfigError)
            )
            if processes.main and goes_on:
                continue_with(error, rundir.resume_command())
            raise
    print(text)
    return 0 if rundir.finished else 1
