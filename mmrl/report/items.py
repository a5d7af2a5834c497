"""Tables of a step or an evaluation, example by example, and the tree of one, for `mmrl show`.

Part of `report`. A directory of `mmrl eval` has a journal for each part of its items; of the evaluations in training
only results of items are stored.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean

from mmrl.errors import MODEL_CAUSED, CheckpointError, ConfigError, unknown
from mmrl.records import Forest
from mmrl.report.overview import Item, Overview
from mmrl.report.stats import FIRST, duration, number, short
from mmrl.report.tables import Rows, facts_table, with_interval
from mmrl.report.text import align, clean, filled
from mmrl.report.trees import input_lines, render_example, shorten_prediction
from mmrl.store.journal import read_step
from mmrl.store.rundir import RunDir

WORST = 10
"""Items that an overview lists."""
CAUGHT = "parse failures caught"
"""Calls that could not be parsed and whose program went on: no failures of rollouts."""
COLUMNS = 3
"""Metrics of a table of items."""
LONGEST_FAILURE = 500
"""Characters of a failure that is quoted."""


def run_facts(overview: Overview) -> list[str]:
    """Return the algorithm, task and model, how far the run is, and what it has cost."""
    steps = [] if overview.evaluates else [f"{overview.done}{f' of {overview.total}' if overview.total else ''} steps"]
    seconds = number(overview.summary.get("seconds"))
    return [overview.description, *steps, *([] if seconds is None else [duration(seconds)]), overview.state]


def evaluation_text(overview: Overview, width: int) -> str:
    """Render an evaluation of `mmrl eval`: scores, behaviour, and the items with the lowest scores."""
    evaluated = [(step, items) for steps in overview.items.values() for step, items in steps.items() if items]
    parts = [f"{overview.name}: {', '.join(run_facts(overview))}\n{overview.run.path}"]
    if not evaluated:
        return "\n\n".join([*parts, "no item is evaluated yet"])
    (step, items), metrics = evaluated[-1], overview.summary.get("metrics") or {}
    parts.append(align(score_rows(items, metrics)))
    parts.append(facts_table({name: value for name, value in metrics.items() if name.startswith("module/")}))
    parts.append(facts_table(overview.summary.get("facts") or {}))
    parts.append(_items_text(items, width, worst=WORST))
    commands = [f"all items:        mmrl show {overview.run.typed} step={step}"] if len(items) > WORST else []
    parts.append(
        "\n".join([*commands, f"one item's calls: mmrl show {overview.run.typed} {example_key(items[0]['id'])}"])
    )
    return "\n\n".join(part for part in parts if part)


def example_key(name: str) -> str:
    """Return the setting that names an example or item in a command, for a shell."""
    return f"example={shlex.quote(clean(name))}"


def score_rows(items: Sequence[Item], metrics: Mapping[str, object]) -> Rows:
    """Return a row per metric: mean and 95 % interval; of an evaluation that is not finished, the means so far.

    Args:
        metrics: of the evaluation's summary; empty where there is none yet.
    """
    names = metric_names(items)
    so_far = {name: fmean(item["metrics"].get(name, 0.0) for item in items) for name in names}
    head = "mean and 95 % interval" if metrics else f"so far, of {len(items)} items"
    return [["", head], *([name, with_interval(metrics or so_far, name)] for name in names)]


def metric_names(items: Sequence[Item]) -> list[str]:
    """Return the metrics of items, those of answers first."""
    names = dict.fromkeys(name for item in items for name in item["metrics"])
    return sorted(names, key=lambda name: (name not in FIRST, name != "reward", name))


def item_rows(items: Sequence[Item], worst: int | None = None) -> tuple[str, Rows]:
    """Return a title, and scores and a prediction of each item, in the order of the split.

    Args:
        worst: how many are listed, those with the lowest scores first; None: all.
    """
    names = metric_names(items)[:COLUMNS]
    title = f"{len(items)} items"
    if worst is not None and len(items) > worst:
        title = f"the {worst} of {len(items)} items with the lowest scores"
        items = sorted(items, key=lambda item: [item["metrics"].get(name, 0.0) for name in names])[:worst]
    return title, _item_rows("item", {clean(item["id"]): item for item in items}, names)


def _items_text(items: Sequence[Item], width: int, worst: int | None = None) -> str:
    title, rows = item_rows(items, worst)
    return f"{title}\n{align(rows, width=width)}{_first_failure({item['id']: item for item in items}, width)}"


def _first_failure(items: Mapping[str, Item], width: int) -> str:
    """Return a line that quotes the first failure of named items that was not the model's doing; empty without one."""
    failures = (f"{name}: {text}" for name, item in items.items() for text in item.get("messages") or ())
    first = next(failures, "")
    return first and "\n" + filled(f"the first failure that is not the model's, {first[:LONGEST_FAILURE]}", width)


def _item_rows(head: str, items: Mapping[str, Item], names: Sequence[str]) -> Rows:
    """Return a row for each named item; how it failed where one has, and how many parse failures its program caught."""
    kinds = [Counter(map(clean, item.get("errors") or ())) for item in items.values()]
    failed = [", ".join(f"{kind} {count}" if count > 1 else kind for kind, count in counts.items()) for counts in kinds]
    caught = [str(item.get("caught_parse", "")) for item in items.values()]
    columns = {title: cells for title, cells in (("failed", failed), (CAUGHT, caught)) if any(cells)}
    rows = [[head, *names, *columns, "a prediction"]]
    for (name, item), *cells in zip(items.items(), *columns.values(), strict=True):
        scores = [short(item["metrics"].get(metric)) for metric in names]
        rows.append([name, *scores, *cells, shorten_prediction((item.get("predictions") or [""])[0])])
    return rows


