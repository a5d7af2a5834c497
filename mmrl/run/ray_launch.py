"""Processes of a run on a Ray cluster: Ray Train places, watches and starts them again together.

    this process ── Ray Train's controller ──┬── actor ── mmrl worker (rank 0) ──┐
            └────── Board (actor) ───────────┴── actor ── mmrl worker (rank 1) ──┴── run directory

Each actor watches one process, the same that `launch.start` would start on one machine, so that a run's numbers do not
depend on who started it, signals reach it, and a GPU is the process's alone. Not `TorchTrainer`: it would open a second
process group and a CUDA context in each actor. The run directory is the only checkpoint. Where a process is lost, Ray
Train ends the others and starts all again, and they continue the run; a process that ends by itself ends the run.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from shutil import rmtree
from typing import IO, Any

from mmrl.config import HardwareConfig
from mmrl.errors import ENDED, ProcessLost
from mmrl.run.launch import GRACE_S, JOB, environment, forward_signals
from mmrl.store.rundir import RunDir
from mmrl.system.child_process import end_with_parent, free_port
from mmrl.system.files import JsonObject
from mmrl.system.ray_cluster import process_resources

POLL_S = 0.5
LOCK_S = 60.0
"""Longest wait for the main process of the group before to be gone."""


class Board:
    """Actor between the starting process and the others: signals for them, their output and exit code from them."""

    def __init__(self) -> None:
        self.signal = 0
        self.code: int | None = None
        self.groups = 0
        self.text: list[tuple[bool, str]] = []

    def begin(self) -> int:
        """Count the groups of processes that have started; return how many there were before."""
        self.groups += 1
        return self.groups - 1

    def stop(self, number: int) -> None:
        """Pass a signal on to all processes."""
        self.signal = number

    def end(self, code: int) -> None:
        """Note the exit code of a process; the first that is not 0 stays."""
        self.code = self.code or code

    def state(self) -> tuple[int, int | None]:
        """Return the signal (0: none) and the exit code (None: none has ended)."""
        return self.signal, self.code

    def write(self, error: bool, text: str) -> None:
        """Take a line of a process's stdout, or stderr."""
        self.text.append((error, text))

    def read(self) -> list[tuple[bool, str]]:
        """Return the lines since the last call."""
        lines, self.text = self.text, []
        return lines


def start_on_ray(job: JsonObject, hardware: HardwareConfig, run_dir: str) -> int:
    """Run `job` in `hardware.processes` processes on each of `hardware.nodes` nodes of the cluster.

    Returns:
        The exit code.
    """
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.backend import Backend, BackendConfig
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    class SharedGpus(Backend):
        """Processes of a node see all of its GPUs and take the one of their local rank, as under torchrun."""

        share_cuda_visible_devices = True

    class Config(BackendConfig):
        backend_cls = SharedGpus

    assert hardware.ray is not None
    # Actors stay in the folder that the cluster or `ray job submit` gives them.
    os.environ.setdefault("RAY_CHDIR_TO_TRIAL_DIR", "0")
    on_this_node = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    board = ray.remote(Board).options(num_cpus=0, scheduling_strategy=on_this_node).remote()
    strategy = "STRICT_PACK" if hardware.nodes == 1 else "STRICT_SPREAD" if hardware.processes == 1 else "PACK"
    scaling = ScalingConfig(
        num_workers=hardware.processes * hardware.nodes, use_gpu=hardware.device == "cuda", placement_strategy=strategy
    )
    scaling.resources_per_worker = process_resources(hardware)
    settings = {"job": job, "hardware": hardware, "board": board, "folder": os.getcwd()}
    with tempfile.TemporaryDirectory(prefix="mmrl-ray-", ignore_cleanup_errors=True) as storage:
        # Nothing is reported to Ray, which keeps no checkpoint: the folder holds a marker of its own.
        run_config = RunConfig(
            storage_path=storage, failure_config=FailureConfig(max_failures=hardware.ray.max_failures)
        )
        trainer = DataParallelTrainer(
            rank, train_loop_config=settings, backend_config=Config(), scaling_config=scaling, run_config=run_config
        )
        outcome: list[Exception | None] = []

        def fit() -> None:
            try:
                trainer.fit()
                outcome.append(None)
            except Exception as error:
                outcome.append(error)

        with forward_signals([]) as signals:
            # In a thread, where Ray Train leaves Ctrl-C to this process.
            threading.Thread(target=fit, daemon=True).start()
            sent = 0
            while not outcome:
                time.sleep(POLL_S)
                if len(signals) > 1:
                    # Nothing gives up a wait of Ray Train's; Ray ends what a process has started when that has ended.
                    print(f"stopped; continue with: mmrl train resume={run_dir}", file=sys.stderr, flush=True)
                    rmtree(storage, ignore_errors=True)
                    os._exit(128 + signals[-1])
                _show(board)
                if len(signals) > sent:
                    sent = len(signals)
                    ray.get(board.stop.remote(signals[-1]))
            _show(board)
        failure, (_, code) = outcome[0], ray.get(board.state.remote())
    if failure is not None:
        often = f"processes were lost more often than hardware.ray.max_failures={hardware.ray.max_failures}"
        words = next((line for line in reversed(str(failure).splitlines()) if line.strip()), repr(failure))
        print(f"error: {often}: {words}\nstopped; continue with: mmrl train resume={run_dir}", file=sys.stderr)
        return 1
    if code in ENDED:
        print(f"{ENDED[code]}; continue with: mmrl train resume={run_dir}", file=sys.stderr)
    return code or 0


