"""What tests of programs share: an engine without a model, small programs and a task around them; tasks played with
scripted replies, DSPy's and agents'.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pandas
import pyarrow.parquet
import yaml

from mmrl import rng
from mmrl.config import DataConfig
from mmrl.config.tasks import task_schema
from mmrl.engines.base import Completion, Engine, Request
from mmrl.errors import ConfigError
from mmrl.records import EMPTY, Call, Example, Forest, Rollout
from mmrl.rollout import with_program
from mmrl.rollout.environment import Environment, SamplingSettings, no_reader
from mmrl.rollout.plans import Tree, independent
from mmrl.rollout.sample import sample
from mmrl.tasks import TASKS
from mmrl.tasks.base import ModuleScore, Score, Task
from mmrl.tasks.mini.teach import demonstrations
from tests.helpers import TOP

Answer = Callable[[Request], str]
ONCE = independent(1)


def letters(text: str) -> tuple[int, ...]:
    """The fakes' tokenizer: one token per character."""
    return tuple(ord(character) for character in text)


def spelled(ids: Sequence[int]) -> str:
    return "".join(chr(i) for i in ids)


@dataclass
class FakeEngine(Engine):
    """Answers each request with `answer(request)`, after a random pause; counts live programs like a real one."""

    answer: Answer
    pause: Callable[[], float] = lambda: 0.0
    live: int = 0
    policy_version: int = 0
    requests: list[Request] = field(default_factory=list)

    async def generate(self, request: Request) -> Completion:
        self.requests.append(request)
        await asyncio.sleep(self.pause())
        text = self.answer(request)
        return Completion(ids=letters(text), logprobs=(-0.5,) * len(text), finish="eos")

    def enter(self) -> None:
        self.live += 1

    def leave(self) -> None:
        self.live -= 1


def seeded_letter(request: Request) -> str:
    """A completion that depends on the request's seed and prompt alone."""
    return "abcdefghijklmnopqrstuvwxyz"[rng.digest(request.sampling.seed, spelled(request.prompt_ids)) % 26]


@dataclass
class Chain:
    """A program whose modules each see the outputs before them; `tool` is used between calls."""

    modules: tuple[str, ...] = ("a", "b", "c")

    async def run(self, example: Example, ctx: Any) -> str:
        text = example.inputs["text"]
        for module in self.modules:
            reply = await ctx.call(module, [{"role": "user", "content": f"{module}:{text}"}])
            text += reply.text
            text += await ctx.tool("echo", text="+")
        return text


@dataclass
class FakeTask(Task):
    """A task around a program; the reward is the share of 'a' to 'm' letters in the prediction."""

    program: Any
    name: str = "fake"
    tools: dict[str, Any] = field(default_factory=lambda: {"echo": lambda text: text})
    reward_sets: tuple[str, ...] = ("outcome",)
    main_metric: str = "score"
    failure_score: float = 0.0
    prompt_layout: str = "dspy"
    reward: Callable[[Any], float] = lambda prediction: sum(c in "abcdefghijklm" for c in str(prediction)) / 10

    def examples(self, split: str) -> list[Example]:
        return [Example(id=f"q{i}", inputs={"text": f"{split}{i}"}) for i in range(8)]

    def score(self, example: Example, prediction: Any, path: Sequence[Call], reward_set: str) -> Score:
        value = self.reward(prediction)
        return Score(reward=value, metrics={"score": value})

    def score_call(self, call: Call) -> ModuleScore:
        return ModuleScore(penalty=-0.5 if call.text == "z" else 0.0, facts={"words": len(call.text.split())})

    def describe(self) -> dict[str, Any]:
        return {"data": "fake"}


def extended(context: Sequence[int], observation: Any, ended: bool = False) -> tuple[int, ...]:
    text = observation if isinstance(observation, str) else "".join(f"<{m['role']}>{m['content']}" for m in observation)
    return (*context, *letters(text))


