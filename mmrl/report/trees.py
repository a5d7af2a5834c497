"""Trees of a step's calls: prompts, completions, rewards and comparisons, for the terminal and the page.

Part of `report`; pure. Credit entries are the mappings that the journal returns (fields of `EntryFields`).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, TypeAlias

from rich.text import Text
from rich.tree import Tree

from mmrl.records import Call, Forest, Rollout
from mmrl.report.stats import number, short, signed
from mmrl.report.text import clean, drawn
from mmrl.system.files import JsonObject

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PROMPT_HEAD, PROMPT_TAIL = 80, 320
"""Characters of a prompt that are shown: its start, and its end where the example is."""

EntryFields: TypeAlias = JsonObject
"""A credit entry as the journal returns it."""


LEVELS = 4
"""Shades of an advantage: from -LEVELS to LEVELS, 0 for none."""
TOKENS = (400, 150)
"""Tokens at the start and at the end of a completion that are shown one by one."""

Piece: TypeAlias = tuple[str, int]
"""A part of a completion and its shade."""


def read_tokenizer(folders: Iterable[Path]) -> Tokenizer | None:
    """Return the tokenizer of the first of `folders` that has one which can be read."""
    # The library that transformers uses; by itself it loads in a moment.
    from tokenizers import Tokenizer

    for folder in folders:
        try:
            return Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception:  # the library raises no type of its own
            continue
    return None


def token_texts(ids: Sequence[int], tokenizer: Tokenizer) -> list[tuple[str, int]]:
    """Return the texts whose sequence is the completion, each with how many tokens it has.

    A letter may be spread over several tokens, which are then one piece; half a letter at the end is left out.
    """
    from tokenizers.decoders import DecodeStream

    stream, parts, done = DecodeStream(skip_special_tokens=False), [], 0
    for count, token in enumerate(ids, start=1):
        if (text := stream.step(tokenizer, token)) is not None:
            parts.append((text, count - done))
            done = count
    return parts


def shade(advantage: float, largest: float) -> int:
    """Return the level of an advantage where `largest` is the largest of the step in size."""
    level = math.ceil(LEVELS * abs(advantage) / largest - 1e-9) if largest > 0 else 0
    return int(math.copysign(min(level, LEVELS), advantage))


def largest_advantage(entries: Sequence[EntryFields]) -> float:
    """Return the largest size of any token's advantage."""
    sizes = (number(value) for entry in entries for value in entry.get("advantages", ()))
    return max((abs(value) for value in sizes if value is not None), default=0.0)


