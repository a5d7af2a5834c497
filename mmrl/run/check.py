"""Checks beyond the schema: across sections, of data, hub, servers and this machine's packages.

Everything that the user typed wrong is refused by `check_all` before any model loads, all of it at once; `mmrl plan`
makes the part of it that is the same on every machine (`plan_problems`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from mmrl import engines
from mmrl.algorithms import ALGORITHMS
from mmrl.algorithms import problems as algorithm_problems
from mmrl.algorithms.checks import TURN_SETS
from mmrl.config import (
    EvalCommandConfig,
    PromptCommandConfig,
    RootConfig,
    SftCommandConfig,
    TaskConfig,
    TrainCommandConfig,
)
from mmrl.config.algo import CriticConfig
from mmrl.config.base import value_at
from mmrl.config.rules import across_sections, engine_name, without_effect
from mmrl.engines.endpoint_engine import unreachable, with_model
from mmrl.errors import ConfigError, gathered, refuse, unknown
from mmrl.report.trackers import missing_trackers
from mmrl.run.build import build_task, reward_set, separate_teachers, teacher_policy, teacher_prompts
from mmrl.run.launch import hardware_problems, missing_packages, replica_problems
from mmrl.run.settle import module_assignment
from mmrl.stages.information_gain import gold_problems
from mmrl.store.policy import Policy, gone_problems, resolve
from mmrl.store.rundir import refuse_full
from mmrl.system.conf import GROUPS, set_by
from mmrl.system.objects import imported
from mmrl.tasks.base import Canonical, Task, continuing_modules
from mmrl.trainer.settings import Settings

ConfigT = TypeVar("ConfigT", bound=RootConfig)


@dataclass(frozen=True, slots=True)
class Checked(Generic[ConfigT]):
    """A config that has passed `check_all`, now or before its run first started."""

    config: ConfigT


def check_all(configs: Sequence[ConfigT]) -> list[Checked[ConfigT]]:
    """Check everything that can be wrong across sections, for all jobs at once; typed keys without effect are, too.

    Raises:
        ConfigError: with every problem.
    """
    problems: list[str] = []
    # All jobs of a sweep share the sections that are not swept, so the first speaks for all.
    if len(configs) > 1 and configs[0].run.dir is not None:
        problems.append("run.dir: the runs of a sweep need a directory each; leave run.dir out")
    for config in configs:
        with gathered(problems):
            problems += [_with_source(problem, config, config.typed.keys) for problem in check(config)]
    # The runs of a sweep mostly have the same problems; each is listed once, in the order of its first run.
    refuse(dict.fromkeys(problems))
    return [Checked(config) for config in configs]


def _with_source(problem: str, config: RootConfig, user_keys: Collection[str]) -> str:
    """Return a problem of a key that the user has not typed with the choice that has set it: `algo=grpo`."""
    key = problem.partition(":")[0]
    if not user_keys or any(f"{key}.".startswith(f"{typed}.") for typed in user_keys if typed not in GROUPS):
        return problem
    choice = set_by(key, value_at(config, key), {group: value_at(config, f"{group}.name") for group in GROUPS})
    return f"{problem} (set by {choice}; {key}=VALUE changes it)" if choice else problem


def check(config: RootConfig) -> list[str]:
    """Return the problems of one config across its sections, data files included."""
    problems: list[str] = []
    if config.run.dir is not None:
        with gathered(problems):
            refuse_full(Path(config.run.dir))
    algo, policy = value_at(config, "algo.name"), value_at(config, "policy")
    if engine_name(config) != "openai":
        problems += gone_problems("model.path", config.model.path) + _matmul_problems(config)
    # A task refuses what it cannot be built from (prompts, a program, files) by a `ConfigError` of its own.
    try:
        task = build_task(config.task, config.seed)
    except ConfigError as error:
        return problems + error.problems
    reward, credited = config.task.reward, str(algo) if config.kind.credit else ""
    if reward is not None and reward not in task.reward_sets:
        problems.append(unknown("task.reward", reward, task.reward_sets))
    # Without a valid reward set the other options cannot be checked.
    elif not turns_missing(reward, credited, task):
        rewards = reward_set(task, reward, credited)
        problems += without_effect(config, config.typed.keys, rewards, task.absent_features, len(task.program.modules))
    problems += task.server_problems() + across_sections(config) + endpoint_problems(config, task)
    problems += endpoints_away(config)
    if policy is None:
        problems += missing_packages(config.hardware) + missing_trackers(config.run.report_to)
        problems += split_problems(config.task, task, config.eval.split, "eval.split")
    return problems + OF_KIND[config.kind.name](config, task)


def _matmul_problems(config: RootConfig) -> list[str]:
    dtype, device = config.model.dtype, config.hardware.device
    if config.model.matmul != "onednn" or (dtype in ("auto", "float32") and device != "cuda"):
        return []
    other = f"hardware.device={device}" if device == "cuda" else f"model.dtype={dtype}"
    return [f"model.matmul: got onednn, which computes float32 on a CPU, beside {other}; expected torch"]


def _prompt_problems(config: PromptCommandConfig, task: Task) -> list[str]:
    from mmrl.stages.prompts.split import prompt_problems

    problems = split_problems(config.task, task, "train", "task.data.train") + engine_problems(config)
    model = getattr(config.algo, "prompt_model", None)
    problems += unreachable({} if model is None else {"algo.prompt_model": model})
    if engine_name(config) == "openai":
        # `policy=` names it in an evaluation; a run of this kind has no such key
        problems.append("engine: openai, whose model nothing names here; set engine.endpoints.MODULE.model=NAME")
    return problems + prompt_problems(config, task)


def engine_problems(
    config: RootConfig, *, training: bool = False, copied: bool = False, rank: int = 0, adapters: Collection[str] = ()
) -> list[str]:
    """Return the problems of the engine that samples, and of its settings; see `engines.problems`."""
    name, device = engine_name(config), config.hardware.device
    return engines.problems(
        config.engine, name, training=training, copied=copied, device=device, rank=rank, adapters=adapters
    )


def _supervised_problems(config: SftCommandConfig, task: Task) -> list[str]:
    from mmrl.stages.sft_data import sft_problems

    assignment = module_assignment(config, task.program.modules)
    problems = assignment.problems() + sft_problems(config, task, tuple(assignment.untrained))
    if config.algo.source != "file":
        problems += split_problems(config.task, task, "train", "task.data.train")
    return problems


def _evaluation_problems(config: EvalCommandConfig, task: Task) -> list[str]:
    policy, modules = served(config), task.program.modules
    # A policy from a run with algo.frozen_serving has two sets of full weights.
    adapters = policy.folders.values()
    problems = process_problems(config)
    problems += engine_problems(config, copied=policy.initial is not None, adapters=adapters)
    problems += replica_problems(config.hardware, getattr(config.engine, "replicas", 1))
    problems += split_problems(config.task, task, config.split, "split")
    if policy.modules is not None and (without := [name for name in modules if name not in policy.modules]):
        problems.append(
            f"policy: {config.policy} has weights for the modules {', '.join(policy.modules)} and none for "
            f"{', '.join(without)} of task={task.name}; give one adapter of its checkpoint (a folder in it) for all"
        )
    return problems


def process_problems(config: EvalCommandConfig) -> list[str]:
    """Return the problems of a hardware profile with an evaluation, which is one process."""
    hardware = config.hardware
    if hardware.nodes > 1:
        return [f"hardware: profile '{hardware.name}' has several machines, mmrl eval runs in one process of one"]
    if hardware.processes > 1 and (hardware.device == "cpu" or engine_name(config) != "vllm_server"):
        instead = "take hardware=gpu1, or on GPUs engine=vllm_server"
        return [f"hardware: profile '{hardware.name}' has several processes, mmrl eval runs in one; {instead}"]
    return []


def plan_problems(config: TrainCommandConfig, task: Task) -> list[str]:
    """Return problems of a training run wherever it runs: no data is read, no server called, no package looked for."""
    return across_sections(config) + endpoint_problems(config, task) + _rl_problems(config, task)


def _rl_problems(config: TrainCommandConfig, task: Task) -> list[str]:
    # From cheap to expensive; nothing here leaves this process.
    modules, critic = config.model.modules is not None, getattr(config.algo, "critic", None)
    problems = hardware_problems(config.hardware, engine_name(config), modules, critic)
    problems += replica_problems(config.hardware, getattr(config.engine, "replicas", 1))
    problems += Settings(train=config.train, algo=config.algo, model=config.model, seed=config.seed).problems()
    problems += algorithm_problems(config.algo, task.program.modules, task.reward_sets) + negative_rewards(config, task)
    problems += module_assignment(config, task.program.modules).problems()
    if engine_name(config) == "openai":
        problems += engines.problems(config.engine, "openai", training=True)
    problems += staleness_problems(config) + kl_problems(config) + text_problems(config, task)
    # What does not fit the modules has its sentence already, and may have no plan.
    problems += [] if problems else replay_problems(config, task)
    return problems + turns_missing(config.task.reward, config.algo.name, task)


def _training_problems(config: TrainCommandConfig, task: Task) -> list[str]:
    """Return the problems of a plan; servers and teachers that are not there, splits that are too small."""
    rank = config.model.lora.r if config.model.lora is not None else 0
    copied = module_assignment(config, task.program.modules).copied
    problems = _rl_problems(config, task) + engine_problems(config, training=True, copied=copied, rank=rank)
    problems += teacher_problems(config, task) + split_problems(config.task, task, "train", "task.data.train")
    available, size = len(task.examples("train")), config.train.batch_size
    if size > available > 0:
        problems.append(f"train.batch_size: got {size}, the train split has {available} examples")
    if config.algo.refills and size == available:
        batch = f"train.batch_size={available}, all of the train split; use algo.zero_variance=drop"
        problems.append(f"algo.zero_variance: got refill, which has no effect with {batch}, or a smaller batch")
    if reward_set(task, config.task.reward, config.algo.name) == "gain":
        problems += gold_problems(task, task.examples("train"))
    if config.algo.minibatches > size:
        problems.append(f"algo.minibatches: got {config.algo.minibatches}, expected at most train.batch_size={size}")
    return problems


def split_problems(config: TaskConfig, task: Task, split: str, key: str) -> list[str]:
    """Return the one sentence for a split that is to be evaluated and is absent or empty."""
    if config.data.source_of(split) is None:
        splits = [f"{key}={name}" for name in config.data.files]
        return [
            f"{key}: got {split}, and there is no such split (task.data.{split}=null); set task.data.{split}, or "
            f"{' or '.join(splits)}"
        ]
    return [] if task.examples(split) else [f"{key}: the {split} split has no examples; set task.data.{split}"]


def served(config: EvalCommandConfig) -> Policy:
    """Return the policy behind `policy=`; with engine=openai that is an endpoint's model, and no weights are here.

    Raises:
        ConfigError: a path that does not exist, or a folder without weights.
    """
    return Policy(base=config.model.path) if engine_name(config) == "openai" else resolve(config.policy)


def endpoint_problems(config: RootConfig, task: Task) -> list[str]:
    """Return problems of the endpoints that answer for modules, without a request."""
    every, endpoints = engine_name(config) == "openai", config.engine.endpoints or {}
    if not every and not endpoints:
        return []
    key = "engine" if every else "engine.endpoints"
    problems = []
    if not config.kind.credit:  # in training `ModuleAssignment.problems` lists them
        problems = [unknown(key, name, task.program.modules) for name in endpoints if name not in task.program.modules]
    for path in ("eval.top_k", "algo.top_k") if config.kind.credit else ("eval.top_k",):
        if top_k := value_at(config, path):
            problems.append(f"{path}: got {top_k}, and an endpoint takes no top_k; use 0")
    return problems + [
        f"{key}: module '{module}' of task={task.name} goes on in the context of an earlier reply, which an "
        "endpoint that takes messages cannot; use engine=transformers or engine=vllm_server for it"
        for module in continuing_modules(task.program)
        if every or module in endpoints
    ]


def endpoints_away(config: RootConfig) -> list[str]:
    """Return the endpoints of modules to which no request can succeed; asks each at most one token."""
    endpoints = config.engine.endpoints or {}
    needed = {f"engine.endpoints.{module}": settings for module, settings in endpoints.items()}
    if engine_name(config) == "openai" and (policy := value_at(config, "policy")) is not None:
        needed["engine.endpoint"] = with_model(config.engine, str(policy))
    return unreachable(needed)


def kl_problems(config: TrainCommandConfig) -> list[str]:
    """Return the problem of a KL term in the reward, part of credit, where the engine records no log-probabilities."""
    algo = config.algo
    if not isinstance(algo, CriticConfig) or algo.kl != "reward" or algo.beta == 0:
        return []
    unrecorded = engines.unrecorded_logprobs(config.engine, (algo.temperature, algo.top_p, algo.top_k))
    kept = "algo.kl: got reward, which takes the log-probabilities that the engine records, and"
    return [f"{kept} {unrecorded}, algo.kl=loss or algo.beta=0"] if unrecorded else []


def staleness_problems(config: TrainCommandConfig) -> list[str]:
    """Return the problems of sampling the next batch while this one trains."""
    if not (staleness := config.train.staleness):
        return []
    algo, problems = config.algo, []
    if algo.refills:
        late = "algo.zero_variance=refill, which samples after credit; use algo.zero_variance=drop"
        problems.append(f"train.staleness: got {staleness} with {late}")
    sampling = (algo.temperature, algo.top_p, algo.top_k)
    if staleness > 1 and config.hardware.device == "cpu" and not config.engine.servers:
        # Seen with vLLM 0.31: the probe of a new version and calls in one batch ("einsum(): subscript b has size …").
        problems.append(
            f"train.staleness: got {staleness} with vLLM on a CPU, which ends where new weights are checked beside "
            "calls of an adapter; use train.staleness=1"
        )
    adapters = config.model.lora is not None
    return problems + engines.staleness_problems(config.engine, engine_name(config), staleness, adapters, sampling)


def text_problems(config: TrainCommandConfig, task: Task) -> list[str]:
    """Return the one sentence for `algo.reserialise` on a program that cannot write its outputs again."""
    if not getattr(config.algo, "reserialise", False) or isinstance(task.program, Canonical):
        return []
    return [
        f"algo.reserialise: task {task.name} has no canonical text of what its modules write; leave it out, or give "
        "its program a method canonical(call) (mmrl.tasks.base.Canonical)"
    ]


def replay_problems(config: TrainCommandConfig, task: Task) -> list[str]:
    """Return the one sentence for an algorithm that plays an agent again, which does not repeat its requests."""
    if getattr(config.task, "deterministic", True):
        return []
    trees = ALGORITHMS[config.algo.name].plan(config.algo, task.program.modules, (config.seed, 0, ""))
    if not any(tree.forks or tree.growth or tree.exchange or tree.teacher for tree in trees):
        return []
    return [
        f"task.deterministic: got false, and algo={config.algo.name} plays an agent again with the replies of an "
        "earlier rollout, which must make the same requests then; use an algorithm without forks, such as grpo or "
        "mmgrpo, or an agent that depends only on its example and on what it is told"
    ]


def negative_rewards(config: TrainCommandConfig, task: Task) -> list[str]:
    """Return the settings that make rewards negative, where `algo.scale=mean` divides by their mean."""
    algo, absent = config.algo, task.absent_features
    if getattr(algo, "scale", True) != "mean":
        return []
    format_score = 0.0 if "parse_failures" in absent else getattr(algo, "format_failure_score", 0.0)
    penalties = "penalties" not in absent and getattr(algo, "penalties", False)
    causes = [
        ("task.failure_score", task.failure_score, task.failure_score < 0, "0 or more"),
        ("algo.format_failure_score", format_score, format_score < 0, "0 or more"),
        ("algo.penalties", "true", penalties, "false"),
    ]
    why = "which makes rewards negative, and algo.scale=mean divides by their mean"
    return [f"{key}: got {value}, {why}; expected {expected}" for key, value, negative, expected in causes if negative]


def turns_missing(reward: str | None, algo: str, task: Task) -> list[str]:
    """Return the sentence for a reward set without the turn rewards of the algorithm; `algo` empty: none does."""
    # An unknown reward set has its own sentence in `check`; a second one would only distract.
    if reward not in task.reward_sets or reward in TURN_SETS or not algo or not ALGORITHMS[algo].needs_turn_rewards:
        return []
    offered = [name for name in TURN_SETS if name in task.reward_sets]
    instead = f"use task.reward={offered[0]}, or leave it out" if offered else "use an algorithm without turn rewards"
    return [f"task.reward: got {reward}, which has no turn rewards, and algo={algo} needs them; {instead}"]


def teacher_problems(config: TrainCommandConfig, task: Task) -> list[str]:
    """Return problems of teachers: missing policies, unreadable prompts, modules that the student does not have."""
    problems: list[str] = []
    if (program := getattr(config.algo, "program", None)) is not None:
        with gathered(problems):
            if not callable(getattr(imported("algo.program", program), "run", None)):
                problems.append(f"algo.program: '{program}' has no `run(example, ctx)`; expected a program")
    exchanged = config.algo.exchanged_modules(task.program.modules)
    for teacher in separate_teachers(config.algo):
        where, endpoint = f"algo.teachers: {teacher.name}", teacher.endpoint
        if endpoint is not None:
            problems += unreachable({f"{where}.endpoint": endpoint})
            if config.algo.top_k > 0:
                problems.append(f"algo.top_k: got {config.algo.top_k}, and an endpoint ({where}) takes no top_k; use 0")
        problems += [
            f"{where}: module '{module}' of task={task.name} goes on in the context of an earlier reply, which another "
            "model has not read; use algo.reply, or exchange other modules"
            for module in continuing_modules(task.program)
            if module in exchanged or endpoint is not None
        ]
        with gathered(problems, f"{where}: "):
            prompts = teacher_prompts(teacher, teacher_policy(teacher))
            modules = build_task(config.task, config.seed, prompts).program.modules
            # A module that the student lacks has no call whose place the teacher's output could take.
            if absent := [name for name in modules if name not in task.program.modules]:
                problems.append(
                    f"{where}: its program has the modules {', '.join(absent)}, which the student's has not; modules "
                    f"are matched by name (the student's: {', '.join(task.program.modules)})"
                )
    return problems


OF_KIND: Mapping[str, Callable[[Any, Task], list[str]]] = {
    "rl": _training_problems,
    "sft": _supervised_problems,
    "prompts": _prompt_problems,
    "eval": _evaluation_problems,
}
"""Kind of a config (`config.schema.Kind`) -> what stands against a run of it."""
