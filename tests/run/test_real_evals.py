"""The tasks and public files of docs/datasets.md: each evaluates, and says what its numbers are over."""

import json
import re
import shlex
from pathlib import Path

import pytest

from mmrl.cli import main

DOCS = Path(__file__).parents[2] / "docs" / "datasets.md"
SECTION = DOCS.read_text(encoding="utf-8").partition("## On official files")[2].partition("\n## ")[0]
BUILD, _ = re.findall("^mmrl .*$", SECTION, re.M)
ROWS = re.findall(r"^\| `(\S+)` \| (`.+`) \| .* \| (.+) \|$", SECTION, re.M)
EVALS = [
    f"mmrl eval policy=tiny task={task} task.data.dev=$DATA/{file}"
    + ("" if share == "nothing is searched" else " task.retriever.index=outputs/union")
    for file, tasks, share in ROWS
    for task in re.findall("`(.+?)`", tasks)
]
OFFICIAL = {
    "banking77": {"em"},
    "papillon": {"score", "quality", "leakage"},
    "hover": {"recall", "all_titles"},
    "search_agent": {"em", "f1", "format", "retrieval"},
    "tool_agent": {"em", "f1"},
}
"""Task -> metrics of its results; the others have those of HotpotQA."""


def arguments(line: str, data: Path, index: Path) -> list[str]:
    command, *rest = shlex.split(line.replace("$DATA", str(data)).replace("outputs/union", str(index)))
    assert command == "mmrl"
    return rest


@pytest.fixture(scope="session")
def union(data_dir, tmp_path_factory):
    index = tmp_path_factory.mktemp("union") / "index"
    assert main(arguments(BUILD, data_dir, index)) == 0
    return index


def test_every_task_is_there():
    assert len(ROWS) == SECTION.count("\n| `")
    assert any(line in EVALS for line in SECTION.splitlines()), "the command on the page is one of the table's"
    named = {value for line in EVALS for key, _, value in [w.partition("=") for w in line.split()] if key == "task"}
    assert named == {
        *("banking77", "papillon", "hover", "hotpotqa", "2wiki", "musique", "search_agent", "tool_agent"),
        *("qa_direct", "search_o1", "r1_searcher"),
    }


@pytest.mark.slow
@pytest.mark.data
@pytest.mark.parametrize("line", EVALS, ids=lambda line: "-".join(re.findall(r"task(?:\.dataset)?=(\w+)", line)))
def test_it_evaluates_and_says_over_what(line, data_dir, union, tmp_path, capsys):
    run = tmp_path / "run"
    small = ["task.data.dev_items=2", "hardware.threads=1", f"run.dir={run}"]
    assert main([*arguments(line, data_dir, union), *small]) == 0
    summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    name, facts, metrics = summary["task"], summary["facts"], summary["metrics"]
    assert metrics["n"] == 2 and metrics["failed_share"] == 0
    assert OFFICIAL.get(name, {"em", "f1", "accuracy"}) | {"reward"} <= set(metrics)
    shown = capsys.readouterr().out
    if name in ("banking77", "papillon", "qa_direct"):
        assert "partial corpus" not in shown, "nothing is searched"
    else:
        assert re.search(r"partial corpus +\w+ with all gold titles.*: dev \d+\.\d%", shown)
        assert facts["partial corpus"]
    if name == "papillon":
        assert "rule-based judge" in shown and facts["external model"] == "rule-based external model"
