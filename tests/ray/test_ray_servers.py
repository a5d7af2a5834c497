"""engine=vllm_server on a Ray cluster: scripted servers in actors, behind a real vllm-router; no vLLM."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest

from mmrl.engines import Completion, EngineSetup
from mmrl.engines.vllm.server import VllmServerEngine
from mmrl.errors import EngineFailure
from tests.engines.test_fleet import ask
from tests.engines.test_server import TINY, engine_of
from tests.helpers.fake_vllm import adapter_in, fake_vllm
from tests.helpers.watch import until

pytestmark = pytest.mark.ray


def started(tmp_path: Path, cpus: float = 1.0, **settings: Any) -> VllmServerEngine:
    setup = EngineSetup(weights=TINY, folders=adapter_in(tmp_path), bundle={"CPU": cpus})
    return engine_of(tmp_path, setup=setup, replicas=2, python=fake_vllm(tmp_path), **settings)


def servers_of(tmp_path: Path) -> dict[int, psutil.Process]:
    """Port -> process of the servers that run."""
    found = {}
    for process in psutil.process_iter(["cmdline"]):
        words = process.info["cmdline"] or []
        if str(tmp_path / "python") in words[:2] and "--port" in words:  # a zombie has no words
            found[int(words[words.index("--port") + 1])] = process
    return found


async def rounds(engine: VllmServerEngine) -> list[Completion]:
    return [made for _ in range(6) for made in await ask(engine, sessions=8)]


@pytest.mark.parametrize("victim", ["server", "actor", "node"])
def test_one_that_is_killed_costs_no_request_and_comes_back_with_the_newest_weights(
    connected: Any, tmp_path: Path, victim: str
) -> None:
    import ray

    engine = started(tmp_path)
    try:
        ports = list(servers_of(tmp_path))
        assert len(ports) == 2
        engine.set_version(0)
        engine.set_version(1)
        first = engine.replicas[0]
        assert first.process is not None
        before = first.api.url
        server = servers_of(tmp_path)[int(before.rpartition(":")[2])]
        actor = server.parent()
        assert actor is not None
        if victim == "node":
            raylets = {node.node_id: node for node in connected.worker_nodes}
            table = ray.util.placement_group_table(engine._group)
            node = raylets[table["bundles_to_node_id"][0]]
            kill = lambda: connected.remove_node(node, allow_graceful=False)  # noqa: E731
        else:
            kill = lambda: os.kill((server if victim == "server" else actor).pid, signal.SIGKILL)  # noqa: E731
        threading.Timer(0.25, kill).start()
        made: list[Completion] = []

        def noticed() -> bool:
            made.extend(asyncio.run(rounds(engine)))
            return engine.restarts > 0

        until(noticed)  # a server outlives its node by a while
        assert {completion.ids for completion in made} == {(2,)}
        engine.set_version(2)
        asyncio.run(ask(engine, sessions=24))  # those from before stay where they went
        assert engine.metrics() == {"engine/restarts": 1.0, "engine/servers": 2.0}
        again = servers_of(tmp_path)[int(first.api.url.rpartition(":")[2])]
        assert again.pid != server.pid
        log = tmp_path / f"asked-{again.pid}.jsonl"
        asked = [json.loads(line) for line in log.read_text().splitlines()]
    finally:
        engine.close()
    asked = [(path, name and name[:2]) for path, session, name in asked if session or name]
    assert asked[:1] == [("/v1/load_lora_adapter", "v1")] and ("/v1/load_lora_adapter", "v2") in asked
    assert ("/v1/completions", None) in asked
    until(lambda: not servers_of(tmp_path))


def test_a_cluster_without_room_stops_the_run(connected: Any, tmp_path: Path) -> None:
    with pytest.raises(EngineFailure, match=r"no node of the cluster has \{'CPU': 3\.0\} free"):
        started(tmp_path, cpus=3.0, start_timeout_s=3.0)
