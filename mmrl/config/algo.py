"""`algo.*`: one schema per algorithm, so that a key which has no effect with an algorithm does not exist there."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, PrivateAttr, field_validator, model_validator

from mmrl.config.base import Idle, MethodConfig, Temperature, needs, no_lookalike
from mmrl.config.teacher import INITIAL, POLICY, STUDENT, TeacherConfig, scoring_problems

Aggregate = Literal["mean", "max", "min", "random", "tree_value"]
FACTOR = 1e30
"""Largest coefficient: times the largest reward it is still a number, and so is its square."""
MOST_SAMPLES = 100_000
"""Largest group: beyond it a typing error is likelier than a wish."""


class AlgoConfig(MethodConfig):
    """Settings of every algorithm."""

    epochs: int = Field(1, ge=1, description="passes over a batch of rollouts")
    minibatches: int = Field(1, ge=1, description="optimizer steps per pass; the batch is split by example")
    loss: Literal["clip", "cispo", "gspo"] = Field(
        "clip",
        description="clip: PPO's ratio of a token; cispo: the ratio as a bounded weight; gspo: one ratio for a "
        "whole call, with clip near 0.0003",
    )
    clip: float = Field(0.2, gt=0, lt=1, description="epsilon of the clipped ratio; cispo: of its upper bound")
    clip_high: float | None = Field(None, gt=0, description="upper epsilon (clip-higher); null: the same as clip")
    beta: float = Field(0.001, ge=0, le=FACTOR, description="weight of the KL term against the reference policy")
    loss_mean: Literal["seq", "token", "constant"] = Field("seq", description="averaging of token losses")
    loss_length: int | None = Field(
        None, ge=1, le=10_000_000, description="L_max of loss_mean=constant; null: the longest sequence of the batch"
    )
    temperature: Temperature = Field(1.0, gt=0, description="sampling temperature of training rollouts")
    top_p: float = Field(1.0, gt=0, le=1, description="nucleus sampling of training rollouts; 1: off")
    top_k: int = Field(0, ge=0, description="sample among the k likeliest tokens alone; 0: off")
    parse_retries: int = Field(0, ge=0, le=10, description="extra attempts after a parse failure in training rollouts")
    # Without it the ratio is 1 in the first optimizer step of a batch alone.
    ratio_one: bool = Field(False, description="ratio 1 in every optimizer step: no clipping, plain policy gradient")
    # Factors of modules are checked against the program's modules, which no schema knows (algorithms/checks.py).
    advantage_scale: dict[str, float] | None = Field(None, description="module: factor of its advantages, else 1")
    distill: dict[str, str] | None = Field(
        None,
        description="module: its teacher: policy, initial, a run, checkpoint, folder or hub id, or the URL of a vLLM "
        "server (docs/distillation.md)",
    )
    distill_coef: float = Field(1.0, ge=0, le=FACTOR, description="weight of the distillation in the loss")
    distill_kl: Literal["sampled", "exact"] = Field(
        "sampled", description="exact: the divergence over the whole vocabulary, for teachers that are loaded here"
    )
    privileged: dict[str, str] | None = Field(
        None,
        description="module: what its teacher reads beside the prompt: a field of the record, or a text with {fields}",
    )
    idle: ClassVar[list[Idle[Any]]] = [
        needs("loss_length", "loss_mean", "constant"),
        Idle("distill_coef distill_kl", lambda algo: algo.distill is None, "without a teacher: algo.distill"),
    ]
    # No key: `model.modules` says it.
    _left_out: frozenset[str] = PrivateAttr(frozenset())

    def leaving_out(self, modules: Collection[str]) -> AlgoConfig:
        """Return a copy of this section with `modules` out of the loss."""
        copy = self.model_copy()
        copy._left_out = frozenset(modules)
        return copy

    @property
    def left_out(self) -> Collection[str]:
        """Modules out of the loss: their tokens count in no length and no mean."""
        return self._left_out

    def exchanged_modules(self, modules: Sequence[str]) -> tuple[str, ...]:
        """Return the modules whose replies a second play of a rollout exchanges."""
        return ()

    @property
    def refills(self) -> int:
        """Most rounds in which further examples replace those without signal."""
        return 0

    @property
    def models_that_teach(self) -> dict[str, str]:
        """Module -> teacher with weights of its own, loaded here or behind a URL (`algo.distill`)."""
        return {m: t for m, t in (self.distill or {}).items() if t not in (POLICY, INITIAL)}

    @model_validator(mode="after")
    def _distilled(self) -> AlgoConfig:
        if self.distill is not None and getattr(self, "reserialise", False):
            raise ValueError("distill: teachers score sampled tokens, and reserialise trains on others; leave one out")
        if self.distill is not None and self.refills:
            raise ValueError(
                "zero_variance: got refill, which leaves out examples with equal rewards, of which the teachers of "
                "distill would teach; use drop or keep"
            )
        if problems := scoring_problems(self.distill, self.privileged, self.temperature, self.distill_kl):
            raise ValueError(*problems)
        return self


class GroupConfig(AlgoConfig):
    """Settings of group-relative algorithms."""

    group_size: int = Field(4, ge=2, le=MOST_SAMPLES, description="G: samples whose rewards are compared")
    # Papers differ in eps and ddof, and a group of four feels both; the files in conf/algo say whose value it is.
    eps: float = Field(1e-6, ge=0, description="added to the standard deviation")
    ddof: Annotated[Literal[0, 1], BeforeValidator(no_lookalike)] = Field(
        1, description="1: sample standard deviation, 0: population"
    )
    scale: Literal[True, False, "mean"] = Field(
        True, description="divide by the standard deviation (false: Dr.GRPO; mean: by the mean reward, MaxRL)"
    )
    std_over: Literal["group", "batch"] = Field("group", description="rewards whose standard deviation is divided by")
    baseline: Literal["mean", "leave_one_out"] = Field("mean", description="leave_one_out: RLOO")
    # equal rewards have advantage 0; with `keep` they still take part in means over the batch
    zero_variance: Literal["keep", "drop", "refill"] = Field(
        "keep", description="treatment of groups with equal rewards; refill: dropped, and other examples sampled"
    )
    refill_rounds: int = Field(4, ge=1, description="most rounds of further sampling in a step (zero_variance=refill)")
    idle: ClassVar[list[Idle[Any]]] = [
        needs("refill_rounds", "zero_variance", "refill"),
        needs("std_over", "scale", True),
    ]

    @property
    def refills(self) -> int:
        """Most rounds in which further examples replace those without signal."""
        return self.refill_rounds if self.zero_variance == "refill" else 0

    @property
    def drops_constant(self) -> bool:
        """True if groups with equal rewards count as not sampled."""
        return self.zero_variance != "keep"


class PenaltyConfig(AlgoConfig):
    """Settings of algorithms with penalties of modules."""

    penalties: bool = Field(True, description="false: final reward only (all R_spe = 0)")
    penalty_scale: dict[str, float] | None = Field(None, description="module: factor of its penalty (R_spe), else 1")
    idle: ClassVar[list[Idle[Any]]] = [
        Idle("penalty_scale", lambda algo: not algo.penalties, "with penalties=false; leave one of the two out")
    ]


class MhgpoConfig(GroupConfig, PenaltyConfig):
    """MHGPO (arXiv 2506.02718): backward rewards with module penalties over forked rollouts."""

    aggregate: Aggregate = Field(
        "mean",
        description="Eq. 4: how successors' rewards are aggregated at a fork; tree_value: TreeRL's value of a step",
    )
    propagate: Literal["shared", "full"] = Field("shared", description="full: a penalty is propagated backwards too")
    train_modules: tuple[str, ...] | None = Field(None, description="train only these (*X); null: all")
    freeze_modules: tuple[str, ...] = Field((), description="leave these out of the loss (-X)")
    frozen_serving: bool = Field(
        False, description="modules out of the loss act with the initial weights, not the current"
    )
    idle: ClassVar[list[Idle[Any]]] = [
        Idle(
            "propagate",
            lambda algo: algo.aggregate == "tree_value",
            "with aggregate=tree_value; leave one of the two out",
        )
    ]

    def trains(self, module: str) -> bool:
        """True if the module is in the loss."""
        trained = self.train_modules is None or module in self.train_modules
        return trained and module not in self.freeze_modules

    def leaving_out(self, modules: Collection[str]) -> AlgoConfig:
        """Freeze the modules too: MHGPO divides by the number of trained slots."""
        return self.model_copy(update={"freeze_modules": tuple(dict.fromkeys((*self.freeze_modules, *modules)))})

    @property
    def left_out(self) -> Collection[str]:
        """See `AlgoConfig.left_out`."""
        return self.freeze_modules

    @property
    def serves_initial(self) -> bool:
        """True if modules out of the loss act with the initial weights."""
        return self.frozen_serving


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
    regroup: Literal["by_agent_fork", "agent_chunks", "alg3"] = Field(
        "by_agent_fork", description="how calls that have no siblings are grouped over the batch (docs/mhgpo.md)"
    )

    @model_validator(mode="after")
    def _probs(self) -> MhgpoRrConfig:
        probs = self.fork_probs
        # 1e-6: what is typed as .7,.1,.2 does not sum to 1 in binary
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


class GrpoConfig(GroupConfig):
    """GRPO on the outcome reward alone (GRPO-OR)."""

    name: Literal["grpo"]


class GrpoMrConfig(GroupConfig):
    """GRPO on outcome and turn rewards merged into one number (GRPO-MR)."""

    name: Literal["grpo_mr"]


class DistillConfig(AlgoConfig):
    """On-policy distillation alone: the teachers' log-probabilities are the whole signal."""

    name: Literal["distill"]
    distill: dict[str, str] = Field(
        description="module: its teacher: policy, initial, a run, checkpoint, folder or hub id, or the URL of a vLLM "
        "server (docs/distillation.md)"
    )
    distill_coef: float = Field(1.0, gt=0, le=FACTOR, description="weight of the distillation in the loss")
    group_size: int = Field(1, ge=1, le=MOST_SAMPLES, description="rollouts of an example")
    beta: float = Field(0.0, ge=0, le=0, description="0: there is no KL term beside the teacher's")
    idle: ClassVar[list[Idle[Any]]] = [
        Idle("advantage_scale", lambda algo: algo.advantage_scale is not None, "with algo=distill, which compares none")
    ]


