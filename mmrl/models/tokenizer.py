"""Chat template of a model as the config asks for it, tried before anything else is loaded."""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING

from mmrl.config import ModelConfig
from mmrl.errors import ConfigError
from mmrl.models.chat import first_line, template_of
from mmrl.models.template import use
from mmrl.models.template_facts import notes, refusals
from mmrl.system.files import user_path

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

LOG = logging.getLogger("mmrl.models")
PLAIN = (
    "{{ bos_token or '' }}{% for m in messages %}"
    "{{ {'user': 'User: ', 'assistant': 'Assistant: '}.get(m.role, '') + m.content }}"
    "{{ eos_token if m.role == 'assistant' }}{{ '\\n\\n' }}{% endfor %}"
    "{{ 'Assistant:' if add_generation_prompt }}"
)
"""`model.chat_template=plain`: a transcript in plain text. A turn of the model ends with the end-of-text token."""
CUT = "Don't cut 12345 words, x_1+=y2: CamelCase  IT'S\n\n\tété e\u0301 Å ﬁ ² 漢字かな \U0001f642 1,000.50 https://a.b/c?d=e#f"
"""Text that tokenizers cut in ways of their own."""
LONGEST_S = 20.0
"""Seconds of computing that a chat template may take for a few short conversations."""


def prepare(tokenizer: PreTrainedTokenizerBase, model: ModelConfig) -> None:
    """Give a tokenizer the chat template, thinking mode and date of the config.

    Raises:
        ConfigError: there is no template, or none that writes right prompts.
    """
    if model.chat_template is not None:
        tokenizer.chat_template = PLAIN if model.chat_template == "plain" else _read_template(model.chat_template)
    elif isinstance(named := tokenizer.chat_template, dict):  # one for each use
        if "default" not in named:
            raise ConfigError(
                f"model.chat_template: the chat templates of '{model.path}' are {', '.join(named)}, none is default; "
                "give one of them, a Jinja file"
            )
        tokenizer.chat_template = named["default"]
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
    said: list[str] = []

    def tried() -> tuple[str, ...]:
        problems = tuple(refusals(tokenizer))
        said.extend(() if problems else notes(tokenizer))
        return problems

    try:
        problems = _limited(tried)
    except Exception as error:  # a template calls what it likes
        problems = (f"cannot write a prompt: {first_line(error)}",)
    if problems:
        raise ConfigError(
            f"model.chat_template: the chat template of '{model.path}' {problems[0]}; give another one, a Jinja file"
        )
    for note in said:
        say(model.path, note)


def spells_otherwise(tokenizer: PreTrainedTokenizerBase, file: str | None) -> bool:
    """Return whether a tokenizer cuts texts otherwise than the `tokenizer.json` that it was read from.

    transformers builds the tokenizers of most classes anew, and takes of the file the vocabulary alone; a class that
    was never the file's own (LlamaTokenizer over GPT-2's bytes) spells in tokens that the model was not trained on.
    """
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    backend = getattr(tokenizer, "backend_tokenizer", None)
    if file is None or backend is None or type(tokenizer) is PreTrainedTokenizerFast:
        return False
    return _pieces(backend) != _pieces(Tokenizer.from_file(file))


def _pieces(backend: Tokenizer) -> list[str]:
    """Return what a text is cut into before the vocabulary is asked, but for a blank in front: settings give that."""
    text = backend.normalizer.normalize_str(CUT) if backend.normalizer is not None else CUT
    cutting = backend.pre_tokenizer
    pieces = [piece for piece, _ in cutting.pre_tokenize_str(text)] if cutting is not None else [text]
    return [pieces[0].lstrip(" \u2581\u0120"), *pieces[1:]]


@cache
def say(path: str, note: str) -> None:
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
    started, clocks = time.monotonic(), list[int]()

    def run() -> None:
        try:
            # A loop that does not end computes; the clock on the wall also counts what else the machine does.
            if hasattr(time, "pthread_getcpuclockid"):
                clocks.append(time.pthread_getcpuclockid(threading.get_ident()))
            results.append(work())
        except _TooLong:
            pass
        except Exception as error:
            results.append(error)

    thread = threading.Thread(target=run, name="mmrl-template", daemon=True)
    thread.start()
    spent = 0.0
    while thread.is_alive() and spent < LONGEST_S:
        thread.join(LONGEST_S / 10)
        with suppress(OSError):  # it has ended
            spent = time.clock_gettime(clocks[0]) if clocks else time.monotonic() - started
    if not results:
        # A template is a Python program to Jinja: only an exception from outside ends its loops.
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(_TooLong))
        thread.join(1.0)
        return (f"does not end: a few short messages took it more than {LONGEST_S:g} s",)
    if isinstance(results[0], Exception):
        raise results[0]
    return results[0]
