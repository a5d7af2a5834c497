"""The retriever server: what it answers and counts, how it batches, and its life as a child process."""

import asyncio
import os
import signal
import subprocess
import sys
import time

import pytest

from mmrl.errors import RetrievalFailure
from mmrl.records import Example
from mmrl.retrieval.base import Document
from mmrl.retrieval.bm25 import Bm25Retriever
from mmrl.retrieval.index_folder import IndexSpec, build_index
from mmrl.retrieval.remote import RemoteRetriever
from mmrl.retrieval.serving import Batches, ChildRetriever, make_app
from mmrl.rollout.plans import independent
from mmrl.rollout.sample import sample
from tests.helpers.programs import Searcher, environment, search_agent
from tests.helpers.servers import DOCUMENTS, fetch_json, listening

BM25 = IndexSpec(kind="bm25", settings={"k1": 0.9, "b": 0.4})


pytestmark = pytest.mark.usefixtures("quick_retries")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"topk": 2}, "queries"),
        ({"queries": "river"}, "queries"),
        ({"queries": [1]}, "queries"),
        ({"queries": ["x"], "topk": 0}, "topk"),
        ({"queries": ["x"], "topk": 10**6}, "topk"),
        ({"queries": ["x"], "topk": "many"}, "topk"),
        ({"queries": ["x"] * 2000}, "at most"),
        ({"queries": ["x"], "return_scores": "yes"}, "return_scores"),
    ],
)
def test_bad_requests_are_told_why(good, body, message):
    status, reply = fetch_json(f"{good}/retrieve", **body)
    assert status == 422 and message in reply["message"]


def test_server_answers_what_it_serves(good):
    assert fetch_json(f"{good}/health") == (200, {"status": "ok", "documents": 3})
    assert fetch_json(f"{good}/retrieve", queries=[], topk=3) == (200, {"result": []})
    assert fetch_json(f"{good}/retrieve", queries=["city"])[1]["result"][0][0]["contents"].startswith("Porto\n")
    assert fetch_json(f"{good}/?k=2")[0] == 422


def test_queries_that_wait_are_searched_together_and_a_crash_hits_its_batch_alone():
    sizes = []

    class Slow:
        def search(self, queries, top_k):
            sizes.append(len(queries))
            time.sleep(0.05)
            if "bad" in queries:
                raise RuntimeError("index on fire")
            return [[Document(id=query, title="", text="")] for query in queries]

    async def load():
        batches = Batches(Slow(), max_batch=8)
        first = asyncio.ensure_future(batches.search(["first"], 1))
        await asyncio.sleep(0.01)
        rest = [asyncio.ensure_future(batches.search([f"q{n}"], 1)) for n in range(10)]
        await asyncio.gather(first, *rest)
        assert [(await one)[0][0].id for one in rest] == [f"q{n}" for n in range(10)]
        with pytest.raises(RuntimeError):
            await batches.search(["bad"], 1)
        return await batches.search(["fine"], 1)

    assert asyncio.run(load())[0][0].id == "fine"
    assert sizes == [1, 8, 2, 1, 1]


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    folder = tmp_path_factory.mktemp("index") / "three"
    build_index(folder, BM25, lambda: DOCUMENTS)
    return folder


def gone(pid, seconds=40):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
            with open(f"/proc/{pid}/stat") as stat:
                if stat.read().rpartition(")")[2].split()[0] == "Z":
                    return True
        except (ProcessLookupError, FileNotFoundError):
            return True
        time.sleep(0.05)
    return False


def test_a_child_is_started_checked_and_stopped(index):
    child = ChildRetriever(index)
    assert child.search(["river Tagus"], [2]) == Bm25Retriever(DOCUMENTS).search(["river Tagus"], [2])
    assert child.counts["requests"] == 1
    child.close()
    assert gone(child.pid)


def test_a_child_that_dies_is_a_failure_that_says_so(index, tmp_path):
    child = ChildRetriever(index)
    child.client()
    os.kill(child.pid, signal.SIGKILL)
    child._server._process.wait()
    with pytest.raises(RetrievalFailure, match="ended: exit code -9"):
        child.search(["river"], [1])
    child.close()
    broken = ChildRetriever(tmp_path / "nothing")
    with pytest.raises(RetrievalFailure, match=r"did not start: exit code 2.*no index\.json"):
        broken.search(["river"], [1])
    broken.close()


@pytest.mark.parametrize("ending", ["raise RuntimeError('boom')", "os.kill(os.getpid(), 9)"])
def test_a_child_goes_with_its_parent_however_it_ends(index, ending):
    code = (
        "import os, sys\nfrom pathlib import Path\nfrom mmrl.retrieval.serving import ChildRetriever\n"
        f"child = ChildRetriever(Path({str(index)!r}))\nchild.search(['river'], [1])\n"
        f"print(child.pid, flush=True)\n{ending}\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=180)
    assert ended.returncode != 0
    assert gone(int(ended.stdout))


def test_a_task_with_a_child_server_runs_and_stops_it(index):
    task = search_agent(process="child", index=str(index))
    assert task.search_tool.corpora["index"][0].title == "Lisbon"
    example = Example(id="e", inputs={"question": "q1?", "corpus": "index"}, metadata={"answers": ["Tagus"]})
    env = environment(task, Searcher())
    env.settings = env.settings.__class__(
        temperature=1.0, top_p=1.0, top_k=0, parse_retries=0, max_tokens=task.config.max_tokens
    )
    forest = asyncio.run(sample(env, [(example, independent(3))], "outcome"))
    assert all(rollout.metrics["retrieval"] == 1.0 for rollout in forest.rollouts)
    pid = task.search_tool.retrievers["index"].pid
    task.close()
    assert gone(pid)


def test_text_that_utf8_cannot_hold_is_served_as_json_can_and_read_without_it():
    document = Document(id="0", title="half \ud800", text="Lisbon \udfff")
    with listening(make_app(Bm25Retriever([document]), {})) as url:
        status, reply = fetch_json(f"{url}/retrieve", queries=["Lisbon \ud800"], topk=1)
        client = RemoteRetriever(url, retries=0)
        (found,) = client.search(["Lisbon \ud800"], [1])[0]
        client.close()
    assert status == 200 and reply["result"][0][0]["title"] == document.title
    assert (found.title, found.text) == ("half \ufffd", "Lisbon \ufffd")
