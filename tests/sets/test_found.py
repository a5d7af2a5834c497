"""Runs side by side: grouping, the rule of "learns", tables, figure, document, and mistakes in what is given."""

import base64
import copy
import hashlib
import html
import json
import re
import shutil
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import yaml

from mmrl.cli import main
from mmrl.report.charts import DARK_CSS
from mmrl.report.overview import find_runs
from mmrl.sets.found import set_of_run_dirs
from mmrl.sets.page import SetPage
from mmrl.store.rundir import RunDir
from mmrl.system.conf import later_wins
from mmrl.system.files import append_jsonl
from tests.helpers.runs import CONFIG, fake_run

METRICS = {"hotpotqa": "f1", "search_agent": "em"}


def right(number, step, share):
    """The metrics of an item: the first `share` items are right."""
    return dict.fromkeys(("em", "f1"), float(number < round(share)))


def made(
    path, algo="mhgpo_rr", seed=0, after=0.6, before=0.2, n=200, task="hotpotqa", done=True, facts=right, **changes
):
    """A run whose first `before` x n items are right at first, and its first `after` x n in the end."""
    config = copy.deepcopy(CONFIG)
    config |= {"seed": seed, "algo": {"name": algo, "group_size": 4} | changes}
    config["task"]["name"] = task
    config["train"]["steps"] = 4
    run = RunDir.create(path, config, ["mmrl", "train"])
    for step in range(5):
        record = {"reward/mean": 0.1 * step + seed, "time/step": 2.0} if step else {}
        if step in (0, 2, 4) and before is not None:
            share = before + (after - before) * step / 4
            modules = {"reranker/invalid_selection": 0.5 - 0.1 * step}
            scored = [facts(number, step, share * n) for number in range(n)]
            items = [{"id": f"d{number}", "metrics": m, "modules": modules} for number, m in enumerate(scored)]
            append_jsonl(run.eval_path(step, "dev"), items)
            record |= {"eval/dev/n": float(n), "time/eval": 1.0}
            names = items[0]["metrics"]
            record |= {f"eval/dev/{name}": fmean(item["metrics"][name] for item in items) for name in names}
        run.append_metrics(step, record)
    if done:
        run.write_summary({"main_metric": METRICS[task]})
    run.close()
    return run.path


def found(tmp_path, name="x"):
    return set_of_run_dirs(name, find_runs([tmp_path]))


def parts(result):
    """Title -> rows, as mappings by the head."""
    return {
        part.title: [dict(zip(part.rows[0], row, strict=True)) for row in part.rows[1:]]
        for part in SetPage(result).parts
    }


def learns(tmp_path, *runs):
    for number, keywords in enumerate(runs):
        made(tmp_path / f"r{number}", **{"seed": number} | keywords)
    (row,) = parts(found(tmp_path))["hotpotqa: f1 on dev"]
    return row["learns"]


@pytest.mark.parametrize(
    ("runs", "verdict"),
    [
        ([{}, {}, {}], "yes (3 of 3 seeds)"),
        ([{"after": 0.25}, {}, {}], "yes (3 of 3 seeds)"),  # 0.05 exactly, and every resample gains something
        ([{"after": 0.24}, {}, {}], "no (2 of 3 seeds)"),
        ([{}, {}], "undecided (2 of 3 seeds)"),
        ([{}, {"after": 0.2}], "no (1 of 2 seeds)"),  # the third seed cannot change it
        ([{}, {}, {"done": False}], "undecided (2 of 3 seeds)"),
        ([{}, {}, {}, {"done": False}], "undecided (3 of 4 seeds)"),
        ([{}, {}, {}, {"after": 0.1}], "no (3 of 4 seeds)"),
        ([{"n": 199}, {"n": 199}, {"n": 199}], "undecided (199 items, 200 are needed)"),
        ([{"before": None}, {"before": None}, {"before": None}], "undecided (no evaluation)"),
    ],
)
def test_learns_as_the_design_says_it(runs, verdict, tmp_path):
    assert learns(tmp_path, *runs) == verdict


