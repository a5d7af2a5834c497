"""Several scripted servers behind vllm-router: `python -m scripts.bench fleet [servers=1,2,4,8] [latency_ms=200]`.

A scripted server answers `AT_ONCE` completions at a time, each token after the latency, so that not this machine's
cores are measured. Programs of `CALLS` calls of a token, one after the other, are driven through `VllmServerEngine`:
throughput of N servers over one; the share of calls that meet the server of their example's first call; and, without
latency, the calls a second that one driver gets through, with and without the router.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from mmrl.config import ModelConfig
from mmrl.config.engines import VllmServerConfig
from mmrl.engines import EngineSetup, Request, Sampling
from mmrl.engines.vllm.server import VllmServerEngine
from mmrl.models.load import load_tokenizer
from mmrl.system.child_process import ChildProcess
from scripts.bench.common import Bar, Measured
from scripts.bench.scripted_server import AT_ONCE

TINY = ModelConfig(name="tiny", path="tiny")
CALLS, PROMPT = 4, 256
SPEEDUPS = {2: 1.9, 4: 3.7, 8: 7.0}
"""Servers -> least throughput over one server."""
OPTIONS = {"servers": "1,2,4,8", "latency_ms": "200", "rounds": "10"}


def _command(index: int, latency_s: float, port: int) -> list[str]:
    return [sys.executable, "-m", "scripts.bench.scripted_server", str(index), str(latency_s), str(port)]


@contextmanager
def fleet(servers: int, latency_s: float) -> Iterator[VllmServerEngine]:
    """An engine over scripted servers."""
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder, urls = Path(name), []
        for index in range(servers):
            child = ChildProcess(partial(_command, index, latency_s), log=folder / "log", timeout_s=60.0)
            stack.callback(child.stop)
            child.start()
            urls.append(child.url)
        (folder / "adapter_config.json").write_text('{"r": 8}')
        setup = EngineSetup(weights=TINY, folder=folder, folders={"default": str(folder)})
        config = VllmServerConfig(name="vllm_server", urls=tuple(urls), concurrency=1024)
        engine = VllmServerEngine(None, load_tokenizer(TINY), config, setup)
        stack.callback(engine.close)
        engine.set_version(0)
        yield engine


@dataclass(frozen=True, slots=True)
class TimedCall:
    """A call of one token."""

    example: str
    parent: int | None
    """Position of the call before it on its path."""


def chains(programs: int) -> list[TimedCall]:
    """Calls of programs: `CALLS` in a row."""
    return [
        TimedCall(str(number // CALLS), number - 1 if number % CALLS else None) for number in range(programs * CALLS)
    ]


async def drive(engine: VllmServerEngine, calls: Sequence[TimedCall]) -> tuple[float, float]:
    """Seconds of the calls, each after its parent; and the share that met the server of their example's first call."""
    prompt, ended = tuple(range(PROMPT)), [asyncio.Event() for _ in calls]
    servers: dict[str, list[int]] = defaultdict(list)

    async def one(number: int, call: TimedCall) -> None:
        if call.parent is not None:
            await ended[call.parent].wait()
        sampling = Sampling(max_tokens=1)
        completion = await engine.generate(Request(prompt_ids=prompt, sampling=sampling, session=call.example))
        servers[call.example].append(completion.ids[0])
        ended[number].set()

    started = time.perf_counter()
    await asyncio.gather(*(one(number, call) for number, call in enumerate(calls)))
    met = sum(server == several[0] for several in servers.values() for server in several)
    return time.perf_counter() - started, met / len(calls)


def driven(servers: int, latency_s: float, calls: Sequence[TimedCall]) -> tuple[float, float]:
    """See `drive`, after a few calls that open connections."""
    with fleet(servers, latency_s) as engine:
        asyncio.run(drive(engine, chains(AT_ONCE)))
        return asyncio.run(drive(engine, calls))


def measure(args: dict[str, str]) -> Measured:
    """Measure throughput and the driver's ceiling."""
    latency_s, rounds = float(args["latency_ms"]) / 1000, int(args["rounds"])
    rates: dict[int, float] = {}
    bars = []
    for count in map(int, args["servers"].split(",")):
        # As many programs as keep every server full.
        calls = chains(rounds * AT_ONCE * count)
        seconds, met = driven(count, latency_s, calls)
        rates[count] = len(calls) / seconds
        if count > 1:
            bars.append(Bar(f"throughput of {count} servers over one", rates[count] / rates[1], SPEEDUPS[count]))
            bars.append(Bar(f"calls that meet their example's server, of {count}", 100 * met, 90.0, unit="%"))
    for count, how in ((1, "without a router"), (2, "through the router")):
        calls = chains(50 * rounds)
        bars.append(Bar(f"calls a second of one driver, {how}", len(calls) / driven(count, 0.0, calls)[0], unit=""))
    return bars, {"calls_per_s": rates, "latency_ms": args["latency_ms"], "at_once": AT_ONCE}
