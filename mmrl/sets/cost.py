"""Cost of the missing runs of a set, by `mmrl plan`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mmrl.config import EvalCommandConfig, TrainCommandConfig
from mmrl.errors import MmrlError
from mmrl.report.text import align
from mmrl.sets.queue import SetRun, by_cell
from mmrl.sets.spec import Command, SetSpec


def cost_text(spec: SetSpec, missing: Sequence[SetRun]) -> str:
    """Format GPU hours (H100; CPU hours for runs on it) of missing runs: trainings by config, evaluations by row."""
    costs: dict[tuple[Command, str], list[float]] = {}
    not_planned = []
    for (command, row, column), runs in by_cell(missing).items():
        task = spec.columns.get(column)  # a training may serve all columns
        name = f"{row}, {column}" if command == "train" and column else row
        try:
            hours, devices = device_hours(runs[0], task.items if task else None)
            costs.setdefault((command, name), []).extend([hours * devices] * len(runs))
        except MmrlError as error:
            not_planned.append(f"not planned: {command} {name}: {error}")
    lines = [["", "row", "runs", "device-hours", ""]]
    # Trainings first: they cost most.
    for (command, name), hours_each in sorted(costs.items(), key=lambda cost: cost[0][0] == "eval"):
        total = f"{sum(hours_each):,.1f}" if any(hours_each) else "not counted"
        lines.append([command, name, str(len(hours_each)), total, ""])
    all_costs = [cost for hours_each in costs.values() for cost in hours_each]
    lines.append(["", "all", str(len(all_costs)), f"{sum(all_costs):,.1f}", ""])
    head = "cost by mmrl plan, runs that optimise prompts not counted:"
    return "\n".join([head, align(lines), *not_planned])


def device_hours(run: SetRun, items: int | None) -> tuple[float, int]:
    """Return the hours of a run by `mmrl plan`, and the devices that it takes.

    Args:
        items: of the split that the set evaluates on, all of them.

    Raises:
        ConfigError: what `mmrl plan` refuses.
    """
    from mmrl.run.plan import PlanArguments, evaluation_hours, make_plan

    config = run.config
    if isinstance(config, EvalCommandConfig):
        # The weights do not exist yet; they have the size of the model that is trained.
        path = run.chain[0].config.model.path if run.after is not None else config.policy
        model = config.model.model_copy(update={"path": path})
        return evaluation_hours(config.model_copy(update={"model": model}), items)
    if not isinstance(config, TrainCommandConfig):
        return 0.0, 1
    hardware = config.hardware
    plan = make_plan(config, PlanArguments(dry=0, device="cpu" if hardware.device == "cpu" else "h100"))
    # Without `eval.items` a training evaluates on as many items as the set does.
    hours = replace(plan, items=plan.items if plan.items is not None else items).hours()
    return hours, hardware.processes * hardware.nodes + hardware.rollout_devices
