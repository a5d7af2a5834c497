"""Chat templates of models that were made elsewhere: without a system role, broken, or not there at all."""

from datetime import datetime
from unittest.mock import Mock, patch

import pytest

from mmrl.errors import ConfigError
from mmrl.models.chat import encode_text, render_observation, render_prompt, template_of
from mmrl.models.load import load_tokenizer
from mmrl.models.template import use
from tests.models.test_models import TEMPLATE, make_folder, make_tokenizer

# as Gemma's: https://huggingface.co/google/gemma-2-2b-it/blob/main/tokenizer_config.json
RAISING = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>model\n' }}{% endif %}"
)
SILENT = "{% for m in messages if m.role != 'system' %}{{ '<|im_start|>' + m.content + '<|im_end|>' }}{% endfor %}"
SYSTEM, USER = {"role": "system", "content": "the cat"}, {"role": "user", "content": "the mat"}
MERGED = {"role": "user", "content": "the cat\n\nthe mat"}


@pytest.mark.parametrize("template", [RAISING, SILENT])
def test_the_system_text_opens_the_first_user_turn_where_a_template_has_no_system_role(template):
    tokenizer = make_tokenizer(template)
    assert render_prompt(tokenizer, [SYSTEM, USER]) == render_prompt(tokenizer, [MERGED])
    assert render_prompt(tokenizer, [SYSTEM]) == render_prompt(tokenizer, [{"role": "user", "content": "the cat"}])
    answer = {"role": "assistant", "content": "dog"}
    assert render_prompt(tokenizer, [SYSTEM, USER, answer, USER]) == render_prompt(tokenizer, [MERGED, answer, USER])


def test_a_template_with_a_system_role_keeps_it():
    tokenizer = make_tokenizer(TEMPLATE)
    assert render_prompt(tokenizer, [SYSTEM, USER]) != render_prompt(tokenizer, [MERGED])


def test_a_growing_context_goes_on_under_a_template_without_a_system_role():
    tokenizer = make_tokenizer(RAISING)
    prompt = render_prompt(tokenizer, [SYSTEM, USER])
    sampled = (*prompt, *encode_text(tokenizer, "the dog"), tokenizer.eos_token_id)
    added = render_observation(tokenizer, sampled, [USER], True)[len(sampled) :]
    assert tokenizer.decode([*added]) == "\n<|im_start|>user\nthe mat<|im_end|>\n<|im_start|>model\n"


# as Qwen3's: thoughts of earlier replies are left out, and with them what comes before the last of them
CUTTING = TEMPLATE.replace(
    "message.content",
    "(message.content.split('</think>')[-1].lstrip('\n') if message.role == 'assistant' else message.content)",
)


def test_replies_shown_in_a_prompt_are_whole_where_a_template_cuts_thoughts():
    tokenizer, plain = make_tokenizer(CUTTING), make_tokenizer(TEMPLATE)
    reply = "<think> the cat </think> the mat <think> dog </think> <answer> the dog </answer>"
    shown = [SYSTEM, USER, {"role": "assistant", "content": reply}, USER]
    assert reply not in tokenizer.apply_chat_template(shown, tokenize=False)
    assert reply in tokenizer.decode([*render_prompt(tokenizer, shown)])
    assert render_prompt(tokenizer, shown) == render_prompt(plain, shown)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('this model wants a date') }}", "this model wants a date"),
        ("{% for m in messages %}{{ m.content }", "unexpected '}'"),
        ("{{ messages | no_such_filter }}", "no_such_filter"),
    ],
)
def test_a_template_that_cannot_write_a_prompt_is_refused_with_its_own_words(tmp_path, template, message):
    with pytest.raises(ConfigError) as caught:
        load_tokenizer(make_folder(tmp_path, template))
    assert str(caught.value).startswith("model.chat_template:") and message in str(caught.value)


def test_a_base_model_without_a_template_is_refused_with_the_setting_that_gives_one(tmp_path):
    config = make_folder(tmp_path, None)
    with pytest.raises(ConfigError, match=r"has no chat template.*model.chat_template=plain"):
        load_tokenizer(config)
    tokenizer = load_tokenizer(config.model_copy(update={"chat_template": "plain"}))
    shown = render_prompt(tokenizer, [SYSTEM, USER, {"role": "assistant", "content": "dog"}, USER])
    text = tokenizer.decode([*shown])
    assert text == "the cat\n\nUser: the mat\n\nAssistant: dog<|im_end|>\n\nUser: the mat\n\nAssistant:"


def test_of_several_templates_the_default_one_is_used(tmp_path):
    config = make_folder(tmp_path, {"default": TEMPLATE, "tool_use": RAISING})
    assert load_tokenizer(config).chat_template == TEMPLATE


def test_of_several_templates_none_may_be_left_to_chance(tmp_path):
    config = make_folder(tmp_path, {"tool_use": TEMPLATE, "rag": RAISING})
    with pytest.raises(ConfigError, match=r"the chat templates of .* are tool_use, rag, none is default"):
        load_tokenizer(config)


@pytest.mark.parametrize(
    "form", ["%d %b %Y", "%-d. %B %y, %A", "%j %W %H:%M:%S %p", "%e|%D|%F", "100%%, %%Y, %%%Y%m%d", "-"]
)
@pytest.mark.parametrize(
    "before", ["", "\n", "  {% if true %}\n", "{% macro day() %}{{ strftime_now('%F') }}{% endmacro %}"]
)
def test_a_template_sees_the_day_of_the_run_as_by_transformers_on_that_day(before, form):
    close = "{% endif %}" if "if" in before else ""
    tokenizer = make_tokenizer(
        f"{before} {{% if strftime_now is defined %}}{{{{ strftime_now('{form}') }}}}{{% endif %}}{close}"
    )
    use(tokenizer, thinking=False, date="2024-02-29")
    with patch("transformers.utils.chat_template_utils.datetime", Mock(now=lambda: datetime(2024, 2, 29))):
        expected = tokenizer.apply_chat_template([USER], tokenize=False)
    assert template_of(tokenizer).write([USER], prompt=False) == expected
    assert datetime(2024, 2, 29).strftime(form) in expected
