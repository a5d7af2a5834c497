"""An agent's requests as calls: contexts, tools, choices, forms of replies, modules, what is refused."""

import itertools
import json
from functools import partial
from typing import Any

import httpx
import openai
import pytest

from mmrl.store.forest import check_forest
from tests.helpers.gateway import ASK, Scripted, agent_of, agent_task, client, one, post, rolled_out, tokenizer

SEARCH: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "finds",
        "parameters": {"type": "object", "properties": {"query": {"type": "string"}}},
    },
}
CALLED = '<tool_call>\n{"name": "search", "arguments": {"query": "Porto"}}\n</tool_call>'


def refused(body):
    """Status and error of one request, whose agent goes on and makes a good one."""
    said = []

    async def agent(example, base_url, api_key):
        for sent in (body, {"messages": ASK}):
            reply = await post(base_url, api_key, **sent)
            said.append((reply.status_code, reply.json().get("error"), reply.headers.get("x-should-retry")))
        return "1"

    rollout, calls = one(agent_task(agent), Scripted(lambda prompt: "one"))
    assert rollout.error is None and said[1][0] == 200 and len(calls) == 1, "nothing of it is recorded"
    return said[0]


def test_a_request_is_a_call_with_the_sampled_tokens_and_their_log_probabilities():
    said = []

    async def work(asking):
        reply = await asking.chat.completions.create(model="gpt-4o", messages=ASK, temperature=0.2, logprobs=True)
        said.append(reply)
        return "0"

    engine = Scripted(lambda prompt: "In Portugal.")
    rollout, (call,) = one(agent_task(agent_of(work)), engine)
    assert (rollout.reward, rollout.prediction, call.module, call.text) == (1.0, "0", "agent", "In Portugal.")
    assert call.prompt_ids == engine.requests[0].prompt_ids and engine.requests[0].sampling.temperature == 1.0
    (choice,) = said[0].choices
    assert (choice.message.content, choice.finish_reason) == ("In Portugal.", "stop")
    assert said[0].usage.completion_tokens == len(call.completion_ids) == len(call.logprobs)
    assert [token.logprob for token in choice.logprobs.content] == list(call.logprobs)
    assert "".join(token.token for token in choice.logprobs.content) == "In Portugal."
    assert engine.live == 0


def test_a_stream_has_the_log_probabilities_of_its_reply_once():
    said = []

    async def work(asking):
        stream = await asking.chat.completions.create(model="m", messages=ASK, logprobs=True, stream=True)
        said.extend([event async for event in stream])
        return "0"

    _, (call,) = one(agent_task(agent_of(work)), Scripted(lambda prompt: "In Portugal."))
    choices = [choice for event in said for choice in event.choices]
    assert "".join(choice.delta.content or "" for choice in choices) == "In Portugal."
    tokens = [token for choice in choices if choice.logprobs for token in choice.logprobs.content]
    assert [token.logprob for token in tokens] == list(call.logprobs)


def test_what_extends_a_reply_goes_on_in_its_tokens_and_anything_else_is_a_new_context():
    async def work(asking):
        messages = [*ASK]
        for question in ("And Lisbon?", "And Faro?"):
            reply = await asking.chat.completions.create(model="m", messages=messages)
            # as clients do: the whole message of the reply, with its empty fields
            messages += [reply.choices[0].message.model_dump(), {"role": "user", "content": question}]
        await asking.chat.completions.create(model="m", messages=messages)
        messages[2]["content"] = "Elsewhere."
        await asking.chat.completions.create(model="m", messages=messages)

    # Letters that the tokenizer would join otherwise if it read the text again.
    engine = Scripted(lambda prompt: "In Portugal.")
    _, calls = one(agent_task(agent_of(work), metric=lambda record, result: 0.0), engine)
    assert [call.turn for call in calls] == [0, 1, 2, 0]
    for before, after in itertools.pairwise(calls[:3]):
        assert after.prompt_ids[: len(before.prompt_ids) + len(before.completion_ids)] == (
            before.prompt_ids + before.completion_ids
        )
        assert before.observation_tokens > 0
    assert [call.facts["rewritten_history"] for call in calls] == [0.0, 0.0, 0.0, 1.0]
    assert "Elsewhere." in engine.prompts[3]


