"""What tests of tasks with DSPy programs share: building one, playing it with scripted replies."""

import asyncio
import csv
import json
from pathlib import Path

from mmrl.config import DataConfig
from mmrl.config.tasks import task_schema
from mmrl.errors import ConfigError
from mmrl.rollout.plans import independent
from mmrl.rollout.programs import with_program
from mmrl.rollout.sample import sample
from mmrl.tasks import TASKS
from mmrl.tasks.mini.teach import demonstrations
from tests.helpers.fakes import FakeEngine, environment


def make(name, seed=0, data=None, **options):
    """A task by its public name; `data` are keys of `task.data`."""
    return with_program(TASKS[name](task_schema(name)(name=name, data=DataConfig(**(data or {})), **options), seed))


def problems(name, **options):
    """What a bad config is told."""
    try:
        make(name, **options)
    except ConfigError as error:
        return "\n".join(error.problems)
    raise AssertionError("the config was accepted")


def filled(**fields):
    """A reply in the chat adapter's form."""
    return "\n\n".join(f"[[ ## {name} ## ]]\n{value}" for name, value in fields.items()) + "\n\n[[ ## completed ## ]]"


def play(task, answer, examples, plans=None, **fields):
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
