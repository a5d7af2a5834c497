"""Run that another run starts from (`from=RUN`) or that an evaluation evaluates: its policy and sections."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from mmrl.config import RlRunConfig, StageConfig, StartConfig
from mmrl.config.base import value_at
from mmrl.config.validate import as_tuples, revealed
from mmrl.errors import CheckpointError, ConfigError
from mmrl.models.merged import merged, require_undamaged
from mmrl.run.settle import announce_code, import_plugins, packages_of
from mmrl.store.policy import (
    Policy,
    is_complete,
    kept_mark,
    list_digest,
    pinned,
    prompts_of,
    resolve,
    run_config,
    run_of,
    source_of,
)
from mmrl.store.rundir import RunDir
from mmrl.system.files import JsonObject, file_digest
from mmrl.tasks.prompts import prompts_file

ConfigT = TypeVar("ConfigT", bound=StageConfig)


def sections_of(run: Path, typed: Collection[str]) -> JsonObject:
    """Return `model`, `task` and `plugins` of a run, which a run that starts from it takes over unless they are typed.

    The plugins are imported.

    Raises:
        ConfigError: it is no training run.
    """
    try:
        stored = revealed(RunDir.read(run_of(str(run))).config)
    except CheckpointError as error:
        raise ConfigError(f"from: {error}; for weights of no run type model=hf model.path={run}") from None
    if "policy" in stored:
        raise ConfigError(f"from: {run} is an evaluation, which makes no policy; expected a run of mmrl train")
    sections = {name: as_tuples(stored.get(name)) for name in ("model", "task") if name not in typed}
    sections = {name: section for name, section in sections.items() if isinstance(section, dict)}
    if (packages := packages_of(stored)) and "plugins" not in typed:
        announce_code(run, sections, packages, program=True)
        import_plugins(packages)
        sections["plugins"] = tuple(packages)
    return sections


def inherit(raw: Mapping[str, object], run: Path, sections: JsonObject, typed: Collection[str]) -> JsonObject:
    """Return a job that starts from a run, with the sections of that run and what the user set in them.

    Args:
        raw: the job, composed.
        sections: of `sections_of`.

    Raises:
        ConfigError: prompts beside those of the run's policy.
    """
    inherited = {**raw, **sections, "start": {"run": str(run)}}
    for name in sections.keys() & {"model", "task"}:
        inherited[name] = with_overrides(sections[name], raw, typed, name)
    if "model" in sections and (path := value_at(raw, "model.path")) is not None:
        # The path of a run that has itself started from another is no setting; the policy's weights take its place.
        inherited["model"]["path"] = path
    if policy_of_run(run).prompts is not None and "task.prompts" in typed:
        raise ConfigError(
            f"task.prompts: has no effect with from={run}, whose policy has prompts of its own; leave it out, or take "
            f"its weights alone: mmrl export {run} out=FOLDER, then model.path=FOLDER"
        )
    return inherited


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


def policy_of_run(run: Path) -> Policy:
    """Return the policy that a run has made.

    Raises:
        ConfigError: it has made none yet, or weights that no further run can start from.
    """
    with _named_from():
        policy = resolve(str(run), prompts_of(str(run))[1])
    if policy.modules:
        raise ConfigError(f"from: {run} has trained weights for each module apart, from which no run can start")
    return policy


@contextmanager
def _named_from() -> Iterator[None]:
    """Name the key that was typed in problems of a policy."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(re.sub("^policy:", "from:", problem) for problem in error.problems) from None


def started(config: ConfigT) -> ConfigT:
    """Return a config with the policy of the run that it starts from (`from=RUN`), where that was not looked up yet."""
    # With digests it has been: it is continued, or the main process of several has done so.
    if config.start is None or config.start != StartConfig(run=config.start.run):
        return config
    run = Path(config.start.run)
    policy = policy_of_run(run)
    return _with_policy(config, policy, _start_of(run, policy, str(run)))


