import hashlib
from collections import Counter

import pytest

from mmrl.tasks.mini.examples import FOLDER, mini_search, mini_single
from scripts.tiny_model.mini.questions import SINGLE_SIZES, SINGLES, SIZES, make_questions, make_singles
from scripts.tiny_model.mini.world import PARTS, make_world
from scripts.tiny_model.mini.write import write_world

SPLITS = tuple(SIZES)


def make_bridges(split):
    """The two-hop questions that are mixed with the single ones, half as many, answered one search at a time."""
    bridges = [question for question in make_questions(split) if question["metadata"]["type"] == "bridge"]
    return bridges[: SINGLE_SIZES[split] // 2]


def test_the_shipped_files_are_the_world_that_the_tiny_model_was_warmed_up_on(tmp_path):
    """The order of sets is another in every process of Python, so it cannot matter."""
    write_world(tmp_path)
    written = {path.relative_to(tmp_path): path.read_bytes() for path in sorted(tmp_path.rglob("*.jsonl"))}
    assert written == {path.relative_to(FOLDER): path.read_bytes() for path in FOLDER.rglob("*.jsonl")}
    assert len(written) == 3 + 5 * len(SPLITS)
    # changing the world means rebuilding the tiny model (scripts/tiny_model/build.py), then this line
    assert (
        hashlib.sha256(b"".join(written.values())).hexdigest()
        == "411d2b57affc2b6456725bccd8c6a47c1e4c0252ed33752284d36b4703f13668"
    )


def test_names_and_titles_are_unique():
    names = [entity.name for entity in make_world().entities.values()]
    assert len(set(names)) == len(names)
    assert [document.title for document in make_world().documents] == names


def named(questions):
    """Names of everything but countries that the questions speak of: subjects, bridges, answers."""
    names = {entity.name: entity for entity in make_world().entities.values()}
    found = set()
    for question in questions:
        metadata = question["metadata"]
        for value in (*metadata["answers"], *metadata["titles"], *(hop["answer"] for hop in metadata["hops"])):
            if value in names and names[value].kind != "country":
                found.add(value)
    return found


@pytest.mark.parametrize("make", [make_questions, make_singles, make_bridges])
@pytest.mark.parametrize(("split", "other"), [("train", "dev"), ("train", "test"), ("dev", "test")])
def test_splits_share_no_subject_bridge_or_named_answer(make, split, other):
    assert not named(make(split)) & named(make_questions(other))
    assert not named(make(split)) & named(make_singles(other))


@pytest.mark.parametrize("split", ["dev", "test"])
def test_train_questions_name_nothing_of_a_held_out_part(split):
    held_out = named(make_questions(split))
    for question in make_questions("train"):
        said = f" {question['inputs']['question'].rstrip('?')} ".replace(",", " ")
        assert not any(f" {name} " in said for name in held_out)


def test_facts_stay_inside_their_part():
    world = make_world()
    for entity in world.entities.values():
        for fact in [*entity.facts.values(), *entity.mentions]:
            other = world.entities.get(fact)
            if other is not None and "country" not in (other.kind, entity.kind):
                assert other.part == entity.part


def test_answers_can_be_read_in_the_gold_documents():
    texts = {document.title: f"{document.title} {document.text}" for document in make_world().documents}
    assert {question["metadata"]["form"] for question in make_singles("train")} == set(SINGLES)
    for split in SPLITS:
        for question in (*make_questions(split), *make_singles(split)):
            text, metadata = question["inputs"]["question"], question["metadata"]
            for hop in metadata["hops"]:
                assert hop["answer"] in texts[hop["title"]], question
            if metadata["type"] == "bridge":
                subject, bridge = metadata["hops"]
                assert bridge["title"] == subject["answer"]
                assert metadata["answers"] == [bridge["answer"]]
                assert subject["title"] in texts[bridge["title"]]
                assert subject["title"] in text and bridge["title"] not in text
                # The second search names what the first one found.
                assert bridge["title"] in question["second_query"] and subject["title"] not in question["second_query"]
            if metadata["type"] == "single":
                (hop,) = metadata["hops"]
                assert hop["title"] in text and hop["title"] in hop["query"]
                assert [hop["answer"]] == metadata["answers"]


def test_comparisons_agree_with_the_facts():
    seen = Counter()
    for split in SPLITS:
        for question in make_questions(split):
            if question["metadata"]["type"] != "comparison":
                continue
            (left, right), (answer,) = question["metadata"]["hops"], question["metadata"]["answers"]
            seen[answer if answer in ("yes", "no") else "which"] += 1
            if answer in ("yes", "no"):
                assert (left["answer"] == right["answer"]) == (answer == "yes")
            else:
                earlier = left if int(left["answer"]) < int(right["answer"]) else right
                assert answer == earlier["title"]
    assert seen["which"] > seen["yes"] > 50
    assert abs(seen["yes"] - seen["no"]) <= 10


def test_each_bridge_form_is_phrased_in_several_ways():
    ways = {}
    for question in make_questions("train"):
        said = question["inputs"]["question"]
        for title in question["metadata"]["titles"]:
            said = said.replace(title, "*")
        ways.setdefault(question["metadata"]["form"], set()).add(said)
    assert all(len(found) >= 2 for found in ways.values())
    assert len(ways) >= 20


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("make", "sizes"), [(make_questions, SIZES), (make_singles, SINGLE_SIZES)])
def test_whatever_the_seed_the_world_is_whole_and_no_question_is_shared_or_repeated(make, sizes, seed):
    assert {entity.part for entity in make_world(seed).entities.values()} == {*PARTS, "all"}
    assert [len(make(split, seed)) for split in SPLITS] == [sizes[split] for split in SPLITS]
    questions = [question for split in SPLITS for question in make(split, seed)]
    assert len({question["id"] for question in questions}) == len(questions)
    assert len({question["inputs"]["question"] for question in questions}) == len(questions)
    assert make("dev", seed) != make("dev", seed + 1)


def test_examples_mix_single_questions_and_bridges():
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
