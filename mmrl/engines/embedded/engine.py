"""The embedded engine: generation in process, from the very module that the trainer trains.

Programs reach it through `rollout.context`; `stages.weights` tells it the policy version after each update.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from mmrl.config import EngineConfig
from mmrl.engines.base import Completion, Engine, Request
from mmrl.engines.embedded.batcher import Batcher
from mmrl.engines.embedded.decoder import Loop, RowDecoder
from mmrl.engines.embedded.rows import Rules, eos_ids
from mmrl.engines.embedded.select import AdapterLoop, choose
from mmrl.models.policy import INITIAL

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class TransformersEngine(Engine):
    """Samples from the trainer's own module, so that weights are never copied between updates.

    Args:
        model: a Hugging Face causal LM, wrapped by peft or not, on the CPU or one GPU. It is shared with the trainer,
            so its weights are always the newest; nothing is copied between updates.
        tokenizer: decodes for stop strings and names the end-of-turn token.
        config: `engine.*`.
        max_context: most tokens of prompt and completion together, at most the model's own limit; None: that limit.
        threads: torch threads of heavy work (`hardware.threads`); None: as torch is set now.
        adapters: module name -> name of the model's LoRA adapter that it speaks with; None: all modules speak with
            what is active.
        initial: another model, never trained, that serves the modules whose name in `adapters` is `INITIAL`; the names
            of the others then stand for `model` as it is, not for LoRA adapters.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        tokenizer: PreTrainedTokenizerBase,
        config: EngineConfig,
        *,
        max_context: int | None = None,
        threads: int | None = None,
        adapters: Mapping[str, str] | None = None,
        initial: torch.nn.Module | None = None,
    ):
        settings: Any = model.config
        if hasattr(settings, "get_text_config"):
            settings = settings.get_text_config()
        limits = [max_context, getattr(settings, "max_position_embeddings", None)]
        limit = min((value for value in limits if value), default=None)
        ends = eos_ids(tokenizer, getattr(model, "generation_config", None))
        loop: Loop
        names = sorted(set(adapters.values())) if adapters is not None else None
        if initial is None:
            loop = choose(model, config.loop, config.batch_tokens, names)
        else:
            served = {name: initial if name == INITIAL else model for name in names or ()}
            loop = AdapterLoop({n: choose(m, config.loop, config.batch_tokens) for n, m in served.items()})
        rules = Rules(tokenizer, ends, settings.vocab_size, limit, adapters)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        self._decoder = RowDecoder(
            loop,
            rules,
            config.batch_tokens,
            threads or torch.get_num_threads(),
            parameters,
        )
        self._batcher = Batcher(self._decoder, config.schedule)

    @property
    def busy_s(self) -> float:
        """Seconds spent decoding so far."""
        return self._batcher.busy_s

    def set_version(self, version: int, state: Mapping[str, torch.Tensor] | None = None) -> None:
        """The weights have changed and are policy `version` now.

        Raises:
            RuntimeError: rows are in flight; their tokens would come from two policies.
        """
        if self._batcher.busy:
            raise RuntimeError("the policy changed while the engine was generating")
        self.policy_version = self._decoder.policy_version = version
        self._decoder.forget()

    def enter(self) -> None:
        """See `Engine.enter`."""
        self._batcher.enter()

    def leave(self) -> None:
        """See `Engine.leave`."""
        self._batcher.leave()

    async def generate(self, request: Request) -> Completion:
        """See `Engine.generate`.

        Raises:
            LengthFailure: the prompt alone fills the context.
            EngineFailure: the request is impossible, or the forward failed.
        """
        self._decoder.rules.check(request)
        return await self._batcher.generate(request)
