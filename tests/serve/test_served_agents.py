"""Chats of a served policy: what clients ask and read there, as in training (whole agents: `tests/agents`)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import openai
import pytest

from mmrl.models.chat import render_prompt
from mmrl.serve import policy
from mmrl.serve.policy import ServedPolicy, make_app
from tests.helpers.gateway import Scripted, agent_task, one, tokenizer
from tests.helpers.servers import listening

CALLED = '<tool_call>\n{"name": "search", "arguments": {"query": "Porto"}}\n</tool_call>'
FOUND = "Nothing is known of Porto."
QUESTION: Any = [{"role": "user", "content": "Where?"}]
SEARCH: Any = {
    "type": "function",
    "function": {"name": "search", "parameters": {"type": "object", "properties": {"query": {"type": "string"}}}},
}


def with_tool(prompt: str) -> str:
    """Thoughts that no prompt of the template would show again, and a call; then the answer."""
    return "<think>\nSo.\n</think>\n\nDone." if FOUND in prompt else f"<think>\nHm.\n</think>\n\n{CALLED}"


def served(answer: Callable[[str], str], **options: Any) -> tuple[Scripted, Any]:
    """An engine with Qwen3's template, and its served policy."""
    engine = Scripted(answer, tokenizer("qwen3"))
    return engine, make_app(ServedPolicy(engine, engine.tokenizer, **options))


@pytest.mark.parametrize("text", ["", "I look.\n", "At sea."])
@pytest.mark.parametrize("stream", [False, True])
def test_calls_choices_and_log_probabilities_are_those_of_the_gateway(stream: bool, text: str) -> None:
    replies: dict[str, list[Any]] = {}

    async def asked(url: str, key: str, into: str) -> None:
        async with openai.AsyncOpenAI(base_url=url, api_key=key) as client:
            options: Any = {"model": "policy/agent", "messages": QUESTION, "n": 2, "logprobs": True, "tools": [SEARCH]}
            reply: Any = await client.chat.completions.create(**options, stream=stream)
            parts = [part async for part in reply] if stream else [reply]
            replies[into] = [choice.model_dump() for part in parts for choice in part.choices]
            for choice in replies[into]:
                for call in (choice["delta"] if stream else choice["message"]).get("tool_calls") or ():
                    call["id"] = "drawn"

    async def agent(example: Any, base_url: str, api_key: str) -> str:
        await asked(base_url, api_key, "trained")
        return "0"

    def answer(prompt: str) -> str:
        return text if text == "At sea." else text + with_tool(prompt)

    one(agent_task(agent), Scripted(answer, tokenizer("qwen3")))
    with listening(served(answer)[1]) as url:
        asyncio.run(asked(f"{url}/v1", "none", "served"))
    assert replies["served"] == replies["trained"] != []
    told = json.dumps(replies["served"])
    assert told.count('"reasoning_content": "Hm."') == (0 if text == "At sea." else 2)
    assert (told.count("drawn"), told.count("I look."), told.count("At sea.")) == {
        "": (2, 0, 0),
        "I look.\n": (2, 2, 0),
        "At sea.": (0, 0, 2),
    }[text]


def test_text_of_anthropics_streams_comes_as_it_is_sampled_and_tokens_are_counted() -> None:
    anthropic = pytest.importorskip("anthropic")  # with `make test-agents`
    engine, app = served(lambda prompt: "In Portugal, by the sea.")
    engine.pieces = True
    options: Any = {"model": "claude", "max_tokens": 64, "messages": QUESTION}
    with (
        listening(app) as url,
        anthropic.Anthropic(base_url=url, api_key="none") as client,
        client.messages.stream(**options) as stream,
    ):
        texts = [event.text for event in stream if event.type == "text"]
        message = stream.get_final_message()
    assert "".join(texts) == message.content[0].text == "In Portugal, by the sea." and len(texts) > 3
    (request,) = engine.requests
    assert message.usage.input_tokens == len(request.prompt_ids) and message.usage.output_tokens > 3
    assert message.stop_reason == "end_turn"


