"""`mmrl plan`: what a checked training run will do and cost, counted without starting it, as text or as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mmrl.config import (
    EvalCommandConfig,
    PromptCommandConfig,
    RootConfig,
    SftCommandConfig,
    StageConfig,
    StagedCommandConfig,
    TaskConfig,
    TrainCommandConfig,
)
from mmrl.config.retriever import Bm25Config
from mmrl.config.tasks import BUILT_IN, Banking77Config, CorpusConfig, JudgedConfig, PapillonConfig
from mmrl.errors import ConfigError, unknown
from mmrl.models.load import model_path
from mmrl.plan.cost import NAMES as DEVICES
from mmrl.plan.cost import Device, gpus, known_gpu
from mmrl.plan.cost import device as find_device
from mmrl.plan.estimate import Plan
from mmrl.plan.evaluation import declared_rollout, evaluation_seconds, mean_rollout
from mmrl.plan.shapes import Shape, shape_of
from mmrl.plan.workload import (
    Lengths,
    Load,
    declared,
    dry_rollouts,
    loads_of,
    parse_lengths,
    trained_calls,
    undeclared,
    without_endpoints,
)
from mmrl.run.build import build_task, evaluation_devices, reward_set
from mmrl.run.check import plan_problems, process_problems
from mmrl.run.settle import settle
from mmrl.stages.prompts.split import expected_trials, prompt_problems, split
from mmrl.stages.sft_data import sft_problems
from mmrl.tasks.base import Task

ONE_GPU = ("auto", "gpu1")
"""Profiles of one GPU, whichever there is."""


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """What `mmrl plan` takes besides a config."""

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
        if dry is not None and not (dry.isascii() and dry.isdigit() and len(dry) < 10):
            raise ConfigError(f"dry: got '{dry}', expected a number of examples (0: count from declared lengths)")
        if lengths and dry not in (None, "0"):
            raise ConfigError("lengths: has no effect with dry rollouts, which are counted; leave one of the two out")
        return cls(parse_lengths(lengths), None if dry is None else int(dry), values.get("device"))


def planned(config: StageConfig | StagedCommandConfig, request: PlanRequest, *, as_json: bool) -> str:
    """What a run of any kind of stages will do and cost, as text or as JSON.

    Raises:
        ConfigError: as `make_plan`, of every stage.
    """
    if isinstance(config, TrainCommandConfig):
        plan = make_plan(config, request)
        return plan.as_json() if as_json else plan.text()
    stages = config.stages if isinstance(config, StagedCommandConfig) else (config,)
    texts, objects, problems = [], [], []
    for number, stage in enumerate(stages, start=1):
        try:
            if isinstance(stage, PromptCommandConfig | SftCommandConfig):
                text, content = _other_stage(stage)
            else:
                assert isinstance(stage, TrainCommandConfig)
                text, content = (plan := make_plan(stage, request)).text(), json.loads(plan.as_json())
        except ConfigError as error:
            problems += [f"stage {number}: {problem}" for problem in error.problems]
            continue
        texts.append(f"stage {number}: {text}")
        objects.append({"stage": number, **content})
    if problems:
        raise ConfigError(dict.fromkeys(problems))
    return json.dumps({"version": 1, "stages": objects}, indent=1) if as_json else "\n\n".join(texts)


def _other_stage(config: PromptCommandConfig | SftCommandConfig) -> tuple[str, dict[str, object]]:
    """What a stage does that optimises prompts, or a supervised one: counts, as text and as an object."""
    where = f"{config.algo.name} on {config.task.name} with {config.model.path}"
    task = build_task(config.task, config.seed)
    if isinstance(config, SftCommandConfig):
        if problems := sft_problems(config, task):
            raise ConfigError(problems)
        steps, size = config.train.steps, config.train.batch_size
        return f"{where}: {steps} steps of {size} sequences", {"steps": steps, "sequences": steps * size}
    if problems := prompt_problems(config, task):
        raise ConfigError(problems)
    train, validation = split(config.algo, task.examples("train"), config.seed)
    modules = len(task.program.modules)
    trials, most = expected_trials(config.algo, modules, len(validation)), len(validation)
    facts: dict[str, object] = {"trials": trials, "train_examples": len(train), "validation_examples": most}
    if not trials:
        return f"{where}: as many rollouts as its budget allows", facts
    # At most: rollouts of a candidate that was tried before come from the store.
    facts["rollouts_at_most"] = rollouts = trials * most + len(train)
    text = f"{where}: about {trials} trials on {most} validation examples and {len(train)} for demonstrations, at most"
    return f"{text} {rollouts:,} rollouts of {modules} modules; the same one is never run twice", facts


def make_plan(config: TrainCommandConfig, request: PlanRequest) -> Plan:
    """The plan of a validated config.

    Raises:
        ConfigError: what `mmrl train` would refuse, as far as it does not depend on this machine.
    """
    # Every GPU that `device=` may name is a CUDA device to a run.
    kind = request.device and ("cpu" if request.device == "cpu" else "cuda")
    if request.device not in (None, *DEVICES):
        raise ConfigError(unknown("device", request.device, DEVICES))
    weights_here = Path(model_path(config.model)).is_dir()
    # A few dry rollouts show the lengths of every module and take little time.
    examples = (0 if request.lengths or not weights_here else 4) if request.dry is None else request.dry
    if examples and not weights_here:
        raise ConfigError(f"dry: the weights of {config.model.path} are not on this machine; leave dry out, or dry=0")
    shape = shape_of(config.model)
    # Counting from lengths needs the program, not the data: those of the mini world stand in for what is not here.
    task = build_task(config.task if examples else on_mini_world(config.task), config.seed)
    # From here on with torch, which takes seconds to load.
    settled = settle(config, kind, planned=True)
    device = _device(settled, request.device)
    problems = plan_problems(settled, task)
    # Without their sizes the plan would count no adapter there and promise too little memory.
    problems += _strange_targets(settled, shape)
    available = len(task.examples("train")) if examples else 0
    if examples > available:
        problems.append(f"dry: got {examples}, the train split has {available} examples")
    if problems:
        raise ConfigError(problems)
    loads, rollout, source = _loads(settled, task, examples, request.lengths)
    if settled.engine.endpoints:
        loads = without_endpoints(loads, settled.engine.endpoints)
        source += f"; an endpoint answers for {', '.join(settled.engine.endpoints)}"
    items = _items(settled, task, counted=bool(examples))
    return Plan(config=settled, shape=shape, device=device, loads=loads, source=source, rollout=rollout, items=items)


def _device(config: TrainCommandConfig, name: str | None) -> Device:
    """The device that is planned for: the one named, else what a run of this config would take here.

    Raises:
        ConfigError: the speed of this machine's GPU is not known.
    """
    # A profile of several GPUs is of other machines than the one where it is planned.
    if name is None and config.hardware.device != "cpu" and config.hardware.name in ONE_GPU and (here := gpus()):
        return known_gpu(here[0])
    return find_device(name or ("cpu" if config.hardware.device == "cpu" else "h100"), config.hardware.threads or 1)


def problems_elsewhere(config: RootConfig) -> list[str]:
    """What stands against a run on another machine: without its data, weights, devices and servers."""
    if isinstance(config, StagedCommandConfig):
        return [problem for stage in config.stages for problem in problems_elsewhere(stage)]
    try:
        task = build_task(on_mini_world(config.task), config.seed)
    except ConfigError as error:
        return list(error.problems)
    reward = config.task.reward
    problems = [unknown("task.reward", reward, task.reward_sets)] if reward not in (None, *task.reward_sets) else []
    if isinstance(config, EvalCommandConfig):
        return problems + process_problems(config)
    if isinstance(config, TrainCommandConfig) and not problems:
        return plan_problems(settle(config, "cpu" if config.hardware.device == "cpu" else "cuda", planned=True), task)
    return problems


def evaluation_hours(config: EvalCommandConfig, items: int | None) -> tuple[float, int]:
    """Hours of an evaluation on H100s (on the CPU where the config says so), and the devices that it takes.

    Args:
        items: of the whole split, where `eval.items` does not say how many.

    Raises:
        ConfigError: the sizes of the model are not known, or the number of items.
    """
    shape, on_cpu = shape_of(config.model), config.hardware.device == "cpu"
    settled = settle(config, "cpu" if on_cpu else "cuda", planned=True)
    if (many := _fewest(config.eval.items, config.task.data.items_of(config.split), items)) is None:
        raise ConfigError("eval.items: null, and nobody has counted the split; set it, or items in the table's file")
    modules = build_task(on_mini_world(config.task), config.seed).program.modules
    rollout = declared_rollout(settled, modules, {}, settled.engine.endpoints or ())
    device = find_device("cpu" if on_cpu else "h100", settled.hardware.threads or 1)
    if problems := process_problems(settled):
        raise ConfigError(problems)
    devices = len(evaluation_devices(settled.hardware)) or 1
    spent = evaluation_seconds(settled, shape, rollout, many * config.eval.samples, device, devices)
    return spent / 3600, devices


def _items(config: TrainCommandConfig, task: Task, counted: bool) -> int | None:
    """How many items an evaluation has.

    Args:
        counted: the task has the data of the config; else those of the mini world may stand in for them.
    """
    split = config.eval.split
    known = counted or getattr(config.task.data, split) == "mini"
    available = len(task.examples(split)) if known else None
    return _fewest(config.eval.items, config.task.data.items_of(split), available)


def _fewest(*limits: int | None) -> int | None:
    return min((limit for limit in limits if limit is not None), default=None)


def _strange_targets(config: TrainCommandConfig, shape: Shape) -> list[str]:
    """The one sentence for LoRA targets whose sizes are not known."""
    lora, known = config.model.lora, shape.projections()
    if lora is None or lora.everywhere or not (strange := [target for target in lora.targets if target not in known]):
        return []
    return [f"model.lora.targets: got {', '.join(strange)}; mmrl plan knows the sizes of {', '.join(known)} alone"]


def _loads(
    config: TrainCommandConfig, task: Task, examples: int, lengths: Mapping[str, Lengths]
) -> tuple[dict[str, Load], dict[str, Load], str]:
    """The work of each module in a step, in a rollout of an evaluation, and where the numbers come from."""
    modules, answered = task.program.modules, config.engine.endpoints or ()
    if examples:
        forest = dry_rollouts(config, task, reward_set(task, config.task.reward, config.algo.name), examples)
        step = loads_of(forest, trained_calls(forest, config), config.train.batch_size / examples)
        return step, mean_rollout(forest, answered), f"counted in dry rollouts of {examples} examples"
    source = "from declared lengths; dry=N counts instead where the weights are at hand"
    if guesses := undeclared(config, modules, lengths):
        source = (
            f"from a guess at the lengths of {', '.join(guesses)}, by the task's limits: declare them with "
            "lengths=, or count with dry=N where the weights are at hand"
        )
    return declared(config, modules, lengths), declared_rollout(config, modules, lengths, answered), source


def on_mini_world(task: TaskConfig) -> TaskConfig:
    """The same task on the embedded data, with what needs no weights, server or key; a task of one's own stays."""
    if task.name not in BUILT_IN:
        return task
    data = task.data.model_copy(update={"train": "mini", "dev": "mini", "test": "mini"})
    # What is left out needs a download, a server or a key, and the plan needs none of their contents.
    plain: dict[str, object] = {"data": data}
    if isinstance(task, Banking77Config):
        plain["labels"] = None
    if isinstance(task, CorpusConfig):
        plain |= {"corpus": None, "retriever": Bm25Config(top_k=task.retriever.top_k)}
    if isinstance(task, JudgedConfig) and task.judge is not None:
        plain["judge"] = task.judge.model_copy(update={"key_env": None})
    if isinstance(task, PapillonConfig) and task.external is not None:
        plain["external"] = task.external.model_copy(update={"key_env": None})
    return task.model_copy(update=plain)
