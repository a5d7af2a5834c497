"""Model facts for the native decoder: the architectures it serves, and their weights in fused form.

Between a Hugging Face module, which the trainer changes in place, and `decode`, which multiplies. `Weights.refresh`
reads every weight anew; it runs at the start of each burst, so that nothing stale can be served however the weights
were changed (an in-place step, `.data`, a new tensor, a merged or switched-off adapter).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mmrl.models.linear import OneDnnLinear, onednn
from mmrl.models.load import causal_lm, unknown_layers

if TYPE_CHECKING:
    from peft.tuners.lora import Linear as LoraLinear
    from transformers import LlamaForCausalLM
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm
    from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3RMSNorm

PLAIN = (nn.Linear, OneDnnLinear)
"""Linear layers that the fused products stand for."""
MOST_COPIED = 2**30
"""Bytes of a model's projections up to which each of several adapters has a copy of them with its updates added."""


def unsupported(model: nn.Module) -> str | None:
    """Return the reason why the native decoder cannot serve this model, or None."""
    causal = cast("LlamaForCausalLM", causal_lm(model))
    if (reason := unknown_layers(causal)) is not None:
        return reason
    if causal is not model and type(getattr(model, "base_model", None)).__name__ != "LoraModel":
        return "its adapter is not LoRA"
    if causal.config.hidden_act != "silu":
        return f"its activation is '{causal.config.hidden_act}'"
    if type(causal.model.embed_tokens) is not nn.Embedding:
        return "its embedding is not a plain one"
    parameters = dict(causal.named_parameters())
    devices = {str(parameter.device) for parameter in parameters.values()}
    if len(devices) > 1:
        return f"its weights lie on several devices ({', '.join(sorted(devices))})"
    # Adapters may be float32 beside a bfloat16 base (peft's default); the products take care of that.
    types = {str(parameter.dtype) for name, parameter in parameters.items() if "lora_" not in name}
    if len(types) > 1:
        return f"its weights are of several types ({', '.join(sorted(types))})"
    return next((reason for module in _linears(causal) if (reason := _odd(module)) is not None), None)


def _linears(causal: LlamaForCausalLM) -> list[nn.Module]:
    linears: list[nn.Module] = [causal.lm_head]
    for layer in _decoder_layers(causal):
        attention, mlp = layer.self_attn, layer.mlp
        linears += [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj]
        linears += [mlp.gate_proj, mlp.up_proj, mlp.down_proj]
    return linears


def _decoder_layers(causal: LlamaForCausalLM) -> list[LlamaDecoderLayer]:
    return [cast("LlamaDecoderLayer", layer) for layer in causal.model.layers]


def _base(source: nn.Module) -> nn.Linear:
    """Return the plain linear layer, inside a LoRA layer or not."""
    return cast(nn.Linear, getattr(source, "base_layer", source))


def _odd(module: nn.Module) -> str | None:
    """Return the reason why a projection is neither a plain linear layer nor one with plain LoRA, or None."""
    if type(module) in PLAIN:
        return None
    if not type(module).__module__.startswith("peft.tuners.lora") or type(module).__name__ != "Linear":
        return f"it has a {type(module).__module__}.{type(module).__name__} layer"
    if type(_base(module)) not in PLAIN:
        return f"its LoRA wraps a {type(_base(module)).__name__} layer"
    lora = cast("LoraLinear", module)
    if lora.lora_variant or any(lora.lora_bias.values()) or lora.fan_in_fan_out:
        return "its LoRA is a variant (DoRA or the like)"
    return None


