"""`mmrl doctor`: problems of this machine, or of a run before it trains, each with the setting to change.

A run is built by its own builders (`run.build`), in a folder that is removed; `mmrl train` looks in the same way, at
fewer examples and with what it has built, before a run that would take over an hour.
"""

from __future__ import annotations

import os
import platform
import random
import shutil
import sysconfig
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from shutil import which
from typing import TYPE_CHECKING, cast

import psutil
from pydantic import Field
from rich.console import Console

from mmrl.config import TrainCommandConfig
from mmrl.config.base import Section
from mmrl.config.engines import VllmServerConfig
from mmrl.models.fetched import PACKAGES
from mmrl.report.doctor import Played, as_object, find, report
from mmrl.report.machine import cpu_name, unmet, versions
from mmrl.report.text import align
from mmrl.run.build import build_stage, build_task, check_model
from mmrl.run.launch import released
from mmrl.run.settle import settle
from mmrl.run.start import started
from mmrl.stages.step_log import StepLog
from mmrl.system.artifacts import cache_root
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


# --- without a run: the machine

KEYS = ("OPENAI_API_KEY", "HF_TOKEN", "WANDB_API_KEY", "ANTHROPIC_API_KEY", "COMET_API_KEY")
"""Environment variables that hold keys; only whether they are set is printed."""
GIB = 2**30


@dataclass(slots=True)
class Machine:
    """Facts of this machine, and its problems for a run."""

    facts: dict[str, str] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)
    """Problems with which nothing can be trained here."""
    notes: list[str] = field(default_factory=list)
    """Sentences about features that some runs need and this machine lacks."""


def check_machine(*, as_json: bool) -> int:
    """Print what this machine has of what runs need; 1 where something that every run needs is broken."""
    from mmrl.engines.vllm.command import vllm_problems

    machine, memory = Machine(broken=unmet()), psutil.virtual_memory()
    machine.facts |= {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": cpu_name(),
        "cores": f"{len(psutil.Process().cpu_affinity())} usable of {os.cpu_count()}",
        "memory": f"{memory.available / GIB:.1f} GiB free of {memory.total / GIB:.1f} GiB",
    }
    _devices(machine)
    # The two places that runs write to; each may be on a disk of its own.
    _disk(machine, "outputs", Path("outputs"), "set run.dir")
    _disk(machine, "cache", cache_root(None), "set MMRL_CACHE")
    fetched = [package.name for package in PACKAGES.values() if package.fetched]
    without_vllm = vllm_problems(VllmServerConfig(name="vllm_server"))
    machine.facts |= {
        **{f"{name} version": version for name, version in versions().items()},
        "vLLM": f"no: {without_vllm[0].partition(': ')[2]}" if without_vllm else "can be used",
        "hub": _hub(),
        "fetched": ", ".join(fetched) or "nothing (mmrl fetch lists all)",
        **{name: "set" if os.environ.get(name) else "not set" for name in KEYS},
    }
    if as_json:
        print(dumps({"version": 1, "can_train": not machine.broken, **asdict(machine)}, indent=1))
    else:
        lines = [*(f"broken: {problem}" for problem in machine.broken), *(f"note: {text}" for text in machine.notes)]
        verdict = "nothing can be trained here" if machine.broken else "mmrl can train here"
        print(align([*machine.facts.items()]) + "\n\n" + "\n".join([*lines, verdict]))
    return int(bool(machine.broken))


def _devices(machine: Machine) -> None:
    try:
        import torch
        from torch.utils.collect_env import get_nvidia_driver_version, run

        from mmrl.plan.cost import gpus

        devices = gpus()
    # A broken installation may raise anything on import; this command has to report it.
    except Exception as error:
        machine.broken.append(f"torch: cannot be used ({type(error).__name__}: {error}); install it again")
        return
    for number, gpu in enumerate(devices):
        free = f"{gpu.free / GIB:.1f} GiB free of {gpu.memory / GIB:.1f} GiB"
        machine.facts[f"GPU {number}"] = f"{gpu.name}, {free}, compute capability {gpu.capability}"
    # Read without torch: an installed driver with a torch that sees no GPU is the most common mistake.
    driver = get_nvidia_driver_version(run)
    compiler = next((path for name in (os.environ.get("CC"), "cc", "gcc", "clang") if (path := which(name or ""))), "")
    headers = Path(sysconfig.get_path("include")) / "Python.h"
    machine.facts |= {
        **({} if devices else {"GPUs": "none that torch can use"}),
        "driver": driver or "none",
        "CUDA of torch": torch.version.cuda or "none: a build for CPUs",
        "C compiler": compiler or "none",
    }
    if driver and not devices:
        machine.broken.append(
            f"torch {torch.__version__}: this machine has GPUs and torch can use none; install a build for CUDA that "
            f"driver {driver} runs, or see CUDA_VISIBLE_DEVICES (hardware=cpu trains without)"
        )
    if devices and not (compiler and headers.is_file()):
        missing = f"{headers} is not there" if compiler else "there is no C compiler"
        machine.notes.append(
            f"torch.compile: {missing}, which packed updates on a GPU need; install it, or take train.packing=padded"
        )


def _disk(machine: Machine, name: str, folder: Path, change: str) -> None:
    """Return the free room in a folder, and whether it can be written."""
    # The folder may not exist yet; its disk is that of the nearest existing parent.
    nearest = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(nearest).free / GIB
    machine.facts[name] = f"{folder}: {free:.1f} GiB free"
    if not os.access(nearest, os.W_OK):
        machine.broken.append(f"{folder}: cannot be written; {change} to a folder that can")
    elif free < 1:  # a run can hardly write its checkpoints
        machine.notes.append(f"{folder}: {free:.2f} GiB are left on its disk; make room before a run")


def _hub() -> str:
    """Say whether the Hugging Face hub answers."""
    from huggingface_hub import constants

    from mmrl.models.hub import hub_answers

    if constants.HF_HUB_OFFLINE:
        return "switched off by HF_HUB_OFFLINE"
    return f"{constants.ENDPOINT} {'answers' if hub_answers() else 'does not answer: offline'}"
