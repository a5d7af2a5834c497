"""The cases that one process and two sharded ones both train; run as a module, one of the two.

`python -m tests.helpers.sharded FOLDER` trains under FSDP2 on a CPU (started by `test_sharded`). accelerate shards on
GPUs only and would fall back to DDP here, so its state is set by hand; everything else is what a run on GPUs does, with
gloo for NCCL.
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

from mmrl.config.algo import PpoConfig
from mmrl.trainer.sharding import whole
from tests.helpers.trainer_cases import LORA, make_calls, make_trainer, sampled, tiny_model, with_targets

CASES: dict[str, dict[str, Any]] = {
    "separate": {"critic": "separate"},
    "adapter": {"critic": "adapter", "lora": True},
    "head": {"critic": "head", "padded": True, "model": "llama"},
    "policy": {"beta": 0.1},
    "lora": {"beta": 0.1, "lora": True, "padded": True},
    "offload": {"critic": "separate", "lora": True, "offload": True},
}
"""`separate` and `policy` train everything, the latter against a reference; `llama` ties no weights."""
VALUE_CALLS = make_calls(5, seed=9)


def build(folder: Path, name: str, seen: list[dict[str, float]], **train: Any) -> Any:
    """A trainer of three steps of two updates each, that saves after each; its metrics go to `seen`."""
    case = CASES[name]
    algo: Any = {"beta": case.get("beta", 0.0), "epochs": 2}
    if "critic" in case:
        algo = PpoConfig(
            name="ppo", critic=case["critic"], critic_lr_factor=10.0, critic_warmup_steps=3, value_clip=10.0, **algo
        )
    settings = {
        "steps": 3,
        "save_every": 1,
        "keep": 3,
        "schedule": "linear",
        "grad_clip": 0.1,
        "microbatch_tokens": 64,
        "packing": "padded" if case.get("padded") else "auto",
    }
    return make_trainer(
        folder,
        tiny_model(case.get("model", "qwen3")),
        lora=LORA if case.get("lora") else None,
        algo=algo,
        calls=lambda step: with_targets(make_calls(7, seed=step)),
        on_step_end=lambda step, metrics: seen.append(metrics),
        **{**settings, **train},
    )


def watch_gradients(trainer: Any) -> list[dict[str, torch.Tensor]]:
    """Fills with the whole gradients of each update, by parameter, before they are clipped."""
    found: list[dict[str, torch.Tensor]] = []
    clip = trainer._clip_grad_norm

    def spy(model: Any) -> Any:
        own = trainer.critic.named_parameters() if trainer.critic is not None else {}
        named = dict(trainer.model.named_parameters()) | {f"critic:{name}": p for name, p in own.items()}
        found.append({name: whole(p.grad).clone() for name, p in named.items() if p.grad is not None})
        return clip(model)

    trainer._clip_grad_norm = spy
    return found


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
