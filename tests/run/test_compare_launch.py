"""A comparison's runs as child processes: started, kept, resumed, refused, failed; with a stand-in for `mmrl train`."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from mmrl.cli import main
from mmrl.cli.configs import configured
from mmrl.config import ALGO_SCHEMAS
from mmrl.config.base import SHIPPED
from mmrl.errors import ConfigError
from mmrl.report.rundir import RunDir
from mmrl.run import queue
from mmrl.run.compare import method_word, read_comparison

FAKE = """
import os, sys, time
from pathlib import Path
from mmrl.cli.configs import configured
from mmrl.config import TrainCommandConfig
from mmrl.system.files import append_jsonl
from mmrl.report.rundir import RunDir
words = sys.argv[2:]
given = dict(word.split("=", 1) for word in words)
with open(os.environ["CALLS"], "a") as calls:
    calls.write(" ".join(words) + "\\n")
if given.get("algo") == os.environ.get("BREAKS", "none"):
    sys.exit("error: out of luck")
if "resume" in given:
    run = RunDir.open(given["resume"])
else:
    config = configured([word for word in words if not word.startswith("run.")])
    run = RunDir.create(given["run.dir"], config.model_dump(mode="json"), ["mmrl"])
with run:
    for step in range(len(run.history()), 3):
        items = [{"id": f"d{n}", "metrics": {"f1": float(n < 40 * step)}, "modules": {}} for n in range(200)]
        record = {"reward/mean": 0.1 * step, "time/step": 1.0}
        if step != 1:
            append_jsonl(run.eval_path(step, "dev"), items)
            record |= {"eval/dev/n": 200.0, "eval/dev/f1": step / 5}
        run.append_metrics(step, record)
        if step == 1 and os.environ.get("HANGS") and "resume" not in given:
            time.sleep(60)
    run.write_summary({"main_metric": "f1"})
    run.report_path.write_text("page")
"""
COMPARE = ["compare", "algo=mhgpo_fof,mhgpo_rr", "task=hotpotqa", "seed=0,1", "name=x", "train.steps=2"]
FEW = [word.replace("seed=0,1", "seed=0") for word in COMPARE]
ROOT = Path("outputs/compare/x/hotpotqa")


@pytest.fixture
def calls(tmp_path, monkeypatch):
    """Run in an empty folder with the stand-in; returns what it was called with so far."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fake.py").write_text(textwrap.dedent(FAKE))
    monkeypatch.setattr(queue, "MMRL", [sys.executable, str(tmp_path / "fake.py")])
    monkeypatch.setattr(queue, "POLL_S", 0.05)
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    top = str(Path(__file__).parents[2])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([top, os.environ.get("PYTHONPATH", "")]))

    def made():
        path = tmp_path / "calls"
        return path.read_text().splitlines() if path.exists() else []

    return made


def test_missing_runs_start_and_finished_ones_are_kept(calls, capsys):
    assert main(COMPARE) == 0
    out = capsys.readouterr().out
    assert len(calls()) == 4
    assert calls()[0].startswith("task=hotpotqa algo=mhgpo_fof seed=0 train.steps=2 run.dir=")
    assert calls()[1].startswith("task=hotpotqa algo=mhgpo_rr seed=0"), "all algorithms with the first seed first"
    assert "[4/4]" in out and "undecided (2 of 3 seeds)" in out and "+0.400" in out
    assert Path("outputs/compare/x/compare.html").is_file()
    assert main(COMPARE) == 0
    assert len(calls()) == 4
    assert capsys.readouterr().out.count("finished before, kept") == 4


def test_several_at_once_have_one_thread_each(calls):
    assert main([*COMPARE, "jobs=3"]) == 0
    assert len(calls()) == 4
    assert all("hardware.threads=1" in call for call in calls())


def test_a_failed_run_is_reported_and_the_others_go_on(calls, capsys, monkeypatch):
    monkeypatch.setenv("BREAKS", "mhgpo_fof")
    assert main(FEW) == 1
    captured = capsys.readouterr()
    assert "mhgpo_fof seed 0: failed: exit code 1, error: out of luck" in captured.out
    assert "1 of 2 runs failed" in captured.err
    assert {path.parent.name for path in ROOT.glob("*/s?/summary.json")} == {"s0"}
    monkeypatch.delenv("BREAKS")
    assert main(FEW) == 0
    assert len(calls()) == 2 + 1


def test_every_run_failing_is_an_error_without_a_comparison(calls, capsys, monkeypatch):
    monkeypatch.setenv("BREAKS", "mhgpo_fof")
    assert main(["compare", "algo=mhgpo_fof", "seed=0", "name=x"]) == 1
    assert "error: hotpotqa mhgpo_fof seed 0: failed" in capsys.readouterr().err


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_comparison_leaves_no_run_behind_and_continues(how, calls, capsys):
    code = (
        "import sys; from mmrl.cli import main; from mmrl.run import queue; queue.POLL_S = 0.05;"
        f"queue.MMRL = {queue.MMRL!r}; sys.exit(main({FEW!r}))"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "HANGS": "1"})
    run = ROOT / "mhgpo_fof" / "s0"
    until = time.monotonic() + 60
    while not ((run / "metrics.jsonl").is_file() and len(RunDir.read(run).history()) == 2):
        assert time.monotonic() < until and parent.poll() is None
        time.sleep(0.05)
    assert RunDir.read(run).in_use
    os.kill(parent.pid, how)
    assert parent.wait() == (143 if how == signal.SIGTERM else -how)
    while RunDir.read(run).in_use:
        assert time.monotonic() < until, "a run goes on without its comparison"
        time.sleep(0.05)
    assert main(FEW) == 0
    assert calls()[1] == f"resume={run}" and len(calls()) == 3
    assert "continues from step 1" in capsys.readouterr().out


