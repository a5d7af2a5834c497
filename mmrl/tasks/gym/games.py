"""Games of textarena, one of whose players learns: the task `textarena`.

As the package's own agents do, a player gets the game's observation of the moment as its whole prompt, and its reply,
less thoughts, is the move. The reward is what the game gives the learning player in the end.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, TypedDict

from typing_extensions import override

from mmrl import rng
from mmrl.config.base import SPLITS
from mmrl.config.tasks import TextArenaConfig
from mmrl.errors import ConfigError
from mmrl.records import Call, Example
from mmrl.tasks.base import Context, Program, Score, Task
from mmrl.tasks.environments.episode import Episode
from mmrl.tasks.gym.sessions import MOVE, GameSession, GameSource
from mmrl.tasks.prompts import PromptedTask, Prompts, Shot, Template, load_prompts, prompts_file, shot_of

PLAYER, OPPONENT = "player", "opponent"


class Played(TypedDict):
    """Result of a game."""

    outcome: float | None
    """Of the learning player; None: the game was not finished."""
    won: bool
    """More than each other player's."""
    moves: int
    """Of the learning player."""
    invalid: bool
    """It lost by a move that the rules do not allow."""
    reason: str
    """Why the game ended, in the game's words."""


@dataclass(slots=True)
class GameProgram:
    """Implements `mmrl.tasks.base.Program`: reads `inputs["seed"]` and `inputs["seat"]`."""

    prompts: Prompts
    source: GameSource
    config: TextArenaConfig
    modules: tuple[str, ...]

    async def run(self, example: Example, ctx: Context) -> Played:
        """Play a game to its end, or to the learning player's last move allowed."""
        limit, seat = self.config.action_timeout_s, example.inputs["seat"]
        episode = Episode(ctx, example.inputs, self.source, {MOVE: self.source}, lambda name: False, limit)
        try:
            asked, moves = await episode.reset(), 0
            while asked:  # nobody is, once the game is over
                player, _, text = asked.partition("\n")
                learns = int(player) == seat
                if learns and moves == self.config.max_turns:
                    break
                moves += learns
                module = PLAYER if learns else OPPONENT
                messages = self.prompts.messages(module, observation=text)
                reply = await ctx.call(module, messages, as_message=True)
                asked = (await episode.act(MOVE, {"text": reply.parsed["content"]})).text
            # The moves of a replay may take long: no batch waits for them.
            ctx.leave()
            try:
                session = await episode.world()
                assert isinstance(session, GameSession)
                outcome = None if asked else await episode.limited(session, session.reward(), "its outcome")
            finally:
                ctx.enter()
            facts = session.facts
            return Played(outcome=outcome, won=session.won, moves=moves, invalid=facts[0], reason=facts[1])
        finally:
            await episode.close()


class TextArenaTask(Task, PromptedTask):
    """Implements `mmrl.tasks.base.Task`.

    Raises:
        ConfigError: the package is missing; an unknown game or parameter, or a game that cannot be played here; bad
            prompts.
    """

    # Untyped, as in `OpenQaTask`.
    program: Any
    reward_sets = ("outcome",)
    main_metric = "score"
    tools: Mapping[str, Any] = {}
    absent_features = frozenset({"penalties", "parse_failures", "observations"})

    def __init__(self, config: TextArenaConfig, seed: int):
        if importlib.util.find_spec("textarena") is None:
            raise ConfigError("task: textarena needs the package textarena; pip install 'mmrl[gym]'")
        if config.game is None:
            raise ConfigError("task.game: missing; expected a game of textarena, such as GuessTheNumber-v0")
        self.name, self.config, self.failure_score = config.name, config, config.failure_score
        self.modules = (PLAYER, OPPONENT) if config.opponent == "policy" else (PLAYER,)
        self.source = GameSource(config)
        from textarena.agents.basic_agents import STANDARD_GAME_PROMPT

        roles = {
            "system": Template(STANDARD_GAME_PROMPT, instructions=True),
            "user": Template("{observation}", required=frozenset({"observation"})),
        }
        file = config.prompts and str(prompts_file(config.prompts, config.name))
        self.all_prompts = load_prompts(dict.fromkeys(self.modules, roles), file)
        self._examples = {split: [self._example(number) for number in config.data.seeds_of(split)] for split in SPLITS}
        self.program = self.make_program(self.all_prompts)

    def _example(self, seed: int) -> Example:
        seat = rng.stream("seat", seed).randrange(self.source.players)
        return Example(id=str(seed), inputs={"seed": seed, "seat": seat})

    @override
    def make_program(self, prompts: Prompts) -> Program:
        return GameProgram(prompts, self.source, self.config, self.modules)

    @override
    def shot_of(self, path: Sequence[Call], module: str) -> Shot | None:
        return shot_of(path, module)

    @override
    def examples(self, split: str) -> Sequence[Example]:
        return self._examples[split]

    def score(self, example: Example, prediction: Played, path: Sequence[Call], reward_set: str) -> Score:
        """Return the game's outcome; of a game that was not finished, `task.failure_score`."""
        outcome = prediction["outcome"]
        reward = self.failure_score if outcome is None else outcome
        facts = {
            "score": reward,
            "finished": float(outcome is not None),
            "moves": float(prediction["moves"]),
            "invalid": float(prediction["invalid"]),
        }
        won = {"won": float(prediction["won"])} if self.source.players > 1 else {}
        return Score(reward=reward, metrics={**facts, **won}, parts={"outcome": reward})

    @override
    def describe(self) -> Mapping[str, object]:
        params = "".join(f", {name}={value}" for name, value in self.config.params.items())
        players = f", {self.source.players} players" if self.source.players > 1 else ""
        facts = {"data": f"textarena {version('textarena')}: {self.config.game}{params}{players}"}
        if players:
            facts["opponent"] = "the policy" if self.config.opponent == "policy" else "random legal moves"
        return {**facts, **{f"{split} items": len(self._examples[split]) for split in SPLITS}}
