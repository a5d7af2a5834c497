"""The embedded engine against plain forwards and Hugging Face's own generate."""

from __future__ import annotations

import asyncio
import random
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model

from mmrl.config.engines import TransformersConfig
from mmrl.engines.base import Completion, EngineSetup, Request
from mmrl.engines.embedded import architecture
from mmrl.engines.embedded.decode import NativeLoop
from mmrl.engines.embedded.hf_loop import HFLoop
from mmrl.engines.embedded.transformers_engine import TransformersEngine
from mmrl.errors import EngineFailure, LengthFailure
from tests.engines.test_decode import forwarded, row
from tests.helpers.engines import EOS, VOCABULARY, generate, model, request, tokenizer
from tests.helpers.hybrids import hybrid_model

LOOPS = ["own", "hf", "states"]


def policy_for(loop: str, scale: float = 0.4) -> Any:
    """A model that the loop serves."""
    return hybrid_model("qwen3_5", VOCABULARY, initializer_range=scale) if loop == "states" else model(scale=scale)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def engine(policy: torch.nn.Module, loop: Any = "hf", **options: Any) -> TransformersEngine:
    settings: dict[str, Any] = {key: options.pop(key) for key in ("schedule", "batch_tokens") if key in options}
    loop = "own" if loop == "states" else loop
    return TransformersEngine(
        policy, tokenizer(), TransformersConfig(loop=loop, **settings), EngineSetup(threads=1, **options)
    )


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    dice = random.Random(seed)
    return [[dice.randrange(2, VOCABULARY) for _ in range(dice.randint(1, 20))] for _ in range(count)]


def recomputed(policy: torch.nn.Module, asked: Request, made: Completion) -> list[float]:
    """Log-probabilities of the sampled ids by one plain forward, as the trainer computes them."""
    with torch.no_grad():
        logits = policy(torch.tensor([asked.prompt_ids + made.ids])).logits[0].float()
    logprobs = torch.log_softmax(logits / (asked.sampling.temperature or 1.0), dim=-1)
    start = len(asked.prompt_ids) - 1
    return [float(logprobs[start + t, token]) for t, token in enumerate(made.ids)]


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("schedule", ["deterministic", "greedy"])
def test_logprobs_equal_a_plain_forward(loop: str, schedule: str) -> None:
    policy = policy_for(loop)
    asked = [
        request(prompt, index, temperature=(0.0, 0.6, 1.0, 1.7)[index % 4], top_p=(1.0, 0.8)[index % 2], max_tokens=20)
        for index, prompt in enumerate(prompts(10))
    ]
    for one, made in zip(asked, generate(engine(policy, loop, schedule=schedule), asked), strict=True):
        assert made.logprobs == pytest.approx(recomputed(policy, one, made), abs=2e-5)
        assert 1 <= len(made.ids) == len(made.logprobs) <= 20
        assert made.finish == ("eos" if made.ids[-1] == EOS else "length")
        assert EOS not in made.ids[:-1]


@pytest.mark.parametrize("loop", LOOPS)
def test_a_request_alone_and_in_a_batch_draws_the_same_tokens(loop: str) -> None:
    policy = policy_for(loop)
    asked = [request(prompt, i, max_tokens=5 + 3 * i) for i, prompt in enumerate(prompts(9, seed=1))]
    together = generate(engine(policy, loop), asked)
    for one, made in zip(asked, together, strict=True):
        assert generate(engine(policy, loop), [one])[0].ids == made.ids
    assert len({made.ids for made in together}) == len(asked)


@pytest.mark.parametrize("loop", LOOPS)
def test_a_small_budget_changes_no_token(loop: str) -> None:
    policy = policy_for(loop)
    asked = [request(prompt, i) for i, prompt in enumerate(prompts(9, seed=2))]
    wide, narrow = (generate(engine(policy, loop, batch_tokens=n), asked) for n in (4096, 64))
    assert [made.ids for made in wide] == [made.ids for made in narrow]


@pytest.mark.parametrize("loop", LOOPS)
def test_greedy_equals_generate(loop: str) -> None:
    policy = policy_for(loop, scale=0.2)
    for index, prompt in enumerate(prompts(4, seed=3)):
        made = generate(engine(policy, loop), [request(prompt, index, temperature=0.0, max_tokens=16)])[0]
        ids = torch.tensor([prompt])
        peer = policy.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=16)
        assert list(made.ids) == peer[0, len(prompt) :].tolist()


