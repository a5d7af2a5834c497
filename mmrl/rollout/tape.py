"""The tape of a rollout: what its program requested, in order, with the outcomes; recorded once, replayed by forks.

A program with one strand repeats its requests in the order of the tape. One with several (`asyncio.gather`) does so
strand by strand, and which strand is next depends on who is faster: replayed requests wait for those before them, the
results of tools come in the order in which they were requested, and a tool that runs counts as a strand that an engine
waits for.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

from mmrl.engines.base import Engine
from mmrl.errors import ReplayDivergence
from mmrl.records import Call

ROUNDS = 64
"""Turns of the event loop that a request of one of several strands waits for those before it on the tape."""
_DEPENDS = "; it must depend only on its example and on what its models and tools return"


@dataclass(slots=True, eq=False)
class Event:
    """Event on the tape, in the order of the program's requests."""

    kind: str
    """`call` or `tool`."""
    name: str
    """Module or tool."""
    request: object
    """Prompt ids of a call, arguments of a tool: compared on replay."""
    # Untyped: the reply of a call or a tool's result, whose type only the program knows.
    outcome: asyncio.Future[Any]
    """Reply of a call, result of a tool."""
    concurrent: bool = False
    """Requested while something else of the rollout was under way: the program has several strands."""
    invocation: int = 0
    """Of a call: `Tape.invocation` when it was requested, by which forks find it."""
    call: Call | None = None
    """Set when a call is recorded."""
    context: tuple[int, ...] | None = None
    """Prompt and completion ids of a recorded call."""
    nested: bool = False
    """A tool that made requests itself: on replay it runs again, since its requests are on the tape too."""
    delivered: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when results of tools that were requested later need not wait for this one."""


@dataclass(slots=True)
class Tape:
    """The tape of one rollout, with the part of it that is replayed at its head."""

    engine: Engine
    replay: Sequence[Event] = ()
    events: list[Event] = field(init=False)
    """Replayed events, then live ones."""
    unplayed: list[int] = field(init=False)
    """Places on the tape that the program has not requested yet."""
    tickets: list[object] = field(default_factory=list)
    """Requests that wait for others to be replayed, the first one first."""
    under_way: int = 0
    """Requests and tools that are not done."""
    waiting: int = 0
    """Replayed requests that another rollout has under way."""
    left_out: set[int] = field(default_factory=set)
    """Places of calls that are none of this rollout's."""

    def __post_init__(self) -> None:
        self.events = list(self.replay)
        self.unplayed = list(range(len(self.replay)))

    async def recorded(self, kind: str, name: str, request: object) -> Event | None:
        """Return the event of this request, or None when the tape is played out.

        Raises:
            ReplayDivergence: there is another one.
        """
        for tape, event in _INSIDE.get():
            if tape is self:  # the tools that this request is inside of: they do not wait themselves any more
                event.nested = True
                self._deliver(event)
        # By order and not by name: the order of requests is what a deterministic program repeats.
        concurrent = any(event.concurrent for event in self.replay)
        ticket = object()
        self.tickets.append(ticket)
        try:
            for _ in range(ROUNDS if concurrent else 1):
                if self.unplayed and self._is(self.unplayed[0], kind, name, request):
                    return self.events[self.unplayed.pop(0)]
                if not self.unplayed and self.tickets[0] is ticket:
                    return None
                if concurrent:  # replies are there at once now, so that one strand may be ahead of the others
                    await asyncio.sleep(0)
        finally:
            self.tickets.remove(ticket)
        if concurrent or not self.unplayed:
            # Some strand waits for something else than this tape. `check_played_out` finds what it never requests.
            position = next((position for position in self.unplayed if self._is(position, kind, name, request)), None)
            if position is None:
                return None
            self.unplayed.remove(position)
            return self.events[position]
        event = self.events[self.unplayed[0]]
        raise ReplayDivergence(
            f"run again for another rollout of its example, the program made {kind} '{name}' "
            + ("with other input" if (event.kind, event.name) == (kind, name) else f"for {event.kind} '{event.name}'")
            + f" as its request {self.unplayed[0] + 1}{_DEPENDS}"
        )

    def record(self, kind: str, name: str, request: object, replaced: Event | None = None) -> Event:
        """Put a request on the tape; `replaced` is the event whose place it takes in this rollout."""
        outcome = asyncio.get_running_loop().create_future()
        event = Event(kind, name, request, outcome, self.under_way > 0, self.invocation(name))
        # A failed event may have no sibling that replays it; its exception is raised in the program itself.
        event.outcome.add_done_callback(lambda future: future.cancelled() or future.exception())
        if replaced is None:
            self.events.append(event)
        else:
            event.concurrent, event.nested = replaced.concurrent, True
            self.events[self.events.index(replaced)] = event
        return event

    async def outcome_of(self, event: Event) -> Any:
        """Return the outcome of an event that is replayed."""
        if event.kind == "tool" and not event.outcome.done():
            # Another rollout's tool is still running: a strand that the schedule waits for, as for one of its own.
            self.begin()
            try:
                await event.delivered.wait()
            finally:
                self.end()
        if event.outcome.done():
            return event.outcome.result()
        # Someone else's request is still under way (a program with concurrent calls): step out of the engine's count
        # of live programs meanwhile, or a deterministic batch would wait for this one forever. What other strands of
        # the program have under way is counted by itself.
        self.waiting += 1
        if self.waiting == 1 and not self.under_way:
            self.engine.leave()
        try:
            return await asyncio.shield(event.outcome)
        finally:
            self.waiting -= 1
            if not self.waiting and not self.under_way:
                self.engine.enter()

    def begin(self) -> None:
        """Count a request or tool as under way."""
        self.under_way += 1
        if self.under_way > 1 or self.waiting:  # one more strand of the program, which the schedule waits for
            self.engine.enter()

    def end(self) -> None:
        """Count a request or tool as ended."""
        self.under_way -= 1
        if self.under_way or self.waiting:  # the program itself counts for the strand that ends last
            self.engine.leave()

    @contextmanager
    def inside(self, event: Event) -> Iterator[None]:
        """Run the function of a tool inside."""
        token = _INSIDE.set((*_INSIDE.get(), (self, event)))
        self.begin()
        try:
            yield
        finally:
            _INSIDE.reset(token)
            self._deliver(event)

    async def turn_of(self, event: Event) -> None:
        """Wait until the results of tools that were requested before are there.

        Whichever thread is faster: the requests that follow them are numbered, and sampled, by their order.
        """
        for other in self.events[: self.events.index(event)]:
            if other.kind == "tool" and not other.outcome.done():
                await other.delivered.wait()

    def check_played_out(self) -> None:
        """Check, after the program's end, that all was replayed.

        Raises:
            ReplayDivergence: it never requested something that is on its tape.
        """
        if self.unplayed:
            event = self.events[self.unplayed[0]]
            raise ReplayDivergence(
                "run again for another rollout of its example, the program ended without "
                f"{event.kind} '{event.name}', its request {self.unplayed[0] + 1}{_DEPENDS}"
            )

    def invocation(self, module: str) -> int:
        """Return the number of the module's calls so far, those under way included."""
        return sum(
            event.kind == "call" and event.name == module and (event.call is not None or not event.outcome.done())
            for position, event in enumerate(self.events)
            if position not in self.left_out
        )

    def leave_out(self, context: tuple[int, ...]) -> None:
        """Leave out a call with these ids of prompt and completion, of several the first."""
        places = [n for n, event in enumerate(self.events) if event.context == context and n not in self.left_out]
        self.left_out.update(places[:1])

    def calls(self) -> list[Call]:
        """Return recorded calls in order, replayed ones included; each has the one before it as parent.

        The order is that of the requests. Parents and invocations are set here: of concurrent calls the first requested
        may end last, and a request may become no call, such as one whose prompt was too long.
        """
        chain: list[Call] = []
        made: Counter[str] = Counter()
        for position, event in enumerate(self.events):
            # What was not requested again is another rollout's.
            if event.call is not None and position not in self.unplayed and position not in self.left_out:
                parent, invocation = chain[-1].id if chain else None, made[event.name]
                as_recorded = (event.call.parent, event.call.invocation) == (parent, invocation)
                chain.append(event.call if as_recorded else replace(event.call, parent=parent, invocation=invocation))
                made[event.name] += 1
        return chain

    def _deliver(self, event: Event) -> None:
        if not event.delivered.is_set():
            event.delivered.set()
            self.end()

    def _is(self, position: int, kind: str, name: str, request: object) -> bool:
        event = self.events[position]
        if (event.kind, event.name) != (kind, name):
            return False
        try:
            return bool(event.request == request)
        except Exception:  # an argument that does not compare to one truth, such as an array
            return repr(event.request) == repr(request)


# The tools in whose functions the running code is, outermost first, each with its rollout's tape.
_INSIDE: ContextVar[tuple[tuple[Tape, Event], ...]] = ContextVar("mmrl_tools", default=())
