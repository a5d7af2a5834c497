"""The whole config of one command."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, SerializeAsAny

from mmrl.config.algo import AlgoConfig
from mmrl.config.base import Section
from mmrl.config.engine import EngineConfig
from mmrl.config.schema import EvalConfig, HardwareConfig, ModelConfig, RunConfig, TrainConfig
from mmrl.config.task import TaskConfig


class RootConfig(Section):
    """What `train` and `eval` share."""

    seed: int = Field(0, ge=0, description="of every random choice: data order, sampling, new weights")
    task: TaskConfig
    model: ModelConfig
    hardware: HardwareConfig
    engine: EngineConfig
    eval: EvalConfig
    run: RunConfig
    plugins: tuple[str, ...] = Field((), description="packages imported first; they may add tasks and algorithms")


class TrainCommandConfig(RootConfig):
    """`mmrl train`."""

    algo: SerializeAsAny[AlgoConfig]
    train: TrainConfig


class EvalCommandConfig(RootConfig):
    """`mmrl eval`."""

    policy: str = Field(description="a run directory, a checkpoint, an adapter, a model folder, `tiny`, or a hub id")
    split: Literal["train", "dev", "test"] = Field("dev", description="whose examples are evaluated")
