"""Sessions of textarena's games: each with draws of its own, and perhaps opponents that draw among legal moves."""

from __future__ import annotations

import contextlib
import inspect
import io
import random
import re
import threading
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np
from typing_extensions import override

from mmrl import rng
from mmrl.config.tasks import TextArenaConfig
from mmrl.errors import (
    ConfigError,
    ProgramFailure,
    RewardFailure,
    RolloutError,
    ToolFailure,
    reason_of,
    refuse,
    unknown,
)
from mmrl.system.user_code import Worker, as_number, user_failure
from mmrl.tasks.base import Context
from mmrl.tasks.environments.base import Observation, Session, Source

T = TypeVar("T")

MOVE = "move"
"""Name of an action on the tape."""
MOST_PLAYERS = 15
_LEGAL = re.compile(r"(?:available|valid|legal|possible) (?:moves|actions)\b[^:\n]*:(.*)", re.IGNORECASE)

_DRAWING = threading.Lock()
"""Games draw from Python's and NumPy's global generators: held by the one that does."""


class GameSource(Source):
    """A game, of which each rollout gets one.

    Raises:
        ConfigError: an unknown game or parameter, or a game that cannot be played here or cannot be repeated.
    """

    tools = ()
    has_reward = True

    def __init__(self, config: TextArenaConfig):
        super().__init__("task.game")
        self.game, self.params, self.scripted = str(config.game), config.params, config.opponent != "policy"
        # Games print, and some try to download lists of words.
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            self._refuse_unknown()
            self.players = config.players or self._fewest()
            texts = [self._first_observation() for _ in range(2)]
        if texts[0] != texts[1]:
            raise ConfigError(
                f"task.game: {self.game} does not repeat itself from a seed, as forks and replays have to"
            )
        if self.players == 1 and config.opponent is not None:
            raise ConfigError(f"task.opponent: has no effect with {self.game}, which has one player; leave it out")
        if self.players > 1 and self.scripted and not legal_moves(texts[0]):
            raise ConfigError(
                f"task.opponent: {self.game} lists no legal moves, of which an opponent could draw one; set "
                "task.opponent=policy"
            )

    @override
    async def open(self, ctx: Context) -> Session:
        return GameSession(self)

    def make(self, **params: Any) -> Any:
        """Return a game that has not begun."""
        import textarena

        return textarena.make(self.game, **params)

    def _refuse_unknown(self) -> None:
        from textarena.envs.registration import ENV_REGISTRY

        if self.game not in ENV_REGISTRY:
            raise ConfigError(unknown("task.game", self.game, ENV_REGISTRY))
        try:
            kind = type(inner(self.make()))
        except Exception as error:  # whatever a game's module does when it is imported
            raise ConfigError(f"task.game: {self.game} cannot be made here: {_reason(error)}") from None
        names = [name for name in inspect.signature(kind).parameters if name != "kwargs"]
        refuse(unknown(f"task.params.{name}", name, names) for name in self.params if name not in names)

    def _fewest(self) -> int:
        """Return the smallest number of players: a game says how many it takes by refusing to begin."""
        import textarena

        reasons = []
        for players in range(1, MOST_PLAYERS + 1):
            self.players = players
            try:
                game = GameSession(self).begin(0)
            except Exception as error:
                reasons.append(_reason(error))
                continue
            # Some do not look at the number.
            if players > 1 or isinstance(game.state, textarena.SinglePlayerState):
                return players
        key = "task.params" if self.params else "task.game"
        why = next((reason for reason in reasons if "player" not in reason.lower()), reasons[0])
        raise ConfigError(f"{key}: {self.game} cannot begin with these parameters: {why}")

    def _first_observation(self) -> str:
        import textarena

        try:
            game = GameSession(self).begin(0)
            _, text = game.get_observation()
        except Exception as error:
            raise ConfigError(f"task.players: {self.game} cannot begin with {self.players}: {_reason(error)}") from None
        if not isinstance(text, str):
            name = self.game.removesuffix("-raw")
            raise ConfigError(f"task.game: {self.game} shows a {type(text).__name__} and no text; use {name}")
        for name, value in vars(inner(game)).items():
            if isinstance(value, textarena.Agent) or type(value).__name__.endswith("Jury"):
                raise ConfigError(f"task.game: {self.game} asks a model of its own ({name}), which no replay repeats")
        return text


