"""Run that another run starts from (`from=RUN`) or that an evaluation evaluates: its policy and sections."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from mmrl.config import StageConfig, StartConfig
from mmrl.config.base import value_at
from mmrl.config.validate import as_tuples, revealed
from mmrl.errors import CheckpointError, ConfigError
from mmrl.models.policy import (
    MARKER,
    Policy,
    checkpoint_step,
    kept_mark,
    prompts_of,
    require_undamaged,
    resolve,
    run_config,
)
from mmrl.report.rundir import RunDir, rows_of
from mmrl.run.settle import announce_code, import_plugins, packages_of
from mmrl.system.files import JsonObject, atomic_dir, digest
from mmrl.tasks.prompts import prompts_file

ConfigT = TypeVar("ConfigT", bound=StageConfig)


def sections_of(run: Path) -> JsonObject:
    """Return `model` and `task` of a run, which a run that starts from it takes over where the user sets nothing else.

    Raises:
        ConfigError: it is no training run.
    """
    try:
        stored = revealed(RunDir.read(run).config)
    except CheckpointError as error:
        raise ConfigError(f"from: {error}") from None
    if "policy" in stored:
        raise ConfigError(f"from: {run} is an evaluation, which makes no policy; expected a run of mmrl train")
    sections = {name: as_tuples(stored.get(name)) for name in ("model", "task")}
    return {name: section for name, section in sections.items() if isinstance(section, dict)}


def run_of(path: Path) -> Path:
    """Return the run whose policy a folder has: the folder itself, or of runs in turn the last that has ended."""
    finished = [row for row in rows_of(path) if (row / "summary.json").is_file()]
    return finished[-1] if finished else path


def with_overrides(
    section: JsonObject, composed: Mapping[str, object], user_keys: Collection[str], name: str
) -> JsonObject:
    """Return a section of the run before, with the user's keys in place of its own."""
    section = {key: value for key, value in section.items() if not (name == "task" and key == "prompts")}
    for key in user_keys:
        if key.startswith(f"{name}."):
            inner = section
            *parents, last = key.removeprefix(f"{name}.").split(".")
            for part in parents:
                inner[part] = {**(inner.get(part) or {})}
                inner = inner[part]
            inner[last] = value_at(composed, key)
    return section


def evaluation_sections(sections: Mapping[str, object], user_keys: Collection[str]) -> JsonObject:
    """Return the sections of an evaluation, with its policy's own task, plugins and endpoints where the user sets none.

    Args:
        sections: composed of what was typed.
        user_keys: keys that the user set.
    """
    policy = str(sections.get("policy"))
    stored = run_config(policy)
    task, packages = stored.get("task"), packages_of(stored)
    if "task" in user_keys or not isinstance(task, Mapping):
        return dict(sections)
    announce_code(Path(policy), stored, packages, program=True)
    import_plugins(packages)
    inherited = with_overrides({**task}, sections, user_keys, "task")
    name, prompts = prompts_of(policy)
    if prompts is not None and name == task.get("name"):
        inherited.setdefault("prompts", prompts)
    result = {**sections, "task": as_tuples(inherited)}
    endpoints, engine = value_at(stored, "engine.endpoints"), sections.get("engine")
    if endpoints and isinstance(engine, Mapping) and not any(key.startswith("engine.endpoints") for key in user_keys):
        result["engine"] = {**engine, "endpoints": as_tuples(endpoints)}
    return {**result, **({"plugins": as_tuples(packages)} if packages and "plugins" not in user_keys else {})}


def policy_of_run(run: Path, *, undamaged: bool = False) -> Policy:
    """Return the policy that a run has made.

    Args:
        undamaged: compare its files with their digests too, which takes a while.

    Raises:
        ConfigError: it has made none yet, or weights that no further run can start from; a file of it is damaged.
    """
    try:
        policy = resolve(str(run), prompts_of(str(run))[1])
        if undamaged:
            require_undamaged(policy)
    except ConfigError as error:
        raise ConfigError(f"from{problem.removeprefix('policy')}" for problem in error.problems) from None
    if policy.modules:
        raise ConfigError(f"from: {run} has trained weights for each module apart, from which no run can start")
    return policy


