"""A run from config to report: build the parts, evaluate, run the stages, evaluate again, summarise.

Called by `cli`; everything that the user typed wrong is found in `check_all`, before any model loads.
"""

from __future__ import annotations

import importlib
import json
import signal
import sys
import time
import traceback
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rich.console import Console

from mmrl import engines
from mmrl.algorithms import ALGORITHMS
from mmrl.algorithms import problems as algorithm_problems
from mmrl.algorithms.options import TURN_SETS
from mmrl.config import (
    EvalCommandConfig,
    HardwareConfig,
    RootConfig,
    RunConfig,
    TaskConfig,
    TrainCommandConfig,
    validate,
)
from mmrl.config.effects import Facts, engine_name, without_effect
from mmrl.config.task import BUILT_IN
from mmrl.errors import CheckpointError, ConfigError, MmrlError, unknown
from mmrl.policy import Policy, describe_weights, resolve
from mmrl.report.journal import write_step
from mmrl.report.rundir import RunDir, allocate, refuse_full
from mmrl.report.tables import align, facts_table
from mmrl.rollout.programs import with_program
from mmrl.stages.launch import problems as hardware_problems
from mmrl.stages.launch import refuse_unlaunched, server_devices, start
from mmrl.stages.processes import ALONE, Processes, join, launched
from mmrl.stages.teachers import build_teachers, teacher_problems
from mmrl.tasks import TASKS
from mmrl.tasks.base import Canonical, Task
from mmrl.trainer.modules import ModuleAssignment
from mmrl.trainer.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mmrl.stages.weights import WeightStage

ConfigT = TypeVar("ConfigT", bound=RootConfig)

_TASKS: dict[tuple[str, int], Task] = {}


def import_plugins(packages: Iterable[str]) -> None:
    """Import the packages of `plugins=`; they may add to the literal dicts. The current folder is searched last.

    Raises:
        ConfigError: a package that cannot be imported, or raises when it is.
    """
    here = str(Path.cwd())
    for package in packages:
        if here not in sys.path and "" not in sys.path:
            sys.path.append(here)  # `python -m` puts it there, the `mmrl` command does not
        try:
            importlib.import_module(package)
        except ConfigError:
            raise
        except ImportError as error:
            raise ConfigError(f"plugins: cannot import '{package}' ({error})") from error
        except Exception as error:  # the user's own code: where it failed is what they need
            raise ConfigError(f"plugins: cannot import '{package}' ({_where(error)})") from error


def _where(error: Exception) -> str:
    """The error and the file and line that raised it."""
    if isinstance(error, SyntaxError):
        return f"{error.filename} line {error.lineno}: {type(error).__name__}: {error.msg}"
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{last.filename} line {last.lineno}: {type(error).__name__}: {error}"


def build_task(config: TaskConfig, seed: int) -> Task:
    """The task of a config; built once per process and config, since a sweep asks for it again and again."""
    key = (config.model_dump_json(), seed)
    if key not in _TASKS:
        if config.name not in TASKS:
            raise ConfigError(unknown("task", config.name, TASKS))
        _TASKS[key] = with_program(TASKS[config.name](config, seed))
    return _TASKS[key]


def check_all(configs: Sequence[RootConfig], typed: Collection[str] = ()) -> None:
    """Everything that can be wrong across sections, for all jobs at once.

    Args:
        typed: keys that the user set on the command line; those without effect are problems too.

    Raises:
        ConfigError: with every problem.
    """
    problems: list[str] = []
    if len(configs) > 1 and configs[0].run.dir is not None:
        problems.append("run.dir: the runs of a sweep need a directory each; leave run.dir out")
    for config in configs:
        try:
            problems += check(config, typed)
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(dict.fromkeys(problems))


