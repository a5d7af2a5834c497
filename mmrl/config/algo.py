"""`algo.*`: one schema per algorithm, so that a key which has no effect with an algorithm does not exist there."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from mmrl.config.base import Section

Aggregate = Literal["mean", "max", "min", "random"]


class AlgoConfig(Section):
    """What every algorithm has."""

    name: str
    epochs: int = Field(1, ge=1, description="passes over a batch of rollouts")
    minibatches: int = Field(1, ge=1, description="optimizer steps per pass; the batch is split by example")
    clip: float = Field(0.2, gt=0, lt=1, description="epsilon of the clipped ratio")
    clip_high: float | None = Field(None, gt=0, description="upper epsilon (clip-higher); null: the same as clip")
    beta: float = Field(0.001, ge=0, description="weight of the KL term against the reference policy")
    loss_mean: Literal["seq", "token", "constant"] = Field("seq", description="how token losses are averaged")
    loss_length: int | None = Field(
        None, ge=1, description="L_max that loss_mean=constant divides by; null: the longest sequence of the batch"
    )
    temperature: float = Field(1.0, gt=0, description="sampling temperature of training rollouts")
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0)
    parse_retries: int = Field(0, ge=0, le=10, description="extra attempts after a parse failure in training rollouts")

    @model_validator(mode="after")
    def _length(self) -> Self:
        if self.loss_length is not None and self.loss_mean != "constant":
            raise ValueError(
                f"loss_length: got {self.loss_length}, which has no effect with loss_mean={self.loss_mean}; "
                "set loss_mean=constant or leave it out"
            )
        return self


class GroupConfig(AlgoConfig):
    """What group-relative algorithms have."""

    group_size: int = Field(4, ge=2, description="G: samples whose rewards are compared")
    eps: float = Field(1e-6, ge=0, description="added to the standard deviation")
    ddof: Literal[0, 1] = 1
    scale: bool = Field(True, description="divide by the standard deviation (false: Dr.GRPO)")
    std_over: Literal["group", "batch"] = Field("group", description="rewards whose standard deviation is divided by")
    baseline: Literal["mean", "leave_one_out"] = Field("mean", description="leave_one_out: RLOO")
    zero_variance: Literal["keep", "drop"] = Field("keep", description="what becomes of groups with equal rewards")

    @model_validator(mode="after")
    def _std(self) -> Self:
        if not self.scale and self.std_over == "batch":
            raise ValueError(
                "std_over: got batch, which has no effect with scale=false; set scale=true or leave it out"
            )
        return self


class MhgpoConfig(GroupConfig):
    """MHGPO (arXiv 2506.02718): backward rewards with module penalties over forked rollouts."""

    aggregate: Aggregate = Field("mean", description="Eq. 4: how successors' rewards are aggregated at a fork")
    propagate: Literal["shared", "full"] = Field("shared", description="whether a penalty is propagated backwards too")
    penalties: bool = Field(True, description="false: final reward only (all R_spe = 0)")
    train_modules: tuple[str, ...] | None = Field(None, description="train only these (*X); null: all")
    freeze_modules: tuple[str, ...] = Field((), description="leave these out of the loss (-X)")


class MhgpoIsConfig(MhgpoConfig):
    """Independent sampling: fork at each module in turn, keep the forked module's calls."""

    name: Literal["mhgpo_is"]


class MhgpoFofConfig(MhgpoConfig):
    """Fork on first."""

    name: Literal["mhgpo_fof"]


class MhgpoRrConfig(MhgpoConfig):
    """Round robin: fork at a drawn module; single calls regrouped over the batch."""

    name: Literal["mhgpo_rr"]
    fork_probs: tuple[float, ...] | None = Field(
        None, description="probability of forking at each module, in order; null: (.7,.1,.2) for three, else uniform"
    )
    regroup: Literal["by_agent_fork", "agent_chunks", "alg3"] = "by_agent_fork"

    @model_validator(mode="after")
    def _probs(self) -> MhgpoRrConfig:
        probs = self.fork_probs
        if probs is not None and (any(p < 0 for p in probs) or abs(sum(probs) - 1) > 1e-6):
            raise ValueError(
                f"fork_probs: got {list(probs)} (sum {sum(probs):g}), expected non-negative numbers that sum to 1"
            )
        return self


class MhgpoFofOsConfig(MhgpoConfig):
    """Fork on first, with the last module over-sampled G times per branch."""

    name: Literal["mhgpo_fof_os"]
    os_group: Literal["example", "parent"] = Field(
        "example", description="group of the over-sampled last module: all G^2 of an example, or G per branch"
    )


ALGO_SCHEMAS: dict[str, type[AlgoConfig]] = {
    "mhgpo_is": MhgpoIsConfig,
    "mhgpo_fof": MhgpoFofConfig,
    "mhgpo_rr": MhgpoRrConfig,
    "mhgpo_fof_os": MhgpoFofOsConfig,
}
"""Plug point: algorithm name -> schema. The same names are in `mmrl.algorithms.ALGORITHMS` and in `conf/algo/`."""