def started(config: ConfigT) -> ConfigT:
    """Return a config with the policy of the run that it starts from (`from=RUN`), where that was not looked up yet."""
    # With digests it has been: it is continued, or the main process of several has done so.
    if config.start is None or config.start != StartConfig(run=config.start.run):
        return config
    return config_from_run(config, Path(config.start.run))


def keep_start(config: StageConfig) -> None:
    """Mark the checkpoint that a run starts from, so that the run that made it keeps it, however long it goes on."""
    checkpoint = Path(config.model.path)
    if config.start is not None and checkpoint_step(checkpoint) is not None:
        # It is marked already, or in a run of somebody else's that cannot be written.
        with suppress(OSError):
            kept_mark(checkpoint).touch(exist_ok=False)


def config_from_run(config: ConfigT, run: Path) -> ConfigT:
    """Return a run from the policy that `run` has made: its weights, with an adapter merged into them, and its prompts.

    Raises:
        ConfigError: as `policy_of_run`.
    """
    policy = policy_of_run(run, undamaged=True)
    prompts = policy.prompts
    path = policy.base if policy.adapter is None else _merged(policy.base, Path(policy.adapter), config)
    changed: dict[str, object] = {"start": _start_of(run, str(run))}
    if path != config.model.path:
        changed["model"] = config.model.model_copy(update={"path": path, "revision": None})
    if prompts is not None:
        changed["task"] = config.task.model_copy(update={"prompts": prompts})
    return config.model_copy(update=changed)


def config_of_resumed(config: ConfigT, folder: Path) -> ConfigT:
    """Return the config of a run that is continued, with the run that it started from where that lies now.

    Raises:
        CheckpointError: what it started from has changed, or is not there.
    """
    start = config.start
    if start is None:
        return config
    # A folder with both runs may have been moved as a whole.
    candidates = [Path(start.run), folder.absolute().parent / Path(start.run).name]
    existing = [candidate for candidate in candidates if candidate.is_dir()]
    for candidate in existing:
        if _start_of(candidate, start.run) == start:
            return config_from_run(config, candidate).model_copy(update={"start": start})
    problem = "has another policy now than the one that this run started from" if existing else "is not there"
    raise CheckpointError(
        f"{folder}: from={existing[0] if existing else start.run} {problem}; restore it, or start a new run"
    )


def _merged(base: str, checkpoint: Path, config: ConfigT) -> str:
    """Merge the adapter of a checkpoint into its weights: the next training gets an adapter of its own.

    So the reference of a KL term is the policy that the run starts from.
    """
    from mmrl.models.save import write_merged, write_tokenizer

    target = checkpoint.parent.parent / "merged" / checkpoint.name
    target.parent.mkdir(exist_ok=True)
    if not (target / "config.json").is_file():
        # Several runs may merge these weights at the same time; the first result stays.
        try:
            with atomic_dir(target) as folder:
                write_merged(base, checkpoint, config.model, folder)
                write_tokenizer(checkpoint, [folder])
        except OSError:
            if not (target / "config.json").is_file():
                raise
    return str(target)


def _start_of(run: Path, name: str) -> StartConfig:
    """Return what a run that starts from `run` keeps of it: what was typed, and the digests of its policy."""
    policy, (task, prompts) = resolve(str(run)), prompts_of(str(run))
    folders = [Path(text) for text in (policy.adapter, policy.base) if text]
    # The list of a checkpoint's files has their digests; there is none where no weights were trained.
    marker = next((folder / MARKER for folder in folders if (folder / MARKER).is_file()), None)
    return StartConfig(
        run=name,
        weights=digest(marker) if marker is not None else None,
        prompts=digest(prompts_file(prompts, str(task))) if prompts is not None else None,
    )
