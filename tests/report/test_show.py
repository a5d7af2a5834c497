"""`mmrl show`: what is printed can be trusted, and what cannot be shown is said."""

import re
from dataclasses import replace

import pytest

from mmrl.config import EvalConfig
from mmrl.errors import CheckpointError, ConfigError
from mmrl.report.console import show_run
from mmrl.report.html import report_run
from mmrl.report.items import item_rows
from mmrl.report.overview import Overview
from mmrl.report.stats import module_facts
from mmrl.report.text import align, clean
from mmrl.report.trees import abridged, advantage_of, credit_line, format_reward, shorten_prediction
from mmrl.stages.evaluate import evaluation_metrics, item_results
from mmrl.stages.step_metrics import forest_metrics
from mmrl.store.journal import read_step, write_step
from mmrl.store.rundir import RunDir
from mmrl.system.files import append_jsonl
from tests.helpers.forests import Grow
from tests.helpers.runs import CONFIG, MODULES, fake_run, forest, items, metrics


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return fake_run(tmp_path_factory.mktemp("show") / "run")


def test_the_overview_has_curve_evaluations_modules_and_the_way_on(run):
    text = show_run(run.path)
    assert text.startswith("mhgpo_rr-hotpotqa-s0: mhgpo_rr on hotpotqa with tiny, 40 of 40 steps, stopped; continue")
    assert "Data: the embedded mini world" in text and "Model: the shipped tiny model" in text
    assert "training reward  0." in text and "(best 0." in text and "█" in text
    assert "0     0.417 [0.357, 0.477]" in text
    assert "em       0.417  0.883      +0.467" in text
    assert "rewriter" in text and "0.441→0.776" in text
    assert f"mmrl show {run.path} step=40" in text


def test_a_row_per_evaluation_has_its_metrics_and_number_of_items(run):
    first = {"eval/dev/n": 8.0, "eval/dev/failed_share": 0.0}
    for name, mean in {"reward": 0.25, "f1": 0.5, "em": 0.25}.items():
        first |= {f"eval/dev/{name}": mean, f"eval/dev/{name}_low": mean - 0.125, f"eval/dev/{name}_high": mean + 0.125}
    history = [{"step": 0, **first}, {"step": 1, "reward/mean": 0.5}, {"step": 2, **first, "eval/dev/em": 0.375}]
    assert replace(Overview.from_run(RunDir.read(run.path)), history=history).evaluations["dev"] == [
        ["step", "em", "f1", "reward", "items"],
        ["0", "0.250 [0.125, 0.375]", "0.500 [0.375, 0.625]", "0.250 [0.125, 0.375]", "8"],
        ["2", "0.375 [0.125, 0.375]", "0.500 [0.375, 0.625]", "0.250 [0.125, 0.375]", "8"],
    ]


@pytest.mark.parametrize(("steps", "means"), [(3, ")"), (5, ")"), (6, ", means of 5 steps)")])
def test_means_are_over_as_many_steps_as_is_said(tmp_path, steps, means):
    run = fake_run(tmp_path / "run", steps=steps)
    rewards = [metrics(step)["reward/mean"] for step in range(1, steps + 1)]
    last = sum(rewards[-5:]) / 5 if steps > 5 else rewards[-1]
    (line,) = [line for line in show_run(run.path).splitlines() if line.startswith("training reward")]
    assert f" → {last:.3f} " in line and line.endswith(means) and line.count("mean") == means.count("mean")


def test_a_running_and_a_finished_run_say_so(tmp_path):
    run = fake_run(tmp_path / "run", steps=3)
    with RunDir.open(run.path):
        assert "running" in show_run(run.path).splitlines()[0]
        run.write_summary({"name": "x"})
        # The report that a run writes at its end, too.
        assert "finished" in show_run(run.path).splitlines()[0]


def test_runs_that_hardly_began_are_shown(tmp_path):
    RunDir.create(tmp_path / "run", CONFIG, []).close()
    assert "0 of 40 steps" in show_run(tmp_path / "run")
    with pytest.raises(CheckpointError, match="no journals yet"):
        show_run(tmp_path / "run", example="q0")
    text = show_run(fake_run(tmp_path / "evaluated", steps=0).path)
    assert "evaluations on dev" in text and "first against last" not in text
    with pytest.raises(CheckpointError, match="not a run directory"):
        show_run(tmp_path)


def test_the_examples_of_a_step(run):
    lines = show_run(run.path, step=40).splitlines()
    assert lines[0] == "step 40: 3 examples, 6 rollouts, 10 calls"
    (cells,) = [line.split() for line in lines if line.lstrip().startswith("q2")]
    assert cells[:6] == ["q2", "3", "0.500", "0.000", "1.000", "tool"]
    assert "the first failure that is not the model's, q2: retriever down" in lines, (
        "not q1's reply that does not parse"
    )