def with_teachers(config: ConfigT) -> ConfigT:
    """Return a config whose teachers (`algo.distill`) are checkpoints: a resume has those of the start, none newer."""
    if not isinstance(config, RlRunConfig) or not config.algo.models_that_teach:
        return config
    own = {module: pinned(teacher) for module, teacher in config.algo.models_that_teach.items()}
    teachers = {**(config.algo.distill or {}), **own}
    return config.model_copy(update={"algo": config.algo.model_copy(update={"distill": teachers})})


def keep_checkpoints(config: StageConfig) -> None:
    """Mark the checkpoints that a run starts from and is taught by, so that the runs that made them keep them, however
    long they go on.
    """
    used = [config.model.path] if config.start is not None else []
    used += config.algo.models_that_teach.values() if isinstance(config, RlRunConfig) else ()
    for checkpoint in filter(None, map(source_of, used)):
        # It is marked already, or in a run of somebody else's that cannot be written.
        with suppress(OSError):
            kept_mark(checkpoint).touch(exist_ok=False)


def _with_policy(config: ConfigT, policy: Policy, start: StartConfig) -> ConfigT:
    """Return a run from the policy of another: its weights, with an adapter merged into them, and its prompts.

    The next training gets an adapter of its own, so the reference of a KL term is the policy that the run starts from.

    Raises:
        ConfigError: a file of the policy is damaged.
    """
    with _named_from():
        require_undamaged(policy, config.model)
        path = policy.base if policy.adapter is None else merged(policy, config.model)
    changed: dict[str, object] = {"start": start}
    if path != config.model.path:
        changed["model"] = config.model.model_copy(update={"path": path, "revision": None})
    if policy.prompts is not None:
        changed["task"] = config.task.model_copy(update={"prompts": policy.prompts})
    return config.model_copy(update=changed)


def config_of_resumed(config: ConfigT, folder: Path) -> ConfigT:
    """Return the config of a run that is continued, with the run that it started from where that lies now.

    Raises:
        CheckpointError: what it started from has changed, or is not there.
    """
    start = config.start
    return config if start is None else _with_policy(config, require_start(config, folder), start)


def require_start(config: StageConfig, folder: Path) -> Policy:
    """Return the policy that the run in `folder` has started from (`from=RUN`), where that lies now.

    Raises:
        CheckpointError: as `config_of_resumed`.
    """
    start = config.start
    assert start is not None
    # A folder with both runs may have been moved as a whole.
    before = run_of(start.run)
    candidates = [Path(start.run), folder.absolute().parent / before.name / Path(start.run).relative_to(before)]
    existing = [candidate for candidate in candidates if candidate.is_dir()]
    for candidate in existing:
        policy = _policy_at_start(candidate, config)
        if policy is not None and _start_of(candidate, policy, start.run) == start:
            return policy
    problem = "has another policy now than the one that this run started from" if existing else "is not there"
    raise CheckpointError(
        f"{folder}: from={existing[0] if existing else start.run} {problem}; restore it, or start a new run"
    )


def _policy_at_start(run: Path, config: StageConfig) -> Policy | None:
    """Return the policy of `run` that another run has started from, also where `run` has gone on since; None: gone."""
    source, start = source_of(config.model.path), config.start
    if start is None or source is None or not source.is_relative_to(start.run):
        return policy_of_run(run)  # whose weights, if it has any, are those of another run
    checkpoint = run / source.relative_to(start.run)
    if not is_complete(checkpoint):
        return None
    return resolve(str(checkpoint), prompts_of(str(run))[1])


def _start_of(run: Path, policy: Policy, name: str) -> StartConfig:
    """Return what a run that starts from a policy of `run` keeps of it: what was typed, and its digests."""
    task, prompts = prompts_of(str(run))
    # There is none where no weights were trained.
    checkpoint = source_of(policy.adapter or policy.base)
    return StartConfig(
        run=name,
        weights=list_digest(checkpoint) if checkpoint is not None else None,
        prompts=file_digest(prompts_file(prompts, str(task))) if prompts is not None else None,
    )
