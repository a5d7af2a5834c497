"""Trials of a run that optimises prompts, and its changes to them, as text: `mmrl show RUN`."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from textwrap import shorten
from typing import Any

from mmrl.report.advice import ADVICE
from mmrl.report.alarms import Alarm
from mmrl.report.text import align, clean
from mmrl.store.rundir import read_object
from mmrl.system.files import JsonObject, read_jsonl

FOLDER = "prompts"
TRIALS, PROPOSALS, MEMO = "trials.jsonl", "proposals.jsonl", "memo.jsonl"
MOST_ROWS = 40
"""More trials than this are not all shown: those on all validation examples are."""


def prompts_text(run: Path, width: int = 100) -> str:
    """Render the trials of a run, and the changes of its best prompts against the first; empty without any.

    Raises:
        DataError: a damaged file.
    """
    trials = read_jsonl(run / FOLDER / TRIALS)
    if not trials:
        return ""
    start = read_object(run / FOLDER / "start.json").get("modules", {})
    result = read_object(run / FOLDER / "result.json")
    full = [trial for trial in trials if trial["full"]]
    best = max(full, key=lambda trial: float(trial["score"]), default=None)
    if result:
        improved, modules = bool(result["improved"]), result["modules"]
        head = f"prompts: reward {result['start']:.4f} at the start, {result['best']:.4f} with the best candidate"
        head += f", on {result['validation']} validation examples" + (
            "" if improved else "; nothing was better than the start, whose prompts stay"
        )
    else:
        modules = best["modules"] if best is not None else start
        head = "prompts: not finished" + (f", best reward so far {best['score']:.4f}" if best is not None else "")
    parts = [head, _table(trials)]
    parts += [_difference(name, start.get(name, {}), prompt, width) for name, prompt in modules.items()]
    return "\n\n".join(part for part in parts if part)


def nothing_went_well(trial: JsonObject) -> str:
    """Describe the failure of a trial whose rollouts have all failed, with an example; empty for any other trial."""
    example = trial.get("unusable")
    if not example:
        return ""
    counts = ", ".join(f"{clean(kind)} {count}" for kind, count in trial["failed"].items())
    text = f"all {trial['items']} rollouts of trial {trial['trial']} failed ({counts})"
    if example["module"]:
        text += f"; {clean(example['module'])} wrote, for example: {_short(example['reply']) or '(nothing)'}"
    return f"{text} ({_short(example['message'])})" if example["message"] else text


def trial_alarms(run: Path) -> list[Alarm]:
    """Return an alarm for each stretch of trials in which nothing went well."""
    trials = read_jsonl(run / FOLDER / TRIALS)
    stretches = [list(part) for failed, part in groupby(trials, lambda trial: bool(nothing_went_well(trial))) if failed]
    count = sum(map(len, stretches))
    return [
        Alarm(
            name="trials_fail",
            key="prompts/score",
            step=part[0]["trial"],
            until=None if part[-1] is trials[-1] else part[-1]["trial"],
            message=ADVICE["trials_fail"].text(count, len(trials), nothing_went_well(part[0])),
        )
        for part in stretches
    ]


def _short(text: str) -> str:
    return shorten(clean(text), 200, placeholder=" …")


def _table(trials: Sequence[JsonObject]) -> str:
    listed = [trial for trial in trials if trial["full"]] if len(trials) > MOST_ROWS else trials
    rows = [["trial", "candidate", "examples", "reward", "best", "demonstrations", "failed"]]
    for trial in listed:
        counts = [len(prompt["demonstrations"]) for prompt in trial["modules"].values()]
        failed = ", ".join(f"{clean(kind)} {count}" for kind, count in trial["failed"].items())
        best = "-" if trial["best"] is None else f"{trial['best']:.4f}"
        items = f"{trial['items']}" + (" (all)" if trial["full"] else "")
        measured = [items, f"{trial['score']:.4f}", best, " ".join(map(str, counts)), failed or "-"]
        rows.append([f"{trial['trial']}", clean(trial["candidate"][:8]), *measured])
    left_out = len(trials) - len(listed)
    note = f"\n{left_out} trials on some of the examples are in {FOLDER}/{TRIALS}" if left_out else ""
    return align(rows) + note


def _difference(name: str, before: Mapping[str, object], after: Mapping[str, object], width: int) -> str:
    old, new = _prompt_lines(before, width), _prompt_lines(after, width)
    if old == new:
        return f"{name}\n  as at the start"
    changes = list(difflib.unified_diff(old, new, lineterm="", n=2))[2:]
    return "\n".join([clean(name), *(f"  {clean(line)}" for line in changes if not line.startswith("@@"))])


def _prompt_lines(prompt: Mapping[str, Any], width: int) -> list[str]:
    """Return the lines of its instructions, and one for each demonstration."""
    lines = str(prompt.get("instructions", "")).splitlines()
    for demo in prompt.get("demonstrations", ()):
        fields = " · ".join(f"{key}: {value}" for key, value in demo.items() if key != "augmented")
        lines.append(shorten(f"demonstration: {fields}", max(width - 3, 40), placeholder=" …"))
    return lines
