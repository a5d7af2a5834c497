"""engine=vllm_server of several processes: each drives its share of the programs against the main one's servers."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from operator import methodcaller
from pathlib import Path
from typing import Any

import pytest

from mmrl.config.engines import VllmServerConfig
from mmrl.engines import Completion, EngineSetup, Request, Sampling, build_engine
from mmrl.engines.vllm.base import PROBE, probe_logprobs
from mmrl.engines.vllm.client import SharedServersEngine
from mmrl.engines.vllm.server import VllmServerEngine
from mmrl.errors import EngineFailure, SyncFailure
from mmrl.models.chat import render_prompt
from mmrl.models.load import load_model, load_tokenizer
from mmrl.store.journal import read_step
from mmrl.store.rundir import RunDir
from mmrl.system.conf import later_wins
from mmrl.system.processes import Processes
from tests.engines.test_server import TINY, answering, asked, reply
from tests.helpers.fake_vllm import adapter_in, fake_vllm
from tests.helpers.servers import Scripted, Seen, serving


@dataclass
class Meeting:
    """Where the threads that stand for two processes meet."""

    values: dict[int, Any] = field(default_factory=dict)
    barrier: threading.Barrier = field(default_factory=lambda: threading.Barrier(2, timeout=60))


class Thread(Processes):
    """One of two processes, as a thread."""

    __slots__ = ("meeting",)
    meeting: Meeting

    @classmethod
    def pair(cls) -> tuple[Thread, Thread]:
        meeting, both = Meeting(), (cls(0, 2), cls(1, 2))
        for one in both:
            object.__setattr__(one, "meeting", meeting)
        return both

    def gather(self, value: Any) -> list[Any]:
        self.meeting.values[self.rank] = value
        self.meeting.barrier.wait()
        values = [self.meeting.values[rank] for rank in range(2)]
        self.meeting.barrier.wait()
        return values

    def barrier(self) -> None:
        self.meeting.barrier.wait()


def both(work: Callable[[Any], Any], *items: Any) -> list[Any]:
    with ThreadPoolExecutor(2) as threads:
        return [future.result() for future in [threads.submit(work, item) for item in items]]


def engines_in(folder: Path, full: bool = False, **settings: Any) -> list[Any]:
    """Engines of two processes, which serve an adapter, or full weights."""
    config = VllmServerConfig(name="vllm_server", **settings)

    adapters = {} if full else adapter_in(folder)

    def build(processes: Processes) -> Any:
        setup = EngineSetup(weights=TINY, folder=folder, folders=adapters, processes=processes)
        return build_engine(config, None, load_tokenizer(TINY), setup)

    return [build(process) for process in Thread.pair()]


async def ask(engine: Any, count: int = 1, version: int | None = None) -> list[Completion]:
    sampling = Sampling(max_tokens=4, temperature=1.0)
    request = Request(prompt_ids=(5, 6), sampling=sampling, session="q 1", version=version)
    return await asyncio.gather(*[engine.generate(request) for _ in range(count)])


def test_every_process_samples_from_the_servers_of_the_main_one(tmp_path: Path) -> None:
    with serving(answering(reply([2]))) as (url, server):
        main, other = engines_in(tmp_path, urls=(url,))
        assert isinstance(main, VllmServerEngine) and isinstance(other, SharedServersEngine)
        for version in range(3):
            both(methodcaller("set_version", version), main, other)
            made = [asyncio.run(ask(engine))[0] for engine in (main, other)]
            assert [one.policy_version for one in made] == [version, version]
        models = [body["model"][:2] for body in asked(server, "/v1/completions") if "prompt_logprobs" not in body]
        assert models == ["v0", "v0", "v1", "v1", "v2", "v2"]
        # A batch that is sampled ahead stays with its version, as long as that is served.
        for engine in (main, other):
            assert asyncio.run(ask(engine, version=1))[0].policy_version == 1
            assert asked(server, "/v1/completions")[-1]["model"].startswith("v1")
            with pytest.raises(EngineFailure, match="version 0 of adapter 'default' is not served"):
                asyncio.run(ask(engine, version=0))
        # The main one alone pushes.
        loads = [body["lora_name"][:2] for body in asked(server, "/v1/load_lora_adapter")]
        assert loads == ["v0", "v1", "v2"]
        main.close()
        other.close()


def test_a_push_that_fails_stops_all_processes_at_the_same_point(tmp_path: Path) -> None:
    """Or the others would wait for rollouts of weights that nobody serves."""

    def refuses(seen: Seen) -> Scripted:
        if seen.path == "/v1/load_lora_adapter" and seen.body:
            return Scripted("no memory for it", 400)
        return answering(reply([2]))(seen)

    with serving(refuses) as (url, _):
        engines = engines_in(tmp_path, urls=(url,))

        def push(engine: Any) -> str:
            with pytest.raises(SyncFailure) as caught:
                engine.set_version(0)
            return str(caught.value)

        first, second = both(push, *engines)
        for engine in engines:
            engine.close()
    assert first == second
    assert "policy version 0" in first and "no memory for it" in first


@pytest.mark.skipif(sys.platform != "linux", reason="needs process groups")
def test_a_server_that_ends_is_started_again_while_only_another_process_asks(tmp_path: Path) -> None:
    main, other = engines_in(tmp_path, python=fake_vllm(tmp_path))
    try:
        both(lambda engine: engine.set_version(0), main, other)
        (replica,) = main.replicas
        address = replica.process.url
        os.killpg(replica.process.pid, signal.SIGKILL)
        while replica.process.alive:
            time.sleep(0.01)
        assert [one.ids for one in asyncio.run(ask(other, 8))] == [(2,)] * 8
        assert main.restarts == 1 and replica.process.url == address
        # The next push finds it as it is.
        both(lambda engine: engine.set_version(1), main, other)
        assert {one.policy_version for one in asyncio.run(ask(other, 2))} == {1}
    finally:
        main.close()
        other.close()


def test_a_server_that_stays_away_fails_the_calls_of_every_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mmrl.engines.vllm.client.REQUEST_TRIES", 2)
    with serving(answering(reply([2]))) as (url, _):
        main, other = engines_in(tmp_path, urls=(url,), start_timeout_s=2)
        both(lambda engine: engine.set_version(0), main, other)
    with pytest.raises(EngineFailure, match="failed 2 times"):
        asyncio.run(ask(other))
    main.close()
    other.close()


def test_full_weights_of_a_given_server_that_ended_are_not_taken_for_the_policys(tmp_path: Path) -> None:
    """The main process gives them to it again, and cannot tell the others when it has."""
    with serving(answering(reply([2]))) as (url, _):
        main, other = engines_in(tmp_path, full=True, urls=(url,))
        both(lambda engine: engine.set_version(1), main, other)
        alive, other._api.url = other._api.url, "http://127.0.0.1:1"
        for address in ("http://127.0.0.1:1", alive):
            other._api.url = address
            with pytest.raises(EngineFailure, match="has ended; it gets its weights at the next push"):
                asyncio.run(ask(other))
        both(lambda engine: engine.set_version(2), main, other)
        assert asyncio.run(ask(other))[0].policy_version == 2
        main.close()
        other.close()


NOTES = """
import os
from mmrl.engines.vllm import client

