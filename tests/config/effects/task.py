"""Effects of `task.*`: examples, prompts, what a program does with them, rewards, and what is searched."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dspy
import yaml

from mmrl.config import ALGO_SCHEMAS, EvalConfig, ModelConfig
from mmrl.config.tasks import OpenQaConfig
from mmrl.engines.base import Completion, Request
from mmrl.errors import LengthFailure, MmrlError
from mmrl.records import Example
from mmrl.rollout import with_program
from mmrl.rollout.environment import sampling_settings
from mmrl.rollout.plans import independent
from mmrl.rollout.sample import sample
from mmrl.run.build import reward_set
from mmrl.run.check import replay_problems
from mmrl.run.settle import module_assignment
from mmrl.stages.collect import Collector
from mmrl.tasks import TASKS
from tests.config.effects import Options, acts, agents, file_of, nested, refused
from tests.helpers.programs import (
    DOCUMENTS,
    EXAMPLE,
    Chain,
    FakeEngine,
    FakeTask,
    Script,
    default_config,
    environment,
    filled,
    forest_of,
    spelled,
)
from tests.helpers.stages import TOKENIZER

CHAINS = "task.hotpotqa;task.2wiki;task.musique"
TURNS = "task.search_agent;task.search_o1;task.r1_searcher"
"""Tasks whose model searches in turns of one context."""
QA = f"{CHAINS};{TURNS};task.tool_agent"
SEARCH = f"{QA};task.hover"
HERE, AGENTS = __name__, agents.__name__


class Answerer(dspy.Module):
    def __init__(self, signature: str = "question -> answer"):
        super().__init__()
        self.answer = dspy.Predict(signature)

    def forward(self, question: str) -> Any:
        return self.answer(question=question)


class Resilient(Answerer):
    def forward(self, question: str) -> Any:
        try:
            return self.answer(question=question)
        except Exception:
            return dspy.Prediction(answer="none")


class Other(Answerer):
    def __init__(self) -> None:
        super().__init__("question -> reasoning, answer")


async def plain(example: Example, ctx: Any) -> str:
    reply = await ctx.call("one", [{"role": "user", "content": str(example.inputs)}])
    return str(reply.text)


def right(record: Any, prediction: Any) -> float:
    return 1.0


def wrong(record: Any, prediction: Any) -> float:
    return 0.0


def _files(name: str, folder: Path) -> Options:
    """Options under which a task reads its three splits from files."""
    made: Options = {f"data.{split}": file_of(name, folder, start) for split, start in SPLITS.items()}
    if isinstance(default_config(name), OpenQaConfig):
        made["dataset"] = "hotpotqa"
    return made


SPLITS = {"train": 0, "dev": 100, "test": 200}
OTHER_FILE = "OTHER FILE"
OTHER_CORPUS = "OTHER CORPUS"
AS_BEFORE = "AS BEFORE"
"""The value that the observation itself gives."""


def built(name: str, options: Options, folder: Path, data: bool = False) -> Any:
    """A task, on files of its own layout or on the mini world."""
    chosen = dict(options)
    if name in ("agent", "dspy"):
        data = True
        own = {"program": f"{HERE}:Answerer"} if name == "dspy" else {"agent": f"{AGENTS}:agent"}
        own = {} if "command" in chosen else own
        chosen = {"metric": f"{HERE}:right", "inputs": ("question",)} | own | chosen
        rule = {key[6:]: chosen.pop(key) for key in list(chosen) if key.startswith("rules.")}
        chosen |= {"rules": (rule,)} if rule else {}
    if data:
        chosen = _files(name, folder) | {key: value for key, value in chosen.items() if value != AS_BEFORE}
    if (data and name == "hover") or chosen.get("corpus") == OTHER_CORPUS:
        (folder / "corpus.json").write_text(json.dumps(list(DOCUMENTS)), encoding="utf-8")
        chosen["corpus"] = str(folder / "corpus.json")
    chosen = {key: file_of(name, folder, 300) if value == OTHER_FILE else value for key, value in chosen.items()}
    return with_program(TASKS[name](default_config(name, **nested(chosen)), 0))


def examples(name: str, options: Options, folder: Path, data: bool = True) -> object:
    """The examples of every split, or why there are none."""
    try:
        task = built(name, options, folder, data)
    except MmrlError as error:
        return type(error)
    return {split: [(e.id, dict(e.inputs)) for e in task.examples(split)] for split in SPLITS}


mini_examples = partial(examples, data=False)
"""The same on the mini world."""


# --- one rollout


class _Full(FakeEngine):
    """Its context is full."""

    async def generate(self, request: Request) -> Completion:
        raise LengthFailure("full")


def rolled_out(task: Any, engine: Any, example: Example | None = None, chosen: str | None = None) -> Any:
    """The forest of an example, by default of the first that is trained on."""
    env = environment(task, engine)
    env.settings = sampling_settings(EvalConfig(), task.config)
    return forest_of(env, example and [example], reward_set=reward_set(task, chosen))


def first_prompt(task: Any, example: Example | None = None) -> str:
    engine = FakeEngine(lambda request: "x")
    rolled_out(task, engine, example)
    return spelled(engine.requests[0].prompt_ids)


def failed(name: str, options: Options, folder: Path) -> object:
    """Reward of a rollout whose context is full."""
    task = built(name, options, folder)
    (rollout,) = rolled_out(task, _Full(lambda request: "")).rollouts
    return rollout.reward


def limited(name: str, options: Options, folder: Path) -> object:
    """What a rollout may do under a task's limits: asked tokens, and how it ends."""
    task: Any = FakeTask(Chain(("a",)))
    task.config = default_config(name, **options)
    engine = FakeEngine(lambda request: "x", pause=lambda: 0.05)
    (rollout,) = rolled_out(task, engine, Example(id="q", inputs={"text": "x" * 60})).rollouts
    return rollout.error, [request.sampling.max_tokens for request in engine.requests]


