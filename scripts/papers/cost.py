"""Cost of the missing runs of a table, by `mmrl plan`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mmrl.config import EvalRunConfig, RlRunConfig
from mmrl.errors import ConfigError, MmrlError, refuse
from mmrl.plan.cost import device, evaluation_seconds
from mmrl.plan.shapes import shape_of
from mmrl.plan.workload import declared_rollout
from mmrl.report.text import align
from mmrl.sets.queue import PlannedRun, by_cell
from scripts.papers.spec import Table


def cost_text(table: Table, missing: Sequence[PlannedRun]) -> str:
    """Format GPU hours (H100; CPU hours for runs on it) of missing runs, by command, row and column."""
    rows, total = [["", "row", "runs", "device-hours", ""]], 0.0
    for (command, row, column), runs in by_cell(missing).items():
        asked = table.columns.get(column)  # a training may serve all columns
        try:
            hours, devices = device_hours(runs[0], asked.items if asked else None)
        except MmrlError as error:
            cost, note = "?", str(error)
        else:
            total += hours * devices * len(runs)
            cost, note = (f"{hours * devices * len(runs):,.1f}", "") if hours else ("not counted", "")
        rows.append([command, f"{row}, {column}" if column else row, str(len(runs)), cost, note])
    rows.append(["", "all", str(len(missing)), f"{total:,.1f}", ""])
    return "\n".join(["cost by mmrl plan, runs that optimise prompts not counted:", align(rows)])


def device_hours(run: PlannedRun, items: int | None) -> tuple[float, int]:
    """Return the hours of a run by `mmrl plan`, and the devices that it takes.

    Args:
        items: of the split that the set evaluates on, all of them.

    Raises:
        ConfigError: what `mmrl plan` refuses.
    """
    from mmrl.commands.plan import PlanArguments, make_plan

    config = run.config
    if isinstance(config, EvalRunConfig):
        # The weights do not exist yet; they have the size of the model that is trained.
        path = run.chain[0].config.model.path if run.after is not None else config.policy
        model = config.model.model_copy(update={"path": path})
        return _evaluation_hours(config.model_copy(update={"model": model}), items)
    if not isinstance(config, RlRunConfig):
        return 0.0, 1
    hardware = config.hardware
    plan = make_plan(config, PlanArguments(dry=0, device="cpu" if hardware.device == "cpu" else "h100"))
    # Without `eval.items` a training evaluates on as many items as the set does.
    hours = replace(plan, items=plan.items if plan.items is not None else items).hours()
    return hours, hardware.processes * hardware.nodes + hardware.rollout_devices


def _evaluation_hours(config: EvalRunConfig, items: int | None) -> tuple[float, int]:
    """Return the hours of an evaluation on H100s (on the CPU where the config says so), and the devices that it takes.

    Args:
        items: of the whole split, where `eval.items` does not say how many.

    Raises:
        ConfigError: the sizes of the model are not known, or the number of items.
    """
    from mmrl.commands.plan import on_mini_world
    from mmrl.run.build import build_task, evaluation_devices
    from mmrl.run.check import process_problems
    from mmrl.run.settle import settle

    limits = (config.eval.items, config.task.data.items_of(config.split), items)
    if not (known := [limit for limit in limits if limit is not None]):
        raise ConfigError("eval.items: null, and nobody has counted the split; set it, or items in the table's file")
    shape, on_cpu = shape_of(config.model), config.hardware.device == "cpu"
    settled = settle(config, "cpu" if on_cpu else "cuda", planned=True).config
    modules = build_task(on_mini_world(config.task), config.seed).program.modules
    rollout = declared_rollout(settled, modules, {}, settled.engine.endpoints or ())
    machine = device("cpu" if on_cpu else "h100", settled.hardware.threads or 1, settled.model.matmul)
    refuse(process_problems(settled))
    devices = len(evaluation_devices(settled.hardware)) or 1
    spent = evaluation_seconds(settled, shape, rollout, min(known) * config.eval.samples, machine, devices)
    return spent / 3600, devices
