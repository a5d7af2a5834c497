"""The four-hop program: queries, passages kept, recall and the strict score, HoVer's records, the mini claims."""

import itertools
import random
from typing import Any

import pytest

from mmrl.records import Example
from mmrl.tasks.dspy.built_in import drop_empty_queries
from scripts.tiny_model.mini.questions import make_claims
from scripts.tiny_model.mini.world import make_world
from tests.helpers.programs import filled, problems, saved
from tests.helpers.programs import make_dspy as make
from tests.helpers.programs import play_dspy as play


def claim(number, question=None, hops=3, titles=("A", "B"), **changes):
    record = {
        "uid": f"u{number}",
        "claim": f"claim {number}",
        "supporting_facts": [[title, 0] for title in titles],
        "label": "SUPPORTED",
        "num_hops": hops,
        "hpqa_id": question or f"q{number}",
    }
    return {key: value for key, value in {**record, **changes}.items() if value is not ...}


@pytest.fixture
def corpus(tmp_path):
    return saved(tmp_path / "corpus.json", [{"title": t, "text": f"{t} is here"} for t in "ABC"])


@pytest.fixture
def of(tmp_path, corpus):
    """Options of the task with these claims as its dev split."""

    def of(*claims, **more):
        path = saved(tmp_path / "hover.json", [*claims])
        return {"data": {"dev": path}, "corpus": corpus, "sample": "all"} | more

    return of


def test_mini_splits_share_no_claim_and_no_document():
    claims = {split: make_claims(split) for split in ("train", "dev", "test")}
    titles = {split: {title for c in found for title in c.metadata["titles"]} for split, found in claims.items()}
    assert [len({c.inputs["claim"] for c in found}) for found in claims.values()] == [800, 300, 300]
    assert not titles["train"] & titles["dev"] and not titles["dev"] & titles["test"]
    world = {entity.name: entity for entity in make_world().entities.values()}
    for c in claims["dev"]:
        text = c.inputs["claim"]
        subject, person, city = (world[title] for title in c.metadata["titles"])
        assert subject.name in text and person.name not in text and city.name not in text
        assert person.id in subject.facts.values() and city.id == person.facts["birth_city"]
        country = next(e.name for e in world.values() if e.id == city.facts["country"])
        assert (country in text) == (c.metadata["label"] == "SUPPORTED")
    labels = [c.metadata["label"] for c in claims["dev"]]
    assert labels.count("SUPPORTED") == 150


class Search:
    """A task's search tool that logs what it was asked; passages are named after the query, better ones first."""

    def __init__(self):
        self.asked = []

    def __call__(self, queries, top_k):
        self.asked.append((list(queries), top_k))
        # every query also brings one passage that all share
        return [
            {"long_text": "Shared | text" if n == 0 else f"{query}-{n} | text", "score": 1.0 / (n + 1)}
            for query in queries
            for n in range(top_k)
        ]


def scripted(queries):
    hops = itertools.cycle(queries)

    def answer(request):
        if request.module == "append_notes.predict":
            return filled(reasoning="so", new_key_facts="fact")
        first, second, third = next(hops)
        return filled(reasoning="so", search_query1=first, search_query2=second, search_query3=third)

    return answer


def test_passages_per_hop_and_in_all(of):
    task = make("hover", **of(*map(claim, range(3))))
    task.tools = {"search": (search := Search())}
    example = task.examples("dev")[0]
    queries = [("x", "y", "x"), ("None", "z", "none."), ("u", "v", "w")]
    (rollout,) = play(task, scripted(queries), [example]).rollouts
    assert rollout.error is None
    assert search.asked == [(["claim 0"], 10), (["x", "y"], 10), (["z"], 10), (["u", "v", "w"], 30)]
    docs = rollout.prediction["retrieved_docs"]
    # the last hop brings 3 x 29 + 1 different passages and keeps 70 of them: best first, so 1/1, then 1/2, ...
    assert len(docs) == 100
    assert docs[10:13] == ["Shared | text", "x-1 | text", "y-1 | text"]
    assert [doc.split("-")[0] for doc in docs[31:37]] == ["u", "v", "w", "u", "v", "w"]
    assert rollout.prediction["key_facts"] == ["fact"] * 3
    assert rollout.metrics["passages"] == 100.0


