"""The task `reasoning_gym` on the package itself: names and parameters, splits, verifiers, and text that would run."""

import re
import sys
import time
from pathlib import Path

import pytest

from mmrl.errors import ConfigError
from mmrl.models.template import use
from mmrl.tasks import TASKS
from mmrl.tasks.gym.answers import EVALUATING, harmless
from mmrl.tasks.gym.generate import entries
from tests.helpers.gateway import Scripted, one, tokenizer
from tests.helpers.lines import refused
from tests.helpers.programs import default_config, play

rg = pytest.importorskip("reasoning_gym", reason="the extra gym is not installed")

SMALL = {"max_terms": 2, "max_digits": 1}


def make(dataset="chain_sum", params=SMALL, seed=0, style="default", **items):
    data = {"train_items": 30, "dev_items": 10, "test_items": 10} | items
    return TASKS["reasoning_gym"](
        default_config("reasoning_gym", dataset=dataset, params=params, style=style, data=data), seed
    )


@pytest.fixture(scope="module")
def sums():
    return make()


def test_problems_are_the_packages_and_splits_share_none(sums):
    task = sums
    splits = {split: task.examples(split) for split in ("train", "dev", "test")}
    asked = {split: {example.inputs["question"] for example in found} for split, found in splits.items()}
    assert not asked["train"] & asked["dev"] and not asked["dev"] & asked["test"] and not asked["train"] & asked["test"]
    assert len(asked["dev"]) == len(splits["dev"]) > 5
    # seeds of train begin at 0: problem i of the package is ours, whatever else was taken out
    theirs = rg.create_dataset("chain_sum", size=30, seed=0, **SMALL)
    assert splits["train"]
    for example in splits["train"]:
        entry = theirs[int(example.id.removeprefix("train"))]
        assert (example.inputs, example.metadata["answer"]) == ({"question": entry["question"]}, entry["answer"])


def test_the_run_seed_changes_no_problem(sums):
    assert sums.examples("train") == make(seed=7).examples("train")


@pytest.mark.parametrize(
    ("text", "reward", "accuracy", "answered"),
    [
        ("I think. <answer>{}</answer>", 1.0, 1.0, 1.0),
        ("<answer>no</answer> or rather <answer> {} </answer>", 1.0, 1.0, 1.0),
        ("{}", 0.0, 0.0, 0.0),
        ("<answer>apples</answer>", 0.0, 0.0, 1.0),
        ("<answer>{} or so</answer>", "partial", 0.0, 1.0),
    ],
)
def test_rewards_are_the_verifiers(sums, text, reward, accuracy, answered):
    task = sums
    example = task.examples("dev")[0]
    answer = example.metadata["answer"]
    rollout, calls, _ = play(task, [text.format(answer)], "outcome", example)
    expected = len(answer) / len(f"{answer} or so") if reward == "partial" else reward
    assert rollout.reward == pytest.approx(expected)
    assert dict(rollout.metrics) == {"accuracy": accuracy, "score": rollout.reward, "answered": answered}
    assert [call.module for call in calls] == ["solver"]


@pytest.mark.parametrize(("said", "answered"), [("I cannot say.", 0.0), ("<answer>no</answer>", 1.0)])
def test_an_answer_within_thoughts_is_none(sums, said, answered):
    read, example = tokenizer("qwen3"), sums.examples("dev")[0]
    use(read, thinking=True, date=None)
    reply = f"<think>\n<answer>{example.metadata['answer']}</answer>?\n</think>\n\n{said}"
    rollout, _ = one(sums, Scripted(lambda prompt: reply, read), examples=[example], max_tokens=120)
    assert (rollout.reward, rollout.metrics["answered"]) == (0.0, answered)


@pytest.mark.parametrize("style", ["default", "DeepSeekZero", "simple", "direct", "chain_of_draft"])
def test_styles_are_the_packages_system_messages(style):
    from reasoning_gym.utils import SYSTEM_PROMPTS

    task = make(style=style)
    example = task.examples("dev")[0]
    messages = task.program.question(example)
    assert [m["content"] for m in messages] == [SYSTEM_PROMPTS[style], example.inputs["question"]]


