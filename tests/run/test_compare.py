"""Runs side by side: grouping, the rule of "learns", tables, figure, document, and mistakes in what is given."""

import copy
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from mmrl.cli import main
from mmrl.report.charts import DARK, comparison_figure
from mmrl.report.compare import compare_runs, evaluation_band, training_band
from mmrl.report.html import write_comparison, write_docs
from mmrl.report.overview import find_runs
from mmrl.report.rundir import RunDir
from mmrl.report.tables import against_rows, comparison_text, pair_rows, seed_rows, summary_rows
from mmrl.system.conf import later_wins
from mmrl.system.files import append_jsonl
from tests.helpers.runs import CONFIG, fake_run

METRICS = {"hotpotqa": "f1", "search_agent": "em"}


def made(
    path, algo="mhgpo_rr", seed=0, after=0.6, before=0.2, n=200, task="hotpotqa", done=True, facts=None, **changes
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
            items = [
                {
                    "id": f"d{number}",
                    "metrics": {name: float(number < round(share * n)) for name in ("em", "f1")},
                    "modules": {"reranker/invalid_selection": 0.5 - 0.1 * step},
                }
                | ({"metrics": facts(number, step, share * n)} if facts else {})
                for number in range(n)
            ]
            append_jsonl(run.eval_path(step, "dev"), items)
            record |= {"eval/dev/n": float(n), "time/eval": 1.0}
            for name in items[0]["metrics"]:
                mean = sum(item["metrics"][name] for item in items) / n
                record |= {
                    f"eval/dev/{name}": mean,
                    f"eval/dev/{name}_low": mean - 0.1,
                    f"eval/dev/{name}_high": mean + 0.1,
                }
        run.append_metrics(step, record)
    if done:
        run.write_summary({"main_metric": METRICS[task]})
    run.close()
    return run.path


def group_of(tmp_path, *runs):
    for number, keywords in enumerate(runs):
        made(tmp_path / f"r{number}", **{"seed": number} | keywords)
    (panel,) = compare_runs(find_runs([tmp_path]), "x", METRICS).panels
    (group,) = panel.groups
    return group


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
    assert group_of(tmp_path, *runs).verdict == verdict


def test_a_gain_that_may_be_chance_is_not_learning(tmp_path):
    # 30 of 200 items are lost and 42 are won: +0.06, with an interval that holds 0.
    def noisy(number, step, share):
        right = number < 30 if step == 0 else 30 <= number < 72 if step == 4 else False
        return {"f1": float(right)}

    group = group_of(tmp_path, *[{"facts": noisy}] * 3)
    found = group.lines[0].difference
    assert found.difference == pytest.approx(0.06) and found.low < 0 < found.high
    assert group.verdict == "no (0 of 3 seeds)"


def test_a_runs_interval_is_the_one_of_its_own_report(tmp_path):
    fake_run(tmp_path / "a")
    (line,) = compare_runs([tmp_path / "a"], "x", METRICS).lines
    assert line.difference == line.seen.differences[line.metric]


def test_one_panel_per_task_and_runs_of_other_settings_apart(tmp_path):
    made(tmp_path / "a", algo="mhgpo_rr")
    made(tmp_path / "b", algo="mhgpo_rr", seed=1, group_size=8)
    made(tmp_path / "c", algo="grpo", task="search_agent")
    panels = {panel.task: panel for panel in compare_runs(find_runs([tmp_path]), "x", {}).panels}
    assert [group.label for group in panels["hotpotqa"].groups] == [
        "mhgpo_rr algo.group_size=4",
        "mhgpo_rr algo.group_size=8",
    ]
    assert panels["hotpotqa"].metric == "f1" and panels["search_agent"].metric == "em"


def test_of_runs_that_repeat_each_other_the_furthest_stays_and_a_note_says_so(tmp_path):
    kept = made(tmp_path / "done")
    left = made(tmp_path / "another", done=False)
    found = compare_runs(find_runs([tmp_path]), "x", METRICS)
    assert [line.seen.run.path for line in found.lines] == [kept]
    assert str(left) in found.notes[0] and found.notes[0] in comparison_text(found)


def test_tables_show_means_ranges_behaviour_and_states(tmp_path):
    made(tmp_path / "a", after=0.6)
    made(tmp_path / "b", after=0.4, seed=1)
    made(tmp_path / "c", seed=2, done=False)
    (panel,) = compare_runs(find_runs([tmp_path]), "x", METRICS).panels
    head, row = summary_rows(panel)
    shown = dict(zip(head, row, strict=True))
    assert shown["seeds"] == "2 of 3 done"
    assert (shown["before"], shown["after"], shown["difference"]) == ("0.200", "0.500", "+0.300")
    assert shown["lowest to highest seed"] == "+0.200 to +0.400"
    assert shown["invalid selections"] == "0.50 → 0.10"
    assert shown["time per run"] == "11 s"  # four steps of 2 s, three evaluations of 1 s
    seeds = seed_rows(panel)
    assert [cells[-1] for cells in seeds[1:2]] == ["done"] and "of 4" in seeds[3][-1]


def test_shares_count_items_above_zero(tmp_path):
    made(tmp_path / "a", task="search_agent", facts=lambda n, step, share: {"em": 0.0, "searches": 3.0 * (n < 50)})
    (panel,) = compare_runs([tmp_path / "a"], "x", METRICS).panels
    shown = dict(zip(*summary_rows(panel), strict=True))
    assert shown["searches"] == "0.25 → 0.25"


def test_algorithms_are_compared_on_common_seeds_and_items(tmp_path):
    for seed in (0, 1):
        made(tmp_path / f"a{seed}", algo="mhgpo_fof", after=0.6, seed=seed)
    made(tmp_path / "b1", algo="mhgpo_is", after=0.3, seed=1)
    made(tmp_path / "b2", algo="mhgpo_is", after=0.9, seed=2)
    made(tmp_path / "c", algo="mmgrpo", after=0.9, seed=5)
    (panel,) = compare_runs(find_runs([tmp_path]), "x", METRICS).panels
    table = {row[0]: dict(zip(against_rows(panel)[0][1:], row[1:], strict=True)) for row in against_rows(panel)[1:]}
    assert table["mhgpo_fof"]["mhgpo_is"] == "+0.300*" and table["mhgpo_is"]["mhgpo_fof"] == "-0.300*"
    assert table["mhgpo_fof"]["mmgrpo"] == "" == table["mmgrpo"]["mmgrpo"]


def test_every_pair_has_its_interval_the_better_first(tmp_path):
    for algo, after in (("mhgpo_fof", 0.3), ("mhgpo_is", 0.6)):
        made(tmp_path / algo, algo=algo, after=after)
    made(tmp_path / "other", algo="mmgrpo", seed=5)
    comparison = compare_runs(find_runs([tmp_path]), "x", METRICS)
    (panel,) = comparison.panels
    head, *pairs = pair_rows(panel)
    assert len(pairs) == 1, "mmgrpo has no seed in common with the others"
    shown = dict(zip(head, pairs[0], strict=True))
    assert shown["pair"] == "mhgpo_is - mhgpo_fof" and shown["difference"] == "+0.300"
    low, high = map(float, shown["95 % interval"].strip("[]").split(", "))
    assert 0 < low <= 0.3 <= high
    assert "mhgpo_is - mhgpo_fof" in comparison_text(comparison)
    better, worse = (next(g for g in panel.groups if g.label == name) for name in ("mhgpo_is", "mhgpo_fof"))
    forth, back = panel.against(better, worse), panel.against(worse, better)
    assert (forth.low, forth.high) == pytest.approx((-back.high, -back.low)), "one draw, seen from both sides"


def test_curves_are_means_with_the_range_of_seeds(tmp_path):
    group = group_of(tmp_path, {"after": 0.6}, {"after": 0.4})
    band = evaluation_band(group, "f1")
    assert band.steps.tolist() == [0, 2, 4]
    assert (band.low[-1], band.mean[-1], band.high[-1]) == pytest.approx((0.4, 0.5, 0.6))
    reward = training_band(group, "reward/mean")
    assert reward.steps.tolist() == [1, 2, 3, 4]
    assert reward.mean[0] == pytest.approx(0.6) and reward.high[0] - reward.low[0] == pytest.approx(1.0)
    assert evaluation_band(group, "nothing") is None


def test_one_seed_has_the_interval_over_items(tmp_path):
    band = evaluation_band(group_of(tmp_path, {}), "f1")
    assert (band.high - band.low) == pytest.approx([0.2, 0.2, 0.2])


def test_the_figure_carries_both_themes_and_every_label(tmp_path):
    for number, algo in enumerate(("mhgpo_fof", "mhgpo_is", "<b>")):
        made(tmp_path / f"r{number}", algo=algo)
    made(tmp_path / "none", algo="mmgrpo", before=None, done=False)
    svg, png = comparison_figure(compare_runs(find_runs([tmp_path]), "x", METRICS))
    words = " ".join(ElementTree.fromstring(svg).itertext())
    assert all(name in words for name in ("mhgpo_fof", "mhgpo_is", "<b>", "mmgrpo", "hotpotqa", "f1 on dev", "step"))
    assert "prefers-color-scheme:dark" in svg
    drawn = svg.partition("</style>")[2]
    assert not [color for color in DARK if color in drawn], "a colour that does not follow the theme"
    assert png.startswith(b"\x89PNG")


def test_a_page_is_filled_between_its_marks_and_keeps_the_rest(tmp_path):
    made(tmp_path / "runs" / "a")
    found = compare_runs(find_runs([tmp_path / "runs"]), "mini", METRICS)
    page = tmp_path / "comparison.md"
    page.write_text("before\n<!-- generated by mmrl compare: mini -->\nold\n<!-- end of generated part -->\nafter\n")
    write_docs(found, page)
    first = page.read_text()
    write_docs(found, page)
    assert page.read_text() == first
    assert first.startswith("before\n") and first.endswith("\nafter\n") and "old" not in first
    for target in re.findall(r"\]\(([^)]+)\)", first):
        assert (tmp_path / target).is_file()
    assert "| mhgpo_rr |" in first
    files = write_comparison(found, tmp_path / "out")
    assert {path.name for path in files} == {"compare.html", "compare.svg", "compare.png"}
    assert "mhgpo_rr" in files[0].read_text()


def test_the_command_on_a_folder_writes_there(tmp_path, capsys):
    made(tmp_path / "all" / "a")
    made(tmp_path / "all" / "b", seed=1)
    assert main(["compare", str(tmp_path / "all")]) == 0
    out = capsys.readouterr().out
    assert "undecided (2 of 3 seeds)" in out and "+0.400" in out
    assert (tmp_path / "all" / "compare.html").is_file()
    assert main(["compare", f"runs=[{tmp_path / 'all' / 'a'},{tmp_path / 'all' / 'b'}]", f"out={tmp_path / 'o'}"]) == 0
    assert (tmp_path / "o" / "compare.svg").is_file()


def test_mistakes_in_what_is_compared(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    RunDir.create(tmp_path / "evaluation", {"task": {"name": "hotpotqa"}, "policy": "tiny"}, ["mmrl", "eval"]).close()
    made(tmp_path / "a")
    for arguments, says in [
        (["empty", "nowhere"], "runs: empty: no training run in it or below it"),
        (["empty", "nowhere"], "runs: nowhere: no such folder"),
        (["evaluation"], "only 1 of `mmrl eval`"),
        (["runs=[]"], "runs: got an empty list"),
        (["a", "jobs=2"], "jobs: has no effect on runs that are there"),
        (["a", "docs=none.md"], "docs: none.md: no such file"),
        (["a", "name=../x"], "name: got '../x'"),
    ]:
        assert main(["compare", *arguments]) == 2, arguments
        assert says in capsys.readouterr().err
    assert not Path("outputs").exists()


def test_a_setting_that_is_set_again_is_one_word():
    words = ["task=a", "train.steps=5", "~algo.x", "++train.steps=7", "algo.x=1", "task=b"]
    assert later_wins(words) == ["task=b", "++train.steps=7", "~algo.x", "algo.x=1"]
