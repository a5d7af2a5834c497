"""vLLM servers on the nodes of a Ray cluster: an actor of a placement group starts each and watches it.

`RayServer` stands for a `ChildProcess` on another node, so that `server.VllmServerEngine` starts it, looks whether it
lives and starts it again as it does with those of its own machine. The servers belong to the process that pushes
weights to them: when that ends, however it ends, Ray ends the actors, and each takes its server along.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from typing_extensions import override

from mmrl.errors import EngineFailure
from mmrl.system.child_process import GRACE_S, ChildProcess
from mmrl.system.ray_cluster import join_cluster

PLACE_S = 60.0
"""Longest wait for room on the cluster for a server that is started again: pushes wait for it."""


class Supervisor:
    """Actor around a server's process on its node.

    Args:
        words: command line but for host and port.
        settings: those of `ChildProcess`.
    """

    def __init__(self, words: Sequence[str], settings: Mapping[str, Any]):
        from ray.util import get_node_ip_address

        host = get_node_ip_address()
        # The address comes last, so that no other argument can change it.
        self._process = ChildProcess(lambda port: [*words, "--host", host, "--port", str(port)], host=host, **settings)

    def placed(self) -> None:
        """Return once the actor runs."""

    def start(self) -> tuple[str, int, str]:
        """Start the server; return host, port and "", or why it did not start."""
        try:
            self._process.start()
        except EngineFailure as error:
            return "", 0, str(error)
        return self._process.host, self._process.port, ""

    def wait(self) -> None:
        """Return when the server has ended."""
        while self._process.alive:
            time.sleep(0.1)

    def stop(self) -> None:
        """End the server."""
        self._process.stop()


def place_servers(resources: Mapping[str, float], count: int) -> Any:
    """Return a placement group with the resources of each server on one node, spread over the nodes.

    It is there as long as this process is part of the cluster.

    Args:
        resources: of one server.
    """
    from ray.util import placement_group

    join_cluster("auto")
    return placement_group([dict(resources)] * count, strategy="SPREAD")


class RayServer(ChildProcess):
    """Server process on a node of the cluster.

    Args:
        words: returns the command line but for host and port.
        group: of `place_servers`.
        index: of its bundle.
        log: in a folder that the nodes share.
    """

    def __init__(self, words: Callable[[], Sequence[str]], group: Any, index: int, *, log: Path, **settings: Any):
        super().__init__(lambda port: words(), log=log, **settings)
        self._words, self._settings = words, {"log": log, **settings}
        self._group, self._index = group, index
        self._actor: Any = None
        self._ended: Any = None
        self._wait_s = self.timeout_s

    @property
    @override
    def alive(self) -> bool:
        import ray

        return self._ended is not None and not ray.wait([self._ended], timeout=0)[0]

    def start(self) -> None:
        """Start it on a node with room for it, in a new actor, and wait until it answers.

        Raises:
            EngineFailure: no node has room, or the server ended or did not answer in time.
        """
        import ray

        self.stop()
        try:
            self._place()
            started = self._actor.start.remote()
            self.host, self.port, failure = ray.get(started, timeout=self.timeout_s + 2 * GRACE_S)
            self._ended = self._actor.wait.remote()
        except ray.exceptions.GetTimeoutError:
            failure = f"no node of the cluster has {self._group.bundle_specs[self._index]} free"
        except ray.exceptions.RayError as error:
            failure = f"its actor ended: {' '.join(str(error).split())[:300]}"
        if failure:
            self.stop()
            raise EngineFailure(failure)

    def _place(self) -> None:
        """Make the actor; once more where it was sent to a node that had ended."""
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        deadline, self._wait_s = time.monotonic() + self._wait_s, PLACE_S
        place = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=self._index)
        resources = self._group.bundle_specs[self._index]
        # Not restarted by Ray: `engine.restarts` is the limit, and weights have to be pushed and checked again.
        kind = ray.remote(Supervisor).options(
            num_cpus=resources["CPU"], num_gpus=resources.get("GPU", 0), max_concurrency=3, scheduling_strategy=place
        )
        while True:
            self._actor = kind.remote(self._words(), self._settings)
            try:
                ray.get(self._actor.placed.remote(), timeout=max(0.0, deadline - time.monotonic()))
                return
            except ray.exceptions.RayActorError:
                if time.monotonic() > deadline:
                    raise

    def stop(self) -> None:
        """End the server and its actor; nothing happens when they have ended already."""
        import ray

        actor, self._actor, self._ended = self._actor, None, None
        if actor is not None:
            with suppress(ray.exceptions.RayError):
                ray.get(actor.stop.remote(), timeout=2 * GRACE_S)
            ray.kill(actor)
