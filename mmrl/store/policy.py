"""Policies, which stages improve: weights (a base, perhaps an adapter) and prompts; and the files of a saved one.

`resolve` turns what a user types after `policy=` into one. A run's checkpoints are folders
`checkpoints/checkpoint-<steps done>`, written by `trainer.checkpoint`; which of them are complete is decided here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, ValidationError

from mmrl.config import ModelConfig
from mmrl.config.base import FETCHED, SHIPPED, reasons, value_at
from mmrl.config.prompts import PROMPT_SCHEMAS
from mmrl.config.validate import revealed
from mmrl.errors import ConfigError, refuse
from mmrl.system.files import atomic_write, differences, file_digest, map_threaded, read_yaml, similar, user_path

POLICY = "policy.json"
"""File of a run without checkpoints that describes its policy, once it has one (`write_policy`)."""
MARKER = "complete.json"
"""File of a checkpoint, and of weights merged from one: names, sizes and SHA-256 of the others."""
EXTRA = "extra.json"
"""File of a checkpoint with further facts, such as which module speaks with which weights."""
CHECKPOINTS, MERGED = "checkpoints", "merged"
"""Folders of a run: of its checkpoints, and of their weights with the adapter merged into them (`models.merged`)."""
_CHECKPOINT = re.compile(r"checkpoint-(\d+)")

TRAINED, INITIAL = "trained", "initial"
"""Names of the two sets of weights where frozen modules act with the initial ones (`algo.frozen_serving`)."""


def from_index(model: str) -> str:
    """Return how a model of `FETCHED`, a name or a hub id, is had without the hub, in words; empty for any other."""
    name = next((name for name, hub in FETCHED.items() if model in (name, hub)), None)
    return "" if name is None else f"; in a clone of mmrl, python -m scripts.fetch_model {name} FOLDER makes its folder"


def gone_problems(key: str, model: str) -> list[str]:
    """Return the refusal of a name that `mmrl fetch` gave to a model; deleted with `mmrl.cli.gone`."""
    if model not in FETCHED or user_path(model).is_dir():
        return []
    return [f"{key}: got '{model}', which was a model of mmrl fetch, expected a folder or hub id{from_index(model)}"]


def chain_problem(folder: Path) -> str:
    """Return why a folder of `stages=` is no run or policy, empty for any other; deleted with `mmrl.cli.gone`."""
    if not (folder / "set.yaml").is_file():
        return ""
    last = max(folder.glob("*/config.yaml"), key=lambda file: file.stat().st_mtime, default=folder).parent
    return f"was made by stages= of an earlier version, whose steps are runs of their own now; the last is {last}"


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
    revision: str | None = None
    """Revision of the base on the hub that its adapter names."""
    tokenizer: str | None = None
    """Folder of its own tokenizer; None: the base's, with the settings of `model.*`."""

    @property
    def folders(self) -> Mapping[str, str]:
        """Name -> folder of every adapter; a shared one has peft's own name."""
        return self.adapters or ({"default": self.adapter} if self.adapter is not None else {})


def _name(name: str) -> str:
    if name in ("", ".", "..") or Path(name).name != name:
        raise ValueError(f"got '{name}', expected the name of a folder in the checkpoint")
    return name


class _Record(BaseModel):
    """The part of `extra.json` that says which module speaks with what."""

    modules: dict[str, Annotated[str, AfterValidator(_name)]] | None = None
    base: str | None = None


class _Stated(BaseModel):
    """Contents of `policy.json`."""

    weights: str
    prompts: str | None
    task: str | None


class _Marker(BaseModel):
    """Contents of `MARKER`."""

    files: dict[str, int]
    sha256: dict[str, str] = {}
    step: int | None = None
    source: str | None = None


class _Adapter(BaseModel):
    """Contents of peft's `adapter_config.json`."""

    base_model_name_or_path: str
    revision: str | None = None


M = TypeVar("M", bound=BaseModel)


def checkpoint_step(path: Path) -> int | None:
    """Return steps done at `checkpoint-<steps>`; None for any other name."""
    match = _CHECKPOINT.fullmatch(path.name)
    return int(match.group(1)) if match else None


