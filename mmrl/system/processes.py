"""The processes of one run: which share of the rollouts is this one's, and how shares come together.

Every process samples every `world`-th example of a batch, with its own engine or from the main one's servers; then all
hold the whole forest, so groups form over the whole batch and every process computes the same credit. The trainer
splits the update.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TypeVar

from mmrl.errors import ConfigError
from mmrl.records import Example, Forest

Value = TypeVar("Value")
WAIT = timedelta(hours=2)
"""Longest wait of a process for the others: rollouts and evaluations may differ that much, a dead process is noticed by
whoever started it."""


@dataclass(frozen=True, slots=True)
class Processes:
    """This process among those of the run. The default is a run of one."""

    rank: int = 0
    world: int = 1
    samplers: int = 0
    """The first so many processes sample, since no others reach the main one's servers; 0: all do."""

    @property
    def main(self) -> bool:
        """True for the process that writes, shows and saves."""
        return self.rank == 0

    @property
    def all_sample(self) -> bool:
        """True where every process samples."""
        return self.samplers in (0, self.world)

    def share(self, items: Sequence[Value]) -> list[Value]:
        """Return the items that this process samples; the shares of all processes make up the batch."""
        samplers = self.samplers or self.world
        return list(items[self.rank :: samplers]) if self.rank < samplers else []

    def part(self, items: Sequence[Value]) -> list[Value]:
        """Return this process's even part of `items`, regardless of which process sampled them."""
        return list(items[self.rank :: self.world])

    def gather(self, value: Value) -> list[Value]:
        """Gather the values of all processes, by rank. A collective: all processes must call it."""
        if self.world == 1:
            return [value]
        from accelerate.utils import gather_object

        values: list[Value] = gather_object([value])
        return values

    def first(self, value: Value) -> Value:
        """Return the main process's value. A collective."""
        return self.gather(value)[0]

    def barrier(self) -> None:
        """Wait until all processes are here."""
        if self.world > 1:
            from accelerate import PartialState

            PartialState().wait_for_everyone()

    def forest(self, part: Forest, examples: Sequence[Example]) -> Forest:
        """Merge the processes' shares into the forest of the batch, in the order of `examples`."""
        return part if self.world == 1 else merge_forests(self.gather(part), examples)


ALONE = Processes()
"""A run of one process."""


def launched() -> int | None:
    """Return the number of processes that a launcher (mmrl, torchrun, accelerate, SLURM) started; None without one."""
    world = os.environ.get("WORLD_SIZE", "")
    return int(world) if world.isdigit() and "RANK" in os.environ else None


def leads() -> bool:
    """Return True in the main process of those that a launcher started, and without a launcher, before they join."""
    return launched() is None or os.environ["RANK"] == "0"


def join(expected: int, device: str) -> Processes:
    """Meet the other processes of the run.

    Args:
        expected: processes that the config asks for, over all nodes.
        device: `cpu` or `cuda`.

    Raises:
        ConfigError: a launcher started another number of processes.
    """
    world = launched()
    # The config's number decides shares and batches, so a launcher must not change it silently.
    if (world or 1) != expected:
        raise ConfigError(
            f"hardware.processes: the config asks for {expected} processes in all, the launcher started {world or 1}"
        )
    if expected == 1:
        return Processes()
    import torch
    from accelerate import PartialState

    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    state = PartialState(cpu=device == "cpu", timeout=WAIT)
    return Processes(state.process_index, state.num_processes)


def lost_a_process(error: RuntimeError) -> bool:
    """True where a collective failed because another process has ended."""
    from torch import distributed

    # NCCL's errors have a type of their own; gloo's are known by the file that they come from.
    return isinstance(error, distributed.DistError) or "/gloo/transport/" in str(error)


def merge_forests(forests: Sequence[Forest], examples: Sequence[Example]) -> Forest:
    """Merge forests that share no example into one, in the order of `examples`."""
    position = {example.id: number for number, example in enumerate(examples)}
    calls = [call for forest in forests for call in forest.calls.values()]
    rollouts = [rollout for forest in forests for rollout in forest.rollouts]
    # Sorting is stable: an example keeps the order of its process.
    return replace(
        forests[0],
        calls={call.id: call for call in sorted(calls, key=lambda call: position[call.example])},
        rollouts=tuple(sorted(rollouts, key=lambda rollout: position[rollout.example])),
    )
