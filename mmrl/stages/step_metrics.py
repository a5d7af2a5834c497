"""A step's numbers from its forest and its credit: means per task, module and group, as docs/metrics.md names them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import combinations
from math import inf
from statistics import fmean, pstdev

from mmrl.credit.entries import Entry
from mmrl.errors import MODEL_CAUSED, ConfigError, LengthFailure, TooManyFailures, failure_summary
from mmrl.records import EMPTY, Call, Forest, Rollout
from mmrl.report.trees import informative_examples
from mmrl.tasks.base import Task
from mmrl.tasks.metrics import normalize

TURNS = 8
"""Turns with metrics of their own; further ones are rare and few."""
TURN_METRICS = ("calls", "length", "finish_length_share", "format_rate", "surprise")


METRIC_OF_FEATURE = {"penalties": "penalty", "parse_failures": "format_rate"}
"""A feature of programs (`tasks.base.FEATURES`) -> the module metric that is a constant where a task never has it."""


def never_metrics(task: Task) -> frozenset[str]:
    """Return module metrics without meaning in this task: a share of parsed completions where nothing is parsed."""
    return frozenset(metric for feature, metric in METRIC_OF_FEATURE.items() if feature in task.absent_features)


def forest_metrics(
    forest: Forest, without: Collection[str] = (), failed: Mapping[str, float] = EMPTY
) -> dict[str, float]:
    """Return rewards, failures, task metrics and module metrics of one step.

    Args:
        without: module metrics that are left out.
        failed: task metrics of a failed rollout.
    """
    metrics = rollout_metrics(forest.rollouts, failed)
    # As kinds of failures, only where there are any.
    if forest.caught:
        metrics["rollouts/caught_parse"] = float(len(forest.caught))
    metrics["rollouts/calls"] = float(len(forest.calls))
    if repeated := sum(rollout.counterfactual_calls for rollout in forest.rollouts):
        metrics["rollouts/calls_again"] = float(repeated)
    metrics["rollouts/tokens"] = float(sum(call.completion_tokens for call in forest.calls.values()))
    for module, calls in by_module(forest).items():
        metrics |= {f"module/{module}/{name}": value for name, value in module_metrics(calls, without).items()}
    gains = [
        abs(call.turn_reward) for call in forest.calls.values() if "privileged_gain" in call.facts and call.turn_reward
    ]
    if gains and (spread := metrics.get("reward/std")):
        metrics["credit/gain_to_outcome"] = fmean(gains) / spread
    return metrics | turn_metrics(forest, without)


def lag_metrics(forest: Forest, step: int) -> dict[str, float]:
    """Return the updates by which the weights that sampled are behind those that step number `step` starts from."""
    # Calls of teachers and endpoints are of no version of the policy.
    sampled = [call for call in forest.calls.values() if call.teacher is None and call.policy_version is not None]
    lags = [step - 1 - call.policy_version for call in sampled if call.policy_version is not None]
    return {"rollouts/policy_lag": fmean(lags), "rollouts/policy_lag_max": float(max(lags))} if lags else {}


def turn_metrics(forest: Forest, without: Collection[str] = ()) -> dict[str, float]:
    """Return calls and turns per rollout; for programs with growing contexts, behaviour by turn (the first `TURNS`)."""
    paths = [path for path in map(forest.path, forest.rollouts) if path]
    if not paths:
        return {}
    metrics = {
        "rollouts/calls_per_rollout": fmean(len(path) for path in paths),
        "rollouts/turns_per_rollout": fmean(1 + max(call.turn for call in path) for path in paths),
    }
    turns: dict[int, list[Call]] = defaultdict(list)
    for call in forest.calls.values():
        turns[call.turn].append(call)
    # With one turn these would repeat the metrics of all calls.
    if len(turns) > 1:
        for turn in sorted(turns)[:TURNS]:
            values = module_metrics(turns[turn], without)
            metrics |= {f"turn/{turn}/{name}": values[name] for name in TURN_METRICS if name in values}
    return metrics


def rollout_metrics(rollouts: Sequence[Rollout], failed: Mapping[str, float] = EMPTY) -> dict[str, float]:
    """Return the rewards over credited rollouts; task metrics over all, as `counted_metrics`, else 0."""
    rewards = [r.reward for r in rollouts if r.reward is not None]
    errors = [r.error for r in rollouts]
    metrics = {"rollouts/count": float(len(rollouts)), "rollouts/failed_share": failed_share(errors)}
    for kind, count in sorted(Counter(error for error in errors if error is not None).items()):
        metrics[f"rollouts/failed/{kind}"] = float(count)
    if rewards:
        metrics |= {
            "reward/mean": fmean(rewards),
            "reward/std": pstdev(rewards),
            "reward/min": min(rewards),
            "reward/max": max(rewards),
        }
    counted = [counted_metrics(rollout, failed) for rollout in rollouts]
    for name in dict.fromkeys(name for r in rollouts for name in r.metrics):
        metrics[f"task/{name}"] = fmean(values.get(name, 0.0) for values in counted)
    return metrics


def counted_metrics(rollout: Rollout, failed: Mapping[str, float]) -> Mapping[str, float]:
    """Return the metrics of a rollout; of a failed one those of `failed` too, from outside at least 0."""
    if not rollout.error:
        return rollout.metrics
    least = -inf if rollout.error in MODEL_CAUSED else 0.0
    return {**{name: max(value, least) for name, value in failed.items()}, **rollout.metrics}


def failed_share(errors: Sequence[str | None]) -> float:
    """Return the share of rollouts with an infrastructure failure (tool, engine, judge, timeout, exception)."""
    failures = sum(error is not None and error not in MODEL_CAUSED for error in errors)
    return failures / len(errors) if errors else 0.0


def refuse_failures(rollouts: Sequence[Rollout], limit: float, where: str, key: str = "train") -> None:
    """Raise `TooManyFailures` where more than `limit` of the rollouts failed by no doing of the model.

    Args:
        key: section of the limit, `max_failed_share`.
    """
    if (share := failed_share([rollout.error for rollout in rollouts])) <= limit:
        return
    failed = [rollout for rollout in rollouts if rollout.failed_outside]
    causes, first = failure_summary(rollout.error for rollout in failed if rollout.error), failed[0]
    trace = f"\n{first.error_traceback.rstrip()}" if first.error_traceback else ""
    raise TooManyFailures(
        f"{where}: {share:.0%} of the rollouts failed {causes}, more than {key}.max_failed_share={limit:.0%}; "
        f"the first: {first.error} in {first.id}: {first.error_message}{trace}"
    )


def refuse_context(rollouts: Sequence[Rollout]) -> None:
    """Refuse a context in which no first prompt of a program fits: its score of 0 would be no model's doing.

    Raises:
        ConfigError: every rollout ended there.
    """
    if rollouts and all(rollout.leaf is None and rollout.error == LengthFailure.kind for rollout in rollouts):
        examples = len({rollout.example for rollout in rollouts})
        raise ConfigError(
            f"task.max_context: the first prompt of none of the {examples} examples fits: {rollouts[0].error_message}; "
            "expected a longer context, up to the model's own"
        )


def by_module(forest: Forest) -> dict[str, list[Call]]:
    """Return calls of each module, modules in program order; modules never called are left out."""
    calls: dict[str, list[Call]] = defaultdict(list)
    for call in forest.calls.values():
        calls[call.module].append(call)
    return {module: calls[module] for module in forest.modules if module in calls}


def module_metrics(calls: Sequence[Call], without: Collection[str] = ()) -> dict[str, float]:
    """Return the behaviour of one module over a step, but for the names `without`."""
    metrics = {
        "calls": float(len(calls)),
        "penalty": fmean(c.penalty for c in calls),
        "length": fmean(c.completion_tokens for c in calls),
        "finish_length_share": fmean(c.finish == "length" for c in calls),
        "format_rate": fmean(c.ok for c in calls),
    }
    if any(c.attempts > 1 for c in calls):
        metrics["attempts"] = fmean(c.attempts for c in calls)
    names = dict.fromkeys(n for c in calls for n, v in c.facts.items() if isinstance(v, int | float))
    for name in names:
        values = [float(c.facts[name]) for c in calls if isinstance(c.facts.get(name), int | float)]
        metrics[name] = fmean(values)
    sampled = [-x for c in calls if c.logprobs for x in c.logprobs]
    if sampled:
        # The mean negative log-probability of sampled tokens: an unbiased estimate of entropy at temperature 1.
        metrics["surprise"] = fmean(sampled)
    return {name: value for name, value in metrics.items() if name not in without}


def credit_metrics(forest: Forest, entries: Iterable[Entry]) -> dict[str, float]:
    """Return the mean reward per module as credited, and how alike the members of a group are."""
    groups: dict[str, list[Entry]] = defaultdict(list)
    rewards: dict[str, list[float]] = defaultdict(list)
    turns: dict[int, list[float]] = defaultdict(list)
    for entry in entries:
        if entry.distilled:
            continue
        rewards[forest.calls[entry.call].module].append(entry.reward)
        turns[forest.calls[entry.call].turn].append(entry.reward)
        if entry.group is not None:
            groups[entry.group].append(entry)
    metrics = {f"module/{module}/reward": fmean(values) for module, values in rewards.items()}
    if len(turns) > 1:
        metrics |= {f"turn/{turn}/reward": fmean(turns[turn]) for turn in sorted(turns)[:TURNS]}
    return metrics | similarity(forest, groups)


def shown_calls(forest: Forest, entries: Sequence[Entry], limit: int) -> list[dict[str, object]]:
    """Return up to `limit` calls for people to read, with reward and advantage (mean over tokens; None without credit).

    Whole examples, those first whose rollouts differ in reward: there is something to compare.
    """
    credited = {entry.call: entry for entry in reversed(entries)}
    rows: list[dict[str, object]] = []
    calls: dict[str, list[Call]] = defaultdict(list)
    for call in forest.calls.values():
        calls[call.example].append(call)
    for example in informative_examples(forest, limit):
        for call in calls[example]:
            entry = credited.get(call.id)
            row = {"example": example, "module": call.module, "prompt": call.prompt_text, "completion": call.text}
            advantage = fmean(entry.advantages) if entry is not None and entry.advantages else None
            rows.append(row | {"reward": entry.reward if entry is not None else None, "advantage": advantage})
    return rows[:limit]


def similarity(forest: Forest, groups: Mapping[str, Sequence[Entry]]) -> dict[str, float]:
    """Compute the intra-group similarity per module: token F1 of a group's output texts, mean over pairs and groups."""
    scores: dict[str, list[float]] = defaultdict(list)
    for members in groups.values():
        calls = [forest.calls[call] for call in dict.fromkeys(e.call for e in members)]
        # Groups of whole rollouts mix modules, whose texts are not alike for other reasons.
        if len({c.module for c in calls}) != 1 or len(calls) < 2:
            continue
        tokens = [Counter(normalize(call.text).split()) for call in calls]
        scores[calls[0].module].append(fmean(_overlap(a, b) for a, b in combinations(tokens, 2)))
    return {f"similarity/{module}": fmean(values) for module, values in sorted(scores.items())}


def _overlap(a: Counter[str], b: Counter[str]) -> float:
    """Return the F1 of two texts' tokens; 1 where neither has any."""
    total = a.total() + b.total()
    return 2 * (a & b).total() / total if total else 1.0
