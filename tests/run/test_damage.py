"""A run that was killed at its end, or whose files have changed: completed, continued from before, or refused."""

import json
import os
import pickle
import shutil

import pytest
import torch

from mmrl.cli import main
from mmrl.config import TrainCommandConfig
from mmrl.report.rundir import RunDir
from mmrl.run.session import reread
from mmrl.run.settle import stored_config
from mmrl.sets.sweep import job_state
from mmrl.trainer import checkpoint
from tests.helpers.runs import EVAL, change_config, contents, flip, forge


@pytest.fixture
def run(whole, tmp_path):
    """A copy of the finished run, as it was before its summary."""
    shutil.copytree(whole, tmp_path / "run")
    (tmp_path / "run" / "summary.json").unlink()
    (tmp_path / "run" / "report.html").unlink()
    return tmp_path / "run"


def chosen(run):
    """The checkpoint that a resume takes."""
    with RunDir.open(run) as rundir:
        found = reread(stored_config(run, TrainCommandConfig).train.steps, rundir)
    return found and found.name


@pytest.mark.parametrize("left", [("report.html",), ("summary.json", "report.html")], ids=["report", "both"])
def test_what_is_missing_of_a_finished_run_is_completed(left, whole, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    for name in left:
        (run / name).unlink()
    config = stored_config(run, TrainCommandConfig)
    assert job_state(run, config) == "unfinished"
    # What a kill between a checkpoint and the removal of an old one leaves.
    shutil.copytree(run / "checkpoints" / "checkpoint-2", run / "checkpoints" / "checkpoint-1")
    marker = run / "checkpoints" / "checkpoint-1" / "complete.json"
    marker.write_text(json.dumps(json.loads(marker.read_text()) | {"step": 1}))
    (run / "eval" / ".step-000003-dev.jsonl.7.tmp").write_text("half")
    assert main(["train", f"resume={run}"]) == 0
    assert contents(run) == contents(whole)
    assert job_state(run, config) == "finished"
    capsys.readouterr()
    assert main(["train", f"resume={run}"]) == 2 and "this run is finished" in capsys.readouterr().err


def change(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def forged(data):
    def write(path):
        path.write_bytes(data)
        forge(path.parent)

    return write


CHECKPOINT = {
    "a bit of the weights": ("model.safetensors", flip),
    "bytes of the optimizer": ("optimizer.pt", lambda path: [flip(path, at) for at in range(2000, 2064)]),
    "another step": ("trainer_state.json", lambda path: change(path, '"global_step": 3', '"global_step": 2')),
    "a truncated file": ("scheduler.pt", lambda path: os.truncate(path, 10)),
    "a missing file": ("rng_state.pth", os.unlink),
    "no list of files": ("complete.json", os.unlink),
    "a list of another step": ("complete.json", lambda path: change(path, '"step": 3', '"step": 2')),
    "garbage": ("extra.json", lambda path: path.write_text("{")),
    "a broken header": ("model.safetensors", forged(b"\xff" * 64)),
    "a broken config": ("config.json", forged(b"{")),
    "a broken archive": ("optimizer.pt", forged(b"PK\x03\x04")),
    "broken facts": ("extra.json", forged(b"[")),
}


@pytest.mark.parametrize("kind", CHECKPOINT)
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_is_taken(kind, run, capsys):
    name, damage = CHECKPOINT[kind]
    damage(run / "checkpoints" / "checkpoint-3" / name)
    assert chosen(run) == "checkpoint-2"
    (line,) = capsys.readouterr().err.splitlines()
    said = "cannot be read" if "broken" in kind else ""
    assert f"checkpoint-3/{name} {said}" in line and line.endswith("continuing from checkpoint-2")
    assert [record["step"] for record in RunDir.read(run).history()] == [0, 1, 2]
    assert RunDir.read(run).journal_steps() == [1, 2]
    shown = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert shown == [".damaged-checkpoint-3", "checkpoint-2"]


def test_a_run_continued_from_the_checkpoint_before_ends_as_the_whole_one(run, whole):
    flip(run / "checkpoints" / "checkpoint-3" / "model.safetensors")
    assert main(["train", f"resume={run}"]) == 0
    # checkpoint-1 is not there to be kept; the two newest are.
    assert contents(run) == contents(whole)


def test_without_another_checkpoint_a_damaged_one_is_refused(run, errors_of):
    for step in (2, 3):
        flip(run / "checkpoints" / f"checkpoint-{step}" / "optimizer.pt")
    before = sorted(run.rglob("*"))
    (line,) = errors_of("train", f"resume={run}").splitlines()
    assert "checkpoint-3/optimizer.pt has not the content that was written" in line
    assert "checkpoint-2/optimizer.pt" in line and "restore what is named from a copy, or delete" in line
    assert sorted(run.rglob("*")) == before


RAN = []


class Command:
    def __reduce__(self):
        return (RAN.append, ("ran",))


@pytest.mark.parametrize("name", ["optimizer.pt", "rng_state.pth", "scheduler.pt"])
def test_a_pickle_that_wants_to_run_a_command_is_refused(name, run, capsys):
    path = run / "checkpoints" / "checkpoint-3"
    torch.save(Command(), path / name)
    forge(path)
    assert chosen(run) == "checkpoint-2"
    (line,) = capsys.readouterr().err.splitlines()
    assert f"checkpoint-3/{name} cannot be read (UnpicklingError: it holds more than weights)" in line
    assert not RAN
    (path.parent / ".damaged-checkpoint-3" / name).write_bytes(pickle.dumps(Command()))
    assert "cannot be read" in checkpoint.unusable(path.parent / ".damaged-checkpoint-3") or not RAN


def test_a_changed_config_is_refused_unless_it_says_where_the_run_runs(run, capsys, errors_of):
    path = run / "config.yaml"
    change_config(run, run={"name": "another"})
    assert chosen(run) == "checkpoint-3" and not capsys.readouterr().err
    change_config(run, hardware={"threads": 2})
    assert chosen(run) == "checkpoint-3"
    change_config(run, seed=7)
    (line,) = errors_of("train", f"resume={run}").splitlines()
    origin = "the run was started with (environment.json)"
    assert f"{path}: is not the config that {origin}: seed=7 (was 0); put it back" in line


def test_settings_that_the_rules_refuse_are_named_with_their_file(run, errors_of):
    change_config(run, train={"warmup_steps": 7, "schedule": "constant"})
    (run / "environment.json").unlink()  # a run of an earlier version has no copy of its config there
    lines = errors_of("train", f"resume={run}").splitlines()
    assert lines and all(line.startswith(f"error: {run}/config.yaml: train.warmup_steps: got 7") for line in lines)


@pytest.mark.parametrize(
    ("name", "data", "code"),
    [
        ("environment.json", "{", 2),
        ("environment.json", '{"resumed": 5}', 2),
        ("environment.json", '{"config": [1]}', 2),
        ("config.yaml", "{", 2),
        ("config.yaml", "[1]", 2),
        ("summary.json", "[", 0),
    ],
)
def test_garbage_in_a_file_of_the_run(name, data, code, run, capsys, monkeypatch):
    monkeypatch.setattr("mmrl.run.session.session", lambda *args: 0)
    (run / name).write_text(data)
    assert main(["train", f"resume={run}"]) == code
    shown = capsys.readouterr().err
    assert "Traceback" not in shown and (not code or str(run / name) in shown)


def test_folders_in_the_place_of_files(run, capsys, errors_of):
    (run / "run.lock").unlink()
    (run / "run.lock").mkdir()
    assert f"error: {run}/run.lock: is a folder, expected a file" in errors_of("train", f"resume={run}")
    (run / "run.lock").rmdir()
    (run / "metrics.jsonl").unlink()
    (run / "metrics.jsonl").mkdir()
    assert main(["train", f"resume={run}"]) == 1
    said = f"error: {run}/metrics.jsonl: Is a directory; see that a file can be read and written there"
    assert said in capsys.readouterr().err


def test_a_damaged_checkpoint_is_not_evaluated(run, tmp_path, errors_of):
    flip(run / "checkpoints" / "checkpoint-3" / "model.safetensors")
    said = errors_of("eval", f"policy={run}", f"run.dir={tmp_path / 'eval'}", "eval.items=2", "hardware=cpu")
    assert "checkpoint-3/model.safetensors has not the content that was written" in said


def test_a_damaged_older_checkpoint_is_named_and_the_newest_taken(run, capsys):
    flip(run / "checkpoints" / "checkpoint-2" / "model.safetensors")
    assert chosen(run) == "checkpoint-3"
    (line,) = capsys.readouterr().err.splitlines()
    assert "checkpoint-2/model.safetensors has not the content" in line and "not needed" in line


@pytest.fixture(scope="module")
def evaluation(random_model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("evaluated") / "eval"
    assert main(["eval", f"policy={random_model}", f"run.dir={folder}", *EVAL]) == 0
    return folder


def test_a_changed_config_of_an_evaluation_is_refused_unless_it_says_where_it_runs(evaluation, tmp_path, capsys):
    folder = tmp_path / "eval"
    shutil.copytree(evaluation, folder)
    change_config(folder, hardware={"threads": 2})
    assert main(["eval", f"resume={folder}"]) == 0
    change_config(folder, eval={"temperature": 0.5})
    capsys.readouterr()
    assert main(["eval", f"resume={folder}"]) == 2
    says = "is not the config that the run was started with (environment.json): eval.temperature=0.5 (was 0.0)"
    assert f"{folder}/config.yaml: {says}" in capsys.readouterr().err


def test_no_checkpoint_at_all_begins_again(run):
    shutil.rmtree(run / "checkpoints")
    assert chosen(run) is None
    # The metrics of step 0 are computed again from the items, which are what was written.
    assert RunDir.read(run).history() == [] and RunDir.read(run).eval_path(0, "dev").exists()