def prompted(name: str, options: Options, folder: Path) -> object:
    """The first prompt of a rollout."""
    if options.get("prompts"):
        task = built(name, {}, folder)
        # in DSPy's programs the first module is not always the first that speaks
        modules = task.program.modules[:1]
        roles = {"system": "Say something else."}
        if name in ("banking77", "papillon", "hover", "dspy"):
            modules, roles = tuple(task.predictors), {"instructions": "Say something else."}
        (folder / "prompts.yaml").write_text(yaml.safe_dump(dict.fromkeys(modules, roles)), encoding="utf-8")
        options = {**options, "prompts": str(folder / "prompts.yaml")}
    task = built(name, options, folder)
    return first_prompt(task, task.examples("dev")[0])


TEXTS: dict[str, Sequence[str]] = {
    "hotpotqa": ("### Lisbon; Tagus ###", "0, 1", "Tagus"),
    "search_agent": (
        "<think> t </think>\n<search> Lisbon river </search>",
        "<think> t </think>\n<search> Tagus </search>",
        "<think> t <answer> A river Tagus </answer>",
    ),
    "tool_agent": (
        "a message without a whole pair <reasoning>",
        '<reasoning>t</reasoning><tool>{"name": "wiki_search", "args": {"query": "Lisbon river"}}</tool>',
        "<answer>Tagus</answer>",
    ),
    "search_o1": (
        "I need it. <|begin_search_query|>Lisbon river<|end_search_query|>",
        "Final information: the Tagus",
        "So <|begin_search_query|>Tagus<|end_search_query|>",
        "Final information: none",
        "\\boxed{Tagus}",
    ),
    "r1_searcher": (
        "<think>t <|begin_of_query|>Lisbon river<|end_of_query|>",
        "so <|begin_of_query|>Tagus<|end_of_query|>",
        "</think><answer>Tagus</answer>",
    ),
}


# found in normalised text alone, and answered in a form that only the loose check accepts
ASKED = replace(EXAMPLE, metadata={"answers": ["A river Tagus"]})


def played(name: str, options: Options, folder: Path) -> object:
    """A rollout in which the model searches and answers: prompts, prediction, reward and metrics."""
    task = built(name, {"corpus": OTHER_CORPUS, "max_tokens": 500, **options}, folder)
    engine = Script(texts=TEXTS.get(name, TEXTS["hotpotqa"]))
    example = ASKED if name == "search_agent" else EXAMPLE
    corpus = next(iter(task.search_tool.corpora))
    forest = rolled_out(task, engine, replace(example, inputs={**example.inputs, "corpus": corpus}), task.config.reward)
    (rollout,) = forest.rollouts
    task.close()
    return (
        [spelled(request.prompt_ids) for request in engine.requests],
        [request.sampling.max_tokens for request in engine.requests],
        [(call.turn_reward, call.penalty) for call in forest.path(rollout)],
        (str(rollout.prediction), rollout.reward, dict(rollout.metrics), rollout.error),
    )


