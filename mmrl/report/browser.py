"""Blocks for the report's rollout browser: calls of every step, compressed, read by the page's script on demand.

`html` puts the blocks into `report.html` and `templates/browser.js` draws them: the journal, as far as the limits go.
"""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from mmrl.errors import MmrlError
from mmrl.records import Forest
from mmrl.report.overview import Item, Overview
from mmrl.report.stats import number, short
from mmrl.report.text import clean
from mmrl.report.trees import (
    EntryFields,
    Node,
    abridged,
    coloured,
    input_lines,
    largest_advantage,
    rollout_line,
    trees,
    visible,
)
from mmrl.secrets import hide
from mmrl.store.journal import read_step
from mmrl.system.files import JsonObject

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SIZE = 6_000_000
"""About how many bytes of journals go into a page; of a longer run every n-th step does, and always the last."""
PROMPT = (800, 2400)
"""Characters shown of a prompt: of its start and of its end."""


StepKey: TypeAlias = tuple[int, str | None]
"""A training step, or with a split the evaluation after it (of `mmrl eval`: that part of its items)."""


@dataclass(frozen=True, slots=True)
class Block:
    """Training rollouts of a step, or a journal of an evaluation."""

    key: str
    """Unique in the page: `train-3`, `dev-20`."""
    label: str
    examples: str
    """JSON list of the examples' ids, by which the script finds one in other steps."""
    data: str
    """base64 of gzip of JSON: `prompts`, and `examples` with their calls in the order of the trees."""


def blocks(overview: Overview, tokenizer: Tokenizer | None, damaged: list[str]) -> list[Block]:
    """Return the blocks of a run, about `SIZE` of them, in the order of steps; damaged ones are left out.

    A block is the journal of a training step; an evaluation of a training run, with what was predicted for each item;
    or a part of an `mmrl eval`, with its calls.

    Args:
        damaged: gets a sentence for each that cannot be read.
    """
    examples = overview.run.examples
    files = step_files(overview)
    stride = max(1, -(-sum(path.stat().st_size for path in files.values()) // SIZE))
    readable = []
    for step_key in dict.fromkeys([*[*files][::stride], *[*files][-1:]]):
        try:
            readable.append(_block_at(overview, step_key, tokenizer, examples))
        except MmrlError as error:
            damaged.append(str(error))
    return readable


def step_files(overview: Overview) -> dict[StepKey, Path]:
    """Return the file of every step and evaluation of a run that a block can be made of, in the order of steps."""
    run, split = overview.run, overview.split
    files: dict[StepKey, Path] = {(step, None): run.journal_path(step) for step in run.journal_steps()}
    if overview.evaluates:
        files |= {(step, split): run.journal_path(step, split) for step in run.journal_steps(split)}
    else:
        files |= {(step, split): run.eval_path(step, split) for step in overview.items.get(split, {})}
    return dict(sorted(files.items(), key=lambda file: (file[0][0], file[0][1] or "")))


def _block_at(
    overview: Overview, step_key: StepKey, tokenizer: Tokenizer | None, examples: Mapping[tuple[str, str], JsonObject]
) -> Block:
    step, split = step_key
    source = split or "train"
    inputs = {name: texts for (within, name), texts in examples.items() if within == source}
    key = f"{source}-{step}"
    if split is not None and not overview.evaluates:
        where = f"{split} after step {step}" if step else f"{split} before training"
        return item_block(overview.items[split][step], inputs, key, where, overview.main_metric or "reward")
    forest, entries = read_step(overview.run, step, evaluation=split)
    where = f"step {step}" if split is None else f"{split}, part {step + 1}"
    return block(forest, entries if split is None else None, tokenizer, inputs, key, where)


def item_block(items: Sequence[Item], inputs: Mapping[str, JsonObject], key: str, where: str, metric: str) -> Block:
    """Return an evaluation as the script reads it: each item's scores and a prediction; `where` says what it is."""
    examples: list[JsonObject] = []
    for item in items:
        prediction = (item.get("predictions") or [""])[0]
        fields = prediction if isinstance(prediction, Mapping) else {"prediction": prediction}
        lines = [f"{name}: {abridged(clean(value), 400, 200)}" for name, value in fields.items()]
        lines.append(" · ".join(f"{name} {short(value)}" for name, value in item["metrics"].items()))
        lines += [f"failed: {', '.join(map(clean, item['errors']))}"] if item.get("errors") else []
        examples.append(
            {
                "id": clean(item["id"]) or "(empty)",
                "asked": input_lines(inputs.get(item["id"])),
                "scored": metric,
                "rewards": [number(item["metrics"].get(metric))],
                "failed": int(bool(item.get("errors"))),
                "calls": [],
                "lost": lines,
            }
        )
    return _packed(key, f"{where}: {len(items)} items", examples)


def block(
    forest: Forest,
    entries: Sequence[EntryFields] | None,
    tokenizer: Tokenizer | None,
    inputs: Mapping[str, JsonObject],
    key: str,
    where: str,
) -> Block:
    """Return a step as the script reads it; `where` is its description.

    Args:
        entries: None: of an evaluation, which gives no credit.
    """
    prompts: dict[str, int] = {}
    largest = largest_advantage(entries or ())
    # Ids that differ only in control characters would look the same.
    ids = [f"{clean(example) or '(empty)'}" for example in forest.examples]
    examples: list[JsonObject] = []
    for ordinal, (name, example) in enumerate(zip(ids, forest.examples, strict=True), 1):
        part = forest.part([example])
        examples.append(
            {
                "id": name if ids.count(name) == 1 else f"{name} #{ordinal}",
                "asked": input_lines(inputs.get(example)),
                "scored": "reward",
                "rewards": [number(rollout.reward) for rollout in part.rollouts],
                "failed": sum(rollout.error is not None for rollout in part.rollouts),
                "calls": [_call(node, prompts, tokenizer, largest) for node in trees(part, entries)],
                "lost": [rollout_line(rollout) for rollout in part.rollouts if rollout.leaf is None],
            }
        )
    return _packed(key, f"{where}: {len(ids)} examples, {len(forest.rollouts)} rollouts", examples, list(prompts))


def _packed(key: str, label: str, examples: Sequence[JsonObject], prompts: Sequence[str] = ()) -> Block:
    # Secrets are hidden before compression: a later search through the page's bytes would miss them.
    text = hide(json.dumps({"prompts": prompts, "examples": examples}, allow_nan=False))
    # Without a time stamp, so that the same run gives the same page.
    data = base64.b64encode(gzip.compress(text.encode(), 6, mtime=0)).decode()
    return Block(key=key, label=label, examples=hide(json.dumps([example["id"] for example in examples])), data=data)


def _call(node: Node, prompts: dict[str, int], tokenizer: Tokenizer | None, largest: float) -> JsonObject:
    prompt = abridged(visible(node.call.prompt_text), *PROMPT)
    return {
        "depth": node.depth,
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
