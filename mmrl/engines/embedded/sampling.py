"""From logits to tokens: recorded log-probability, top-k, top-p, inverse CDF; and the decoder that does it for a batch.

`RowDecoder` is what the batcher drives: it holds the rows in flight, samples, and decides which are done, on top of a
`ModelLoop` that owns weights and KV cache. In `sample` each row brings its own settings and its
own uniform, so that its token depends on nothing else in its batch but the last bits of its logits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from mmrl.engines.embedded.batch_rows import BatchRow, Rules
from mmrl.engines.embedded.batcher import PendingRequest
from mmrl.errors import EngineFailure

if TYPE_CHECKING:
    from mmrl.engines.embedded.transformers_engine import ModelLoop

BLOCK = 64
"""Tokens summed as one in the first level of the inverse CDF."""
RANKED = 64
"""Most probable tokens looked at first; only rows whose border lies beyond them are sorted whole."""
ONE_THREAD_WORK = 20_000_000
"""Parameters × rows of a decode step below which a second thread costs more than it gives (measured: 1.4× slower)."""


class RowDecoder:
    """Makes the tokens of a batch: synchronous, one decode boundary at a time. Driven by the batcher.

    Args:
        loop: the model's side.
        rules: ends of completions.
        batch_tokens: most prompt tokens in flight, counted as rows × longest prompt.
        threads: torch threads of heavy work; light steps take one. The choice depends on shapes alone, so equal
            batches run with equal threads.
        parameters: size of the model.
    """

    def __init__(self, loop: ModelLoop, rules: Rules, batch_tokens: int, threads: int, parameters: int):
        self.loop = loop
        self.rules = rules
        self.batch_tokens = batch_tokens
        self.threads = threads
        self.parameters = parameters
        self.policy_version = 0
        self._jobs: list[PendingRequest] = []
        self._rows: list[BatchRow] = []
        """Of each job."""
        self._version = 0

    @property
    def refills(self) -> bool:
        """Whether rows can join while others are in flight."""
        return self.loop.refills

    def start(self) -> None:
        """The first row of a burst is about to come: look at the weights afresh; the burst's completions carry the
        policy version of this moment."""
        # Of this moment: the version may change before the burst is over only if nothing is in flight.
        self._version = self.policy_version
        self._jobs, self._rows = [], []
        with torch.no_grad():
            self.loop.start()

    def room(self, jobs: Sequence[PendingRequest], active: int) -> int:
        """How many of the first `jobs` may be admitted next to `active` rows."""
        # Rows × longest prompt, not the sum: the cache is one block, as long for each row as the longest one needs.
        widest = max((len(job.request.prompt_ids) for job in self._jobs), default=0)
        for count, job in enumerate(jobs):
            widest = max(widest, len(job.request.prompt_ids))
            if widest * (active + count + 1) > self.batch_tokens:
                return count
        return len(jobs)

    def admit(self, jobs: Sequence[PendingRequest]) -> None:
        """Prefill `jobs` and sample the first token of each."""
        rows = [self.rules.row(job.request) for job in jobs]
        tokens = sum(len(row.prompt_ids) for row in rows)
        with torch.no_grad(), self._threads(tokens):
            ids, logprobs = sample(self.loop.prefill(rows), rows)
        self._jobs += jobs
        self._rows += rows
        self._append(jobs, rows, ids, logprobs)

    def step(self) -> None:
        """Sample one more token of each row in flight."""
        rows = self._rows
        with torch.no_grad(), self._threads(len(rows)):
            ids, logprobs = sample(self.loop.step([row.ids[-1] for row in rows]), rows)
        self._append(self._jobs, rows, ids, logprobs)

    def drop(self, jobs: Sequence[PendingRequest]) -> None:
        """Forget rows that are done or no longer needed."""
        gone = {id(job) for job in jobs}
        indices = [index for index, job in enumerate(self._jobs) if id(job) not in gone]
        if len(indices) < len(self._jobs):
            with torch.no_grad():
                indices = self.loop.keep(indices)  # the loop may reorder rows; jobs follow
            self._jobs = [self._jobs[index] for index in indices]
            self._rows = [self._rows[index] for index in indices]

    def stop(self) -> None:
        """The burst is over, well or badly: forget all rows and put the model back as it was."""
        self._jobs, self._rows = [], []
        self.loop.stop()

    def forget(self) -> None:
        """No program is live: nothing cached of earlier rows may be used again.

        Bursts begin and end as timing has it, so what is shared between two of them must not depend on where the
        border lies. That no program is live is a fact of the programs, not of timing.
        """
        self.loop.forget()

    def _append(
        self, jobs: Sequence[PendingRequest], rows: Sequence[BatchRow], ids: Sequence[int], logprobs: Sequence[float]
    ) -> None:
        for job, row, token, logprob in zip(jobs, rows, ids, logprobs, strict=True):
            try:
                finish = self.rules.append(row, token, logprob)
            except EngineFailure as failure:  # this row's alone; the batch goes on without it
                job.outcome = failure
                continue
            if finish is not None:
                job.outcome = self.rules.completion(row, finish, self._version)

    @contextmanager
    def _threads(self, tokens: int) -> Iterator[None]:
        # By shape, never by load: the number of threads decides how a product is split, and so its last bits.
        threads = self.threads if tokens * self.parameters >= ONE_THREAD_WORK else 1
        before = torch.get_num_threads()
        if threads == before:
            yield
            return
        torch.set_num_threads(threads)
        try:
            yield
        finally:
            torch.set_num_threads(before)


def sample(logits: torch.Tensor, rows: Sequence[BatchRow]) -> tuple[list[int], list[float]]:
    """Draw the next token of each row.

    Args:
        logits: (B, V), any float type, finite.
        rows: B rows; row b draws with its uniform number len(row.ids).

    Returns:
        ids and recorded log-probabilities, B each. The log-probability is log-softmax(logits / T) over the full
        vocabulary, before top-k and top-p, as the trainer computes it; T = 1 for greedy rows. A row whose logits
        are not finite gets nan.
    """
    # float32 whatever the model computes in: the difference of two log-probabilities is an exponent in the importance
    # ratio, and bfloat16 resolves values near -20 to 0.125 only.
    scores = logits.float()  # (B, V)
    settings = [row.request.sampling for row in rows]
    temperatures = [one.temperature or 1.0 for one in settings]
    if any(temperature != 1.0 for temperature in temperatures):
        scores = scores / torch.tensor(temperatures, device=scores.device).unsqueeze(1)
    scores = scores - scores.amax(dim=-1, keepdim=True)  # the largest exponential is 1: none overflows
    weights = _exp(scores)  # (B, V / BLOCK, BLOCK)
    sums = weights.sum(dim=-1, dtype=torch.float64)  # (B, V / BLOCK)
    # Over the full vocabulary, so before _draw takes filtered tokens out of the sums: the recorded log-probability is
    # that of the policy which the trainer differentiates, and the trainer knows no top-k or top-p.
    log_total = sums.sum(dim=-1).log()  # (B,)
    random = [index for index, one in enumerate(settings) if one.temperature > 0]  # the others are greedy
    if not random:
        ids = scores.argmax(dim=-1)
    elif len(random) == len(rows):
        ids = _draw(scores, weights, sums, rows)
    else:
        ids = scores.argmax(dim=-1)
        ids[random] = _draw(scores[random], weights[random], sums[random], [rows[index] for index in random])
    # ids: (B,), chosen: (B,)
    chosen = scores.gather(1, ids.unsqueeze(1)).squeeze(1).double() - log_total
    return ids.tolist(), chosen.float().tolist()


def _exp(scores: torch.Tensor) -> torch.Tensor:
    """exp(scores) in blocks, (B, V) -> (B, V / BLOCK rounded up, BLOCK), zeros at the end."""
    count, size = scores.shape
    blocks = -(-size // BLOCK)
    weights = scores.new_empty(count, blocks * BLOCK)
    torch.exp(scores, out=weights[:, :size])
    weights[:, size:] = 0.0
    return weights.view(count, blocks, BLOCK)


def _draw(scores: torch.Tensor, weights: torch.Tensor, sums: torch.Tensor, rows: Sequence[BatchRow]) -> torch.Tensor:
    """Inverse CDF over the surviving tokens in vocabulary order, summed in float64: first the block, then the token.

    Args:
        scores: (B, V), log-probabilities up to a constant per row.
        weights: (B, blocks, BLOCK) float32, their exponentials; zeroed in place where filtered out.
        sums: (B, blocks) float64.

    Returns:
        (B,) ids, each of a token whose weight is above zero.
    """
    # Two levels spare a cumulative sum over the whole vocabulary: V / BLOCK sums, then the BLOCK tokens of one.
    # float64, or with 150,000 terms rounding would decide between tokens.
    size = scores.shape[1]
    settings = [row.request.sampling for row in rows]
    filtered = [index for index, one in enumerate(settings) if one.top_p < 1 or 0 < one.top_k < size]
    if filtered:
        cut = [settings[index] for index in filtered]
        keep = surviving(scores[filtered], [one.top_k for one in cut], [one.top_p for one in cut])
        some = weights[filtered]
        some.flatten(1)[:, :size].mul_(keep)
        sums[filtered] = some.sum(dim=-1, dtype=torch.float64)
        weights[filtered] = some
    cdf = sums.cumsum(dim=-1)  # (B, blocks); not normalised, the uniform is scaled by its last column instead
    # Uniform number t of a row belongs to its token t, however rows are batched: that makes a completion a function of
    # its seed and prompt.
    uniforms = torch.tensor([float(row.uniforms[len(row.ids)]) for row in rows], dtype=torch.float64)
    block, rest = _locate(cdf, uniforms.to(cdf.device).unsqueeze(1) * cdf[:, -1:])
    inner = weights.gather(1, block.unsqueeze(2).expand(-1, 1, BLOCK)).squeeze(1).double().cumsum(dim=-1)
    token, _ = _locate(inner, rest)
    return (block * BLOCK + token).squeeze(1).clamp_(max=size - 1)


def _locate(cdf: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The first index whose cdf exceeds the target, and what is left of the target there; (B, N), (B, 1) -> (B, 1).

    Its own share of the cdf is above zero: the cdf before it does not exceed the target. The target stays below
    the total, which rounding may have made it reach.
    """
    total = cdf[:, -1:]
    target = torch.minimum(target, torch.nextafter(total, torch.zeros_like(total)))
    index = torch.searchsorted(cdf, target, right=True).clamp_(max=cdf.shape[1] - 1)
    before = cdf.gather(1, (index - 1).clamp_(min=0)).masked_fill_(index == 0, 0.0)
    return index, target - before


