"""What `mmrl credit` prints: every call of a forest with its credit under one or several algorithms.

Above `credit` because it runs algorithms; no task, no model, no torch.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from mmrl.algorithms import assign_credit
from mmrl.algorithms import problems as check
from mmrl.config import AlgoConfig
from mmrl.credit.entries import Credit, Entry
from mmrl.errors import ConfigError, DataError
from mmrl.records import Forest
from mmrl.report.forest import VERSION, check_forest, parse_forest
from mmrl.report.journal import decode_step
from mmrl.system.files import gunzip

GZIP = b"\x1f\x8b"
LARGEST_FILE = 2**30
"""Bytes that a zipped file may unpack to."""
TURN_REWARD_SETS = ("outcome", "turn")
"""A file may hold both kinds of reward; whether it does is its own matter."""


def load_rollouts(path: Path) -> Forest:
    """The forest of a JSON file, or of one step of a run's journal (`journal/step-*.jsonl.gz`); either may be zipped.

    Raises:
        DataError: the file is missing or malformed.
    """
    try:
        data = path.read_bytes()
        text = (gunzip(data, LARGEST_FILE) if data.startswith(GZIP) else data).decode("utf-8-sig")
        if _is_journal(text):
            forest = decode_step([json.loads(line) for line in text.split("\n") if line.strip()], str(path))[0]
            check_forest(forest, str(path))
            return forest
        return parse_forest(text, str(path))
    except OSError as error:
        hint = "; a journal is a file in RUN_DIR/journal" if path.is_dir() else ""
        raise DataError(f"rollouts: {path} cannot be read ({error.strerror or error}){hint}") from None
    except UnicodeDecodeError:
        raise DataError(f"rollouts: {path} is not UTF-8 text") from None
    except DataError:
        raise
    except (EOFError, zlib.error, ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
        raise DataError(f"rollouts: {path} is a damaged journal ({type(error).__name__}: {error})") from None


def _is_journal(text: str) -> bool:
    """Whether the first line is a record of its own, as in a journal."""
    try:
        first = json.loads(text.partition("\n")[0])
    except (ValueError, RecursionError):
        return False
    return isinstance(first, dict) and "line" in first


def credit_report(algos: Sequence[AlgoConfig], forest: Forest, *, seed: int, as_json: bool) -> str:
    """Credit `forest` under each of `algos`, as a table or as JSON (one object, or a list of them for several).

    Raises:
        ConfigError: an algorithm that does not fit the forest's modules, or lacks what it needs of the records
            (the first record of each algorithm that does).
    """
    problems = [p for algo in algos for p in check(algo, forest.modules, TURN_REWARD_SETS)]
    if problems:
        raise ConfigError(dict.fromkeys(problems))
    credits = []
    for algo in algos:
        try:
            credits.append(assign_credit(forest, algo, seed))
        except DataError as error:  # what one of several algorithms lacks is reported with its name
            problems += [f"algo={algo.name}: {problem}" for problem in error.problems]
    if problems:
        raise DataError(problems)
    if as_json:
        records = [credit_json(credit) for credit in credits]
        return json.dumps(records[0] if len(records) == 1 else records, indent=1)
    return table(forest, credits)


def credit_json(credit: Credit) -> dict[str, object]:
    """The JSON output of one algorithm; calls without credit do not appear."""
    return {"version": VERSION, "algo": credit.algo, "calls": [_entry_json(entry) for entry in credit.entries]}


def _entry_json(entry: Entry) -> dict[str, object]:
    record: dict[str, object] = {
        "id": entry.call,
        "reward": entry.reward,
        "parts": dict(entry.parts),
        "group": entry.group,
        "group_size": entry.group_size,
        "mean": entry.mean,
        "std": entry.std,
        "advantages": list(entry.advantages),
        "weights": list(entry.weights),
        "returns": None if entry.returns is None else list(entry.returns),
        "filler_of": entry.filler_of,
    }
    if entry.raw_advantages is not None and entry.token_rewards is not None:
        record |= {"raw_advantages": list(entry.raw_advantages), "token_rewards": list(entry.token_rewards)}
    return record


def table(forest: Forest, credits: Sequence[Credit]) -> str:
    """One row per entry: calls in the forest's order, algorithms side by side; then the calls without credit."""
    blocks = [_Block(credit) for credit in credits]
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
        lines = [f"{credits[0].algo}: {len(rows) - 1} entries", *_aligned(rows)]
    else:
        titles = [title for block in blocks for title in [block.name, *[""] * (len(block.columns) - 1)]]
        lines = _aligned([["", "", *titles], *rows])
    if missing:
        lines.append(_printable(f"calls without an entry: {', '.join(missing)}"))
    return "\n".join(lines)


class _Block:
    """The columns of one algorithm."""

    def __init__(self, credit: Credit):
        self.name = credit.algo
        self.critic = any(entry.returns is not None for entry in credit.entries)
        shown = ("token rewards", "raw advantage", "advantage", "returns", "weight")
        compared = ("group", "size", "mean", "std", "advantage", "weight")
        self.columns = ("reward", "parts", *(shown if self.critic else compared))
        self.rows: dict[str, list[list[str]]] = {}
        for entry in credit.entries:
            self.rows.setdefault(entry.call, []).append(self._row(entry))

    def cells(self, call: str, index: int) -> Sequence[str]:
        """The `index`-th entry of a call; blanks where there is none."""
        rows = self.rows.get(call, ())
        return rows[index] if index < len(rows) else [""] * len(self.columns)

    def _row(self, entry: Entry) -> list[str]:
        first = [_number(entry.reward), _parts(entry.parts)]
        if self.critic:
            tokens = (entry.token_rewards, entry.raw_advantages, entry.advantages, entry.returns, entry.weights)
            return [*first, *(_per_token(values or ()) for values in tokens)]
        group = (entry.group or "-") + (" (filler)" if entry.filler_of else "")
        numbers = [str(entry.group_size), _number(entry.mean), _number(entry.std)]
        return [*first, group, *numbers, _per_token(entry.advantages), _per_token(entry.weights)]


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


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    rows = [[_printable(cell) for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
