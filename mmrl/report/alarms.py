"""Named alarms for the known ways in which a run goes wrong: a pure function of the metric history.

Read by the live display and the HTML report. An alarm never stops a run. Rules are rows of a table (`rules`): they look
at trailing means over a window of steps, so that one odd batch does not ring.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TypeAlias

import numpy as np

from mmrl.errors import MODEL_CAUSED
from mmrl.report.advice import ADVICE, FAILURES
from mmrl.report.stats import (
    FAILED,
    LOST,
    WINDOW,
    History,
    Metrics,
    keys_in,
    number,
    rollout_count,
    series,
    trailing_mean,
)

VALIDITY_FACTS = ("valid", "valid_share", "format", "format_ok", "format_rate", "ok")
"""Behaviour facts (last part of a `module/<m>/…` key) that are shares of well-formed completions."""
FAULT_FACTS = ("invalid", "invalid_selection", "invalid_share", "unparsable")
"""Behaviour facts that are shares of ill-formed completions."""
NEVER_FACTS = (*FAULT_FACTS, "action_none")
"""Behaviour facts that are 1 where a module never writes what its program can use."""
MUST_BE_FINITE = ("train/loss", "train/grad_norm", "train/kl", "reward/mean")


CUT_SHARE = "/finish_length_share"
"""End of the keys of the share of replies that are cut."""
_LOST_KEY = re.compile(f"(eval/[^/]+/){LOST}")
"""The name of what an evaluation lost of a metric."""
MODULES = ("module/", "turn/")
"""Beginnings of the keys of modules and turns."""
ALL_FAILED = 0.95
"""Share of rollouts that failed from which on an alarm need not wait for a window of steps."""
NEVER_VALID = 0.05
"""Share of usable completions up to which a module learns next to nothing."""
ALL_CUT = 0.9
"""Share of replies cut at the limit above which a module hardly ever says what it would."""
EMPTY_SEARCHES = 0.3
"""Share of searches that bring nothing."""
UNLIKELY = 0.01
"""Probability of the gold answer up to which its differences from turn to turn are noise."""
SMALL_GAINS = 0.05
"""Size of turn rewards by evidence, in deviations of the outcome, up to which they say nothing beside it."""
OUTWEIGHED = 1.0
"""Size of what teachers say over that of rewards above which these change little: seen with 4, whose gradients were 30
times as large, and 0.7 (9 times), since a teacher's point one way and advantages of a group cancel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarm:
    """A stretch of steps during which a rule held."""

    name: str
    key: str
    step: int
    until: int | None
    """Last step; None: still on."""
    message: str


def alarms(history: History, window: int = WINDOW, extra: Sequence[AlarmRule] = ()) -> list[Alarm]:
    """Return all alarms of a run in order of their first step; those still on have `until=None`.

    Args:
        window: steps of the trailing means; before that many only failures of nearly all rollouts ring.
        extra: further rules than `rules`.
    """
    table = (*rules(history, window), *extra)
    raised = [alarm for rule in table for key in rule.keys for alarm in _rung(rule, key, history, window)]
    raised += [alarm for key in MUST_BE_FINITE for alarm in _not_finite(history, key)]
    raised += [alarm for key in keys_in(history) if _LOST_KEY.match(key) for alarm in _unlearned(history, key)]
    return sorted(_with_causes(raised, history), key=lambda alarm: (alarm.step, alarm.name, alarm.key))


CAUSES = {
    "zero_variance": ("replies_cut", "never_parses", "prompt_too_long", "limits"),
    "never_parses": ("replies_cut",),
    "format_falling": ("replies_cut",),
}
"""Alarm -> alarms that explain it, the first cause first."""


def _with_causes(raised: Sequence[Alarm], history: History) -> list[Alarm]:
    """Put alarms down to what causes them: replies that are cut or do not parse, or how most rollouts fail."""
    last = max((record["step"] for record in history), default=0)

    def explains(name: str, other: Alarm, alarm: Alarm) -> bool:
        end = last if alarm.until is None else alarm.until
        # Also of replies that have grown until they are cut.
        found = "replies_cut" if other.key.endswith(CUT_SHARE) else other.name
        if name != found or not other.step <= end <= (other.until or last):
            return False
        # What a module or turn writes is explained by its own replies alone.
        if alarm.key.startswith(MODULES) and alarm.key.rpartition("/")[0] != other.key.rpartition("/")[0]:
            return False
        steps, shares = _curve(history, other.key)
        stretch = shares[(steps >= alarm.step) & (steps <= end)]
        # Where half of the rollouts fail in one way, equal rewards are put down to it.
        return name == "never_parses" or bool(len(stretch) and stretch.mean() >= 0.5)

    def message(alarm: Alarm) -> str:
        causes = (o.message for name in CAUSES.get(alarm.name, ()) for o in raised if explains(name, o, alarm))
        cause = next(causes, None)
        return f"{re.split('; |, so ', alarm.message)[0]}, since {cause}" if cause else alarm.message

    return [replace(alarm, message=message(alarm)) for alarm in raised]


