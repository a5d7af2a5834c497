"""No option is silent: a changed value of any leaf of any section changes what comes out of mmrl, or is refused."""

from __future__ import annotations

from collections import Counter
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest

from mmrl.cli.configs import eval_configs, train_configs
from mmrl.cli.overrides import read_line
from mmrl.errors import ConfigError
from mmrl.run.check import check_all
from tests.config.effects import EFFECTS, Acts, Refused, all_leaves, same_code

for module in ("algo", "training", "command", "engine", "task", "endpoints", "retriever", "other_stages"):
    import_module(f"tests.config.effects.{module}")

ACTING = {leaf: effect for leaf, effect in EFFECTS.items() if isinstance(effect, Acts)}
REFUSED = {leaf: effect for leaf, effect in EFFECTS.items() if isinstance(effect, Refused)}
OBSERVED = {same_code(leaf): leaf for leaf in reversed(ACTING)}
"""Of leaves whose effect is the same code, the first one."""
FIRST = {id(effect): leaf for leaf, effect in reversed(ACTING.items())}
"""Each entry's first section, where its observation is made twice."""


def test_every_leaf_has_an_entry_and_every_entry_a_leaf() -> None:
    leaves = all_leaves()
    assert [leaf for leaf, count in Counter(leaves).items() if count > 1] == []
    assert [leaf for leaf in leaves if leaf not in EFFECTS] == [], "an option without a test of what it does"
    assert [leaf for leaf in EFFECTS if leaf not in set(leaves)] == []


@pytest.mark.parametrize("leaf", sorted(OBSERVED.values()), ids="-".join)
def test_a_changed_value_changes_what_comes_out(leaf: tuple[str, str], tmp_path: Path) -> None:
    (section, key), effect = leaf, ACTING[leaf]
    name = section.partition(".")[2] or section

    def seen(value: object, folder: str) -> object:
        (tmp_path / folder).mkdir()
        return effect.observe(name, {**effect.also, key: value}, tmp_path / folder)

    one, other = (seen(value, f"{number}") for number, value in enumerate(effect.values))
    assert one != other
    if FIRST[id(effect)] == leaf:
        assert seen(effect.values[0], "again") == one, "what differs without a change proves nothing"


@cache
def problems_of(section: str, part: str) -> list[str]:
    """What is said when all keys below a part of a section that are refused are typed at once."""
    group, _, name = section.partition(".")
    refused = [leaf for leaf in REFUSED if leaf[0] == section and leaf[1].partition(".")[0] == part]
    typed = list(dict.fromkeys(REFUSED[leaf].typed for leaf in refused))
    command = "eval" if section == "eval command" else "train"
    chosen = "algo=sft" if group == "supervised" else f"{group}={name}"
    start = ["policy=tiny"] if command == "eval" else [chosen] if name else []
    line = read_line([*start, *typed])
    try:
        check_all(eval_configs(line) if command == "eval" else train_configs(line), line.keys)
    except ConfigError as error:
        return list(error.problems)
    return []


@pytest.mark.parametrize("leaf", REFUSED, ids="-".join)
def test_what_has_no_effect_is_refused_when_it_is_typed(leaf: tuple[str, str]) -> None:
    (section, key), effect = leaf, REFUSED[leaf]
    problems = problems_of(section, key.partition(".")[0])
    assert [p for p in problems if p.startswith(effect.starts) and effect.says in p]
