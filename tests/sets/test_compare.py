"""A set's runs as child processes: started, kept, resumed, refused, failed; with a stand-in for `mmrl train`."""

import csv
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mmrl.cli import main
from mmrl.sets import queue
from mmrl.sets.queue import PlannedRun
from mmrl.store.rundir import RunDir
from mmrl.system.files import file_digest

COMPARE = ["compare", "algo=mhgpo_fof,mhgpo_rr", "task=hotpotqa", "seed=0,1", "name=x", "train.steps=2"]
FEW = [word.replace("seed=0,1", "seed=0") for word in COMPARE]


def test_each_comparison_has_a_folder_of_its_own_and_takes_no_file_of_others(calls, errors_of):
    same = ["compare", "algo=mhgpo_fof,grpo", "seed=0", "train.steps=2"]

    def folders():
        return {path.name for path in Path("outputs/sets").glob("*") if (path / "set.json").is_file()}

    assert main(same) == 0 and main(same) == 0 and len(first := folders()) == 1
    assert main([*same[:3], "train.steps=1"]) == 0 and len(folders() - first) == 1
    assert all(name.startswith("mhgpo_fof-grpo-") for name in folders()) and len(calls()) == 4
    Path("mine").mkdir()
    Path("mine/figure.svg").write_text("mine")
    assert "out: mine/figure.svg is no page's, and one would overwrite it" in errors_of(*same[:2], "seed=1", "out=mine")
    runs = [str(path.parent) for path in Path("outputs/sets/runs").rglob("config.yaml")]
    assert "out: mine/figure.svg is no page's" in errors_of("compare", *runs, "out=mine")
    assert calls() == [] and os.listdir("mine") == ["figure.svg"]


ROOT = Path("outputs/sets/runs/hotpotqa")


def run_dir(algo):
    """Where the set of `FEW` puts a run."""
    from mmrl.cli.configs import set_config
    from mmrl.sets.plan import settings_digest

    config = set_config("train", ["task=hotpotqa", f"algo={algo}", "train.steps=2"], None)
    return ROOT / algo / f"s0-{settings_digest(config, {})}"


def test_missing_runs_start_and_finished_ones_are_kept(calls, capsys):
    assert main(COMPARE) == 0
    out = capsys.readouterr().out
    first, second, *others = calls()
    assert first.startswith("train task=hotpotqa algo=mhgpo_fof train.steps=2 seed=0 run.dir=")
    assert second.startswith("train task=hotpotqa algo=mhgpo_rr train.steps=2 seed=0"), "one seed of all first"
    assert len(others) == 2
    assert "[4/4]" in out and "undecided (2 of 3 seeds)" in out and "+0.400" in out
    assert Path("outputs/sets/x/set.html").is_file()
    assert main(COMPARE) == 0 and calls() == []
    assert capsys.readouterr().out.count("finished before, kept") == 4


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_comparison_leaves_no_run_behind_and_continues(how, calls, capsys):
    code = (
        "import sys; from mmrl.cli import main; from mmrl.sets import queue; queue.POLL_S = 0.05;"
        f"queue.MMRL = {queue.MMRL!r}; sys.exit(main({FEW!r}))"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "HANGS": "1"})
    run = run_dir("mhgpo_fof")
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
    _, resumed, other = calls()
    assert resumed == f"train resume={run}" and "algo=mhgpo_rr" in other
    assert "train mhgpo_fof, seed 0: continues" in capsys.readouterr().out


def test_other_settings_are_other_runs_and_what_is_shared_runs_once(calls, capsys):
    assert main([*COMPARE[:3], "seed=0", "name=x", "train.steps=2"]) == 0 and len(calls()) == 2
    assert main([*COMPARE[:2], "algo=mhgpo_fof,grpo", "seed=0", "name=y", "train.steps=2"]) == 2  # algo twice
    assert main(["compare", "algo=mhgpo_fof,grpo", "seed=0", "name=y", "train.steps=2"]) == 0
    assert len(calls()) == 1, "mhgpo_fof is there already"
    assert main([*COMPARE[:3], "seed=0", "name=x", "train.steps=1"]) == 0 and len(calls()) == 2


STEPS = ["compare", "algo=mhgpo_fof+grpo", "task=hotpotqa", "name=x", "mhgpo_fof.train.steps=2", "eval.items=200"]


