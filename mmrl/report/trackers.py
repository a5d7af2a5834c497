"""Copies of the metrics for the tracking services of accelerate (`run.report_to`); `metrics.jsonl` stays the record.

`accelerate.tracking` speaks to the services. Added here: files lie in the run directory, a resumed run continues
its curves in wandb and TensorBoard, wandb is offline without a key and says so, some calls of each step go along as
texts, no secret leaves, and a service that fails does not end the run.
"""

from __future__ import annotations

import importlib.util
import os
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmrl.config import RunConfig
from mmrl.errors import ConfigError, refuse
from mmrl.report.stats import number, short
from mmrl.report.text import clean
from mmrl.report.trees import abridged
from mmrl.secrets import add_secret, hide, secret_name
from mmrl.store.rundir import RunDir
from mmrl.system.files import dumps, plain

if TYPE_CHECKING:
    from accelerate.tracking import GeneralTracker


WITH_TEXTS = ("wandb", "tensorboard")
STEP = "step"
"""wandb's axis: its own step never goes back, so it would drop the steps that a resumed run does again."""
UNTAKEN = re.compile(r"[^\w./ -]")
"""What mlflow takes in no name, as the brackets of a DSPy predictor in a list (`module/steps[0]/reward`)."""
COLUMNS = ("step", "example", "module", "prompt", "completion", "reward", "advantage")
SENT_CHARACTERS = {"prompt": (500, 1500), "completion": (1500, 500)}
"""Characters at the start and at the end of a long text that are sent."""


class Trackers:
    """Trackers of a run; without any, they cost nothing.

    Args:
        started: name -> tracker.
        warn: called once per tracker that fails, with the reason.
        calls: most calls of a step whose texts are sent.
    """

    def __init__(self, started: Mapping[str, GeneralTracker], warn: Callable[[str], None] = print, calls: int = 0):
        self._started = dict(started)
        self._warn = warn
        self._calls = calls

    def log(self, step: int, metrics: Mapping[str, object]) -> None:
        """Pass the finite numbers of a step to the trackers."""
        finite = {key: value for key, raw in metrics.items() if (value := number(raw)) is not None}

        def send(tracker: GeneralTracker) -> None:
            if tracker.name == "wandb":
                tracker.log({**finite, STEP: step})
            elif tracker.name == "mlflow":
                tracker.log({UNTAKEN.sub("_", key): value for key, value in finite.items()}, step=step)
            else:
                tracker.log(finite, step=step)

        self._each(send)

    @property
    def calls(self) -> int:
        """Maximum number of calls of a step that `log_calls` takes; 0 where no tracker takes texts."""
        return self._calls if any(name in WITH_TEXTS for name in self._started) else 0

    def log_calls(self, step: int, calls: Sequence[Mapping[str, object]]) -> None:
        """Pass some calls of a step to the trackers.

        Args:
            calls: `COLUMNS` but the step, in the order in which they are shown.
        """
        rows = [[step, *_sendable(call)] for call in calls[: self.calls]]

        def send(tracker: GeneralTracker) -> None:
            if tracker.name == "wandb":
                import wandb

                tracker.log({"rollouts": wandb.Table(columns=list(COLUMNS), data=rows), STEP: step})
            elif tracker.name == "tensorboard":
                tracker.log({"rollouts": "\n\n---\n\n".join(map(_markdown, rows))}, step=step)

        if rows:
            self._each(send)

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
                # Off for good: a service that fails at every step would flood the log and wait for its timeout.
                del self._started[name]
                self._warn(f"{name} switched off: {type(error).__name__}: {error}")


@contextmanager
def trackers(
    settings: RunConfig,
    run: RunDir,
    *,
    name: str,
    group: str,
    device: str,
    warn: Callable[[str], None] = print,
) -> Iterator[Trackers]:
    """Open the trackers of `run.report_to`, and close them at the end with the run's summary (if it came that far).

    A resumed run goes on in the same files.

    Args:
        name, group: of the run, where `run.name` and `run.group` say nothing, nor wandb's variables.
        device: `hardware.device`.
        warn: called with what a user should know: where wandb's data go, and later what fails.

    Raises:
        ConfigError: a package is not installed, or a tracker does not start.
    """
    report_to = settings.report_to
    refuse(missing_trackers(report_to))
    # Read only if it is sent: most runs have no tracker.
    config = without_secrets(run.config) if report_to else {}
    next_step = max((record["step"] for record in run.history()), default=-1) + 1
    started: dict[str, GeneralTracker] = {}
    # Started before training: a bad key is an error of the config, not of step 1.
    for service in report_to:
        try:
            started[service] = tracker = _started(service, run, next_step, settings, name, group, device)
            if service == "wandb":
                warn(wandb_mode(run.path)[1])
            if service == "tensorboard":
                # As a text: `store_init_configuration` adds a run to the folder at each start, and takes no lists.
                tracker.log({"config": _block(dumps(config, indent=1))}, step=next_step)
            else:
                tracker.store_init_configuration(config)
        except Exception as error:
            Trackers(started, warn).finish()
            raise ConfigError(f"run.report_to: '{service}' does not start: {type(error).__name__}: {error}") from None
    opened = Trackers(started, warn, settings.report_calls)
    try:
        yield opened
    finally:
        opened.finish(run.summary)


