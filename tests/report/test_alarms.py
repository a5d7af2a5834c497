"""Each alarm rings for its illness, and a healthy run is silent."""

import math
import re

import pytest

from mmrl.report.advice import ADVICE
from mmrl.report.alarms import alarms
from mmrl.report.stats import lost
from mmrl.tasks.base import RESERVED
from tests.helpers import TOP


def history(steps=40, **curves):
    """A healthy run; `curves` replace metrics (`__` for `/`) by functions of the step."""
    healthy = {
        "reward/mean": lambda s: 0.3 + 0.5 * s / steps + 0.05 * (-1) ** s,
        "credit/zero_variance_share": lambda s: 0.2 + 0.6 * s / steps,
        "train/kl": lambda s: 0.2 * s / steps,
        "train/loss": lambda s: -0.01,
        "train/grad_norm": lambda s: 1.0,
        "train/logprob_gap_mean": lambda s: 1e-5,
        "rollouts/failed_share": lambda s: 0.01,
        "rollouts/count": lambda s: 24.0,
        "rollouts/calls_per_rollout": lambda s: 3.0 - 0.4 * s / steps,
        "train/clip_share": lambda s: 0.05,
        "similarity/m": lambda s: 0.3 + 0.5 * s / steps,
        "turn/1/format_rate": lambda s: 0.8 + 0.2 * s / steps,
        "module/m/entropy": lambda s: 0.5 - 0.4 * s / steps,
        "module/m/format_rate": lambda s: 0.8 + 0.2 * s / steps,
        "module/m/length": lambda s: 20.0 + s / steps,
        "module/m/finish_length_share": lambda s: 0.1,
    }
    made = healthy | {key.replace("__", "/"): curve for key, curve in curves.items()}
    return [{"step": s} | {key: curve(s) for key, curve in made.items()} for s in range(1, steps + 1)]


def test_a_healthy_run_is_silent():
    assert alarms(history()) == []


@pytest.mark.parametrize(
    ("name", "key", "curve"),
    [
        ("reward_collapse", "reward/mean", lambda s: 0.8 if s < 20 else 0.1),
        ("reward_collapse", "reward/mean", lambda s: -0.1 if s < 20 else -0.4),
        ("entropy_collapse", "module/m/entropy", lambda s: 0.5 if s < 20 else 0.001),
        ("zero_variance", "credit/zero_variance_share", lambda s: 0.2 if s < 20 else 0.99),
        ("clipping", "train/clip_share", lambda s: 0.01 if s < 20 else 0.6),
        ("copies", "similarity/m", lambda s: 0.5 if s < 20 else 1.0),
        ("calls_falling", "rollouts/calls_per_rollout", lambda s: 2.0 if s < 20 else 1.0),
        ("format_falling", "turn/1/format_rate", lambda s: 0.9 if s < 20 else 0.2),
        ("length_runaway", "turn/0/length", lambda s: 20.0 if s < 20 else 90.0),
        ("logprob_gap", "train/logprob_gap_mean", lambda s: 1e-5 if s < 20 else 0.3),
        ("kl_explosion", "train/kl", lambda s: 0.1 if s < 20 else 8.0),
        ("kl_explosion", "train/kl", lambda s: 30.0),
        ("format_falling", "module/m/format_rate", lambda s: 0.95 if s < 20 else 0.5),
        ("format_falling", "module/m/invalid_selection", lambda s: 0.1 if s < 20 else 0.5),
        ("never_parses", "turn/1/format_rate", lambda s: 0.0),
        ("never_parses", "module/m/invalid_selection", lambda s: 1.0),
        ("never_parses", "module/m/action_none", lambda s: 0.98),
        ("untaught", "module/m/untaught_share", lambda s: 0.6),
        ("gains_small", "credit/gain_to_outcome", lambda s: 0.01),
        ("rewards_outweighed", "credit/teachers_to_rewards", lambda s: 1.2),
        ("gold_unlikely", "module/m/gold_probability", lambda s: 1e-4),
        ("failures", "rollouts/failed_share", lambda s: 0.0 if s < 20 else 0.4),
        ("prompt_too_long", "rollouts/failed/length", lambda s: 0.0 if s < 20 else 12.0),
        ("limits", "rollouts/failed/limit", lambda s: 0.0 if s < 20 else 12.0),
        ("never_parses", "rollouts/failed/parse", lambda s: 24.0),
        ("judge_unreadable", "task/judge_fallback", lambda s: 0.1 if s < 20 else 0.5),
        ("empty_searches", "task/empty_searches", lambda s: 0.0 if s < 20 else 0.8),
        ("answers_growing", "task/answer_words", lambda s: 3.0 if s < 20 else 12.0),
        ("many_candidates", "task/answer_candidates", lambda s: 1.2 if s < 20 else 4.0),
        ("length_runaway", "module/m/length", lambda s: 20.0 if s < 20 else 90.0),
        ("length_runaway", "module/m/finish_length_share", lambda s: 0.05 if s < 20 else 0.9),
        ("replies_cut", "module/m/finish_length_share", lambda s: 0.92),
        ("not_finite", "train/grad_norm", lambda s: 1.0 if s < 20 else math.nan),
        ("not_finite", "train/loss", lambda s: 1.0 if s < 20 else math.inf),
        ("not_finite", "train/kl", lambda s: 1e-3 if s < 20 else None),  # as a file has it
    ],
)
def test_an_illness_rings_its_own_alarm_only(name, key, curve):
    found = alarms(history(**{key.replace("/", "__"): curve}))
    assert [(alarm.name, alarm.key) for alarm in found] == [(name, key)]
    (alarm,) = found
    assert alarm.until is None
    assert alarm.step <= 25
    assert len(alarm.message) > 10


