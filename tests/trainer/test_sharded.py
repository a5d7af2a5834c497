"""FSDP2: two processes that share the weights of policy and critic end with the numbers and files of one."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers.core_model_loading import revert_weight_conversion

from mmrl.config import HardwareConfig
from mmrl.run.launch import wrapping
from mmrl.trainer.sharding import exact_outputs
from tests.helpers.trainer_cases import CASES, VALUE_CALLS, build, sampled, tiny_model, two_processes, watch_gradients

OWN = {"time/update", "train/tokens_forwarded"}
"""Metrics that the number of processes changes."""
pytestmark = pytest.mark.slow
cases = pytest.mark.parametrize("name", CASES)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One process trains every case here, then two train the same, and go on from what the one has saved."""
    folder = tmp_path_factory.mktemp("sharded")
    one = {}
    for name in CASES:
        seen: list[dict[str, float]] = []
        trainer = build(folder / "one" / name, name, seen)
        gradients = watch_gradients(trainer)
        trainer.train()
        values = trainer.forwards.values(sampled(VALUE_CALLS)) if trainer.critic is not None else None
        one[name] = {"metrics": seen, "gradients": gradients, "values": values}
    hardware = HardwareConfig(name="test", device="cuda", processes=2, sharding="fsdp2")
    two_processes(["-m", "tests.helpers.trainer_cases", str(folder)], wrapping(hardware))
    return {"folder": folder, "one": one}


def facts_of(runs: dict[str, Any], name: str) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads((runs["folder"] / "two" / name / "facts.json").read_text())
    return facts


def weights(folder: Path, step: int) -> dict[str, torch.Tensor]:
    found = {}
    for file in sorted((folder / f"checkpoint-{step}").glob("*.safetensors")):
        found |= {f"{file.name}:{name}": tensor for name, tensor in load_file(file).items()}
    return found


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor], atol: float) -> None:
    assert left.keys() == right.keys()
    for name in left:
        assert torch.allclose(left[name], right[name], rtol=1e-4, atol=atol), name


def same_metrics(left: list[dict[str, float]], right: list[dict[str, float]]) -> None:
    for mine, theirs in zip(left, right, strict=True):
        assert mine.keys() == theirs.keys()
        for key in mine.keys() - OWN:
            assert theirs[key] == pytest.approx(mine[key], rel=1e-4, abs=1e-4), key


@cases
def test_every_weight_is_sharded(name: str, runs: dict[str, Any]) -> None:
    facts = facts_of(runs, name)
    assert facts["kind"] == "DistributedType.FSDP"
    assert facts["whole"] == []


@cases
def test_two_processes_give_the_losses_and_gradients_of_one(name: str, runs: dict[str, Any]) -> None:
    one = runs["one"][name]
    same_metrics(one["metrics"], facts_of(runs, name)["metrics"])
    gradients = torch.load(runs["folder"] / "two" / name / "gradients.pt")
    assert len(gradients) == len(one["gradients"]) == 6
    for mine, theirs in zip(one["gradients"], gradients, strict=True):
        same(mine, theirs, 1e-5)


@cases
def test_they_save_the_files_of_one(name: str, runs: dict[str, Any]) -> None:
    one, two = (runs["folder"] / kind / name for kind in ("one", "two"))
    same(weights(one, 3), weights(two, 3), 1e-5)
    if "critic" in CASES[name]:
        assert any(key.startswith("critic.safetensors:") for key in weights(two, 3))
    states = [torch.load(folder / "checkpoint-3" / "optimizer.pt") for folder in (one, two)]
    assert states[0]["param_groups"] == states[1]["param_groups"]
    for index, values in states[0]["state"].items():
        same(values, states[1]["state"][index], 1e-6)
    files = [{p.name for p in (f / "checkpoint-3").iterdir() if "rng_state" not in p.name} for f in (one, two)]
    assert files[0] == files[1]


@cases
def test_what_engines_are_sent_is_what_is_saved(name: str, runs: dict[str, Any]) -> None:
    """Of an adapter no base, which would be gathered for nothing."""
    pushed = torch.load(runs["folder"] / "two" / name / "pushed.pt")
    files = weights(runs["folder"] / "two" / name, 3).items()
    saved = {file.partition(":")[2]: value for file, value in files if not file.startswith("critic")}
    sent = {key.replace(".default", ""): value.cpu() for key, value in pushed.items()}
    if name == "experts":  # in a file each is by itself
        sent = revert_weight_conversion(tiny_model("qwen3_moe"), sent)
    same(saved, {key: sent[key] for key in saved}, 1e-6)
    if CASES[name].get("lora"):
        assert all("lora_" in key for key in sent)


@cases
def test_two_go_on_from_one(name: str, runs: dict[str, Any]) -> None:
    same_metrics(runs["one"][name]["metrics"][2:], facts_of(runs, name)["resumed"])
    same(weights(runs["folder"] / "one" / name, 3), weights(runs["folder"] / "again" / name, 3), 1e-5)


@cases
def test_one_goes_on_from_two(name: str, runs: dict[str, Any], tmp_path: Path) -> None:
    seen: list[dict[str, float]] = []
    build(tmp_path, name, seen, resume_from=runs["folder"] / "two" / name / "checkpoint-2").train()
    same_metrics(runs["one"][name]["metrics"][2:], seen)
    same(weights(runs["folder"] / "one" / name, 3), weights(tmp_path, 3), 1e-5)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if "critic" in case])
def test_values_of_shares_of_unequal_size(name: str, runs: dict[str, Any]) -> None:
    for mine, theirs in zip(runs["one"][name]["values"], facts_of(runs, name)["values"], strict=True):
        assert theirs == pytest.approx(mine, abs=1e-4)


def test_log_probabilities_are_not_rounded_on_their_way_out() -> None:
    """accelerate's policy for bf16 casts what a unit returns, gradients' sums too."""
    half = torch.bfloat16
    plugin = SimpleNamespace(mixed_precision_policy=MixedPrecisionPolicy(half, half, half))
    accelerator = SimpleNamespace(state=SimpleNamespace(fsdp_plugin=plugin))
    exact_outputs(accelerator)
    found = plugin.mixed_precision_policy
    assert (found.param_dtype, found.reduce_dtype, found.output_dtype) == (half, torch.float32, None)
