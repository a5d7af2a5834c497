"""What the report's rollout browser shows: calls of every step, compressed, read by the page's script on demand.

`html` puts the blocks into `report.html` and `templates/browser.js` draws them. The page shows some examples of some
steps without script; this is the rest of the journal, as far as the limits go.
"""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Iterable, Iterator, Sequence
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
"""Rollouts that go into a page; steps are then left out between the first and the last."""
SIZE = 6_000_000
"""Bytes of a page's blocks, after which no further step goes in."""
PROMPT = (800, 2400)
"""Characters shown of a prompt: of its start and of its end."""


@dataclass(frozen=True, slots=True)
class Block:
    """One step's training rollouts, or those of an evaluation after it."""

    key: str
    """Unique in the page: `train-3`, `dev-20`."""
    label: str
    examples: str
    """JSON list of the examples' ids, by which the script finds one in other steps."""
    data: str
    """base64 of gzip of JSON: `prompts`, and `examples` with their calls in the order of the trees."""


def blocks(run: RunDir, split: str | None, texts: TokenTexts) -> list[Block]:
    """Blocks of a run's journal within `ROLLOUTS` and `SIZE`, in the order of steps; damaged ones are left out.

    Args:
        split: whose evaluations are shown too, where they have journals.
    """
    places: list[tuple[int, str | None]] = [(step, None) for step in run.journal_steps()]
    places += [(step, split) for step in run.journal_steps(split)] if split else []
    made: dict[tuple[int, str | None], Block] = {}
    rollouts = size = 0
    for place in spread(places):
        try:
            forest, entries = read_step(run, place[0], evaluation=place[1])
        except MmrlError:
            continue  # the page says so where the step is shown without script
        rollouts += len(forest.rollouts)
        if made and (rollouts > ROLLOUTS or size > SIZE):
            break
        made[place] = block(forest, entries, texts, place[1])
        size += len(made[place].data)
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


def block(forest: Forest, entries: Sequence[EntryFields], texts: TokenTexts, split: str | None = None) -> Block:
    """One step as the script reads it."""
    prompts: dict[str, int] = {}
    largest = largest_advantage(entries)
    examples = [
        {
            "id": clean(example),
            "rewards": [number(rollout.reward) for rollout in forest.rollouts if rollout.example == example],
            "failed": sum(rollout.error is not None for rollout in forest.rollouts if rollout.example == example),
            "calls": list(_calls(trees(forest, entries, example), prompts, texts, largest)),
            "lost": [rollout_line(r) for r in forest.rollouts if r.example == example and r.leaf is None],
        }
        for example in forest.examples
    ]
    # Secrets are hidden here: no reader of the page's bytes would see them in what is compressed.
    text = hide(json.dumps({"prompts": list(prompts), "examples": examples}, allow_nan=False))
    where = f"{split} after step {forest.step}" if split else f"step {forest.step}"
    return Block(
        key=f"{split or 'train'}-{forest.step}",
        label=f"{where}: {len(examples)} examples, {len(forest.rollouts)} rollouts",
        examples=hide(json.dumps([example["id"] for example in examples])),
        # Without the time of writing: the same run makes the same page.
        data=base64.b64encode(gzip.compress(text.encode(), 6, mtime=0)).decode(),
    )


def _calls(
    nodes: Iterable[Node], prompts: dict[str, int], texts: TokenTexts, largest: float, depth: int = 0
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
            "ok": call.ok,
            "prompt": prompts.setdefault(prompt, len(prompts)),
            "pieces": coloured(call, node.entries, texts, largest),
            "credit": [credit_line(one) for one in node.entries],
            "group": entry.get("group"),
            "reward": number(entry.get("reward")),
            "outcomes": [rollout_line(rollout) for rollout in node.rollouts],
        }
        yield from _calls(node.children, prompts, texts, largest, depth + 1)
