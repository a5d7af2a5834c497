"""Law 10: packed tries and padded rows give the same numbers, for any calls, any budget and any order."""

from __future__ import annotations

import random
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmrl.config.algo import PpoConfig
from mmrl.errors import ConfigError, MmrlError
from mmrl.trainer import logprobs, selfcheck, tree_kernels, tries
from mmrl.trainer.objective import TrainCall
from mmrl.trainer.selfcheck import calls_to_compare, check_tries
from mmrl.trainer.trl_trainer import MmrlTrainer
from tests.helpers.trainer_cases import (
    LORA,
    assert_close,
    exact_model,
    gradients,
    make_calls,
    make_trainer,
    sampled,
    tiny_model,
    train_call,
    train_entry,
    with_changes,
    with_targets,
)


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> MmrlTrainer:
    return make_trainer(tmp_path_factory.mktemp("law10"), exact_model(), algo={"beta": 0.1})


@st.composite
def forests(draw: st.DrawFn) -> list[TrainCall]:
    """Shared prompts, turns that go on from calls, forks inside completions, duplicates, one token, long ones."""
    calls: list[TrainCall] = []
    ids = st.lists(st.integers(2, 5), min_size=1, max_size=12)
    for number in range(draw(st.integers(1, 8))):
        prompt, completion = draw(ids), draw(ids)
        if calls:
            other = draw(st.sampled_from(calls))
            match draw(st.sampled_from(["group", "turn", "fork", "twin", "new"])):
                case "group":
                    prompt = list(other.call.prompt_ids)
                case "turn":
                    prompt = [*other.call.prompt_ids, *other.call.completion_ids, *prompt]
                case "fork":  # the trained tokens part in the middle of the completion
                    prompt = list(other.call.prompt_ids)
                    completion = [*other.call.completion_ids[: draw(st.integers(0, 12))], *completion]
                case "twin":
                    prompt, completion = list(other.call.prompt_ids), list(other.call.completion_ids)
        tokens = len(completion)
        if len(prompt) + tokens > 120:
            continue
        numbers = st.lists(st.sampled_from([0.0, 0.5, -1.0, 2.0]), min_size=tokens, max_size=tokens).map(tuple)
        entries = draw(st.lists(st.builds(train_entry, advantages=numbers, weights=numbers), min_size=1, max_size=2))
        calls.append(
            train_call(
                id=f"c{number}",
                module=draw(st.sampled_from("ab")),
                prompt_ids=tuple(prompt),
                completion_ids=tuple(completion),
                logprobs=tuple(-3.0 - 0.1 * (t % 4) for t in range(tokens)),
                entries=tuple(entries),
            )
        )
    return calls


@pytest.mark.parametrize("always", [True, False])
def test_law_10_tries_equal_padded_rows(always: bool, trainer: MmrlTrainer) -> None:
    @settings(max_examples=40)
    @given(forests(), st.integers(8, 400), st.randoms(use_true_random=False))
    def check(calls: list[TrainCall], budget: int, dice: random.Random) -> None:
        trainer.forwards.tries = False
        loss, expected = gradients(trainer, calls, 10**6)
        trainer.forwards.tries = True
        with pytest.MonkeyPatch.context() as patch:
            if always:
                patch.setattr(tries, "MERGE_COST", 0.0)
                patch.setattr(tries, "NODE_COST", 0)
            tree_loss, found = gradients(trainer, dice.sample(calls, len(calls)), budget)
        assert tree_loss == pytest.approx(loss, abs=1e-10)
        assert_close(found, expected)

    check()


