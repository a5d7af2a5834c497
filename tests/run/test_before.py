"""`run.before`: the evaluation before training, made once for runs that begin with the same policy."""

import json
import os
import shutil
from pathlib import Path

import pytest

from mmrl.cli import main
from mmrl.cli.configs import configured
from mmrl.rollout.sample import sample
from mmrl.run.before import before_differences
from mmrl.run.settle import settle
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
    assert main(command(random_model, tmp_path / "takes", *words, f"run.before={first}")) == 0
    assert len(evaluated) == 1, "after training alone"
    assert numbers(tmp_path / "takes") == numbers(tmp_path / "evaluates")
    results = [RunDir.read(folder).eval_path(0, "dev").read_bytes() for folder in (first, tmp_path / "takes")]
    assert results[0] == results[1]


def test_once_taken_over_it_is_the_runs_own(first, random_model, tmp_path):
    donor, run = tmp_path / "donor", tmp_path / "run"
    shutil.copytree(first, donor)
    words = ["algo=mhgpo_fof", "train.steps=2", "eval.temperature=0", "train.save_every=1"]
    assert main(command(random_model, run, *words, f"run.before={donor}")) == 0
    whole = numbers(run)
    shutil.rmtree(donor)
    shutil.rmtree(run / "checkpoints" / "checkpoint-2")
    (run / "summary.json").unlink()
    assert main(["train", f"resume={run}"]) == 0
    assert numbers(run) == whole


def evaluates(first, random_model, folder, capsys, *words):
    """What is said where a run does not take the evaluation over, and evaluates."""
    assert main(command(random_model, folder, "algo=mhgpo_fof", *STEPS, f"run.before={first}", *words)) == 0
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("eval.items=3", "eval.items is 4 there, 3 here"),
        ("eval.temperature=0.5", "eval.temperature is 0.0 there, 0.5 here"),
        ("task.max_tokens=7", "task.max_tokens is 6 there, 7 here"),
        ("seed=1", "seed is 0 there, 1 here"),
        ("model.dtype=bfloat16", "model.dtype is auto there, bfloat16 here"),
        ("eval.split=test", "it has no evaluation on test before training"),
        ("model.date=2024-02-29", "model.date is "),
    ],
)
def test_one_that_is_asked_something_else_evaluates(first, random_model, tmp_path, capsys, word, says):
    message = evaluates(first, random_model, tmp_path / "run", capsys, word)
    assert f"run.before: evaluated anew, not taken from {first}: " in message and says in message, message


def test_what_is_no_run_of_mmrl_train_is_refused(first, random_model, tmp_path, capsys):
    words = command(random_model, tmp_path / "run", "algo=mhgpo_fof", *STEPS)
    assert main(["eval", f"policy={first}", "eval.items=2", "hardware=cpu", f"run.dir={tmp_path / 'evaluation'}"]) == 0
    capsys.readouterr()
    for folder, says in ((tmp_path / "none", "no such run directory"), (tmp_path / "evaluation", "is no run of mmrl")):
        assert main([*words, f"run.before={folder}"]) == 2
        said = capsys.readouterr().err
        assert said.startswith("error: run.before: ") and says in said
        assert not (tmp_path / "run").exists()


def change_prompts(donor, random_model):
    os.utime(Path(random_model) / "config.json")


def change_items(donor, random_model):
    path = donor / "examples.jsonl"
    path.write_text(path.read_text().replace("?", "!"))


def lose_items(donor, random_model):
    path = donor / "eval" / "step-000000-dev.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))


def fail_once(donor, random_model):
    path = donor / "eval" / "step-000000-dev.jsonl"
    path.write_text(path.read_text().replace('"failed_share":0.0', '"failed_share":1.0', 1))


def change_facts(donor, **changed):
    path = donor / "environment.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))


def upgrade(donor, random_model):
    change_facts(donor, versions={"torch": "1.0"})


def edit_mmrl(donor, random_model):
    change_facts(donor, mmrl_code="0")


def move_in_an_older_one(donor, random_model):
    older = Path(shutil.copytree(random_model, f"{random_model}-older"))
    shutil.rmtree(random_model)
    older.rename(random_model)
    for path in (Path(random_model), *Path(random_model).iterdir()):
        os.utime(path, (1e9, 1e9))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (change_prompts, "config.json has changed since"),
        (change_items, "4 of the dev items are others"),
        (lose_items, "it has no evaluation on dev before training"),
        (fail_once, "failed from outside causes"),
        (upgrade, "versions of packages are others"),
        (edit_mmrl, "mmrl's own sources are others"),
        (move_in_an_older_one, "config.json has changed since"),
    ],
)
def test_what_has_changed_since_is_evaluated(first, random_model, tmp_path, capsys, change, says):
    donor = tmp_path / "donor"
    shutil.copytree(first, donor)
    model = tmp_path / "model"
    shutil.copytree(random_model, model)
    for name in ("config.yaml", "environment.json"):
        (donor / name).write_text((donor / name).read_text().replace(str(random_model), str(model)))
    items = donor / "eval" / "step-000000-dev.jsonl"
    items.write_text(items.read_text())  # later than the copied model
    assert not before_differences(
        settle(planned(command(model, tmp_path, "algo=grpo", *STEPS), tmp_path).config).config, donor
    )
    change(donor, model)
    message = evaluates(donor, model, tmp_path / "run", capsys)
    assert says in message, message


def test_files_that_are_known_by_content_may_be_newer_but_not_others(random_model, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    donor, prompts = tmp_path / "donor", tmp_path / "p.yaml"
    prompts.write_text("{}")
    words = [*STEPS, "task.prompts='~/p.yaml'"]
    assert main(command(random_model, donor, "algo=mhgpo_rr", *words)) == 0
    config = settle(planned(command(random_model, tmp_path, "algo=grpo", *words), tmp_path).config).config
    prompts.touch()
    assert before_differences(config, donor) == []
    prompts.write_text("{ }")
    assert before_differences(config, donor) == ["task.prompts=~/p.yaml has other content now"]


def test_code_that_may_have_changed_evaluates(first, random_model, tmp_path, capsys, monkeypatch):
    (tmp_path / "code_of_before.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    message = evaluates(first, random_model, tmp_path / "run", capsys, "plugins=[code_of_before]")
    assert "plugins=code_of_before is code that may have changed" in message


def planned(words, path, seed=0):
    config = configured([word for word in words[1:] if not word.startswith("run.dir=")])
    return PlannedRun(row="r", column="c", seed=seed, words=[], path=Path(path), config=config)


def test_a_set_evaluates_once_what_its_runs_begin_with(first, random_model, tmp_path, calls):  # noqa: F811
    same = planned(command(random_model, tmp_path, "algo=grpo", *STEPS), tmp_path / "same")
    other = planned(command(random_model, tmp_path, "algo=grpo", *STEPS, "seed=1"), tmp_path / "other")
    done = planned(command(random_model, first, "algo=mhgpo_rr", *STEPS), first)
    RunQueue(runs=[done, other, same], at_once=1, config_dir=None, on_done=lambda: None).run()
    takes = {line.split("run.dir=")[1].split()[0]: f"run.before={first}" in line for line in calls()}
    assert takes == {str(tmp_path / "same"): True, str(tmp_path / "other"): False}
