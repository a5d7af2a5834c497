"""`algo.*` of a supervised stage."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from mmrl.config.base import Section
from mmrl.config.rules import checked

SFT = "sft"
"""Its name after `algo=`."""


class SftConfig(Section):
    """Supervised training: on demonstrations of the task, on a file, or on the policy's own best rollouts."""

    name: Literal["sft"]
    source: Literal["task", "file", "rollouts"] = Field(
        "task",
        description="demonstrations that the task makes of its train split, those of `file`, or rollouts of the train "
        "split by the policy as it starts, of which the best are trained on (rejection fine-tuning)",
    )
    file: str | None = Field(
        None, description="records with `messages`, or with `inputs` and `outputs`; a file, hub id or Python list"
    )
    modules: dict[str, float] | None = Field(
        None,
        description="module: how often a pass sees each of its examples; those not named are left out; null: all, once",
    )
    prompt_weight: float = Field(
        0.0, ge=0, description="weight of the prompts' own tokens in the loss; completions have 1"
    )
    rollouts: int = Field(8, ge=1, le=100_000, description="of each train example")
    min_reward: float = Field(1.0, description="least reward of a rollout that is trained on")
    per_example: int | None = Field(
        1, ge=1, description="at most so many rollouts of an example, the best ones; null: all that have min_reward"
    )
    temperature: float = Field(1.0, gt=0, description="sampling temperature of the rollouts")
    top_p: float = Field(1.0, gt=0, le=1, description="nucleus sampling of the rollouts; 1: off")
    top_k: int = Field(0, ge=0, description="the same among the k likeliest tokens; 0: off")
    parse_retries: int = Field(0, ge=0, le=10, description="extra attempts after a parse failure in the rollouts")

    @model_validator(mode="after")
    def _effects(self) -> Self:
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
        return checked(self, "algo")
