"""scripts/papers/sets: the papers' facts, stated once each, and what a wrong file is told."""

import functools
import gzip
import json
import os
import re
from operator import attrgetter
from pathlib import Path
from statistics import fmean

import pytest
import yaml

from mmrl.cli.configs import set_config
from mmrl.config.validate import as_tuples, explain
from mmrl.sets.words import set_names
from scripts.papers.spec import SETS, Cell, Table, read_table, table_words

ROOT = Path(__file__).parents[3]
PAPERS = Path(os.environ.get("MMRL_PAPERS", ROOT.parent / "shared" / "papers"))
"""The papers' texts, which are not part of this repository."""
TABLES = set_names([SETS])
WORDS = Path(__file__).parent / "words.json.gz"
FACTS = yaml.safe_load((Path(__file__).parent / "facts.yaml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("place", FACTS)
def test_the_papers_facts(place):
    name, row, column, command = place.split(" | ")
    spec = read_table(name)
    words = table_words(spec, row, column, "paper", command)
    if command == "eval" and not spec.rows[row].policy:
        words.append("policy=RUN")
    config = set_config(command, words, None)
    for key, expected in FACTS[place].items():
        assert attrgetter(key)(config) == as_tuples(expected), key


def test_every_reported_value_is_there():
    specs = [read_table(name) for name in TABLES]
    assert sum(len(spec.reported(row)) for spec in specs for row in spec.rows) == 370
    assert sum(std is not None for spec in specs for row in spec.rows for _, std in spec.reported(row).values()) == 49
    first = read_table("mhgpo-table1").reported("MHGPO-FoF(os)")
    assert first[Cell("2Wiki", "EM")] == (32.801, None) and first["OOD"] == (26.109, None)
    turns = read_table("turn-table2").reported("PPO")
    assert turns[Cell("Musique", "EM")] == (0.199, None) and turns[Cell("NQ", "format")] == (0.909, None)


@pytest.mark.parametrize("name", TABLES)
def test_printed_averages_and_claims_are_what_the_numbers_say(name):
    """One that is not was copied wrong."""
    spec = read_table(name)
    reported = {row: spec.reported(row) for row in spec.rows if spec.rows[row].values}
    values = {row: {place: value for place, (value, _) in places.items()} for row, places in reported.items()}
    # A paper averages before it rounds: half a digit from the numbers, half from the average.
    room = 1.5 * 10**-spec.source.decimals
    for row, printed in values.items():
        for mean, cells in spec.means.items():
            inner = fmean(printed[cell] for cell in spec.selected(cells))
            assert printed[mean] == pytest.approx(inner, abs=room), (row, mean)
    for claim in spec.claims:
        if claim.more in values and claim.than in values:
            more, than = (fmean(values[row][c] for c in spec.selected(claim.cells)) for row in (claim.more, claim.than))
            assert more > than, claim


@pytest.mark.skipif(not PAPERS.is_dir(), reason="the papers' texts are not here (MMRL_PAPERS=FOLDER)")
def test_every_reported_value_stands_in_the_papers():
    texts = [line for path in sorted(PAPERS.glob("*.txt")) for line in path.read_text(errors="replace").splitlines()]
    number = r"(?<![\w.])\d+\.?\d*"
    lines = [[float(text) for text in re.findall(number, re.sub(r"<[^>]*>", " ", line))] for line in texts]
    counted = 0
    for name in TABLES:
        spec = read_table(name)
        for row in spec.rows:
            for numbers in printed(spec, row):
                counted += len(numbers)
                assert any(holds(line, numbers) for line in lines if len(line) >= len(numbers)), (name, row)
    assert counted == 370 + 49


def printed(spec, row):
    """A row's numbers as they stand side by side in a line; of scores printed apart, in one line each."""
    values = spec.reported(row)
    blocks = [[*spec.cells, *spec.means]]
    if spec.order == "scores":
        blocks = [
            [*(c for c in spec.cells if c.score == score), *(m for m, of in spec.means.items() if of == (score,))]
            for score in spec.scores
        ]
    for block in blocks if values else ():
        yield [number for place in block for number in values[place] if number is not None]


def holds(line, numbers):
    return any(line[start : start + len(numbers)] == numbers for start in range(len(line) - len(numbers) + 1))


@pytest.mark.parametrize("name", TABLES)
def test_every_config_of_a_table_composes(name):
    table = read_table(name)
    composed = set()
    # At the first scale, the paper's, every pair; at others each row, each column, and what has words for itself.
    of_each = {(pair[place], place): pair for place in (0, 1) for pair in table.pairs}.values()
    few = dict.fromkeys([*of_each, *(pair for pair in table.pairs if pair[0] in table.columns[pair[1]].cells)])
    for scale in table.scales:
        for row, column in table.pairs if scale == table.scales[0] else few:
            for command in ("train", "eval"):
                words = table_words(table, row, column, scale, command)
                if (command == "train" and table.rows[row].policy) or tuple(words) in composed:
                    continue
                composed.add(tuple(words))
                config = set_config(command, [*words, *(["policy=tiny"] if command == "eval" else [])], None)
                if scale == "mini":
                    assert config.task.data.dev == "mini" and config.hardware.name == "cpu"
                    assert config.model.path.startswith("tiny")
                    assert config.eval.items == (240 if command == "eval" else 24)


def test_the_words_of_published_runs_stay_as_they_are():
    """Frozen, in their order, by set, scale, row, column and command: a change of them is another experiment."""
    for place, words in json.loads(gzip.decompress(WORDS.read_bytes())).items():
        assert words_at(place) == words, f"{place}; if it is meant: python -m tests.scripts.papers.test_spec"


READ = functools.cache(read_table)


def words_at(place):
    name, scale, row, column, command = place.split("|")
    return table_words(READ(name), row, column, scale, command)


SPEC = {
    "source": {"arxiv": "0000.00000", "at": "Table 1", "decimals": 1},
    "shows": "x",
    "seeds": [0],
    "columns": {"A": {}, "B": {}},
    "scores": {"EM": "em", "F1": "f1"},
    "means": {"AVG": ["F1"]},
    "rows": {"one": {"values": [1.0, 2.0, 3.0, 4.0, 3.0]}, "two": {"values": [1.0, 1.0, 1.0, 1.0, 1.0]}},
    "agree": 1,
}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rows": {"one": {"values": [1.0, 2.0]}}}, "rows.one.values: got 2 numbers, expected 5 or none"),
        ({"rows": {"one": {"vlaues": []}}}, "rows.one.vlaues: unknown key; did you mean 'values'?"),
        ({"claims": [{"more": "one", "than": "tow"}]}, "claims.1.than: got 'tow'"),
        ({"claims": [{"more": "one", "than": "two", "cells": ["EN"]}]}, "claims.1.cells: got 'EN'"),
        ({"means": {"AVG": ["F2"]}}, "means.AVG: got 'F2'"),
        ({"means": {"A": ["F1"]}}, "columns, scores, means: A is the name of two of them"),
        ({"set": ["task"]}, "set: got task, expected KEY=VALUE"),
        ({"rows": {"one": {"from": "tow"}, "two": {}}}, "rows.one.from: got 'tow'"),
        (
            {"rows": {"one": {"from": "two"}, "two": {"from": "one"}}},
            "rows.one.from: one starts from two starts from one",
        ),
        (
            {"rows": {"one": {"from": "two"}, "two": {"policy": "tiny"}}},
            "rows.one.from: only what is trained starts from a row",
        ),
        ({"columns": {"A": {"rows": ["tow"]}, "B": {}}}, "columns.A.rows: got 'tow'"),
        ({"columns": {"A": {"cells": {"tow": ["x=1"]}}, "B": {}}}, "columns.A.cells: got 'tow'"),
        ({"scores": {}, "means": {}}, "scores: got {}, expected"),
    ],
)
def test_a_wrong_table_is_refused_in_words(changes, said):
    from pydantic import ValidationError

    with pytest.raises(ValidationError) as caught:
        Table.model_validate(as_tuples({**SPEC, **changes}))
    problems = explain(Table, caught.value)
    assert any(problem.startswith(said) for problem in problems), problems


def test_a_right_one_is_not(tmp_path):
    spec = Table.model_validate(as_tuples(SPEC))
    assert spec.reported("one")["AVG"] == (3.0, None) and spec.selected(["AVG"]) == [Cell("A", "F1"), Cell("B", "F1")]
    assert spec.label(Cell("A", "F1")) == "A F1"


def test_every_table_stands_in_the_docs():
    text = (ROOT / "docs" / "tables" / "index.md").read_text(encoding="utf-8")
    families = [name.rpartition("-")[2] for name in TABLES]
    assert [name for name in families if f"-{name}`" not in text] == []


if __name__ == "__main__":  # writes the words of the same places again
    now = {place: words_at(place) for place in json.loads(gzip.decompress(WORDS.read_bytes()))}
    WORDS.write_bytes(gzip.compress(json.dumps(now, indent=0).encode(), mtime=0))
