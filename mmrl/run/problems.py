"""Checks that several kinds of runs share."""

from __future__ import annotations

from collections.abc import Collection

from mmrl import engines
from mmrl.algorithms import ALGORITHMS
from mmrl.algorithms.checks import TURN_SETS
from mmrl.config import RootConfig, TaskConfig, TrainCommandConfig
from mmrl.config.base import value_at
from mmrl.config.rules import engine_name
from mmrl.errors import unknown
from mmrl.tasks.base import Task, continuing_modules


def engine_problems(
    config: RootConfig, *, training: bool = False, copied: bool = False, rank: int = 0, adapters: Collection[str] = ()
) -> list[str]:
    """Return the problems of the engine that samples, and of its settings; see `engines.problems`."""
    name, device = engine_name(config), config.hardware.device
    return engines.problems(
        config.engine, name, training=training, copied=copied, device=device, rank=rank, adapters=adapters
    )


def split_problems(config: TaskConfig, task: Task, split: str, key: str) -> list[str]:
    """Return the one sentence for a split that is to be evaluated and is absent or empty."""
    if config.data.source_of(split) is None:
        splits = [f"{key}={name}" for name in config.data.files]
        return [
            f"{key}: got {split}, and there is no such split (task.data.{split}=null); set task.data.{split}, or "
            f"{' or '.join(splits)}"
        ]
    return [] if task.examples(split) else [f"{key}: the {split} split has no examples; set task.data.{split}"]


def endpoint_problems(config: RootConfig, task: Task) -> list[str]:
    """Return problems of the endpoints that answer for modules, without a request."""
    every, endpoints = engine_name(config) == "openai", config.engine.endpoints or {}
    if not every and not endpoints:
        return []
    key = "engine" if every else "engine.endpoints"
    problems = []
    training = isinstance(config, TrainCommandConfig)
    if not training:  # in training `ModuleAssignment.problems` lists them
        problems = [unknown(key, name, task.program.modules) for name in endpoints if name not in task.program.modules]
    for path in ("eval.top_k", "algo.top_k") if training else ("eval.top_k",):
        if top_k := value_at(config, path):
            problems.append(f"{path}: got {top_k}, and an endpoint takes no top_k; use 0")
    return problems + [
        f"{key}: module '{module}' of task={task.name} goes on in the context of an earlier reply, which an "
        "endpoint that takes messages cannot; use engine=transformers or engine=vllm_server for it"
        for module in continuing_modules(task.program)
        if every or module in endpoints
    ]


def turns_missing(reward: str | None, algo: str, task: Task) -> list[str]:
    """Return the sentence for a reward set without the turn rewards of the algorithm; `algo` empty: none does."""
    # An unknown reward set has its own sentence in `check`; a second one would only distract.
    if reward not in task.reward_sets or reward in TURN_SETS or not algo or not ALGORITHMS[algo].needs_turn_rewards:
        return []
    offered = [name for name in TURN_SETS if name in task.reward_sets]
    instead = f"use task.reward={offered[0]}, or leave it out" if offered else "use an algorithm without turn rewards"
    return [f"task.reward: got {reward}, which has no turn rewards, and algo={algo} needs them; {instead}"]
