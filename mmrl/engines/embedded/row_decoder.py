"""Decoder of batches under the `Batcher`: requests as rows, a loop for each set of weights, the self-check of loops.

A request becomes a row, and its tokens are drawn from the logits of a loop: the native decoder where it knows the
architecture and agrees with the model's own forward, else that forward, with a warning.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TypeAlias

import numpy as np
import torch

from mmrl.config.engines import TransformersConfig
from mmrl.engines.base import Request, Sampling
from mmrl.engines.embedded.architecture import unsupported
from mmrl.engines.embedded.attended import AttendedLoop, unattended
from mmrl.engines.embedded.batch_rows import BatchRow, Rules
from mmrl.engines.embedded.decode import NativeLoop
from mmrl.engines.embedded.hf_loop import HFLoop, WholeRows
from mmrl.engines.embedded.pending import PendingRequest
from mmrl.engines.embedded.sampling import sample
from mmrl.engines.embedded.state_loop import StateLoop, serves
from mmrl.errors import ConfigError, EngineFailure
from mmrl.models.selfcheck import CheckRow, Way, computes_in_half, logprobs_of, plain_logprobs, rounding_noise

LOG = logging.getLogger("mmrl.engines")

CHECKED_TOKENS, CHECKED_STEPS = 512, 32
"""Longest part of the first batch's shortest and longest prompt that the self-check computes in two ways, and the most
of its tokens that are decoded one by one."""
ONE_THREAD_WORK = 20_000_000
"""Parameters × rows of a decode step below which a second thread costs more than it gives (measured: 1.4× slower)."""

Loop: TypeAlias = NativeLoop | AttendedLoop | HFLoop
WORDS: Mapping[type[Loop], str] = {
    NativeLoop: "the native decoder",
    AttendedLoop: "the model's own layers over shared prefixes",
    StateLoop: "the model's own forward, shared prefixes once",
    HFLoop: "generation by the model's own forward",
    WholeRows: "generation without a cache",
}
"""Loops in words, fastest first."""


class RowDecoder:
    """Decoder of a batch: synchronous, one decode boundary at a time. Driven by the batcher.

    Each set of weights has a loop with a cache of its own, and they are stepped in turn. Loops are compared with the
    model's plain forward (`check`); where they differ, the next slower one generates.

    Args:
        weights: name -> a causal LM, and the adapter of it that is meant (None: whichever is active); every row names
            one of them (`BatchRow.adapter`), or none where there is one alone.
        rules: ends of completions.
        config: `engine.loop` = auto | own | hf, and `engine.batch_tokens`: most prompt tokens in flight, counted as
            rows × longest prompt, and most tokens of shared prefixes that are stored.
        threads: torch threads of heavy work, None: torch's own number; light steps take one. The choice depends on
            shapes alone, so equal batches run with equal threads.
        checked: compare the loops with the model's plain forward on their first prompts.

    Raises:
        ConfigError: `own`, and no loop but that of the model's own cache knows the model.
    """

    def __init__(
        self,
        weights: Mapping[str, tuple[torch.nn.Module, str | None]],
        rules: Rules,
        config: TransformersConfig,
        threads: int | None = None,
        checked: bool = True,
    ):
        self.weights = weights
        self.rules = rules
        self.batch_tokens = config.batch_tokens
        self.outside = torch.get_num_threads()
        self.threads = threads or self.outside
        models = list(dict.fromkeys(model for model, _ in weights.values()))
        self.parameters = sum(parameter.numel() for parameter in models[0].parameters())
        self.device = next(models[0].parameters()).device.index
        kinds = {model: _loop_kind(model, config.loop, checked) for model in models}
        self.loops: dict[str, Loop] = {}
        # In half precision the adapters of a model share the base weights that the first of them reads.
        self._base: NativeLoop | None = None
        for name, (model, adapter) in weights.items():
            if kinds[model] is NativeLoop:
                loop = NativeLoop(model, config.batch_tokens, adapter, self._base)
                self._base = self._base or (loop if adapter is not None else None)
                self.loops[name] = loop
            elif kinds[model] is AttendedLoop:
                self.loops[name] = AttendedLoop(model, adapter, config.batch_tokens)
            elif kinds[model] is StateLoop:
                self.loops[name] = StateLoop(model, adapter, config.batch_tokens)
            else:
                self.loops[name] = HFLoop(model, adapter)
        self._unchecked = set(self.loops) if checked else set()
        self._rows: dict[PendingRequest, BatchRow] = {}
        """Rows in flight; those of one set of weights stand in the order that its loop has them in."""
        self._version = 0

    @property
    def refills(self) -> bool:
        """True if rows can join while others are in flight."""
        return all(loop.refills for loop in self.loops.values())

    def start(self, version: int) -> None:
        """Look at the weights afresh: the first row of a burst is about to come.

        Args:
            version: policy version that the burst's completions carry; it may change before the burst is over only if
                nothing is in flight.
        """
        self._version = version
        self._rows = {}
        with torch.no_grad():
            # Out of use itself where it differs from the model, but the other adapters read its weights.
            if self._base is not None and self._base not in self.loops.values():
                self._base.weights.refresh()
            for loop in self.loops.values():
                loop.start()

    def room(self, jobs: Sequence[PendingRequest], active: int) -> int:
        """Return the number of the first `jobs` that may be admitted next to `active` rows."""
        # Rows × longest prompt, not the sum: the cache is one block, as long for each row as the longest one needs.
        widest = max((len(row.prompt_ids) for row in self._rows.values()), default=0)
        for count, job in enumerate(jobs):
            widest = max(widest, len(job.request.prompt_ids))
            if widest * (active + count + 1) > self.batch_tokens:
                return count
        return len(jobs)

    def admit(self, jobs: Sequence[PendingRequest]) -> None:
        """Prefill `jobs` and sample the first token of each."""
        added = {job: self.rules.row(job.request) for job in jobs}
        self._sample(added, self._prefill, tokens=sum(len(row.prompt_ids) for row in added.values()))
        self._rows |= added

    def step(self) -> None:
        """Sample one more token of each row in flight."""
        self._sample(
            self._rows, lambda name, rows: self.loops[name].step([row.ids[-1] for row in rows]), tokens=len(self._rows)
        )

    def drop(self, jobs: Sequence[PendingRequest]) -> None:
        """Forget rows that are done or no longer needed."""
        in_flight, gone = list(self._rows.items()), set(jobs)
        if gone.isdisjoint(self._rows):
            return
        remaining: list[int] = []
        with torch.no_grad():
            for name, places in self._places(list(self._rows.values())).items():
                # the loop may reorder its rows; requests follow
                order = self.loops[name].keep(
                    [position for position, i in enumerate(places) if in_flight[i][0] not in gone]
                )
                remaining += [places[position] for position in order]
        self._rows = dict(in_flight[index] for index in remaining)

    def stop(self) -> None:
        """Forget all rows and put the model back as it was: the burst is over, well or badly."""
        self._rows = {}
        # In reverse: a model's training modes are put back by the loop that noted them first.
        for loop in reversed(self.loops.values()):
            loop.stop()

    def forget(self) -> None:
        """Forget what was cached of earlier rows for later ones: no program is live.

        Bursts begin and end as timing has it, so what is shared between two of them must not depend on where the
        border lies. That no program is live is a fact of the programs, not of timing.
        """
        for loop in self.loops.values():
            loop.forget()

    def _places(self, rows: Sequence[BatchRow]) -> dict[str, list[int]]:
        """Return the positions of the rows of each set of weights that has any."""
        places = {name: [i for i, row in enumerate(rows) if (row.adapter or "") == name] for name in self.loops}
        return {name: indices for name, indices in places.items() if indices}

    def _sample(
        self,
        batch: Mapping[PendingRequest, BatchRow],
        forward: Callable[[str, list[BatchRow]], torch.Tensor],
        tokens: int,
    ) -> None:
        """Append a token to each row of `batch`.

        Args:
            forward: name of a set of weights, rows -> (rows, V) logits.
            tokens: how many are forwarded.
        """
        rows = list(batch.values())
        # Each thread has a current device of its own, and some kernels run on that one.
        with torch.no_grad(), self._threads(tokens), torch.accelerator.device_index(self.device):
            places = self._places(rows)
            parts = [forward(name, [rows[i] for i in indices]) for name, indices in places.items()]
            logits = parts[0]
            if len(parts) > 1:
                logits = logits.new_empty(len(rows), logits.shape[1])
                for indices, part in zip(places.values(), parts, strict=True):
                    logits[torch.tensor(indices, device=part.device)] = part
            ids, logprobs = sample(logits, rows)
        for job, row, token, logprob in zip(batch, rows, ids, logprobs, strict=True):
            try:
                finish = self.rules.append(row, token, logprob)
            except EngineFailure as failure:  # this row's alone; the batch goes on without it
                job.outcome = failure
                continue
            if finish is not None:
                job.outcome = self.rules.completion(row, finish, self._version)

    def _prefill(self, name: str, rows: list[BatchRow]) -> torch.Tensor:
        if name in self._unchecked:
            self._unchecked.remove(name)
            # Of the run itself: they have the lengths and the special tokens that matter here.
            prompts = sorted({row.prompt_ids[:CHECKED_TOKENS] for row in rows}, key=len)
            compared = [CheckRow(ids[: -(-len(ids) // 2)], ids[-(-len(ids) // 2) :][:CHECKED_STEPS]) for ids in prompts]
            if ends := [row for row in (compared[0], compared[-1]) if row.completion_ids]:
                self.loops[name].stop()  # it notes the model's training modes anew at the next start
                self.check(name, ends)
                self.loops[name].start()
        return self.loops[name].prefill(rows)

    def check(self, name: str, rows: Sequence[CheckRow]) -> Way | None:
        """Compare the log-probabilities of given rows by a loop with those of the model's plain forward.

        A loop that differs makes room, for the rest of the run, to the next slower one.

        Returns:
            The loop in use; None for weights that have diverged, of which requests will say so.

        Raises:
            ConfigError: no loop agrees.
        """
        model, adapter = self.weights[name]
        half, reference = computes_in_half(model), HFLoop(model, adapter)
        with torch.no_grad(), reference.using_adapter():
            plain = plain_logprobs(model, rows)
            noise = rounding_noise(model, partial(plain_logprobs, model, rows), plain) if half else 0.0
        if not all(math.isfinite(number) for row in plain for number in row):
            return None
        while True:
            loop = self.loops[name]
            words = WORDS[type(loop)]
            # Whatever a model's own code raises where it is not made for a loop.
            try:
                way = Way.compared(words, _replayed(loop, rows), plain)
                fault = way.fault(half=half, noise=noise)
            except Exception as error:
                fault = f"{words} fails ({type(error).__name__}: {error})"
            if not fault:
                return way
            following = {NativeLoop: HFLoop, StateLoop: HFLoop, AttendedLoop: HFLoop, HFLoop: WholeRows}.get(type(loop))
            if following is None:
                raise ConfigError(f"model.path: the engine cannot serve this model: against its plain forward, {fault}")
            self.loops[name] = following(model, adapter)
            LOG.warning(
                "engine.loop: against the model's plain forward, %s; what serves now is %s (slower)",
                fault,
                WORDS[following],
            )

    @contextmanager
    def _threads(self, tokens: int) -> Iterator[None]:
        # By shape, never by load: the number of threads decides how a product is split, and so its last bits.
        threads = self.threads if tokens * self.parameters >= ONE_THREAD_WORK else 1
        if threads == torch.get_num_threads():
            yield
            return
        torch.set_num_threads(threads)
        try:
            yield
        finally:
            # Of whoever built this, not what this thread had: it may have decoded for a run before.
            torch.set_num_threads(self.outside)


@torch.no_grad()
def _replayed(loop: Loop, rows: Sequence[CheckRow]) -> list[list[float]]:
    """Return the completions' log-probabilities as they would be recorded if these very tokens were sampled together.

    Rows leave as they end, so that all that a loop does is done: prefill, steps, rows that go.
    """
    made = [
        BatchRow(
            request=Request(prompt_ids=row.prompt_ids, sampling=Sampling(max_tokens=len(row.completion_ids))),
            limit=len(row.completion_ids),
            uniforms=np.empty(0),
        )
        for row in rows
    ]
    found: list[list[float]] = [[] for _ in rows]
    loop.start()
    loop.share_all()
    try:
        logits, alive = loop.prefill(made), list(range(len(rows)))
        while alive:
            tokens = [rows[i].completion_ids[len(made[i].ids)] for i in alive]
            for i, token, logprob in zip(alive, tokens, logprobs_of(logits, tokens), strict=True):
                made[i].ids.append(token)
                found[i].append(logprob)
            staying = [place for place, i in enumerate(alive) if len(made[i].ids) < made[i].limit]
            if len(staying) < len(alive):
                alive = [alive[place] for place in loop.keep(staying)]
            if alive:
                logits = loop.step([made[i].ids[-1] for i in alive])
    finally:
        loop.stop()
        loop.forget()
    return found


def _loop_kind(model: torch.nn.Module, choice: str, checked: bool) -> type[Loop]:
    """Return the fastest loop that knows a model's layers, with a warning where it is a slow one."""
    if choice == "hf":
        return HFLoop
    if unsupported(model) is None:
        return NativeLoop
    if serves(model):
        return StateLoop
    reason = unattended(model)
    # What mixes tokens beside attention shows in the self-check alone.
    if reason is None and (checked or choice == "own"):
        return AttendedLoop
    if choice == "own":
        raise ConfigError(f"engine.loop: got 'own', which cannot serve this model: {reason}; use auto or hf")
    LOG.warning(
        "engine.loop=auto: the model's own forward generates (slower), since %s", reason or "model.selfcheck=false"
    )
    return HFLoop
