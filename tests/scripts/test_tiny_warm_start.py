"""scripts.tiny_model.warm_start: batches that count alike, planned by the seed alone; resume is exact."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from transformers import TrainerCallback

from mmrl.errors import CheckpointError, ConfigError
from mmrl.stages.sft import encode, tokens_of
from mmrl.trainer.trl_trainer import MmrlTrainer
from scripts.tiny_model.warm_start import WarmStart, plan_batches, warm_start
from tests.helpers.stages import TOKENIZER, new_model, shown, weights
from tests.stages.test_sft_steps import CALLS, demonstrations

SETTINGS = WarmStart(steps=12, batch_tokens=600, lr=3e-3, save_every=4, seed=3)


class StopAt(TrainerCallback):
    def __init__(self, step: int):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step >= self.step


@pytest.fixture
def losses(monkeypatch):
    """Of every step that is trained."""
    seen, step = [], MmrlTrainer.training_step
    monkeypatch.setattr(MmrlTrainer, "training_step", lambda *given: seen.append(step(*given)) or seen[-1])
    return seen


def test_a_pass_sees_every_demonstration_once_within_the_budget():
    whole = plan_batches(CALLS, replace(SETTINGS, steps=10_000, batch_tokens=300))
    one_pass = whole[: next(n for n in range(1, 999) if sum(map(len, whole[:n])) == len(CALLS))]
    assert Counter(row for batch in one_pass for row in batch) == Counter(range(len(CALLS)))
    for batch in one_pass:
        assert len(batch) == 1 or len(batch) * max(tokens_of(CALLS[row]) for row in batch) <= 300
    assert one_pass != whole[len(one_pass) : 2 * len(one_pass)]


def test_a_demonstration_over_the_budget_is_a_step_of_its_own():
    assert all(len(batch) == 1 for batch in plan_batches(CALLS[:6], replace(SETTINGS, batch_tokens=1)))


def test_mixing_shares():
    planned = plan_batches(CALLS, replace(SETTINGS, steps=1000, mix={"say": 0.25, "twice": 2.0}))
    seen = Counter(CALLS[row].module for batch in planned for row in batch)
    assert seen["twice"] / seen["say"] == pytest.approx(8, rel=0.2)


def test_the_plan_depends_on_the_seed_alone():
    assert plan_batches(CALLS, SETTINGS) == plan_batches(CALLS, SETTINGS)
    assert plan_batches(CALLS, SETTINGS) != plan_batches(CALLS, replace(SETTINGS, seed=4))


def test_a_step_of_several_batches_weighs_them_alike_and_mixes_lengths(tmp_path, losses):
    made = [shown("short", "a", "1234567") for _ in range(40)]
    made += [shown("long", "the cat " * 20, "1") for _ in range(40)]
    calls = [encode(TOKENIZER, item) for item in made]
    settings = replace(SETTINGS, steps=1, batches=2, batch_tokens=400, lr=0.0)
    short, long = plan_batches(calls, settings)
    assert {calls[row].module for row in short} == {"short"} and {calls[row].module for row in long} == {"long"}
    for rows in (short, long):
        folder = tmp_path / made[rows[0]].module
        warm_start(new_model(), TOKENIZER, [made[row] for row in rows], replace(SETTINGS, steps=1), folder)
    warm_start(new_model(), TOKENIZER, made, settings, tmp_path / "both")
    assert float(losses[2]) == pytest.approx(float(losses[0] + losses[1]) / 2, abs=1e-5)


def test_a_stopped_warm_start_continues_to_the_same_weights(tmp_path):
    made = demonstrations()
    whole = weights(warm_start(new_model(), TOKENIZER, made, SETTINGS, tmp_path / "whole"))
    part = tmp_path / "part"
    stopped = weights(warm_start(new_model(), TOKENIZER, made, SETTINGS, part, callbacks=[StopAt(6)]))
    continued = weights(warm_start(new_model(), TOKENIZER, made, SETTINGS, part))
    assert all(torch.equal(whole[name], continued[name]) for name in whole)
    assert not all(torch.equal(whole[name], stopped[name]) for name in whole)


@pytest.mark.parametrize("change", ["settings", "data"])
def test_checkpoints_of_other_data_or_settings_are_refused(tmp_path, change):
    short = replace(SETTINGS, steps=4)
    warm_start(new_model(), TOKENIZER, demonstrations(), short, tmp_path)
    settings = replace(short, lr=1.0) if change == "settings" else short
    made = demonstrations(29) if change == "data" else demonstrations()
    with pytest.raises(CheckpointError, match="made with other settings or demonstrations"):
        warm_start(new_model(), TOKENIZER, made, settings, tmp_path)


def test_a_mix_of_nothing_is_a_config_error():
    with pytest.raises(ConfigError, match="mix"):
        plan_batches(CALLS, replace(SETTINGS, mix={"say": 0.0, "twice": 0.0}))
