"""A section of the config that an algorithm does not take."""

from typing import Any, Literal

import pytest

from mmrl.algorithms import ALGORITHMS, problems
from mmrl.algorithms.base import Algorithm
from mmrl.config import AlgoConfig
from mmrl.credit.entries import Credit
from mmrl.errors import ConfigError


@pytest.mark.parametrize(
    "algorithm, takes",
    [
        ("mhgpo_rr", "MhgpoRrConfig"),
        ("mhgpo_fof", "MhgpoConfig"),
        ("ppo", "TurnCriticConfig"),
        ("grpo", "GroupConfig"),
        ("mt_grpo", "TurnGroupConfig"),
    ],
)
def test_an_algorithm_with_the_section_of_another_is_refused(algorithm, takes, monkeypatch):
    class Section(AlgoConfig):
        """As of a plugin that derives it from the wrong one."""

        name: Literal["mine"] = "mine"

    kind: Any = type(ALGORITHMS[algorithm])

    class Mine(kind):
        def __init__(self):
            pass

    monkeypatch.setitem(ALGORITHMS, "mine", Mine())
    with pytest.raises(ConfigError, match=f"algo: the section of 'mine' is no {takes}, which its algorithm takes"):
        problems(Section(), ("a",), ("outcome",))


def test_an_algorithm_that_names_no_section_takes_any(monkeypatch):
    class Section(AlgoConfig):
        name: Literal["mine"] = "mine"

    class Mine(Algorithm[Any]):
        name = "mine"

        def credit(self, forest, algo, seed, minibatch=None):
            return Credit(algo=self.name, entries=())

    monkeypatch.setitem(ALGORITHMS, "mine", Mine())
    assert problems(Section(), ("a",), ("outcome",)) == []


def test_an_algorithm_without_a_plan_needs_a_group_size():
    class Plain(Algorithm):
        name = "plain"

        def credit(self, forest, algo, seed, minibatch=None):
            return Credit(algo=self.name, entries=())

    class Section(AlgoConfig):
        name: Literal["plain"] = "plain"

    with pytest.raises(ConfigError, match="algo: 'plain' has no group_size, and its algorithm no plan of its own"):
        Plain().plan(Section(), ("a",), (0, 0, "q"))
