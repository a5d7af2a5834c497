"""Composed config in, validated config out: frozen pydantic models, all errors at once.

Imports no Hydra and no torch. `validate` is the only door; `cli` composes the mapping that it takes.
"""

from mmrl.config.algo import ALGO_SCHEMAS, AlgoConfig
from mmrl.config.endpoint import EndpointConfig
from mmrl.config.engine import EngineConfig
from mmrl.config.root import EvalCommandConfig, RootConfig, TrainCommandConfig
from mmrl.config.schema import (
    EvalConfig,
    HardwareConfig,
    LoraConfig,
    ModelConfig,
    ModuleWeights,
    RunConfig,
    TrainConfig,
)
from mmrl.config.task import DataConfig, JudgeConfig, RetrieverConfig, TaskConfig
from mmrl.config.validate import validate

__all__ = [
    "ALGO_SCHEMAS",
    "AlgoConfig",
    "DataConfig",
    "EndpointConfig",
    "EngineConfig",
    "EvalCommandConfig",
    "EvalConfig",
    "HardwareConfig",
    "JudgeConfig",
    "LoraConfig",
    "ModelConfig",
    "ModuleWeights",
    "RetrieverConfig",
    "RootConfig",
    "RunConfig",
    "TaskConfig",
    "TrainCommandConfig",
    "TrainConfig",
    "validate",
]
