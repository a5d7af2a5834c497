"""Credit as text: JSON with every token's numbers, and tables for people, no wider than their terminal."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from textwrap import fill, wrap

from mmrl.algorithms import minibatches
from mmrl.config import AlgoConfig
from mmrl.credit.entries import Credit, Entry
from mmrl.records import Call, Forest
from mmrl.report.forest import VERSION

LEAST = 8
"""Columns that a cell keeps, however narrow the terminal."""


def json_report(algos: Sequence[AlgoConfig], forest: Forest, credits: Sequence[Credit]) -> str:
    """One object, or a list of them for several algorithms: all that the table has, and every token's numbers."""
    records = [_credit_json(algo, forest, credit) for algo, credit in zip(algos, credits, strict=True)]
    return json.dumps(records[0] if len(records) == 1 else records, indent=1)


def _credit_json(algo: AlgoConfig, forest: Forest, credit: Credit) -> dict[str, object]:
    split, credited = minibatches(forest.examples, algo.minibatches), {entry.call for entry in credit.entries}
    return {
        "version": VERSION,
        "algo": credit.algo,
        "step": forest.step,
        "calls": [_entry_json(entry, forest.calls[entry.call], split) for entry in credit.entries],
        "calls_without_entry": [call for call in forest.calls if call not in credited],
    }


def _entry_json(entry: Entry, call: Call, split: Mapping[str, int]) -> dict[str, object]:
    return {
        "id": entry.call,
        "module": call.module,
        "minibatch": split[call.example],
        "reward": entry.reward,
        "parts": dict(entry.parts),
        "group": entry.group,
        "group_size": entry.group_size,
        "mean": entry.mean,
        "std": entry.std,
        "token_rewards": _list(entry.token_rewards),
        "raw_advantages": _list(entry.raw_advantages),
        "advantages": list(entry.advantages),
        "returns": _list(entry.returns),
        "weights": list(entry.weights),
        "filler_of": entry.filler_of,
    }


def _list(values: Sequence[float] | None) -> list[float] | None:
    return None if values is None else list(values)


def table(algos: Sequence[AlgoConfig], forest: Forest, credits: Sequence[Credit], width: int | None = None) -> str:
    """One row per entry: calls in the forest's order, algorithms side by side; then the calls without credit.

    Args:
        width: columns of the terminal; None: any number. A wider table is printed in parts, one algorithm after the
            other: a small table per group, or per call where there is a critic.
    """
    splits = [minibatches(forest.examples, algo.minibatches) for algo in algos]
    blocks = [_Block(forest, credit, split) for credit, split in zip(credits, splits, strict=True)]
    rows = [["call", "module", *(column for block in blocks for column in block.columns)]]
    missing: list[str] = []
    for call in forest.calls.values():
        height = max((len(block.rows.get(call.id, ())) for block in blocks), default=0)
        if not height:
            missing.append(call.id)
        rows += [
            [call.id, call.module, *(c for block in blocks for c in block.cells(call.id, i))] for i in range(height)
        ]
    if len(credits) == 1:
        lines = [blocks[0].title, *_aligned(rows)]
    else:
        titles = [title for block in blocks for title in [block.name, *[""] * (len(block.columns) - 1)]]
        lines = _aligned([["", "", *titles], *rows])
    if width is not None and max(map(len, lines)) > width:
        lines = [line for block in blocks for line in [*block.in_parts(width), ""]]
    if missing:
        lines.append(filled(f"calls without an entry: {', '.join(missing)}", width))
    return "\n".join(lines).rstrip("\n")


class _Block:
    """What one algorithm says: the columns of the wide table, or the parts of the narrow one."""

    def __init__(self, forest: Forest, credit: Credit, split: Mapping[str, int]):
        self.name, self.forest, self.entries, self.split = credit.algo, forest, credit.entries, split
        self.title = f"{credit.algo}: {len(credit.entries)} entries"
        self.critic = any(entry.returns is not None for entry in credit.entries)
        self.several = any(split.values())
        """More than one mini-batch."""
        tokens = ("token rewards", "raw advantage", "advantage", "returns", "weight")
        compared = ("group", "size", "mean", "std", "advantage", "weight")
        batch = ("minibatch",) if self.several else ()
        self.columns = (*batch, "reward", "parts", *(tokens if self.critic else compared))
        self.rows: dict[str, list[list[str]]] = {}
        for entry in credit.entries:
            self.rows.setdefault(entry.call, []).append(self._row(entry))

    def cells(self, call: str, index: int) -> Sequence[str]:
        """The `index`-th entry of a call; blanks where there is none."""
        rows = self.rows.get(call, ())
        return rows[index] if index < len(rows) else [""] * len(self.columns)

    def _row(self, entry: Entry) -> list[str]:
        batch = [self._batch(entry)] if self.several else []
        first = [*batch, _number(entry.reward), _parts(entry.parts)]
        if self.critic:
            return [*first, *map(_per_token, _per_token_columns(entry).values())]
        group = (entry.group or "-") + (" (filler)" if entry.filler_of else "")
        numbers = [str(entry.group_size), _number(entry.mean), _number(entry.std)]
        return [*first, group, *numbers, _per_token(entry.advantages), _per_token(entry.weights)]

    def _batch(self, entry: Entry) -> str:
        return str(self.split[self.forest.calls[entry.call].example])

    def in_parts(self, width: int) -> list[str]:
        """For a terminal of `width` columns: headings with what the rows below them share, and the rows."""
        lines = [self.title]
        for heading, rows in self._by_call() if self.critic else self._by_group():
            lines += ["", joined(heading, width), *("  " + line for line in _aligned(rows, width - 2))]
        return lines

    def _by_group(self) -> list[tuple[list[str], list[list[str]]]]:
        groups: dict[str | None, list[Entry]] = {}
        for entry in self.entries:
            groups.setdefault(entry.group, []).append(entry)
        parts = []
        for name, entries in groups.items():
            modules = [self.forest.calls[entry.call].module for entry in entries]
            mixed = len(set(modules)) > 1
            facts = ["in no group"]
            if name is not None:
                facts = [f"group {name}", f"size {entries[0].group_size}", f"mean {_number(entries[0].mean)}"]
                facts.append(f"std {_number(entries[0].std)}")
            facts += [] if mixed else [f"module {modules[0]}"]
            facts += [f"minibatch {', '.join(sorted(set(map(self._batch, entries))))}"] if self.several else []
            rows = [["call", *(["module"] if mixed else []), "reward", "parts", "advantage", "weight"]]
            for entry, module in zip(entries, modules, strict=True):
                call = entry.call + (" (filler)" if entry.filler_of else "")
                shown = [_number(entry.reward), _parts(entry.parts), _per_token(entry.advantages)]
                rows.append([call, *([module] if mixed else []), *shown, _per_token(entry.weights)])
            parts.append((facts, rows))
        return parts

    def _by_call(self) -> list[tuple[list[str], list[list[str]]]]:
        parts = []
        for entry in self.entries:
            facts = [f"call {entry.call}", f"module {self.forest.calls[entry.call].module}"]
            facts += [f"minibatch {self._batch(entry)}"] if self.several else []
            made = f" ({_parts(entry.parts)})" if entry.parts else ""
            facts.append(f"reward {_number(entry.reward)}{made}")
            columns = _per_token_columns(entry)
            tokens = [[_number(value) for value in token] for token in zip(*columns.values(), strict=True)]
            rows, first = [["tokens", *columns]], 0
            for place, token in enumerate(tokens):
                # Tokens that print alike share a row.
                if tokens[place + 1 : place + 2] != [token]:
                    rows.append([str(first) if first == place else f"{first}-{place}", *token])
                    first = place + 1
            parts.append((facts, rows))
        return parts


