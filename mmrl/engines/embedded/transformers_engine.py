"""The embedded engine: generation in process, from the very module that the trainer trains.

Programs reach it through `rollout.context`; `stages.weights` calls `set_version` after each update. `decode_loop` picks
what runs the model: the native decoder where it knows the architecture and agrees with the model's own forward, else
that forward, with a warning.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, cast

import torch

from mmrl.config.engines import TransformersConfig
from mmrl.engines.base import Completion, Engine, Request
from mmrl.engines.embedded.architecture import unsupported
from mmrl.engines.embedded.batch_rows import BatchRow, Rules, context_limit, eos_ids
from mmrl.engines.embedded.batcher import Batcher
from mmrl.engines.embedded.decode import NativeLoop
from mmrl.engines.embedded.hf_loop import HFLoop
from mmrl.engines.embedded.sampling import DecodeLoop, RowDecoder
from mmrl.errors import ConfigError
from mmrl.models.policy import INITIAL

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

LOG = logging.getLogger("mmrl.engines")

CHECKED_TOKENS = 512
"""Longest part of the first prompt that the self-check forwards twice."""
TOLERANCE = {torch.float32: 1e-3}
HALF_TOLERANCE = 0.3
"""Largest difference of two log-probabilities in the self-check: rounding only, float32 and half precision."""


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
        config: TransformersConfig,
        *,
        max_context: int | None = None,
        threads: int | None = None,
        adapters: Mapping[str, str] | None = None,
        initial: torch.nn.Module | None = None,
    ):
        # A wrapper of peft passes attributes on to the model inside.
        causal = cast("PreTrainedModel", model)
        settings = causal.config.get_text_config()
        ends = eos_ids(tokenizer, causal.generation_config)
        loop: DecodeLoop
        names = sorted(set(adapters.values())) if adapters is not None else None
        if initial is None:
            loop = decode_loop(model, config.loop, config.batch_tokens, names)
        else:
            served = {name: initial if name == INITIAL else model for name in names or ()}
            options = config.loop, config.batch_tokens
            loop = AdapterLoop({name: decode_loop(one, *options) for name, one in served.items()})
        self.max_context = context_limit(settings, max_context)
        rules = Rules(tokenizer, ends, settings.vocab_size, self.max_context, adapters)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        self._decoder = RowDecoder(
            loop,
            rules,
            config.batch_tokens,
            threads or torch.get_num_threads(),
            parameters,
        )
        self._batcher = Batcher(self._decoder, config.schedule)
        # A GPU takes other kernels for other sizes of a batch, and rounds another way.
        self.repeats_greedy = next(model.parameters()).device.type == "cpu"

    @property
    def busy_s(self) -> float:
        """Seconds spent decoding so far."""
        return self._batcher.busy_s

    @property
    def computing_s(self) -> float:
        """See `Engine.computing_s`."""
        return self._batcher.computing_s

    def set_version(self, version: int, state: Mapping[str, torch.Tensor] | None = None) -> None:
        """The weights have changed and are policy `version` now.

        Raises:
            RuntimeError: rows are in flight; their tokens would come from two policies.
        """
        # A row in flight has keys and values of the old weights in the cache; more tokens would mix two policies.
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


def decode_loop(
    model: torch.nn.Module,
    choice: str,
    stored_tokens: int = 65536,
    adapters: Sequence[str] | None = None,
) -> DecodeLoop:
    """The loop for `engine.loop` = auto | own | hf.

    Args:
        model: a causal LM.
        stored_tokens: most tokens of shared prefixes that the native decoder stores.
        adapters: names of the adapters that rows may name; None: all rows run with whichever is active.

    Raises:
        ConfigError: `own`, and the native decoder does not know the model.
    """
    native = choice != "hf"
    reason = unsupported(model) if native else None
    if reason is not None:
        if choice == "own":
            raise ConfigError(f"engine.loop: got 'own', which cannot serve this model: {reason}; use auto or hf")
        LOG.warning("engine.loop=auto: the model's own forward generates (slower), since %s", reason)
        native = False
    if adapters is None:
        return CheckedLoop(model, stored_tokens) if native else HFLoop(model)
    # One decoder per adapter; in half precision all of them read the base weights of the first, which is refreshed
    # before the others because `AdapterLoop.start` goes in this order.
    loops: dict[str, DecodeLoop] = {}
    first: NativeLoop | None = None
    for name in sorted(adapters):
        if native:
            checked = CheckedLoop(model, stored_tokens, name, first)
            first = first or checked.native
            loops[name] = checked
        else:
            loops[name] = HFLoop(model, name)
    return AdapterLoop(loops)


class CheckedLoop:
    """The native decoder, compared with the model's forward on the first prompt; where they differ, that forward."""

    def __init__(
        self,
        model: torch.nn.Module,
        stored_tokens: int,
        adapter: str | None = None,
        base: NativeLoop | None = None,
    ):
        self.model = model
        self.adapter = adapter
        self.native = NativeLoop(model, stored_tokens, adapter, base)
        self.loop: DecodeLoop = self.native
        self.checked = False

    @property
    def refills(self) -> bool:
        """See `DecodeLoop.refills`."""
        return self.loop.refills

    def start(self) -> None:
        """See `DecodeLoop.start`."""
        if self.loop is not self.native:  # unused from then on, but another adapter's loop may share its weights
            self.native.weights.refresh()
        self.loop.start()

    def stop(self) -> None:
        """See `DecodeLoop.stop`."""
        self.loop.stop()

    def forget(self) -> None:
        """See `DecodeLoop.forget`."""
        self.loop.forget()

    def prefill(self, rows: Sequence[BatchRow]) -> torch.Tensor:
        """See `DecodeLoop.prefill`."""
        if not self.checked:
            difference, tolerance = self._compare(rows[0])
            self.checked = True
            if not difference <= tolerance:
                LOG.warning(
                    "engine.loop: the native decoder differs from the model's forward by %.2g in a log-probability "
                    "(tolerance %.2g); the model's own forward generates (slower)",
                    difference,
                    tolerance,
                )
                # For the rest of the run: a decoder that is wrong once is wrong for every prompt.
                self.loop.stop()
                self.loop = HFLoop(self.model, self.adapter)
                self.loop.start()
        return self.loop.prefill(rows)

    def step(self, tokens: Sequence[int]) -> torch.Tensor:
        """See `DecodeLoop.step`."""
        return self.loop.step(tokens)

    def keep(self, indices: Sequence[int]) -> list[int]:
        """See `DecodeLoop.keep`."""
        return self.loop.keep(indices)

    def _compare(self, row: BatchRow) -> tuple[float, float]:
        """Largest difference in log-probability after the prompt and after one more token, and what is allowed."""
        # A prompt of the run itself, not a made-up one: it has the lengths and special tokens that matter here. One
        # more token after it, so that the step with a cache is compared as well as the prefill.
        ids = row.prompt_ids[:CHECKED_TOKENS]
        probe = BatchRow(prompt_ids=ids, temperature=1.0, top_p=1.0, top_k=0, stop=(), limit=1, uniforms=row.uniforms)
        outputs = []  # of each loop: (2, vocabulary), after the prompt and after one more token
        for loop in (self.loop, HFLoop(self.model, self.adapter)):
            loop.start()
            try:
                outputs.append([loop.prefill([probe]), loop.step([ids[0]])])
            finally:
                loop.stop()
                loop.forget()
        self.loop.start()
        native, reference = (torch.cat(several).float().log_softmax(dim=-1) for several in outputs)
        if not torch.isfinite(reference).all():  # diverged weights: both fail, and the request says so
            return 0.0, 0.0
        return float((native - reference).abs().max()), TOLERANCE.get(outputs[1][0].dtype, HALF_TOLERANCE)


