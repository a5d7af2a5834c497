"""Processes of a run on this machine: checks of hardware profiles, starting, watching and ending them together.

`start` is called when a hardware profile has more than one process and no launcher has started them. The processes
find each other by torchrun's environment variables, so a run started by torchrun, accelerate or SLURM takes the same
path.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import psutil

from mmrl.config import HardwareConfig
from mmrl.errors import ENDED, ConfigError, ProcessLost
from mmrl.system.child_process import end_with_parent, free_port
from mmrl.system.files import JsonObject
from mmrl.system.processes import launched
from mmrl.system.stop import of_this_thread
from mmrl.tasks.base import Task

JOB = "MMRL_JOB"
"""Environment variable that hands a worker its job as JSON: the settled config, the command, new or continued."""
OF_ACCELERATE = re.compile(
    r"ACCELERATE_(MIXED_PRECISION|USE_(CPU|FSDP|DEEPSPEED|MEGATRON_LM|PARALLELISM_CONFIG)|CONFIG_DS_FIELDS"
    r"|(DYNAMO|DEEPSPEED|GRADIENT)_.*)|FSDP_.*"
)
"""Variables by which accelerate is told how to wrap, compile and compute a model; not those of its logs."""
GRACE_S = 20.0
"""Seconds that the other processes have to end after one has died."""


def start(job: JsonObject, hardware: HardwareConfig, run_dir: str) -> int:
    """Run `job` in `hardware.processes` processes; returns the exit code.

    A process that dies takes the others along: the last checkpoint stays, and what to type next is printed. They end
    with this process too, also when it is killed outright.
    """
    # Not torch.distributed's elastic agent. Tried with torch 2.13: it ends the other workers and knows exit codes and
    # signals, but after a stop it raises SignalException and the workers' own exit codes are gone, each end adds log
    # lines of its own ("Sending process ... closing signal", "failed (exitcode: 2) ..."), and it has no hook between
    # fork and exec: a worker could guard itself only after seconds of imports, too late if its parent is killed then.
    # Taken anew for each run: two runs on one machine must not meet each other's processes.
    port = free_port()
    workers = [
        psutil.Popen(
            [sys.executable, "-m", "mmrl", "worker"],
            env={**os.environ, **environment(hardware, rank, port), JOB: json.dumps(job)},
            preexec_fn=end_with_parent,  # nobody would watch them any more
        )
        for rank in range(hardware.processes)
    ]
    with forward_signals(workers) as signals:
        failed = _wait(workers)
        if failed is None:
            return 0
        # The others would wait for the dead one in a collective until its timeout, which is hours.
        _end(workers)
    code = workers[failed].returncode
    if signals and code in (-signals[0], 128 + signals[0]):
        print(f"{ENDED[128 + signals[0]]}; continue with: mmrl train resume={run_dir}", file=sys.stderr)
        return 128 + signals[0]
    # A negative code is a signal: the process had no chance to say anything, so this one does.
    if code < 0:
        print(
            f"error: process {failed} of {len(workers)} was killed by signal {-code} ({signal.Signals(-code).name}); "
            f"the others were ended\nstopped; continue with: mmrl train resume={run_dir}",
            file=sys.stderr,
        )
        return 1
    return 1 if code == ProcessLost.exit_code else code


def environment(hardware: HardwareConfig, rank: int, port: int) -> dict[str, str]:
    """Return the variables by which a process finds the others, and how accelerate is to wrap the model."""
    variables = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(hardware.processes),
        "LOCAL_WORLD_SIZE": str(hardware.processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": str(hardware.threads or 1),
    }
    return variables | wrapping(hardware)


def drop_wrapping() -> None:
    """Remove accelerate's variables: hardware profile and `model.dtype` say what they would.

    `accelerate launch` sets them by the defaults of the user's `accelerate config`, transformers by the run before.
    """
    for name in filter(OF_ACCELERATE.fullmatch, list(os.environ)):
        del os.environ[name]


def wrapping(hardware: HardwareConfig) -> dict[str, str]:
    """Return accelerate's variables for a hardware profile, as `accelerate launch` would set them."""
    offload = str(hardware.cpu_offload).lower()
    if hardware.device == "cpu":
        return {"ACCELERATE_USE_CPU": "true"}
    # The names are accelerate's: what `accelerate launch` sets is read by the Trainer's own `Accelerator`.
    if hardware.sharding == "fsdp2":
        return {
            "ACCELERATE_USE_FSDP": "true",
            "FSDP_VERSION": "2",
            "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
            "FSDP_RESHARD_AFTER_FORWARD": "true",
            "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
            # True while the policy is loaded (`sharding.loaded_once`): teachers and encoders are not sharded.
            "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
            "FSDP_OFFLOAD_PARAMS": offload,
        }
    if hardware.sharding.startswith("zero"):
        device = "cpu" if hardware.cpu_offload else "none"
        return {
            "ACCELERATE_USE_DEEPSPEED": "true",
            "ACCELERATE_DEEPSPEED_ZERO_STAGE": hardware.sharding.removeprefix("zero"),
            "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": device,
            "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": device if hardware.sharding == "zero3" else "none",
            "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL": str(hardware.sharding == "zero3").lower(),
            "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "1",
        }
    return {}


