"""What the missing runs of a table will cost, by `mmrl plan`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mmrl.config import EvalCommandConfig, StagedCommandConfig, TrainCommandConfig
from mmrl.errors import MmrlError
from mmrl.report.text import align
from mmrl.run.table_runs import Planned, TableRun, digest, with_seed


def cost_text(planned: Planned, missing: Sequence[TableRun]) -> str:
    """Hours of GPUs (H100; of the CPU for runs on it) of what is missing: trainings by config, evaluations by row."""
    alike: dict[tuple[str, ...], list[TableRun]] = {}
    for run in missing:
        kind = digest(with_seed(run.config, 0), {}) if run.command == "train" else run.column
        alike.setdefault((run.command, run.row, kind if run.after is None else run.column), []).append(run)
    rows: dict[tuple[str, ...], tuple[int, float]] = {}
    not_planned = {}
    for (command, row, _), runs in alike.items():
        first = runs[0]
        name = f"{row}, {first.column}" if command == "train" and first.column else row
        column = planned.spec.columns.get(first.column)  # a training names its stage, or none
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
    text = "cost by mmrl plan, stages that optimise prompts not counted:\n" + align([[*line, ""] for line in lines])
    return "\n".join([text, *(f"not planned: {name}: {why}" for name, why in not_planned.items())])


def device_hours(run: TableRun, items: int | None) -> tuple[float, int]:
    """Hours of a run by `mmrl plan`, and the devices that it takes; of stages those that train weights.

    Args:
        items: of the split that the table evaluates on, all of them.

    Raises:
        ConfigError: what `mmrl plan` refuses.
    """
    from mmrl.run.plan import PlanRequest, evaluation_hours, make_plan

    config = run.config
    if isinstance(config, EvalCommandConfig | TrainCommandConfig):
        # Weights that are still to be made: of the size of those that they are made from.
        path = run.first.config.model.path if run.after is not None else getattr(config, "policy", config.model.path)
        config = config.model_copy(update={"model": config.model.model_copy(update={"path": path})})
    if isinstance(config, EvalCommandConfig):
        return evaluation_hours(config, items)
    stages = config.stages if isinstance(config, StagedCommandConfig) else (config,)
    hours, devices = 0.0, 1
    for stage in stages:
        if isinstance(stage, TrainCommandConfig):
            hardware = stage.hardware
            plan = make_plan(stage, PlanRequest({}, 0, "cpu" if hardware.device == "cpu" else "h100"))
            # It evaluates on what the table does, where its config does not say how much of that.
            hours += replace(plan, items=plan.items if plan.items is not None else items).hours()
            devices = max(devices, hardware.processes * hardware.nodes + hardware.rollout_devices)
    return hours, devices
