"""Named alarms for the known ways in which a run goes wrong: a pure function of the metric history.

Part of `report`; read by the live display and the HTML report. An alarm never stops a run. Every rule looks at
trailing means over `window` steps, so that one odd batch does not ring; thresholds are fields of `Thresholds`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from mmrl.report.series import History, keys_in, series, short, trailing_mean

VALIDITY_FACTS = ("valid", "valid_share", "format", "format_ok", "format_rate", "ok")
"""Behaviour facts (last part of a `module/<m>/…` key) that are shares of well-formed completions."""
FAULT_FACTS = ("invalid", "invalid_selection", "invalid_share", "unparsable")
"""Behaviour facts that are shares of ill-formed completions."""
MUST_BE_FINITE = ("train/loss", "train/grad_norm", "train/kl", "reward/mean")


@dataclass(frozen=True, slots=True, kw_only=True)
class Thresholds:
    """When alarms ring."""

    window: int = 5
    """Steps of the trailing mean; nothing rings before that many steps."""
    reward_drop: float = 0.5
    """`reward_collapse`: share of the best trailing reward that is lost..."""
    reward_drop_least: float = 0.1
    """... and at least this much in absolute terms."""
    entropy_left: float = 0.05
    """`entropy_collapse`: share of the first trailing entropy that is left."""
    zero_variance: float = 0.95
    """`zero_variance`: share of groups whose rewards are all equal."""
    logprob_gap: float = 0.05
    """`logprob_gap`: mean |trainer - sampler| log-probability per token, in nats."""
    kl: float = 1.0
    """`kl_explosion`: KL to the reference in nats per token..."""
    kl_growth: float = 5.0
    """... and this many times what it was two windows before (10 times `kl` rings without growth)."""
    validity_drop: float = 0.2
    """`format_falling`: fall of a share of valid completions below its best (or rise of a share of faulty ones)."""
    failed_share: float = 0.2
    """`failures`: share of rollouts that failed."""
    judge_fallback: float = 0.2
    """`judge_unreadable`: share of rollouts that the fixed rule scores, since no reply of the judge can be read."""
    length_growth: float = 3.0
    """`length_runaway`: growth of the mean completion length..."""
    cut_rise: float = 0.3
    """... or rise of the share of completions cut at the limit, to at least one half."""
    clip_share: float = 0.3
    """`clipping`: share of trained tokens whose ratio is clipped."""
    similarity: float = 0.98
    """`copies`: mean token F1 between the texts of a group."""
    calls_lost: float = 0.4
    """`calls_falling`: share of the most calls per rollout that is lost..."""
    calls_lost_least: float = 0.5
    """... and at least this many calls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarm:
    """One stretch of steps during which a rule held."""

    name: str
    key: str
    """The metric that rang."""
    step: int
    """First step."""
    until: int | None
    """Last step; None: still on."""
    message: str
    """What was seen and what to try."""


def alarms(history: History, thresholds: Thresholds | None = None) -> list[Alarm]:
    """All alarms of a run in order of their first step; those still on have `until=None`."""
    found: list[Alarm] = []
    for name, key, steps, on, say in findings(history, thresholds or Thresholds()):
        found += _stretches(name, key, steps, on, say)
    return sorted(found, key=lambda alarm: (alarm.step, alarm.name, alarm.key))


def current(history: History, thresholds: Thresholds | None = None) -> list[Alarm]:
    """Alarms that are on at the last step."""
    return [alarm for alarm in alarms(history, thresholds) if alarm.until is None]


Finding = tuple[str, str, np.ndarray, np.ndarray, Any]
"""(alarm name, key, steps, where it rings, message of a place)."""


def findings(history: History, limits: Thresholds) -> Iterator[Finding]:
    """What every rule says of every metric that it reads, whether it rings or not."""
    rules = (_reward, _entropy, _zero_variance, _gap, _kl, _validity, _failures, _judge, _length, _finite)
    for rule in (*rules, _clip, _similarity, _calls):
        yield from rule(history, limits)


def _smooth(history: History, key: str, limits: Thresholds) -> tuple[np.ndarray, np.ndarray]:
    """Steps and trailing means of `key`, from the first full window on; empty when there is none."""
    steps, values = series(history, key)
    means = trailing_mean(values, limits.window)
    return steps[limits.window - 1 :], means[limits.window - 1 :]