class AdapterLoop:
    """Rows of several adapters in flight at once: one loop per adapter, each with its own cache, stepped in turn.

    Args:
        loops: by adapter name, sorted; every row names one of them.
    """

    def __init__(self, loops: dict[str, DecodeLoop]):
        self.loops = loops
        self._names: list[str] = []
        """Adapter of each row in flight. The rows of one adapter stand in the order that its loop has them in."""

    @property
    def refills(self) -> bool:
        """See `DecodeLoop.refills`."""
        return all(loop.refills for loop in self.loops.values())

    def start(self) -> None:
        """See `DecodeLoop.start`."""
        self._names = []
        for loop in self.loops.values():
            loop.start()

    def stop(self) -> None:
        """See `DecodeLoop.stop`."""
        self._names = []
        # In reverse: a model's training modes are put back by the loop that noted them first.
        for loop in reversed(self.loops.values()):
            loop.stop()

    def forget(self) -> None:
        """See `DecodeLoop.forget`."""
        for loop in self.loops.values():
            loop.forget()

    def prefill(self, rows: Sequence[BatchRow]) -> torch.Tensor:
        """See `DecodeLoop.prefill`."""
        names = [row.adapter or "" for row in rows]
        logits = {
            name: self.loops[name].prefill([rows[index] for index in places])
            for name, places in self._by_adapter(names).items()
        }
        self._names += names
        return self._gather(names, logits)

    def step(self, tokens: Sequence[int]) -> torch.Tensor:
        """See `DecodeLoop.step`."""
        logits = {
            name: self.loops[name].step([tokens[index] for index in places])
            for name, places in self._by_adapter(self._names).items()
        }
        return self._gather(self._names, logits)

    def keep(self, indices: Sequence[int]) -> list[int]:
        """See `DecodeLoop.keep`."""
        survivors = set(indices)
        order: list[int] = []
        for name, places in self._by_adapter(self._names).items():
            local = self.loops[name].keep([at for at, index in enumerate(places) if index in survivors])
            order += [places[at] for at in local]
        self._names = [self._names[index] for index in order]
        return order

    def _by_adapter(self, names: Sequence[str]) -> dict[str, list[int]]:
        """Positions of the rows of each adapter that has any."""
        places = {name: [i for i, other in enumerate(names) if other == name] for name in self.loops}
        return {name: indices for name, indices in places.items() if indices}

    def _gather(self, names: Sequence[str], parts: dict[str, torch.Tensor]) -> torch.Tensor:
        """(rows of one adapter, V) each -> (rows, V) in the order of `names`."""
        first = next(iter(parts.values()))
        logits = first.new_empty(len(names), first.shape[1])
        for name, places in self._by_adapter(names).items():
            logits[torch.tensor(places, device=first.device)] = parts[name]
        return logits
