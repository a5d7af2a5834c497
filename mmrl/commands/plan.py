"""`mmrl plan`: work and cost of a checked training run, counted without starting it, as text or as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

from pydantic import Field

from mmrl.config import (
    EvalRunConfig,
    HardwareConfig,
    PromptRunConfig,
    RlRunConfig,
    RootConfig,
    SftRunConfig,
    StageConfig,
    TaskConfig,
)
from mmrl.config.base import MINI, SPLITS, Idle, Section
from mmrl.config.retriever import Bm25Config
from mmrl.config.tasks import BUILT_IN, PRIVILEGED
from mmrl.config.teacher import INITIAL, POLICY, is_url
from mmrl.errors import CheckpointError, ConfigError, located, refuse, unknown
from mmrl.models.load import local_path
from mmrl.plan.cost import NAMES as DEVICES
from mmrl.plan.cost import Device, gpus, known_gpu
from mmrl.plan.cost import device as find_device
from mmrl.plan.estimate import Plan
from mmrl.plan.shapes import Shape, shape_of
from mmrl.plan.workload import (
    Lengths,
    Load,
    declared,
    declared_rollout,
    dry_rollouts,
    loads_of,
    mean_rollout,
    parse_lengths,
    trained_calls,
    undeclared,
    without_endpoints,
)
from mmrl.records import Forest
from mmrl.run.build import build_task, model_of_teacher, reward_set
from mmrl.run.check import process_problems
from mmrl.run.rl import plan_problems
from mmrl.run.settle import module_assignment, settle
from mmrl.run.start import started
from mmrl.stages.prompts.split import prompt_problems, split
from mmrl.stages.sft_data import sft_problems
from mmrl.store.journal import read_step
from mmrl.store.policy import resolve
from mmrl.store.rundir import RunDir

ONE_GPU = ("auto", "gpu1")
"""Profiles of one GPU, whichever there is."""


class PlanArguments(Section):
    """Arguments of `mmrl plan` beside a config."""

    idle: ClassVar = [
        Idle("run", lambda given: given.lengths, "beside lengths=; leave one of the two out"),
        Idle(
            "lengths run",
            lambda given: given.dry,
            lambda given: f"with dry={given.dry}, which counts them; leave one of the two out",
        ),
    ]
    lengths: str = Field("", description="MODULE:P/C[,...]: tokens of prompt and completion of each module")
    dry: int | None = Field(
        None, ge=0, description="examples whose rollouts are counted; null: some where the weights are here"
    )
    run: str = Field("", description="a run whose last journal has the calls that are counted")
    device: str | None = None


def planned(config: StageConfig, request: PlanArguments, *, as_json: bool) -> str:
    """Plan a run of any kind of stages: what it will do and cost, as text or as JSON.

    Raises:
        ConfigError: as `make_plan`.
    """
    if isinstance(config, RlRunConfig):
        plan = make_plan(config, request)
        return plan.as_json() if as_json else plan.text()
    facts = _counted(config)
    if as_json:
        return json.dumps({"version": 1, **facts}, indent=1)
    counts = ", ".join(f"{name.replace('_', ' ')} {count:,}" for name, count in facts.items())
    return f"{config.algo.name} on {config.task.name} with {config.model.path}: {counts}"


def _counted(config: StageConfig) -> dict[str, int]:
    """Count what a run does that is no reinforcement learning."""
    task = build_task(config.task, config.seed)
    if isinstance(config, SftRunConfig):
        refuse(sft_problems(config, task))
        return {"steps": config.train.steps, "sequences": config.train.steps * config.train.batch_size}
    assert isinstance(config, PromptRunConfig)
    refuse(prompt_problems(config, task))
    train, validation = map(len, split(config, task.examples("train")))
    counts = {"train_examples": train, "validation_examples": validation}
    # Without a number of trials it makes as many rollouts as its budget says (`algo.max_metric_calls`, ...).
    if trials := config.algo.expected_trials(len(task.program.modules), validation):
        # An upper bound: a candidate that comes twice is answered from the memo where it is greedy.
        counts |= {"trials": trials, "rollouts_at_most": trials * validation + train}
    return counts


def make_plan(config: RlRunConfig, request: PlanArguments) -> Plan:
    """Plan the run of a validated config.

    Raises:
        ConfigError: what `mmrl train` would refuse, as far as it does not depend on this machine.
    """
    config = started(config)
    lengths = parse_lengths(request.lengths)
    recorded = _recorded(request.run) if request.run else None
    # Every GPU that `device=` may name is a CUDA device to a run.
    kind = request.device and ("cpu" if request.device == "cpu" else "cuda")
    if request.device not in (None, *DEVICES):
        raise ConfigError(unknown("device", request.device, DEVICES))
    has_weights = Path(local_path(config.model.path)).is_dir()
    # A few dry rollouts show the lengths of every module and take little time.
    examples = (0 if lengths or recorded or not has_weights else 4) if request.dry is None else request.dry
    if examples and not has_weights:
        raise ConfigError(f"dry: the weights of {config.model.path} are not on this machine; leave dry out, or dry=0")
    # Counting from lengths needs the program, not the data: those of the mini world stand in for what is not here.
    task = build_task(config.task if examples else on_mini_world(config.task), config.seed)
    # From here on with torch, which takes seconds to load.
    shape = shape_of(config.model)
    settled = settle(config, kind, planned=True).config
    device = _device(settled.hardware, request.device, settled.model.matmul)
    problems = plan_problems(settled, task)
    modules = task.program.modules
    if recorded is not None and set(recorded.modules) != set(modules):
        problems.append(f"run: {request.run} has modules {', '.join(recorded.modules)}, expected {', '.join(modules)}")
    weights = module_assignment(config, modules)
    trained = {*weights.adapters.values()} - weights.frozen_adapters
    shape = replace(shape, adapters=max(1, len(trained)), copies=int(weights.copied))
    shape = replace(shape, teachers=tuple(_teachers(config)))
    lora, sizes = config.model.lora, shape.projections()
    # Without their sizes the plan would count no adapter there and promise too little memory.
    named = lora.targets if lora is not None and not lora.everywhere and shape.adapter_width is None else ()
    if invalid := [name for name in named if name not in sizes]:
        targets = f"got {', '.join(invalid)}; mmrl plan knows the sizes of {', '.join(sizes)} alone"
        problems.append(f"model.lora.targets: {targets}")
    if examples and examples > (train_size := len(task.examples("train"))):
        problems.append(f"dry: got {examples}, the train split has {train_size} examples")
    refuse(problems)
    forest = recorded
    if examples:
        forest = dry_rollouts(settled, task, reward_set(task, config.task.reward, config.algo.name), examples)
    if forest is not None and not forest.calls:
        reason = next((rollout.error_message for rollout in forest.rollouts if rollout.error_message), "no rollouts")
        raise ConfigError(f"{'dry' if examples else 'run'}: none of the rollouts has made a call ({reason})")
    loads, rollout, source = _loads(settled, modules, forest, lengths)
    source += f": the last step of {request.run}" if recorded is not None else ""
    if settled.engine.endpoints:
        loads = without_endpoints(loads, settled.engine.endpoints)
        source += f"; an endpoint answers for {', '.join(settled.engine.endpoints)}"
    plan = Plan(config=settled, shape=shape, device=device, loads=loads, source=source, rollout=rollout)
    # The split has the data of the config, or those of the mini world stand in for them.
    counted = examples or config.task.data.source_of(config.eval.split) == MINI
    available = len(task.examples(config.eval.split)) if counted else None
    limits = (config.eval.items, config.task.data.items_of(config.eval.split), available)
    return replace(plan, items=min((limit for limit in limits if limit is not None), default=None))


def _recorded(folder: str) -> Forest:
    """Return the rollouts of a run's last step.

    Raises:
        ConfigError: it has none, or cannot be read.
    """
    try:
        run = RunDir.read(folder)
        return read_step(run, max(run.journal_steps(), default=1))[0]
    except CheckpointError as error:
        raise ConfigError(f"run: {error}") from None


def _teachers(config: RlRunConfig) -> Iterator[tuple[Shape | None, tuple[str, ...]]]:
    """Yield each model of `algo.distill` that scores here (`Shape.teachers`); a server's work is its own.

    The policy scores the modules of `task.reward=privileged`, too.
    """
    modules: dict[str, list[str]] = {}
    pairs = list((config.algo.distill or {}).items())
    if config.task.reward == PRIVILEGED:
        pairs += [(module, POLICY) for module in config.algo.privileged or ()]
    for module, teacher in dict.fromkeys(pairs):
        modules.setdefault(teacher, []).append(module)
    for teacher, scored in modules.items():
        if teacher in (POLICY, INITIAL):
            yield None, tuple(scored)
        elif not is_url(teacher):
            with located(f"algo.distill.{scored[0]}: "):
                section = model_of_teacher(config.model, teacher, resolve(teacher))
                yield shape_of(section.model_copy(update={"lora": None})), tuple(scored)


def _device(hardware: HardwareConfig, name: str | None, matmul: str) -> Device:
    """Return the device that is planned for: the one named, else what a run of this profile would take here.

    Raises:
        ConfigError: the speed of this machine's GPU is not known.
    """
    # A profile of several GPUs is of other machines than the one where it is planned.
    if name is None and hardware.device != "cpu" and hardware.name in ONE_GPU and (found_gpus := gpus()):
        return known_gpu(found_gpus[0])
    return find_device(name or ("cpu" if hardware.device == "cpu" else "h100"), hardware.threads or 1, matmul)


def problems_elsewhere(config: RootConfig) -> list[str]:
    """Return the problems of a run on another machine: without its data, weights, devices and servers."""
    try:
        task = build_task(on_mini_world(config.task), config.seed)
    except ConfigError as error:
        return list(error.problems)
    reward = config.task.reward
    known = (None, PRIVILEGED, *task.reward_sets)
    problems = [] if reward in known else [unknown("task.reward", reward, task.reward_sets)]
    if isinstance(config, EvalRunConfig):
        return problems + process_problems(config)
    if isinstance(config, RlRunConfig) and not problems:
        settled = settle(config, "cpu" if config.hardware.device == "cpu" else "cuda", planned=True).config
        return plan_problems(settled, task)
    return problems


def _loads(
    config: RlRunConfig, modules: Sequence[str], forest: Forest | None, lengths: Mapping[str, Lengths]
) -> tuple[dict[str, Load], dict[str, Load], str]:
    """Return the work of each module in a step, in a rollout of an evaluation, and where the numbers come from."""
    answered = config.engine.endpoints or ()
    if forest is not None:
        examples = len({rollout.example for rollout in forest.rollouts})
        step = loads_of(forest, trained_calls(forest, config), config.train.batch_size / examples)
        return step, mean_rollout(forest, answered), f"counted in rollouts of {examples} examples"
    source = "from declared lengths; dry=N counts instead where the weights are at hand"
    if guesses := undeclared(config, modules, lengths):
        source = (
            f"from a guess at the lengths of {', '.join(guesses)}, by the task's limits: declare them with "
            "lengths=, or count with dry=N where the weights are at hand"
        )
    return declared(config, modules, lengths), declared_rollout(config, modules, lengths, answered), source


def on_mini_world(task: TaskConfig) -> TaskConfig:
    """Replace the task's data by the embedded data, with what needs no weights, server or key; user tasks stay."""
    if task.name not in BUILT_IN:
        return task
    # What is left out needs a download, a server or a key, and the plan needs none of their contents.
    replaced: dict[str, object] = {"data": task.data.model_copy(update=dict.fromkeys(SPLITS, MINI))}
    replaced |= {key: None for key in ("labels", "corpus") if hasattr(task, key)}
    if (retriever := getattr(task, "retriever", None)) is not None:
        replaced["retriever"] = Bm25Config(top_k=retriever.top_k)
    for key in ("judge", "external"):
        if (endpoint := getattr(task, key, None)) is not None:
            replaced[key] = endpoint.model_copy(update={"key_env": None})
    return task.model_copy(update=replaced)
