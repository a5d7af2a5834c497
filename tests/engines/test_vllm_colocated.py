"""engine=vllm_colocated with a real vLLM (CPU build) in this process, which must be one that has it (make test-vllm).

Sleep mode needs a GPU and is not among what is seen here.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mmrl.config.engines import VllmColocatedConfig
from mmrl.errors import SyncFailure
from mmrl.models.load import load_tokenizer
from tests.helpers.engines import (
    PYTHON,
    TINY,
    ask,
    many_long_prompts_agree,
    needs_vllm,
    prompt_of,
    pushes_arrive,
    samples_agree,
    serving,
    steps_of,
)

pytestmark = pytest.mark.vllm
here = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="this interpreter has no vLLM")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(TINY)


@pytest.fixture(scope="module")
def colocated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Any]]:
    with serving(VllmColocatedConfig(name="vllm_colocated"), tmp_path_factory.mktemp("colocated")) as engine_and_model:
        yield engine_and_model


@here
def test_samples_have_the_log_probabilities_of_transformers(colocated: Any, tokenizer: Any) -> None:
    engine, model = colocated
    samples_agree(engine, model, tokenizer)
    (full,) = ask(colocated[0], prompt_of(tokenizer, "Who wrote it?"), temperature=0.0, max_tokens=64)
    assert full.finish == "eos" and full.ids[-1] == tokenizer.eos_token_id


@here
def test_many_long_prompts_at_once(colocated: Any, tokenizer: Any) -> None:
    engine, model = colocated
    many_long_prompts_agree(engine, model, tokenizer)


@here
def test_a_push_changes_the_policy_and_no_stale_prefix_is_served(colocated: Any, tokenizer: Any) -> None:
    engine, model = colocated
    pushes_arrive(engine, model, tokenizer, lambda: engine._probes(None)["vLLM"])
    assert len(engine._vllm.list_loras()) == 2


@here
def test_a_push_that_vllm_refuses_stops_with_its_words(colocated: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _ = colocated
    monkeypatch.setattr("mmrl.engines.vllm.base.save_weights", lambda *_: {"default": Path("/no/such/adapter")})
    with pytest.raises(SyncFailure, match="version 9 was not taken by vLLM"):
        engine.set_version(9)


@here
@pytest.mark.slow
def test_full_weights_go_from_memory_to_memory(tmp_path: Path, tokenizer: Any) -> None:
    """In a process of its own: one process holds one vLLM."""
    code = f"""
from pathlib import Path
from mmrl.config.engines import VllmColocatedConfig
from mmrl.engines import build_engine
from mmrl.models.load import load_model, load_tokenizer
from tests.helpers.engines import TINY, ask, gap, perturb, prompt_of, setup_in
model, tokenizer = load_model(TINY, "cpu"), load_tokenizer(TINY)
engine = build_engine(VllmColocatedConfig(name="vllm_colocated"), model, tokenizer, setup_in(Path({str(tmp_path)!r})))
prompt = prompt_of(tokenizer, "Who wrote it?")
for version in range(3):
    engine.set_version(version)
    (made,) = ask(engine, prompt, temperature=0.7)
    print("gap", gap(model, prompt, made, 0.7))
    perturb(model, version)
engine.close()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    gaps = [float(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("gap ")]
    assert len(gaps) == 3 and max(gaps) < 1e-4


@pytest.mark.slow
@needs_vllm
@pytest.mark.parametrize("lora", ["model.lora={}", "model.lora=null"])
def test_training_end_to_end(lora: str, tmp_path: Path) -> None:
    assert PYTHON is not None
    small = ["hardware.threads=1", "train.steps=3", "train.batch_size=4", "eval.items=2", "eval.every=0"]
    options = ["engine=vllm_colocated", lora, *small, f"run.dir={tmp_path / 'run'}"]
    done = subprocess.run([PYTHON, "-m", "mmrl", "train", *options], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    steps = steps_of(tmp_path / "run")
    assert [record["step"] for record in steps] == [1, 2, 3]
    assert max(record["train/logprob_gap_max"] for record in steps) < 1e-4
    assert all(record["rollouts/failed_share"] == 0 for record in steps)
