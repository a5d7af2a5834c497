"""Takes the pages of the papers' tables into the docs: `python -m scripts.tables [outputs/sets] [mini]`.

Of every table that is whole at the scale, its Markdown page and its figure go to docs/tables, whose index.md gets one
line: seeds, the paper's claims that are held and not held, and how many are undecided. Each set of `COMPARED`
has its page in docs/tables/NAME.md. What is not there keeps the page and line it has.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from mmrl.sets.words import set_names
from scripts.docs import filled
from scripts.papers.spec import SETS

ROOT = Path(__file__).parents[1]
PART = "tables that were run"
COMPARED = ("mini", "tasks")
"""Sets without scales, of which docs/tables has a page each."""
HEAD = ["| table | what | seeds | claims held | not held | undecided |", "|---|---|---|---|---|---|"]


def line_of(name: str, page: dict[str, Any]) -> str:
    """The table's line in docs/tables/index.md."""
    by_verdict: dict[str, list[str]] = {"held": [], "not held": [], "undecided": []}
    # A claim between rows of two models says nothing at scale mini; its line counts it among the undecided.
    for claim in page["claims"]:
        if claim["interval"] is None:
            continue  # not run: one of its rows has no items
        low, high = claim["interval"]
        where = f" on {', '.join(claim['cells'])}" if claim["cells"] else ""
        by_verdict.get(claim["verdict"], by_verdict["undecided"]).append(
            f"{claim['more']} > {claim['than']}{where} ({claim['difference']:+.3f} [{low:+.3f}, {high:+.3f}])"
        )
    seeds = sorted({len(value["seeds"]) for value in page["values"]})
    cells = [
        f"[`{name}`]({name}.md)",
        page["head"]["paper"].partition(": ")[2],
        " or ".join(map(str, seeds)),
        *("; ".join(by_verdict[verdict]) for verdict in ("held", "not held")),
        str(len(by_verdict["undecided"]) or ""),
    ]
    return f"| {' | '.join(cells)} |"


def whole(paths: Iterable[Path]) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Folder and content of every set.json whose cells all have their seeds."""
    for path in sorted(paths):
        page = json.loads(path.read_text(encoding="utf-8"))
        if page["cells_done"] == page["cells"]:
            yield path.parent, page


def lines_in(text: str) -> dict[str, str]:
    """Table -> its line, of the generated part as it is."""
    return {match[1]: match[0] for match in re.finditer(r"^\| \[`([\w-]+)`\]\(.*$", text, re.MULTILINE)}


def fill_comparison(outputs: Path) -> None:
    """Put the pages of `COMPARED` that are complete into docs/tables, their figures beside them."""
    tables = ROOT / "docs" / "tables"
    for folder, _ in whole(outputs / name / "set.json" for name in COMPARED if (outputs / name / "set.json").is_file()):
        name = folder.name
        # Without its title and head: the document says what was run.
        body = "\n\n".join((folder / "set.md").read_text(encoding="utf-8").strip().split("\n\n")[2:])
        body = body.replace("(figure.png)", f"(figures/set-{name}.svg)").replace("\n## ", "\n### ")
        (tables / "figures" / f"set-{name}.svg").write_bytes((folder / "figure.svg").read_bytes())
        page_file = tables / f"{name}.md"
        page_file.write_text(filled(page_file.read_text(encoding="utf-8"), name, body, by="tables"), encoding="utf-8")
        print(f"taken: {name}")


def main(arguments: list[str]) -> int:
    """Write pages, figures and lines; prints what was taken."""
    outputs, scale = Path((arguments or ["outputs/sets"])[0]), (arguments[1:] or ["mini"])[0]
    folder = ROOT / "docs" / "tables"
    index = folder / "index.md"
    text = index.read_text(encoding="utf-8")
    lines = lines_in(text)
    for made, page in whole(outputs.glob(f"*/{scale}/set.json")):
        name = made.parent.name
        lines[name] = line_of(name, page)
        markdown = (made / "set.md").read_text(encoding="utf-8")
        figure = made / "figure.svg"
        if figure.is_file():
            (folder / f"{name}.svg").write_bytes(figure.read_bytes())
        (folder / f"{name}.md").write_text(markdown.replace("(figure.png)", f"({name}.svg)"), encoding="utf-8")
        print(f"taken: {name}")
    part = "\n".join([*HEAD, *(lines[name] for name in set_names([SETS]) if name in lines)])
    index.write_text(filled(text, PART, part, by="tables"), encoding="utf-8")
    fill_comparison(outputs)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
