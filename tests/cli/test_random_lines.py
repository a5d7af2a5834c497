"""Random command lines are served or refused: exit code, no traceback, no hang, nothing written elsewhere."""

import os
from pathlib import Path

import pytest
from hypothesis import given, settings

from tests.fuzz.command_lines import command_lines
from tests.fuzz.in_process import call, run

LINES = int(os.environ.get("FUZZ", "5000")) // 25
"""A line takes some hundred times as long as another bad input (`make fuzz`)."""


@settings(max_examples=LINES)
@given(line=command_lines())
def test_random_lines_are_served_or_refused(line):
    assert run(line) is None


@pytest.mark.parametrize(
    "line",
    [
        "train -m hydra/sweeper=1e3 seed=1,2",
        "eval --package=train policy=tiny",
        "train run.name=\udcff",  # half of a letter
        "train -m hydra.mode=RUN seed=1,2",
    ],
    ids=ascii,
)
def test_what_was_found(line):
    """And that has no sentence of its own in test_cli_mistakes.py."""
    assert run(line.split()) is None


def test_the_check_itself_sees_what_is_wrong(monkeypatch, tmp_path):
    import time

    import mmrl.cli

    def does(what):
        monkeypatch.setattr(mmrl.cli, "main", lambda words: what())
        return call(["x"], tmp_path, limit_s=0.2) or ""

    here = tmp_path / "x"
    assert "exit code 3" in does(lambda: 3)
    assert "KeyError" in does(lambda: dict[str, int]()["x"])
    assert "not done after 0.2 s" in does(lambda: time.sleep(5))
    assert "without a word" in does(lambda: 2)
    assert does(lambda: print("Traceback (most recent call last):") or 0)
    elsewhere = Path(tmp_path).parent / "elsewhere-of-a-test"
    assert "wrote" in does(lambda: elsewhere.write_text("") or 0)
    assert not does(lambda: here.mkdir() or 0)
