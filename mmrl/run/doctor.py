"""`mmrl doctor`: what is wrong with this machine, or with a run before it trains, each with the setting to change.

A run is built by its own builders (`run.build`), in a folder that is removed; `mmrl train` looks in the same way, at
fewer examples and with what it has built, before a run that would take over an hour.
"""

from __future__ import annotations

import os
import platform
import random
import shutil
import subprocess
import sysconfig
import tempfile
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, cast

import psutil
from rich.console import Console

from mmrl.config import TrainCommandConfig
from mmrl.config.engines import VllmServerConfig
from mmrl.errors import ConfigError
from mmrl.records import Forest
from mmrl.report.doctor import Played, as_object, find, report
from mmrl.report.machine import cpu_name, unmet, versions
from mmrl.report.text import align
from mmrl.run import fetch
from mmrl.run.build import build_stage, build_task, check_model
from mmrl.run.launch import released
from mmrl.run.settle import settle
from mmrl.stages.step_log import StepLog
from mmrl.system.artifacts import cache_root
from mmrl.system.files import atomic_write, dumps, plain

if TYPE_CHECKING:
    from mmrl.stages.weights import WeightStage

EXAMPLES, FEW = 8, 4
"""Examples that `mmrl doctor` plays, and `mmrl train` before a long run."""
FILE = "doctor.json"
"""In a run directory: the findings before training."""


def examples_of(values: Mapping[str, str]) -> int:
    """From the key `examples` as typed.

    Raises:
        ConfigError: no whole number of at least 1.
    """
    text = values.get("examples", str(EXAMPLES))
    if not (text.isascii() and text.isdigit() and int(text[:9]) > 0 and len(text) < 10):
        raise ConfigError(f"examples: got '{text}', expected a number of training examples to play, at least 1")
    return int(text)


def doctor(config: TrainCommandConfig, examples: int, *, as_json: bool) -> int:
    """Play a few examples of a checked run and print what is wrong; writes nothing that stays.

    Args:
        examples: training examples to play.

    Returns:
        1 where training would be useless, else 0.

    Raises:
        ConfigError: a model that cannot be had, or devices that are not here.
    """
    # One process sees what each of several would.
    hardware = config.hardware
    one = {"processes": 1, "nodes": 1, "sharding": "none", "cpu_offload": False}
    one |= {"rollout_devices": min(1, hardware.rollout_devices)}
    config = settle(config.model_copy(update={"hardware": hardware.model_copy(update=one)}))
    check_model(config.model)
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
            return _examined(stage, examples)[0]
        finally:
            stage.close()


def _examined(stage: WeightStage, examples: int) -> tuple[Played, Forest]:
    # It imports torch, which a refused config need not wait for.
    import numpy
    import torch

    from mmrl.stages.checkup import examine

    # A program of the user's may draw from the global sources; what the run draws from them stays as it would be.
    drawn, array_draws = random.getstate(), numpy.random.get_state()
    try:
        with torch.random.fork_rng():
            return examine(stage, examples)
    finally:
        random.setstate(drawn)
        numpy.random.set_state(array_draws)


def look_before(stage: WeightStage, log: StepLog) -> None:
    """Before training: play a few examples where `run.doctor` says so, print and keep the findings.

    It stops no run: what so few examples show is for a person to judge.
    """
    config = stage.config
    if not log.processes.first(_needed(config, log.rundir.path / FILE)):
        return
    facts, _ = _examined(stage, FEW)
    findings = find(facts)
    if log.processes.main:
        log.progress.note(f"before training (run.doctor=false leaves this out):\n{report(facts, findings)}")
        atomic_write(log.rundir.path / FILE, dumps(as_object(facts, findings), indent=1) + "\n")


def _needed(config: TrainCommandConfig, made: Path) -> bool:
    """Whether to look.

    Args:
        made: what a start of this run that was killed may have left.
    """
    # A resumed start would print the same findings again, and they cost rollouts.
    if made.exists():
        return False
    # What runs on a CPU is small, and mostly seen to its end.
    return config.hardware.device != "cpu" if config.run.doctor == "auto" else config.run.doctor


# --- without a run: the machine

KEYS = ("OPENAI_API_KEY", "HF_TOKEN", "WANDB_API_KEY", "ANTHROPIC_API_KEY", "COMET_API_KEY")
"""Environment variables that hold keys; only whether they are set is printed."""
HUB_S = 8.0
"""Longest wait for the hub; a name that cannot be resolved has no limit of its own."""
SMI_S = 10.0
"""Longest wait for nvidia-smi."""
LEAST_DISK = 2**30
"""Free bytes below which a run can hardly write its checkpoints."""
GIB = 2**30


@dataclass(slots=True)
class Machine:
    """What this machine has, and what of it stands against a run."""

    facts: dict[str, object] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)
    """Nothing can be trained here."""
    notes: list[str] = field(default_factory=list)
    """What some runs would miss."""

    def text(self) -> str:
        """For people."""
        rows = [[name, str(value)] for name, value in self.facts.items()]
        lines = [*(f"broken: {problem}" for problem in self.broken), *(f"note: {text}" for text in self.notes)]
        verdict = "nothing can be trained here" if self.broken else "mmrl can train here"
        return "\n\n".join([align(rows), "\n".join([*lines, verdict])])