class DrMasConfig(GroupConfig):
    """Dr.MAS (arXiv 2602.08847): all calls of a module in an example are one group."""

    name: Literal["dr_mas"]


class C3Config(GroupConfig):
    """C3 (arXiv 2603.06859): each call of the plan against further samples of it, by what comes after them."""

    name: Literal["c3"]
    fanout: dict[str, int] | None = Field(
        None,
        description="module or module:invocation (from 0; typed {a\\:1: 3}): samples of that call; null: 2 of each "
        "module's first, group_size of the last module's",
    )
    group_size: int = Field(4, ge=2, le=MOST_SAMPLES, description="samples of the last module's first call")
    max_leaves: int = Field(
        64, ge=2, le=MOST_SAMPLES, description="most rollouts of an example, or the plan is refused"
    )
    siblings: Literal["parent", "depth"] = Field(
        "parent", description="calls that are compared: samples of one call; depth: all of a module and invocation"
    )
    baseline: Literal["mean", "leave_one_out"] = Field("leave_one_out", description="leave_one_out: RLOO")
    scale: Literal[True, False, "mean"] = Field(
        False, description="divide by the standard deviation, which biases; mean: by the mean value"
    )
    idle: ClassVar[list[Idle[Any]]] = [
        Idle("group_size", lambda algo: algo.fanout is not None, "with fanout, which says all numbers of samples")
    ]

    @field_validator("fanout")
    @classmethod
    def _widths(cls, fanout: dict[str, int] | None) -> dict[str, int] | None:
        seen: dict[tuple[str, int], str] = {}
        for key, width in (fanout or {}).items():
            if not re.fullmatch(r"[^:]+(:[0-9]{1,6})?", key):
                raise ValueError(f"got '{key}', expected a module, or module:invocation with a number from 0")
            if not 1 <= width <= MOST_SAMPLES:
                raise ValueError(f"{key}: got {width}, expected 1 to {MOST_SAMPLES} samples")
            if (other := seen.setdefault(_call_of(key), key)) != key:
                raise ValueError(f"got '{other}' and '{key}', which are the same call; leave one of the two out")
        if fanout is not None and not any(width > 1 for width in fanout.values()):
            raise ValueError(f"got {fanout}, with which no call is compared; expected at least one with 2 samples")
        return fanout

    def widths(self, modules: Sequence[str]) -> dict[tuple[str, int], int]:
        """Return the numbers of samples of the calls that are named: (module, invocation) -> samples."""
        default = dict.fromkeys(modules[:-1], 2) | {modules[-1]: self.group_size}
        fanout = default if self.fanout is None else self.fanout
        return {_call_of(key): width for key, width in fanout.items()}


