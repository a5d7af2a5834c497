"""`python -m scripts.papers`: runs missing, shared, stopped, failed; cells, claims, pages; a stand-in for the runs."""

import csv
import json
import re
from functools import cache
from pathlib import Path

import pytest

from mmrl.cli.configs import set_config
from mmrl.sets import queue
from scripts import papers
from scripts.papers.__main__ import main

BASE = """
paper: [model=llama31_8b_instruct]
mini: [model=tiny]
"""
SPEC = """
source: {arxiv: "0000.00000", at: Table 9, percent: true, decimals: 1}
shows: nothing
base: own
seeds: [0, 1]
columns: {HotpotQA: {set: [task=hotpotqa]}}
scores: {EM: em, F1: f1, "# Sub-Q": module/rewriter/sub_queries}
counts: ["# Sub-Q"]
means: {AVG: [EM, F1]}
rows:
  untrained: {policy: tiny, seeds: [0], values: [20.0, 20.0, 2.0, 20.0]}
  FoF: {train: [algo=mhgpo_fof], values: [30.0, 30.0, 2.0, 30.0], std: [0.5]}
  RR: {train: [algo=mhgpo_rr], values: [40.0, 40.0, 2.0, 40.0]}
  RR again: {train: [algo=mhgpo_rr]}
agree: 1.0
claims:
  - {more: RR, than: untrained, cells: [AVG]}
  - {more: RR, than: FoF, cells: [EM]}
  - {more: RR again, than: RR}
"""
TABLE = ["own", "scale=mini"]


@cache
def composed(command, words, config_dir):
    """Every test composes the same few configs."""
    return set_config(command, words, config_dir)


@pytest.fixture
def calls(calls, tmp_path, monkeypatch):
    """The stand-in beside a table of its own."""
    for folder, text in (("set", SPEC), ("set/base", BASE)):
        (tmp_path / "conf" / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / "conf" / folder / "own.yaml").write_text(text)
    # What a run would be refused for is another test's matter, and takes the seconds in which torch loads.
    monkeypatch.setattr("mmrl.sets.command.check_all", lambda configs: None)
    monkeypatch.setattr("scripts.papers.cost.device_hours", lambda run, items: (2.5, 8))
    monkeypatch.setattr("mmrl.cli.configs.set_config", lambda c, words, folder: composed(c, tuple(words), folder))
    return calls


def cells(scale="mini"):
    folder = Path(f"outputs/sets/own/{scale}")
    part = folder / "selected" / "set.json"
    content = json.loads((part if part.exists() else folder / "set.json").read_text())
    return content, {(v["row"], v["score"] or v["label"]): v for v in content["values"]}


def test_what_is_missing_runs_once_and_is_shown_beside_the_paper(calls, capsys):
    assert main(TABLE) == 0
    first = calls()
    # Two rows of one config share their runs; an evaluation follows its training.
    assert [line.split()[0] for line in first].count("train") == 4 and len(first) == 9
    assert first[0].startswith("eval policy=tiny") or "policy=tiny" in first[0]
    content, values = cells()
    one = values["RR", "EM"]
    assert one["seeds"] == {"0": 70.0, "1": 70.0} and one["mean"] == 70.0 and one["std"] == 0.0
    assert one["paper"] == 40.0 and one["agrees"] is None and values["FoF", "EM"]["paper_std"] == 0.5
    assert values["RR", "# Sub-Q"]["mean"] == 2.0 and values["RR", "AVG"]["mean"] == 70.0
    low, high = one["interval"]
    assert 50 < low < 70 < high < 90 and one["items"] == 100
    assert [claim["verdict"] for claim in content["claims"]] == ["undecided", "undecided", "undecided"]  # two seeds
    assert "the same runs: RR, RR again" in content["notes"]
    assert content["head"]["machine"] == "abacus" and content["head"]["commit"] == "0123456789"
    text = capsys.readouterr().out
    assert "set own (arXiv 0000.00000, Table 9) at scale mini: 9 runs, 9 missing" in text
    assert "RR > untrained" in text
    # Nothing runs twice, and every page says the same.
    assert main(TABLE) == 0 and calls() == []
    folder = Path("outputs/sets/own/mini")
    rows = list(csv.DictReader((folder / "set.csv").open()))
    assert [row["ours"] for row in rows if row["row"] == "untrained"] == ["20.0", "20.0", "2.0", "20.0"]
    written = (folder / "set.md").read_text()
    assert "70.0 ± 0.0" in written and "python -m scripts.papers own rows='RR' scale=mini" in written
    assert "RR &gt; untrained" in (folder / "set.html").read_text()


