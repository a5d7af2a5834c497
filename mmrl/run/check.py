"""From a validated config to one that can run: plugins, the task, checks across sections, what depends on this machine.

Called by `cli`, `run` and `evaluation`; everything that the user typed wrong is found in `check_all`, before any model
loads.
"""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

from mmrl import engines
from mmrl.algorithms import ALGORITHMS
from mmrl.algorithms import problems as algorithm_problems
from mmrl.algorithms.checks import TURN_SETS
from mmrl.config import (
    EvalCommandConfig,
    HardwareConfig,
    RootConfig,
    TaskConfig,
    TrainCommandConfig,
    validate_stored,
)
from mmrl.config.algo import CriticConfig
from mmrl.config.retriever import Bm25Config
from mmrl.config.rules import Facts, engine_name, without_effect
from mmrl.config.task import BUILT_IN, CorpusConfig, JudgedConfig, PapillonConfig
from mmrl.engines.endpoint import named, unreachable
from mmrl.errors import CheckpointError, ConfigError, unknown
from mmrl.models.assignment import ModuleAssignment
from mmrl.models.policy import Policy, resolve
from mmrl.report.rundir import RunDir, refuse_full
from mmrl.rollout.programs import with_program
from mmrl.run.launch import missing_packages
from mmrl.run.launch import problems as hardware_problems
from mmrl.stages.teachers import teacher_problems
from mmrl.tasks import TASKS
from mmrl.tasks.base import Canonical, Task, continuing_modules
from mmrl.trainer.settings import Settings

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
            absent_features=task.absent_features,
            modules=len(task.program.modules),
        )
        problems += without_effect(config, typed, facts)
    problems += task.server_problems()
    if isinstance(config, EvalCommandConfig):
        if config.hardware.processes * config.hardware.nodes != 1:
            problems.append(f"hardware: profile '{config.hardware.name}' has several processes, mmrl eval runs in one")
        if not task.examples(config.split):
            problems.append(f"split: the {config.split} split has no examples; set task.data.{config.split}")
        copied = served(config).initial is not None
        problems += engines.problems(
            config.engine, engine_name(config), training=False, copied=copied, device=config.hardware.device
        )
        problems += endpoint_problems(config, task) + endpoints_away(config)
        return problems + policy_problems(config, task)
    assert isinstance(config, TrainCommandConfig)
    problems += device_problems(config) + missing_packages(config.hardware)
    problems += Settings(train=config.train, algo=config.algo, model=config.model, seed=config.seed).problems()
    problems += algorithm_problems(config.algo, task.program.modules, task.reward_sets)
    problems += assignment(config, task).problems()
    problems += engines.problems(
        config.engine,
        engine_name(config),
        training=True,
        copied=assignment(config, task).copied,
        device=config.hardware.device,
        rank=config.model.lora.r if config.model.lora is not None else 0,
    )
    problems += endpoint_problems(config, task) + endpoints_away(config)
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


def device_problems(config: TrainCommandConfig) -> list[str]:
    """What the processes of a hardware profile cannot do of a training run."""
    return hardware_problems(
        config.hardware,
        engine_name(config),
        modules=config.model.modules is not None,
        critic=config.algo.critic if isinstance(config.algo, CriticConfig) else None,
    )


def policy_problems(config: EvalCommandConfig, task: Task) -> list[str]:
    """What is wrong with `policy=` for a task."""
    problems = []
    if config.model.modules is not None:
        problems.append(
            "model.modules: has no effect on mmrl eval, where a checkpoint says which module speaks with what"
        )
    policy = served(config)
    without = [name for name in task.program.modules if policy.modules is not None and name not in policy.modules]
    if policy.modules is not None and without:
        problems.append(
            f"policy: {config.policy} has weights for the modules {', '.join(policy.modules)} and none for "
            f"{', '.join(without)} of task={task.name}; give one adapter of its checkpoint (a folder in it) for all"
        )
    return problems


def served(config: EvalCommandConfig) -> Policy:
    """The policy behind `policy=`; with engine=openai that is an endpoint's model, and no weights are here.

    Raises:
        ConfigError: a path that does not exist, or a folder without weights.
    """
    return Policy(base=config.model.path) if engine_name(config) == "openai" else resolve(config.policy)


