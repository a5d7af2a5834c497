"""engine=vllm_server without vLLM: the process it manages, what it asks a server and how it takes the answers."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mmrl.config import ModelConfig
from mmrl.config.engines import VllmServerConfig
from mmrl.engines import Completion, EngineSetup, Request, Sampling
from mmrl.engines.vllm.base import save_weights
from mmrl.engines.vllm.command import exact, logprobs_mode, server_arguments, server_environment
from mmrl.engines.vllm.server import VllmServerEngine
from mmrl.errors import EngineFailure, SyncFailure
from mmrl.models.load import load_model, load_tokenizer, local_path
from mmrl.system.child_process import ChildProcess
from mmrl.system.http_client import HttpFailure
from tests.helpers.fake_vllm import adapter_in
from tests.helpers.servers import Scripted, ScriptedServer, Seen, serving
from tests.helpers.watch import running

TINY = ModelConfig(name="tiny", path="tiny")
HEALTHY = """
import http.server, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("child", child.pid, flush=True)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def log_message(self, *a): pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def process(tmp_path: Path, program: str, timeout_s: float = 30.0) -> ChildProcess:
    return ChildProcess(
        lambda port: [sys.executable, "-c", program, str(port)],
        env={"SAID": "hello"},
        log=tmp_path / "log",
        timeout_s=timeout_s,
        limit="engine.start_timeout_s",
    )


