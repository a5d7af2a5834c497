"""Sizes of a model without its weights: of what its `config.json` builds, or from a table of those in `conf/model`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mmrl.config.schema import ALL_LINEAR, ModelConfig
from mmrl.errors import ConfigError, refuse
from mmrl.models.adapter import experts_of, targets_of
from mmrl.models.load import built, local_path
from mmrl.models.report import quiet
from mmrl.store.policy import gone_problems


@dataclass(frozen=True, slots=True)
class Shape:
    """A decoder with grouped-query attention and a gated MLP, or one that costs as much."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    """The MLP's width; where a token is sent to some experts alone, that of these together."""
    vocab: int
    tied: bool = False
    """Input and output embeddings are one matrix."""
    idle: int = 0
    """Parameters of the experts that a token is not sent to."""
    adapter_width: int | None = None
    """Inputs and outputs of all that an adapter is put on, summed; None: by `projections`."""
    adapters: int = 1
    """Adapters that a run trains, with LoRA: one for all modules, or more with `model.modules`."""
    copies: int = 0
    """Frozen copies of the whole model that act beside the policy (`algo.frozen_serving` without LoRA)."""
    teachers: tuple[tuple[Shape | None, tuple[str, ...]], ...] = ()
    """Models that score the calls of some modules (`algo.distill`); None: this one, or as it was at the start."""

    @property
    def block_parameters(self) -> int:
        """Parameters of the layers that a token is multiplied with."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.intermediate)

    @property
    def layer_parameters(self) -> int:
        """Number of parameters of the layers, norms left out."""
        return self.block_parameters + self.idle

    @property
    def parameters(self) -> int:
        """Number of parameters, norms left out."""
        return self.layer_parameters + self.vocab * self.hidden * (1 if self.tied else 2)

    def kv_bytes(self, width: int) -> int:
        """Return the bytes of keys and values of one token at `width` bytes a number."""
        return 2 * self.layers * self.kv_heads * self.head_dim * width

    def adapted(self, targets: tuple[str, ...]) -> list[tuple[int, int]]:
        """Return the inputs and outputs of a layer's projections that an adapter on `targets` is of."""
        sizes = self.projections()
        return [sizes[target] for target in (sizes if targets == (ALL_LINEAR,) else targets) if target in sizes]

    def lora_parameters(self, rank: int, targets: tuple[str, ...]) -> int:
        """Return the parameters of one LoRA adapter of `rank` on the projections `targets`."""
        width = self.layers * sum(map(sum, self.adapted(targets))) if self.adapter_width is None else self.adapter_width
        return rank * width

    def projections(self) -> dict[str, tuple[int, int]]:
        """Return name -> inputs and outputs of each linear layer of a decoder layer."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "q_proj": (self.hidden, queries),
            "k_proj": (self.hidden, keys),
            "v_proj": (self.hidden, keys),
            "o_proj": (queries, self.hidden),
            "up_proj": (self.hidden, self.intermediate),
            "gate_proj": (self.hidden, self.intermediate),
            "down_proj": (self.intermediate, self.hidden),
        }

    def activation_bytes(self, width: int, checkpointed: bool, dropped: tuple[str, ...] = ()) -> int:
        """Return the bytes stored for the backward per token.

        That is everything it reads, or each layer's input and the whole of the layer that is being recomputed. An
        adapter with dropout on the projections `dropped` stores a copy of the input of each.
        """
        layer = 8 * self.hidden + 3 * self.intermediate + sum(inputs for inputs, _ in self.adapted(dropped))
        return (self.layers * self.hidden + layer if checkpointed else self.layers * layer) * width


KNOWN = {
    # layers, hidden, heads, KV heads, head's size, MLP, vocabulary
    "HuggingFaceTB/SmolLM2-135M-Instruct": Shape(30, 576, 9, 3, 64, 1536, 49152, tied=True),
    "Qwen/Qwen3-8B": Shape(36, 4096, 32, 8, 128, 12288, 151936),
    "meta-llama/Llama-3.1-8B-Instruct": Shape(32, 4096, 32, 8, 128, 14336, 128256),
    "Qwen/Qwen2.5-7B": Shape(28, 3584, 28, 4, 128, 18944, 152064),
    "Qwen/Qwen2.5-7B-Instruct": Shape(28, 3584, 28, 4, 128, 18944, 152064),
    "Qwen/Qwen2.5-72B-Instruct": Shape(80, 8192, 64, 8, 128, 29568, 152064),
}
"""Hub id -> shape, from the models' published `config.json`."""


CHOSEN_EXPERTS = ("num_experts_per_tok", "top_k_experts", "moe_topk", "moe_top_k", "moe_k")
"""Names that configs of transformers have for the number of experts that a token is sent to."""


def shape_of(model: ModelConfig) -> Shape:
    """Return the shape of a model: of what a folder's `config.json` builds, else from the table.

    Raises:
        ConfigError: a hub id that is not in the table and not on this machine; as `models.load.load_model`.
    """
    if (Path(local_path(model.path)) / "config.json").is_file():
        return built_shape(model)
    refuse(gone_problems("model.path", model.path))
    if model.path in KNOWN:
        return KNOWN[model.path]
    raise ConfigError(
        f"model.path: mmrl plan does not know the sizes of '{model.path}'; give a folder that has its config.json, "
        f"or one of {', '.join(KNOWN)}"
    )


def built_shape(model: ModelConfig) -> Shape:
    """Return the shape of the text part of the model that a config builds, counted without a number in it.

    Raises:
        ConfigError: as `models.load.load_model` by its config and adapter alone.
    """
    from peft import get_peft_model

    bare = built(model)
    config: Any = bare.config.get_text_config()
    of_layers = getattr(config, "per_layer_config", None) or [config]

    def most(name: str) -> int:
        return max(getattr(part, name, None) or 0 for part in of_layers)

    outer = {bare.get_input_embeddings().weight, bare.get_output_embeddings().weight}
    layers = sum(weight.numel() for weight in bare.get_decoder().parameters() if weight not in outer)
    experts: list[Any] = [bare.get_parameter(name) for name in experts_of(bare)]  # each (experts, …, …)
    chosen = next((getattr(config, name) for name in CHOSEN_EXPERTS if hasattr(config, name)), None)
    heads = most("num_attention_heads")  # 0: no attention, no cache that grows
    shape = Shape(
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        heads=heads,
        kv_heads=most("num_key_value_heads") or heads,
        head_dim=most("head_dim") or config.hidden_size // max(1, heads),
        intermediate=0,
        vocab=config.vocab_size,
        tied=len(outer) == 1,
        idle=sum(weight.numel() // len(weight) * (len(weight) - (chosen or len(weight))) for weight in experts),
    )
    # Whatever the layers are made of: as wide an MLP as costs what they do.
    rest = layers - shape.layer_parameters
    shape = replace(shape, intermediate=round(rest / (3 * shape.layers * shape.hidden)))
    if (lora := model.lora) is None:
        return shape
    with quiet():
        adapted = get_peft_model(bare, targets_of(bare, lora).peft_config(lora))
    trained = sum(weight.numel() for weight in adapted.parameters() if weight.requires_grad)
    return replace(shape, adapter_width=trained // lora.r)
