import asyncio
import json
import threading
import time
from collections import Counter
from contextlib import closing, contextmanager
from dataclasses import replace
from urllib.parse import parse_qsl, urlsplit

import pytest

from mmrl.errors import ConfigError, RetrievalFailure
from mmrl.records import Example
from mmrl.retrieval.base import Document
from mmrl.retrieval.bm25 import Bm25Retriever
from mmrl.retrieval.protocols import read_dspy_reply, read_search_r1_reply
from mmrl.retrieval.remote import RemoteRetriever
from mmrl.system.http_client import Breaker
from tests.helpers.programs import Searcher, environment, forest_of, search_agent
from tests.helpers.servers import DOCUMENTS, Faulty, Scripted, good_app, listening, serving

QUERIES = ["river Tagus", "city", "capital of Portugal", "river"]


pytestmark = pytest.mark.usefixtures("quick_retries")


@contextmanager
def faulty(plan, **options):
    """A client of a server whose searches meet the faults of `plan`."""
    with listening(Faulty(good_app(), plan)) as url, closing(RemoteRetriever(url, **options)) as client:
        yield client


def colbert(seen):
    """A server of DSPy's protocol."""
    sent = dict(parse_qsl(urlsplit(seen.path).query))
    (found,) = Bm25Retriever(DOCUMENTS).search([sent["query"]], [int(sent["k"])])
    return Scripted({"topk": [{"text": f"{d.title} | {d.text}", "pid": d.id, "score": d.score} for d in found]})


@pytest.mark.parametrize("path", ["", "/retrieve", "dspy"])
def test_both_protocols_give_what_the_retriever_gives(good, path):
    expected = Bm25Retriever(DOCUMENTS).search(QUERIES, [3, 1, 2, 2])
    with serving(colbert) as (url, _):
        client = RemoteRetriever(url, protocol="dspy") if path == "dspy" else RemoteRetriever(good + path)
        assert client.search(QUERIES, [3, 1, 2, 2]) == expected
        assert asyncio.run(client.search_async(QUERIES, [3, 1, 2, 2])) == expected
        client.close()
        assert client.search(["city"], [1]) == Bm25Retriever(DOCUMENTS).search(["city"], [1])
        client.close()


def test_replies_in_the_forms_of_other_servers_are_read():
    wiki18 = {"result": [[{"document": {"id": "7", "contents": '"Ada"\nof\nPorto'}, "score": 2}]]}
    assert read_search_r1_reply(wiki18, 1) == [[Document(id="7", title="Ada", text="of\nPorto", score=2.0)]]
    bare = read_search_r1_reply({"result": [[{"contents": "Ada\nof Porto"}], []]}, 2)
    assert [[(d.title, d.text, d.score) for d in result] for result in bare] == [[("Ada", "of Porto", 0.0)], []]
    plain = read_search_r1_reply({"result": [[{"contents": "Ada of Porto"}]]}, 1)
    assert [(d.title, d.text) for d in plain[0]] == [("", "Ada of Porto")]
    colbert = read_dspy_reply({"topk": [{"text": "Ada | of | Porto", "pid": 3, "rank": 1, "score": 9.5, "prob": 0.4}]})
    assert colbert == [Document(id="3", title="Ada", text="of | Porto", score=9.5)]
    with pytest.raises(ValueError, match="the server says: no index"):
        read_dspy_reply({"error": True, "message": "no index", "topk": []})
    same = [read_search_r1_reply({"result": [[{"contents": "x\ny"}]]}, 1)[0][0].id for _ in range(2)]
    assert same[0] == same[1] != read_search_r1_reply({"result": [[{"contents": "x\nz"}]]}, 1)[0][0].id


CAUSES = {
    "hang": "timeout", "500": "status", "429": "status", "404": "status", "302": "status", "drop": "status",
    "garbage": "garbage", "empty": "garbage", "html": "garbage", "list": "garbage", "nan": "garbage",
    "less": "garbage", "long": "garbage",
}  # fmt: skip


@pytest.mark.parametrize(("fault", "cause"), CAUSES.items())
def test_each_fault_is_retried_then_a_typed_failure_never_an_empty_result(fault, cause):
    with (
        faulty(lambda n: fault, timeout_s=0.2 if fault == "hang" else 20, retries=2) as client,
        pytest.raises(RetrievalFailure) as failure,
    ):
        client.search(["river"], [2])
    once = fault in ("404", "302")  # asking again cannot help
    assert failure.value.cause == cause and failure.value.kind == "tool" and not failure.value.model_caused
    assert client.url in str(failure.value)
    assert client.counts["requests"] == (1 if once else 3)
    assert client.counts["failures"] == client.counts[f"failures_{cause}"] == 1


