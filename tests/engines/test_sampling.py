"""Sampling: recorded log-probabilities, filters against a slow reference, the distribution that comes out."""

from __future__ import annotations

import math
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmrl.engines.base import Request, Sampling
from mmrl.engines.embedded import sampling
from mmrl.engines.embedded.batch_rows import BatchRow
from mmrl.engines.embedded.sampling import sample, surviving


def row(uniforms: object = (0.5,), temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0) -> BatchRow:
    settings = Sampling(max_tokens=1, temperature=temperature, top_p=top_p, top_k=top_k)
    asked = Request(prompt_ids=(1,), sampling=settings)
    return BatchRow(request=asked, limit=1, uniforms=np.asarray(uniforms, dtype=np.float64))


def slow_kept(logprobs: list[float], top_k: int, top_p: float) -> set[int]:
    """The definition, one token at a time, in Python floats."""
    order = sorted(range(len(logprobs)), key=lambda token: (-logprobs[token], token))
    order = order[:top_k] if top_k else order
    total = math.fsum(math.exp(logprobs[token]) for token in order)
    chosen, mass = [], 0.0
    for token in order:
        if chosen and mass >= top_p * total:
            break
        chosen.append(token)
        mass += math.exp(logprobs[token])
    return set(chosen)


def test_recorded_logprob_is_at_temperature_and_before_filters() -> None:
    logits = torch.tensor([[1.0, 2.0, 4.0], [1.0, 2.0, 4.0], [1.0, 2.0, 4.0]])
    rows = [row(temperature=0.5, top_k=1), row(temperature=0.0), row(temperature=2.0, top_p=0.1)]
    ids, logprobs = sample(logits, rows)
    assert ids == [2, 2, 2]
    for temperature, logprob in zip((0.5, 1.0, 2.0), logprobs, strict=True):
        expected = 4 / temperature - math.log(sum(math.exp(x / temperature) for x in (1, 2, 4)))
        assert logprob == pytest.approx(expected, abs=1e-6)


def test_recorded_logprob_ignores_filters_when_every_row_has_one() -> None:
    logits = torch.randn(5, 200, generator=torch.Generator().manual_seed(0))
    ids, logprobs = sample(logits, [row([0.1 * i], top_k=3, top_p=0.7) for i in range(5)])
    expected = torch.log_softmax(logits, dim=-1).gather(1, torch.tensor(ids).unsqueeze(1)).squeeze(1)
    assert logprobs == pytest.approx(expected.tolist(), abs=1e-6)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.integers(-40, 40), min_size=1, max_size=30),
    st.integers(0, 32),
    st.sampled_from([0.05, 0.3, 0.5, 0.77, 0.9, 0.99, 1.0]),
    st.sampled_from([1, 3, 8, 64]),
)
def test_filters_equal_the_slow_reference(quarters: list[int], top_k: int, top_p: float, ranked: int) -> None:
    logprobs = torch.log_softmax(torch.tensor([quarters], dtype=torch.float32) / 4 + 0.01, dim=-1)
    with patch.object(sampling, "RANKED", ranked):
        mask = surviving(logprobs, [top_k], [top_p])[0]
    fast = {token for token in range(len(quarters)) if mask[token]}
    slow = slow_kept(logprobs[0].tolist(), top_k, top_p)
    if fast != slow:  # only a nucleus whose mass equals p to the last bits may differ: by its last token, or by such
        # as no sum in float32 shows (with p = 1 there may be several)
        assert sum(math.exp(logprobs[0, token]) > 1e-6 for token in fast ^ slow) <= 1
        masses = [sum(math.exp(logprobs[0, token]) for token in chosen) for chosen in (fast & slow,)]
        whole = sum(sorted((math.exp(x) for x in logprobs[0].tolist()), reverse=True)[: top_k or None])
        assert masses[0] == pytest.approx(top_p * whole, abs=1e-5)


def test_rows_whose_border_lies_beyond_the_ranked_tokens_are_ranked_whole() -> None:
    peaked, flat = [8.0, *[0.0] * 199], [0.0] * 200
    logprobs = torch.log_softmax(torch.tensor([peaked, flat, flat, peaked]), dim=-1)
    # Borders between two tokens: a share of exactly 90 of 100 would be decided by the last bit of a machine's sums.
    counts = surviving(logprobs, [0, 0, 100, 70], [0.9, 0.899, 0.499, 1.0]).sum(dim=-1)
    assert counts.tolist() == [1, 180, 50, 70]


def test_filters_differ_by_row() -> None:
    logprobs = torch.log_softmax(torch.tensor([[0.0, 1.0, 2.0, 3.0]] * 3), dim=-1)
    assert surviving(logprobs, [0, 2, 1], [1.0, 1.0, 0.2]).tolist() == [
        [True, True, True, True],
        [False, False, True, True],
        [False, False, False, True],
    ]


@pytest.mark.parametrize(
    ("temperature", "top_p", "top_k"), [(1.0, 1.0, 0), (0.6, 1.0, 0), (1.0, 0.8, 0), (1.3, 0.9, 6)]
)
def test_distribution(temperature: float, top_p: float, top_k: int) -> None:
    draws = 20_000
    logits = torch.randn(1, 12, generator=torch.Generator().manual_seed(3)) * 1.5
    logprobs = torch.log_softmax(logits / temperature, dim=-1)[0].tolist()
    allowed = slow_kept(logprobs, top_k, top_p)
    probs = np.array([math.exp(x) if token in allowed else 0.0 for token, x in enumerate(logprobs)])
    probs /= probs.sum()
    uniforms = np.random.Generator(np.random.Philox(key=11)).random(draws)
    ids, _ = sample(logits.expand(draws, -1), [row([u], temperature, top_p, top_k) for u in uniforms])
    counts = np.bincount(ids, minlength=12)
    assert counts[probs == 0].sum() == 0
    expected = probs[probs > 0] * draws
    chi2 = float((((counts[probs > 0] - expected) ** 2) / expected).sum())
    freedom = len(expected) - 1
    assert chi2 < freedom + 4.5 * math.sqrt(2 * freedom)


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1 - 2**-53])
@pytest.mark.parametrize("size", [1, 7, 5000])
def test_a_token_of_probability_zero_is_never_drawn(uniform: float, size: int) -> None:
    logits = torch.randn(1, size, generator=torch.Generator().manual_seed(size))
    logits = torch.cat([torch.full((1, 3), -math.inf), logits, torch.full((1, 3), -math.inf)], dim=1)
    ids, logprobs = sample(logits, [row([uniform])])
    assert 3 <= ids[0] < 3 + size
    assert math.isfinite(logprobs[0])


def test_inverse_cdf_in_vocabulary_order() -> None:
    logits = torch.tensor([[0.2, 0.5, 0.3]]).log()
    drawn = [sample(logits, [row([u])])[0][0] for u in (0.0, 0.19, 0.21, 0.69, 0.71, 0.999)]
    assert drawn == [0, 0, 1, 1, 2, 2]


def test_logits_that_are_not_finite_give_nan() -> None:
    _, logprobs = sample(torch.full((2, 4), math.nan), [row(), row(temperature=0.0)])
    assert all(math.isnan(x) for x in logprobs)
