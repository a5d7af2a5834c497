"""The loop that serves any Hugging Face causal LM: its own forward, left-padded, with the cache it makes itself.

Under `RowDecoder`; the fallback of `decode`, which is faster and knows fewer architectures.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from mmrl.engines.embedded.rows import Row


class HFLoop:
    """Implements `mmrl.engines.embedded.decoder.Loop` by `model(...)`; a batch is decoded to its end
    before the next begins.

    Args:
        model: a causal LM, wrapped by peft or not. Generation runs in eval mode; each submodule's mode is put back
            when a burst ends.
        adapter: the peft adapter to generate with; None: whichever is active. Which one is active, and which
            parameters take gradients, is as before after each forward.
    """

    refills = False

    def __init__(self, model: torch.nn.Module, adapter: str | None = None):
        self.model = model
        self.adapter = adapter
        inner: Any = model
        if hasattr(inner, "get_base_model"):
            inner = inner.get_base_model()
        accepted = inspect.signature(inner.forward).parameters
        self._positions = "position_ids" in accepted
        self._last_only = {"logits_to_keep": 1} if "logits_to_keep" in accepted else {}
        self._training: list[torch.nn.Module] = []
        self._cache: Any = None
        self._mask: torch.Tensor | None = None

    def start(self) -> None:
        """Switch dropout off."""
        self._training = [module for module in self.model.modules() if module.training]
        self.model.eval()

    def stop(self) -> None:
        """Forget the batch; training modes as before."""
        self._cache = self._mask = None
        for module in self._training:
            module.training = True
        self._training = []

    def forget(self) -> None:
        """Nothing is kept between batches."""

    def prefill(self, rows: Sequence[Row]) -> torch.Tensor:
        """See `Loop.prefill`; only with no rows in flight."""
        width = max(len(row.prompt_ids) for row in rows)
        ids = torch.zeros(len(rows), width, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for index, row in enumerate(rows):
            ids[index, width - len(row.prompt_ids) :] = torch.tensor(row.prompt_ids)
            mask[index, width - len(row.prompt_ids) :] = 1
        device = next(self.model.parameters()).device
        self._cache = None
        return self._forward(ids.to(device), mask.to(device))

    def step(self, tokens: Sequence[int]) -> torch.Tensor:
        """See `Loop.step`."""
        assert self._mask is not None
        ids = torch.tensor(tokens, device=self._mask.device).unsqueeze(1)
        return self._forward(ids, torch.cat([self._mask, torch.ones_like(ids)], dim=1))

    def keep(self, indices: Sequence[int]) -> list[int]:
        """See `Loop.keep`."""
        assert self._mask is not None
        if not indices:
            self._cache = self._mask = None
            return []
        chosen = torch.tensor(indices, device=self._mask.device)
        self._mask = self._mask[chosen]
        self._cache.batch_select_indices(chosen)
        return list(indices)

    def _forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        self._mask = mask
        extra: dict[str, Any] = dict(self._last_only)
        if self._positions:
            positions = (mask.cumsum(dim=1) - 1).clamp_(min=0)
            extra["position_ids"] = positions[:, -ids.shape[1] :]
        with using(self.model, self.adapter):
            output = self.model(
                input_ids=ids,
                attention_mask=mask,
                past_key_values=self._cache,
                use_cache=True,
                return_dict=True,
                **extra,
            )
        self._cache = output.past_key_values
        return output.logits[:, -1]


@contextmanager
def using(model: Any, adapter: str | None) -> Iterator[None]:
    """Inside, `adapter` is the model's active one; peft also moves `requires_grad` with it, which is put back."""
    if adapter is None or model.active_adapters == [adapter]:
        yield
        return
    before = list(model.active_adapters)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    model.base_model.set_adapter(adapter)
    try:
        yield
    finally:
        model.base_model.set_adapter(before)
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        for parameter in trained:
            parameter.requires_grad_(True)
