"""Whole runs through the command line, with a really small random model: the line from config to report."""

import itertools
import os
import random
import re
import signal
import subprocess
import time

import pytest

from mmrl.cli import main
from mmrl.errors import ConfigError, EngineFailure
from mmrl.store.journal import read_step
from mmrl.store.rundir import RunDir
from mmrl.tasks.search_tool import SearchTool
from tests.helpers.runs import EVAL, SMALL, command, numbers
from tests.helpers.watch import started


@pytest.mark.parametrize("algo", ["mhgpo_is", "mhgpo_fof", "mhgpo_rr", "mhgpo_fof_os"])
def test_a_run_ends_with_a_table_and_a_report(algo, random_model, tmp_path, output_of):
    out = output_of(*command(random_model, tmp_path / "run", f"algo={algo}", "train.steps=2"))
    assert "before" in out and "after" in out
    assert f"mmrl show {tmp_path / 'run'}" in out
    run = RunDir.read(tmp_path / "run")
    assert [record["step"] for record in run.history()] == [0, 1, 2]
    assert run.report_path.stat().st_size > 1000
    assert run.summary["algo"] == algo
    assert {"eval/dev/f1", "eval/dev/em", "eval/dev/f1_low"} <= set(run.history()[-1])
    for record in run.history()[1:]:
        assert record["train/logprob_gap_max"] < 1e-4
        assert record["rollouts/failed_share"] == 0


def test_the_same_command_gives_the_same_numbers(random_model, tmp_path, capsys):
    # A look at a few examples before the first step changes nothing of what the run samples.
    for name, looked in (("a", "false"), ("b", "true")):
        assert main(command(random_model, tmp_path / name, "train.steps=3", f"run.doctor={looked}")) == 0
        assert ("before training (run.doctor=false leaves this out)" in capsys.readouterr().err) == (looked == "true")
        assert (tmp_path / name / "doctor.json").exists() == (looked == "true")
    assert numbers(tmp_path / "a") == numbers(tmp_path / "b")
    assert main(command(random_model, tmp_path / "c", "train.steps=3", "seed=1")) == 0
    assert numbers(tmp_path / "a") != numbers(tmp_path / "c")


@pytest.mark.slow
def test_killed_at_a_random_instant_and_resumed_a_run_gives_bit_equal_numbers(random_model, tmp_path):
    """One instant; `make chaos` tries hundreds."""
    steps = ["train.steps=6", "algo=mhgpo_rr", "algo.epochs=2", "algo.minibatches=2"]
    killed = tmp_path / "killed"
    arguments = command(random_model, killed, *steps)
    # only what is killed needs a process of its own
    process = started(*arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while process.poll() is None and not (killed / "metrics.jsonl").exists():
        time.sleep(0.02)
    time.sleep(random.Random(os.getpid()).random() * 1.5)
    process.send_signal(signal.SIGKILL)
    process.wait()
    if not (killed / "config.yaml").exists():
        assert main(arguments) == 0
    elif not RunDir.read(killed).finished:
        assert main(["train", f"resume={killed}"]) == 0
    assert main(command(random_model, tmp_path / "whole", *steps)) == 0
    assert numbers(tmp_path / "whole") == numbers(killed)


@pytest.fixture
def outage(monkeypatch):
    """From now on a search fails where `fails` says so of its number."""

    def begin(fails):
        works, numbers = SearchTool.use, itertools.count(1)

        def breaks(self, *arguments):
            if fails(next(numbers)):
                raise OSError("retriever down")
            return works(self, *arguments)

        monkeypatch.setattr("mmrl.run.build._TASKS", {})
        monkeypatch.setattr(SearchTool, "use", breaks)

    return begin


def test_too_many_outside_failures_stop_the_run_with_its_state_saved(random_model, tmp_path, capsys, outage):
    outage(lambda number: number > 30)
    code = main(command(random_model, tmp_path / "run", "algo=mhgpo_fof", "train.steps=50", "eval.every=0"))
    captured = capsys.readouterr()
    assert code == 1
    assert "retriever down" in captured.err
    assert f"resume={tmp_path / 'run'}" in captured.err
    assert list((tmp_path / "run" / "checkpoints").glob("checkpoint-*"))


def test_an_outage_before_training_stops_the_run_which_then_measures_its_start_again(
    random_model, tmp_path, capsys, outage
):
    run, down = tmp_path / "run", [True]
    outage(lambda number: down[0])
    assert main(command(random_model, run, "train.steps=2")) == 1
    said = capsys.readouterr().err
    failed = r"before training: 100% of the rollouts failed .*\(tool 4; the first, .*retriever down \(.*in breaks\)"
    assert re.search(failed, said), said
    assert f"resume={run}" in said
    assert not list((run / "eval").iterdir())
    down[0] = False
    assert main(["train", f"resume={run}"]) == 0
    assert RunDir.read(run).history()[0]["eval/dev/failed_share"] == 0
    assert "failed from outside" not in capsys.readouterr().out


def test_an_evaluation_tells_its_outages_and_asks_again_on_resume(random_model, tmp_path, output_of, outage):
    folder = tmp_path / "eval"
    outage(lambda number: number == 2)
    said = output_of("eval", f"policy={random_model}", f"run.dir={folder}", *EVAL)
    assert "25.0% of the rollouts failed from outside causes" in said
    assert "dev items" in said and "train items" not in said and "test items" not in said
    assert re.search(r"from outside: tool 1; the first, item \S+: .*retriever down \(.*in breaks\)\n", said)
    assert f"mmrl eval resume={folder}" in said
    said = output_of("eval", f"resume={folder}")
    assert "0.0% of the rollouts failed from outside causes" in said and "resume=" not in said
    run = RunDir.read(folder)
    first, second = (read_step(run, step, evaluation="dev")[0] for step in run.journal_steps("dev"))
    assert (len(first.rollouts), len(second.rollouts)) == (4, 1)


def test_a_sweep_runs_every_job_in_a_directory_of_its_own(random_model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["algo=mhgpo_fof,mhgpo_rr", "seed=1,2", "train.steps=1", f"model.path={random_model}"]
    assert main(["train", "-m", *words, *SMALL]) == 0
    runs = sorted(path.parent.relative_to(tmp_path).parts[:3] for path in tmp_path.rglob("summary.json"))
    assert [run[:2] for run in runs] == [("outputs", "hotpotqa")] * 4
    assert [run[2] for run in runs] == ["mhgpo_fof", "mhgpo_fof", "mhgpo_rr", "mhgpo_rr"]


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (KeyboardInterrupt(), 130, True),
        (EngineFailure("the server ended with code 1"), 1, True),
        (ConfigError("engine.args: got --foo"), 2, False),
    ],
)
def test_a_run_stopped_while_its_engine_starts_says_how_to_go_on(
    error, code, said, random_model, tmp_path, capsys, monkeypatch
):
    """A server takes minutes to start; a wrong setting would stop the run again."""

    def stop(*args):
        raise error

    monkeypatch.setattr("mmrl.run.session.build_stage", stop)
    assert main(command(random_model, tmp_path / "run")) == code
    shown = capsys.readouterr()
    assert (f"mmrl train resume={tmp_path / 'run'}" in " ".join((shown.out + shown.err).split())) == said
