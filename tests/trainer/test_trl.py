"""The seam to TRL: the same numbers as TRL's own loss, and the methods that the seam relies on."""

from __future__ import annotations

import copy
import inspect
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from mmrl.trainer.objective import TrainCall
from mmrl.trainer.trl_trainer import MmrlTrainer
from tests.helpers.trainer_cases import (
    gradients,
    make_calls,
    make_trainer,
    sampled,
    tiny_model,
    tiny_tokenizer,
    with_changes,
)

BETA = 0.04


def near_policy(trainer: MmrlTrainer, calls: list[TrainCall]) -> list[TrainCall]:
    """The calls with old and reference log-probabilities around the policy's, some far enough to be clipped."""
    found = []
    generator = torch.Generator().manual_seed(1)
    for call, logprobs in zip(calls, trainer.forwards.policy_logprobs(sampled(calls)), strict=True):
        noise = torch.randn(2, len(logprobs), generator=generator) * 0.3
        old = tuple(lp + d for lp, d in zip(logprobs, noise[0].tolist(), strict=True))
        ref = tuple(lp + d for lp, d in zip(logprobs, noise[1].tolist(), strict=True))
        found.append(with_changes(call, logprobs=old, ref_logprobs=ref))
    return found


def trl_inputs(calls: list[TrainCall]) -> dict[str, torch.Tensor]:
    """The batch in TRL's layout: prompts padded on the left, completions on the right."""
    prompt, width = max(len(c.call.prompt_ids) for c in calls), max(len(c.call.completion_ids) for c in calls)

    def left(ids: tuple[int, ...]) -> list[int]:
        return [0] * (prompt - len(ids)) + list(ids)

    def right(values: Any, fill: float = 0) -> list[Any]:
        return [*values, *[fill] * (width - len(values))]

    return {
        "prompt_ids": torch.tensor([left(c.call.prompt_ids) for c in calls]),
        "prompt_mask": torch.tensor([left((1,) * len(c.call.prompt_ids)) for c in calls]),
        "completion_ids": torch.tensor([right(c.call.completion_ids) for c in calls]),
        "completion_mask": torch.tensor([right((1,) * len(c.call.completion_ids)) for c in calls]),
        "advantages": torch.tensor([c.entries[0].advantages[0] for c in calls]),
        "old_per_token_logps": torch.tensor([right(c.call.logprobs) for c in calls]),
        "ref_per_token_logps": torch.tensor([right(c.call.ref_logprobs) for c in calls]),
    }


def trl_gradients(
    model: Any, calls: list[TrainCall], folder: Path, beta: float, temperature: float, **loss: Any
) -> tuple[float, dict[str, torch.Tensor]]:
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=GRPOConfig(
            output_dir=str(folder),
            per_device_train_batch_size=2,
            num_generations=2,
            beta=0.0,
            use_bias_correction_kl=False,  # TRL's default multiplies the KL term by the ratio; no paper of ours does
            temperature=temperature,
            bf16=False,
            use_cpu=True,
            gradient_checkpointing=False,
            report_to="none",
            disable_tqdm=True,
            **{"loss_type": "grpo", "epsilon": 0.2, **loss},
        ),
        train_dataset=Dataset.from_dict({"prompt": ["a", "b"]}),
        processing_class=tiny_tokenizer(),
    )
    arguments: Any = trainer.args
    trainer.beta = beta  # the constructor would want a reference model by name; the batch brings its values
    trainer.current_gradient_accumulation_steps = 1
    model.train()
    tokens = sum(len(call.call.completion_ids) for call in calls)
    items = torch.tensor(float(tokens * arguments.steps_per_generation))  # of a batch that is generated at once
    total = trainer._compute_loss(model, trl_inputs(calls) | {"num_items_in_batch": items})
    total.backward()
    return float(total.detach()), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def same_gradients(ours: MmrlTrainer, found: tuple[float, Any], expected: tuple[float, Any]) -> None:
    """Some ratios are clipped, and loss and gradients are equal."""
    assert 0.0 < ours.totals.metrics(ours.forwards.reduce)["train/clip_share"] < 1.0
    assert found[0] == pytest.approx(expected[0], abs=1e-5)
    assert found[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        assert float((found[1][name] - gradient).norm()) <= 1e-4 * float(gradient.norm()), name


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
@pytest.mark.parametrize(("beta", "temperature"), [(BETA, 1.0), (0.0, 0.6)])
@pytest.mark.parametrize("budget", [64, 16384])
def test_law_1_loss_and_gradients_equal_trls(
    kind: str, beta: float, temperature: float, budget: int, tmp_path: Path
) -> None:
    model = tiny_model(kind)
    twin = copy.deepcopy(model)
    ours = make_trainer(tmp_path / "ours", model, algo={"beta": beta, "temperature": temperature})
    calls = near_policy(ours, make_calls(8))
    found = gradients(ours, calls, budget)
    same_gradients(ours, found, trl_gradients(twin, calls, tmp_path / "trl", beta, temperature))


@pytest.mark.parametrize(
    ("algo", "trl"),
    [
        ({"loss": "gspo", "clip": 0.05, "clip_high": 0.08}, {"importance_sampling_level": "sequence"}),
        # TRL bounds the weight from above alone, and gives the bound itself.
        ({"loss": "cispo"}, {"loss_type": "cispo", "epsilon_high": 1.2}),
    ],
    ids=["gspo", "cispo"],
)
def test_the_other_losses_equal_trls(algo: dict[str, Any], trl: dict[str, Any], tmp_path: Path) -> None:
    model = tiny_model()
    twin = copy.deepcopy(model)
    ours = make_trainer(tmp_path / "ours", model, algo={"beta": BETA, **algo})
    calls = near_policy(ours, make_calls(8))
    if algo["loss"] == "cispo":  # a mean over tokens there
        tokens = sum(len(call.call.completion_ids) for call in calls)
        calls = [
            replace(call, entries=(replace(entry, weights=(1 / tokens,) * len(entry.weights)),))
            for call in calls
            for entry in call.entries
        ]
    else:
        trl |= {"epsilon": algo["clip"], "epsilon_high": algo["clip_high"]}
    same_gradients(ours, gradients(ours, calls), trl_gradients(twin, calls, tmp_path / "trl", BETA, 1.0, **trl))


def test_the_method_that_keeps_telemetry_silent_exists_in_trl() -> None:
    """Whose absence no other test would notice, as it would that of the methods which train, clip, save and resume."""
    assert list(inspect.signature(GRPOTrainer._send_telemetry).parameters) == ["self"]


def test_trls_own_reward_path_can_never_run(tmp_path: Path) -> None:
    own: Any = make_trainer(tmp_path).reward_funcs[0]
    with pytest.raises(RuntimeError, match="rewards come from mmrl"):
        own(prompts=["a"], completions=["b"])


def test_a_run_is_silent(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    trainer = make_trainer(tmp_path, steps=2, save_every=1)
    trainer.train()
    out, err = capfd.readouterr()
    assert out == ""
    assert err == ""
    assert trainer.args.report_to == []
    assert transformers.PrinterCallback not in {type(c) for c in trainer.callback_handler.callbacks}
