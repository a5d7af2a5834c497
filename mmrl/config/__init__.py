"""Composed config in, validated config out: frozen pydantic models, all errors at once.

Imports no Hydra and no torch. `validate` is the only door; `cli` composes the mapping that it takes.
"""

from mmrl.config.algo import ALGO_SCHEMAS, AlgoConfig
from mmrl.config.endpoint import EndpointConfig
from mmrl.config.engines import ENGINE_SCHEMAS, EngineConfig
from mmrl.config.retriever import RETRIEVER_SCHEMAS, RetrieverConfig
from mmrl.config.schema import (
    EvalConfig,
    EvalRunConfig,
    HardwareConfig,
    LoraConfig,
    ModelConfig,
    ModuleWeights,
    PromptRunConfig,
    RlRunConfig,
    RootConfig,
    RunConfig,
    SftRunConfig,
    StageConfig,
    StartConfig,
    TrainConfig,
    Typed,
    WeightRunConfig,
    schema_of,
    stage_schema,
)
from mmrl.config.tasks import TASK_SCHEMAS, DataConfig, JudgeConfig, TaskConfig
from mmrl.config.validate import validate, validate_stored

__all__ = [
    "ALGO_SCHEMAS",
    "ENGINE_SCHEMAS",
    "RETRIEVER_SCHEMAS",
    "TASK_SCHEMAS",
    "AlgoConfig",
    "DataConfig",
    "EndpointConfig",
    "EngineConfig",
    "EvalConfig",
    "EvalRunConfig",
    "HardwareConfig",
    "JudgeConfig",
    "LoraConfig",
    "ModelConfig",
    "ModuleWeights",
    "PromptRunConfig",
    "RetrieverConfig",
    "RlRunConfig",
    "RootConfig",
    "RunConfig",
    "SftRunConfig",
    "StageConfig",
    "StartConfig",
    "TaskConfig",
    "TrainConfig",
    "Typed",
    "WeightRunConfig",
    "schema_of",
    "stage_schema",
    "validate",
    "validate_stored",
]