generate = client.HttpEngine.generate

async def noted(self, request):
    with open(os.path.join({folder!r}, "asked-by-" + os.environ["RANK"]), "a") as file:
        print(request.session, file=file)
    return await generate(self, request)

client.HttpEngine.generate = noted
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs process groups")
def test_two_processes_train_from_one_server(tmp_path: Path) -> None:
    """With a rate of 0 the weights stay, so that the stand-in can answer the probe."""
    model, tokenizer = load_model(TINY, "cpu"), load_tokenizer(TINY)
    probe = probe_logprobs(model, render_prompt(tokenizer, [{"role": "user", "content": PROBE}]), None)
    (tmp_path / "notes.py").write_text(NOTES.format(folder=str(tmp_path)))
    words = [
        *("hardware=cpu2", "engine=vllm_server", f"engine.python={fake_vllm(tmp_path, 2048, probe)}", "model.lora={}"),
        *("task=hotpotqa", "algo=mhgpo_fof", "train.lr=0", "train.steps=2", "train.batch_size=4", "train.save_every=1"),
        *("train.staleness=1", "eval.items=3", f"run.dir={tmp_path / 'run'}", "plugins=[notes]"),
    ]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    command = [sys.executable, "-m", "mmrl", "train", *later_wins(words)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    run = RunDir.read(tmp_path / "run")
    for step in (1, 2):
        forest, _ = read_step(run, step)[:2]
        assert {rollout.error for rollout in forest.rollouts} <= {None, "parse"}
        assert len({call.example for call in forest.calls.values()}) == 4
    asked_by = [set((tmp_path / f"asked-by-{rank}").read_text().split()) for rank in range(2)]
    assert all(asked_by) and not asked_by[0] & asked_by[1]