def test_the_tree_of_an_example(run):
    text = show_run(run.path, example="q0", step=39)
    assert text.startswith("example q0 · step 39 · 2 rollouts")
    rewriter, reranker, first, second = (text.index(f"[q0/{name}]") for name in ("0#0", "0#1", "0#2", "1#2"))
    assert rewriter < reranker < first < second
    assert text.count("[q0/0#1]") == 1  # a shared call is shown once
    assert "├── answerer" in text and "└── answerer" in text
    assert "asked: as above" in text
    assert "reward 0.750 = shared 0.800 + penalty -0.050 · group q0|rewriter (n 2, mean 0.500, std 0.300)" in text
    assert "advantage +0.830" in text
    assert "⇒ q0/1 reward 0.000 = answer 0.000 · metrics: em 0.000" in text
    assert "characters…]" in re.sub(r"\n[│ ]+", " ", text)


def test_a_deep_tree_is_shown_whole(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    grow = Grow(("a",))
    grow.chain("q/0", "a" * 40, 1.0)
    with RunDir.create(tmp_path / "run", CONFIG, []) as run:
        write_step(run, grow.forest, step=1)
    lines = show_run(run.path, example="q").splitlines()
    assert sum("no credit" in line for line in lines) == 40
    assert sum("└── a #" in line for line in lines) == 39
    assert lines[-2].strip().startswith("⇒ q/0 reward 1.000")


def test_failures_are_in_the_tree_of_the_last_step_with_the_example(run):
    text = show_run(run.path, example="q1")
    assert "example q1 · step 40" in text and "could not be parsed" in text and "parse failure: no <ids>" in text
    assert "q2/9 failed (tool): retriever down; not credited" in show_run(run.path, example="q2")


def test_a_models_text_cannot_drive_the_terminal(run):
    assert "\x1b" not in show_run(run.path, example="q0") + show_run(run.path, step=40)
    assert clean("a\x1b[2Jb\nc\x00\u202e") == "a\\x1b[2Jb ⏎ c\\x00\\x202e"


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            {"example": "q11"},
            ConfigError,
            r"example: got 'q11', expected one of 63 names, the nearest are q1, .*; did you mean 'q1'",
        ),
        (
            {"example": "Q0", "step": 40},
            ConfigError,
            r"example: got 'Q0', expected one of 63 names, the nearest are q0",
        ),
        ({"step": 7}, CheckpointError, r"no journal of step 7; journals exist for steps 38 to 40"),
        ({"example": "q0", "step": 7}, CheckpointError, r"no journal of step 7"),
    ],
)
def test_what_is_not_there_is_one_clear_error(run, arguments, error, message):
    with pytest.raises(error, match=message) as raised:
        show_run(run.path, **arguments)
    assert raised.value.exit_code == 2


@pytest.mark.parametrize(
    ("shown", "text"),
    [
        (abridged("a" * 50 + "b" * 500 + "c" * 50, 50, 50), "a" * 50 + " […500 characters…] " + "c" * 50),
        (abridged("short", 1, 1), "short"),
        (advantage_of({"advantages": (0.5, 0.5)}), "+0.500"),
        (advantage_of({"advantages": (-1.0, 1.0)}), "-1.000 … +1.000 (mean +0.000)"),
        (advantage_of({}), "-"),
        (format_reward(1.25, {"f1": 0.75, "form": 0.5}), " = f1 0.750 + form 0.500"),
        (format_reward(-0.4, {"turn": -0.4, "own_advantage": -0.5}), " (turn -0.400, own_advantage -0.500)"),
        (format_reward(None, {"f1": 0.0}), " (f1 0.000)"),
        (format_reward(1.0, {}), ""),
        # a sum of zero does not show its rounding
        (format_reward(0.0, {"turn": 0.3 - 0.2 - 0.1}), " = turn 0.000"),
        (shorten_prediction({"answer": "Fonen", "actions": ["search"]}), "Fonen"),
        (shorten_prediction({"answer": None, "ended": "limit"}), "{'answer': None, 'ended': 'limit'}"),
        (shorten_prediction({"label": "refund"}), "{'label': 'refund'}"),
        (shorten_prediction("harp"), "harp"),
        (
            credit_line({"reward": 1.0, "advantages": (1.0,), "weights": (0.0,), "filler_of": "x"}),
            "reward 1.000 · advantage +1.000 · left out of the loss · repeated to fill its group",
        ),
        (
            credit_line({"reward": 0.2, "parts": {"turn": 0.2, "own_advantage": 1.0}}),
            "reward 0.200 (turn 0.200, own_advantage 1.000) · advantage -",
        ),
    ],
)
def test_calls_in_words(shown, text):
    assert shown == text