def write_marker(folder: Path, step: int | None, source: Path | None = None) -> None:
    """Write the list of a folder's files, as the last of them.

    Args:
        step: that of its name (`checkpoint_step`).
        source: the checkpoint that it was made of.
    """
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    sizes = {str(file.relative_to(folder)): file.stat().st_size for file in files}
    marker = {"step": step, "files": sizes, "sha256": dict(zip(sizes, map_threaded(file_digest, files), strict=True))}
    made_of = {} if source is None else {"source": list_digest(source)}
    (folder / MARKER).write_text(json.dumps(marker | made_of, indent=1), encoding="utf-8")


def is_complete(path: Path) -> bool:
    """Return True if `path` is a checkpoint whose files are all there, with the sizes they were written with."""
    # By the files and not the name alone: a copy from another machine may have ended halfway.
    try:
        marker = _Marker.model_validate_json((path / MARKER).read_bytes())
        return all((path / name).stat().st_size == size for name, size in marker.files.items())
    except (OSError, ValidationError):
        return False


def damage(path: Path, only: Callable[[str], bool] = lambda name: True) -> str:
    """Return the first file of a checkpoint that is not as it was saved, in words; empty where all are.

    Reads every byte: sizes alone do not show a flipped bit.

    Args:
        only: by name, the files that are looked at.
    """
    try:
        marker = _Marker.model_validate_json((path / MARKER).read_bytes())
    except (OSError, ValidationError):
        return f"{path / MARKER} is missing or cannot be read"
    if marker.step != checkpoint_step(path):
        return f"{path / MARKER} is that of step {marker.step}"
    files = {path / name: (size, marker.sha256.get(name)) for name, size in marker.files.items() if only(name)}
    changed = differences(files)
    return next((f"{file} {text}" for file, text in changed.items()), "")


def list_digest(folder: Path) -> str | None:
    """Return the digest of a folder's list, which has those of its files; None without one."""
    return file_digest(folder / MARKER) if (folder / MARKER).is_file() else None


def is_made_of(folder: Path, source: Path) -> bool:
    """Return whether a folder with a readable list (`damage`) was made of a checkpoint as that is now."""
    return _Marker.model_validate_json((folder / MARKER).read_bytes()).source == list_digest(source)


def every_checkpoint(folder: Path) -> list[Path]:
    """Return folders with the name of a checkpoint, oldest first, whole or not."""
    steps = [(step, path) for path in folder.glob("checkpoint-*") if (step := checkpoint_step(path)) is not None]
    return [path for _, path in sorted(steps)]


def complete_checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints in `folder`, oldest first."""
    return [path for path in every_checkpoint(folder) if is_complete(path)]


def kept_mark(checkpoint: Path) -> Path:
    """Return the file that keeps a checkpoint from being deleted: another run has started from it."""
    return checkpoint.with_name(f".kept-{checkpoint.name}")


def source_of(weights: str) -> Path | None:
    """Return the checkpoint of a run that weights are, or were merged from; None for any other folder or hub id."""
    path = user_path(weights)
    if checkpoint_step(path) is None or path.parent.name not in (CHECKPOINTS, MERGED):
        return None
    return path.parent.parent / CHECKPOINTS / path.name


def run_of(text: str) -> Path:
    """Return the run that a checkpoint, or weights merged from one, are of; any other folder as it is."""
    checkpoint = source_of(text)
    return user_path(text) if checkpoint is None else checkpoint.parents[1]


def newest_checkpoint(folder: Path | str) -> Path | None:
    """Find the newest complete checkpoint of a run, by its directory or its `checkpoints` folder; None without one."""
    root = Path(folder)
    inner = root / CHECKPOINTS
    complete = complete_checkpoints(inner if inner.is_dir() else root)
    return complete[-1] if complete else None


def describe_weights(modules: Mapping[str, str] | None) -> dict[str, str]:
    """Return the fact for a summary that says which module speaks with which weights; none for one shared policy."""
    return {"weights": ", ".join(f"{module}: {name}" for module, name in modules.items())} if modules else {}


def other_task(text: str, evaluated: str) -> dict[str, str]:
    """Return the fact for a summary that a run's policy was trained on another task than the evaluated one."""
    name = _run_section(text, "task").get("name")
    return {"trained on": str(name)} if name not in (None, evaluated) else {}


def run_config(text: str) -> Mapping[str, object]:
    """Return the config of the run that a policy comes from; empty where it comes from none."""
    folder = user_path(text).resolve()
    if text in SHIPPED or not folder.is_dir():
        return {}
    for run in (folder, *list(folder.parents)[:3]):  # a run, a checkpoint in it, one adapter of that
        if (run / "config.yaml").is_file() and (run / CHECKPOINTS).is_dir():
            stored = read_yaml(run / "config.yaml")
            return revealed(stored) if isinstance(stored, Mapping) else {}
    return {}


