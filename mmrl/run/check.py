"""Checks beyond the schema: across sections, of data, hub, servers and this machine's packages.

Everything that the user typed wrong is refused by `check_all` before any model loads, all of it at once; `mmrl plan`
makes the part of it that is the same on every machine (`rl.plan_problems`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from mmrl.config import EvalRunConfig, RlRunConfig, RootConfig, StageConfig
from mmrl.config.base import value_at
from mmrl.config.rules import across_sections, engine_name, without_effect
from mmrl.config.tasks import PRIVILEGED
from mmrl.engines.endpoint_engine import unreachable, with_model
from mmrl.errors import ConfigError, gathered, refuse, unknown
from mmrl.models.prepare import matmul_fault
from mmrl.report.trackers import missing_trackers
from mmrl.run.before import before_problems
from mmrl.run.build import (
    build_task,
    endpoint_problems,
    engine_problems,
    reward_set,
    split_problems,
    turns_missing,
)
from mmrl.run.kinds import kind_of
from mmrl.run.launch import missing_packages, replica_problems
from mmrl.store.policy import Policy, gone_problems, resolve
from mmrl.store.rundir import refuse_full
from mmrl.system.conf import GROUPS, set_by
from mmrl.tasks.base import Task

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
    if engine_name(config) != "openai":
        problems += gone_problems("model.path", config.model.path)
        if fault := matmul_fault(config.model.matmul, config.model.dtype, config.hardware.device):
            problems.append(f"model.matmul: got {config.model.matmul}, {fault}; expected torch")
    # A task refuses what it cannot be built from (prompts, a program, files) by a `ConfigError` of its own.
    try:
        task = build_task(config.task, config.seed)
    except ConfigError as error:
        return problems + error.problems
    reward, credited = config.task.reward, config.algo.name if isinstance(config, RlRunConfig) else ""
    if reward is not None and reward not in (*task.reward_sets, PRIVILEGED):
        problems.append(unknown("task.reward", reward, task.reward_sets))
    # Without a valid reward set the other options cannot be checked.
    elif not turns_missing(reward, credited, task):
        rewards = reward_set(task, reward, credited)
        problems += without_effect(config, config.typed.keys, rewards, task.absent_features, len(task.program.modules))
    problems += task.server_problems() + across_sections(config) + endpoint_problems(config, task)
    # Endpoints to which no request can succeed; each is asked for at most 16 tokens.
    needed = {f"engine.endpoints.{module}": settings for module, settings in (config.engine.endpoints or {}).items()}
    if isinstance(config, EvalRunConfig) and engine_name(config) == "openai":
        needed["engine.endpoint"] = with_model(config.engine, config.policy)
    problems += unreachable(needed)
    if isinstance(config, StageConfig):
        problems += missing_packages(config.hardware) + missing_trackers(config.run.report_to)
        problems += split_problems(config.task, task, config.eval.split, "eval.split")
        problems += before_problems(config)
        problems += kind_of(config).problems(config, task)
    if isinstance(config, EvalRunConfig):
        problems += _evaluation_problems(config, task)
    return problems


def _evaluation_problems(config: EvalRunConfig, task: Task) -> list[str]:
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


def process_problems(config: EvalRunConfig) -> list[str]:
    """Return the problems of a hardware profile with an evaluation, which is one process."""
    hardware = config.hardware
    if hardware.nodes > 1:
        return [f"hardware: profile '{hardware.name}' has several machines, mmrl eval runs in one process of one"]
    if hardware.processes > 1 and (hardware.device == "cpu" or engine_name(config) != "vllm_server"):
        instead = "take hardware=gpu1, or on GPUs engine=vllm_server"
        return [f"hardware: profile '{hardware.name}' has several processes, mmrl eval runs in one; {instead}"]
    return []


def served(config: EvalRunConfig) -> Policy:
    """Return the policy behind `policy=`; with engine=openai that is an endpoint's model, and no weights are here.

    Raises:
        ConfigError: a path that does not exist, or a folder without weights.
    """
    return Policy(base=config.model.path) if engine_name(config) == "openai" else resolve(config.policy)
