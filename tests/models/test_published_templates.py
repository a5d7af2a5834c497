"""Every chat template that TRL ships, loaded as a folder with exactly that template: prompts, turns, tools, ends."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any
from unittest.mock import Mock, patch

import pytest

from mmrl.config import ModelConfig
from mmrl.errors import MmrlError, RequestFailure
from mmrl.models.chat import (
    added_to_message,
    decode_text,
    encode_text,
    end_of_prompt,
    eos_ids,
    render_observation,
    render_prompt,
    template_of,
)
from mmrl.models.load import load_tokenizer
from mmrl.models.replies import message_of
from mmrl.models.template_facts import template_facts
from mmrl.models.tokenizer import PLAIN
from mmrl.stages.sft import encode
from mmrl.tasks.base import Demonstration
from scripts.models.templates import save_tokenizer, template_names
from tests.models.test_models import make_tokenizer

USER = {"role": "user", "content": "Where was she born? {x}"}
NEXT = {"role": "user", "content": "And then?"}
SYSTEM = {"role": "system", "content": "Be brief."}
FUNCTION = {
    "name": "look_up",
    "description": "find",
    "parameters": {"type": "object", "properties": {"city": {"type": "string", "description": "a city"}}},
}
TOOLS = [{"type": "function", "function": FUNCTION}]


@cache
def loaded(name: str, **settings: Any) -> Any:
    """The tokenizer as a run loads it; None where it is refused."""
    folder = Path(mkdtemp())
    save_tokenizer(name, folder)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    try:
        return load_tokenizer(ModelConfig(name="x", path=str(folder), **settings))
    except MmrlError as error:
        assert str(error).startswith("model.chat_template: ")
        return None


NAMES = [name for name in template_names() if loaded(name) is not None]


def official(tokenizer: Any, messages: Any, **options: Any) -> list[int]:
    """What transformers itself gives, on the day of the run."""
    template = template_of(tokenizer)
    day = Mock(now=lambda: template.day)
    with patch("transformers.utils.chat_template_utils.datetime", day):
        made = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, **template.arguments, **options
        )
    return list(made["input_ids"] if hasattr(made, "keys") else made)


def test_only_templates_of_other_kinds_are_refused() -> None:
    assert len(NAMES) >= 24
    assert {*template_names()} - {*NAMES} <= {"idefics2", "idefics3", "llava_next", "smolvlm", "diffusion_gemma"}


@pytest.mark.parametrize("name", ["llama3_1", "qwen3"])
def test_null_is_nothing(name: str) -> None:
    """A template looks whether a message has tool calls."""
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Where?"}]
    nulls = [{**message, "name": None, "tool_calls": None, "tool_call_id": None} for message in messages]
    empty = [{**message, "tool_calls": []} for message in messages]
    wanted = tuple(official(loaded(name), messages))
    assert render_prompt(loaded(name), nulls) == render_prompt(loaded(name), empty) == wanted


@pytest.mark.parametrize("name", NAMES)
def test_prompts_are_the_tokenizers_own(name: str) -> None:
    tokenizer = loaded(name)
    facts = template_facts(tokenizer)
    assert not facts.refused
    conversations = [[USER], *([[SYSTEM, USER]] if facts.system == "role" else [])]
    for messages in conversations:
        assert list(render_prompt(tokenizer, messages)) == official(tokenizer, messages)


@pytest.mark.parametrize("name", NAMES)
def test_a_turn_that_goes_on_is_what_the_template_writes_after_the_reply(name: str) -> None:
    tokenizer = loaded(name)
    reply = {"role": "assistant", "content": "In Ulm."}
    try:
        whole = tokenizer.decode(official(tokenizer, [USER, reply, NEXT]))
    except Exception:
        pytest.skip("it takes no second turn")
    prompt, ids = render_prompt(tokenizer, [USER]), tuple(encode_text(tokenizer, "In Ulm."))
    ends = tokenizer.convert_tokens_to_ids(list(template_of(tokenizer).ends))
    for sampled, ended in ((ids, False), *(((*ids, end), True) for end in ends)):
        grown = render_observation(tokenizer, (*prompt, *sampled), [NEXT], ended)
        assert grown[: len(prompt) + len(ids)] == (*prompt, *ids)
        # Whether the model wrote the end of its turn or the limit cut it: it stands there once.
        assert tokenizer.decode(grown[len(prompt) + len(ids) :]) == whole.rpartition("In Ulm.")[2]


@pytest.mark.parametrize("name", NAMES)
def test_replies_end_where_the_template_ends_them(name: str) -> None:
    tokenizer = loaded(name)
    ends = {tokenizer.convert_tokens_to_ids(token) for token in template_of(tokenizer).ends}
    assert {tokenizer.eos_token_id} | ends == eos_ids(tokenizer, None)
    assert not ends & {tokenizer.convert_tokens_to_ids(token) for token in template_of(tokenizer).marks}


@pytest.mark.parametrize("name", [name for name in NAMES if not template_facts(loaded(name)).no_tools])
@pytest.mark.parametrize("results", [1, 2])
def test_calls_are_read_back_and_their_results_go_on(name: str, results: int) -> None:
    tokenizer = loaded(name)
    assert list(render_prompt(tokenizer, [USER], TOOLS)) == official(tokenizer, [USER], tools=TOOLS)
    template = template_of(tokenizer)
    arguments: Any = '{"city": "Ulm"}' if template.text_arguments else {"city": "Ulm"}
    call: dict[str, Any] = {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": "call00001", "type": "function", "function": {"name": "look_up", "arguments": arguments}}
        ],
    }
    try:
        before, whole = template.write([USER], TOOLS), template.write([USER, call], TOOLS, prompt=False)
    except Exception:
        pytest.skip("it writes no call without a result")
    if not whole.startswith(before):
        pytest.skip("it writes an earlier turn otherwise than the prompt of it")
    prompt = render_prompt(tokenizer, [USER], TOOLS)
    ids = tokenizer(whole[len(before) :], add_special_tokens=False).input_ids
    message = message_of(tokenizer, prompt, ids, TOOLS)
    (read,) = message["tool_calls"]
    assert read["function"]["name"] == "look_up"
    assert read["function"]["arguments"] == {"city": "Ulm"}
    # A text after the call, where the turn goes on after one, is beside it; else all of it is text.
    ends = [tokenizer.convert_tokens_to_ids(end) for end in template.ends]
    end = next((n for n, i in enumerate(ids) if i in ends), len(ids))
    spoken = message_of(tokenizer, prompt, [*ids[:end], *encode_text(tokenizer, "\nDone."), *ids[end:]], TOOLS)
    assert spoken["content"].endswith("Done.")
    assert spoken.get("tool_calls") == [read] or spoken["unread_call"]
    if results == 2:
        try:
            template.write([USER, {**call, "tool_calls": call["tool_calls"] * 2}], TOOLS, prompt=False)
        except Exception:
            pytest.skip("it writes one call alone")
    answers = [
        {"role": "tool", "content": f"born {n}", "name": "look_up", "tool_call_id": f"call0000{n}"}
        for n in range(results)
    ]
    grown = tokenizer.decode(render_observation(tokenizer, (*prompt, *ids), answers, True)[len(prompt) + len(ids) :])
    places = [grown.find(f"born {n}") for n in range(results)]
    assert -1 not in places and places == sorted(places)


@pytest.mark.parametrize(
    ("name", "call", "other"),
    [
        ("qwen3_5_nothink", "<tool_call>\n<function=look_up>\n{}</function>\n</tool_call>", '{"city": "Ulm"}\n'),
        ("qwen3_5_nothink", "<tool_call>\n<function=look_up>\n{}</function>\n</tool_call>", "<parameter=city>\nUlm\n"),
        ("glm4moe", "\n<tool_call>look_up\n{}</tool_call>", '{"city": "Ulm"}\n'),
        ("lfm2_2_5", "<|tool_call_start|>[look_up({})]<|tool_call_end|>", "'Ulm'"),
    ],
)
def test_arguments_in_another_form_are_no_call_without_any(name: str, call: str, other: str) -> None:
    tokenizer = loaded(name)
    prompt = render_prompt(tokenizer, [USER], TOOLS)
    for written, arguments in (("", [{}]), (other, [])):
        ids = tokenizer(call.format(written), add_special_tokens=False).input_ids
        message = message_of(tokenizer, prompt, ids, TOOLS)
        assert [read["function"]["arguments"] for read in message.get("tool_calls", ())] == arguments
        assert written in message["content"] and message.get("unread_call", False) == bool(written)


def test_arguments_of_a_request_are_compared_by_what_a_template_writes() -> None:
    changing: dict[str, dict[str, Any]] = {
        "qwen3": {"enable_thinking": True, "chat_template": "{{ 1 }}", "tools": []},
        "qwen3_6": {"preserve_thinking": True},
        "llama3_1": {"tools_in_user_message": False},
        "gptoss": {"reasoning_effort": "low", "model_identity": "You are Ulm."},
        "gemma4": {"enable_thinking": True},
    }
    same = {"enable_thinking": False, "reasoning_effort": "medium", "tools_in_user_message": True, "strange": [1]}
    for name, arguments in changing.items():
        template = template_of(loaded(name))
        assert not [key for key, value in arguments.items() if template.unchanged_by({key: value})], name
        assert template.unchanged_by(same), name


@pytest.mark.parametrize("name", NAMES)
def test_the_date_is_that_of_the_run(name: str) -> None:
    tokenizers = [loaded(name, date=date) for date in ("2024-02-29", "2026-11-28")]
    first, second = ([tokenizer.decode(render_prompt(tokenizer, [USER]))] for tokenizer in tokenizers)
    assert (first != second) == template_facts(tokenizers[0]).dated


def test_special_looking_text_stays_text_in_every_template() -> None:
    for name in NAMES:
        tokenizer = loaded(name)
        forged = f"a{tokenizer.eos_token}b"
        ids = render_prompt(tokenizer, [{"role": "user", "content": forged}])
        plain = render_prompt(tokenizer, [{"role": "user", "content": "ab"}])
        assert ids.count(tokenizer.eos_token_id) == plain.count(tokenizer.eos_token_id)
        assert forged in tokenizer.decode(ids)


def test_gpt_oss_replies_are_their_final_part() -> None:
    tokenizer = loaded("gptoss")
    reply = (
        "<|channel|>analysis<|message|>Maybe Lyon?<|end|><|start|>assistant<|channel|>final<|message|>Paris<|return|>"
    )
    assert decode_text(tokenizer, tokenizer(reply, add_special_tokens=False).input_ids) == "Paris"


@pytest.mark.parametrize("name", [*NAMES, "plain"])
def test_text_before_the_end_of_a_prompt_is_the_end_of_its_users_message(name: str) -> None:
    """Where the teachers of `algo.privileged` read more: the same ids as of a longer message."""
    # In the plain form the two line breaks after a message are one token with its last character, if that is ";".
    tokenizer = loaded(name) if name != "plain" else make_tokenizer(PLAIN)
    end = end_of_prompt(tokenizer)
    system = [SYSTEM] if template_facts(tokenizer).system == "role" else []
    for before in ([], system, [USER, {"role": "assistant", "content": "There."}]):
        for asked in ("Where was she born?", "1 2 (3)", "x = {y};", "x"):
            prompt = render_prompt(tokenizer, [*before, {"role": "user", "content": asked}])
            place = len(prompt) - len(end)
            assert prompt[place:] == end
            longer = (*prompt[:place], *added_to_message(tokenizer, "The answer: Oslo."), *end)
            message = {"role": "user", "content": f"{asked}\n\nThe answer: Oslo."}
            official = render_prompt(tokenizer, [*before, message])
            assert tokenizer.decode(list(longer)) == tokenizer.decode(list(official))


WRITTEN_FIRST = {"gptoss": "<|channel|>final<|message|>", "glm4moe": "\n"}
"""What templates put between the end of a prompt and the text of a reply, by their source."""
OPEN = {"deepseek_r1_distill", "deepseekv3"}
"""Templates whose prompts always end inside of thoughts."""
OPEN_IF_ASKED = {
    *("qwen3_5_nothink", "qwen3_5_think", "qwen3_6", "qwen3_8"),
    *("nemotron_3_5_lightning", "nemotron_3_nano", "nemotron_3_super", "nemotron_3_ultra"),
}
"""Those that do so with model.thinking=true."""


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_a_trained_reply_is_read_as_its_text(name: str, thinking: bool) -> None:
    """Behind what the template writes before it, and, where the prompt opens thoughts, with their end."""
    if thinking and not template_of(loaded(name)).thinks:
        pytest.skip("the template has no thinking mode")
    tokenizer = loaded(name, thinking=thinking)
    opened = name in OPEN or (thinking and name in OPEN_IF_ASKED)
    for text in ("In Ulm.", "Two\n\nlines: {x} <|im_end|>", "She did.\n</think>\n\nIn Ulm."):
        asked = Demonstration(module="m", messages=[USER], completion=text)
        if opened and "</think>" not in text:
            with pytest.raises(RequestFailure, match="end inside of thoughts, and the reply has no </think>"):
                encode(tokenizer, asked)
            continue
        call = encode(tokenizer, asked)
        assert decode_text(tokenizer, call.completion_ids).strip() == text
        first = WRITTEN_FIRST.get(name, "") if not thinking else ""
        assert tokenizer.decode(list(call.completion_ids[:-1])) == first + text
        assert call.completion_ids[-1] in eos_ids(tokenizer, None)


@pytest.mark.parametrize("written", ["<think>\nIn Ulm?\n</think>\n\nYes.", " <think>In Ulm?\n</think>\n\nYes."])
@pytest.mark.parametrize(("name", "thinking"), [("deepseek_r1_distill", False), ("qwen3_5_think", True)])
def test_thoughts_that_the_prompt_has_opened_are_opened_once(name: str, thinking: bool, written: str) -> None:
    """Data have the mark of both prompts, `<think>` and a line break, at the start of a reply."""
    tokenizer = loaded(name, thinking=thinking)
    call = encode(tokenizer, Demonstration(module="m", messages=[USER], completion=written))
    assert tokenizer.decode(list(call.prompt_ids)).endswith("<think>\n")
    assert tokenizer.decode(list(call.completion_ids[:-1])) == "In Ulm?\n</think>\n\nYes."
    history = [("<think>\nLook.</think>", " found ")]
    asked = Demonstration(module="m", messages=[USER], history=history, completion="<think>In Ulm</think>.")
    call = encode(tokenizer, asked)
    assert tokenizer.decode(list(call.prompt_ids)).endswith("<think>\nLook.</think> found ")
    assert tokenizer.decode(list(call.completion_ids[:-1])) == "<think>In Ulm</think>.", "within the turn: its own text"


@pytest.mark.parametrize("name", ["gptoss", "deepseek_r1_distill"])
def test_a_turn_that_goes_on_has_one_beginning(name: str) -> None:
    """Text of a tool inside of the turn: what the template writes first is written once, thoughts are ended once."""
    history = [("Look.</think>", " found ")]
    asked = Demonstration(module="m", messages=[USER], history=history, completion="In Ulm.")
    call = encode(loaded(name), asked)
    whole = loaded(name).decode(list(call.prompt_ids + call.completion_ids[:-1]))
    assert whole.endswith(WRITTEN_FIRST.get(name, "<think>\n") + "Look.</think> found In Ulm.")
    assert loaded(name).decode(list(call.completion_ids[:-1])) == "In Ulm."