def step_text(overview: Overview, step: int, width: int) -> str:
    """Return the examples that a step trained on, and the items that were evaluated after it.

    Raises:
        CheckpointError: it has neither; names the steps that have one.
    """
    run, parts = overview.run, []
    training = run.journal_path(step).is_file()
    if training:
        parts.append(_examples_table(run, read_step(run, step)[0], step, width))
    evaluated = {split: items for (split, after), items in _evaluated(overview).items() if after == step}
    for split, items in evaluated.items():
        when = "" if overview.evaluates else f" after step {step}" if step else " before training"
        table = _items_text(items, width, worst=WORST if training else None)
        parts.append(f"evaluation on {split}{when}\n{table}")
    if not parts:
        raise CheckpointError(f"{run.path}: no journal of step {step}; {_steps(overview)}")
    if not training:
        example = next(iter(evaluated.values()))[0]["id"]
        parts.append(f"one item: mmrl show {run.typed} step={step} {example_key(example)}")
    return "\n\n".join(parts)


def example_text(overview: Overview, example: str, step: int | None, width: int) -> str:
    """Return the calls of a training example at a step, or what evaluations say of an item.

    Args:
        step: None: the last step that has the example.

    Raises:
        ConfigError: nothing has such an example.
        CheckpointError: the step has neither a journal nor an evaluation, or there are none at all.
    """
    run = overview.run
    evaluated = {key: items for key, items in _evaluated(overview).items() if step in (None, key[1])}
    steps = [recorded for recorded in reversed(run.journal_steps()) if step in (None, recorded)]
    if not steps and not evaluated:
        which = "the run has no journals yet" if step is None else f"no journal of step {step}; {_steps(overview)}"
        raise CheckpointError(f"{run.path}: {which}")
    ids: dict[str, None] = {}
    # From the newest step back: a journal is read whole, so the first match ends the search.
    for recorded in steps:
        forest, entries = read_step(run, recorded)
        if example in forest.examples:
            return render_example(forest, entries, example, width, run.examples.get(("train", example)))
        ids |= dict.fromkeys(forest.examples)
    results = {key: item for key, items in evaluated.items() for item in items if item["id"] == example}
    if not results:
        ids |= dict.fromkeys(item["id"] for items in evaluated.values() for item in items)
        raise ConfigError(clean(unknown("example", example, ids)))
    named = {f"{split}, step {after}": item for (split, after), item in results.items()}
    rows = _item_rows("evaluation", named, metric_names([*results.values()])[:COLUMNS])
    inputs = input_lines(run.examples.get((next(iter(results))[0], example)))
    parts = ["\n".join([f"item {clean(example)}", *inputs, align(rows, width=width)])]
    # Its calls, where an evaluation has stored them.
    for split in dict.fromkeys(split for split, _ in results):
        # An item that was evaluated again, after a failure, is in a later journal.
        for part in reversed(run.journal_steps(split)):
            forest, _ = read_step(run, part, evaluation=split)
            if example in forest.examples:
                parts.append(render_example(forest, None, example, width))
                break
    return "\n\n".join(parts)


def _examples_table(run: RunDir, forest: Forest, step: int, width: int) -> str:
    caught = Counter(call.example for call in forest.caught.values())
    items: dict[str, Item] = {}
    for example in forest.examples:
        rollouts = [rollout for rollout in forest.rollouts if rollout.example == example]
        rewards = [rollout.reward for rollout in rollouts if rollout.reward is not None]
        reward_stats = {"reward": fmean(rewards), "lowest": min(rewards), "highest": max(rewards)} if rewards else {}
        items[clean(example)] = {
            "metrics": {"rollouts": len(rollouts), **reward_stats},
            "errors": [rollout.error for rollout in rollouts if rollout.error is not None],
            "messages": [r.error_message for r in rollouts if r.error is not None and r.error not in MODEL_CAUSED],
            "predictions": [rollout.prediction for rollout in rollouts if rollout.prediction is not None],
            **({"caught_parse": caught[example]} if caught else {}),
        }
    rows = _item_rows("example", items, ("rollouts", "reward", "lowest", "highest"))
    key = example_key(forest.examples[0]) if forest.examples else "example=<id>"
    return (
        f"step {step}: {len(forest.examples)} examples, {len(forest.rollouts)} rollouts, {len(forest.calls)} calls\n"
        f"{align(rows, width=width)}{_first_failure(items, width)}\n\n"
        f"one example's calls: mmrl show {run.typed} step={step} {key}"
    )


def _evaluated(overview: Overview) -> dict[tuple[str, int], Sequence[Item]]:
    """Return (split, step) -> results of its items, for evaluations that have some."""
    return {(split, step): items for split, steps in overview.items.items() for step, items in steps.items() if items}


def _steps(overview: Overview) -> str:
    """Return the steps that have something to show."""
    steps, evaluations = overview.run.journal_steps(), sorted({step for _, step in _evaluated(overview)})
    have = [f"journals exist for steps {steps[0]} to {steps[-1]}"] if steps else []
    have += [f"evaluations of step {', '.join(map(str, evaluations))}"] if evaluations else []
    return ", ".join(have) or "the run has no journals yet"