def messages(records):
    return {alarm.name: alarm.message for alarm in alarms(records)}


def test_equal_rewards_are_blamed_on_what_never_parses():
    unparsed = {"module__m__format_rate": lambda s: 0.0, "credit__zero_variance_share": lambda s: 1.0}
    found = messages(history(**unparsed))
    assert sorted(found) == ["never_parses", "zero_variance"]
    assert "algo.group_size" not in found["zero_variance"] and "parsed" in found["zero_variance"]
    # Once it parses, equal rewards are what they are.
    unparsed["module__m__format_rate"] = lambda s: 0.0 if s < 10 else 1.0
    assert "algo.group_size" in messages(history(**unparsed))["zero_variance"]


CUT = "module__m__finish_length_share"


def test_cut_replies_are_the_first_cause_of_what_follows_from_them():
    illness = {"credit__zero_variance_share": lambda s: 1.0, "module__m__format_rate": lambda s: 0.0}
    illness |= {"module__other__format_rate": lambda s: 0.0, "rollouts__failed__limit": lambda s: 24.0}
    found = [(alarm.key, alarm.message) for alarm in alarms(history(**illness, **{CUT: lambda s: 0.92}))]
    texts = dict(found)
    assert len(texts) == len(found) == 5
    cut = texts.pop("module/m/finish_length_share")
    assert cut.startswith("92% of the replies are cut at the limit of task.max_tokens; raise task.max_tokens")
    assert texts["credit/zero_variance_share"] == f"100% of the groups have equal rewards, since {cut}"
    assert texts["module/m/format_rate"] == f"none of the replies can be parsed, since {cut}"
    assert "cut" not in texts["module/other/format_rate"], "replies of another module"
    # also where replies grew until they were cut, and not once they are no longer
    grown = {"module__m__format_rate": lambda s: 1.0 if s < 20 else 0.0, CUT: lambda s: 0.0 if s < 20 else 1.0}
    assert "task.max_tokens" in messages(history(**grown))["format_falling"]
    illness[CUT] = lambda s: 0.92 if s < 20 else 0.0
    assert "parsed" in messages(history(**illness))["zero_variance"]
    # of a few it does not follow
    illness = {"credit__zero_variance_share": lambda s: 1.0, CUT: lambda s: 0.4}
    assert "algo.group_size" in messages(history(**illness))["zero_variance"]


