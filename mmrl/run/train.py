"""A run from config to report: build the parts, evaluate, run the stages, evaluate again, summarise.

Called by `cli` once `prepare` has found nothing wrong.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from mmrl import engines
from mmrl.config import (
    HardwareConfig,
    RunConfig,
    TrainCommandConfig,
    validate_stored,
)
from mmrl.errors import CheckpointError, ConfigError, MmrlError
from mmrl.models.load import load_policy
from mmrl.report.rundir import RunDir, allocate
from mmrl.run.check import (
    assignment,
    build_task,
    check_all,
    import_plugins,
    refuse_absent,
    refuse_kind,
    reward_set,
    settle,
)
from mmrl.run.launch import adopt, refuse_unlaunched, server_devices, start
from mmrl.run.stopping import released, stoppable
from mmrl.stages.teachers import build_teachers
from mmrl.system.processes import ALONE, Processes, join, launched
from mmrl.tasks.base import Task

if TYPE_CHECKING:
    from mmrl.stages.weights import WeightStage


def train(config: TrainCommandConfig, command: Sequence[str]) -> int:
    """Start a new run. Returns the exit code."""
    from mmrl.models.load import load_tokenizer, refuse_targets

    config = settle(config)
    load_tokenizer(config.model)  # a model that cannot be had is found before a run directory is made
    refuse_targets(config.model)
    if launched() is None:
        refuse_unlaunched(config.hardware)
        if config.hardware.processes > 1:
            config = placed(config)
            assert config.run.dir is not None
            job = {"config": config.model_dump(mode="json"), "command": list(command)}
            return start(job, config.hardware, config.run.dir)
    return begin(config, command)


def placed(config: TrainCommandConfig) -> TrainCommandConfig:
    """The config with a run directory of its own."""
    if config.run.dir is not None:
        return config
    stamp = datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    path = allocate(Path("outputs") / config.task.name / config.algo.name, f"{stamp}_s{config.seed}")
    return config.model_copy(update={"run": config.run.model_copy(update={"dir": str(path)})})


def begin(config: TrainCommandConfig, command: Sequence[str]) -> int:
    """Start a run in this process, which may be one of several. Returns the exit code."""
    if launched() is not None:
        adopt(config.hardware)
    processes = join(config.hardware.processes * config.hardware.nodes, config.hardware.device)
    config = processes.first(placed(config) if processes.main else config)
    assert config.run.dir is not None
    if processes.main:
        with RunDir.create(config.run.dir, config.model_dump(mode="json"), command) as rundir:
            processes.first(None)
            return _run(config, rundir, None, processes)
    processes.first(None)  # the main process has made the folder
    return _run(config, RunDir.read(config.run.dir), None, processes)


def work(job: Mapping[str, Any]) -> int:
    """One process of a run that `start` has started: begin it, or continue it."""
    if "resume" in job:
        return resume(Path(job["resume"]))
    import_plugins(job["config"].get("plugins", ()))
    return begin(validate_stored(TrainCommandConfig, job["config"]), job["command"])


def resume(folder: Path) -> int:
    """Continue a stopped or killed run from its newest complete checkpoint, to the numbers it would have had."""
    from mmrl.models.policy import newest_checkpoint

    refuse_kind(folder, TrainCommandConfig)
    stored = RunDir.read(folder).config
    hardware = stored.get("hardware", {})
    refuse_absent(validate_hardware(hardware), served_here=stored.get("engine", {}).get("url") is None)
    count = hardware.get("processes", 1) * hardware.get("nodes", 1)
    if launched() is None and count > 1:
        refuse_unlaunched(validate_hardware(hardware))
        return start({"resume": str(folder)}, validate_hardware(hardware), str(folder))
    if launched() is not None:
        adopt(validate_hardware(hardware))
    processes = join(count, hardware.get("device", "cpu"))
    if not processes.main:
        shared: tuple[TrainCommandConfig, Path | None] = processes.first((None, None))  # type: ignore[assignment]
        return _run(shared[0], RunDir.read(folder), shared[1], processes)
    with RunDir.open(folder, command=["mmrl", "train", f"resume={folder}"]) as rundir:
        import_plugins(rundir.config.get("plugins", ()))
        config = validate_stored(TrainCommandConfig, rundir.config)
        if rundir.summary:
            raise CheckpointError(f"{folder}: this run is finished; look at it with: mmrl show {folder}")
        config = config.model_copy(update={"run": config.run.model_copy(update={"dir": str(folder)})})
        check_resumable(config)
        checkpoint = newest_checkpoint(rundir.checkpoints)
        rundir.truncate_after(step_number(checkpoint) if checkpoint else 0)
        processes.first((config, checkpoint))
        return _run(config, rundir, checkpoint, processes)


def validate_hardware(section: Mapping[str, Any]) -> HardwareConfig:
    """The hardware section of a run's config."""
    return HardwareConfig.model_validate(dict(section))


def check_resumable(config: TrainCommandConfig) -> None:
    """The cross-section checks, less the one that the run directory is free."""
    free = config.model_copy(update={"run": config.run.model_copy(update={"dir": None})})
    check_all([free])


def step_number(checkpoint: Path) -> int:
    """Steps done at `checkpoint-<steps>`."""
    return int(checkpoint.name.rpartition("-")[2])


