"""The worked examples of docs/algorithms.md through the command line: a file in, one row of the paper's numbers out.

Every further number, and what options make of them, is pinned in `tests/algorithms`.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import scripts
from mmrl.cli import main

FORESTS = Path(scripts.__file__).parent / "forests"
GAE = ("algo.obs=all", "algo.position=turn_end", "algo.gamma=0.9", "algo.gae_lambda=0.8")
CASES = {
    ("program", "mmgrpo", "algo.filler=max"): [0.783186, -1.305310, -0.261062, 0.783186],
    ("agents", "mhgpo_fof"): [1.059624, 1.150791, 0.844440, -0.132453, -0.657595, 0.259828, -0.927171],
    ("agents", "mhgpo_fof", "algo.propagate=full"): [1.031614, 1.031614, 0.844440, -0.066556],
    ("round_robin", "mhgpo_rr", "algo.group_size=2"): [*[-0.707106] * 3, *[0.707106] * 3, -0.707106, *[0.707104] * 2],
    ("oversampled", "mhgpo_fof_os", "algo.group_size=2"): [0.707105, 1.276441, 0.060783, -0.707105, -1.154875],
    ("critic", "mappo", "algo.beta=0.1"): [0.960436, -1.013979],
    ("turns", "grpo"): [1.039959, 1.039959, -0.976931, -0.976931, 0.661792, -0.724820, -0.724820],
    ("turns", "grpo_mr"): [1.287064, 1.287064, -0.792040, -0.792040, 0.297015],
    ("turns", "mt_grpo"): [2.477159, 1.039959, -1.052574, -0.976931, 0.297015, -1.405599, -0.724820],
    ("more_turns", "mt_grpo_variable", "algo.missing_turn=exclude"): [0.797624, 0.220473, 0.927081, 1.416198, 0.839047],
    ("observed", "mt_ppo", "algo.beta=0.0", "algo.whiten=none", *GAE): [-0.026802, -0.025983, 0.046],
    ("observed", "ppo", "algo.beta=0.0", "algo.obs=all", "algo.whiten=none"): [0.6, 0.4, 0.2],
}
"""(forest, algorithm, options) -> the advantage of the first token of the first calls."""


def credit(forest, algo, options, capsys):
    """Run `mmrl credit … --json`, whose output must be JSON alone."""
    assert main(["credit", f"algo={algo}", f"rollouts={FORESTS / forest}.json", "--json", *options]) == 0
    out = capsys.readouterr()
    assert out.err == ""
    return json.loads(out.out)


@pytest.mark.parametrize(("case", "expected"), CASES.items(), ids=["-".join(case[:2]) for case in CASES])
def test_a_worked_example(case, expected, capsys):
    forest, algo, *options = case
    found = [call["advantages"][0] for call in credit(forest, algo, options, capsys)["calls"]]
    assert found[: len(expected)] == pytest.approx(expected, abs=6e-7)


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
