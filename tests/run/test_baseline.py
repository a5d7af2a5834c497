"""`run.baseline`: the evaluation before training, made once for runs that begin with the same policy."""

import shutil
from pathlib import Path

import pytest

from mmrl.cli import main
from mmrl.cli.configs import configured
from mmrl.rollout.sample import sample
from mmrl.sets.queue import PlannedRun, RunQueue
from mmrl.stages import evaluate
from mmrl.store.rundir import RunDir
from tests.helpers.runs import command, numbers
from tests.helpers.stand_in import calls  # noqa: F401

STEPS = ["train.steps=1", "eval.temperature=0"]


@pytest.fixture(scope="module")
def first(random_model, tmp_path_factory):
    """A run whose evaluation others take over."""
    folder = tmp_path_factory.mktemp("first") / "run"
    assert main(command(random_model, folder, "algo=mhgpo_rr", *STEPS)) == 0
    return folder


def test_a_run_that_takes_it_over_has_the_numbers_of_one_that_evaluates(first, random_model, tmp_path, monkeypatch):
    words = ["algo=mhgpo_fof", *STEPS]
    assert main(command(random_model, tmp_path / "evaluates", *words)) == 0
    evaluated = []
    monkeypatch.setattr(evaluate, "sample", lambda *arguments: evaluated.append(1) or sample(*arguments))
    assert main(command(random_model, tmp_path / "takes", *words, f"run.baseline={first}")) == 0
    assert len(evaluated) == 1, "after training alone"
    assert numbers(tmp_path / "takes") == numbers(tmp_path / "evaluates")
    results = [RunDir.read(folder).eval_path(0, "dev").read_bytes() for folder in (first, tmp_path / "takes")]
    assert results[0] == results[1]


def test_once_taken_over_it_is_the_runs_own(first, random_model, tmp_path):
    donor, run = tmp_path / "donor", tmp_path / "run"
    shutil.copytree(first, donor)
    words = ["algo=mhgpo_fof", "train.steps=2", "eval.temperature=0", "train.save_every=1"]
    assert main(command(random_model, run, *words, f"run.baseline={donor}")) == 0
    whole = numbers(run)
    shutil.rmtree(donor)
    shutil.rmtree(run / "checkpoints" / "checkpoint-2")
    (run / "summary.json").unlink()
    assert main(["train", f"resume={run}"]) == 0
    assert numbers(run) == whole


def said(capsys, *words):
    """The error of a command line that is refused."""
    assert main([*words]) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("eval.items=3", "eval.items is 4 there, 3 here"),
        ("eval.top_p=0.5", "eval.top_p is 1.0 there, 0.5 here"),
        ("task.max_tokens=7", "task.max_tokens is 6 there, 7 here"),
        ("seed=1", "seed is 0 there, 1 here"),
        ("hardware.threads=2", "hardware.threads is 1 there, 2 here"),
        ("model.dtype=bfloat16", "model.dtype is auto there, bfloat16 here"),
        ("task.reward=em", "task.reward is None there, em here"),
        ("eval.split=test", "has no evaluation on test before training"),
    ],
)
def test_one_that_is_asked_something_else_is_refused(first, random_model, tmp_path, capsys, word, says):
    words = command(random_model, tmp_path / "run", "algo=mhgpo_fof", *STEPS, f"run.baseline={first}", word)
    message = said(capsys, *words)
    assert f"error: run.baseline: {first}" in message and says in message, message
    assert not (tmp_path / "run").exists()


def test_what_is_no_run_of_mmrl_train_is_refused(first, random_model, tmp_path, capsys):
    words = command(random_model, tmp_path / "run", "algo=mhgpo_fof", *STEPS)
    assert "run.baseline: " in said(capsys, *words, f"run.baseline={tmp_path / 'none'}")
    assert main(["eval", f"policy={first}", "eval.items=2", "hardware=cpu", f"run.dir={tmp_path / 'evaluation'}"]) == 0
    assert "is no run of mmrl train" in said(capsys, *words, f"run.baseline={tmp_path / 'evaluation'}")


def test_items_that_have_changed_since_are_refused(first, random_model, tmp_path, capsys):
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in first.iterdir():
        (copy / path.name).symlink_to(path)
    (copy / "examples.jsonl").unlink()
    text = (first / "examples.jsonl").read_text().replace('"split":"dev"', '"split":"dev" ').replace("?", "!")
    (copy / "examples.jsonl").write_text(text)
    words = command(random_model, tmp_path / "run", "algo=mhgpo_fof", *STEPS, f"run.baseline={copy}")
    assert "4 of the dev items are others" in said(capsys, *words)


def planned(words, path, seed=0):
    config = configured([word for word in words[1:] if not word.startswith("run.dir=")])
    return PlannedRun(row="r", column="c", seed=seed, words=[], path=Path(path), config=config)


def test_a_set_evaluates_once_what_its_runs_begin_with(first, random_model, tmp_path, calls):  # noqa: F811
    same = planned(command(random_model, tmp_path, "algo=grpo", *STEPS), tmp_path / "same")
    other = planned(command(random_model, tmp_path, "algo=grpo", *STEPS, "seed=1"), tmp_path / "other")
    done = planned(command(random_model, first, "algo=mhgpo_rr", *STEPS), first)
    RunQueue(runs=[done, other, same], at_once=1, config_dir=None, on_done=lambda: None).run()
    takes = {line.split("run.dir=")[1].split()[0]: f"run.baseline={first}" in line for line in calls()}
    assert takes == {str(tmp_path / "same"): True, str(tmp_path / "other"): False}
