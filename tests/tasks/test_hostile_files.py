"""Data files that nobody meant to write: each is refused with file and record, none is read as something else."""

import json

import pytest

from mmrl.errors import ConfigError
from mmrl.tasks import TASKS
from mmrl.tasks.data.rows import Source
from tests.helpers.programs import default_config, saved
from tests.tasks.test_data import DEEP, record


@pytest.mark.parametrize("option", ["labels", "prompts"])
def test_the_same_of_other_files(tmp_path, option):
    given = {option: saved(tmp_path / "deep.json", DEEP)}
    if option == "labels":
        given |= {"data": {"dev": saved(tmp_path / "data.json", [{"text": "hi", "label": "a"}])}, "sample": "all"}
    with pytest.raises(ConfigError, match=rf"task\.{option}: .*deep\.json is not JSON"):
        TASKS["banking77"](default_config("banking77", **given), 0)


def test_a_file_of_which_nothing_is_left_says_why(tmp_path):
    rows = [{"user_query": "q", "target_response": " ", "pii_units": ""}]
    config = default_config("papillon", data={"dev": saved(tmp_path / "data.json", rows)})
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
