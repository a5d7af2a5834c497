"""Weights per module: several LoRA adapters on one frozen base, each trained by its own modules' calls alone.

Part of `trainer`; without it all modules share one set of weights. mmGRPO's general case (arXiv 2508.04660, Sec. 3):
a group updates only the weights of its module.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypedDict, cast

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import set_seed

from mmrl.errors import ConfigError
from mmrl.models.assignment import ModuleAssignment
from mmrl.trainer.objective import TrainCall

if TYPE_CHECKING:
    from transformers import PreTrainedModel, Trainer


class ParameterGroup(TypedDict):
    """A group of an optimizer, as torch takes it."""

    params: list[torch.nn.Parameter]
    lr: float
    weight_decay: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapters:
    """Adapter of each module; modules may share one."""

    by_module: Mapping[str, str]
    """Module name -> adapter name (letters, digits, `_`, `-`)."""
    rates: Mapping[str, float]
    """Adapter name -> learning rate, where it is not `train.lr`."""
    frozen: frozenset[str] = frozenset()
    """Adapters that are served and never trained."""

    @property
    def names(self) -> list[str]:
        """Adapter names, each once."""
        return list(dict.fromkeys(self.by_module.values()))

    @property
    def trained(self) -> list[str]:
        """Names of the adapters that take updates."""
        return [name for name in self.names if name not in self.frozen]

    def attach(self, model: PreTrainedModel, config: LoraConfig, seed: int) -> PeftModel:
        """Put all adapters on `model`, the first one active; random starts depend on `seed` alone."""
        parts = {part for name, _ in model.named_modules() for part in name.split(".")}
        reserved = sorted({*parts, "base_layer", "base_model", "weight", "bias"} & set(self.names))
        if reserved:
            # peft would take the layer for the adapter and leave weights out of the checkpoint, in silence.
            raise ConfigError(
                f"model.modules: adapter name '{name}' is the name of a part of the model; give it another one"
                for name in reserved
            )
        set_seed(seed)
        first, *rest = self.names
        wrapped = cast("PeftModel", get_peft_model(model, config, adapter_name=first))
        for name in rest:
            wrapped.add_adapter(name, config)
        self.train_all(wrapped)
        return wrapped

    def train_all(self, policy: PeftModel) -> None:
        """Let every adapter take gradients but the frozen ones; peft leaves that to the active one."""
        for name in self.names:
            for parameter in self.parameters(policy, name).values():
                parameter.requires_grad_(name not in self.frozen)

    def parameters(self, policy: PeftModel, name: str) -> dict[str, torch.nn.Parameter]:
        """Return the weights of one adapter."""
        # Only after `.lora_A.` and the like: an adapter may be called like a layer.
        pattern = re.compile(rf"\.lora_\w+\.{name}(\.|$)")
        return {n: p for n, p in policy.named_parameters() if pattern.search(n)}

    def split(self, calls: Sequence[TrainCall]) -> list[list[TrainCall]]:
        """Group calls by adapter, in the order of `names`: one forward runs with one adapter."""
        by_adapter: dict[str, list[TrainCall]] = {name: [] for name in self.names}
        for train in calls:
            by_adapter[self.by_module[train.call.module]].append(train)
        return list(by_adapter.values())

    def make_optimizer(self, trainer: Trainer) -> torch.optim.Optimizer:
        """Create the optimizer that the settings of `trainer` name, with a group per trained adapter of its model."""
        policy, settings = cast("PeftModel", trainer.model), trainer.args
        groups: list[ParameterGroup] = [
            {
                "params": list(self.parameters(policy, name).values()),
                "lr": self.rates.get(name, settings.learning_rate),
                "weight_decay": settings.weight_decay,
            }
            for name in self.trained
        ]
        self.train_all(policy)
        kind, options = trainer.get_optimizer_cls_and_kwargs(settings)
        optimizer: torch.optim.Optimizer = kind(groups, **options)
        return optimizer

    def clip(self, policy: PeftModel, limit: float) -> dict[str, float]:
        """Clip each adapter's gradients on their own; returns the norms before."""
        # A norm over all of them would let one module's large gradients shrink another's step.
        return {
            name: float(torch.nn.utils.clip_grad_norm_(self.parameters(policy, name).values(), limit))
            for name in self.trained
        }


def in_fixed_order(policy: torch.nn.Module) -> None:
    """Sort names in the adapters' configs: peft writes sets, whose order differs from process to process."""
    for config in policy.peft_config.values() if isinstance(policy, PeftModel) else ():
        for field in ("target_modules", "exclude_modules"):
            names = getattr(config, field, None)
            if isinstance(names, set):
                setattr(config, field, sorted(names))


def make_adapters(assignment: ModuleAssignment) -> Adapters | None:
    """Return the adapters of an assignment; None where all modules share one policy."""
    if not assignment.adapters:
        return None
    return Adapters(by_module=assignment.adapters, rates=assignment.rates, frozen=assignment.frozen_adapters)
