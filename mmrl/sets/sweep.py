"""`mmrl train -m`: the jobs of a sweep, run by any sweeper and launcher of Hydra, and compared at the end."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from uuid import uuid4

from mmrl.config import RootConfig, StageConfig
from mmrl.errors import CheckpointError, ConfigError, MmrlError, gathered, print_error, refuse
from mmrl.report.stats import number
from mmrl.report.text import align
from mmrl.run.check import check_all
from mmrl.run.session import begin, resume
from mmrl.run.settle import config_changes, run_folder
from mmrl.sets.found import set_of_run_dirs
from mmrl.sets.page import learning_part
from mmrl.sets.queue import State, day_of, run_state, though_changed
from mmrl.store.rundir import RunDir
from mmrl.system.files import JsonObject
from mmrl.system.processes import launched

Build = Callable[[], StageConfig]
"""Makes the config of a job, or raises `ConfigError`."""
Job = Callable[[Build], float | None]
Drive = Callable[[Job], None]
"""Calls a function with the config of every job, in this process or in others."""


def sweep(
    configs: Sequence[StageConfig],
    drive: Drive,
    *,
    searched: bool = False,
) -> int:
    """Run the jobs through Hydra's sweeper and launcher; a job that stops does not stop the others.

    With a directory of its own for each job (`run.dir=outputs/x/s${seed}`) the same command skips what is finished and
    continues what is not, as a comparison does; without, each run has a new directory. A job gives its sweeper the
    task's main metric after training, on `eval.split`.

    Args:
        configs: of the jobs, or, where `searched`, some that lie within what the sweeper will try.
        drive: the sweeper.
        searched: the sweeper chooses the jobs' values as it goes (optuna), so their number is not known here.

    Raises:
        ConfigError: every problem of every job; nothing has started.
    """
    folders = {config.run.dir: config for config in configs if config.run.dir}
    # Directories of an earlier start of the same sweep are not empty, which `check_all` would refuse; and of a search
    # the configs stand for values that are not known yet.
    separate = searched or len(folders) == len(configs)
    check_all([config.in_folder(None) for config in configs] if separate else configs)
    problems: list[str] = []
    for folder, config in ({} if searched else folders).items():
        with gathered(problems):
            job_state(Path(folder), config)
    refuse(dict.fromkeys(problems))
    day = day_of(Path(folder) for folder in folders)
    Path("outputs").mkdir(exist_ok=True)
    # A launcher may run jobs in processes on other machines (submitit), so what comes of them comes back as files.
    with TemporaryDirectory(dir="outputs", prefix=".sweep-") as scratch:
        results = Path(scratch).absolute()
        try:
            drive(partial(_sweep_job, results, None if searched else len(configs), day))
        except ValueError as error:
            # Optuna's sweeper asks for the best trial at its end; where all have failed there is none. A launcher that
            # cannot start leaves no result.
            if not (codes := [result["code"] for result in _results(results)]) or 0 in codes:
                raise MmrlError(f"the sweeper stopped: {error}") from error
        done = _results(results)
    jobs = len(done) if searched else len(configs)
    failed = jobs - sum(result["code"] == 0 for result in done)
    if len(done) > 1:
        _show([Path(result["folder"]) for result in done if result["folder"]])
    print(f"sweep: {jobs - failed} of {jobs} runs finished", file=sys.stderr if failed else sys.stdout)
    return max((int(result["code"]) for result in done), default=1) or int(failed > 0)


def _results(folder: Path) -> list[JsonObject]:
    results: list[JsonObject] = [json.loads(path.read_text()) for path in folder.iterdir()]
    return sorted(results, key=lambda result: str(result["folder"]))


def _show(folders: Sequence[Path]) -> None:
    """Print the runs side by side, those of them that lie on this machine."""
    present = [run for run in dict.fromkeys(folders) if (run / "config.yaml").is_file()]
    if len(present) < 2:
        return
    try:
        result = set_of_run_dirs("sweep", present)
        # Only the learning tables: a search has too many runs for a table of all pairs.
        for part in (learning_part(result, column) for column in result.columns if result.started_in(column)):
            print(f"\n{part.title}\n{align(part.rows)}")
        print()
    # All runs have ended: an unreadable one is reported here and does not change the exit code.
    except MmrlError as error:
        print(f"the runs are not shown side by side: {error}", file=sys.stderr)


def _sweep_job(results: Path, jobs: int | None, day: str, build: Build) -> float | None:
    """Run a job of a sweep, in this process or in one that a launcher has started. Returns its main metric."""
    folder, created = "", False
    try:
        config = build()
        name = f"algo={config.algo.name} task={config.task.name} seed={config.seed}"
        print(f"-- job {len(list(results.iterdir())) + 1}{f' of {jobs}' if jobs else ''}: {name}")
        folder, state = config.run.dir or "", "new"
        if folder:
            state = job_state(Path(folder), config)
        elif launched() is None:  # else the main process of several makes it
            folder = run_folder(None, config.task.name, config.algo.name, suffix=f"_s{config.seed}")
            config, created = config.in_folder(folder), True
        if config.model.date is None:
            config = config.model_copy(update={"model": config.model.model_copy(update={"date": day})})
        if state == "finished":
            print(f"finished before, kept: {folder}{though_changed(Path(folder))}")
            code = 0
        elif state == "unfinished":
            code = resume(Path(folder))
        else:
            (checked,) = check_all([config])  # a search asks for values between those that were checked before
            _, code = begin(checked)
    except MmrlError as error:
        print_error(error)
        code = error.exit_code
    if created and not any(Path(folder).iterdir()):  # refused before it wrote anything
        Path(folder).rmdir()
    # A unique name per job: launchers run jobs in parallel on machines that share this folder.
    (results / uuid4().hex).write_text(json.dumps({"code": code, "folder": folder and str(Path(folder).absolute())}))
    return _score(Path(folder)) if code == 0 and folder else None


def job_state(path: Path, config: RootConfig) -> State:
    """Return the state of a job's run in a directory (it may be missing); remove leftovers of a killed start.

    Raises:
        ConfigError: it holds something else than this run.
    """
    if (state := run_state(path)) == "new":
        return state
    stored = RunDir.read(path).config
    changes = config_changes(stored, config.model_dump(mode="json"))
    # Settings that depend on the machine are not compared, nor those that come with the policy of another run.
    policy = ("start.weights", "start.prompts", "model.path", "model.revision", "task.prompts")
    if stored.get("start"):
        changes = {key: change for key, change in changes.items() if key not in policy}
    different = [
        f"{key}={stored} (requested: {requested})"
        for key, (stored, requested) in changes.items()
        if not key.startswith("hardware.") and not (key == "engine.name" and requested == "auto")
    ]
    if different:
        raise ConfigError(f"run.dir: {path} holds a run with other settings: {', '.join(different)}; take another")
    return state


def _score(folder: Path) -> float | None:
    """Return the main metric of the evaluation after training; None where none was made."""
    try:
        summary = RunDir.read(folder).summary
    except CheckpointError:
        return None
    compared = summary.get("comparison", {}).get(summary.get("main_metric"), {})
    return number(compared.get("after"))