def test_penalties_are_shown_where_there_are_some():
    history = [{"step": 1, "module/a/penalty": 0.0, "module/a/reward": 1.0}, {"step": 2, "module/b/penalty": 0.0}]
    assert module_facts(history) == ("reward",)
    assert module_facts([*history, {"step": 3, "module/b/penalty": -0.1}]) == ("penalty", "reward")


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("where", [{}, {"step": 40}, {"step": 40, "example": "q0"}], ids=["run", "step", "example"])
def test_all_fits_the_terminal_but_paths_and_commands_to_copy(where, width, tmp_path, monkeypatch):
    """Long names, four metrics, nine facts of a module: what does not fit beside each other stands below."""
    run = fake_run(tmp_path / "run")
    shown = {f"module/{name}/{fact}": 0.123 for name in MODULES for fact in ("surprise", "kl", "clip_share")}
    shown |= {f"eval/dev/answer_presence{end}": 0.25 for end in ("", "_low", "_high")}
    run.append_metrics(40, shown)
    monkeypatch.setenv("COLUMNS", str(width))
    text = show_run(run.path, **where)
    wide = [line for line in text.splitlines() if len(line) > width and str(run.path) not in line]
    assert not wide, wide
    assert where or all(fact in text for fact in ("calls", "surprise", "clip_share", "answer_presence"))


def test_a_table_that_is_too_wide_goes_on_below_with_its_first_column():
    rows = [["", "one", "two", "three", ""], ["a", "1", "22222", "3", "yes"], ["bb", "4", "5", "6", "no"]]
    assert align(rows, width=40) == align(rows)
    assert align(rows, width=16).split("\n") == [
        "      one    two",
        "  a     1  22222",
        "  bb    4      5",
        "",
        "      three",
        "  a       3  yes",
        "  bb      6  no",
    ]
    assert align(rows, width=1).count("\n\n") == 3


EVALUATION = {key: value for key, value in CONFIG.items() if key != "algo"} | {"policy": "tiny", "split": "test"}


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory):
    """What `mmrl eval` leaves: results of 12 items, and a journal of each half."""
    run = RunDir.create(tmp_path_factory.mktemp("eval") / "run", EVALUATION, ["mmrl", "eval", "policy=tiny"])
    with run:
        results = [{**item, "predictions": ["x"], "errors": [], "failed_share": 0.0} for item in items(0, 12)]
        results[3] |= {"id": "q1", "errors": ["parse"]}
        append_jsonl(run.eval_path(0, "test"), results)
        for part in range(2):
            made, _ = forest(0)
            write_step(run, made, evaluation="test", step=part)
    return run


def test_an_evaluation_is_shown_by_its_scores_and_items(evaluated):
    text = show_run(evaluated.path)
    assert text.startswith("eval-hotpotqa-s0: tiny on hotpotqa, test, stopped; continue with: mmrl eval resume=")
    assert "so far, of 12 items" in text and "the 10 of 12 items with the lowest scores" in text
    scores = dict.fromkeys(("em", "em_low", "em_high", "module/answerer/length"), 0.5)
    evaluated.write_summary({"metrics": scores, "facts": {"data": "mini world"}})
    text = show_run(evaluated.path)
    rows = [line.split() for line in text.splitlines()]
    assert ["em", "0.500", "[0.500,", "0.500]"] in rows and ["data", "mini", "world"] in rows
    assert ["module/answerer/length", "0.500"] in rows and "finished" in text.splitlines()[0]
    assert f"all items:        mmrl show {evaluated.path} step=0" in text and "?" not in text


@pytest.mark.parametrize(
    ("data", "says"), [("mini world", "Data: the embedded mini world"), ("made up", "Data: made up.")]
)
def test_data_that_a_task_makes_itself_are_not_the_mini_world(run, data, says):
    overview = replace(Overview.from_run(RunDir.read(run.path)), summary={"facts": {"data": data}})
    assert overview.kind[0].startswith(says)


def test_the_items_of_an_evaluation_and_the_calls_of_one(evaluated):
    text = show_run(evaluated.path, step=0)
    assert text.startswith("evaluation on test\n12 items\n  item")
    assert "failed  a prediction" in text and text.count("\n  d") == 11
    one = show_run(evaluated.path, example="q1")
    assert one.startswith("item q1\n  evaluation") and "test, step 0" in one and "parse  x" in one
    assert "rewriter · 3 tokens" in one and "credit" not in one
    for arguments, words in (
        ({"step": 3}, "no journal of step 3; evaluations of step 0"),
        ({"example": "d77"}, "example: got 'd77', expected one of d0, d1, .*; did you mean 'd7'"),
        ({"example": "q7", "step": 0}, "example: got 'q7', expected one of d0, "),
    ):
        with pytest.raises((CheckpointError, ConfigError), match=words):
            show_run(evaluated.path, **arguments)