def test_a_step_starts_from_what_the_one_before_has_made(calls, capsys):
    """A row for each, one seed, settings of one step; its policy is named for other commands."""
    assert main([*STEPS, "train.steps=3", "grpo.algo.group_size=4"]) == 0
    first, second = calls()
    start = first.partition("run.dir=")[2].split()[0]
    assert f"from={start}" in second and "algo=grpo" in second and "algo.group_size=4" in second
    assert "train.steps=2" in first and "train.steps=3" in second and "group_size" not in first
    out = capsys.readouterr().out
    policy = second.partition("run.dir=")[2].split()[0]
    text = " ".join(out.split())
    assert "mhgpo_fof+grpo: starts from the policy of mhgpo_fof; its own, for mmrl eval and serve (policy=) and" in text
    assert f"mmrl export: {policy}" in text and "one seed, as algo=A+B has where none is typed" in text
    page = json.loads(Path("outputs/sets/x/set.json").read_text())
    assert [(run["row"], run["seed"]) for run in page["runs"]] == [("mhgpo_fof", 0), ("mhgpo_fof+grpo", 0)]
    assert main([*STEPS, "train.steps=3", "grpo.algo.group_size=4"]) == 0 and calls() == [], "the same runs"
    assert main([*STEPS, "train.steps=3", "grpo.algo.group_size=4", "seed=0,1"]) == 0 and len(calls()) == 2
    assert "one seed" not in Path("outputs/sets/x/set.md").read_text()


def test_a_finished_run_of_code_and_files_that_were_edited_since_is_kept_with_a_word(calls, capsys):
    assert main(FEW) == 0
    Path("mine.py").write_text("two = 2")
    Path("p.yaml").write_text("{}")
    for file in Path("outputs/sets/runs").rglob("environment.json"):
        facts = json.loads(file.read_text())
        digest = file_digest(Path("mine.py")) if "mhgpo_fof" in str(file) else "another"
        facts = {**facts, "cwd": str(Path.cwd()), "own_code": {"mine.py": digest}}
        facts["inputs"] = {"task.prompts=p.yaml": "another", "task.labels=gone.json": "0"}
        file.write_text(json.dumps(facts))
    capsys.readouterr()
    assert main(FEW) == 0
    kept = [line for line in capsys.readouterr().out.splitlines() if "finished before, kept" in line]
    changed = [line.partition("though ")[2].partition(" has changed since; delete outputs")[0] for line in kept]
    assert changed == ["task.prompts=p.yaml", "mine.py, task.prompts=p.yaml"], kept


def test_the_reason_of_a_failure_is_that_of_the_last_start(tmp_path):
    run = PlannedRun(seed=0, path=tmp_path / "run", row="a", column="", words=(), config=None, code=-9)
    run.log.write_text("error: no such file\n")
    run.log_start = run.log.stat().st_size
    with run.log.open("a") as log:
        log.write("step 3\n")
    assert run.failure() == f"exit code -9, step 3 (log: {run.log})"


@pytest.mark.parametrize("killed", ["mhgpo_fof", "grpo"])
def test_a_comparison_killed_in_any_step_goes_on_there(killed, calls, monkeypatch):
    code = (
        "import sys; from mmrl.cli import main; from mmrl.sets import queue; queue.POLL_S = 0.05;"
        f"queue.MMRL = {queue.MMRL!r}; sys.exit(main({STEPS!r}))"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "HANGS": killed})
    until = time.monotonic() + 60
    while not [path for path in (ROOT / killed).glob("*/metrics.jsonl") if len(path.read_text().splitlines()) == 2]:
        assert time.monotonic() < until and parent.poll() is None
        time.sleep(0.05)
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    started = calls()
    assert main(STEPS) == 0
    (run,) = (path for path in (ROOT / killed).iterdir() if path.is_dir())
    resumed, *later = calls()
    assert resumed == f"train resume={run}" and len(started) + len(later) == 2, "no step twice"
    assert all("from=" in line for line in later)


def test_keys_about_weights_hold_for_the_steps_that_train_some(calls):
    about_weights = ["train.steps=2", "eval.every=1", "model.lora.r=4"]
    assert main(["compare", "algo=miprov2+mmgrpo", "task=banking77", *about_weights, "miprov2.algo.auto=light"]) == 0
    prompts, weights = calls()
    assert all(word in weights and word not in prompts for word in about_weights)
    assert "algo.auto=light" in prompts and "algo.auto" not in weights


def test_a_file_of_ones_own_is_a_step_of_the_kind_of_its_algorithm(calls):
    Path("conf/algo").mkdir(parents=True)
    Path("conf/algo/mygepa.yaml").write_text("# @package _global_\ndefaults: [gepa, _self_]\nalgo: {auto: light}\n")
    assert main(["compare", "algo=mygepa+mmgrpo", "task=banking77", "train.steps=2"]) == 0
    prompts, weights = calls()
    assert "algo=mygepa" in prompts and "train.steps" not in prompts and "train.steps=2" in weights