def test_demonstrations_earn_everything(sums):
    for example in sums.examples("train")[:5]:
        (shown,) = sums.demonstrations(example)
        assert play(sums, [shown.completion], "outcome", example)[0].reward == 1.0


def test_a_data_set_that_knows_no_answer_has_no_demonstrations():
    task = make("graph_color", {}, train_items=2, dev_items=1, test_items=1)
    assert task.demonstrations(task.examples("train")[0]) == []


def test_several_data_sets_in_one():
    specs = [{"name": "chain_sum", "weight": 1, "config": SMALL}, {"name": "leg_counting", "weight": 1, "config": {}}]
    task = make("composite", {"datasets": specs})
    sources = {example.metadata["metadata"]["source_dataset"] for example in task.examples("train")}
    assert sources == {"chain_sum", "leg_counting"}
    for example in task.examples("train"):
        assert play(task, [f"<answer>{example.metadata['answer']}</answer>"], "outcome", example)[0].reward == 1.0


@pytest.mark.parametrize("dataset", ["word_ladder", "ransom_note"])
def test_problems_do_not_depend_on_the_order_of_sets(monkeypatch, dataset):
    """Of these generators the package makes others in each process."""
    found = []
    for order in ("1", "2"):
        monkeypatch.setenv("PYTHONHASHSEED", order)
        found.append(entries("reasoning_gym", dataset, {}, {"dev": (7, 6)}))
    assert found[0] == found[1]


def test_entries_keep_what_a_verifier_reads():
    """rearc marks a board against a tuple of tuples; JSON would make lists of it."""
    (entry,) = entries("reasoning_gym", "rearc", {}, {"dev": (3, 1)})["dev"]
    assert rg.create_dataset("rearc", seed=3, size=1).score_answer(entry["answer"], entry) == 1.0


def test_a_verifier_that_raises_gives_nothing():
    task = make("prime_factorization", {})
    example = task.examples("dev")[0]
    with pytest.raises(ValueError):
        task.verifier.score_answer("many", example.metadata)
    rollout, _, _ = play(task, ["<answer>many</answer>"], "outcome", example)
    assert (rollout.error, rollout.reward) == (None, 0.0)


# -- bad input


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "task.dataset: missing; expected a data set of reasoning-gym"),
        (["task.dataset=chain_sun"], "task.dataset: got 'chain_sun'.*did you mean 'chain_sum'"),
        (["task.params.max_term=2"], "task.params.max_term: got 'max_term'.*did you mean 'max_terms'"),
        (["task.params.max_terms=two"], "task.params.max_terms: got 'two', expected a valid integer"),
        (["task.params.min_terms=0"], "task.params: chain_sum refuses its parameters: min_terms must be positive"),
        (["task.params.seed=3"], "task.params.seed: is set by mmrl.*task.data.train_items"),
        (["task.data.train=a.jsonl"], "task.data.train: got 'a.jsonl', expected 'generated'"),
        (["task.style=plain"], "task.style"),
        (
            [
                "task.params.max_terms=2",
                "task.params.max_digits=1",
                "task.data.dev_items=900",
                "task.data.train_items=2",
            ],
            "task.params: chain_sum makes .* all in dev and test",
        ),
        (["task.dataset=composite"], "task.params: composite refuses its parameters: Must specify at least one"),
        (
            ["task.dataset=composite", "task.params.datasets=[{name: nope, weight: 1, config: {}}]"],
            "task.params.datasets.0.name: got 'nope'",
        ),
        (
            ["task.dataset=composite", "task.params.datasets=[{name: chain_sum, weight: 1, config: {max_term: 1}}]"],
            "task.params.datasets.0.config.max_term.*did you mean 'max_terms'",
        ),
    ],
)
def test_bad_input_is_one_line(words, said):
    given = [] if not words or any(word.startswith("task.dataset") for word in words) else ["task.dataset=chain_sum"]
    problems = refused("task=reasoning_gym", "algo=grpo", *given, *words)
    assert len(problems) == 1 and re.search(said, problems[0]), problems