def _reward(history: History, limits: Thresholds) -> Iterator[Finding]:
    steps, means = _smooth(history, "reward/mean", limits)
    best = np.maximum.accumulate(means) if len(means) else means
    on = best - means > np.maximum(limits.reward_drop * np.abs(best), limits.reward_drop_least)
    yield (
        "reward_collapse",
        "reward/mean",
        steps,
        on,
        lambda at: (
            f"reward fell to {short(means[at])} from its best of {short(best[at])}; "
            "go back to an earlier checkpoint, with a lower train.lr or a higher algo.beta"
        ),
    )


def _entropy(history: History, limits: Thresholds) -> Iterator[Finding]:
    # A trainer that computes no entropy leaves the sampler's estimate of it, `surprise`.
    for key in _module_keys(history, ("entropy",)) or _module_keys(history, ("surprise",)):
        steps, means = _smooth(history, key, limits)
        if len(means) and means[0] > 0:
            yield (
                "entropy_collapse",
                key,
                steps,
                means < limits.entropy_left * means[0],
                lambda at, means=means: (
                    f"entropy is {short(means[at])}, {means[at] / means[0]:.0%} of what it was at first: nearly all "
                    "samples agree; if reward has stopped rising, raise algo.temperature or lower train.lr"
                ),
            )


def _zero_variance(history: History, limits: Thresholds) -> Iterator[Finding]:
    key = "credit/zero_variance_share"
    steps, means = _smooth(history, key, limits)
    yield (
        "zero_variance",
        key,
        steps,
        means >= limits.zero_variance,
        lambda at: (
            f"{means[at]:.0%} of the groups have equal rewards, so almost nothing is learned; "
            "data too easy or too hard, algo.group_size too small, or a reward that is always the same"
        ),
    )


def _above(
    history: History, limits: Thresholds, name: str, key: str, limit: float, say: Callable[[float], str]
) -> Iterator[Finding]:
    """The rule of most metrics: their mean over the window is above a limit."""
    steps, means = _smooth(history, key, limits)
    yield name, key, steps, means > limit, lambda at: say(float(means[at]))


def _gap(history: History, limits: Thresholds) -> Iterator[Finding]:
    yield from _above(
        history,
        limits,
        "logprob_gap",
        "train/logprob_gap_mean",
        limits.logprob_gap,
        lambda mean: (
            f"sampler and trainer disagree by {short(mean)} nats per token; weights out of step, or another "
            "precision or temperature on one side; train.old_logprobs=recompute hides it from the ratio"
        ),
    )


def _kl(history: History, limits: Thresholds) -> Iterator[Finding]:
    steps, means = _smooth(history, "train/kl", limits)
    lag = 2 * limits.window
    before = np.concatenate([np.full(min(lag, len(means)), np.inf), means])[: len(means)]
    starts = (means > limits.kl_growth * before) | (means > 10 * limits.kl)
    on = np.zeros(len(means), dtype=bool)
    for at, mean in enumerate(means):  # once it has exploded it stays on until KL is down again
        on[at] = mean > limits.kl and bool(starts[at] or (at > 0 and on[at - 1]))
    yield (
        "kl_explosion",
        "train/kl",
        steps,
        on,
        lambda at: (
            f"KL to the reference is {short(means[at])} nats per token, after {short(means[0])} at first; "
            "lower train.lr or raise algo.beta"
        ),
    )


def _validity(history: History, limits: Thresholds) -> Iterator[Finding]:
    for key in _module_keys(history, VALIDITY_FACTS):
        steps, means = _smooth(history, key, limits)
        best = np.maximum.accumulate(means) if len(means) else means
        yield (
            "format_falling",
            key,
            steps,
            best - means > limits.validity_drop,
            lambda at, means=means, best=best: (
                f"valid share fell to {means[at]:.0%} from {best[at]:.0%}; look at completions with mmrl show"
            ),
        )
    for key in _module_keys(history, FAULT_FACTS):
        steps, means = _smooth(history, key, limits)
        best = np.minimum.accumulate(means) if len(means) else means
        yield (
            "format_falling",
            key,
            steps,
            means - best > limits.validity_drop,
            lambda at, means=means, best=best: (
                f"faulty share rose to {means[at]:.0%} from {best[at]:.0%}; look at completions with mmrl show"
            ),
        )


def _failures(history: History, limits: Thresholds) -> Iterator[Finding]:
    yield from _above(
        history,
        limits,
        "failures",
        "rollouts/failed_share",
        limits.failed_share,
        lambda mean: f"{mean:.0%} of the rollouts fail; rollouts/failed/<kind> says why",
    )


