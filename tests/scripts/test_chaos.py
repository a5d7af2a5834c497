"""The chaos campaign: what it compares, how it damages, where it strikes; and a few real trials."""

from __future__ import annotations

import functools
import gzip
import json
import os
import random
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import mmrl
from mmrl.cli.configs import configured
from scripts.chaos import __main__ as campaign
from scripts.chaos import children
from scripts.chaos.cases import CASES
from scripts.chaos.compare import differences
from scripts.chaos.damage import KINDS, damage, put_back
from scripts.chaos.hooks import PHASES
from scripts.chaos.trial import Place, make_reference

ROOT = Path(mmrl.__file__).parents[1]


@functools.cache
def stored_config() -> str:
    return yaml.safe_dump(configured([]).model_dump(mode="json"))


def run_of(folder: Path, **changes: Any) -> Path:
    """A small folder like a run's."""
    metrics = [
        {"step": 1, "reward/mean": 0.5, "time/step": changes.get("seconds", 1.0)},
        {"step": 2, "reward/mean": 1.0},
    ]
    files = {
        "config.yaml": stored_config().encode(),
        "metrics.jsonl": "".join(json.dumps(line) + "\n" for line in metrics).encode(),
        "summary.json": json.dumps({"seconds": changes.get("seconds", 1.0), "steps": 2}).encode(),
        "journal/step-000001.jsonl.gz": gzip.compress(b"{}\n", mtime=0),
        "report.html": b"<html></html>\n",
        "run.lock": str(changes.get("pid", 1)).encode(),
        **changes.get("files", {}),
    }
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return folder


def test_runs_that_differ_in_times_pids_and_sockets_are_equal(tmp_path: Path) -> None:
    one, two = run_of(tmp_path / "a"), run_of(tmp_path / "b", seconds=2.0, pid=7, files={"environment.json": b"x"})
    (one / "environment.json").write_text("y")
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(os.path.relpath(one / "socket"))  # a path of a socket is short
        assert differences(one, two) == []
    (two / "report.html").unlink()
    assert differences(one, two) == ["report.html: is missing"]


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        ({"metrics.jsonl": b'{"step": 1, "reward/mean": 0.5}\n'}, "metrics.jsonl: its contents differ"),
        ({"metrics.jsonl": b'{"step": 1, "reward/mean": 0.25}\n'}, "metrics.jsonl: its contents differ"),
        ({"summary.json": b'{"seconds": 1.0, "steps": 3}'}, "summary.json: its contents differ"),
        ({"report.html": b"<html>"}, "report.html: is not a whole page"),
        ({".metrics.jsonl.1.tmp": b""}, ".metrics.jsonl.1.tmp: should not be there"),
        ({"journal/step-000001.jsonl.gz": b"cut"}, "journal/step-000001.jsonl.gz: 23 and 3 bytes differ"),
    ],
)
def test_every_difference_is_named(files: dict[str, bytes], problem: str, tmp_path: Path) -> None:
    assert differences(run_of(tmp_path / "a"), run_of(tmp_path / "b", files=files)) == [problem]


def test_a_config_is_compared_as_mmrl_reads_it(tmp_path: Path) -> None:
    """A lost line is a difference where the key's default is another value."""
    one = run_of(tmp_path / "a")
    for line, problems in (("  matmul: torch\n", []), ("  steps: 60\n", ["config.yaml: its contents differ"])):
        assert stored_config().count(line) == 1
        config = stored_config().replace(line, "").encode()
        assert differences(one, run_of(tmp_path / "b", files={"config.yaml": config})) == problems


@pytest.mark.parametrize(("more", "problems"), [("d8", []), ("d1", ["examples.jsonl: has not the same examples"])])
def test_an_example_under_an_id_that_nothing_has_is_no_difference(
    more: str, problems: list[str], tmp_path: Path
) -> None:
    line = '{{"split": "dev", "id": "{}", "asked": {}}}\n'.format
    one, two = (
        run_of(tmp_path / name, files={"examples.jsonl": text.encode()})
        for name, text in (("a", line("d1", 1)), ("b", line("d1", 1) + line(more, 2)))
    )
    assert differences(one, two) == problems


def test_tensors_are_compared_by_value(tmp_path: Path) -> None:
    import torch

    one, two = run_of(tmp_path / "a"), run_of(tmp_path / "b")
    for folder, value, name in ((one, 1.0, "x"), (two, 1.0, "y")):
        torch.save({"state": {0: torch.tensor([value])}}, folder / name)
        (folder / name).rename(folder / "optimizer.pt")
    assert differences(one, two) == []
    torch.save({"state": {0: torch.tensor([1.5])}}, two / "optimizer.pt")
    assert differences(one, two) == ["optimizer.pt: its contents differ"]


def test_damage_follows_from_its_seed_and_is_always_some(tmp_path: Path) -> None:
    seen = set()
    for seed in range(60):
        one, two, intact = (run_of(tmp_path / f"{seed}{name}") for name in "abc")
        kind, file, held = damage(one, random.Random(seed))
        assert (kind, file, held) == damage(two, random.Random(seed))
        now = (one / file).read_bytes() if (one / file).is_file() else None
        assert held == (intact / file).read_bytes()
        assert now != held
        put_back(one / file, held)
        assert differences(one, intact) == []
        seen.add(kind)
    assert seen == set(KINDS)


def test_every_phase_is_a_function_of_mmrl() -> None:
    """A renamed function must not make the campaign strike nowhere; read from the sources, which is quick."""
    for target in (target for targets in PHASES.values() for target in targets):
        module, _, path = target.partition(":")
        if module != "os":
            *outer, name = path.split(".")
            text = (ROOT / f"{module.replace('.', '/')}.py").read_text()
            assert f"def {name}(" in text, target
            assert all(f"class {part}" in text for part in outer), target
    assert all(case.stop is None or case.stop[0] in PHASES for case in CASES.values())


def test_wrong_options_are_refused() -> None:
    for words, message in ((["trails=3"], "unknown option trails"), (["cases=grpo,no"], "cases: got grpo,no")):
        with pytest.raises(SystemExit, match=message):
            campaign.main(words)


@pytest.mark.slow
def test_a_few_real_trials(tmp_path: Path) -> None:
    """The short form, in a process of its own: however it was disturbed, every run ends as the undisturbed one."""
    out = tmp_path / "chaos.json"
    words = ["trials=4", "seed=1", "jobs=2", "cases=grpo,index", f"out={out}"]
    command = [sys.executable, "-m", "scripts.chaos", *words, f"work={tmp_path / 'work'}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-2000:]}"
    result = json.loads(out.read_text())
    assert (result["trials"], result["failed"]) == (4, 0)
    assert sum(one["struck"] for one in result["results"]) >= 3


def test_a_run_that_outlives_its_time_is_said_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a run that the harness has killed, the code alone (-9) would say nothing."""
    monkeypatch.setattr(children, "LIMIT_S", 0.1)
    (problem,) = make_reference(Place(tmp_path), "steps").problems
    assert problem.startswith("steps: the undisturbed run ended at its time limit")
