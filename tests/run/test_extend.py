import shutil

import pytest

from mmrl.cli import main
from mmrl.store.rundir import RunDir
from tests.helpers.runs import command, numbers


@pytest.fixture(scope="module")
def short(random_model, tmp_path_factory):
    """A run of 2 steps, finished."""
    folder = tmp_path_factory.mktemp("short") / "run"
    assert main(command(random_model, folder, "train.steps=2")) == 0
    return folder


def copy(run, folder):
    return shutil.copytree(run, folder / "run")


def weights(run, step):
    (file,) = (run / "checkpoints" / f"checkpoint-{step}").glob("*.safetensors")
    return file.read_bytes()


def test_two_steps_and_two_more_are_four_bit_for_bit(short, random_model, tmp_path, capsys, errors_of):
    run, whole = copy(short, tmp_path), tmp_path / "whole"
    assert main(command(random_model, whole, "train.steps=4")) == 0
    capsys.readouterr()
    before, config = RunDir.read(run).summary, (run / "config.yaml").read_bytes()
    assert main(["train", f"resume={run}", "train.steps=+2"]) == 0
    printed = capsys.readouterr()
    assert "continuing from step 2" in printed.err and "after step 2 (segments.jsonl)" in printed.out
    seen, expected = RunDir.read(run), RunDir.read(whole)
    assert numbers(run) == numbers(whole)
    assert weights(run, 4) == weights(whole, 4)
    for step in (3, 4):
        assert seen.journal_path(step).read_bytes() == expected.journal_path(step).read_bytes()
    assert seen.environment["resumed"][-1]["step"] == 2, "costs are counted anew from there"
    # the first segment and the config stay as they were
    (segment,) = seen.segments
    assert (segment["steps"], segment["done"], segment["summary"]) == (4, 2, before)
    assert segment["command"] == ["mmrl", "train", f"resume={run}", "train.steps=+2"]
    assert (run / "config.yaml").read_bytes() == config and seen.config["train"]["steps"] == 4
    assert seen.finished and seen.summary["steps"] == 4
    assert "after step 2" in seen.summary["facts"]["extended"] and "after step 2" in seen.report_path.read_text()
    # finished again, and the checkpoints of both segments are what they say
    assert "this run is finished" in errors_of("train", f"resume={run}")


def test_full_weights_in_bfloat16_go_on_too(random_model, tmp_path, caplog):
    """What is generated first is so within the trainer's mixed precision, by weights in float32."""
    words, run = ("model.dtype=bfloat16", "model.lora=null", "eval.temperature=0", "eval.every=1"), tmp_path / "run"
    assert main(command(random_model, run, *words, "train.steps=1")) == 0
    assert main(["train", f"resume={run}", "train.steps=+1"]) == 0
    whole = tmp_path / "whole"
    assert main(command(random_model, whole, *words, "train.steps=2", f"run.before={run}")) == 0
    assert numbers(run) == numbers(whole)
    assert "engine.loop" not in caplog.text, "the fastest loop agrees"


def test_a_checkpoint_that_another_run_starts_from_stays_and_is_found_where_both_were_moved(
    short, random_model, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    copy(short, tmp_path)
    words = command(random_model, "second", "train.steps=1", "model.lora={r: 4, alpha: 8}")
    own = ("model=", "model.path=", "model.lora=null", "task")
    assert main(["train", "from=run", *(word for word in words[1:] if not word.startswith(own))]) == 0
    assert main(["train", "resume=run", "train.steps=+4"]) == 0
    steps = [int(path.name.rpartition("-")[2]) for path in (tmp_path / "run" / "checkpoints").glob("checkpoint-*")]
    assert sorted(steps) == [2, 4, 6], "train.keep=2, and the one that the other run starts from"
    (tmp_path / "moved").mkdir()
    for name in ("run", "second"):
        (tmp_path / name).rename(tmp_path / "moved" / name)
    assert main(["export", "moved/second", "out=exported"]) == 0
    assert (tmp_path / "exported" / "model.safetensors").is_file()


def test_a_killed_extension_goes_on(short, tmp_path):
    run = copy(short, tmp_path)
    with RunDir.open(run) as opened:
        opened.add_segment(3, 2, ["mmrl"])
    assert not RunDir.read(run).finished  # killed before it began
    assert main(["train", f"resume={run}"]) == 0
    assert RunDir.read(run).summary["steps"] == 3


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        (["train.steps=2"], "this run is finished"),
        (["train.steps=1"], "has done 2; expected more, or +N"),
        (["train.steps=+0"], "this run is finished"),
        (["train.steps=-3"], "train.steps: got '-3', expected +N"),
        (["train.steps=ten"], "train.steps: got 'ten', expected +N"),
        (["train.steps=+2", "train.lr=1"], "remove train.lr=1"),
        (["train.batch_size=2"], "train.steps: further steps"),
    ],
)
def test_what_a_run_cannot_go_on_with(typed, says, short, tmp_path, errors_of):
    def files():
        # but for the lock, and that somebody tried
        passed_over = ("run.lock", "environment.json")
        return {p: p.read_bytes() for p in short.rglob("*") if p.is_file() and p.name not in passed_over}

    before = files()
    assert says in errors_of("train", f"resume={short}", *typed)
    assert files() == before


def test_a_refused_extension_leaves_no_trace(short, tmp_path, errors_of):
    run = copy(short, tmp_path)
    (run / "checkpoints" / "checkpoint-2" / "config.json").write_text("{}")
    assert "checkpoint-2/config.json has 2 bytes" in errors_of("train", f"resume={run}", "train.steps=+1")
    assert not (run / "segments.jsonl").exists()


def test_a_learning_rate_that_falls_to_the_end_of_the_run_is_refused(short, tmp_path, errors_of):
    run = copy(short, tmp_path)
    text = (run / "config.yaml").read_text()
    assert "schedule: constant" in text
    (run / "config.yaml").write_text(text.replace("seed: 0", "seed: 7"))
    says = "(environment.json): seed=7 (was 0); put it back"
    assert says in errors_of("train", f"resume={run}", "train.steps=4")
    (run / "config.yaml").write_text(text.replace("schedule: constant", "schedule: cosine"))
    assert "train.schedule=cosine ends at step 2" in errors_of("train", f"resume={run}", "train.steps=4")
    assert not (run / "segments.jsonl").exists()