def test_what_was_typed_stands_on_the_page_and_marks_what_it_changes(calls, capsys):
    assert main(TABLE) == 0
    whole = Path("outputs/sets/own/mini/set.md").read_text()
    assert (
        "- command: python -m scripts.papers own scale=mini\n- seeds: 0, 1; 0 of untrained\n" in whole
        and " *" not in whole
    )
    capsys.readouterr()
    # Trainings alone take it, and where a corpus lies is no other setting.
    assert main([*TABLE, "seed=3", "train.steps=7", "task.corpus=here.json"]) == 0
    command = "python -m scripts.papers own seed=3 scale=mini train.steps=7 task.corpus=here.json"
    settings = "train.steps=7 task.corpus=here.json; what is marked * was not made with the set's own"
    assert Path("outputs/sets/own/mini/set.md").read_text() == whole, "a page of its own"
    folder = Path("outputs/sets/own/mini/selected")
    pages = {path.suffix: " ".join(path.read_text().split()) for path in folder.glob("set.*")}
    for kind in (".md", ".html", ".tex", ".json"):
        text = pages[kind].replace("</b>", ":").replace("&#39;", "'")
        assert command in text and settings in text and "3; 0 of untrained; the set's own are 0, 1" in text, kind
    assert " ".join(f"settings: {settings}".split()[:6]) in " ".join(capsys.readouterr().out.split())
    _, values = cells()
    assert {row: values[row, "EM"]["other"] for row in ("untrained", "FoF", "RR")} == {
        "untrained": False,
        "FoF": True,
        "RR": True,
    }
    table = {row["row"]: row for row in csv.DictReader((folder / "set.csv").open()) if row["place"] == "EM"}
    assert table["untrained"]["settings"] == "" and table["FoF"]["settings"] == settings.partition(";")[0]
    assert table["FoF"]["command"] == (
        "python -m scripts.papers own rows='FoF' scale=mini seed=3 train.steps=7 task.corpus=here.json"
    )
    assert "| FoF | 60.0 *" in pages[".md"] and "| untrained | 20.0 |" in pages[".md"]
    assert re.search(r"RR &gt; FoF</td><td>EM</td><td>[a-z ]+ \*</td>", pages[".html"].replace("\n", ""))


def test_other_settings_are_not_compared_with_the_paper(calls):
    words = ["own", "rows=FoF", "seed=0"]
    assert main([*words, "task.corpus=here.json"]) == 0
    assert cells("paper")[1]["FoF", "EM"]["agrees"] is False
    assert main([*words, "task.max_tokens=7"]) == 0
    folder = Path("outputs/sets/own/paper/selected")
    (row,) = (row for row in csv.DictReader((folder / "set.csv").open()) if row["place"] == "EM")
    assert (row["paper"], row["difference"], row["agrees"]) == ("30.0", "", "")
    # What the set's words say already is no other setting.
    assert main([*words, "task=hotpotqa", "model=llama31_8b_instruct"]) == 0
    assert cells("paper")[1]["FoF", "EM"]["other"] is False


