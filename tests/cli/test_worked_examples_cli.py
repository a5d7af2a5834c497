"""`mmrl credit` on the worked examples, whose numbers tests/algorithms has: as JSON, side by side, quickly."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import scripts
from mmrl.cli import main

FORESTS = Path(scripts.__file__).parent / "forests"


def credit(forest, algo, options, capsys):
    """Run `mmrl credit … --json`, whose output must be JSON alone."""
    assert main(["credit", f"algo={algo}", f"rollouts={FORESTS / forest}.json", "--json", *options]) == 0
    out = capsys.readouterr()
    assert out.err == ""
    return json.loads(out.out)


def test_algorithms_side_by_side(capsys):
    several = credit("turns", "grpo,grpo_mr,mt_grpo", ["algo.eps=1e-4"], capsys)
    for one, expected in zip(several, (1.039959, 1.287064, 2.477159), strict=True):
        assert one["calls"][0]["advantages"] == pytest.approx([expected] * 3, abs=6e-7)


def test_the_command_loads_nothing_heavy():
    """How long it takes to start is measured by `make bench`; here, that none of what takes seconds is imported."""
    path = FORESTS / "agents.json"
    code = (
        "import sys; from mmrl.cli import main;"
        f"code = main(['credit', 'algo=mhgpo_fof,mhgpo_rr,mmgrpo', 'rollouts={path}', '--json']);"
        "heavy = {'torch', 'transformers', 'trl', 'dspy', 'datasets', 'numpy', 'httpx', 'openai', 'mmrl.tasks'};"
        "print(sorted(heavy & set(sys.modules)), file=sys.stderr); sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "[]\n")
    assert [one["algo"] for one in json.loads(done.stdout)] == ["mhgpo_fof", "mhgpo_rr", "mmgrpo"]
