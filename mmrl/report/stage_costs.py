"""The stages of a run: their histories as one, and what each has cost and gained."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mmrl.errors import CheckpointError
from mmrl.models.policy import STAGES
from mmrl.report.rundir import RunDir, step_of
from mmrl.report.stats import duration, fixed, number, short, signed
from mmrl.system.files import JsonObject, atomic_write, dumps

COUNTS = {
    "rollouts": ("rollouts/count", "prompts/rollouts"),
    "calls": ("rollouts/calls", "prompts/calls", "prompts/writer/requests"),
    "tokens": ("rollouts/tokens", "prompts/completion_tokens", "prompts/writer/completion_tokens"),
    "trained": ("train/tokens",),
}
"""Count of a stage -> metrics of its steps that are summed; those of the model that writes instructions among them."""
TIMES = ("time/step", "time/eval")
"""Seconds that stay in the history where a stage was stopped and continued."""
MONEY = ("endpoint/cost", "endpoint/judge/cost", "endpoint/external/cost")
"""Counted since the process started, so the last value of each start is its cost."""


def stage_folders(run: Path) -> list[Path]:
    """The stages of a run that have begun, in order; empty for a run that is one stage."""
    folders = [path for path in (run / STAGES).glob("*_*") if path.name.partition("_")[0].isdigit()]
    return sorted(folders, key=lambda path: int(path.name.partition("_")[0]))


def stage_facts(run: Path) -> list[JsonObject]:
    """Cost and gain of each stage: counts, seconds, USD, and the main metric before and after with its interval.

    `difference`, `low` and `high` compare item by item what the stage started from with what it made; absent while the
    stage goes on.
    """
    facts: list[JsonObject] = []
    for path in stage_folders(run):
        try:
            stage = RunDir.read(path)
        except CheckpointError:  # a kill came before its config was written
            continue
        summary, history = stage.summary, stage.history()
        fact: JsonObject = {"stage": path.name, "steps": max((int(line["step"]) for line in history), default=0)}
        for name, keys in COUNTS.items():
            fact[name] = int(sum(number(line.get(key)) or 0.0 for line in history for key in keys))
        fact["seconds"] = sum(number(line.get(key)) or 0.0 for line in history for key in TIMES)
        money = sum(_paid([number(line.get(key)) for line in history]) for key in MONEY)
        fact["cost"] = money + sum(number(line.get("prompts/writer/cost")) or 0.0 for line in history)
        metric = summary.get("main_metric")
        compared = summary.get("comparison", {}).get(metric) or {}
        fact["metric"] = metric
        fact |= {key: compared.get(key) for key in ("before", "after", "difference", "low", "high", "n")}
        facts.append(fact)
    return facts


def _paid(values: Sequence[float | None]) -> float:
    """The sum over process starts of a count that each start begins anew."""
    paid, last = 0.0, 0.0
    for value in values:
        if value is None:
            continue
        if value < last:  # a process started again
            paid += last
        last = value
    return paid + last


def stage_rows(facts: Sequence[JsonObject]) -> list[list[str]]:
    """A header and a row per stage."""
    metric = next((str(fact["metric"]) for fact in facts if fact["metric"]), "score")
    money = any(fact["cost"] for fact in facts)
    header = ["stage", metric, "gain", "95 % interval", "steps", "rollouts", "calls", "tokens sampled", "trained"]
    rows = [[*header, "time", *(["USD"] if money else [])]]
    for fact in facts:
        if fact["after"] is None:
            scores = ["", "", ""]
        else:
            scores = [f"{fixed(fact['before'])} → {fixed(fact['after'])}", signed(fact["difference"])]
            scores.append(f"{signed(fact['low'])} to {signed(fact['high'])}")
        counts = [short(float(n)) if (n := fact[name]) else "0" for name in ("rollouts", "calls", "tokens", "trained")]
        time = duration(fact["seconds"]) + ("" if fact["metric"] else ", not ended")
        cost = [f"{fact['cost']:.2f}"] if money else []
        rows.append([fact["stage"], *scores, str(fact["steps"]), *counts, time, *cost])
    return rows


def gather(rundir: RunDir, stages: Sequence[Path]) -> None:
    """Bring the history and the evaluations of the ended stages together in the run's own files, each step once.

    Steps count through all stages. Where a stage begins, the evaluation is that of the end of the stage before: of the
    same policy, evaluated once more in the folder of the later stage.
    """
    lines: dict[int, dict[str, object]] = {}
    offset = 0
    for path in stages:
        run = RunDir.read(path)
        for record in run.history():
            step = offset + int(record["step"])
            # The end of a stage and the start of the next are one step of the run; what the earlier record has stays.
            lines[step] = {**record, **lines.get(step, {}), "step": step}
        for file in sorted((path / "eval").glob("step-*.jsonl")):
            step, split = step_of(file) or 0, file.stem.split("-", 2)[2]
            if step or not offset:
                atomic_write(rundir.eval_path(offset + step, split), file.read_text(encoding="utf-8"))
        offset = max(lines, default=0)
    atomic_write(rundir.metrics_path, "".join(dumps(lines[step]) + "\n" for step in sorted(lines)))
