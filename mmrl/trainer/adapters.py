"""Weights per module: several LoRA adapters on one frozen base, each trained by its own modules' calls alone.

Part of `trainer`; without it all modules share one set of weights. mmGRPO's general case (arXiv 2508.04660, Sec. 3):
a group updates only the weights of its module.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import set_seed

from mmrl.errors import ConfigError
from mmrl.trainer.objective import TrainCall


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapters:
    """Which module speaks with which adapter; modules may share one."""

    of: Mapping[str, str]
    """Module name -> adapter name (letters, digits, `_`, `-`)."""
    rates: Mapping[str, float]
    """Adapter name -> learning rate, where it is not `train.lr`."""

    def __post_init__(self) -> None:
        problems = [
            f"model.lora: adapter name '{name}' is reserved or holds other characters than letters, digits, _ and -"
            for name in self.names
            if name in ("default", "critic") or not name.replace("_", "").replace("-", "").isalnum()
        ]
        problems += [
            f"learning rate of adapter '{name}': no such adapter" for name in self.rates if name not in self.names
        ]
        if problems:
            raise ConfigError(problems)

    @property
    def names(self) -> list[str]:
        """Adapter names, each once."""
        return list(dict.fromkeys(self.of.values()))

    def attach(self, model: Any, config: LoraConfig, seed: int) -> Any:
        """`model` with all adapters on it, the first one active; random starts depend on `seed` alone."""
        set_seed(seed)
        first, *others = self.names
        wrapped = get_peft_model(model, config, adapter_name=first)
        for name in others:
            wrapped.add_adapter(name, config)
        self.train_all(wrapped)
        return wrapped

    def train_all(self, policy: Any) -> None:
        """Every adapter takes gradients; peft leaves that to the active one."""
        for name in self.names:
            for parameter in self.parameters(policy, name).values():
                parameter.requires_grad_(True)

    def parameters(self, policy: Any, name: str) -> dict[str, torch.nn.Parameter]:
        """The weights of one adapter."""
        return {n: p for n, p in policy.named_parameters() if f".{name}." in n and "lora_" in n}

    def split(self, calls: Sequence[TrainCall]) -> list[list[TrainCall]]:
        """Calls by adapter, in the order of `names`: one forward runs with one adapter."""
        found: dict[str, list[TrainCall]] = {name: [] for name in self.names}
        for call in calls:
            found[self.adapter(call)].append(call)
        return list(found.values())

    def adapter(self, call: TrainCall) -> str:
        """The adapter that a call was sampled with."""
        if call.module not in self.of:
            raise ConfigError(f"model.lora: no adapter for module '{call.module}' (there are {', '.join(self.of)})")
        return self.of[call.module]

    def groups(self, policy: Any, lr: float, weight_decay: float) -> list[dict[str, Any]]:
        """Optimizer groups, one per adapter."""
        return [
            {
                "params": list(self.parameters(policy, name).values()),
                "lr": self.rates.get(name, lr),
                "weight_decay": weight_decay,
            }
            for name in self.names
        ]

    def clip(self, policy: Any, limit: float) -> dict[str, float]:
        """Clip each adapter's gradients on their own; returns the norms before."""
        return {
            name: float(torch.nn.utils.clip_grad_norm_(self.parameters(policy, name).values(), limit))
            for name in self.names
        }

    @contextmanager
    def using(self, policy: Any, call: TrainCall) -> Iterator[None]:
        """Inside, the policy runs with the adapter of `call`; forward and backward both belong in here."""
        policy.set_adapter(self.adapter(call))
        yield
