"""Rows and paragraphs as plain text, no wider than a terminal.

What is copied or piped is the same. Without numpy, which `mmrl credit` must not wait for.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from itertools import zip_longest
from textwrap import fill, wrap
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import RenderableType

LEAST = 8
"""Columns that a cell keeps, however narrow the terminal."""


def align(rows: Sequence[Sequence[str]], indent: str = "  ", width: int | None = None) -> str:
    """Align rows of text in columns: the first column to the left, all others to the right, except a last one of words.

    Args:
        width: columns of the terminal. What does not fit is printed below, with the first column again. None: any.
    """
    # The widest cell of each column, head included.
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    blocks: list[list[int]] = [[]]
    for column, needed in enumerate(widths[1:], start=1):
        used_width = len(indent) + widths[0] + sum(2 + widths[other] for other in blocks[-1])
        if width is not None and needed and blocks[-1] and used_width + 2 + needed > width:
            blocks.append([])
        blocks[-1].append(column)
    last = len(widths) - 1
    lines: list[str] = []
    for block in blocks:
        lines += [""] * bool(lines)
        for row in rows:
            cells = [row[column] if column == last else row[column].rjust(widths[column]) for column in block]
            lines.append((indent + "  ".join([row[0].ljust(widths[0]), *cells])).rstrip())
    return "\n".join(lines)


def clean(text: object) -> str:
    """Make text safe to print: line ends become ⏎, other control characters are made visible."""
    # A model may write escape sequences: shown as text they cannot drive a terminal.
    line = str(text).replace("\r\n", "\n").replace("\n", " ⏎ ").replace("\t", " ")
    return "".join(mark if mark.isprintable() else f"\\x{ord(mark):02x}" for mark in line)


def filled(text: str, width: int | None) -> str:
    """Wrap a paragraph to at most `width` columns (None: one line)."""
    text = clean(text)
    return text if width is None else fill(text, width, subsequent_indent="  ", break_on_hyphens=False)


def wrapped_rows(rows: Sequence[Sequence[str]], width: int | None = None) -> list[str]:
    """Align rows in columns, all to the left; where they are wider than `width` the widest columns are wrapped."""
    rows = [[clean(cell) for cell in row] for row in rows]
    columns = list(zip(*rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    # Ids in the first column may be cut anywhere; others are wrapped between words as long as that is enough.
    words = [max(len(word) for cell in column for word in cell.split() or [""]) for column in columns]
    for least in ([LEAST, *words[1:]], [LEAST] * len(columns)):
        while width is not None and sum(widths) + 2 * (len(widths) - 1) > width:
            wider = [column for column, limit in enumerate(least) if widths[column] > limit]
            if not wider:
                break
            widths[max(wider, key=widths.__getitem__)] -= 1
    lines = []
    for row in rows:
        cells = [wrap(cell, size, break_on_hyphens=False) for cell, size in zip(row, widths, strict=True)]
        for parts in zip_longest(*cells, fillvalue=""):
            lines.append("  ".join(part.ljust(size) for part, size in zip(parts, widths, strict=True)).rstrip())
    return lines


def drawn(parts: Sequence[RenderableType], width: int) -> str:
    """Return the plain text of what rich draws, so that copied or piped output is the same."""
    from rich.console import Console

    screen = Console(file=io.StringIO(), width=width, color_system=None, markup=False, highlight=False, emoji=False)
    with screen.capture() as captured:
        for part in parts:
            screen.print(part)
    return "\n".join(line.rstrip() for line in captured.get().splitlines())
