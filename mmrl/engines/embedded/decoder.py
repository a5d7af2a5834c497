"""Rows in, tokens out: what the batcher drives, on top of a loop that turns rows into logits.

`RowDecoder` keeps the rows, samples and decides who is done; a `Loop` (`hf_loop`, `decode`) owns weights and KV cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch

from mmrl.engines.embedded.batcher import Job
from mmrl.engines.embedded.rows import Row, Rules
from mmrl.engines.embedded.sampling import sample
from mmrl.errors import EngineFailure

ONE_THREAD_WORK = 20_000_000
"""Parameters × rows of a decode step below which a second thread costs more than it gives (measured: 1.4× slower)."""


class Loop(Protocol):
    """Turns rows into logits; rows in flight have an order, and logits come in that order."""

    @property
    def refills(self) -> bool:
        """Whether `prefill` may come while rows are in flight."""
        ...

    def start(self) -> None:
        """A burst begins: no rows yet, weights may have changed."""
        ...

    def prefill(self, rows: Sequence[Row]) -> torch.Tensor:
        """Append rows; returns the (len(rows), V) logits that follow their prompts."""
        ...

    def step(self, tokens: Sequence[int]) -> torch.Tensor:
        """Extend the rows in flight by one token each; returns (B, V) logits."""
        ...

    def keep(self, indices: Sequence[int]) -> list[int]:
        """Forget all rows but these (ascending); returns them in the order in which they are in flight from now on."""
        ...

    def stop(self) -> None:
        """The burst is over: forget all rows."""
        ...

    def forget(self) -> None:
        """Forget what was kept from earlier rows for later ones."""
        ...


class RowDecoder:
    """Implements `mmrl.engines.embedded.batcher.Decoder`.

    Args:
        loop: the model's side.
        rules: ends of completions.
        batch_tokens: most prompt tokens in flight, counted as rows × longest prompt.
        threads: torch threads of heavy work; light steps take one. The choice depends on shapes alone, so equal
            batches run with equal threads.
        parameters: size of the model.
    """

    def __init__(self, loop: Loop, rules: Rules, batch_tokens: int, threads: int, parameters: int):
        self.loop = loop
        self.rules = rules
        self.batch_tokens = batch_tokens
        self.threads = threads
        self.parameters = parameters
        self.policy_version = 0
        self._jobs: list[Job] = []
        self._version = 0

    @property
    def refills(self) -> bool:
        """See `Decoder.refills`."""
        return self.loop.refills

    def start(self) -> None:
        """See `Decoder.start`; the burst's completions carry the policy version of this moment."""
        self._version = self.policy_version
        self._jobs = []
        with torch.no_grad():
            self.loop.start()

    def room(self, jobs: Sequence[Job], active: int) -> int:
        """See `Decoder.room`."""
        widest = max((len(job.request.prompt_ids) for job in self._jobs), default=0)
        for count, job in enumerate(jobs):
            widest = max(widest, len(job.request.prompt_ids))
            if widest * (active + count + 1) > self.batch_tokens:
                return count
        return len(jobs)

    def admit(self, jobs: Sequence[Job]) -> None:
        """See `Decoder.admit`."""
        rows = []
        for job in jobs:
            job.state = self.rules.row(job.request)
            rows.append(job.state)
        tokens = sum(len(row.prompt_ids) for row in rows)
        with torch.no_grad(), self._threads(tokens):
            ids, logprobs = sample(self.loop.prefill(rows), rows)
        self._jobs += jobs
        self._append(jobs, ids, logprobs)

    def step(self) -> None:
        """See `Decoder.step`."""
        rows: list[Row] = [job.state for job in self._jobs]
        with torch.no_grad(), self._threads(len(rows)):
            ids, logprobs = sample(self.loop.step([row.ids[-1] for row in rows]), rows)
        self._append(self._jobs, ids, logprobs)

    def drop(self, jobs: Sequence[Job]) -> None:
        """See `Decoder.drop`."""
        gone = {id(job) for job in jobs}
        indices = [index for index, job in enumerate(self._jobs) if id(job) not in gone]
        if len(indices) < len(self._jobs):
            with torch.no_grad():
                indices = self.loop.keep(indices)
            self._jobs = [self._jobs[index] for index in indices]

    def stop(self) -> None:
        """See `Decoder.stop`."""
        self._jobs = []
        self.loop.stop()

    def forget(self) -> None:
        """See `Decoder.forget`."""
        self.loop.forget()

    def _append(self, jobs: Sequence[Job], ids: Sequence[int], logprobs: Sequence[float]) -> None:
        for job, token, logprob in zip(jobs, ids, logprobs, strict=True):
            try:
                finish = self.rules.append(job.state, token, logprob)
            except EngineFailure as failure:
                job.outcome = failure
                continue
            if finish is not None:
                job.outcome = self.rules.completion(job.state, finish, self._version)

    @contextmanager
    def _threads(self, tokens: int) -> Iterator[None]:
        wanted = self.threads if tokens * self.parameters >= ONE_THREAD_WORK else 1
        before = torch.get_num_threads()
        if wanted == before:
            yield
            return
        torch.set_num_threads(wanted)
        try:
            yield
        finally:
            torch.set_num_threads(before)
