"""The end of a run: `summary.json`, `report.html`, and the text that a person reads last.

Top of `report`; called by `run` once training and the last evaluation are done.
"""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from itertools import pairwise
from textwrap import fill
from typing import Any

from mmrl.config import EndpointConfig
from mmrl.report.html import write_report
from mmrl.report.overview import Item, Overview
from mmrl.report.rundir import RunDir
from mmrl.report.series import duration, series, short, sparkline, trailing_mean
from mmrl.report.show import alarm_text
from mmrl.report.tables import before_after_table, compare_items, facts_table
from mmrl.system.conf import row_keys


def finish(
    run: RunDir,
    config: Any,
    facts: Mapping[str, Any],
    before: Sequence[Item],
    after: Sequence[Item],
    *,
    seconds: float,
    main_metric: str | None = None,
) -> str:
    """Write summary and report; returns the text to print.

    Args:
        config: the validated config (`TrainCommandConfig`).
        facts: `Task.describe()`.
        before, after: per-item results on `eval.split`, with `id` and `metrics`.
        seconds: wall-clock time of this process's part of the run.
        main_metric: `Task.main_metric`.
    """
    differences = compare_items(before, after, config.seed, config.eval.bootstrap, main_metric)
    seen = Overview.of(run)
    _, rewards = series(seen.training, "reward/mean")
    smooth = trailing_mean(rewards, 5)
    summary = {
        "name": seen.name,
        "algo": seen.get("algo.name"),
        "task": seen.get("task.name"),
        "model": seen.get("model.name"),
        "seed": config.seed,
        "steps": seen.done,
        "seconds": seconds,
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        "split": config.eval.split,
        "main_metric": main_metric,
        "comparison": {name: asdict(found) | {"certain": found.certain} for name, found in differences.items()},
        "reward": {"first": smooth[0], "last": smooth[-1], "best": smooth.max()} if len(smooth) else {},
        "alarms": [asdict(alarm) for alarm in seen.alarms],
        "facts": dict(facts),
        "what": seen.kind,
    }
    run.write_summary(summary)
    seen = Overview.of(run)
    width = min(shutil.get_terminal_size((100, 24)).columns, 110)
    trouble = _write_report(seen)
    parts = [
        f"{seen.name}: {seen.done} steps of {seen.what} in {duration(seconds)}",
        "\n".join(fill(sentence, width) for sentence in seen.kind) + ("\n" + facts_table(facts) if facts else ""),
        before_after_table(differences, config.eval.split),
    ]
    if len(rewards):
        first, last, best = (short(value) for value in (smooth[0], smooth[-1], smooth.max()))
        parts.append(
            f"training reward  {first} → {last} (best {best}, means of 5 steps)\n  {sparkline(rewards.tolist(), 60)}"
        )
    parts.append(failures_text({"before": before, "after": after}))
    parts.append(alarm_text(seen.alarms, width))
    parts.append(further(run, seen, trouble))
    return "\n\n".join(part for part in parts if part)


def failures_text(evaluations: Mapping[str, Sequence[Item]]) -> str:
    """Which evaluations have rollouts that failed from outside, where each counts as 0; empty where none has."""
    shares = {
        when: sum(i.get("failed_share", 0.0) for i in items) / len(items)
        for when, items in evaluations.items()
        if items
    }
    return "\n".join(
        f"evaluation {when} training: {share:.1%} of the rollouts failed from outside causes and count as 0"
        for when, share in shares.items()
        if share
    )


def _write_report(seen: Overview) -> str:
    """Write the report; what went wrong, if anything did."""
    try:
        write_report(seen)
    except Exception as error:  # the run is done and its numbers are safe: a drawing problem must not lose the summary
        return f"report not written ({type(error).__name__}: {error})"
    return ""


def further(run: RunDir, seen: Overview, trouble: str = "") -> str:
    """Where everything is, and the commands to look further."""
    rows = {"run directory": str(run.path), "report": trouble or str(run.report_path)}
    rows |= {"look further": f"mmrl show {run.path}"}
    steps = run.journal_steps()
    if steps:
        rows[""] = f"mmrl show {run.path} step={steps[-1]}"
    rows["evaluate"] = evaluation_command(seen)
    return facts_table(rows, indent="")


def evaluation_command(seen: Overview) -> str:
    """The command that evaluates the run on its own task, as its user set that task up.

    `mmrl eval` composes a config of its own, so what was typed, or set by a row (`experiment=`), of `plugins`,
    `model=` and `task.*` is to be typed again, by the values of this run (the command of a sweep has several).
    """
    typed = dict.fromkeys(_set_by(seen.run.environment.get("command", ())))
    words = [f"policy={seen.run.path}", f"task={seen.get('task.name')}"]
    if "model" in typed and seen.get("model.name") != "tiny":
        words.append(f"model={seen.get('model.name')}")
    for key in typed:
        section, _, name = key.partition(".")
        again = section == "task" and name and name.partition(".")[0] not in NOT_AGAIN
        if (again or key == "plugins") and (value := _as_typed(seen.get(key))) is not None:
            words.append(f"{key}={value}")
    if endpoints := seen.get("engine.endpoints"):
        words.append(f"engine.endpoints={_endpoints(endpoints)}")
    return " ".join(["mmrl eval", *(shlex.quote(word) for word in [*words, *_held_out(seen)])])


def _set_by(command: Sequence[str]) -> Iterator[str]:
    """The config keys that a command line set, those of its rows included."""
    folder = next((after for word, after in pairwise(command) if word in ("--config-dir", "-cd")), None)
    for word in command:
        key, _, value = word.lstrip("+").partition("=")
        yield key
        for row in value.split(",") if key == "experiment" else ():
            yield from row_keys(row, folder)


NOT_AGAIN = ("data", "reward", "search_penalty", "final_penalty", "em_needs_format", "outcome_rewards", "judge")
"""Parts of `task` that an evaluation gets otherwise (`data`) or that shape rewards in training alone."""


def _as_typed(value: Any) -> str | None:
    """A config value as one types it; None for a section."""
    if isinstance(value, Mapping):
        return None
    if isinstance(value, list | tuple):
        return f"[{','.join(str(item) for item in value)}]"
    return str(value).lower() if isinstance(value, bool) else "null" if value is None else str(value)


def _endpoints(given: Mapping[str, Mapping[str, Any]]) -> str:
    """`engine.endpoints` as one types it, without what is at its default."""
    fields = EndpointConfig.model_fields
    sections = []
    for module, endpoint in given.items():
        typed = {key: value for key, value in endpoint.items() if value != fields[key].default}
        shown = [
            f"{key}: '{value}'" if isinstance(value, str) else f"{key}: {_as_typed(value)}"
            for key, value in typed.items()
        ]
        sections.append(f"{module}: {{{', '.join(shown)}}}")
    return f"{{{', '.join(sections)}}}"


def _held_out(seen: Overview) -> list[str]:
    """What to evaluate on next: test; dev where dev is the user's own data and test still the mini world."""
    dev, test = seen.get("task.data.dev"), seen.get("task.data.test")
    if test not in (None, "mini"):
        return [f"task.data.test={test}", "split=test"]
    return [f"task.data.dev={dev}", "split=dev"] if test == "mini" and dev not in (None, "mini") else ["split=test"]