def test_replies_that_are_all_cut_ring_at_once():
    (alarm,) = alarms(history(steps=1, **{CUT: lambda s: 1.0}))
    assert (alarm.name, alarm.step, alarm.until) == ("replies_cut", 1, None)
    assert alarms(history(steps=4, **{CUT: lambda s: 0.92})) == []


@pytest.mark.parametrize(
    ("kind", "name", "word"),
    [
        ("length", "prompt_too_long", "task.max_context"),
        ("limit", "limits", "task.max_turns"),
        ("parse", "never_parses", "task.prompts"),
    ],
)
def test_equal_rewards_are_blamed_on_how_most_rollouts_fail(kind, name, word):
    equal = {"credit__zero_variance_share": lambda s: 1.0}
    found = messages(history(**equal, **{f"rollouts__failed__{kind}": lambda s: 24.0}))
    assert sorted(found) == sorted([name, "zero_variance"])
    assert word in found[name] and found[name].startswith("100% of the rollouts") and "()" not in found[name]
    assert word in found["zero_variance"] and "algo.group_size" not in found["zero_variance"]
    some = messages(history(**equal, rollouts__failed__length=lambda s: 8.0))
    assert sorted(some) == ["prompt_too_long", "zero_variance"]
    assert "algo.group_size" in some["zero_variance"], "a third that fails does not make the others equal"


@pytest.mark.parametrize(
    ("kind", "name"), [("length", "prompt_too_long"), ("limit", "limits"), ("parse", "never_parses")]
)
def test_failures_of_nearly_all_rollouts_ring_at_once(kind, name):
    (alarm,) = alarms(history(steps=1, **{f"rollouts__failed__{kind}": lambda s: 23.0}))
    assert (alarm.name, alarm.step, alarm.until) == (name, 1, None)
    assert alarms(history(steps=4, **{f"rollouts__failed__{kind}": lambda s: 20.0})) == []
    assert [a.name for a in alarms(history(steps=1, rollouts__failed_share=lambda s: 1.0))] == ["failures"]


def test_failures_of_trials_of_prompts_ring_too():
    """Their shares are of the trial's examples: 30 of 50, then 8 of 50, as long as a window and more."""

    def trials(failed):
        trial = {"prompts/score": 0.1, "prompts/items": 50.0, "rollouts/failed_share": 0.0}
        return [{"step": step, **trial, "rollouts/failed/length": failed} for step in range(1, 20)]

    (alarm,) = alarms(trials(30.0))
    assert alarm.name == "prompt_too_long" and alarm.message.startswith("60% of the rollouts")
    assert "algo.max_labeled_demos" in alarm.message
    assert alarms(trials(8.0)) == []


def test_steps_without_a_failure_count_in_the_mean():
    """The metric is there only in such steps: all of the rollouts in one step of five, or of four."""
    for every, names in ((5, set()), (4, {"prompt_too_long"})):
        records = history(steps=20)
        for record in records[4::every]:
            record["rollouts/failed/length"] = 24.0
        assert {alarm.name for alarm in alarms(records)} == names


def test_all_advice_names_settings_that_exist():
    document = "\n".join(page.read_text() for page in (TOP / "docs").glob("keys-*.md"))
    listed = {*re.findall(r"^\| `([\w.<>]+)`", document, re.M), "task.retriever.name"}
    for name, advice in ADVICE.items():
        settings = re.findall(r"\b(?:task|algo|train|model|engine)\.[a-z_]+(?:\.[a-z_]+)*", advice.change)
        assert settings or "algo=" in advice.change, name
        assert [setting for setting in settings if setting not in listed] == [], name


def test_entropy_is_judged_by_where_it_began():
    assert alarms(history(module__m__entropy=lambda s: 0.02 if s < 20 else 0.005)) == []
    assert alarms(history(module__m__entropy=lambda s: 5.0 if s < 20 else 0.2)) != []


