"""The retriever server: what it answers, and how it batches."""

import asyncio
import time

import pytest

from mmrl.retrieval.base import Document
from mmrl.retrieval.bm25 import Bm25Retriever
from mmrl.retrieval.remote import RemoteRetriever
from mmrl.retrieval.serving import Batches, make_app
from tests.helpers import Fake
from tests.helpers.servers import fetch_json, listening

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
        ({"queries": ["x"] * 16_385}, "at most"),
        ({"queries": ["x"], "return_scores": "yes"}, "return_scores"),
    ],
)
def test_bad_requests_are_told_why(good, body, message):
    status, reply = fetch_json(f"{good}/retrieve", **body)
    assert status == 422 and message in reply["message"]


def test_server_answers_what_it_serves(good):
    assert fetch_json(f"{good}/health") == (200, {"status": "ok", "documents": 3})
    assert fetch_json(f"{good}/retrieve", queries=[], topk=3) == (200, {"result": []})
    # Search-R1's batch of 512 questions, 5 rollouts each
    assert len(fetch_json(f"{good}/retrieve", queries=["city"] * 2560)[1]["result"]) == 2560
    assert fetch_json(f"{good}/retrieve", queries=["city"])[1]["result"][0][0]["contents"].startswith("Porto\n")


def test_queries_that_wait_are_searched_together_and_a_crash_hits_its_batch_alone():
    sizes = []

    class Slow(Fake):
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


def test_text_that_utf8_cannot_hold_is_served_as_json_can_and_read_without_it():
    document = Document(id="0", title="half \ud800", text="Lisbon \udfff")
    with listening(make_app(Bm25Retriever([document]), {})) as url:
        status, reply = fetch_json(f"{url}/retrieve", queries=["Lisbon \ud800"], topk=1)
        client = RemoteRetriever(url, retries=0)
        (found,) = client.search(["Lisbon \ud800"], [1])[0]
        client.close()
    assert status == 200 and reply["result"][0][0]["title"] == document.title
    assert (found.title, found.text) == ("half \ufffd", "Lisbon \ufffd")