def _run_section(text: str, section: str) -> Mapping[str, object]:
    """Return a section of the run's config."""
    stored = value_at(run_config(text), section)
    return stored if isinstance(stored, Mapping) else {}


def is_shipped(text: str) -> bool:
    """Return True if `policy=` names a shipped model, or a run that trained one."""
    visited: set[Path] = set()
    # A later stage of a run began with the weights of an earlier one.
    while text not in SHIPPED and Path(text).resolve() not in visited:
        visited.add(Path(text).resolve())
        text = str(_run_section(text, "model").get("path"))
    return text in SHIPPED


def model_of(text: str) -> tuple[str, dict[str, object]]:
    """Return `model=` for a policy, and its run's keys of `model` that say how it computes and its prompts are written.

    Else a policy would be evaluated with the limits of another model, with other prompts than it was trained on, or
    with other numbers.
    """
    section = _run_section(text, "model")

    def settings(*keys: str) -> dict[str, object]:
        default = {key: ModelConfig.model_fields[key].default for key in keys}
        return {key: value for key in keys if (value := section.get(key)) not in (None, default[key])}

    computing = settings("dtype", "attention", "matmul")
    if is_shipped(text):
        return "tiny", computing
    name = section.get("name")
    asking = settings("revision", "chat_template", "thinking", "date")
    return "hf" if name is None else str(name), asking | computing


def write_policy(folder: Path, *, weights: str, prompts: str | None, task: str) -> None:
    """Write what the policy of a run is. Paths below its folder are written relative to it, so that it may be moved.

    Args:
        weights: as `policy=`, or `model.path` of the run.
        prompts: a file as `task.prompts`; None: the task's own.
        task: whose prompts they are.
    """

    def written(path: str | None) -> str | None:
        inside = path is not None and Path(path).exists() and Path(path).resolve().is_relative_to(folder.resolve())
        return str(Path(path).resolve().relative_to(folder.resolve())) if inside and path is not None else path

    content = {"weights": written(weights), "prompts": written(prompts), "task": task}
    atomic_write(folder / POLICY, json.dumps(content, indent=1) + "\n")


def _read(path: Path, schema: type[M]) -> M:
    """Return a JSON file of a run or of peft.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        return schema.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise ConfigError(f"policy: {path} cannot be read ({reasons(error, 1)}); restore it") from None
    except OSError as error:
        raise ConfigError(f"policy: {path} cannot be read ({error}); restore it") from None


def _stated(folder: Path) -> _Stated:
    """Read `policy.json`, with whole paths."""
    stated = _read(folder / POLICY, _Stated)
    # Joined with a whole path, or with a name that is none of a file in it, a folder changes nothing.
    for key, path in (("weights", stated.weights), ("prompts", stated.prompts)):
        if path is not None and (folder / path).exists():
            setattr(stated, key, str(folder / path))
    return stated


def _weights_of(folder: Path) -> str:
    """Return the weights that a `policy.json` names, through further ones of it."""
    visited: set[Path] = set()
    weights = str(folder)
    while (Path(weights) / POLICY).is_file():
        if Path(weights).resolve() in visited:
            raise ConfigError(f"policy: {folder / POLICY} cannot be read (its weights lead back to itself); restore it")
        visited.add(Path(weights).resolve())
        weights = _stated(Path(weights)).weights
    return weights


def prompts_of(text: str) -> tuple[str | None, str | None]:
    """Return the task and prompt file that a policy was made with; None, None if it has no prompts of its own."""
    folder = user_path(text)
    if text in SHIPPED or not folder.is_dir():
        return None, None
    if (folder / POLICY).is_file():
        stated = _stated(folder)
        return (stated.task, stated.prompts) if stated.prompts is not None else (None, None)
    section = _run_section(text, "task")
    name, prompts = section.get("name"), section.get("prompts")
    return (str(name), str(prompts)) if prompts else (None, None)


def resolve(text: str, prompts: str | None = None) -> Policy:
    """Return the policy behind `policy=`: a run directory (its newest complete checkpoint), a checkpoint, an adapter, a
    folder with weights, `tiny`, or a hub id.

    Raises:
        ConfigError: a path that does not exist, or a folder without weights.
    """
    folder = user_path(text)
    if text in SHIPPED or not (folder.exists() or text.startswith((".", "/", "~")) or text.count("/") != 1):
        return Policy(base=text, prompts=prompts)
    if not folder.is_dir():
        expected = "expected a run, checkpoint, adapter, model folder or hub id"
        raise ConfigError(f"policy: got '{text}', {expected}{similar(folder)}{from_index(text)}")
    if problem := chain_problem(folder):
        raise ConfigError(f"policy: {folder}: {problem}")
    if (folder / POLICY).is_file():
        # A run of prompts has the weights that it started with.
        return replace(resolve(_weights_of(folder)), prompts=prompts or prompts_of(text)[1])
    if (folder / "config.yaml").is_file():
        if _run_section(text, "algo").get("name") in PROMPT_SCHEMAS:
            raise ConfigError(f"policy: run {text} has not ended; continue it with: mmrl train resume={text}")
        # The same test as a resume: a run that was killed while it saved is evaluated as it would go on.
        newest = newest_checkpoint(folder)
        if newest is None:
            raise ConfigError(f"policy: run {text} has no checkpoint yet that is complete")
        return _saved_policy(newest, prompts)
    return _saved_policy(folder, prompts)


def pinned(text: str) -> str:
    """Return the checkpoint that is a run's policy now, in place of the run, which may go on; others as they are."""
    folder = user_path(text)
    if text in SHIPPED or not folder.is_dir():
        return text
    weights = Path(_weights_of(folder))
    newest = newest_checkpoint(weights) if (weights / "config.yaml").is_file() else None
    return text if newest is None else str(newest)