@pytest.mark.parametrize("loop", LOOPS)
def test_stop_string_across_tokens(loop: str) -> None:
    policy = policy_for(loop)
    free = generate(engine(policy, loop), [request([5, 6], 0, max_tokens=30, seed=4)])[0]
    text = tokenizer().decode([*free.ids[:12]])
    stop = text[-3:]
    made = generate(engine(policy, loop), [request([5, 6], 0, max_tokens=30, seed=4, stop=(stop,))])[0]
    assert made.finish == "stop"
    assert made.ids == free.ids[: len(made.ids)]
    assert stop in tokenizer().decode([*made.ids])
    assert stop not in tokenizer().decode([*made.ids[:-1]])


@pytest.mark.parametrize("loop", LOOPS)
def test_context_limit(loop: str) -> None:
    limited = engine(policy_for(loop), loop, max_context=16)
    made = generate(limited, [request([5] * 12, 0, temperature=0.0, max_tokens=50)])[0]
    assert made.finish in ("length", "eos")
    assert len(made.ids) <= 4

    async def both() -> list:
        return list(
            await asyncio.gather(
                limited.generate(request([5] * 16, 0)), limited.generate(request([5], 1)), return_exceptions=True
            )
        )

    too_long, fine = asyncio.run(both())
    assert isinstance(too_long, LengthFailure)
    assert isinstance(fine, Completion)


@pytest.mark.parametrize("loop", LOOPS)
def test_diverged_weights_fail_the_request(loop: str) -> None:
    policy = policy_for(loop)
    with torch.no_grad():
        policy.model.norm.weight.fill_(float("nan"))
    with pytest.raises(EngineFailure, match="diverged"):
        generate(engine(policy, loop), [request([5, 6])])


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("programs", [1, 5])
def test_timing_of_programs_changes_nothing(loop: str, programs: int) -> None:
    header = prompts(1, seed=9)[0] * 9

    def run(seed: int) -> list:
        dice = random.Random(seed)
        served = engine(policy_for(loop), loop)

        async def program(index: int) -> list:
            made, asked = [], [*header, 7, index + 8]
            try:
                for turn in range(4):  # contexts that grow: prefixes are found again, or not, whatever the timing
                    await asyncio.sleep(dice.choice([0, 0.0005, 0.003]) if seed else 0)
                    made.append(await served.generate(request(asked, 10 * index + turn, max_tokens=4 + index)))
                    asked = [*asked, *made[-1].ids, *prompts(1, seed=turn)[0]]
            finally:
                served.leave()
            return made

        async def everything() -> list:
            for _ in range(programs):
                served.enter()
            return list(await asyncio.gather(*(program(index) for index in range(programs))))

        return asyncio.run(everything())

    first = run(0)
    assert all(run(seed) == first for seed in (1, 2, 3, 4))  # log-probabilities to the last bit


@pytest.mark.parametrize("loop", LOOPS)
def test_training_mode_and_dropout_are_left_as_they_were(loop: str) -> None:
    policy = get_peft_model(policy_for(loop), LoraConfig(r=4, lora_dropout=0.9, target_modules=["q_proj", "down_proj"]))
    for name, parameter in policy.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    policy.train()
    policy.get_output_embeddings().eval()
    modes = [module.training for module in policy.modules()]
    asked = [request(prompt, index) for index, prompt in enumerate(prompts(3))]
    made = generate(engine(policy, loop), asked)
    assert [module.training for module in policy.modules()] == modes
    policy.eval()
    for one, completion in zip(asked, made, strict=True):
        assert completion.logprobs == pytest.approx(recomputed(policy, one, completion), abs=2e-5)