def check(config: RootConfig, typed: Collection[str] = ()) -> list[str]:
    """Problems of one config across its sections, data files included."""
    problems = []
    if config.run.dir is not None:
        try:
            if not config.run.dir.strip():
                raise ConfigError("run.dir: got an empty path, expected a new or empty folder, or leave it out")
            refuse_full(Path(config.run.dir))
        except ConfigError as error:
            problems += error.problems
    task = build_task(config.task, config.seed)
    if config.task.reward is not None and config.task.reward not in task.reward_sets:
        problems.append(unknown("task.reward", config.task.reward, task.reward_sets))
    elif not isinstance(config, TrainCommandConfig) or not turns_missing(config, task):
        facts = Facts(
            reward_set=reward_set(config, task),
            lacks=getattr(task, "lacks", ()),
            modules=len(task.program.modules),
        )
        problems += without_effect(config, typed, facts)
    if isinstance(config, EvalCommandConfig):
        if config.hardware.processes * config.hardware.nodes != 1:
            problems.append(f"hardware: profile '{config.hardware.name}' has several processes, mmrl eval runs in one")
        copied = resolve(config.policy).initial is not None
        problems += engines.problems(config.engine, engine_name(config), training=False, copied=copied)
        return problems + policy_problems(config, task)
    assert isinstance(config, TrainCommandConfig)
    problems += hardware_problems(config.hardware, engine_name(config), modules=config.model.modules is not None)
    problems += Settings(train=config.train, algo=config.algo, model=config.model, seed=config.seed).problems()
    problems += algorithm_problems(config.algo, task.program.modules, task.reward_sets)
    problems += assignment(config, task).problems()
    problems += engines.problems(
        config.engine, engine_name(config), training=True, copied=assignment(config, task).copied
    )
    problems += staleness_problems(config) + turns_missing(config, task)
    problems += text_problems(config, task) + teacher_problems(config, task, build_task)
    available = len(task.examples("train"))
    if config.train.batch_size > available:
        problems.append(f"train.batch_size: got {config.train.batch_size}, the train split has {available} examples")
    if getattr(config.algo, "zero_variance", "keep") == "refill" and config.train.batch_size == available:
        problems.append(
            f"algo.zero_variance: got refill, which has no effect with train.batch_size={available}, all of the train "
            "split: no other example is left to sample; use algo.zero_variance=drop, or a smaller batch"
        )
    if config.algo.minibatches > config.train.batch_size:
        problems.append(
            f"algo.minibatches: got {config.algo.minibatches}, "
            f"expected at most train.batch_size={config.train.batch_size}"
        )
    if not task.examples(config.eval.split):
        problems.append(f"eval.split: the {config.eval.split} split has no examples")
    return problems


def policy_problems(config: EvalCommandConfig, task: Task) -> list[str]:
    """What is wrong with `policy=` for a task."""
    problems = []
    if config.model.modules is not None:
        problems.append(
            "model.modules: has no effect on mmrl eval, where a checkpoint says which module speaks with what"
        )
    policy = resolve(config.policy)
    without = [name for name in task.program.modules if policy.modules is not None and name not in policy.modules]
    if policy.modules is not None and without:
        problems.append(
            f"policy: {config.policy} has weights for the modules {', '.join(policy.modules)} and none for "
            f"{', '.join(without)} of task={task.name}; give one adapter of its checkpoint (a folder in it) for all"
        )
    return problems


def assignment(config: TrainCommandConfig, task: Task) -> ModuleAssignment:
    """Which module speaks with which weights in a training run."""
    return ModuleAssignment(model=config.model, algo=config.algo, modules=tuple(task.program.modules))


def reward_set(config: RootConfig, task: Task) -> str:
    """The reward set of a run: the user's, else the algorithm's own kind."""
    if config.task.reward is not None:
        return config.task.reward
    if isinstance(config, TrainCommandConfig) and ALGORITHMS[config.algo.name].needs_turn_rewards:
        return next((name for name in TURN_SETS if name in task.reward_sets), task.reward_sets[0])
    return task.reward_sets[0]