def surviving(scores: torch.Tensor, top_k: Sequence[int], top_p: Sequence[float]) -> torch.Tensor:
    """Which tokens survive top-k and then top-p.

    The k most probable tokens stay (0: all), are renormalised, and of those the fewest whose probabilities sum to
    at least p. Of tokens tied at the border the lower ids stay.

    Args:
        scores: (B, V) float32, log-probabilities up to a constant per row.
        top_k: B counts, 0 for off.
        top_p: B masses in (0, 1].

    Returns:
        (B, V) bool with at least one True per row.
    """
    # Sorting a vocabulary of 150,000 for every token is far dearer than finding its RANKED best, and the border lies
    # among those for nearly every row of a trained model; only the other rows are sorted whole.
    size = scores.shape[1]
    counts = torch.tensor([min(k, size) if k > 0 else size for k in top_k], device=scores.device)
    masses = torch.tensor(top_p, dtype=torch.float64, device=scores.device)
    if size <= RANKED:
        return _surviving(scores, counts, masses, size)[0]
    keep, settled = _surviving(scores, counts, masses, RANKED)
    if not bool(settled.all()):
        flat = ~settled
        keep[flat] = _surviving(scores[flat], counts[flat], masses[flat], size)[0]
    return keep


def _surviving(
    scores: torch.Tensor, counts: torch.Tensor, masses: torch.Tensor, width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """`surviving` from the `width` most probable tokens, and of which rows they are enough to tell."""
    size = scores.shape[1]
    # ranked: (B, width), descending; probs and before: the same shape.
    ranked = scores.topk(width, dim=-1).values if width < size else scores.sort(dim=-1, descending=True).values
    ranks = torch.arange(width, device=scores.device)
    counts, masses = counts.unsqueeze(1), masses.unsqueeze(1)
    probs = ranked.double().exp().masked_fill(ranks >= counts, 0.0)
    totals = probs.sum(dim=-1, keepdim=True)
    if width < size:
        # Top-k renormalises over its k tokens, which are all ranked (or the row is not settled); without top-k the mass
        # of the tokens beyond the ranked ones counts too.
        totals = torch.where(counts < size, totals, scores.exp().sum(dim=-1, keepdim=True, dtype=torch.float64))
    before = probs.cumsum(dim=-1) - probs
    target = masses * totals  # (B, 1)
    settled = (counts <= width) | ((counts == size) & (before[:, -1:] + probs[:, -1:] >= target))
    inside = (before < target) & (ranks < counts)
    inside[:, 0] = True  # rounding must not leave a row without tokens
    number = inside.sum(dim=-1, keepdim=True)
    # From a number of ranks to a set of tokens: topk gives equal scores no order that holds on every device, so ties at
    # the border are broken by token id.
    border = ranked.gather(1, number - 1)
    above = scores > border
    tied = scores == border
    keep = above | (tied & (tied.cumsum(dim=-1) <= number - above.sum(dim=-1, keepdim=True)))
    return keep, settled.squeeze(1)