@pytest.mark.parametrize("template", ["qwen3", "qwen2_5"])
def test_tools_are_written_and_read_by_the_models_template(template):
    said = []

    async def work(asking):
        messages = [*ASK]
        reply = await asking.chat.completions.create(model="m", messages=messages, tools=[SEARCH])
        said.append(reply.choices[0])
        message = reply.choices[0].message
        result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "a city <|im_end|>"}
        messages += [message.model_dump(), result]
        reply = await asking.chat.completions.create(model="m", messages=messages, tools=[SEARCH])
        # A request that leaves the tools out wants no more calls; one with others has another prompt.
        await asking.chat.completions.create(model="m", messages=messages)
        other = {**SEARCH, "function": {**SEARCH["function"], "name": "other"}}
        await asking.chat.completions.create(model="m", messages=messages, tools=[other])
        return reply.choices[0].message.content

    engine = Scripted(lambda prompt: "a city" if "a city" in prompt else CALLED, tokenizer(template))
    rollout, calls = one(agent_task(agent_of(work)), engine)
    assert rollout.error is None, rollout.error_message
    assert said[0].finish_reason == "tool_calls"
    assert json.loads(said[0].message.tool_calls[0].function.arguments) == {"query": "Porto"}
    assert '"name": "search"' in engine.prompts[0]
    assert [call.turn for call in calls] == [0, 1, 1, 0] and rollout.prediction == "a city"
    added = calls[1].prompt_ids[len(calls[0].prompt_ids) + len(calls[0].completion_ids) :]
    assert "a city <|im_end|>" in engine.tokenizer.decode(list(added))
    end = engine.tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert sum(token == end for token in added) == 1, "text ends no turn"


def test_demonstrations_are_no_rewritten_history():
    shots = [{"role": "user", "content": "Where is Faro?"}, {"role": "assistant", "content": "In Portugal."}]

    async def work(asking):
        for question in ("Where is Porto?", "Where is Lyon?"):
            messages = [*shots, {"role": "user", "content": question}]
            await asking.chat.completions.create(model="m", messages=messages)

    _, calls = one(agent_task(agent_of(work), metric=lambda record, result: 0.0), Scripted(lambda prompt: "x"))
    assert [(call.turn, call.facts["rewritten_history"]) for call in calls] == [(0, 0.0), (0, 0.0)]


def test_tools_of_a_template_without_them_are_refused():
    async def work(asking):
        with pytest.raises(openai.BadRequestError, match="chat template does not write them"):
            await asking.chat.completions.create(model="m", messages=ASK, tools=[SEARCH])
        return "0"

    rollout, calls = one(agent_task(agent_of(work)), Scripted(lambda prompt: "x"))
    assert rollout.reward is None and rollout.error == "engine" and not calls


def test_a_reply_of_another_form_than_was_asked_for_does_not_parse_and_is_the_models_doing():
    schema = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"required": ["a", "b"]}}}

    async def work(asking):
        reply = await asking.chat.completions.create(model="m", messages=ASK, response_format=schema)
        return json.loads(reply.choices[0].message.content)["b"]

    for text, present in (("no json", 0), ('{"a": 1}', 1)):
        rollout, (call,) = one(agent_task(agent_of(work)), Scripted(partial(lambda text, prompt: text, text)))
        assert (rollout.error, rollout.reward, call.ok) == ("parse", 0.0, False)
        assert (call.present_fields, call.expected_fields) == (present, 2)
    rollout, (call,) = one(agent_task(agent_of(work)), Scripted(lambda prompt: '{"a": 1, "b": "0"}'))
    assert (rollout.reward, call.ok) == (1.0, True)


