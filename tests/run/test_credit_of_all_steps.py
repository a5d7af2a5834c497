"""`mmrl credit run=RUN`: the credit of all steps derived again, and beside it that of other algorithms."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest

from mmrl.cli import main
from mmrl.report.journal import read_step, write_step
from mmrl.report.rundir import RunDir
from tests.run.test_credit_of_runs import STEP, trained


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of two steps that sampled the same."""
    folder = tmp_path_factory.mktemp("run") / "run"
    trained(folder, "algo=mhgpo_is", "algo.group_size=3")
    directory = RunDir.read(folder)
    forest, entries = read_step(directory, STEP)
    write_step(directory, replace(forest, step=STEP + 1), entries)
    return folder


def credited(run, algo, output_of):
    """Call -> advantage × weight per token, out of what `mmrl credit` writes."""
    pushes = {}
    for entry in json.loads(output_of("credit", f"run={run}", f"step={STEP}", f"algo={algo}", "--json"))["calls"]:
        tokens = np.array(entry["advantages"]) * np.array(entry["weights"])
        pushes[entry["id"]] = pushes.get(entry["id"], 0) + tokens
    return {call: tokens for call, tokens in pushes.items() if np.any(tokens)}


def test_every_step_is_what_was_trained_on(run, capsys):
    assert main(["credit", f"run={run}"]) == 0
    shown = capsys.readouterr()
    assert "2 of 2 steps: the credit derived again equals what was trained on, to the bit" in shown.out
    assert [line.split()[0] for line in shown.out.splitlines() if line.endswith("yes")] == ["7", "8"]
    assert shown.err == ""


def test_another_algorithm_on_the_same_rollouts_by_hand(run, output_of):
    mine, other = (credited(run, algo, output_of) for algo in ("mhgpo_is", "grpo"))
    step, _ = json.loads(output_of("credit", f"run={run}", "algo=grpo", "--json"))
    (found,) = step["others"]
    both = sorted(mine.keys() & other.keys())
    assert 0 < len(both) < len(other) and step["pushed"] == len(mine)
    assert (found["algo"], found["pushed"], found["both"]) == ("grpo", len(other), len(both))
    same = [mine[call].sum() * other[call].sum() > 0 for call in both]
    assert found["same"] == pytest.approx(np.mean(same)) and 0 < found["same"] < 1
    tokens = [(mine.get(c, 0 * other.get(c, 0)), other.get(c, 0 * mine.get(c, 0))) for c in mine.keys() | other.keys()]
    a, b = (np.concatenate(side) for side in zip(*tokens, strict=True))
    assert found["cosine"] == pytest.approx(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


def test_the_runs_own_algorithm_is_compared_where_a_setting_of_it_is_changed(run, output_of):
    alone = json.loads(output_of("credit", f"run={run}", "algo=mhgpo_is", "--json"))
    assert [step["others"] for step in alone] == [[], []]
    for step in json.loads(output_of("credit", f"run={run}", "algo.eps=1.0", "--json")):
        (other,) = step["others"]
        assert step["problem"] == "" and other["same"] == 1 and other["both"] == step["pushed"]


def test_a_step_that_was_trained_otherwise_is_named(run, tmp_path, capsys):
    changed = shutil.copytree(run, tmp_path / "run")
    forest, entries = read_step(RunDir.read(changed), STEP + 1)
    entries[0] = {**entries[0], "advantages": [value + 1 for value in entries[0]["advantages"]]}
    write_step(RunDir.read(changed), forest, entries)
    assert main(["credit", f"run={changed}"]) == 1
    shown = capsys.readouterr()
    assert "1 of 2 steps" in shown.out
    assert shown.err.startswith(f"error: {changed}: step 8: 1 of {len(entries)} entries differ")
    assert shown.err.count("error") == 1