def test_no_query_at_all_searches_nothing_and_goes_on(of):
    task = make("hover", **of(claim(0)))
    task.tools = {"search": (search := Search())}
    (rollout,) = play(task, scripted([("None", "NONE", " ")]), task.examples("dev")).rollouts
    assert rollout.error is None and search.asked == [(["claim 0"], 10)]
    assert len(rollout.prediction["retrieved_docs"]) == 10 and len(rollout.prediction["key_facts"]) == 3


def test_a_predictor_keeps_the_key_facts_of_its_own_hop(of):
    # DSPy's traces, and with them demonstrations, hold the inputs until the rollout has ended.
    task = make("hover", **of(claim(0)))
    task.tools = {"search": Search()}
    trace = []

    kind: Any = type(task.program)

    class Traced(kind):
        async def run(self, example, ctx):
            return await self.run_traced(example, ctx, trace)

    task.program.__class__ = Traced
    facts = (f"fact {number}" for number in range(3))

    def answer(request):
        if request.module == "append_notes.predict":
            return filled(reasoning="so", new_key_facts=next(facts))
        return filled(reasoning="so", search_query1="x", search_query2="None", search_query3="None")

    (rollout,) = play(task, answer, task.examples("dev")).rollouts
    assert rollout.prediction["key_facts"] == ["fact 0", "fact 1", "fact 2"]
    seen = {name: [] for name in task.program.modules}
    for predictor, inputs, _ in trace:
        seen[task.program.structure.name_of([predictor])].append(inputs["key_facts"])
    assert seen == {
        "append_notes.predict": [[], ["fact 0"], ["fact 0", "fact 1"]],
        "generate_query.predict": [["fact 0"], ["fact 0", "fact 1"], ["fact 0", "fact 1", "fact 2"]],
    }


@pytest.mark.parametrize(
    ("queries", "kept"),
    [
        (["a", "b", "c"], ["a", "b", "c"]),
        (["a", "a", "b"], ["a", "b"]),
        (["None", "none", "NONE."], []),
        ([None, "", "  "], []),
        (["'None'", '"a"', " a "], ['"a"', "a"]),
        (["None of the films", "x", "x"], ["None of the films", "x"]),
    ],
)
def test_which_queries_are_searched(queries, kept):
    assert drop_empty_queries(queries) == kept


def score(task, docs, titles=("A", "B"), reward_set="outcome"):
    example = Example(id="e", inputs={}, metadata={"titles": list(titles)})
    return task.score(example, {"retrieved_docs": docs}, [], reward_set)


def test_recall_and_the_strict_score():
    task = make("hover")
    assert task.reward_sets == ("outcome", "strict")
    assert score(task, ["A | x", "C | y"]).metrics == {"recall": 0.5, "all_titles": 0.0, "passages": 2.0}
    assert score(task, ["B | x", "A | y"]).metrics["all_titles"] == 1.0
    assert score(task, ["A | x"]).reward == 0.5 and score(task, ["A | x"], reward_set="strict").reward == 0.0
    assert score(task, [], titles=["A"]).reward == 0.0
    assert score(task, ["C | A | B"]).metrics["recall"] == 0.0, "a title ends at the first bar"
    assert score(task, ["The porto! | x"], titles=["Porto"]).metrics["recall"] == 1.0, "titles are compared normalised"
    same = score(task, ["Will & Grace | x", "Cafe\u0301 | y"], titles=["Will &amp; Grace", "Caf\u00e9"])
    assert same.metrics["recall"] == 1.0, "as copies of Wikipedia write them"
    assert score(task, ["B | x"], titles=["B", "The B"]).metrics["all_titles"] == 1.0, "two names of one page"
    barred = score(task, ["A | B | text"], titles=["A | B"])
    assert barred.metrics["recall"] == 1.0, "also in gold titles"
    late = [f"C{n} | x" for n in range(100)] + ["A | x"]
    assert score(task, late).metrics["recall"] == 0.0, "only the first 100 count"


