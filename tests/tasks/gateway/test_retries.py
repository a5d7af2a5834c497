"""Clients that give up: they ask again and get the same reply, or leave, and nothing of it is recorded."""

import asyncio
import itertools

import dspy
import httpx
import openai
import pytest

from mmrl.serve import front
from mmrl.serve.front import Finished, Running
from mmrl.serve.protocol import CompletionRequest, Refused
from mmrl.store.forest import check_forest
from tests.helpers import Fake
from tests.helpers.gateway import ASK, Scripted, agent_of, agent_task, client, one, post, rolled_out


@pytest.mark.parametrize("repeats", [{"x-stainless-retry-count": "1"}, {}], ids=["counted", "at once"])
def test_a_retry_is_the_same_call_with_the_same_reply(repeats):
    async def agent(example, base_url, api_key):
        headers = {"Authorization": f"Bearer {api_key}"}
        body = {"model": "m", "messages": ASK}
        async with httpx.AsyncClient(headers=headers) as asking:
            # its client gives up, and asks again: as those of OpenAI and Anthropic do, or with the same request alone
            with pytest.raises(httpx.ReadTimeout):
                await asking.post(f"{base_url}/chat/completions", json=body, timeout=0.2)
            again = {"x-stainless-retry-count": "1"}
            first = await asking.post(f"{base_url}/chat/completions", json=body, headers=repeats)
            # The same question of a client that has its reply: a call of its own, whatever its header says.
            second = await asking.post(f"{base_url}/chat/completions", json=body, headers=again)
        assert first.status_code == second.status_code == 200 and first.json()["id"] != second.json()["id"]
        return "0"

    engine = Scripted(lambda prompt: "x", delay=0.5)
    rollout, calls = one(agent_task(agent), engine)
    assert rollout.error is None, rollout.error_message
    assert len(calls) == 2 == len(engine.requests)


def test_equal_requests_at_once_that_are_all_repeated_get_a_reply_each():
    numbers, read = itertools.count(), []

    async def agent(example, base_url, api_key):
        async with client(base_url, api_key, timeout=0.3, max_retries=5) as asking:
            asked = (asking.chat.completions.create(model="m", messages=ASK) for _ in range(4))
            read.extend(reply.choices[0].message.content for reply in await asyncio.gather(*asked))
        return "0"

    engine = Scripted(lambda prompt: f"reply {next(numbers)}", delay=0.7)
    rollout, calls = one(agent_task(agent), engine)
    assert rollout.error is None, rollout.error_message
    assert sorted(read) == sorted(call.text for call in calls) == [f"reply {n}" for n in range(4)]


def test_more_requests_at_once_than_are_taken_are_asked_again_by_their_client(monkeypatch):
    monkeypatch.setattr("mmrl.serve.gateway.MOST_OPEN", 3)
    read = []

    async def work(asking):
        asked = (asking.chat.completions.create(model="m", messages=ASK) for _ in range(5))
        read.extend(await asyncio.gather(*asked))
        return "0"

    rollout, calls = one(agent_task(agent_of(work)), Scripted(lambda prompt: "x", delay=0.2))
    assert rollout.error is None, rollout.error_message
    assert len(read) == len(calls) == 5


def test_a_reply_that_comes_as_its_client_leaves_waits_for_the_retry():
    class Left(Fake):
        async def receive(self):
            return {"type": "http.disconnect"}

    async def ready():
        task = asyncio.get_running_loop().create_future()
        task.set_result(Finished(id="a", answers=[], tokens=(0, 0)))
        await front._until_ready(Running(parsed=CompletionRequest(model="m", prompt="q"), task=task), Left())

    with pytest.raises(Refused, match="the client has gone"):
        asyncio.run(ready())


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_reply_that_nobody_came_back_for_is_no_call_of_the_rollout(stream):
    async def agent(example, base_url, api_key):
        async with client(base_url, api_key, timeout=0.1, max_retries=0) as impatient:
            with pytest.raises(openai.APITimeoutError):
                await impatient.chat.completions.create(model="m", messages=ASK, stream=stream)
        async with client(base_url, api_key) as asking:
            await asking.chat.completions.create(model="m", messages=ASK, max_tokens=9)
            await asking.chat.completions.create(model="m", messages=ASK[1:])
        return "0"

    engine = Scripted(lambda prompt: f"reply {next(numbers)}", delay=0.4)
    numbers = itertools.count()
    forest = rolled_out(agent_task(agent), engine)
    (rollout,) = forest.rollouts
    calls = forest.path(rollout)
    assert rollout.error is None, rollout.error_message
    assert [call.text for call in calls] == ["reply 1", "reply 2"] and len(engine.requests) == 3
    assert [call.parent for call in calls] == [None, calls[0].id]
    check_forest(forest, "forest")


