"""A run that was killed at its end, or whose files are damaged: completed, or refused by a line that names the file."""

import json
import os
import pickle
import shutil

import pytest
import torch

from mmrl.cli import main
from mmrl.config import RlRunConfig
from mmrl.run.settle import stored_config
from mmrl.sets.sweep import job_state
from tests.helpers.runs import EVAL, change_config, contents, flip, forge, numbers


@pytest.fixture
def run(whole, tmp_path):
    """A copy of the finished run, as it was before its summary."""
    shutil.copytree(whole, tmp_path / "run")
    (tmp_path / "run" / "summary.json").unlink()
    (tmp_path / "run" / "report.html").unlink()
    return tmp_path / "run"


def files_of(run):
    """What is in a run directory but a note of each start."""
    return {p: p.read_bytes() for p in run.rglob("*") if p.is_file() and p.name not in ("environment.json", "run.lock")}


@pytest.fixture
def refused(run, errors_of):
    """Resume the run, which is refused in one line and left as it is; gives that line."""

    def resume():
        before = files_of(run)
        (line,) = errors_of("train", f"resume={run}").splitlines()
        assert files_of(run) == before
        return line

    return resume


@pytest.mark.parametrize("left", [("report.html",), ("summary.json", "report.html")], ids=["report", "both"])
def test_what_is_missing_of_a_finished_run_is_completed(left, whole, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    for name in left:
        (run / name).unlink()
    config = stored_config(run, RlRunConfig)
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
def test_a_damaged_checkpoint_is_refused(kind, run, refused):
    name, damage = CHECKPOINT[kind]
    damage(run / "checkpoints" / "checkpoint-3" / name)
    line = refused()
    said = "cannot be read" if "broken" in kind else ""
    assert f"checkpoint-3/{name} {said}" in line
    assert "restore it from a copy, or delete the checkpoints from step 3 on" in line


def test_a_run_without_its_damaged_checkpoint_goes_on_from_the_one_before_and_ends_as_the_whole_one(run, whole):
    flip(run / "checkpoints" / "checkpoint-3" / "model.safetensors")
    shutil.rmtree(run / "checkpoints" / "checkpoint-3")
    assert main(["train", f"resume={run}"]) == 0
    # checkpoint-1 is not there to be kept; the two newest are.
    assert contents(run) == contents(whole)


RAN = []


class Command:
    def __reduce__(self):
        return (RAN.append, ("ran",))


@pytest.mark.parametrize("name", ["optimizer.pt", "rng_state.pth", "scheduler.pt"])
def test_a_pickle_that_wants_to_run_a_command_is_refused(name, run, refused):
    path = run / "checkpoints" / "checkpoint-3"
    torch.save(Command(), path / name)
    forge(path)
    assert f"checkpoint-3/{name} cannot be read (UnpicklingError: it holds more than weights)" in refused()
    (path / name).write_bytes(pickle.dumps(Command()))
    forge(path)
    assert f"checkpoint-3/{name} cannot be read" in refused()
    assert not RAN


def without_line(path, number=1):
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:number] + lines[number + 1 :]))


def doubled_line(path, number=1):
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[: number + 1], *lines[number:]]))


def of_another_step(path):
    shutil.copy(path.with_name("step-000003.jsonl.gz"), path)


RECORD = {
    "a lost line of metrics": ("metrics.jsonl", without_line, "has 0 lines of step 1", 1),
    "a doubled line of metrics": ("metrics.jsonl", lambda path: doubled_line(path, 2), "has 2 lines of step 2", 2),
    "no metrics": ("metrics.jsonl", os.unlink, "has 0 lines of step 1", 1),
    "a line of metrics that is none": (
        "metrics.jsonl",
        lambda path: change(path, '"step":2,', '"step":2;'),
        ":3: got",
        1,
    ),
    "a truncated journal": ("journal/step-000001.jsonl.gz", lambda path: os.truncate(path, 100), "damaged journal", 1),
    "a flipped bit of a journal": ("journal/step-000003.jsonl.gz", flip, "damaged journal", 3),
    "a missing journal": ("journal/step-000002.jsonl.gz", os.unlink, "no journal of step 2", 2),
    "a journal in another's place": ("journal/step-000002.jsonl.gz", of_another_step, "is of another step", 2),
    "a lost item": ("eval/step-000002-dev.jsonl", without_line, "has 3 items, expected 4", 2),
    "an item that is none": ("eval/step-000002-dev.jsonl", lambda path: flip(path, 0), ":1: got", 2),
    "no items": ("eval/step-000002-dev.jsonl", os.unlink, "has 0 items, expected 4", 2),
}


