"""Plan of a run: work, memory and time together, with the problems, as text or as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

from mmrl.config import RlRunConfig
from mmrl.errors import ConfigError
from mmrl.plan.cost import (
    CACHED,
    GIB,
    Device,
    engine_memory,
    evaluation_seconds,
    generating_devices,
    host_memory,
    memory,
    seconds,
    sleeps,
    trained_parameters,
    training_processes,
)
from mmrl.plan.shapes import Shape
from mmrl.plan.workload import Load
from mmrl.report.stats import duration, short
from mmrl.report.text import align


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationLoad:
    """Work of the evaluations of one training run."""

    times: int
    rollouts: int
    """Rollouts of each."""
    seconds: float
    """Expected seconds of each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Work, memory and time of a training run."""

    config: RlRunConfig
    shape: Shape
    device: Device
    loads: Mapping[str, Load]
    source: str
    """Source of the numbers of tokens, in words."""
    rollout: Mapping[str, Load]
    """By module, one rollout of an evaluation."""
    items: int | None = None
    """Items of an evaluation; None: all of a split that nobody has counted yet."""

    @property
    def step(self) -> Load:
        """Load of a step, all modules."""
        return sum(self.loads.values(), Load())

    @property
    def _largest(self) -> Load:
        """The step's load, with the tokens of an evaluation where those are more: what the caches must hold."""
        one, step = sum(self.rollout.values(), Load()), self.step
        many = math.inf if self.items is None else float(self.items * self.config.eval.samples)
        evaluation = {name: many * getattr(one, name) for name in CACHED if getattr(one, name)}
        return replace(step, **{name: max(held, getattr(step, name)) for name, held in evaluation.items()})

    def memory(self) -> dict[str, float]:
        """Return the bytes per training device by part."""
        # No call is cut, so a pack holds the longest one; lengths are means of a module, and the largest stands for it.
        longest = max((load.prompt + load.completion) / load.calls for load in self.loads.values() if load.calls)
        return memory(self.config, self.shape, self._largest, longest, self.device)

    def rollout_memory(self) -> dict[str, float]:
        """Return the bytes per device reserved for rollouts, by part; empty without such devices."""
        reserved = self.config.hardware.rollout_devices
        return engine_memory(self.config, self.shape, self._largest, self.device) if reserved else {}

    def host_memory(self) -> float:
        """Return the bytes of host memory that offloaded parts of all processes of one machine take."""
        return self.config.hardware.processes * sum(host_memory(self.config, self.shape).values())

    def seconds(self) -> dict[str, float]:
        """Return the seconds of a step by phase."""
        return seconds(self.config, self.shape, self.loads, self.step, self.device)

    def step_seconds(self) -> float:
        """Return the seconds of a step; with `train.staleness=1` on separate devices, rollouts overlap the update."""
        # With a batch ahead the slower of the two hides the other.
        times = self.seconds()
        if self.config.train.staleness and self.config.hardware.rollout_devices:
            return max(times["update"] + times.get("teachers", 0.0), times["prefill"] + times["decode"])
        return sum(times.values())

    @property
    def evaluation_times(self) -> int:
        """Evaluations before training, every `eval.every` steps, and after it."""
        every, steps = self.config.eval.every, self.config.train.steps
        return 2 + ((steps - 1) // every if every else 0)

    def evaluations(self) -> EvaluationLoad | None:
        """Count the evaluations before, during and after training; None where their items or time are unknown."""
        if self.items is None:
            return None
        rollouts = self.items * self.config.eval.samples
        try:
            devices = generating_devices(self.config)
            spent = evaluation_seconds(self.config, self.shape, self.rollout, rollouts, self.device, devices)
        except ConfigError:  # no room beside the weights: `warnings` says so
            return None
        return EvaluationLoad(times=self.evaluation_times, rollouts=rollouts, seconds=spent)

    def hours(self) -> float:
        """Return the hours of the whole run, its evaluations included where they can be counted."""
        counted = self.evaluations()
        evaluating = counted.times * counted.seconds if counted else 0.0
        return (self.config.train.steps * self.step_seconds() + evaluating) / 3600

    def warnings(self) -> list[str]:
        """Return the warnings of what cannot work or will hurt, with the setting to change."""
        warnings, parts = [], self.memory()
        need = sum(parts.values())
        if need > self.device.memory:
            warnings.append(
                f"needs {need / GIB:.0f} GiB per device, {self.device.name} has {self.device.memory / GIB:.0f} GiB: "
                + self._smaller(parts)
            )
        engine = self.config.engine
        share = engine.as_vllm.gpu_memory if engine.as_vllm is not None else 1.0
        copy = (self.rollout_memory() or parts).get("engine's copy", 0.0) if self.device.name != "cpu" else 0.0
        if copy > self.device.memory:
            warnings.append(
                f"the weights alone take {copy / GIB:.0f} GiB of a device that generates, {self.device.name} has "
                f"{self.device.memory / GIB:.0f} GiB: serve them by a vLLM of your own on several (engine.urls)"
            )
        elif copy > share * self.device.memory:
            warnings.append(
                f"the weights alone take {copy / GIB:.0f} GiB of a device that generates, and vLLM may take "
                f"{share * self.device.memory / GIB:.0f} GiB (engine.gpu_memory={share:g}): raise engine.gpu_memory"
            )
        if self.step.calls and not self.step.trained:
            warnings.append(
                "no call is trained: every module is left out of the loss (algo.train_modules), or every rollout "
                "failed, which mmrl doctor shows"
            )
        return warnings

    def _smaller(self, parts: Mapping[str, float]) -> str:
        """Return the setting that saves most where it hurts."""
        config, engine = self.config, self.config.engine
        # This setting changes neither what is trained nor how; if it is enough, nothing else is advised.
        if config.hardware.sharding != "none" and not config.hardware.cpu_offload:
            hardware = config.hardware.model_copy(update={"cpu_offload": True})
            moved = sum(replace(self, config=config.model_copy(update={"hardware": hardware})).memory().values())
            if moved <= self.device.memory:
                return f"hardware.cpu_offload=true ({moved / GIB:.0f} GiB then), or more devices (hardware=)"
        if engine.as_vllm is None:
            cache = f"engine.batch_tokens below {engine.in_process.batch_tokens}"
        else:
            cache = f"engine.gpu_memory below {engine.as_vllm.gpu_memory:g}"
        microbatch = f"a smaller train.microbatch_tokens ({config.train.microbatch_tokens or 'auto'} now)"
        checkpointed = config.model.gradient_checkpointing
        elsewhere = "rollouts on devices of their own (hardware.rollout_devices, or engine.urls)"
        options = {
            elsewhere: ["engine's copy", "fused weights"],
            microbatch if checkpointed else "model.gradient_checkpointing=true": ["activations"],
            cache: ["KV cache", "stored turns"],
            "algo.critic=adapter or head": ["critic"],
        }
        if config.model.lora is None:
            options["train an adapter (model.lora={r: 16, alpha: 64})"] = ["gradients", "optimizer", "reference"]
        # The largest part first: a saving elsewhere would not make the run fit.
        saved = {words: sum(parts.get(part, 0.0) for part in names) for words, names in options.items()}
        return max(saved, key=lambda words: saved[words]) + ", or more devices (hardware=)"

    def as_json(self) -> str:
        """Return the whole plan as JSON."""
        counted = self.evaluations()
        content: dict[str, object] = {
            "version": 1,
            "calls": {module: asdict(load) for module, load in self.loads.items()},
            "tokens_from": self.source,
            "parameters": self.shape.parameters,
            "trained_parameters": trained_parameters(self.config, self.shape),
            "memory_bytes": self.memory(),
            "rollout_memory_bytes": self.rollout_memory(),
            "host_memory_bytes": self.host_memory(),
            "seconds_per_step": self.seconds(),
            "evaluations": asdict(counted) if counted else None,
            "hours": self.hours(),
            "device": asdict(self.device),
            "processes": training_processes(self.config),
            "rollout_devices": self.config.hardware.rollout_devices,
            "warnings": self.warnings(),
        }
        return json.dumps(content, indent=1)

    def text(self) -> str:
        """Render the whole plan as text."""
        config, step, times = self.config, self.step, self.seconds()
        rollout_devices, parts = config.hardware.rollout_devices, sum(times.values())
        head = (
            f"{config.algo.name} on {config.task.name} with {config.model.path}: {config.train.steps} steps of "
            f"{config.train.batch_size} examples on {training_processes(config)} x {self.device.name}"
            + (f", rollouts on {rollout_devices} more" if rollout_devices else "")
        )
        trained = f"{trained_parameters(config, self.shape):,} of {self.shape.parameters:,} parameters trained"
        saved = f"{1 - step.trained_unique / step.trained:.0%}" if step.trained else "nothing"
        blocks = [
            head + "\n" + trained,
            f"one step ({self.source})\n" + align(self._work()),
            self._fit("training device" if rollout_devices else "device", self.memory()),
            *([self._fit("rollout device", self.rollout_memory())] if rollout_devices else []),
            *self._outside_devices(),
            f"time: {short(self.step_seconds())} s a step, {duration(3600 * self.hours())} in all, "
            f"{self._evaluating()}\n"
            + align([[name, f"{short(spent)} s", f"{spent / parts:.0%}"] for name, spent in times.items()]),
            f"assumed: {self.device.flops / 1e12:.3g} TFLOP/s, {self.device.bandwidth / 1e9:.0f} GB/s, update at "
            f"{self.device.utilisation:.0%} of it; sharing saves {saved} of the "
            "update's tokens. Estimates: docs/performance.md says how far off they were.",
        ]
        blocks += [f"warning: {warning}" for warning in self.warnings()]
        return "\n\n".join(blocks)

    def _evaluating(self) -> str:
        counted = self.evaluations()
        if counted is None:
            extent = " of the whole split" if self.items is None else ""
            return f"{self.evaluation_times} evaluations{extent} not counted{' (eval.items)' if extent else ''}"
        if not counted.seconds:
            return f"{counted.times} evaluations by a server or endpoints not counted"
        return f"with {counted.times} evaluations of {counted.rollouts:,} rollouts, {duration(counted.seconds)} each"

    def _outside_devices(self) -> list[str]:
        """Return the facts that are in no table of a device."""
        lines = []
        if host := self.host_memory():
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


def _size(size: float) -> str:
    return f"{size / GIB:.2f} GiB" if size >= 0.1 * GIB else f"{size / 2**20:.1f} MiB"
