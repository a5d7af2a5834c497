"""Evaluation of a policy on a split: independent rollouts, per-item results, bootstrap intervals; resumable.

Used before, during and after training, and by `mmrl eval`.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from mmrl.config import EvalConfig
from mmrl.errors import MODEL_CAUSED
from mmrl.records import Example, Forest
from mmrl.report.tables import bootstrap_interval
from mmrl.rollout.context import Environment
from mmrl.rollout.plans import independent
from mmrl.rollout.sample import sample
from mmrl.stages.metrics import failed_share, module_metrics, never
from mmrl.system.files import append_jsonl, atomic_write, dumps, read_jsonl, repair_jsonl
from mmrl.system.processes import ALONE, Processes
from mmrl.tasks.base import Task

CHUNK = 256
"""Items evaluated at once: enough for full batches, few enough that a killed evaluation loses little."""

Item = dict[str, Any]


def evaluate(
    env_for: Callable[[tuple[Any, ...]], Environment],
    examples: Sequence[Example],
    settings: EvalConfig,
    seed: int,
    reward_set: str,
    results: Path | None = None,
    on_forest: Callable[[int, Forest], None] | None = None,
    processes: Processes = ALONE,
) -> list[Item]:
    """Evaluate on `examples` (the first `settings.items` of them).

    Args:
        env_for: environment for a key; sampling depends on (seed, item, sample) alone, never on the chunk.
        results: JSONL of per-item results; items already there are not run again.
        on_forest: told each chunk's forest, for the journal.
        processes: who share the work; only the main one writes.

    Returns:
        One item per example: id, means over samples of reward and metrics, errors. Failed rollouts score 0, or what
        the task's `failed_metrics` say.
    """
    wanted = list(examples[: settings.items] if settings.items else examples)
    done: dict[str, Item] = {}
    if results:
        if processes.main:
            repair_jsonl(results)  # a line torn by a kill must not swallow the next one
            done = {item["id"]: item for item in read_jsonl(results)}
        done = processes.first(done)
    for chunk in chunks([e for e in wanted if e.id not in done]):
        env = env_for((seed, "eval"))
        plans = [(example, independent(settings.samples)) for example in processes.share(chunk)]
        forest = processes.forest(asyncio.run(sample(env, plans, reward_set)), chunk)
        found = item_results(forest, failed_metrics(env.task), never(env.task))
        if on_forest:
            on_forest(len(done) // CHUNK, forest)
        if results and processes.main:
            append_jsonl(results, found)
        done |= {item["id"]: item for item in found}
    return [done[example.id] for example in wanted]


def forget_failed(results: Path) -> int:
    """Drop the items of which a rollout failed from outside, so that they are evaluated again; how many they were."""
    repair_jsonl(results)
    items = read_jsonl(results)
    kept = [item for item in items if not item["failed_share"]]
    if len(kept) < len(items):
        atomic_write(results, "".join(dumps(item) + "\n" for item in kept))
    return len(items) - len(kept)


def chunks(examples: Sequence[Example]) -> Iterator[Sequence[Example]]:
    """Consecutive chunks of `CHUNK` examples."""
    for start in range(0, len(examples), CHUNK):
        yield examples[start : start + CHUNK]


def failed_metrics(task: Task) -> dict[str, float]:
    """The official metrics of a task, with what a failed rollout has of each: its own attribute, or 0 in its main one.

    So they are reported even where every rollout failed.
    """
    return dict(task.failed_metrics)


def item_results(forest: Forest, failed: dict[str, float], without: Collection[str] = ()) -> list[Item]:
    """Per-item results of an evaluated forest, in its order.

    Args:
        failed: metrics of a rollout without a score.
        without: module metrics that are left out.
    """
    names = sorted({*failed, *(name for r in forest.rollouts for name in r.metrics)})
    behaviour: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for call in forest.calls.values():
        for name, value in module_metrics([call], without).items():
            behaviour[call.example][f"{call.module}/{name}"].append(value)
    items = []
    for example in forest.examples:
        rollouts = [r for r in forest.rollouts if r.example == example]
        counted = [failed | dict(r.metrics) if r.error else r.metrics for r in rollouts]
        metrics = {name: fmean(values.get(name, 0.0) for values in counted) for name in names}
        metrics["reward"] = fmean(r.reward or 0.0 for r in rollouts)
        items.append(
            {
                "id": example,
                "metrics": metrics,
                "modules": {name: fmean(values) for name, values in behaviour[example].items()},
                "predictions": [r.prediction for r in rollouts],
                "errors": [r.error for r in rollouts if r.error],
                "messages": [r.error_message for r in rollouts if r.error and r.error not in MODEL_CAUSED],
                "failed_share": failed_share(rollouts),
            }
        )
    return items


def outside_failures(items: Sequence[Item]) -> str:
    """What failed from outside, and how: the number of each kind, and the first message; empty where nothing did."""
    counts = Counter(error for item in items for error in item["errors"] if error not in MODEL_CAUSED)
    if not counts:
        return ""
    told = next((f"the first, item {item['id']}: {text}" for item in items for text in item.get("messages", ())), "")
    shown = "".join(character if character.isprintable() else " " for character in told)
    return "; ".join(filter(None, [", ".join(f"{k} {n}" for k, n in counts.items()), " ".join(shown.split())[:500]]))


def evaluation_metrics(items: Sequence[Item], settings: EvalConfig, seed: int) -> dict[str, float]:
    """Means over items with 95 % bootstrap intervals (`<name>_low`, `<name>_high`)."""
    metrics: dict[str, float] = {"n": float(len(items))}
    names = sorted({name for item in items for name in item["metrics"]})
    for name in names:
        values = [item["metrics"].get(name, 0.0) for item in items]
        low, high = bootstrap_interval(values, (seed, "eval", name), settings.bootstrap)
        metrics |= {name: fmean(values), f"{name}_low": low, f"{name}_high": high}
    modules: Mapping[str, list[float]] = defaultdict(list)
    for item in items:
        for name, value in item["modules"].items():
            modules[name].append(value)
    metrics |= {
        f"module/{name}": fmean(values) for name, values in sorted(modules.items()) if not name.endswith("calls")
    }
    metrics["failed_share"] = fmean(item["failed_share"] for item in items) if items else 0.0
    metrics["model_failed"] = float(sum(error in MODEL_CAUSED for item in items for error in item["errors"]))
    return metrics
