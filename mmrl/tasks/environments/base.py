"""What an environment is to mmrl, whoever wrote it: a source that opens a session for each rollout.

A source knows its tools before anything is sampled; a session has the state of one rollout. `Episode` records what a
session says on the tape of its rollout; a session itself knows nothing of forks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mmrl.tasks.base import Context, Message


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What an action brought; compared when it is done again."""

    text: str
    failed: bool = False
    """The action raised, or there is none of that name."""
    done: bool = False
    """The episode is over."""
    state: str | None = None
    """State that it left, for algorithms that compare turns of one state; None: its text says it."""
    turn_reward: float | None = None
    """Reward so far of the turn whose action it was."""


class Session(ABC):
    """State of one rollout. Used by one rollout, one call at a time."""

    instance: object | None = None
    """The user's own object, for reward functions that look into it."""

    async def reset(self, row: Mapping[str, Any]) -> str:
        """Begin an episode of a record; returns what is appended to its prompt."""
        return ""

    @abstractmethod
    async def act(self, name: str, arguments: Mapping[str, Any]) -> Observation:
        """Use a tool. What the tool itself raises is an observation.

        Raises:
            RolloutError: the session cannot go on.
        """

    async def reward(self) -> float | None:
        """Return the episode's own reward; None: it has none."""
        return None

    def abandon(self) -> None:  # noqa: B027 (most have nothing that could block)
        """Give up a session whose call did not end in time."""

    async def close(self) -> None:  # noqa: B027
        """End it. Called once, also after a failure."""


class Source(ABC):
    """Environment, or server of tools, of which each rollout gets a session.

    Args:
        key: what the user has typed, for messages.
    """

    tools: Sequence[Message]
    """Functions that the model may call, as in OpenAI's protocol."""
    has_reward: bool = False
    """Its sessions have a reward of their own."""
    has_turn_rewards: bool = False
    """Its observations have rewards of turns."""
    turns_add_up: bool = False
    """The reward of an episode is the sum of its turns' rewards."""

    def __init__(self, key: str):
        self.key = key

    @property
    def names(self) -> Sequence[str]:
        """Return the names of the tools."""
        return [str(tool["function"]["name"]) for tool in self.tools]

    @abstractmethod
    async def open(self, ctx: Context) -> Session:
        """Return a session for one rollout, whose `ctx` is told of waits for other rollouts."""

    def row_problem(self, row: Mapping[str, Any]) -> str:
        """Return the reason why no episode can begin with a record; empty where one can."""
        return ""

    def close(self) -> None:  # noqa: B027
        """End what the sessions share; a later use starts it again."""
