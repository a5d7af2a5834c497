"""scripts.tiny_model.warm_start: batches that count alike, planned by the seed alone; resume is exact."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from transformers import TrainerCallback

from mmrl.config import TrainConfig
from mmrl.errors import CheckpointError, ConfigError
from mmrl.stages.sft import encode, tokens_of
from scripts.tiny_model.warm_start import WarmStart, plan_batches, warm_start
from tests.helpers.stages import TOKENIZER, new_model, shown, weights
from tests.stages.test_sft_steps import CALLS, demonstrations

TRAIN = TrainConfig(steps=12, lr=3e-3, schedule="cosine", microbatch_tokens=600, save_every=4)
SETTINGS = WarmStart(train=TRAIN, seed=3)


def settings(batches=1, mix=None, **train):
    return WarmStart(train=TRAIN.model_copy(update=train), batches=batches, mix=mix or {}, seed=3)


class StopAt(TrainerCallback):
    def __init__(self, step: int):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step >= self.step


def test_a_pass_sees_every_demonstration_once_within_the_budget():
    whole = plan_batches(CALLS, settings(steps=10_000, microbatch_tokens=300))
    one_pass = whole[: next(n for n in range(1, 999) if sum(map(len, whole[:n])) == len(CALLS))]
    assert Counter(row for batch in one_pass for row in batch) == Counter(range(len(CALLS)))
    for batch in one_pass:
        assert len(batch) == 1 or len(batch) * max(tokens_of(CALLS[row]) for row in batch) <= 300
    assert one_pass != whole[len(one_pass) : 2 * len(one_pass)]


def test_a_demonstration_over_the_budget_is_a_step_of_its_own():
    assert all(len(batch) == 1 for batch in plan_batches(CALLS[:6], settings(microbatch_tokens=1)))


def test_mixing_shares():
    planned = plan_batches(CALLS, settings(steps=1000, mix={"say": 0.25, "twice": 2.0}))
    seen = Counter(CALLS[row].module for batch in planned for row in batch)
    assert seen["twice"] / seen["say"] == pytest.approx(8, rel=0.2)


def test_the_plan_depends_on_the_seed_alone():
    assert plan_batches(CALLS, SETTINGS) == plan_batches(CALLS, SETTINGS)
    assert plan_batches(CALLS, SETTINGS) != plan_batches(CALLS, replace(SETTINGS, seed=4))


def test_a_step_takes_its_batches_from_several_lengths():
    made = [shown("short", "a", "1234567") for _ in range(40)]
    made += [shown("long", "the cat " * 20, "1") for _ in range(40)]
    calls = [encode(TOKENIZER, item) for item in made]
    short, long = plan_batches(calls, settings(steps=1, batches=2, microbatch_tokens=400))
    assert {calls[row].module for row in short} == {"short"} and {calls[row].module for row in long} == {"long"}


def test_a_stopped_warm_start_continues_to_the_same_weights_and_with_nothing_else(tmp_path):
    made, short = demonstrations(), settings(steps=4, save_every=2)
    whole = weights(warm_start(new_model(), TOKENIZER, made, short, tmp_path / "whole"))
    part = tmp_path / "part"
    stopped = weights(warm_start(new_model(), TOKENIZER, made, short, part, callbacks=[StopAt(2)]))
    for others, changed in ((made, settings(steps=4, save_every=2, lr=1.0)), (demonstrations(29), short)):
        with pytest.raises(CheckpointError, match="made with other settings or demonstrations"):
            warm_start(new_model(), TOKENIZER, others, changed, part)
    continued = weights(warm_start(new_model(), TOKENIZER, made, short, part))
    assert all(torch.equal(whole[name], continued[name]) for name in whole)
    assert not all(torch.equal(whole[name], stopped[name]) for name in whole)


def test_a_mix_of_nothing_is_a_config_error():
    with pytest.raises(ConfigError, match="mix"):
        plan_batches(CALLS, settings(mix={"say": 0.0, "twice": 0.0}))