def test_a_gain_that_may_be_chance_is_not_learning(tmp_path):
    # 30 of 200 items are lost and 42 are won: +0.06, with an interval that holds 0.
    def noisy(number, step, share):
        right = number < 30 if step == 0 else 30 <= number < 72 if step == 4 else False
        return {"f1": float(right)}

    assert learns(tmp_path, *[{"facts": noisy}] * 3) == "no (0 of 3 seeds)"
    gain = found(tmp_path).started("mhgpo_rr", "hotpotqa")[0].gain
    assert gain.difference == pytest.approx(0.06) and gain.low < 0 < gain.high


def test_a_runs_interval_is_the_one_of_its_own_report(tmp_path):
    fake_run(tmp_path / "a")
    result = found(tmp_path)
    ((row, column),) = result.runs
    (run,) = result.started(row, column)
    assert run.gain == run.overview.differences[run.metric]


def test_one_column_per_task_and_runs_of_other_settings_apart(tmp_path):
    made(tmp_path / "a", algo="mhgpo_rr")
    made(tmp_path / "b", algo="mhgpo_rr", seed=1, group_size=8)
    made(tmp_path / "c", algo="grpo", task="search_agent")
    result = found(tmp_path)
    assert [*result.started_in("hotpotqa")] == ["mhgpo_rr algo.group_size=4", "mhgpo_rr algo.group_size=8"]
    assert result.metric("grpo", "search_agent") == "em" and [*result.started_in("search_agent")] == ["grpo"]


def test_of_runs_that_repeat_each_other_the_furthest_stays_and_a_note_says_so(tmp_path):
    kept = made(tmp_path / "done")
    left = made(tmp_path / "another", done=False)
    result = found(tmp_path)
    assert [run.path for runs in result.runs.values() for run in runs] == [kept]
    assert str(left) in result.notes[0] and "left out" in " ".join(SetPage(result).text().split())


def test_tables_show_means_ranges_behaviour_and_states(tmp_path):
    made(tmp_path / "a", after=0.6)
    made(tmp_path / "b", after=0.4, seed=1)
    made(tmp_path / "c", seed=2, done=False)
    shown = parts(found(tmp_path))
    (row,) = shown["hotpotqa: f1 on dev"]
    assert row["seeds"] == "2 of 3 done"
    assert (row["before"], row["after"], row["difference"]) == ("0.200", "0.500", "+0.300")
    assert row["lowest to highest seed"] == "+0.200 to +0.400"
    assert row["invalid selections"] == "0.50 → 0.10"
    assert row["time per run"] == "11 s"  # four steps of 2 s, three evaluations of 1 s
    states = [row["state"] for row in shown["hotpotqa: f1 on dev, every seed"]]
    assert states[0] == "done" and "of 4" in states[2]


def test_shares_count_items_above_zero(tmp_path):
    made(tmp_path / "a", task="search_agent", facts=lambda n, step, share: {"em": 0.0, "searches": 3.0 * (n < 50)})
    (row,) = parts(found(tmp_path))["search_agent: em on dev"]
    assert row["searches at all"] == "0.25 → 0.25"


def test_every_pair_has_its_interval_on_common_seeds_and_items_the_better_first(tmp_path):
    for algo, after, seed in (("fof", 0.3, 0), ("fof", 0.3, 1), ("is", 0.6, 1), ("is", 0.9, 2), ("mm", 0.9, 5)):
        made(tmp_path / f"{algo}{seed}", algo=algo, after=after, seed=seed)
    result = found(tmp_path)
    (pair,) = parts(result)["hotpotqa: f1 on dev, every pair"]  # mm has no seed in common with the others
    assert pair["pair"] == "is - fof" and pair["difference"] == "+0.300"
    low, high = map(float, pair["95 % interval"].strip("[]").split(", "))
    assert 0 < low <= 0.3 <= high
    assert "hotpotqa: not compared, no seed in common: fof and mm, is and mm" in noted(tmp_path)
    forth = result.against("is", "fof", "hotpotqa")
    back = result.against("fof", "is", "hotpotqa")
    assert (forth.low, forth.high) == pytest.approx((-back.high, -back.low)), "one draw, seen from both sides"


def test_rows_that_cannot_be_compared_have_no_table_of_pairs(tmp_path):
    for seed, algo in enumerate(("fof", "is")):
        made(tmp_path / algo, algo=algo, seed=seed)
    assert not [title for title in parts(found(tmp_path)) if "pair" in title]
    assert "hotpotqa: not compared, no seed in common: fof and is" in noted(tmp_path)