def rank(settings: dict[str, Any]) -> None:
    """Run one process of the run, in an actor of Ray Train, and watch it to its end.

    Raises:
        ProcessLost: it was killed, or another one was; Ray Train then starts all processes again.
    """
    import ray
    import ray.util
    from ray.train import get_context
    from ray.train.collective import broadcast_from_rank_zero

    context, board, hardware, job = get_context(), settings["board"], settings["hardware"], settings["job"]
    number, first = context.get_world_rank(), None
    if number == 0:
        first = (ray.util.get_node_ip_address(), free_port(), _resumes(settings))
    address, port, resumed = broadcast_from_rank_zero(first)
    if resumed is None:
        return
    places = {"LOCAL_RANK": context.get_local_rank(), "LOCAL_WORLD_SIZE": context.get_local_world_size()}
    places |= {"WORLD_SIZE": context.get_world_size(), "MASTER_ADDR": address, "PYTHONUNBUFFERED": 1}
    places |= {"RAY_ADDRESS": ray.get_runtime_context().gcs_address, JOB: json.dumps({**job, "resumed": resumed})}
    variables = environment(hardware, number, port) | {name: str(value) for name, value in places.items()}
    folder = settings["folder"] if Path(settings["folder"]).is_dir() else None
    command = [sys.executable, "-m", "mmrl", "worker"]
    streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    streams |= {"text": True, "errors": "replace"}
    process = subprocess.Popen(command, env={**os.environ, **variables}, cwd=folder, preexec_fn=_prepare, **streams)
    try:
        stopped = _watch(process, board)
    finally:
        process.kill()
        process.wait()
    # Killed by the signal: it was loading its packages.
    code = 128 - process.returncode if stopped and process.returncode < 0 else process.returncode
    if code < 0 or code == ProcessLost.exit_code:
        time.sleep(4 * POLL_S)  # another one that ended the run by itself has said so by then
        if not ray.get(board.state.remote())[1]:
            raise ProcessLost(f"process {number} ended with code {code}")
    ray.get(board.end.remote(0 if code < 0 else code))


def _prepare() -> None:
    """Undo what a process inherits from Ray, and tie it to its actor; runs in it before its program."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    # Killed: others take its place when its actor has ended, and its GPU and the run's lock must be free at once.
    end_with_parent(signal.SIGKILL)


def _resumes(settings: dict[str, Any]) -> bool | None:
    """Return whether this group of processes continues the run; None: there is nothing left to do."""
    import ray

    job, board, hardware = settings["job"], settings["board"], settings["hardware"]
    folder = Path(settings["folder"], job["config"]["run"]["dir"])
    restarts = ray.get(board.begin.remote())
    if not restarts:
        return bool(job["resumed"])
    started = (folder / "config.yaml").is_file()
    limit = time.monotonic() + LOCK_S
    while started and RunDir.read(folder).in_use and time.monotonic() < limit:
        time.sleep(POLL_S)
    if started and RunDir.read(folder).finished:
        return None
    where = f"{'from the last checkpoint' if started else 'anew'} (start {restarts} of {hardware.ray.max_failures})"
    ray.get(board.write.remote(True, f"warning: a process was lost; all start {where}\n"))
    return started


def _watch(process: subprocess.Popen[str], board: Any) -> bool:
    """Pass on output, signals and the end of the run until a process has ended; True if it was signalled."""
    import ray

    def pass_on(stream: IO[str], error: bool) -> None:
        for line in stream:
            board.write.remote(error, line)

    pairs = ((process.stdout, False), (process.stderr, True))
    readers = [threading.Thread(target=pass_on, args=pair) for pair in pairs]
    for reader in readers:
        reader.start()
    sent, grace = 0, GRACE_S
    while process.poll() is None:
        number, code = ray.get(board.state.remote())
        if number != sent:
            process.send_signal(number)
            sent = number
        # Another one has stopped the run: this one saves, or waits for it in a collective.
        grace -= POLL_S if code and not sent else 0.0
        if grace < 0:
            process.kill()
        time.sleep(POLL_S)
    for reader in readers:
        reader.join()
    return bool(sent)


def _show(board: Any) -> None:
    """Print what the processes have written since the last call."""
    import ray

    with suppress(ray.exceptions.RayError):
        for error, text in ray.get(board.read.remote()):
            print(text, end="", file=sys.stderr if error else sys.stdout, flush=True)
