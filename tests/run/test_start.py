"""Runs that start from others: merged weights that were damaged or lost, and a run that has gone on since."""

import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mmrl.cli import main
from mmrl.config import StageConfig
from mmrl.errors import ConfigError
from mmrl.models.merged import merged, require_undamaged
from mmrl.run.settle import stored_config
from mmrl.sets.queue import _require_start
from mmrl.store.policy import damage, resolve
from tests.helpers.runs import EVAL, command, contents, flip, forge

LORA = "model.lora={r: 4, alpha: 8}"
TYPED = ("model=", "model.path=", "model.lora=", "task=")
"""What a run takes over from the one that it starts from."""


def pair(random_model, folder, lora):
    """A run of two steps, and a run of two steps that starts from it, in `folder`, which is the current one."""
    own = [lora] if lora else []
    assert main(command(random_model, "first", "train.steps=2", *own)) == 0
    words = command(random_model, "second", "train.steps=2", "train.save_every=1", "eval.every=0")
    assert main(["train", "from=first", *own, *(word for word in words[1:] if not word.startswith(TYPED))]) == 0
    return folder


@pytest.fixture(scope="module")
def pairs(random_model, tmp_path_factory):
    """Folders with a run and one that starts from it: `lora` and `full`; only read."""
    before, found = os.getcwd(), {}
    try:
        for name, lora in (("lora", LORA), ("full", None)):
            found[name] = tmp_path_factory.mktemp(name)
            os.chdir(found[name])
            pair(random_model, found[name], lora)
    finally:
        os.chdir(before)
    return found


@pytest.fixture
def at(pairs, tmp_path, monkeypatch):
    """Copy a pair, and go there; the second run as if it was killed after its first step."""

    def enter(name):
        shutil.copytree(pairs[name], tmp_path, dirs_exist_ok=True)
        monkeypatch.chdir(tmp_path)
        shutil.rmtree("second/checkpoints/checkpoint-2")
        for file in ("summary.json", "report.html"):
            os.unlink(f"second/{file}")
        return tmp_path

    return enter


def cut(path):
    os.truncate(path, path.stat().st_size - 1)


