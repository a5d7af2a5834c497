"""Records of finished runs: what is kept, and what stops it."""

from __future__ import annotations

import hashlib
import json
import shlex
from pathlib import Path

import pytest

from scripts import evidence
from tests.helpers.runs import CONFIG, fake_run


def test_a_record_can_be_run_and_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train = tmp_path / "train.jsonl"
    train.write_text("{}\n")
    config = CONFIG | {"task": CONFIG["task"] | {"data": {"train": str(train), "dev": None, "dev_items": 3}}}
    run = fake_run(tmp_path / "run", config=config)
    monkeypatch.setattr(evidence, "FOLDER", tmp_path / "kept")
    with pytest.raises(SystemExit, match="the run is not finished"):
        evidence.main([str(run.path)])
    summary = {"finished": "now", "task": "hotpotqa", "algo": "mhgpo_rr", "seed": 0, "main_metric": "f1"}
    (run.path / "summary.json").write_text(json.dumps(summary | {"facts": {"data": str(train)}}))
    environment = json.loads((run.path / "environment.json").read_text())
    words = [*environment["command"], "task.data.train=${oc.env:DATA}/train.jsonl"]
    (run.path / "environment.json").write_text(json.dumps(environment | {"command": words}))
    with pytest.raises(SystemExit, match="also: got nope, expected some of "):
        evidence.main([str(run.path), "also=em,nope"])
    assert evidence.main([str(run.path), "also=em"]) == 0
    text = (tmp_path / "kept" / "hotpotqa-mhgpo_rr-s0.json").read_text()
    kept = json.loads(text)
    assert shlex.split(kept["command"]) == words
    assert kept["data"] == {"train": hashlib.sha256(train.read_bytes()).hexdigest()}
    assert len(kept["items"]) == 60 and all(len(values) == 2 for values in kept["items"].values())
    assert kept["items/em"].keys() == kept["items"].keys()
    assert str(tmp_path) not in text
    (run.path / "environment.json").write_text(json.dumps(environment | {"command": [*words, "train.lr=1"]}))
    with pytest.raises(SystemExit, match="is the record of other settings; give this one a name, as=NAME"):
        evidence.main([str(run.path), "also=em"])


@pytest.mark.parametrize(
    ("word", "kept"),
    [
        ("model.path=/srv/models/a-1.5b", "model.path=FOLDER"),
        ("algo.distill={answerer: /srv/big, reranker: policy}", "algo.distill={answerer: FOLDER, reranker: policy}"),
        ("model.path=Qwen/Qwen2.5-0.5B", "model.path=Qwen/Qwen2.5-0.5B"),
        ("engine.urls=[http://host:8000/v1]", "engine.urls=[http://host:8000/v1]"),
        ("task.data.train=${oc.env:DATA,data}/a/b.json", "task.data.train=${oc.env:DATA,data}/a/b.json"),
        ("task.prompts=docs/programs/a.yaml", "task.prompts=docs/programs/a.yaml"),
        ("task.prompts=../a/b.yaml", "task.prompts=../a/b.yaml"),
    ],
)
def test_a_command_names_no_folder_of_this_machine(word: str, kept: str) -> None:
    assert evidence.elsewhere(["mmrl", "train", word, "run.before=outputs/x"]) == ["mmrl", "train", kept]


def test_no_record_names_one() -> None:
    for path in evidence.FOLDER.glob("*-s*.json"):
        words = shlex.split(json.loads(path.read_text(encoding="utf-8"))["command"])
        assert evidence.elsewhere(words) == words, path.name


def test_the_table_is_that_of_the_records_that_are_kept() -> None:
    page = (evidence.FOLDER.parent / "real.md").read_text(encoding="utf-8")
    assert f"{evidence.table()}\n<!-- end of generated part -->" in page, "python -m scripts.evidence table"


def test_a_line_has_the_t_interval_of_its_seeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gains 0.1, 0.2, 0.3: 0.2 ± 4.3027 · 0.1 / sqrt(3)."""
    monkeypatch.setattr(evidence, "FOLDER", tmp_path)
    lines = {"some-grpo": ("sums", "small", "`grpo`", "here"), "some-one": ("sums", "small", "`grpo`", "here")}
    monkeypatch.setattr(evidence, "LINES", lines)
    for name, seed, after in (("some-grpo", 0, 0.1), ("some-grpo", 1, 0.2), ("some-grpo", 2, 0.3), ("some-one", 0, 1)):
        kept = {"summary": {"main_metric": "em"}, "items": {"a": [0, after], "b": [1, 1 + after]}}
        (tmp_path / f"{name}-s{seed}.json").write_text(json.dumps(kept))
    *_, three, one = evidence.table().splitlines()
    assert three == "| sums | em, 2 | small | `grpo` | 0.500 → 0.700 | +0.200 [-0.048, +0.448] | here |"
    assert one == "| sums | em, 2 | small | `grpo` | 0.500 → 1.500 | +1.000, one seed | here |"
