"""docs/coming-from.md and README.md: files and commands as printed are accepted, and run; names of both sides exist."""

from __future__ import annotations

import inspect
import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import fields
from types import SimpleNamespace

import pandas as pd
import pytest
from dspy.teleprompt.grpo import GRPO

from mmrl.api import Run
from mmrl.cli import main
from tests.helpers import TOP
from tests.helpers.lines import refused
from tests.scripts.test_first_hour import blocks, commands

PAGE = (TOP / "docs" / "coming-from.md").read_text(encoding="utf-8")
README = (TOP / "README.md").read_text(encoding="utf-8")
ALLOWED = {"AsyncGRPOTrainer", "num_training_gpus", "num_inference_gpus", "teacher", "compile", "checkpoint"}
"""Left of a table, but no option of the two trainers: a class, arguments of `compile`, options of Arbor's alone."""
TYPED = [command for kind, text in blocks(PAGE) if kind == "console" for command, _ in commands(text)]


@pytest.fixture
def page(tmp_path, monkeypatch, random_model):
    """The page's files in a folder of their own, with data as it describes them."""
    rows = [
        {"prompt": [{"role": "user", "content": f"What is {a} + {b}?"}], "answer": str(a + b)}
        for a in range(4)
        for b in range(2)
    ]
    of_verl = [
        {
            "data_source": "sums",
            "prompt": row["prompt"],
            "reward_model": {"style": "rule", "ground_truth": row["answer"]},
            "extra_info": {"index": index},
        }
        for index, row in enumerate(rows)
    ]
    for name, part in {"train": slice(6), "dev": slice(6, 8)}.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[part]))
    for name, part in {"train": slice(6), "test": slice(6, 8)}.items():
        pd.DataFrame(of_verl[part]).to_parquet(tmp_path / f"{name}.parquet")
    (tmp_path / "verl_reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return {'score': float(solution_str.strip() == ground_truth), 'length': len(solution_str)}\n"
    )
    for kind, text in blocks(PAGE):
        if kind in ("python", "yaml"):
            file = tmp_path / re.search(r"^# (\S+\.(py|yaml))$", text, re.M)[1]
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text.replace("MODEL", random_model))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_every_command_is_accepted_before_anything_loads(page):
    lines = [shlex.split(line)[2:] for line in TYPED if line.startswith("mmrl train ")]
    assert len(lines) == 3
    for words in lines:
        assert refused(*words) == []
    assert refused(*lines[0], "task.metric_weights=[1]") != []


@pytest.mark.slow
@pytest.mark.parametrize("line", TYPED)
def test_every_command_runs(page, line):
    if line.startswith("python "):
        file = page / line.split()[1]
        file.write_text(file.read_text().replace('"train.steps": 100', '"train.steps": 1, "task.max_tokens": 8'))
        done = subprocess.run(
            [sys.executable, file.name], env=os.environ | {"PYTHONPATH": str(TOP)}, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return
    short = ("train.steps=1", "task.max_tokens=8", "hardware=cpu", "run.dir=out")
    assert main([*shlex.split(line)[1:], *short]) == 0
    reported = set(Run(page / "out").metrics.columns)
    metrics = re.search(r"task\.metric=\[?([^\] ]+)", line)[1].split(",")
    names = {metric.rpartition(":")[2] for metric in metrics} if len(metrics) > 1 else {"length"}
    assert {f"task/{name}" for name in {"score", *names}} <= reported


def rows(heading):
    """Names in the left and the right column of a section's table."""
    section = PAGE.split(f"## {heading}")[1].split("\n## ")[0]
    table = [line for line in section.splitlines() if line.startswith("| ")][2:]
    return [[re.findall(r"`([^`]+)`", cell) for cell in line.strip("| ").split(" | ")] for line in table]


def test_names_of_the_other_side_exist():
    from trl import GRPOConfig, GRPOTrainer

    known = {field.name for field in fields(GRPOConfig)} | {*inspect.signature(GRPOTrainer.__init__).parameters}
    of_dspy = {*inspect.signature(GRPO.__init__).parameters}
    for heading, names in {"TRL": known, "DSPy": of_dspy}.items():
        for left, _ in rows(heading):
            for name in filter(lambda name: not name.startswith("…"), left):
                word = re.match(r"\w+", name)[0]
                assert word in names or word in ALLOWED, name


def test_every_key_that_the_tables_name_is_one_of_ours():
    keys = re.compile(r"\| `((?:algo|task|train|eval|run|model|engine|hardware)\.[\w.]+)`")
    known = {key for page in (TOP / "docs").glob("keys-*.md") for key in keys.findall(page.read_text(encoding="utf-8"))}
    named = {
        word.partition("=")[0]
        for heading in ("TRL", "DSPy", "verl", "verifiers")
        for _, right in rows(heading)
        for name in right
        for word in name.split()
        if re.match(r"(algo|task|train|eval|run|model|engine|hardware)\.", word)
    }
    assert len(named) > 40 and named <= known, named - known


GENERATOR = {
    "create_dataset": lambda name, size, seed, **options: [{"question": f"{seed + i}?"} for i in range(size)],
    "get_score_answer_fn": lambda name: lambda answer, entry: 1.0,
}


def test_the_second_command_of_a_newcomer_is_accepted(monkeypatch, random_model):
    assert "cd docs/programs\nmmrl train experiment=sums" in README
    monkeypatch.setitem(sys.modules, "reasoning_gym", SimpleNamespace(**GENERATOR))
    monkeypatch.chdir(TOP / "docs" / "programs")
    assert refused("experiment=sums", f"model.path={random_model}") == []
    monkeypatch.delitem(sys.modules, "puzzles")


def typed_in_the_readme():
    """Every command of mmrl's that the README prints, its lines joined."""
    printed = re.findall(r"^(mmrl .*)$|`(mmrl [^`]+)`", README.replace("\\\n", " "), re.M)
    return sorted({re.sub(r"\s+#.*", "", line or quoted) for line, quoted in printed})


@pytest.mark.parametrize("line", typed_in_the_readme())
def test_a_command_of_the_readme_has_keys_that_its_help_names(line, capsys):
    command, *words = shlex.split(line)[1:]
    if command == "--help":
        return
    assert main([command, "--help"]) == 0
    helped = capsys.readouterr().out
    for key in (word.partition("=")[0] for word in words if "=" in word):
        assert f"{key.partition('.')[0]}" in helped, key


def test_the_readmes_runs_are_accepted(page, random_model):
    (page / "mine.py").write_text(next(text for kind, text in blocks(README) if text.startswith("# mine.py")))
    for name in ("train", "dev"):
        (page / f"{name}.jsonl").write_text("".join(f'{{"question": "{name} {n}", "gold": "a"}}\n' for n in range(8)))
    lines = [line for line in typed_in_the_readme() if line.startswith("mmrl train ")]
    trained = [line for line in lines if "experiment=" not in line and "RUN_DIR" not in line]
    assert len(trained) == 2
    for line in trained:
        assert refused(*shlex.split(line.replace("FOLDER_OR_HUB_ID", random_model))[2:]) == [], line