def gained(name: str, options: Options, folder: Path) -> object:
    """Turn rewards that the collector adds, where the gold answer becomes likelier with the prompt's length."""
    task = built(name, {"corpus": OTHER_CORPUS, "max_tokens": 500, **options}, folder)
    corpus = next(iter(task.search_tool.corpora))
    example = replace(ASKED, inputs={**EXAMPLE.inputs, "corpus": corpus})
    forest = rolled_out(task, Script(texts=TEXTS[name]), example, "gain")
    task.close()
    score = lambda calls: [[-1000 / len(call.prompt_ids)] * len(call.completion_ids) for call in calls]  # noqa: E731
    processes = SimpleNamespace(all_sample=True, forest=lambda forest, examples: forest)
    log = SimpleNamespace(processes=processes, timed=lambda name: nullcontext(), note_own_code=lambda *facts: None)
    forwards = SimpleNamespace(settings=SimpleNamespace(critic=None), policy_logprobs=score)
    config = SimpleNamespace(task=task.config, algo=None, train=SimpleNamespace(max_failed_share=1.0))
    collector = SimpleNamespace(
        log=log, trainer=SimpleNamespace(forwards=forwards), reward_set="gain", task=task, config=config
    )
    collector.tokenizer = TOKENIZER
    made = Collector._complete(collector, (forest, {}), [example], 1, [])
    return [call.turn_reward for call in made.calls.values()]


def answered(name: str, options: Options, folder: Path) -> object:
    """Metrics of an answer that is spelled otherwise than the gold one."""
    task = built(name, options, folder)
    example = Example(id="e", inputs={}, metadata={"answers": ["New-York"]})
    return task.answer_metrics("New York", example)


def searched(name: str, options: Options, folder: Path) -> object:
    """Titles that a search brings."""
    task = built(name, options, folder)
    try:
        if name == "hover":
            return [p["long_text"] for p in task.tools["search"](queries=["river Tagus"], top_k=5)]
        corpus = task.examples("dev")[0].inputs["corpus"]
        return [p["title"] for p in task.search(["river Tagus", "river Tagus"], corpus)]
    finally:
        task.close()


for split in SPLITS:
    acts("task.*", f"data.{split}", examples, AS_BEFORE, OTHER_FILE)
    acts("task.*", f"data.{split}_items", examples, None, 3)
acts("task.*", "max_tokens", limited, 100, 7)
acts("task.*", "max_context", limited, 4096, 20)
acts("task.*", "timeout_s", limited, 600.0, 0.01)
acts("task.*", "failure_score", failed, 0.0, -0.5)
acts("task.[!a]*", "prompts", prompted, None, "MINE")
acts(f"{QA};task.qa_direct", "punctuation", answered, "delete", "space")
acts(SEARCH, "corpus", searched, None, OTHER_CORPUS)
acts(f"{CHAINS};task.qa_direct;task.search_o1", "dataset", mini_examples, "hotpotqa", "musique")
acts("task.r1_searcher", "dataset", mini_examples, "hotpotqa", "nq")
acts("task.search_agent;task.tool_agent", "dataset", examples, "hotpotqa", "musique")
acts(QA, "retriever.top_k", searched, 3, 1)
acts(CHAINS, "retriever.dedup", searched, False, True, retriever__top_k=4)
refused(f"{TURNS};task.tool_agent;task.hover", "retriever.dedup", "true", "no effect")
refused("task.tool_agent;task.hover", "retriever.snippet_words", "5", "no effect")
refused("task.hover", "retriever.top_k", "5", "use task.hop_top_k")
acts(f"{CHAINS};{TURNS}", "retriever.snippet_words", played, 100, 2)
acts("task.search_agent;task.tool_agent", "reward", played, "outcome", "turn")
acts("task.r1_searcher", "reward", played, "outcome", "stage1")
refused(f"{CHAINS};task.qa_direct;task.search_o1;task.banking77;task.papillon", "reward", "turn", "expected")
acts(f"{TURNS};task.tool_agent", "max_observation", played, 500, 16)
acts(TURNS, "max_turns", played, 3, 1)
acts("task.search_agent", "count_final_call", played, False, True, max_turns=2)
acts("task.search_agent", "search_penalty", played, 0.1, 0.3, reward="turn")
acts("task.search_agent", "final_penalty", played, -1.0, -0.5, reward="turn")
acts("task.search_agent", "em_needs_format", played, True, False, reward="turn")
acts("task.search_agent", "format_check", played, "strict", "loose", reward="turn")
acts("task.search_agent", "retrieval_match", played, "normalized", "case_insensitive", reward="turn")
acts("task.search_agent", "gain", gained, "probability", "logprob")
acts("task.tool_agent", "max_completion", played, 1024, 120, max_tokens=500)
acts("task.tool_agent", "outcome_rewards", played, 4, 3)
acts("task.tool_agent", "format_rewards", played, "strict", "released")
acts("task.qa_direct", "chain_of_thought", prompted, False, True)


