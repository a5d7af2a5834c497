"""The kinds of `mmrl train`, one entry each: what is checked, how long it goes on, and which stage is built."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from mmrl.config import PromptRunConfig, RlRunConfig, SftRunConfig, StageConfig
from mmrl.run import prompts, rl, sft
from mmrl.stages import Stage
from mmrl.tasks.base import Task

if TYPE_CHECKING:
    from mmrl.stages.step_log import StepLog

ConfigT = TypeVar("ConfigT", bound=StageConfig)


@dataclass(frozen=True, slots=True)
class StageKind(Generic[ConfigT]):
    """One kind of `mmrl train`, known by its config's type, which `config.stage_schema` picks."""

    problems: Callable[[ConfigT, Task], list[str]]
    """What stands against a run, beside the checks of every kind (`check.check`)."""
    steps: Callable[[ConfigT, Task], int]
    """Its length, for the display; 0 where nobody knows."""
    build: Callable[[ConfigT, Task, StepLog], Stage[ConfigT]]
    """Loads the policy and everything around it."""


KINDS: Mapping[type[StageConfig], StageKind[Any]] = {
    RlRunConfig: StageKind(rl.problems, lambda config, task: config.train.steps, rl.build),
    SftRunConfig: StageKind(sft.problems, lambda config, task: config.train.steps, sft.build),
    PromptRunConfig: StageKind(prompts.problems, prompts.trials, prompts.build),
}


def kind_of(config: ConfigT) -> StageKind[ConfigT]:
    """Return the kind of a config."""
    return KINDS[type(config)]


def build_stage(config: ConfigT, task: Task, log: StepLog) -> Stage[ConfigT]:
    """Build the stage of a settled config."""
    import torch

    # Before any torch work: the number of threads decides the order of float sums.
    torch.set_num_threads(config.hardware.threads or 1)
    return kind_of(config).build(config, task, log)