def environment(
    task: Any, engine: Any, retries: int = 0, key: tuple[Any, ...] = (0, 1), timeout_s: float = 600.0
) -> Environment:
    settings = SamplingSettings(
        temperature=1.0, top_p=1.0, top_k=0, parse_retries=retries, max_tokens=8, timeout_s=timeout_s
    )
    return Environment(
        task=task,
        engine=engine,
        render=lambda messages: letters("|".join(m["content"] for m in messages)),
        extend=extended,
        decode=spelled,
        settings=settings,
        key=key,
        read=lambda prompt, ids, tools: no_reader(prompt, ids, tools) if tools else {"content": spelled(ids)},
    )


DOCUMENTS = (
    {"title": "Lisbon", "text": "Lisbon is the capital of Portugal, on the river Tagus."},
    {"title": "Porto", "text": "Porto is a city on the river Douro."},
    {"title": "Tagus", "text": "The Tagus is a river of Iberia."},
)
EXAMPLE = Example(
    id="e", inputs={"question": "On which river is Lisbon?", "corpus": "given"}, metadata={"answers": ["Tagus", "Tejo"]}
)


def default_config(name: str, **options: Any) -> Any:
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


def forest_of(
    env: Environment,
    examples: Iterable[Example] | None = None,
    plans: Sequence[Tree] = ONCE,
    reward_set: str = "outcome",
) -> Forest:
    """The forest of `examples`, by default of the first that is trained on."""
    chosen = env.task.examples("train")[:1] if examples is None else examples
    return asyncio.run(sample(env, [(example, plans) for example in chosen], reward_set))


def run_program(
    program: Any,
    plans: Sequence[Tree] = ONCE,
    answer: Answer = seeded_letter,
    pause: Callable[[], float] = lambda: 0.0,
    examples: int = 1,
    kind: Callable[..., FakeTask] = FakeTask,
    settings: Mapping[str, Any] = EMPTY,
    **fields: Any,
) -> tuple[Forest, FakeEngine]:
    """The forest of a program's first examples, and the engine that answered; `fields` are the task's."""
    engine = FakeEngine(answer, pause)
    env = environment(with_program(kind(program, **fields)), engine)
    env.settings = replace(env.settings, **settings)
    forest = forest_of(env, env.task.examples("train")[:examples], plans)
    assert engine.live == 0, "every program that entered must have left"
    return forest, engine


def play(
    task: Any, texts: Sequence[str], reward_set: str = "turn", example: Example = EXAMPLE
) -> tuple[Rollout, list[Call], Script]:
    """One rollout in which the model says `texts`; a token is a character."""
    engine = Script(texts=texts)
    env = environment(task, engine)
    env.settings = replace(env.settings, max_tokens=task.config.max_tokens)
    forest = forest_of(env, [example], reward_set=reward_set)
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


def play_dspy(task, answer, examples, plans=ONCE, **fields):
    """The forest of `examples` when each request is answered by `answer(request)`."""
    return forest_of(environment(task, FakeEngine(answer), **fields), examples, plans, task.reward_sets[0])


def by_prompt(task, examples):
    """Answers each request as the demonstrations of `examples` do."""
    shown = {
        (d.module, "|".join(m["content"] for m in d.messages)): d.completion
        for example in examples
        for d in demonstrations(task, example)
    }
    return lambda request: shown[request.module, spelled(request.prompt_ids)]


def saved(path: Path, content):
    """Rows in the form of the path's suffix, any other JSON value, or a text as it is; returns the path as text."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(content), path)
    elif isinstance(content, str):
        path.write_text(content, encoding="utf-8")
    elif path.suffix == ".csv":
        pandas.DataFrame(content).to_csv(path, index=False)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n\n" for row in content), encoding="utf-8")
    else:
        path.write_text(json.dumps(content, indent=1), encoding="utf-8")
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
