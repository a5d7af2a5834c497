"""Law 11 over data-parallel processes: two processes end with the weights and metrics of one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mmrl.trainer.objective import TrainCall
from tests.helpers.trainer_cases import LORA, make_calls, trained, two_processes
from tests.trainer.test_exact_kl import taught

pytestmark = pytest.mark.slow
COMMON: dict[str, Any] = {"steps": 3, "microbatch_tokens": 64, "algo": {"beta": 0.1, "epochs": 2}}
EXACT = {"distill": {"a": "policy", "b": "initial"}, "distill_kl": "exact"}
OPTIONS = {
    "full": COMMON,
    "lora": COMMON | {"lora": LORA},
    "exact": COMMON | {"algo": {**COMMON["algo"], **EXACT}},  # each process makes the teachers' states of its own packs
}
SCRIPT = """
import json, sys
from pathlib import Path
from tests.helpers.trainer_cases import make_calls, make_trainer, sampled
from tests.trainer.test_processes import OPTIONS, calls_of

def calls(step):
    # Before credit a process forwards what it sampled: another number of packs than the others, or none.
    if trainer.args.process_index == 0:
        trainer.forwards.policy_logprobs(sampled(make_calls(2, seed=step)))
    return calls_of(kind, step)

for kind, options in OPTIONS.items():
    folder, seen = Path(sys.argv[1]) / kind, []
    trainer = make_trainer(folder, calls=calls, on_step_end=lambda s, m: seen.append(m), **options)
    trainer.train()
    if trainer.args.process_index == 0:
        (folder / "metrics.json").write_text(json.dumps(seen))
        assert trainer.accelerator.num_processes == 2
"""


def calls_of(kind: str, step: int) -> list[TrainCall]:
    calls = make_calls(7, seed=step)
    return taught(calls, 3) if kind == "exact" else calls


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what two processes have trained, of both kinds one after the other: starting is what takes time."""
    folder = tmp_path_factory.mktemp("two")
    two_processes(["-c", SCRIPT, str(folder)], {"OMP_NUM_THREADS": "1"})
    return folder


@pytest.mark.parametrize("kind", OPTIONS)
def test_two_processes_equal_one(kind: str, two: Path, tmp_path: Path) -> None:
    _, seen = trained(tmp_path, calls=lambda step: calls_of(kind, step), **OPTIONS[kind])
    name = "adapter_model.safetensors" if kind == "lora" else "model.safetensors"
    mine, theirs = (load_file(folder / "checkpoint-3" / name) for folder in (tmp_path, two / kind))
    assert mine.keys() == theirs.keys()
    for key in mine:
        assert torch.allclose(mine[key], theirs[key], atol=1e-5), key
    for one, other in zip(seen, json.loads((two / kind / "metrics.json").read_text()), strict=True):
        assert one.keys() == other.keys()
        for key in one.keys() - {"time/update", "train/tokens_forwarded"}:
            assert other[key] == pytest.approx(one[key], abs=1e-4), key
