"""`mmrl show RUN`: a run's curve and tables as text; with a step and an example, the tree of calls.

Part of `report`; returns text, the command prints it.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from textwrap import fill

from mmrl.errors import CheckpointError, ConfigError, nearest
from mmrl.records import Forest
from mmrl.report.alarms import Alarm
from mmrl.report.journal import read_step
from mmrl.report.overview import Overview
from mmrl.report.rundir import RunDir
from mmrl.report.series import ASCII_BLOCKS, BLOCKS, binned, module_facts, series, short, trailing_mean
from mmrl.report.tables import align, before_after_table
from mmrl.report.trees import clean, render_example, shown_prediction

MODULE_FACTS = ("calls", "reward", "penalty", "format_rate", "length", "entropy", "surprise", "kl", "clip_share")


def show(path: Path | str, example: str | None = None, step: int | None = None) -> str:
    """Text for the terminal.

    Args:
        example: id of an example: its tree of calls, at `step` or at the last step that has it.
        step: a step: its examples; with `example`, the tree.

    Raises:
        CheckpointError: not a run, no such step, a damaged journal.
        ConfigError: no such example.
    """
    run = RunDir.read(path)
    width = shutil.get_terminal_size((100, 24)).columns
    if example is not None:
        found = step if step is not None else _last_step_with(run, example)
        forest, entries = read_step(run, found)
        return render_example(forest, entries, example, width)
    if step is not None:
        forest, _ = read_step(run, step)
        return _step_table(run, forest, step)
    return overview_text(Overview.of(run), width)


def overview_text(seen: Overview, width: int = 100) -> str:
    """Curve, evaluations, modules and alarms of a run."""
    total = f" of {seen.total}" if seen.total is not None else ""
    parts = [f"{seen.name}: {seen.what}, {seen.done}{total} steps, {seen.state}\n{seen.run.path}"]
    steps, rewards = series(seen.training, "reward/mean")
    if len(rewards):
        title = "reward per step" if len(rewards) < 20 else "reward per step (mean of 5)"
        smooth = rewards if len(rewards) < 20 else trailing_mean(rewards, 5)
        parts.append(f"{title}\n{text_plot(smooth.tolist(), int(steps[0]), int(steps[-1]), width)}")
    parts += [_evaluation_table(seen, split) for split in _splits(seen)]
    if seen.differences:
        parts.append("first against last evaluation, " + before_after_table(seen.differences, seen.split))
    if seen.modules:
        parts.append(_module_table(seen))
    parts.append(alarm_text(seen.alarms, width))
    parts.append(_further(seen))
    return "\n\n".join(part for part in parts if part)


def text_plot(values: Sequence[float], first: int, last: int, width: int = 80, height: int = 8) -> str:
    """An area chart of block characters with its range on the left and its steps below.

    Args:
        values: at least one finite number.
        first, last: steps of the first and last value.
    """
    marks = ASCII_BLOCKS if not (sys.stdout.encoding or "").lower().startswith("utf") else BLOCKS
    columns = binned(values, max(min(width - 14, 72), 10))
    repeat = max(1, min(6, 40 // len(columns)))
    low, high = min(columns), max(columns)
    labels = [short(high), short((low + high) / 2), short(low)]
    margin = max(len(label) for label in labels) + 2
    levels = height * len(marks)
    heights = [levels // 2 if high == low else 1 + round((v - low) / (high - low) * (levels - 1)) for v in columns]
    lines = []
    for row in range(height - 1, -1, -1):
        label = {height - 1: labels[0], height // 2 - 1: labels[1], 0: labels[2]}.get(row, "")
        cells = (
            " " if filled <= row * len(marks) else marks[min(filled - row * len(marks), len(marks)) - 1]
            for filled in heights
        )
        lines.append(f"{label.rjust(margin)} │" + "".join(cell * repeat for cell in cells).rstrip())
    length = len(columns) * repeat
    lines.append(f"{' ' * margin} └{'─' * length}")
    lines.append(f"{' ' * margin}  {str(first).ljust(max(length - len(str(last)), len(str(first)) + 1))}{last}")
    return "\n".join(lines)


def alarm_text(alarms: Sequence[Alarm], width: int = 100) -> str:
    """One paragraph per alarm; empty without."""
    if not alarms:
        return ""
    lines = ["alarms"]
    for alarm in alarms:
        until = f" to {alarm.until}" if alarm.until is not None else " on"
        said = f"{alarm.name} from step {alarm.step}{until} ({alarm.key}): {alarm.message}"
        lines.append(fill(said, max(width, 40), initial_indent="  ", subsequent_indent="    "))
    return "\n".join(lines)


def _splits(seen: Overview) -> list[str]:
    found = {key.split("/")[1] for record in seen.history for key in record if key.startswith("eval/")}
    return sorted(found, key=lambda split: (split != seen.split, split))


def _evaluation_table(seen: Overview, split: str) -> str:
    names = seen.metric_names(split)
    names.sort(key=lambda name: name != seen.main_metric)
    names = names[:4]
    if not names:
        return ""
    rows = [["step", *names, "items"]]
    cells = {
        name: {step: (value, low, high) for step, value, low, high in seen.evaluations(split, name)} for name in names
    }
    for record in seen.history:
        step = record["step"]
        if not any(step in cells[name] for name in names):
            continue
        row = [str(step)]
        for name in names:
            value, low, high = cells[name].get(step, (None, None, None))
            row.append(short(value) + ("" if low is None else f" [{short(low)}, {short(high)}]"))
        rows.append([*row, short(record.get(f"eval/{split}/n"))])
    return f"evaluations on {split} (with 95 % intervals)\n{align(rows)}"


def _module_table(seen: Overview) -> str:
    first, last = seen.training[0], seen.training[-1]
    facts = [fact for fact in MODULE_FACTS if fact in module_facts(seen.training)]
    rows = [["", *facts, ""]]
    for name in seen.modules:
        cells = []
        for fact in facts:
            old, new = short(first.get(f"module/{name}/{fact}")), short(last.get(f"module/{name}/{fact}"))
            cells.append(new if old == new else f"{old}→{new}")
        rows.append([name, *cells, ""])
    return f"modules, step {first['step']} → step {last['step']}\n{align(rows)}"


def _further(seen: Overview) -> str:
    steps = seen.run.journal_steps()
    path = seen.run.path
    lines = []
    if steps:
        lines.append(f"examples of a step:  mmrl show {path} step={steps[-1]}")
        lines.append(f"one example's calls: mmrl show {path} step={steps[-1]} example=<id>")
    if seen.run.report_path.is_file():
        lines.append(f"report for people:   {seen.run.report_path}")
    return "\n".join(lines)


def _step_table(run: RunDir, forest: Forest, step: int) -> str:
    rows = [["example", "rollouts", "reward", "lowest", "highest", "failed", "a prediction"]]
    for example in forest.examples:
        rollouts = [rollout for rollout in forest.rollouts if rollout.example == example]
        rewards = [rollout.reward for rollout in rollouts if rollout.reward is not None]
        failed = sum(rollout.error is not None for rollout in rollouts)
        numbers = (short(fmean(rewards)), short(min(rewards)), short(max(rewards))) if rewards else ("-", "-", "-")
        shown = next((rollout.prediction for rollout in rollouts if rollout.prediction is not None), "")
        rows.append([clean(example), str(len(rollouts)), *numbers, str(failed), shown_prediction(shown)])
    example = clean(forest.examples[0]) if forest.examples else "<id>"
    return (
        f"step {step}: {len(forest.examples)} examples, {len(forest.rollouts)} rollouts, {len(forest.calls)} calls\n"
        f"{align(rows)}\n\none example's calls: mmrl show {run.path} step={step} example='{example}'"
    )


def _last_step_with(run: RunDir, example: str) -> int:
    """The last step whose journal has the example.

    Raises:
        ConfigError: no step has it; names the nearest of all ids.
        CheckpointError: the run has no journals.
    """
    steps = run.journal_steps()
    if not steps:
        raise CheckpointError(f"{run.path}: the run has no journals yet")
    ids: dict[str, None] = {}
    for step in reversed(steps):
        forest, _ = read_step(run, step)
        if example in forest.examples:
            return step
        ids |= dict.fromkeys(forest.examples)
    raise ConfigError(
        f"example: got '{example}', which none of the {len(steps)} journalled steps has{nearest(example, list(ids))} "
        f"(ids of a step: mmrl show {run.path} step={steps[-1]})"
    )
