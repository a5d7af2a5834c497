"""Evaluation of a policy on a split: independent rollouts, per-item results, bootstrap intervals; resumable.

`evaluate` is what `mmrl eval` runs; `Evaluations` are those before, during and after training.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from statistics import fmean
from typing import Any

from mmrl import rng
from mmrl.config import EvalConfig, RootConfig
from mmrl.config.tasks import UNSCORED
from mmrl.errors import MODEL_CAUSED, DataError, TooManyFailures, failure_summary
from mmrl.records import Example, Forest
from mmrl.report.stats import bootstrap_interval, lost
from mmrl.rollout.environment import Environment
from mmrl.rollout.plans import independent
from mmrl.rollout.sample import sample
from mmrl.stages import Stage
from mmrl.stages.step_log import StepLog
from mmrl.stages.step_metrics import counted_metrics, failed_share, module_metrics, never_metrics, refuse_context
from mmrl.system.files import append_jsonl, atomic_write, dumps, read_jsonl, repair_jsonl
from mmrl.system.processes import ALONE, Processes
from mmrl.system.replies import one_line

CHUNK = 256
"""Items evaluated at once: enough for full batches, few enough that a killed evaluation loses little."""

Item = dict[str, Any]
"""Results of one example: id, means over samples (`metrics`, `modules`), predictions, errors."""


def evaluate(
    env_for: Callable[[rng.Key], Environment],
    examples: Sequence[Example],
    settings: EvalConfig,
    seed: int,
    reward_set: str,
    results: Path | None = None,
    on_forest: Callable[[int | None, Forest], None] | None = None,
    processes: Processes = ALONE,
    again: bool = False,
) -> list[Item]:
    """Evaluate on `examples` (the first `settings.items` of them).

    Args:
        env_for: environment for a key; sampling depends on (seed, item, sample) alone, never on the chunk.
        results: JSONL of per-item results; items already there are not run again.
        on_forest: given each chunk's number and forest, for the journal; None for items that fill gaps in `results`.
        processes: who share the work; only the main one writes.
        again: True if items were taken out of `results` (`drop_failed`) to be evaluated again, and no others.

    Returns:
        One item per example: id, means over samples of reward and metrics, errors. Failed rollouts score 0, or what
        the task's `failed_metrics` say; failures of the model `task.failure_score` where that is below 0. Only those
        of the chunks until more than `settings.max_failed_share` of the rollouts had failed from outside causes.
    """
    # The first ones and no random choice: evaluations of different runs are compared item by item.
    selected = list(examples[: settings.items] if settings.items else examples)
    done: dict[str, Item] = {}
    if results:
        if processes.main:
            done = _read_back(results, [] if again else selected)
        done = processes.first(done)
    in_order = not again and list(done) == [e.id for e in selected[: len(done)]]
    for chunk in chunks([e for e in selected if e.id not in done]):
        # One key for all chunks: where a chunk begins depends on what a killed evaluation left.
        env = env_for((seed, "eval"))
        plans = [(example, independent(settings.samples)) for example in processes.share(chunk)]
        forest = processes.forest(asyncio.run(sample(env, plans, reward_set)), chunk)
        refuse_context(forest.rollouts)
        scored = reward_set != UNSCORED
        items = item_results(forest, env.task.failed_metrics, never_metrics(env.task), scored=scored)
        # The journal before the results: an item in the results has its journal.
        if on_forest:
            on_forest(len(done) // CHUNK if in_order else None, forest)
        if results and processes.main:
            append_jsonl(results, items)
        done |= {item["id"]: item for item in items}
        if too_many_failed(list(done.values()), settings):  # whatever is broken, the next chunk would meet it too
            break
    return [done[example.id] for example in selected if example.id in done]


@dataclass(slots=True, kw_only=True)
class Evaluations:
    """The evaluations of a training run on `eval.split`; per-item results stay in the run directory."""

    examples: Sequence[Example]
    """The split."""
    last_step: int
    """`train.steps`, after which the policy is always evaluated."""
    stage: Stage[RootConfig]
    _failure: str = ""
    """Sentence of `too_many_failed` about the last evaluation."""

    @property
    def log(self) -> StepLog:
        """The run's."""
        return self.stage.log

    @property
    def settings(self) -> EvalConfig:
        """The run's."""
        return self.stage.config.eval

    def baseline(self) -> list[Item]:
        """Evaluate before training; on a resumed run, or with `run.before`, read back the results of then.

        Raises:
            TooManyFailures: nothing of it stays, since all later evaluations compare with it.
        """
        return self._scored(0, "evaluation before training")

    def final(self) -> list[Item]:
        """Return the results after the last step; evaluated once more if too much of that evaluation failed.

        Raises:
            TooManyFailures: again; nothing of it stays, and a resume evaluates again.
        """
        return self._scored(self.last_step, "evaluation after training")

    def _scored(self, step: int, when: str) -> list[Item]:
        # The main process writes the history; the others may look before it is on their disk.
        split, history = self.settings.split, self.log.rundir.history()
        if not self.log.processes.first(
            any(record["step"] == step and has_scores(record, split) for record in history)
        ):
            metrics = self.metrics(step)
            if not has_scores(metrics, split):
                raise TooManyFailures(f"{when}: {self._failure}")
            if self.log.processes.main:
                self.log.rundir.append_metrics(step, metrics)
                self.log.trackers.log(step, metrics)
        return self.items(step)

    def due(self, step: int) -> bool:
        """Return True if an evaluation is due after `step` steps: after the last one, and every `eval.every`."""
        every = self.settings.every
        return step == self.last_step or bool(every and step % every == 0)

    def metrics(self, step: int) -> dict[str, float]:
        """Return the metrics after `step` steps, named `eval/<split>/<metric>`; without scores if too much failed."""
        started, split = time.perf_counter(), self.settings.split
        items = self.items(step)
        failures = [
            failure for item in items for failure in zip(failed_kinds([item]), item.get("messages", ()), strict=False)
        ]
        self.log.note_own_code(f"evaluation on {split} at step {step}", failures, len(items) * self.settings.samples)
        metrics = evaluation_metrics(items, self.settings, self.stage.config.seed)
        self._failure = too_many_failed(items, self.settings)
        if self._failure:
            metrics = without_scores(metrics)
            self.log.progress.note(f"evaluation on {split} at step {step}: no scores: {self._failure}")
        else:
            if step:
                main = self.stage.task.main_metric
                metrics |= lost(self.items(0), items, self.stage.config.seed, self.settings.bootstrap, main)
            self.log.progress.evaluation(step, split, metrics)
        return {f"eval/{split}/{name}": value for name, value in metrics.items()} | {
            "time/eval": time.perf_counter() - started
        }

    def items(self, step: int) -> list[Item]:
        """Return per-item results after `step` steps, evaluated now or read back; not kept if too many failed."""

        def environment(key: rng.Key) -> Environment:
            self.stage.sync(step)  # not before: a resumed run whose items are all there need not push old weights
            environments.append(self.stage.environment(self.settings, key))
            return environments[-1]

        def under_way() -> str:
            scored = sum(env.scoring.calls for env in environments)
            return f"evaluating {split}: {scored} of {count} rollouts scored"

        split, environments = self.settings.split, list[Environment]()
        count = self.settings.samples * len(self.examples[: self.settings.items])
        self.log.progress.status(under_way)
        results = self.log.rundir.eval_path(step, split)
        items = evaluate(
            environment,
            self.examples,
            self.settings,
            self.stage.config.seed,
            self.stage.reward_set,
            results,
            processes=self.log.processes,
        )
        if self.log.processes.main and results.exists():
            # Items that failed would be read back by a resume, and compared with forever.
            if too_many_failed(items, self.settings):
                results.unlink()
            else:
                self.log.rundir.note_examples(self.settings.split, self.examples[: self.settings.items])
        return items