def _call_of(key: str) -> tuple[str, int]:
    """Return module and invocation of a key of `algo.fanout`."""
    module, _, invocation = key.partition(":")
    return module, int(invocation or 0)


class CcpoConfig(GroupConfig):
    """Counterfactual credit after CCPO (arXiv 2603.21563): a module's calls against the rollout without its replies."""

    name: Literal["ccpo"]
    exchanged: tuple[str, ...] | None = Field(
        None, description="whose replies a second play exchanges; null: all but the last"
    )
    reply: str = Field("", description="text that replaces their replies")
    teachers: tuple[TeacherConfig, ...] | None = Field(
        None, max_length=1, description="one, whose weights or endpoint reply in their place; null: algo.reply does"
    )
    program: str | None = Field(
        None,
        description="package.module:name of a program that plays the second time; null: the task's, from their first "
        "call on",
    )
    credit: Literal["bonus", "difference"] = Field(
        "bonus",
        description="bonus: outcome ± bonus_coef where the exchange decides success; difference: outcome minus "
        "the exchanged rollout's",
    )
    bonus_coef: float = Field(0.2, ge=0, le=FACTOR, description="lambda of credit=bonus")
    success: float = Field(0.5, ge=-FACTOR, le=FACTOR, description="outcome above which a rollout has succeeded")
    scale: Literal[True, False, "mean"] = Field(
        False, description="divide by the standard deviation, which washes small bonuses out; mean: by the mean reward"
    )
    idle: ClassVar[list[Idle[Any]]] = [
        needs("bonus_coef success", "credit", "bonus"),
        needs("reply teachers", "program", None),
        Idle("reply", lambda algo: algo.teachers is not None, "with teachers; leave one of the two out"),
    ]

    def exchanged_modules(self, modules: Sequence[str]) -> tuple[str, ...]:
        """Return the modules whose replies a second play exchanges: the named ones, else all but the last."""
        return tuple(modules[:-1]) if self.exchanged is None else self.exchanged

    @model_validator(mode="after")
    def _teacher(self) -> Self:
        for teacher in self.teachers or ():
            idle = [key for key in ("prompts", "rollouts") if getattr(teacher, key) is not None]
            if teacher.name == STUDENT or idle:
                got = " and ".join(idle) or f"name={STUDENT}"
                raise ValueError(f"teachers: got {got}, expected [{{name: other, policy: P}}], or an endpoint")
        return self


