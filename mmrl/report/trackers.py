"""Copies of the metrics for the tracking services of accelerate (`run.report_to`); `metrics.jsonl` stays the record.

`accelerate.tracking` speaks to the services. Added here: files lie in the run directory, a resumed run continues its
curves, wandb is offline without a key, no secret leaves, and a service that fails does not end the run.
"""

from __future__ import annotations

import importlib.util
import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from mmrl.errors import ConfigError
from mmrl.report.rundir import RunDir
from mmrl.report.stats import number
from mmrl.secrets import secret_name
from mmrl.system.files import dumps, plain

if TYPE_CHECKING:
    from accelerate.tracking import GeneralTracker


class Trackers:
    """All trackers of a run; empty ones cost nothing.

    Args:
        started: name -> tracker.
        warn: called once per tracker that fails, with the reason.
    """

    def __init__(self, started: Mapping[str, GeneralTracker], warn: Callable[[str], None] = print):
        self._started = dict(started)
        self._warn = warn

    @property
    def names(self) -> tuple[str, ...]:
        """Trackers still on."""
        return tuple(self._started)

    def log(self, step: int, metrics: Mapping[str, object]) -> None:
        """Pass the finite numbers of one step on."""
        finite = {key: value for key, raw in metrics.items() if (value := number(raw)) is not None}
        self._each(lambda tracker: tracker.log(finite, step=step))

    def finish(self, summary: Mapping[str, object] | None = None) -> None:
        """Close all; wandb has a place for the summary of the run."""

        def close(tracker: GeneralTracker) -> None:
            if tracker.name == "wandb":
                tracker.tracker.summary.update(plain(summary or {}))
            tracker.finish()

        self._each(close)
        self._started.clear()

    def _each(self, use: Callable[[GeneralTracker], None]) -> None:
        for name, tracker in list(self._started.items()):
            try:
                use(tracker)
            except Exception as error:  # a third party's failure, of whatever type, must not end the run
                # Off for good: a service that fails once per step would flood the log and wait for its timeout.
                del self._started[name]
                self._warn(f"{name} switched off: {type(error).__name__}: {error}")


@contextmanager
def trackers(
    report_to: Sequence[str],
    run: RunDir,
    *,
    name: str,
    project: str,
    device: str,
    warn: Callable[[str], None] = print,
) -> Iterator[Trackers]:
    """The trackers of `run.report_to`, closed at the end with the run's summary (if it came that far).

    Raises:
        ConfigError: as `open_trackers`.
    """
    opened = open_trackers(report_to, run, name=name, project=project, device=device, warn=warn)
    try:
        yield opened
    finally:
        opened.finish(run.summary)


def open_trackers(
    report_to: Sequence[str],
    run: RunDir,
    *,
    name: str,
    project: str,
    device: str,
    warn: Callable[[str], None] = print,
) -> Trackers:
    """Start the trackers named in `run.report_to`; a resumed run goes on in the same files.

    Args:
        name, project: of the run, and of the service's project (`run.wandb_project`).
        device: `hardware.device`.

    Raises:
        ConfigError: a package is not installed, or a tracker does not start.
    """
    if problems := missing_trackers(report_to):
        raise ConfigError(problems)
    # Read only where it is sent: most runs have no tracker.
    shown = without_secrets(run.config) if report_to else {}
    next_step = max((record["step"] for record in run.history()), default=-1) + 1
    started: dict[str, GeneralTracker] = {}
    # Started before training: a bad key is an error of the config, not of step 1.
    for service in report_to:
        try:
            started[service] = tracker = _started(service, run, next_step, name, project, device)
            if service == "tensorboard":
                # As a text: `store_init_configuration` adds a run to the folder at each start, and takes no lists.
                tracker.log({"config": dumps(shown)}, step=next_step)
            else:
                tracker.store_init_configuration(shown)
        except Exception as error:
            Trackers(started, warn).finish()
            raise ConfigError(f"run.report_to: '{service}' does not start: {type(error).__name__}: {error}") from None
    return Trackers(started, warn)


def missing_trackers(report_to: Sequence[str]) -> list[str]:
    """Trackers whose package is not installed, one sentence each; imports nothing."""
    return [
        f"run.report_to: '{tracker}' needs its package, which is not installed; pip install 'mmrl[{tracker}]'"
        for tracker in report_to
        if importlib.util.find_spec(tracker) is None
    ]


def _started(tracker: str, run: RunDir, next_step: int, name: str, project: str, device: str) -> GeneralTracker:
    from accelerate import PartialState
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    # accelerate's trackers need its process state; the trainer's arguments reset it and set it up in the same way.
    PartialState(cpu=device == "cpu")
    folder = str(run.path)
    options: dict[str, object] = {}
    if tracker == "wandb":
        # The id is kept beside the files, so that a resumed run continues the same curve.
        id_file = run.path / "wandb_id.txt"
        if not id_file.exists():
            id_file.write_text(secrets.token_hex(4))
        # Without a key wandb would ask for a login and wait.
        online = "WANDB_API_KEY" in os.environ or "WANDB_MODE" in os.environ
        options = {"name": name, "dir": folder, "id": id_file.read_text().strip(), "resume": "allow"}
        options["mode"] = None if online else "offline"
        # wandb would else wrap standard output and print its own banner.
        options["settings"] = {"console": "off", "silent": True}
    elif tracker == "tensorboard":
        # What a killed run wrote from here on is dropped.
        options = {"purge_step": next_step}
    elif tracker == "mlflow":
        # Its seven retries of two minutes each would hold up the step at which a server fails.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        options = {"run_name": name}
    elif tracker == "trackio":
        options = {"name": name, "resume": "allow"}
    elif tracker == "swanlab":
        options = {"experiment_name": name, "logdir": str(run.path / "swanlog")}
    elif tracker == "comet_ml":
        # Comet would else send the source, the console and the environment of the process too.
        quiet = dict.fromkeys(("log_code", "log_env_details", "log_git_metadata", "log_git_patch"), False)
        settings = importlib.import_module(tracker).ExperimentConfig
        options["experiment_config"] = settings(name=name, offline_directory=folder, auto_output_logging=False, **quiet)
    kind = LOGGER_TYPE_TO_CLASS[tracker]
    # The first argument is a service's project, but for TensorBoard and Aim the run's name in the folder.
    place = (tracker, folder) if kind.requires_logging_directory else (project,)
    created: GeneralTracker = kind(*place, **options)
    created.start()
    return created


def without_secrets(value: object, key: str = "") -> Any:
    """`value` with each text under a key that names a secret replaced by `(hidden)`."""
    if isinstance(value, Mapping):
        return {name: without_secrets(inner, str(name)) for name, inner in value.items()}
    if isinstance(value, list):
        return [without_secrets(item, key) for item in value]
    return "(hidden)" if isinstance(value, str) and secret_name(key) else value
