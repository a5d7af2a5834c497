"""Going on from any call of a rollout: where a branch begins, and what a played rollout leaves to go on from.

A `Branch` replays the tape of another rollout up to a request and is live from there; `rollout.sample.play` plays it.
Under forks on a recorded path, the exchange of a module's replies (CCPO) and the audit of credit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from mmrl.records import EMPTY, Call, Example, Forest, Rollout
from mmrl.rollout.context import RolloutContext, Substitute
from mmrl.rollout.environment import Environment
from mmrl.rollout.plans import Tree
from mmrl.rollout.tape import Event
from mmrl.tasks.base import Program


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """Rollout of an example, or a tree of them, that begins on the tape of another one."""

    example: Example
    path: str
    """Path id: the source of every sampling seed, so that no two branches of an example have the same."""
    tape: Sequence[Event] = ()
    """Requests that are replayed; none: it plays from the start."""
    plan: Tree = field(default_factory=Tree)
    """Its forks; those at a call that is on the tape start there."""
    substitutes: Mapping[str, Substitute] = EMPTY
    """Module -> what replies to its live calls in place of the policy."""
    program: Program | None = None
    """Plays in place of the task's; None: that one."""

    def copied_tape(self) -> list[Event]:
        """Return copies of the events: what this play notes of a call (a turn's reward) must reach no other."""
        return [replace(event) for event in self.tape]

    def context(self, env: Environment) -> RolloutContext:
        """Return the `ctx` of a single rollout."""
        return RolloutContext(env, self.example, self.path, self.copied_tape(), substitutes=self.substitutes)


@dataclass(frozen=True, slots=True)
class Leaf:
    """Rollout that was played."""

    path: tuple[str | int, ...]
    """Path of its root, then its branch at each fork."""
    rollout: Rollout
    calls: Sequence[Call]
    events: Sequence[Event] = ()
    """Its tape, where it is kept."""

    def before(self, call: str) -> Sequence[Event]:
        """Return the tape up to a call, without it."""
        return self.events[: self._place(call)]

    def after(self, call: str) -> Sequence[Event]:
        """Return the tape up to a call and its reply."""
        return self.events[: self._place(call) + 1]

    def _place(self, call: str) -> int:
        return next(n for n, event in enumerate(self.events) if event.call is not None and event.call.id == call)


def forest_of(leaves: Sequence[Leaf], modules: Sequence[str], step: int = 0) -> Forest:
    """Gather rollouts, in their order, with their calls."""
    calls: dict[str, Call] = {}
    for leaf in leaves:
        for call in leaf.calls:
            calls.setdefault(call.id, call)
    return Forest(calls=calls, rollouts=tuple(leaf.rollout for leaf in leaves), modules=tuple(modules), step=step)