def test_items_that_stand_in_two_columns_count_once(calls):
    """As on the mini world, where NQ and HotpotQA are the same questions."""
    assert main(TABLE) == 0
    one = cells()[0]
    calls()
    same = "{HotpotQA: {set: [task=hotpotqa]}, NQ: {set: [task=hotpotqa]}}"
    twice = SPEC.replace("{HotpotQA: {set: [task=hotpotqa]}}", same)
    # The values, of one column, would not fit.
    Path("conf/set/own.yaml").write_text(re.sub(r"(?m), (values|std): \[[^]]*\]", "", twice))
    assert main(TABLE) == 0 and calls() == []
    two = cells()[0]
    assert [claim["items"] for claim in two["claims"]] == [claim["items"] for claim in one["claims"]] == [100, 100, 100]
    first, second = (content["claims"][1] for content in (one, two))
    assert first["difference"] == second["difference"]
    assert first["interval"] == second["interval"]
    # Another policy on the same questions: each item has the mean of both, and counts once.
    other = same.replace("NQ: {set: [task=hotpotqa]}", "NQ: {set: [task=hotpotqa, task.max_tokens=7]}")
    Path("conf/set/own.yaml").write_text(Path("conf/set/own.yaml").read_text().replace(same, other))
    assert main(TABLE) == 0 and calls() != []
    three = cells()[0]["claims"]
    assert [claim["items"] for claim in three] == [100, 100, 100]
    assert three[1]["interval"] == pytest.approx(first["interval"])


def test_a_scheduler_starts_each_run(calls, tmp_path, monkeypatch, capsys):
    """As `srun` does: it stays until the run has ended, whose machine decides about its threads."""
    srun = tmp_path / "srun"
    srun.write_text('#!/bin/sh\necho "$1 $2 OMP=$OMP_NUM_THREADS" >> started\nshift 2\nexec "$@"\n')
    srun.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)

    def checked(configs):
        assert not configs, "data and devices are those of another machine"

    monkeypatch.setattr("mmrl.sets.command.check_all", checked)
    monkeypatch.setattr(queue, "SHARED_S", 0.0)
    assert main([*TABLE, "rows=FoF", "jobs=2", "through=srun --gpus-per-node=8 '--comment=two words'"]) == 0
    assert Path("started").read_text().splitlines() == ["--gpus-per-node=8 --comment=two words OMP="] * 4
    started = calls()
    assert [line.split()[0] for line in started].count("eval") == 2
    assert not any("hardware.threads" in line for line in started)
    # What it ran is what runs here: nothing is left to do.
    assert main([*TABLE, "rows=FoF"]) == 0 and calls() == []
    # A command that only submits is no such command, and nothing follows what is not there.
    assert main([*TABLE, "rows=RR", "through=true"]) == 1 and calls() == []
    said = capsys.readouterr()
    assert "train RR, seed 0: failed: exit code 1" in said.out or "true has ended, and the run has not" in said.err
    assert "eval RR on HotpotQA, seed 0: left out: train RR, seed 0 failed" in said.out
    # What is wrong wherever it runs is said here.
    assert main([*TABLE, "rows=RR", "through=srun -n 1", "task.reward=nowhere"]) == 2
    assert "task.reward: got 'nowhere'" in capsys.readouterr().err and calls() == []


def test_a_failure_leaves_the_others_and_is_tried_again(calls, monkeypatch, capsys):
    monkeypatch.setenv("BREAKS", "mhgpo_rr")
    assert main([*TABLE, "seed=0"]) == 1
    assert len(calls()) == 4  # untrained; FoF and its evaluation; RR
    text, errors = capsys.readouterr()
    assert "left out: train RR, seed 0 failed" in text
    assert "error: train RR, seed 0: exit code 1, error: out of luck" in errors and "2 of 5 runs failed" in errors
    content, values = cells()
    assert values["RR", "EM"]["mean"] is None and values["FoF", "EM"]["mean"] == 60.0
    assert any(note.startswith("RR on HotpotQA, seed 0: train RR, seed 0 failed") for note in content["notes"])
    assert content["claims"][0]["verdict"] == "not run" and content["cells_done"] == 6
    monkeypatch.delenv("BREAKS")
    assert main([*TABLE, "seed=0"]) == 0
    assert [line.split()[0] for line in calls()] == ["train", "eval"]


