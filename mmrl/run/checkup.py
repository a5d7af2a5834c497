"""A few examples played before training, at what a run has built: what is wrong is printed, and stops no run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mmrl.config import RlRunConfig
from mmrl.report.doctor import Probe, as_object, find, report
from mmrl.stages.step_log import StepLog
from mmrl.system.files import atomic_write, dumps
from mmrl.system.notebook import global_state_kept

if TYPE_CHECKING:
    from mmrl.stages.rl import RlStage

EXAMPLES = 4
"""Examples that `mmrl train` plays before a long run."""
FILE = "doctor.json"
"""In a run directory: the findings before training."""


def examined(stage: RlStage, examples: int) -> Probe:
    """Play a few examples; leaves all sources of random numbers as they were."""
    # It imports torch, which a refused config need not wait for.
    from mmrl.stages.checkup import examine

    # A program of the user's may draw from the global sources; what the run draws from them stays as it would be.
    with global_state_kept():
        return examine(stage, examples)[0]


def check_before_training(stage: RlStage, log: StepLog) -> None:
    """Play a few examples before training where `run.doctor` says so; print and keep the findings.

    It stops no run: what so few examples show is for a person to judge.
    """
    config = stage.config
    if not log.processes.first(doctor_runs(config, log.rundir.path / FILE)):
        return
    probe = examined(stage, EXAMPLES)
    findings = find(probe)
    if log.processes.main:
        log.progress.note(f"before training (run.doctor=false leaves this out):\n{report(probe, findings)}")
        atomic_write(log.rundir.path / FILE, dumps(as_object(probe, findings), indent=1) + "\n")


def doctor_runs(config: RlRunConfig, findings: Path) -> bool:
    """True if `mmrl train` plays examples before training: not where a start that was killed has left its findings."""
    wanted = config.run.doctor
    # Runs on a CPU are small, and are mostly watched to their end.
    return (config.hardware.device != "cpu" if wanted == "auto" else wanted) and not findings.exists()