@pytest.mark.parametrize(
    ("choice", "text", "ok", "called"),
    [
        ("required", CALLED, True, True),
        ("required", "no", False, False),
        ("none", CALLED, False, False),
        ({"type": "function", "function": {"name": "other"}}, CALLED, False, True),
        ({"type": "function", "function": {"name": "search"}}, CALLED, True, True),
    ],
)
def test_tool_choice_is_what_a_reply_must_parse_as(choice, text, ok, called):
    async def work(asking):
        other = {**SEARCH, "function": {**SEARCH["function"], "name": "other"}}
        tools = [SEARCH, other]
        reply = await asking.chat.completions.create(model="m", messages=ASK, tools=tools, tool_choice=choice)
        assert bool(reply.choices[0].message.tool_calls) == called
        return "0"

    rollout, (call,) = one(agent_task(agent_of(work)), Scripted(lambda prompt: text, tokenizer("qwen3")))
    assert (rollout.error, call.ok) == (None, ok)


@pytest.mark.parametrize("dialect", ["chat/completions", "messages"])
@pytest.mark.parametrize(("calls", "parallel", "ok"), [(1, False, True), (2, False, False), (2, True, True)])
def test_two_calls_do_not_parse_where_one_at_a_time_was_asked_for(dialect, calls, parallel, ok):
    if dialect == "messages":
        tool = {"name": "search", "input_schema": SEARCH["function"]["parameters"]}
        choice = {"type": "auto", "disable_parallel_tool_use": not parallel}
        asked = {"max_tokens": 200, "tools": [tool], "tool_choice": choice}
    else:
        asked = {"tools": [SEARCH], "parallel_tool_calls": parallel}

    async def agent(example, base_url, api_key):
        async with httpx.AsyncClient(base_url=base_url, headers={"x-api-key": api_key}) as asking:
            reply = (await asking.post(dialect, json={"model": "m", "messages": ASK, **asked})).json()
        if dialect == "messages":
            made = [block for block in reply["content"] if block["type"] == "tool_use"]
        else:
            made = reply["choices"][0]["message"].get("tool_calls") or []
        assert len(made) == calls
        return "0"

    rollout, (call,) = one(agent_task(agent), Scripted(lambda prompt: "\n".join([CALLED] * calls), tokenizer("qwen3")))
    assert (rollout.error, call.ok) == (None, ok)


def test_a_reply_that_a_client_has_begun_is_refused():
    said = []

    async def agent(example, base_url, api_key):
        messages = [*ASK, {"role": "assistant", "content": "It is in"}]
        async with httpx.AsyncClient(base_url=base_url, headers={"x-api-key": api_key}) as asking:
            said.append(await asking.post("/messages", json={"model": "m", "max_tokens": 8, "messages": messages}))
            await asking.post("/messages", json={"model": "m", "max_tokens": 8, "messages": ASK})
        return "0"

    rollout, calls = one(agent_task(agent), Scripted(lambda prompt: "x"))
    assert rollout.error is None and len(calls) == 1
    assert said[0].status_code == 400 and "(prefill); expected one of the user" in said[0].json()["error"]["message"]


def test_choices_are_calls_of_their_own_and_any_of_them_can_be_gone_on_from():
    async def work(asking):
        reply = await asking.chat.completions.create(model="m", messages=ASK, n=3, max_tokens=4, stop=["Port"])
        messages = [*ASK, reply.choices[1].message.model_dump(), {"role": "user", "content": "Why?"}]
        await asking.chat.completions.create(model="m", messages=messages)
        return [choice.message.content for choice in reply.choices]

    texts = iter(["0 aa", "1 bb", "2 cc Porto", "end"])
    engine = Scripted(lambda prompt: next(texts))
    rollout, calls = one(agent_task(agent_of(work), metric=lambda record, result: 1.0), engine)
    assert rollout.prediction == ["0 aa", "1 bb", "2 cc "]
    assert [call.turn for call in calls] == [0, 0, 0, 1]
    assert calls[3].prompt_ids[: len(calls[1].prompt_ids)] == calls[1].prompt_ids
    assert calls[1].observation_tokens and not calls[0].observation_tokens
    assert engine.requests[0].sampling.max_tokens == 4 and engine.requests[0].sampling.stop == ("Port",)


