"""What the report's rollout browser shows: calls of every step, compressed, read by the page's script on demand.

`html` puts the blocks into `report.html` and `templates/browser.js` draws them: the journal, as far as the limits go.
"""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from mmrl.errors import MmrlError
from mmrl.records import Forest
from mmrl.report.journal import read_step
from mmrl.report.rundir import RunDir
from mmrl.report.stats import number, short
from mmrl.report.trees import (
    EntryFields,
    Node,
    TokenTexts,
    abridged,
    call_name,
    clean,
    coloured,
    credit_line,
    largest_advantage,
    rollout_line,
    trees,
    visible,
)
from mmrl.secrets import hide

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


def blocks(
    run: RunDir, split: str | None, texts: TokenTexts, *, parts: bool = False, damaged: list[str] | None = None
) -> list[Block]:
    """Blocks of a run's journal within `ROLLOUTS` and `SIZE`, in the order of steps; damaged ones are left out.

    Args:
        split: whose evaluations are shown too, where they have journals.
        parts: the run is an evaluation, whose journals are numbered parts of it.
        damaged: gets a sentence for each that cannot be read.
    """
    places: list[tuple[int, str | None]] = [(step, None) for step in run.journal_steps()]
    places += [(step, split) for step in run.journal_steps(split)] if split else []
    made: dict[tuple[int, str | None], Block] = {}
    rollouts = size = 0
    for count, place in enumerate(spread(places)):
        if count > 1 and (rollouts >= ROLLOUTS or size >= SIZE):
            break
        try:
            forest, entries = read_step(run, place[0], evaluation=place[1])
        except MmrlError as error:
            if damaged is not None:
                damaged.append(str(error))
            continue
        step, of = place
        where = f"step {step}" if of is None else f"{of}, part {step + 1}" if parts else f"{of} after step {step}"
        one = block(forest, entries, texts, f"{of or 'train'}-{step}", where)
        if count > 1 and (rollouts + len(forest.rollouts) > ROLLOUTS or size + len(one.data) > SIZE):
            continue
        made[place] = one
        rollouts += len(forest.rollouts)
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


def block(forest: Forest, entries: Sequence[EntryFields], texts: TokenTexts, key: str, where: str) -> Block:
    """One step as the script reads it; `where` says what it is."""
    prompts: dict[str, int] = {}
    largest = largest_advantage(entries)
    # A call may stand in several groups, and a group may have calls of several examples.
    groups: dict[str, list[str]] = {}
    for entry in entries:
        if entry.get("group") is not None:
            groups.setdefault(str(entry["call"]), []).append(str(entry["group"]))
    # Ids that differ in control characters alone would be one.
    ids = [f"{clean(example) or '(empty)'}" for example in forest.examples]
    names = [name if ids.count(name) == 1 else f"{name} #{at}" for at, name in enumerate(ids, 1)]
    examples = [
        {
            "id": name,
            "rewards": [number(rollout.reward) for rollout in forest.rollouts if rollout.example == example],
            "failed": sum(rollout.error is not None for rollout in forest.rollouts if rollout.example == example),
            "calls": list(_calls(trees(forest, entries, example), prompts, texts, largest, groups)),
            "lost": [rollout_line(r) for r in forest.rollouts if r.example == example and r.leaf is None],
        }
        for name, example in zip(names, forest.examples, strict=True)
    ]
    # Secrets are hidden here: no reader of the page's bytes would see them in what is compressed.
    text = hide(json.dumps({"prompts": list(prompts), "examples": examples}, allow_nan=False))
    return Block(
        key=key,
        label=f"{where}: {len(examples)} examples, {len(forest.rollouts)} rollouts",
        examples=hide(json.dumps(names)),
        # Without the time of writing: the same run makes the same page.
        data=base64.b64encode(gzip.compress(text.encode(), 6, mtime=0)).decode(),
    )


def _calls(
    nodes: Iterable[Node],
    prompts: dict[str, int],
    texts: TokenTexts,
    largest: float,
    groups: Mapping[str, Sequence[str]],
    depth: int = 0,
) -> Iterator[dict[str, object]]:
    for node in nodes:
        call = node.call
        entry = node.entries[0] if node.entries else {}
        facts = [f"{call.completion_tokens} tokens", call.finish]
        facts += [f"penalty {short(call.penalty)}"] if call.penalty else []
        facts += [f"{name} {short(value)}" for name, value in call.facts.items() if number(value) is not None]
        prompt = abridged(visible(call.prompt_text), *PROMPT)
        yield {
            "depth": depth,
            "module": call.module,
            "name": call_name(call),
            "facts": " · ".join(facts),
            "state": node.state,
            "prompt": prompts.setdefault(prompt, len(prompts)),
            "pieces": coloured(call, node.entries, texts, largest),
            "credit": [credit_line(one) for one in node.entries],
            "groups": groups.get(call.id, ()),
            "reward": number(entry.get("reward")),
            "outcomes": [rollout_line(rollout) for rollout in node.rollouts],
        }
        yield from _calls(node.children, prompts, texts, largest, groups, depth + 1)