def _judge(history: History, limits: Thresholds) -> Iterator[Finding]:
    yield from _above(
        history,
        limits,
        "judge_unreadable",
        "task/judge_fallback",
        limits.judge_fallback,
        lambda mean: (
            f"{mean:.0%} of the rollouts are scored by the fixed rule, since no reply of the judge can be read: "
            "rewards are too low; raise task.judge.max_tokens, or take another task.judge.model"
        ),
    )


def _length(history: History, limits: Thresholds) -> Iterator[Finding]:
    for key in _module_keys(history, ("length",)):
        steps, means = _smooth(history, key, limits)
        if len(means) and means[0] > 0:
            yield (
                "length_runaway",
                key,
                steps,
                means > limits.length_growth * means[0],
                lambda at, means=means: (
                    f"completions grew from {short(means[0])} to {short(means[at])} tokens; "
                    "length may be what earns reward"
                ),
            )
    for key in _module_keys(history, ("finish_length_share",)):
        steps, means = _smooth(history, key, limits)
        if len(means):
            yield (
                "length_runaway",
                key,
                steps,
                (means >= 0.5) & (means - means[0] > limits.cut_rise),
                lambda at, means=means: (
                    f"{means[at]:.0%} of the completions are cut at the limit (first {means[0]:.0%}); "
                    "raise task.max_tokens, or look for a missing end of turn"
                ),
            )


def _clip(history: History, limits: Thresholds) -> Iterator[Finding]:
    key = "train/clip_share"
    steps, means = _smooth(history, key, limits)
    yield (
        "clipping",
        key,
        steps,
        means > limits.clip_share,
        lambda at: (
            f"{means[at]:.0%} of the trained tokens are clipped, so most of the batch has no gradient; "
            "lower train.lr, or fewer algo.epochs and algo.minibatches"
        ),
    )


def _similarity(history: History, limits: Thresholds) -> Iterator[Finding]:
    for key in [key for key in keys_in(history) if key.startswith("similarity/")]:
        steps, means = _smooth(history, key, limits)
        yield (
            "copies",
            key,
            steps,
            means >= limits.similarity,
            lambda at, means=means: (
                f"texts of a group agree to {means[at]:.0%}: exploration is gone; raise algo.temperature if reward "
                "has stopped rising"
            ),
        )


def _calls(history: History, limits: Thresholds) -> Iterator[Finding]:
    key = "rollouts/calls_per_rollout"
    steps, means = _smooth(history, key, limits)
    best = np.maximum.accumulate(means) if len(means) else means
    yield (
        "calls_falling",
        key,
        steps,
        best - means > np.maximum(limits.calls_lost * best, limits.calls_lost_least),
        lambda at: (
            f"rollouts fell to {short(means[at])} calls from {short(best[at])}: the policy stopped using its tools or "
            "fails early; reward its turns (algo=mt_grpo, mt_ppo), or read rollouts with mmrl show"
        ),
    )


def _finite(history: History, limits: Thresholds) -> Iterator[Finding]:
    for key in MUST_BE_FINITE:
        places = [record for record in history if isinstance(record.get(key), float)]
        yield (
            "not_finite",
            key,
            np.array([record["step"] for record in places], dtype=np.int64),
            np.array([not math.isfinite(record[key]) for record in places], dtype=bool),
            lambda at, places=places, key=key: f"{key} is {places[at][key]}; lower train.lr, check model.dtype",
        )


def _module_keys(history: History, facts: tuple[str, ...]) -> list[str]:
    kinds = ("module/", "turn/")
    return [key for key in keys_in(history) if key.startswith(kinds) and key.rsplit("/", 1)[1] in facts]


def _stretches(name: str, key: str, steps: np.ndarray, on: np.ndarray, say: Any) -> list[Alarm]:
    """One alarm per maximal run of True in `on`."""
    if not len(on) or not on.any():
        return []
    padded = np.concatenate([[False], on, [False]]).astype(np.int8)
    starts = np.flatnonzero(np.diff(padded) == 1)
    ends = np.flatnonzero(np.diff(padded) == -1) - 1
    return [
        Alarm(
            name=name,
            key=key,
            step=int(steps[start]),
            until=None if end == len(on) - 1 else int(steps[end]),
            message=say(int(start if end < len(on) - 1 else end)),
        )
        for start, end in zip(starts, ends, strict=True)
    ]
