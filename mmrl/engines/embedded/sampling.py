"""Sampling of tokens from logits: recorded log-probability, top-k, top-p, inverse CDF.

Each row brings its own settings and its own uniform, so that its token depends on nothing else in its batch but the
last bits of its logits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mmrl.engines.embedded.batch_rows import BatchRow

BLOCK = 64
"""Tokens summed as one in the first level of the inverse CDF."""
RANKED = 64
"""Most probable tokens looked at first; only rows whose border lies beyond them are sorted whole."""


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
    temperatures = [setting.temperature or 1.0 for setting in settings]
    if any(temperature != 1.0 for temperature in temperatures):
        scores = scores / torch.tensor(temperatures, device=scores.device).unsqueeze(1)
    scores = scores - scores.amax(dim=-1, keepdim=True)  # the largest exponential is 1: none overflows
    weights = _exp(scores)  # (B, V / BLOCK, BLOCK)
    sums = weights.sum(dim=-1, dtype=torch.float64)  # (B, V / BLOCK)
    # Over the full vocabulary, so before _draw takes filtered tokens out of the sums: the recorded log-probability is
    # that of the policy which the trainer differentiates, and the trainer knows no top-k or top-p.
    log_total = sums.sum(dim=-1).log()  # (B,)
    random = [index for index, setting in enumerate(settings) if setting.temperature > 0]  # the others are greedy
    if not random:
        ids = scores.argmax(dim=-1)
    elif len(random) == len(rows):
        ids = _draw(scores, weights, sums, rows)
    else:
        ids = scores.argmax(dim=-1)
        ids[random] = _draw(scores[random], weights[random], sums[random], [rows[index] for index in random])
    # ids: (B,), logprobs: (B,)
    logprobs = scores.gather(1, ids.unsqueeze(1)).squeeze(1).double() - log_total
    return ids.tolist(), logprobs.float().tolist()


def _exp(scores: torch.Tensor) -> torch.Tensor:
    """Compute exp(scores) in blocks, (B, V) -> (B, V / BLOCK rounded up, BLOCK), zeros at the end."""
    count, size = scores.shape
    blocks = -(-size // BLOCK)
    weights = scores.new_empty(count, blocks * BLOCK)
    torch.exp(scores, out=weights[:, :size])
    weights[:, size:] = 0.0
    return weights.view(count, blocks, BLOCK)


def _draw(scores: torch.Tensor, weights: torch.Tensor, sums: torch.Tensor, rows: Sequence[BatchRow]) -> torch.Tensor:
    """Invert the CDF over the surviving tokens in vocabulary order, summed in float64: first the block, then the token.

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
    filtered = [index for index, setting in enumerate(settings) if setting.top_p < 1 or 0 < setting.top_k < size]
    if filtered:
        cut = [settings[index] for index in filtered]
        keep = surviving(scores[filtered], [setting.top_k for setting in cut], [setting.top_p for setting in cut])
        some = weights[filtered]
        some.flatten(1)[:, :size].mul_(keep)
        sums[filtered] = some.sum(dim=-1, dtype=torch.float64)
        weights[filtered] = some
    cdf = sums.cumsum(dim=-1)  # (B, blocks); not normalised, the uniform is scaled by its last column instead
    # Uniform number t of a row belongs to its token t, however rows are batched: that makes a completion a function of
    # its seed and prompt.
    uniforms = torch.tensor([float(row.uniforms[len(row.ids)]) for row in rows], dtype=torch.float64)
    block, remainder = _locate(cdf, uniforms.to(cdf.device).unsqueeze(1) * cdf[:, -1:])
    inner = weights.gather(1, block.unsqueeze(2).expand(-1, 1, BLOCK)).squeeze(1).double().cumsum(dim=-1)
    token, _ = _locate(inner, remainder)
    return (block * BLOCK + token).squeeze(1).clamp_(max=size - 1)


def _locate(cdf: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Find the first index whose cdf exceeds the target, and the target's rest there; (B, N), (B, 1) -> (B, 1).

    Its own share of the cdf is above zero: the cdf before it does not exceed the target. The target stays below
    the total, which rounding may have made it reach.
    """
    total = cdf[:, -1:]
    target = torch.minimum(target, torch.nextafter(total, torch.zeros_like(total)))
    index = torch.searchsorted(cdf, target, right=True).clamp_(max=cdf.shape[1] - 1)
    before = cdf.gather(1, (index - 1).clamp_(min=0)).masked_fill_(index == 0, 0.0)
    return index, target - before


def surviving(scores: torch.Tensor, top_k: Sequence[int], top_p: Sequence[float]) -> torch.Tensor:
    """Return the tokens that survive top-k and then top-p.

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
    """Compute `surviving` from the `width` most probable tokens, and the rows for which these suffice."""
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
    better = scores > border
    tied = scores == border
    keep = better | (tied & (tied.cumsum(dim=-1) <= number - better.sum(dim=-1, keepdim=True)))
    return keep, settled.squeeze(1)
