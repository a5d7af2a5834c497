"""What tests of tasks share: programs played with scripted replies, DSPy's and agents', and one rollout of them."""

from __future__ import annotations

import asyncio
import csv
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from mmrl.config import DataConfig, TaskConfig
from mmrl.config.tasks import task_schema
from mmrl.engines.base import Completion, Request
from mmrl.errors import ConfigError
from mmrl.records import Call, Example, Rollout
from mmrl.rollout import with_program
from mmrl.rollout.plans import independent
from mmrl.rollout.sample import sample
from mmrl.tasks import TASKS
from mmrl.tasks.mini.teach import demonstrations
from tests.helpers import TOP
from tests.helpers.fakes import FakeEngine, environment, letters

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


def make_dspy(name, seed=0, data=None, **options):
    """A task by its public name; `data` are keys of `task.data`."""
    return with_program(TASKS[name](task_schema(name)(name=name, data=DataConfig(**(data or {})), **options), seed))


def problems(name, **options):
    """What a bad config is told."""
    try:
        make_dspy(name, **options)
    except ConfigError as error:
        return "\n".join(error.problems)
    raise AssertionError("the config was accepted")


def filled(**fields):
    """A reply in the chat adapter's form."""
    return "\n\n".join(f"[[ ## {name} ## ]]\n{value}" for name, value in fields.items()) + "\n\n[[ ## completed ## ]]"


def play_dspy(task, answer, examples, plans=None, **fields):
    """The forest of `examples` when each request is answered by `answer(request)`."""
    engine = FakeEngine(answer)
    env = environment(task, engine, **fields)
    planned = [(example, plans or independent(1)) for example in examples]
    return asyncio.run(sample(env, planned, task.reward_sets[0]))


def by_prompt(task, examples):
    """Answers each request as the demonstrations of `examples` do."""
    shown = {
        (d.module, "|".join(m["content"] for m in d.messages)): d.completion
        for example in examples
        for d in demonstrations(task, example)
    }
    return lambda request: shown[request.module, "".join(map(chr, request.prompt_ids))]


def write_csv(path: Path, rows):
    """Rows (mappings with equal keys) as CSV; returns the path as text."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return str(path)


def write_json(path: Path, content):
    """Any JSON value; returns the path as text."""
    path.write_text(json.dumps(content), encoding="utf-8")
    return str(path)


def search_agent(**retriever):
    """The task `search_agent` with other keys of `task.retriever`."""
    return TASKS["search_agent"](default_config("search_agent", retriever={"top_k": 3} | retriever), 0)


class Searcher(Script):
    """Searches for something of its own in every rollout, then answers."""

    async def generate(self, request):
        prompt = "".join(map(chr, request.prompt_ids))
        number = prompt.partition("Question: q")[2].partition("?")[0]
        searched = "</information>" in prompt.partition("Question:")[2]
        self.texts = [
            "<think> t </think>\n<answer> Tagus </answer>"
            if searched
            else f"<think> t </think>\n<search> river n{number} </search>"
        ]
        return await super().generate(request)
