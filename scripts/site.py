"""Builds the site of the documentation in build/site, from docs/ and the pages at the top of the repository, offline.

    python -m scripts.site

The links of these pages are those between files. On the site all pages stand in one folder, and a file that is not part
of it (a config, a script) is named without a link. A link that leads nowhere fails the build.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

TOP = Path(__file__).resolve().parent.parent
NAMES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
}
"""Pages at the top of the repository -> their names on the site."""
LINK = re.compile(r"(!?)\[([^\[\]]*)\]\((?!https?:|mailto:|#)([^()#\s]+)(#[^()\s]*)?\)")
MERMAID = '\n<script src="mermaid.js"></script>\n'
"""Ends a page that has a diagram."""


def on_site(text: str, folder: Path) -> str:
    """Return a page with the links that it has on the site.

    Args:
        text: the page as it stands in the repository.
        folder: where it stands there.
    """

    def link(match: re.Match[str]) -> str:
        image, label, target, anchor = match.groups()
        path = (folder / target).resolve()
        name = NAMES.get(path.relative_to(TOP).as_posix())
        if name is None and path.is_relative_to(TOP / "docs"):
            name = path.relative_to(TOP / "docs").as_posix()
        return label if name is None else f"{image}[{label}]({name}{anchor or ''})"

    return LINK.sub(link, text) + (MERMAID if "```mermaid" in text else "")


def write_pages(folder: Path) -> None:
    """Write the sources of the site into a new folder."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(TOP / "docs", folder)
    sources = {path: path.name for path in (TOP / "docs").glob("*.md")}
    for path, name in (sources | {TOP / page: name for page, name in NAMES.items()}).items():
        (folder / name).write_text(on_site(path.read_text(encoding="utf-8"), path.parent), encoding="utf-8")
    # Else a search for an algorithm shows its many tables of numbers before its page, and one for a key its history.
    for page in (*folder.glob("tables/*.md"), *folder.glob("changelog.md")):
        page.write_text(f"---\nsearch: {{exclude: true}}\n---\n\n{page.read_text(encoding='utf-8')}", encoding="utf-8")
    # The one library that the generator would have a reader's browser fetch from elsewhere.
    shutil.copy(str(files("mermaidx") / "assets" / "mermaid.js"), folder)


def build(top: Path) -> int:
    """Build the site in a folder that has mkdocs.yml; returns an exit code."""
    write_pages(top / "build" / "pages")
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--clean"]
    return subprocess.run(command, cwd=top, env=os.environ | {"PYTHONPATH": str(TOP)}).returncode


if __name__ == "__main__":
    code = build(TOP)
    if not code:
        print("look at it: python3 -m http.server -d build/site (without a server it has no search)")
    sys.exit(code)