HUGE = json.dumps({"contents": "a", "text": "a"})[:-1] + ', "score": 1' + "0" * 400 + "}"
"""A passage whose score is more than a float holds."""
NO_PASSAGES = {
    "text": '"x"',
    "nulls": '{"topk": null, "result": null}',
    "huge score": f'{{"topk": [{HUGE}], "result": [[{HUGE[:-1]}, "document": {HUGE}}}]]}}',
}


@pytest.mark.parametrize("protocol", ["search_r1", "dspy"])
@pytest.mark.parametrize("sent", NO_PASSAGES.values(), ids=NO_PASSAGES)
def test_whatever_the_reply_it_is_passages_or_garbage(protocol, sent):
    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": sent.encode()})

    with (
        listening(app) as url,
        closing(RemoteRetriever(url, protocol=protocol, retries=0)) as client,
        pytest.raises(RetrievalFailure) as failure,
    ):
        client.search(["river"], [2])
    assert failure.value.cause == "garbage" and client.counts["failures_garbage"] == 1


@pytest.mark.parametrize(
    ("url", "says", "cause", "requests"),
    [
        ("http://localhost:99999", "is no address", "connection", 1),
        ("http://127.0.0.1:1", "http://127.0.0.1:1/retrieve", "connection", 2),
    ],
)
def test_no_address_and_nobody_there_are_failures_with_the_address(url, says, cause, requests):
    with closing(RemoteRetriever(url, retries=1)) as client, pytest.raises(RetrievalFailure) as failure:
        client.search(["x"], [1])
    assert says in str(failure.value) and failure.value.cause == cause
    assert failure.value.transient == (requests > 1) and client.counts["requests"] == requests


def test_fewer_passages_than_asked_are_used_counted_and_told_once(good, caplog):
    with closing(RemoteRetriever(good)) as client:
        found = client.search(["city", "zebra", "river"], [3, 3, 3])
        assert [len(result) for result in found] == [1, 0, 3]
        assert client.counts["short"] == 2 and client.counts["empty"] == 1
        client.search(["zebra"], [3])
    assert client.counts["short"] == 3  # asked again: a short result is not kept
    messages = [record.getMessage() for record in caplog.records if record.name == "mmrl.retrieval"]
    assert len(messages) == 1 and "1 of 3 passages" in messages[0]


def test_results_are_cached_by_query_and_number_and_the_oldest_goes_first(good):
    asked = ["river"], ["river"], ["river", "city"], ["city"], ["capital"], ["river"]
    for size, counts in ((2, [(1, 0), (1, 1), (2, 2), (2, 3), (3, 3), (4, 3)]), (0, [(1, 0), (2, 0)])):
        with closing(RemoteRetriever(good, cache_size=size)) as client:
            for queries, expected in zip(asked, counts, strict=False):
                client.search(queries, [1] * len(queries))
                assert (client.counts["requests"], client.counts["cached"]) == expected


def test_the_breaker_opens_lets_one_look_and_closes():
    now = [0.0]
    breaker = Breaker(failures=2, wait_s=10, clock=lambda: now[0])
    assert not breaker.refuses()
    breaker.failure()
    breaker.success()
    breaker.failure()
    assert not breaker.refuses()
    breaker.failure()
    assert breaker.refuses()
    now[0] = 10.0
    assert not breaker.refuses() and breaker.refuses()  # one may look, the others still may not
    breaker.failure()
    assert breaker.refuses()
    now[0] = 20.0
    assert not breaker.refuses()
    breaker.abandoned()
    assert not breaker.refuses()
    breaker.success()
    assert not breaker.refuses() and not breaker.refuses()


def test_a_dead_server_is_not_asked_again_and_again(caplog):
    with faulty(lambda n: "500" if n < 3 else "ok", retries=0) as client:
        client._http.breaker = Breaker(failures=3, wait_s=0.2)
        causes = []
        for _ in range(6):
            with pytest.raises(RetrievalFailure) as failure:
                client.search(["river"], [1])
            causes.append(failure.value.cause)
        assert causes == ["status"] * 3 + ["refused"] * 3
        assert "not sent, since too many requests have failed in a row; the last: HTTP 500" in str(failure.value)
        assert client.counts["requests"] == 3 and client.counts["failures_refused"] == 3
        time.sleep(0.25)
        assert client.search(["river"], [1])[0]
    messages = [record.getMessage() for record in caplog.records if record.name == "mmrl.http"]
    assert messages[-1].endswith(": answers again")


