"""One step of the trainer: what is trained, how often, and what it costs."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, CohereConfig, Gemma2Config, GraniteConfig

from mmrl.config import LoraConfig
from mmrl.errors import ConfigError, MmrlError, TooManyFailures
from mmrl.trainer.objective import StepBatch, TrainCall
from tests.helpers.trainer_cases import (
    LORA,
    SIZES,
    agreeing,
    changed,
    gradients,
    make_calls,
    make_trainer,
    sampled,
    tiny_model,
    train_call,
    train_entry,
    trained,
    weights_of,
    with_changes,
    without_advantage,
)


def test_a_step_without_work_counts_and_changes_nothing(tmp_path: Path) -> None:
    """Even with momentum and weight decay: an update from nothing must not drift."""

    def calls(step: int) -> list[TrainCall]:
        return without_advantage(make_calls(4)) if step == 2 else make_calls(4)

    snapshots, steps = [], []
    trainer: Any = None

    def on_step_end(step: int, metrics: dict[str, float]) -> None:
        snapshots.append(weights_of(trainer))
        steps.append(metrics)

    trainer = make_trainer(tmp_path, calls=calls, on_step_end=on_step_end, steps=3, weight_decay=0.1)
    trainer.train()
    assert changed(snapshots[0], snapshots[1]) == set()
    assert changed(snapshots[1], snapshots[2])
    assert [m["train/calls_skipped"] for m in steps] == [0, 4, 0]
    assert steps[1]["train/tokens_forwarded"] == 0
    assert steps[1]["train/loss"] == 0
    assert trainer.state.global_step == 3


def test_an_empty_completion_is_skipped(tmp_path: Path) -> None:
    calls = make_calls(3)
    entry = train_entry(advantages=(), weights=())
    empty = train_call(id="e", module="a", prompt_ids=(1,), completion_ids=(), entries=(entry,))
    trainer = make_trainer(tmp_path)
    loss, _ = gradients(trainer, [*calls, empty])
    assert trainer.batch_metrics["train/calls_skipped"] == 1
    assert loss == gradients(trainer, calls)[0]
    assert [len(values) for values in trainer.forwards.policy_logprobs(sampled([empty, calls[0]]))] == [
        0,
        len(calls[0].call.completion_ids),
    ]


def test_order_of_callbacks_modes_and_optimizer_steps(tmp_path: Path) -> None:
    events: list[Any] = []
    trainer: Any = None

    def next_batch(step: int) -> StepBatch:
        events.append(("batch", step, trainer.model.training, trainer.state.global_step))
        return StepBatch(step=step, calls=make_calls(8, minibatches=2), minibatches=2, metrics={"mine": 7.0})

    def on_step_end(step: int, metrics: dict[str, float]) -> None:
        events.append(("end", step, trainer.model.training, trainer.state.global_step))
        assert metrics["mine"] == 7.0

    trainer = make_trainer(
        tmp_path, next_batch=next_batch, on_step_end=on_step_end, steps=2, algo={"epochs": 2, "minibatches": 2}
    )
    trainer.train()
    assert events == [("batch", 1, False, 0), ("end", 1, False, 4), ("batch", 2, False, 4), ("end", 2, False, 8)]


def test_minibatches_are_separate_updates_with_old_logprobs_of_the_sampler(tmp_path: Path) -> None:
    """Two mini-batches equal two runs of one optimizer step each, the second from the first one's weights."""
    calls = make_calls(8, minibatches=2)
    both, _ = trained(tmp_path / "both", calls=calls, algo={"minibatches": 2})
    halves = [[replace(c, minibatch=0) for c in calls if c.minibatch == half] for half in (0, 1)]
    apart, _ = trained(tmp_path / "apart", calls=lambda step: halves[step - 1], steps=2)
    assert changed(weights_of(both), weights_of(apart)) == set()


def test_recomputed_old_logprobs_make_the_first_ratio_one(tmp_path: Path) -> None:
    for algo in ({}, {"epochs": 2, "minibatches": 2}):
        _, (metrics,) = trained(tmp_path / str(len(algo)), algo=algo, old_logprobs="recompute", lr=0.0)
        assert metrics["train/ratio_mean"] == pytest.approx(1, abs=1e-5)
        assert metrics["train/logprob_gap_mean"] > 0.1  # the sampler's made-up numbers are still compared with


def test_calls_without_sampling_logprobs_are_recomputed(tmp_path: Path) -> None:
    calls = [with_changes(call, logprobs=None) for call in make_calls(4)]
    for epochs in (1, 2):
        _, (metrics,) = trained(tmp_path / str(epochs), calls=calls, lr=0.0, algo={"epochs": epochs})
        assert metrics["train/ratio_mean"] == pytest.approx(1, abs=1e-5)
        assert "train/logprob_gap_mean" not in metrics


