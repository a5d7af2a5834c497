"""The progress display: right in a terminal, quiet elsewhere, and never the end of a run."""

import io
import math
import re
import sys

import pytest
from rich.console import Console

from mmrl.report.progress import Progress
from tests.helpers.runs import evaluation, metrics


def terminal(width=100, **more):
    return Console(file=io.StringIO(), force_terminal=True, width=width, height=40, legacy_windows=False, **more)


def pipe(encoding="utf-8", width=80, **more):
    return Console(file=io.TextIOWrapper(io.BytesIO(), encoding=encoding), force_terminal=False, width=width, **more)


def written(console):
    console.file.flush()
    buffer = console.file
    return buffer.buffer.getvalue().decode() if hasattr(buffer, "buffer") else buffer.getvalue()


def played(console, steps=25, total=40):
    progress = Progress(total=total, title="a run", main_metric="em", console=console)
    with progress:
        progress.evaluation(0, "dev", evaluation(0))
        for step in range(1, steps + 1):
            progress.step(step, metrics(step))
        progress.evaluation(steps, "dev", evaluation(20))
        progress.note("a checkpoint was saved")
    return progress


def drawn(progress, width, encoding="utf-8"):
    console = pipe(encoding, width)
    console.print(progress.render(width))
    return written(console)


@pytest.mark.parametrize("width", [120, 80, 40, 20])
def test_the_display_fits_its_terminal(width):
    text = drawn(played(terminal(width)), width)
    assert all(len(line) <= width for line in text.splitlines())
    assert "step 25/40" in text
    if width >= 40:
        assert re.search(r"reward +0\.\d", text)


def test_the_display_shows_reward_evaluations_and_speed():
    text = drawn(played(terminal(120)), 120)
    assert "62%" in text and "left" in text
    assert re.search(r"dev em +0\.817 .*\[0\.757, 0\.877\].*from 0\.417", text)
    assert "12.3k tokens/s" in text


def test_without_a_terminal_there_are_few_plain_lines():
    console = pipe()
    played(console, steps=300, total=300)
    lines = written(console).splitlines()
    assert "\x1b" not in written(console)
    assert 25 <= sum(line.startswith("step ") for line in lines) <= 40
    assert lines[-3].startswith("step 300/300") and "done" in lines[-3]
    assert any(line.startswith("evaluation on dev at step 0: em 0.417 [0.357, 0.477]") for line in lines)
    assert "a checkpoint was saved" in lines


def test_a_supervised_stage_shows_its_loss():
    told = {"train/loss": 0.75, "train/token_accuracy": 0.5, "module/a/loss": 0.75, "rate/tokens_per_s": 9.0}
    for console in (pipe(), terminal()):
        with Progress(total=2, console=console) as progress:
            progress.step(1, told)
        shown = written(console)
        assert "loss" in shown and "0.75" in shown and "token accuracy 50" in shown and "reward" not in shown


@pytest.mark.parametrize("done", [0, 2])
def test_the_pace_begins_with_the_first_step_and_has_evaluations_in_it(done):
    now = [0.0]
    console = pipe(get_time=lambda: now[0])
    with Progress(total=done + 4, first_step=done, console=console) as progress:
        now[0] = 900  # one before training is no part of a step
        progress.evaluation(done, "dev", evaluation(0))
        now[0] = 910
        progress.step(done + 1, metrics(1))
        now[0] = 4900  # an evaluation that takes longer than many steps
        progress.evaluation(done + 1, "dev", evaluation(0))
        now[0] = 4910
        progress.step(done + 2, metrics(2))
    _, first, _, second = written(console).splitlines()
    assert first.endswith("10 s/step  30 s left")
    assert second.endswith("33 min 25 s/step  1 h 06 min left")


def test_the_pace_of_a_run_of_one_step_is_that_of_the_step():
    now = [0.0]
    console = pipe(get_time=lambda: now[0])
    with Progress(total=1, console=console) as progress:
        progress.evaluation(0, "dev", evaluation(0))
        now[0] = 15
        progress.evaluation(1, "dev", evaluation(0))  # the last one, which a run makes before it logs the step
        progress.step(1, metrics(1))
    assert written(console).splitlines()[-1].endswith("15 s/step  done")


def test_failed_rollouts_are_printed_with_their_kinds():
    console = pipe()
    with Progress(total=2, console=console) as progress:
        progress.evaluation(0, "dev", {"n": 8.0, "em": 0.1, "failed/parse": 0.5, "failed/judge": 0.25})
        progress.evaluation(0, "dev", {"n": 8.0, "em": 0.1, "failed/length": 1.0})
        progress.evaluation(0, "dev", {"n": 8.0, "em": 0.1, "failed_share": 0.0})
        counts = {"rollouts/count": 8.0, "rollouts/failed/judge": 2.0, "rollouts/failed/length": 4.0}
        progress.step(1, {"reward/mean": 0.5, "rollouts/failed_share": 0.25} | counts)
        progress.step(2, {"reward/mean": 0.5, "rollouts/count": 8.0, "rollouts/failed_share": 0.0})
    some, all_, none, first, second = written(console).splitlines()
    assert some.endswith("n 8  failed 75% (parse 50%, judge 25%), judge counted as 0")
    assert all_.endswith("n 8  failed 100% (length 100%)") and none.endswith("n 8")
    assert "  failed 75% (length 50%, judge 25%)  " in first
    assert "failed" not in second


