"""What the report's rollout browser shows: calls of every step, compressed, read by the page's script on demand.

`html` puts the blocks into `report.html` and `templates/browser.js` draws them: the journal, as far as the limits go.
"""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from mmrl.errors import MmrlError
from mmrl.records import Forest, Rollout
from mmrl.report.journal import read_step
from mmrl.report.overview import Item, Overview
from mmrl.report.stats import number
from mmrl.report.text import clean
from mmrl.report.trees import (
    EntryFields,
    Node,
    abridged,
    asked_lines,
    coloured,
    largest_advantage,
    rollout_line,
    trees,
    visible,
)
from mmrl.secrets import hide
from mmrl.system.files import JsonObject

if TYPE_CHECKING:
    from tokenizers import Tokenizer

ROLLOUTS = 10_000
"""Rollouts that go into a page, and"""
SIZE = 6_000_000
"""bytes of its blocks: what does not fit between the first step and the last, which are always there, is left out."""
PROMPT = (800, 2400)
"""Characters shown of a prompt: of its start and of its end."""


Place: TypeAlias = tuple[int, str | None]
"""A training step, or with a split the evaluation after it (of `mmrl eval`: that part of its items)."""


@dataclass(frozen=True, slots=True)
class Block:
    """One step's training rollouts, or a journal of an evaluation."""

    key: str
    """Unique in the page: `train-3`, `dev-20`."""
    label: str
    rollouts: int
    examples: str
    """JSON list of the examples' ids, by which the script finds one in other steps."""
    data: str
    """base64 of gzip of JSON: `prompts`, and `examples` with their calls in the order of the trees."""


def blocks(seen: Overview, tokenizer: Tokenizer | None, damaged: list[str]) -> list[Block]:
    """Blocks of a run within `ROLLOUTS` and `SIZE`, in the order of steps; damaged ones are left out.

    A block is the journal of a training step; an evaluation of a training run, with what was predicted for each item;
    or a part of an `mmrl eval`, with its calls.

    Args:
        damaged: gets a sentence for each that cannot be read.
    """
    run, split, examples = seen.run, seen.split, seen.run.examples
    evaluated = run.journal_steps(split) if seen.evaluates else seen.items.get(split, {})
    places: list[Place] = [*((step, None) for step in run.journal_steps()), *((step, split) for step in evaluated)]
    fitting: dict[Place, Block] = {}
    rollouts = size = 0
    for count, place in enumerate(spread(places)):
        if count > 1 and (rollouts >= ROLLOUTS or size >= SIZE):
            break
        try:
            one = _block_at(seen, place, tokenizer, examples)
        except MmrlError as error:
            damaged.append(str(error))
            continue
        if count <= 1 or (rollouts + one.rollouts <= ROLLOUTS and size + len(one.data) <= SIZE):
            fitting[place] = one
            rollouts += one.rollouts
            size += len(one.data)
    return [fitting[place] for place in _in_order(fitting)]


def _block_at(
    seen: Overview, place: Place, tokenizer: Tokenizer | None, examples: Mapping[tuple[str, str], JsonObject]
) -> Block:
    step, split = place
    key = f"{split or 'train'}-{step}"
    asked = {name: texts for (within, name), texts in examples.items() if within == (split or "train")}
    if split is not None and not seen.evaluates:
        where, metric = (
            f"{split} after step {step}" if step else f"{split} before training",
            seen.main_metric or "reward",
        )
        return block(forest_of(seen.items[split][step], metric), None, None, asked, key, where, metric)
    forest, entries = read_step(seen.run, step, evaluation=split)
    where = f"step {step}" if split is None else f"{split}, part {step + 1}"
    return block(forest, entries if split is None else None, tokenizer, asked, key, where)


def _in_order(places: Iterable[Place]) -> list[Place]:
    return sorted(places, key=lambda place: (place[0], place[1] or ""))


def spread(places: Iterable[Place]) -> Iterator[Place]:
    """The ends first, then what halves the gaps: wherever one stops, the run is covered evenly."""
    ordered = _in_order(places)
    left = dict.fromkeys(range(len(ordered)))
    stride = max(len(ordered) - 1, 1)
    while left:
        for place in [*range(0, len(ordered), stride), len(ordered) - 1]:
            if place in left:
                del left[place]
                yield ordered[place]
        stride = max(stride // 2, 1)


def forest_of(items: Sequence[Item], metric: str) -> Forest:
    """The items of an evaluation in training, whose calls are not stored, as rollouts with a metric for reward."""
    rollouts = tuple(
        Rollout(
            id=item["id"],
            example=item["id"],
            leaf=None,
            reward=number(item["metrics"].get(metric)),
            error=next(iter(item.get("errors") or ()), None),
            prediction=next(iter(item.get("predictions") or ()), ""),
            metrics=item["metrics"],
        )
        for item in items
    )
    return Forest(calls={}, rollouts=rollouts, modules=())


def block(
    forest: Forest,
    entries: Sequence[EntryFields] | None,
    tokenizer: Tokenizer | None,
    asked: Mapping[str, JsonObject],
    key: str,
    where: str,
    scored: str = "reward",
) -> Block:
    """One step as the script reads it; `where` says what it is.

    Args:
        entries: None: of an evaluation, which gives no credit.
        scored: what the rollouts' rewards are called.
    """
    prompts: dict[str, int] = {}
    largest = largest_advantage(entries or ())
    # Ids that differ in control characters alone would be one.
    ids = [f"{clean(example) or '(empty)'}" for example in forest.examples]
    examples: list[JsonObject] = []
    for place, (name, example) in enumerate(zip(ids, forest.examples, strict=True), 1):
        rollouts = [rollout for rollout in forest.rollouts if rollout.example == example]
        examples.append(
            {
                "id": name if ids.count(name) == 1 else f"{name} #{place}",
                "asked": asked_lines(asked.get(example)),
                "scored": scored,
                "rewards": [number(rollout.reward) for rollout in rollouts],
                "failed": sum(rollout.error is not None for rollout in rollouts),
                "calls": list(_calls(trees(forest, entries, example), prompts, tokenizer, largest)),
                "lost": [rollout_line(rollout, scored) for rollout in rollouts if rollout.leaf is None],
            }
        )
    # Secrets are hidden here: no reader of the page's bytes would see them in what is compressed.
    text = hide(json.dumps({"prompts": list(prompts), "examples": examples}, allow_nan=False))
    return Block(
        key=key,
        label=f"{where}: {len(ids)} examples, {len(forest.rollouts)} rollouts",
        rollouts=len(forest.rollouts),
        examples=hide(json.dumps([example["id"] for example in examples])),
        # Without the time of writing: the same run makes the same page.
        data=base64.b64encode(gzip.compress(text.encode(), 6, mtime=0)).decode(),
    )


def _calls(
    nodes: Iterable[Node], prompts: dict[str, int], tokenizer: Tokenizer | None, largest: float, depth: int = 0
) -> Iterator[JsonObject]:
    for node in nodes:
        prompt = abridged(visible(node.call.prompt_text), *PROMPT)
        yield {
            "depth": depth,
            "module": node.call.module,
            "name": node.name,
            "facts": node.facts,
            "state": node.state,
            "prompt": prompts.setdefault(prompt, len(prompts)),
            "pieces": coloured(node.call, node.entries, tokenizer, largest),
            "credit": node.credit,
            "groups": [str(entry["group"]) for entry in node.entries if entry.get("group") is not None],
            "reward": number(node.entries[0].get("reward")) if node.entries else None,
            "outcomes": node.outcomes,
        }
        yield from _calls(node.children, prompts, tokenizer, largest, depth + 1)