def test_curves_are_means_with_the_range_of_seeds(tmp_path):
    for seed, after in enumerate((0.6, 0.4)):
        made(tmp_path / f"r{seed}", seed=seed, after=after)
    result = found(tmp_path)
    figure = SetPage(result).figure
    (_, _, (score,)), (_, _, (reward,)), _ = figure.panels
    assert score.steps.tolist() == [0, 2, 4]
    assert (score.low[-1], score.mean[-1], score.high[-1]) == pytest.approx((0.4, 0.5, 0.6))
    assert reward.steps.tolist() == [1, 2, 3, 4]
    assert reward.mean[0] == pytest.approx(0.6) and reward.high[0] - reward.low[0] == pytest.approx(1.0)
    assert reward.mean[3] == pytest.approx(0.75), "a mean of the steps so far, five at most"


def test_the_figure_carries_both_themes_and_every_label(tmp_path):
    for number, algo in enumerate(("mhgpo_fof", "mhgpo_is", "<b>")):
        made(tmp_path / f"r{number}", algo=algo)
    made(tmp_path / "none", algo="mmgrpo", before=None, done=False)
    files: dict[str, Any] = SetPage(found(tmp_path)).figure.files
    svg = files["figure.svg"]
    words = " ".join(ElementTree.fromstring(svg).itertext())
    assert all(name in words for name in ("mhgpo_fof", "mhgpo_is", "<b>", "mmgrpo", "f1 on dev", "step"))
    assert f"{DARK_CSS}</style>" in svg.partition("<g")[0]
    assert files["figure.png"].startswith(b"\x89PNG")


def test_each_diagram_has_its_means_for_the_pointer(tmp_path):
    for seed, after in enumerate((0.6, 0.4)):
        made(tmp_path / f"r{seed}", seed=seed, after=after)
    page = SetPage(found(tmp_path)).html().decode()
    (drawing,) = re.findall('data-hover="([^"]*)"', page)
    score, reward = json.loads(html.unescape(drawing))
    assert score["lines"] == [["mhgpo_rr", [0, 2, 4], [0.2, 0.35, 0.5], None]]
    assert reward["lines"][0][1] == [1, 2, 3, 4] and reward["lines"][0][2][0] == 0.6
    # Side by side: each to the right of the one before it.
    assert 0 < score["axis"][0] < score["axis"][1] < reward["axis"][0]
    script = re.search("<script>(.*?)</script>", page, re.DOTALL)[1]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in page


def test_the_files_of_a_page_and_names_that_are_markup(tmp_path):
    made(tmp_path / "runs" / "a", algo="<b>&")
    files = {path.name: path for path in SetPage(found(tmp_path / "runs", "mini")).write(tmp_path / "out")}
    drawn = {"figure.svg", "figure.png", "figure.csv"}
    assert set(files) == {"set.html", "set.md", "set.json", "set.csv", "set.tex", *drawn}
    for target in re.findall(r"\]\(([^)]+)\)", files["set.md"].read_text()):
        assert (tmp_path / "out" / target).is_file()
    assert "&lt;b&gt;&amp;" in files["set.html"].read_text() and "<b>&" not in files["set.html"].read_text()


