"""The docs say what is there: generated parts are fresh, links lead somewhere, every metric has its line."""

import re
import subprocess
import sys
from pathlib import Path

TOP = Path(__file__).parents[2]


def test_the_generated_parts_are_up_to_date():
    # In a process of its own: other tests may have added names to those that the docs list.
    done = subprocess.run([sys.executable, "-m", "scripts.docs", "--check"], cwd=TOP, capture_output=True, text=True)
    assert done.returncode == 0, f"run: make docs\n{done.stdout}{done.stderr}"


def test_the_readme_is_short_and_names_every_folder_of_the_package():
    text = (TOP / "README.md").read_text(encoding="utf-8")
    assert len(text.encode()) <= 9 * 1024
    for path in (TOP / "mmrl").iterdir():
        if (path / "__init__.py").exists():
            assert re.search(rf"^.*\b{path.name}/ ", text, re.M), path


def test_every_page_of_the_docs_is_linked_from_the_readme():
    text = (TOP / "README.md").read_text(encoding="utf-8")
    for path in (TOP / "docs").glob("*.md"):
        assert f"docs/{path.name}" in text, path


def test_links_between_docs_lead_somewhere():
    for page in [TOP / "README.md", *(TOP / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#\s]+)", page.read_text()):
            if not target.startswith("http"):
                assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_anchors_in_links_are_headings():
    def anchors(page: Path) -> set[str]:
        text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
        kept = (re.sub(r"[^\w\- ]", "", title.lower()) for title in re.findall(r"^#+ (.*)$", text, re.M))
        return {title.replace(" ", "-") for title in kept}

    for page in [TOP / "README.md", *(TOP / "docs").glob("*.md")]:
        for target, anchor in re.findall(r"\]\(([^)#\s]*)#([^)\s]+)\)", page.read_text()):
            if not target.startswith("http"):
                assert anchor in anchors(page.parent / target if target else page), f"{page.name}: {target}#{anchor}"


def test_no_path_of_one_machine_is_in_the_project():
    listed = subprocess.run(["git", "ls-files"], cwd=TOP, capture_output=True, text=True).stdout.splitlines()
    home = re.compile(r"(?<![\w.])/(work|root|farm|home)/")
    for name in listed:
        path = TOP / name
        if (
            path.suffix in (".py", ".md", ".yaml", ".toml", "")
            and path.is_file()
            and name != "tests/scripts/test_docs.py"
        ):
            assert not home.search(path.read_text(errors="ignore")), name
