"""Data files that nobody meant to write: each is refused with file and record, none is read as something else."""

import json

import pytest

from mmrl.errors import ConfigError, DataError
from mmrl.tasks import TASKS
from mmrl.tasks.data.layouts import load_corpus
from mmrl.tasks.data.rows import Source
from tests.helpers.programs import default_config, saved
from tests.tasks.test_data import load, record

DEEP = "[" * 100_000 + "]" * 100_000
MUSIQUE = {
    "id": "2hop__1",
    "question": "Who made it?",
    "answer": "Ada",
    "answer_aliases": ["A. L."],
    "paragraphs": [{"title": "Thing", "paragraph_text": "Made by Ada.", "is_supporting": True}],
}
POPQA = {
    "id": 1,
    "question": "Who?",
    "possible_answers": '["Ada"]',
    "paragraphs": [{"title": "Thing", "text": "x", "is_supporting": True}],
}


@pytest.mark.parametrize(
    ("layout", "row", "says"),
    [
        # an empty alias would be matched by every answer that normalises to nothing, a text by its letters
        ("musique", MUSIQUE | {"answer_aliases": [""]}, "answer_aliases.0: is empty"),
        ("musique", MUSIQUE | {"answer_aliases": [None]}, "answer_aliases.0: Input should be a valid string"),
        ("musique", MUSIQUE | {"answer_aliases": "Ada"}, "answer_aliases: Input should be a valid list"),
        (
            "musique",
            MUSIQUE | {"paragraphs": [MUSIQUE["paragraphs"][0] | {"title": None}]},
            "paragraphs.0.title: Input should",
        ),
        ("musique", MUSIQUE | {"paragraphs": [MUSIQUE["paragraphs"][0] | {"paragraph_text": None}]}, "paragraph_text"),
        ("hotpotqa", record(context=[[None, ["x"]]]), "context.0.0: Input should be a valid string"),
        ("hotpotqa", record(context=[["Thing", [None]]]), "context.0.1.0: Input should be a valid string"),
        ("hotpotqa", record(supporting_facts=[[None, 0]]), "supporting_facts.0.0: Input should be a valid string"),
        (
            "popqa",
            POPQA | {"paragraphs": [{"title": None, "text": "x"}]},
            "paragraphs.0.title: Input",
        ),
        (
            "popqa",
            POPQA | {"paragraphs": [{"title": "Thing", "text": 7}]},
            "paragraphs.0.text: Input",
        ),
        ("popqa", POPQA | {"possible_answers": DEEP}, "recursion"),
    ],
)
def test_what_is_no_text_is_refused_and_never_becomes_the_text_none(tmp_path, layout, row, says):
    path = saved(tmp_path / "data.json", [row])
    with pytest.raises(DataError) as error:
        load(path, layout)
    assert f"task.data.dev: {path} record 0" in str(error.value) and says in str(error.value)


@pytest.mark.parametrize("name", ["data.json", "data.jsonl"])
@pytest.mark.parametrize("content", [DEEP, '[{"_id": ' + "9" * 5000 + "}]"], ids=["brackets", "digits"])
def test_json_that_python_cannot_read_is_told_by_its_file(tmp_path, name, content):
    path = saved(tmp_path / name, content)
    with pytest.raises(DataError, match="not JSON") as error:
        Source("task.data.dev", path).rows("dev")
    assert path in str(error.value)


@pytest.mark.parametrize("option", ["labels", "prompts"])
def test_the_same_of_other_files(tmp_path, option):
    given = {option: saved(tmp_path / "deep.json", DEEP)}
    if option == "labels":
        given |= {"data": {"dev": saved(tmp_path / "data.json", [{"text": "hi", "label": "a"}])}, "sample": "all"}
    with pytest.raises(ConfigError, match=rf"task\.{option}: .*deep\.json is not JSON"):
        TASKS["banking77"](default_config("banking77", **given), 0)


def test_passages_whose_id_is_null_are_numbered(tmp_path):
    rows = [{"id": None, "title": title, "text": "x"} for title in "ab"]
    assert [document.id for document in load_corpus("task.corpus", saved(tmp_path / "data.json", rows))] == ["0", "1"]


def test_a_file_of_which_nothing_is_left_says_why(tmp_path):
    rows = [{"user_query": "q", "target_response": " ", "pii_units": ""}]
    config = default_config("papillon", data={"dev": saved(tmp_path / "data.json", rows)}, sample="all")
    with pytest.raises(ConfigError, match="target_response is empty in every row"):
        TASKS["papillon"](config, 0)


@pytest.mark.parametrize("name", ["data.json", "data.jsonl"])
def test_half_a_utf16_pair_is_shown_as_no_character_and_told(tmp_path, caplog, name):
    rows = [{"question": "a\ud800b", "more": [{"\udfff": ["\ud83d\ude00"]}]}, {"question": "\U0001f600 é"}]
    text = json.dumps(rows) if name.endswith("json") else "\n".join(map(json.dumps, rows))
    path = saved(tmp_path / name, text)
    values = [row.values for row in Source("task.data.dev", path).rows("dev")]
    assert values == [{"question": "a\ufffdb", "more": [{"\ufffd": ["\U0001f600"]}]}, {"question": "\U0001f600 é"}]
    (warning,) = caplog.records
    assert path in warning.message and "U+FFFD" in warning.message


def test_questions_that_are_trained_and_evaluated_on_are_told(tmp_path, caplog):
    path = saved(tmp_path / "data.json", [record()])
    TASKS["hotpotqa"](default_config("hotpotqa", data={"train": path, "dev": path}), 0)
    assert [r.message for r in caplog.records] == [
        f"task.data: train and dev are both {path}: what is evaluated may have been trained on"
    ]
    caplog.clear()
    TASKS["hotpotqa"](default_config("hotpotqa", data={"dev": path}), 0)
    assert not caplog.records


def test_a_table_with_two_columns_of_one_name_is_refused(tmp_path):
    """Either could be meant, and reading one of them would train on a guess."""
    path = saved(tmp_path / "train.csv", "text,category,text\na,card_arrival,b\n")
    with pytest.raises(ConfigError, match=r"train\.csv line 1: more than one column is called 'text'"):
        TASKS["banking77"](default_config("banking77", data={"train": path}), 0)
