"""A run from config to report: build the parts, evaluate, run the stages, evaluate again, summarise.

Called by `cli`; everything that the user typed wrong is found in `check_all`, before any model loads.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmrl.algorithms import ALGORITHMS
from mmrl.config import EvalCommandConfig, RootConfig, TaskConfig, TrainCommandConfig, validate
from mmrl.errors import CheckpointError, ConfigError, MmrlError, unknown
from mmrl.policy import Policy, resolve
from mmrl.report.rundir import RunDir, allocate
from mmrl.tasks import TASKS
from mmrl.tasks.base import Task

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mmrl.stages.weights import WeightStage

_TASKS: dict[tuple[str, int], Task] = {}


def build_task(config: TaskConfig, seed: int) -> Task:
    """The task of a config; built once per process and config, since a sweep asks for it again and again."""
    key = (config.model_dump_json(), seed)
    if key not in _TASKS:
        if config.name not in TASKS:
            raise ConfigError(unknown("task", config.name, TASKS))
        _TASKS[key] = TASKS[config.name](config, seed)
    return _TASKS[key]


def check_all(configs: Sequence[RootConfig]) -> None:
    """Everything that can be wrong across sections, for all jobs at once.

    Raises:
        ConfigError: with every problem.
    """
    problems: list[str] = []
    for config in configs:
        try:
            problems += check(config)
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(dict.fromkeys(problems))


def check(config: RootConfig) -> list[str]:
    """Problems of one config across its sections, data files included."""
    problems = []
    if config.run.dir is not None and Path(config.run.dir).exists() and any(Path(config.run.dir).iterdir()):
        problems.append(f"run.dir: {config.run.dir} exists and is not empty; choose another, or continue with resume=")
    if config.model.path not in ("tiny",) and config.model.path.startswith(("/", ".", "~")):
        folder = Path(config.model.path).expanduser()
        if not folder.is_dir():
            problems.append(f"model.path: no folder '{config.model.path}'")
    task = build_task(config.task, config.seed)
    if config.task.reward is not None and config.task.reward not in task.reward_sets:
        problems.append(unknown("task.reward", config.task.reward, task.reward_sets))
    if isinstance(config, EvalCommandConfig):
        resolve(config.policy)
        return problems
    assert isinstance(config, TrainCommandConfig)
    problems += ALGORITHMS[config.algo.name].check(config.algo, task.program.modules, task.reward_sets)
    available = len(task.examples("train"))
    if config.train.batch_size > available:
        problems.append(f"train.batch_size: got {config.train.batch_size}, the train split has {available} examples")
    if config.algo.minibatches > config.train.batch_size:
        problems.append(
            f"algo.minibatches: got {config.algo.minibatches}, expected at most train.batch_size={config.train.batch_size}"
        )
    if not task.examples(config.eval.split):
        problems.append(f"eval.split: the {config.eval.split} split has no examples")
    return problems


def reward_set(config: RootConfig, task: Task) -> str:
    """The reward set of a run: the user's, else the algorithm's own kind."""
    if config.task.reward is not None:
        return config.task.reward
    if isinstance(config, TrainCommandConfig) and ALGORITHMS[config.algo.name].needs_turn_rewards:
        return next(name for name in task.reward_sets if name == "turn")
    return task.reward_sets[0]


def train(config: TrainCommandConfig, command: Sequence[str]) -> int:
    """Start a new run. Returns the exit code."""
    stamp = datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    if config.run.dir is None:
        path = allocate(Path("outputs") / config.task.name / config.algo.name, f"{stamp}_s{config.seed}")
        config = config.model_copy(update={"run": config.run.model_copy(update={"dir": str(path)})})
    config = settle(config)
    assert config.run.dir is not None
    with RunDir.create(config.run.dir, config.model_dump(mode="json"), command) as rundir:
        return _run(config, rundir, None)


def resume(folder: Path) -> int:
    """Continue a stopped or killed run from its newest complete checkpoint, to the numbers it would have had."""
    from mmrl.trainer.checkpoint import latest

    with RunDir.open(folder, command=["mmrl", "train", f"resume={folder}"]) as rundir:
        config = validate(TrainCommandConfig, as_tuples(rundir.config))
        if rundir.summary:
            raise CheckpointError(f"{folder}: this run is finished; look at it with: mmrl show {folder}")
        config = config.model_copy(update={"run": config.run.model_copy(update={"dir": str(folder)})})
        check_resumable(config)
        checkpoint = latest(rundir.checkpoints)
        rundir.truncate_after(step_number(checkpoint) if checkpoint else 0)
        return _run(config, rundir, checkpoint)


def check_resumable(config: TrainCommandConfig) -> None:
    """The cross-section checks, less the one that the run directory is free."""
    free = config.model_copy(update={"run": config.run.model_copy(update={"dir": None})})
    check_all([free])


def step_number(checkpoint: Path) -> int:
    """Steps done at `checkpoint-<steps>`."""
    return int(checkpoint.name.rpartition("-")[2])


def as_tuples(value: Any) -> Any:
    """Lists as tuples all the way down: what strict models take."""
    if isinstance(value, dict):
        return {key: as_tuples(item) for key, item in value.items()}
    return tuple(as_tuples(item) for item in value) if isinstance(value, list) else value


def settle(config: TrainCommandConfig) -> TrainCommandConfig:
    """Fix what depends on this machine (device, threads, engine), so that a resume repeats it."""
    import os

    import torch

    hardware = config.hardware
    device = hardware.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"hardware: profile '{hardware.name}' asks for a CUDA device, this machine has none")
    threads = hardware.threads or len(os.sched_getaffinity(0))
    engine = hardware.engine if config.engine.name == "auto" else config.engine.name
    return config.model_copy(
        update={
            "hardware": hardware.model_copy(update={"device": device, "threads": threads}),
            "engine": config.engine.model_copy(update={"name": engine}),
        }
    )


def _run(config: TrainCommandConfig, rundir: RunDir, checkpoint: Path | None) -> int:
    """Evaluate, train, evaluate, report."""
    started = time.perf_counter()
    task = build_task(config.task, config.seed)
    from mmrl.report.progress import Progress
    from mmrl.report.trackers import trackers

    with Progress(config, total=config.train.steps) as progress, stoppable(), trackers(config, rundir) as tracked:
        stage, model = build_stage(config, task, rundir, progress)
        progress.note(describe_start(config, task, rundir, checkpoint))
        before = stage.items(0)
        stage.tracked = tracked
        stage.baseline(before)
        trainer = stage.trainer(model, checkpoint)
        try:
            trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
        except (MmrlError, KeyboardInterrupt):
            progress.note(f"continue with: mmrl train resume={rundir.path}")
            raise
        after = stage.items(config.train.steps)
        stage.final(after)
    from mmrl.report.finish import finish

    print(finish(rundir, config, task.describe(), before, after, seconds=time.perf_counter() - started))
    return 0


def build_stage(config: TrainCommandConfig, task: Task, rundir: RunDir, progress: Any) -> tuple[WeightStage, Any]:
    """Model, tokenizer, engine and stage of a run."""
    import torch

    from mmrl.engines import ENGINES
    from mmrl.models import load_model, load_tokenizer
    from mmrl.stages.weights import WeightStage

    hardware = config.hardware
    torch.set_num_threads(hardware.threads or 1)
    tokenizer = load_tokenizer(config.model)
    model = load_model(config.model, hardware.device)
    engine = ENGINES[config.engine.name](model, tokenizer, config.engine, max_context=config.task.max_context)
    stage = WeightStage(
        config=config,
        task=task,
        engine=engine,
        tokenizer=tokenizer,
        rundir=rundir,
        progress=progress,
        train=task.examples("train"),
        dev=task.examples(config.eval.split),
        reward_set=reward_set(config, task),
    )
    return stage, model


def describe_start(config: TrainCommandConfig, task: Task, rundir: RunDir, checkpoint: Path | None) -> str:
    """What is about to happen, in two lines."""
    facts = ", ".join(f"{key} {value}" for key, value in task.describe().items())
    verb = f"continuing from step {step_number(checkpoint)}" if checkpoint else "starting"
    return (
        f"{verb}: {config.algo.name} on {task.name} with {config.model.name} "
        f"({config.hardware.device}, {config.hardware.threads} threads), {config.train.steps} steps of "
        f"{config.train.batch_size} examples\n{facts}\nrun directory: {rundir.path}"
    )


@contextmanager
def stoppable() -> Iterator[None]:
    """SIGTERM (a scheduler's stop) ends a run like Ctrl-C does: what is saved is kept, and the way on is printed."""

    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    try:
        previous = signal.signal(signal.SIGTERM, interrupt)
    except ValueError:  # not the main thread: someone else handles signals
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def evaluate_policy(config: EvalCommandConfig, command: Sequence[str]) -> int:
    """`mmrl eval`."""
    raise NotImplementedError


def load_policy(policy: Policy, config: RootConfig, device: str) -> tuple[Any, Any]:
    """Model and tokenizer of a policy."""
    raise NotImplementedError
