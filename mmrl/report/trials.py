"""What a run that optimised prompts has tried and changed, as text: `mmrl show RUN`."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from textwrap import indent, shorten

from mmrl.errors import DataError
from mmrl.report.advice import ADVICE
from mmrl.report.alarms import Alarm
from mmrl.report.text import align
from mmrl.report.trees import clean
from mmrl.system.files import JsonObject, read_jsonl

FOLDER = "prompts"
TRIALS, PROPOSALS = "trials.jsonl", "proposals.jsonl"
ROLLOUTS, COMPLETIONS = "rollouts.jsonl", "completions.jsonl"
STORED = {TRIALS: "trial", PROPOSALS: "usable", ROLLOUTS: "rollouts", COMPLETIONS: "key"}
"""Files of JSON lines in the folder, which a resumed stage reads; what each of their lines has."""
MOST_ROWS = 40
"""More trials than this are not all shown: those on all validation examples are."""


def prompts_text(run: Path, width: int = 100) -> str:
    """The trials of a run, and its best prompts so far as a difference to those it started from; empty without any.

    Raises:
        DataError: a damaged file.
    """
    trials = read_jsonl(run / FOLDER / TRIALS)
    if not trials:
        return ""
    start, result = _read(run / FOLDER / "start.json").get("modules", {}), _read(run / FOLDER / "result.json")
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
    """What went wrong in a trial whose rollouts have all failed, with an example; empty for any other trial."""
    example = trial.get("unusable")
    if not example:
        return ""
    counts = ", ".join(f"{clean(kind)} {count}" for kind, count in trial["failed"].items())
    text = f"all {trial['items']} rollouts of trial {trial['trial']} failed ({counts})"
    if example["module"]:
        text += f"; {clean(example['module'])} wrote, for example: {_short(example['reply']) or '(nothing)'}"
    return f"{text} ({_short(example['message'])})" if example["message"] else text


def trial_alarms(run: Path) -> list[Alarm]:
    """One alarm for each stretch of trials in which nothing went well."""
    trials = read_jsonl(run / FOLDER / TRIALS)
    stretches = [list(some) for failed, some in groupby(trials, lambda trial: bool(nothing_went_well(trial))) if failed]
    count = sum(map(len, stretches))
    return [
        Alarm(
            name="trials_fail",
            key="prompts/score",
            step=some[0]["trial"],
            until=None if some[-1] is trials[-1] else some[-1]["trial"],
            message=ADVICE["trials_fail"].text(count, len(trials), nothing_went_well(some[0])),
        )
        for some in stretches
    ]


def _short(text: str) -> str:
    return shorten(clean(text), 200, placeholder=" …")


def _read(path: Path) -> JsonObject:
    try:
        content = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except ValueError:
        content = None
    if not isinstance(content, dict):
        raise DataError(f"{path}: cannot be read: not a JSON object")
    return content


def _table(trials: Sequence[JsonObject]) -> str:
    shown = [trial for trial in trials if trial["full"]] if len(trials) > MOST_ROWS else trials
    rows = [["trial", "candidate", "examples", "reward", "best", "demonstrations", "failed"]]
    for trial in shown:
        counts = [len(prompt["demonstrations"]) for prompt in trial["modules"].values()]
        failed = ", ".join(f"{clean(kind)} {count}" for kind, count in trial["failed"].items())
        best = "-" if trial["best"] is None else f"{trial['best']:.4f}"
        items = f"{trial['items']}" + (" (all)" if trial["full"] else "")
        rows.append(
            [
                f"{trial['trial']}",
                clean(trial["candidate"][:8]),
                *(items, f"{trial['score']:.4f}", best, " ".join(map(str, counts)), failed or "-"),
            ]
        )
    left_out = len(trials) - len(shown)
    note = f"\n{left_out} trials on some of the examples are in {FOLDER}/{TRIALS}" if left_out else ""
    return align(rows) + note


def _difference(name: str, before: Mapping[str, object], after: Mapping[str, object], width: int) -> str:
    lines = [f"{name}", *_instructions(str(before.get("instructions", "")), str(after["instructions"]))]
    old, new = (json.loads(json.dumps(prompt.get("demonstrations", []))) for prompt in (before, after))
    if old == new:
        lines.append(f"  {len(new)} demonstrations, as at the start" if new else "  no demonstrations")
    else:
        lines.append(f"  demonstrations: {len(old)} at the start, {len(new)} now")
        lines += [f"  - {_line(demo, width)}" for demo in old if demo not in new]
        lines += [f"  + {_line(demo, width)}" for demo in new if demo not in old]
    return "\n".join(map(clean, lines))


def _instructions(before: str, after: str) -> Iterator[str]:
    if before == after:
        yield "  instructions as at the start"
        return
    yield "  instructions:"
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), lineterm="", n=2)
    yield from (indent(line, "  ") for line in list(lines)[2:] if not line.startswith("@@"))


def _line(demo: Mapping[str, object], width: int) -> str:
    fields = [f"{key}: {value}" for key, value in demo.items() if key != "augmented"]
    return shorten("  ".join(fields), max(width - 6, 40), placeholder=" …")