def missing_trackers(report_to: Sequence[str]) -> list[str]:
    """Return the trackers whose package is not installed, one sentence each; imports nothing."""
    return [
        f"run.report_to: '{tracker}' needs its package, which is not installed; pip install 'mmrl[{tracker}]'"
        for tracker in report_to
        if importlib.util.find_spec(tracker) is None
    ]


def wandb_mode(folder: Path) -> tuple[str | None, str]:
    """Return the mode of `wandb.init` (None: wandb decides), and a sentence that says where the data go.

    Args:
        folder: of the run.
    """
    from requests.utils import get_netrc_auth

    if mode := os.environ.get("WANDB_MODE"):
        return None, f"wandb: {mode}, as the environment variable WANDB_MODE says"
    if os.environ.get("WANDB_API_KEY"):
        return None, "wandb: online, with the key of the environment variable WANDB_API_KEY"
    server = os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai"
    if login := get_netrc_auth(server):  # where `wandb login` leaves the key
        add_secret("WANDB_API_KEY", login[1])
        return None, f"wandb: online, with the login for {server} in the netrc file"
    # Without a key wandb would ask for one and wait.
    send = f"wandb sync {folder}/wandb/offline-run-*"
    return "offline", f"wandb: offline, since there is neither a login (wandb login) nor WANDB_API_KEY; to send: {send}"


def _sendable(call: Mapping[str, object]) -> list[object]:
    """Return the cells of a call after its step: texts cut and without secrets."""
    cells = []
    for name in COLUMNS[1:]:
        value = call[name]
        if isinstance(value, str):
            text = clean(value)
            value = hide(abridged(text, *SENT_CHARACTERS[name]) if name in SENT_CHARACTERS else text)
        cells.append(value)
    return cells


def _markdown(row: Sequence[object]) -> str:
    """Format a call for TensorBoard."""
    _, example, module, prompt, completion, reward, advantage = row
    head = f"**{module}** · {example} · reward {short(reward)} · advantage {short(advantage)}"
    return f"{head}\n\n{_block(str(prompt))}\n\n{_block(str(completion))}"


def _block(text: str) -> str:
    # Indented, not fenced: the text could close a fence.
    return "\n".join(f"    {line}" for line in text.split("\n"))


def _started(
    tracker: str, run: RunDir, next_step: int, settings: RunConfig, name: str, group: str, device: str
) -> GeneralTracker:
    from accelerate import PartialState
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    # accelerate's trackers need its process state; the trainer's arguments reset it and set it up in the same way.
    PartialState(cpu=device == "cpu")
    # What is given to wandb wins over its variables, which are to hold where the config says nothing.
    variables = os.environ if tracker == "wandb" else {}
    name = settings.name or variables.get("WANDB_NAME") or name
    group = settings.group or variables.get("WANDB_RUN_GROUP") or group
    project = settings.wandb_project or variables.get("WANDB_PROJECT") or "mmrl"
    folder = str(run.path)
    options: dict[str, object] = {}
    if tracker == "wandb":
        # The id is stored beside the files, so that a resumed run continues the same curve.
        id_file = run.path / "wandb_id.txt"
        if not id_file.exists():
            id_file.write_text(secrets.token_hex(4))
        options = {"name": name, "dir": folder, "id": id_file.read_text().strip(), "resume": "allow"}
        options |= {"mode": wandb_mode(run.path)[0], "group": group, "tags": list(settings.tags) or None}
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
        comet_config = importlib.import_module(tracker).ExperimentConfig
        options["experiment_config"] = comet_config(
            name=name, offline_directory=folder, auto_output_logging=False, **quiet
        )
    kind = LOGGER_TYPE_TO_CLASS[tracker]
    # The first argument is a service's project (`WITH_PROJECTS`), but for TensorBoard and Aim the run's name in the
    # folder, and DVCLive passes over it.
    arguments = (tracker, folder) if kind.requires_logging_directory else (project,)
    created: GeneralTracker = kind(*arguments, **options)
    created.start()
    if tracker == "wandb":
        created.tracker.define_metric(STEP)
        created.tracker.define_metric("*", step_metric=STEP)
    return created


def without_secrets(value: object, key: str = "") -> Any:
    """Replace each text in `value` under a key that names a secret by `(hidden)`."""
    if isinstance(value, Mapping):
        return {name: without_secrets(inner, str(name)) for name, inner in value.items()}
    if isinstance(value, list):
        return [without_secrets(item, key) for item in value]
    return "(hidden)" if isinstance(value, str) and secret_name(key) else value
