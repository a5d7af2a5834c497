"""`mmrl new-task` writes a package whose own test passes and which trains, from a folder that is not mmrl's."""

import os
import subprocess
import sys

import pytest

from mmrl.cli import main
from tests.helpers import TOP


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A folder with one package of each kind."""
    folder = tmp_path_factory.mktemp("mine")
    assert main(["new-task", "route_plain", f"dir={folder}"]) == 0
    assert main(["new-task", "route_dspy", "kind=dspy", f"dir={folder}"]) == 0
    return folder


def test_the_written_tests_pass_under_pytest(written):
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "route_plain", "route_dspy"],
        cwd=written,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(TOP)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "6 passed" in done.stdout


@pytest.mark.parametrize("name", ["route_plain", "route_dspy"])
def test_it_trains_and_evaluates_by_its_name_alone(name, written, random_model, monkeypatch, capsys):
    monkeypatch.chdir(written)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    small = ["model=hf", f"model.path={random_model}", f"run.dir=run_{name}", "hardware.threads=1", "task.max_tokens=6"]
    sizes = ["algo.rollouts=2", "train.steps=1", "train.batch_size=2", "eval.items=2"]
    assert main(["train", f"task={name}", "algo=mmgrpo", *small, *sizes]) == 0, capsys.readouterr()
    config = (written / f"run_{name}" / "config.yaml").read_text()
    assert name in config and f"{name}/train.jsonl" in config


def test_the_next_commands_are_printed(tmp_path, monkeypatch, output_of):
    monkeypatch.chdir(tmp_path)
    printed = output_of("new-task", "route")
    for command in ("python -m pytest route\n", "mmrl train task=route ", "mmrl eval task=route policy="):
        assert command in printed
    assert "cd " not in printed and "model=" not in printed
    assert "model=NAME" in output_of("new-task", "other", "kind=dspy")


@pytest.mark.parametrize("taken", ["route/mine.txt", "conf/task/route.yaml"])
def test_nothing_is_overwritten(taken, tmp_path, monkeypatch, errors_of):
    monkeypatch.chdir(tmp_path)
    (tmp_path / taken).parent.mkdir(parents=True)
    (tmp_path / taken).write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    assert "exists, and nothing is overwritten" in errors_of("new-task", "route")
    assert sorted(tmp_path.rglob("*")) == before and (tmp_path / taken).read_text() == "mine"
