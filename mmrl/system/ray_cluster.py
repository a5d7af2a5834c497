"""The user's Ray cluster: connection, and whether it can take a run, found out before anything starts.

Ray is imported where it is used: no other run needs it.
"""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path
from typing import Any
from uuid import uuid4

from mmrl import __version__
from mmrl.config import HardwareConfig, RootConfig
from mmrl.config.engines import VllmServerConfig
from mmrl.errors import ConfigError, refuse

LOOK_S = 60.0
"""Longest wait for every node's answer."""


def connect(hardware: HardwareConfig) -> str:
    """Join the cluster of a hardware profile until this process ends; return the device of its training processes.

    Raises:
        ConfigError: nobody answers at the address, or it runs another Ray or Python.
    """
    join_cluster(hardware.ray.address if hardware.ray is not None else "auto")
    if hardware.device != "auto":
        return hardware.device
    return "cuda" if any(node["Resources"].get("GPU") for node in _nodes()) else "cpu"


def join_cluster(address: str) -> None:
    """Connect this process to a cluster, whose actors then end with it; nothing where it is connected already.

    Raises:
        ConfigError: nobody answers at the address, or it runs another Ray or Python.
    """
    import ray

    if ray.is_initialized():
        return
    if address == "auto":
        address = os.environ.get("RAY_ADDRESS", address)
    # Ray takes SIGTERM for itself, and a run that it ends would not save.
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        if address != "auto":
            host, _, port = address.rpartition(":")
            # Ray itself would try for minutes.
            socket.create_connection((host, int(port)), timeout=5).close()
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except (OSError, RuntimeError, ValueError) as error:
        expected = "expected HOST:PORT of a Ray cluster to which this machine belongs (`ray start`)"
        words = " ".join(str(error).split())
        raise ConfigError(f"hardware.ray.address: got {address}, {expected}: {words}") from None
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def process_resources(hardware: HardwareConfig) -> dict[str, float]:
    """Return the resources that one training process reserves."""
    return {"CPU": float(hardware.threads or 1), **({"GPU": 1.0} if hardware.device == "cuda" else {})}


def server_resources(hardware: HardwareConfig, replicas: int) -> dict[str, float]:
    """Return the resources that one of `replicas` vLLM servers reserves."""
    gpus = hardware.rollout_devices // replicas
    return {"CPU": float(max(hardware.threads or 1, gpus)), **({"GPU": float(gpus)} if gpus else {})}


def refuse_cluster(config: RootConfig) -> None:
    """Find a cluster that cannot take a run, before a folder is made. Ray itself admits no node with another Python.

    Raises:
        ConfigError: too few nodes, CPUs or GPUs; a node with another mmrl, or without the run's folder.
    """
    hardware, nodes = config.hardware, _nodes()
    need = process_resources(hardware)
    of_node = _together([need] * hardware.processes)
    fitting = [node for node in nodes if _holds(node["Resources"], of_node)]
    available = "; ".join(f"{node['NodeManagerAddress']}: {_text(node['Resources'])}" for node in nodes)
    available += " (nodes that are up; no autoscaler is waited for)"
    if len(fitting) < hardware.nodes:
        each = (
            f"got {hardware.processes} on each of hardware.nodes={hardware.nodes} nodes, which takes {_text(of_node)}"
        )
        raise ConfigError(f"hardware.processes: {each} on each; the Ray cluster has {available}")
    engine, reserved = config.engine, [of_node] * hardware.nodes
    if isinstance(engine, VllmServerConfig) and not engine.urls:
        gpus = hardware.rollout_devices
        if hardware.device == "cuda" and (not gpus or gpus % engine.replicas):
            expected = f"expected a multiple of engine.replicas={engine.replicas}, since servers have GPUs of their own"
            raise ConfigError(f"hardware.rollout_devices: got {gpus}, {expected}")
        reserved += [server_resources(hardware, engine.replicas)] * engine.replicas
    total = _together([node["Resources"] for node in nodes])
    if not _holds(total, _together(reserved)):
        both = f"training and vLLM servers take {_text(_together(reserved))} together"
        raise ConfigError(f"hardware.rollout_devices, engine.replicas: {both}; the Ray cluster has {available}")
    problems = _node_problems([node for node in nodes if _holds(node["Resources"], need)], config.run.dir)
    refuse(problems)


def _nodes() -> list[dict[str, Any]]:
    import ray

    return [node for node in ray.nodes() if node["Alive"]]


def _together(parts: list[dict[str, float]]) -> dict[str, float]:
    return {name: sum(part.get(name, 0.0) for part in parts) for name in ("CPU", "GPU")}


def _holds(has: dict[str, float], of_node: dict[str, float]) -> bool:
    return all(has.get(name, 0.0) >= count for name, count in of_node.items())


def _text(resources: dict[str, float]) -> str:
    return " and ".join(f"{resources.get(name, 0.0):g} {name}s" for name in ("CPU", "GPU"))


def _node_problems(nodes: list[dict[str, Any]], run_dir: str | None) -> list[str]:
    """Return a sentence for each node that could not run a process: each looks for a file beside the run's folder."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    # Inside, so that Ray sends it as it is: a node without mmrl can run it too.
    def look(path: str) -> tuple[str, bool]:
        import os
        import time

        try:
            from mmrl import __version__ as version
        except ImportError:
            version = "none"
        limit = time.monotonic() + 5  # a network's folder may show a new file late
        while not (visible := os.path.isfile(path)) and time.monotonic() < limit:
            time.sleep(0.25)
        return version, visible

    folder = Path(run_dir or "outputs").absolute()
    existing = next(parent for parent in (folder, *folder.parents) if parent.is_dir())
    token = existing / f".mmrl-{uuid4().hex}.tmp"
    problems: list[str] = []
    try:
        token.touch()
        answers = {}
        for node in nodes:
            on_it = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            name = f"node {node['NodeManagerAddress']} ({node['NodeID'][:8]})"
            answers[name] = ray.remote(look).options(num_cpus=0, scheduling_strategy=on_it).remote(str(token))
        for name, answer in answers.items():
            try:
                version, visible = ray.get(answer, timeout=LOOK_S)
            except ray.exceptions.RayError as error:
                problems.append(f"hardware.ray: {name} runs nothing: {' '.join(str(error).split())[:300]}")
                continue
            if version != __version__:
                problems.append(f"hardware.ray: {name} has mmrl {version}, expected {__version__}, as here")
            if not visible:
                expected = "expected a folder that all nodes share"
                problems.append(f"run.dir: {folder}: {name} does not see {existing}; {expected}")
    except OSError as error:
        problems.append(f"run.dir: cannot write to {existing}: {error.strerror or error}")
    finally:
        token.unlink(missing_ok=True)
    return problems