def test_codes_in_names_reach_neither_the_terminal_nor_the_page(tmp_path, recwarn):
    odd = "m\x1b]0;title\x07\x1b[31m\u202e"
    run = fake_run(tmp_path / "run", steps=10, config={**CONFIG, "run": {"name": odd, "dir": None}})
    with RunDir.open(run.path) as written:
        interval = {f"eval/dev/{odd}{end}": 0.5 for end in ("", "_low", "_high")}
        told = metrics(11) | interval | {f"module/{odd}/reward": 1.0, f"task/{odd}": 1.0}
        written.append_metrics(11, told)
        written.append_metrics(12, told)
    shown = show_run(run.path), report_run(run.path).read_text()
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", "".join(shown))
    assert r"m\x1b]0;title\x07\x1b[31m\u202e" in shown[0] and not recwarn.list


def test_an_evaluation_without_items_is_passed_over(tmp_path):
    with RunDir.create(tmp_path / "run", EVALUATION, ["mmrl", "eval", "policy=tiny"]) as run:
        for step, split in ((0, "dev"), (1, "dev")):
            run.eval_path(step, split).parent.mkdir(exist_ok=True)
            run.eval_path(step, split).write_text("")
    assert show_run(run.path).endswith("no item is evaluated yet")
    with pytest.raises(CheckpointError, match="no journal of step 0; the run has no journals yet"):
        show_run(run.path, step=0)
    append_jsonl(run.eval_path(0, "test"), items(0, 2))
    assert show_run(run.path, step=0).endswith(f"one item: mmrl show {run.path} step=0 example=d0")
    assert "d0" in show_run(run.path) and report_run(run.path).is_file()


def test_the_evaluations_of_a_training_run(run):
    assert show_run(run.path, step=0).startswith("evaluation on dev before training\n60 items\n")
    assert "evaluation on dev after step 40\nthe 10 of 60 items with the lowest scores" in show_run(run.path, step=40)
    text = show_run(run.path, example="d7")
    assert text.startswith("item d7\n") and [f"dev, step {step}" in text for step in (0, 10, 20, 40)] == [True] * 4


def test_the_page_of_an_evaluation_has_scores_and_items(evaluated):
    page = report_run(evaluated.path).read_text()
    assert "<h2>Scores on test</h2>" in page and "<td>em</td>" in page and "12 items</summary>" in page
    assert "tiny on hotpotqa, test" in page and " steps" not in page.partition("<h2>")[0].partition("<h1>")[2]


def test_parse_failures_that_a_program_caught_are_counted_apart(tmp_path):
    """q0's rollouts end well after a shared failure at the reranker, q1's ends in one, q2's is fine."""
    run = fake_run(tmp_path / "run", steps=3)
    forest, entries = read_step(run, 2)
    calls = {key: replace(call, ok=call.ok and key != "q0/0#1") for key, call in forest.calls.items()}
    forest = replace(forest, calls=calls)
    assert list(forest.caught) == ["q0/0#1"]
    assert forest_metrics(forest)["rollouts/caught_parse"] == 1.0
    run.journal_path(2).unlink()
    write_step(run, forest, entries)
    text = show_run(run.path, step=2)
    assert re.search(r"failed  parse failures caught  a prediction", text)
    assert re.search(r"\n  q0 .*0  +1 ", text) and re.search(r"\n  q1 .* parse +0\s", text)
    assert "parse failures caught" not in show_run(run.path, step=1)
    texts = [" ".join(re.sub("[│├└─]", " ", show_run(run.path, step=2, example=q)).split()) for q in ("q0", "q1")]
    assert "could not be parsed, which the program caught [q0/0#1]" in texts[0]
    assert "could not be parsed [q1/0#1]" in texts[1]


def test_an_evaluation_counts_them_by_item():
    forest = Grow(("a", "b"))
    for number, error in enumerate((None, "parse")):
        first = forest.call(f"d{number}/0#0", None, "a", ok=False)
        forest.end(forest.call(f"d{number}/0#1", first, "b", ok=error is None), 1.0 - number, error=error)
    first = forest.call("d2/0#0", None, "a")
    forest.end(first, 0.0)
    found = item_results(forest.forest, {"em": 0.0})
    assert [(item["errors"], item.get("caught_parse")) for item in found] == [([], 1), (["parse"], 1), ([], None)]
    metrics = evaluation_metrics(found, EvalConfig(), 0)
    assert (metrics["caught_parse"], metrics["model_failed"]) == (2.0, 1.0)
    _, rows = item_rows(found)
    assert rows[0][-3:-1] == ["failed", "parse failures caught"]
    assert [row[-3:-1] for row in rows[1:]] == [["", "1"], ["parse", "1"], ["", ""]]