def test_a_missing_package_is_named_with_what_installs_it(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"reasoning-gym; pip install 'mmrl\[gym\]'"):
        make()


# -- text that a verifier would run


def _sources() -> dict[str, str]:
    from reasoning_gym.factory import DATASETS

    return {name: Path(sys.modules[kind.__module__].__file__).read_text() for name, (kind, _) in DATASETS.items()}


def test_every_verifier_that_evaluates_is_known():
    """The part of each module from its verifier on to the next method calls none of Python's evaluators."""
    evaluates = re.compile(r"(?<![\w.])(?:eval|exec|Fraction)\(\w*answer|\bparse_expr\(answer|sympify\(\w*answer")
    found = set()
    for name, source in _sources().items():
        verifier = source.partition("def score_answer")[2].partition("\n    def ")[0]
        if evaluates.search(verifier):
            found.add(name)
    assert found <= EVALUATING, found - EVALUATING
    assert {"countdown", "n_queens"} <= found, "the pattern finds nothing any more"


HARMLESS = [
    *("1+2", "(1+2)*3**2", "x**2/2 + sin(x) + C", "[1, 2]", "[['Q', '_']]", "1 2 3", "ABCD", "Q _ _\n_ _ Q", "3/8"),
    *("0.5", "50%", "9**-2", "x**(1/2)", "2**x", "x*(y+2)**3/4 - exp(-x)*log(x)"),
]
HARMFUL = [
    *(
        "9**9**9",
        "(9**99)**99",
        "9**(50*90)",
        "9**9999",
        "9!!!!",
        "factorial(9)",
        "1e999999999",
        "1e９９９９９９９９９",
    ),
    *("__import__('os').system('x')", "exit()", "x.y", "lambda: 1", "sqrt('__import__(\"os\")')", "'a'*10**9"),
    *("[1]*10**9", "[1 for _ in x]", "f'{x}'", "(1)\n(2)", "(x := 3)", "+".join(["1"] * 2000)),
]


@pytest.mark.parametrize("text", HARMLESS)
def test_answers_are_let_through(text):
    assert harmless(text)


@pytest.mark.parametrize("text", HARMFUL)
def test_text_that_could_run_or_take_for_ever_is_not(text):
    assert not harmless(text)


@pytest.mark.parametrize("dataset", sorted(EVALUATING))
def test_the_packages_own_answers_are_let_through(dataset):
    answers = [entry["answer"] for entry in rg.create_dataset(dataset, seed=0, size=20)]
    assert [answer for answer in answers if not harmless(answer)] == []


def test_no_answer_is_run(tmp_path):
    task, written = make("countdown", {}, train_items=2, dev_items=1, test_items=1), tmp_path / "written"
    example = task.examples("dev")[0]
    text = f"open({str(written)!r}, 'w')"
    task.verifier.score_answer(text, example.metadata)
    assert written.exists(), "the package runs it no more; `answers` can go"
    written.unlink()
    rollout, _, _ = play(task, [f"<answer>{text}</answer>"], "outcome", example)
    assert (rollout.error, rollout.metrics["accuracy"], written.exists()) == (None, 0.0, False)


def test_a_verifier_that_takes_too_long_fails_the_rollout(sums, monkeypatch):
    monkeypatch.setattr("mmrl.tasks.gym.problems.VERIFIER_S", 0.1)
    monkeypatch.setattr(sums.verifier, "score_answer", lambda answer, entry: time.sleep(1))
    rollout, _, _ = play(sums, ["<answer>1</answer>"], "outcome", sums.examples("dev")[0])
    assert rollout.error == "reward" and "took longer than 0.1 s" in rollout.error_message
