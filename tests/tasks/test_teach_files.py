"""Demonstrations of data files that name their gold articles: they play as they are written, and earn everything."""

from html import unescape

import pytest

from mmrl.config import DataConfig
from mmrl.config.tasks import MultihopQaConfig
from mmrl.tasks import TASKS
from mmrl.tasks.mini.teach import demonstrations
from tests.helpers.programs import default_config, play

ROOMY = {"max_observation": 9000, "max_context": 90000, "max_tokens": 900}  # a token is a character here


@pytest.mark.parametrize(("name", "best"), [("search_agent", 1.0), ("r1_searcher", 1.0)])
@pytest.mark.parametrize(
    ("dataset", "file"),
    [
        ("hotpotqa", "hotpotqa/hotpot_dev_distractor_sample.json"),
        ("2wiki", "2wikimultihopqa/dev_sample.json"),
        ("musique", "musique/dev_sample.jsonl"),
    ],
)
def test_an_agent_searches_each_gold_article_and_answers(data_dir, name, best, dataset, file):
    data = DataConfig(dev=str(data_dir / file))
    task = TASKS[name](default_config(name, dataset=dataset, data=data, **ROOMY), 0)
    played = 0
    for example in task.examples("dev")[:40]:
        if len(example.metadata["titles"]) > 3:  # of more searches than r1_searcher makes
            continue
        if shown := demonstrations(task, example):
            titles = example.metadata["titles"]
            assert len(shown) == len(titles) + 1
            rollout, calls, _ = play(task, [d.completion for d in shown], "outcome", example)
            assert rollout.prediction["queries"] == [unescape(title) for title in titles]
            assert (rollout.reward, rollout.metrics["em"]) == (best, 1.0)
            for call, demonstration in zip(calls[1:], shown[1:], strict=True):
                assert call.prompt_text == demonstration.history[-1][1]
            played += 1
    assert played >= 20


def test_more_gold_articles_than_searches_have_none(data_dir):
    data = DataConfig(dev=str(data_dir / "2wikimultihopqa/dev_sample.json"))
    tasks = [
        TASKS["search_agent"](default_config("search_agent", dataset="2wiki", data=data, max_turns=most, **ROOMY), 0)
        for most in (3, 4)
    ]
    four = [example for example in tasks[0].examples("dev") if len(example.metadata["titles"]) == 4][:10]
    too_few, enough = ([bool(demonstrations(task, example)) for example in four] for task in tasks)
    assert sum(too_few) == 0 and sum(enough) >= 8


@pytest.mark.parametrize(
    ("name", "file"),
    [("hotpotqa", "hotpotqa/hotpot_dev_distractor_sample.json"), ("musique", "musique/dev_sample.jsonl")],
)
def test_three_agents_search_select_and_answer(data_dir, name, file):
    task = TASKS[name](MultihopQaConfig(name=name, data=DataConfig(dev=str(data_dir / file))), 0)
    played = 0
    for example in task.examples("dev")[:40]:
        shown = demonstrations(task, example)
        assert shown[0].module == "rewriter"
        first_found_all = len(shown[1].completion.split(",")) == len(example.metadata["titles"])
        if first_found_all and [d.module for d in shown[:3]] == ["rewriter", "reranker", "answerer"]:
            rollout, calls, _ = play(task, [d.completion for d in shown[:3]], "outcome", example)
            assert rollout.metrics["em"] == rollout.metrics["gold_selected"] == 1.0
            assert [call.module for call in calls] == ["rewriter", "reranker", "answerer"]
            played += 1
    assert played >= 25


def test_data_that_names_no_article_has_none(data_dir, tmp_path):
    (tmp_path / "corpus.jsonl").write_text('{"title": "A", "text": "alpha"}\n')
    data = DataConfig(dev=str(data_dir / "nq_open/NQ-open.dev.jsonl"))
    config = default_config("search_agent", dataset="nq", data=data, corpus=str(tmp_path / "corpus.jsonl"), **ROOMY)
    task = TASKS["search_agent"](config, 0)
    assert [d for example in task.examples("dev")[:20] for d in demonstrations(task, example)] == []
