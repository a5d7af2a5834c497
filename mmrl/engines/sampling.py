"""One token per row from a batch of logits: recorded log-probability, top-k, top-p, inverse CDF.

Used by both decode loops. Each row brings its own settings and its own uniform, so that a row's token depends on
nothing else in its batch but the last bits of its logits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mmrl.engines.rows import Row


def sample(logits: torch.Tensor, rows: Sequence[Row]) -> tuple[list[int], list[float]]:
    """Draw the next token of each row.

    Args:
        logits: (B, V), any float type, finite.
        rows: B rows; row b draws with its uniform number len(row.ids).

    Returns:
        ids and recorded log-probabilities, B each. The log-probability is log-softmax(logits / T) in float32 over the
        full vocabulary, before top-k and top-p (semantics.md §0.2); T = 1 for greedy rows. A row whose logits are not
        finite gets nan.
    """
    logits = logits.float()
    temperatures = [row.temperature or 1.0 for row in rows]
    if any(temperature != 1.0 for temperature in temperatures):
        logits = logits / torch.tensor(temperatures, device=logits.device).unsqueeze(1)
    logprobs = torch.log_softmax(logits, dim=-1)
    random = [index for index, row in enumerate(rows) if row.temperature > 0]
    if not random:
        ids = logits.argmax(dim=-1)
    elif len(random) == len(rows):
        ids = _draw(logprobs, rows)
    else:
        ids = logits.argmax(dim=-1)
        ids[random] = _draw(logprobs[random], [rows[index] for index in random])
    chosen = logprobs.gather(1, ids.unsqueeze(1)).squeeze(1)
    return ids.tolist(), chosen.tolist()


def _draw(logprobs: torch.Tensor, rows: Sequence[Row]) -> torch.Tensor:
    """Inverse-CDF draw in float64 over the kept tokens in vocabulary order; (B, V) -> (B,)."""
    probs = logprobs.double().exp_()
    filtered = [index for index, row in enumerate(rows) if row.top_p < 1 or 0 < row.top_k < logprobs.shape[1]]
    if filtered:
        keep = kept(logprobs[filtered], [rows[i].top_k for i in filtered], [rows[i].top_p for i in filtered])
        probs[filtered] = probs[filtered].masked_fill_(~keep, 0.0)
    cdf = probs.cumsum(dim=-1)
    total = cdf[:, -1:]
    uniforms = torch.tensor([float(row.uniforms[len(row.ids)]) for row in rows], dtype=torch.float64)
    target = uniforms.to(cdf.device).unsqueeze(1) * total
    # u < 1, but u * total may round up to total, past the last token that has any probability.
    target = torch.minimum(target, torch.nextafter(total, torch.zeros_like(total)))
    # The first index whose cdf exceeds the target: its own probability is above zero, whatever was filtered.
    return torch.searchsorted(cdf, target, right=True).squeeze(1).clamp_(max=cdf.shape[1] - 1)


def kept(logprobs: torch.Tensor, top_k: Sequence[int], top_p: Sequence[float]) -> torch.Tensor:
    """Which tokens survive top-k and then top-p.

    The k most probable tokens stay (0: all), are renormalised, and of those the fewest whose probabilities sum to
    at least p. Of tokens tied at the border the lower ids stay.

    Args:
        logprobs: (B, V) float32.
        top_k: B counts, 0 for off.
        top_p: B masses in (0, 1].

    Returns:
        (B, V) bool with at least one True per row.
    """
    size = logprobs.shape[1]
    counts = torch.tensor([min(k, size) if k > 0 else size for k in top_k], device=logprobs.device).unsqueeze(1)
    masses = torch.tensor(top_p, dtype=torch.float64, device=logprobs.device).unsqueeze(1)
    widest = int(counts.max())
    ranked = logprobs.topk(widest, dim=-1).values if widest < size else logprobs.sort(dim=-1, descending=True).values
    ranks = torch.arange(widest, device=logprobs.device)
    probs = ranked.double().exp().masked_fill(ranks >= counts, 0.0)
    before = probs.cumsum(dim=-1) - probs
    inside = (before < masses * probs.sum(dim=-1, keepdim=True)) & (ranks < counts)
    inside[:, 0] = True
    number = inside.sum(dim=-1, keepdim=True)
    border = ranked.gather(1, number - 1)
    above = logprobs > border
    tied = logprobs == border
    return above | (tied & (tied.cumsum(dim=-1) <= number - above.sum(dim=-1, keepdim=True)))