def coloured(call: Call, entries: Sequence[EntryFields], tokenizer: Tokenizer | None, largest: float) -> list[Piece]:
    """Split the completion in pieces of one shade each.

    One piece where all tokens have the same advantage, or nothing says what each token is.
    """
    values = [number(value) or 0.0 for value in entries[0].get("advantages", ())] if entries else []
    # The values may belong to other tokens than the completion's.
    differs = len(set(values)) > 1 and len(values) == len(call.completion_ids)
    if tokenizer is None or not differs:
        return [(abridged(clean(call.text), 1200, 400), shade(fmean(values), largest) if values else 0)]
    shaded: list[Piece] = []
    (head, tail), position, left_out = TOKENS, 0, len(values) - sum(TOKENS)
    for text, count in token_texts(call.completion_ids, tokenizer):
        if position < head or position >= len(values) - tail:
            shaded.append((clean(text), shade(fmean(values[position : position + count]), largest)))
        elif left_out > 0:
            shaded.append((f" […{left_out} tokens…] ", 0))
            left_out = 0
        position += count
    return [("".join(text for text, _ in pieces), level) for level, pieces in groupby(shaded, lambda piece: piece[1])]


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A call in its tree, with its texts for the terminal and the page."""

    call: Call
    depth: int
    """The number of calls before it."""
    name: str
    """Module, and where it has more than one, invocation and turn."""
    facts: str
    """Length and end of the reply, its attempts, what the program noted of it, and its rewards."""
    state: str
    """A remark on a reply that could not be parsed; empty for one that could."""
    entries: Sequence[EntryFields]
    credit: Sequence[str]
    """A line for each entry; none in an evaluation, which gives no credit."""
    outcomes: Sequence[str]
    """A line for each rollout that ends here."""


def depth_first(forest: Forest) -> Iterator[tuple[Call, int]]:
    """Yield calls with their depths, every call before those that follow it."""
    pending = [(call, 0) for call in reversed(list(forest.calls.values())) if call.parent is None]
    while pending:
        call, depth = pending.pop()
        yield call, depth
        pending += [(forest.calls[child], depth + 1) for child in reversed(forest.children[call.id])]


def trees(forest: Forest, entries: Sequence[EntryFields] | None) -> Iterator[Node]:
    """Yield the calls of a forest, depth first.

    Args:
        entries: None: of an evaluation.
    """
    # A call has several entries where padding repeats it, none where it is not trained.
    by_call: defaultdict[str, list[EntryFields]] = defaultdict(list)
    for entry in entries or ():
        by_call[str(entry["call"])].append(entry)
    rollouts_by_leaf: defaultdict[str | None, list[Rollout]] = defaultdict(list)
    for rollout in forest.rollouts:
        rollouts_by_leaf[rollout.leaf].append(rollout)

    for call, depth in depth_first(forest):
        credit = [credit_line(entry) for entry in by_call[call.id]] or ["no credit"]
        failed = "could not be parsed" + (", which the program caught" if call.id in forest.caught else "")
        counts = {" #": call.invocation, " turn ": call.turn}
        yield Node(
            call=call,
            depth=depth,
            name=call.module + "".join(f"{label}{count}" for label, count in counts.items() if count),
            facts=_facts(call),
            state="" if call.ok else failed,
            entries=by_call[call.id],
            credit=[] if entries is None else credit,
            outcomes=[rollout_line(rollout) for rollout in rollouts_by_leaf[call.id]],
        )


def _facts(call: Call) -> str:
    noted = {"penalty": call.penalty or None, "turn reward": call.turn_reward, **call.facts}
    facts = [f"{call.completion_tokens} tokens, {call.finish}"]
    facts += [f"attempt {call.attempts}"] if call.attempts > 1 else []
    for name, value in noted.items():
        if isinstance(value, int | float | str):
            facts.append(f"{name} {short(value) if number(value) is not None else abridged(clean(value), 200, 60)}")
    return " · ".join(facts)


def informative_examples(forest: Forest, count: int) -> list[str]:
    """Return the examples worth reading first: those whose rewards differ most between rollouts (None counts as 0)."""
    rewards: defaultdict[str, list[float]] = defaultdict(list)
    for rollout in forest.rollouts:
        rewards[rollout.example].append(rollout.reward or 0.0)
    # Where rollouts of one question differ, there is something to learn from.
    return sorted(rewards, key=lambda example: min(rewards[example]) - max(rewards[example]))[:count]


def abridged(text: str, head: int = PROMPT_HEAD, tail: int = PROMPT_TAIL) -> str:
    """Start and end of a long text, with the number of characters left out between them."""
    if len(text) <= head + tail + 30:
        return text
    # Both ends: instructions stand at the start, the example at the end.
    return f"{text[:head]} […{len(text) - head - tail} characters…] {text[-tail:]}"


def advantage_of(entry: EntryFields) -> str:
    """Return the advantage of an entry: one number, or its range where it differs between tokens."""
    values = [value for value in entry.get("advantages", ()) if number(value) is not None]
    if not values:
        return "-"
    low, high = min(values), max(values)
    values_text = [signed(value) for value in (low, high, fmean(values))]
    return values_text[0] if low == high else f"{values_text[0]} … {values_text[1]} (mean {values_text[2]})"


def format_reward(reward: object, parts: Mapping[str, object]) -> str:
    """Format the parts of a reward: a sum if they add up to it, else a list (`turn -0.400, own_advantage -0.691`)."""
    if not parts:
        return ""
    texts = [f"{name} {short(value)}" for name, value in parts.items()]
    total, terms = number(reward), [number(value) for value in parts.values()]
    # Turn-level rewards have parts that are no addends; those stand in brackets instead.
    if total is not None and None not in terms and math.isclose(sum(filter(None, terms)), total, abs_tol=1e-9):
        return " = " + " + ".join(texts)
    return f" ({', '.join(texts)})"


def shorten_prediction(prediction: object, head: int = 30, tail: int = 10) -> str:
    """Return the start and the end of a prediction: of one that has an answer among other things, of its answer."""
    if isinstance(prediction, Mapping) and prediction.get("answer") is not None:
        prediction = prediction["answer"]
    return abridged(clean(prediction), head, tail)


def credit_line(entry: EntryFields) -> str:
    """Format an entry: reward with its parts, group, advantage, weight."""
    line = f"reward {short(entry.get('reward'))}{format_reward(entry.get('reward'), entry.get('parts') or {})}"
    if entry.get("distilled"):  # no reward: what its teacher says
        line = f"teacher − policy {short(entry.get('reward'))} a token"
    group = entry.get("group")
    if group is not None:
        known = entry.get("mean") is not None
        spread = f", mean {short(entry['mean'])}, std {short(entry.get('std'))}" if known else ""
        line += f" · group {group} (n {entry.get('group_size', 0)}{spread})"
    line += f" · advantage {advantage_of(entry)}"
    weights = entry.get("weights", ())
    # All weights 0: it was compared, but takes no part in the loss.
    if weights and not any(weights):
        line += " · left out of the loss"
    if entry.get("filler_of"):
        line += " · repeated to fill its group"
    return line


def rollout_line(rollout: Rollout) -> str:
    """Return the outcome of one rollout."""
    message = f": {clean(rollout.error_message)}" if rollout.error_message else ""
    if rollout.failed_outside:
        return f"{rollout.id} failed ({rollout.error}){message}; not credited"
    line = f"{rollout.id} no reward"
    if rollout.reward is not None:
        line = f"{rollout.id} reward {short(rollout.reward)}{format_reward(rollout.reward, rollout.parts)}"
    if rollout.error is not None:
        line += f" · {rollout.error} failure{message}"
    # A metric that is also part of the reward is listed there.
    metrics = {name: value for name, value in rollout.metrics.items() if rollout.parts.get(name) != value}
    if metrics:
        line += " · metrics: " + ", ".join(f"{name} {short(value)}" for name, value in metrics.items())
    if rollout.fork:
        line += f" · forked at {rollout.fork}"
    return line + f" · prediction {shorten_prediction(rollout.prediction, 100, 60)}"


def input_lines(texts: JsonObject | None) -> list[str]:
    """Return an example's inputs, a line for each, and what its reward goes by; [] where that was not kept."""
    inputs, gold = ((texts or {}).get(key) or {} for key in ("asked", "gold"))
    parts = " · ".join(f"{name} {clean(text)}" for name, text in gold.items() if text)
    return [f"{name}: {clean(text)}" for name, text in inputs.items()] + ([f"gold: {parts}"] if parts else [])


