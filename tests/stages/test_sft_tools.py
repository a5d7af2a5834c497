"""Supervised conversations with tools: each reply is trained as a rollout would have sampled it."""

from __future__ import annotations

import json
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from mmrl.errors import RequestFailure
from mmrl.models.replies import message_of, tools_problem
from mmrl.stages.sft import turns_of
from mmrl.stages.sft_data import read_file
from mmrl.tasks.base import Conversation
from tests.helpers.gateway import TEMPLATES, named, tokenizer

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Looks.",
            "parameters": {
                "type": "object",
                "properties": {"at": {"type": "string", "description": "what"}},
                "required": ["at"],
            },
        },
    }
]


def called(at: str) -> dict[str, Any]:
    return {"type": "function", "id": "call00000", "function": {"name": "look", "arguments": {"at": at}}}


TALK: list[dict[str, Any]] = [
    {"role": "user", "content": "What is there?"},
    {"role": "assistant", "content": "", "tool_calls": [called("the <|im_end|> sea")]},
    {"role": "tool", "name": "look", "content": "A ship.", "tool_call_id": "call00000"},
    {"role": "assistant", "content": "", "tool_calls": [called("the ship")]},
    {"role": "tool", "name": "look", "content": "It sinks.", "tool_call_id": "call00000"},
    {"role": "assistant", "content": "A ship that sinks."},
]


def able() -> list[str]:
    """TRL's templates that write tools whose calls can be read."""
    return sorted(path.stem for path in TEMPLATES.glob("*.jinja") if not tools_problem(tokenizer(path.stem)))


@pytest.mark.parametrize("template", [name for name in able() if not name.startswith("nemotron")])
def test_replies_are_read_back_as_they_were(template: str) -> None:
    """What is trained is what the reader of rollouts takes for this reply; contexts grow by the tokens before."""
    loaded = tokenizer(template)
    calls = list(turns_of(loaded, Conversation(module="agent", messages=TALK, tools=TOOLS)))
    replies = [message for message in TALK if message["role"] == "assistant"]
    assert len(calls) == len(replies)
    for call, wanted in zip(calls, replies, strict=True):
        read = message_of(loaded, call.prompt_ids, call.completion_ids, TOOLS)
        assert read["content"].strip() == wanted["content"] and not read.get("unread_call")
        assert [c["function"]["arguments"] for c in read.get("tool_calls", ())] == [
            c["function"]["arguments"] for c in wanted.get("tool_calls", ())
        ]
    for before, after in pairwise(calls):
        context = before.prompt_ids + before.completion_ids
        assert (
            after.prompt_ids[: len(context) - 1] == context[:-1]
        )  # gpt-oss ends a call that goes on with another token


@pytest.mark.parametrize("template", [name for name in able() if name.startswith("nemotron")])
def test_templates_that_show_replies_otherwise_are_refused(template: str) -> None:
    """Nemotron's open thoughts in the prompt, and show a reply of no thoughts without that opening."""
    with pytest.raises(RequestFailure, match="shown otherwise than one that follows a prompt"):
        list(turns_of(tokenizer(template), Conversation(module="agent", messages=TALK, tools=TOOLS)))


@pytest.mark.parametrize("template", ["qwen3_instruct_2507", "qwen2_5"])
def test_contexts_are_those_of_the_whole_conversation(template: str) -> None:
    """Where a template writes earlier replies as they were, the last context is its own text of all messages."""
    loaded = tokenizer(template)
    *_, last = turns_of(loaded, Conversation(module="agent", messages=TALK, tools=TOOLS))
    whole = loaded.apply_chat_template(TALK, tools=TOOLS, tokenize=False)
    assert loaded.decode(list(last.prompt_ids + last.completion_ids)) == whole.rstrip("\n")


def read(**record: Any) -> Any:
    """The conversation of a record, as a stage reads it."""
    algo = SimpleNamespace(file=named([record]), modules=None)
    config: Any = SimpleNamespace(algo=algo, model=SimpleNamespace(modules=None))
    task: Any = SimpleNamespace(name="environment", program=SimpleNamespace(modules=("agent",)))
    ((_, conversation),) = read_file(config, task)
    return conversation


def test_the_forms_of_openai_and_trl_are_one_conversation() -> None:
    """Arguments and tools as JSON texts, a reply of calls alone with null, keys that a table has filled with null."""
    openai = [{key: value for key, value in message.items() if key != "name"} | {"refusal": None} for message in TALK]
    for message in openai:
        for call in message.get("tool_calls", ()):
            message["content"] = None
            message["tool_calls"] = [
                {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
            ]
    table = [{"tool_calls": None, "name": None, "tool_call_id": None} | message for message in TALK]
    wanted = read(messages=TALK, tools=TOOLS)
    assert read(messages=openai, tools=TOOLS) == read(messages=table, tools=json.dumps(TOOLS)) == wanted
    assert [message.get("name") for message in wanted.messages] == [m.get("name") for m in TALK]


def test_results_belong_to_calls_by_their_ids() -> None:
    calls = [{"id": name, "function": {"name": name, "arguments": {}}} for name in ("look", "go")]
    results = [{"role": "tool", "content": "…", "tool_call_id": name} for name in ("go", "look")]
    ask, end = {"role": "user", "content": "?"}, {"role": "assistant", "content": "."}
    talk: list[dict[str, Any]] = [ask, {"role": "assistant", "content": None, "tool_calls": calls}, *results, end]
    assert [m["name"] for m in read(messages=talk, tools=TOOLS).messages if m["role"] == "tool"] == ["go", "look"]
    unmarked = [{**message, "tool_call_id": None} if "tool_call_id" in message else message for message in talk]
    assert [m["name"] for m in read(messages=unmarked, tools=TOOLS).messages if m["role"] == "tool"] == ["look", "go"]