def endpoint_problems(config: RootConfig, task: Task) -> list[str]:
    """What is wrong with the endpoints that answer for modules; asks nobody."""
    name = engine_name(config)
    endpoints = config.engine.endpoints or {}
    if name != "openai" and not endpoints:
        return []
    key = "engine" if name == "openai" else "engine.endpoints"
    problems = [
        unknown(key, module, task.program.modules) for module in endpoints if module not in task.program.modules
    ]
    samplings = {"eval.top_k": config.eval.top_k}
    if isinstance(config, TrainCommandConfig):
        samplings["algo.top_k"] = config.algo.top_k
        problems = []  # `ModuleAssignment` tells of unknown modules
    problems += [f"{what}: got {k}, and an endpoint takes no top_k; use 0" for what, k in samplings.items() if k > 0]
    for module in [m for m in continuing_modules(task.program) if name == "openai" or m in endpoints]:
        problems.append(
            f"{key}: module '{module}' of task={task.name} goes on in the context of an earlier reply, which an "
            "endpoint that takes messages cannot; use engine=transformers or engine=vllm_server for it"
        )
    return problems


def endpoints_away(config: RootConfig) -> list[str]:
    """Why no request to the endpoints that answer for modules can succeed; asks each at most one token."""
    endpoints = config.engine.endpoints or {}
    asked = {f"engine.endpoints.{module}": settings for module, settings in endpoints.items()}
    if engine_name(config) == "openai" and isinstance(config, EvalCommandConfig):
        asked["engine.endpoint"] = named(config.engine, config.policy)
    return unreachable(asked)


def assignment(config: TrainCommandConfig, task: Task) -> ModuleAssignment:
    """Which module speaks with which weights in a training run."""
    answered = {module: endpoint.model for module, endpoint in (config.engine.endpoints or {}).items()}
    modules = tuple(task.program.modules)
    return ModuleAssignment(model=config.model, algo=config.algo, modules=modules, answered=answered)


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
    if chosen not in task.reward_sets:
        return []  # refused as unknown already
    offered = [name for name in TURN_SETS if name in task.reward_sets]
    instead = f"use task.reward={offered[0]}, or leave it out" if offered else "use an algorithm without turn rewards"
    return [f"task.reward: got {chosen}, which has no turn rewards, and algo={config.algo.name} needs them; {instead}"]


def refuse_kind(folder: Path, schema: type[RootConfig]) -> None:
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
        validate_stored(schema, config)
    except ConfigError as error:
        raise ConfigError(f"{folder}/config.yaml: {problem}" for problem in error.problems) from None


def settle(config: ConfigT) -> ConfigT:
    """Fix what depends on this machine (device, threads, engine), so that a resume repeats it."""
    import os

    import torch

    hardware = config.hardware
    device = hardware.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    hardware = hardware.model_copy(update={"device": device})
    refuse_absent(hardware, served_here=config.engine.server is None)
    threads = hardware.threads or max(1, len(os.sched_getaffinity(0)) // hardware.processes)
    engine = hardware.engine if config.engine.name == "auto" else config.engine.name
    return config.model_copy(
        update={
            "hardware": hardware.model_copy(update={"threads": threads}),
            "engine": config.engine.model_copy(update={"name": engine}),
        }
    )


def refuse_absent(hardware: HardwareConfig, served_here: bool) -> None:
    """Raises `ConfigError` for GPUs that this machine does not have.

    Args:
        served_here: whether rollout devices, if any, are this machine's.
    """
    import torch

    if hardware.device != "cuda":
        return
    if not torch.cuda.is_available():
        raise ConfigError(f"hardware.device: got cuda (hardware={hardware.name}), this machine has no CUDA device")
    # Of several machines, the first alone serves, and who is first is not known yet.
    serving = hardware.rollout_devices if hardware.nodes == 1 and served_here else 0
    here = torch.cuda.device_count()
    if here < hardware.processes + serving:
        raise ConfigError(
            f"hardware.processes: profile '{hardware.name}' asks for {hardware.processes} GPUs to train"
            + (f" and {serving} to serve rollouts" if serving else "")
            + f", this machine has {here}; set hardware.processes, or take another profile"
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
    """The same task on the embedded data, with what needs no weights, server or key; a task of one's own stays."""
    if task.name not in BUILT_IN:
        return task
    data = task.data.model_copy(update={"train": "mini", "dev": "mini", "test": "mini"})
    plain: dict[str, object] = {"data": data}
    if isinstance(task, CorpusConfig):
        plain |= {"corpus": None, "retriever": Bm25Config(top_k=task.retriever.top_k)}
    if isinstance(task, JudgedConfig) and task.judge is not None:
        plain["judge"] = task.judge.model_copy(update={"key_env": None})
    if isinstance(task, PapillonConfig) and task.external is not None:
        plain["external"] = task.external.model_copy(update={"key_env": None})
    return task.model_copy(update=plain)
