"""The cases that one process and two sharded ones both train: `sharded_worker`, `test_trainer_sharded`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from mmrl.config.algo import PpoConfig
from mmrl.trainer.sharding import whole
from tests.helpers.trainer_cases import LORA, make_calls, make_trainer, tiny_model
from tests.trainer.test_critic import with_targets

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
