"""Weights per module: adapters of their own, trained by their own calls alone (law 12)."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mmrl.config.algo import PpoConfig
from mmrl.trainer.adapters import Adapters
from mmrl.trainer.objective import TrainCall
from tests.helpers.trainer_cases import (
    LORA,
    changed,
    gradients,
    make_calls,
    make_trainer,
    resumable,
    sampled,
    weights_of,
    with_targets,
)

BOTH = Adapters(by_module={"a": "alpha", "b": "beta"}, rates={})


def weights(trainer: Any, name: str) -> dict[str, torch.Tensor]:
    return {n: p.detach().clone() for n, p in BOTH.parameters(trainer.model, name).items()}


def frozen(calls: list[TrainCall], module: str) -> list[TrainCall]:
    zero = [tuple(replace(e, weights=(0.0,) * len(e.weights)) for e in c.entries) for c in calls]
    return [replace(c, entries=z) if c.call.module == module else c for c, z in zip(calls, zero, strict=True)]


def test_law_12_a_frozen_modules_weights_are_bit_identical(tmp_path: Path) -> None:
    calls = make_calls(6)
    trainer = make_trainer(
        tmp_path, lora=LORA, adapters=BOTH, calls=frozen(calls, "b"), steps=3, weight_decay=0.5, lr=1e-2
    )
    alpha, beta = weights(trainer, "alpha"), weights(trainer, "beta")
    before = trainer.forwards.policy_logprobs(sampled(calls))
    trainer.train()
    assert not changed(weights(trainer, "beta"), beta)
    assert changed(weights(trainer, "alpha"), alpha)
    after = trainer.forwards.policy_logprobs(sampled(calls))
    for call, old, new in zip(calls, before, after, strict=True):
        assert (old == new) == (call.call.module == "b"), "each call is scored with its own adapter"


@pytest.mark.parametrize("adapters", [None, BOTH])
def test_adapter_configs_are_the_same_in_every_process(adapters: Adapters | None, tmp_path: Path) -> None:
    """peft holds and writes sets, whose order depends on the process."""
    lora = LORA.model_copy(update={"targets": ["v_proj", "q_proj", "up_proj", "o_proj", "k_proj", "down_proj"]})
    make_trainer(tmp_path, lora=lora, adapters=adapters).model.save_pretrained(str(tmp_path / "saved"))
    files = sorted((tmp_path / "saved").rglob("adapter_config.json"))
    assert len(files) == (2 if adapters else 1)
    assert all(json.loads(file.read_text())["target_modules"] == sorted(lora.targets) for file in files)


def test_each_modules_gradients_come_from_its_own_calls(tmp_path: Path) -> None:
    calls = make_calls(6)
    trainer = make_trainer(tmp_path, lora=LORA, adapters=BOTH, algo={"beta": 0.1})
    _, both = gradients(trainer, calls)
    for module, name in BOTH.by_module.items():
        _, alone = gradients(trainer, [call for call in calls if call.call.module == module])
        assert all(f".{name}." in key for key in alone)
        assert all(torch.allclose(both[key], gradient, atol=1e-6) for key, gradient in alone.items())


def test_a_shared_adapter_is_the_shared_policy(tmp_path: Path) -> None:
    """Two modules on one adapter: the same gradients as without adapters per module, from the same weights."""
    calls = make_calls(6)
    shared = make_trainer(tmp_path / "a", lora=LORA)
    named = make_trainer(tmp_path / "b", lora=LORA, adapters=Adapters(by_module={"a": "one", "b": "one"}, rates={}))
    with torch.no_grad():
        for name, parameter in named.model.named_parameters():
            parameter.copy_(shared.model.get_parameter(name.replace(".one.", ".default.")))
    loss, expected = gradients(shared, calls)
    other_loss, found = gradients(named, calls)
    assert other_loss == loss
    assert {key.replace(".one.", ".default.") for key in found} == expected.keys()
    assert all(torch.equal(found[key.replace(".default.", ".one.")], expected[key]) for key in expected)


def test_modules_learn_apart_with_their_own_rates_and_norms(tmp_path: Path) -> None:
    seen: list[dict[str, float]] = []
    adapters = Adapters(by_module={"a": "alpha", "b": "beta"}, rates={"beta": 0.0})
    trainer = make_trainer(tmp_path, lora=LORA, adapters=adapters, on_step_end=lambda s, m: seen.append(m), steps=2)
    alpha, beta = weights(trainer, "alpha"), weights(trainer, "beta")
    trainer.train()
    assert not changed(weights(trainer, "beta"), beta)
    assert changed(weights(trainer, "alpha"), alpha)
    norms = [seen[0][f"adapter/{name}/grad_norm"] for name in ("alpha", "beta")]
    assert all(norm > 0 for norm in norms)
    assert seen[0]["train/grad_norm"] == pytest.approx((norms[0] ** 2 + norms[1] ** 2) ** 0.5)


@pytest.mark.parametrize("critic", [None, "adapter"])
def test_resumes_bit_equal(critic: str | None, tmp_path: Path) -> None:
    algo: Any = {"beta": 0.1, "epochs": 2}
    if critic:
        algo = PpoConfig(name="ppo", beta=0.1, kl="loss", critic="adapter")

    def calls(step: int) -> list[TrainCall]:
        return with_targets(make_calls(6, seed=step))

    lora = LORA.model_copy(update={"dropout": 0.2})
    options = {"lora": lora, "adapters": BOTH, "algo": algo, "calls": calls, "steps": 4, "save_every": 2}
    metrics, whole = resumable(tmp_path / "whole", **options)
    folders = {path.name for path in (tmp_path / "whole" / "checkpoint-2").iterdir() if path.is_dir()}
    assert folders == {"alpha", "beta"}
    resumed, again = resumable(tmp_path / "resumed", tmp_path / "whole" / "checkpoint-2", **options)
    assert resumed == {step: metrics[step] for step in (3, 4)}
    assert not changed(weights_of(whole), weights_of(again))
