"""Runs docs/notebooks/optimize.ipynb again and keeps what its cells show: `python -m scripts.notebook` (half a minute).

Cells run in order below one event loop, as a kernel has it, in an empty folder; without the kernel itself, so that no
other package is needed. Progress, on standard error, is not kept: it has the seconds of one machine.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import copy
import io
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

NOTEBOOK = Path(__file__).resolve().parent.parent / "docs" / "notebooks" / "optimize.ipynb"


def executed(notebook: dict[str, Any], names: dict[str, Any]) -> dict[str, Any]:
    """The notebook with the outputs of today; `names`: what its cells define.

    Raises:
        Exception: that of a cell.
    """
    fresh, count = copy.deepcopy(notebook), 0

    async def kernel() -> None:
        nonlocal count
        for cell in fresh["cells"]:
            if cell["cell_type"] == "code":
                count += 1
                cell |= {"execution_count": count, "outputs": run_cell("".join(cell["source"]), names, count)}

    asyncio.run(kernel())
    return fresh


def run_cell(source: str, names: dict[str, Any], count: int) -> list[dict[str, Any]]:
    """Run a cell. Returns what it printed, and the value of a last line that is an expression."""
    tree = ast.parse(source)
    last = tree.body[-1]
    if isinstance(last, ast.Expr):
        tree.body.pop()
    with contextlib.redirect_stdout(Printed()) as printed:
        exec(compile(tree, "<cell>", "exec"), names)
        value = (
            eval(compile(ast.Expression(last.value), "<cell>", "eval"), names) if isinstance(last, ast.Expr) else None
        )
    outputs: list[dict[str, Any]] = []
    if printed.getvalue():
        outputs.append({"output_type": "stream", "name": "stdout", "text": lines(printed.getvalue())})
    if value is not None:
        shown = {"output_type": "execute_result", "execution_count": count, "metadata": {}}
        outputs.append(shown | {"data": {"text/plain": lines(repr(value))}})
    return outputs


class Printed(io.StringIO):
    """Standard output of a cell, which takes every letter."""

    encoding = "utf-8"


def lines(text: str) -> list[str]:
    """Text as a notebook stores it."""
    return text.splitlines(keepends=True)


def main() -> int:
    """Write the notebook."""
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        fresh = executed(notebook, {"__name__": "__main__"})
        os.chdir(NOTEBOOK.parent)
    NOTEBOOK.write_text(json.dumps(fresh, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"written: {NOTEBOOK.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
