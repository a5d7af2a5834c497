"""What evaluations cost: rollouts of their own, of which nothing is trained."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from mmrl.config import RootConfig, TrainCommandConfig
from mmrl.errors import ConfigError
from mmrl.plan.cost import GIB, Device, cache_room, computing_width, generation_seconds
from mmrl.plan.shapes import Shape
from mmrl.plan.workload import Lengths, Load, lengths_of, path_load
from mmrl.records import Forest


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluations:
    """Those of one training run."""

    times: int
    rollouts: int
    """Of one of them."""
    seconds: float
    """Of one of them."""


def times_of(config: TrainCommandConfig) -> int:
    """Before training, every `eval.every` steps, and after it."""
    every, steps = config.eval.every, config.train.steps
    return 2 + ((steps - 1) // every if every else 0)


def declared_rollout(
    config: RootConfig, modules: Sequence[str], given: Mapping[str, Lengths], answered: Collection[str] = ()
) -> dict[str, Load]:
    """Load of one rollout by module, from lengths.

    Args:
        given: lengths that the user typed, by module.
        answered: modules whose calls cost these devices nothing: an endpoint answers.
    """
    return {
        module: replace(path_load(size, 1, 1, False), decode_steps=float(size.completion * size.calls))
        for module, size in lengths_of(config, modules, given).items()
        if module not in answered
    }


def mean_rollout(forest: Forest, answered: Collection[str] = ()) -> dict[str, Load]:
    """The same, the mean over the rollouts of a forest; prefixes that rollouts share are not taken off."""
    loads = {}
    for module in forest.modules:
        total, steps = Load(), 0
        for rollout in forest.rollouts:
            calls = [call for call in forest.path(rollout) if call.module == module and module not in answered]
            prompts = [len(call.prompt_ids) for call in calls]
            completion = sum(call.completion_tokens for call in calls)
            # Of a later turn of one context only what was added since the turn before is prefilled.
            before = [
                len(last.prompt_ids) + last.completion_tokens if call.turn else 0
                for last, call in zip(calls[:1] + calls, calls, strict=False)
            ]
            total += Load(
                calls=len(calls), prompt=sum(prompts), prompt_unique=sum(prompts) - sum(before), completion=completion
            )
            steps = max(steps, completion)
        loads[module] = replace(total.scaled(1 / max(1, len(forest.rollouts))), decode_steps=float(steps))
    return loads


def evaluation_seconds(
    config: RootConfig, shape: Shape, rollout: Mapping[str, Load], rollouts: int, device: Device, devices: int
) -> float:
    """Expected seconds of `rollouts` rollouts of the kind on so many `devices`; 0 where endpoints or a server that is
    given answer.

    Raises:
        ConfigError: the weights leave no room for the cache of one call.
    """
    engine, width = config.engine, computing_width(config)
    copy = float(shape.parameters * width)
    vllm = engine.as_vllm
    if engine.servers or engine.name == "openai":
        return 0.0
    if vllm is not None and any("tensor-parallel-size" in word for word in vllm.args):
        # All devices together are one.
        device = replace(
            device, memory=devices * device.memory, bandwidth=devices * device.bandwidth, flops=devices * device.flops
        )
        devices = 1
    spent = 0.0
    for load in rollout.values():
        if load.calls:
            longest = (load.prompt + load.completion) / load.calls
            if vllm is None:
                room = max(longest, engine.in_process.batch_tokens)
            else:
                room = cache_room(vllm, device, copy) / shape.kv_bytes(width)
                if room < longest:
                    key = "kv_cache_gb" if device.name == "cpu" else "gpu_memory"
                    raise ConfigError(
                        f"engine.{key}: got {getattr(engine, key):g}, which leaves no room for a call beside weights "
                        f"of {copy / GIB:.0f} GiB; raise it, or spread them (engine.args=['--tensor-parallel-size=8'])"
                    )
            # What does not fit in the KV cache waits, and the weights are read again for it.
            rounds = max(1, math.ceil(rollouts / devices * longest / room))
            all_rows = replace(load.scaled(rollouts), decode_steps=load.decode_steps * rounds)
            spent += sum(generation_seconds(shape, {"": all_rows}, device, width, devices).values())
    return spent
