"""Loss and gradients of one step: no split into packs, order of calls or sharing of rows changes them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mmrl.config import LoraConfig
from mmrl.trainer.objective import StepBatch, TrainCall
from tests.helpers.trainer_cases import (
    LORA,
    assert_close,
    gradients,
    make_calls,
    make_trainer,
    tiny_model,
    train_entry,
    with_changes,
)


@pytest.mark.parametrize("budget", [64, 80, 130])
@pytest.mark.parametrize("lora", [None, LORA])
def test_law_11_no_split_changes_loss_or_gradients(budget: int, lora: LoraConfig | None, tmp_path: Path) -> None:
    calls = make_calls(12, seed=3)
    model = tiny_model("qwen3" if lora else "gpt2", dtype=torch.float64)
    trainer = make_trainer(tmp_path, model, lora=lora, algo={"beta": 0.1})
    if lora:
        trainer.model.double()
    loss, expected = gradients(trainer, calls, 16384)
    assert len(trainer.step_packs(StepBatch(step=1, calls=calls))[0]) == 1
    split_loss, found = gradients(trainer, calls, budget)
    assert len(trainer.step_packs(StepBatch(step=1, calls=calls))[0]) > 1
    assert split_loss == pytest.approx(loss, abs=1e-10)
    assert_close(found, expected)


def test_law_9_tokens_of_weight_0_have_exactly_no_gradient(tmp_path: Path) -> None:
    call = make_calls(1, seed=5)[0]
    tokens = len(call.call.completion_ids)
    advantages = tuple(1.0 + t for t in range(tokens))

    def with_tail(advantage: float) -> TrainCall:
        """The last token has weight 0; nothing but its own loss depends on its id."""
        entry = train_entry(advantages=(*advantages[:-1], advantage), weights=(*[1 / tokens] * (tokens - 1), 0.0))
        return with_changes(call, completion_ids=(*call.call.completion_ids[:-1], 2 + int(advantage)), entries=(entry,))

    trainer = make_trainer(tmp_path)
    loss, expected = gradients(trainer, [with_tail(3.0)])
    other_loss, found = gradients(trainer, [with_tail(30.0)])
    assert other_loss == loss != 0
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_law_9_prompts_are_never_targets(tmp_path: Path) -> None:
    """Logits exist for completion tokens only, so nothing else can have a gradient from the loss."""
    model = tiny_model("llama")
    seen: list[torch.Tensor] = []
    trainer = make_trainer(tmp_path, model)
    model.get_output_embeddings().register_forward_hook(lambda _, args, out: seen.append(out))
    calls = make_calls(5, seed=6)
    gradients(trainer, calls)
    assert sum(out.shape[1] for out in seen) == sum(len(call.call.completion_ids) for call in calls)


def test_entries_of_one_call_equal_as_many_calls(tmp_path: Path) -> None:
    calls = make_calls(3, seed=7)
    tokens = len(calls[0].call.completion_ids)
    extra = train_entry(advantages=(-0.7,) * tokens, weights=tuple(0.1 + 0.01 * t for t in range(tokens)))
    first = calls[0].entries[0]
    joined = [replace(calls[0], entries=(first, extra, first)), *calls[1:]]
    copies = [
        with_changes(calls[0], id=f"copy{number}", entries=(entry,)) for number, entry in enumerate((extra, first))
    ]
    apart = [calls[0], *copies, *calls[1:]]
    trainer = make_trainer(tmp_path, tiny_model("gpt2", dtype=torch.float64), algo={"beta": 0.05}, packing="padded")
    loss, found = gradients(trainer, joined)
    forwarded = trainer.totals.counts[0].item()
    expected_loss, expected = gradients(trainer, apart)
    assert loss == pytest.approx(expected_loss, abs=1e-10)
    assert_close(found, expected)
    assert forwarded == trainer.totals.counts[0].item()  # equal calls share their row


def test_turns_of_one_context_share_a_row_and_change_no_number(tmp_path: Path) -> None:
    whole = make_calls(4, seed=9)
    turns = []
    for call in whole:
        context = call.call.prompt_ids + call.call.completion_ids + (7, 8)
        later = with_changes(make_calls(1, seed=len(context))[0], id=f"{call.call.id}+", prompt_ids=context)
        turns += [call, later]
    trainer = make_trainer(tmp_path, tiny_model("gpt2", dtype=torch.float64), algo={"beta": 0.05}, packing="padded")
    loss, found = gradients(trainer, turns)
    together = trainer.totals.counts[0].item()
    parts = [gradients(trainer, [call]) for call in turns]
    assert loss == pytest.approx(sum(part for part, _ in parts), abs=1e-10)
    assert_close(found, {name: torch.stack([part[name] for _, part in parts]).sum(0) for name in found})
    packs = trainer.step_packs(StepBatch(step=1, calls=turns))[0]
    assert [pack.input_ids.shape[0] for pack in packs] == [4]
    assert together == packs[0].forwarded
