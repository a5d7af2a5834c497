"""Attention of a causal LM's layers, asked of the model itself: what each one sees, and a function in its place.

Used by the trainer's packed tries and by the embedded engine. Which models they serve is decided by what a layer's
attention gets (`attended_layers`), not by the names of families.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, cast
from weakref import WeakKeyDictionary

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask, sdpa_mask

from mmrl.models.load import causal_lm
from mmrl.models.prepare import exact_by_sdpa

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

IMPLEMENTATION, EAGER = "mmrl_tree", "mmrl_tree_eager"
"""Names of the attention function in transformers' registry, over SDPA and over a model's own attention."""
_PROBE = "mmrl_probe"
_OUTPUTS = {"use_cache", "logits_to_keep", "output_attentions", "output_hidden_states", "output_router_logits"}
_KNOWN = {"dropout", "position_ids", "is_causal", "scaling", "tree", "sliding_window", "softcap", "s_aux", *_OUTPUTS}
"""What attention is told and `attention` knows, or needs not know."""
MaskFunction: TypeAlias = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class AttentionModule(Protocol):
    """The attributes of a layer's attention module that are read."""

    layer_idx: int
    config: PreTrainedConfig


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """Attention of one layer. T new tokens, queries and keys with positions in them."""

    module: AttentionModule
    query: torch.Tensor
    """(B, heads, T, D)"""
    key: torch.Tensor
    """(B, kv heads, T, D)"""
    value: torch.Tensor
    """(B, kv heads, T, D of values)"""
    scale: float
    window: int | None
    """A token sees itself and window - 1 before it; None: all."""
    softcap: float | None
    """Scores s become c · tanh(s / c)."""
    sinks: torch.Tensor | None
    """(heads,) score of a key without a value, one more in each softmax."""


class Attending(Protocol):
    """Argument `tree` of a model's forward: it attends for all layers of this forward."""

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """Return (B, T, heads, D of values)."""


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """What a layer's attention is given."""

    layer: int
    window: int | None
    softcap: float | None
    kv_heads: int
    key_size: int
    value_size: int