def test_streams_are_made_from_the_finished_reply():
    async def work(asking):
        options = {"model": "m", "messages": ASK, "stream": True, "tools": [SEARCH]}
        parts = [part async for part in await asking.chat.completions.create(**options)]
        (called,) = [part.choices[0].delta.tool_calls for part in parts if part.choices[0].delta.tool_calls]
        assert called[0].function.name == "search" and parts[-1].choices[0].finish_reason == "tool_calls"
        parts = [part async for part in await asking.chat.completions.create(**options)]
        return "".join(part.choices[0].delta.content or "" for part in parts)

    texts = iter([CALLED, "0"])
    rollout, calls = one(agent_task(agent_of(work)), Scripted(lambda prompt: next(texts), tokenizer("qwen3")))
    assert (rollout.prediction, rollout.reward, len(calls)) == ("0", 1.0, 2)


def test_the_module_is_named_by_the_model_the_header_or_a_rule():
    rules = ({"pattern": "title", "reply": "A chat"}, {"pattern": "^Plan", "module": "planner"})

    async def work(asking):
        def asked(system="x", **options):
            messages = [{"role": "system", "content": system}, ASK[1]]
            return asking.chat.completions.create(**{"model": "gpt-4o", "messages": messages} | options)

        await asked(model="policy/worker")
        await asked(system="Plan it.", extra_headers={"X-Mmrl-Module": "worker"})
        await asked(system="Plan it.")
        assert (await asked(system="Write a title.")).choices[0].message.content == "A chat"
        with pytest.raises(openai.BadRequestError, match="nothing says which of the modules planner, worker"):
            await asked()
        with pytest.raises(openai.NotFoundError, match="expected one of planner, worker"):
            await asked(model="policy/other")
        return [model.id async for model in asking.models.list()]

    task = agent_task(agent_of(work), modules=("planner", "worker"), rules=rules, metric=lambda record, result: 1.0)
    rollout, calls = one(task, Scripted(lambda prompt: "x"))
    assert [call.module for call in calls] == ["worker", "worker", "planner"]
    assert rollout.metrics["answered_by_rule"] == 1.0 and rollout.prediction == ["policy/planner", "policy/worker"]


def test_without_a_rule_that_answers_nothing_is_counted():
    async def work(asking):
        await asking.chat.completions.create(model="gpt-4o", messages=ASK)
        return "0"

    rules = ({"pattern": "brief", "module": "agent"},)
    rollout, calls = one(agent_task(agent_of(work), rules=rules), Scripted(lambda prompt: "x"))
    assert len(calls) == 1 and rollout.metrics.keys() == {"score"}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"n": 64}, "n: Input should be less than or equal to 16"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "text alone"),
        ({"min_p": 0.1}, "min_p: this server does not have it"),
        ({"mirostat": 2}, "mirostat: unknown field"),
        ({"thinking": {"type": "disabled"}}, "thinking: this server does not have it"),
        ({"provider": {"order": ["x"]}}, "provider: this server does not have it"),
        ({"logit_bias": {"5": 1}}, "logit_bias: this server does not have it"),
        ({"top_logprobs": 3}, "top_logprobs: this server does not have it"),
        (
            {"tools": [SEARCH], "tool_choice": {"type": "function", "function": {"name": "zz"}}},
            "tool_choice: Value error, got 'zz', expected a tool of the request: search",
        ),
        ({"tool_choice": "required"}, "tool_choice: Value error, asks for a call of a tool, and the request has none"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": "x " * 5000}]}, "leaves no room"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"$schema": ["draft-07"]}}}},
            "$.$schema: got ['draft-07'], expected a text",
        ),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_cannot_be_had_is_refused_and_not_recorded(change, says):
    status, error, again = refused({"messages": ASK} | change)
    assert (status, again) == (400, "false") and says in error["message"]