def _saved_policy(folder: Path, prompts: str | None) -> Policy:
    """Return the policy in a checkpoint, an adapter's folder or a folder with weights."""
    adapter = folder / "adapter_config.json"
    # Which module speaks with what, and the initial weights, as `ModuleAssignment.record` put them in a checkpoint.
    record = _read(folder / EXTRA, _Record) if (folder / EXTRA).is_file() else _Record()
    modules, base = record.modules, record.base
    if adapter.is_file():
        return Policy(**_named_by(folder), adapter=str(folder), prompts=prompts, step=_step(folder))
    if (folder / "config.json").is_file():
        return Policy(base=str(folder), prompts=prompts, step=_step(folder), modules=modules, initial=base)
    if modules:
        adapters = {name: folder / name for name in modules.values()}
        missing = [name for name, path in adapters.items() if not (path / "adapter_config.json").is_file()]
        if missing:
            raise ConfigError(f"policy: {folder} lacks the adapters {', '.join(missing)} of its modules")
        return Policy(
            **_named_by(next(iter(adapters.values()))),
            prompts=prompts,
            step=_step(folder),
            modules=modules,
            adapters={name: str(path) for name, path in adapters.items()},
        )
    raise ConfigError(f"policy: {folder} holds neither adapter_config.json nor config.json, so no weights")


def _step(folder: Path) -> int | None:
    """Return the training step of a checkpoint, or of one adapter in it."""
    steps = [checkpoint_step(path) for path in (folder.resolve().parent, folder)]
    return next((step for step in steps if step is not None), None)


def _named_by(adapter: Path) -> dict[str, Any]:
    """Return base, revision and tokenizer of an adapter's folder, as arguments of a `Policy`.

    The base is `model.path` of its run, whose other settings are `model.*` of the config; else what it says itself.
    """
    if (base := _base_in_run(adapter)) is not None:
        return {"base": base}
    named = _read(adapter / "adapter_config.json", _Adapter)
    own = str(adapter) if (adapter / "tokenizer_config.json").is_file() else None
    return {"base": named.base_model_name_or_path, "revision": named.revision, "tokenizer": own}


def _base_in_run(adapter: Path) -> str | None:
    """Return `model.path` of the run that an adapter is a checkpoint of; None for any other adapter."""
    # One folder up for a shared adapter (checkpoint-3/), two for one of several (checkpoint-3/<name>/).
    for folder in list(adapter.resolve().parents)[:2]:
        stored = run_config(str(folder.parent)) if folder.name == CHECKPOINTS else {}
        if isinstance(base := value_at(stored, "model.path"), str):
            refuse(gone_problems("policy", base))
            start = run_of(str(value_at(stored, "start.run")))
            moved = folder.parent.parent / start.name
            if Path(base).is_relative_to(start) and not Path(base).exists() and moved.is_dir():
                # Moved, as a whole, with the run that it started from.
                return str(moved / Path(base).relative_to(start))
            return base
    return None
