"""BM25 over a million passages, and its server: `python -m scripts.bench retrieval [passages=N] [queries=N]`.

Passages are drawn (words of a Zipf law, about 60 a passage) and written to a file; `mmrl index build` builds their
index in a separate process, whose peak memory is read when it has ended. Then each query is put to bm25s called
directly and to mmrl's retriever in turn, so that both meet the same machine; and rounds of queries go in turn to the
retriever in process and to a child server that 64 clients ask at once.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mmrl.retrieval.index_folder import open_index, read_info
from mmrl.retrieval.remote import RemoteRetriever
from mmrl.retrieval.store import PassageStore
from mmrl.system.child_process import ChildProcess
from scripts.bench.common import Bar, Measured, once

VOCABULARY, WORDS, TOP_K, CLIENTS = 200_000, 60, 10, 64
OPTIONS = {"passages": "1000000", "queries": "400", "rounds": "3"}
BARS: dict[str, dict[str, Any]] = {"latency ratio": {"bar": 1.1, "at_most": True}, "server ratio": {"bar": 0.8}}
"""Most that a query may cost against bm25s; least share of in-process throughput that the server must reach."""


def word(number: int) -> str:
    """A made-up word, the more frequent the shorter."""
    letters, text = "etaoinshrdlu", ""
    number += 12
    while number:
        number, letter = divmod(number, 12)
        text += letters[letter]
    return text + "x"  # never a stop word


def drawn(rng: np.random.Generator, sizes: Sequence[int]) -> Iterator[list[str]]:
    """Texts of so many words each, drawn by Zipf's law."""
    words = np.array([word(number) for number in range(VOCABULARY)])
    for size in sizes:
        yield list(words[np.minimum(rng.zipf(1.15, size) - 1, VOCABULARY - 1)])


def write_corpus(path: Path, passages: int) -> None:
    """Write passages as JSON lines."""
    with path.open("w", encoding="utf-8") as file:
        for number, text in enumerate(drawn(np.random.default_rng(1), [WORDS] * passages)):
            file.write(json.dumps({"title": f"{text[0]} {number}", "text": " ".join(text)}) + "\n")


def queries_of(count: int) -> list[str]:
    """Queries of three to six words."""
    rng = np.random.default_rng(2)
    return [" ".join(text) for text in drawn(rng, [int(size) for size in rng.integers(3, 7, count)])]


def resident() -> float:
    """Resident memory of this process in MB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def latencies(retriever: Any, queries: Sequence[str]) -> dict[str, list[float]]:
    """Seconds per query, of bm25s and of mmrl, in turn."""
    found: dict[str, list[float]] = {"bm25s": [], "mmrl": []}
    calls = {
        "bm25s": lambda query: retriever._index.retrieve(
            [retriever._words(query)], k=TOP_K, show_progress=False, n_threads=0
        ),
        "mmrl": lambda query: retriever.search([query], [TOP_K]),
    }
    for number, query in enumerate(queries):
        for name in sorted(calls, reverse=bool(number % 2)):
            found[name].append(once(partial(calls[name], query))[1])
    return found


async def through_server(child: RemoteRetriever, queries: Sequence[str]) -> float:
    """Queries per second when 64 clients ask one after the other each."""
    waiting = list(queries)

    async def client() -> None:
        while waiting:
            await child.search_async([waiting.pop()], [TOP_K])

    started = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(CLIENTS)))
    return len(queries) / (time.perf_counter() - started)


def throughputs(retriever: Any, child: RemoteRetriever, queries: Sequence[str], rounds: int) -> dict[str, list[float]]:
    """Queries per second of each round, in process and through the server, in turn."""
    found: dict[str, list[float]] = {"in process": [], "server": []}
    for _ in range(rounds):
        started = time.perf_counter()
        for query in queries:
            retriever.search([query], [TOP_K])
        found["in process"].append(len(queries) / (time.perf_counter() - started))
        found["server"].append(asyncio.run(through_server(child, queries)))
    return found


def measure(args: dict[str, str]) -> Measured:
    """Measure all numbers."""
    with tempfile.TemporaryDirectory() as place:
        result = measured(Path(place), *(int(args[name]) for name in ("passages", "queries", "rounds")))
    bars = [Bar(name, value, unit="", **BARS.get(name, {})) for name, value in result.items()]
    return bars, {"top_k": TOP_K, "clients": CLIENTS}


def measured(place: Path, passages: int, count: int, rounds: int) -> dict[str, float]:
    """Measure all numbers, by name."""
    corpus, folder = place / "corpus.jsonl", place / "index"
    write_corpus(corpus, passages)
    subprocess.run([sys.executable, "-m", "mmrl", "index", "build", f"corpus={corpus}", f"index={folder}"], check=True)
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1e3
    before = resident()
    info = read_info(folder)
    retriever = open_index(folder, info, PassageStore(folder))
    queries = queries_of(count)
    latencies(retriever, queries[:20])
    times = latencies(retriever, queries)
    command = [sys.executable, "-m", "mmrl", "serve-retriever", f"index={folder}"]
    log = folder.with_name("server.log")
    server = ChildProcess(lambda port: [*command, f"port={port}"], log=log, timeout_s=300.0)
    server.start()
    child = RemoteRetriever(server.url, cache_size=0)
    child.search(queries[:1], [TOP_K])
    rates = throughputs(retriever, child, queries, rounds)
    child.close()
    server.stop()
    percentiles = {name: {p: float(np.percentile(v, p)) for p in (50, 99)} for name, v in times.items()}
    ratios = [s / p for s, p in zip(rates["server"], rates["in process"], strict=True)]
    return {
        "passages": info.documents,
        "text MB": info.text_bytes / 1e6,
        "build s": info.build_seconds,
        "build peak MB": peak,
        "disk MB": sum(size for size, _ in info.files.values()) / 1e6,
        "resident MB": resident() - before,
        **{f"{name} p{percent} ms": 1e3 * at[percent] for name, at in percentiles.items() for percent in at},
        "latency ratio": percentiles["mmrl"][50] / percentiles["bm25s"][50],
        "latency ratio p99": percentiles["mmrl"][99] / percentiles["bm25s"][99],
        "in process queries/s": float(np.median(rates["in process"])),
        "server queries/s": float(np.median(rates["server"])),
        "server ratio": float(np.median(ratios)),
    }