def test_the_task_of_an_experiment_holds_where_none_is_typed(calls):
    Path("conf/experiment").mkdir(parents=True)
    Path("conf/experiment/bank.yaml").write_text("# @package _global_\ndefaults: [override /task: banking77]\n")
    Path("conf/experiment/child.yaml").write_text("# @package _global_\ndefaults: [bank, _self_]\ntrain: {steps: 2}\n")
    Path("conf/experiment/short.yaml").write_text("# @package _global_\ntrain: {steps: 2}\n")

    def tasks(*words):
        shutil.rmtree("outputs", ignore_errors=True)
        assert main(["compare", "algo=mmgrpo,sft", "seed=0", "name=x", *words]) == 0
        assert len(calls()) == 2
        return {path.name for path in Path("outputs/sets/runs").iterdir() if path.is_dir()}

    assert tasks("experiment=bank") == tasks("experiment=child") == {"banking77"}
    assert (
        json.loads(Path("outputs/sets/x/set.json").read_text())["head"]["shows"] == "mmgrpo, sft with experiment=child"
    )
    assert tasks("experiment=bank", "task=hover") == {"hover"}
    assert tasks("experiment=short") == {"hotpotqa"}


def test_its_page_has_the_command_that_makes_it_again(calls):
    assert main([*FEW, "jobs=2"]) == 0
    page = json.loads(Path("outputs/sets/x/set.json").read_text())
    assert page["command"] == "mmrl compare seed=0 algo=mhgpo_fof,mhgpo_rr task=hotpotqa name=x train.steps=2"
    assert page["head"]["settings"] == "train.steps=2" and page["head"]["seeds"] == "0"
    assert [value["other"] for value in page["values"]] == [False, False], "its settings are the set"


OWN = """
shows: mine
base: mine
seeds: [0, 1]
algos: {mhgpo_rr: [train.batch_size=24]}
columns: {one: {train: [task=hotpotqa]}, two: {train: [task=hotpotqa, task.max_tokens=99], rows: [b]}}
rows: {a: {train: [algo=mhgpo_rr]}, b: {train: [algo=grpo], without: [eval]}}
"""


def test_a_set_of_ones_own_runs_and_what_is_typed_is_marked(calls, capsys):
    for folder, text in (("set", OWN), ("set/base", "train: [eval.items=200, train.steps=2]")):
        Path("conf", folder).mkdir(parents=True)
        Path("conf", folder, "mine.yaml").write_text(text)
    assert main(["compare", "set=mine", "do=plan"]) == 0 and calls() == []
    plan = capsys.readouterr().out
    assert "set mine: 6 runs, 6 missing" in plan and "train b on two, seeds 0 1:" in plan
    assert "mmrl train eval.items=200 train.steps=2 train.batch_size=24 task=hotpotqa algo=mhgpo_rr seed=0" in plan
    assert "mmrl train train.steps=2 task=hotpotqa task.max_tokens=99 algo=grpo seed=0" in plan
    assert main(["compare", "set=mine"]) == 0 and len(calls()) == 6
    whole = json.loads(Path("outputs/sets/mine/set.json").read_text())
    assert whole["cells_done"] == whole["cells"] == 3 and whole["command"] == "mmrl compare set=mine"
    capsys.readouterr()
    # A part, or other settings, has a page of its own, and starts only what they change.
    assert main(["compare", "set=mine", "rows=A", "seed=1"]) == 0 and calls() == []
    assert main(["compare", "set=mine", "rows=a", "seed=1", "train.lr=0.1"]) == 0 and len(calls()) == 1
    page = json.loads(Path("outputs/sets/mine/selected/set.json").read_text())
    assert [(value["row"], value["label"], value["other"]) for value in page["values"]] == [
        ("a", "one", True),
        ("a", "two", False),
    ]
    assert "a *" in capsys.readouterr().out
    assert json.loads(Path("outputs/sets/mine/set.json").read_text()) == whole
    rows = [*csv.DictReader(Path("outputs/sets/mine/set.csv").read_text().splitlines())]
    assert [(row["row"], row["column"], row["after"], row["seeds"]) for row in rows[:2]] == [
        ("a", "one", "0.400", "2 of 2"),
        ("a", "two", "", "0 of 0"),
    ]