def test_a_conversation_whose_context_is_no_longer_kept_goes_on_from_its_messages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reply: Any = {"role": "assistant", "content": "In Portugal"}
    for most, kept in ((2**22, True), (1, False)):
        monkeypatch.setattr(policy, "MOST_KEPT", most)
        engine, app = served(lambda prompt: "In Portugal, END")
        with listening(app) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
            for messages in (QUESTION, [*QUESTION, reply, *QUESTION]):
                client.chat.completions.create(model="policy", messages=messages, stop=[", END"])
        prompt = engine.requests[1].prompt_ids
        assert (prompt == render_prompt(engine.tokenizer, [*QUESTION, reply, *QUESTION])) != kept
        assert (", END" in engine.prompts[1]) == kept, "what was sampled, and not what was sent"


def test_models_are_listed_and_found_by_the_names_that_requests_may_give() -> None:
    for modules, name, listed, found, strange in (
        ((), "policy", ["policy"], "policy/any", "other"),
        (("planner", "worker"), "policy", ["policy/planner", "policy/worker"], "policy/worker", "policy/third"),
        (("planner", "worker"), "me/mine", ["me/mine/planner", "me/mine/worker"], "me/mine/worker", "me/worker"),
    ):
        engine, app = served(lambda prompt: "x", modules=modules, name=name)
        with listening(app) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            assert [model.id for model in client.models.list()] == listed
            assert client.models.retrieve(found).id == found
            with pytest.raises(openai.NotFoundError, match="expected one of"):
                client.models.retrieve(strange)
            client.chat.completions.create(model=found, messages=QUESTION)
            client.chat.completions.create(
                model="gpt-4o", messages=QUESTION, extra_headers={"X-Mmrl-Module": found.rpartition("/")[2]}
            )
            if modules:
                for unknown in (strange, "gpt-4o"):
                    with pytest.raises(openai.NotFoundError, match="expected one of"):
                        client.chat.completions.create(model=unknown, messages=QUESTION)
        assert [request.module for request in engine.requests] == [found.rpartition("/")[2] if modules else ""] * 2


def test_texts_of_tokens_are_together_the_text_and_so_are_their_bytes() -> None:
    said = "Olá, ação 東京 🙂 in Portugal"
    with (
        listening(served(lambda prompt: said)[1]) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client,
    ):
        reply = client.chat.completions.create(model="policy", messages=QUESTION, logprobs=True)
    assert reply.choices[0].logprobs is not None
    tokens = reply.choices[0].logprobs.content or []
    assert len(tokens) > len(said) / 4 and all("\ufffd" not in token.token for token in tokens)
    assert "".join(token.token for token in tokens) == said
    assert b"".join(bytes(token.bytes or []) for token in tokens) == said.encode()


@pytest.mark.parametrize("n", [1, 3])
def test_each_choice_of_a_stream_has_its_role_before_its_text(n: int) -> None:
    with (
        listening(served(lambda prompt: "At sea.")[1]) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client,
    ):
        stream = client.chat.completions.create(model="policy", messages=QUESTION, n=n, stream=True)
        parts = [choice for part in stream for choice in part.choices]
    for index in range(n):
        first, *others = [choice.delta for choice in parts if choice.index == index]
        assert (first.role, first.content) == ("assistant", "")
        assert "".join(delta.content or "" for delta in others) == "At sea."


def test_text_of_responses_comes_as_it_is_sampled() -> None:
    engine, app = served(lambda prompt: "In Portugal, by the sea.")
    engine.pieces = True
    with (
        listening(app) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client,
        client.responses.stream(model="policy", input="Where?") as stream,
    ):
        events = list(stream)
        response = stream.get_final_response()
    texts = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(texts) == response.output_text == "In Portugal, by the sea." and len(texts) > 3
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert response.usage is not None and response.usage.output_tokens > 3


def test_an_agent_of_responses_goes_on_with_its_calls_on_its_served_policy() -> None:
    engine, app = served(with_tool)
    tool: Any = {"type": "function", **SEARCH["function"], "strict": False}
    with listening(app) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        items: Any = [*QUESTION]
        first = client.responses.create(model="policy", input=items, tools=[tool])
        (call,) = [item for item in first.output if item.type == "function_call"]
        items += [item.model_dump(exclude_none=True) for item in first.output]
        items += [{"type": "function_call_output", "call_id": call.call_id, "output": FOUND}]
        assert client.responses.create(model="policy", input=items, tools=[tool]).output_text == "Done."
    assert "Hm." in engine.prompts[1], "thoughts stay as they were sampled"
