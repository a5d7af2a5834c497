"""mmrl from Python: what `mmrl train` and `mmrl eval` do, with the same checks, errors and run directories.

config = mmrl.compose("algo=mhgpo_rr", "task=hotpotqa", train={"steps": 20})
run = mmrl.train(config)
run.metrics.plot(y="reward/mean")
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from mmrl import run
from mmrl.config import EvalRunConfig, RootConfig, StageConfig, validate
from mmrl.config.base import iter_leaves
from mmrl.config.validate import has_free_keys
from mmrl.errors import ENDED, ConfigError, MmrlError
from mmrl.store.policy import resolve
from mmrl.store.rundir import RunDir, step_of
from mmrl.system.conf import GROUPS
from mmrl.system.files import user_path
from mmrl.system.notebook import as_the_command, outside_of_loops

if TYPE_CHECKING:
    from pandas import DataFrame

__all__ = ["Run", "compose", "evaluate", "resume", "train"]


def words_of(*words: str, **settings: object) -> list[str]:
    """Return the words of a command line that say the same: sections may be mappings, choices of a group are names.

    Raises:
        ConfigError: settings that cannot be words.
    """
    from mmrl.cli.overrides import hydra_value

    if wrong := [word for word in words if not isinstance(word, str)]:
        raise ConfigError(f"got a {type(wrong[0]).__name__}, expected words, such as 'algo=grpo', or named arguments")
    # the `name` of a group's mapping is the choice of that group, also below the name of a step
    choices = tuple(f".{group}.name" for group in GROUPS)
    said = [*words]
    for key, value in iter_leaves(settings, whole=has_free_keys):
        key = key.removesuffix(".name") if f".{key}".endswith(choices) else key
        value = os.fspath(value) if isinstance(value, os.PathLike) else value
        # Hydra does not read `from`.
        said.append(f"{key}={value if key == 'from' else hydra_value(key, value)}")
    if nul := [word for word in said if "\0" in word]:
        raise ConfigError(f"{nul[0].partition('=')[0]}: got a text with a NUL character")
    return said


def compose(*words: str, config_dir: str | Path | None = None, **settings: object) -> RootConfig:
    """Return the config of a run of `mmrl train`, or, with `policy=`, of `mmrl eval`; a frozen pydantic model.

    Args:
        words: as after the command: `"algo=mhgpo_rr"`, `"from=RUN_DIR"`.
        config_dir: a folder of configs, before `conf/` here and the shipped ones.
        settings: the same as arguments; sections may be mappings: `train={"steps": 20}`, `**{"train.steps": 20}`.

    Raises:
        ConfigError: every problem.
    """
    from mmrl.cli import refuse_words
    from mmrl.cli.configs import eval_configs, train_configs
    from mmrl.cli.overrides import key_of, read_line

    typed = words_of(*words, **settings)
    evaluates = not {"policy", "split"}.isdisjoint(map(key_of, typed))
    refuse_words(["eval" if evaluates else "train", *typed])
    flags = [] if config_dir is None else ["--config-dir", str(config_dir)]
    keys = () if evaluates else ("from",)
    line = read_line([*typed, *flags], command_keys=keys, single="mmrl.compose")
    return (eval_configs if evaluates else train_configs)(line)[0]


def train(config: RootConfig) -> Run:
    """Train, and return the finished run.

    Args:
        config: of `compose`, without `policy=`.

    Raises:
        MmrlError: whatever the command would have ended with, in the same words.
    """
    if isinstance(config, EvalRunConfig):
        raise ConfigError("policy: is for mmrl.evaluate; leave it out")
    return _as_command(lambda: finished(*run.train(_validated(config))))


def evaluate(config: RootConfig) -> Run:
    """Evaluate `policy` on a task's split, and return the evaluation.

    Args:
        config: of `compose`, with `policy=`.

    Raises:
        MmrlError: as `train`.
    """
    if isinstance(config, StageConfig):
        raise ConfigError("policy: missing, expected policy=RUN_DIR")
    return _as_command(lambda: run.evaluate(_validated(config)))


def resume(run_dir: Path | str) -> Run:
    """Continue a stopped run or evaluation, to the same numbers, and return it.

    Raises:
        MmrlError: as `train`; `CheckpointError` where a file that it needs is damaged.
    """

    def work(path: Path) -> Path:
        from mmrl.run import eval as evaluations
        from mmrl.run import session

        if "policy" in RunDir.read(path).config:
            evaluations.resume_evaluation(path)
            return path
        return finished(path, session.resume(path))

    return _as_command(lambda: work(user_path(str(run_dir))))


def _validated(config: RootConfig) -> Any:
    """Validate a config again: a copy that the user has made with other values (`model_copy`) has not been."""
    if not isinstance(config, RootConfig):
        raise ConfigError(f"got a {type(config).__name__}, expected the config that mmrl.compose returns")
    return validate(type(config), _raw(config)).as_typed(config.typed)


def _raw(value: Any) -> Any:
    """Return what a config holds as mappings; pydantic's own way leaves keys out that no section has."""
    if isinstance(value, BaseModel | Mapping):
        return {key: _raw(inner) for key, inner in dict(value).items()}
    return tuple(map(_raw, value)) if isinstance(value, tuple | list) else value


