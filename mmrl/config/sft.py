"""`algo.*` of supervised stages."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from mmrl.config.base import Idle, MethodConfig, Sources, Temperature, needs

SFT = "sft"
"""Name after `algo=`."""


class SftConfig(MethodConfig):
    """Supervised training: on demonstrations of the task, on a file, or on the policy's own best rollouts."""

    name: Literal["sft"]
    source: Literal["task", "file", "rollouts"] = Field(
        "task",
        description="demonstrations that the task makes, those of `file`, or the best rollouts by the policy as it "
        "starts (rejection fine-tuning)",
    )
    file: Sources = Field(
        None, description="files, a hub id or Python list of `messages`, or of `inputs` and `outputs`"
    )
    modules: dict[str, float] | None = Field(
        None,
        description="module: how often a pass sees each of its examples; those not named are left out; null: all, once",
    )
    rollouts: int = Field(8, ge=1, le=100_000, description="rollouts of each train example")
    min_reward: float = Field(1.0, description="least reward of a rollout that is trained on")
    per_example: int | None = Field(
        1, ge=1, description="at most so many rollouts of an example, the best ones; null: all that have min_reward"
    )
    temperature: Temperature = Field(1.0, gt=0, description="sampling temperature of the rollouts")
    top_p: float = Field(1.0, gt=0, le=1, description="nucleus sampling of the rollouts; 1: off")
    top_k: int = Field(0, ge=0, description="sample among the k likeliest tokens alone; 0: off")
    parse_retries: int = Field(0, ge=0, le=10, description="extra attempts after a parse failure in the rollouts")
    idle: ClassVar[list[Idle[Any]]] = [
        needs("file", "source", "file"),
        needs("rollouts min_reward per_example temperature top_p top_k parse_retries", "source", "rollouts"),
    ]

    @model_validator(mode="after")
    def _source(self) -> Self:
        problems = []
        if self.source == "file" and self.file is None:
            problems.append("file: missing, expected the examples to train on: algo.file=FILE")
        problems += [
            f"modules.{module}: got {share}, expected a number above 0; a module that is not named is left out"
            for module, share in (self.modules or {}).items()
            if share <= 0
        ]
        if problems:
            raise ValueError(*problems)
        return self