def test_a_client_that_leaves_frees_its_slot(monkeypatch):
    monkeypatch.setattr("mmrl.serve.gateway.RETRY_S", 0.1)

    async def agent(example, base_url, api_key):
        async with client(base_url, api_key, timeout=0.2, max_retries=0) as asking:
            for stream in (False, True):
                with pytest.raises(openai.APITimeoutError):
                    await asking.chat.completions.create(model="m", messages=ASK, stream=stream)
        for _ in range(200):
            if engine.cancelled == 2:
                break
            await asyncio.sleep(0.02)
        engine.delay = 0.0
        async with client(base_url, api_key) as asking:
            await asking.chat.completions.create(model="m", messages=ASK)
        return "0"

    engine = Scripted(lambda prompt: "x", delay=30.0)
    rollout, calls = one(agent_task(agent), engine)
    assert rollout.error is None, rollout.error_message
    assert (engine.cancelled, engine.waiting, len(calls)) == (2, 0, 1)


def test_choices_of_a_request_that_was_given_up_are_no_calls():
    class Slow(Scripted):
        async def generate(self, request):
            if str(request.order[0]).endswith("#0"):
                await asyncio.sleep(60)
            return await super().generate(request)

    async def agent(example, base_url, api_key):
        headers = {"Authorization": f"Bearer {api_key}"}
        async with httpx.AsyncClient(headers=headers, timeout=0.5) as asking:
            with pytest.raises(httpx.TimeoutException):
                await asking.post(f"{base_url}/chat/completions", json={"model": "m", "n": 3, "messages": ASK})
        return "0"

    rollout, calls = one(agent_task(agent), Slow(lambda prompt: "x"))
    assert (rollout.error, rollout.reward, calls) == ("program", None, ())


@pytest.mark.parametrize(("options", "error"), [({}, "engine"), ({"max_calls": 2}, "limit")])
def test_what_fails_after_a_prompt_that_was_too_long_is_a_failure(options, error):
    """Only the prompt is forgiven, where the agent shortens it and goes on."""

    class Dies(Scripted):
        async def generate(self, request):
            if "boom" in self.tokenizer.decode(list(request.prompt_ids)):
                raise OSError("engine died")
            return await super().generate(request)

    async def agent(example, base_url, api_key):
        statuses = []
        async with httpx.AsyncClient(headers={"Authorization": f"Bearer {api_key}"}) as asking:
            for text in ("word " * 3000, "short", "boom"):
                body = {"model": "m", "messages": [{"role": "user", "content": text}]}
                statuses.append((await asking.post(f"{base_url}/chat/completions", json=body)).status_code)
        assert statuses[:2] == [400, 200] and statuses[2] >= 400
        return "0"

    rollout, _ = one(agent_task(agent, **options), Dies(lambda prompt: "x"))
    assert rollout.error == error and (rollout.reward is None) == (error == "engine")


@pytest.mark.parametrize("asks", [False, True])
def test_a_prompt_that_was_too_long_is_forgiven_to_who_has_a_reply(asks):
    """Else a fallback would be scored that no model has had a part in."""

    async def agent(example, base_url, api_key):
        answered = (await post(base_url, api_key)).status_code if asks else None
        refused = (await post(base_url, api_key, text="word " * 3000)).status_code
        assert (answered, refused) == (200 if asks else None, 400)
        return "0"

    rollout, calls = one(agent_task(agent), Scripted(lambda prompt: "x"))
    assert (rollout.error, len(calls)) == ((None, 1) if asks else ("length", 0))


def test_past_its_calls_an_agent_that_asks_on_and_on_is_ended():
    """Not at its time, as if it had been the machine's fault."""

    async def agent(example, base_url, api_key):
        while True:
            await post(base_url, api_key)
            await asyncio.sleep(0.01)

    rollout, calls = one(agent_task(agent, max_calls=3), Scripted(lambda prompt: "x"))
    assert (rollout.error, rollout.reward, len(calls)) == ("limit", 0.0, 3)


def test_dspys_cache_answers_no_agent(tmp_path):
    dspy.configure_cache(disk_cache_dir=str(tmp_path))
    solve = dspy.Predict("question -> answer")

    def agent(example, base_url, api_key):
        with dspy.context(lm=dspy.LM("openai/policy/agent", api_base=base_url, api_key=api_key)):
            return solve(question=example["question"]).answer

    task = agent_task(agent)
    for _ in range(2):
        rollout, calls = one(task, Scripted(lambda prompt: "[[ ## answer ## ]]\n0\n\n[[ ## completed ## ]]"))
        assert (rollout.error, rollout.reward, len(calls)) == (None, 1.0, 1)


def test_a_reply_that_the_agent_has_edited_is_seen_in_any_turn():
    async def agent(example, base_url, api_key):
        messages = [*ASK]
        async with client(base_url, api_key) as asking:
            for turn in range(3):
                reply = await asking.chat.completions.create(model="m", messages=messages)
                text = reply.choices[0].message.content
                said = f"edited {text}" if turn == 1 else text
                messages += [{"role": "assistant", "content": said}, {"role": "user", "content": f"next {turn}"}]
        return "0"

    rollout, calls = one(agent_task(agent), Scripted(lambda prompt: f"reply {prompt.count('assistant')}"))
    assert rollout.error is None
    assert [call.facts["rewritten_history"] for call in calls] == [0.0, 0.0, 1.0]
