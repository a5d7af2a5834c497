"""The loop that serves any Hugging Face causal LM: its own forward, left-padded, with the cache it makes itself.

Under `RowDecoder`; the fallback of `decode`, which is faster and knows fewer architectures.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, cast

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from typing_extensions import override

from mmrl.engines.embedded.batch_rows import BatchRow
from mmrl.models.load import causal_lm

if TYPE_CHECKING:
    from transformers import DynamicCache


class HFLoop:
    """Loop that generates by `model(...)`, for a `RowDecoder`; a batch is decoded to its end before the next begins.

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
        accepted = inspect.signature(causal_lm(model).forward).parameters
        self._positions = "position_ids" in accepted
        # Its name since transformers 5.24; the older one goes with 5.40.
        self._cache_name = "cache" if "cache" in accepted else "past_key_values"
        # Without it a prefill would make logits of all prompt tokens: rows × positions × vocabulary.
        self._last_only = {"logits_to_keep": 1} if "logits_to_keep" in accepted else {}
        self._training: list[torch.nn.Module] = []
        self._cache: DynamicCache | None = None
        self._mask: torch.Tensor | None = None
        self._rows: list[list[int]] = []
        self._layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]

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
        """Do nothing: batches share nothing."""

    def share_all(self) -> None:
        """Do nothing: batches share nothing."""

    def prefill(self, rows: Sequence[BatchRow]) -> torch.Tensor:
        """Do as `NativeLoop.prefill`, only with no rows in flight."""
        width = max(len(row.prompt_ids) for row in rows)
        # Padded on the left, so that the newest token of every row stands in the last column: `logits[:, -1]` is right
        # for all of them, and a step appends one column.
        ids = torch.zeros(len(rows), width, dtype=torch.long)  # (rows, width)
        mask = torch.zeros_like(ids)
        for index, row in enumerate(rows):
            ids[index, width - len(row.prompt_ids) :] = torch.tensor(row.prompt_ids)
            mask[index, width - len(row.prompt_ids) :] = 1
        device = next(self.model.parameters()).device
        self._cache = None
        return self._forward(ids.to(device), mask.to(device))

    def step(self, tokens: Sequence[int]) -> torch.Tensor:
        """See `NativeLoop.step`."""
        assert self._mask is not None
        ids = torch.tensor(tokens, device=self._mask.device).unsqueeze(1)
        return self._forward(ids, torch.cat([self._mask, torch.ones_like(ids)], dim=1))

    def keep(self, indices: Sequence[int]) -> list[int]:
        """See `NativeLoop.keep`."""
        assert self._mask is not None
        if not indices:
            self._cache = self._mask = None
            return []
        rows = torch.tensor(indices, device=self._mask.device)
        self._mask = self._mask[rows]
        cache = self._cache
        assert cache is not None
        # What beam search does: the only way of selecting rows that layers of every kind have, states of recurrent and
        # convolutional layers too.
        cache.reorder_cache(cast("torch.LongTensor", rows))
        return list(indices)

    def _forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Forward the newest columns: (rows, new tokens) ids under a (rows, all tokens) mask -> (rows, V) logits."""
        self._mask = mask
        logits, self._cache = self._call(ids, mask, self._cache)
        return logits

    def _call(
        self, ids: torch.Tensor, mask: torch.Tensor, cache: DynamicCache | None
    ) -> tuple[torch.Tensor, DynamicCache]:
        extra: dict[str, object] = {**self._last_only, self._cache_name: cache}
        if self._positions:
            # Counted over real tokens: padding must not shift the rotary angles of a prompt.
            positions = (mask.cumsum(dim=1) - 1).clamp_(min=0)
            extra["position_ids"] = positions[:, -ids.shape[1] :]
        with self.using_adapter():
            output = self.model(
                input_ids=ids,
                attention_mask=mask,
                use_cache=True,
                return_dict=True,
                **extra,
            )
        return output.logits[:, -1], getattr(output, self._cache_name)

    @contextmanager
    def using_adapter(self) -> Iterator[None]:
        """Make the loop's adapter the active one inside."""
        layers, adapter = self._layers, self.adapter
        if adapter is None or all(layer.active_adapters == [adapter] for layer in layers):
            yield
            return
        # A layer's set_adapter also turns on the gradients of the adapter and off those of the others. Generation
        # happens between two updates, so the trainer's set must be as it was. Of these layers alone: a walk over all
        # parameters would be made for every token.
        before = [list(layer.active_adapters) for layer in layers]
        weights = [
            p for layer in layers for name in layer.adapter_layer_names for p in getattr(layer, name).parameters()
        ]
        trained = [parameter.requires_grad for parameter in weights]
        for layer in layers:
            layer.set_adapter(adapter)
        try:
            yield
        finally:
            for layer, names in zip(layers, before, strict=True):
                layer.set_adapter(names)
            for parameter, flag in zip(weights, trained, strict=True):
                parameter.requires_grad_(flag)


class WholeRows(HFLoop):
    """Loop without a cache: every token is computed from its whole row, as the trainer computes it.

    Slow, a forward of the row so far for each token. It serves models whose cache or whose positions do not bear
    padding on the left, and those that have no cache.
    """

    @override
    def prefill(self, rows: Sequence[BatchRow]) -> torch.Tensor:
        """Only with no rows in flight."""
        self._rows = [list(row.prompt_ids) for row in rows]
        return self._whole()

    @override
    def step(self, tokens: Sequence[int]) -> torch.Tensor:
        for row, token in zip(self._rows, tokens, strict=True):
            row.append(token)
        return self._whole()

    @override
    def keep(self, indices: Sequence[int]) -> list[int]:
        self._rows = [self._rows[index] for index in indices]
        return list(indices)

    def _whole(self) -> torch.Tensor:
        """Forward all rows, padded on the right; returns the (rows, V) logits after each one's last token."""
        lengths = torch.tensor([len(row) for row in self._rows])
        width, least = int(lengths.max()), int(lengths.min())
        ids = torch.tensor([[*row, *[0] * (width - len(row))] for row in self._rows])  # (rows, width)
        # Logits of the columns in which some row ends, where a model can leave the others out.
        last = dict.fromkeys(self._last_only, width - least + 1)
        device = next(self.model.parameters()).device
        with self.using_adapter():
            logits: torch.Tensor = self.model(
                input_ids=ids.to(device), use_cache=False, return_dict=True, **last
            ).logits
        return logits[torch.arange(len(lengths)), (lengths - 1 - (width - logits.shape[1])).to(device)]
