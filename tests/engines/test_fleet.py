"""engine=vllm_server with several servers: scripted ones behind a real vllm-router; no vLLM."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import pytest

from mmrl.engines import Completion, EngineSetup, Request, Sampling
from mmrl.engines.vllm.server import VllmServerEngine
from mmrl.errors import EngineFailure, SyncFailure
from mmrl.models.load import load_model
from tests.engines.test_server import TINY, engine_of, fake, probe_reply, reply
from tests.helpers.fake_vllm import fake_vllm
from tests.helpers.servers import Scripted, ScriptedServer, Seen, serving

pytest.importorskip("vllm_router", reason="needs vllm-router, whose wheels are for Linux on x86_64")


def started(tmp_path: Path, **settings: Any) -> VllmServerEngine:
    """An engine over two servers of its own."""
    return engine_of(tmp_path, replicas=2, python=fake_vllm(tmp_path), **settings)


def kill(engine: VllmServerEngine, index: int) -> None:
    victim = engine.replicas[index].process
    assert victim is not None and victim.pid is not None
    os.killpg(victim.pid, signal.SIGKILL)


async def ask(engine: VllmServerEngine, sessions: int, each: int = 1, name: str = "q") -> list[Completion]:
    sampling = Sampling(max_tokens=4, temperature=1.0)
    requests = [
        Request(prompt_ids=(5, 6), sampling=sampling, session=f"{name} {number}") for number in range(sessions)
    ] * each
    return await asyncio.gather(*[engine.generate(request) for request in requests])


def answering(seen: Seen) -> Scripted:
    return probe_reply(seen) if "prompt_logprobs" in seen.body else reply([2])


def sessions_of(server: ScriptedServer) -> dict[str, int]:
    counts: dict[str, int] = defaultdict(int)
    for seen in server.seen:
        headers = {name.lower(): value for name, value in seen.headers.items()}
        if seen.path == "/v1/completions" and "x-session-id" in headers:
            counts[headers["x-session-id"]] += 1
    return counts


def test_requests_of_a_session_meet_and_weights_reach_every_server(tmp_path: Path) -> None:
    with serving(fake(answering)) as (first, one), serving(fake(answering)) as (second, other):
        engine = engine_of(tmp_path, urls=(first, second))
        for version in range(3):
            engine.set_version(version)
        made = asyncio.run(ask(engine, sessions=30, each=4))
        engine.end_session("q 1")
        assert engine.metrics() == {"engine/restarts": 0.0, "engine/servers": 2.0}
        engine.close()
    assert [completion.ids for completion in made] == [(2,)] * 120
    by_server = [sessions_of(one), sessions_of(other)]
    assert not set(by_server[0]) & set(by_server[1])
    assert all(set(counts.values()) == {4} and len(counts) >= 10 for counts in by_server)
    for server in (one, other):
        changes = [(seen.path, seen.body["lora_name"][:2]) for seen in server.seen if seen.body and "lora" in seen.path]
        assert changes == [*(("/v1/load_lora_adapter", f"v{n}") for n in range(3)), ("/v1/unload_lora_adapter", "v0")]


def test_the_router_asks_no_proxy_for_the_servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        serving([Scripted("squid", 403)]) as (proxy, asked),
        serving(fake(answering)) as (first, _),
        serving(fake(answering)) as (second, _),
    ):
        for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, proxy.removesuffix("/v1"))
        for name in ("NO_PROXY", "no_proxy"):
            monkeypatch.delenv(name, raising=False)
        with closing(engine_of(tmp_path, urls=(first, second))) as engine:
            engine.set_version(0)
            assert len(asyncio.run(ask(engine, sessions=2))) == 2
    assert not asked.seen


def test_a_server_killed_under_way_costs_no_request_and_comes_back_with_the_newest_weights(tmp_path: Path) -> None:
    with closing(started(tmp_path)) as engine:
        engine.set_version(0)
        engine.set_version(1)
        victim = engine.replicas[0].process
        assert victim is not None and victim.pid is not None
        before = victim.url

        async def rounds() -> list[Completion]:
            made = await ask(engine, sessions=8)
            # It ends while requests are on their way, and before the next push, however slow the machine is.
            asyncio.get_running_loop().call_later(0.01, os.killpg, victim.pid, signal.SIGKILL)
            return made + [answer for _ in range(5) for answer in await ask(engine, sessions=8)]

        assert [made.ids for made in asyncio.run(rounds())] == [(2,)] * 48
        engine.set_version(2)
        # Sessions of before stay where they went on, which is the other server if this one was slow to come back.
        asyncio.run(ask(engine, sessions=8, name="new"))
        assert engine.metrics() == {"engine/restarts": 1.0, "engine/servers": 2.0}
        assert victim.url == before  # other processes may know it
        log = [json.loads(line) for line in (tmp_path / f"asked-{victim.pid}.jsonl").read_text().splitlines()]
    asked = [(path, name and name[:2]) for path, session, name in log if session or name]
    # Calls of older weights died with it, and what it does not have is not taken from it.
    assert asked[:1] == [("/v1/load_lora_adapter", "v1")] and ("/v1/unload_lora_adapter", "v0") not in asked
    assert ("/v1/load_lora_adapter", "v2") in asked and ("/v1/completions", None) in asked
    assert not [child for child in (replica.process for replica in engine.replicas) if child and child.alive]


def test_calls_wait_for_servers_that_all_ended_while_the_router_forgets_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(started(tmp_path, restarts=1)) as engine:
        engine.set_version(0)
        assert engine.router is not None
        remove = engine.router.remove

        async def slowly(url: str) -> None:
            await asyncio.sleep(1.0)
            await remove(url)

        monkeypatch.setattr(engine.router, "remove", slowly)
        kill(engine, 0)
        kill(engine, 1)

        async def asked() -> int:
            early = asyncio.create_task(ask(engine, sessions=4))
            await asyncio.sleep(0.7)  # meanwhile the first calls have failed, and both servers are out
            return len(await early) + len(await ask(engine, sessions=4, name="later"))

        assert asyncio.run(asked()) == 8


def test_a_server_that_ends_too_often_stays_out_and_the_others_go_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with closing(started(tmp_path, restarts=0)) as engine:
        engine.set_version(0)
        kill(engine, 1)
        assert len(asyncio.run(ask(engine, sessions=8))) == 8
        assert engine.metrics()["engine/servers"] == 1.0
        engine.set_version(1)
        assert engine.metrics() == {"engine/restarts": 0.0, "engine/servers": 1.0}
        assert "vLLM server 2 ended again after engine.restarts=0 starts" in caplog.text
        kill(engine, 0)
        with pytest.raises(EngineFailure, match=r"vLLM server 1 ended again after engine\.restarts=0 starts"):
            asyncio.run(ask(engine, sessions=8))
        with pytest.raises(SyncFailure, match=r"ended again after engine\.restarts=0 starts"):
            engine.set_version(2)


def test_a_server_that_ended_between_two_pushes_is_started_once(tmp_path: Path) -> None:
    with closing(started(tmp_path)) as engine:
        engine.set_version(0)
        kill(engine, 1)
        victim = engine.replicas[1].process
        while victim is not None and victim.alive:
            time.sleep(0.01)
        engine.set_version(1)
        assert engine.metrics() == {"engine/restarts": 1.0, "engine/servers": 2.0}


def test_servers_that_mmrl_starts_have_the_weights_of_version_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(started(tmp_path, setup=EngineSetup(weights=TINY))) as engine:
        saved: list[int] = []
        monkeypatch.setattr(engine, "_save", lambda version, state: saved.append(version) or {})
        engine.set_version(0)
        engine.set_version(1)
        assert saved == [1]


def test_a_server_of_others_that_goes_is_left_out_and_taken_back_with_the_newest_weights(tmp_path: Path) -> None:
    with serving(fake(answering)) as (first, _), serving(fake(answering)) as (second, _):
        engine = engine_of(tmp_path, urls=(first, second))
        engine.set_version(0)
        alive, engine.replicas[1].api.url = engine.replicas[1].api.url, "http://127.0.0.1:1"
        assert engine.router is not None
        engine._api.io.wait(engine.router.remove(alive))  # the router knows it by its right address
        engine.set_version(1)
        assert engine.metrics()["engine/servers"] == 1.0
        assert len(asyncio.run(ask(engine, sessions=8))) == 8
        engine.replicas[1].api.url = alive
        engine.set_version(2)
        assert engine.metrics()["engine/servers"] == 2.0
        engine.close()


@pytest.mark.parametrize(
    ("dtype", "off", "refused"),
    [("float32", 1, True), ("bfloat16", 1, False), ("bfloat16", 1000, True), ("trained in float32", 1, False)],
)
def test_each_server_is_probed_after_a_push(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, off: int, refused: bool
) -> None:
    """In half precision a single token may be off by 0.5, by rounding alone."""

    def stale(seen: Seen) -> Scripted:
        rows = [{str(t): {"logprob": -1.5 if n < off else -1.0}} for n, t in enumerate(seen.body["prompt"][1:])]
        return Scripted({"choices": [{"prompt_logprobs": [None, *rows]}]})

    monkeypatch.setattr("mmrl.engines.vllm.base.probe_logprobs", lambda model, ids, name: [-1.0] * (len(ids) - 1))
    with serving(fake(answering)) as (first, _), serving(fake(stale)) as (second, _):
        trained = dtype.startswith("trained")
        weights = TINY.model_copy(update={"dtype": "bfloat16" if trained else dtype})
        # Parameters that are trained are float32, whatever vLLM serves.
        model = load_model(TINY if trained else weights, "cpu")
        engine = engine_of(tmp_path, model, EngineSetup(weights=weights), urls=(first, second))
        said = r"vLLM server 2 does not serve the pushed weights: .* differ by 0\.5"
        with pytest.raises(SyncFailure, match=said) if refused else nullcontext():
            engine.set_version(1)
        engine.close()


def replying(path: str, answer: Scripted) -> Callable[[Seen], Scripted]:
    return lambda seen: answer if seen.path == path else fake(answering)(seen)


@pytest.mark.parametrize(
    ("path", "answer", "words"),
    [
        ("/v1/models", Scripted({"data": [{"id": "x", "max_model_len": 64}]}), "expected servers of one model"),
        ("/v1/models", Scripted("nothing here", 404), r"engine\.urls: no vLLM server answers at http://127"),
        ("/v1/load_lora_adapter", Scripted("Not Found", 404), r"engine\.urls: .* loads no LoRA adapters"),
    ],
    ids=["other model", "no vLLM", "no adapters"],
)
def test_servers_that_do_not_fit_are_refused(tmp_path: Path, path: str, answer: Scripted, words: str) -> None:
    with (
        serving(fake(answering)) as (first, _),
        serving(replying(path, answer)) as (second, _),
        pytest.raises(EngineFailure, match=words),
    ):
        engine_of(tmp_path, urls=(first, second))


def test_a_named_router_carries_the_requests_of_one_server_too(tmp_path: Path) -> None:
    def router(seen: Seen) -> Scripted:
        return Scripted({"urls": []}) if seen.path == "/list_workers" else fake(answering)(seen)

    with serving(fake(answering)) as (url, server), serving(router) as (address, carrier):
        engine = engine_of(tmp_path, urls=(url,), router=address.removesuffix("/v1"))
        engine.set_version(0)
        assert len(asyncio.run(ask(engine, sessions=2))) == 2
        engine.close()
    assert not sessions_of(server) and sessions_of(carrier) == {"q 0": 1, "q 1": 1}
    assert [seen.path.partition("?")[0] for seen in carrier.seen if "worker?" in seen.path] == ["/add_worker"]


def test_a_router_without_sessions_is_refused(tmp_path: Path) -> None:
    def other_router(seen: Seen) -> Scripted:
        return Scripted({"urls": []}) if seen.path == "/list_workers" else Scripted("Not Found", 404)

    with (
        serving(fake(answering)) as (url, _),
        serving(other_router) as (router, _),
        pytest.raises(EngineFailure, match=r"engine\.router: no vllm-router with sessions at .*HTTP 404"),
    ):
        engine_of(tmp_path, urls=(url, url.replace("127.0.0.1", "localhost")), router=router.removesuffix("/v1"))