def shared_calls(groups: int = 3, samples: int = 3, prompt: int = 30) -> list[TrainCall]:
    calls = []
    for group in range(groups):
        made = make_calls(samples, seed=group)
        ids = tuple(random.Random(group).randrange(2, 40) for _ in range(prompt))
        calls += [with_changes(call, id=f"{group}{call.call.id}", prompt_ids=ids) for call in made]
    return calls


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logits_in_chunks_change_no_number(temperature: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made = make_trainer(tmp_path, exact_model(), algo={"temperature": temperature})
    sizes: list[int] = []
    made.model.get_output_embeddings().register_forward_hook(lambda *_: sizes.append(1))
    loss, expected = gradients(made, shared_calls())
    entropy = made.totals.sums[:, 5].clone()
    monkeypatch.setattr(logprobs, "CHUNK", 40 * 7)
    chunked_loss, found = gradients(made, shared_calls())
    assert chunked_loss == pytest.approx(loss, abs=1e-10)
    assert_close(found, expected)
    assert torch.allclose(made.totals.sums[:, 5], entropy)
    assert "forward" not in vars(made.model.get_output_embeddings())


@pytest.mark.parametrize("critic", ["separate", "head", "adapter"])
def test_the_critics_values_and_gradients_are_those_of_padded_rows(critic: str, tmp_path: Path) -> None:
    calls = with_targets(shared_calls())
    found: list[Any] = []
    for packing in ("trie", "padded"):
        algo = PpoConfig(name="ppo", critic=critic, beta=0.0)  # type: ignore[arg-type]
        lora = LORA if critic == "adapter" else None
        made = make_trainer(tmp_path / packing, tiny_model(), packing=packing, lora=lora, algo=algo)
        values = made.forwards.values(sampled(calls))
        gradients(made, calls, 100)
        assert made.critic is not None
        grads = {n: p.grad.clone() for n, p in made.critic.named_parameters().items() if p.grad is not None}
        found.append((values, grads))
    for one, two in zip(found[0][0], found[1][0], strict=True):
        assert one == pytest.approx(two, abs=1e-5)
    assert_close(found[0][1], found[1][1], 1e-5)


def test_models_that_cannot_share_are_padded_aloud(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made = make_trainer(tmp_path, tiny_model("bloom"))
    assert not made.forwards.tries
    assert "train.packing=auto: rows are padded (slower), since BloomForCausalLM" in caplog.text
    with pytest.raises(ConfigError, match=r"train\.packing: got 'trie', which this model cannot do: BloomForCausalLM"):
        make_trainer(tmp_path, tiny_model("bloom"), packing="trie")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_self_check_stops_a_run_whose_layers_do_not_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    made = make_trainer(tmp_path, tiny_model(dtype=dtype), calls=shared_calls())
    assert check_tries(made.forwards, shared_calls())
    before = {name: weight.clone() for name, weight in made.model.named_parameters()}

    def leaky(query: Any, key: Any, value: Any, calls: Any, scale: float, *_: Any) -> Any:
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scale, enable_gqa=True
        ).transpose(1, 2)

    monkeypatch.setattr(tree_kernels.TreeAttention, "apply", leaky)
    with pytest.raises(MmrlError, match=r"train\.packing: on the first batch, packed and padded log-probabilities"):
        check_tries(made.forwards, shared_calls())
    # In half precision the medians of so few tokens say nothing; their gradients do.
    words = "log-probabilities of packed tries differ by" if dtype == torch.float32 else "cosine of their gradients"
    with pytest.raises(MmrlError, match=words):
        made.train()
    assert all(torch.equal(before[name], weight) for name, weight in made.model.named_parameters())


@pytest.mark.parametrize(("dtype", "refused"), [(torch.float32, True), (torch.bfloat16, False)])
def test_a_single_token_decides_in_float32_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, refused: bool
) -> None:
    made = make_trainer(tmp_path, tiny_model(dtype=dtype))
    right, sides = selfcheck._measure, iter((0.5, 0.0))

    def rounded(*arguments: Any, **options: Any) -> Any:
        logprobs, gradient = right(*arguments, **options)
        next(iter(logprobs.values()))[0] += next(sides)  # as seen of SmolLM2-135M in bfloat16
        return logprobs, gradient

    monkeypatch.setattr(selfcheck, "_measure", rounded)
    with pytest.raises(MmrlError, match=r"log-probabilities differ by 0\.5") if refused else nullcontext():
        check_tries(made.forwards, shared_calls())


def test_the_self_check_sees_a_wrong_gradient(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = make_trainer(tmp_path)
    right = tree_kernels.TreeAttention.apply
    assert check_tries(made.forwards, shared_calls())
    monkeypatch.setattr(
        tree_kernels.TreeAttention,
        "apply",
        lambda q, k, v, *rest: right(q, k.detach(), v.detach(), *rest),
    )
    with pytest.raises(MmrlError, match=r"the cosine of their gradients"):
        check_tries(made.forwards, shared_calls())


def test_the_self_check_leaves_nothing_behind_and_waits_for_work(tmp_path: Path) -> None:
    made = make_trainer(tmp_path)
    state = torch.get_rng_state()
    assert check_tries(made.forwards, shared_calls())
    assert all(weight.grad is None for weight in made.model.parameters())
    assert torch.equal(state, torch.get_rng_state())
    idle = [replace(call, entries=()) for call in shared_calls()]
    assert check_tries(made.forwards, idle) is False


def test_the_self_check_takes_calls_that_share() -> None:
    chosen = calls_to_compare([*make_calls(5, seed=9), *shared_calls(1, 3, prompt=300)])
    assert chosen[0].call.prompt_ids == chosen[1].call.prompt_ids
    assert len(chosen[0].call.prompt_ids) == 300
    assert sum(len(call.call.prompt_ids) + len(call.call.completion_ids) for call in chosen) <= 1024


def test_the_budget_comes_from_the_memory_unless_given(tmp_path: Path) -> None:
    assert make_trainer(tmp_path, microbatch_tokens=77).forwards.budget == 77
    chosen = make_trainer(tmp_path).forwards.budget
    assert chosen == make_trainer(tmp_path).forwards.budget
    assert 512 <= chosen <= 4096
