"""Loss entries of on-policy distillation, beside those of any algorithm (`algo.distill`).

    A_t = log pi_T(o_t | h, g) - log pi_S(o_t | h);  token weight = distill_coef / (n · |o|)

pi_S is the policy that is trained, pi_T the teacher of the call's module, which may read more (g, `algo.privileged`);
both are computed before the first update. In expectation over the policy's own tokens this is the gradient of the
reverse KL divergence of one token, KL(pi_S || pi_T), as in arXiv 2306.08543 (MiniLLM) and TRL's distillation. n counts
the calls of one module and invocation in an optimizer step: a module weighs the same, however often others are called.
With `algo.distill_kl=exact` the trainer takes that divergence itself, with these weights; A is for people to read then.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean

from mmrl.config.algo import AlgoConfig
from mmrl.credit.entries import Entry
from mmrl.credit.loss_weights import LossSequence, Minibatches, minibatch_of, per_token
from mmrl.records import Call, Forest


def distilled_entries(forest: Forest, algo: AlgoConfig, minibatch: Minibatches = None) -> list[Entry]:
    """Return an entry for each call of a module with a teacher, whatever its groups and rewards are.

    Calls count once, also those that several rollouts share; rollouts that failed from an outside cause have none, and
    neither have calls that a teacher made (mmGRPO) or that have no tokens.
    """
    credited = {call.id for rollout in forest.rollouts if not rollout.failed_outside for call in forest.path(rollout)}
    slots: dict[tuple[int, str, int], list[Call]] = defaultdict(list)
    for call in forest.calls.values():
        taught = call.module in (algo.distill or {}) and call.teacher is None
        if taught and call.id in credited and call.distillation:
            slots[minibatch_of(call.example, minibatch), call.module, call.invocation].append(call)
    entries = []
    for calls in slots.values():
        sequences = [LossSequence(call.example, 0, call.completion_tokens) for call in calls]
        # A slot on its own: with `loss_mean=token` it is its tokens that share, not those of other modules.
        weights = per_token(sequences, [1 / len(calls)] * len(calls), algo)
        for call, weight in zip(calls, weights, strict=True):
            assert call.distillation is not None
            entries.append(
                Entry(
                    call=call.id,
                    # What a reward would be: the mean over tokens, for people to read.
                    reward=fmean(call.distillation),
                    parts={"distillation": fmean(call.distillation)},
                    advantages=call.distillation,
                    weights=(algo.distill_coef * weight,) * call.completion_tokens,
                    distilled=True,
                )
            )
    return entries


def distillation_metrics(forest: Forest, algo: AlgoConfig, entries: Sequence[Entry]) -> dict[str, float]:
    """Return `module/<m>/teacher_gap`, the mean of log pi_T - log pi_S over the module's tokens, in nats.

    Also `module/<m>/untaught_share`: calls of the policy that have no teacher, or with `task.reward=privileged` no
    reward by what it reads (`stages.distillation`); and, where rewards have entries, `credit/teachers_to_rewards`: the
    sum of |A| · weight of teachers' tokens over that of rewards (with `distill_kl=exact` still of what was sampled).
    """
    calls: dict[str, list[Call]] = defaultdict(list)
    scored = {**(algo.distill or {}), **(algo.privileged or {})}
    for call in forest.calls.values():
        if call.module in scored and call.teacher is None and call.completion_tokens:
            calls[call.module].append(call)
    metrics = {}
    for module, own in calls.items():
        if gaps := [gap for call in own for gap in call.distillation or ()]:
            metrics[f"module/{module}/teacher_gap"] = fmean(gaps)
        # Without a teacher in the loss, it is turn rewards that privileged text gives (`task.reward=privileged`).
        without = [
            call.distillation is None if module in (algo.distill or {}) else "privileged_gain" not in call.facts
            for call in own
        ]
        metrics[f"module/{module}/untaught_share"] = fmean(without)
    if algo.distill is None:
        return metrics
    size = {True: 0.0, False: 0.0}
    for entry in entries:
        size[entry.distilled] += sum(abs(a) * weight for a, weight in zip(entry.advantages, entry.weights, strict=True))
    if size[False]:
        metrics["credit/teachers_to_rewards"] = size[True] / size[False]
    return metrics
