"""What a stage improves: a policy is weights (a base, perhaps an adapter) and prompts.

`resolve` turns what a user types after `policy=` into one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from mmrl.config.shipped import SHIPPED
from mmrl.errors import ConfigError

TRAINED, INITIAL = "trained", "initial"
"""Names of the two sets of weights where frozen modules act with the initial ones (`algo.frozen_serving`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Weights and prompts at one point of a run."""

    base: str
    """A shipped model, a folder with full weights, or a hub id."""
    adapter: str | None = None
    """Folder of a LoRA adapter on top of the base."""
    prompts: str | None = None
    """YAML file of prompts that replace the task's."""
    step: int | None = None
    """Training step, when it comes from a run."""
    modules: Mapping[str, str] | None = None
    """Module -> name of the weights that it speaks with; None: all share one policy."""
    adapters: Mapping[str, str] = field(default_factory=dict)
    """Name of weights -> folder of their LoRA adapter."""
    initial: str | None = None
    """Full weights that the name `INITIAL` stands for."""


def describe_weights(modules: Mapping[str, str] | None) -> dict[str, str]:
    """The fact for a summary that says which module speaks with which weights; none for one shared policy."""
    return {"weights": ", ".join(f"{module}: {name}" for module, name in modules.items())} if modules else {}


def other_task(text: str, evaluated: str) -> dict[str, str]:
    """The fact for a summary that says that a run's policy was trained on another task than the evaluated one.

    Else whoever leaves out `task=` evaluates on its default and takes the numbers for those of the run's task.
    """
    folder = Path(text).resolve()
    if text in SHIPPED or not folder.is_dir():
        return {}
    for run in (folder, *list(folder.parents)[:3]):  # a run, a checkpoint in it, one adapter of that
        if (run / "config.yaml").is_file() and (run / "checkpoints").is_dir():
            config = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))
            name = (config.get("task") or {}).get("name")
            return {"trained on": f"{name} (to evaluate on that: task={name})"} if name not in (None, evaluated) else {}
    return {}


def resolve(text: str, prompts: str | None = None) -> Policy:
    """The policy behind `policy=`: a run directory (its newest complete checkpoint), a checkpoint, an adapter, a
    folder with weights, `tiny`, or a hub id.

    Raises:
        ConfigError: a path that does not exist, or a folder without weights.
    """
    folder = Path(text)
    if text in SHIPPED or not (folder.exists() or text.startswith((".", "/", "~")) or text.count("/") != 1):
        return Policy(base=text, prompts=prompts)
    if not folder.is_dir():
        raise ConfigError(f"policy: got '{text}', expected a run, checkpoint, adapter, model folder or hub id")
    if (folder / "config.yaml").is_file():
        checkpoints = sorted(
            (path for path in (folder / "checkpoints").glob("checkpoint-*") if path.name.split("-")[1].isdigit()),
            key=lambda path: int(path.name.split("-")[1]),
        )
        if not checkpoints:
            raise ConfigError(f"policy: run {text} has no checkpoint yet")
        return _checkpoint(checkpoints[-1], prompts)
    return _checkpoint(folder, prompts)


def _checkpoint(folder: Path, prompts: str | None) -> Policy:
    adapter = folder / "adapter_config.json"
    modules, base = _recorded(folder)
    if adapter.is_file():
        return Policy(base=_base_of(adapter), adapter=str(folder), prompts=prompts, step=_step(folder))
    if (folder / "config.json").is_file():
        return Policy(base=str(folder), prompts=prompts, step=_step(folder), modules=modules, initial=base)
    if modules:
        adapters = {name: folder / name for name in modules.values()}
        missing = [name for name, path in adapters.items() if not (path / "adapter_config.json").is_file()]
        if missing:
            raise ConfigError(f"policy: {folder} lacks the adapters {', '.join(missing)} of its modules")
        return Policy(
            base=_base_of(next(iter(adapters.values())) / "adapter_config.json"),
            prompts=prompts,
            step=_step(folder),
            modules=modules,
            adapters={name: str(path) for name, path in adapters.items()},
        )
    raise ConfigError(f"policy: {folder} holds neither adapter_config.json nor config.json, so no weights")


def _recorded(folder: Path) -> tuple[dict[str, str] | None, str | None]:
    """Which module speaks with what, and the initial weights, as `trainer.modules` recorded them in a checkpoint."""
    extra = folder / "extra.json"
    found = json.loads(extra.read_text(encoding="utf-8")) if extra.is_file() else {}
    return found.get("modules"), found.get("base")


def _step(folder: Path) -> int | None:
    """The training step of a checkpoint, or of one adapter in it."""
    parent = folder.resolve().parent.name
    name = parent if parent.startswith("checkpoint-") else folder.name
    number = name.rpartition("-")[2]
    return int(number) if number.isdigit() else None


def _base_of(adapter: Path) -> str:
    """What an adapter is for: `model.path` of its run, else what it says itself (which may have moved since)."""
    for folder in list(adapter.resolve().parents)[1:3]:
        config = folder.parent / "config.yaml"
        if folder.name == "checkpoints" and config.is_file():
            return str(yaml.safe_load(config.read_text(encoding="utf-8"))["model"]["path"])
    return str(json.loads(adapter.read_text(encoding="utf-8"))["base_model_name_or_path"])
