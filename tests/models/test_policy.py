"""What `policy=` accepts."""

import json

import pytest

from mmrl.errors import ConfigError
from mmrl.models.policy import Policy, other_task, resolve


def checkpoint(folder, step, adapter=False):
    path = folder / "checkpoints" / f"checkpoint-{step}"
    path.mkdir(parents=True)
    if adapter:
        (path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "/gone"}))
    else:
        (path / "config.json").write_text("{}")
    (path / "complete.json").write_text(json.dumps({"step": step, "files": {}}))
    return path


@pytest.mark.parametrize("text", ["tiny", "Qwen/Qwen3-8B"])
def test_names_and_hub_ids_stand_for_themselves(text):
    assert resolve(text) == Policy(base=text)


def test_a_run_is_its_newest_checkpoint_by_number(tmp_path):
    (tmp_path / "config.yaml").write_text("model: {path: tiny}\n")
    for step in (9, 10, 2):
        newest = checkpoint(tmp_path, step)
    (tmp_path / "checkpoints" / "checkpoint-11.tmp").mkdir()
    found = resolve(str(tmp_path))
    assert (found.base, found.step) == (str(newest.parent / "checkpoint-10"), 10)


def test_a_checkpoint_of_a_run_that_is_not_complete_is_passed_over(tmp_path):
    (tmp_path / "config.yaml").write_text("model: {path: tiny}\n")
    whole, damaged = checkpoint(tmp_path, 2), checkpoint(tmp_path, 4)
    (damaged / "complete.json").write_text(json.dumps({"step": 4, "files": {"model.safetensors": 3}}))
    assert resolve(str(tmp_path)).base == str(whole)


def test_an_adapter_of_a_run_takes_the_runs_base(tmp_path):
    (tmp_path / "config.yaml").write_text("model: {path: Qwen/Qwen3-8B}\n")
    path = checkpoint(tmp_path, 5, adapter=True)
    assert resolve(str(tmp_path)) == Policy(base="Qwen/Qwen3-8B", adapter=str(path), step=5)


def test_a_policy_of_another_task_is_told(tmp_path, monkeypatch):
    (tmp_path / "config.yaml").write_text("model: {path: tiny}\ntask: {name: search_agent}\n")
    newest = checkpoint(tmp_path, 5)
    (newest / "agent").mkdir()
    told = {"trained on": "search_agent (to evaluate on that: task=search_agent)"}
    for folder in (tmp_path, newest, newest / "agent"):
        assert other_task(str(folder), "hotpotqa") == told
        assert other_task(str(folder), "search_agent") == {}
    monkeypatch.chdir(tmp_path)
    assert other_task("tiny", "hotpotqa") == other_task("Qwen/Qwen3-8B", "hotpotqa") == {}


def test_an_adapter_alone_names_its_base_itself(tmp_path):
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "owner/base"}))
    assert resolve(str(tmp_path)) == Policy(base="owner/base", adapter=str(tmp_path))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda p: p / "nowhere", "expected a run"),
        (lambda p: p, "holds neither"),
        (lambda p: (p / "config.yaml").write_text("model: {path: tiny}") and p, "no checkpoint yet"),
    ],
)
def test_paths_without_weights_are_refused(make, says, tmp_path):
    with pytest.raises(ConfigError, match=says):
        resolve(str(make(tmp_path)))