def staleness_problems(config: TrainCommandConfig) -> list[str]:
    """What stands against sampling the next batch while this one trains."""
    if not config.train.staleness:
        return []
    algo, found = config.algo, []
    if getattr(algo, "zero_variance", "keep") == "refill":
        found.append(
            "train.staleness: got 1 with algo.zero_variance=refill, which samples further examples once a batch is "
            "credited; use algo.zero_variance=drop, or train.staleness=0"
        )
    sampling = (algo.temperature, algo.top_p, algo.top_k)
    return found + engines.staleness_problems(config.engine, engine_name(config), sampling)


def text_problems(config: TrainCommandConfig, task: Task) -> list[str]:
    """The one sentence for `algo.reserialise` on a program that cannot write its outputs again."""
    if not getattr(config.algo, "reserialise", False) or isinstance(task.program, Canonical):
        return []
    return [
        f"algo.reserialise: task {task.name} has no canonical text of what its modules write; leave it out, or give "
        "its program a method canonical(call) (mmrl.tasks.base.Canonical)"
    ]


def turns_missing(config: TrainCommandConfig, task: Task) -> list[str]:
    """The one sentence for a reward set without the turn rewards that the algorithm needs."""
    chosen = config.task.reward
    if chosen is None or chosen in TURN_SETS or not ALGORITHMS[config.algo.name].needs_turn_rewards:
        return []
    offered = [name for name in TURN_SETS if name in task.reward_sets]
    instead = f"use task.reward={offered[0]}, or leave it out" if offered else "use an algorithm without turn rewards"
    return [f"task.reward: got {chosen}, which has no turn rewards, and algo={config.algo.name} needs them; {instead}"]


def train(config: TrainCommandConfig, command: Sequence[str]) -> int:
    """Start a new run. Returns the exit code."""
    from mmrl.models import load_tokenizer

    config = settle(config)
    load_tokenizer(config.model)  # a model that cannot be had is found before a run directory is made
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
    return begin(validate(TrainCommandConfig, as_tuples(job["config"])), job["command"])


def resume(folder: Path) -> int:
    """Continue a stopped or killed run from its newest complete checkpoint, to the numbers it would have had."""
    from mmrl.trainer.checkpoint import latest

    _refuse_kind(folder, TrainCommandConfig)
    hardware = RunDir.read(folder).config.get("hardware", {})
    count = hardware.get("processes", 1) * hardware.get("nodes", 1)
    if launched() is None and count > 1:
        refuse_unlaunched(validate_hardware(hardware))
        return start({"resume": str(folder)}, validate_hardware(hardware), str(folder))
    processes = join(count, hardware.get("device", "cpu"))
    if not processes.main:
        shared: tuple[TrainCommandConfig, Path | None] = processes.first((None, None))  # type: ignore[assignment]
        return _run(shared[0], RunDir.read(folder), shared[1], processes)
    with RunDir.open(folder, command=["mmrl", "train", f"resume={folder}"]) as rundir:
        import_plugins(rundir.config.get("plugins", ()))
        config = validate(TrainCommandConfig, as_tuples(rundir.config))
        if rundir.summary:
            raise CheckpointError(f"{folder}: this run is finished; look at it with: mmrl show {folder}")
        config = config.model_copy(update={"run": config.run.model_copy(update={"dir": str(folder)})})
        check_resumable(config)
        checkpoint = latest(rundir.checkpoints)
        rundir.truncate_after(step_number(checkpoint) if checkpoint else 0)
        processes.first((config, checkpoint))
        return _run(config, rundir, checkpoint, processes)


def _refuse_kind(folder: Path, schema: type[RootConfig]) -> None:
    """Before anything is written there: refuse to continue a run of the other command, or one whose config is broken.

    Raises:
        CheckpointError: it is a run of the other command.
        ConfigError: its config is none that this version understands.
    """
    config = RunDir.read(folder).config
    here, there = ("train", "eval") if schema is TrainCommandConfig else ("eval", "train")
    if {"train": "policy" in config, "eval": "algo" in config}[here]:
        raise CheckpointError(
            f"{folder}: this is a run of mmrl {there}; continue it with: mmrl {there} resume={folder}"
        )
    import_plugins(config.get("plugins", ()))
    try:
        validate(schema, as_tuples(config))
    except ConfigError as error:
        raise ConfigError(f"{folder}/config.yaml: {problem}" for problem in error.problems) from None


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


