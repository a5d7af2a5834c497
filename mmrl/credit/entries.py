"""Records of credit: groups of sequences that are compared, and entries, which put a call into the loss.

A group carries its rewards, then its advantages, then its weights; its entries go to the trainer and to people.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from mmrl.records import EMPTY, Call


@dataclass(frozen=True, slots=True)
class Reward:
    """A reward that is compared or estimated with, and its summands."""

    total: float
    parts: Mapping[str, float] = EMPTY


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A loss entry of a call. Per-token tuples have the call's `completion_tokens` (T) as length."""

    call: str
    """Call id."""
    reward: float
    """R of the call as compared within its group (PPO family: sum of its token rewards)."""
    parts: Mapping[str, float] = EMPTY
    """Summands of `reward` (`shared`, `penalty`, `turn`, `outcome`, ...)."""
    group: str | None = None
    """Group id; None for the PPO family and for calls without a group."""
    group_size: int = 0
    mean: float | None = None
    """Mean reward of the group."""
    std: float | None = None
    """Standard deviation that the group was divided by."""
    advantages: tuple[float, ...]
    """Advantage of each token, for the trainer, length T."""
    weights: tuple[float, ...]
    """Loss weight per token, length T; 0 for an entry that is left out of the loss."""
    filler_of: str | None = None
    """For a repeated entry: id of the call whose entry it repeats (its own id)."""
    returns: tuple[float, ...] | None = None
    """Critic targets (PPO family), length T."""
    raw_advantages: tuple[float, ...] | None = None
    """Advantages before whitening (PPO family), length T."""
    token_rewards: tuple[float, ...] | None = None
    """Reward per token (PPO family), length T."""
    distilled: bool = False
    """True for the entry of `algo.distill`: no reward, no group, no KL term and no critic has a part in it."""


@dataclass(frozen=True, slots=True)
class Member:
    """A sequence of a group: a call, or all calls of a rollout."""

    calls: tuple[Call, ...]
    reward: Reward
    filler: bool = False
    """Added by padding: repeats an entry of the same call."""
    caught: bool = False
    """A call that could not be parsed and after which its program went on."""
    advantage: float = 0.0
    weight: float = 0.0
    """Loss weight of each token."""

    @property
    def call(self) -> Call:
        """Call with the reward: the only one, or the rollout's last."""
        return self.calls[-1]

    def tokens(self, left_out: Collection[str] = ()) -> int:
        """Return |o|: tokens of all calls, but for those of modules out of the loss."""
        return sum(call.completion_tokens for call in self.calls if call.module not in left_out)


@dataclass(frozen=True, slots=True)
class Group:
    """Members whose rewards are compared, and the statistics of the comparison."""

    id: str
    members: tuple[Member, ...]
    mean: float | None = None
    std: float | None = None
    """Divisor of the rewards (without eps); None for a group of one and with `scale=False`."""
    constant: bool = False
    """True if all rewards are equal: every advantage is 0."""
    is_dropped: bool = False
    """Without any advantage under `zero_variance=drop` (or `refill`): treated as if it had not been sampled."""

    @property
    def is_singleton(self) -> bool:
        """Compared with nothing: no advantage is defined, it stays out of the loss."""
        return len(self.members) < 2

    def entries(self) -> list[Entry]:
        """Return an entry per call of each member."""
        return [
            self.entry(call, member.reward, member.advantage, member.weight, filler=member.filler)
            for member in self.members
            for call in member.calls
        ]

    def entry(self, call: Call, reward: Reward, advantage: float, weight: float, *, filler: bool = False) -> Entry:
        """Return the entry of a call whose reward was compared here, with one advantage and weight for its tokens."""
        return Entry(
            call=call.id,
            reward=reward.total,
            parts=reward.parts,
            group=self.id,
            group_size=len(self.members),
            mean=self.mean,
            std=self.std,
            advantages=(advantage,) * call.completion_tokens,
            weights=(weight,) * call.completion_tokens,
            filler_of=call.id if filler else None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Credit:
    """Result of an algorithm's `credit` over one forest."""

    algo: str
    entries: tuple[Entry, ...]
    groups: tuple[Group, ...] | None = None
    """Groups that were compared; None for the PPO family."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Further credit metrics, keys as in docs/metrics.md; those of the groups are made for every algorithm alike."""