def test_a_folder_of_something_else_is_not_touched(calls, capsys):
    folder = run_dir("mhgpo_fof")
    folder.mkdir(parents=True)
    (folder / "notes.txt").write_text("mine")
    assert main(COMPARE) == 2
    assert "expected a run, got something else" in capsys.readouterr().err
    assert (folder / "notes.txt").read_text() == "mine" and calls() == []


def test_leftovers_of_a_start_killed_at_once_do_not_block(calls):
    folder = run_dir("mhgpo_fof")
    for name in ("journal", "eval", "checkpoints"):
        (folder / name).mkdir(parents=True)
    (folder / "environment.json").write_text("{}")
    assert main(FEW) == 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["algo=mhgpo_fof,mhgpo_fo"], "algo: got 'mhgpo_fo'"),
        (["algo=mhgpo_fof", "task=nope"], "task: got 'nope'"),
        (["algo="], "algo: missing"),
        (["algo=grpo", "task=[]"], "task: got [], expected at least 1"),
        (["algo=miprov2+nope"], "algo: got 'nope'"),
        ([], "algo: missing"),
        (["algo=mmgrpo", "rows=nope"], "rows: got 'nope'"),
        (["algo=mmgrpo", "scale=paper"], "scale: is gone; the papers' tables have scales"),
        (["set=mni"], "set: got 'mni', expected one of coder, credits, mini"),
        (["set=mini", "algo=grpo", "task=hotpotqa"], "algo: a set's file says it"),
        (["set=mini", "columns=nowhere"], "columns: got 'nowhere'"),
        (["set=mini", "tsk.max_tokens=3"], "tsk: unknown key"),
        (["algo=miprov2+"], "algo: got ''"),
        (
            ["algo=miprov2+mmgrpo", "gepa.algo.auto=light"],
            "gepa.algo.auto: got 'gepa', expected one of miprov2, mmgrpo",
        ),
        (["algo=miprov2+mmgrpo", "mmgrpo.algo=grpo"], "mmgrpo.algo: a step is its algorithm, which algo= names"),
        (["algo=miprov2+mmgrpo", "mmgrpo.task=hover"], "mmgrpo.task: is the same for all; type task= or leave it out"),
        (["algo=miprov2+mmgrpo", "mmgrpo.eval.split=test"], "mmgrpo.eval.split: is the same for all"),
        (["algo=miprov2+mmgrpo", "mmgrpo.seed=1"], "mmgrpo.seed: is the same for all"),
        (["algo=miprov2+mmgrpo", "task=banking77", "mmgrpo.model=hf", "mmgrpo.model.path=a/b"], "is tiny (tiny_dspy)"),
        (["algo=miprov2+mmgrpo", "task=banking77", "mmgrpo.model.revision=x"], "from which it starts, is tiny"),
        (["algo=miprov2+mmgrpo", "task=banking77", "mmgrpo.train.lrr=1"], "error: mmgrpo.train.lrr: unknown key"),
        (
            ["algo=miprov2+mmgrpo", "task=banking77", "mipro.algo.auto=light"],
            "error: mipro.algo.auto: got 'mipro', exp",
        ),
        (
            ["algo=miprov2+mmgrpo", "mmgrpo.run.dir=x"],
            "mmgrpo.run.dir: a set has a directory for each run; leave it out",
        ),
        (["algo=miprov2+mmgrpo", "task=banking77", "mmgrpo.algo.teachers=[{name: x, policy: ./no}]"], "./no"),
        (["algo=miprov2+mmgrpo", "task=banking77", "mmgrpo.task.prompts=a.json"], "starts with those of miprov2"),
        (["algo=miprov2", "task=banking77", "train.steps=2"], "train.steps: has no effect with algo=miprov2"),
        (
            ["algo=mmgrpo+miprov2", "task=hover", "mmgrpo.model.modules={}", "+model.lora={r: 4}"],
            "mmgrpo: trains weights for each module apart (model.modules, algo.frozen_serving), from which no run",
        ),
        (["algo=mhgpo_fof", "run.dir=x"], "run.dir: a set has a directory for each run"),
        (["algo=mhgpo_fof", "train.stepps=3"], "train.stepps: unknown key"),
        (["algo=mhgpo_fof", "name=a/b"], "name: got 'a/b'"),
        (["algo=mt_ppo", "task=hotpotqa"], "mt_ppo"),
        (["-m", "algo=mhgpo_fof"], "-m: not for mmrl compare"),
    ],
)
def test_mistakes_end_with_exit_code_2_before_anything_starts(arguments, says, calls, capsys):
    assert main(["compare", *arguments]) == 2
    error = capsys.readouterr().err
    assert says in error and "Traceback" not in error
    assert calls() == [] and not Path("outputs").exists()