def as_tuples(value: Any) -> Any:
    """Lists as tuples all the way down: what strict models take."""
    if isinstance(value, dict):
        return {key: as_tuples(item) for key, item in value.items()}
    return tuple(as_tuples(item) for item in value) if isinstance(value, list) else value


def settle(config: ConfigT) -> ConfigT:
    """Fix what depends on this machine (device, threads, engine), so that a resume repeats it."""
    import os

    import torch

    hardware = config.hardware
    device = hardware.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"hardware.device: got cuda (hardware={hardware.name}), this machine has no CUDA device")
    threads = hardware.threads or max(1, len(os.sched_getaffinity(0)) // hardware.processes)
    engine = hardware.engine if config.engine.name == "auto" else config.engine.name
    return config.model_copy(
        update={
            "hardware": hardware.model_copy(update={"device": device, "threads": threads}),
            "engine": config.engine.model_copy(update={"name": engine}),
        }
    )


def plannable(config: TrainCommandConfig, device: str | None) -> TrainCommandConfig:
    """`settle` for a run that is only planned: the devices it names need not be here.

    Args:
        device: name of the device that is planned for; None: the hardware profile's own.
    """
    import os

    import torch

    hardware = config.hardware
    kind = "cpu" if device == "cpu" else "cuda" if device else hardware.device
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    threads = hardware.threads or len(os.sched_getaffinity(0))
    engine = hardware.engine if config.engine.name == "auto" else config.engine.name
    return config.model_copy(
        update={
            "hardware": hardware.model_copy(update={"device": kind, "threads": threads}),
            "engine": config.engine.model_copy(update={"name": engine}),
        }
    )


def on_mini_world(task: TaskConfig) -> TaskConfig:
    """The same task on the embedded data; a task of one's own keeps its data, having no other."""
    if task.name not in BUILT_IN:
        return task
    data = task.data.model_copy(update={"train": "mini", "dev": "mini", "test": "mini"})
    return task.model_copy(update={"data": data, "corpus": None})


def _run(config: TrainCommandConfig, rundir: RunDir, checkpoint: Path | None, processes: Processes) -> int:
    """Evaluate, train, evaluate, report; all processes of the run do the work, the main one writes and shows."""
    from mmrl.report.finish import finish
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
        stage, trainer = build_stage(config, task, rundir, progress, opened, checkpoint, processes)
        try:
            before = stage.baseline()
            trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
            after = stage.items(config.train.steps)
        except (MmrlError, KeyboardInterrupt):
            progress.note(f"stopped; continue with: mmrl train resume={rundir.path}")
            raise
        finally:
            stage.close()
        if not processes.main:
            return 0
        text = finish(
            rundir,
            config,
            {**task.describe(), **stage.assignment.describe()},
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
) -> tuple[WeightStage, Any]:
    """Tokenizer, model, trainer, engine and the stage that ties them together."""
    import torch

    from mmrl.engines import Setup, build_engine
    from mmrl.models import load_model, load_tokenizer
    from mmrl.stages.weights import WeightStage

    hardware = config.hardware
    torch.set_num_threads(hardware.threads or 1)
    tokenizer = load_tokenizer(config.model)
    stage = WeightStage(
        config=config,
        task=task,
        tokenizer=tokenizer,
        rundir=rundir,
        progress=progress,
        trackers=trackers,
        train=task.examples("train"),
        heldout=task.examples(config.eval.split),
        reward_set=reward_set(config, task),
        assignment=assignment(config, task),
        processes=replace(processes, one_samples=processes.world > 1 and engines.serves_all(config.engine.name)),
    )
    trainer = stage.trainer(load_model(config.model, hardware.device), checkpoint)
    if stage.processes.one_samples and not processes.main:
        stage.engine = engines.Elsewhere()
        return stage, trainer
    # The engine samples from the very module that is trained (wrapped by peft where there is an adapter).
    setup = Setup(
        max_context=config.task.max_context,
        threads=hardware.threads,
        adapters=stage.assignment.served,
        initial=load_model(config.model, hardware.device) if stage.assignment.copied else None,
        weights=config.model,
        device=hardware.device,
        devices=server_devices(hardware),
        folder=rundir.path,
        samplings=((config.algo.temperature, config.algo.top_p, config.algo.top_k),),
    )
    stage.engine = build_engine(config.engine, trainer.model, tokenizer, setup)
    try:
        stage.teachers = build_teachers(config, task, stage.engine, tokenizer, build_task, load_policy)
    except BaseException:
        stage.engine.close()
        raise
    return stage, trainer


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
def released(task: Task) -> Iterator[None]:
    """Let a task stop what it has started (a retriever's child process), however the run ends."""
    try:
        yield
    finally:
        close = getattr(task, "close", None)
        if close is not None:
            close()


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
    """`mmrl eval`: evaluate any policy on any task's split; per-item results are kept, so a stopped one continues."""
    config = settle(_placed(config))
    assert config.run.dir is not None
    with RunDir.create(config.run.dir, config.model_dump(mode="json"), command) as rundir:
        return _evaluate(config, rundir)


def _placed(config: EvalCommandConfig) -> EvalCommandConfig:
    """With a run directory."""
    if config.run.dir is not None:
        return config
    stamp = datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    path = allocate(Path("outputs") / config.task.name / "eval", stamp)
    return config.model_copy(update={"run": config.run.model_copy(update={"dir": str(path)})})


def evaluate_columns(configs: Mapping[str, EvalCommandConfig], command: Sequence[str]) -> int:
    """`mmrl eval -m`: one evaluation after the other, then all of them side by side. Returns the worst exit code.

    Args:
        configs: column name -> config. An evaluation that stops leaves its column out and does not stop the others.
    """
    from mmrl.report.columns import columns_text

    codes: list[int] = []
    columns: dict[str, Mapping[str, float]] = {}
    for name, config in configs.items():
        config = _placed(config)
        assert config.run.dir is not None
        print(f"-- evaluation {len(codes) + 1} of {len(configs)}: {name}")
        try:
            codes.append(evaluate_policy(config, command))
            summary = json.loads((Path(config.run.dir) / "summary.json").read_text(encoding="utf-8"))
            columns[name] = summary["metrics"]
        except MmrlError as error:
            print(f"error: {error}", file=sys.stderr)
            codes.append(error.exit_code)
    print(f"\n{columns_text(columns)}")
    return max(codes, default=0)


def resume_evaluation(folder: Path) -> int:
    """Continue a stopped `mmrl eval`: items already evaluated are kept."""
    _refuse_kind(folder, EvalCommandConfig)
    with RunDir.open(folder, command=["mmrl", "eval", f"resume={folder}"]) as rundir:
        import_plugins(rundir.config.get("plugins", ()))
        config = validate(EvalCommandConfig, as_tuples(rundir.config))
        config = config.model_copy(update={"run": config.run.model_copy(update={"dir": str(folder)})})
        check_all([config.model_copy(update={"run": config.run.model_copy(update={"dir": None})})])
        return _evaluate(config, rundir)


def _evaluate(config: EvalCommandConfig, rundir: RunDir) -> int:
    import torch

    from mmrl.stages.environment import eval_settings, make_environment
    from mmrl.stages.evaluate import evaluate, evaluation_metrics

    hardware = config.hardware
    torch.set_num_threads(hardware.threads or 1)
    task = build_task(config.task, config.seed)
    policy = resolve(config.policy)
    settings = eval_settings(config, config.eval)
    with stoppable(), released(task), evaluation_engine(config, policy, rundir) as (engine, tokenizer):
        try:
            items = evaluate(
                lambda key: make_environment(config, task, engine, tokenizer, settings, key),
                task.examples(config.split),
                config.eval,
                config.seed,
                reward_set(config, task),
                rundir.eval_path(policy.step or 0, config.split),
                lambda chunk, forest: write_step(rundir, forest, evaluation=config.split, step=chunk),
            )
        except KeyboardInterrupt:
            print(f"stopped; continue with: mmrl eval resume={rundir.path}", file=sys.stderr)
            raise
    metrics = evaluation_metrics(items, config.eval, config.seed)
    rundir.write_summary({"policy": config.policy, "task": task.name, "split": config.split, "metrics": metrics})
    print(evaluation_text(config, {**task.describe(), **describe_weights(policy.modules)}, metrics, rundir.path))
    return 0


@contextmanager
def evaluation_engine(config: EvalCommandConfig, policy: Policy, rundir: RunDir) -> Iterator[tuple[Any, Any]]:
    """The engine that serves `policy`, and the tokenizer; closed at the end."""
    from mmrl.engines import Setup, build_engine, needs_model
    from mmrl.models import load_tokenizer

    weights = config.model.model_copy(update={"path": policy.base})
    model: Any = None
    tokenizer: Any = None
    serving: dict[str, Any] = {"adapters": policy.modules}
    if needs_model(config.engine.name):
        model, tokenizer, serving = load_policy(policy, config)
    setup = Setup(
        max_context=config.task.max_context,
        threads=config.hardware.threads,
        **serving,
        weights=weights,
        folders=policy.adapters or ({"default": policy.adapter} if policy.adapter is not None else {}),
        device=config.hardware.device,
        folder=rundir.path,
        served=config.policy,
    )
    tokenizer = tokenizer or load_tokenizer(weights)
    engine = build_engine(config.engine, model, tokenizer, setup)
    try:
        engine.set_version(policy.step or 0)
        yield engine, tokenizer
    finally:
        engine.close()


def load_policy(policy: Policy, config: RootConfig) -> tuple[Any, Any, dict[str, Any]]:
    """Model (with its adapters) and tokenizer of a policy, and the engine's arguments for weights per module."""
    from mmrl.models import load_model, load_tokenizer

    weights = config.model.model_copy(update={"path": policy.base})
    model: Any = load_model(weights, config.hardware.device)
    adapters = policy.adapters or ({"default": policy.adapter} if policy.adapter is not None else {})
    if adapters:
        from peft import PeftModel

        (first, folder), *others = adapters.items()
        model = PeftModel.from_pretrained(model, folder, adapter_name=first)
        for name, folder in others:
            model.load_adapter(folder, adapter_name=name)
    initial = None
    if policy.initial is not None:
        initial = load_model(config.model.model_copy(update={"path": policy.initial}), config.hardware.device)
    return model, load_tokenizer(weights), {"adapters": policy.modules, "initial": initial}


def evaluation_text(
    config: EvalCommandConfig, facts: Mapping[str, Any], metrics: Mapping[str, float], path: Path
) -> str:
    """What `mmrl eval` prints: each metric with its 95 % interval, and what was evaluated on what."""
    rows = [["", "mean", "95 % interval"]]
    for name in metrics:
        if f"{name}_low" in metrics:
            interval = f"[{metrics[f'{name}_low']:.4f}, {metrics[f'{name}_high']:.4f}]"
            rows.append([name, f"{metrics[name]:.4f}", interval])
    behaviour = {name: value for name, value in metrics.items() if name.startswith("module/")}
    failed = f"{metrics['failed_share']:.1%} of the rollouts failed from outside causes"
    if config.model.name == "tiny" and "mini world" not in str(facts.get("data", "mini world")):
        facts = {**facts, "note": "the tiny model is made for the mini world and cannot read real text"}
    return "\n\n".join(
        [
            f"{config.policy} on {config.task.name}, {config.split} ({metrics['n']:.0f} items, seed {config.seed})",
            align(rows),
            facts_table(behaviour),
            facts_table(facts),
            f"{failed}, {metrics['model_failed']:.0f} by the model's own doing\nper item: {path}",
        ]
    )
