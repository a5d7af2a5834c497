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
