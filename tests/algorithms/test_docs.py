"""The pages of the algorithms: every command is run and prints what they say; the files are docs/forests.

A line of "…" stands for lines that a page leaves out.
"""

import re
import shlex

import pytest

from mmrl.algorithms import ALGORITHMS
from mmrl.cli import main
from mmrl.store.forest import parse_forest
from tests.helpers import TOP
from tests.helpers.forests import documented

DOCS, FORESTS = TOP / "docs", TOP / "docs" / "forests"
NAMES = ("algorithms", "forest", "mmgrpo", "mhgpo", "turn-rewards", "ppo", "credits", "distillation")
PAGE = "".join((DOCS / f"{name}.md").read_text(encoding="utf-8") for name in NAMES)
FILES = re.findall(r"\(forests/(\w+\.json)\)\):\n\n```json\n(.*?)```", PAGE, re.S)
BLOCKS = re.findall(r"```console\n(.*?)```", PAGE, re.S)
RUNS = [run for block in BLOCKS for run in re.findall(r"^\$ mmrl (.*)\n((?:(?!\$ ).*\n)*)", block, re.M)]


@pytest.mark.parametrize(("name", "text"), FILES, ids=[name for name, _ in FILES])
def test_a_file_on_a_page_is_the_one_of_the_folder(name, text):
    assert parse_forest(text, name) == documented(name.removesuffix(".json"))


@pytest.mark.parametrize(("command", "printed"), RUNS, ids=[command for command, _ in RUNS])
def test_commands_print_what_the_page_says(command, printed, monkeypatch, capsys):
    monkeypatch.chdir(FORESTS)
    monkeypatch.delenv("COLUMNS")  # as printed to a file
    assert main(shlex.split(command)) == 0
    lines = [re.escape(f"{line.rstrip()}\n") if line != "…" else "(?:[^\n]+\n)+" for line in printed.splitlines()]
    out = "".join(f"{line.rstrip()}\n" for line in capsys.readouterr().out.rstrip().splitlines())
    assert re.fullmatch("".join(lines), out), out


def test_every_algorithm_has_an_example():
    shown = {word for command, _ in RUNS for word in re.findall(r"algo=(\w+)", command)}
    assert shown == set(ALGORITHMS)


def test_the_picture_of_ten_credits_has_the_numbers_of_today(monkeypatch, tmp_path):
    monkeypatch.chdir(FORESTS)
    (line,) = re.findall(r"^mmrl (credit .*) page=ten.html$", PAGE, re.M)
    assert main([*line.split(), f"page={tmp_path / 'ten.svg'}"]) == 0
    today, shown = (path.read_text("utf-8") for path in (tmp_path / "ten.svg", DOCS / "figures" / "credits.svg"))
    cells = [re.findall(r">([^<>]+)</text>", svg) for svg in (today, shown)]
    assert cells[0] == cells[1] and sum(cell[0] in "+-·0" for cell in cells[0]) >= 80