def render_example(
    forest: Forest,
    entries: Sequence[EntryFields] | None,
    example: str,
    width: int,
    texts: JsonObject | None = None,
) -> str:
    """Render the trees of one example as text.

    Args:
        entries: None: of an evaluation, which gives no credit.
        texts: of `RunDir.examples`.
    """
    forest = forest.part([example])
    rollouts = forest.rollouts
    prefix = f"example {example} · step {forest.step} · " if entries is not None else ""
    head = f"{prefix}{len(rollouts)} rollout{'s' if len(rollouts) != 1 else ''}"
    parts: list[str | Tree] = ["\n".join([head, *input_lines(texts)])]
    ancestors: list[Tree] = []
    previous: dict[str | None, Call] = {}
    for node in trees(forest, entries):
        tree = Tree(Text(_node_text(node, previous.get(node.call.parent))))
        if node.depth:
            ancestors[node.depth - 1].children.append(tree)
            previous[node.call.parent] = node.call
        else:
            parts += ["", tree]
        ancestors[node.depth :] = [tree]
    # A rollout that failed before its first call is on no path of the tree.
    if without_calls := [f"  {rollout_line(rollout)}" for rollout in rollouts if rollout.leaf is None]:
        parts += ["", "\n".join(["without any call:", *without_calls])]
    # A level takes four columns: lines of deep trees overflow.
    deepest = max((len(forest.path(rollout)) for rollout in rollouts), default=0)
    return drawn(parts, max(width, 4 * deepest + 30))


def _node_text(node: Node, previous: Call | None) -> str:
    """Return the lines of a call; `previous`: the sibling before it, whose prompt is not shown again."""
    call = node.call
    lines = [f"{node.name} · {node.facts}{f' · {node.state}' if node.state else ''}  [{call.id}]"]
    if previous is not None and (call.prompt_ids, call.prompt_text) == (previous.prompt_ids, previous.prompt_text):
        lines.append("asked: as above")
    elif call.prompt_text:
        lines.append(f"asked: {abridged(clean(call.prompt_text))}")
    lines.append(f"said:  {abridged(clean(call.text), 300, 100) or '(nothing)'}")
    return "\n".join([*lines, *node.credit, *(f"⇒ {outcome}" for outcome in node.outcomes)])


def visible(value: str) -> str:
    """Make control characters of a text visible, all but its line ends."""
    return "\n".join(clean(line) for line in value.replace("\r\n", "\n").split("\n"))
