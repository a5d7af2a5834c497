import subprocess
import sys
from typing import Any

import pytest

from mmrl.config import DataConfig
from mmrl.config.retriever import Bm25Config
from mmrl.config.tasks import MultihopQaConfig
from mmrl.errors import ConfigError
from mmrl.records import Call, Example
from mmrl.tasks import TASKS
from mmrl.tasks.mini.teach import demonstrations
from mmrl.tasks.search_program import parse_queries, parse_selection
from tests.helpers.programs import saved


def make(seed=0, **options):
    return TASKS["hotpotqa"](MultihopQaConfig(name="hotpotqa", **options), seed)


def called(module, text, **facts):
    return Call(id="c", example="e", parent=None, module=module, completion_tokens=1, text=text, facts=facts)


def selected(documents, penalty):
    return {"selected_documents": documents, "invalid_selection": float(penalty < 0)}


@pytest.mark.parametrize(
    ("module", "text", "candidates", "penalty", "facts"),
    [
        ("rewriter", "### a; b; c; d ###", None, 0.0, {"sub_queries": 4, "unparsable": 0}),
        ("rewriter", "### a; b; c; d; e ###", None, -0.5, {"sub_queries": 5, "unparsable": 0}),
        ("rewriter", "a; b", None, -0.5, {"sub_queries": 0, "unparsable": 1}),
        ("reranker", "1, 2", 10, 0.0, selected(2, 0.0)),
        ("reranker", "1, 1", 10, -0.5, selected(1, -0.5)),
        ("reranker", "1, 1, 11, 12", 10, -0.5, selected(1, -0.5)),  # flat, not per fault
        ("reranker", "none", 10, -0.5, selected(0, -0.5)),
        ("reranker", "none", 0, 0.0, selected(0, 0.0)),
        ("answerer", "", None, 0.0, {"answer_words": 0}),
        ("answerer", " word" * 30, None, 0.0, {"answer_words": 30}),
        ("answerer", " word" * 31, None, -1.0, {"answer_words": 31}),
    ],
)
def test_penalties(module, text, candidates, penalty, facts):
    score = make().score_call(called(module, text, **({} if candidates is None else {"candidates": candidates})))
    assert (score.penalty, dict(score.facts)) == (penalty, facts)


def predicted(answer, candidates=(), selected=()):
    return {"answer": answer, "queries": [], "candidates": list(candidates), "selected": list(selected)}


def test_reward_is_plain_f1_and_metrics_follow_the_official_rules():
    task = make()
    example = Example(id="e", inputs={}, metadata={"answers": ["no"], "titles": ["A", "B"]})
    score = task.score(example, predicted("no never", ["A", "C", "A"], ["C"]), (), "outcome")
    assert score.reward == pytest.approx(2 / 3)
    assert score.metrics == {
        "em": 0,
        "f1": 0,
        "accuracy": 0,
        "answered": 1,
        "answer_words": 2,
        "answer_candidates": 1,
        "gold_retrieved": 0.5,
        "gold_selected": 0,
    }
    example = Example(id="e", inputs={}, metadata={"answers": ["Ty Mendoza", "Tyler"]})
    score = task.score(example, predicted("it is Tyler"), (), "outcome")
    assert score.reward == pytest.approx(0.5)
    shape = {"answer_words": 3, "answer_candidates": 1}
    assert score.metrics == {"em": 0, "f1": pytest.approx(0.5), "accuracy": 1, "answered": 1, **shape}


def test_an_empty_answer_is_never_right():
    # a gold answer that normalises to nothing, as nine of NQ, TriviaQA and PopQA do
    example = Example(id="e", inputs={}, metadata={"answers": ["The"]})
    metrics = make().score(example, predicted(""), (), "outcome").metrics
    assert (metrics["em"], metrics["f1"], metrics["accuracy"], metrics["answered"]) == (0, 0, 0, 0)
    assert make().score(example, predicted("the"), (), "outcome").metrics["em"] == 1


@pytest.mark.parametrize(("queries", "budget"), [(1, [10]), (2, [5, 5]), (3, [4, 3, 3]), (4, [3, 3, 2, 2])])
def test_the_budget_is_split_over_the_queries(queries, budget):
    task = make()
    asked = ["film", "city", "book", "company"][:queries]
    found = task.search(asked, "mini")
    assert len(found) == 10
    expected = [d for query, k in zip(asked, budget, strict=True) for d in task.search([query], "mini")[:k]]
    assert found == expected