def _curve(history: History, key: str) -> tuple[np.ndarray, np.ndarray]:
    """Return steps and values of a metric; for a kind of failure its share of the rollouts of each step."""
    if not key.startswith(FAILED):
        return series(history, key)
    counts = [(record, count) for record in history if (count := rollout_count(record))]
    # A step without failures of this kind does not have the metric.
    shares = np.array([(number(record.get(key)) or 0.0) / count for record, count in counts], dtype=np.float64)
    return np.array([record["step"] for record, _ in counts], dtype=np.int64), shares


Criterion: TypeAlias = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]
"""Trailing means (n >= 1) -> where the rule rings, and the reference of the means; both of length n."""


@dataclass(frozen=True, slots=True)
class AlarmRule:
    """A row of the table of alarm rules."""

    name: str
    keys: Sequence[str]
    criterion: Criterion
    advice: str = ""
    """Name of its sentence in the table of advice; empty: `name`."""
    subject: str | None = None
    """Name in the sentence; None: the last part of the key."""
    early: bool = False
    """True: rings before `window` steps, too, if it holds for nearly all rollouts."""


def rules(history: History, window: int = WINDOW) -> tuple[AlarmRule, ...]:
    """Return all rules but `not_finite` and `unlearned`, which look at no mean."""
    # A trainer that computes no entropy leaves the sampler's estimate of it, `surprise`.
    entropy = module_keys(history, ("entropy",)) or module_keys(history, ("surprise",))
    similarity = [key for key in keys_in(history) if key.startswith("similarity/")]
    valid, faulty = module_keys(history, VALIDITY_FACTS), module_keys(history, FAULT_FACTS)
    useless = module_keys(history, NEVER_FACTS)
    length, cut = module_keys(history, ("length",)), module_keys(history, ("finish_length_share",))
    return (
        # Credit and update.
        AlarmRule("reward_collapse", ["reward/mean"], _off_best(0.1, share=0.5)),
        AlarmRule("zero_variance", ["credit/zero_variance_share"], at_least(0.95)),
        AlarmRule("states_never_repeat", ["credit/anchored_later_share"], _at_most(0.02)),
        AlarmRule("gold_unlikely", module_keys(history, ("gold_probability",)), _at_most(UNLIKELY)),
        AlarmRule("untaught", module_keys(history, ("untaught_share",)), above(0.5), early=True),
        AlarmRule("rewards_outweighed", ["credit/teachers_to_rewards"], above(OUTWEIGHED)),
        AlarmRule("gains_small", ["credit/gain_to_outcome"], _at_most(SMALL_GAINS)),
        # Nats per token; bfloat16 alone made 0.05 of them with SmolLM2-135M.
        AlarmRule("logprob_gap", ["train/logprob_gap_mean"], above(0.1)),
        AlarmRule("kl_explosion", ["train/kl"], _exploded(1.0, window)),  # nats per token
        AlarmRule("clipping", ["train/clip_share"], above(0.3)),
        # Rollouts and their scores.
        AlarmRule("failures", ["rollouts/failed_share"], above(0.2), early=True),
        *(
            AlarmRule(FAILURES[kind], [f"{FAILED}{kind}"], above(0.2), subject="", early=True)
            for kind in sorted(MODEL_CAUSED & FAILURES.keys())
        ),
        AlarmRule("never_parses", [f"{FAILED}parse"], at_least(ALL_FAILED), "unparsed_rollouts", early=True),
        AlarmRule("judge_unreadable", ["task/judge_fallback"], above(0.2)),
        # Rollouts without a search count as 0.
        AlarmRule("empty_searches", ["task/empty_searches"], above(EMPTY_SEARCHES), subject="search"),
        AlarmRule("answers_growing", ["task/answer_words"], _above_first(3.0, at_least=8.0)),
        AlarmRule("many_candidates", ["task/answer_candidates"], above(2.5)),
        AlarmRule("calls_falling", ["rollouts/calls_per_rollout"], _off_best(0.5, share=0.4)),
        # Modules and turns.
        AlarmRule("entropy_collapse", entropy, _below_first(0.05)),
        AlarmRule("never_parses", valid, _at_most(NEVER_VALID)),
        AlarmRule("never_parses", useless, at_least(1 - NEVER_VALID), "never_valid"),
        AlarmRule("format_falling", valid, _off_best(0.2)),
        AlarmRule("format_falling", faulty, _off_best(0.2, lowest=True), "faults_rising"),
        AlarmRule("length_runaway", length, _above_first(3.0), "length_growing"),
        AlarmRule("length_runaway", cut, _risen(0.3, at_least=0.5), "cut", "task.max_tokens"),
        AlarmRule("replies_cut", cut, _above_from_start(ALL_CUT), "cut", "task.max_tokens", early=True),
        AlarmRule("copies", similarity, at_least(0.98)),  # mean token F1 between the texts of a group
    )


# --- criteria: against a limit, against the first mean, against the best one so far


