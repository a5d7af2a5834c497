"""Bad input of every kind: some of the suite, many of `make fuzz`."""

from __future__ import annotations

import os
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmrl.cli.arguments import section_of
from mmrl.commands.plan import PlanArguments
from mmrl.config import RlRunConfig, validate
from mmrl.errors import ConfigError, DataError
from mmrl.plan.workload import parse_lengths
from mmrl.system.files import user_path
from mmrl.tasks.data.rows import Source
from tests.fuzz import targets
from tests.fuzz.targets import TARGETS, outcome

MANY = int(os.environ.get("FUZZ", "0"))
"""Inputs of each target; 0: the few of the suite (`make fuzz` has many)."""


@pytest.fixture(scope="module", autouse=True)
def _composed() -> None:
    """Composing draws random numbers, which no strategy of hypothesis may do."""
    targets.configs()


@pytest.mark.parametrize("name", TARGETS)
@settings(max_examples=MANY or 60)
@given(data=st.data())
def test_bad_input_is_refused_in_words(name: str, data: st.DataObject) -> None:
    inputs, run = TARGETS[name]
    assert outcome(run, data.draw(inputs)) is None


def raises(error: Exception) -> str | None:
    raise error


def test_only_named_errors_are_right() -> None:
    assert outcome(raises, DataError("line 3: no text")) is None
    assert outcome(raises, ConfigError("")) == "an error without words"
    assert str(outcome(raises, KeyError("id"))).startswith("KeyError at test_fuzz.py:")


def test_slow_input_is_found() -> None:
    assert outcome(time.sleep, 30, limit_s=0.05) == "took longer than 0.05 s"


# -- what was found ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", ["a:²/3", f"a:{'9' * 5000}/3", "a:1/2x³"])
def test_lengths_that_int_refuses_are_refused_in_words(spec: str) -> None:
    with pytest.raises(ConfigError, match="lengths: got"):
        parse_lengths(spec)


def test_a_number_of_examples_that_int_refuses_is_refused_in_words() -> None:
    for value in ("²", "9" * 5000):
        with pytest.raises(ConfigError, match="dry: got"):
            section_of(PlanArguments, {"dry": value})


def test_the_home_of_nobody_is_a_path_like_any_other() -> None:
    assert str(user_path("~nobody-of-this-name/x")) == "~nobody-of-this-name/x"
    with pytest.raises(DataError, match="no such file"):
        _ = Source("task.data.train", "~nobody-of-this-name/x.jsonl").files("train")


def test_a_path_that_no_file_can_have_is_refused_in_words() -> None:
    for spec in ("a" * 300, "b/" * 3000):
        with pytest.raises(ConfigError, match=f"got a path of {len(spec)} characters"):
            _ = Source("task.data.train", spec).files("train")
    with pytest.raises(ConfigError, match="got a path with a NUL character"):
        _ = Source("task.data.train", "~\0").files("train")


@pytest.mark.parametrize("name", ["a\ud800", "a\0", "\\\0"])
def test_a_config_with_a_text_that_no_file_can_hold_is_refused_by_its_key(name: str) -> None:
    raw = dict(targets.configs()[0])
    raw["run"] = {**raw["run"], "name": name}
    with pytest.raises(ConfigError, match=r"run\.name: got a text with half a character or a NUL"):
        validate(RlRunConfig, raw)
