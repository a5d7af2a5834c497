"""`mmrl doctor`: problems of a run before it trains, each with the setting to change.

A run is built by its own builders (`run.build`), in a folder that is removed; `mmrl train` looks in the same way, at
fewer examples and with what it has built, before a run that would take over an hour.
"""

from __future__ import annotations

import random
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, cast

from pydantic import Field
from rich.console import Console

from mmrl.config import TrainCommandConfig
from mmrl.config.base import Section
from mmrl.report.doctor import Played, as_object, find, report
from mmrl.run.build import build_stage, build_task, check_model
from mmrl.run.launch import released
from mmrl.run.settle import settle
from mmrl.run.start import started
from mmrl.stages.step_log import StepLog
from mmrl.system.files import atomic_write, dumps, plain

if TYPE_CHECKING:
    from mmrl.stages.weights import WeightStage

FEW = 4
"""Examples that `mmrl train` plays before a long run."""
FILE = "doctor.json"
"""In a run directory: the findings before training."""


class DoctorArguments(Section):
    """Arguments of `mmrl doctor` beside a config."""

    examples: int = Field(8, ge=1, description="training examples that are played")


def doctor(config: TrainCommandConfig, examples: int, *, as_json: bool) -> int:
    """Play a few examples of a checked run and print what is wrong.

    Writes nothing that stays, but the merged weights of a run with an adapter that this one starts from.

    Args:
        examples: training examples to play.

    Returns:
        1 where training would be useless, else 0.

    Raises:
        ConfigError: a model that cannot be had, or devices that are not here.
    """
    # A single process sees what each of several would.
    hardware = config.hardware
    single = {"processes": 1, "nodes": 1, "sharding": "none", "cpu_offload": False, "ray": None}
    single |= {"rollout_devices": min(1, hardware.rollout_devices)}
    config = settle(started(config).model_copy(update={"hardware": hardware.model_copy(update=single)}))
    check_model(config)
    facts = _played(config, examples)
    findings = find(facts)
    if as_json:
        print(dumps(as_object(facts, findings), indent=1))
    else:
        several = hardware.processes * hardware.nodes
        note = f"\n(on one process; the run has {several})" if several > 1 else ""
        print(report(facts, findings) + note)
    return int(any(finding.useless for finding in findings))


def _played(config: TrainCommandConfig, examples: int) -> Played:
    from mmrl.report.progress import Progress
    from mmrl.report.rundir import RunDir
    from mmrl.report.trackers import Trackers
    from mmrl.system.stop import stoppable

    task = build_task(config.task, config.seed)
    stored = plain(config.model_dump(mode="json"))
    with (
        tempfile.TemporaryDirectory(prefix="mmrl-doctor-", ignore_cleanup_errors=True) as folder,
        RunDir.create(Path(folder) / "run", stored, ["mmrl", "doctor"]) as rundir,
        Progress(total=1, title="doctor", live=False, console=Console(quiet=True)) as progress,
        stoppable() as stop,
        released(task),
    ):
        log = StepLog(rundir=rundir, progress=progress, trackers=Trackers({}), stop=stop)
        stage = cast("WeightStage", build_stage(config, task, log))
        try:
            return _examined(stage, examples)
        finally:
            stage.close()


def _examined(stage: WeightStage, examples: int) -> Played:
    # It imports torch, which a refused config need not wait for.
    import numpy
    import torch

    from mmrl.stages.checkup import examine

    # A program of the user's may draw from the global sources; what the run draws from them stays as it would be.
    python_state, numpy_state = random.getstate(), numpy.random.get_state()
    try:
        with torch.random.fork_rng():
            return examine(stage, examples)[0]
    finally:
        random.setstate(python_state)
        numpy.random.set_state(numpy_state)


def check_before_training(stage: WeightStage, log: StepLog) -> None:
    """Play a few examples before training where `run.doctor` says so; print and keep the findings.

    It stops no run: what so few examples show is for a person to judge.
    """
    config = stage.config
    if not log.processes.first(_doctor_runs(config, log.rundir.path / FILE)):
        return
    facts = _examined(stage, FEW)
    findings = find(facts)
    if log.processes.main:
        log.progress.note(f"before training (run.doctor=false leaves this out):\n{report(facts, findings)}")
        atomic_write(log.rundir.path / FILE, dumps(as_object(facts, findings), indent=1) + "\n")


def _doctor_runs(config: TrainCommandConfig, findings: Path) -> bool:
    """True if `mmrl train` plays examples before training.

    Args:
        findings: what a start of this run that was killed may have left.
    """
    # A resumed start would print the same findings again, and they cost rollouts.
    if findings.exists():
        return False
    # Runs on a CPU are small, and are mostly watched to their end.
    return config.hardware.device != "cpu" if config.run.doctor == "auto" else config.run.doctor
