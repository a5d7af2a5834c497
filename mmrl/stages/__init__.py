"""Stages: each maps a policy to a better one. `mmrl.run.build` makes the one of a run, `mmrl.run.session` runs it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from mmrl import rng
from mmrl.config import EvalConfig, RootConfig

if TYPE_CHECKING:
    from mmrl.rollout.environment import Environment
    from mmrl.stages.evaluate import Evaluations
    from mmrl.stages.step_log import StepLog


class Stage(Protocol):
    """Reinforcement learning, supervised training, or a search for prompts."""

    @property
    def config(self) -> RootConfig:
        """The run's."""
        ...

    @property
    def reward_set(self) -> str:
        """Which of the task's reward sets scores rollouts."""
        ...

    @property
    def log(self) -> StepLog:
        """The run's."""
        ...

    def environment(self, phase: EvalConfig, key: rng.Key, /) -> Environment:
        """What the rollouts of an evaluation share, with the policy of now."""
        ...

    def sync(self, version: int, /) -> None:
        """Have the policy after so many steps served."""
        ...

    def improve(self, evaluations: Evaluations, checkpoint: Path | None) -> None:
        """Improve the policy, from a checkpoint of this stage where there is one.

        Args:
            evaluations: made when due; where the number of steps shows only now, this sets their last one.
        """
        ...

    def describe(self) -> Mapping[str, str]:
        """Facts for the summary, after `improve`."""
        ...

    def close(self) -> None:
        """Free what the stage holds, however it ended."""
        ...