# --- the tasks of the mmGRPO paper, and one's own


def drawn(name: str, options: Options, folder: Path) -> object:
    """The training examples of a long file."""
    source = file_of(name, folder, 0, 320)
    more = {"corpus": OTHER_CORPUS, "claim_hops": None} if name == "hover" else {}
    task = built(name, {"data.train": source, **more, **options}, folder)
    return [example.id for example in task.examples("train")]


def classes(name: str, options: Options, folder: Path) -> object:
    """The prompt of a classifier with other labels."""
    if options.get("labels"):
        (folder / "labels.json").write_text(json.dumps(["label 0", "label 1", "label 2"]), encoding="utf-8")
        options = {**options, "labels": str(folder / "labels.json")}
    return first_prompt(built(name, options, folder, data=True))


def system_message(name: str, options: Options, folder: Path) -> object:
    """What the first call of a rollout has before the item."""
    return first_prompt(built(name, options, folder, data=name != "hover")).partition("<user>")[0]


def hops(name: str, options: Options, folder: Path) -> object:
    """A rollout over several hops: its prompts, its passages and its reward."""
    task = built(name, options, folder, data=True)

    def answer(request: Request) -> str:
        if "query" in request.module:
            return filled(reasoning="r", search_query1="river Tagus", search_query2="Porto", search_query3="None")
        return filled(reasoning="r", new_key_facts="fact")

    engine = FakeEngine(answer)
    example = Example(
        id="e",
        inputs={"claim": "The Tagus is a river at Lisbon"},
        metadata={"titles": ["Lisbon", "Elsewhere"], "hops": 3},
    )
    forest = rolled_out(task, engine, example, task.config.reward)
    task.close()
    (rollout,) = forest.rollouts
    return len(engine.requests), [spelled(r.prompt_ids) for r in engine.requests], rollout.prediction, rollout.reward


def own(name: str, options: Options, folder: Path) -> object:
    """A rollout of a program of one's own: its prompt, the modules it called and its reward."""
    task = built(name, options, folder)
    engine = FakeEngine(lambda request: filled(answer="yes", reasoning="so"))
    (rollout,) = rolled_out(task, engine).rollouts
    prompts = [spelled(request.prompt_ids) for request in engine.requests]
    return task.program.modules, prompts, rollout.reward, rollout.error


def asked(name: str, options: Options, folder: Path) -> object:
    """A rollout of an agent: its requests as calls, what it was told, and its reward."""
    if options.get("command") == "A SCRIPT":
        options = {**options, "command": f"{sys.executable} {agents.__file__}"}
    forest = rolled_out(built(name, options, folder), FakeEngine(lambda request: "yes"))
    (rollout,) = forest.rollouts
    calls = [(call.module, call.prompt_text) for call in forest.path(rollout)]
    return calls, rollout.prediction, rollout.reward, rollout.error, rollout.error_message[:60]


