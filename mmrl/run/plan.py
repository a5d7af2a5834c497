"""`mmrl plan`: what a checked training run will do and cost, counted without starting it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mmrl.config import TrainCommandConfig
from mmrl.errors import ConfigError
from mmrl.models.load import model_path
from mmrl.plan.devices import device as find_device
from mmrl.plan.report import Plan
from mmrl.plan.shapes import shape_of
from mmrl.plan.workload import Lengths, Load, declared, dry_loads, parse_lengths, undeclared, without_endpoints
from mmrl.run.build import build_task, reward_set
from mmrl.run.check import on_mini_world, plan_problems
from mmrl.run.settle import plannable
from mmrl.tasks.base import Task


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """What `mmrl plan` is asked for besides a config."""

    lengths: Mapping[str, Lengths]
    dry: int | None
    """Examples whose rollouts are counted; 0: none, lengths as declared; None: some where the weights are here."""
    device: str | None

    @classmethod
    def read(cls, values: Mapping[str, str]) -> PlanRequest:
        """From the keys `lengths`, `dry` and `device` as typed.

        Raises:
            ConfigError: a value that cannot be read, or two that exclude each other.
        """
        dry, lengths = values.get("dry"), values.get("lengths", "")
        if dry is not None and not dry.isdigit():
            raise ConfigError(f"dry: got '{dry}', expected a number of examples (0: count from declared lengths)")
        if lengths and dry not in (None, "0"):
            raise ConfigError("lengths: has no effect with dry rollouts, which are counted; leave one of the two out")
        return cls(parse_lengths(lengths), None if dry is None else int(dry), values.get("device"))


def make_plan(config: TrainCommandConfig, request: PlanRequest) -> Plan:
    """The plan of a validated config.

    Raises:
        ConfigError: what `mmrl train` would refuse, as far as it does not depend on this machine.
    """
    settled = plannable(config, request.device)
    name = request.device or ("cpu" if plannable(config, None).hardware.device == "cpu" else "h100")
    device = find_device(name, config.hardware.threads or 1)
    weights_here = Path(model_path(config.model)).is_dir()
    examples = (0 if request.lengths or not weights_here else 4) if request.dry is None else request.dry
    if examples and not weights_here:
        raise ConfigError(f"dry: the weights of {config.model.path} are not on this machine; leave dry out, or dry=0")
    shape = shape_of(config.model)
    # Counting from lengths needs the program, not the data: those of the mini world stand in for what is not here.
    task = build_task(settled.task if examples else on_mini_world(settled.task), settled.seed)
    problems = plan_problems(settled, task)
    known = shape.projections()
    if settled.model.lora is not None and (strange := [t for t in settled.model.lora.targets if t not in known]):
        problems.append(
            f"model.lora.targets: got {', '.join(strange)}; mmrl plan knows the sizes of {', '.join(known)} alone"
        )
    available = len(task.examples("train")) if examples else 0
    if examples > available:
        problems.append(f"dry: got {examples}, the train split has {available} examples")
    if problems:
        raise ConfigError(problems)
    loads, source = _loads(settled, task, examples, request.lengths)
    if settled.engine.endpoints:
        loads = without_endpoints(loads, settled.engine.endpoints)
        source += f"; an endpoint answers for {', '.join(settled.engine.endpoints)}"
    return Plan(config=settled, shape=shape, device=device, loads=loads, source=source)


def _loads(
    config: TrainCommandConfig, task: Task, examples: int, lengths: Mapping[str, Lengths]
) -> tuple[dict[str, Load], str]:
    """The work of each module, and where the numbers come from."""
    modules = task.program.modules
    if examples:
        return (
            dict(dry_loads(config, task, reward_set(config, task), examples)),
            f"counted in dry rollouts of {examples} examples",
        )
    source = "from declared lengths; dry=N counts instead where the weights are at hand"
    if guesses := undeclared(config, modules, lengths):
        source = (
            f"from a guess at the lengths of {', '.join(guesses)}, by the task's limits: declare them with "
            "lengths=, or count with dry=N where the weights are at hand"
        )
    return declared(config, modules, lengths), source