def test_a_body_beyond_the_limit_and_a_foreign_key_are_refused():
    status, error, _ = refused({"text": "x" * (5 << 20)})
    assert status == 413 and "more than 4194304 bytes" in error["message"]
    seen = []

    async def agent(example, base_url, api_key):
        for key in ("", "mmrl-guessed", *(old for old, _ in seen)):
            async with client(base_url, key or "none", max_retries=0) as asking:
                with pytest.raises(openai.AuthenticationError, match="no rollout of this key"):
                    await asking.chat.completions.create(model="m", messages=ASK)
        async with client(base_url, api_key) as asking:
            await asking.chat.completions.create(model="m", messages=ASK)
        seen.append((api_key, base_url))
        return "0"

    for _ in range(2):
        rollout, calls = one(agent_task(agent), Scripted(lambda prompt: "x"))
        assert rollout.reward == 1.0 and len(calls) == 1
    (one_key, url), (other_key, other_url) = seen
    assert one_key != other_key and url != other_url
    assert url.startswith("http://127.0.0.1:") and other_url.startswith("http://127.0.0.1:")


def test_calls_beyond_the_limit_end_the_rollout():
    async def work(asking):
        for _ in range(3):
            await asking.chat.completions.create(model="m", messages=ASK)

    rollout, calls = one(agent_task(agent_of(work), max_calls=2), Scripted(lambda prompt: "x"))
    assert (rollout.error, rollout.reward, len(calls)) == ("limit", 0.0, 2)
    assert "task.max_calls=2" in rollout.error_message


def test_a_request_that_became_no_call_counts_in_no_invocation():
    """A prompt that is too long is answered with an error, after which the agent shortens it and goes on."""

    async def work(asking):
        with pytest.raises(openai.BadRequestError, match="context"):
            await asking.chat.completions.create(model="m", messages=[{"role": "user", "content": "word " * 3000}])
        for _ in range(2):
            await asking.chat.completions.create(model="m", messages=ASK)
        return "1"

    forest = rolled_out(agent_task(agent_of(work)), Scripted(lambda prompt: "one"))
    first, second = forest.calls.values()
    assert [(call.invocation, call.parent) for call in (first, second)] == [(0, None), (1, first.id)]
    check_forest(forest, "forest")


def test_a_reply_of_anthropics_that_a_stop_sequence_ended_names_it():
    said = []

    async def agent(example, base_url, api_key):
        body = {"model": "m", "max_tokens": 50, "messages": [{"role": "user", "content": "Where?"}]}
        async with httpx.AsyncClient(headers={"x-api-key": api_key}) as asking:
            for stops in (["STOP", "P"], ["never"]):
                reply = await asking.post(f"{base_url}/messages", json={**body, "stop_sequences": stops})
                said.append({key: reply.json()[key] for key in ("content", "stop_reason", "stop_sequence")})
        return "1"

    one(agent_task(agent), Scripted(lambda prompt: "at STOP it"))
    assert said == [
        {"content": [{"type": "text", "text": "at "}], "stop_reason": "stop_sequence", "stop_sequence": "STOP"},
        {"content": [{"type": "text", "text": "at STOP it"}], "stop_reason": "end_turn", "stop_sequence": None},
    ]


