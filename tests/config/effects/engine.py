"""Effects of `engine.*`: how the embedded engine batches, how vLLM is started and asked."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, patch

from mmrl.config import ENGINE_SCHEMAS, ModelConfig
from mmrl.engines import EngineSetup
from mmrl.engines.embedded.hf_loop import HFLoop
from mmrl.engines.embedded.transformers_engine import TransformersEngine
from mmrl.engines.vllm.colocated import VllmColocatedEngine
from mmrl.engines.vllm.server import VllmServerEngine
from mmrl.errors import EngineFailure, SyncFailure
from mmrl.models.load import load_tokenizer
from mmrl.system.http_client import HttpFailure
from tests.config.effects import Options, acts
from tests.helpers.engines import generate, model, request, tokenizer

TINY = ModelConfig(name="tiny", path="tiny")


def section(name: str, options: Options) -> Any:
    return ENGINE_SCHEMAS[name].model_validate({"name": name, **options})


# --- in process


def _embedded(options: Options) -> tuple[Any, Any]:
    network = model()
    return network, TransformersEngine(network, tokenizer(), section("transformers", options), EngineSetup())


def begins(name: str, options: Options, folder: Path) -> object:
    """Whether a request is answered while another program is live that has sent none."""
    _, engine = _embedded(options)

    async def ask() -> bool:
        engine.enter()
        engine.enter()
        asked = asyncio.create_task(engine.generate(request([5, 6, 7], max_tokens=2)))
        done, _ = await asyncio.wait({asked}, timeout=2.0)
        engine.leave()
        await asked
        engine.leave()
        return bool(done)

    try:
        return asyncio.run(ask())
    finally:
        engine.close()


def forwarded(name: str, options: Options, folder: Path) -> object:
    """Whether the model's own forward generates."""
    network, engine = _embedded(options)
    with patch.object(type(network), "forward", autospec=True, side_effect=type(network).forward) as forward:
        generate(engine, [request([5, 6, 7], max_tokens=8)])
    engine.close()
    # the native decoder compares itself with it once, after one token
    return forward.call_count > 4


def together(name: str, options: Options, folder: Path) -> object:
    """How many prompts are prefilled at once."""
    _, engine = _embedded({"loop": "hf", **options})
    sizes: list[int] = []
    prefill = HFLoop.prefill

    def counted(loop: Any, rows: Any) -> Any:
        sizes.append(len(rows))
        return prefill(loop, rows)

    with patch.object(HFLoop, "prefill", counted):
        generate(engine, [request([5] * 40, order, max_tokens=2) for order in range(4)])
    engine.close()
    return max(sizes)


# greedy first: the other one waits for as long as it is given
acts("engine.transformers", "schedule", begins, "greedy", "deterministic")
acts("engine.transformers", "loop", forwarded, "own", "hf")
acts("engine.transformers", "batch_tokens", together, 65536, 64)


# --- vLLM


def _setup(folder: Path, device: str) -> EngineSetup:
    return EngineSetup(max_context=64, weights=TINY, device=device, folder=folder, samplings=((1.0, 1.0, 0),))


class _Process:
    """Stands where a server is started; remembers how."""

    alive, log = True, "log"

    def __init__(self, command: Any, **options: Any):
        self.started = command(1234), options["env"], options["timeout_s"]

    def stop(self) -> None:
        pass

    def log_tail(self) -> str:
        return ""


@contextmanager
def _server(options: Options, folder: Path, device: str) -> Iterator[Any]:
    async def nothing(engine: Any) -> None:
        return None

    with (
        patch("mmrl.engines.vllm.base.vllm_problems", lambda *_: []),
        patch("mmrl.engines.vllm.server.ChildProcess", _Process),
        patch.object(VllmServerEngine, "_first_boot", nothing),
        patch.dict(os.environ),
    ):
        os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)
        engine = VllmServerEngine(None, load_tokenizer(TINY), section("vllm_server", options), _setup(folder, device))
        try:
            yield engine
        finally:
            engine.close()


@contextmanager
def _vllm_package(seen: list[list[str]]) -> Iterator[None]:
    """vLLM as far as a start in this process goes."""
    vllm = MagicMock()
    vllm.EngineArgs.add_cli_args.return_value.parse_args = lambda arguments: seen.append(list(arguments))
    vllm.LLMEngine.from_engine_args.return_value.model_config.max_model_len = 512
    within = ("distributed", "engine.arg_utils", "utils.argparse_utils", "v1.engine.llm_engine")
    with patch.dict(sys.modules, {"vllm": vllm} | {f"vllm.{name}": vllm for name in within}):
        yield


def started(name: str, options: Options, folder: Path) -> object:
    """With what vLLM is started: command line, environment, limit of time; where completions come from, and limits."""
    device = "cpu" if "kv_cache_gb" in options else "cuda"
    if name == "vllm_server":
        with _server(options, folder, device) as engine:
            servers = [(replica.process and replica.process.started, replica.api.url) for replica in engine.replicas]
            return servers, engine._api.url, engine._api.io.timeout_s, engine._api.io.slots._value
    seen: list[list[str]] = []
    with (
        _vllm_package(seen),
        patch("mmrl.engines.vllm.base.vllm_problems", lambda *_: []),
        patch.object(VllmColocatedEngine, "_check_served", lambda self: None, create=True),
        patch.dict(os.environ),
    ):
        os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)
        config = section("vllm_colocated", options)
        VllmColocatedEngine(None, load_tokenizer(TINY), config, _setup(folder, device)).close()
        return seen, os.environ.get("VLLM_CPU_KVCACHE_SPACE")


def restarted(name: str, options: Options, folder: Path) -> object:
    """How often a server that dies is started again."""
    with _server(options, folder, "cpu") as engine:
        for count in range(10):
            try:
                engine.replicas[0].spend_restart(HttpFailure("connection", "dead"), 0)
            except EngineFailure:
                return count
    return None


def pushed(name: str, options: Options, folder: Path) -> object:
    """Whether a push that takes a while goes through."""

    def slowly(engine: Any, version: int, state: object) -> None:
        engine._wait(asyncio.sleep(0.2))

    with (
        _server({"urls": ("http://host:1",), **options}, folder, "cpu") as engine,
        patch.object(VllmServerEngine, "_push", slowly),
    ):
        try:
            engine.set_version(1)
        except SyncFailure:
            return "too late"
    return "taken"


BOTH = "engine.vllm_server;engine.vllm_colocated"
acts(BOTH, "logprobs", started, "raw", "processed")
acts(BOTH, "gpu_memory", started, 0.4, 0.8)
acts(BOTH, "kv_cache_gb", started, 1, 3)
acts(BOTH, "args", started, (), ("--max-num-seqs=4",))
acts("engine.vllm_colocated", "sleep", started, True, False)
acts("engine.vllm_server", "urls", started, (), ("http://host:1",))
acts("engine.vllm_server", "replicas", started, 1, 2)
acts("engine.vllm_server", "router", started, None, "http://router:1", urls=("http://host:1", "http://host:2"))
acts("engine.vllm_server", "python", started, None, "other-python")
acts("engine.vllm_server", "start_timeout_s", started, 900.0, 5.0)
acts("engine.vllm_server", "timeout_s", started, 600.0, 5.0)
acts("engine.vllm_server", "concurrency", started, 128, 4)
acts("engine.vllm_server", "restarts", restarted, 2, 0)
acts("engine.vllm_server", "sync_timeout_s", pushed, 300.0, 0.05)
