"""Every question answering program on the public files of every data set: loaded, searched, played, scored."""

from typing import Any

import pytest

from mmrl.config import DataConfig
from mmrl.config.retriever import Bm25Config
from mmrl.tasks import TASKS
from mmrl.tasks.agents.r1_searcher import QUERY as R1_QUERY
from mmrl.tasks.agents.search_o1 import QUERY as O1_QUERY
from tests.helpers.programs import default_config, play

PASSAGES = "2wikimultihopqa/2wikimultihopqa_corpus.json"
FILES = {
    # data set -> file, corpus for questions without passages
    "nq": ("nq_open/NQ-open.dev.jsonl", PASSAGES),
    "triviaqa": ("triviaqa/topics.dpr.trivia.test.txt", PASSAGES),
    "popqa": ("popqa/popqa.json", None),
    "hotpotqa": ("hotpotqa/hotpot_dev_distractor_sample.json", None),
    "2wiki": ("2wikimultihopqa/dev_sample.json", None),
    "musique": ("musique/dev_sample.jsonl", None),
}
TURNS = {
    "search_agent": ["<think> x </think>\n<search> {q} </search>", "<think> x </think>\n<answer> {a} </answer>"],
    "tool_agent": [
        '<reasoning> x </reasoning>\n<tool> {{"name": "wiki_search", "args": {{"query": "river"}}}} </tool>',
        "<reasoning> x </reasoning>\n<answer> {a} </answer>",
    ],
    "search_o1": [f"x {O1_QUERY[0]} {{q}} {O1_QUERY[1]}", "x", "\\boxed{{{a}}}"],
    "r1_searcher": [f"x {R1_QUERY[0]} {{q}} {R1_QUERY[1]}", "x </think>\n<answer> {a} </answer>"],
    "qa_direct": ["{a}"],
}


@pytest.mark.parametrize("dataset", FILES)
@pytest.mark.parametrize("name", TURNS)
def test_an_agent_that_knows_earns_what_the_official_rules_say(data_dir, name, dataset):
    file, corpus = FILES[dataset]
    path = str(data_dir / file)
    limits: dict[str, Any] = (
        {} if name == "qa_direct" else {"max_observation": 9000, "max_context": 60_000, "max_tokens": 2000}
    )
    if name == "tool_agent":
        limits["max_completion"] = 50_000
    if name != "qa_direct" and corpus:
        limits["corpus"] = str(data_dir / corpus)
    if name != "qa_direct":
        limits["retriever"] = Bm25Config(top_k=1)
    config = default_config(name, **{"dataset": dataset, "data": DataConfig(dev=path, dev_items=20)} | limits)
    task = TASKS[name](config.model_copy(update={"max_tokens": 2000}), 0)
    example = next(e for e in task.examples("dev") if not set(e.metadata["answers"][0]) & set("\\{}<>"))
    values = {"q": example.inputs["question"], "a": example.metadata["answers"][0]}
    rollout, _, _ = play(task, [text.format(**values) for text in TURNS[name]], "outcome", example)
    assert rollout.error is None
    assert rollout.metrics["em"] == rollout.metrics["f1"] == rollout.metrics["answered"] == 1
    assert len(task.examples("dev")) == 20
