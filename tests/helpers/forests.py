"""Forests for tests: a small builder for worked examples, and hypothesis strategies for random ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from mmrl.algorithms import ALGORITHMS, assign_credit
from mmrl.config import ALGO_SCHEMAS
from mmrl.credit.entries import Credit, Entry
from mmrl.records import Call, Forest, Rollout
from mmrl.store.forest import parse_forest
from tests.helpers import TOP

REWARDED = sorted(set(ALGORITHMS) - {"distill"})
"""Algorithms that credit rewards; the other one is tested in tests/credit/test_distillation.py."""


class Grow:
    """Builds a forest call by call; invocation and turn follow from the path."""

    def __init__(self, modules: Sequence[str], step: int = 0):
        self.modules = tuple(modules)
        self.step = step
        self.calls: dict[str, Call] = {}
        self.rollouts: list[Rollout] = []

    def call(self, call_id: str, parent: str | None, module: str, tokens: int = 1, **fields: Any) -> str:
        path, above = [], parent
        while above is not None:
            path.append(self.calls[above])
            above = self.calls[above].parent
        example = fields.pop("example", None) or (path[0].example if path else call_id.split("/")[0])
        self.calls[call_id] = Call(
            id=call_id,
            example=example,
            parent=parent,
            module=module,
            invocation=sum(call.module == module for call in path),
            turn=len(path),
            completion_tokens=tokens,
            **fields,
        )
        return call_id

    def end(self, leaf: str | None, reward: float | None, **fields: Any) -> None:
        example = fields.pop("example", None) or (self.calls[leaf].example if leaf else "q")
        fields.setdefault("id", f"{example}/r{len(self.rollouts)}")
        self.rollouts.append(Rollout(example=example, leaf=leaf, reward=reward, **fields))

    def chain(
        self, name: str, modules: Sequence[str], reward: float | None, tokens: int = 1, **fields: Any
    ) -> list[str]:
        """One independent rollout: ids are `<name>#<position>`; `name` starts with the example's id and a slash."""
        parent, ids = None, []
        for position, module in enumerate(modules):
            parent = self.call(f"{name}#{position}", parent, module, tokens)
            ids.append(parent)
        self.end(parent, reward, id=name, example=name.split("/")[0], **fields)
        return ids

    @property
    def forest(self) -> Forest:
        return Forest(calls=self.calls, rollouts=tuple(self.rollouts), modules=self.modules, step=self.step)


def credit(
    forest: Forest,
    name: str,
    *,
    seed: int = 0,
    minibatch: Mapping[str, int] | None = None,
    frozen: Sequence[str] = (),
    **options: Any,
) -> Credit:
    """The credit that the algorithm `name` with these options gives a forest."""
    algo = ALGO_SCHEMAS[name].model_validate({"name": name, **options})
    return assign_credit(forest, algo, seed, minibatch, frozen)


def documented(name: str) -> Forest:
    """A worked example of docs/forests, which the pages of the algorithms show."""
    return parse_forest((TOP / "docs" / "forests" / f"{name}.json").read_text(encoding="utf-8"), name)


def singles(*examples: Sequence[float | None], tokens: Sequence[int] = (2, 2, 2, 2)) -> Forest:
    """Rollouts of one call: for each example their rewards (None: failed from outside), of `tokens` in turn."""
    grow = Grow(("a",))
    for example, rewards in enumerate(examples):
        for branch, reward in enumerate(rewards):
            size = tokens[branch]
            call = grow.call(f"q{example}/{branch}", None, "a", size, values=(0.0,) * size)
            grow.end(call, reward, fork="a", error="tool" if reward is None else None)
    return grow.forest


def turns(*rollouts: Sequence[float | None]) -> Forest:
    """Rollouts of one agent: of each the turn rewards of its calls but the last, and its outcome (None: failed)."""
    grow = Grow(("agent",))
    for number, (*rewards, outcome) in enumerate(rollouts):
        leaf = None
        for turn, reward in enumerate((*rewards, None)):
            leaf = grow.call(f"q/{number}#{turn}", leaf, "agent", turn_reward=reward)
        grow.end(leaf, outcome, id=f"q/{number}", error="tool" if outcome is None else None)
    return grow.forest


def by_call(credit: Credit) -> dict[str, Entry]:
    """Entries of an algorithm that has one per call."""
    found = {entry.call: entry for entry in credit.entries}
    assert len(found) == len(credit.entries)
    return found


def advantage(entry: Entry) -> float:
    """The advantage of an entry whose tokens all have the same."""
    assert len(set(entry.advantages)) == 1
    return entry.advantages[0]


def total_weight(credit: Credit) -> float:
    return sum(sum(entry.weights) for entry in credit.entries)


MODULES = ("writer", "ranker", "answerer")
numbers = st.integers(-40, 40).map(lambda n: n / 20)
"""Rewards on a grid, so that ties happen and differences are never mere rounding."""
lengths = st.integers(1, 5)