@pytest.mark.parametrize("loop", LOOPS)
def test_weights_are_never_stale(loop: str) -> None:
    policy = policy_for(loop)
    served = engine(policy, loop)
    asked = [request([5, 6, 7], 0, max_tokens=8), request([5, 6, 7], 1, max_tokens=8)]
    generate(served, asked)
    for version, change in enumerate(("in place", "data", "replaced"), start=1):
        generator = torch.Generator().manual_seed(version)
        with torch.no_grad():
            for parameter in policy.parameters():
                noise = 0.1 * torch.randn(parameter.shape, generator=generator)
                if change == "in place":
                    parameter.add_(noise)
                elif change == "data":
                    parameter.data.add_(noise)
                else:
                    parameter.data = parameter.data + noise
        served.set_version(version)
        for one, made in zip(asked, generate(served, asked), strict=True):
            assert made.policy_version == version
            assert made.logprobs == pytest.approx(recomputed(policy, one, made), abs=2e-5)


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize(
    ("dtype", "most_copied"), [(torch.float32, 2**30), (torch.float32, 0), (torch.bfloat16, 2**30)]
)
def test_each_module_speaks_with_its_own_adapter(
    loop: str, dtype: torch.dtype, most_copied: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(architecture, "MOST_COPIED", most_copied)
    settings = LoraConfig(r=4, target_modules=["q_proj", "down_proj", "gate_proj"])
    policy = get_peft_model(policy_for(loop, scale=0.2).to(dtype), settings, adapter_name="one")
    policy.add_adapter("two", settings)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "lora_" in name:
                parameter.requires_grad_(True)
            if "lora_B" in name:
                parameter.normal_(std=0.3)
    policy.eval()
    modules = {"asker": "one", "reader": "two", "writer": "one"}
    served = engine(policy, loop, adapters=modules)
    asked = [
        replace(request(prompt, index, max_tokens=3 + index), module=("asker", "reader", "writer")[index % 3])
        for index, prompt in enumerate(prompts(9))
    ]
    made = generate(served, asked)
    assert policy.active_adapters == ["one"]
    assert all(parameter.requires_grad == ("lora_" in name) for name, parameter in policy.named_parameters())
    exact = dtype == torch.float32
    for one, completion in zip(asked, made, strict=True):
        policy.set_adapter(modules[one.module])
        gap = np.abs(np.array(recomputed(policy, one, completion)) - np.array(completion.logprobs)).max()
        policy.set_adapter("two" if modules[one.module] == "one" else "one")
        other = np.abs(np.array(recomputed(policy, one, completion)) - np.array(completion.logprobs)).max()
        assert gap < (2e-5 if exact else 0.2)
        assert other > 5 * gap

    async def unknown() -> None:
        await served.generate(replace(asked[0], module="judge"))

    with pytest.raises(EngineFailure, match="module 'judge' has no adapter"):
        asyncio.run(unknown())


@pytest.mark.parametrize(("most_copied", "shared"), [(0, True), (2**30, False)])
def test_adapters_of_a_large_model_share_its_fused_weights(
    most_copied: int, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(architecture, "MOST_COPIED", most_copied)
    settings = LoraConfig(r=4, target_modules=["q_proj", "down_proj"])
    policy = get_peft_model(model(), settings, adapter_name="one")
    policy.add_adapter("two", settings)
    decoder: Any = engine(policy.eval(), "own", adapters={"asker": "one", "reader": "two"}).decoder
    decoder.start(0)
    first, second = (decoder.loops[name].weights.layers[0] for name in ("one", "two"))
    for part in ("qkv", "down"):
        one, two = getattr(first, part), getattr(second, part)
        assert (one.weight.data_ptr() == two.weight.data_ptr()) == shared
        assert (one.low is not None) == (two.low is not None) == shared


def test_a_token_with_an_inactive_adapter_walks_no_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = get_peft_model(model(), LoraConfig(r=4, target_modules=["q_proj"]), adapter_name="one")
    policy.add_adapter("two", LoraConfig(r=4, target_modules=["q_proj"]))
    before = {name: parameter.requires_grad for name, parameter in policy.named_parameters()}
    loop = HFLoop(policy, "two")
    loop.start()
    with torch.no_grad(), monkeypatch.context() as patch:
        loop.prefill([row(range(5, 12))])
        for walk in ("parameters", "modules", "named_modules"):
            patch.setattr(type(policy), walk, lambda *_, **__: pytest.fail("the whole model was walked"))
        loop.step([3])
    loop.stop()
    assert policy.active_adapters == ["one"]
    assert {name: parameter.requires_grad for name, parameter in policy.named_parameters()} == before


@pytest.mark.parametrize("keeps", [True, False])
def test_what_prompts_share_is_kept_between_requests_that_come_one_by_one(
    keeps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = engine(model(), "own")
    (own,) = served.decoder.loops.values()
    assert isinstance(own, NativeLoop)
    seen = forwarded(own, monkeypatch)
    header = [2 + i % 90 for i in range(100)]

    async def one_by_one() -> list[Completion]:
        made = []
        for index in range(4):
            served.enter()
            made.append(await served.generate(request([*header, 7, index], index, max_tokens=4)))
            served.leave()
        return made

    with served.prefix_cache_kept() if keeps else nullcontext():
        made = asyncio.run(one_by_one())
        # The second finds out what is shared; from the third on it is there.
        # The first is the check of the decoder; the third finds what the second shares with the one before.
        assert seen == ([51, 102, 101, 1, 1, 1] if keeps else [51, 102, 102, 102, 102])
        assert len(own._store) == (1 if keeps else 0)
    assert len(own._store) == 0
    assert [one.ids for one in made] == [one.ids for one in asyncio.run(one_by_one())]


def test_a_new_version_in_mid_batch_is_refused() -> None:
    served = engine(model())

    async def clash() -> None:
        task = asyncio.create_task(served.generate(request([5], 0, max_tokens=200)))
        while not served.active:
            await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="while the engine was generating"):
            served.set_version(1)
        task.cancel()

    asyncio.run(clash())
