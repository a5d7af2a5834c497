"""The embedded engine: generation in process, from the very module that the trainer trains.

Programs reach it through `rollout.context`; `stages.weights` calls `set_version` after each update. `ModelLoop` picks
what runs the model: the native decoder where it knows the architecture and agrees with the model's own forward, else
that forward, with a warning.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, cast

import torch

from mmrl.config.engines import TransformersConfig
from mmrl.engines.base import Completion, Engine, EngineSetup, Request, Sampling
from mmrl.engines.embedded.architecture import unsupported
from mmrl.engines.embedded.batch_rows import HALF_TOLERANCE, TOLERANCE, BatchRow, Rules, context_limit, eos_ids
from mmrl.engines.embedded.batcher import Batcher
from mmrl.engines.embedded.decode import NativeLoop
from mmrl.engines.embedded.hf_loop import HFLoop
from mmrl.engines.embedded.sampling import RowDecoder
from mmrl.errors import ConfigError
from mmrl.models.policy import INITIAL

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

LOG = logging.getLogger("mmrl.engines")

CHECKED_TOKENS = 512
"""Longest part of the first prompt that the self-check forwards twice."""


class TransformersEngine(Engine):
    """Samples from the trainer's own module, so that weights are never copied between updates.

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
        adapters, initial = setup.adapters, setup.initial
        names = sorted(set((adapters or {}).values()))
        if initial is None:
            loop = ModelLoop({name: (model, name) for name in names} or {"": (model, None)}, config)
        else:
            loop = ModelLoop({name: (initial if name == INITIAL else model, None) for name in names}, config)
        self.max_context = context_limit(settings, setup.max_context)
        rules = Rules(tokenizer, ends, settings.vocab_size, self.max_context, adapters)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        threads = setup.threads or torch.get_num_threads()
        self._decoder = RowDecoder(loop, rules, config.batch_tokens, threads, parameters)
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