def _per_token_columns(entry: Entry) -> dict[str, Sequence[float]]:
    """What there is of each token where there is a critic."""
    return {
        "token rewards": entry.token_rewards or (),
        "raw advantage": entry.raw_advantages or (),
        "advantage": entry.advantages,
        "returns": entry.returns or (),
        "weight": entry.weights,
    }


def _parts(parts: Mapping[str, float]) -> str:
    return " ".join(f"{name}={_number(value)}" for name, value in parts.items())


def _number(value: float | None) -> str:
    """Six decimals, as the papers' worked examples have; six digits for what is smaller than that shows."""
    if value is None:
        return "-"
    if value and abs(value) < 1e-3:
        return f"{value:.6g}"
    return f"{value + 0.0:.6f}".rstrip("0").rstrip(".")


def _per_token(values: Sequence[float]) -> str:
    """`0.5 x4` for four numbers that print alike, else each."""
    shown = [_number(value) for value in values]
    if len(shown) > 1 and len(set(shown)) == 1:
        return f"{shown[0]} x{len(shown)}"
    return " ".join(shown) or "-"


def _printable(text: str) -> str:
    """Line breaks, terminal codes and lone surrogates of a name as escapes: a row is one line on every terminal."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def filled(text: str, width: int | None) -> str:
    """A paragraph of at most `width` columns (None: one line)."""
    shown = _printable(text)
    return shown if width is None else fill(shown, width, subsequent_indent="  ", break_on_hyphens=False)


def joined(facts: Sequence[str], width: int | None) -> str:
    """Facts with dots between them, where lines end if they can; at most `width` columns (None: one line)."""
    if width is None:
        return " · ".join(map(_printable, facts))
    lines = [_printable(facts[0])]
    for fact in map(_printable, facts[1:]):
        if len(lines[-1]) + len(fact) + 5 > width:  # a dot on either side, so that no line looks like the end
            lines[-1] += " ·"
            lines.append("  " + fact)
        else:
            lines[-1] += f" · {fact}"
    return "\n".join(fill(line, width, subsequent_indent="  ", break_on_hyphens=False) for line in lines)


def _aligned(rows: Sequence[Sequence[str]], width: int | None = None) -> list[str]:
    """Rows in columns; where they are wider than `width` the cells of the widest columns are wrapped."""
    rows = [[_printable(cell) for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    if width is not None:
        # Ids may be cut anywhere; other cells are wrapped between words as long as that is enough.
        words = [
            max(len(word) for row in rows for word in row[column].split() or [""]) for column in range(len(widths))
        ]
        _narrowed(widths, [LEAST, *words[1:]], width)
        _narrowed(widths, [LEAST] * len(widths), width)
    lines = []
    for row in rows:
        cells = [_wrapped(cell, own) for cell, own in zip(row, widths, strict=True)]
        for number in range(max(map(len, cells))):
            parts = [cell[number] if number < len(cell) else "" for cell in cells]
            lines.append("  ".join(part.ljust(own) for part, own in zip(parts, widths, strict=True)).rstrip())
    return lines


def _narrowed(widths: list[int], least: Sequence[int], width: int) -> None:
    """Take from the widest columns, of those above `least`, until a table has `width` columns."""
    while sum(widths) + 2 * (len(widths) - 1) > width:
        free = [(own, -column) for column, own in enumerate(widths) if own > least[column]]
        if not free:
            return
        widths[-max(free)[1]] -= 1


def _wrapped(cell: str, width: int) -> list[str]:
    return [cell] if len(cell) <= width else wrap(cell, width, break_on_hyphens=False)
