"""Programs small enough to enumerate: what their decisions are truly worth, in plain Python.

A reply is one of a few words, and the policy is a table: a softmax over the replies for each history, with parameters
of its own (`tabular_model` has it as a model that engine and trainer take). So values, advantages, the policy gradient
and each module's influence are sums over a few dozen paths.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from mmrl import rng
from mmrl.records import Call, Example, Forest
from mmrl.tasks.base import Score, Task
from tests.helpers.forests import Grow

History = tuple[int, ...]
"""The replies so far, of all modules."""
Outcome = Callable[[int, History], float]
"""Number of the example and all replies of a rollout -> its outcome."""


def word(history: History) -> str:
    """The prompt of the call after these replies: one word, which is one token."""
    return "h" + "".join(map(str, history))


@dataclass(frozen=True)
class Table:
    """A program, and the policy that plays it. Prompts do not name the example: all examples share the table."""

    replies: Mapping[str, int]
    """Module -> number of its replies."""
    following: Callable[[History], str | None]
    """The module that is called next, or None at the end."""
    outcome: Outcome
    seed: int = 0
    """Of the policy's logits, which are drawn from -1 to 1."""
    examples: int = 1
    temperature: float = 1.0
    given: Mapping[History, Sequence[float]] = field(default_factory=dict)
    """Logits of some histories, in place of the drawn ones."""

    @property
    def modules(self) -> tuple[str, ...]:
        return tuple(self.replies)

    @cached_property
    def histories(self) -> tuple[History, ...]:
        """All histories at which a module is called, the shorter ones first."""
        found, new = list[History](), list[History]([()])
        while new:
            found += (at := [h for h in new if self.following(h) is not None])
            new = [(*h, reply) for h in at for reply in range(len(self.logits(h)))]
        return tuple(found)

    def module(self, history: History) -> str:
        """The module that is called after these replies."""
        module = self.following(history)
        assert module is not None
        return module

    def logits(self, history: History) -> Sequence[float]:
        draw = rng.stream(self.seed, word(history))
        drawn = [draw.uniform(-1, 1) for _ in range(self.replies[self.module(history)])]
        return self.given.get(history, drawn)

    def probabilities(self, history: History) -> list[float]:
        weights = [math.exp(logit / self.temperature) for logit in self.logits(history)]
        return [weight / math.fsum(weights) for weight in weights]

    def reach(self, history: History) -> float:
        """Probability that a rollout passes through these replies."""
        return math.prod(self.probabilities(history[:n])[reply] for n, reply in enumerate(history))

    def v(self, example: int, history: History) -> float:
        """V: expected outcome after these replies; at the end of a rollout its outcome."""
        if self.following(history) is None:
            return self.outcome(example, history)
        return math.fsum(p * self.v(example, (*history, r)) for r, p in enumerate(self.probabilities(history)))

    def q(self, example: int, history: History, reply: int) -> float:
        """Q: expected outcome when this reply is fixed."""
        return self.v(example, (*history, reply))

    def d(self, example: int, history: History, reply: int) -> float:
        """D = Q - V: what a decision is worth."""
        return self.q(example, history, reply) - self.v(example, history)

    def variance_of_q(self, example: int, history: History) -> float:
        """Var_o Q(h, o)."""
        return math.fsum(p * self.d(example, history, r) ** 2 for r, p in enumerate(self.probabilities(history)))

    def paths(self) -> list[tuple[float, History]]:
        """All complete rollouts, with their probabilities."""
        ended = [(*h, r) for h in self.histories for r in range(len(self.logits(h)))]
        return [(self.reach(h), h) for h in ended if self.following(h) is None]

    def variance(self, example: int) -> float:
        """Var(R | example)."""
        mean = self.v(example, ())
        return math.fsum(p * (self.outcome(example, path) - mean) ** 2 for p, path in self.paths())

    def influence(self, module: str) -> float:
        """E[sum over the module's calls of Var_o Q] / E[Var(R | example)]; those of all modules add up to 1."""
        at = [h for h in self.histories if self.module(h) == module]
        explained = math.fsum(self.reach(h) * self.variance_of_q(e, h) for e in range(self.examples) for h in at)
        return explained / math.fsum(self.variance(e) for e in range(self.examples))

    def gradient(self) -> dict[History, list[float]]:
        """G: the derivative of the expected outcome, averaged over examples, in the logits of each history."""
        return {
            history: [
                math.fsum(self.reach(history) * p * self.d(e, history, r) for e in range(self.examples))
                / (self.examples * self.temperature)
                for r, p in enumerate(self.probabilities(history))
            ]
            for history in self.histories
        }

    def score_gradient(self, history: History, reply: int) -> list[float]:
        """The derivative of log π(reply | history) in the logits of this history."""
        chances = self.probabilities(history)
        return [((r == reply) - p) / self.temperature for r, p in enumerate(chances)]

    def forests(self, width: Callable[[History], int], example: int = 0) -> Iterator[tuple[float, Forest]]:
        """All forests of one tree whose calls after a history have `width(history)` samples, with probabilities."""
        for chance, tree in self._trees(width, ()):
            grow = Grow(self.modules)
            self._grow(grow, f"q{example}/0", example, (), tree, None)
            yield chance, grow.forest

    def _trees(self, width: Callable[[History], int], history: History) -> list[tuple[float, Any]]:
        """A tree is the tuple of its samples after a history, each a reply and the tree behind it."""
        if self.following(history) is None:
            return [(1.0, ())]
        single = [
            (p * chance, (reply, behind))
            for reply, p in enumerate(self.probabilities(history))
            for chance, behind in self._trees(width, (*history, reply))
        ]
        return [
            (math.prod(chance for chance, _ in samples), tuple(sample for _, sample in samples))
            for samples in itertools.product(single, repeat=width(history))
        ]

    def _grow(self, grow: Grow, name: str, example: int, history: History, tree: Any, parent: str | None) -> None:
        for branch, (reply, behind) in enumerate(tree):
            own = f"{name}.{branch}"
            call = grow.call(
                f"{own}#{len(history)}", parent, self.module(history), text=f"r{reply}", facts={"history": history}
            )
            after = (*history, reply)
            if self.following(after) is None:
                grow.end(call, self.outcome(example, after), id=own)
            else:
                self._grow(grow, own, example, after, behind, call)