def test_seeds_whose_configs_differ_are_no_average(calls, monkeypatch, capsys):
    monkeypatch.setenv("DRIFTS", "1")
    assert main([*TABLE, "rows=fof"]) == 0
    content, values = cells()
    assert values["FoF", "EM"]["mean"] is None
    assert content["notes"][0] == "FoF on HotpotQA: not averaged, its seeds differ in task.max_tokens"


def test_an_evaluation_that_was_stopped_goes_on_and_a_seed_that_is_missing_is_said(calls, capsys):
    assert main([*TABLE, "rows=FoF", "seed=0"]) == 0
    made = [line for line in calls() if line.startswith("eval")]
    folder = Path(made[0].partition("run.dir=")[2].split()[0])
    (folder / "summary.json").unlink()
    assert main([*TABLE, "rows=FoF", "do=show"]) == 0 and calls() == []
    assert cells()[1]["FoF", "EM"]["mean"] is None
    assert main([*TABLE, "rows=FoF", "seed=0"]) == 0
    assert calls() == [f"eval resume={folder}"]
    assert main([*TABLE, "rows=FoF", "do=show"]) == 0
    content, values = cells()
    assert values["FoF", "EM"]["seeds"] == {"0": 60.0} and "FoF on HotpotQA: seeds 1 are missing" in content["notes"]


def test_a_run_that_was_extended_is_named(calls):
    assert main([*TABLE, "rows=RR", "seed=0"]) == 0
    trained = next(line for line in calls() if line.startswith("train"))
    folder = Path(trained.partition("run.dir=")[2].split()[0])
    (folder / "segments.jsonl").write_text('{"steps": 9, "done": 2, "summary": {}, "command": []}\n')
    assert main([*TABLE, "rows=RR", "do=show"]) == 0
    assert f"RR on HotpotQA, seed 0: {folder} was extended to 9 steps" in cells()[0]["notes"]


def test_failures_from_outside_are_said_and_too_many_of_them_leave_no_score(calls, monkeypatch, capsys):
    monkeypatch.setenv("FAILS", "0.04")
    # Nothing of it is drawn, so its one seed stands for all.
    assert main([*TABLE, "rows=untrained", "seed=1"]) == 0
    note = cells()[0]["notes"][0]
    assert note == "untrained on HotpotQA, seed 0: 4.0% of the rollouts failed from outside and count 0"
    monkeypatch.setenv("FAILS", "0.6")
    assert main([*TABLE, "rows=FoF", "seed=0"]) == 0
    assert cells()[1]["FoF", "EM"]["mean"] is None and len(calls()) == 3
    monkeypatch.setenv("FAILS", "0")
    assert main([*TABLE, "rows=FoF", "seed=0"]) == 0
    assert calls()[0].split()[1].startswith("resume=")
    assert cells()[1]["FoF", "EM"]["mean"] == 60.0


def test_agreement_is_judged_at_the_papers_scale_alone(calls, capsys):
    assert main(["own", "rows=untrained,FoF", "seed=0", "jobs=2"]) == 0
    assert all("hardware.threads=1" in line for line in calls())
    assert ["train", "FoF", "1", "20.0"] in [line.split() for line in capsys.readouterr().out.splitlines()]
    _, values = cells("paper")
    assert values["untrained", "EM"]["agrees"] is True and values["FoF", "EM"]["agrees"] is False
    assert values["FoF", "# Sub-Q"]["agrees"] is True


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["own", "do=look"], "do: got 'look', expected 'run', 'plan' or 'show'"),
        (["own", "scale=real"], "scale: got real, and own has words for paper, mini alone"),
        (["own", "rows=QR"], "rows: got 'QR', expected one of FoF, RR, RR again, untrained"),
        (["own", "seed=x"], "seed: got 'x', expected integer"),
        (["own", "jobs=0"], "jobs: got '0', expected greater than or equal to 1"),
        (["on"], "set: got 'on'"),
        (["own", "mhgpo-table1"], "table: got 2 names, expected one"),
        (["own", "through='"], 'through: got "\'", expected a command'),
        (["own", "through=no_such_scheduler -n 1"], "through: got 'no_such_scheduler -n 1', expected a command"),
        (["own", "through="], "through: got '', expected a command"),
        (["rows=RR"], "table: which one? `python -m scripts.papers` lists them"),
        (["own", "-m"], "-m: not for python -m scripts.papers, which takes lists as they are: seed=0,1"),
        (["own", "scale=mini", "tsk.max_tokens=3"], "FoF: tsk: unknown key"),
    ],
)
def test_mistakes_are_said_before_anything_starts(calls, capsys, words, said):
    assert main(words) == 2
    errors = capsys.readouterr().err.splitlines()
    assert any(line.startswith(f"error: {said}") for line in errors), errors
    assert calls() == [] and not Path("outputs").exists()


