"""The evaluation before training that another run has made (`run.before`): asked the same, a policy repeats itself.

What cannot be told to be the same is evaluated anew, and a line says why: all that is lost is time.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from mmrl.algorithms import ALGORITHMS
from mmrl.config import RlRunConfig, StageConfig, schema_of, validate_stored
from mmrl.config.base import MINI, flattened
from mmrl.errors import CheckpointError, ConfigError, DataError, located
from mmrl.records import Example
from mmrl.run.inputs import KEYS, changed_inputs
from mmrl.run.settle import code_outside, config_changes, packages_of
from mmrl.store.machine import describe_environment
from mmrl.store.rundir import RunDir, example_line
from mmrl.system.files import atomic_write, plain, user_path

_OTHERS = ("algo.", "train.", "eval.every", "eval.bootstrap", "model.selfcheck")
"""Settings that no evaluation before training depends on; rewards depend on the algorithm, which is looked at apart."""
_MACHINE = ("hardware.device", "hardware.threads", "hardware.processes", "hardware.nodes")
"""Those of the machine that it does depend on, in the last bits of its logits."""
_VERSIONS = {"versions": "versions of packages", "mmrl_code": "mmrl's own sources", "cpu": "CPUs"}


def before_problems(config: StageConfig) -> list[str]:
    """Return the problem of `run.before`, which must be a run of mmrl train."""
    if config.run.before is None:
        return []
    try:
        _stored(Path(config.run.before))
    except ConfigError as error:
        return error.problems
    return []


def _stored(folder: Path) -> StageConfig:
    try:
        with located("run.before: "):
            stored = RunDir.read(folder).config
            config = validate_stored(schema_of(stored), stored)
    except (CheckpointError, DataError) as error:
        raise ConfigError(f"run.before: {error}") from None
    if not isinstance(config, StageConfig):
        raise ConfigError(f"run.before: {folder} is no run of mmrl train; expected one")
    return config


def before_differences(config: StageConfig, folder: Path) -> list[str]:
    """Return why the evaluation before training of the run in a folder is not that of a settled config; empty: it is.

    Raises:
        ConfigError: there is no training run.
    """
    from mmrl.stages.evaluate import has_scores, read_items  # numpy, which a config that is refused need not wait for

    stored, run, split = _stored(folder), RunDir.read(folder), config.eval.split
    record = next((r for r in run.history() if r["step"] == 0 and has_scores(r, split)), None)
    results = run.eval_path(0, split)
    items = read_items(results) if results.exists() else []
    if record is None or len(items) != record[f"eval/{split}/n"]:
        return [f"it has no evaluation on {split} before training"]
    # Rollouts that failed from outside may not fail again.
    failed = ["rollouts of it failed from outside causes"] if any(item["failed_share"] for item in items) else []
    settled = config.model_dump(mode="json")
    changes = config_changes(run.config, settled)
    differing = [
        path
        for path in changes
        if not path.startswith(_OTHERS)
        and (not path.startswith("hardware.") or path in _MACHINE)
        # Greedily sampled, and not of data that a seed draws: the mini world, or some of the training examples.
        and not (
            path == "seed"
            and config.eval.temperature == 0
            and split != "train"
            and config.task.data.source_of(split) != MINI
        )
    ]
    texts = [f"{path} is {changes[path][0]} there, {changes[path][1]} here" for path in differing]
    if config.task.reward is None and _turn_sets(config) != _turn_sets(stored):
        texts.append(f"algo={config.algo.name} has other rewards than algo={stored.algo.name}")
    here = plain(describe_environment(()))
    texts += [f"{what} are others" for name, what in _VERSIONS.items() if run.environment.get(name) != here[name]]
    code = code_outside(settled, packages_of(settled), program=True)
    texts += [f"{setting} is code that may have changed" for setting in code]
    changed = (setting for setting in changed_inputs(run.environment) if not setting.startswith(_OTHERS))
    texts += [f"{setting} has other content now" for setting in changed]
    made = results.stat().st_mtime
    texts += [f"{path} has changed since" for path in _files(config) if _changed(path) > made]
    return failed + texts


def _changed(path: Path) -> float:
    """Return when a file, folder or link, or what it leads to, was last written, moved or replaced."""
    return max(time for facts in (path.stat(), path.lstat()) for time in (facts.st_mtime, facts.st_ctime))


def _turn_sets(config: StageConfig) -> tuple[object, ...]:
    """Return what decides the reward set of a task whose config names none."""
    algorithm = ALGORITHMS[config.algo.name] if isinstance(config, RlRunConfig) else None
    return getattr(algorithm, "needs_turn_rewards", False), getattr(algorithm, "turn_sets", ())


def _files(config: StageConfig) -> Iterator[Path]:
    """Yield the files and folders, too large to know by content, that model and task name, and the files in these."""
    for name, section in (("model", config.model), ("task", config.task)):
        for key, value in flattened({name: section.model_dump(mode="json")}).items():
            for text in value if isinstance(value, list | tuple) else [value]:
                # not `Path.exists`, which raises for a text that is too long for a path
                if key not in KEYS and isinstance(text, str) and text and os.path.exists(os.path.expanduser(text)):
                    yield (path := user_path(text))
                    yield from (file for file in path.rglob("*") if file.is_file())


def take_over(config: StageConfig, rundir: RunDir, examples: Iterable[Example]) -> str:
    """Copy the items of `run.before` into a run that has none yet; returns why not, empty where it has or need not.

    Args:
        config: settled.
        examples: those that would be evaluated here.
    """
    results = rundir.eval_path(0, config.eval.split)
    if config.run.before is None or results.exists():
        return ""
    folder, split = Path(config.run.before), config.eval.split
    differences = before_differences(config, folder)
    known = RunDir.read(folder).examples
    new = [e for e in examples if known.get((split, e.id)) != plain(example_line(split, e))]
    if new and not differences:
        differences = [f"{len(new)} of the {split} items are others, the first is {new[0].id}"]
    if differences:
        return f"run.before: evaluated anew, not taken from {folder}: {'; '.join(differences)}"
    atomic_write(results, RunDir.read(folder).eval_path(0, split).read_text(encoding="utf-8"))
    return ""