def two(*, stops: bool = False, **fields: Any) -> Table:
    """A module of two replies and one of three; `stops`: the first one's second reply ends the rollout."""

    def following(history: History) -> str | None:
        if not history:
            return "first"
        return "second" if len(history) == 1 and not (stops and history == (1,)) else None

    return Table(**{"replies": {"first": 2, "second": 3}, "following": following, "outcome": drawn_outcome, **fields})


def bifurcation(matters: str = "b", **fields: Any) -> Table:
    """Four modules of two replies of which only `matters` changes the outcome: 0 or 1, by its reply.

    It replies alike whatever was said before, so that no other module matters through it.
    """
    modules = ("a", "b", "c", "d")
    at = modules.index(matters)
    before = itertools.product(range(2), repeat=at)
    return Table(
        **{
            "replies": dict.fromkeys(modules, 2),
            "following": lambda history: modules[len(history)] if len(history) < len(modules) else None,
            "outcome": lambda example, history: float(history[at]),
            "given": dict.fromkeys(before, (0.4, -0.3)),
            **fields,
        }
    )


def skipping(**fields: Any) -> Table:
    """Three modules: a first reply of 1 leaves the second module out; the third answers."""

    def following(history: History) -> str | None:
        called = ("a", "c") if history[:1] == (1,) else ("a", "b", "c")
        return called[len(history)] if len(history) < len(called) else None

    return Table(**{"replies": {"a": 2, "b": 2, "c": 2}, "following": following, "outcome": drawn_outcome, **fields})


def drawn_outcome(example: int, history: History) -> float:
    """An outcome from 0 to 1 in steps of a tenth, drawn for each example and path."""
    return rng.stream("outcome", example, word(history)).randrange(11) / 10


@dataclass
class TableProgram:
    """The program of a table, for the real rollout."""

    table: Table

    @property
    def modules(self) -> tuple[str, ...]:
        return self.table.modules

    async def run(self, example: Example, ctx: Any) -> list[int]:
        history: History = ()
        while (module := self.table.following(history)) is not None:
            reply = await ctx.call(module, [{"role": "user", "content": word(history)}])
            history += (int(reply.text.removeprefix("r")),)
        return list(history)


class TableTask(Task):
    """The task of a table: `examples` examples in each split, the outcome as reward."""

    name = "tabular"
    tools: Mapping[str, Any] = {}
    reward_sets = ("outcome",)
    main_metric = "outcome"
    failure_score = 0.0
    absent_features = frozenset({"observations", "penalties", "parse_failures", "repeated_calls"})

    def __init__(self, table: Table, config: Any = None):
        self.table, self.config = table, config
        self.program: Any = TableProgram(table)

    def examples(self, split: str) -> list[Example]:
        return [Example(id=f"{split}{n}", inputs={"number": n}) for n in range(self.table.examples)]

    def score(self, example: Example, prediction: Any, path: Sequence[Call], reward_set: str) -> Score:
        outcome = self.table.outcome(example.inputs["number"], tuple(prediction))
        return Score(reward=outcome, metrics={"outcome": outcome})

    def describe(self) -> dict[str, Any]:
        return {"data": "enumerated"}


TABLES: Mapping[str, Table] = {
    "two": two(examples=4),
    "stops": two(examples=4, stops=True),
    "bifurcation": bifurcation(examples=2),
    "skipping": skipping(examples=4),
}
"""Tables that a command line can name: `task=tabular_NAME` (`tabular_model.saved`)."""