def test_a_document_that_two_queries_bring_is_there_twice_unless_dedup():
    example = make().examples("dev")[0]
    queries = [example.inputs["question"]] * 2
    twice = [d["id"] for d in make().search(queries, "mini")]
    assert twice == twice[:5] * 2
    once = [d["id"] for d in make(retriever=Bm25Config(dedup=True)).search(queries, "mini")]
    assert once == twice[:5]
    assert make(retriever=Bm25Config(top_k=1)).search(["film", "city"], "mini") == make(
        retriever=Bm25Config(top_k=1)
    ).search(["film"], "mini")


def test_subsets_are_seeded_for_train_and_fixed_for_dev():
    data = DataConfig(train_items=20, dev_items=10)
    ids = {
        (seed, split): [e.id for e in make(seed, data=data).examples(split)]
        for seed in (1, 2)
        for split in ("train", "dev")
    }
    assert len(ids[1, "train"]) == 20
    assert ids[1, "train"] != ids[2, "train"]
    assert ids[1, "dev"] == ids[2, "dev"]
    assert ids[1, "train"] == [e.id for e in make(1, data=data).examples("train")]
    assert len(make(data=DataConfig(dev_items=10**6)).examples("dev")) == len(make().examples("dev"))


def test_demonstrations_are_what_the_program_would_want():
    task = make()
    seen_orders, noisy = set(), 0
    for example in task.examples("train")[:150]:
        shown = demonstrations(task, example)
        assert shown == demonstrations(task, example)
        assert parse_queries(shown[0].completion) == [hop["query"] for hop in example.metadata["hops"]]
        for one in shown:
            assert task.score_call(called(one.module, one.completion, candidates=10)).penalty == 0
            content = one.messages[-1]["content"]
            if one.module == "reranker":
                lines = [line for line in content.split("\n") if line.startswith("Document")]
                selection = parse_selection(one.completion, len(lines))
                titles = [lines[index].split(": ")[1].split(" | ")[0] for index in selection.indices]
                assert titles
                assert set(titles) <= set(example.metadata["titles"])
                seen_orders.add(one.completion)
            if one.module == "answerer":
                assert one.completion == example.metadata["answers"][0]
                assert all(f": {title} | " in content for title in example.metadata["titles"])
                noisy += content.count("\nDocument") > len(example.metadata["titles"])
    assert len(seen_orders) > 10
    assert noisy > 30


def test_no_demonstrations_without_hops():
    example = Example(id="e", inputs={"question": "q", "corpus": "mini"}, metadata={"answers": ["a"]})
    assert demonstrations(make(), example) == []


def test_all_config_problems_at_once(tmp_path):
    prompts = saved(tmp_path / "p.yaml", {"rewriter": {"user": "x"}})
    with pytest.raises(ConfigError) as caught:
        make(prompts=prompts, data=DataConfig(train="none.json", dev="nothing.jsonl"), corpus="no.jsonl")
    text = "\n".join(caught.value.problems)
    assert len(caught.value.problems) == 4
    assert "task.corpus: 'no.jsonl': no such file" in text
    assert "task.prompts" in text
    assert "task.data.train: 'none.json': no such file" in text
    assert "task.data.dev: 'nothing.jsonl': no such file" in text


def test_the_default_needs_neither_torch_nor_what_other_data_needs():
    code = (
        "import sys; from mmrl.tasks import TASKS; from mmrl.config.tasks import MultihopQaConfig; "
        "found = {'torch', 'transformers', 'datasets', 'bm25s', 'dspy', 'pyarrow'} & set(sys.modules); "
        "assert not found, found; from mmrl.tasks.mini.teach import demonstrations; "
        "task = TASKS['hotpotqa'](MultihopQaConfig(name='hotpotqa'), 0); "
        "assert demonstrations(task, task.examples('train')[0]); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("name", ["2wiki", "musique"])
def test_out_of_domain_columns_have_questions_of_their_own(name):
    task: Any = TASKS[name](MultihopQaConfig(name=name), 0)
    assert task.dataset == name
    trained = {example.inputs["question"] for example in make().examples("train")}
    assert not trained & {example.inputs["question"] for example in task.examples("dev")}