class GigpoConfig(GroupConfig):
    """GiGPO (arXiv 2505.10978): whole rollouts are compared, and so are the calls that were made in the same state."""

    name: Literal["gigpo"]
    gamma: float = Field(0.95, ge=0, le=1, description="discount of later rewards in a call's return, per call")
    step_coef: float = Field(1.0, ge=0, le=FACTOR, description="w: coefficient of the advantage within a state")
    count: Literal["rollout", "call"] = Field(
        "rollout", description="what mean and std of the rollouts count: each rollout once, or once for each call"
    )
    similarity: float | None = Field(
        None, gt=0, lt=1, description="states named this alike are one (difflib's ratio); null: the same name alone"
    )


class IgpoConfig(GroupConfig):
    """IGPO (arXiv 2510.14967): turns are rewarded by what they add to the probability of the gold answer."""

    name: Literal["igpo"]
    gamma: float = Field(1.0, ge=0, le=1, description="discount of later turns' normalised rewards, per turn")
    normalise: Literal["joint", "separate"] = Field(
        "joint", description="an example's turn rewards and outcomes in one group, or in a group each"
    )


class TreeGrpoConfig(GroupConfig):
    """Tree-GRPO (arXiv 2509.21240): trees that grow at drawn calls; leaves compared in their tree and in all."""

    name: Literal["tree_grpo"]
    trees: int = Field(2, ge=1, le=MOST_SAMPLES, description="M: trees of an example")
    nodes: int = Field(2, ge=1, le=MOST_SAMPLES, description="N: calls drawn in a tree, from which a round goes on")
    rounds: int = Field(1, ge=1, le=MOST_SAMPLES, description="L: rounds in which a tree grows")
    group_size: int = Field(3, ge=1, le=MOST_SAMPLES, description="K: leaves kept of each tree")

    @model_validator(mode="after")
    def _leaves(self) -> Self:
        leaves = 1 + self.nodes * self.rounds
        if self.group_size > leaves:
            raise ValueError(f"group_size: got {self.group_size}, a tree has {leaves} leaves (1 + nodes · rounds)")
        if self.trees * self.group_size < 2:
            raise ValueError("group_size: got 1 with trees=1, and one rollout is compared with nothing; expected more")
        return self