@pytest.mark.parametrize("kind", RECORD)
def test_a_run_without_the_whole_record_of_its_steps_is_refused(kind, run, refused):
    name, damage, says, step = RECORD[kind]
    damage(run / name)
    line = refused()
    assert says in line and (f"{run / name}" in line or f"{run}: {says}" in line)
    assert f"restore it from a copy, or delete the checkpoints from step {step} on" in line


def test_steps_after_a_lost_one_are_done_again_once_their_checkpoints_are_deleted(run, whole):
    (run / "journal" / "step-000003.jsonl.gz").write_bytes(b"x")
    without_line(run / "metrics.jsonl", 3)
    shutil.rmtree(run / "checkpoints" / "checkpoint-3")
    assert main(["train", f"resume={run}"]) == 0
    assert contents(run) == contents(whole)


@pytest.mark.parametrize("step", [0, 3])
@pytest.mark.parametrize("damage", [os.unlink, without_line, doubled_line, lambda path: os.truncate(path, 60)])
def test_an_evaluation_whose_weights_are_there_is_completed(step, damage, run, whole):
    name = f"eval/step-{step:06d}-dev.jsonl"
    damage(run / name)
    assert main(["train", f"resume={run}"]) == 0
    if damage is without_line:  # evaluated without the others, an item may differ in its last bits, and comes last
        ids = [[json.loads(line)["id"] for line in (one / name).read_bytes().splitlines()] for one in (run, whole)]
        assert ids[0] == [ids[1][0], *ids[1][2:], ids[1][1]] and numbers(run) == numbers(whole)
    else:
        assert contents(run) == contents(whole)


def test_a_changed_config_is_refused_unless_it_says_where_the_run_runs(run, capsys, refused, monkeypatch):
    path = run / "config.yaml"
    monkeypatch.setattr("mmrl.run.session.session", lambda *args: 0)
    change_config(run, run={"name": "another"})
    assert main(["train", f"resume={run}"]) == 0 and not capsys.readouterr().err
    change_config(run, hardware={"threads": 2})
    assert main(["train", f"resume={run}"]) == 0
    assert capsys.readouterr().err == f"warning: {path}: since the start: hardware.threads=2 (was 1)\n"
    change_config(run, seed=7)
    line = refused()
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


def test_a_damaged_older_checkpoint_is_not_needed(run, whole):
    flip(run / "checkpoints" / "checkpoint-2" / "model.safetensors")
    assert main(["train", f"resume={run}"]) == 0
    assert numbers(run) == numbers(whole)


@pytest.fixture(scope="module")
def evaluation(random_model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("evaluated") / "eval"
    assert main(["eval", f"policy={random_model}", f"run.dir={folder}", *EVAL]) == 0
    return folder


ITEMS, JOURNAL = "eval/step-000000-dev.jsonl", "journal/step-000000-eval-dev.jsonl.gz"


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        (ITEMS, lambda path: without_line(path, 3)),
        (ITEMS, lambda path: os.truncate(path, 60)),
        (ITEMS, os.unlink),
        ("summary.json", os.unlink),
    ],
)
def test_what_is_missing_of_an_evaluation_is_made_again(name, damage, evaluation, tmp_path):
    folder = tmp_path / "eval"
    shutil.copytree(evaluation, folder)
    damage(folder / name)
    assert main(["eval", f"resume={folder}"]) == 0
    for file in ("summary.json", ITEMS, JOURNAL):
        assert (folder / file).read_bytes() == (evaluation / file).read_bytes(), file


@pytest.mark.parametrize(
    ("name", "damage", "says"),
    [
        (ITEMS, lambda path: flip(path, 0), f"{ITEMS}:1: got"),
        (JOURNAL, flip, f"{JOURNAL}: damaged journal"),
        (JOURNAL, lambda path: os.truncate(path, 90), f"{JOURNAL}: damaged journal"),
        (JOURNAL, os.unlink, "journal: has no rollout of item "),
    ],
)
def test_an_evaluation_with_a_damaged_file_is_refused(name, damage, says, evaluation, tmp_path, errors_of):
    folder = tmp_path / "eval"
    shutil.copytree(evaluation, folder)
    damage(folder / name)
    before = files_of(folder)
    assert f"error: {folder}/{says}" in errors_of("eval", f"resume={folder}")
    assert files_of(folder) == before


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


def test_no_checkpoint_at_all_begins_again(run, whole):
    shutil.rmtree(run / "checkpoints")
    assert main(["train", f"resume={run}"]) == 0
    assert contents(run) == contents(whole)
