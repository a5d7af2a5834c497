"""Effects of `task.retriever.*`: what is built, what is searched, and what is sent to servers."""

from __future__ import annotations

import asyncio
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock, patch

import httpx

from mmrl.config import RETRIEVER_SCHEMAS, RetrieverConfig
from mmrl.errors import RetrievalFailure
from mmrl.retrieval import remote
from mmrl.retrieval.base import Document
from mmrl.retrieval.index_folder import spec_of
from mmrl.retrieval.select import open_retriever
from tests.config.effects import Body, Busy, Options, acts
from tests.config.effects.task import played, searched
from tests.helpers.programs import DOCUMENTS

LOCAL = "retriever.bm25;retriever.dense"
SETTINGS: dict[str, dict[str, object]] = {
    "bm25": {},
    "dense": {"model": "m", "encoder": "own", "normalise": None, "query_prompt": None, "passage_prompt": None},
}
CORPUS = [Document(id=str(n), title=d["title"], text=d["text"]) for n, d in enumerate(DOCUMENTS)]


def section(name: str, options: Options) -> RetrieverConfig:
    needed = {"url": "http://host:1"} if name == "remote" else {}
    return RETRIEVER_SCHEMAS[name].model_validate({"name": name, **needed, **options})


def described(name: str, options: Options, folder: Path) -> object:
    """What an index is built of."""
    return spec_of(section(name, options))


def scored(name: str, options: Options, folder: Path) -> object:
    """Scores of a search."""
    found = open_retriever(section(name, options), CORPUS).search(["rivers of Tagus"], [3])
    return [(document.id, document.score) for document in found[0]]


def opened(name: str, options: Options, folder: Path) -> object:
    """The folder that is opened or cached in, and what its encoder and search are made with."""
    info = SimpleNamespace(kind=name, settings=SETTINGS[name])
    with (
        patch("mmrl.retrieval.select.cached_index", return_value=Path("cached")) as cached,
        patch("mmrl.retrieval.select.read_info", lambda path: info),
        patch("mmrl.retrieval.select.PassageStore", lambda path: path),
        patch("mmrl.retrieval.index_folder.bm25.Bm25Retriever") as words,
        patch("mmrl.retrieval.select.Bm25Retriever") as over_corpus,
        patch("mmrl.retrieval.index_folder.dense.Encoder") as one,
        patch("mmrl.retrieval.index_folder.dense.DenseRetriever") as dense,
    ):
        open_retriever(section(name, options), CORPUS)
        made = [words, over_corpus, one, dense]
        calls = [call for kind in made for call in kind.call_args_list]
        shown = [[str(argument) for argument in call.args if not hasattr(argument, "mock_calls")] for call in calls]
        return shown, [call.kwargs for call in calls], [str(call.args[-1]) for call in cached.call_args_list]


@dataclass
class _Server(Busy):
    """Stands where httpx sends to a retrieval server."""

    seen: list[tuple[str, str, str | None]] = field(default_factory=list)

    async def send(self, request: httpx.Request) -> httpx.Response:
        self.seen.append((request.method, str(request.url), request.headers.get("authorization")))
        await self.wait()
        if self.key == "retries":
            return httpx.Response(500, stream=Body(b"broken"), request=request)
        if request.method == "GET":
            found = {"topk": [{"pid": 1, "text": "A | b", "score": 1.0}]}
            return httpx.Response(200, stream=Body(found), request=request)
        count = len(json.loads(request.content)["queries"])
        passage = {"document": {"id": "1", "contents": "A\nb"}, "score": 1.0}
        return httpx.Response(200, stream=Body({"result": [[passage]] * count}), request=request)


def sent(name: str, options: Options, folder: Path) -> object:
    """What four searches, two of them alike and two at once, send to a server."""
    key = next(iter(options))
    server = _Server(key)

    with (
        server.in_place(),
        patch.dict(os.environ, {"TOKEN_OF_A_TEST": "a-token-of-a-test-long-enough"}),
        patch.object(remote, "WAITS_S", (0.001, 0.002)),
    ):
        retriever = open_retriever(section(name, {"timeout_s": 5.0, "retries": 0, **options}), CORPUS)
        failures = []
        for query in ("one", "one"):
            try:
                retriever.search([query], [1])
            except RetrievalFailure as failure:
                failures.append(failure.cause)

        async def both() -> None:
            await asyncio.gather(*(retriever.search_async([q], [1]) for q in ("two", "three")), return_exceptions=True)

        asyncio.run(both())
        retriever.close()
    return type(retriever).__name__, server.seen, failures, server.most if key == "concurrency" else None


acts("retriever.bm25", "k1 b", scored, 0.9, 0.4)
acts("retriever.bm25", "stemmer", scored, "none", "porter")
acts("retriever.bm25", "stopwords", scored, "english", "none")
acts("retriever.dense", "model", described, None, "mine", encoder="e5")
acts("retriever.dense", "encoder", described, "contriever", "e5")
acts("retriever.dense", "normalise", described, True, False, model="mine")
acts("retriever.dense", "query_prompt passage_prompt", described, None, "ask: ")
acts("retriever.dense", "faiss", described, "flat", "hnsw")
acts("retriever.dense", "batch_size", opened, 32, 8)
acts("retriever.dense", "device", opened, "cpu", "cuda")
acts(LOCAL, "index", opened, None, "folder")
acts("retriever.dense", "cache_dir", opened, None, "MINE")
for key, one, other in (("timeout_s", 5.0, 0.05), ("retries", 0, 2), ("concurrency", 64, 1), ("cache_size", 10, 0)):
    acts("retriever.remote", key, sent, one, other)
acts("retriever.remote", "url", sent, "http://one:1", "http://other:1")
acts("retriever.remote", "token_env", sent, None, "TOKEN_OF_A_TEST")
acts("retriever.remote", "protocol", sent, "search_r1", "dspy")


def through_task(name: str, options: Options, folder: Path) -> object:
    """Passages of a task's search with this retriever: its budget, repetitions, and words of a passage in prompts."""
    key, value = next(iter(options.items()))
    observe = played if key == "snippet_words" else searched
    hits = [Document(id=str(n), title=f"T{n}", text="many words of a passage here") for n in range(6)]
    fake = MagicMock(over_http=False, counts={}, search=lambda queries, top_k: [hits[:k] for k in top_k])
    needed = {"retriever.url": "http://host:1", "corpus": None} if name == "remote" else {}
    more = {"retriever.top_k": 4} if key == "dedup" else {}
    with (
        patch("mmrl.tasks.search_tool.open_retriever", lambda config, documents: fake),
        patch("mmrl.tasks.open_qa.retriever_problems", lambda config: []),
    ):
        chosen = {"retriever.name": name, **needed, **more, f"retriever.{key}": value}
        return observe("hotpotqa", chosen, folder)


acts("retriever.*", "top_k", through_task, 4, 2)
acts("retriever.*", "dedup", through_task, False, True)
acts("retriever.*", "snippet_words", through_task, 100, 2)