def test_a_server_and_its_children_end_together(tmp_path: Path) -> None:
    server = process(tmp_path, HEALTHY)
    server.start()
    child = int((tmp_path / "log").read_text().split()[-1])
    assert server.alive and running(child)
    server.stop()
    server.stop()
    deadline = time.monotonic() + 10
    while running(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not server.alive and not running(child)


def test_a_server_does_not_inherit_a_place_in_a_launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With torchrun's variables vLLM's workers would wait for a store that nobody keeps."""
    of_torchrun = (
        "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK ROLE_WORLD_SIZE ROLE_NAME MASTER_ADDR MASTER_PORT"
    )
    for name in [*of_torchrun.split(), "TORCHELASTIC_USE_AGENT_STORE", "ACCELERATE_USE_FSDP", "FSDP_VERSION", "MINE"]:
        monkeypatch.setenv(name, "given")
    server = process(tmp_path, "import os; print(sorted(n for n, v in os.environ.items() if v == 'given'))")
    with pytest.raises(EngineFailure, match=r"\['MINE'\]"):
        server.start()


@pytest.mark.parametrize(
    ("program", "timeout_s", "says"),
    [
        ("import os, sys; print(os.environ['SAID']); sys.exit('no')", 30.0, r"ended with code 1 .*hello\n *no"),
        ("import time; print('hm', flush=True); time.sleep(9)", 1.0, r"after engine\.start_timeout_s=1 s.*hm"),
    ],
    ids=["ends at once", "never answers"],
)
def test_a_server_that_does_not_start_is_quoted(program: str, timeout_s: float, says: str, tmp_path: Path) -> None:
    server = process(tmp_path, program, timeout_s)
    with pytest.raises(EngineFailure, match=f"(?s){says}"):
        server.start()
    assert not server.alive


def test_the_mode_of_log_probabilities() -> None:
    at_one, below, cut = (1.0, 0.9, 20), (0.6, 1.0, 0), (0.6, 0.9, 0)
    assert [logprobs_mode(VllmServerConfig(), [used]) for used in (at_one, below, cut)] == [
        *("raw", "processed", "processed"),
    ]
    assert logprobs_mode(VllmServerConfig(logprobs="raw"), [below]) == "raw"
    assert logprobs_mode(VllmServerConfig(urls=("http://h",)), [below]) == "raw"
    exact_ones = [("raw", 1.0, 0.9, 20), ("raw", 0.0, 1.0, 0), ("processed", 0.6, 1.0, 0)]
    others = [("raw", 0.6, 1.0, 0), ("processed", 1.0, 0.9, 0), ("processed", 0.6, 1.0, 20)]
    for mode, temperature, top_p, top_k in [*exact_ones, *others]:
        expected = (mode, temperature, top_p, top_k) in exact_ones
        sampling = Sampling(max_tokens=1, temperature=temperature, top_p=top_p, top_k=top_k)
        assert exact(mode, sampling) is expected


def test_how_the_server_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    setup = EngineSetup(weights=TINY, device="cpu", threads=2, max_context=512)
    made = server_arguments(VllmServerConfig(args=("--max-num-seqs=4",)), setup, "/weights", "raw", 2, 9)
    text = " ".join(made)
    for part in (
        "--model /weights",
        "--dtype float32",
        "--logprobs-mode raw_logprobs",
        "--max-model-len 512",
        "--enable-lora --max-lora-rank 16 --max-loras 4 --max-cpu-loras 6",
        "--generation-config vllm",
        "--tokenizer",
    ):
        assert part in text
    assert made[-1] == "--max-num-seqs=4" and "--enforce-eager" in made
    assert "lora" not in " ".join(server_arguments(VllmServerConfig(), setup, "/weights", "raw", 0, 0))
    assert "--gpu-memory-utilization 0.4" in " ".join(server_arguments(VllmServerConfig(), ON_GPU, "/w", "raw", 0, 0))
    assert server_environment(VllmServerConfig(kv_cache_gb=3), setup)["VLLM_CPU_KVCACHE_SPACE"] == "3"
    assert server_environment(VllmServerConfig(), setup)["OMP_NUM_THREADS"] == "2"
    assert server_environment(VllmServerConfig(), setup)["VLLM_API_KEY"] == ""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert "OMP_NUM_THREADS" not in server_environment(VllmServerConfig(), setup)  # the user's own stays


def reply(ids: list[int], logprobs: list[float] | None = None, finish: str = "stop") -> Scripted:
    values = [-0.5] * len(ids) if logprobs is None else logprobs
    return Scripted({"choices": [{"token_ids": ids, "logprobs": {"token_logprobs": values}, "finish_reason": finish}]})


def fake(complete: Callable[[Seen], Scripted]) -> Callable[[Seen], Scripted]:
    def answer(seen: Seen) -> Scripted:
        if seen.path == "/v1/models":
            return Scripted({"data": [{"id": "some-model", "max_model_len": 64}]})
        if seen.path == "/v1/completions":
            return complete(seen)
        return Scripted("Success")

    return answer


ON_GPU = EngineSetup(weights=TINY, device="cuda")
"""Full weights on a GPU."""


def engine_of(tmp_path: Path, model: Any = None, setup: EngineSetup | None = None, **settings: Any) -> VllmServerEngine:
    """An engine in a folder, which serves an adapter where the setup says nothing else."""
    setup = replace(setup or EngineSetup(weights=TINY, folders=adapter_in(tmp_path)), folder=tmp_path)
    return VllmServerEngine(model, load_tokenizer(TINY), VllmServerConfig(name="vllm_server", **settings), setup)


async def start_anew(engine: VllmServerEngine) -> None:
    """Take the server out and bring it back, as after its end."""
    (replica,) = engine.replicas
    engine._serving.remove(replica)
    await engine._bring_up_to_date(replica)


def asked(server: ScriptedServer, path: str) -> list[Any]:
    return [seen.body for seen in server.seen if seen.path == path and seen.body is not None]


def ask(engine: VllmServerEngine, **settings: Any) -> Completion:
    sampling = Sampling(**({"max_tokens": 16, "seed": (1 << 100) + 7} | settings))
    return asyncio.run(engine.generate(Request(prompt_ids=(5, 6, 7), sampling=sampling)))


def probe_reply(seen: Seen) -> Scripted:
    rows = [None, *[{str(token): {"logprob": -1.0}} for token in seen.body["prompt"][1:]]]
    return Scripted({"choices": [{"prompt_logprobs": rows}]})


def answering(*scripted: Scripted) -> Callable[[Seen], Scripted]:
    left = list(scripted)

    def complete(seen: Seen) -> Scripted:
        if "prompt_logprobs" in seen.body:
            return probe_reply(seen)
        return left.pop(0) if len(left) > 1 else left[0]

    return fake(complete)


@contextmanager
def served(tmp_path: Path, *scripted: Scripted, version: int = 0) -> Iterator[tuple[VllmServerEngine, ScriptedServer]]:
    """An engine of a scripted server, and that server; policy `version` has been pushed."""
    with serving(answering(*scripted)) as (url, server), closing(engine_of(tmp_path, urls=(url,))) as engine:
        engine.set_version(version)
        yield engine, server


def test_token_ids_and_every_setting_are_sent(tmp_path: Path) -> None:
    with served(tmp_path, reply([20, 21, 2, 30]), version=3) as (engine, server):
        made = ask(engine, temperature=1.0, top_p=0.9, top_k=5, stop=("##",))
        cut = ask(engine, temperature=0.7)
    assert (made.ids, made.logprobs, made.finish, made.policy_version) == ((20, 21, 2), (-0.5,) * 3, "eos", 3)
    assert cut.logprobs is None  # a given server reports raw values
    body = asked(server, "/v1/completions")[-2]
    assert body["prompt"] == [5, 6, 7] and body["seed"] == 7 and body["max_tokens"] == 16
    assert (body["temperature"], body["top_p"], body["top_k"], body["stop"]) == (1.0, 0.9, 5, ["##"])
    assert (body["min_p"], body["repetition_penalty"], body["return_token_ids"]) == (0.0, 1.0, True)
    assert body["model"].startswith("v3-default-")


def test_each_version_has_a_name_of_its_own_and_old_ones_go(tmp_path: Path) -> None:
    with served(tmp_path, reply([2])) as (engine, server):
        for version in (1, 1, 2):
            engine.set_version(version)
    names = [body["lora_name"] for body in asked(server, "/v1/load_lora_adapter")]
    assert len(set(names)) == 4
    assert [body["lora_name"] for body in asked(server, "/v1/unload_lora_adapter")] == names[:2]


def test_the_context_limit_is_the_servers(tmp_path: Path) -> None:
    with served(tmp_path, reply([20] * 61, finish="length")) as (engine, server):
        made = ask(engine, max_tokens=500)
    assert asked(server, "/v1/completions")[-1]["max_tokens"] == 61
    assert (made.finish, len(made.ids)) == ("length", 61)


def test_replies_are_read_within_bounds_and_quoted_in_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = [Scripted("no " * 1000, 400), Scripted({"choices": ["x" * 1000]}), reply([], []), reply([3] * 2000)]
    with served(tmp_path, *bad) as (engine, _):
        monkeypatch.setattr("mmrl.engines.vllm.api.LARGEST_REPLY", 5000)
        for words in ("HTTP 400: no no", "lacks token ids", "0 token ids", "a reply of [0-9]+ bytes, more than 5000"):
            with pytest.raises(EngineFailure, match=words) as caught:
                ask(engine)
            assert len(str(caught.value)) < 400


def test_a_given_server_is_asked_again_and_then_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mmrl.engines.vllm.server.REQUEST_TRIES", 2)
    with served(tmp_path, Scripted("busy", 503), reply([2]), Scripted("gone", 500)) as (engine, server):
        assert ask(engine).ids == (2,)
        with pytest.raises(EngineFailure, match=r"failed 2 times.*HTTP 500: gone"):
            ask(engine)
    assert len([body for body in asked(server, "/v1/completions") if "logprobs" in body]) == 4


@pytest.mark.parametrize("ids", [[20, 21], []])
def test_a_completion_that_the_server_cut_off_is_asked_for_again(ids: list[int], tmp_path: Path) -> None:
    """As vLLM answers when it pauses, sleeps or is told to end."""
    with served(tmp_path, reply(ids, finish="abort"), reply([20, 2])) as (engine, _):
        made = ask(engine)
    assert (made.ids, made.finish) == ((20, 2), "eos")


def test_a_push_that_is_refused_or_stuck(tmp_path: Path) -> None:
    def refuse(seen: Seen) -> Scripted:
        if seen.path == "/v1/load_lora_adapter" and seen.body is not None:
            return Scripted("rank too large", 400) if "v1-" in seen.body["lora_name"] else Scripted("", delay=3.0)
        return answering(reply([2]))(seen)

    with serving(refuse) as (url, _):
        engine = engine_of(tmp_path, urls=(url,), sync_timeout_s=0.5)
        with pytest.raises(SyncFailure, match=r"version 1 was not taken by the vLLM server: .*rank too large"):
            engine.set_version(1)
        with pytest.raises(SyncFailure, match=r"version 2 did not reach .* within engine\.sync_timeout_s=0\.5 s"):
            engine.set_version(2)
        assert engine.policy_version == -1
        engine.close()


@pytest.mark.parametrize("body", ["", {"success": True}], ids=["older versions", "newer"])
def test_weights_are_not_served_beside_prefixes_of_those_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: Any
) -> None:
    monkeypatch.setattr("mmrl.engines.vllm.api.RESET_WAIT_S", 0.01)
    monkeypatch.setattr(VllmServerEngine, "_save", lambda engine, version, state: {"": tmp_path / f"v{version}"})
    resets = [Scripted(body), *[Scripted({"success": False})] * 2, Scripted(body), Scripted({"success": False})]

    def answer(seen: Seen) -> Scripted:
        if seen.path == "/reset_prefix_cache":
            return resets.pop(0) if len(resets) > 1 else resets[0]
        return answering(reply([2]))(seen)

    with serving(answer) as (url, _), closing(engine_of(tmp_path, setup=ON_GPU, urls=(url,))) as engine:
        engine.set_version(1)
        engine.set_version(2)
        assert len(resets) == 1
        with pytest.raises(SyncFailure, match=r"version 3 .*the prefix cache was not emptied"):
            engine.set_version(3)


def test_nobody_at_the_address(tmp_path: Path) -> None:
    with serving([Scripted("")]) as (url, _):
        pass
    with pytest.raises(EngineFailure, match=r"engine\.urls: no vLLM server answers at http://127"):
        engine_of(tmp_path, urls=(url,))


def serving_root(root: Any) -> Callable[[Seen], Scripted]:
    """A server that was started with some weights."""
    card = {"id": "served", "root": root, "max_model_len": 64}
    return lambda seen: Scripted({"data": [card]}) if seen.path == "/v1/models" else answering(reply([2]))(seen)


@pytest.mark.parametrize("trained", ["all weights", "an adapter"])
def test_an_evaluation_at_a_server_of_another_model_is_refused(trained: str, tmp_path: Path) -> None:
    """Nothing is pushed there, so that its own model would be reported as the policy."""
    (policy := tmp_path / "checkpoint-5").mkdir()
    weights = ModelConfig(name="hf", path=str(policy))
    setup = EngineSetup(weights=weights, folders=adapter_in(tmp_path) if trained == "an adapter" else {})
    with serving(serving_root("Qwen/Qwen3-0.6B")) as (url, _):
        words = f"{url.removesuffix('/v1')} serves Qwen/Qwen3-0.6B, .*the policy is {policy}; start the server with"
        with pytest.raises(EngineFailure, match=rf"engine\.urls: {words}"):
            engine_of(tmp_path, setup=setup, urls=(url,))


@pytest.mark.parametrize("root", [str(Path(local_path("tiny")) / ".." / "tiny"), None], ids=["its folder", "not said"])
def test_an_evaluation_at_a_server_of_the_policy(root: Any, tmp_path: Path) -> None:
    with (
        serving(serving_root(root)) as (url, _),
        closing(engine_of(tmp_path, setup=EngineSetup(weights=TINY), urls=(url,))) as engine,
    ):
        engine.set_version(3)
        assert ask(engine).policy_version == 3


def test_a_dead_managed_server_is_started_once_for_all_who_wait(tmp_path: Path) -> None:
    with served(tmp_path, reply([2])) as (engine, server):
        (replica,) = engine.replicas
        replica.process = process(tmp_path, HEALTHY)
        replica.process.start()
        alive, starts, answers = replica.api.url, [], threading.Event()
        sampling = Sampling(max_tokens=4, temperature=1.0)
        replica.api.url = "http://127.0.0.1:1"
        os.killpg(replica.process.pid or 0, signal.SIGKILL)

        async def boot() -> None:
            starts.append(time.monotonic())
            replica.process = process(tmp_path, HEALTHY)
            await asyncio.to_thread(replica.process.start)
            # It answers, but has not been given its weights yet.
            replica.api.url = alive
            before = len(asked(server, "/v1/completions"))
            answers.set()
            await asyncio.sleep(0.3)
            assert len(asked(server, "/v1/completions")) == before

        replica.boot = boot

        async def many() -> list[Completion]:
            async def late() -> Completion:
                await asyncio.to_thread(answers.wait)
                return await engine.generate(Request(prompt_ids=(5, 6), sampling=sampling))

            early = [engine.generate(Request(prompt_ids=(5, 6), sampling=sampling)) for _ in range(5)]
            return await asyncio.gather(*early, late())

        assert [made.ids for made in asyncio.run(many())] == [(2,)] * 6
        assert (len(starts), engine.restarts) == (1, 1)


def test_a_server_that_is_started_again_has_the_full_weights_that_were_pushed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From its start on: other training processes ask at its address as soon as anybody answers there."""
    with serving(answering(reply([2]))) as (url, server):
        engine = engine_of(tmp_path, setup=ON_GPU, urls=(url,), args=("--max-num-seqs=4",))
        monkeypatch.setattr(engine, "_save", lambda version, state: {"": tmp_path / f"v{version}"})
        managed, loaded = engine._managed(0), []
        for version in (0, 1, 2):
            engine.set_version(version)
            command = managed.command(8000)
            loaded.append(command[command.index("--model") + 1])
            assert command[-4:] == ["--host", "127.0.0.1", "--port", "8000"], "no engine.args after the address"
        # One of others starts with the weights of the run's beginning; calls must not be sampled from those.
        engine._api.io.wait(start_anew(engine))
        assert [body["kwargs"]["weights_path"] for body in asked(server, "/collective_rpc")] == [
            str(tmp_path / name) for name in ("v0", "v1", "v2", "v2")
        ]
        (replica,) = engine.replicas
        replica.process = process(tmp_path, HEALTHY)
        replica.process.start()
        reloads = len(asked(server, "/collective_rpc"))
        monkeypatch.setattr(replica, "boot", lambda: asyncio.to_thread(replica.process.start))
        os.killpg(replica.process.pid or 0, signal.SIGKILL)
        assert engine._api.io.wait(engine._take_out_lost(HttpFailure("connection", "it has ended")))
        engine._api.io.wait(engine._gather())
        engine.close()
    assert loaded == [str(tmp_path / f"v{version}") for version in (0, 1, 2)] and engine.restarts == 1
    assert len(asked(server, "/collective_rpc")) == reloads, "what it was started with is what was pushed"


def test_full_weights_are_written_as_they_are_served(tmp_path: Path) -> None:
    """Trained weights are float32; tied ones are one tensor, in the files too."""
    model = load_model(TINY, "cpu")
    assert model.config.tie_word_embeddings and all(p.dtype == torch.float32 for p in model.parameters())
    save_weights(model, [], tmp_path / "w", None, "bfloat16")
    written = load_file(tmp_path / "w" / "model.safetensors")
    assert {name: tensor.shape for name, tensor in written.items()} == {n: p.shape for n, p in model.named_parameters()}
    for name, parameter in model.named_parameters():
        assert written[name].dtype == torch.bfloat16 and torch.equal(written[name], parameter.bfloat16())


def gone_for(engine: VllmServerEngine, seconds: float) -> None:
    """Let nobody listen at the only server's address for a while."""
    (replica,) = engine.replicas
    alive, replica.api.url = replica.api.url, "http://127.0.0.1:1"
    threading.Timer(seconds, setattr, (replica.api, "url", alive)).start()


@pytest.mark.parametrize("when", ["while it is asked", "before a push"])
def test_the_only_given_server_comes_back_with_the_newest_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """It has been started with the weights of the run's beginning."""
    monkeypatch.setattr("mmrl.engines.vllm.server.WATCH_S", 0.05)
    monkeypatch.setattr(VllmServerEngine, "_save", lambda engine, version, state: {"": tmp_path / f"v{version}"})
    with (
        serving(answering(reply([2]))) as (url, server),
        closing(engine_of(tmp_path, setup=ON_GPU, urls=(url,))) as engine,
    ):
        engine.set_version(1)
        before = len(server.seen)
        gone_for(engine, 0.3)
        if when == "before a push":
            engine.set_version(2)
        assert ask(engine).ids == (2,)
        pages = [seen.path for seen in server.seen[before:] if seen.path in ("/collective_rpc", "/v1/completions")]
        loaded = [Path(body["kwargs"]["weights_path"]).name for body in asked(server, "/collective_rpc")]
        assert engine.metrics() == {"engine/restarts": 1.0, "engine/servers": 1.0}
    again = ["v1"] if when == "while it is asked" else ["v1", "v2"]
    assert (loaded, pages) == (["v1", *again], [*(["/collective_rpc"] * len(again)), "/v1/completions"])


def test_the_only_given_server_that_stays_away_is_asked_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mmrl.engines.vllm.server.WATCH_S", 0.05)
    with (
        serving(answering(reply([2]))) as (url, _),
        closing(engine_of(tmp_path, setup=ON_GPU, urls=(url,), start_timeout_s=0.2)) as engine,
    ):
        alive, engine._api.url = engine._api.url, "http://127.0.0.1:1"
        with pytest.raises(EngineFailure, match=r"engine\.urls: nobody listens at http://127\.0\.0\.1:1"):
            ask(engine)
        with pytest.raises(SyncFailure, match="no vLLM server is left"):
            engine.set_version(2)
        # Back, but nobody has given it the policy's weights.
        engine._api.url = alive
        with pytest.raises(EngineFailure, match="no vLLM server is left until the next push"):
            ask(engine)
        engine.set_version(2)
        assert ask(engine).policy_version == 2


def test_a_server_that_could_not_be_reached_for_a_while_keeps_its_adapters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mmrl.engines.vllm.server.WATCH_S", 0.05)
    names: list[str] = []

    def answer(seen: Seen) -> Scripted:
        if seen.path == "/v1/load_lora_adapter" and seen.body is not None:
            if seen.body["lora_name"] in names:
                return Scripted("already loaded", 400)  # as vLLM says
            names.append(seen.body["lora_name"])
        if seen.path == "/v1/models":
            return Scripted({"data": [{"id": name, "max_model_len": 64} for name in ("base", *names)]})
        return answering(reply([2]))(seen)

    with serving(answer) as (url, _), closing(engine_of(tmp_path, urls=(url,))) as engine:
        engine.set_version(1)
        gone_for(engine, 0.2)
        assert ask(engine).ids == (2,)


def test_weights_pushed_after_a_resume_outlive_those_of_the_process_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = tmp_path / "engine" / "weights"
    for name in ("v000006-6", "v000007-7", "v000008-8.tmp"):
        (left / name).mkdir(parents=True)

    def save(model: Any, names: Any, folder: Path, *_: Any) -> dict[str, Path]:
        folder.mkdir(parents=True)
        return {"": folder}

    monkeypatch.setattr("mmrl.engines.vllm.base.save_weights", save)
    monkeypatch.setattr("mmrl.engines.vllm.base.PushingEngine._check_served", lambda engine: None)
    with serving(answering(reply([2]))) as (url, _):
        engine = engine_of(tmp_path, load_model(TINY, "cpu"), ON_GPU, urls=(url,))
        engine.set_version(7)
        engine.close()
    assert (left / "v000007-8").is_dir() and not (left / "v000006-6").exists()


def test_weights_that_cannot_be_written_are_a_failed_push(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(version: int, state: Any) -> Any:
        raise OSError(28, "No space left on device")

    with served(tmp_path, reply([2])) as (engine, _):
        monkeypatch.setattr(engine, "_save", full)
        with pytest.raises(SyncFailure, match=r"policy version 1 .*No space left on device"):
            engine.set_version(1)
