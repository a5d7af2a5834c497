import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmrl.records import Example
from mmrl.retrieval.base import Document
from mmrl.retrieval.store import PassageStore, write_passages
from mmrl.tasks.data import corpus as module
from mmrl.tasks.data.corpus import coverage, find_occurring, label

DOCUMENTS = [
    Document(id="0", title="New York", text="The city that never sleeps; élan vital."),
    Document(id="1", title="Porto", text="On the Douro. Founded by 200 BC"),
    Document(id="2", title="塔", text="それは東京にある。"),
]


def item(name, answers=(), titles=(), corpus="c"):
    return Example(id=name, inputs={"corpus": corpus}, metadata={"answers": list(answers), "titles": list(titles)})


@pytest.mark.parametrize(
    ("answer", "there"),
    [
        ("new york", True), ("The city, that NEVER sleeps", True), ("Élan Vital", True), ("200 bc", True),
        ("york the", True),  # title and text of one passage are one run
        ("東京", True), ("京東", False), ("e\u0301lan vital", True),
        ("vital porto", False), ("sleep", False), ("never that", False), ("Bucharest", False), ("?", False),
    ],
)  # fmt: skip
def test_an_answer_occurs_as_whole_words_within_a_passage(answer, there):
    assert find_occurring({answer}, DOCUMENTS) == ({answer} if there else set())


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.sampled_from("abcd"), min_size=1, max_size=9), min_size=1, max_size=5),
    st.lists(st.lists(st.sampled_from("abcde"), min_size=1, max_size=4), min_size=1, max_size=6),
)
def test_it_equals_a_plain_search(passages, answers):
    texts = [f"t {' '.join(words)}" for words in passages]
    documents = [Document(id=str(n), title="t", text=" ".join(words)) for n, words in enumerate(passages)]
    asked = {" ".join(words) for words in answers}
    assert find_occurring(asked, documents) == {a for a in asked if any(f" {a} " in f" {text} " for text in texts)}


def test_titles_count_where_there_are_some_and_answers_where_not(tmp_path):
    splits = {
        "train": [item("a", titles=["Porto"]), item("b", titles=["Porto", "Nowhere"], answers=["Douro"])],
        "dev": [item("c", answers=["Lisbon", "douro"]), item("d", answers=["x"]), item("e", titles=["New York"])],
        "test": [item("f", answers=["x"], corpus="remote")],
    }
    found = {"train": 0.5, "dev": 2 / 3}
    assert coverage(splits, {"c": DOCUMENTS, "remote": ()}) == found
    write_passages(tmp_path, DOCUMENTS)
    assert coverage(splits, {"c": PassageStore(tmp_path), "remote": ()}) == found


def test_titles_are_compared_as_the_score_compares_them():
    splits = {"dev": [item("a", titles=["new_york"])]}
    assert coverage(splits, {"c": DOCUMENTS}) == {"dev": 0.0}
    assert coverage(splits, {"c": DOCUMENTS}, lambda title: title.lower().replace(" ", "_")) == {"dev": 1.0}


def test_a_corpus_too_large_to_read_is_known_by_titles_alone(monkeypatch):
    monkeypatch.setattr(module, "SCANNED", 1)
    splits = {"dev": [item("a", titles=["Porto"]), item("b", answers=["Nowhere"])], "test": [item("c", answers=["x"])]}
    assert coverage(splits, {"c": DOCUMENTS}) == {"dev": 1.0}


@pytest.mark.parametrize(
    ("shares", "passages", "real", "expected"),
    [
        ({"dev": 1.0}, 300, False, {}),  # the mini world
        ({}, 300, True, {}),  # nothing is known
        ({"train": 1.0, "dev": 0.5}, 300, False, {"partial corpus": "gold: train 100.0%, dev 50.0%"}),
        ({"dev": 1.0}, 40_000, True, {"partial corpus": "gold: dev 100.0%"}),  # some passages of Wikipedia
        ({"dev": 1.0}, 5_233_329, True, {"corpus coverage": "gold: dev 100.0%"}),
        ({"dev": 0.999}, 5_233_329, True, {"partial corpus": "gold: dev 99.9%"}),
    ],
)
def test_the_share_is_always_told_of_real_data_and_a_part_is_called_one(shares, passages, real, expected):
    assert label("gold", shares, passages, real=real) == expected
