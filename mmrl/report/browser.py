"""What the report's rollout browser shows: calls of every step, compressed, read by the page's script on demand.

`html` puts the blocks into `report.html` and `templates/browser.js` draws them: the journal, as far as the limits go.
"""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mmrl.errors import MmrlError
from mmrl.records import Forest
from mmrl.report.journal import read_step
from mmrl.report.overview import Item, Overview
from mmrl.report.stats import number, short
from mmrl.report.trees import (
    EntryFields,
    Node,
    abridged,
    asked_lines,
    clean,
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


@dataclass(frozen=True, slots=True)
class Block:
    """One step's training rollouts, or a journal of an evaluation."""

    key: str
    """Unique in the page: `train-3`, `dev-20`."""
    label: str
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
    run, split = seen.run, seen.split
    examples = run.examples
    evaluated = {} if seen.evaluates else seen.items.get(split, {})
    places: list[tuple[int, str | None]] = [(step, None) for step in run.journal_steps()]
    places += [(step, split) for step in (run.journal_steps(split) if seen.evaluates else evaluated)]
    made: dict[tuple[int, str | None], Block] = {}
    rollouts = size = 0
    for count, place in enumerate(spread(places)):
        if count > 1 and (rollouts >= ROLLOUTS or size >= SIZE):
            break
        step, of = place
        key, where = f"{of or 'train'}-{step}", f"step {step}" if of is None else f"{of}, part {step + 1}"
        asked = {name: text for (at, name), text in examples.items() if at == (of or "train")}
        if of is not None and not seen.evaluates:
            items = evaluated[step]
            where = f"{of} after step {step}" if step else f"{of} before training"
            one, count_of = item_block(items, asked, key, where, seen.main_metric or "reward"), len(items)
        else:
            try:
                forest, entries = read_step(run, step, evaluation=of)
            except MmrlError as error:
                damaged.append(str(error))
                continue
            one, count_of = (
                block(forest, entries if of is None else None, tokenizer, asked, key, where),
                len(forest.rollouts),
            )
        if count > 1 and (rollouts + count_of > ROLLOUTS or size + len(one.data) > SIZE):
            continue
        made[place] = one
        rollouts += count_of
        size += len(one.data)
    return [made[place] for place in sorted(made, key=lambda place: (place[0], place[1] or ""))]


def spread(places: Sequence[tuple[int, str | None]]) -> Iterator[tuple[int, str | None]]:
    """The ends first, then what halves the gaps: wherever one stops, the run is covered evenly."""
    ordered = sorted(places, key=lambda place: (place[0], place[1] or ""))
    given: set[int] = set()
    stride = max(len(ordered) - 1, 1)
    while len(given) < len(ordered):
        for at in [*range(0, len(ordered), stride), len(ordered) - 1]:
            if at not in given:
                given.add(at)
                yield ordered[at]
        stride = max(stride // 2, 1)


def item_block(items: Sequence[Item], asked: Mapping[str, JsonObject], key: str, where: str, metric: str) -> Block:
    """An evaluation as the script reads it: each item's scores and a prediction; `where` says what it is."""
    examples = []
    for item in items:
        prediction = (item.get("predictions") or [""])[0]
        fields = prediction if isinstance(prediction, Mapping) else {"prediction": prediction}
        texts = {
            name: "; ".join(map(str, value)) if isinstance(value, list) else value for name, value in fields.items()
        }
        lines = [f"{name}: {abridged(clean(text), 400, 200)}" for name, text in texts.items()]
        lines.append(" · ".join(f"{name} {short(value)}" for name, value in item["metrics"].items()))
        lines += [f"failed: {', '.join(map(clean, item['errors']))}"] if item.get("errors") else []
        examples.append(
            {
                "id": clean(item["id"]) or "(empty)",
                "asked": asked_lines(asked.get(item["id"])),
                "scored": metric,
                "rewards": [number(item["metrics"].get(metric))],
                "failed": int(bool(item.get("errors"))),
                "calls": [],
                "lost": lines,
            }
        )
    return _packed(key, f"{where}: {len(items)} items", [], examples)


def block(
    forest: Forest,
    entries: Sequence[EntryFields] | None,
    tokenizer: Tokenizer | None,
    asked: Mapping[str, JsonObject],
    key: str,
    where: str,
) -> Block:
    """One step as the script reads it; `where` says what it is.

    Args:
        entries: None: of an evaluation, which gives no credit.
    """
    prompts: dict[str, int] = {}
    credited, entries = entries is not None, entries or ()
    largest = largest_advantage(entries)
    # Ids that differ in control characters alone would be one.
    ids = [f"{clean(example) or '(empty)'}" for example in forest.examples]
    names = [name if ids.count(name) == 1 else f"{name} #{at}" for at, name in enumerate(ids, 1)]
    examples = [
        {
            "id": name,
            "asked": asked_lines(asked.get(example)),
            "scored": "reward",
            "rewards": [number(rollout.reward) for rollout in forest.rollouts if rollout.example == example],
            "failed": sum(rollout.error is not None for rollout in forest.rollouts if rollout.example == example),
            "calls": list(_calls(trees(forest, entries, example), prompts, tokenizer, largest, credited)),
            "lost": [rollout_line(r) for r in forest.rollouts if r.example == example and r.leaf is None],
        }
        for name, example in zip(names, forest.examples, strict=True)
    ]
    return _packed(key, f"{where}: {len(examples)} examples, {len(forest.rollouts)} rollouts", list(prompts), examples)


def _packed(key: str, label: str, prompts: Sequence[str], examples: Sequence[Mapping[str, object]]) -> Block:
    # Secrets are hidden here: no reader of the page's bytes would see them in what is compressed.
    text = hide(json.dumps({"prompts": prompts, "examples": examples}, allow_nan=False))
    return Block(
        key=key,
        label=label,
        examples=hide(json.dumps([example["id"] for example in examples])),
        # Without the time of writing: the same run makes the same page.
        data=base64.b64encode(gzip.compress(text.encode(), 6, mtime=0)).decode(),
    )


def _calls(
    nodes: Iterable[Node],
    prompts: dict[str, int],
    tokenizer: Tokenizer | None,
    largest: float,
    credited: bool,
    depth: int = 0,
) -> Iterator[dict[str, object]]:
    for node in nodes:
        call = node.call
        entry = node.entries[0] if node.entries else {}
        prompt = abridged(visible(call.prompt_text), *PROMPT)
        yield {
            "depth": depth,
            "module": call.module,
            "name": node.name,
            "facts": " · ".join(filter(None, [node.ended, node.facts])),
            "state": node.state,
            "prompt": prompts.setdefault(prompt, len(prompts)),
            "pieces": coloured(call, node.entries, tokenizer, largest),
            "credit": node.credit if credited else [],
            "groups": [str(one["group"]) for one in node.entries if one.get("group") is not None],
            "reward": number(entry.get("reward")),
            "outcomes": node.outcomes,
        }
        yield from _calls(node.children, prompts, tokenizer, largest, credited, depth + 1)
