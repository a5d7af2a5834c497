"""The journal reads back exactly what was written, whatever a step holds."""

import dataclasses
import gzip
import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mmrl.credit.entries import Entry
from mmrl.errors import CheckpointError
from mmrl.records import Call, Forest, Rollout
from mmrl.store.journal import JournalWriter, decode_step, encode_step, read_step, write_step
from mmrl.store.rundir import RunDir
from tests.helpers.forests import Grow

floats = st.floats(allow_nan=False)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | floats | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)
objects = st.dictionaries(st.text(), json_values, max_size=3)
ids = st.lists(st.integers(0, 200_000), max_size=6).map(tuple)
OF_TYPE = {
    "int": st.integers(0, 9),
    "float": floats,
    "bool": st.booleans(),
    "str": st.text(),
    "Any": json_values,
    "tuple[int, ...]": ids,
    "tuple[float, ...]": st.lists(floats, max_size=6).map(tuple),
    "Mapping[str, Any]": objects,
    "Mapping[str, float]": st.dictionaries(st.text(), floats, max_size=2),
    "Mapping[str, str]": st.dictionaries(st.text(), st.text(), max_size=2),
}


def records(kind):
    """Records of `kind` whose fields hold anything of their type."""
    types = {field.name: field.type.partition(" | None") for field in dataclasses.fields(kind)}
    return st.builds(
        kind, **{name: st.none() | OF_TYPE[of] if none else OF_TYPE[of] for name, (of, none, _) in types.items()}
    )


CALLS, ROLLOUTS = records(Call), records(Rollout)


@st.composite
def forests(draw):
    calls = {}
    for number in range(draw(st.integers(0, 4))):
        name, parent = f"q/{number}#0", draw(st.sampled_from([None, *calls]))
        calls[name] = dataclasses.replace(draw(CALLS), id=name, parent=parent)
    leaves = [None, *calls]
    rollouts = tuple(dataclasses.replace(draw(ROLLOUTS), id=f"q/{n}", leaf=leaf) for n, leaf in enumerate(leaves))
    return Forest(
        calls=calls, rollouts=rollouts, modules=("a", "b"), step=draw(st.integers(0, 999)), meta=draw(objects)
    )


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(forests(), st.lists(objects, max_size=3))
def test_any_forest_survives_json(forest, extra):
    entries = [{"call": "c", "advantages": (0.1, -2.0), "parts": part} for part in extra]
    text = "\n".join(json.dumps(line) for line in json.loads(json.dumps(encode_step(forest, entries), default=dict)))
    got, got_entries = decode_step([json.loads(line) for line in text.split("\n")])
    assert got == forest
    assert list(got.calls) == list(forest.calls)
    assert got_entries == entries


def small_forest(step=3):
    grow = Grow(("answerer",), step)
    for number in range(3):
        fields = {"prompt_ids": tuple(range(50)), "prompt_text": "who? \ud800", "completion_ids": (7, number)}
        leaf = grow.call(f"q/{number}#0", None, "answerer", 2, logprobs=(-0.1, -1 / 3), text="Líndā", **fields)
        grow.end(leaf, number / 3)
    return grow.forest


@pytest.fixture
def run(tmp_path):
    with RunDir.create(tmp_path / "run", {"seed": 1}, ["mmrl"]) as run:
        yield run


ENTRY: dict[str, Any] = {"call": "q/0#0", "reward": 0.1 + 0.2, "advantages": (1.5, 1.5), "weights": (0.25, 0.25)}


@pytest.mark.parametrize("entry", [ENTRY, Entry(**ENTRY)], ids=["mapping", "dataclass"])
def test_a_step_is_written_and_read(run, entry):
    write_step(run, small_forest(), [entry])
    assert read_step(run, 3) == (small_forest(), [ENTRY])
    assert run.journal_steps() == [3]


def test_a_journal_has_the_name_that_earlier_ones_have():
    rollout = Rollout(id="q/0", example="q", leaf=None, reward=0.0, counterfactual_calls=3)
    line = encode_step(Forest(calls={}, rollouts=(rollout,), modules=("a",)), ())[1]
    assert line["calls_again"] == 3 and "counterfactual_calls" not in line


def test_a_shared_prompt_is_stored_once(run):
    write_step(run, small_forest())
    lines = gzip.decompress(run.journal_path(3).read_bytes()).decode().splitlines()
    assert [json.loads(line)["line"] for line in lines].count("prompt") == 1


def test_equal_steps_give_equal_files_and_no_leftovers(run):
    write_step(run, small_forest())
    first = run.journal_path(3).read_bytes()
    write_step(run, small_forest())
    assert run.journal_path(3).read_bytes() == first
    assert first[4:8] == bytes(4)  # gzip's time stamp
    assert [path.name for path in run.journal_path(3).parent.iterdir()] == ["step-000003.jsonl.gz"]


def test_a_missing_step_names_those_that_exist(run):
    with pytest.raises(CheckpointError, match="no journal of step 9; the run has no journals yet"):
        read_step(run, 9)
    write_step(run, small_forest())
    with pytest.raises(CheckpointError, match="journals exist for steps 3 to 3"):
        read_step(run, 9)


def with_head(lines, **changed):
    """A journal whose forest has other fields; None: without it."""
    head = {**json.loads(lines[0]), **changed}
    first = json.dumps({name: value for name, value in head.items() if value is not None}).encode() + b"\n"
    return gzip.compress(b"".join([first, *lines[1:]]))


DAMAGE = {
    "cut": lambda data, lines: data[:-20],
    "zeroed": lambda data, lines: data[:20] + bytes(len(data) - 20),
    "unknown": lambda data, lines: gzip.compress(b"".join(lines) + b'{"line":"other"}\n'),
    "headless": lambda data, lines: gzip.compress(b"".join(lines[1:])),
    "modules": lambda data, lines: with_head(lines, modules=3),
    "no meta": lambda data, lines: with_head(lines, meta=None),
    "meta": lambda data, lines: with_head(lines, meta=[1]),
    "step": lambda data, lines: with_head(lines, step="x"),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_journal_is_one_clear_error(run, damage):
    write_step(run, small_forest())
    path = run.journal_path(3)
    data = path.read_bytes()
    lines = gzip.decompress(data).splitlines(keepends=True)
    path.write_bytes(damage(data, lines))
    with pytest.raises(CheckpointError, match="damaged journal"):
        read_step(run, 3)
    path.write_bytes(with_head(lines, of_a_later_version=1))
    assert read_step(run, 3)[0] == small_forest()


def test_a_writer_has_written_when_it_was_waited_for(tmp_path):
    run = RunDir.create(tmp_path / "run", {}, [])
    writer = JournalWriter()
    for step in (1, 2):
        writer.write(run, dataclasses.replace(small_forest(), step=step), [])
    writer.wait()
    assert run.journal_steps(None) == [1, 2]
    assert read_step(run, 2)[0] == dataclasses.replace(small_forest(), step=2)
    writer.close()
    writer.close()
    run.close()


def test_what_writing_raised_is_raised_to_whoever_waits(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("mmrl.store.journal.atomic_write", full)
    with RunDir.create(tmp_path / "run", {}, []) as run:
        writer = JournalWriter()
        writer.write(run, small_forest(), [])
        with pytest.raises(OSError, match="No space left"):
            writer.wait()
        writer.wait()  # it is said once
        writer.close()