def test_gap_between_sampler_and_trainer_is_zero_when_they_agree(tmp_path: Path) -> None:
    _, seen = trained(tmp_path, calls_of=agreeing, algo={"temperature": 0.6}, steps=2)
    for metrics in seen:
        assert metrics["train/logprob_gap_max"] < 1e-5
        assert metrics["train/ratio_mean"] == pytest.approx(1, abs=1e-5)
        assert metrics["train/clip_share"] == 0


@pytest.mark.parametrize(
    "config",
    [
        Gemma2Config(**SIZES, head_dim=8, final_logit_softcapping=2.0, attn_logit_softcapping=None),
        GraniteConfig(**SIZES, logits_scaling=3.0),
        CohereConfig(**SIZES, logit_scale=0.3),
    ],
    ids=["gemma", "granite", "cohere"],
)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_use_the_models_own_head(config: Any, temperature: float, tmp_path: Path) -> None:
    """Soft caps, logit scales and tied heads: equal to log-softmax over the model's logits, one call at a time."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(config)).eval()
    trainer = make_trainer(tmp_path, model, algo={"temperature": temperature}, microbatch_tokens=64)
    calls = make_calls(6)
    for call, found in zip(calls, trainer.forwards.policy_logprobs(sampled(calls)), strict=True):
        ids = torch.tensor([call.call.prompt_ids + call.call.completion_ids])
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0, len(call.call.prompt_ids) - 1 : -1]
        expected = torch.log_softmax(logits / temperature, -1).gather(
            -1, torch.tensor(call.call.completion_ids)[:, None]
        )
        assert list(found) == pytest.approx(expected[:, 0].tolist(), abs=1e-4)


def test_entropy_is_of_the_distribution_at_the_sampling_temperature(tmp_path: Path) -> None:
    (call,) = make_calls(1)
    model = tiny_model()
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([call.call.prompt_ids + call.call.completion_ids])).logits[0]
    logits = logits[len(call.call.prompt_ids) - 1 : -1] / 0.5
    expected = torch.distributions.Categorical(logits=logits).entropy().mean()
    _, (metrics,) = trained(tmp_path, model, calls=[call], algo={"temperature": 0.5})
    assert metrics["train/entropy"] == pytest.approx(float(expected), abs=1e-5)
    assert metrics["module/a/entropy"] == metrics["train/entropy"]


@pytest.mark.parametrize("lora", [None, LORA])
def test_reference_is_the_policy_as_it_was_at_the_start(lora: LoraConfig | None, tmp_path: Path) -> None:
    calls = make_calls()
    trainer = make_trainer(tmp_path, lora=lora, algo={"beta": 0.1}, steps=3, lr=1e-2)
    before = trainer.forwards.policy_logprobs(sampled(calls))
    trainer.train()
    after = trainer.forwards.policy_logprobs(sampled(calls))
    assert trainer.forwards.policy_logprobs(sampled(calls), reference=True) == before != after


def test_lora_trains_adapters_alone_and_without_dropout_in_old_and_reference(tmp_path: Path) -> None:
    calls = make_calls()
    lora = LORA.model_copy(update={"dropout": 0.5})
    trainer = make_trainer(tmp_path, lora=lora, calls=calls, algo={"beta": 0.1}, steps=2)
    before = weights_of(trainer)
    trainer.train()
    after = weights_of(trainer)
    assert changed(before, after)
    assert all("lora_" in name for name in changed(before, after))
    trainer.model.train()
    assert trainer.forwards.policy_logprobs(sampled(calls)) == trainer.forwards.policy_logprobs(sampled(calls))


@pytest.mark.parametrize(
    ("schedule", "warmup", "expected"),
    [
        ("constant", 0, [1e-3] * 4),
        ("constant_with_warmup", 2, [0, 5e-4, 1e-3, 1e-3]),
        ("linear", 0, [1e-3, 7.5e-4, 5e-4, 2.5e-4]),
        ("cosine", 0, [1e-3, 8.5355339e-4, 5e-4, 1.4644661e-4]),
    ],
)
def test_schedules_count_optimizer_steps(schedule: str, warmup: int, expected: list[float], tmp_path: Path) -> None:
    rates: list[float] = []
    trainer = make_trainer(tmp_path, steps=2, algo={"epochs": 2}, schedule=schedule, warmup_steps=warmup)
    step = trainer.training_step
    trainer.training_step = lambda *a, **k: (rates.append(trainer._get_learning_rate()), step(*a, **k))[1]
    trainer.train()
    assert rates == pytest.approx(expected)


def test_gradient_clipping_reports_the_norm_before_it(tmp_path: Path) -> None:
    found = [trained(tmp_path / str(clip), grad_clip=clip, lr=1e-6)[1] for clip in (0.01, 100.0)]
    assert found[0][0]["train/grad_norm"] == found[1][0]["train/grad_norm"] > 0.01


def test_a_loss_that_is_not_a_number_stops_before_the_weights_are_touched(tmp_path: Path) -> None:
    call = make_calls(1)[0]
    entry = replace(call.entries[0], advantages=(float("nan"),) * len(call.call.completion_ids))
    trainer = make_trainer(tmp_path, calls=[replace(call, entries=(entry,))])
    before = weights_of(trainer)
    with pytest.raises(MmrlError, match=r"step 1: the loss is nan"):
        trainer.train()
    assert changed(before, weights_of(trainer)) == set()


def test_bfloat16_models_train_in_float32_weights_under_autocast(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, tiny_model(dtype=torch.bfloat16), lr=1e-6)
    before = weights_of(trainer)
    trainer.train()
    after = weights_of(trainer)
    assert {value.dtype for value in after.values()} == {torch.float32}
    # bfloat16 weights would have swallowed an update of 1e-6.
    assert len(changed(before, after)) == len(after)
    assert trainer.accelerator.mixed_precision == "bf16"


def test_in_bfloat16_forwards_before_training_are_those_of_the_update(tmp_path: Path) -> None:
    """The self-check's are made there."""
    calls, inside = sampled(make_calls()), list[list[tuple[float, ...]]]()

    def next_batch(step: int) -> StepBatch:
        inside.append(trainer.forwards.policy_logprobs(calls))
        return StepBatch(step=step, calls=make_calls())

    trainer = make_trainer(tmp_path, tiny_model(dtype=torch.bfloat16), next_batch=next_batch)
    before = trainer.forwards.policy_logprobs(calls)
    trainer.train()
    assert inside == [before]


