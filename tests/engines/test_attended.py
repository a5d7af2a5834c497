"""The loop over a model's own layers: windows, caps and sinks on shared prefixes, and all that any loop must do."""

from __future__ import annotations

import logging
import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmrl.config import ModelConfig
from mmrl.config.engines import TransformersConfig
from mmrl.engines.base import EngineSetup
from mmrl.engines.embedded import row_decoder, shared_prefix
from mmrl.engines.embedded.attended import AttendedLoop
from mmrl.engines.embedded.hf_loop import HFLoop
from mmrl.engines.embedded.transformers_engine import TransformersEngine
from scripts.models.architectures import tiny_model as architecture
from tests.engines import test_transformers as common
from tests.engines.test_decode import adapted, assert_logits_of, come_and_go, later_turns, randomised, row
from tests.helpers.engines import VOCABULARY, model, tokenizer
from tests.helpers.trainer_cases import SIZES
from tests.trainer.test_tree_windows import FAMILIES, family

CONTEXT = {"vocab_size": VOCABULARY, "max_position_embeddings": 2048}


def served(name: str, window: int) -> Any:
    """A family's model with a vocabulary and a context of these tests."""
    with pytest.MonkeyPatch.context() as patch:
        for key, value in CONTEXT.items():
            patch.setitem(SIZES, key, value)
        return family(name, window)


@settings(max_examples=60)
@given(st.integers(0, 10_000), st.sampled_from([*FAMILIES]), st.sampled_from([3, 12, 70, 500]), st.booleans())
def test_rows_that_come_and_go_have_the_logits_that_they_have_alone(
    seed: int, name: str, window: int, together: bool
) -> None:
    """Windows shorter than a tail, than a prefix, and longer than all; read together, or copied into each row."""
    dice = random.Random(seed)
    trunk = [dice.randrange(VOCABULARY) for _ in range(90)]

    def draw() -> list[list[int]]:
        new = []
        for _ in range(dice.randint(1, 3)):
            tail = [dice.randrange(VOCABULARY) for _ in range(dice.choice((1, 7, 40)))]
            new += [[*trunk[: dice.choice((0, 40, 89, 90))], *tail] for _ in range(dice.choice((1, 1, 4)))]
        return new

    with pytest.MonkeyPatch.context() as patch:
        if together:
            patch.setattr(shared_prefix, "LEAST_TOKENS", 8)
            patch.setattr(shared_prefix, "LEAST_BYTES", {"cpu": 1})
        patch.setattr("mmrl.engines.embedded.attended.BLOCK", 16)
        come_and_go(dice, draw, served(name, window), forks=True, loop=AttendedLoop)


@pytest.mark.parametrize("name", ["gemma2", "mistral", "gpt_oss"])
def test_a_long_prefix_of_many_rows_is_held_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_prefix, "LEAST_BYTES", {"cpu": 100_000})
    policy = served(name, 50)
    loop = AttendedLoop(policy)
    header = [2 + i % 90 for i in range(600)]
    prompts = [[*header, 5, i] for i in range(8)] + [[7] * 40]
    with torch.no_grad():
        loop.start()
        loop.prefill([row(prompt) for prompt in prompts])
        logits = loop.step([3] * len(prompts))
    assert loop._groups
    assert loop._cache[0].shape[3] < 200
    assert_logits_of(policy, [[*ids, 3] for ids in prompts], logits)


def test_a_later_turn_goes_on_from_the_earlier_one(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = served("gemma3", 9)
    later_turns(policy, AttendedLoop(policy), monkeypatch)


def test_layers_whose_keys_have_other_sizes_share_a_cache() -> None:
    """Gemma 4's global heads are fewer and wider than its local ones."""
    policy = architecture("gemma4_text")
    policy.set_attn_implementation("sdpa")
    loop = AttendedLoop(policy)
    assert len(set(loop.shapes)) == 2
    prompts = [[*range(3, 40), tail] for tail in (50, 51, 52)]
    with torch.no_grad():
        loop.start()
        loop.prefill([row(prompt) for prompt in prompts])
        logits = loop.step([7, 8, 9])
    assert_logits_of(policy, [[*ids, last] for ids, last in zip(prompts, (7, 8, 9), strict=True)], logits)


@pytest.mark.parametrize(
    ("test", "arguments"),
    [
        ("test_logprobs_equal_a_plain_forward", ("own", "deterministic")),
        ("test_a_request_alone_and_in_a_batch_draws_the_same_tokens", ("own",)),
        ("test_a_small_budget_changes_no_token", ("own",)),
        ("test_greedy_equals_generate", ("own",)),
        ("test_stop_string_across_tokens", ("own",)),
        ("test_context_limit", ("own",)),
        ("test_diverged_weights_fail_the_request", ("own",)),
        ("test_timing_of_programs_changes_nothing", ("own", 6)),
        ("test_training_mode_and_dropout_are_left_as_they_were", ("own",)),
        ("test_weights_are_never_stale", ("own",)),
    ],
)
def test_it_does_what_every_loop_does(test: str, arguments: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests of the other loops, with a model that the native decoder is told not to know."""
    monkeypatch.setattr(row_decoder, "unsupported", lambda model: "another family")
    assert isinstance(common.engine(model(), "own").decoder.loops[""], AttendedLoop)
    getattr(common, test)(*arguments)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_module_speaks_with_its_own_adapter(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_decoder, "unsupported", lambda model: "another family")
    common.test_each_module_speaks_with_its_own_adapter("own", dtype, 2**30, monkeypatch)


def test_an_adapter_on_all_layers_is_applied() -> None:
    policy = randomised(adapted(served("olmo3", 6), "q_proj", "k_proj", "o_proj", "down_proj"))
    loop = AttendedLoop(policy)
    prompts = [[*range(3, 40), tail] for tail in (50, 51)]
    with torch.no_grad():
        loop.start()
        logits = loop.prefill([row(prompt) for prompt in prompts])
    assert_logits_of(policy, prompts, logits)


@pytest.mark.parametrize("name", ["zaya", "falcon_h1"])
def test_what_mixes_tokens_beside_attention_is_found(name: str, caplog: pytest.LogCaptureFixture) -> None:
    policy = architecture(name)
    policy.set_attn_implementation("sdpa")
    for checked, word in ((True, "the model's own layers over shared prefixes differ"), (False, "selfcheck=false")):
        setup = EngineSetup(threads=1, weights=ModelConfig(name="x", path="x", selfcheck=checked))
        with caplog.at_level(logging.WARNING, "mmrl.engines"):
            made = TransformersEngine(policy, tokenizer(), TransformersConfig(), setup)
        assert isinstance(made.decoder.loops[""], HFLoop)
        assert word in caplog.text
