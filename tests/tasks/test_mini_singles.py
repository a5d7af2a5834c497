"""Single-hop questions of the mini world, and two-hop ones that are answered one search at a time."""

import pytest

from mmrl.tasks.mini.examples import mini_search, mini_single
from scripts.tiny_model.mini.questions import SINGLE_SIZES, SINGLES, make_questions, make_singles
from scripts.tiny_model.mini.world import make_world

SPLITS = tuple(SINGLE_SIZES)


def make_bridges(split):
    """The two-hop questions that are mixed with the single ones, half as many."""
    bridges = [question for question in make_questions(split) if question["metadata"]["type"] == "bridge"]
    return bridges[: SINGLE_SIZES[split] // 2]


@pytest.mark.parametrize("seed", range(4))
def test_sizes_ids_and_texts(seed):
    questions = [question for split in SPLITS for question in make_singles(split, seed)]
    assert len(questions) == sum(SINGLE_SIZES.values())
    assert len({question["id"] for question in questions}) == len(questions)
    assert len({question["inputs"]["question"] for question in questions}) == len(questions)
    assert {question["metadata"]["form"] for question in make_singles("train", seed)} == set(SINGLES)


def named(questions):
    """Names of subjects and of answers that are entities, countries left out."""
    world = make_world()
    names = {entity.name: entity for entity in world.entities.values()}
    said = {value for q in questions for value in (*q["metadata"]["answers"], *q["metadata"]["titles"])}
    return {name for name in said if name in names and names[name].kind != "country"}


@pytest.mark.parametrize("make", [make_singles, make_bridges])
@pytest.mark.parametrize(("split", "other"), [("train", "dev"), ("train", "test"), ("dev", "test")])
def test_splits_share_no_subject_or_named_answer(make, split, other):
    assert not named(make(split)) & named(make_questions(other))
    assert not named(make(split)) & named(make_singles(other))


def test_answers_can_be_read_in_the_gold_document():
    texts = {document.title: f"{document.title} {document.text}" for document in make_world().documents}
    for split in SPLITS:
        for question in make_singles(split):
            (hop,) = question["metadata"]["hops"]
            assert hop["title"] in question["inputs"]["question"]
            assert hop["title"] in hop["query"]
            assert [hop["answer"]] == question["metadata"]["answers"]
            assert hop["answer"] in texts[hop["title"]]


def test_the_second_search_names_what_the_first_one_found():
    for split in SPLITS:
        for question in make_bridges(split):
            first, second = question["metadata"]["hops"]
            assert second["title"] == first["answer"]
            assert second["title"] in question["second_query"]
            assert first["title"] not in question["second_query"]


def test_examples():
    for split in SPLITS:
        singles, mixed = mini_single(split), mini_search(split)
        bridges = [example for example in mixed if example.metadata["type"] == "bridge"]
        second = {example.id: example.metadata["hops"][1]["query"] for example in bridges}
        assert second == {question["id"]: question["second_query"] for question in make_bridges(split)}
        assert len({example.id for example in mixed}) == len(mixed)
        assert {example.id for example in singles} < {example.id for example in mixed}
        first = [example.metadata["type"] for example in mixed[:60]]
        assert 5 < first.count("bridge") < 40
        assert all(set(example.inputs) == {"question", "corpus"} for example in mixed)
