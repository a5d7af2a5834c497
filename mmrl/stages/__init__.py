"""Stages: each maps a policy to a better one. `mmrl.run.build` makes the one of a run, `mmrl.run.session` runs it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

from mmrl import rng
from mmrl.config import AlgoConfig, EvalConfig, RootConfig
from mmrl.config.sft import SftConfig
from mmrl.engines.base import Engine
from mmrl.rollout.environment import Environment, make_environment, sampling_settings
from mmrl.tasks.base import Task

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from mmrl.stages.evaluate import Evaluations
    from mmrl.stages.step_log import StepLog

ConfigT = TypeVar("ConfigT", bound=RootConfig, covariant=True)


@dataclass(kw_only=True)
class Stage(ABC, Generic[ConfigT]):
    """Reinforcement learning, supervised training, or a search for prompts."""

    config: ConfigT
    task: Task
    engine: Engine
    """Samples the policy."""
    tokenizer: PreTrainedTokenizerBase
    reward_set: str
    """The one of the task's reward sets that scores rollouts."""
    log: StepLog

    def environment(self, phase: AlgoConfig | SftConfig | EvalConfig, key: rng.Key) -> Environment:
        """Return the environment of rollouts of the current policy, in training (`algo.*`) or in evaluation (`eval.*`).

        Args:
            key: (run seed, step or phase).
        """
        settings = sampling_settings(phase, self.config.task)
        return make_environment(self.task, self.engine, self.tokenizer, settings, key)

    def sync(self, version: int) -> None:
        """Have the policy after so many steps served; here the engine samples from its very weights."""
        self.engine.set_version(version)

    @abstractmethod
    def improve(self, evaluations: Evaluations, checkpoint: Path | None) -> None:
        """Improve the policy, from a checkpoint of this stage where there is one.

        Args:
            evaluations: made when due; where the number of steps shows only now, this sets their last one.
        """

    @abstractmethod
    def describe(self) -> Mapping[str, str]:
        """Return facts for the summary, after `improve`."""

    def recorded(self) -> Mapping[str, object]:
        """Return the stage's state for a checkpoint."""
        return {}

    def close(self) -> None:
        """Free what the stage holds, however it ended."""
        self.engine.close()
