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
    spent: dict[tuple[str, str, str], float | None] = {}
    rows: dict[tuple[str, str], list[float]] = {}
    not_planned = []
    # Trainings first: they are what costs.
    for run in sorted(missing, key=lambda run: run.command == "eval"):
        apart = run.command == "eval" or run.after is not None
        alike = (run.command, run.row, run.column if apart else digest(run.config.model_copy(update={"seed": 0}), {}))
        if alike not in spent:
            column = spec.columns.get(run.column)  # a training may serve all columns
            try:
                hours, devices = device_hours(run, column.items if column else None)
                spent[alike] = hours * devices
            except MmrlError as error:
                spent[alike] = None
                not_planned.append(f"not planned: {run.name.rpartition(', seed')[0]}: {error}")
        if (cost := spent[alike]) is not None:
            name = f"{run.row}, {run.column}" if run.command == "train" and run.column else run.row
            rows.setdefault((run.command, name), []).append(cost)
    lines = [["", "row", "runs", "device-hours", ""]]
    for (command, name), costs in rows.items():
        lines.append([command, name, str(len(costs)), f"{sum(costs):,.1f}" if any(costs) else "not counted", ""])
    every = [cost for costs in rows.values() for cost in costs]
    lines.append(["", "all", str(len(every)), f"{sum(every):,.1f}", ""])
    head = "cost by mmrl plan, runs that optimise prompts not counted:"
    return "\n".join([head, align(lines), *not_planned])


def device_hours(run: SetRun, items: int | None) -> tuple[float, int]:
    """Hours of a run by `mmrl plan`, and the devices that it takes.

    Args:
        items: of the split that the set evaluates on, all of them.

    Raises:
        ConfigError: what `mmrl plan` refuses.
    """
    from mmrl.run.plan import PlanArguments, evaluation_hours, make_plan

    config = run.config
    if isinstance(config, EvalCommandConfig):
        # Weights that are still to be made: of the size of those that they are made from.
        path = run.chain[0].config.model.path if run.after is not None else config.policy
        model = config.model.model_copy(update={"path": path})
        return evaluation_hours(config.model_copy(update={"model": model}), items)
    if not isinstance(config, TrainCommandConfig):
        return 0.0, 1
    hardware = config.hardware
    plan = make_plan(config, PlanArguments(dry=0, device="cpu" if hardware.device == "cpu" else "h100"))
    # It evaluates on what the set does, where its config does not say how much of that.
    hours = replace(plan, items=plan.items if plan.items is not None else items).hours()
    return hours, hardware.processes * hardware.nodes + hardware.rollout_devices
