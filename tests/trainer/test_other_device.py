"""A rehearsal for accelerators: on PyTorch's `meta` device a tensor that was made on another device is an error.

No GPU is here. `meta` tensors have shapes, dtypes and a device, and no values: what mixes devices or reads values where
it must not fails, as it would on a GPU. Kernels, memory and speed are not rehearsed (docs/hardware.md).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mmrl.engines.embedded import shared_prefix
from mmrl.engines.embedded.attended import AttendedLoop
from mmrl.engines.embedded.decode import NativeLoop
from mmrl.models.attending import install
from mmrl.trainer import tree_attention
from mmrl.trainer.logprobs import score
from mmrl.trainer.objective import token_loss
from mmrl.trainer.packing import make_packs
from mmrl.trainer.varlen_attention import varlen_calls
from tests.engines.test_attended import served
from tests.engines.test_decode import build, row
from tests.helpers.trainer_cases import make_calls, tiny_model
from tests.trainer.test_tree_windows import FAMILIES

META = torch.device("meta")


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "lora", "lora-bfloat16", "gemma2", "gemma3", "olmo3"])
@pytest.mark.parametrize("least", [1, 1 << 40], ids=["prefixes shared", "copied"])
def test_decoding_stays_on_the_models_device(name: str, least: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_prefix, "LEAST_TOKENS", 8)
    monkeypatch.setattr(shared_prefix, "LEAST_BYTES", {"cpu": least, "gpu": least})
    if name in FAMILIES:  # what its layers attend to is looked at where there are values
        own: Any = AttendedLoop(policy := served(name, 9))
        policy.to(META)
    else:
        own = NativeLoop(build(name).to(META))
    with torch.no_grad():
        own.start()
        made = [own.prefill([row([3] * 20)] * 3 + [row([4] * 30), row([3] * 19 + [7])])]
        made += [own.step([1, 2, 3, 4, 5]) for _ in range(70)]
        own.keep([0, 2, 3])
        made += [own.step([1, 2, 3]), own.prefill([row([4] * 33)]), own.step([1, 2, 4, 4])]
    assert all(logits.device == META for logits in made)
    assert [len(logits) for logits in made[-3:]] == [3, 1, 4]
    assert bool(own._groups) == (least == 1)


@pytest.mark.parametrize("window", [None, 3])
def test_stretches_of_a_pack_are_on_the_models_device(window: int | None) -> None:
    pack = make_packs(make_calls(), 10**6, beta=0.1, modules=["a", "b"], score_all=True, tries=True)[0]
    assert pack.tree is not None
    for call in varlen_calls(pack.tree.spans, window, META):
        tensors = [part for part in call if isinstance(part, torch.Tensor)]
        assert len(tensors) >= 2
        assert all(part.device == META for part in tensors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_update_of_tries_stays_on_the_models_device(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to FlexAttention's kernel, which is not for `meta`; what it is given is."""

    def kernel(
        query: Any,
        key: Any,
        value: Any,
        score_mod: Any,
        block_mask: Any,
        scale: float,
        enable_gqa: bool,
        kernel_options: Any,
        return_aux: Any,
    ) -> torch.Tensor:
        assert score_mod is return_aux is None
        assert kernel_options == {"FORCE_USE_FLEX_ATTENTION": True}  # the other kernel failed on an H200
        assert block_mask.kv_indices.device == query.device == key.device == value.device == META
        assert query.dtype == key.dtype == value.dtype == dtype
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, scale=scale, enable_gqa=enable_gqa)

    monkeypatch.setattr(tree_attention, "_flex_kernel", lambda compiled: kernel)
    monkeypatch.setattr(torch.Tensor, "unique", lambda positions: positions)  # which depends on values
    policy = tiny_model(dtype=dtype)
    install(policy)
    policy = policy.to(META)
    packs = make_packs(make_calls(), 60, beta=0.1, modules=["a", "b"], dtype=torch.float32, score_all=False, tries=True)
    assert len(packs) > 1
    for pack in packs:
        there = pack.to(META)
        scores = score(policy, policy.get_output_embeddings(), there, 1.0, entropy=True)
        at = there.entry_index
        loss = token_loss(
            scores.logprobs[at], there.sampled[at], there.known_ref[at], there.advantages, there.weights, 0.2, None, 0.1
        )
        loss.loss.backward()
    gradients = [parameter.grad for parameter in policy.parameters() if parameter.requires_grad]
    assert all(gradient is not None and gradient.device == META for gradient in gradients)
