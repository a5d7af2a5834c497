"""Groups to entries: normalise, weigh, and write one `Entry` per place that a call takes in the loss.

What the group-relative algorithms over calls (mmGRPO, MHGPO) share; each says only what its groups and shares are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mmrl.config.algo import GroupConfig
from mmrl.credit.advantages import Normalised, normalise, std_of
from mmrl.credit.entries import Entry
from mmrl.credit.groups import Group, Member
from mmrl.credit.rewards import Reward
from mmrl.records import Call, Forest


@dataclass(frozen=True, slots=True)
class Compared:
    """A group with its statistics."""

    group: Group
    result: Normalised
    vanished: bool
    """A zero-variance group under `zero_variance=drop` (or `refill`): treated as if it had not been sampled."""

    @property
    def kept(self) -> bool:
        """Whether the group is in the loss."""
        return not (self.result.dropped or self.vanished)


def compare(groups: Iterable[Group], algo: GroupConfig) -> list[Compared]:
    """Normalise every group as `algo` says (eps, ddof, scale, std_over, baseline, zero_variance)."""
    groups = list(groups)
    found = []
    batch_std = batch_std_of([[m.reward.total for m in group.members] for group in groups], algo)
    for group in groups:
        result = normalise_as(algo, [member.reward.total for member in group.members], batch_std)
        found.append(Compared(group, result, result.constant and algo.drops_constant))
    return found


def normalise_as(algo: GroupConfig, rewards: Sequence[float], batch_std: float | None) -> Normalised:
    """`normalise` with the options of a config section."""
    return normalise(
        rewards, eps=algo.eps, ddof=algo.ddof, scale=algo.scale, baseline=algo.baseline, batch_std=batch_std
    )


def batch_std_of(groups: Sequence[Sequence[float]], algo: GroupConfig) -> float | None:
    """Standard deviation over all groups that have one, for `std_over=batch`; else None."""
    if algo.std_over != "batch":
        return None
    return std_of([reward for group in groups if len(group) > 1 for reward in group], algo.ddof)


def entry(member: Member, compared: Compared, index: int, weight: float) -> Entry:
    """The entry of the `index`-th member of a compared group."""
    tokens = member.call.completion_tokens
    return Entry(
        call=member.call.id,
        reward=member.reward.total,
        parts=member.reward.parts,
        group=compared.group.id,
        group_size=len(compared.group.members),
        mean=compared.result.mean,
        std=compared.result.std,
        advantages=(compared.result.advantages[index],) * tokens,
        weights=(weight,) * tokens,
        filler_of=member.call.id if member.filler else None,
    )


def left_out(call: Call, reward: Reward) -> Entry:
    """The entry of a call that has a reward and no group: shown to people, weight 0."""
    zeros = (0.0,) * call.completion_tokens
    return Entry(call=call.id, reward=reward.total, parts=reward.parts, advantages=zeros, weights=zeros)


def group_metrics(forest: Forest, compared: Sequence[Compared]) -> dict[str, float]:
    """Credit metrics of a step (docs/metrics.md)."""
    sized = [item for item in compared if not item.result.dropped]
    metrics = {
        "credit/groups": float(len(sized)),
        "credit/groups_of_one": float(len(compared) - len(sized)),
        "credit/zero_variance_share": _share([item.result.constant for item in sized]),
    }
    for module in forest.modules:
        own = [item for item in sized if any(member.call.module == module for member in item.group.members)]
        if own:
            metrics[f"credit/{module}/zero_variance_share"] = _share([item.result.constant for item in own])
    return metrics


def _share(flags: Sequence[bool]) -> float:
    return sum(flags) / len(flags) if flags else 0.0
