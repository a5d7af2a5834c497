"""Tools inside DSPy programs: the rollout that is running, reached from where no `ctx` can be passed.

A `dspy.Module` gets only its inputs. `rollout.dspy` puts the rollout's host here before it runs a module, so that the
module's tools (retrievers, external models) go onto the rollout's tape like those of any other program.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol, TypeVar

from mmrl.errors import ProgramFailure

T = TypeVar("T")


class Host(Protocol):
    """Rollout's interface to the module that it runs."""

    def tool(self, name: str, /, **arguments: object) -> Coroutine[Any, Any, Any]:
        """Call `Context.tool` of the rollout."""
        ...

    def remember(
        self, name: str, arguments: Mapping[str, object], run: Callable[[], Awaitable[object]]
    ) -> Coroutine[Any, Any, Any]:
        """Call `Context.remember` of the rollout."""
        ...

    def at_end(self, end: Callable[[], Awaitable[None]]) -> None:
        """Await something when the rollout has ended, on its event loop."""
        ...

    def on_loop(self) -> bool:
        """Check if the caller runs on the rollout's event loop."""
        ...

    async def awaited(self, coroutine: Coroutine[object, object, T]) -> T:
        """Run a coroutine on the rollout's event loop, from whichever loop this is awaited on."""
        ...

    def wait(self, coroutine: Coroutine[object, object, T]) -> T:
        """Run a coroutine on the rollout's event loop and block until it is done; from worker threads only."""
        ...


# A context variable, not a global: rollouts run at once, each with a host of its own, also in threads of `forward`.
_HOST: ContextVar[Host | None] = ContextVar("mmrl_host", default=None)


@contextmanager
def running(host: Host) -> Iterator[None]:
    """Assign everything that runs inside to the rollout of `host`."""
    token = _HOST.set(host)
    try:
        yield
    finally:
        _HOST.reset(token)


def current() -> Host | None:
    """Return the host of the rollout that is running, if any."""
    return _HOST.get()


async def use_tool(name: str, /, **arguments: object) -> Any:
    """Use one of the task's tools from a module's `aforward`; its result is recorded and replayed.

    Raises:
        ProgramFailure: no rollout is running.
        ToolFailure: the tool raised.
    """
    host = of_rollout(name)
    return await host.awaited(host.tool(name, **arguments))


def use_tool_sync(name: str, /, **arguments: object) -> Any:
    """Use a tool from a module that has only `forward`."""
    host = of_rollout(name)
    return host.wait(host.tool(name, **arguments))


def of_rollout(name: str) -> Host:
    """Return the host of the rollout that uses a tool.

    Raises:
        ProgramFailure: no rollout is running.
    """
    # None outside a rollout, also in a thread that the module has started without the rollout's context.
    host = _HOST.get()
    if host is None:
        raise ProgramFailure(f"tool '{name}' was used outside a rollout; run the module with mmrl")
    return host
