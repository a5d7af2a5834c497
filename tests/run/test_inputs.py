"""Files that a config names are those that the run was started with, or it is not continued."""

import json
from pathlib import Path

import pytest

from mmrl.cli import main
from mmrl.config import StageConfig
from mmrl.errors import CheckpointError
from mmrl.run import inputs
from mmrl.run.inputs import changed_inputs, inputs_of
from mmrl.run.settle import refuse_edits, stored_config
from mmrl.store.rundir import RunDir


@pytest.fixture(autouse=True)
def here(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("mmrl.run.session.session", lambda *args: 0)


def config(**sections):
    return {"model": {"chat_template": None}, "task": {"name": "x", "data": {}}, "algo": {"name": "grpo"}, **sections}


def edited(record, path, text):
    """What has changed once a file has another text; the file is put back."""
    before = path.read_text()
    path.write_text(text)
    changed = changed_inputs({"inputs": record})
    path.write_text(before)
    return changed


def test_each_file_that_a_config_names_is_recorded_and_what_changes_is_named():
    for folder in ("data", "corpus/below"):
        Path(folder).mkdir(parents=True)
    files = ("p.yaml", "labels.json", "c.jinja", "data/a.jsonl", "data/b.jsonl", "dev.csv", "corpus/below/c.jsonl")
    for name in (*files, "sft.jsonl"):
        Path(name).write_text("text")
    data = {"train": "data/*.jsonl", "dev": "dev.csv,data/a.jsonl", "test": "mini"}
    task = {"name": "x", "prompts": "p.yaml", "labels": "labels.json", "data": data, "corpus": "corpus"}
    record = inputs_of(config(task=task, model={"chat_template": "c.jinja"}, algo={"file": "sft.jsonl"}))
    settings = {"task.prompts": "p.yaml", "task.labels": "labels.json", "model.chat_template": "c.jinja"}
    settings |= {"task.data.train": data["train"], "task.data.dev": data["dev"], "task.corpus": "corpus"}
    assert record.keys() == {f"{key}={value}" for key, value in {**settings, "algo.file": "sft.jsonl"}.items()}
    assert changed_inputs({"inputs": record}) == [] == changed_inputs({})
    for name, setting in {
        "p.yaml": ["task.prompts=p.yaml"],
        "c.jinja": ["model.chat_template=c.jinja"],
        "data/a.jsonl": ["task.data.train=data/*.jsonl", "task.data.dev=dev.csv,data/a.jsonl"],
        "corpus/below/c.jsonl": ["task.corpus=corpus"],
        "sft.jsonl": ["algo.file=sft.jsonl"],
    }.items():
        assert edited(record, Path(name), "other text") == setting
    Path("data/c.jsonl").write_text("text")  # a further shard
    assert changed_inputs({"inputs": record}) == ["task.data.train=data/*.jsonl"]
    Path("p.yaml").unlink()  # whoever reads it says so
    assert changed_inputs({"inputs": record}) == ["task.data.train=data/*.jsonl"]


def test_what_names_no_file_is_not_recorded():
    for name in ("mini", "plain", "paper"):
        Path(name).write_text("a file that is meant by nobody")
    data = {"train": "mini", "dev": "owner/name:config", "test": "package.module:rows"}
    task = {"name": "x", "prompts": "paper", "data": data}
    assert inputs_of(config(task=task, model={"chat_template": "plain"})) == {}


def test_of_a_large_file_size_and_blocks_all_over_it_are_read(monkeypatch):
    monkeypatch.setattr(inputs, "_WHOLE", 2**12)
    monkeypatch.setattr(inputs, "_BLOCKS", 4)
    file, text = Path("corpus.jsonl"), "a" * 2**14
    file.write_text(text)
    record = inputs_of(config(task={"corpus": "corpus.jsonl"}))
    assert edited(record, file, text + "a")
    # blocks of 1,024 bytes begin at 0, 4,096, 8,192 and 12,288
    for place, seen in ((0, True), (9000, True), (2000, False)):
        assert bool(edited(record, file, f"{text[:place]}b{text[place + 1 :]}")) is seen, place


def test_of_many_files_no_more_is_read_than_of_a_large_one(monkeypatch):
    monkeypatch.setattr(inputs, "_WHOLE", 2**12)
    monkeypatch.setattr(inputs, "_BLOCKS", 4)
    Path("corpus").mkdir()
    shards, text = [Path(f"corpus/{name}.jsonl") for name in "abcd"], "a" * 2**12
    for shard in shards:
        shard.write_text(text)
    record = inputs_of(config(task={"corpus": "corpus"}))
    assert edited(record, shards[3], text + "a")
    # 1,024 bytes of each of four files of 4,096
    for shard in shards:
        for place, seen in ((1023, True), (1024, False)):
            assert bool(edited(record, shard, f"{text[:place]}b{text[place + 1 :]}")) is seen, (shard, place)


def test_under_a_launcher_the_main_process_alone_looks(monkeypatch):
    Path("p.yaml").write_text("{}")
    assert main(["train", "run.dir=run", "hardware=cpu", "task.prompts=p.yaml"]) == 0
    Path("p.yaml").write_text("{ }")
    run = RunDir.read("run")
    stored = stored_config(run.path, StageConfig)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    refuse_edits(run.path, stored)
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(CheckpointError, match=r"task\.prompts=p\.yaml; put it back"):
        refuse_edits(run.path, stored)


def test_a_run_goes_on_with_the_files_that_it_was_started_with(capsys, errors_of):
    Path("p.yaml").write_text("{}")
    assert main(["train", "run.dir=run", "hardware=cpu", "task.prompts=p.yaml"]) == 0
    assert main(["train", "resume=run"]) == 0
    Path("p.yaml").write_text("{ }")
    says = "run: other content than when the run was started (environment.json): task.prompts=p.yaml; put it back"
    assert f"error: {says}, or start a new run" in errors_of("train", "resume=run")
    facts = RunDir.read("run").environment
    Path("mine.py").write_text("one = 1")
    del facts["inputs"]  # a run of an earlier version
    facts["resumed"][-1]["own_code"] = {"mine.py": "0"}
    Path("run/environment.json").write_text(json.dumps(facts))
    capsys.readouterr()
    assert main(["train", "resume=run"]) == 0
    assert "warning: run: has changed since the last start: mine.py\n" in capsys.readouterr().err


def test_an_evaluation_is_continued_with_the_files_that_it_was_started_with(errors_of):
    Path("p.yaml").write_text("{}")
    words = ["task=qa_direct", "policy=tiny", "hardware=cpu", "eval.items=2", "task.prompts=p.yaml", "run.dir=e"]
    assert main(["eval", *words]) == 0
    Path("p.yaml").write_text("{ }")
    assert "error: e: other content than when the run was started" in errors_of("eval", "resume=e")
