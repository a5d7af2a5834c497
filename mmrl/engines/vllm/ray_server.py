"""vLLM servers on the nodes of a Ray cluster: an actor of a placement group starts each and watches it.

`RayServer` stands for a `ChildProcess` on another node, so that `server.VllmServerEngine` starts it, looks whether it
lives and starts it again as it does with those of its own machine. The servers belong to the process that pushes
weights to them: when that ends, however it ends, Ray ends the actors, and each takes its server along.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

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

    def start(self) -> tuple[str, str]:
        """Start the server; return its address, or why it did not start."""
        try:
            self._process.start()
        except EngineFailure as error:
            return "", str(error)
        return self._process.url, ""

    def wait(self) -> None:
        """Return when the server has ended."""
        while self._process.alive:
            time.sleep(0.1)

    def stop(self) -> None:
        """End the server."""
        self._process.stop()


class Bundles:
    """Placement group with the resources of each server on one node, spread over the nodes.

    Args:
        resources: of one server.
    """

    def __init__(self, resources: Mapping[str, float], count: int):
        from ray.util import placement_group

        join_cluster("auto")
        self.resources = dict(resources)
        self.group = placement_group([self.resources] * count, strategy="SPREAD")

    def actor(self, index: int, *arguments: object) -> Any:
        """Return a new actor in the place of server `index`."""
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        place = PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=index)
        # Not restarted by Ray: `engine.restarts` is the limit, and weights have to be pushed and checked again.
        options = {"num_cpus": self.resources["CPU"], "num_gpus": self.resources.get("GPU", 0)}
        kind = ray.remote(Supervisor).options(max_concurrency=3, scheduling_strategy=place, **options)
        return kind.remote(*arguments)

    def close(self) -> None:
        """Give the resources back."""
        from ray.util import remove_placement_group

        remove_placement_group(self.group)


class RayServer(ChildProcess):
    """Server process on a node of the cluster.

    Args:
        words: command line but for host and port.
        index: of its bundle.
        log: in a folder that the nodes share.
    """

    def __init__(self, words: Sequence[str], bundles: Bundles, index: int, *, log: Path, **settings: Any):
        super().__init__(lambda port: words, log=log, **settings)
        self._arguments = (words, {"log": log, **settings})
        self._bundles, self._index = bundles, index
        self._address = ""
        self._actor: Any = None
        self._ended: Any = None
        self._wait_s = self.timeout_s

    @property
    def url(self) -> str:
        """See `ChildProcess.url`."""
        return self._address

    @property
    def alive(self) -> bool:
        """See `ChildProcess.alive`."""
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
            self._address, failure = ray.get(self._actor.start.remote(), timeout=self.timeout_s + 2 * GRACE_S)
            self._ended = self._actor.wait.remote()
        except ray.exceptions.GetTimeoutError:
            failure = f"no node of the cluster has {self._bundles.resources} free"
        except ray.exceptions.RayError as error:
            failure = f"its actor ended: {' '.join(str(error).split())[:300]}"
        except BaseException:
            self.stop()
            raise
        if failure:
            self.stop()
            raise EngineFailure(failure)

    def _place(self) -> None:
        """Make the actor; once more where it was sent to a node that had ended."""
        import ray

        deadline, self._wait_s = time.monotonic() + self._wait_s, PLACE_S
        while True:
            self._actor = self._bundles.actor(self._index, *self._arguments)
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