class Linear:
    """Matrix product in place of several projections of the same input, their LoRA updates included.

    In float32 the updates are added into a private copy of the weights; in half precision they are applied beside
    them, since a small update would be lost in the rounding of the sum, and so they are where each of several adapters
    would need a large copy.

    Args:
        sources: the projections, in the order of the output's columns.
        scale_by: the norm before them, whose weight can be folded into the columns (float32 only).
        adapter: the LoRA adapter to apply; None: whichever is active.
        base: the same product with another adapter, refreshed before this one: with updates beside the weights both use
            its weights.
        merge: add updates into the weights where these are float32.
    """

    def __init__(
        self,
        sources: list[nn.Module],
        scale_by: LlamaRMSNorm | None = None,
        adapter: str | None = None,
        base: Linear | None = None,
        merge: bool = True,
    ):
        self.sources = sources
        self.merge = merge
        self.adapter = adapter
        self.base = base
        self.scale_by = scale_by
        self.folded = False
        self.weight: Tensor = torch.empty(0)
        self.transposed: Tensor = self.weight
        self.bias: Tensor | None = None
        self.low: Tensor | None = None
        self.high: Tensor | None = None
        self._buffer: Tensor | None = None
        # As the model itself multiplies (`model.matmul`).
        self.product: Callable[[Tensor, Tensor, Tensor | None], Tensor] = (
            onednn if isinstance(_base(sources[0]), OneDnnLinear) else F.linear
        )

    def refresh(self) -> None:
        """Read the sources anew."""
        bases = [_base(source) for source in self.sources]
        updates = [_updates(source, self.adapter) for source in self.sources]
        # In float32 a sum of weight and update is as good as two products, and one product is cheaper. In bfloat16 the
        # sum would round most of a small update away, so it is applied beside the weights (`_beside`).
        full = bases[0].weight.dtype == torch.float32 and self.merge
        self.folded = full and self.scale_by is not None
        # A private copy is made only where the weights change or are put side by side: the trainer's stay untouched.
        copied = len(bases) > 1 or self.folded or (full and any(updates))
        if self.base is not None and not full:
            self.weight = self.base.weight
        else:
            self.weight = self._copy([base.weight for base in bases]) if copied else bases[0].weight.detach()
        self.low = self.high = None
        if any(updates) and full:
            parts = self.weight.split([base.out_features for base in bases])
            for part, pairs in zip(parts, updates, strict=True):
                for low, high, scaling in pairs:
                    part.addmm_(high, low, alpha=scaling)
        elif any(updates):
            self._beside(bases, updates)
        if self.folded and self.scale_by is not None:  # (out, in) times (in,): a norm's weight scales the input columns
            self.weight.mul_(self.scale_by.weight)
        self.transposed = self.weight.t()
        biases: list[Tensor] = [
            torch.zeros_like(base.weight[:, 0]) if base.bias is None else base.bias for base in bases
        ]
        self.bias = torch.cat(biases) if any(base.bias is not None for base in bases) else None

    def _copy(self, weights: list[Tensor]) -> Tensor:
        shape = (sum(weight.shape[0] for weight in weights), weights[0].shape[1])
        # The buffer of the last time where it fits: an update changes values, not shapes.
        old = self._buffer
        if old is None or old.shape != shape or old.dtype != weights[0].dtype or old.device != weights[0].device:
            self._buffer = torch.empty(shape, dtype=weights[0].dtype, device=weights[0].device)
        assert self._buffer is not None
        torch.cat(weights, out=self._buffer)
        return self._buffer

    def _beside(self, bases: list[nn.Linear], updates: list[list[tuple[Tensor, Tensor, float]]]) -> None:
        """Merge all updates into a pair of matrices: (ranks, in) and (out, ranks), the latter block by block."""
        self.low = low = torch.cat([low for pairs in updates for low, _, _ in pairs])
        blocks = [
            torch.cat([low.new_zeros(base.out_features, 0), *(high * scaling for _, high, scaling in pairs)], dim=1)
            for base, pairs in zip(bases, updates, strict=True)
        ]
        self.high = torch.block_diag(*blocks)

    def __call__(self, x: Tensor, rows: slice | None = None) -> Tensor:
        """Multiply (N, in) -> (N, out), or only the output columns `rows`."""
        weight, bias, high = self.weight, self.bias, self.high
        if rows is not None:
            weight = weight[rows]
            bias = None if bias is None else bias[rows]
            high = None if high is None else high[rows]
        y = self.product(x, weight, bias)
        if self.low is not None and high is not None:
            y = (y + F.linear(F.linear(x.to(self.low.dtype), self.low), high)).to(y.dtype)
        return y

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """Return residual + self(x)."""
        # One kernel for product and residual instead of two passes over the result.
        if self.bias is None and self.low is None and self.product is F.linear:
            return torch.addmm(residual, x, self.transposed)
        return residual + self(x)


def _updates(source: nn.Module, adapter: str | None) -> list[tuple[Tensor, Tensor, float]]:
    """Return (A, B, scaling) of the LoRA updates that a forward of this layer with this adapter would add now."""
    lora = cast("LoraLinear", source)
    if not hasattr(source, "base_layer") or lora.disable_adapters or lora.merged:
        return []
    names = [adapter] if adapter is not None else lora.active_adapters
    matrices = [
        (cast(nn.Linear, lora.lora_A[name]).weight, cast(nn.Linear, lora.lora_B[name]).weight, lora.scaling[name])
        for name in names
        if name in lora.lora_A
    ]
    return [(low.detach(), high.detach(), scaling) for low, high, scaling in matrices]


class Norm:
    """x / rms(x), times the weight unless that is folded into the product that follows."""

    def __init__(self, module: LlamaRMSNorm, then: Linear | None = None):
        self.module = module
        self.then = then
        self.eps = float(module.variance_epsilon)
        self.weight: Tensor | None = None
        self._eps_like = torch.empty(0)

    def refresh(self) -> None:
        """Read the weight anew."""
        weight = self.module.weight.detach()
        self.weight = None if self.then is not None and self.then.folded else weight
        self._eps_like = torch.tensor(self.eps, device=weight.device)

    def __call__(self, x: Tensor) -> Tensor:
        """Normalize (..., H) -> (..., H); computed in float32 as the model does."""
        if x.dtype != torch.float32:
            return F.rms_norm(x, x.shape[-1:], self.weight, self.eps)
        return scaled(x, self._eps_like) if self.weight is None else scaled(x, self._eps_like) * self.weight


