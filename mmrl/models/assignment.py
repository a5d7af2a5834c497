"""Assignment of weights to modules, from `model.modules` and the algorithm's frozen modules.

No torch here, so that a config is judged before any model loads. `run` hands the assignment to the trainer
(`trainer.adapters`), the engine and the checkpoint, from which `policy.resolve` reads it back.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from mmrl.config import ModelConfig, ModuleWeights
from mmrl.config.base import MethodConfig
from mmrl.errors import unknown
from mmrl.store.policy import INITIAL, TRAINED, describe_weights

RESERVED = ("default", "critic")
"""Adapter names with a meaning of their own: the shared policy's (peft) and the critic's."""


@dataclass(frozen=True, kw_only=True)
class ModuleAssignment:
    """The weights of each module of a program.

    Args:
        model: `model.*`.
        algo: `algo.*`, which may freeze modules too.
        modules: the program's, in order.
        answered: those that an endpoint answers for (`engine.endpoints`).
        unlearning: those that the task leaves out of the loss.
        unlearning_key: the option of the task that does.
    """

    model: ModelConfig
    algo: MethodConfig
    modules: tuple[str, ...]
    answered: Mapping[str, str] = field(default_factory=dict)
    """Module -> name of the endpoint's model."""
    unlearning: Collection[str] = ()
    unlearning_key: str = "task.frozen"

    @cached_property
    def adapters(self) -> Mapping[str, str]:
        """Module -> LoRA adapter; empty where all modules share one policy."""
        # A module that `model.modules` leaves out still gets an adapter: weights per module means all of them.
        if self.model.modules is not None:
            return {m: _weights_of(self.model, m).adapter or adapter_name(m) for m in self.modules}
        # Two adapters on one base, of which one is never trained, cost less than a second copy of the model.
        if self.initial and self.model.lora is not None:
            return {m: INITIAL if m in self.initial else TRAINED for m in self.modules}
        return {}

    @cached_property
    def frozen(self) -> tuple[str, ...]:
        """Modules that `model.modules` or the task leaves out of the loss, or that an endpoint answers for."""
        left_out = {*self.answered, *self.unlearning}
        return tuple(m for m in self.modules if m in left_out or _weights_of(self.model, m).frozen)

    @cached_property
    def initial(self) -> tuple[str, ...]:
        """Modules that `algo.frozen_serving` lets act with the initial weights."""
        if not self.algo.serves_initial:
            return ()
        return tuple(m for m in self.modules if not self.algo.trains(m))

    @property
    def copied(self) -> bool:
        """True if a frozen copy of the whole initial model serves the modules `initial`, for want of adapters."""
        return bool(self.initial) and not self.adapters

    @property
    def served(self) -> Mapping[str, str] | None:
        """Module -> name of the weights that an engine serves it with; None: one shared policy."""
        if self.copied:
            return {m: INITIAL if m in self.initial else TRAINED for m in self.modules}
        return self.adapters or None

    @cached_property
    def untrained(self) -> frozenset[str]:
        """Modules that are out of the loss, by the model's or the algorithm's settings."""
        algo = self.algo
        by_algo = {m for m in self.modules if not algo.trains(m)}
        return frozenset({*self.frozen, *by_algo})

    @property
    def frozen_adapters(self) -> frozenset[str]:
        """Adapters that take no update: those of which every module is out of the loss."""
        # One module in the loss is enough to train an adapter that several share.
        trained = {adapter for m, adapter in self.adapters.items() if m not in self.untrained}
        return frozenset(self.adapters.values()) - trained

    @property
    def rates(self) -> Mapping[str, float]:
        """Adapter -> learning rate, where it is not `train.lr`."""
        rates = [(adapter, _weights_of(self.model, m).lr) for m, adapter in self.adapters.items()]
        return {adapter: lr for adapter, lr in rates if lr is not None}

    def describe(self) -> dict[str, str]:
        """Return the line of a summary that says which module speaks with what; empty for one shared policy."""
        still = {m for m, a in self.adapters.items() if a in self.frozen_adapters} | set(self.initial)
        served = self.served or (dict.fromkeys(self.modules, TRAINED) if self.answered else {})
        names = {m: f"{name} (frozen)" if m in still else name for m, name in served.items()}
        return describe_weights(names | {m: f"endpoint {model}" for m, model in self.answered.items()})

    def record(self) -> dict[str, object]:
        """Return the part that a checkpoint stores, for `policy.resolve`."""
        # A shared policy records nothing: its checkpoint is the policy.
        if self.copied:
            return {"modules": self.served, "base": self.model.path}
        return {"modules": self.adapters} if self.adapters else {}

    def problems(self) -> list[str]:
        """Return its problems, one sentence each: settings that cannot work or have no effect."""
        problems = [*self._answered_problems(), *self._left_out_problems()]
        if self.model.modules is not None:
            return [*problems, *self._adapter_problems(self.model.modules)]
        if self.algo.serves_initial and not self.initial:
            problems.append("algo.frozen_serving: has no effect without a frozen module; set algo.freeze_modules")
        return problems

    def _answered_problems(self) -> Iterator[str]:
        listed = {
            "algo.train_modules": getattr(self.algo, "train_modules", None) or (),
            "algo.advantage_scale": getattr(self.algo, "advantage_scale", None) or (),
        }
        for m in self.answered:
            if m not in self.modules:
                yield unknown("engine.endpoints", m, self.modules)
            if m in (self.model.modules or {}) or m in self.initial:
                yield (
                    f"engine.endpoints.{m}: the module has weights of its own too (model.modules or "
                    "algo.frozen_serving); leave one of the two out"
                )
            for key in (key for key, modules in listed.items() if m in modules):
                yield (
                    f"{key}: names '{m}', for which an endpoint answers (engine.endpoints), so it is not trained; "
                    "leave one of the two out"
                )

    def _left_out_problems(self) -> Iterator[str]:
        """Yield modules out of the loss that an algorithm cannot do without."""
        if not self.frozen:
            return
        first = self.frozen[0]
        key = f"engine.endpoints.{first}" if first in self.answered else f"model.modules.{first}.frozen"
        key = self.unlearning_key if first in self.unlearning else key
        if self.algo.values_rollouts:
            yield (
                f"{key}: the critic of {self.algo.name} values whole rollouts and would not learn the part of "
                f"{', '.join(self.frozen)}; use algo=mappo, which values each call on its own"
            )
        if not set(self.modules) - self.untrained:
            yield f"{key}: no module is left to train; expected at least one"

    def _adapter_problems(self, modules: Mapping[str, ModuleWeights]) -> Iterator[str]:
        """Yield the adapters that cannot be, or about which the modules that share them disagree."""
        yield from (unknown("model.modules", name, self.modules) for name in modules if name not in self.modules)
        if self.model.lora is None:
            yield (
                "model.modules: weights per module are LoRA adapters, and model.lora is null; set model.lora (for "
                "example model.lora.r=16), or leave model.modules out"
            )
        # peft finds an adapter's weights by name among the layers', so a name must not be one of theirs.
        reserved = {*RESERVED, *(self.model.lora.targets if self.model.lora else ())}
        users: dict[str, list[str]] = {}
        for m, adapter in self.adapters.items():
            users.setdefault(adapter, []).append(m)
        for adapter, sharing in users.items():
            if adapter in reserved or not re.fullmatch(r"(?!lora_|\d+$)[A-Za-z0-9_-]+", adapter):
                yield (
                    f"model.modules.{sharing[0]}.adapter: got '{adapter}', expected letters, digits, _ and -, and no "
                    "name that mmrl or the model has for something else"
                )
            settings = {m: _weights_of(self.model, m) for m in sharing}
            unnamed = [m for m in sharing if settings[m].adapter is None]
            if len(unnamed) > 1:
                yield (
                    f"model.modules: the adapters of {', '.join(unnamed)} would all be called '{adapter}'; give them "
                    "names (model.modules.<module>.adapter)"
                )
            rates = {weights.lr for weights in settings.values() if weights.lr is not None}
            if len(rates) > 1:
                yield (
                    f"model.modules: {', '.join(sharing)} share the adapter '{adapter}' and differ in lr "
                    f"({', '.join(f'{rate:g}' for rate in sorted(rates))}); expected one lr for it"
                )
            if adapter in self.frozen_adapters:
                yield from (
                    f"model.modules.{m}.lr: has no effect on a frozen module; leave it out"
                    for m in sharing
                    if settings[m].lr is not None
                )
            trained = [m for m in sharing if m not in self.frozen]
            for m in (m for m in sharing if trained and m in self.frozen and m not in self.answered):
                yield (
                    f"model.modules.{m}.frozen: its adapter '{adapter}' is trained by {', '.join(trained)}; freeze all "
                    "of them, or give it another adapter"
                )


def adapter_name(module: str) -> str:
    """Name of a module's own adapter."""
    return re.sub(r"[^A-Za-z0-9_-]", "_", module)


def _weights_of(model: ModelConfig, module: str) -> ModuleWeights:
    return (model.modules or {}).get(module) or ModuleWeights()
