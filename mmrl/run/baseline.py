"""The evaluation before training that another run has made (`run.baseline`): greedy, the same policy repeats itself."""

from __future__ import annotations

from pathlib import Path

from mmrl.algorithms import ALGORITHMS
from mmrl.config import RlRunConfig, StageConfig, schema_of, validate_stored
from mmrl.config.base import MINI
from mmrl.errors import CheckpointError, ConfigError, located
from mmrl.run.build import evaluated
from mmrl.run.settle import config_changes, settle
from mmrl.store.rundir import RunDir, example_line
from mmrl.system.files import plain
from mmrl.tasks.base import Task

_OTHERS = ("algo.", "train.", "plugins", "eval.every", "eval.bootstrap", "eval.max_failed_share", "model.selfcheck")
"""Settings that no evaluation before training depends on; rewards depend on the algorithm, which is looked at apart."""
_MACHINE = ("hardware.device", "hardware.threads")
"""Those of the machine that it does depend on, in the last bits of its logits."""


def has_baseline(run: RunDir, split: str) -> bool:
    """Check that a run's evaluation before training has ended with scores."""
    from mmrl.stages.evaluate import has_scores  # numpy, which a config that is refused need not wait for

    return any(record["step"] == 0 and has_scores(record, split) for record in run.history())


def baseline_differences(config: StageConfig, folder: Path) -> list[str]:
    """Return why the evaluation before training of the run in a folder is not that of a config; empty: it is.

    Raises:
        ConfigError: there is no training run with such an evaluation.
    """
    try:
        with located("run.baseline: "):
            run = RunDir.read(folder)
            stored = validate_stored(schema_of(run.config), run.config)
    except CheckpointError as error:
        raise ConfigError(f"run.baseline: {error}") from None
    if not isinstance(stored, StageConfig):
        raise ConfigError(f"run.baseline: {folder} is no run of mmrl train; expected one")
    if not has_baseline(run, config.eval.split):
        raise ConfigError(f"run.baseline: {folder} has no evaluation on {config.eval.split} before training")
    own = settle(config, planned=True).config
    changes = config_changes(run.config, own.model_dump(mode="json"))
    differing = [
        path
        for path in changes
        if not path.startswith(_OTHERS)
        and (not path.startswith("hardware.") or path in _MACHINE)
        # Of real data, a seed decides what is sampled alone.
        and not (path == "seed" and own.eval.temperature == 0 and own.task.data.source_of(own.eval.split) != MINI)
    ]
    texts = [f"{path} is {changes[path][0]} there, {changes[path][1]} here" for path in differing]
    if own.task.reward is None and _turn_sets(own) != _turn_sets(stored):
        texts.append(f"algo={own.algo.name} has other rewards than algo={stored.algo.name}")
    return texts


def _turn_sets(config: StageConfig) -> tuple[object, ...]:
    """Return what decides the reward set of a task whose config names none."""
    algorithm = ALGORITHMS[config.algo.name] if isinstance(config, RlRunConfig) else None
    return getattr(algorithm, "needs_turn_rewards", False), getattr(algorithm, "turn_sets", ())


def baseline_problems(config: StageConfig, task: Task) -> list[str]:
    """Return the problems of `run.baseline`, whose items must be those that would be evaluated here."""
    if config.run.baseline is None:
        return []
    folder, split = Path(config.run.baseline), config.eval.split
    try:
        differences = baseline_differences(config, folder)
    except ConfigError as error:
        return error.problems
    if not differences:
        known, (examples, _) = RunDir.read(folder).examples, evaluated(task, config, split)
        new = [e for e in examples[: config.eval.items] if known.get((split, e.id)) != plain(example_line(split, e))]
        differences = [f"{len(new)} of the {split} items are others, the first is {new[0].id}"] if new else []
    same = "expected a run with the same policy before training, asked the same in the same way"
    return [f"run.baseline: {folder}: {'; '.join(differences)}; {same}"] if differences else []