def test_settings_without_effect_are_refused_together(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        make_trainer(tmp_path, schedule="constant", warmup_steps=5, steps=2)
    assert [p.split(":")[0] for p in caught.value.problems] == ["train.warmup_steps", "train.warmup_steps"]


def test_too_many_failures_leave_the_last_step_saved(tmp_path: Path) -> None:
    def next_batch(step: int) -> StepBatch:
        if step == 3:
            raise TooManyFailures("step 3: all failed")
        return StepBatch(step=step, calls=make_calls())

    trainer = make_trainer(tmp_path, next_batch=next_batch, steps=5)
    with pytest.raises(TooManyFailures):
        trainer.train()
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-2"]


@pytest.mark.parametrize("lora", [None, LORA])
def test_gradient_checkpointing_changes_no_weight(lora: LoraConfig | None, tmp_path: Path) -> None:
    found = []
    for checkpointing in (False, True):
        trainer, _ = trained(tmp_path / str(checkpointing), lora=lora, steps=2, checkpointing=checkpointing)
        assert trainer.args.gradient_checkpointing is checkpointing
        found.append(weights_of(trainer))
    assert all(torch.allclose(found[0][name], found[1][name], atol=1e-6) for name in found[0])


@pytest.mark.parametrize("minibatches", [1, 2])
@pytest.mark.parametrize("old", ["sampler", "recompute"])
def test_dropout_is_in_the_update_alone(old: str, minibatches: int, tmp_path: Path) -> None:
    """With a sampler that agrees, the gap is 0 and the ratio is that of one policy with and without dropout."""
    lora = LoraConfig(r=4, alpha=64, dropout=0.5)
    options = {"lora": lora, "old_logprobs": old, "steps": 2, "lr": 0.05, "algo": {"minibatches": minibatches}}
    _, (_, metrics) = trained(tmp_path, calls_of=lambda trainer: halved(agreeing(trainer), minibatches), **options)
    assert metrics["train/logprob_gap_max"] < 1e-5
    assert abs(metrics["train/ratio_mean"] - 1) > 1e-4


def halved(calls: list[TrainCall], minibatches: int) -> list[TrainCall]:
    return [replace(call, minibatch=number % minibatches) for number, call in enumerate(calls)]


def test_gradients_count_as_whole_after_an_updates_last_pack_alone(tmp_path: Path) -> None:
    """DeepSpeed's engine takes an optimizer step after each backward pass in which accelerate says so."""
    trainer, seen = make_trainer(tmp_path, calls=make_calls(8), packing="padded", steps=2), []
    trainer.forwards.budget = 24
    backward = trainer.accelerator.backward
    trainer.accelerator.backward = lambda loss: (seen.append(trainer.accelerator.sync_gradients), backward(loss))[1]
    trainer.train()
    packs = len(seen) // 2
    assert packs > 1 and seen == [*[False] * (packs - 1), True] * 2
