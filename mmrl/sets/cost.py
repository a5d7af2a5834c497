"""What the missing runs of a set will cost, by `mmrl plan`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mmrl.config import EvalCommandConfig, TrainCommandConfig
from mmrl.errors import MmrlError
from mmrl.report.text import align
from mmrl.sets.plan import digest
from mmrl.sets.queue import SetRun
from mmrl.sets.spec import SetSpec


def cost_text(spec: SetSpec, missing: Sequence[SetRun]) -> str:
    """Hours of GPUs (H100; of the CPU for runs on it) of what is missing: trainings by config, evaluations by row."""
    alike: dict[tuple[str, ...], list[SetRun]] = {}
    for run in missing:
        kind = digest(run.config.model_copy(update={"seed": 0}), {}) if run.command == "train" else run.column
        alike.setdefault((run.command, run.row, kind if run.after is None else run.column), []).append(run)
    rows: dict[tuple[str, ...], tuple[int, float]] = {}
    not_planned = {}
    for (command, row, _), runs in alike.items():
        first = runs[0]
        name = f"{row}, {first.column}" if command == "train" and first.column else row
        column = spec.columns.get(first.column)  # a training may serve all columns
        try:
            hours, devices = device_hours(first, column.items if column else None)
        except MmrlError as error:
            not_planned[first.name.rpartition(", seed")[0]] = str(error)
            continue
        count, spent = rows.get((command, name), (0, 0.0))
        rows[command, name] = (count + len(runs), spent + len(runs) * hours * devices)
    # Trainings first: they are what costs.
    listed = sorted(rows.items(), key=lambda item: item[0][0] == "eval")
    lines = [["", "row", "runs", "device-hours"]]
    lines += [
        [command, name, str(count), f"{spent:,.1f}" if spent else "not counted"]
        for (command, name), (count, spent) in listed
    ]
    count, spent = (sum(numbers) for numbers in zip(*rows.values(), strict=True)) if rows else (0, 0.0)
    lines.append(["", "all", str(count), f"{spent:,.1f}"])
    text = "cost by mmrl plan, runs that optimise prompts not counted:\n" + align([[*line, ""] for line in lines])
    return "\n".join([text, *(f"not planned: {name}: {why}" for name, why in not_planned.items())])


def device_hours(run: SetRun, items: int | None) -> tuple[float, int]:
    """Hours of a run by `mmrl plan`, and the devices that it takes.

    Args:
        items: of the split that the set evaluates on, all of them.

    Raises:
        ConfigError: what `mmrl plan` refuses.
    """
    from mmrl.run.plan import PlanRequest, evaluation_hours, make_plan

    config = run.config
    if isinstance(config, EvalCommandConfig):
        # Weights that are still to be made: of the size of those that they are made from.
        path = run.chain[0].config.model.path if run.after is not None else config.policy
        model = config.model.model_copy(update={"path": path})
        return evaluation_hours(config.model_copy(update={"model": model}), items)
    if not isinstance(config, TrainCommandConfig):
        return 0.0, 1
    hardware = config.hardware
    plan = make_plan(config, PlanRequest({}, 0, "cpu" if hardware.device == "cpu" else "h100"))
    # It evaluates on what the set does, where its config does not say how much of that.
    hours = replace(plan, items=plan.items if plan.items is not None else items).hours()
    return hours, hardware.processes * hardware.nodes + hardware.rollout_devices