DAMAGE = {
    "a bit of the weights": ("model.safetensors", flip),
    "a truncated file": ("model.safetensors", cut),
    "no weights": ("model.safetensors", os.unlink),
    "another config": ("config.json", lambda path: path.write_text(path.read_text() + " ")),
    "no tokenizer": ("tokenizer.json", os.unlink),
    "no list of files": ("complete.json", os.unlink),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damaged_merged_weights_are_made_again_with_equal_bits(kind, at, capsys):
    folder = at("lora") / "first" / "merged" / "checkpoint-2"
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    name, spoil = DAMAGE[kind]
    spoil(folder / name)
    # of a merge that was killed, and of one of another checkpoint
    stale, other = folder.with_name(".checkpoint-2-ab12cd34"), folder.with_name(".checkpoint-20-ab12cd34")
    for path in (stale, other):
        path.mkdir()
    model = stored_config(folder.parents[1], StageConfig).model
    assert merged(resolve("first"), model) == "first/merged/checkpoint-2"
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    (line,) = capsys.readouterr().err.splitlines()
    named = f"first/merged/checkpoint-2/{name}"
    assert line.startswith(f"warning: {named}") and line.endswith("; merged again from first/checkpoints/checkpoint-2")
    assert not stale.exists() and other.exists()
    merged(resolve("first"), model)
    assert capsys.readouterr().err == "", "whole now"


def test_a_resume_trains_from_the_weights_that_were_merged_at_first(at, pairs, capsys):
    folder = at("lora") / "first" / "merged" / "checkpoint-2"
    flip(folder / "model.safetensors")
    assert main(["train", "resume=second"]) == 0
    assert "merged again from first/checkpoints/checkpoint-2" in capsys.readouterr().err
    assert contents(folder.parents[2] / "second") == contents(pairs["lora"] / "second")


@pytest.mark.parametrize("use", ["eval", "export"])
def test_a_damaged_base_is_made_again_wherever_a_policy_is_used(use, at, capsys):
    folder = at("lora") / "first" / "merged" / "checkpoint-2"
    flip(folder / "model.safetensors")
    words = ["eval", "policy=second", "run.dir=evaluated", *EVAL] if use == "eval" else ["export", "second", "out=exp"]
    assert main(words) == 0
    assert not damage(folder) and "merged again" in capsys.readouterr().err
    # without the adapter that it was merged from it cannot be
    shutil.rmtree("first/checkpoints")
    flip(folder / "model.safetensors")
    words = [word.replace("evaluated", "again").replace("exp", "exp2") if "=" in word else word for word in words]
    assert main(words) == 2
    assert "first/merged/checkpoint-2/model.safetensors has not the content" in capsys.readouterr().err


def test_weights_that_cannot_be_checked_are_taken(at):
    """A folder of a former version has no list of files; its adapter may be gone."""
    at("lora")
    os.unlink("first/merged/checkpoint-2/complete.json")
    shutil.rmtree("first/checkpoints")
    require_undamaged(resolve("second"), stored_config(Path("second"), StageConfig).model)


@pytest.mark.parametrize("name", ["lora", "full"])
def test_a_run_goes_on_where_the_one_that_it_started_from_was_extended(name, at, pairs, capsys, errors_of):
    folder = at(name)
    assert main(["train", "resume=first", "train.steps=+4"]) == 0
    steps = sorted(
        int(path.name.rpartition("-")[2]) for path in (folder / "first" / "checkpoints").glob("checkpoint-*")
    )
    assert steps == [2, 4, 6], "train.keep=2, and the one that the other run starts from"
    moved = shutil.copytree(folder, folder / "moved", ignore=shutil.ignore_patterns("moved"))
    assert main(["train", "resume=second"]) == 0
    assert contents(folder / "second") == contents(pairs[name] / "second")
    # also where both were moved, and not from another checkpoint once that one is gone
    shutil.rmtree(folder / "first")
    assert main(["train", f"resume={moved / 'second'}"]) == 0
    (moved / "second" / "summary.json").unlink()
    shutil.rmtree(moved / "first" / "checkpoints" / "checkpoint-2")
    assert "has another policy now" in errors_of("train", f"resume={moved / 'second'}")
    # A set keeps finished runs, but not of a start that is gone.
    with pytest.raises(ConfigError, match=r"has another policy now .*; delete .*second to run it again"):
        _require_start(moved / "second", moved / "first")


def test_a_checkpoint_that_is_another_now_is_merged_again(at, capsys):
    """A run made anew in the same folder has a checkpoint of the same name."""
    folder = at("lora")
    policy, section = resolve("first"), stored_config(folder / "second", StageConfig).model
    target, checkpoint = Path(merged(policy, section)), Path(policy.adapter)
    before = load_file(target / "model.safetensors")
    weights = load_file(checkpoint / "adapter_model.safetensors")
    save_file({name: weight + 0.1 for name, weight in weights.items()}, checkpoint / "adapter_model.safetensors")
    forge(checkpoint)
    capsys.readouterr()
    assert merged(policy, section) == str(target)
    assert f"{target} was made of another {checkpoint.name}; merged again" in capsys.readouterr().err
    after = load_file(target / "model.safetensors")
    assert any(not torch.equal(before[name], after[name]) for name in before)
    assert merged(policy, section) == str(target) and capsys.readouterr().err == ""


def test_the_revision_of_a_base_is_that_of_the_run_that_trained_it(at, monkeypatch):
    """Of the run that starts from it, which has none, the base would be the newest."""
    folder = at("lora")
    config = (folder / "first" / "config.yaml").read_text()
    assert "revision: null" in config
    (folder / "first" / "config.yaml").write_text(config.replace("revision: null", "revision: abc"))
    seen = []
    monkeypatch.setattr("mmrl.models.merged.write_merged", lambda base, adapter, model, target: seen.append(model))
    shutil.rmtree("first/merged")
    merged(resolve("first"), stored_config(folder / "second", StageConfig).model)
    assert [model.revision for model in seen] == ["abc"]
