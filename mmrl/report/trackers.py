"""Copies of the metrics for wandb and TensorBoard (`run.report_to`); `metrics.jsonl` stays the record.

Both packages are imported only when asked for. wandb runs offline unless the environment holds a
key (or sets WANDB_MODE), so a run never waits for a login. A tracker that fails is switched off with one sentence: it
must not end a training run.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from mmrl.config import RootConfig
from mmrl.errors import ConfigError, unknown
from mmrl.report.progress import run_name
from mmrl.report.rundir import RunDir
from mmrl.report.stats import number
from mmrl.system.files import JsonObject, plain

SECRET_WORDS = ("api_key", "apikey", "secret", "password", "access_token", "auth_token")


# Own writers instead of accelerate's trackers: those need its process state, which the trainer must set up first, and
# they import torch. What is promised here is small: a resumed curve, offline without a key, no secrets, no crash.
class Tracker(Protocol):
    """One tracking service."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the finite numbers of one step."""
        ...

    def finish(self, summary: Mapping[str, object]) -> None:
        """Write the end and close."""
        ...


class Trackers:
    """All trackers of a run; empty ones cost nothing.

    Args:
        writers: name -> writer.
        warn: hears, once per tracker, why it was switched off.
    """

    def __init__(self, writers: Mapping[str, Tracker], warn: Callable[[str], None] = print):
        self._writers = dict(writers)
        self._warn = warn

    @property
    def names(self) -> tuple[str, ...]:
        """Trackers still on."""
        return tuple(self._writers)

    def log(self, step: int, metrics: Mapping[str, object]) -> None:
        """Pass the finite numbers of one step on."""
        finite = {key: value for key, raw in metrics.items() if (value := number(raw)) is not None}
        self._each(lambda writer: writer.log(step, finite))

    def finish(self, summary: Mapping[str, object] | None = None) -> None:
        """Close all."""
        self._each(lambda writer: writer.finish(summary or {}))
        self._writers.clear()

    def _each(self, use: Callable[[Tracker], None]) -> None:
        for name, writer in list(self._writers.items()):
            try:
                use(writer)
            except Exception as error:  # a third party's failure, of whatever type, must not end the run
                # Off for good: a service that fails once per step would flood the log.
                del self._writers[name]
                self._warn(f"{name} switched off: {type(error).__name__}: {error}")


@contextmanager
def trackers(config: RootConfig, run: RunDir, warn: Callable[[str], None] = print) -> Iterator[Trackers]:
    """The trackers of `run.report_to`, closed at the end with the run's summary (if it came that far).

    Raises:
        ConfigError: as `open_trackers`.
    """
    opened = open_trackers(
        config.run.report_to,
        run.path,
        name=run_name(config),
        config=config.model_dump(mode="json"),
        project=config.run.wandb_project,
        warn=warn,
    )
    try:
        yield opened
    finally:
        opened.finish(run.summary)


def open_trackers(
    report_to: Sequence[str],
    run_path: Path,
    *,
    name: str,
    config: JsonObject,
    project: str = "mmrl",
    warn: Callable[[str], None] = print,
) -> Trackers:
    """Open the trackers named in `run.report_to`; files go below `run_path`, and a resumed run goes on in the same.

    Raises:
        ConfigError: an unknown name, or a package that is not installed or does not start.
    """
    writers: dict[str, Tracker] = {}
    # Opened before training: a wrong name or a bad key is an error of the config, not of step 1.
    for tracker in report_to:
        if tracker not in _OPENERS:
            raise ConfigError(unknown("run.report_to", tracker, _OPENERS))
        try:
            writers[tracker] = _OPENERS[tracker](run_path, name, without_secrets(plain(config)), project)
        except ImportError as error:
            raise ConfigError(f"run.report_to: '{tracker}' cannot be imported ({error}); install it first") from None
        except Exception as error:
            raise ConfigError(f"run.report_to: '{tracker}' does not start: {type(error).__name__}: {error}") from None
    return Trackers(writers, warn)


def without_secrets(config: Mapping[str, object]) -> JsonObject:
    """`config` with the text under any key that names a secret replaced by `(hidden)`."""
    return {
        key: "(hidden)"
        if isinstance(value, str) and any(word in str(key).lower() for word in SECRET_WORDS)
        else _inside(value)
        for key, value in config.items()
    }


def _inside(value: object) -> object:
    if isinstance(value, Mapping):
        return without_secrets(value)
    return [_inside(item) for item in value] if isinstance(value, list) else value


class _Wandb:
    def __init__(self, run_path: Path, name: str, config: JsonObject, project: str):
        import wandb

        # Without a key wandb would ask for a login and wait.
        online = "WANDB_API_KEY" in os.environ or "WANDB_MODE" in os.environ
        # The id is kept beside the files, so that a resumed run continues the same curve.
        id_file = run_path / "wandb_id.txt"
        run_id = id_file.read_text().strip() if id_file.exists() else secrets.token_hex(4)
        id_file.write_text(run_id)
        self._run = wandb.init(
            project=project,
            name=name,
            dir=str(run_path),
            config=dict(config),
            id=run_id,
            resume="allow",
            mode=None if online else "offline",
            # wandb would else wrap standard output and print its own banner.
            settings=wandb.Settings(console="off", silent=True),
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def finish(self, summary: Mapping[str, object]) -> None:
        self._run.summary.update(plain(summary))
        self._run.finish()


class _TensorBoard:
    def __init__(self, run_path: Path, name: str, config: JsonObject, project: str):
        # TensorBoard's own writer, since torch's would import torch.
        from tensorboard.summary import Writer as EventWriter

        self._writer = EventWriter(str(run_path / "tensorboard"))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for key, value in metrics.items():
            self._writer.add_scalar(key, value, step)
        self._writer.flush()

    def finish(self, summary: Mapping[str, object]) -> None:
        self._writer.close()


_OPENERS: dict[str, Callable[[Path, str, JsonObject, str], Tracker]] = {
    "wandb": _Wandb,
    "tensorboard": _TensorBoard,
}
