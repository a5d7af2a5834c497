"""Refilling a step: examples whose groups carry no signal make way for others (`algo.zero_variance=refill`).

Part of the weight stage. Dynamic sampling as in DAPO (arXiv 2503.14476, Sec. 3.2), on any group-relative algorithm:
after a round of sampling, credit says which examples have a call with an advantage; as many further examples as are
missing are sampled, in at most `algo.refill_rounds` rounds. Which ones is a function of (run seed, step) alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from mmrl import rng
from mmrl.config import AlgoConfig
from mmrl.config.algo import GroupConfig
from mmrl.credit.entries import Credit
from mmrl.records import Call, Example, Forest


@dataclass(frozen=True, slots=True)
class Filled:
    """What the rounds of one step made."""

    forest: Forest
    """Everything sampled, for the journal: `meta["refill"]` says how many rounds there were and what was not kept."""
    kept: tuple[Example, ...]
    """The examples that the step trains on: `batch_size` at most, those with signal first sampled first."""
    rounds: int
    """Rounds of further sampling."""

    @property
    def trained(self) -> Forest:
        """The part of the forest that belongs to the kept examples."""
        return only(self.forest, [example.id for example in self.kept])

    def metrics(self) -> dict[str, float]:
        """How much sampling it took (docs/metrics.md)."""
        sampled = len(self.forest.examples)
        return {
            "refill/rounds": float(self.rounds),
            "refill/examples": float(sampled),
            "refill/kept_share": len(self.kept) / sampled if sampled else 0.0,
        }


def refills(algo: AlgoConfig) -> bool:
    """Whether the config asks for it."""
    return isinstance(algo, GroupConfig) and algo.zero_variance == "refill"


def refill(
    first: Sequence[Example],
    pool: Sequence[Example],
    sample: Callable[[Sequence[Example]], Forest],
    credit: Callable[[Forest], Credit],
    *,
    rounds: int,
    key: rng.Key,
) -> Filled:
    """Sample until as many examples as in `first` carry signal, or the rounds or the pool are used up.

    Args:
        first: the step's own batch.
        pool: all training examples.
        sample: makes the forest of some examples.
        credit: credits a forest; decides what has signal.
        rounds: most rounds after the first.
        key: (run seed, step).
    """
    own = {example.id for example in first}
    waiting = [example for example in pool if example.id not in own]
    rng.stream(*key, "refill").shuffle(waiting)
    asked = list(first)
    forest = sample(first)
    found = with_signal(forest, credit(forest))
    done = 0
    while len(found) < len(first) and done < rounds and waiting:
        missing = len(first) - len(found)
        chosen, waiting = waiting[:missing], waiting[missing:]
        forest = joined(forest, sample(chosen))
        asked += chosen
        found = with_signal(forest, credit(forest))
        done += 1
    kept = tuple(example for example in asked if example.id in found)[: len(first)]
    names = {example.id for example in kept}
    meta = {"rounds": done, "left_out": [example.id for example in asked if example.id not in names]}
    return Filled(replace(forest, meta={**forest.meta, "refill": meta}), kept, done)


def with_signal(forest: Forest, credit: Credit) -> set[str]:
    """Examples with a token whose advantage and weight are both other than 0."""
    return {
        forest.calls[entry.call].example
        for entry in credit.entries
        if any(a and w for a, w in zip(entry.advantages, entry.weights, strict=True))
    }


def joined(first: Forest, second: Forest) -> Forest:
    """Both forests as one; they share no example."""
    return replace(first, calls={**first.calls, **second.calls}, rollouts=(*first.rollouts, *second.rollouts))


def only(forest: Forest, examples: Sequence[str]) -> Forest:
    """The part of a forest that belongs to some examples."""
    chosen = set(examples)
    calls: dict[str, Call] = {key: call for key, call in forest.calls.items() if call.example in chosen}
    rollouts = tuple(rollout for rollout in forest.rollouts if rollout.example in chosen)
    return replace(forest, calls=calls, rollouts=rollouts)
