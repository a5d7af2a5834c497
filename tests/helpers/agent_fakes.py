"""Hand-written fakes for the tests of agents: an engine that plays given texts, and one rollout of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import yaml

from mmrl.config import TaskConfig
from mmrl.config.tasks import task_schema
from mmrl.engines.base import Completion, Request
from mmrl.records import Call, Example, Rollout
from mmrl.rollout.plans import independent
from mmrl.rollout.sample import sample
from mmrl.tasks import TASKS
from tests.helpers.fakes import FakeEngine, environment, letters
from tests.scripts.test_docs import TOP

DOCUMENTS = (
    {"title": "Lisbon", "text": "Lisbon is the capital of Portugal, on the river Tagus."},
    {"title": "Porto", "text": "Porto is a city on the river Douro."},
    {"title": "Tagus", "text": "The Tagus is a river of Iberia."},
)
EXAMPLE = Example(
    id="e", inputs={"question": "On which river is Lisbon?", "corpus": "given"}, metadata={"answers": ["Tagus", "Tejo"]}
)


def default_config(name: str, **options: Any) -> TaskConfig:
    """`conf/task/<name>.yaml`, with other options."""
    section = yaml.safe_load((TOP / "conf" / "task" / f"{name}.yaml").read_text())["task"]
    return task_schema(name).model_validate(section | options)


def make(name: str, folder: Any, documents: Sequence[dict[str, str]] = DOCUMENTS, **options: Any) -> Any:
    """A task whose corpus is `documents`."""
    path = folder / "corpus.json"
    path.write_text(json.dumps(list(documents)), encoding="utf-8")
    return TASKS[name](default_config(name, corpus=str(path), **options), 0)


@dataclass
class Script(FakeEngine):
    """Plays `texts` one after the other, the last for ever; keeps to token limits and stop strings like a real one."""

    answer: Any = None
    texts: Sequence[str] = ()

    async def generate(self, request: Request) -> Completion:
        text = self.texts[min(len(self.requests), len(self.texts) - 1)]
        self.requests.append(request)
        ends = [text.find(stop) + len(stop) for stop in request.sampling.stop if stop in text]
        stopped = text[: min(ends)] if ends else text
        shown = stopped[: request.sampling.max_tokens]
        finish = "length" if shown != stopped else "stop" if ends else "eos"
        return Completion(ids=letters(shown), logprobs=(-0.5,) * len(shown), finish=finish)


def play(
    task: Any, texts: Sequence[str], reward_set: str = "turn", example: Example = EXAMPLE
) -> tuple[Rollout, list[Call], Script]:
    """One rollout in which the model says `texts`; a token is a character."""
    engine = Script(texts=texts)
    env = environment(task, engine)
    env.settings = replace(env.settings, max_tokens=task.config.max_tokens)
    forest = asyncio.run(sample(env, [(example, independent(1))], reward_set))
    (rollout,) = forest.rollouts
    return rollout, list(forest.path(rollout)), engine
