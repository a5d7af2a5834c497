"""The engine's loop for hybrids: prompts that share, rows that come and go, turns that go on, what is kept of them."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmrl.config import ModelConfig
from mmrl.config.engines import TransformersConfig
from mmrl.engines.base import EngineSetup
from mmrl.engines.embedded.hf_loop import HFLoop
from mmrl.engines.embedded.prefixes import PrefixSegment, PrefixStore
from mmrl.engines.embedded.state_loop import StateLoop
from mmrl.engines.embedded.transformers_engine import TransformersEngine
from tests.engines.test_decode import assert_logits_of, come_and_go, forwarded, headed, later_turns, plain, row
from tests.engines.test_prefixes import prompt_sets
from tests.helpers.engines import VOCABULARY, generate, model, request, tokenizer
from tests.helpers.hybrids import HYBRIDS, hybrid_model

POLICIES = {kind: hybrid_model(kind, VOCABULARY) for kind in HYBRIDS}
HEADER = [2 + i % 90 for i in range(100)]


@pytest.mark.parametrize("kind", HYBRIDS)
def test_rows_that_come_and_go_have_the_logits_that_they_have_alone(kind: str) -> None:
    @settings(max_examples=8)
    @given(st.integers(0, 10_000))
    def check(seed: int) -> None:
        dice = random.Random(seed)
        come_and_go(dice, headed(dice), POLICIES[kind], forks=True, loop=StateLoop)

    check()


def test_prompts_are_forwarded_once_and_their_states_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = POLICIES["qwen3_5"]
    own = StateLoop(policy)
    seen = forwarded(own, monkeypatch)
    rows = [[*HEADER, 7, *[5] * i] for i in (1, 2, 3, 4, 4)]
    with torch.no_grad():
        own.start()
        logits = own.prefill([row(prompt) for prompt in rows])
        # The header and the 7, and what the four prompts have beyond them, of which each begins with the one before.
        assert sorted(seen) == [1, 2, 3, 4, 101]
        assert_logits_of(policy, rows, logits)
        logits = own.prefill([row([*HEADER, 7, 9, 9])])[0]
        assert sum(seen) == 111 + 2
        torch.testing.assert_close(logits, plain(policy, [*HEADER, 7, 9, 9]), atol=1e-4, rtol=1e-4)
        # Within what is stored there is no state to start from.
        logits = own.prefill([row([*HEADER[:70], 9, 9])])[0]
        assert sum(seen) == 113 + 72
    torch.testing.assert_close(logits, plain(policy, [*HEADER[:70], 9, 9]), atol=1e-4, rtol=1e-4)


def test_a_later_turn_goes_on_from_the_earlier_ones_state(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = POLICIES["qwen3_5"]
    later_turns(policy, StateLoop(policy), monkeypatch)


def test_a_row_that_has_left_takes_its_padding_with_it() -> None:
    policy = POLICIES["qwen3_5"]
    own = StateLoop(policy)
    with torch.no_grad():
        own.start()
        own.prefill([row(HEADER), row([5, 6])])
        own.keep([1])
        logits = own.prefill([row([7, 8, 9])])
    cache: Any = own._cache
    assert cache.layers[1].keys.shape[2] == 3
    assert_logits_of(policy, [[7, 8, 9]], logits)


@given(prompt_sets(), prompt_sets())
def test_the_store_finds_the_longest_whole_sequence(
    stored: list[tuple[int, ...]], prompts: list[tuple[int, ...]]
) -> None:
    store = PrefixStore(100_000, state_tokens=5)
    for ids in stored:
        store.add(PrefixSegment(ids))
    assert store.tokens == sum(len(ids) + 5 for ids in stored)
    for prompt in prompts:
        slow = max(
            (len(ids) for ids in stored if 16 <= len(ids) < len(prompt) and prompt[: len(ids)] == ids), default=0
        )
        found, length = store.find(prompt)
        assert length == slow
        assert (found.ids if found else ()) == prompt[:slow]


def test_states_count_as_their_bytes() -> None:
    # Two layers with 4 heads of 8 x 6 float32 numbers; a token has 2 heads of 8 keys and values in one layer.
    own = StateLoop(POLICIES["qwen3_5"], stored_tokens=112)
    assert own._state_tokens == 2 * 4 * 8 * 6 * 4 // (2 * 2 * 8 * 4) == 12
    with torch.no_grad():
        own.start()
        own.prefill([row([*HEADER, i]) for i in (1, 2)])
        assert own._store.tokens == 112
        own.forget()
        assert own._store.tokens == 0
        own.prefill([row([3, *HEADER, i]) for i in (1, 2)])
        assert own._store.tokens == 0


@pytest.mark.parametrize(("choice", "kind"), [("auto", StateLoop), ("own", StateLoop), ("hf", HFLoop)])
def test_the_engine_takes_it_for_hybrids_quietly(
    choice: Any, kind: type[HFLoop], caplog: pytest.LogCaptureFixture
) -> None:
    served = TransformersEngine(
        POLICIES["qwen3_5"], tokenizer(), TransformersConfig(loop=choice), EngineSetup(threads=1)
    )
    made = generate(served, [request([*HEADER, 7, i], i, max_tokens=4) for i in range(3)])
    assert type(served.decoder.loops[""]) is kind
    assert not caplog.text
    assert all(made)


@pytest.mark.parametrize("at_load", [True, False])
def test_a_state_that_is_lost_is_noticed_before_it_is_used(
    at_load: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    right = StateLoop._forward_segments

    def lost(loop: StateLoop, segments: Any) -> torch.Tensor:
        for part in segments[0].parent.cache if segments[0].parent else ():
            if part.shape[-1] == 6:
                part.zero_()
        return right(loop, segments)

    monkeypatch.setattr(StateLoop, "_forward_segments", lost)
    weights = ModelConfig(name="test", path="tiny") if at_load else None
    policy = POLICIES["qwen3_5"]
    served = TransformersEngine(policy, tokenizer(), TransformersConfig(), EngineSetup(threads=1, weights=weights))
    assert (type(served.decoder.loops[""]) is HFLoop) == at_load
    asked = [request([*HEADER[:20], 7, *[8] * i], i, max_tokens=4) for i in range(3)]
    made = generate(served, asked)
    assert type(served.decoder.loops[""]) is HFLoop
    assert "shared prefixes once differ by" in caplog.text
    with torch.no_grad():
        for one, completion in zip(asked, made, strict=True):
            logits = policy(torch.tensor([one.prompt_ids + completion.ids])).logits[0].log_softmax(-1)
            expected = [float(logits[len(one.prompt_ids) - 1 + t, token]) for t, token in enumerate(completion.ids)]
            assert completion.logprobs == pytest.approx(expected, abs=2e-5)


def test_other_families_are_not_its() -> None:
    from mmrl.engines.embedded.state_loop import serves

    assert not serves(model())