def test_runs_side_by_side_say_in_what_they_differ_besides_the_algorithm(tmp_path, capsys):
    one = made(tmp_path / "a", algo="grpo", group_size=8, beta=0.1)
    other = made(tmp_path / "b", algo="mhgpo_rr", seed=1, propagate="full")
    config = RunDir.read(other).config
    config["train"]["lr"], config["hardware"] = 0.5, {"threads": 7}
    (other / "config.yaml").write_text(yaml.safe_dump(config))
    assert main(["compare", str(one), str(other), f"out={tmp_path / 'o'}"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert f"command: mmrl compare {one} {other}" in text and "seeds: 0; 1 of mhgpo_rr" in text
    (rows,) = [rows for title, rows in parts(found(tmp_path)).items() if "differ" in title]
    # Keys that one algorithm alone has are what it is; the machine changes no number.
    assert rows == [
        {"setting": "algo.group_size", "grpo": "8", "mhgpo_rr": "4"},
        {"setting": "train.lr", "grpo": "-", "mhgpo_rr": "0.5"},
    ]
    assert re.search(r"train\.lr +\S+ +0\.5", text)


def test_runs_that_differ_in_the_algorithm_alone_say_so(tmp_path):
    for algo in ("grpo", "mhgpo_rr"):
        made(tmp_path / algo, algo=algo)
    (part,) = [part for part in SetPage(found(tmp_path)).parts if "differ" in part.title]
    assert len(part.rows) == 1 and part.note.endswith("Here there are none.")


def test_the_command_on_a_folder_writes_there(tmp_path, capsys):
    made(tmp_path / "all" / "a")
    made(tmp_path / "all" / "b", seed=1)
    assert main(["compare", str(tmp_path / "all")]) == 0
    out = capsys.readouterr().out
    assert "undecided (2 of 3 seeds)" in out and "+0.400" in out
    assert (tmp_path / "all" / "set.html").is_file()
    assert main(["compare", str(tmp_path / "all" / "a"), str(tmp_path / "all" / "b"), f"out={tmp_path / 'o'}"]) == 0
    assert (tmp_path / "o" / "figure.svg").is_file()


def test_the_logs_of_a_set_lie_between_its_runs(tmp_path, capsys):
    """`mmrl compare outputs/sets/runs/TASK/ALGO/*`, as the shell expands it."""
    made(tmp_path / "a")
    (tmp_path / "a.log").touch()
    (tmp_path / "b.log").touch()
    assert main(["compare", *map(str, (tmp_path / "a", tmp_path / "a.log")), f"out={tmp_path / 'o'}"]) == 0
    assert "cells: 1 of 1" in capsys.readouterr().out
    assert main(["compare", *map(str, (tmp_path / "a", tmp_path / "b.log"))]) == 2
    assert "b.log: is a file" in capsys.readouterr().err


def test_mistakes_in_what_is_compared(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    RunDir.create(tmp_path / "evaluation", {"task": {"name": "hotpotqa"}, "policy": "tiny"}, ["mmrl", "eval"]).close()
    made(tmp_path / "a")
    for arguments, says in [
        (["empty", "nowhere"], "runs: empty: no training run in it or below it"),
        (["empty", "nowhere"], "runs: nowhere: no such folder"),
        (["evaluation"], "only 1 of `mmrl eval`"),
        (["a", "jobs=2"], "jobs: has no effect on runs that are there"),
        (["a", "name=../x"], "name: got '../x'"),
    ]:
        assert main(["compare", *arguments]) == 2, arguments
        assert says in capsys.readouterr().err
    assert not Path("outputs").exists()


def test_a_setting_that_is_set_again_is_one_word():
    words = ["task=a", "train.steps=5", "~algo.x", "++train.steps=7", "algo.x=1", "task=b"]
    assert later_wins(words) == ["task=b", "++train.steps=7", "~algo.x", "algo.x=1"]


def test_a_later_word_wins_over_those_below_its_key():
    """Hydra applies them in turn; a choice of a group comes first wherever it stands."""
    assert later_wins(["model.lora.r=8", "model.lora=null"]) == ["model.lora=null"]
    words = ["model.lora=null", "model.lora.r=8", "model.loras=1", "model.lora={r: 2}"]
    assert later_wins(words) == ["model.lora={r: 2}", "model.loras=1"]
    assert later_wins([*words, "model.lora.r=4"]) == ["model.lora={r: 2}", "model.loras=1", "model.lora.r=4"]
    assert later_wins(["task.max_tokens=5", "task=a"]) == ["task.max_tokens=5", "task=a"]


def test_finished_runs_of_one_config_are_rows_by_their_folders(tmp_path):
    made(tmp_path / "before")
    made(tmp_path / "after")
    made(tmp_path / "stopped", done=False)
    result = found(tmp_path)
    names = [str(row) for row in result.rows]
    assert len(names) == 3 and {name.partition(" (")[2] for name in names} == {"before)", "after)", ""}


def noted(tmp_path):
    return " ".join(" ".join(found(tmp_path).notes).split())


def asked(run, gold="a", split="dev"):
    """Note what a run was asked."""
    lines = [{"split": split, "id": f"d{n}", "asked": {"q": f"q{n}"}, "gold": {"a": gold}} for n in range(200)]
    append_jsonl(run / "examples.jsonl", lines)


def test_rollouts_that_failed_from_outside_are_said_of_both_evaluations(tmp_path):
    """They count 0: those before training make a gain larger."""
    run = RunDir.read(made(tmp_path / "a"))
    assert "failed from outside" not in noted(tmp_path)
    for step, share in ((0, 0.25), (4, 0.45)):
        append_jsonl(run.metrics_path, [{"step": step, "eval/dev/n": 200.0, "eval/dev/failed_share": share}])
    said = "25.0% of the rollouts before and 45.0% of the rollouts after failed from outside and count 0"
    assert f"mhgpo_rr on hotpotqa, seed 0: {said}" in noted(tmp_path)
    shutil.rmtree(run.path / "eval")
    assert "failed from outside" not in noted(tmp_path)


def test_runs_that_were_asked_other_records_under_one_id_are_not_compared(tmp_path):
    for name, algo, gold in (("a", "grpo", "a"), ("b", "mhgpo_rr", "a"), ("c", "mmgrpo", "edited")):
        asked(made(tmp_path / name, algo=algo), gold)
    rows = parts(found(tmp_path))["hotpotqa: f1 on dev, every pair"]
    assert [row["pair"] for row in rows] == ["grpo - mhgpo_rr"]
    assert "rows that were asked other records are not compared: d0 of" in noted(tmp_path)
    asked(made(tmp_path / "d", algo="grpo", seed=1), "edited")
    assert "grpo on hotpotqa: not averaged, its seeds were asked other records: d0 of" in noted(tmp_path)
    assert found(tmp_path).started("grpo", "hotpotqa") == []


def test_rows_whose_scores_are_of_other_metrics_are_not_compared(tmp_path):
    for name, metric in (("a", "mine:one"), ("b", "mine:two"), ("c", ["mine:one", "mine:two"])):
        file = made(tmp_path / name, algo=f"algo_{name}") / "config.yaml"
        config = yaml.safe_load(file.read_text())
        config["task"] |= {"metric": metric, "metric_weights": [2.0, 1.0] if name == "c" else []}
        file.write_text(yaml.safe_dump(config))
    made(tmp_path / "d", algo="algo_d")
    made(tmp_path / "e", algo="algo_e")
    RunDir.read(made(tmp_path / "f", algo="algo_f")).write_summary({"main_metric": "em"})
    shown = parts(found(tmp_path))
    assert [row["pair"] for row in shown["hotpotqa: f1, em on dev, every pair"]] == ["algo_d - algo_e"]
    said = (
        "hotpotqa: rows with other metrics are not compared: algo_a has f1 task.metric=mine:one; "
        "algo_b has f1 task.metric=mine:two; algo_c has f1 task.metric=[mine:one,mine:two] "
        "task.metric_weights=[2.0,1.0]; algo_d has f1; algo_e has f1; algo_f has em"
    )
    assert said in noted(tmp_path)


@pytest.mark.parametrize(("steps", "paid"), [([2], 5.0), ([2, 2, 3], 7.0), ([], 3.0)])
def test_what_each_start_has_paid_is_summed(steps, paid, tmp_path):
    """2 USD when the run was stopped after step 2, then 2 and 3 of a process that counts from 0 again."""
    run = RunDir.read(made(tmp_path / "a", before=None))
    for step, cost in ((1, 1.0), (2, 2.0), (3, 2.0), (4, 3.0)):
        append_jsonl(run.metrics_path, [{"step": step, "endpoint/judge/cost": cost}])
    environment = run.path / "environment.json"
    environment.write_text(json.dumps({"resumed": [{"step": step} for step in steps]}))
    (scored,) = found(tmp_path).started("mhgpo_rr", "hotpotqa")
    assert scored.costs["USD"] == paid


def test_code_and_files_of_ones_own_that_were_edited_between_runs_is_named(tmp_path):
    for name, algo, digest in (("a", "grpo", "1"), ("b", "mhgpo_rr", "2")):
        file = made(tmp_path / name, algo=algo) / "environment.json"
        facts = json.loads(file.read_text()) | {
            "own_code": {"mine.py": digest, "same.py": "0"},
            "inputs": {"task.prompts=p.yaml": digest, "task.data.train=t.csv": "0"},
        }
        file.write_text(json.dumps(facts))
    assert "runs were made with other code or files of yours: mine.py, task.prompts=p.yaml" in noted(tmp_path)


def chained(tmp_path, name, start, seed=0, **options):
    """A run that started from another, whose folder it knows from where it ran."""
    run = made(tmp_path / name, seed=seed, **options)
    file = run / "config.yaml"
    config = yaml.safe_load(file.read_text())
    config["start"] = {"run": start, "weights": None, "prompts": None}
    file.write_text(yaml.safe_dump(config))
    return run


def test_before_is_that_of_the_first_run_that_was_asked_the_same(tmp_path):
    asked(made(tmp_path / "sft" / "s0", algo="sft", before=0.1, after=0.8), "easy")
    run = chained(tmp_path, "grpo/s0", "sft/s0", algo="grpo", before=0.78, after=0.79)
    asked(run, "hard")
    row = next(row for row in parts(found(tmp_path))["hotpotqa: f1 on dev"] if row["row"].startswith("sft+grpo"))
    assert (row["before"], row["difference"]) == ("0.780", "+0.010")
    assert f"before is that of {run}, the runs before it were asked other records" in noted(tmp_path)


def test_a_chain_is_found_from_another_folder_and_what_is_lost_is_said(tmp_path, monkeypatch):
    made(tmp_path / "outputs" / "sft" / "s0", algo="sft", before=0.1, after=0.3)
    chained(tmp_path, "outputs/grpo/s0", "outputs/sft/s0", algo="grpo", before=0.3, after=0.7)
    chained(tmp_path, "outputs/grpo/s1", "outputs/gone/s0", seed=1, algo="grpo", before=0.3, after=0.7)
    monkeypatch.chdir("/")
    rows = {row["row"]: row for row in parts(found(tmp_path))["hotpotqa: f1 on dev"]}
    assert rows["sft+grpo"]["before"] == "0.100" and "(s0 is not here)+grpo" in rows


def test_starts_that_were_trained_otherwise_are_rows_of_their_own(tmp_path):
    for seed, size in ((0, 4), (1, 8)):
        made(tmp_path / "sft" / f"s{seed}", algo="sft", seed=seed, group_size=size)
        chained(tmp_path, f"grpo/s{seed}", str(tmp_path / "sft" / f"s{seed}"), seed=seed, algo="grpo")
    rows = [row["row"] for row in parts(found(tmp_path))["hotpotqa: f1 on dev"]]
    assert {"sft+grpo sft.algo.group_size=4", "sft+grpo sft.algo.group_size=8"} <= {*rows}


def test_seeds_that_save_at_other_steps_are_averaged(tmp_path):
    made(tmp_path / "a", after=0.6)
    other = made(tmp_path / "b", seed=1, after=0.4)
    config = RunDir.read(other).config
    config["train"] |= {"save_every": 1, "keep": 9}
    (other / "config.yaml").write_text(yaml.safe_dump(config))
    (row,) = parts(found(tmp_path))["hotpotqa: f1 on dev"]
    assert row["after"] == "0.500" and "not averaged" not in noted(tmp_path)


def test_a_mapping_that_only_some_runs_have_makes_rows_of_their_own(tmp_path):
    made(tmp_path / "a", distill=None)
    made(tmp_path / "b", seed=1, distill={"answerer": "policy"})
    rows = [row["row"] for row in parts(found(tmp_path))["hotpotqa: f1 on dev"]]
    assert sorted(rows) == ["mhgpo_rr", "mhgpo_rr algo.distill.answerer=policy"]


def test_the_metric_is_the_one_that_runs_have_recorded(tmp_path):
    run = RunDir.read(made(tmp_path / "a"))
    run.write_summary({"main_metric": "em"})
    assert found(tmp_path).metric("mhgpo_rr", "hotpotqa") == "em"
    other = RunDir.read(made(tmp_path / "b", algo="grpo", done=False))
    other.note_main_metric("accuracy")
    assert found(tmp_path).metric("grpo", "hotpotqa") == "accuracy", "of a run that goes on, too"