class GameSession(Session):
    """A game. Used in a thread of its own: the first board of some takes seconds.

    The global generators are its own while it plays, and afterwards as they were.
    """

    facts: tuple[bool, str] = False, ""
    """At the end: whether the learning player made an invalid move, and why the game ended."""
    won = False
    """At the end: whether its outcome is larger than each other one's."""

    def __init__(self, source: GameSource):
        self._source = source
        self._worker = Worker()
        self._generators: tuple[Any, Any] | None = None
        self._seed = self._seat = self._drawn = 0

    def begin(self, seed: int) -> Any:
        """Begin the game of a seed; returns it."""

        def work() -> Any:
            game = self._source.make(**self._source.params)
            game.reset(num_players=self._source.players, seed=seed)
            return game

        self._seed = seed
        self.instance = self._alone(work)
        return self.instance

    @override
    async def reset(self, row: Mapping[str, Any]) -> str:
        self._seat = row["seat"]

        def work() -> str:
            self.begin(row["seed"])
            return self._alone(self._until_asked).text

        return await self._called(work)

    @override
    async def act(self, name: str, arguments: Mapping[str, Any]) -> Observation:
        def work() -> Observation:
            done, _ = self._game.step(arguments["text"])
            return Observation(text="", done=True) if done else self._until_asked()

        return await self._called(lambda: self._alone(work))

    @override
    async def reward(self) -> float | None:
        rewards, infos = await self._called(self._game.close)
        outcomes = {seat: as_number(reward) for seat, reward in rewards.items()}
        if (outcome := outcomes.get(self._seat)) is None:
            raise RewardFailure(f"{self._source.game} gave {rewards!r:.100} as outcome, expected a number each")
        info = infos[self._seat]
        self.facts = bool(info.get("invalid_move")), str(info.get("reason", ""))
        self.won = all(outcome > (other or 0.0) for seat, other in outcomes.items() if seat != self._seat)
        return outcome

    @override
    async def close(self) -> None:
        self._worker.close()

    @property
    def _game(self) -> Any:
        return self.instance

    def _until_asked(self) -> Observation:
        """Play the scripted opponents until a model is asked; returns who is, and what it sees."""
        while True:
            player, text = self._game.get_observation()
            if player == self._seat or not self._source.scripted:
                return Observation(text=f"{player}\n{text}")
            moves = legal_moves(text)
            if not moves:
                raise ToolFailure(f"{self._source.game} lists no legal moves for its player {player}")
            self._drawn += 1
            done, _ = self._game.step(rng.stream("opponent", self._seed, self._drawn).choice(moves))
            if done:
                return Observation(text="", done=True)

    async def _called(self, function: Callable[[], T]) -> T:
        try:
            return await self._worker.call(function)
        except RolloutError:
            raise
        except Exception as error:
            raise user_failure(ProgramFailure, error, f"{self._source.game} raised ") from error

    def _alone(self, function: Callable[[], T]) -> T:
        """Call what draws from the global generators, by draws that follow from the seed and earlier calls alone."""
        with _DRAWING:
            outer = random.getstate(), np.random.get_state()
            if self._generators is None:
                random.seed(self._seed)
                np.random.seed(self._seed)
            else:
                random.setstate(self._generators[0])
                np.random.set_state(self._generators[1])
            try:
                return function()
            finally:
                self._generators = random.getstate(), np.random.get_state()
                random.setstate(outer[0])
                np.random.set_state(outer[1])


def legal_moves(text: str) -> list[str]:
    """Return the moves in brackets of the last line of an observation that lists legal ones."""
    lists = [re.findall(r"\[[^\[\]\n]+\]", line) for line in _LEGAL.findall(text)]
    return next((moves for moves in reversed(lists) if moves), [])


def inner(game: Any) -> Any:
    """Return a game without the package's wrappers."""
    import textarena

    while isinstance(game, textarena.Wrapper):
        game = game.env
    return game


def _reason(error: Exception) -> str:
    if isinstance(error, LookupError) and (missing := re.search(r"nltk\.download\('(\w+)'\)", str(error))):
        return f"NLTK's list '{missing[1]}' is not there; get it with: python -m nltk.downloader {missing[1]}"
    reason = reason_of(error)
    return f"{reason}; its file needs a newer Python" if isinstance(error, SyntaxError) else reason