def waited(name: str, options: Options, folder: Path) -> object:
    """Live programs, as the engine counts them, while an agent does something else."""
    task = built(name, {"agent": f"{AGENTS}:slow_agent", **options}, folder)
    engine, live = FakeEngine(lambda request: "yes"), list[int]()

    async def watched() -> None:
        env = environment(task, engine)
        playing = asyncio.create_task(sample(env, [(task.examples("train")[0], independent(1))], "outcome"))
        while not engine.requests:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.25)
        live.append(engine.live)
        await playing

    asyncio.run(watched())
    return live


def unlearning(name: str, options: Options, folder: Path) -> object:
    """Modules that a run leaves out of the loss."""
    config = built(name, options, folder).config
    model, engine = ModelConfig(name="tiny", path="tiny"), SimpleNamespace(endpoints=None)
    algo = ALGO_SCHEMAS["grpo"].model_validate({"name": "grpo"})
    run: Any = SimpleNamespace(model=model, engine=engine, algo=algo, task=config)
    return module_assignment(run, config.modules).untrained


def forking(name: str, options: Options, folder: Path) -> object:
    """What is said of an algorithm that plays an agent again."""
    task = built(name, options, folder)
    algo = ALGO_SCHEMAS["mhgpo_is"].model_validate({"name": "mhgpo_is"})
    run: Any = SimpleNamespace(task=task.config, algo=algo, seed=0)
    return replay_problems(run, task)


def caught(name: str, options: Options, folder: Path) -> object:
    """What each call of a program that goes on after a reply which does not parse is penalised by."""
    task = built(name, {"program": f"{HERE}:Resilient", **options}, folder)
    forest = rolled_out(task, FakeEngine(lambda request: "no"))
    return [call.penalty for call in forest.path(forest.rollouts[0])]


def offered(name: str, options: Options, folder: Path) -> object:
    """The reward set in use."""
    task = built(name, options, folder)
    return reward_set(task, task.config.reward)


acts("task.banking77;task.papillon;task.hover", "sample", drawn, "all", "paper")
acts("task.banking77", "labels", classes, None, "MINE")
acts("task.banking77", "prompt_layout", classes, "dspy", "shared_first")
acts("task.papillon;task.hover;task.dspy", "prompt_layout", system_message, "dspy", "shared_first")
acts("task.hover", "claim_hops", examples, None, 3)
acts("task.hover", "search_hops", hops, 2, 3)
acts("task.hover", "hop_top_k last_top_k", hops, 1, 2, search_hops=2)
acts("task.hover", "passages", hops, 100, 1, search_hops=2)
acts("task.hover", "reward", hops, "outcome", "strict", search_hops=2)
acts("task.dspy;task.agent", "reward", offered, None, "turn")
acts("task.dspy", "program", own, f"{HERE}:Answerer", f"{HERE}:Other")
acts("task.dspy", "metric", own, f"{HERE}:right", f"{HERE}:wrong")
PLAIN = f"{HERE}:plain"
acts("task.dspy", "inputs", own, ("question",), ("question", "gold"), program=PLAIN, modules=("one",))
acts("task.dspy", "modules", own, ("one",), ("two", "one"), program=PLAIN)
acts("task.dspy", "caught_parse_penalty", caught, 0.0, -0.25)


acts("task.agent", "agent", asked, f"{AGENTS}:agent", f"{AGENTS}:other_agent")
acts("task.agent", "command", asked, "A SCRIPT", "sh -c 'exit 3'")
acts("task.agent", "client_env", asked, False, True, command="A SCRIPT")
acts("task.agent", "metric", asked, f"{HERE}:right", f"{HERE}:wrong")
acts("task.agent", "inputs", asked, ("question",), ("question", "gold"))
acts("task.agent", "modules", asked, ("one",), ("two",))
acts("task.agent", "rules.pattern", asked, "title", "nothing", rules__reply="by rule")
acts("task.agent", "rules.reply", asked, "by rule", "otherwise", rules__pattern="title")
acts("task.agent", "rules.module", asked, "one", "two", rules__pattern="", modules=("one", "two"))
acts("task.agent", "frozen", unlearning, (), ("two",), modules=("one", "two"))
acts("task.agent", "deterministic", forking, True, False)
acts("task.agent", "max_calls", asked, 2, 1)
acts("task.agent", "idle_s", waited, 60.0, 0.1)
refused("task.agent", "prompts", "MINE", "whose prompts are its own code")
