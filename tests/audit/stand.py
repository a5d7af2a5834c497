"""An audit's plays over a program that can be enumerated, its policy played without a model."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from mmrl import rng
from mmrl.audit.plays import Plays
from mmrl.audit.settings import AuditKeys
from mmrl.engines.base import Request
from mmrl.rollout.environment import Environment
from tests.helpers.programs import FakeEngine, environment, spelled
from tests.helpers.tabular import Table, TableTask


@dataclass
class Stand:
    """What `Plays` needs of a stage."""

    table: Table
    seed: int = 0
    engine: FakeEngine = field(init=False)

    def __post_init__(self) -> None:
        self.task: Any = TableTask(self.table)
        self.engine = FakeEngine(self.reply)
        self.config = SimpleNamespace(seed=self.seed, algo=None, train=SimpleNamespace(max_failed_share=0.5))
        self.assignment = SimpleNamespace(untrained=frozenset())

    def reply(self, request: Request) -> str:
        history = tuple(map(int, spelled(request.prompt_ids).removeprefix("h")))
        draw, chances = rng.stream(request.sampling.seed), self.table.probabilities(history)
        return f"r{draw.choices(range(len(chances)), weights=chances)[0]}"

    def environment(self, algo: Any, key: Any) -> Environment:
        return environment(self.task, self.engine, key=key)


def plays_of(table: Table, seed: int = 0, stand: Stand | None = None, **keys: Any) -> Plays:
    stand = stand or Stand(table, seed)
    return Plays(
        keys=AuditKeys(algo=("grpo",), **{"examples": 2, **keys}),
        stage=stand,  # type: ignore[arg-type]
        examples=stand.task.examples("train"),
        reward_set="outcome",
        value=lambda leaf: leaf.rollout.reward,
    )
