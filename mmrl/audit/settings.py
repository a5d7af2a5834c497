"""Keys of `mmrl audit`; all others are settings of its rows, as in `mmrl train`."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from mmrl.config.base import Section

BLOCKS = 16
"""Blocks of the reference gradient: how they agree says whether it can be measured."""
LEAST_RUNS = 3
"""Gradients of a budget that an interval is taken over."""


class AuditKeys(Section):
    """What is measured, and how closely."""

    algo: tuple[Annotated[str, Field(pattern=r"^[\w./-]+$")], ...] = Field(min_length=1, description="the rows")
    policy: str | None = Field(None, min_length=1, description="a training run or a checkpoint of one; null: model=")
    examples: int = Field(32, ge=2, description="of the train split, drawn by seed")
    decisions: int = Field(4, ge=1, description="calls for each example whose truth is measured, by modules alike")
    continuations: int = Field(16, ge=2, description="of each such call; half as many other replies, each twice")
    batches: int = Field(16, ge=3, description="gradients of each row at budget 1")
    budgets: tuple[Annotated[int, Field(ge=1, strict=False)], ...] = Field(
        (1, 4), min_length=1, description="calls behind a gradient, in units of the dearest row's batch"
    )
    reference: int = Field(64, description="rollouts of each example behind the reference gradient")
    truth: Literal["outcome", "reward"] = Field("outcome", description="reward: what the rows optimise, with penalties")
    out: str | None = Field(None, min_length=1, description="folder; null: one below outputs/audits, by the settings")

    @field_validator("algo")
    @classmethod
    def _once(cls, algo: tuple[str, ...]) -> tuple[str, ...]:
        if repeated := [name for name in dict.fromkeys(algo) if algo.count(name) > 1]:
            raise ValueError(f"got {repeated[0]} more than once")
        return algo

    @field_validator("budgets")
    @classmethod
    def _nested(cls, budgets: tuple[int, ...]) -> tuple[int, ...]:
        if any(after % before or after == before for before, after in pairwise(budgets)):
            got = ",".join(map(str, budgets))
            raise ValueError(f"got {got}, expected each to be a multiple of the one before, such as 1,4,16")
        return budgets

    @model_validator(mode="after")
    def _enough(self) -> AuditKeys:
        problems = []
        most = self.budgets[-1]
        if self.batches // most < LEAST_RUNS:
            problems.append(
                f"budgets: got {most}, of which batches={self.batches} has {self.batches // most}, too few for an "
                f"interval; expected batches={LEAST_RUNS * most} or more, or smaller budgets"
            )
        if self.reference < 2 * BLOCKS or self.reference % BLOCKS:
            problems.append(f"reference: got {self.reference}, expected a multiple of {BLOCKS}, at least {2 * BLOCKS}")
        if problems:
            raise ValueError(*problems)
        return self

    @property
    def replies(self) -> int:
        """n: replies in the place of an audited one, each continued twice."""
        return max(2, self.continuations // 2)