def test_a_run_with_other_settings_is_refused_before_anything_starts(calls, capsys):
    assert main([*COMPARE[:3], "seed=0", "name=x", "train.steps=2"]) == 0
    capsys.readouterr()
    assert main([*COMPARE[:3], "seed=0,1", "name=x", "train.steps=5", "hardware.threads=2"]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 2 and len(calls()) == 2
    assert f"{ROOT / 'mhgpo_fof' / 's0'} holds a run with other settings: train.steps=2 (requested: 5);" in errors[0]


def test_a_folder_of_something_else_is_not_touched(calls, capsys):
    folder = ROOT / "mhgpo_fof" / "s0"
    folder.mkdir(parents=True)
    (folder / "notes.txt").write_text("mine")
    assert main(COMPARE) == 2
    assert "holds no run of a comparison" in capsys.readouterr().err
    assert (folder / "notes.txt").read_text() == "mine" and calls() == []


def test_leftovers_of_a_start_killed_at_once_do_not_block(calls):
    folder = ROOT / "mhgpo_fof" / "s0"
    for name in ("journal", "eval", "checkpoints"):
        (folder / name).mkdir(parents=True)
    (folder / "environment.json").write_text("{}")
    assert main(FEW) == 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["algo=mhgpo_fof,mhgpo_fo"], "algo: got 'mhgpo_fo'"),
        (["algo=mhgpo_fof", "task=nope"], "task: got 'nope'"),
        (["algo=mhgpo_fof", "jobs=0"], "jobs: got '0', expected a whole number from 1"),
        (["algo=mhgpo_fof", "seed=0,x"], "seed: got 'x'"),
        (["algo="], "algo: got an empty list"),
        (["algo=miprov2+nope"], "algo: got 'nope'"),
        ([], "algo: missing"),
        (["plan=maxi"], "plan: got 'maxi', expected one of mini"),
        (["plan=mini", "algo=mmgrpo", "task=tool_agent"], "plan mini runs none of these algorithms on these tasks"),
        (["algo=mhgpo_fof", "run.dir=x"], "run.dir: a comparison gives each run its own directory"),
        (["algo=mhgpo_fof", "train.stepps=3"], "train.stepps: unknown key"),
        (["algo=mhgpo_fof", "name=a/b"], "name: got 'a/b'"),
        (["algo=mt_ppo", "task=hotpotqa"], "mt_ppo"),
        (["algo=mhgpo_fof", "docs=none.md"], "docs: none.md: no such file"),
        (["-m", "algo=mhgpo_fof"], "-m: not for mmrl compare"),
    ],
)
def test_mistakes_end_with_exit_code_2_before_anything_starts(arguments, says, calls, capsys):
    assert main(["compare", *arguments]) == 2
    error = capsys.readouterr().err
    assert says in error and "Traceback" not in error
    assert calls() == [] and not Path("outputs").exists()


SHIPPED_PLANS = sorted((Path(__file__).parents[2] / "conf" / "compare").glob("*.yaml"))


@pytest.mark.parametrize("path", SHIPPED_PLANS, ids=lambda path: path.stem)
def test_every_run_of_a_shipped_plan_composes(path):
    plan = read_comparison(path)
    for part in plan.parts:
        for task in part.task:
            for algo in part.algo:
                own = [*plan.settings, *part.settings, *plan.algo.get(algo, ())]
                config = configured([f"task={task}", method_word(algo), *own])
                assert (config.eval.items or 200) >= 200, "needed to say that it learns"
    assert len(plan.seed) >= 3


def test_the_shipped_plans_run_every_task_of_the_mini_world_and_every_algorithm():
    parts = [part for path in SHIPPED_PLANS for part in read_comparison(path).parts]
    assert {task for part in parts for task in part.task} == {task for tasks in SHIPPED.values() for task in tasks}
    named = {name for part in parts for algo in part.algo for name in algo.split("+")}
    assert named == {*ALGO_SCHEMAS, "miprov2", "better_together", "sft"}


def test_names_joined_by_plus_are_the_stages_of_one_run():
    assert method_word("grpo") == "algo=grpo"
    config = configured(["task=hotpotqa", method_word("miprov2+mhgpo_fof"), "stage.mhgpo_fof.train.steps=3"])
    assert [stage.algo.name for stage in config.stages] == ["miprov2", "mhgpo_fof"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[1, 2]", "got list, expected a mapping"),
        ("parts: []", "parts"),
        ("parts: [{task: [hotpotqa], algo: [grpo], seeds: [1]}]", "parts.0.seeds: unknown key"),
        ("parts: [{task: [hotpotqa], algo: [grpo]}]\nalgo: {ppo: [x=1]}", "algo.ppo: no part runs this algorithm"),
        ("parts: {", "cannot be read"),
    ],
)
def test_a_malformed_plan_is_refused_with_its_name(text, says, tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_comparison(path)
    assert str(path) in str(caught.value) and says in str(caught.value)
