"""SIGTERM, which schedulers send: the run saves, ends with 143, and goes on from there to the same numbers."""

import asyncio
import gc
import os
import signal
import sys
import time

import pytest

from mmrl.cli import main
from mmrl.errors import Stopped
from mmrl.stages.collect import RolloutSampler
from mmrl.system.stop import stoppable
from mmrl.trainer.trl_trainer import MmrlTrainer
from tests.helpers.runs import command, contents, numbers
from tests.run.test_processes import workers_of


def small(random_model, folder):
    """A run of three steps, saved at its end alone."""
    return command(random_model, folder, "train.steps=3", "train.save_every=100", "eval.every=2")


def checkpoints(run):
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def terminate():
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize(
    ("place", "method", "count", "saved"),
    [
        (RolloutSampler, "collect", 3, ["checkpoint-2"]),
        (MmrlTrainer, "training_step", 2, ["checkpoint-2"]),
        (RolloutSampler, "environment", 1, []),
    ],
    ids=["while it samples", "while it updates", "before training"],
)
def test_a_run_that_is_terminated_saves_and_goes_on(
    place, method, count, saved, random_model, whole, tmp_path, capsys, monkeypatch
):
    run, works, calls = tmp_path / "run", getattr(place, method), []

    def stops(self, *arguments, **named):
        calls.append(method)
        if len(calls) == count:
            terminate()
            terminate()  # schedulers repeat it
        return works(self, *arguments, **named)

    with monkeypatch.context() as patched:
        patched.setattr(place, method, stops)
        assert main(small(random_model, run)) == 143
    shown = capsys.readouterr().err
    assert shown.splitlines()[-1] == f"stopped by SIGTERM; continue with: mmrl train resume={run}"
    assert shown.count("continue with") == 1
    assert checkpoints(run) == saved
    assert main(["train", f"resume={run}"]) == 0
    assert numbers(run) == numbers(whole)
    assert checkpoints(run) == ["checkpoint-3"], "the one that was saved early is not kept"
    files = {name: data for name, data in contents(whole)[2].items() if "checkpoint-2" not in name}
    assert contents(run)[2] == files, "journals, evaluations, the last checkpoint"


@pytest.mark.parametrize(
    ("number", "raised", "says"),
    [(signal.SIGTERM, SystemExit, str(Stopped.exit_code)), (signal.SIGINT, KeyboardInterrupt, None)],
)
def test_a_signal_that_comes_while_a_destructor_runs_is_not_lost(number, raised, says, capsys):
    class Ends:
        def __del__(self):
            os.kill(os.getpid(), number)

    # a shell's background job begins with Ctrl-C ignored
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(raised, match=says), stoppable():
            Ends()
            time.sleep(5)
    finally:
        signal.signal(signal.SIGINT, before)
    assert not capsys.readouterr().err


def test_a_loop_that_the_stop_of_a_command_left_unmade_goes_without_a_word(monkeypatch, capsys):
    def stopped(words):
        held = asyncio.SelectorEventLoop.__new__(asyncio.SelectorEventLoop)  # by the traceback alone
        raise SystemExit(Stopped.exit_code if held else 0)

    said = []
    monkeypatch.setattr(sys, "unraisablehook", said.append)
    monkeypatch.setattr("mmrl.cli._dispatch", stopped)
    assert main(["train"]) == 143
    gc.collect()
    assert not said and capsys.readouterr().err == "stopped by SIGTERM\n"


def test_a_stop_waits_where_it_is_held_and_is_raised_once():
    with pytest.raises(SystemExit), stoppable():
        terminate()
        time.sleep(1)
    with stoppable():
        with pytest.raises(Stopped):
            terminate()
            time.sleep(1)
        terminate()  # while what runs is being closed
    with stoppable() as stop, stop.held():
        terminate()
        assert stop.requested
        with pytest.raises(Stopped), stop.at_once():
            raise AssertionError("never reached")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_the_process_that_starts_others_passes_a_stop_on(number, code, tmp_path):
    script = (
        f"#!{sys.executable}\nimport os, signal, sys, time\n"
        f"signal.signal({int(number)}, lambda *_: sys.exit({code}))\n"
        "open('PIDS', 'a').write(f'{os.getpid()}\\n')\ntime.sleep(600)\n"
    )
    process, _ = workers_of(tmp_path, script)
    process.send_signal(number)
    assert process.wait(30) == code
