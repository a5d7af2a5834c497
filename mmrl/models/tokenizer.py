"""Chat template of a model as the config asks for it, tried before anything else is loaded."""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING

from mmrl.config import ModelConfig
from mmrl.errors import ConfigError
from mmrl.models.chat import first_line, template_of
from mmrl.models.template import use
from mmrl.models.template_facts import notes, refusals
from mmrl.system.files import user_path

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LOG = logging.getLogger("mmrl.models")
PLAIN = (
    "{{ bos_token or '' }}{% for m in messages %}"
    "{{ {'user': 'User: ', 'assistant': 'Assistant: '}.get(m.role, '') + m.content }}"
    "{{ eos_token if m.role == 'assistant' }}{{ '\\n\\n' }}{% endfor %}"
    "{{ 'Assistant:' if add_generation_prompt }}"
)
"""`model.chat_template=plain`: a transcript in plain text. A turn of the model ends with the end-of-text token."""
LONGEST_S = 20.0
"""Time that a chat template may take for a few short conversations."""


def prepare(tokenizer: PreTrainedTokenizerBase, model: ModelConfig) -> None:
    """Give a tokenizer the chat template, thinking mode and date of the config.

    Raises:
        ConfigError: there is no template, or none that writes right prompts.
    """
    if model.chat_template is not None:
        tokenizer.chat_template = PLAIN if model.chat_template == "plain" else _read_template(model.chat_template)
    elif isinstance(tokenizer.chat_template, dict):  # one for each use
        tokenizer.chat_template = tokenizer.chat_template.get("default")
    if not isinstance(tokenizer.chat_template, str):
        raise ConfigError(
            f"model.chat_template: the tokenizer of '{model.path}' has no chat template, as base models have none; use "
            "model.chat_template=plain, or a Jinja file"
        )
    if tokenizer.eos_token_id is None:
        raise ConfigError(f"model.path: the tokenizer of '{model.path}' has no end-of-turn (eos) token")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    use(tokenizer, thinking=model.thinking, date=model.date)
    if model.thinking and not template_of(tokenizer).thinks:
        raise ConfigError(f"model.thinking: the chat template of '{model.path}' has no thinking mode, expected false")
    try:
        problems = _limited(lambda: tuple(refusals(tokenizer)))
    except Exception as error:  # a template calls what it likes
        problems = (f"cannot write a prompt: {first_line(error)}",)
    if problems:
        raise ConfigError(
            f"model.chat_template: the chat template of '{model.path}' {problems[0]}; give another one, a Jinja file"
        )
    for note in notes(tokenizer):
        _say(model.path, note)


@cache
def _say(path: str, note: str) -> None:
    """Say it once in a process, however often a tokenizer is loaded."""
    LOG.warning("model.path=%s: %s", path, note)


def _read_template(path: str) -> str:
    try:
        return user_path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"model.chat_template: cannot read '{path}': {error}") from error


class _TooLong(BaseException):
    """Ends a template that does not; no template can catch it."""


def _limited(work: Callable[[], tuple[str, ...]]) -> tuple[str, ...]:
    """Return the result of `work`; a sentence where it does not end.

    Raises:
        Exception: what `work` raises.
    """
    results: list[tuple[str, ...] | Exception] = []

    def run() -> None:
        try:
            results.append(work())
        except _TooLong:
            pass
        except Exception as error:
            results.append(error)

    thread = threading.Thread(target=run, name="mmrl-template", daemon=True)
    thread.start()
    thread.join(LONGEST_S)
    if not results:
        # A template is a Python program to Jinja: only an exception from outside ends its loops.
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(_TooLong))
        thread.join(1.0)
        return (f"does not end: three short messages took it more than {LONGEST_S:g} s",)
    if isinstance(results[0], Exception):
        raise results[0]
    return results[0]