def test_run_progress_false_gives_plain_lines_in_a_terminal():
    console = terminal()
    with Progress(total=2, title="named", live=False, console=console) as progress:
        progress.step(1, metrics(1))
    assert "named: 2 steps to go" in written(console)
    assert "\x1b[?25l" not in written(console)  # the cursor is never hidden


def test_an_encoding_without_blocks_gets_ascii():
    console = pipe("ascii")
    progress = played(console)
    progress.note("Lísbon → Pörto")
    assert written(console).isascii()
    assert drawn(progress, 80, "ascii").isascii()


def test_a_resumed_run_shows_and_judges_by_the_steps_before():
    history = [{"step": 0, **evaluation(0)}]
    history += [{"step": step, "reward/mean": 0.9 if step < 10 else 0.1} for step in range(1, 13)]
    history[4] |= evaluation(4)
    whole, resumed = terminal(120), terminal(120)
    with (
        Progress(total=30, console=whole) as without,
        Progress(total=30, console=resumed, first_step=12, history=history) as progress,
    ):
        for told in (without, progress):
            told.step(13, {"reward/mean": 0.1})
    assert "reward_collapse" not in written(whole)
    assert "alarm reward_collapse from step 12 (reward/mean)" in written(resumed)
    text = drawn(progress, 120)
    assert "step 13/30" in text and "best 0.900" in text
    assert re.search(r"dev em +0\.5\d\d .*from 0\.417  at step 4", text)


def test_the_status_is_asked_for_at_each_refresh_and_has_its_time():
    done = iter(range(9))
    with Progress(total=2, console=terminal()) as progress:
        progress.status(lambda: f"sampling: {next(done)} of 9")
        assert "sampling: 1 of 9" in drawn(progress, 80)
        assert re.search(r"sampling: [2-8] of 9", drawn(progress, 80))
        progress.step(1, metrics(1))
        assert "sampling" not in drawn(progress, 80)


def test_codes_in_names_and_messages_drive_no_terminal():
    console = pipe()
    codes = "\x1b]0;title\x07\x1b[2J"
    with Progress(total=3, title=f"run{codes}", main_metric=f"m{codes}", console=console) as progress:
        progress.evaluation(0, "dev", {f"m{codes}": 0.5})
        progress.step(1, {"reward/mean": 0.5, f"task/m{codes}": 0.5})
        progress.note(f"{codes}\nnext line")
    assert "\x1b" not in written(console) and "\x07" not in written(console)
    assert r"m\x1b]0;title\x07\x1b[2J 0.500" in written(console) and "\nnext line\n" in written(console)


def test_an_alarm_is_said_once():
    console = pipe()
    with Progress(total=50, console=console) as progress:
        for step in range(1, 30):
            progress.step(step, {"reward/mean": 0.5, "credit/zero_variance_share": 1.0})
    assert written(console).count("alarm zero_variance") == 1


def test_a_slow_change_since_the_first_steps_rings_in_a_long_run():
    """Entropy falls by e in 200 steps; a mean of five is a twentieth of the first one, that of step 5, after 599.1."""
    console = pipe()
    with Progress(total=2000, console=console) as progress:
        for step in range(1, 610):
            progress.step(step, {"reward/mean": 0.5, "module/a/entropy": math.exp(-step / 200)})
    assert "alarm entropy_collapse at step 605 (module/a/entropy)" in written(console)


class Broken(io.StringIO):
    def write(self, text):
        raise OSError("disk full")


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_broken_screen_never_ends_the_run(is_terminal, capsys):
    console = Console(file=Broken(), force_terminal=is_terminal, width=80)
    streams = sys.stdout, sys.stderr
    with Progress(total=3, title="x", console=console) as progress:
        for step in (1, 2, 3):
            progress.step(step, metrics(step))
        progress.note("still here")
        progress.evaluation(3, "dev", {"em": 1.0})
        progress.status("x")
    assert progress.off
    assert (sys.stdout, sys.stderr) == streams
    assert capsys.readouterr().err.count("switched off") == 1


@pytest.mark.parametrize("odd", [{}, {"reward/mean": None}, {"reward/mean": float("nan")}, {"module/x/reward": "text"}])
def test_odd_metrics_are_shown_as_missing(odd, capsys):
    console = terminal()
    with Progress(total=3, console=console) as progress:
        progress.step(1, odd)
        progress.evaluation(1, "dev", odd)
    assert not progress.off
    assert capsys.readouterr().err == ""


def test_the_runs_own_exceptions_pass():
    with pytest.raises(KeyboardInterrupt), Progress(total=3, console=terminal()):
        raise KeyboardInterrupt