def attention(
    module: AttentionModule,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    tree: Attending | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Implement transformers' attention, (B, heads, T, D) to (B, T, heads, D): by `tree`, or without one by SDPA."""
    if tree is None:
        plain, layer = sdpa_attention_forward, cast("torch.nn.Module", module)
        return plain(layer, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs)
    call = AttentionCall(
        module=module,
        # Under autocast, norms and rotary angles may have left queries and keys in float32.
        query=query.to(value.dtype),
        key=key.to(value.dtype),
        value=value,
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=kwargs.get("sliding_window"),
        softcap=kwargs.get("softcap"),
        sinks=kwargs.get("s_aux"),
    )
    return tree.attend(call), None


def _attention_or_eager(
    module: AttentionModule,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    tree: Attending | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Do as `attention`, but without a tree by the model's own function: SDPA would pass over caps and sinks."""
    if tree is not None:
        return attention(module, query, key, value, attention_mask, tree=tree, **kwargs)
    own = sys.modules[type(module).__module__].eager_attention_forward  # where every family has it
    return cast("tuple[torch.Tensor, torch.Tensor]", own(module, query, key, value, attention_mask, **kwargs))


def install(model: torch.nn.Module) -> None:
    """Set a causal LM, wrapped by peft or not, to the attention that knows trees; without one it is as before."""
    AttentionInterface.register(IMPLEMENTATION, attention)
    AttentionInterface.register(EAGER, _attention_or_eager)
    AttentionMaskInterface.register(IMPLEMENTATION, sdpa_mask)
    AttentionMaskInterface.register(EAGER, eager_mask)
    causal = causal_lm(model)
    if (name := {"sdpa": IMPLEMENTATION, "eager": EAGER}.get(str(causal.config._attn_implementation))) is not None:
        causal.set_attn_implementation(name)


class NotPlain(Exception):
    """The reason why a model's attention is not served, in words."""


def attended_layers(model: torch.nn.Module) -> list[LayerAttention]:
    """Forward four tokens and look at what the attention of each layer gets.

    Plain is causal softmax attention, with or without a window, a cap and sinks, in each layer and by transformers'
    interface, of queries and keys whose positions do not depend on a row's length.

    Raises:
        NotPlain: it is another.
    """
    causal = causal_lm(model)
    implementation = str(causal.config._attn_implementation)
    wanted = implementation == "eager" and exact_by_sdpa(causal.config, type(causal))
    if wanted or implementation not in ("sdpa", "eager", IMPLEMENTATION, EAGER):
        raise NotPlain(f"its attention is '{implementation}'")
    _check_positions(causal.config)
    if causal not in _ATTENDED:
        _ATTENDED[causal] = _looked_at(causal)
    return _ATTENDED[causal]


_ATTENDED: WeakKeyDictionary[PreTrainedModel, list[LayerAttention]] = WeakKeyDictionary()
"""What was found: a large model's forward takes seconds on a CPU, and engine and trainer ask of the same one."""


def _looked_at(causal: PreTrainedModel) -> list[LayerAttention]:
    seen: list[tuple[AttentionModule, torch.Tensor, torch.Tensor, torch.Tensor | None, dict[str, Any]]] = []
    masks: list[MaskFunction] = []

    def mask(*_: Any, mask_function: MaskFunction, q_length: int, kv_length: int, **__: Any) -> torch.Tensor:
        # Not a mask: its number, which says which layers get it.
        masks.append(mask_function)
        return torch.full((1, 1, q_length, kv_length), -float(len(masks)))

    def note(
        module: AttentionModule,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        seen.append((module, key, value, attention_mask, kwargs))
        return value.repeat_interleave(query.shape[1] // key.shape[1], 1).transpose(1, 2).contiguous(), None

    AttentionInterface.register(_PROBE, note)
    AttentionMaskInterface.register(_PROBE, mask)
    marker = object()
    ids = torch.zeros(1, 4, dtype=torch.long, device=next(causal.parameters()).device)
    try:
        with torch.no_grad(), _implementation(causal, _PROBE):
            causal(input_ids=ids, use_cache=False, tree=marker)
    except Exception as error:  # whatever the code of an architecture raises on what it does not expect
        reason = f"{type(causal).__name__} does not bear another attention ({type(error).__name__})"
        raise NotPlain(reason) from error
    layers: list[LayerAttention] = []
    for module, key, value, given, told in seen:
        window = told.get("sliding_window")
        unknown = [name for name, part in told.items() if part is not None and name not in _KNOWN]
        if told.get("tree") is not marker:
            raise NotPlain(f"{type(causal).__name__} does not tell its attention what it is called with")
        if not hasattr(sys.modules[type(module).__module__], "eager_attention_forward"):
            raise NotPlain(f"{type(causal).__name__} has no attention of its own to go back to")
        if unknown or told.get("is_causal") is False:
            raise NotPlain(f"its attention has {' and '.join(unknown or ['no order'])}")
        if not _masked_by(given, masks, window):
            raise NotPlain("its tokens do not see all tokens before them, or all of a window")
        layers.append(
            LayerAttention(module.layer_idx, window, told.get("softcap"), key.shape[1], key.shape[-1], value.shape[-1])
        )
    count = causal.config.get_text_config().num_hidden_layers
    order = [layer.layer for layer in layers]
    if None in order or order != sorted(order) or {*order} != {*range(count)}:
        raise NotPlain(f"{type(causal).__name__} has layers that mix tokens otherwise than by one attention each")
    return layers


def _check_positions(config: PreTrainedConfig) -> None:
    parameters = getattr(config.get_text_config(), "rope_parameters", None) or {}
    # By layer type where these differ.
    for kind in (parameters, *(part for part in parameters.values() if isinstance(part, dict))):
        name = str(kind.get("rope_type", ""))
        if "dynamic" in name or name == "longrope":
            raise NotPlain(f"its position encoding '{name}' depends on the length")


@contextmanager
def _implementation(causal: PreTrainedModel, name: str) -> Iterator[None]:
    """Attend by another function inside."""
    before = causal.config._attn_implementation
    causal.set_attn_implementation(name)
    try:
        yield
    finally:
        causal.set_attn_implementation(before)


def _masked_by(given: torch.Tensor | None, masks: list[MaskFunction], window: int | None) -> bool:
    """Return True if the mask that a layer got is the causal one with this window, far beyond the window's end."""
    numbers = [] if given is None else [int(number) for number in given.unique()]
    if len(numbers) != 1 or not -len(masks) <= numbers[0] < 0:
        return False
    wide = window or 32
    keys = torch.arange(3 * wide + 2)
    nothing = torch.zeros((), dtype=torch.long)
    for position in (0, 1, wide - 1, wide, wide + 1, 3 * wide + 1):
        try:
            sees = masks[-numbers[0] - 1](nothing, nothing, torch.tensor(position), keys)
        except (RuntimeError, IndexError):  # it is made for these four tokens alone
            return False
        expected = (keys <= position) & (keys > position - (window or len(keys) + 1))
        if not torch.equal(sees.expand_as(keys), expected):
            return False
    return True
