"""The JSON form of a forest: what is read, what is refused and how it is said, and the round trip."""

import json
from dataclasses import replace

import pytest

from mmrl import rng
from mmrl.errors import DataError
from mmrl.records import Call
from mmrl.store.forest import dump_forest, parse_forest
from tests.helpers.forests import Grow


def small():
    first = {"id": "c0", "example": "q", "parent": None, "module": "a", "completion_tokens": 3}
    first["logprobs"] = [-1, -2, -3]
    second = {"id": "c1", "example": "q", "parent": "c0", "module": "b", "invocation": 0, "turn": 1, "penalty": -0.5}
    second |= {"completion_ids": [5, 6], "observation_tokens": 1, "values": [0.1, 0.2, 0.3]}
    rollout = {"id": "r0", "example": "q", "leaf": "c1", "reward": 1, "error": None, "fork": "a"}
    return {"version": 1, "modules": ["a", "b"], "calls": [first, second], "rollouts": [rollout]}


def parse(raw):
    return parse_forest(json.dumps(raw), "f.json")


def test_reads_the_form_with_its_defaults():
    forest = parse(small())
    first, second = forest.calls["c0"], forest.calls["c1"]
    assert (first.invocation, first.turn, first.ok, first.penalty, first.turn_reward) == (0, 0, True, 0.0, None)
    assert first.logprobs == (-1.0, -2.0, -3.0) and first.values is None and first.prompt_tokens is None
    assert second.completion_tokens == 2 and second.completion_ids == (5, 6) and second.values == (0.1, 0.2, 0.3)
    assert forest.rollouts[0].reward == 1.0 and forest.rollouts[0].fork == "a"
    assert forest.modules == ("a", "b")


def test_round_trip():
    grow = Grow(("a", "b"))
    grow.call("q/0", None, "a", 2, completion_ids=(7, 8), logprobs=(-1.0, -0.5), prompt_tokens=9, turn_reward=0.2)
    grow.call("q/1", "q/0", "b", 0, ok=False, present_fields=1, expected_fields=2, penalty=-1.0, observation_tokens=4)
    grow.end("q/1", 0.0, error="parse", fork="a")
    grow.end(None, None, error="tool")
    grow.chain("r/0", "abaab", 1.0)
    read = parse(dump_forest(grow.forest))
    assert read == grow.forest
    assert [call.invocation for call in read.calls.values() if call.example == "r"] == [0, 0, 1, 2, 1]


def test_token_ids_start_at_zero_and_lists_may_be_empty():
    raw = change("calls.1.completion_ids", [0, 1])
    assert parse(raw).calls["c1"].completion_ids == (0, 1)
    raw["calls"][1] |= {"completion_ids": [], "observation_tokens": 0, "values": []}
    assert parse(raw).calls["c1"].completion_tokens == 0
    raw["calls"][1]["values"] = [1.0]
    with pytest.raises(DataError, match=r"got 1 numbers, expected 0, one per completion token$"):
        parse(raw)


def test_what_is_written_is_json_without_defaults():
    written = dump_forest(parse(small()))
    assert json.loads(json.dumps(written)) == written
    assert "null" not in json.dumps(written)
    assert "values" not in written["calls"][0] and written["calls"][1]["values"] == [0.1, 0.2, 0.3]
    assert written["calls"][1]["completion_ids"] == [5, 6] and "completion_tokens" not in written["calls"][1]


def test_teachers_go_with_calls():
    grow = Grow(("a",))
    grow.call("q/0", None, "a")
    grow.end("q/0", 1.0, teacher="gpt")
    written = dump_forest(grow.forest)
    assert written["calls"][0]["teacher"] == "gpt"
    read = parse(written)
    assert read.rollouts[0].teacher == "gpt" and read.calls["q/0"].teacher == "gpt"
    grow.call("q/1", None, "a", teacher="its own")
    grow.end("q/1", 0.0, teacher="the rollout's")
    grow.end(grow.call("q/2", None, "a"), 0.0)
    _, taught, untaught = dump_forest(grow.forest)["calls"]
    assert taught["teacher"] == "its own" and "teacher" not in untaught


def test_a_model_caused_failure_without_reward_is_credited_with_the_default_failure_score():
    raw = small()
    raw["rollouts"][0] |= {"reward": None, "error": "parse"}
    assert parse(raw).rollouts[0].reward == 0.0
    raw["rollouts"][0]["error"] = "tool"
    assert parse(raw).rollouts[0].reward is None