def above(limit: float) -> Criterion:
    """Build a condition that rings above `limit`."""
    return lambda means: (means > limit, means)


def at_least(limit: float) -> Criterion:
    """Build a condition that rings from `limit` on."""
    return lambda means: (means >= limit, means)


def _at_most(limit: float) -> Criterion:
    return lambda means: (means <= limit, means)


def _above_first(times: float, at_least: float = 0.0) -> Criterion:
    # Growth from a first mean of 0 is undefined.
    return lambda means: (
        (means > times * means[0]) & (means[0] > 0) & (means >= at_least),
        np.full_like(means, means[0]),
    )


def _above_from_start(limit: float) -> Criterion:
    # What rises to the limit later is told as a rise.
    return lambda means: ((means > limit) & (means[0] > limit), means)


def _below_first(times: float) -> Criterion:
    return lambda means: ((means < times * means[0]) & (means[0] > 0), np.full_like(means, means[0]))


def _risen(by: float, at_least: float) -> Criterion:
    return lambda means: ((means >= at_least) & (means - means[0] > by), np.full_like(means, means[0]))


def _off_best(by: float, share: float = 0.0, lowest: bool = False) -> Criterion:
    """Build a condition that rings more than `by`, and more than `share` of it, below the highest mean so far.

    Args:
        lowest: above the lowest mean instead, for metrics that should be low.
    """

    def criterion(means: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        best = (np.minimum if lowest else np.maximum).accumulate(means)
        return np.abs(best - means) > np.maximum(share * np.abs(best), by), best

    return criterion


def _exploded(limit: float, window: int) -> Criterion:
    """Build a condition that holds from where KL grew five-fold, or to ten times the limit, until it is down again."""

    def criterion(means: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        # Two windows back, so that the two means share no step.
        lag = 2 * window
        before = np.concatenate([np.full(min(lag, len(means)), np.inf), means])[: len(means)]
        starts = (means > 5 * before) | (means > 10 * limit)
        rings = np.zeros(len(means), dtype=bool)
        for index, mean in enumerate(means):
            rings[index] = mean > limit and bool(starts[index] or (index > 0 and rings[index - 1]))
        return rings, np.full_like(means, means[0])

    return criterion


# --- from curves to alarms


def _rung(rule: AlarmRule, key: str, history: History, window: int) -> list[Alarm]:
    """Return the alarms of one rule on one metric."""
    steps, values = _curve(history, key)
    means, first = trailing_mean(values, window), window - 1
    if not rule.early:
        steps, means, first = steps[first:], means[first:], 0
    if not len(means):
        return []
    rings, reference = rule.criterion(means)
    rings[:first] &= means[:first] >= ALL_FAILED
    advice, subject = ADVICE[rule.advice or rule.name], key.rpartition("/")[2] if rule.subject is None else rule.subject
    return _stretches(
        rule.name, key, steps, rings, lambda index: advice.text(float(means[index]), float(reference[index]), subject)
    )


def _not_finite(history: History, key: str) -> list[Alarm]:
    # `series` leaves such values out, so they are looked for in the records, which have null for them in a file.
    records = [record for record in history if isinstance(record.get(key, ""), float | None)]
    rings = np.array([number(record[key]) is None for record in records], dtype=bool)
    steps = np.array([record["step"] for record in records], dtype=np.int64)
    message = ADVICE["not_finite"].text(subject=f"{key} is NaN or infinite")
    return _stretches("not_finite", key, steps, rings, lambda index: message)


def _unlearned(history: History, key: str) -> list[Alarm]:
    # Each evaluation counts by itself; one that has not lost anything does not have the metric.
    name = _LOST_KEY.sub(r"\1", key)
    steps, _ = series(history, name)
    losses = np.array([number(record.get(key)) or 0.0 for record in history if number(record.get(name)) is not None])

    def message(index: int) -> str:
        return ADVICE["unlearned"].text(float(losses[index]), subject=key.partition(LOST)[2])

    return _stretches("unlearned", key, steps, losses > 0, message)


def module_keys(history: Iterable[Metrics], facts: tuple[str, ...]) -> list[str]:
    """Return the keys of modules and turns whose last part is one of `facts`."""
    return [key for key in keys_in(history) if key.startswith(MODULES) and key.rsplit("/", 1)[1] in facts]


def _stretches(name: str, key: str, steps: np.ndarray, rings: np.ndarray, message: Callable[[int], str]) -> list[Alarm]:
    """Return an alarm per maximal run of True in `rings`; `message(index)` is its text at a position of the curve."""
    stretches = []
    for ringing, group in groupby(range(len(rings)), key=lambda index: bool(rings[index])):
        if ringing:
            indices = list(group)
            still = indices[-1] == len(rings) - 1
            until = None if still else int(steps[indices[-1]])
            text = message(indices[-1 if still else 0])
            stretches.append(Alarm(name=name, key=key, step=int(steps[indices[0]]), until=until, message=text))
    return stretches