def finished(folder: Path, code: int) -> Path:
    """Return the folder of a run by its exit code.

    Raises:
        KeyboardInterrupt: it was stopped.
        MmrlError: it is not finished.
    """
    if code in ENDED:  # of several processes, which have said how to continue it
        raise KeyboardInterrupt
    if code:
        raise MmrlError(f"{folder}: the run is not finished; continue it with: {RunDir.read(folder).resume_command()}")
    return folder


def _as_command(work: Callable[[], Path]) -> Run:
    with as_the_command():
        return Run(outside_of_loops(work))


class Run:
    """A run directory, of `mmrl train` or `mmrl eval`, finished or not; everything is read when it is asked for.

    Args:
        path: the run directory; then also the attribute `path`.

    Raises:
        CheckpointError: no run is there.
    """

    def __init__(self, path: Path | str):
        self.path = RunDir.read(path).path

    def __fspath__(self) -> str:
        return str(self.path)

    def __repr__(self) -> str:
        return f"mmrl.Run({str(self.path)!r})"

    @property
    def metrics(self) -> DataFrame:
        """Metrics (docs/metrics.md) by step; 0 is before training. Of an evaluation one row, of its policy's step."""
        import pandas as pd

        folder = RunDir.read(self.path)
        records = folder.history()
        if evaluated := folder.summary.get("metrics"):
            records = [{"step": self.evaluations["step"][0], **evaluated}]
        return pd.DataFrame(records, index=pd.Index([record.pop("step") for record in records], name="step"))

    @property
    def evaluations(self) -> DataFrame:
        """Means over samples for each evaluated item: step, split, id, and its metrics."""
        import pandas as pd

        from mmrl.stages.evaluate import read_items

        rows: list[dict[str, Any]] = []
        for path in sorted((RunDir.read(self.path).path / "eval").glob("step-*-*.jsonl")):
            place = {"step": step_of(path), "split": path.stem.rpartition("-")[2]}
            rows += [{**place, "id": item["id"], **item["metrics"]} for item in read_items(path)]
        return pd.DataFrame(rows, columns=None if rows else ["step", "split", "id"])

    @property
    def policy(self) -> str:
        """What `policy=` takes: the run, for the weights and prompts that it has made; of an evaluation its own.

        Raises:
            ConfigError: it has made none yet.
        """
        policy = str(RunDir.read(self.path).config.get("policy", self.path))
        resolve(policy)
        return policy

    @property
    def report(self) -> Path:
        """Its page, `report.html`, which is drawn here if it is missing."""
        from mmrl.report.html import report_run

        page = RunDir.read(self.path).report_path
        return page if page.is_file() else report_run(self.path)

    def credit(self, step: int, *algos: str, **settings: object) -> DataFrame:
        """Return every call of a training step with its credit, as `mmrl credit run= step=` computes it.

        Args:
            step: a training step, from 1.
            algos: names of algorithms; none: the one that it was trained with.
            settings: of them: `algo={"group_size": 4}`; and the command's `seed` and `page`.

        Raises:
            MmrlError: as the command.
        """
        import pandas as pd

        from mmrl.cli.hydra import credit_request
        from mmrl.commands.credit import credited_calls

        names = [f"algo={','.join(map(str, algos))}"] if algos else []
        request = credit_request([f"run={self.path}", f"step={step}", *names, *words_of(**settings)])
        return pd.DataFrame(credited_calls(request))