def scaled(x: Tensor, eps: Tensor) -> Tensor:
    """Compute x / sqrt(mean(x²) + eps) over the last axis, in three small operations."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x * torch.addcmul(eps, norm, norm, value=1 / x.shape[-1]).rsqrt_()


@dataclass(slots=True)
class Layer:
    """Decoder layer in fused form."""

    before_attention: Norm
    qkv: Linear
    out: Linear
    before_mlp: Norm
    gate_up: Linear
    down: Linear
    qk_norms: tuple[Qwen3RMSNorm, Qwen3RMSNorm] | None
    """q_norm and k_norm, where the model has them."""
    qk_weight: Tensor | None = None
    """(heads + kv heads, head_dim): their weights, head by head."""
    qk_eps: float = 0.0
    qk_eps_like: Tensor | None = None


class Weights:
    """A model's weights for the native decoder. `unsupported(model)` must be None.

    Args:
        model: the causal LM, wrapped by peft or not.
        adapter: the LoRA adapter to apply; None: whichever is active when the weights are read.
        base: the weights with another adapter; always refreshed before these.
    """

    def __init__(self, model: nn.Module, adapter: str | None = None, base: Weights | None = None):
        causal = cast("LlamaForCausalLM", causal_lm(model))
        config = causal.config
        self.causal = causal
        self.heads: int = config.num_attention_heads
        self.kv_heads: int = config.num_key_value_heads or config.num_attention_heads
        copied = sum(_base(source).weight.nbytes for source in _linears(causal))
        merge = adapter is None or copied <= MOST_COPIED
        self.layers: list[Layer] = [
            _layer(module, adapter, base.layers[index] if base is not None else None, merge)
            for index, module in enumerate(_decoder_layers(causal))
        ]
        self.head_dim: int = _decoder_layers(causal)[0].self_attn.head_dim
        self.norm = Norm(causal.model.norm)
        self.head: Linear = Linear([causal.lm_head], None, adapter, base.head if base is not None else None, merge)
        self.by_onednn: bool = self.head.product is onednn
        self.embedding: Tensor = torch.empty(0)
        self.angles: tuple[Tensor, Tensor] | None = None

    def refresh(self) -> None:
        """Read all weights anew."""
        self.embedding = self.causal.model.embed_tokens.weight.detach()
        for layer in self.layers:
            for part in (layer.qkv, layer.out, layer.gate_up, layer.down, layer.before_attention, layer.before_mlp):
                part.refresh()
            if layer.qk_norms is not None:
                q_norm, k_norm = layer.qk_norms
                layer.qk_weight = torch.cat(
                    [q_norm.weight.detach().expand(self.heads, -1), k_norm.weight.detach().expand(self.kv_heads, -1)]
                )
                layer.qk_eps = float(q_norm.variance_epsilon)
                layer.qk_eps_like = torch.tensor(layer.qk_eps, device=self.embedding.device)
        self.norm.refresh()
        self.head.refresh()
        if self.angles is not None and self.angles[0].device != self.embedding.device:
            self.angles = None

    def rope(self, length: int) -> tuple[Tensor, Tensor]:
        """Return cos and signed sin, (T, head_dim), T >= `length` positions: rotated x = x·cos + roll(x, half)·sin."""
        if self.angles is None or self.angles[0].shape[0] < length:
            positions = torch.arange(max(256, 1 << (length - 1).bit_length()), device=self.embedding.device)
            cos, sin = self.causal.model.rotary_emb(self.embedding[:1], positions.unsqueeze(0))
            # Powers of two, so that a growing context asks for new angles a few times only. The model's own module
            # makes them: RoPE kinds differ in the frequencies, not in how the angles are used.
            half = self.head_dim // 2
            self.angles = cos[0], torch.cat([-sin[0, :, :half], sin[0, :, half:]], dim=-1)
        return self.angles


def _layer(module: LlamaDecoderLayer, adapter: str | None, base: Layer | None, merge: bool) -> Layer:
    attention, mlp = module.self_attn, module.mlp
    qwen = cast("Qwen3Attention", attention)

    def linear(sources: list[nn.Module], shared: Linear | None, scale_by: LlamaRMSNorm | None = None) -> Linear:
        return Linear(sources, scale_by, adapter, shared, merge)

    qkv = linear(
        [attention.q_proj, attention.k_proj, attention.v_proj], base.qkv if base else None, module.input_layernorm
    )
    gate_up = linear([mlp.gate_proj, mlp.up_proj], base.gate_up if base else None, module.post_attention_layernorm)
    return Layer(
        before_attention=Norm(module.input_layernorm, qkv),
        qkv=qkv,
        out=linear([attention.o_proj], base.out if base else None),
        before_mlp=Norm(module.post_attention_layernorm, gate_up),
        gate_up=gate_up,
        down=linear([mlp.down_proj], base.down if base else None),
        qk_norms=(qwen.q_norm, qwen.k_norm) if hasattr(attention, "q_norm") else None,
    )