def test_an_agent_of_anthropics_calls_tools_and_reads_streams():
    """A result goes on in the context of the turn that asked for it; what cannot be read is refused in its words."""
    events, refused = [], []

    async def agent(example, base_url, api_key):
        tool = {"name": "search", "description": "finds", "input_schema": SEARCH["function"]["parameters"]}
        body = {"model": "m", "max_tokens": 80, "system": "Be brief.", "tools": [tool], "tool_choice": {"type": "any"}}
        messages = [{"role": "user", "content": [{"type": "text", "text": "Where is Porto?"}]}]
        async with httpx.AsyncClient(base_url=base_url, headers={"x-api-key": api_key}) as asking:
            image = [{"role": "user", "content": [{"type": "image", "source": {}}]}]
            refused.append((await asking.post("/messages", json={**body, "messages": image})).json())
            (use,) = (await asking.post("/messages", json={**body, "messages": messages})).json()["content"]
            assert (use["type"], use["name"], use["input"]) == ("tool_use", "search", {"query": "Porto"})
            found = {"type": "tool_result", "tool_use_id": use["id"], "content": [{"type": "text", "text": "a city"}]}
            messages += [{"role": "assistant", "content": [use]}, {"role": "user", "content": [found]}]
            body |= {"messages": messages, "stream": True, "tool_choice": {"type": "auto"}}
            async with asking.stream("POST", "/messages", json=body) as reply:
                async for line in reply.aiter_lines():
                    events.extend([json.loads(line[6:])] if line.startswith("data: ") else [])
        return "1"

    engine = Scripted(lambda prompt: "It is a city." if "a city" in prompt else CALLED, tokenizer("qwen3"))
    rollout, calls = one(agent_task(agent), engine)
    assert rollout.error is None, rollout.error_message
    assert [call.turn for call in calls] == [0, 1] and "a city" in engine.prompts[1]
    assert [event["type"] for event in events if event["type"] != "ping"] == [
        *("message_start", "content_block_start", "content_block_delta", "content_block_stop"),
        *("message_delta", "message_stop"),
    ]
    (delta,) = (event["delta"] for event in events if event["type"] == "content_block_delta")
    assert delta == {"type": "text_delta", "text": "It is a city."}
    assert "Input tag 'image' found" in refused[0]["error"]["message"]


DEFAULTS = {
    "reasoning_effort": "low",
    "verbosity": "low",
    "prompt_cache_retention": "24h",
    "store": False,
    "user": "u",
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "top_k": -1,
    "n": 1,
    "logit_bias": {},
    "presence_penalty": 0,
    "chat_template_kwargs": {"enable_thinking": True},
    "skip_special_tokens": True,
    "stop": None,
    "priority": 0,
    "usage": {"include": True},
    "provider": {},
    "transforms": [],
    "return_token_ids": False,
    "messages": [{"role": "user", "content": "Where?", "cache_control": {"type": "ephemeral"}}],
}


def test_fields_that_change_no_reply_are_taken_and_the_others_named():
    """By the chat template: Qwen's has a thinking mode, here on, and no effort; that of gpt-oss has an effort."""
    answers = []

    def asked(template, **body):
        async def agent(example, base_url, api_key):
            reply = await post(base_url, api_key, **body)
            answers.append((reply.status_code, reply.json().get("error", {}).get("param")))
            return "0"

        one(agent_task(agent), Scripted(lambda prompt: "x", tokenizer(template)))
        return answers.pop()

    assert asked("qwen3", **DEFAULTS) == (200, None)
    assert asked("gptoss", reasoning_effort="medium") == (200, None)
    for template, name, value in (
        ("gptoss", "reasoning_effort", "high"),
        ("qwen3", "enable_thinking", False),
        ("qwen3", "chat_template", "{{ 1 }}"),
    ):
        field = name if name == "reasoning_effort" else f"chat_template_kwargs.{name}"
        body = {name: value} if field == name else {"chat_template_kwargs": {name: value}}
        assert asked(template, **body) == (400, field)


def test_a_reply_that_comes_back_with_the_name_of_its_agent_goes_on():
    async def work(asking):
        messages = [{**ASK[1], "name": "user"}]
        for name in ("planner", "worker"):
            reply = await asking.chat.completions.create(model="m", messages=messages, tools=[SEARCH])
            message = {**reply.choices[0].message.model_dump(exclude_none=True), "name": name}
            messages += [message, {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "x"}]
        await asking.chat.completions.create(model="m", messages=messages, tools=[SEARCH])
        # A message that was given with a name is another one under another name.
        messages[0] = {**messages[0], "name": "other"}
        await asking.chat.completions.create(model="m", messages=messages, tools=[SEARCH])

    engine = Scripted(lambda prompt: CALLED, tokenizer("qwen3"))
    _, calls = one(agent_task(agent_of(work), metric=lambda record, result: 0.0), engine)
    assert [(call.turn, call.facts["rewritten_history"]) for call in calls] == [(0, 0), (1, 0), (2, 0), (0, 1)]
