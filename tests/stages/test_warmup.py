"""stages.warmup: trained ids are those a rollout sends, the loss is that of the completions, resume is exact."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from transformers import TrainerCallback

from mmrl.errors import CheckpointError, ConfigError, DataError
from mmrl.models.chat import render_prompt
from mmrl.stages.warmup import WarmStartSettings, _Collator, encode, fit, plan_batches, warm_start
from mmrl.tasks.base import Demonstration
from tests.helpers.stages import TOKENIZER, new_model, shown, weights

SETTINGS = WarmStartSettings(steps=12, batch_tokens=600, lr=3e-3, save_every=4, log_every=1, seed=3)


def demonstrations(count: int = 30) -> list[Demonstration]:
    made = []
    for number in range(count):
        made.append(shown("say", f"Say {number % 7}", f"{number % 7}"))
        made.append(shown("twice", "the cat " * (number % 9) + f"{number % 5}?", f"{number % 5}{number % 5}"))
    return made


class StopAt(TrainerCallback):
    def __init__(self, step: int):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step >= self.step


class Record(TrainerCallback):
    def __init__(self):
        self.losses: dict[int, float] = {}

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            self.losses[state.global_step] = float(logs["loss"])


def test_ids_are_the_rollouts_prompt_and_the_completion_with_its_end():
    asked = shown("say", "a <|im_end|> b", "<|im_end|>")
    (item,) = encode(TOKENIZER, [asked])
    assert item.prompt_ids == render_prompt(TOKENIZER, asked.messages)
    assert item.completion_ids[-1] == TOKENIZER.eos_token_id
    assert TOKENIZER.eos_token_id not in item.completion_ids[:-1]
    assert TOKENIZER.decode(item.completion_ids[:-1]) == "<|im_end|>"


def test_a_pass_sees_every_demonstration_once_within_the_budget():
    encoded = encode(TOKENIZER, demonstrations())
    whole = plan_batches(encoded, replace(SETTINGS, steps=10_000, batch_tokens=300))
    one_pass = whole[: next(n for n in range(1, 999) if sum(map(len, whole[:n])) == len(encoded))]
    assert Counter(row for batch in one_pass for row in batch) == Counter(range(len(encoded)))
    for batch in one_pass:
        assert len(batch) == 1 or len(batch) * max(len(encoded[row]) for row in batch) <= 300
    assert one_pass != whole[len(one_pass) : 2 * len(one_pass)]


def test_a_demonstration_over_the_budget_is_a_step_of_its_own():
    encoded = encode(TOKENIZER, demonstrations(3))
    assert all(len(batch) == 1 for batch in plan_batches(encoded, replace(SETTINGS, batch_tokens=1)))


def test_mixing_shares():
    encoded = encode(TOKENIZER, demonstrations(200))
    planned = plan_batches(encoded, replace(SETTINGS, steps=1000, mix={"say": 0.25, "twice": 2.0}))
    seen = Counter(encoded[row].module for batch in planned for row in batch)
    assert seen["twice"] / seen["say"] == pytest.approx(8, rel=0.2)


def test_the_plan_depends_on_the_seed_alone():
    encoded = encode(TOKENIZER, demonstrations())
    assert plan_batches(encoded, SETTINGS) == plan_batches(encoded, SETTINGS)
    assert plan_batches(encoded, SETTINGS) != plan_batches(encoded, replace(SETTINGS, seed=4))


def test_first_loss_is_the_mean_over_completion_tokens(tmp_path):
    made = demonstrations()
    encoded = encode(TOKENIZER, made)
    batch = [encoded[row] for row in plan_batches(encoded, SETTINGS)[0]]
    model = new_model()
    total, count = 0.0, 0
    for item in batch:  # one by one, without padding, scored position by position
        ids = torch.tensor([item.prompt_ids + item.completion_ids])
        logprobs = model(ids).logits[0].log_softmax(-1)
        for position in range(len(item.prompt_ids), len(item)):
            total -= float(logprobs[position - 1, ids[0, position]].detach())
            count += 1
    record = Record()
    warm_start(new_model(), TOKENIZER, made, replace(SETTINGS, steps=1), tmp_path, callbacks=[record])
    assert record.losses[1] == pytest.approx(total / count, abs=2e-3)  # logged with four digits


def test_a_step_of_several_batches_weighs_them_alike_and_mixes_lengths(tmp_path):
    made = [shown("short", "a", "1234567") for _ in range(40)] + [
        shown("long", "the cat " * 20, "1") for _ in range(40)
    ]
    encoded = encode(TOKENIZER, made)
    settings = replace(SETTINGS, steps=1, batches=2, batch_tokens=400, lr=0.0)
    short, long = ([encoded[row] for row in batch] for batch in plan_batches(encoded, settings))
    assert {item.module for item in short} == {"short"} and {item.module for item in long} == {"long"}
    losses = []
    for batch in (short, long):
        record = Record()
        rows = [made[encoded.index(item)] for item in batch]
        warm_start(new_model(), TOKENIZER, rows, replace(SETTINGS, steps=1), tmp_path / "one", callbacks=[record])
        losses.append(record.losses[1])
    record = Record()
    warm_start(new_model(), TOKENIZER, made, settings, tmp_path / "two", callbacks=[record])
    assert record.losses[1] == pytest.approx(sum(losses) / 2, abs=2e-3)


def test_prompt_weight_adds_the_prompts_own_tokens(tmp_path):
    made = demonstrations(4)
    losses = {}
    for weight in (0.0, 0.5):
        record = Record()
        settings = replace(SETTINGS, steps=1, batch_tokens=9999, prompt_weight=weight)
        warm_start(new_model(), TOKENIZER, made, settings, tmp_path / str(weight), callbacks=[record])
        losses[weight] = record.losses[1]
    model, total, count = new_model(), 0.0, 0
    for item in encode(TOKENIZER, made):
        ids = torch.tensor([item.prompt_ids])
        logprobs = model(ids).logits[0].log_softmax(-1).detach()
        total -= sum(float(logprobs[position - 1, ids[0, position]]) for position in range(1, ids.shape[1]))
        count += ids.shape[1] - 1
    assert losses[0.5] - losses[0.0] == pytest.approx(0.5 * total / count, abs=4e-3)


@pytest.mark.parametrize("examples", [5, 70])  # of 60 demonstrations: some twice in a step
@pytest.mark.parametrize("checkpointing", [False, True])
def test_tries_and_padded_rows_make_the_same_steps(examples, checkpointing, tmp_path):
    header = "Say what is asked for, in as few words as you can, and nothing else. "
    made = [shown(item.module, header + str(item.messages[0]["content"]), item.completion) for item in demonstrations()]
    settings = replace(SETTINGS, steps=4, examples=examples, gradient_checkpointing=checkpointing)
    history, end = {}, {}
    for packing in ("padded", "trie"):
        seen = history[packing] = []
        model = new_model()
        folder = tmp_path / packing
        folder.mkdir()
        fit(
            model,
            TOKENIZER,
            encode(TOKENIZER, made),
            replace(settings, packing=packing),
            folder,
            on_step=lambda step, metrics, seen=seen: seen.append(metrics),
        )
        end[packing] = weights(model)
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
    settings = replace(SETTINGS, steps=2, examples=6, packing="trie")
    seen = []
    encoded = encode(TOKENIZER, demonstrations())
    fit(model, TOKENIZER, encoded, settings, tmp_path, on_step=lambda step, metrics: seen.append(metrics))
    assert count["head"] == count["model"] >= 2 and len(seen) == 2
    assert all(any("token_accuracy" in name for name in metrics) for metrics in seen)


def test_tries_continue_to_the_same_weights(tmp_path):
    made, settings = demonstrations(), replace(SETTINGS, examples=6, packing="trie")
    whole = weights(warm_start(new_model(), TOKENIZER, made, settings, tmp_path / "whole"))
    part = tmp_path / "part"
    warm_start(new_model(), TOKENIZER, made, settings, part, callbacks=[StopAt(6)])
    continued = weights(warm_start(new_model(), TOKENIZER, made, settings, part, resume=True))
    assert all(torch.equal(whole[name], continued[name]) for name in whole)


def test_padding_is_never_trained_or_seen():
    encoded = encode(TOKENIZER, demonstrations(9))
    (made,) = _Collator(encoded, 5, SETTINGS)([{"batches": [[0, 17]]}])["batches"]
    for row, item in enumerate([encoded[0], encoded[17]]):
        assert made["input_ids"][row, : len(item)].tolist() == list(item.prompt_ids + item.completion_ids)
        trained = made["labels"][row] != -100
        assert made["labels"][row][trained].tolist() == list(item.completion_ids)
        assert trained.nonzero()[0] == len(item.prompt_ids)
    assert made["input_ids"][0, len(encoded[0]) :].tolist() == [5] * (len(encoded[17]) - len(encoded[0]))


def test_it_learns(tmp_path):
    record = Record()
    warm_start(new_model(), TOKENIZER, demonstrations(), replace(SETTINGS, steps=60), tmp_path, callbacks=[record])
    assert record.losses[60] < record.losses[1] / 2


def test_a_stopped_warm_start_continues_to_the_same_weights(tmp_path):
    made = demonstrations()
    whole = weights(warm_start(new_model(), TOKENIZER, made, SETTINGS, tmp_path / "whole"))
    part = tmp_path / "part"
    stopped = weights(warm_start(new_model(), TOKENIZER, made, SETTINGS, part, callbacks=[StopAt(6)]))
    continued = weights(warm_start(new_model(), TOKENIZER, made, SETTINGS, part, resume=True))
    assert all(torch.equal(whole[name], continued[name]) for name in whole)
    assert not all(torch.equal(whole[name], stopped[name]) for name in whole)


def test_resume_without_a_checkpoint_starts_anew(tmp_path):
    whole = weights(warm_start(new_model(), TOKENIZER, demonstrations(), SETTINGS, tmp_path / "a"))
    other = weights(warm_start(new_model(), TOKENIZER, demonstrations(), SETTINGS, tmp_path / "b", resume=True))
    assert all(torch.equal(whole[name], other[name]) for name in whole)


@pytest.mark.parametrize("change", ["settings", "data"])
def test_checkpoints_of_other_data_or_settings_are_refused(tmp_path, change):
    short = replace(SETTINGS, steps=4)
    warm_start(new_model(), TOKENIZER, demonstrations(), short, tmp_path)
    settings = replace(short, lr=1.0) if change == "settings" else short
    made = demonstrations(29) if change == "data" else demonstrations()
    with pytest.raises(CheckpointError, match="lr" if change == "settings" else "data"):
        warm_start(new_model(), TOKENIZER, made, settings, tmp_path, resume=True)


def test_no_demonstrations_is_a_config_error(tmp_path):
    with pytest.raises(ConfigError, match="demonstrations"):
        warm_start(new_model(), TOKENIZER, [], SETTINGS, tmp_path)


def test_a_mix_of_nothing_is_a_config_error():
    with pytest.raises(ConfigError, match="mix"):
        plan_batches(encode(TOKENIZER, demonstrations()), replace(SETTINGS, mix={"say": 0.0, "twice": 0.0}))


def test_a_demonstration_longer_than_the_context_is_named(tmp_path):
    made = [*demonstrations(2), shown("say", "the cat " * 90, "x")]
    with pytest.raises(DataError, match=r"demonstration 4 \(module 'say'\): \d+ tokens, expected at most 64"):
        warm_start(new_model(context=64), TOKENIZER, made, SETTINGS, tmp_path)
