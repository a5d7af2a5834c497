"""`mmrl plan`: what a checked training run will do and cost, counted without starting it, as text or as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from mmrl.config import PromptCommandConfig, SftCommandConfig, StageConfig, StagedCommandConfig, TrainCommandConfig
from mmrl.config.engines import TransformersConfig, VllmConfig
from mmrl.errors import ConfigError, unknown
from mmrl.models.load import model_path
from mmrl.plan.cost import (
    GIB,
    SLOW_CPU,
    Device,
    engine_memory,
    gpus,
    host_memory,
    measured_cpu,
    memory,
    nearest_gpu,
    seconds,
    sleeps,
    weight_layout,
)
from mmrl.plan.cost import NAMES as DEVICES
from mmrl.plan.cost import device as find_device
from mmrl.plan.shapes import Shape, shape_of
from mmrl.plan.workload import (
    Lengths,
    Load,
    declared,
    dry_loads,
    loads_of,
    parse_lengths,
    total,
    trained_calls,
    undeclared,
    without_endpoints,
)
from mmrl.records import Forest
from mmrl.report.text import align
from mmrl.run.build import build_task, reward_set
from mmrl.run.check import on_mini_world, plan_problems
from mmrl.run.settle import settle
from mmrl.stages.prompts.split import expected_trials, prompt_problems, split
from mmrl.stages.sft_data import sft_problems
from mmrl.tasks.base import Task


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
    name = request.device or ("cpu" if settled.hardware.device == "cpu" else "h100")
    device = find_device(name, config.hardware.threads or 1)
    problems = plan_problems(settled, task)
    # Without their sizes the plan would count no adapter there and promise too little memory.
    problems += _strange_targets(settled, shape)
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


def hours(config: TrainCommandConfig, task: Task, forest: Forest | None = None) -> float:
    """About how long a settled run will take on the devices of this machine.

    Args:
        forest: rollouts of a few examples that tokens are counted in; None: from declared lengths, which are those of
            the papers' models and data, so mostly too long.

    Raises:
        ConfigError: the sizes of its model are not known.
    """
    shape, loads = shape_of(config.model), declared(config, task.program.modules, {})
    if forest is not None:
        loads = loads_of(forest, trained_calls(forest, config), config.train.batch_size / len(forest.examples))
    if strange := _strange_targets(config, shape):
        raise ConfigError(strange)
    loads = without_endpoints(loads, config.engine.endpoints or {})

    def on(device: Device) -> float:
        plan = Plan(config=config, shape=shape, device=device, loads=loads, source="")
        return config.train.steps * plan.step_seconds() / 3600

    if config.hardware.device != "cpu":
        here = gpus()
        # The first stands for all: the GPUs of one machine are mostly of one kind.
        return on(nearest_gpu(here[0].name if here else ""))
    longest = on(SLOW_CPU)
    # Measuring takes a quarter of a second, which a short run need not wait for.
    return longest if longest < 1 else on(measured_cpu(config.hardware.threads or 1))


def _strange_targets(config: TrainCommandConfig, shape: Shape) -> list[str]:
    """The one sentence for LoRA targets whose sizes are not known."""
    lora, known = config.model.lora, shape.projections()
    if lora is None or lora.everywhere or not (strange := [target for target in lora.targets if target not in known]):
        return []
    return [f"model.lora.targets: got {', '.join(strange)}; mmrl plan knows the sizes of {', '.join(known)} alone"]


def _loads(
    config: TrainCommandConfig, task: Task, examples: int, lengths: Mapping[str, Lengths]
) -> tuple[dict[str, Load], str]:
    """The work of each module, and where the numbers come from."""
    modules = task.program.modules
    if examples:
        return (
            dict(dry_loads(config, task, reward_set(task, config.task.reward, config.algo.name), examples)),
            f"counted in dry rollouts of {examples} examples",
        )
    source = "from declared lengths; dry=N counts instead where the weights are at hand"
    if guesses := undeclared(config, modules, lengths):
        source = (
            f"from a guess at the lengths of {', '.join(guesses)}, by the task's limits: declare them with "
            "lengths=, or count with dry=N where the weights are at hand"
        )
    return declared(config, modules, lengths), source


DURATIONS = (("min", 60, 7200), ("hours", 3600, 3 * 86400), ("days", 86400, math.inf))
"""Unit, seconds of one, seconds up to which it is used; below two minutes seconds are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a run will do and cost."""

    config: TrainCommandConfig
    shape: Shape
    device: Device
    loads: Mapping[str, Load]
    source: str
    """Where the tokens come from, in words."""

    @property
    def step(self) -> Load:
        """One step, all modules."""
        return total(self.loads)

    def memory(self) -> dict[str, float]:
        """Bytes per training device by part."""
        longest = max((load.prompt + load.completion) / load.calls for load in self.loads.values() if load.calls)
        return memory(self.config, self.shape, self.step, longest, self.device)

    def rollout_memory(self) -> dict[str, float]:
        """Bytes per device reserved for rollouts, by part; empty without such devices."""
        if not self.config.hardware.rollout_devices:
            return {}
        return engine_memory(self.config, self.shape, self.step, self.device)

    def seconds(self) -> dict[str, float]:
        """Seconds of a step by phase."""
        return seconds(self.config, self.shape, self.loads, self.step, self.device)

    def step_seconds(self) -> float:
        """Seconds of a step; with `train.staleness=1` and devices of their own, rollouts pass beside the update."""
        # With a batch ahead the slower of the two hides the other.
        times = self.seconds()
        if self.config.train.staleness and self.config.hardware.rollout_devices:
            return max(times["update"], times["prefill"] + times["decode"])
        return sum(times.values())

    def warnings(self) -> list[str]:
        """What cannot work or will hurt, with the setting to change."""
        warnings, parts = [], self.memory()
        need = sum(parts.values())
        if need > self.device.memory:
            warnings.append(
                f"needs {need / GIB:.0f} GiB per device, {self.device.name} has {self.device.memory / GIB:.0f} GiB: "
                + self._smaller(parts)
            )
        engine = self.config.engine
        share = engine.gpu_memory if isinstance(engine, VllmConfig) else 1.0
        copy = (self.rollout_memory() or parts).get("engine's copy", 0.0) if self.device.name != "cpu" else 0.0
        if copy > self.device.memory:
            warnings.append(
                f"the weights alone take {copy / GIB:.0f} GiB of a device that generates, {self.device.name} has "
                f"{self.device.memory / GIB:.0f} GiB: serve them by a vLLM of your own on several (engine.url)"
            )
        elif copy > share * self.device.memory:
            warnings.append(
                f"the weights alone take {copy / GIB:.0f} GiB of a device that generates, and vLLM may take "
                f"{share * self.device.memory / GIB:.0f} GiB (engine.gpu_memory={share:g}): raise engine.gpu_memory"
            )
        if self.step.calls and not self.step.trained:
            warnings.append("no call is trained: every module is left out of the loss (algo.train_modules)")
        return warnings

    def _smaller(self, parts: Mapping[str, float]) -> str:
        """The setting that saves most where it hurts."""
        config, engine = self.config, self.config.engine
        states = sum(parts.get(name, 0.0) for name in ("gradients", "optimizer", "reference"))
        served = parts.get("engine's copy", 0.0)
        options = [
            (served, True, "rollouts on devices of their own (hardware.rollout_devices, or engine.url)"),
            (states, config.model.lora is None, "train an adapter (model.lora={r: 16, alpha: 64})"),
            (parts.get("critic", 0.0), "critic" in parts, "algo.critic=adapter or head"),
            (
                parts.get("activations", 0.0),
                not config.model.gradient_checkpointing,
                "model.gradient_checkpointing=true",
            ),
            (
                parts.get("activations", 0.0),
                True,
                f"a smaller train.microbatch_tokens ({config.train.microbatch_tokens or 'auto'} now)",
            ),
            (
                parts.get("KV cache", 0.0),
                True,
                f"engine.gpu_memory below {engine.gpu_memory:g}"
                if isinstance(engine, VllmConfig)
                else f"engine.batch_tokens below {engine.batch_tokens}"
                if isinstance(engine, TransformersConfig)
                else "",
            ),
        ]
        # The largest part first: a saving elsewhere would not make the run fit.
        usable = [(size, words) for size, can, words in options if can]
        return max(usable)[1] + ", or more devices (hardware=)"

    def as_json(self) -> str:
        """Everything, for machines."""
        config, made = self.config, weight_layout(self.config, self.shape)
        content: dict[str, object] = {
            "version": 1,
            "calls": {module: asdict(load) for module, load in self.loads.items()},
            "tokens_from": self.source,
            "parameters": self.shape.parameters,
            "trained_parameters": made.trained_parameters,
            "memory_bytes": self.memory(),
            "rollout_memory_bytes": self.rollout_memory(),
            "host_memory_bytes": host_memory(config, self.shape),
            "seconds_per_step": self.seconds(),
            "hours": config.train.steps * self.step_seconds() / 3600,
            "device": asdict(self.device),
            "processes": made.processes,
            "rollout_devices": config.hardware.rollout_devices,
            "warnings": self.warnings(),
        }
        return json.dumps(content, indent=1)

    def text(self) -> str:
        """Everything, for people."""
        config, made = self.config, weight_layout(self.config, self.shape)
        step, times, rollout_devices = self.step, self.seconds(), config.hardware.rollout_devices
        per_step, parts = self.step_seconds(), sum(times.values())
        head = (
            f"{config.algo.name} on {config.task.name} with {config.model.path}: {config.train.steps} steps of "
            f"{config.train.batch_size} examples on {made.processes} x {self.device.name}"
            + (f", rollouts on {rollout_devices} more" if rollout_devices else "")
        )
        trained = f"{made.trained_parameters:,} of {self.shape.parameters:,} parameters trained"
        blocks = [
            head + "\n" + trained,
            f"one step ({self.source})\n" + align(self._work()),
            self._fit("training device" if rollout_devices else "device", self.memory()),
            *([self._fit("rollout device", self.rollout_memory())] if rollout_devices else []),
            *self._outside_devices(),
            f"time: {duration(per_step)} a step, {duration(config.train.steps * per_step)} in all, evaluations not "
            "counted\n" + align([[name, duration(spent), f"{spent / parts:.0%}"] for name, spent in times.items()]),
            f"assumed: {self.device.flops / 1e12:.3g} TFLOP/s, {self.device.bandwidth / 1e9:.0f} GB/s, update at "
            f"{self.device.utilisation:.0%} of it; sharing saves {_ratio(step.trained, step.trained_unique)} of the "
            "update's tokens. Estimates: docs/performance.md says how far off they were.",
        ]
        blocks += [f"warning: {warning}" for warning in self.warnings()]
        return "\n\n".join(blocks)

    def _outside_devices(self) -> list[str]:
        """What is in no table of a device."""
        lines, host = [], host_memory(self.config, self.shape)
        if host:
            lines.append(f"host memory: {_size(host)} per machine for what hardware.cpu_offload keeps there")
        if sleeps(self.config):
            lines.append("vLLM sleeps during the update: the table has the larger of the two phases")
        return lines

    def _fit(self, which: str, parts: Mapping[str, float]) -> str:
        fit = f"{sum(parts.values()) / GIB:.2f} of {self.device.memory / GIB:.0f} GiB per {which}"
        return f"memory: {fit}\n" + align([[name, _size(size)] for name, size in parts.items()])

    def _work(self) -> list[list[str]]:
        rows = [["module", "calls", "prompt tokens", "unique", "completion", "trained", "unique"]]
        for name, load in [*self.loads.items(), ("all", self.step)]:
            numbers = (load.calls, load.prompt, load.prompt_unique, load.completion, load.trained, load.trained_unique)
            rows.append([name, *(f"{number:,.0f}" for number in numbers)])
        return rows


def _ratio(raw: float, unique: float) -> str:
    return f"{1 - unique / raw:.0%}" if raw else "nothing"


def _size(size: float) -> str:
    return f"{size / GIB:.2f} GiB" if size >= 0.1 * GIB else f"{size / 2**20:.1f} MiB"


def duration(spent: float) -> str:
    """Seconds in the unit that a person reads."""
    if spent < 120:
        return f"{spent:.2f} s" if spent < 10 else f"{spent:.0f} s"
    unit, seconds = next((unit, each) for unit, each, most in DURATIONS if spent < most)
    return f"{spent / seconds:,.{1 if spent / seconds < 100 else 0}f} {unit}"