def test_all_mistakes_of_a_command_line_are_said_at_once(calls, capsys):
    for words, keys in (
        (["rows=QR", "columns=nowhere"], ["rows", "columns"]),
        (["seed=0,x", "jobs=0"], ["seed", "jobs"]),
    ):
        assert main(["own", *words]) == 2
        errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
        assert [line.split(":")[1].strip() for line in errors] == keys


def test_a_table_with_a_mistake_in_its_base_is_refused(calls, capsys):
    Path("conf/set/base/own.yaml").write_text(BASE + "algos: {mhgpo: {mini: [seed=1]}}\n")
    assert main(TABLE) == 2
    assert "base.algos: got 'mhgpo'" in capsys.readouterr().err


def test_a_folder_in_the_place_of_a_set_is_named(calls, capsys):
    Path("conf/set/folder.yaml").mkdir()
    assert main(["folder", "do=plan"]) == 2
    assert "conf/set/folder.yaml: is not a file" in capsys.readouterr().err


def test_a_row_that_cannot_run_is_refused_in_one_line(calls, capsys):
    row = "{from: FoF, train: [algo=grpo, model.path=tiny_prompts]}"
    Path("conf/set/own.yaml").write_text(SPEC.replace("rows:\n", f"rows:\n  Next: {row}\n"))
    assert main(TABLE) == 2
    (error,) = capsys.readouterr().err.splitlines()
    expected = "error: Next: model: got tiny (tiny_prompts), and FoF, from which it starts, is tiny (tiny)"
    assert error.startswith(expected)
    assert calls() == [] and not Path("outputs").exists()


def test_a_rule_that_names_no_checkpoint_yet_is_no_mistake_of_a_plan(calls, capsys):
    spec = SPEC.replace("FoF: {train", "FoF: {checkpoint: before_collapse, train")
    Path("conf/set/own.yaml").write_text(spec)
    assert main([*TABLE, "rows=FoF", "do=plan"]) == 0
    assert "no such run directory" in capsys.readouterr().out.split("eval FoF on HotpotQA, seeds 0 1:\n")[1]


def test_the_command_of_every_run_is_printed(calls, capsys):
    assert main([*TABLE, "rows=FoF", "do=plan", "eval.items=7"]) == 0
    text = capsys.readouterr().out
    assert "train FoF, seeds 0 1:\n  mmrl train model=tiny task=hotpotqa algo=mhgpo_fof eval.items=7 seed=0" in text
    assert "eval FoF on HotpotQA, seeds 0 1:\n  mmrl eval model=tiny" in text and calls() == []
    # A setting that evaluations do not take is for the trainings.
    assert main([*TABLE, "rows=FoF", "do=plan", "eval.every=3", "run.report_to=[wandb]", "train.lr=1"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  mmrl")]
    assert ["eval.every=3" in line and "train.lr=1" in line for line in lines] == [True, False]
    assert "wandb" in lines[0] and "wandb" not in lines[1]


def test_without_a_name_all_tables_are_listed(capsys):
    assert main([]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["mhgpo-table1", "2506.02718", "Table", "1", "14", "x", "9", "3"] in [line[:8] for line in lines]
    tables = {path.stem for path in (Path(papers.__file__).parent / "sets").glob("*.yaml")}
    assert {line[0] for line in lines if line[1:2] and line[1].startswith("25")} == tables
