"""`mmrl plan`: compose and check a training run as `mmrl train` does, then print what it will do and cost."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mmrl.cli.commands import validated
from mmrl.cli.compose import CommandLine, parse_arguments, take
from mmrl.config import TrainCommandConfig
from mmrl.errors import ConfigError


def plan_command(arguments: Sequence[str]) -> int:
    """`mmrl plan <overrides> [lengths=MODULE:P/C,...] [dry=N] [device=NAME] [--json]`."""
    as_json = "--json" in arguments
    line = parse_arguments([a for a in arguments if a != "--json"])
    lengths = take(line.overrides, "lengths") or ""
    dry = take(line.overrides, "dry")
    name = take(line.overrides, "device")
    if line.multirun or line.prints_only:
        raise ConfigError("mmrl plan: takes one run and no flags but --json")
    if dry is not None and not dry.isdigit():
        raise ConfigError(f"dry: got '{dry}', expected a number of examples (0: count from declared lengths)")
    if lengths and dry not in (None, "0"):
        raise ConfigError("lengths: has no effect with dry rollouts, which are counted; leave one of the two out")
    (config,) = validated("train", TrainCommandConfig, line)
    plan = make(config, lengths, None if dry is None else int(dry), name, line)
    print(plan.as_json() if as_json else plan.text())
    return 0


def make(config: TrainCommandConfig, lengths: str, dry: int | None, name: str | None, line: CommandLine):  # type: ignore[no-untyped-def]  # the type would load torch
    """The plan of a validated config."""
    from mmrl import engines
    from mmrl.algorithms import problems as algorithm_problems
    from mmrl.models.load import model_path
    from mmrl.plan.devices import device as find_device
    from mmrl.plan.load import asked_elsewhere, declared, guessed, parse_lengths
    from mmrl.plan.report import Plan
    from mmrl.plan.shapes import shape_of
    from mmrl.run import check as prepare
    from mmrl.trainer.settings import Settings

    given = parse_lengths(lengths)
    on = name or ("cpu" if prepare.plannable(config, None).hardware.device == "cpu" else "h100")
    device = find_device(on, config.hardware.threads or 1)
    here = Path(model_path(config.model)).is_dir()
    examples = (0 if lengths or not here else 4) if dry is None else dry
    if examples and not here:
        raise ConfigError(f"dry: the weights of {config.model.path} are not on this machine; leave dry out, or dry=0")
    shape = shape_of(config.model)
    config = prepare.plannable(config, name)
    problems = prepare.device_problems(config) + prepare.staleness_problems(config)
    problems += Settings(train=config.train, algo=config.algo, model=config.model, seed=config.seed).problems()
    if config.engine.name == "openai":
        problems += engines.problems(config.engine, config.engine.name, training=True)
    known = shape.projections()
    if config.model.lora is not None and (strange := [t for t in config.model.lora.targets if t not in known]):
        problems.append(
            f"model.lora.targets: got {', '.join(strange)}; mmrl plan knows the sizes of {', '.join(known)} alone"
        )
    # Counting from lengths needs the program, not the data: those of the mini world stand in for what is not here.
    task = prepare.build_task(config.task if examples else prepare.on_mini_world(config.task), config.seed)
    problems += algorithm_problems(config.algo, task.program.modules, task.reward_sets)
    problems += prepare.assignment(config, task).problems() + prepare.endpoint_problems(config, task)
    available = len(task.examples("train")) if examples else 0
    if examples > available:
        problems.append(f"dry: got {examples}, the train split has {available} examples")
    if problems:
        raise ConfigError(problems)
    if examples:
        from mmrl.plan.dry import dry_loads

        loads = dry_loads(config, task, prepare.reward_set(config, task), examples)
        source = f"counted in dry rollouts of {examples} examples"
    else:
        loads = declared(config, task.program.modules, given)
        source = "from declared lengths; dry=N counts instead where the weights are at hand"
        if unknown := guessed(config, task.program.modules, given):
            source = (
                f"from a guess at the lengths of {', '.join(unknown)}, by the task's limits: declare them with "
                "lengths=, or count with dry=N where the weights are at hand"
            )
    if config.engine.endpoints:
        loads = asked_elsewhere(loads, config.engine.endpoints)
        source += f"; an endpoint answers for {', '.join(config.engine.endpoints)}"
    return Plan(config=config, shape=shape, device=device, loads=loads, source=source)
