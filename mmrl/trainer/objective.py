"""Input of the trainer, and the one objective over it.

Part of `trainer`; made from a forest and its credit, or by the supervised stage with advantage 1.
Blind to algorithms: every paper's rewards, groups and normalisation have become an advantage and a weight per token
before they come here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from mmrl.credit.entries import Entry
from mmrl.errors import MmrlError
from mmrl.records import Call


def active(entry: Entry, beta: float) -> bool:
    """Return True if an entry can move any weights at all, given the weight `beta` of the KL term."""
    return any(
        weight != 0 and (advantage != 0 or entry.returns is not None or (beta > 0 and not entry.distilled))
        for weight, advantage in zip(entry.weights, entry.advantages, strict=True)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainCall:
    """Generation to train on: forwarded once, entered into the loss once per entry. T is its completion length."""

    call: Call
    """The sampled call. Its `completion_ids` are all that is trained (with T = 0 it is skipped); its `logprobs` are the
    ratio's denominator (None: recomputed before the first update of the step), its `ref_logprobs` the reference's
    (None: computed when the KL term needs them), its `values` the critic's before the step."""
    entries: tuple[Entry, ...] = ()
    """Weights hold all normalisation: the loss is the weighted sum over the tokens of an optimizer step."""
    minibatch: int = 0
    """Index of its optimizer step within an epoch."""
    view: Call | None = None
    """The call as its teacher reads it, where its distilled entry is the exact divergence (`algo.distill_kl`)."""

    @property
    def kl_weights(self) -> tuple[float, ...] | None:
        """Weights of the divergence from the teacher, length T; None without."""
        found = (entry.weights for entry in self.entries if entry.distilled and any(entry.weights))
        return None if self.view is None else next(found, None)

    def __post_init__(self) -> None:
        call, tokens = self.call, len(self.call.completion_ids)
        if tokens and not call.prompt_ids:
            raise MmrlError(f"call {call.id}: has no prompt tokens, so its first completion token cannot be predicted")
        # Checked here, once: a shorter tuple would train the wrong tokens, and a zip somewhere would not say so.
        per_token = {"logprobs": call.logprobs, "ref_logprobs": call.ref_logprobs, "values": call.values}
        if call.values is not None and len(call.values) == tokens + call.observation_tokens:
            # With `algo.obs=all` the critic has valued the observation after the completion too.
            per_token["values"] = call.values[:tokens]
        for number, entry in enumerate(self.entries):
            parts = {"advantages": entry.advantages, "weights": entry.weights, "returns": entry.returns}
            per_token |= {f"entries[{number}].{name}": values for name, values in parts.items()}
        for name, values in per_token.items():
            if values is not None and len(values) != tokens:
                raise MmrlError(f"call {call.id}: {name} has {len(values)} values for {tokens} completion tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBatch:
    """Everything that one step trains on."""

    step: int
    """Step number, from 1."""
    calls: list[TrainCall]
    minibatches: int = 1
    """Optimizer steps of one epoch; every `TrainCall.minibatch` is below it."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Passed through to `on_step_end` unchanged."""


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """The objective of some tokens (E of them, one per token of each entry) and what it is made of."""

    loss: torch.Tensor
    """Scalar, to be minimised."""
    ratio: torch.Tensor
    """exp(logprobs - old), of the token or (`gspo`) of its call; (E,), detached like every tensor below."""
    clipped: torch.Tensor
    """True where the bound on the ratio is active, (E,) bool: the policy term's gradient is 0, or (`cispo`) bounded."""
    kl: torch.Tensor | None
    """k3 estimate of KL(policy || reference) in nats, (E,); None without a reference."""
    correction: Correction | None = None
    """Weights of the policy term; None without truncated importance sampling."""


@dataclass(frozen=True, slots=True)
class Correction:
    """Truncated importance weights of some tokens: sampler against trainer, before any update of the step."""

    weights: torch.Tensor
    """(E,), detached, at most the cap; 1 where the sampler's log-probability is not known."""
    truncated: torch.Tensor
    """True where the cap is below the plain weight, (E,) bool."""


def truncated_weights(before: torch.Tensor, sampled: torch.Tensor, cap: float) -> Correction:
    """Compute min(exp(before - sampled), cap) per token: truncated importance sampling (Ionides, 2008).

    Sampler and trainer compute the same policy with other kernels, precisions or (with `train.staleness`) versions of
    the weights; the weight makes the sampler's tokens stand for the trainer's distribution, and the cap bounds what
    one token can weigh.

    Args:
        before: the trainer's log-probabilities before the first update of the step, (E,).
        sampled: the sampler's, (E,); NaN where they are not known.
    """
    # A weight, not a part of the ratio: the gradient must not flow through it, and clipping must not see it.
    with torch.no_grad():
        weights = torch.where(sampled.isnan(), torch.ones_like(before), torch.exp(before - sampled))
        return Correction(weights.clamp(max=cap), weights > cap)


def token_loss(
    logprobs: torch.Tensor,
    old: torch.Tensor,
    ref: torch.Tensor | None,
    advantages: torch.Tensor,
    weights: torch.Tensor,
    clip: float,
    clip_high: float | None,
    beta: float,
    ratio_one: bool = False,
    correction: Correction | None = None,
    kind: str = "clip",
    calls: torch.Tensor | None = None,
    rewarded: torch.Tensor | None = None,
) -> TokenLoss:
    """Sum w_t * (-min(r_t A_t, clip(r_t, 1 - clip, 1 + clip_high) A_t) + beta * k3_t), r_t = exp(logprobs - old).

    With `correction` the policy term, not the KL term, is multiplied by its weights. Two other policy terms:

    `gspo` (arXiv 2507.18071): r_t = exp(mean over the call's tokens of logprobs - old), one ratio for the whole call,
    with the gradient of the token's own log-probability.
    `cispo` (arXiv 2506.13585): -sg(min(r_t, 1 + clip_high)) A_t logprobs, sg: without gradient; the bound limits how
    much a token weighs and takes no token's gradient away. There is no lower one, as in the paper's runs.

    k3 = exp(ref - logprobs) - (ref - logprobs) - 1 (Schulman's estimator, as in GRPO, arXiv 2402.03300, Eq. 4). The
    clipped term is PPO's (arXiv 1707.06347, Eq. 7). Every tensor has shape (E,).

    Args:
        logprobs: of the policy in training, with gradient.
        old: of the policy that sampled.
        ref: of the reference policy; needed when `beta` > 0.
        weights: normalisation included; packs leave out tokens of weight 0.
        clip_high: upper epsilon; None: `clip`.
        ratio_one: `old` is the policy in training itself, so that r_t = 1 with the gradient of log-probability.
        correction: truncated importance weights; None: all 1.
        kind: `clip`, `cispo` or `gspo`.
        calls: index of each token's call, (E,) int64; needed for `gspo`.
        rewarded: False for tokens without a KL term, (E,) bool; None: all have one.
    """
    high = clip if clip_high is None else clip_high
    # (E,). With ratio_one the value is exactly 1, the gradient that of logprobs: REINFORCE with PPO's bookkeeping.
    log_ratio = logprobs - (logprobs.detach() if ratio_one else old)
    if kind == "gspo":
        assert calls is not None
        # A call that takes several places in the loss repeats its tokens, which leaves their mean as it is.
        own = log_ratio.detach()
        sums = torch.zeros(int(calls.max()) + 1 if len(calls) else 0).to(own).index_add(0, calls, own)
        # The value is the call's, the gradient each token's own (the paper's GSPO-token, Eq. 13 and 14): the same where
        # a call has one advantage, and where its tokens have their own (a critic's, a teacher's), each is pushed by it.
        log_ratio = (sums / torch.bincount(calls).clamp(min=1))[calls] + log_ratio - own
    ratio = torch.exp(log_ratio)
    low = 0.0 if kind == "cispo" else 1 - clip
    bounded = ratio.clamp(low, 1 + high)
    if kind == "cispo":
        per_token = -bounded.detach() * advantages * logprobs
    else:
        # The smaller of the two is the pessimistic bound: a token is held back only where moving on would gain.
        per_token = -torch.minimum(ratio * advantages, bounded * advantages)
    if correction is not None:
        per_token = per_token * correction.weights
    kl = None
    if ref is not None:
        # k3, not the plain log-ratio (k1): never negative, of low variance near the reference, and its gradient with
        # respect to the policy, 1 - exp(gap), pulls towards the reference on every sampled token.
        gap = ref - logprobs
        kl = torch.exp(gap) - gap - 1
        if beta > 0:
            per_token = per_token + (beta * kl if rewarded is None else beta * kl * rewarded)
    with torch.no_grad():
        # Beyond the bound, and on the side where the minimum takes the bounded branch: no gradient from this token.
        upper_side = torch.ones_like(ratio, dtype=torch.bool) if kind == "cispo" else advantages > 0
        clipped = ((ratio < low) & (advantages < 0)) | ((ratio > 1 + high) & upper_side)
    # A plain sum: `weights` hold every mean (over tokens, calls, groups), so packs and processes just add up.
    kl = None if kl is None else kl.detach()
    return TokenLoss((weights * per_token).sum(), ratio.detach(), clipped, kl, correction)


@dataclass(frozen=True, slots=True)
class ValueLoss:
    """The critic's objective of some tokens."""

    loss: torch.Tensor
    """Scalar, to be minimised."""
    clipped: torch.Tensor
    """True where the clipped square is the larger one, (E,) bool."""


def value_loss(
    values: torch.Tensor, old: torch.Tensor, returns: torch.Tensor, weights: torch.Tensor, clip: float
) -> ValueLoss:
    """Return the sum of w_t * 0.5 * max((V_t - R_t)^2, (clip(V_t, old_t - clip, old_t + clip) - R_t)^2); shapes (E,).

    The clipped value loss of PPO implementations; no paper's equation, described with others in arXiv 2005.12729.
    """
    bounded = old + (values - old).clamp(-clip, clip)
    plain_error, bounded_error = (values - returns).square(), (bounded - returns).square()
    # Within the bounds `bounded` is V_t up to rounding, so the errors alone would count tokens that nothing clips.
    clipped = (bounded_error > plain_error) & ((values - old).abs() > clip)
    return ValueLoss((weights * 0.5 * torch.maximum(plain_error, bounded_error)).sum(), clipped.detach())
