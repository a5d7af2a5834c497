"""Forests for tests: a small builder for worked examples, and hypothesis strategies for random ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mmrl.credit.entries import Credit, Entry
from mmrl.records import Call, Forest, Rollout


class Grow:
    """Builds a forest call by call; invocation and turn follow from the path."""

    def __init__(self, modules: Sequence[str], step: int = 0):
        self.modules = tuple(modules)
        self.step = step
        self.calls: dict[str, Call] = {}
        self.rollouts: list[Rollout] = []

    def call(self, call_id: str, parent: str | None, module: str, tokens: int = 1, **fields: Any) -> str:
        path = []
        above = parent
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