@st.composite
def chains(
    draw: Any,
    *,
    modules: Sequence[str] = MODULES,
    linear: bool = False,
    examples: int = 3,
    rollouts: tuple[int, int] = (1, 5),
    tokens: st.SearchStrategy[int] = lengths,
    failures: bool = True,
    penalties: bool = False,
    turn_rewards: st.SearchStrategy[float] | None = None,
    critic: bool = False,
) -> Forest:
    """Independent rollouts of one to `examples` examples.

    Args:
        linear: every rollout calls each module once, in order; else any sequence of one to five calls.
        rollouts: least and most per example.
        failures: some rollouts fail from outside causes, some before their first call.
        turn_rewards: of every intermediate call; None: no turn rewards.
        critic: calls have values and log-probabilities.
    """
    grow = Grow(modules)
    for example in range(draw(st.integers(1, examples))):
        for index in range(draw(st.integers(*rollouts))):
            name = f"q{example}/{index}"
            fate = draw(st.sampled_from(["fine"] * 8 + ["outside", "unborn"])) if failures else "fine"
            if fate == "unborn":
                grow.end(None, draw(st.sampled_from([None, 0.0])), error="length", example=f"q{example}", id=name)
                continue
            path = list(modules) if linear else draw(st.lists(st.sampled_from(modules), min_size=1, max_size=5))
            parent = None
            for position, module in enumerate(path):
                last = position == len(path) - 1
                size = draw(tokens)
                parent = grow.call(
                    f"{name}#{position}",
                    parent,
                    module,
                    size,
                    penalty=draw(numbers) if penalties else 0.0,
                    turn_reward=None if last or turn_rewards is None else draw(turn_rewards),
                    **_estimates(draw, size) if critic else {},
                )
            reward = None if fate == "outside" else draw(numbers)
            grow.end(parent, reward, id=name, error="tool" if reward is None else None, fork=modules[0])
    return grow.forest


def with_unread(forest: Forest, random: Any) -> Forest:
    """The forest where some calls could not be parsed: what ended a rollout, or was caught, or both."""
    calls, rollouts = dict(forest.calls), []
    for rollout in forest.rollouts:
        path = forest.path(rollout)
        for call in path:
            if random.random() < 0.3:
                calls[call.id] = replace(call, ok=False, present_fields=random.randrange(3), expected_fields=3)
        ended = rollout.reward is not None and path and random.random() < 0.3
        rollouts.append(replace(rollout, reward=0.0, error="parse") if ended else rollout)
    return replace(forest, calls=calls, rollouts=tuple(rollouts))


def _estimates(draw: Any, size: int) -> dict[str, Any]:
    def tokens() -> tuple[float, ...]:
        return tuple(draw(st.lists(numbers, min_size=size, max_size=size)))

    return {"values": tokens(), "logprobs": tokens(), "ref_logprobs": tokens()}


@st.composite
def forked(draw: Any, *, sampler: str, modules: Sequence[str] = MODULES, failures: bool = True) -> Forest:
    """Trees as MHGPO samples them, with penalties: `rr` one per example, `is` one per module, `os` with two forks."""
    grow = Grow(modules)
    size = draw(st.integers(2, 4))
    for example in range(draw(st.integers(1, 4))):
        if sampler == "os":
            plans = [[(0, size), (len(modules) - 1, draw(st.integers(1, 3)))]]
        elif sampler == "is":
            plans = [[(fork, size)] for fork in range(len(modules))]
        else:
            plans = [[(draw(st.integers(0, len(modules) - 1)), size)]]
        for tree, forks in enumerate(plans):
            widths = dict(forks)
            tips: list[tuple[str, str | None]] = [(f"q{example}/{tree}", None)]
            for position, module in enumerate(modules):
                grown = []
                for name, parent in tips:
                    for branch in range(widths.get(position, 1)):
                        call_id = f"{name}{'.' + str(branch) if position in widths else ''}"
                        made = grow.call(f"{call_id}#{position}", parent, module, draw(lengths), penalty=draw(numbers))
                        grown.append((call_id, made))
                tips = grown
            for name, leaf in tips:
                failed = failures and draw(st.integers(0, 9)) == 0
                grow.end(
                    leaf,
                    None if failed else draw(numbers),
                    id=name,
                    error="engine" if failed else None,
                    fork=modules[forks[0][0]],
                )
    return grow.forest


def relabelled(
    forest: Forest, calls: Mapping[str, str], modules: Mapping[str, str], order: Callable[[str], Any]
) -> Forest:
    """The same forest under other call ids and module names, its examples and rollouts in another order."""
    names: dict[str | None, Any] = {None: None, **modules}
    ids: dict[str | None, Any] = {None: None, **calls}
    renamed = [
        replace(call, id=ids[call.id], parent=ids[call.parent], module=names[call.module])
        for call in sorted(forest.calls.values(), key=lambda call: (call.turn, order(call.id)))
    ]
    rollouts = [
        replace(rollout, leaf=ids[rollout.leaf], fork=names[rollout.fork])
        for rollout in sorted(forest.rollouts, key=lambda rollout: order(rollout.id))
    ]
    own = tuple(names[name] for name in forest.modules)
    return replace(forest, calls={call.id: call for call in renamed}, rollouts=tuple(rollouts), modules=own)
