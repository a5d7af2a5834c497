"""A run as text: `mmrl show` (curve, tables, the tree of an example), and what is printed when training ends.

Returns text, commands print it. `finish` also writes `summary.json` and `report.html`.
"""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from textwrap import fill

from mmrl.config.base import path_override
from mmrl.errors import MODEL_CAUSED, failure_summary, without_codes
from mmrl.report.alarms import Alarm
from mmrl.report.html import try_report
from mmrl.report.items import evaluation_text, example_key, example_text, run_facts, step_text
from mmrl.report.overview import Item, Overview, damage_named
from mmrl.report.stats import (
    compare_items,
    counted,
    duration,
    learning,
    module_facts,
    short,
    sparkline,
)
from mmrl.report.tables import before_after_table, facts_table, module_rows
from mmrl.report.text import align
from mmrl.report.trials import prompts_text
from mmrl.store.journal import read_step
from mmrl.store.rundir import RunDir

MODULE_FACTS: tuple[str, ...] = ("calls", "reward", "penalty", "format_rate", "length", "entropy", "surprise", "kl")
MODULE_FACTS += ("clip_share", "teacher_gap", "loss", "token_accuracy")


def show_run(path: Path | str, example: str | None = None, step: int | None = None) -> str:
    """Render a run for the terminal.

    Args:
        example: id of an example: its tree of calls, at `step` or at the last step that has it; of an item, its
            scores, and its calls where they are stored.
        step: a step: its examples, and the items evaluated after it; with `example`, the tree.

    Raises:
        CheckpointError: not a run, no such step, a damaged file.
        ConfigError: no such example.
    """
    run = RunDir.read(path)
    with damage_named(path):
        overview, width = Overview.from_run(run), shutil.get_terminal_size((100, 24)).columns
        if example is not None:
            text = example_text(overview, example, step, width)
        elif step is not None:
            text = step_text(overview, step, width)
        else:
            text = evaluation_text(overview, width) if overview.evaluates else overview_text(overview, width)
        return without_codes(text)


def overview_text(overview: Overview, width: int = 100) -> str:
    """Render curve, evaluations, modules and alarms of a run."""
    parts = [f"{overview.name}: {', '.join(run_facts(overview))}", _kind_text(overview, width), _curve_text(overview)]
    parts += [
        f"evaluations on {split} (with 95 % intervals)\n{align(rows, width=width)}"
        for split, rows in overview.evaluations.items()
    ]
    if overview.differences:
        parts.append(
            "first against last evaluation, " + before_after_table(overview.differences, overview.split, width)
        )
    if overview.modules:
        first, last = overview.training[0]["step"], overview.training[-1]["step"]
        facts = [fact for fact in MODULE_FACTS if fact in module_facts(overview.training)]
        table = align(module_rows(overview.training, facts), width=width)
        parts.append(f"modules, step {first} → step {last}\n{table}")
    parts += [alarm_text(overview.alarms, width), prompts_text(overview.run.path, width), _paths_and_commands(overview)]
    return "\n\n".join(part for part in parts if part)


def _kind_text(overview: Overview, width: int) -> str:
    """Describe the kind of run and its task."""
    facts = facts_table(overview.summary.get("facts") or {})
    return "\n".join([*(fill(sentence, width) for sentence in overview.kind), *filter(None, [facts])])


def _curve_text(overview: Overview) -> str:
    """Render the training reward (of a supervised stage the loss): its means and a curve; empty before a step."""
    name, _, values = learning(overview.training)
    if not len(values):
        return ""
    first, last, best = (short(overview.curve[key]) for key in ("first", "last", "best"))
    ascii_only = not (sys.stdout.encoding or "").lower().startswith("utf")
    curve = sparkline(values.tolist(), 60, ascii_only=ascii_only)
    means = f", means of {overview.window} steps" if overview.window else ""
    return f"training {name}  {first} → {last} (best {best}{means})\n  {curve}"


def alarm_text(alarms: Sequence[Alarm], width: int) -> str:
    """Render a paragraph per alarm; empty without alarms."""
    if not alarms:
        return ""
    lines = ["alarms"]
    for alarm in alarms:
        until = f" to {alarm.until}" if alarm.until is not None else " on"
        line = f"{alarm.name} from step {alarm.step}{until} ({alarm.key}): {alarm.message}"
        lines.append(fill(line, max(width, 40), initial_indent="  ", subsequent_indent="    "))
    return "\n".join(lines)


