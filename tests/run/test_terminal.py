"""Runs in a real terminal: what a person reads, to the last line."""

import sys

import pytest

from mmrl.report.stats import BLOCKS
from mmrl.store.rundir import RunDir
from tests.helpers.runs import command
from tests.helpers.terminal import in_terminal, screen

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="no pseudo-terminals")


def test_the_screen_is_what_is_left_of_lines_that_were_drawn_over():
    assert screen("a\r\nbc\r\x1b[2K\x1b[1A\x1b[2Kd\r\nef\rg\r\n") == ["d", "gf", ""]


def test_a_run_is_stopped_by_ctrl_c_and_goes_on_with_what_it_knows(random_model, tmp_path):
    run = tmp_path / "run"
    words = command(random_model, run, "train.steps=4", "train.save_every=1", "eval.every=1")
    stopped = in_terminal("-m", "mmrl", *words, keys={"step 2/4": "\x03"})
    assert stopped.code == 130
    said = [line for line in stopped.lines if line]
    assert said[0] == "mmrl train: loading …"
    assert said[-1].startswith("interrupted; continue with: mmrl train resume="), said
    assert "sampling: " in stopped.raw and "updating the weights" in stopped.raw and "loading the model" in stopped.raw
    assert "AttributeError" not in stopped.raw
    assert "<h2>Curves</h2>" in (run / "report.html").read_text(), "written at the evaluation after a step"
    done = max(record["step"] for record in RunDir.read(run).history())

    ended = in_terminal("-m", "mmrl", *said[-1].removeprefix("interrupted; continue with: mmrl ").split())
    assert ended.code == 0, ended.raw
    # The evaluation before training, and the steps of the process before, are on its display and in its alarms.
    began = RunDir.read(run).history()[0]["eval/dev/f1"]
    first = ended.raw.partition(f"step {done}/4")[2].partition("step 3/4")[0]
    assert f"from {began:.3f}" in first and "best " in first
    (at,) = (number for number, line in enumerate(ended.lines) if line.startswith("training reward"))
    curve = ended.lines[at + 1].strip()
    assert len(curve) == 4 and set(curve) <= set(BLOCKS)
    assert [line for line in ended.lines if line][-1].startswith("evaluate ")


BARS = """
import sys, time
from tqdm import tqdm
from mmrl.report.progress import Progress
from mmrl.secrets import HidingStream

sys.stdout, sys.stderr = HidingStream.around(sys.stdout), HidingStream.around(sys.stderr)
with Progress(total=2, title="run") as progress:
    for name, leave in (("kept", True), ("gone", False)):
        for _ in tqdm(range(40), desc=name, mininterval=0, leave=leave):
            time.sleep(0.03)
    progress.status("working")
    time.sleep(1.2)
    print("a line of the program", sys.stdout.encoding)
    print("un", end="")
    print("finished")
    progress.note("metric\\x1b[31m\\x07 red")
print("after", sys.stdout.encoding)
"""


def test_what_others_print_stands_above_the_display_once():
    seen = in_terminal("-c", BARS)
    assert seen.code == 0, seen.raw
    lines = [line for line in seen.lines if line]
    assert [line[:14] for line in lines if "it/s" in line] == ["kept: 100%|███"]
    assert "a line of the program utf-8" in lines and "unfinished" in lines and lines[-1] == "after utf-8"
    assert "gone" in seen.raw and "working" in seen.raw
    assert r"metric\x1b[31m\x07 red" in lines