def look_at_machine(*, as_json: bool) -> int:
    """Print what this machine has of what runs need; 1 where something that every run needs is broken."""
    machine = Machine()
    machine.broken += unmet()
    machine.facts |= {"python": platform.python_version(), "platform": platform.platform(), "cpu": cpu_name()}
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = psutil.virtual_memory()
    machine.facts["cores"] = f"{cores} usable of {os.cpu_count()}"
    machine.facts["memory"] = f"{memory.available / GIB:.1f} GiB free of {memory.total / GIB:.1f} GiB"
    _devices(machine)
    # The two places that runs write to; each may be on a disk of its own.
    _disk(machine, "outputs", Path("outputs"))
    _disk(machine, "cache", cache_root(None))
    machine.facts |= {f"{name} version": version for name, version in versions().items()}
    _vllm(machine)
    machine.facts["hub"] = _hub()
    machine.facts["fetched"] = fetch.here()
    machine.facts |= {name: "set" if os.environ.get(name) else "not set" for name in KEYS}
    if as_json:
        print(dumps({"version": 1, "can_train": not machine.broken, **asdict(machine)}, indent=1))
    else:
        print(machine.text())
    return int(bool(machine.broken))


def _devices(machine: Machine) -> None:
    try:
        import torch

        from mmrl.plan.cost import gpus

        here = gpus()
    # Whatever a broken installation raises when it is imported: to say so is what this command is for.
    except Exception as error:
        machine.broken.append(f"torch: cannot be used ({type(error).__name__}: {error}); install it again")
        return
    # Read apart from torch: a driver that is there beside a torch that sees none is the commonest mistake.
    listed = _driver()
    for number, gpu in enumerate(here):
        free = f"{gpu.free / GIB:.1f} GiB free of {gpu.memory / GIB:.1f} GiB"
        machine.facts[f"GPU {number}"] = f"{gpu.name}, {free}, compute capability {gpu.capability}"
    if not here:
        machine.facts["GPUs"] = "none that torch can use"
    machine.facts["driver"] = ", ".join(sorted(set(listed))) or "none"
    machine.facts["CUDA of torch"] = torch.version.cuda or "none: a build for CPUs"
    if listed and not here:
        machine.broken.append(
            f"torch {torch.__version__}: this machine has {len(listed)} GPUs and torch can use none; install a build "
            f"for CUDA that driver {listed[0]} runs, or see CUDA_VISIBLE_DEVICES (hardware=cpu trains without)"
        )
    nccl = torch.distributed.is_available() and torch.distributed.is_nccl_available()
    machine.facts["NCCL"] = ".".join(map(str, torch.cuda.nccl.version())) if nccl and here else "not there"
    if len(here) > 1 and not nccl:
        machine.notes.append("NCCL: torch was built without it, so a run has one GPU; take hardware=cuda")
    compiler = next((name for name in (os.environ.get("CC"), "cc", "gcc", "clang") if name and shutil.which(name)), "")
    machine.facts["C compiler"] = shutil.which(compiler) if compiler else "none"
    headers = (Path(sysconfig.get_path("include")) / "Python.h").is_file()
    if here and not (compiler and headers):
        missing = "C compiler" if not compiler else f"Python.h in {sysconfig.get_path('include')}"
        machine.notes.append(
            f"torch.compile: there is no {missing}, which packed updates on a GPU need; install it, or take "
            "train.packing=padded"
        )


def _driver() -> list[str]:
    """The driver's version for each GPU that it knows, whatever torch can do with them."""
    try:
        done = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=SMI_S,
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.split() if done.returncode == 0 else []


def _disk(machine: Machine, name: str, folder: Path) -> None:
    """Free room in a folder, or where it would be made, and whether it can be written."""
    # The folder itself may not be made yet: the disk is that of the nearest one above.
    above = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(above).free
    machine.facts[name] = f"{folder}: {free / GIB:.1f} GiB free"
    if not os.access(above, os.W_OK):
        change = "set run.dir" if name == "outputs" else "set MMRL_CACHE"
        machine.broken.append(f"{folder}: cannot be written; {change} to a folder that can")
    elif free < LEAST_DISK:
        machine.notes.append(f"{folder}: {free / GIB:.2f} GiB are left on its disk; make room before a run")


def _vllm(machine: Machine) -> None:
    from mmrl.engines.vllm.command import vllm_problems

    problems = vllm_problems(VllmServerConfig(name="vllm_server"))
    machine.facts["vLLM"] = f"no: {problems[0].partition(': ')[2]}" if problems else "can be used"


def _hub() -> str:
    """Whether the Hugging Face hub answers, within `HUB_S`."""
    from huggingface_hub import constants

    from mmrl.models.hub import hub_answers

    if constants.HF_HUB_OFFLINE:
        return "switched off by HF_HUB_OFFLINE"
    answers: list[bool] = []
    # A daemon: what still waits for a name server must not keep the command.
    query = threading.Thread(target=lambda: answers.append(hub_answers()), daemon=True)
    query.start()
    query.join(HUB_S)
    return f"{constants.ENDPOINT} answers" if any(answers) else f"{constants.ENDPOINT} does not answer: offline"