def _run(config: TrainCommandConfig, rundir: RunDir, checkpoint: Path | None, processes: Processes) -> int:
    """Evaluate, train, evaluate, report; all processes of the run do the work, the main one writes and shows."""
    from mmrl.report.console import finish
    from mmrl.report.progress import Progress
    from mmrl.report.trackers import trackers

    started = time.perf_counter()
    task = build_task(config.task, config.seed)
    done = step_number(checkpoint) if checkpoint else 0
    tracked = config if processes.main else config.model_copy(update={"run": RunConfig()})
    with (
        Progress(
            config,
            total=config.train.steps,
            main_metric=task.main_metric,
            first_step=done,
            console=None if processes.main else Console(quiet=True),
        ) as progress,
        stoppable(),
        released(task),
        trackers(tracked, rundir, progress.note) as opened,
    ):
        progress.note(describe_start(config, task, rundir, checkpoint))
        stage: WeightStage | None = None
        try:
            stage = build_stage(config, task, rundir, progress, opened, checkpoint, processes)
            before = stage.evaluations.baseline()
            stage.run(checkpoint)
            after = stage.evaluations.items(config.train.steps)
        except (MmrlError, KeyboardInterrupt) as error:
            if stage is not None or not isinstance(error, ConfigError):  # a wrong setting would stop it again
                progress.note(f"stopped; continue with: mmrl train resume={rundir.path}")
            raise
        finally:
            if stage is not None:
                stage.close()
        if not processes.main:
            return 0
        text = finish(
            rundir,
            config,
            {**task.describe(), **assignment(config, task).describe(), **stage.engines[0].describe()},
            before,
            after,
            seconds=time.perf_counter() - started,
            main_metric=task.main_metric,
        )
    print(text)
    return 0


def build_stage(
    config: TrainCommandConfig,
    task: Task,
    rundir: RunDir,
    progress: Any,
    trackers: Any,
    checkpoint: Path | None,
    processes: Processes = ALONE,
) -> WeightStage:
    """Tokenizer, model, trainer, engine and the stage that ties them together."""
    import torch

    from mmrl.engines import EngineSetup, build_engine
    from mmrl.engines.base import Engine
    from mmrl.models.load import load_model, load_tokenizer
    from mmrl.rollout.environment import make_environment, sampling_settings
    from mmrl.rollout.teachers import LoadedTeacher
    from mmrl.stages.collect import Collector
    from mmrl.stages.evaluate import Evaluations
    from mmrl.stages.step_log import StepLog
    from mmrl.stages.weights import WeightStage
    from mmrl.trainer.adapters import make_adapters
    from mmrl.trainer.settings import Settings
    from mmrl.trainer.trl_trainer import MmrlTrainer

    hardware = config.hardware
    torch.set_num_threads(hardware.threads or 1)
    tokenizer = load_tokenizer(config.model)
    modules = assignment(config, task)
    processes = replace(processes, one_samples=processes.world > 1 and engines.serves_all(config.engine.name))
    trainer = MmrlTrainer(
        load_model(config.model, hardware.device),
        tokenizer,
        Settings(train=config.train, algo=config.algo, model=config.model, seed=config.seed),
        output_dir=rundir.checkpoints,
        # The stage needs the engine, which needs the trainer's model: so these two look it up when they are called.
        next_batch=lambda step: stage.next_batch(step),
        on_step_end=lambda step, update: stage.on_step_end(step, update),
        resume_from=checkpoint,
        extra=lambda step: modules.record(),
        adapters=make_adapters(modules),
    )
    if processes.one_samples and not processes.main:
        engine: Engine = engines.NullEngine()
        teachers: dict[str, LoadedTeacher] = {}
    else:
        # The engine samples from the very module that is trained (wrapped by peft where there is an adapter).
        setup = EngineSetup(
            max_context=config.task.max_context,
            threads=hardware.threads,
            adapters=modules.served,
            initial=load_model(config.model, hardware.device) if modules.copied else None,
            weights=config.model,
            device=hardware.device,
            devices=server_devices(hardware),
            folder=rundir.path,
            samplings=((config.algo.temperature, config.algo.top_p, config.algo.top_k),),
        )
        engine = build_engine(config.engine, trainer.model, tokenizer, setup)
        try:
            teachers = build_teachers(config, task, engine, tokenizer, build_task, load_policy)
        except BaseException:
            engine.close()
            raise
    log = StepLog(
        rundir=rundir,
        progress=progress,
        trackers=trackers,
        processes=processes,
        prefetched=bool(config.train.staleness),
    )
    collector = Collector(
        config=config,
        task=task,
        engine=engine,
        tokenizer=tokenizer,
        trainer=trainer,
        examples=task.examples("train"),
        reward_set=reward_set(config, task),
        sync=lambda version: stage.sync(version),
        log=log,
        processes=processes,
        teachers=teachers,
    )
    settings = sampling_settings(config.eval, config.task)
    evaluations = Evaluations(
        config=config,
        examples=task.examples(config.eval.split),
        reward_set=collector.reward_set,
        environment=lambda key: make_environment(task, engine, tokenizer, settings, key),
        sync=collector.sync,
        log=log,
        processes=processes,
    )
    own = {id(e): e for e in (engine, *(teacher.engine for teacher in teachers.values()))}
    stage = WeightStage(
        algo=config.algo,
        seed=config.seed,
        frozen=modules.frozen,
        trainer=trainer,
        engines=tuple(own.values()),
        collector=collector,
        evaluations=evaluations,
        log=log,
        processes=processes,
    )
    return stage


def describe_start(config: TrainCommandConfig, task: Task, rundir: RunDir, checkpoint: Path | None) -> str:
    """What is about to happen, in two lines."""
    facts = ", ".join(f"{key} {value}" for key, value in task.describe().items())
    verb = f"continuing from step {step_number(checkpoint)}" if checkpoint else "starting"
    return (
        f"{verb}: {config.algo.name} on {task.name} with {config.model.name} "
        f"({config.hardware.device}, {config.hardware.threads} threads), {config.train.steps} steps of "
        f"{config.train.batch_size} examples\n{facts}\nrun directory: {rundir.path}"
    )
