"""One of two processes that train under FSDP2 on a CPU; started by `test_trainer_sharded` with a folder.

accelerate shards on GPUs only and would fall back to DDP here, so its state is told otherwise; everything else is what
a run on GPUs does, with gloo for NCCL.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import state
from accelerate.utils import DistributedType
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor

from tests.helpers.sharded_cases import CASES, VALUE_CALLS, build, watch_gradients
from tests.helpers.trainer_cases import sampled


def shard_on_cpu() -> None:
    """Make accelerate's state FSDP where it would be MULTI_CPU."""
    before = state.AcceleratorState.__init__

    def init(self: Any, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
        before(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if self.distributed_type == DistributedType.MULTI_CPU:
            state.PartialState._shared_state["distributed_type"] = DistributedType.FSDP
            self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, fsdp_plugin

    state.AcceleratorState.__init__ = init  # type: ignore[method-assign]


def run(folder: Path, name: str) -> None:
    """Train one case from its start, then on from one process's second step; the main process writes what it saw."""
    seen: list[dict[str, float]] = []
    trainer = build(folder / "two" / name, name, seen)
    plugin = trainer.accelerator.state.fsdp_plugin
    # Pinning memory takes a GPU.
    plugin.cpu_offload = CPUOffloadPolicy(pin_memory=False) if CASES[name].get("offload") else OffloadPolicy()
    gradients = watch_gradients(trainer)
    trainer.train()
    trained = dict(trainer.model.named_parameters())
    if trainer.critic is not None:
        trained |= trainer.critic.named_parameters()
    facts: dict[str, Any] = {
        "kind": str(trainer.accelerator.distributed_type),
        "whole": [name for name, parameter in trained.items() if not isinstance(parameter, DTensor)],
        "metrics": seen,
        "resumed": [],
    }
    main = trainer.accelerator.is_main_process
    if trainer.critic is not None:
        facts["values"] = trainer.forwards.values(sampled(VALUE_CALLS if main else VALUE_CALLS[:1]))
        trainer.forwards.values(sampled(VALUE_CALLS[:2] if main else []))
    start = folder / "one" / name / "checkpoint-2"
    build(folder / "again" / name, name, facts["resumed"], resume_from=start).train()
    if main:
        (folder / "two" / name / "facts.json").write_text(json.dumps(facts))
        torch.save(gradients, folder / "two" / name / "gradients.pt")


if __name__ == "__main__":
    shard_on_cpu()
    for case in CASES:
        run(Path(sys.argv[1]), case)
