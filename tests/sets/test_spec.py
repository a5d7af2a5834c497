"""conf/set: the shipped sets, and what a wrong file is told."""

import gzip
import json
from pathlib import Path

import pytest

from mmrl.cli import main
from mmrl.cli.configs import set_config
from mmrl.config import ALGO_SCHEMAS
from mmrl.config.base import SHIPPED
from mmrl.errors import ConfigError
from mmrl.run.check import check
from mmrl.sets.spec import SetSpec
from mmrl.sets.words import read_set, set_folders, set_names, words_of
from tests.helpers.servers import Scripted, serving

WORDS = Path(__file__).parent / "words.json.gz"
SETS = {name: read_set(SetSpec, name, set_folders()) for name in set_names(set_folders())}


@pytest.mark.parametrize("name", SETS)
def test_every_config_of_a_shipped_set_composes(name):
    spec = SETS[name]
    starts = {row.from_ for row in spec.rows.values()}
    for row, column in spec.pairs:
        config = set_config("train", words_of(spec, row, column), None)
        # What a start has learned is seen where the next run begins.
        assert config.eval.items >= 200 or row in starts, "needed to say that it learns"


@pytest.mark.slow
@pytest.mark.parametrize("name", SETS)
def test_no_run_of_a_shipped_set_is_refused(name, data_dir, monkeypatch):
    """Nor has a word no effect, which is seen when the task has its data."""
    monkeypatch.setenv("MMRL_DATA", str(data_dir))
    spec = SETS[name]
    words = {f"{row} on {column}": words_of(spec, row, column) for row, column in spec.pairs}
    with serving(lambda seen: Scripted({"data": []})) as (url, _):  # the model that writes prompts, where there is one
        monkeypatch.setenv("MMRL_PROMPT_MODEL", f"{url}/v1")
        found = {pair: check(set_config("train", said, None)) for pair, said in words.items()}
    assert not {pair: problems for pair, problems in found.items() if problems}


def test_the_words_of_published_runs_stay_as_they_are():
    """Frozen, in their order, by set, row and column: a change of them is another experiment."""
    for place, words in json.loads(gzip.decompress(WORDS.read_bytes())).items():
        assert words_at(place) == words, f"{place}; if it is meant: python -m tests.sets.test_spec"


def words_at(place):
    name, row, column = place.split("|")
    return words_of(SETS[name], row, column)


def test_the_shipped_sets_run_every_task_of_the_mini_world_and_every_algorithm():
    own = [*SETS.values()]
    tasks = {
        word[5:] for spec in own for column in spec.columns.values() for word in column.train if word[:5] == "task="
    }
    algos = {word[5:] for spec in own for row in spec.rows.values() for word in row.train if word.startswith("algo=")}
    assert tasks == {task for tasks in SHIPPED.values() for task in tasks}
    assert algos == {*ALGO_SCHEMAS, "miprov2", "sft"} - {"distill"} and all(len(spec.seeds) >= 3 for spec in own)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[1, 2]", "rows: missing"),
        ("rows: {a: {}}", "shows: missing"),
        ("shows: x\nrows: {a: {}}\nalgos: {ppoo: [x=1]}", "mine.yaml: algos: got 'ppoo'"),
        ("shows: x\nbase: nowhere\nrows: {a: {}}", "set/base: got 'nowhere'"),
        ("rows: {", "cannot be read"),
        ("shows: x\nrows: {a: {from: b}, b: {from: a}}", "rows.a.from: a starts from b starts from a"),
        ("shows: x\nrows: {a: {from: c}}", "rows.a.from: got 'c'"),
        ("shows: x\nrows: {a: {train: [algo]}}", "rows.a.train: got algo, expected KEY=VALUE"),
        ("shows: x\nrows:\n  a: [algo=ppo]\n  a: [algo=grpo]", "mine.yaml:4: a: given more than once"),
        (
            "shows: x\nset: [&words [seed=1, seed=2], seed=3, x=1, +x=2]\nrows: {a: {}}",
            "set: got x, seed more than once",
        ),
        (
            "shows: x\nrows: {a: {}}\nscores: {EM: em}",
            "scores: for tables of papers, which python -m scripts.papers NAME runs",
        ),
    ],
)
def test_a_malformed_set_is_refused_with_its_name(text, says, tmp_path):
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "mine.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_set(SetSpec, "mine", set_folders(str(tmp_path)), str(tmp_path))
    assert "mine" in str(caught.value) or "nowhere" in str(caught.value)
    assert says in str(caught.value), str(caught.value)


def test_a_list_of_words_sets_those_otherwise_that_it_takes_up():
    spec = SetSpec.model_validate({"shows": "x", "set": [["a=1", "b=1"], "~b", "b=2", "a=2"], "rows": {"r": {}}})
    assert spec.set == ("a=1", "b=1", "~b", "b=2", "a=2")


def test_an_experiment_that_is_not_there_names_its_file(capsys):
    assert main(["eval", "policy=tiny", "experiment=mine"]) == 2
    assert "experiment: got 'mine', and there is none; conf/experiment/mine.yaml" in capsys.readouterr().err


def test_an_evaluation_of_ones_own_is_not_trained(tmp_path, monkeypatch, capsys):
    (tmp_path / "conf/experiment").mkdir(parents=True)
    (tmp_path / "conf/experiment/look.yaml").write_text("# @package _global_\npolicy: tiny\n")
    (tmp_path / "conf/experiment/learn.yaml").write_text(
        "# @package _global_\ndefaults:\n  - override /algo: grpo\ntrain: {steps: 3}\n"
    )
    monkeypatch.chdir(tmp_path)
    assert main(["train", "experiment=look"]) == 2
    assert "policy: unknown key" in capsys.readouterr().err
    assert main(["eval", "policy=tiny", "experiment=learn"]) == 2
    assert "Could not override 'algo'" in capsys.readouterr().err


if __name__ == "__main__":  # writes the words of the same places again
    now = {place: words_at(place) for place in json.loads(gzip.decompress(WORDS.read_bytes()))}
    WORDS.write_bytes(gzip.compress(json.dumps(now, indent=0).encode(), mtime=0))
