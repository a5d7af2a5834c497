"""The embedded engine: generation in process, from the very module that the trainer trains.

Programs reach it through `rollout.context`; `stages.rl` calls `set_version` after each update. A request waits in
the `Batcher` and becomes a row of `RowDecoder`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from typing_extensions import override

from mmrl.config.engines import TransformersConfig
from mmrl.engines.base import Completion, EngineSetup, Request
from mmrl.engines.embedded.batch_rows import Rules, engine_context
from mmrl.engines.embedded.batcher import Batcher
from mmrl.engines.embedded.row_decoder import RowDecoder
from mmrl.models.chat import eos_ids
from mmrl.models.selfcheck import Way, check_rows, computes_in_half, drawn_adapters
from mmrl.store.policy import INITIAL

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class TransformersEngine(Batcher):
    """Engine that samples from the trainer's own module, so that weights are never copied between updates.

    Args:
        model: a Hugging Face causal LM, wrapped by peft or not, on the CPU or one GPU. It is shared with the trainer,
            so its weights are always the newest; nothing is copied between updates.
        tokenizer: decodes for stop strings and names the end-of-turn token.
        config: `engine.*`.
        setup: limits, threads, and which module speaks with which adapter, or with `setup.initial`: then the names in
            `setup.adapters` stand for models as they are, not for LoRA adapters.
    """

    def __init__(
        self, model: torch.nn.Module, tokenizer: PreTrainedTokenizerBase, config: TransformersConfig, setup: EngineSetup
    ):
        # A wrapper of peft passes attributes on to the model inside.
        causal = cast("PreTrainedModel", model)
        settings = causal.config.get_text_config()
        ends = eos_ids(tokenizer, causal.generation_config)
        initial, names = setup.initial, sorted(set((setup.adapters or {}).values()))
        weights: dict[str, tuple[torch.nn.Module, str | None]] = {"": (model, None)}
        if initial is not None:
            weights = {name: (initial if name == INITIAL else model, None) for name in names}
        elif names:
            weights = {name: (model, name) for name in names}
        self.max_context = engine_context(settings, setup.max_context)
        self.rules = Rules(tokenizer, ends, settings.vocab_size, self.max_context, setup.adapters)
        checked = setup.weights is None or setup.weights.selfcheck
        decoder = RowDecoder(weights, self.rules, config, setup.threads, checked=checked)
        self.ways: list[Way] = []
        """Results of the self-check, by set of weights."""
        if setup.weights is not None and checked:
            rows = check_rows(tokenizer, settings.vocab_size, self.max_context, half=computes_in_half(model))
            with drawn_adapters(model):
                self.ways = [way for name in weights if (way := decoder.check(name, rows)) is not None]
        super().__init__(decoder, config.schedule)
        # A GPU takes other kernels for other sizes of a batch, and rounds another way.
        self.repeats_greedy = next(model.parameters()).device.type == "cpu"

    @override
    async def generate(self, request: Request) -> Completion:
        self.rules.check(request)
        return await super().generate(request)
