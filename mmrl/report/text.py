"""Rows and paragraphs as plain text, no wider than a terminal.

What is copied or piped is the same. Without numpy, which `mmrl credit` must not wait for.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from textwrap import fill
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import RenderableType


def align(rows: Sequence[Sequence[str]], indent: str = "  ", width: int | None = None, words: bool = False) -> str:
    """Align rows of text in columns: the first column to the left, all others to the right, except a last one of words.

    Args:
        words: True for cells of words, which are all aligned to the left.
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
            justify = str.ljust if words else str.rjust
            cells = [row[column] if column == last else justify(row[column], widths[column]) for column in block]
            lines.append((indent + "  ".join([row[0].ljust(widths[0]), *cells])).rstrip())
    return "\n".join(lines)


def clean(value: object) -> str:
    """Make a text safe to print: line ends become ⏎, other control characters are made visible; a list is joined."""
    text = "; ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    # A model may write escape sequences: shown as text they cannot drive a terminal.
    line = text.replace("\r\n", "\n").replace("\n", " ⏎ ").replace("\t", " ")
    if line.isprintable():  # nearly every text; letter by letter a report would take twice as long
        return line
    return "".join(mark if mark.isprintable() else f"\\x{ord(mark):02x}" for mark in line)


def filled(text: str, width: int | None) -> str:
    """Wrap a paragraph to at most `width` columns (None: one line)."""
    text = clean(text)
    return text if width is None else fill(text, width, subsequent_indent="  ", break_on_hyphens=False)


def drawn(parts: Sequence[RenderableType], width: int) -> str:
    """Return the plain text of what rich draws, so that copied or piped output is the same."""
    from rich.console import Console

    screen = Console(file=io.StringIO(), width=width, color_system=None, markup=False, highlight=False, emoji=False)
    with screen.capture() as captured:
        for part in parts:
            screen.print(part)
    return "\n".join(line.rstrip() for line in captured.get().splitlines())