def change(path, value):
    """A copy of `small()` with one value replaced (or removed: value is ...)."""
    at = raw = small()
    *above, last = (int(part) if part.isdigit() else part for part in path.split("."))
    for part in above:
        at = at[part]
    if value is ...:
        del at[last]
    else:
        at[last] = value
    return raw


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("version", 2, "version: got 2, input should be 1"),
        ("version", ..., "version: missing"),
        ("extra", 1, "extra: got 1, extra inputs are not permitted"),
        ("modules", [], "modules: got [], list should have at least 1 item"),
        ("modules", ["a", "a"], "modules: got ['a', 'a'], expected a list of different names"),
        ("modules", ["a", 1], "modules.1: got 1, input should be a valid string"),
        ("calls", {}, "calls: got {}, input should be a valid list"),
        ("rollouts", None, "rollouts: got None, input should be a valid list"),
        ("calls.0", 3, "calls[0]: got 3, input should be a valid dictionary"),
        ("rollouts.0", "r", "rollouts[0]: got 'r', input should be a valid dictionary"),
        ("calls.0.penalti", 1, "call 'c0': penalti: got 1, extra inputs are not permitted"),
        ("rollouts.0.rewards", 1, "rollout 'r0': rewards: got 1, extra inputs"),
        ("calls.0.id", ..., "calls[0]: id: missing"),
        ("calls.1.module", "c", "call 'c1': module: got 'c', expected one of a, b"),
        ("calls.1.module", "a", "call 'c1': invocation: got 0, its path has 1 earlier calls of 'a'"),
        ("rollouts.0.fork", "x", "rollout 'r0': fork: got 'x', expected one of a, b"),
        ("rollouts.0.error", "prase", "rollout 'r0': error: got 'prase', expected one of engine, judge"),
        ("calls.1.parent", "c9", "call 'c1': parent: got 'c9', which is no call"),
        ("calls.0.parent", "c1", "call 'c0': parent: a cycle (c0 -> c1)"),
        ("calls.0.parent", "c0", "call 'c0': parent: a cycle (c0)"),
        ("rollouts.0.leaf", "c7", "rollout 'r0': leaf: got 'c7', which is no call"),
        ("rollouts.0.leaf", None, "rollout 'r0': leaf: got null without an error"),
        ("calls.1.example", "p", "call 'c1': example: got 'p', its parent has 'q'"),
        ("rollouts.0.example", "p", "rollout 'r0': example: got 'p', its leaf has 'q'"),
        ("calls.1.invocation", 1, "call 'c1': invocation: got 1, its path has 0 earlier calls"),
        ("calls.0.turn", -1, "call 'c0': turn: got -1, input should be greater than or equal to 0"),
        ("calls.0.turn", True, "call 'c0': turn: got True"),
        ("calls.0.completion_tokens", ..., "call 'c0': expected completion_tokens or"),
        ("calls.1.completion_tokens", 3, "completion_tokens: got 3, completion_ids has 2"),
        ("calls.1.completion_ids", ["x"], "call 'c1': completion_ids.0: got 'x', input should be a valid integer"),
        ("calls.1.completion_ids", [0, -1], "completion_ids.1: got -1, input should be greater"),
        ("calls.1.values", [1.0], "call 'c1': values: got 1 numbers, expected 2, one per"),
        ("calls.1.values", [1.0] * 5, "got 5 numbers, expected 2, one per completion token (or 3 with observation"),
        ("calls.0.logprobs", [1.0] * 4, "call 'c0': logprobs: got 4 numbers, expected 3"),
        ("calls.1.values", ["x", 1], "call 'c1': values.0: got 'x', input should be a valid"),
        ("calls.1.values", [float("nan"), 1], "call 'c1': values.0: got nan, expected a finite"),
        ("calls.1.values", [-1e200, 1], "call 'c1': values.0: got -1e+200, expected a finite number"),
        ("rollouts.0.reward", float("nan"), "rollout 'r0': reward: got nan, expected a finite"),
        ("rollouts.0.reward", 10**400, "rollout 'r0': reward: got 1000"),
        ("rollouts.0.reward", 1e200, "got 1e+200, expected a finite number, of at most 1e+100 in size"),
        ("rollouts.0.reward", "1", "rollout 'r0': reward: got '1'"),
        ("calls.0.completion_tokens", 10**12, "got 1000000000000, input should be less than or equal to 10000000"),
        ("rollouts.0.error", "tool", "reward: got 1 with error 'tool', which is never credited; expected null"),
        ("calls.0.penalty", float("-inf"), "call 'c0': penalty: got -inf"),
        ("calls.1.turn_reward", 0.1, "call 'c1': turn_reward: got a number on the"),
        ("calls.0.present_fields", 2, "call 'c0': present_fields: got 2 of 0 expected_fields"),
        ("calls.0.example", "", "call 'c0': example: got '', expected a text that is not empty"),
        ("calls.0.example", None, "call 'c0': example: got None"),
        ("calls.0.ok", 1, "call 'c0': ok: got 1, input should be a valid boolean"),
        ("calls.1.id", "c0", "call 'c0': this id occurs twice"),
        ("calls.1.parent", 0, "call 'c1': parent: got 0, input should be a valid string"),
    ],
)
def test_malformed_files_are_refused_with_file_and_record(path, value, message):
    with pytest.raises(DataError) as caught:
        parse(change(path, value))
    assert any(message in problem for problem in caught.value.problems), caught.value.problems
    assert all(problem.startswith("f.json: ") for problem in caught.value.problems)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", r"f\.json: got \[\], input should be a valid dictionary"),
        ('{"version": 1,\n "modules": }', r"f\.json: not JSON \(Expecting value: line 2 "),
        ("[" * 100_000, "f.json: "),
    ],
)
def test_broken_text_is_refused(text, message):
    with pytest.raises(DataError, match=message):
        parse_forest(text, "f.json")