class ModelLoop:
    """Turns rows into logits: one loop for each set of weights, with a cache of its own, stepped in turn.

    Rows in flight have an order, and logits come in that order.

    A native decoder is compared with the model's own forward on its first prompt; where they differ, that forward
    generates.

    Args:
        weights: name -> a causal LM, and the adapter of it that is meant (None: whichever is active); every row names
            one of them (`BatchRow.adapter`), or none where there is one alone.
        config: `engine.loop` = auto | own | hf, and how many tokens of shared prefixes are stored.

    Raises:
        ConfigError: `own`, and the native decoder does not know the model.
    """

    def __init__(self, weights: Mapping[str, tuple[torch.nn.Module, str | None]], config: TransformersConfig):
        self.weights = weights
        self.loops: dict[str, NativeLoop | HFLoop] = {}
        self._names: list[str] = []
        """Weights of each row in flight. The rows of one set stand in the order that its loop has them in."""
        # In half precision the adapters of a model share the base weights that the first of them reads.
        self._base: NativeLoop | None = None
        models = dict.fromkeys(model for model, _ in weights.values())
        native = {model: _is_native(model, config.loop) for model in models}
        for name, (model, adapter) in weights.items():
            if native[model]:
                loop = NativeLoop(model, config.batch_tokens, adapter, self._base)
                self._base = self._base or (loop if adapter is not None else None)
                self.loops[name] = loop
            else:
                self.loops[name] = HFLoop(model, adapter)
        self._unchecked = {name for name, loop in self.loops.items() if isinstance(loop, NativeLoop)}

    @property
    def refills(self) -> bool:
        """Whether `prefill` may come while rows are in flight."""
        return all(loop.refills for loop in self.loops.values())

    def start(self) -> None:
        """A burst begins: no rows yet, weights may have changed."""
        self._names = []
        # Out of use itself where it differs from the model, but the other adapters read its weights.
        if self._base is not None and self._base not in self.loops.values():
            self._base.weights.refresh()
        for loop in self.loops.values():
            loop.start()

    def stop(self) -> None:
        """The burst is over: forget all rows."""
        self._names = []
        # In reverse: a model's training modes are put back by the loop that noted them first.
        for loop in reversed(self.loops.values()):
            loop.stop()

    def forget(self) -> None:
        """Forget what was cached of earlier rows for later ones."""
        for loop in self.loops.values():
            loop.forget()

    def prefill(self, rows: Sequence[BatchRow]) -> torch.Tensor:
        """Append rows; returns the (len(rows), V) logits that follow their prompts."""
        names = [row.adapter or "" for row in rows]
        logits = {}
        for name, places in self._places(names).items():
            if name in self._unchecked:
                self._check(name, rows[places[0]])
            logits[name] = self.loops[name].prefill([rows[index] for index in places])
        self._names += names
        return self._gather(names, logits)

    def step(self, tokens: Sequence[int]) -> torch.Tensor:
        """Extend the rows in flight by one token each; returns (B, V) logits."""
        logits = {
            name: self.loops[name].step([tokens[index] for index in places])
            for name, places in self._places(self._names).items()
        }
        return self._gather(self._names, logits)

    def keep(self, indices: Sequence[int]) -> list[int]:
        """Forget all rows but these (ascending); returns them in the order in which they are in flight from now on."""
        survivors = set(indices)
        order: list[int] = []
        for name, places in self._places(self._names).items():
            local = self.loops[name].keep([at for at, index in enumerate(places) if index in survivors])
            order += [places[at] for at in local]
        self._names = [self._names[index] for index in order]
        return order

    def _places(self, names: Sequence[str]) -> dict[str, list[int]]:
        """Positions of the rows of each set of weights that has any."""
        if len(self.loops) == 1:
            return {name: list(range(len(names))) for name in self.loops}
        places = {name: [i for i, other in enumerate(names) if other == name] for name in self.loops}
        return {name: indices for name, indices in places.items() if indices}

    def _gather(self, names: Sequence[str], parts: dict[str, torch.Tensor]) -> torch.Tensor:
        """(rows of one set of weights, V) each -> (rows, V) in the order of `names`."""
        first = next(iter(parts.values()))
        if len(parts) == 1:
            return first
        logits = first.new_empty(len(names), first.shape[1])
        for name, places in self._places(names).items():
            logits[torch.tensor(places, device=first.device)] = parts[name]
        return logits

    def _check(self, name: str, row: BatchRow) -> None:
        """Compare log-probabilities of a native loop after a prompt and one more token with the model's own."""
        self._unchecked.remove(name)
        model, adapter = self.weights[name]
        # A prompt of the run itself, not a made-up one: it has the lengths and special tokens that matter here. One
        # more token after it, so that the step with a cache is compared as well as the prefill.
        ids = row.prompt_ids[:CHECKED_TOKENS]
        request = Request(prompt_ids=ids, sampling=Sampling(max_tokens=1))
        probe = BatchRow(request=request, limit=1, uniforms=row.uniforms)
        outputs = []  # of each loop: (2, vocabulary), after the prompt and after one more token
        for loop in (self.loops[name], HFLoop(model, adapter)):
            loop.start()
            try:
                outputs.append(torch.cat([loop.prefill([probe]), loop.step([ids[0]])]))
            finally:
                loop.stop()
                loop.forget()
        native, reference = (logits.float().log_softmax(dim=-1) for logits in outputs)
        difference = float((native - reference).abs().max())
        tolerance = TOLERANCE if outputs[1].dtype == torch.float32 else HALF_TOLERANCE
        # Of diverged weights both fail, and the request says so.
        if bool(torch.isfinite(reference).all()) and not difference <= tolerance:
            LOG.warning(
                "engine.loop: the native decoder differs from the model's forward by %.2g in a log-probability "
                "(tolerance %.2g); the model's own forward generates (slower)",
                difference,
                tolerance,
            )
            # For the rest of the run: a decoder that is wrong once is wrong for every prompt.
            self.loops[name] = HFLoop(model, adapter)
        self.loops[name].start()


def _is_native(model: torch.nn.Module, choice: str) -> bool:
    """Whether the native decoder serves a model, with a warning where it does not know it."""
    reason = unsupported(model) if choice != "hf" else None
    if reason is not None and choice == "own":
        raise ConfigError(f"engine.loop: got 'own', which cannot serve this model: {reason}; use auto or hf")
    if reason is not None:
        LOG.warning("engine.loop=auto: the model's own forward generates (slower), since %s", reason)
    return reason is None and choice != "hf"