def drop_failed(results: Path) -> int:
    """Drop the items with an infrastructure failure, so that they are evaluated again; how many they were."""
    repair_jsonl(results)
    items = read_items(results)
    complete = [item for item in items if not item["failed_share"]]
    if len(complete) < len(items):
        _write_items(results, complete)
    return len(items) - len(complete)


def _read_back(results: Path, selected: Sequence[Example]) -> dict[str, Item]:
    """Read the items of whole chunks; part of a chunk, left by a kill, is cut off and evaluated again with the rest.

    So a chunk always has the same items, of which each may see the others in the last bits of its logits.
    """
    repair_jsonl(results)  # a line torn by a kill must not swallow the next one
    items = read_items(results)
    if len(items) < len(selected) and [item["id"] for item in items] == [e.id for e in selected[: len(items)]]:
        items = items[: len(items) // CHUNK * CHUNK]
    if len(items) < len(read_jsonl(results)):  # also where a line is there twice
        _write_items(results, items)
    return {item["id"]: item for item in items}


def _write_items(results: Path, items: Sequence[Item]) -> None:
    atomic_write(results, "".join(dumps(item) + "\n" for item in items))


def read_items(results: Path) -> list[Item]:
    """Return per-item results of a file, each item once; a missing file is empty.

    Raises:
        DataError: a line that is none of an evaluation.
    """
    items = read_jsonl(results)
    for number, item in enumerate(items, start=1):
        if not {"id", "metrics", "modules", "errors", "failed_share"} <= item.keys():
            raise DataError(f"{results}:{number}: got {list(item)}, expected the result of one item")
    return list({item["id"]: item for item in items}.values())


def chunks(examples: Sequence[Example]) -> Iterator[Sequence[Example]]:
    """Yield consecutive chunks of `CHUNK` examples."""
    for start in range(0, len(examples), CHUNK):
        yield examples[start : start + CHUNK]


def item_results(
    forest: Forest, failed: Mapping[str, float], without: Collection[str] = (), *, scored: bool = True
) -> list[Item]:
    """Return per-item results of an evaluated forest, in its order.

    Args:
        failed: metrics of a failed rollout.
        without: module metrics that are left out.
        scored: rollouts have rewards.
    """
    # Failed rollouts report no metrics: the names come from all, so that each item has all of them.
    names = sorted({*failed, *(name for r in forest.rollouts for name in r.metrics)})
    behaviour: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for call in forest.calls.values():
        for name, value in module_metrics([call], without).items():
            behaviour[call.example][f"{call.module}/{name}"].append(value)
    caught = Counter(call.example for call in forest.caught.values())
    items: list[Item] = []
    for example in forest.examples:
        rollouts = [r for r in forest.rollouts if r.example == example]
        counted = [counted_metrics(rollout, failed) for rollout in rollouts]
        metrics = {name: fmean(values.get(name, 0.0) for values in counted) for name in names}
        # A failure counts 0 in an evaluation, or less where `task.failure_score` is below 0; never more.
        if scored:
            metrics["reward"] = fmean(min(r.reward or 0.0, 0.0 if r.error else inf) for r in rollouts)
        items.append(
            {
                "id": example,
                "metrics": metrics,
                "modules": {name: fmean(values) for name, values in behaviour[example].items()},
                "predictions": [r.prediction for r in rollouts],
                "errors": [r.error for r in rollouts if r.error],
                "messages": [r.error_message for r in rollouts if r.error and r.error not in MODEL_CAUSED],
                "failed_share": failed_share([r.error for r in rollouts]),
                **({"caught_parse": caught[example]} if caught[example] else {}),
            }
        )
    return items


def failed_kinds(items: Sequence[Item]) -> list[str]:
    """Return the kind of each failure that was no doing of the model."""
    return [error for item in items for error in item["errors"] if error not in MODEL_CAUSED]


def too_many_failed(items: Sequence[Item], settings: EvalConfig) -> str:
    """Describe failures that are not the model's if they exceed `eval.max_failed_share`; empty if they do not."""
    share, limit = fmean(item["failed_share"] for item in items) if items else 0.0, settings.max_failed_share
    if share <= limit:
        return ""
    causes, failures = failure_summary(failed_kinds(items)), infrastructure_failures(items)
    return f"{share:.0%} of the rollouts failed {causes}, more than eval.max_failed_share={limit:.0%} ({failures})"


def without_scores(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics of `evaluation_metrics` that are no means over items."""
    scores = {name for name in metrics if f"{name}_low" in metrics}
    return {
        name: value for name, value in metrics.items() if name.removesuffix("_low").removesuffix("_high") not in scores
    }


def has_scores(record: Mapping[str, float], split: str) -> bool:
    """Return True if a line of the history has an evaluation on `split` of which not too much failed."""
    return any(key.startswith(f"eval/{split}/") and f"{key}_low" in record for key in record)


def infrastructure_failures(items: Sequence[Item]) -> str:
    """Return the number of infrastructure failures of each kind, and the first message; empty where there are none."""
    counts = Counter(failed_kinds(items))
    if not counts:
        return ""
    first = next((f"the first, item {item['id']}: {text}" for item in items for text in item.get("messages", ())), "")
    causes = ", ".join(f"{kind} {count}" for kind, count in counts.items())
    return "; ".join(filter(None, [causes, one_line(first)[:500]]))


def evaluation_metrics(items: Sequence[Item], settings: EvalConfig, seed: int) -> dict[str, float]:
    """Return means over items with 95 % bootstrap intervals (`<name>_low`, `<name>_high`)."""
    metrics: dict[str, float] = {"n": float(len(items))}
    names = sorted({name for item in items for name in item["metrics"]})
    for name in names:
        values = [item["metrics"].get(name, 0.0) for item in items]
        # The seed has the metric's name, so that another metric changes no interval.
        low, high = bootstrap_interval(values, (seed, "eval", name), settings.bootstrap)
        metrics |= {name: fmean(values), f"{name}_low": low, f"{name}_high": high}
    modules: Mapping[str, list[float]] = defaultdict(list)
    for item in items:
        for name, value in item["modules"].items():
            modules[name].append(value)
    # Numbers of calls depend on how many items there are; all other module facts are means.
    metrics |= {
        f"module/{name}": fmean(values) for name, values in sorted(modules.items()) if not name.endswith("/calls")
    }
    metrics["failed_share"] = fmean(item["failed_share"] for item in items) if items else 0.0
    metrics["model_failed"] = float(sum(error in MODEL_CAUSED for item in items for error in item["errors"]))
    if caught := sum(item.get("caught_parse", 0) for item in items):
        metrics["caught_parse"] = float(caught)
    rollouts = settings.samples * len(items)
    kinds = Counter(error for item in items for error in item["errors"])
    return metrics | {f"failed/{kind}": count / rollouts for kind, count in kinds.most_common()}