def test_the_largest_count_and_the_largest_number_are_read():
    raw = change("calls.0.prompt_tokens", 10_000_000)
    raw["calls"][0]["penalty"], raw["rollouts"][0]["reward"] = -1e100, 1e100
    forest = parse(raw)
    assert forest.calls["c0"].prompt_tokens == 10_000_000
    assert (forest.calls["c0"].penalty, forest.rollouts[0].reward) == (-1e100, 1e100)
    raw["calls"][0] |= {"prompt_tokens": 10_000_001, "penalty": -1.1e100}
    with pytest.raises(DataError) as caught:
        parse(raw)
    assert [problem.split(",")[0] for problem in caught.value.problems] == [
        "f.json: call 'c0': prompt_tokens: got 10000001",
        "f.json: call 'c0': penalty: got -1.1e+100",
    ]


def test_problems_of_several_records_are_told_each():
    raw = small()
    raw["calls"] = [raw["calls"][0] | {"module": "c"}, raw["calls"][0]]
    with pytest.raises(DataError) as caught:
        parse(raw)
    assert "f.json: call 'c0': this id occurs twice" in caught.value.problems and len(caught.value.problems) == 2
    raw["calls"] = [small()["calls"][0] | {"id": name, "parent": "c00"} for name in ("c0", "c1")]
    with pytest.raises(DataError) as caught:
        parse(raw)
    assert caught.value.problems == [
        f"f.json: call '{name}': parent: got 'c00', which is no call" for name in ("c0", "c1")
    ]


def test_an_unknown_error_is_one_problem_whatever_its_reward():
    with pytest.raises(DataError) as caught:
        parse(change("rollouts.0.error", "prase"))
    (problem,) = caught.value.problems
    assert problem.endswith("; did you mean 'parse'?")


def test_texts_and_prompts_are_left_out_of_the_form():
    forest = parse(small())
    call = replace(forest.calls["c0"], text="hello", prompt_text="secret", prompt_ids=(1, 2))
    written = json.dumps(dump_forest(replace(forest, calls={**forest.calls, "c0": call})))
    assert "hello" not in written and "secret" not in written


def chain(count, parent):
    """The form of `count` calls of one module below each other; `parent` names the parent of a call by its number."""
    calls = [
        {"id": f"c{n}", "example": "q", "parent": parent(n), "module": "a", "invocation": n, "completion_tokens": 1}
        for n in range(count)
    ]
    return {"version": 1, "modules": ["a"], "calls": calls, "rollouts": []}


def test_a_long_chain_is_read_without_comparing_its_calls(monkeypatch):
    def compared(self, other):
        raise AssertionError("calls are compared, which is quadratic in the length of a chain")

    monkeypatch.setattr(Call, "__eq__", compared)
    raw = chain(3000, lambda n: f"c{n + 1}" if n < 2999 else None)  # children stand before their parents
    for call in raw["calls"]:
        call["invocation"] = 2999 - call["invocation"]
    assert list(parse(raw).calls)[:2] == ["c2999", "c2998"]
    with pytest.raises(DataError, match=r"a cycle \(c0 -> c1 -> .* -> c9\)$"):
        parse(chain(3000, lambda n: f"c{(n + 1) % 3000}"))


def test_half_of_a_letter_in_an_id_is_a_key_like_any_other():
    """JSON can hold half of a UTF-16 pair, and algorithms draw by keys that ids are parts of."""
    assert len({rng.digest("\ud800"), rng.digest("\ud801"), rng.digest("?")}) == 3
