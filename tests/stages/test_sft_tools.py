"""Supervised conversations with tools: each reply is trained as a rollout would have sampled it."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from mmrl.errors import RequestFailure
from mmrl.models.replies import message_of, tools_problem
from mmrl.models.template import use
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


CLOSED = "prompts of the model's chat template close the thoughts, and the reply has some; use model.thinking=true, or "


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


TASK: Any = SimpleNamespace(name="environment", program=SimpleNamespace(modules=("agent",)))


def config_of(file: str) -> Any:
    return SimpleNamespace(algo=SimpleNamespace(file=file, modules=None), model=SimpleNamespace(modules=None))


def read(**record: Any) -> Any:
    """The conversation of a record, as a stage reads it."""
    ((_, conversation),) = read_file(config_of(named([record])), TASK)
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


def test_keys_of_other_calls_in_a_table_are_no_arguments(tmp_path: Path) -> None:
    """Parquet has one struct for the arguments of all calls; a null in a JSON text is the record's own."""
    calls = [
        {"id": "a", "function": {"name": "look", "arguments": {"at": "sea", "far": {"by": 2}}}},
        {"id": "b", "function": {"name": "go", "arguments": {"to": [{"x": 1}, {"y": 2}]}}},
    ]
    talk = [TALK[0], {"role": "assistant", "content": "", "tool_calls": calls}, {**TALK[-1], "content": "."}]
    table = pyarrow.Table.from_pylist([{"messages": talk, "tools": TOOLS}])
    pyarrow.parquet.write_table(table, tmp_path / "x.parquet")
    assert table.to_pylist()[0]["messages"][1]["tool_calls"][0]["function"]["arguments"]["to"] is None
    (_, conversation), *_ = read_file(config_of(str(tmp_path / "x.parquet")), TASK)
    assert isinstance(conversation, Conversation) and conversation.tools == TOOLS
    given = [call["function"]["arguments"] for call in conversation.messages[1]["tool_calls"]]
    assert given == [{"at": "sea", "far": {"by": 2}}, {"to": [{"x": 1}, {"y": 2}]}]
    for arguments in ({"at": None}, '{"at": null}'):
        own = [TALK[0], {**TALK[1], "tool_calls": [{"function": {"name": "look", "arguments": arguments}}]}]
        assert read(messages=own, tools=TOOLS).messages[1]["tool_calls"][0]["function"]["arguments"] == {"at": None}


@pytest.mark.parametrize("template", [name for name in able() if not name.startswith("nemotron")])
def test_thoughts_are_trained_or_refused(template: str) -> None:
    """Never left out without a word."""
    loaded, trained = tokenizer(template), []
    for name in ("reasoning_content", "thinking"):
        talk = [TALK[0], {**TALK[1], name: "Look first."}, *TALK[2:]]
        try:
            first, *_ = turns_of(loaded, read(messages=talk, tools=TOOLS))
        except RequestFailure as error:
            assert f"messages.1.{name}: the model's chat template does not write it" == str(error) or (
                "shown otherwise" in str(error) or CLOSED in str(error)
            )
        else:
            read_back = message_of(loaded, first.prompt_ids, first.completion_ids, TOOLS)
            assert read_back["reasoning_content"].strip() == "Look first."
            trained.append(name)
    assert trained == {"qwen3": ["reasoning_content"], "gptoss": ["thinking"]}.get(template, trained)


@pytest.mark.parametrize("template", ["qwen3", "qwen3_5_think", "glm4moe", "gptoss", "gemma4_v5"])
def test_thoughts_in_the_content_are_those_of_the_templates_field(template: str) -> None:
    """Their marks are the template's: it would write an empty block of thoughts before a content with them."""
    field, loaded = "thinking" if template == "gptoss" else "reasoning_content", tokenizer(template)
    use(loaded, thinking=True, date=None)
    plain = [TALK[0], {**TALK[1], field: "Look first."}, *TALK[2:5], {**TALK[5], field: "Look,\nthen say."}]
    marked = [
        *(TALK[0], {**TALK[1], "content": "<think>\nLook first.\n</think>\n\n"}, *TALK[2:5]),
        {**TALK[5], "content": "<think>Look,\nthen say.</think>\nA ship that sinks."},
    ]
    expected = list(turns_of(loaded, read(messages=plain, tools=TOOLS)))
    assert list(turns_of(loaded, read(messages=marked, tools=TOOLS))) == expected
    assert loaded.decode(list(expected[0].completion_ids)).count("Look first.") == 1


def test_thoughts_in_the_content_stay_where_a_template_writes_none() -> None:
    loaded = tokenizer("qwen2_5")
    text = "<think>\nLook.\n</think>\n\nA ship."
    *_, last = turns_of(loaded, read(messages=[*TALK[:5], {**TALK[5], "content": text}], tools=TOOLS))
    assert loaded.decode(list(last.completion_ids[:-1])) == text


@pytest.mark.parametrize("template", ["qwen3", "qwen3_5_think", "glm4moe"])
@pytest.mark.parametrize("reply", [{"content": "<think>a</think>b"}, {"content": "b", "reasoning_content": "a"}])
def test_thoughts_behind_prompts_that_close_them_are_refused(template: str, reply: Any) -> None:
    loaded = tokenizer(template)
    use(loaded, thinking=False, date=None)
    with pytest.raises(RequestFailure, match=f"messages.5: {CLOSED}replies without thoughts"):
        list(turns_of(loaded, read(messages=[*TALK[:5], {**TALK[5], **reply}], tools=TOOLS)))
    assert list(turns_of(loaded, read(messages=TALK, tools=TOOLS)))


def test_a_reply_of_weight_0_is_read_and_not_trained() -> None:
    loaded = tokenizer("qwen2_5")
    every = list(turns_of(loaded, read(messages=TALK, tools=TOOLS)))
    chosen = list(turns_of(loaded, read(messages=[TALK[0], {**TALK[1], "weight": 0}, *TALK[2:]], tools=TOOLS)))
    assert len(every) == 3 and chosen == every[1:]


def test_results_belong_to_calls_by_their_ids() -> None:
    calls = [{"id": name, "function": {"name": name, "arguments": {}}} for name in ("look", "go")]
    results = [{"role": "tool", "content": "…", "tool_call_id": name} for name in ("go", "look")]
    ask, end = {"role": "user", "content": "?"}, {"role": "assistant", "content": "."}
    talk: list[dict[str, Any]] = [ask, {"role": "assistant", "content": None, "tool_calls": calls}, *results, end]
    assert [m["name"] for m in read(messages=talk, tools=TOOLS).messages if m["role"] == "tool"] == ["go", "look"]
    unmarked = [{**message, "tool_call_id": None} if "tool_call_id" in message else message for message in talk]
    assert [m["name"] for m in read(messages=unmarked, tools=TOOLS).messages if m["role"] == "tool"] == ["look", "go"]