def test_the_papers_sample(tmp_path, corpus):
    rows = [claim(n, question=f"q{n // 2}", hops=3 if n % 4 < 2 else 2) for n in range(4000)]
    path = saved(tmp_path / "hover.json", rows)
    task = make("hover", data={"train": path, "dev": path}, corpus=corpus, sample="paper")
    expected = [f"u{n}" for n in range(0, 4000, 4)]  # three hops, the first claim of each question
    random.Random(0).shuffle(expected)
    assert [e.id for e in task.examples("train")] == expected[:500]
    assert [e.id for e in task.examples("dev")] == expected[500:1000]
    assert task.describe()["sample"] == "3-hop claims, one per question, shuffled with seed 0"
    every = make("hover", data={"dev": path}, corpus=corpus, claim_hops=None, sample="paper")
    assert len(every.examples("dev")) == 500
    assert len(make("hover", data={"dev": path}, corpus=corpus).examples("dev")) == 2000


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([claim(0, supporting_facts=...)], "record 0: supporting_facts: Field required"),
        ([claim(0, supporting_facts=[])], "record 0: supporting_facts: List should have at least 1 item"),
        ([claim(0, supporting_facts=[3])], "supporting_facts.0: Input should be a valid string"),
        ([claim(0, claim=" ")], "record 0: claim: is empty"),
        ([claim(0, num_hops="3")], "num_hops: Input should be a valid integer"),
        ([claim(0), claim(0, question="other")], "record 1: duplicate id 'u0'"),
        ([claim(0, hpqa_id=...)], "hpqa_id: Field required"),
    ],
)
def test_bad_records_are_told_by_place(of, rows, message):
    assert message in problems("hover", **of(*rows))


@pytest.mark.parametrize(
    "facts", [[["Thing", 0]], [{"key": "Thing", "value": 0}], {"key": ["Thing"], "value": [0]}], ids=str
)
def test_forms_of_gold_titles(of, facts):
    (example,) = make("hover", **of(claim(0, supporting_facts=facts))).examples("dev")
    assert example.metadata["titles"] == ["Thing"]


@pytest.mark.parametrize("facts", ["Thing", [[None, 0]], [["", 0]], [[]], ["Thing"], {"title": ["Thing"]}, 7], ids=str)
def test_other_forms_of_gold_titles_are_refused(of, facts):
    assert "record 0: supporting_facts" in problems("hover", **of(claim(0, supporting_facts=facts)))


def test_claims_without_a_corpus_or_of_other_hops_are_refused(of):
    assert "task.corpus: got null" in problems("hover", **of(claim(0), corpus=None))
    assert "has 1 claims of task.claim_hops=3" in problems("hover", **of(claim(0), sample="paper"))
    assert "hover.json has no claims of task.claim_hops=3" in problems("hover", **of(claim(0, hops=2)))


def test_a_corpus_without_the_gold_titles_is_labelled(of):
    rows = [claim(0), claim(1, titles=("A", "Z")), claim(2, titles=("Z",)), claim(3, titles=("C",))]
    task = make("hover", **of(*rows))
    assert task.describe()["partial corpus"] == "claims with all gold titles in it: dev 50.0%"


def test_real_files(data_dir):
    folder = data_dir / "hover"
    if not folder.is_dir():
        pytest.skip(f"no hover in {data_dir}")
    path = str(folder / "hover_dev_release_v1.1.json")
    task = make("hover", data={"train": path, "dev": path}, corpus="mini", sample="paper")
    assert [len(task.examples(split)) for split in ("train", "dev")] == [500, 272]
    assert not {e.id for e in task.examples("train")} & {e.id for e in task.examples("dev")}
    assert all(e.metadata["hops"] == 3 for e in task.examples("dev"))
    assert "dev 0.0%" in task.describe()["partial corpus"]
    unlabelled = str(folder / "hover_test_release_v1.1.json")
    assert "record 0" in problems("hover", data={"dev": unlabelled}, corpus="mini")