def test_no_more_requests_at_once_than_allowed_and_no_thread_each():
    inside, most, loading = Counter(), [], []

    app = good_app()

    async def counted(scope, receive, send):
        inside["now"] += 1
        most.append(inside["now"])
        # The first are held until as many are inside as may be: a slow machine sends them one after the other.
        deadline = time.monotonic() + 5
        while loading and max(most) < 4 and time.monotonic() < deadline:
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.01)
        await app(scope, receive, send)
        inside["now"] -= 1

    with listening(counted) as url, closing(RemoteRetriever(url, concurrency=4)) as client:
        client.search(["warm"], [1])
        before = threading.active_count()
        loading.append(True)

        async def load():
            searches = [asyncio.ensure_future(client.search_async([f"q{n}"], [1])) for n in range(40)]
            await asyncio.sleep(0.03)
            during = threading.active_count()
            await asyncio.gather(*searches)
            return during

        assert asyncio.run(load()) <= before + 1
        assert max(most) == 4


def test_a_cancelled_search_leaves_the_client_usable():
    async def given_up(client):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(client.search_async(["river"], [1]), 0.1)
        return await asyncio.wait_for(client.search_async(["river"], [1]), 10)

    with faulty(lambda n: "hang" if n == 0 else "ok", timeout_s=5, concurrency=1) as client:
        assert asyncio.run(given_up(client))[0]


# From the rollout loop


def asked(n):
    question = {"question": f"q{n}?", "corpus": "remote"}
    return Example(id=f"e{n}", inputs=question, metadata={"answers": ["Tagus"], "titles": ["Tagus"]})


def run_rollouts(task, items):
    env = environment(task, Searcher())
    env.settings = replace(env.settings, max_tokens=task.config.max_tokens)
    return forest_of(env, map(asked, range(items)))


def test_rollouts_through_a_server_under_load_with_faults():
    """Each rollout searches once; every fourth request meets a fault that a retry mends."""
    faults = ["500", "garbage", "hang", "less"]
    plan = lambda n: faults[(n // 4) % 4] if n > 0 and n % 4 == 0 else "ok"  # noqa: E731
    with listening(Faulty(good_app(), plan, hang_s=8)) as url:
        task = search_agent(name="remote", url=url, timeout_s=4.0, retries=6, concurrency=64)
        forest = run_rollouts(task, 96)
        counts = dict(task.search_tool.retrievers["remote"].counts)
        assert [rollout.error for rollout in forest.rollouts] == [None] * 96
        assert all(rollout.metrics["em"] == 1.0 and rollout.metrics["retrieval"] == 1.0 for rollout in forest.rollouts)
        assert counts["retries"] > 10 and counts.get("failures", 0) == 0
        task.close()


def test_rollouts_whose_search_fails_are_outside_failures_and_not_scored(caplog):
    with listening(Faulty(good_app(), lambda n: "ok" if n == 0 else "500")) as url:
        task = search_agent(name="remote", url=url, timeout_s=20.0, retries=1, concurrency=4)
        forest = run_rollouts(task, 40)
        assert {rollout.error for rollout in forest.rollouts} == {"tool"}
        assert task.search_tool.retrievers["remote"].counts["failures"] == 40
        assert task.search_tool.retrievers["remote"].counts["failures_refused"] > 20  # the server is spared
        task.close()
    told = [record.getMessage() for record in caplog.records if record.name in ("mmrl.retrieval", "mmrl.http")]
    assert len(told) == 2, "the first failure, and that no more are sent"
    assert "HTTP 500" in told[0] and "none is sent for a while" in told[1]


def test_a_server_that_is_not_there_is_found_before_a_model_loads(good):
    with pytest.raises(ConfigError, match=r"task\.retriever\.url: .*127\.0\.0\.1:1/retrieve"):
        search_agent(name="remote", url="http://127.0.0.1:1")
    with pytest.raises(ConfigError, match=r"task\.retriever\.url: .*HTTP 404.*search_r1"):
        search_agent(name="remote", url=f"{good}/elsewhere")


def test_a_server_that_is_busy_when_a_run_begins_does_not_refuse_it():
    with listening(Faulty(good_app(), lambda n: "429" if n == 0 else "ok")) as url:
        search_agent(name="remote", url=url, retries=1).close()
    with (
        listening(Faulty(good_app(), lambda n: "429")) as url,
        pytest.raises(ConfigError, match=r"task\.retriever\.url: .*HTTP 429"),
    ):
        search_agent(name="remote", url=url, retries=1)
