"""Sizes of a model without its weights: from its `config.json`, or from a table of the models in `conf/model`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mmrl.config.schema import ALL_LINEAR, ModelConfig
from mmrl.errors import ConfigError, refuse
from mmrl.models.load import local_path
from mmrl.store.policy import gone_problems
from mmrl.store.rundir import read_object


@dataclass(frozen=True, slots=True)
class Shape:
    """A dense decoder with grouped-query attention and a gated MLP."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    tied: bool = False
    """Input and output embeddings are one matrix."""
    adapters: int = 1
    """Adapters that a run trains, with LoRA: one for all modules, or more with `model.modules`."""
    copies: int = 0
    """Frozen copies of the whole model that act beside the policy (`algo.frozen_serving` without LoRA)."""
    teachers: tuple[tuple[Shape | None, tuple[str, ...]], ...] = ()
    """Models that score the calls of some modules (`algo.distill`); None: this one, or as it was at the start."""

    @property
    def block_parameters(self) -> int:
        """Parameters of the layers, which every token is multiplied with."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.intermediate)

    @property
    def parameters(self) -> int:
        """Number of parameters, norms left out."""
        return self.block_parameters + self.vocab * self.hidden * (1 if self.tied else 2)

    def kv_bytes(self, width: int) -> int:
        """Return the bytes of keys and values of one token at `width` bytes a number."""
        return 2 * self.layers * self.kv_heads * self.head_dim * width

    def adapted(self, targets: tuple[str, ...]) -> list[tuple[int, int]]:
        """Return the inputs and outputs of a layer's projections that an adapter on `targets` is of."""
        sizes = self.projections()
        return [sizes[target] for target in (sizes if targets == (ALL_LINEAR,) else targets) if target in sizes]

    def lora_parameters(self, rank: int, targets: tuple[str, ...]) -> int:
        """Return the parameters of one LoRA adapter of `rank` on the projections `targets`."""
        return self.layers * rank * sum(map(sum, self.adapted(targets)))

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


def shape_of(model: ModelConfig) -> Shape:
    """Return the shape of a model: a folder's `config.json`, else the table.

    Raises:
        ConfigError: a hub id that is not in the table and not on this machine.
    """
    config = Path(local_path(model.path)) / "config.json"
    if config.is_file():
        return read_shape(read_object(config), str(config))
    refuse(gone_problems("model.path", model.path))
    if model.path in KNOWN:
        return KNOWN[model.path]
    raise ConfigError(
        f"model.path: mmrl plan does not know the sizes of '{model.path}'; give a folder that has its config.json, "
        f"or one of {', '.join(KNOWN)}"
    )


def read_shape(content: dict[str, object], source: str) -> Shape:
    """Return the shape from the fields of a Hugging Face `config.json`."""

    def number(name: str, default: int | None = None) -> int:
        value = content.get(name, default)
        if not isinstance(value, int) or value < 1:
            raise ConfigError(f"model.path: {source} has no positive whole number '{name}', so its size is not known")
        return value

    # `head_dim` is written only where it is not hidden / heads (Qwen3).
    heads = number("num_attention_heads")
    return Shape(
        layers=number("num_hidden_layers"),
        hidden=number("hidden_size"),
        heads=heads,
        kv_heads=number("num_key_value_heads", heads),
        head_dim=number("head_dim", number("hidden_size") // heads),
        intermediate=number("intermediate_size"),
        vocab=number("vocab_size"),
        tied=bool(content.get("tie_word_embeddings", False)),
    )