class TurnGroupConfig(GroupConfig):
    """Settings of the MT-GRPO algorithms."""

    alpha: float = Field(1.0, ge=0, le=1, description="discount of later turns' advantages, per turn")
    turn_coef: float = Field(1.0, ge=0, le=FACTOR, description="coefficient of the intermediate turns' advantages")


class MtGrpoConfig(TurnGroupConfig):
    """MT-GRPO with its two-turn rules (arXiv 2505.11821)."""

    name: Literal["mt_grpo"]
    no_tool: Literal["combined", "outcome"] = Field(
        "combined", description="a rollout without a tool result: the merged advantage, or the outcome's alone"
    )
    missing_turn: Literal["zero", "exclude"] = Field(
        "zero", description="such a rollout in the first turn's mean and std: with reward 0, or not at all"
    )


class MtGrpoVariableConfig(TurnGroupConfig):
    """MT-GRPO for any number of turns."""

    name: Literal["mt_grpo_variable"]
    missing_turn: Literal["absorb", "zero", "exclude"] = Field(
        "absorb",
        description="a rollout that ended before a turn, in the turn's mean: with reward 0 and credit for it (absorb), "
        "with reward 0, or not at all",
    )


class MmgrpoConfig(GroupConfig):
    """mmGRPO (arXiv 2508.04660): groups by module and invocation, padded, optionally the k most diverse."""

    name: Literal["mmgrpo"]
    rollouts: int = Field(12, ge=2, le=MOST_SAMPLES, description="R: rollouts per example")
    # the base's G is a number; here null is a value of its own (no selection), so the type is wider
    group_size: int | None = Field(None, ge=2, description="G: keep the G most diverse of a group; null: all R")  # type: ignore[assignment]
    teachers: tuple[TeacherConfig, ...] | None = Field(
        None, description="programs that make the R rollouts, one after the other; null: the student alone"
    )
    reserialise: bool = Field(False, description="train on a reply's canonical text, not on the sampled tokens")
    padding_mode: Literal["fill", "truncate", "ragged"] = Field("fill", description="where numbers of calls differ")
    filler: Literal["randint", "max"] = Field("randint", description="call that fills a gap: a random one, or the last")
    fill_source: Literal["rollout", "group"] = Field("rollout", description="source of calls that fill a gap")
    on_missing: Literal["drop_rollout", "skip_example"] = Field(
        "drop_rollout", description="a rollout that never calls a module: left out, or the module is skipped"
    )
    failing_traces: Literal["failing_only", "trajectory"] = Field(
        "failing_only", description="calls that are trained of a rollout that failed to parse"
    )
    # YAML's truth value stands for the word of `algo.failing_index=true`.
    failing_index: Annotated[
        Literal["zero", "true"], BeforeValidator(lambda value: "true" if value is True else value)
    ] = Field("zero", description="invocation under which a failing call is grouped: the first, or its true one")
    format_failure_score: float = Field(
        -1.0, ge=-FACTOR, le=FACTOR, description="reward of a failing call with no field"
    )
    format_failure_best: float = Field(
        0.0, ge=-FACTOR, le=FACTOR, description="limit to which that reward rises with the share of fields present"
    )
    max_context: int | None = Field(8192, ge=1, description="longest prompt + completion that is trained on")
    overlong: Literal["datapoint", "trajectory"] = Field("datapoint", description="left out where one is longer")
    idle: ClassVar[list[Idle[Any]]] = [
        needs("filler fill_source", "padding_mode", "fill"),
        needs("filler", "fill_source", "rollout"),
        needs("failing_index", "padding_mode", "ragged"),
        needs("failing_index", "failing_traces", "failing_only"),
        Idle(
            "overlong", lambda algo: algo.max_context is None, "with max_context=null; set max_context or leave it out"
        ),
    ]

    @model_validator(mode="after")
    def _shares(self) -> Self:
        if self.group_size is not None and self.group_size > self.rollouts:
            raise ValueError(f"group_size: got {self.group_size}, expected at most rollouts={self.rollouts}")
        if self.teachers is None:
            return self
        # Each teacher makes a fixed share of an example's R rollouts, so the shares have to sum up to R beforehand.
        names = [teacher.name for teacher in self.teachers]
        counts = [teacher.rollouts for teacher in self.teachers if teacher.rollouts is not None]
        if len(set(names)) < len(names):
            raise ValueError(f"teachers: got {', '.join(names)}, expected a different name for each")
        even = bool(names) and self.rollouts % len(names) == 0
        if not (len(counts) == len(names) and sum(counts) == self.rollouts if counts else even):
            raise ValueError(
                f"teachers: got {len(names)} with {counts} rollouts, expected rollouts for each that sum to "
                f"rollouts={self.rollouts}, or for none and a number of teachers that divides it"
            )
        return self

    def shares(self) -> dict[str, int]:
        """Return the rollouts per example of each teacher, in sampling order."""
        teachers = self.teachers or (TeacherConfig(name=STUDENT),)
        return {t.name: t.rollouts or self.rollouts // len(teachers) for t in teachers}


class CriticConfig(AlgoConfig):
    """Settings of algorithms with a critic."""

    loss_mean: Literal["seq", "token", "constant"] = Field("token", description="averaging of token losses")
    gamma: float = Field(1.0, ge=0, le=1, description="discount per token")
    gae_lambda: float = Field(1.0, ge=0, le=1, description="lambda of generalised advantage estimation")
    kl: Literal["reward", "loss"] = Field("reward", description="where the KL term goes: k1 per token, or k3")
    critic: Literal["separate", "adapter", "head"] = Field(
        "separate", description="copy of the backbone; second LoRA adapter on the policy's; head on its hidden states"
    )
    # a factor, so that one search over train.lr moves both networks
    critic_lr_factor: float = Field(
        10.0, ge=0, description="the critic's learning rate over train.lr; constant after its warm-up"
    )
    critic_warmup_steps: int = Field(0, ge=0, description="optimizer steps of linear warm-up of the critic")
    critic_init: Literal["random", "zero"] = Field(
        "random", description="weights of the new value head; zero: values begin at 0, advantages as returns"
    )
    value_clip: float = Field(0.5, gt=0, description="how far a value may move from its old one in the value loss")


class MappoConfig(CriticConfig, PenaltyConfig):
    """MAPPO: one critic for all modules, advantages estimated within each call."""

    name: Literal["mappo"]
    whiten: Literal["trained", "none"] = Field("trained", description="tokens that advantages are whitened over")


_SKIPS = "with obs=skip, which passes over observation tokens"


class TurnCriticConfig(CriticConfig):
    """Settings of PPO and MT-PPO, where a rollout's calls form one sequence."""

    values_rollouts: ClassVar[bool] = True
    obs: Literal["skip", "all"] = Field("skip", description="tokens that the estimation runs over: sampled, or all")
    position: Literal["last_generated", "turn_end"] = Field(
        "last_generated", description="token that carries a turn's reward; turn_end: its last observation token"
    )
    whiten: Literal["trained", "all", "none"] = Field(
        "trained", description="tokens that advantages are whitened over; all: observations too"
    )
    # obs=skip leaves observation tokens out of the sequence, so nothing can be placed or averaged on them
    idle: ClassVar[list[Idle[Any]]] = [
        Idle("position", lambda algo: algo.obs == "skip", f"{_SKIPS}: turn_end needs obs=all"),
        Idle("whiten", lambda algo: algo.obs == "skip" and algo.whiten == "all", f"{_SKIPS}: all needs obs=all"),
    ]


class PpoConfig(TurnCriticConfig):
    """PPO on the outcome reward."""

    name: Literal["ppo"]


class MtPpoConfig(TurnCriticConfig):
    """PPO with a reward at the end of every turn (arXiv 2505.11821)."""

    name: Literal["mt_ppo"]
    whiten_within: Literal["batch", "turn"] = Field(
        "batch", description="turn: advantages of the last turns are whitened apart from those of the turns before"
    )
    idle: ClassVar[list[Idle[Any]]] = [
        Idle("whiten_within", lambda algo: algo.whiten == "none", "with whiten=none; leave one of the two out")
    ]


ALGO_SCHEMAS: dict[str, type[AlgoConfig]] = {
    "c3": C3Config,
    "ccpo": CcpoConfig,
    "distill": DistillConfig,
    "dr_mas": DrMasConfig,
    "gigpo": GigpoConfig,
    "grpo": GrpoConfig,
    "grpo_mr": GrpoMrConfig,
    "igpo": IgpoConfig,
    "mappo": MappoConfig,
    "mhgpo_fof": MhgpoFofConfig,
    "mhgpo_fof_os": MhgpoFofOsConfig,
    "mhgpo_is": MhgpoIsConfig,
    "mhgpo_rr": MhgpoRrConfig,
    "mmgrpo": MmgrpoConfig,
    "mt_grpo": MtGrpoConfig,
    "mt_grpo_variable": MtGrpoVariableConfig,
    "mt_ppo": MtPpoConfig,
    "ppo": PpoConfig,
    "tree_grpo": TreeGrpoConfig,
}
"""Plug point: algorithm name -> schema. The same names are in `mmrl.algorithms.ALGORITHMS` and in `conf/algo/`."""
