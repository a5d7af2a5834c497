"""One token per row from a batch of logits: recorded log-probability, top-k, top-p, inverse CDF.

Used by both decode loops. Each row brings its own settings and its own uniform, so that a row's token depends on
nothing else in its batch but the last bits of its logits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mmrl.engines.embedded.rows import Row

BLOCK = 64
"""Tokens summed as one in the first level of the inverse CDF."""
RANKED = 64
"""Most probable tokens looked at first; only rows whose border lies beyond them are sorted whole."""


def sample(logits: torch.Tensor, rows: Sequence[Row]) -> tuple[list[int], list[float]]:
    """Draw the next token of each row.

    Args:
        logits: (B, V), any float type, finite.
        rows: B rows; row b draws with its uniform number len(row.ids).

    Returns:
        ids and recorded log-probabilities, B each. The log-probability is log-softmax(logits / T) over the full
        vocabulary, before top-k and top-p (semantics.md §0.2); T = 1 for greedy rows. A row whose logits are not
        finite gets nan.
    """
    scores = logits.float()
    temperatures = [row.temperature or 1.0 for row in rows]
    if any(temperature != 1.0 for temperature in temperatures):
        scores = scores / torch.tensor(temperatures, device=scores.device).unsqueeze(1)
    scores = scores - scores.amax(dim=-1, keepdim=True)
    weights = _exp(scores)
    sums = weights.sum(dim=-1, dtype=torch.float64)
    log_total = sums.sum(dim=-1).log()  # before _draw takes filtered tokens out of the sums
    random = [index for index, row in enumerate(rows) if row.temperature > 0]
    if not random:
        ids = scores.argmax(dim=-1)
    elif len(random) == len(rows):
        ids = _draw(scores, weights, sums, rows)
    else:
        ids = scores.argmax(dim=-1)
        ids[random] = _draw(scores[random], weights[random], sums[random], [rows[index] for index in random])
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


def _draw(scores: torch.Tensor, weights: torch.Tensor, sums: torch.Tensor, rows: Sequence[Row]) -> torch.Tensor:
    """Inverse CDF over the kept tokens in vocabulary order, summed in float64: first the block, then the token.

    Args:
        scores: (B, V), log-probabilities up to a constant per row.
        weights: (B, blocks, BLOCK) float32, their exponentials; zeroed in place where filtered out.
        sums: (B, blocks) float64.

    Returns:
        (B,) ids, each of a token whose weight is above zero.
    """
    size = scores.shape[1]
    filtered = [index for index, row in enumerate(rows) if row.top_p < 1 or 0 < row.top_k < size]
    if filtered:
        keep = kept(scores[filtered], [rows[i].top_k for i in filtered], [rows[i].top_p for i in filtered])
        some = weights[filtered]
        some.flatten(1)[:, :size].mul_(keep)
        sums[filtered] = some.sum(dim=-1, dtype=torch.float64)
        weights[filtered] = some
    cdf = sums.cumsum(dim=-1)
    uniforms = torch.tensor([float(row.uniforms[len(row.ids)]) for row in rows], dtype=torch.float64)
    block, rest = _locate(cdf, uniforms.to(cdf.device).unsqueeze(1) * cdf[:, -1:])
    inner = weights.gather(1, block.unsqueeze(2).expand(-1, 1, BLOCK)).squeeze(1).double().cumsum(dim=-1)
    token, _ = _locate(inner, rest)
    return (block * BLOCK + token).squeeze(1).clamp_(max=size - 1)


def _locate(cdf: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The first index whose cdf exceeds the target, and what is left of the target there; (B, N), (B, 1) -> (B, 1).

    Its own share of the cdf is above zero: the cdf before it does not exceed the target. The target is kept below
    the total, which rounding may have made it reach.
    """
    total = cdf[:, -1:]
    target = torch.minimum(target, torch.nextafter(total, torch.zeros_like(total)))
    index = torch.searchsorted(cdf, target, right=True).clamp_(max=cdf.shape[1] - 1)
    before = cdf.gather(1, (index - 1).clamp_(min=0)).masked_fill_(index == 0, 0.0)
    return index, target - before


def kept(scores: torch.Tensor, top_k: Sequence[int], top_p: Sequence[float]) -> torch.Tensor:
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
    size = scores.shape[1]
    counts = torch.tensor([min(k, size) if k > 0 else size for k in top_k], device=scores.device)
    masses = torch.tensor(top_p, dtype=torch.float64, device=scores.device)
    if size <= RANKED:
        return _kept(scores, counts, masses, size)[0]
    keep, settled = _kept(scores, counts, masses, RANKED)
    if not bool(settled.all()):
        flat = ~settled
        keep[flat] = _kept(scores[flat], counts[flat], masses[flat], size)[0]
    return keep


def _kept(
    scores: torch.Tensor, counts: torch.Tensor, masses: torch.Tensor, width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """`kept` from the `width` most probable tokens, and of which rows they are enough to tell."""
    size = scores.shape[1]
    ranked = scores.topk(width, dim=-1).values if width < size else scores.sort(dim=-1, descending=True).values
    ranks = torch.arange(width, device=scores.device)
    counts, masses = counts.unsqueeze(1), masses.unsqueeze(1)
    probs = ranked.double().exp().masked_fill(ranks >= counts, 0.0)
    totals = probs.sum(dim=-1, keepdim=True)
    if width < size:
        totals = torch.where(counts < size, totals, scores.exp().sum(dim=-1, keepdim=True, dtype=torch.float64))
    before = probs.cumsum(dim=-1) - probs
    wanted = masses * totals
    settled = (counts <= width) | ((counts == size) & (before[:, -1:] + probs[:, -1:] >= wanted))
    inside = (before < wanted) & (ranks < counts)
    inside[:, 0] = True
    number = inside.sum(dim=-1, keepdim=True)
    border = ranked.gather(1, number - 1)
    above = scores > border
    tied = scores == border
    keep = above | (tied & (tied.cumsum(dim=-1) <= number - above.sum(dim=-1, keepdim=True)))
    return keep, settled.squeeze(1)
