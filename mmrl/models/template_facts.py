"""Facts of a chat template: what it can, what is to be said of it, and why it is refused."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mmrl.models.chat import render_prompt, template_of
from mmrl.models.replies import reader, tools_problem
from mmrl.models.template import ASKED, REPLY, USER, Messages, Template

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SYSTEM = {"role": "system", "content": "Be brief."}
ANSWER = {"role": "assistant", "content": REPLY}
NEXT = {"role": "user", "content": "And then?"}
CONVERSATIONS: Sequence[Messages] = (
    ({"role": "user", "content": "Who made it?"},),
    (SYSTEM, {"role": "user", "content": "Two lines:\n  {x}: 1, 2"}),
    (USER, {"role": "assistant", "content": "That one."}, NEXT),
)
"""Conversations whose prompts are compared with the tokenizer's own way."""
BEFORE: Sequence[Messages] = ((NEXT,), (USER, {"role": "assistant", "content": "No."}, NEXT))
"""Beginnings of conversations that go on after a reply."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateFacts:
    """Facts of the chat template of a loaded tokenizer, as text and truth values."""

    system: str
    """`role`, or `merged` where there is no system role: its text opens the user's turn."""
    thinking: bool
    """There is a thinking mode (`model.thinking`)."""
    no_tools: str
    """Why tools cannot be used; empty where they can."""
    ends: tuple[str, ...]
    """Tokens that end a turn of the model: the tokenizer's own and those that the template writes after a reply."""
    dated: bool
    """It writes the date, which is `model.date`."""
    marks: tuple[str, ...]
    """Special tokens that mark parts of a reply."""
    read: bool
    """Parts of a reply can be told apart."""
    notes: tuple[str, ...]
    """Sentences that are worth a line at the start of a run."""
    refused: tuple[str, ...]
    """Sentences, each after "the chat template": why it cannot be used; empty where it can."""


def template_facts(tokenizer: PreTrainedTokenizerBase) -> TemplateFacts:
    """Return the facts of a tokenizer's chat template.

    Raises:
        Exception: the template's own, where it cannot write a prompt at all.
    """
    template = template_of(tokenizer)
    return TemplateFacts(
        system="merged" if template.merges else "role",
        thinking=template.thinks,
        no_tools=tools_problem(tokenizer),
        ends=_ends(tokenizer),
        dated=template.dated,
        marks=tuple(sorted(template.marks)),
        read=reader(tokenizer) is not None,
        notes=tuple(notes(tokenizer)),
        refused=tuple(refusals(tokenizer)),
    )


def _ends(tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    return tuple(dict.fromkeys([str(tokenizer.eos_token), *template_of(tokenizer).ends]))


def notes(tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    """Yield what is worth a line at the start of a run."""
    template = template_of(tokenizer)
    if added := _ends(tokenizer)[1:]:
        yield f"the chat template ends the model's turns with {' and '.join(added)}: replies end there, too"
    if template.dated:
        yield f"the chat template writes the date, {template.day:%Y-%m-%d} (model.date)"
    # TRL, which says whether a reply can be read, takes a while to load.
    if template.marks and reader(tokenizer) is None:
        yield (
            f"{', '.join(sorted(template.marks))} mark parts of replies, and nobody knows how to read them: programs "
            "get all parts as one text; give the tokenizer a response_template"
        )
    if _rewritten(template):
        yield "the chat template writes earlier replies otherwise than they were sampled; sampled tokens stay"


def _rewritten(template: Template) -> bool:
    """Return True if a reply in a conversation is not what was asked for and given."""
    try:
        return not template.write([USER, ANSWER, NEXT]).startswith(template.write([USER]) + REPLY)
    except Exception:
        return False


def refusals(tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    """Yield sentences, each after "the chat template", why it cannot be used.

    Raises:
        Exception: the template's own, where it cannot write a prompt at all.
    """
    template = template_of(tokenizer)
    if ASKED not in template.write([{"role": "user", "content": ASKED}]).lower():
        yield "does not write the user's message"
        return
    for messages in CONVERSATIONS:
        if messages[0]["role"] == "system" and template.merges:
            continue
        try:
            text = template.write(messages)
        except Exception:
            if len(messages) == 1:
                raise
            continue  # it refuses a role, or an order of roles
        ids = tokenizer(text, add_special_tokens=False).input_ids
        if difference := _difference(tokenizer, render_prompt(tokenizer, messages), ids):
            yield f"gives other token ids here than by transformers: {difference}"
    for before in BEFORE:
        try:
            whole = template.write([*before, ANSWER, NEXT])
            going_on = template.after_reply([NEXT])
        except Exception:
            continue
        if (after := whole.rpartition(REPLY)[2]) != going_on:
            yield f"goes on after a reply in two ways: {_first(going_on, after)}"


def _difference(tokenizer: PreTrainedTokenizerBase, got: Sequence[int], expected: Sequence[int]) -> str:
    shorter = min(len(got), len(expected))
    first = next((n for n, (a, b) in enumerate(zip(got, expected, strict=False)) if a != b), shorter)
    if len(got) == len(expected) == first:
        return ""
    tokens = [tokenizer.convert_ids_to_tokens(list(ids)[first : first + 5]) for ids in (got, expected)]
    return f"from token {first} on {tokens[0]} for {tokens[1]}"


def _first(got: str, expected: str) -> str:
    start = next((n for n, (a, b) in enumerate(zip(got, expected, strict=False)) if a != b), 0)
    return f"{got[start : start + 40]!r} for {expected[start : start + 40]!r}"
