"""Stock phrases as single tokens: how a tiny model's tokenizer grows for programs whose prompts are mostly boilerplate.

Used by `scripts/tiny_model/build.py` for models that continue an earlier one. A DSPy prompt is some 250 tokens of
instructions around a dozen that matter; in a world of two dozen prompts each instruction is one phrase, and a tiny
model needs no more than to know which. Prompts then have a fifth of their tokens, in the build and in every run.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import cast

import torch
from transformers import AddedToken, PreTrainedModel, PreTrainedTokenizerFast

from mmrl.tasks.base import Demonstration

STOCK_SHARE = 0.9
"""A line of a module's prompts is stock if this share of them has it."""
PIECE_COUNT = 30
"""Runs of small words that the demonstrations have this often become tokens too ..."""
PIECE_TOKENS = 4
"""... if they were at least this many before: what the model can read already stays as it is."""
TAGS = re.compile(
    r"\n*\[\[ ## \w+ ## \]\]\n?|<\|\w+\|>"
    r'|<tool_call>\n\{"name": "\w+", "arguments": \{"\w+": "|"\}\}\n</tool_call>'
    r'|<tool_response>\n(?:\{"\w+": "\w+"\}\n</tool_response>)?|\n</tool_response>|</?[a-z_]+>'
)
"""Field headers of DSPy's chat format with the line breaks around them, markup of agents, calls of tools."""
PIECE = r" ?(?<![^\W_])(?!(?:{names})\b)[A-Za-z][a-z]*(?: [a-z]+)*[ .,:?]{{0,2}}(?![^\W_])"
"""A run of small words, the first perhaps capitalised: never part of a name."""


def stock_phrases(demonstrations: Sequence[Demonstration], names: Iterable[str] | None = None) -> list[str]:
    """Texts that are to be one token each, in a fixed order: stock passages of prompts, tags, runs of small words.

    Args:
        names: words that no run of small words may begin with, since they are part of names; None: no such runs.
    """
    found = dict.fromkeys(_passages(demonstrations))
    texts = [text for d in demonstrations for text in (*(m["content"] for m in d.messages), d.completion)]
    turns = [turn for d in demonstrations for pair in d.history for turn in pair]
    texts += [part for t in turns for part in ([t] if isinstance(t, str) else [m["content"] for m in t])]
    found |= dict.fromkeys(tag for tag, count in _count(TAGS, texts).items() if count >= PIECE_COUNT)
    if names is None:
        return list(found)
    cut = re.compile("|".join(map(re.escape, sorted(found, key=len, reverse=True))))
    rest = [part for text in texts for part in cut.split(text) if part]
    pieces = _count(re.compile(PIECE.format(names="|".join(sorted(map(re.escape, names))))), rest)
    return [*found, *(piece for piece, count in sorted(pieces.items()) if count >= PIECE_COUNT and len(piece) > 3)]


def _passages(demonstrations: Sequence[Demonstration]) -> Iterator[str]:
    """Longest runs of whole lines that a module's prompts share."""
    prompts: dict[tuple[str, str], list[str]] = defaultdict(list)
    for demonstration in demonstrations:
        for message in demonstration.messages:
            prompts[demonstration.module, message["role"]].append(message["content"])
    for texts in prompts.values():
        lines = Counter(line for text in texts for line in set(text.split("\n")))
        stock = {line for line, count in lines.items() if count >= STOCK_SHARE * len(texts)}
        runs = Counter(run for text in texts for run in _runs(text.split("\n"), stock))
        yield from (run for run, count in runs.items() if len(run) > 20 and count >= STOCK_SHARE * len(texts))


def _runs(lines: Sequence[str], stock: set[str]) -> Iterator[str]:
    """Runs of consecutive stock lines, with the line breaks between them and around them."""
    run: list[str] = []
    for number, line in enumerate([*lines, None]):
        if line is not None and line in stock:
            run += ["\n" * bool(number and not run), line, "\n" * (number < len(lines) - 1)]
        elif run:
            yield "".join(run)
            run = []


def _count(pattern: re.Pattern[str], texts: Iterable[str]) -> Counter[str]:
    return Counter(found for text in texts for found in pattern.findall(text))


def extend(
    tokenizer: PreTrainedTokenizerFast,
    model: PreTrainedModel,
    demonstrations: Sequence[Demonstration],
    names: Iterable[str] | None,
    seed: int,
) -> list[str]:
    """Add the stock phrases that are several tokens so far to the tokenizer and to the model's embeddings.

    A new row of the embeddings starts as the mean of the rows of the tokens that it replaces. Returns the phrases.
    """
    found = {p: tokenizer(p, add_special_tokens=False).input_ids for p in stock_phrases(demonstrations, names)}
    parts = [ids for ids in found.values() if len(ids) >= PIECE_TOKENS]
    phrases = [phrase for phrase, ids in found.items() if len(ids) >= PIECE_TOKENS]
    tokenizer.add_tokens([AddedToken(phrase, normalized=False, special=False) for phrase in phrases])
    torch.manual_seed(seed)
    model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    rows = cast("torch.nn.Embedding", model.get_input_embeddings()).weight
    with torch.no_grad():
        for number, ids in enumerate(parts, start=len(tokenizer) - len(phrases)):
            rows[number] = rows[ids].mean(0) + 0.02 * torch.randn(rows.shape[1])
    return phrases
