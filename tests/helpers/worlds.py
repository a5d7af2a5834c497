"""Environments in the forms that TRL documents, and some that misbehave; scripted models that call their tools."""

from __future__ import annotations

import asyncio
import json
import random
import sqlite3
import sys
import threading
import time
from typing import Any, ClassVar

from mmrl.config import DataConfig
from mmrl.config.tasks import EnvironmentConfig
from mmrl.tasks import TASKS
from tests.helpers.gateway import Scripted, named, tokenizer

ROWS = [{"id": f"r{n}", "prompt": [{"role": "user", "content": "Count."}], "target": n} for n in range(6)]


class Counter:
    """Counts towards a target; owns its reward."""

    made: ClassVar[list[Counter]] = []

    def __init__(self) -> None:
        self.count = 0
        self.closed = 0
        self.actions: list[str] = []
        self.made.append(self)

    def reset(self, target: int = 4, **columns: Any) -> str | None:
        self.count, self.target, self.columns = 0, target, columns
        return f" Reach {target}."

    def add(self, step: int) -> str:
        """
        Adds to the counter.

        Args:
            step: what to add

        Returns:
            The counter.
        """
        if step < 0:
            raise ValueError("step must not be negative")
        self.actions.append(f"add {step}")
        self.count += step
        return str(self.count)

    async def look(self) -> str:
        """Says what the counter is."""
        await asyncio.sleep(0)
        self.actions.append("look")
        return f"it is {self.count}"

    def get_reward(self) -> float:
        return float(self.count == self.target)

    def _close(self) -> None:
        self.closed += 1


class Bare:
    """Like TRL's quick start: its reward is read by a reward function over `environments`."""

    def __init__(self) -> None:
        self.reward = 0.0

    def reset(self, **kwargs: Any) -> str | None:
        self.reward = 0.0
        return None

    def echo(self, message: str) -> str:
        """
        Echo the message back from the environment.

        Args:
            message: The message to echo

        Returns:
            The echoed message.
        """
        self.reward = len(message) / 10
        return message


def of_environments(environments: list[Any], **kwargs: Any) -> list[float]:
    """TRL's form of a reward function that reads what an environment keeps."""
    return [environment.reward for environment in environments]


class Stepwise(Counter):
    """Has what TRL passes over: rewards of turns, states, an end."""

    _turn_reward: float | None = None

    def reset(self, target: int = 4, **columns: Any) -> str | None:
        self._done = False
        return super().reset(target, **columns)

    def add(self, step: int) -> str:
        """
        Adds to the counter.

        Args:
            step: what to add
        """
        self._turn_reward = step / 10
        self._done = self.count + step >= 8
        return super().add(step)

    def _state(self) -> str:
        return f"at {self.count}"


class Random(Counter):
    """Depends on more than its record and the actions."""

    def add(self, step: int) -> str:
        """
        Adds to the counter.

        Args:
            step: what to add
        """
        return super().add(step) + f" {random.SystemRandom().random()}"


class Database:
    """Keeps a connection that belongs to the thread that made it."""

    def reset(self, **kwargs: Any) -> None:
        self.base = sqlite3.connect(":memory:")
        self.base.execute("create table t (x int)")
        self.thread = threading.get_ident()

    def put(self, x: int) -> int:
        """
        Puts a row into the table.

        Args:
            x: the value
        """
        self.base.execute("insert into t values (?)", (x,))
        return int(self.base.execute("select count(*) from t").fetchone()[0])

    def get_reward(self) -> float:
        (total,) = self.base.execute("select sum(x) from t").fetchone()
        return float(total)


def of_connection(completions: Any, environments: list[Any], **kwargs: Any) -> list[float]:
    """A reward function that uses what belongs to the environment's thread."""
    return [float(environment.base.execute("select max(x) from t").fetchone()[0]) for environment in environments]


class Bad(Counter):
    """Tools that misbehave."""

    def block(self) -> str:
        """Never comes back in time."""
        time.sleep(1.0)
        return "late"

    def leave(self) -> str:
        """Ends the process."""
        sys.exit(3)

    def picture(self) -> list[dict[str, Any]]:
        """Gives an image."""
        return [{"type": "image", "image": b""}]

    def long(self) -> str:
        """Says much."""
        return " ".join(f"word{n}" for n in range(5000))

    def dense(self) -> str:
        """Says much without a space."""
        return "[" + ",".join(f'"item{n}"' for n in range(5000)) + "]"

    def half(self) -> str:
        """Gives half a character, which no tokenizer takes."""
        return "a\ud800b"

    def parts(self) -> list[dict[str, str]]:
        """Gives parts of a message."""
        return [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]


def tool_call(name: str, **arguments: Any) -> str:
    """A tool call as Qwen's template writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def actions(*replies: str) -> Scripted:
    """A model that gives these replies, one a turn, and then says what it has read last."""

    def answer(prompt: str) -> str:
        turns = prompt.count("<|im_start|>assistant") - 1
        return replies[turns] if turns < len(replies) else "I am done."

    return Scripted(answer=answer, tokenizer=tokenizer("qwen3"))


def environment_task(world: Any = Counter, **options: Any) -> Any:
    """A task around a class, or classes by name."""
    chosen: dict[str, Any] = {"data": DataConfig(train=named(options.pop("rows", ROWS)))} | options
    if world is not None:
        chosen["environment"] = {n: named(w) for n, w in world.items()} if isinstance(world, dict) else named(world)
    if callable(metric := chosen.get("metric")):
        chosen["metric"] = named(metric)
    return TASKS["environment"](EnvironmentConfig(name="environment", **chosen), 0)