def test_short_answers_may_grow_to_whole_ones():
    assert alarms(history(task__answer_words=lambda s: 1.0 if s < 20 else 5.0)) == []


def test_one_odd_batch_does_not_ring():
    assert alarms(history(reward__mean=lambda s: -1.0 if s == 25 else 0.5 + s / 100)) == []
    assert alarms(history(train__kl=lambda s: 4.0 if s == 25 else 0.1)) == []


def test_nothing_rings_before_a_full_window():
    assert alarms(history(steps=4, credit__zero_variance_share=lambda s: 1.0)) == []
    assert [a.step for a in alarms(history(steps=5, credit__zero_variance_share=lambda s: 1.0))] == [5]


def test_an_alarm_that_passes_has_an_end():
    ill = history(credit__zero_variance_share=lambda s: 1.0 if 10 <= s < 20 else 0.2)
    (alarm,) = alarms(ill)
    assert (alarm.step, alarm.until) == (14, 19)
    assert [(found.name, found.until) for found in alarms(ill[:18])] == [("zero_variance", None)]


def test_the_samplers_estimate_stands_in_for_entropy():
    records = history()
    for record in records:
        del record["module/m/entropy"]
        record["module/m/surprise"] = 0.5 if record["step"] < 20 else 0.001
    assert [(a.name, a.key) for a in alarms(records)] == [("entropy_collapse", "module/m/surprise")]


@pytest.mark.parametrize("records", [[], [{"step": 1}], [{"step": s, "reward/std": None} for s in range(9)]])
def test_histories_without_numbers(records):
    assert alarms(records) == []


def test_what_an_evaluation_has_lost_beyond_chance_rings_until_it_is_back():
    def items(selected):
        return [
            {"id": str(n), "metrics": {"gold_selected": float(value), "answer_words": 4.0 - value}}
            for n, value in selected
        ]

    before = items(enumerate([1] * 20 + [0] * 20))
    worse = items(enumerate([1] * 8 + [0] * 32))
    ((key, value),) = lost(before, worse, 0, 1000, "f1").items()
    # 12 of 40 items lost it; words went up, of which no alarm says whether that is good.
    assert key == "lost/gold_selected"
    assert 0.1 < value < 0.3
    assert lost(before, items(enumerate([1] * 19 + [0] * 21)), 0, 1000, "f1") == {}, "one item may be chance"
    assert lost(before[10:29], worse[10:29], 0, 1000, "f1") == {}, "few items"
    assert lost(worse, before, 0, 1000, "f1") == {}, "a gain"
    score = "eval/dev/gold_selected"
    curve = [
        {"step": 0, score: 0.5},
        {"step": 10, score: 0.2, "eval/dev/lost/gold_selected": value},
        {"step": 20, score: 0.5},
    ]
    (alarm,) = alarms(curve)
    assert (alarm.name, alarm.step, alarm.until) == ("unlearned", 10, 10)
    assert "of gold_selected or more since before training" in alarm.message
    # As runs look at it: without the evaluation before training.
    assert [(other.name, other.step) for other in alarms(curve[1:])] == [("unlearned", 10)]


def test_a_metric_of_ones_own_may_be_called_lost():
    """As points that a game counts: `points_lost` beside `points`, in evaluations and in training."""
    names = ("eval/dev/points", "eval/dev/points_lost", "task/lost/points", "task/points_lost")
    assert alarms([{"step": step} | dict.fromkeys(names, 3.0) for step in range(9)]) == []
    assert RESERVED.fullmatch("lost/points") and not RESERVED.fullmatch("points_lost")


def test_a_loss_of_less_than_a_twentieth_is_no_alarm():
    def items(values):
        return [{"id": str(n), "metrics": {"gold_retrieved": value}} for n, value in enumerate(values)]

    before = items([0.95] * 400)
    assert lost(before, items([0.91] * 400), 0, 1000, "f1") == {}, "beyond chance, and small"
    assert lost(before, items([0.90] * 400), 0, 1000, "f1") == {"lost/gold_retrieved": pytest.approx(0.05)}
