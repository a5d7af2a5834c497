"""Environments as Python classes, in the form of TRL's `environment_factory`: `reset`, tools, perhaps `get_reward`.

What TRL passes over begins with an underscore: `_turn_reward`, `_state`, `_done` (read after each action; attributes or
methods) and `_close`.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from typing_extensions import override

from mmrl.errors import ConfigError, ProgramFailure, RewardFailure, RolloutError, Stopped, ToolFailure, refuse
from mmrl.system.objects import imported
from mmrl.system.user_code import Worker, as_number, is_async, on_agent_loop, user_failure
from mmrl.tasks.base import Context, Message
from mmrl.tasks.dspy.own import refusing_signature
from mmrl.tasks.environments.base import Observation, Session, Source

NO_TOOLS = ("reset", "get_reward")
"""Public methods that are no tools."""
UNREADABLE = (
    *("image", "image_url", "input_image", "audio", "audio_url", "input_audio"),
    *("video", "video_url", "input_video"),
)
"""Types of parts of a message that are no texts."""
MOST_ABANDONED = 32
"""Sessions that did not come back and still have a thread; with as many no further one is opened."""

_abandoned = 0
_LOCK = threading.Lock()


class ClassSource(Source):
    """A class, or a function that makes an instance without arguments.

    Args:
        key: what the user has typed, for messages.
        path: `package.module:name`.

    Raises:
        ConfigError: it is no environment.
    """

    def __init__(self, key: str, path: str):
        super().__init__(key)
        self._factory: Callable[[], Any] = imported(key, path)
        if not callable(self._factory):
            raise ConfigError(f"{key}: {path} is a {type(self._factory).__name__}, expected a class with `reset`")
        if (takes := refusing_signature(self._factory)) is not None:
            raise ConfigError(f"{key}: {path} takes {takes}, expected a class that is made without arguments")
        # One is made here, as TRL does: what a factory makes says which methods there are.
        try:
            probe = self._factory()
        except (Exception, SystemExit) as error:
            if isinstance(error, SystemExit) and error.code == Stopped.exit_code:  # SIGTERM, for `mmrl.cli`
                raise
            raise ConfigError(str(user_failure(ProgramFailure, error, f"{key}: {path}() raised "))) from None
        if not callable(getattr(probe, "reset", None)):
            raise ConfigError(f"{key}: {path} has no method `reset`; expected an environment, as in TRL")
        self._reset: Callable[..., Any] = probe.reset
        names = [name for name, _ in inspect.getmembers(type(probe), inspect.isfunction) if not name.startswith("_")]
        problems: list[str] = []
        self.tools = schemas(
            {name: getattr(probe, name) for name in names if name not in NO_TOOLS}, f"{key}: {path}.", problems
        )
        self.has_reward = "get_reward" in names
        self.has_turn_rewards = hasattr(probe, "_turn_reward")
        refuse(problems)
        if callable(end := getattr(probe, "_close", None)) and not is_async(end):
            with suppress(Exception):
                end()

    @override
    async def open(self, ctx: Context) -> Session:
        if _abandoned >= MOST_ABANDONED:
            raise ToolFailure(f"{self.key}: {MOST_ABANDONED} environments did not come back; no further one is begun")
        session = ObjectSession()
        try:
            session.instance = await session.call(self._factory)
        except RolloutError:
            raise
        except Exception as error:
            raise user_failure(ProgramFailure, error, f"{self.key}: making one raised ") from error
        return session

    @override
    def row_problem(self, row: Mapping[str, Any]) -> str:
        takes = refusing_signature(self._reset, **row)
        return "" if takes is None else f"reset takes {takes}, and records have {', '.join(row)}"


class FunctionSource(Source):
    """A function as a tool beside an environment, as TRL's `tools`.

    Raises:
        ConfigError: it is no function, or does not say what it takes.
    """

    def __init__(self, key: str, path: str):
        super().__init__(key)
        function, problems = imported(key, path), list[str]()
        if not callable(function):
            raise ConfigError(f"{key}: {path} is a {type(function).__name__}, expected a function")
        self._tool = {path.rpartition(":")[2].rpartition(".")[2]: function}
        self.tools = schemas(self._tool, f"{key}: {path.partition(':')[0]}:", problems)
        refuse(problems)

    @override
    async def open(self, ctx: Context) -> Session:
        session = ObjectSession()
        session.tools = self._tool
        return session


class ObjectSession(Session):
    """An instance of a user's class, or a function of a user's, in a thread of its own where it is not async."""

    tools: Mapping[str, Callable[..., Any]] | None = None
    """Functions that are no methods of an instance."""

    def __init__(self) -> None:
        self._worker = Worker()
        self._abandoned = False

    async def call(self, function: Callable[..., Any], /, *args: Any, **named: Any) -> Any:
        """Call code of the user's where the session's own code runs; awaits what is async."""
        if is_async(function):
            return await on_agent_loop(function(*args, **named))
        # One thread for all its calls: a database's connection, a browser, a lock may belong to a thread.
        result = await self._worker.call(function, *args, **named)
        return await on_agent_loop(result) if inspect.isawaitable(result) else result

    @override
    async def reset(self, row: Mapping[str, Any]) -> str:
        instance: Any = self.instance
        try:
            said = await self.call(instance.reset, **row)
        except RolloutError:
            raise
        except Exception as error:
            raise user_failure(ProgramFailure, error, "reset raised ") from error
        return "" if said is None else text_of(said, "reset")

    @override
    async def act(self, name: str, arguments: Mapping[str, Any]) -> Observation:
        function = getattr(self.instance, name) if self.tools is None else self.tools[name]
        failed = False
        try:
            result = await self.call(function, **arguments)
        except RolloutError:
            raise
        except Exception as error:
            result, failed = {"error": str(error)}, True
        return Observation(
            text=text_of(result, name),
            failed=failed,
            done=bool(await self._read("_done")),
            state=None if (state := await self._read("_state")) is None else str(state),
            # What raised may have left the reward of an earlier action there.
            turn_reward=None if failed else await self._number("_turn_reward"),
        )

    @override
    async def reward(self) -> float | None:
        if not hasattr(self.instance, "get_reward"):
            return None
        return await self._number("get_reward")

    @override
    def abandon(self) -> None:
        self._abandoned = True
        _count(1)
        self._worker.put(lambda: _count(-1))  # it did come back

    @override
    async def close(self) -> None:
        try:
            if not self._abandoned:
                await self._read("_close")
        finally:
            self._worker.close()

    async def _read(self, name: str) -> Any:
        value = getattr(self.instance, name, None)
        return await self.call(value) if callable(value) else value

    async def _number(self, name: str) -> float | None:
        try:
            value = await self._read(name)
        except RolloutError:
            raise
        except Exception as error:
            raise user_failure(RewardFailure, error, f"{name} raised ") from error
        if value is None:
            return None
        if (number := as_number(value)) is None:
            raise RewardFailure(f"{name} gave {value!r:.100}, expected a number")
        return number


def _count(change: int) -> None:
    global _abandoned
    with _LOCK:
        _abandoned += change


def schemas(functions: Mapping[str, Callable[..., Any]], where: str, problems: list[str]) -> Sequence[Message]:
    """Return what a model is told of functions: transformers' JSON schema of hints and docstring, as in TRL.

    Args:
        where: what stands before a name, in messages.
        problems: gets a sentence for each that does not say what it takes.
    """
    from transformers.utils.chat_template_utils import get_json_schema

    found = []
    for name, function in functions.items():
        try:
            described = get_json_schema(function)["function"]
            found.append({"type": "function", "function": {**described, "name": name}})
        except Exception as error:  # its own, and what evaluating the user's hints raises
            problems.append(
                f"{where}{name}: {error}; a tool needs a docstring with an Args section, and a type for each argument"
            )
    return found


def text_of(result: object, name: str) -> str:
    """Return what a tool gave, as TRL writes it: its `str`; of parts of a message the texts.

    Raises:
        ProgramFailure: a part is an image.
    """
    if not isinstance(result, list) or not result or not all(isinstance(part, dict) for part in result):
        return str(result)
    if other := [part["type"] for part in result if part.get("type") in UNREADABLE]:
        raise ProgramFailure(f"{name} gave a part of type '{other[0]}', and mmrl's models read text alone")
    # Records may have a field `type` too.
    texts = all(part.get("type") == "text" and isinstance(part.get("text"), str) for part in result)
    return "\n".join(part["text"] for part in result) if texts else str(result)
