"""A rollout's episode: what its sessions say goes on the tape; on a fork's, the recorded actions are done again first.

An environment has state. A rollout that goes on from a call of another one plays a session of its own: reset with the
same record, then every recorded action, before its first live action and before the reward is asked. What they bring
must be what is on the tape.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any, TypeVar

from mmrl.errors import ReplayDivergence, ToolFailure
from mmrl.retrieval.base import whole_text
from mmrl.system.user_code import copied
from mmrl.tasks.base import Context
from mmrl.tasks.environments.base import Observation, Session, Source

T = TypeVar("T")

RESET = "reset"
"""Name of the beginning of an episode, on the tape and in times of tools."""
CLOSE_S = 10.0
"""Longest wait for a session to end."""


class Episode:
    """Episode of one rollout.

    Args:
        world: source that is reset with the record; None: there are tools alone.
        tools: name -> source.
        stateless: name of a tool -> what is on the tape stands, and it is not used again.
        limit_s: longest time of one action.
    """

    def __init__(
        self,
        ctx: Context,
        row: Mapping[str, Any],
        world: Source | None,
        tools: Mapping[str, Source],
        stateless: Callable[[str], bool],
        limit_s: float,
    ):
        self._ctx, self._row, self._world, self._tools = ctx, row, world, tools
        self._stateless, self._limit_s = stateless, limit_s
        self._sessions: dict[Source, Session] = {}
        self._behind: list[tuple[str, Callable[[], Awaitable[object]], object]] = []
        """Actions on the tape that no session here has done: what to call them, the action, what it brought."""

    @property
    def turns_add_up(self) -> bool:
        """True where the reward of the episode is the sum of its actions' rewards."""
        return self._world is not None and self._world.turns_add_up

    async def reset(self) -> str:
        """Begin; returns what is appended to the prompt."""
        if self._world is None:
            return ""
        text: str = await self._recorded(RESET, {}, self._reset)
        return text

    async def act(self, name: str, arguments: Mapping[str, Any]) -> Observation:
        """Use a tool; one that nobody has is an observation too."""
        if name not in self._tools:
            return Observation(text=str({"error": f"Tool {name} not found."}), failed=True)
        if not isinstance(arguments, Mapping):  # a model writes what it likes
            return Observation(text=str({"error": f"arguments: got {arguments!r:.60}, expected names"}), failed=True)
        if self._stateless(name):
            return Observation(**await self._ctx.remember(name, arguments, lambda: self._act(name, arguments)))
        return Observation(**await self._recorded(name, arguments, lambda: self._act(name, arguments)))

    async def world(self) -> Session | None:
        """Return the session of the world as the episode has left it; None: there are tools alone."""
        await self._catch_up()
        return None if self._world is None else await self._session(self._world)

    async def limited(self, session: Session, work: Awaitable[T], what: str) -> T:
        """Await what a session does.

        Raises:
            ToolFailure: it takes too long.
        """
        try:
            async with asyncio.timeout(self._limit_s):
                return await work
        except TimeoutError:
            session.abandon()
            raise ToolFailure(f"{what} took longer than task.action_timeout_s={self._limit_s:g}") from None

    async def close(self) -> None:
        """End its sessions."""
        for session in self._sessions.values():
            # What it was worth is known; how it ends is no part of that.
            with suppress(Exception):
                async with asyncio.timeout(CLOSE_S):
                    await session.close()

    async def _recorded(self, name: str, arguments: Mapping[str, Any], work: Callable[[], Awaitable[object]]) -> Any:
        live = False

        async def run() -> object:
            nonlocal live
            live = True
            await self._catch_up()
            return await work()

        result = await self._ctx.remember(name, arguments, run)
        if not live:
            self._behind.append((f"{name}({_said(arguments)})", work, result))
        return result

    async def _catch_up(self) -> None:
        while self._behind:
            what, work, recorded = self._behind.pop(0)
            if (result := await work()) != recorded:
                raise ReplayDivergence(
                    f"the environment, played again, gave something else for {what}: "
                    f"{_difference(recorded, result)}; it must depend only on its record and on the actions, or set "
                    "task.deterministic=false"
                )

    async def _reset(self) -> str:
        assert self._world is not None
        session = await self._session(self._world)
        return whole_text(await self.limited(session, session.reset(self._row), RESET))

    async def _act(self, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        session = await self._session(self._tools[name])
        # A copy: a tool may change what it gets, and other branches do the action again with the same.
        observed = await self.limited(session, session.act(name, copied(arguments)), name)
        return asdict(replace(observed, text=whole_text(observed.text)))

    async def _session(self, source: Source) -> Session:
        if source not in self._sessions:
            self._sessions[source] = await source.open(self._ctx)
        return self._sessions[source]


def _said(arguments: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r:.40}" for name, value in arguments.items())


def _difference(recorded: Any, result: Any) -> str:
    """Describe the first part in which two results differ."""
    if isinstance(recorded, Mapping) and isinstance(result, Mapping):
        part = next(part for part in recorded if recorded[part] != result[part])
        return f"{part} {_around(str(recorded[part]), str(result[part]))}"
    return _around(str(recorded), str(result))


def _around(recorded: str, result: str) -> str:
    start = next((n for n, (a, b) in enumerate(zip(recorded, result, strict=False)) if a != b), 0)
    start = max(0, start - 20)
    return f"was {recorded[start:][:80]!r}, is {result[start:][:80]!r}"


def merged(sources: Sequence[Source]) -> dict[str, Source]:
    """Return the source of each tool."""
    return {name: source for source in sources for name in source.names}
