"""stages.sft: trained ids are those a rollout sends; loss and gradient are those of plain likelihood."""

from collections import Counter
from itertools import islice

import pytest
import torch

from mmrl.config import LoraConfig, ModelConfig, TrainConfig
from mmrl.models.chat import render_prompt
from mmrl.stages.sft import encode, order, step_batch, tokens_of
from mmrl.tasks.base import Demonstration
from mmrl.trainer.settings import Settings
from mmrl.trainer.trl_trainer import MmrlTrainer
from tests.helpers.stages import TOKENIZER, new_model, shown, weights
from tests.helpers.trainer_cases import LORA


def demonstrations(count: int = 30) -> list[Demonstration]:
    made = []
    for number in range(count):
        made.append(shown("say", f"Say {number % 7}", f"{number % 7}"))
        made.append(shown("twice", "the cat " * (number % 9) + f"{number % 5}?", f"{number % 5}{number % 5}"))
    return made


CALLS = [encode(TOKENIZER, item) for item in demonstrations()]


def train(folder, calls, steps=1, size=7, model=None, lora=None, checkpointing=False, **options):
    """The trainer after `steps` steps of `size` calls, and the metrics of each."""
    seen, rows = [], order(calls, {}, 0)
    section = ModelConfig(name="x", path="x", lora=lora, gradient_checkpointing=checkpointing)
    trainer = MmrlTrainer(
        model or new_model(),
        TOKENIZER,
        Settings.supervised(TrainConfig(steps=steps, lr=1e-3, **options), section, 0),
        output_dir=folder,
    )
    trainer.follow(
        lambda step: step_batch(step, [calls[row] for row in islice(rows, size)]),
        lambda step, metrics: seen.append(metrics),
    )
    trainer.train()
    return trainer, seen


def test_ids_are_the_rollouts_prompt_and_the_completion_with_its_end():
    asked = shown("say", "a <|im_end|> b", "<|im_end|>")
    item = encode(TOKENIZER, asked)
    assert item.prompt_ids == render_prompt(TOKENIZER, asked.messages)
    assert item.completion_ids[-1] == TOKENIZER.eos_token_id
    assert TOKENIZER.eos_token_id not in item.completion_ids[:-1]
    assert TOKENIZER.decode([*item.completion_ids[:-1]]) == "<|im_end|>"
    assert item.logprobs is None and tokens_of(item) == len(item.prompt_ids) + len(item.completion_ids)


def test_a_pass_has_every_call_once_in_an_order_of_the_seed_alone():
    first, second = (list(islice(order(CALLS, {}, 3), at, at + len(CALLS))) for at in (0, len(CALLS)))
    assert sorted(first) == sorted(second) == list(range(len(CALLS))) and first != second
    assert first == list(islice(order(CALLS, {}, 3), len(CALLS))) != list(islice(order(CALLS, {}, 4), len(CALLS)))


def test_mixing_shares():
    drawn = Counter(CALLS[row].module for row in islice(order(CALLS, {"say": 0.25, "twice": 2.0}, 0), 20_000))
    assert drawn["twice"] / drawn["say"] == pytest.approx(8, rel=0.05)


@pytest.mark.parametrize("packing", ["padded", "trie"])
@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
def test_loss_and_gradient_are_those_of_the_mean_negative_log_likelihood(
    packing: str, lora: LoraConfig | None, tmp_path
):
    chosen = [CALLS[row] for row in islice(order(CALLS, {}, 0), 7)]
    seen: dict[str, torch.Tensor] = {}
    trainer, _ = train(tmp_path / "setup", CALLS, lora=lora, packing=packing, microbatch_tokens=64)
    model = trainer.forwards.policy
    trainer.model.zero_grad()
    packs, _ = trainer.forwards.minibatch_packs(step_batch(1, chosen), ["say", "twice"])
    assert len(packs[0]) > 1
    loss = float(sum(trainer._train_on(trainer.model_wrapped, pack, first=False) for pack in packs[0]))
    seen = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    # One by one, without padding or packs, by transformers' own forward.
    completions = []
    for call in chosen:
        ids = torch.tensor([call.prompt_ids + call.completion_ids])
        nll = -model(ids).logits[0, :-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
        completions.append(nll[len(call.prompt_ids) - 1 :])
    expected = torch.cat(completions).mean()
    expected.backward()
    assert loss == pytest.approx(float(expected.detach()), abs=1e-5)
    reference = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert reference.keys() == seen.keys()
    for name, gradient in reference.items():
        torch.testing.assert_close(seen[name], gradient, rtol=1e-4, atol=1e-5)


def test_metrics_are_of_completions(tmp_path):
    _, (metrics,) = train(tmp_path, CALLS)
    tokens = [len(CALLS[row].completion_ids) for row in islice(order(CALLS, {}, 0), 7)]
    assert metrics["train/sequences"] == 7 and metrics["train/tokens"] == sum(tokens)
    for name in ("train/ratio_mean", "train/entropy", "train/logprob_gap_mean"):
        assert name not in metrics


@pytest.mark.parametrize("size", [5, 70])  # of 60 demonstrations: some twice in a step
@pytest.mark.parametrize("checkpointing", [False, True])
def test_tries_and_padded_rows_make_the_same_steps(size, checkpointing, tmp_path):
    header = "Say what is asked for, in as few words as you can, and nothing else. "
    made = [shown(item.module, header + str(item.messages[0]["content"]), item.completion) for item in demonstrations()]
    calls = [encode(TOKENIZER, item) for item in made]
    end, history = {}, {}
    for packing in ("padded", "trie"):
        trainer, history[packing] = train(
            tmp_path / packing, calls, steps=4, size=size, packing=packing, checkpointing=checkpointing
        )
        end[packing] = weights(trainer.model)
    for one, two in zip(history["padded"], history["trie"], strict=True):
        assert one.keys() == two.keys()
        for name in one.keys() - {"train/tokens_forwarded"}:
            if not name.startswith(("time/", "rate/")):
                assert one[name] == pytest.approx(two[name], rel=2e-4, abs=1e-6), name
        assert two["train/tokens_forwarded"] < 0.6 * one["train/tokens_forwarded"]
    for name, value in end["padded"].items():
        torch.testing.assert_close(end["trie"][name], value, rtol=1e-3, atol=1e-4)


def test_the_output_head_runs_once_for_loss_and_accuracy(tmp_path):
    model, count = new_model(), {"model": 0, "head": 0}
    for name, module in (("model", model), ("head", model.get_output_embeddings())):
        module.register_forward_hook(lambda *_, name=name: count.update({name: count[name] + 1}))
    _, seen = train(tmp_path, CALLS, steps=2, model=model, packing="trie")
    assert count["head"] == count["model"] >= 2 and len(seen) == 2
    assert all("train/token_accuracy" in metrics for metrics in seen)