# --- the end of a run


def finish(
    run: RunDir,
    facts: Mapping[str, object],
    before: Sequence[Item],
    after: Sequence[Item],
    seconds: float,
    main_metric: str | None = None,
) -> str:
    """Write summary and report; returns the text to print.

    Args:
        facts, main_metric: the task's (`describe()`, `main_metric`).
        before, after: per-item results on `eval.split`, with `id` and `metrics`, compared as `eval.*` says.
        seconds: wall-clock time of this process's part of the run.
    """
    overview = Overview.from_run(run)
    seed, split = overview.get("seed"), overview.split
    differences = compare_items(before, after, seed, overview.get("eval.bootstrap"), main_metric)
    if ends := [segment["done"] for segment in run.segments]:
        facts = {**facts, "extended": f"after step {', '.join(map(str, ends))} (segments.jsonl)"}
    # The page of the last evaluation is not this one, and a run without a page is not finished (`RunDir.finished`).
    run.report_path.unlink(missing_ok=True)
    # First the numbers, then the page: a page that fails to draw loses nothing.
    run.write_summary(
        {
            "name": overview.name,
            "algo": overview.get("algo.name"),
            "task": overview.get("task.name"),
            "model": overview.get("model.name"),
            "seed": seed,
            "steps": overview.done,
            "seconds": seconds,
            "finished": datetime.now(UTC).isoformat(timespec="seconds"),
            "split": split,
            "main_metric": main_metric,
            "comparison": {key: asdict(change) | {"certain": change.certain} for key, change in differences.items()},
            "reward": overview.curve if learning(overview.training)[0] == "reward" else {},
            "alarms": [asdict(alarm) for alarm in overview.alarms],
            "facts": facts,
            "what": overview.kind,
        }
    )
    overview = Overview.from_run(run)
    width = min(shutil.get_terminal_size((100, 24)).columns, 110)  # wider paragraphs are hard to read
    problem = try_report(overview)
    parts = [
        f"{overview.name}: {counted(overview.done, 'step')} of {overview.description} in {duration(seconds)}",
        _kind_text(overview, width),
        before_after_table(differences, split, width),
        _curve_text(overview),
        _failures_text({"before": before, "after": after}),
        alarm_text(overview.alarms, width),
        _paths_and_commands(overview, problem),
    ]
    return without_codes("\n\n".join(part for part in parts if part))


def _failures_text(evaluations: Mapping[str, Sequence[Item]]) -> str:
    """Name the evaluations with rollouts that failed from outside, each counted as 0; empty where none has."""
    lines = []
    for when, items in evaluations.items():
        share = sum(item.get("failed_share", 0.0) for item in items) / max(len(items), 1)
        causes = failure_summary(kind for item in items for kind in item.get("errors", ()) if kind not in MODEL_CAUSED)
        if share:
            lines.append(f"evaluation {when} training: {share:.1%} of the rollouts failed {causes} and count as 0")
    return "\n".join(lines)


def _paths_and_commands(overview: Overview, problem: str = "") -> str:
    """Return the paths of everything, and the commands to look further."""
    path, steps, report = overview.run.path, overview.run.journal_steps(), overview.run.report_path
    rows = {"run directory": str(path), "report": problem or (str(report) if report.is_file() else "not yet")}
    typed = overview.run.typed
    rows["look further"] = f"mmrl show {typed}"
    if steps:
        rows["a step"] = f"mmrl show {typed} step={steps[-1]}"
        if examples := read_step(overview.run, steps[-1])[0].examples:
            rows["an example"] = f"mmrl show {typed} step={steps[-1]} {example_key(examples[0])}"
    # Objects of a Python process have names that no command can import.
    if not str(overview.get("task.program") or "").startswith("mmrl.system.objects:"):
        # On test, or, of the user's data, dev or train.
        sources = {split: overview.get(f"task.data.{split}") for split in ("test", "dev", "train")}
        split = next((split for split, source in sources.items() if source not in (None, "mini")), "test")
        policy = shlex.quote(path_override("policy", path))
        rows["evaluate"] = f"mmrl eval {policy} split={split}"
    return facts_table(rows, indent="")