def must_start(processes: int, nodes: int) -> bool:
    """True if this process has to start those of the run: there are several, and no launcher has started them.

    Raises:
        ConfigError: a run over several nodes that no launcher has started.
    """
    # A worker of `start`, or of the user's torchrun or SLURM: starting more would multiply the run.
    if launched() is not None:
        return False
    if nodes > 1:
        raise ConfigError(
            f"hardware.nodes: got {nodes}; mmrl starts processes on one machine only. Run this on each node: torchrun "
            f"--nnodes {nodes} --nproc-per-node {processes} --rdzv-backend c10d --rdzv-endpoint HOST:PORT -m mmrl train"
            " … (or through SLURM, docs/hardware.md)"
        )
    return processes > 1


def _wait(workers: Sequence[psutil.Popen]) -> int | None:
    """Wait for the processes: return the rank of the first one that failed; None when all are done."""
    while True:
        codes = [worker.poll() for worker in workers]
        for rank, code in enumerate(codes):
            if code:
                return rank
        if all(code == 0 for code in codes):
            return None
        # Polling, because a wait for one process would not notice the death of another.
        time.sleep(0.1)


def _end(workers: Sequence[psutil.Popen]) -> None:
    """Terminate the processes that still run, then kill them."""
    for worker in workers:
        if worker.poll() is None:
            worker.terminate()
    # One deadline for all: they save at the same time, so waiting for each in turn is not longer.
    _, survivors = psutil.wait_procs(workers, timeout=GRACE_S)
    for worker in survivors:
        worker.kill()
        worker.wait()


@contextmanager
def forward_signals(workers: Sequence[psutil.Popen]) -> Iterator[list[int]]:
    """Pass Ctrl-C and SIGTERM on to the workers, which end by themselves; no process survives an error here.

    After SIGTERM they save, which takes as long as their step; a second signal ends them within seconds.

    Yields:
        The signals that have come.
    """
    signals: list[int] = []

    def forward(number: int, frame: object) -> None:
        signals.append(number)
        if len(signals) > 1:
            _end(workers)
            return
        # Workers are in the same process group, but SIGTERM from a scheduler reaches only this process.
        for worker in workers:
            if worker.poll() is None:
                worker.send_signal(number)

    # Installed once all workers are there: a signal before that ends this process, and they end with it.
    before = {}
    if (stop := of_this_thread()) is not None:
        stop.forward = forward
    else:
        before = {number: signal.signal(number, forward) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        _end(workers)


@contextmanager
def released(task: Task) -> Iterator[None]:
    """Let a task close what it has opened (a retriever's connections), however the run ends.

    A sweep uses a task for several runs: each begins with counts of its own.
    """
    # Before, not after: an interrupted run of a sweep may have left counts behind.
    task.reset_counts()
    try:
        yield
    finally:
        task.close()


def replica_problems(hardware: HardwareConfig, replicas: int) -> list[str]:
    """Return the problems of several vLLM servers on the GPUs of a hardware profile."""
    devices = hardware.rollout_devices or hardware.processes
    # Servers on one GPU share its memory (`engine.gpu_memory`).
    # GPUs of a Ray cluster are counted where it is (`ray_cluster.refuse_cluster`).
    if hardware.device == "cpu" or hardware.ray is not None or devices == 1 or not devices % replicas:
        return []
    return [f"engine.replicas: got {replicas}, expected a divisor of {devices}, the GPUs that serve"]


def hardware_problems(hardware: HardwareConfig, engine: str, modules: bool, critic: str | None = None) -> list[str]:
    """Return the problems of a hardware profile, one sentence each.

    Args:
        engine: the engine that samples.
        modules: whether there are weights per module.
        critic: kind of the algorithm's critic, if it has one. FSDP2 shards it beside the policy; DeepSpeed takes one
            model, and DDP wants every trained weight in every backward pass, so no second adapter.
    """
    # Over all machines: what the processes share does not depend on where they run.
    total, sharding = hardware.processes * hardware.nodes, hardware.sharding
    copies = "none (every process holds the whole model)"
    sharded = {
        f"accelerate does not do on a CPU; use {copies}": sharding != "none" and hardware.device == "cpu",
        "engine=transformers cannot sample from; use engine=vllm_server": sharding != "none"
        and engine == "transformers",
        f"DeepSpeed cannot train a critic under; use fsdp2, or {copies}": sharding.startswith("zero") and bool(critic),
    }
    problems = [f"hardware.sharding: got {sharding}, which {why}" for why, applies in sharded.items() if applies]
    if total > 1 and engine == "vllm_colocated":
        profile = f"profile '{hardware.name}' has {total}"
        problems.append(f"engine: vllm_colocated runs in one process, {profile}; use engine=vllm_server")
    if total > 1 and critic == "adapter" and sharding == "none":
        problems.append(
            "algo.critic: got adapter, which needs one process or hardware.sharding=fsdp2; use separate or head"
        )
    if total > 1 and modules:
        problems.append(f"hardware.processes: got {total} in all, weights per module need 1")
    return problems


def missing_packages(hardware: HardwareConfig) -> list[str]:
    """Name the packages that a hardware profile needs and this interpreter lacks, without an import."""
    problems = []
    if hardware.sharding.startswith("zero") and importlib.util.find_spec("deepspeed") is None:
        problems.append(
            f"hardware.sharding: got {hardware.sharding}, which needs DeepSpeed, and {sys.executable} does not have "
            "it; install it (pip install 'mmrl[deepspeed]'), or use hardware.sharding=fsdp2"
        )
    if hardware.ray is not None and importlib.util.find_spec("ray") is None:
        lacks = f"needs Ray, which {sys.executable} does not have; install it (pip install 'mmrl[ray]')"
        problems.append(f"hardware.ray: profile '{hardware.name}' {lacks}, or use another profile")
    return problems
