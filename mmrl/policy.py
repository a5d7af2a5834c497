"""What a stage improves: a policy is weights (a base, perhaps an adapter) and prompts.

`resolve` turns what a user types after `policy=` into one.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import yaml

from mmrl.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Weights and prompts at one point of a run."""

    base: str
    """`tiny`, a folder with full weights, or a hub id."""
    adapter: str | None = None
    """Folder of a LoRA adapter on top of the base."""
    prompts: str | None = None
    """YAML file of prompts that replace the task's."""
    step: int | None = None
    """Training step, when it comes from a run."""


def resolve(text: str, prompts: str | None = None) -> Policy:
    """The policy behind `policy=`: a run directory (its newest complete checkpoint), a checkpoint, an adapter, a
    folder with weights, `tiny`, or a hub id.

    Raises:
        ConfigError: a path that does not exist, or a folder without weights.
    """
    folder = Path(text)
    if text == "tiny" or not (folder.exists() or text.startswith((".", "/", "~")) or text.count("/") != 1):
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
    step = folder.name.rpartition("-")[2]
    number = int(step) if step.isdigit() else None
    adapter = folder / "adapter_config.json"
    if adapter.is_file():
        base = _run_base(folder) or json.loads(adapter.read_text(encoding="utf-8"))["base_model_name_or_path"]
        return Policy(base=base, adapter=str(folder), prompts=prompts, step=number)
    if (folder / "config.json").is_file():
        return Policy(base=str(folder), prompts=prompts, step=number)
    raise ConfigError(f"policy: {folder} holds neither adapter_config.json nor config.json, so no weights")


def _run_base(folder: Path) -> str | None:
    """`model.path` of the run that `folder` is a checkpoint of; None outside a run."""
    config = folder.parent.parent / "config.yaml"
    if not config.is_file():
        return None
    return str(yaml.safe_load(config.read_text(encoding="utf-8"))["model"]["path"])
