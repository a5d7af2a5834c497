from __future__ import annotations

import json
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mmrl.config import LoraConfig
from mmrl.engines.vllm.base import save_weights
from mmrl.errors import CheckpointError
from mmrl.models.load import processor_files
from mmrl.models.save import copy_full
from mmrl.store.policy import EXTRA, MARKER, is_complete, newest_checkpoint, write_marker
from mmrl.trainer import checkpoint
from tests.helpers.trainer_cases import (
    LORA,
    OTHERS,
    changed,
    make_calls,
    make_trainer,
    resumable,
    tiny_model,
    weights_of,
)


def write(folder: Path, step: int, **extra: Any) -> Path:
    temporary = checkpoint.begin(folder, step)
    (temporary / "model.safetensors").write_bytes(b"weights")
    (temporary / "adapter").mkdir()
    (temporary / "adapter" / "config.json").write_text("{}")
    return checkpoint.commit(folder, step, extra)


def read_extra(path: Path) -> Any:
    checkpoint.require(path)
    return json.loads((path / EXTRA).read_text())


def test_latest_is_by_number_and_skips_what_is_not_complete(tmp_path: Path) -> None:
    for step in (2, 10, 9):
        write(tmp_path, step)
    assert newest_checkpoint(tmp_path) == tmp_path / "checkpoint-10"
    (tmp_path / "checkpoint-10" / "adapter" / "config.json").write_text("{} ")
    assert newest_checkpoint(tmp_path) == tmp_path / "checkpoint-9"
    (tmp_path / "checkpoint-9" / MARKER).unlink()
    assert newest_checkpoint(tmp_path) == tmp_path / "checkpoint-2"
    (tmp_path / "checkpoint-2" / "model.safetensors").unlink()
    assert newest_checkpoint(tmp_path) is None


def test_latest_of_a_run_directory(tmp_path: Path) -> None:
    assert newest_checkpoint(tmp_path) is None
    assert newest_checkpoint(tmp_path / "nowhere") is None
    write(tmp_path / "checkpoints", 3)
    assert newest_checkpoint(tmp_path) == tmp_path / "checkpoints" / "checkpoint-3"


@pytest.mark.parametrize("text", ["", "[]", '{"files": 3}', '{"step": 1}', "{"])
def test_a_damaged_marker_means_incomplete(text: str, tmp_path: Path) -> None:
    path = write(tmp_path, 1)
    (path / MARKER).write_text(text)
    assert not is_complete(path)
    with pytest.raises(CheckpointError, match="not a complete checkpoint"):
        checkpoint.require(path)


def test_prune_keeps_the_newest_complete_ones_and_foreign_files(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        write(tmp_path, step)
    (tmp_path / "checkpoint-4" / MARKER).unlink()
    (tmp_path / "checkpoint-best").mkdir()
    checkpoint.prune(tmp_path, keep=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint-2", "checkpoint-3", "checkpoint-best"]


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    write(tmp_path, 1, round=1)
    assert write(tmp_path, 1, round=2) == tmp_path / "checkpoint-1"
    assert read_extra(tmp_path / "checkpoint-1") == {"round": 2}
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint-1"]


def test_sweep_removes_half_written_checkpoints_only(tmp_path: Path) -> None:
    write(tmp_path, 1)
    checkpoint.begin(tmp_path, 2)
    (tmp_path / ".keep").mkdir()
    checkpoint.sweep(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == [".keep", "checkpoint-1"]


def test_extra_that_is_not_json_leaves_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(TypeError):
        write(tmp_path, 1, bad=object())
    assert newest_checkpoint(tmp_path) is None


# -- resuming --------------------------------------------------------------------------------------


def run(
    folder: Path, resume: Path | None = None, ends: int = 6, **options: Any
) -> tuple[dict[int, Any], dict[str, Any]]:
    """Metrics by step, and the weights after six steps; killed after `ends`: nothing more is called or saved."""

    def calls(step: int) -> list[Any]:
        if step > ends:
            raise KeyboardInterrupt
        return make_calls(6, seed=step, minibatches=2)

    algo = {"beta": 0.1, "epochs": 2, "minibatches": 2}
    seen, trainer = resumable(
        folder, resume, calls=calls, steps=6, algo=algo, schedule="cosine", weight_decay=0.1, **options
    )
    return seen, weights_of(trainer)


@pytest.mark.parametrize("lora", [None, LORA.model_copy(update={"dropout": 0.3})], ids=["full", "lora with dropout"])
def test_a_resumed_run_is_bit_equal(lora: LoraConfig | None, tmp_path: Path) -> None:
    metrics, weights = run(tmp_path / "whole", lora=lora, save_every=2)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "cut", ends=5, lora=lora, save_every=2)
    found = newest_checkpoint(tmp_path / "cut")
    assert found is not None and found.name == "checkpoint-4"
    torch.manual_seed(99)  # whatever the process did before
    torch.rand(7)
    resumed, resumed_weights = run(tmp_path / "cut", found, lora=lora, save_every=2)
    assert resumed == {step: metrics[step] for step in (5, 6)}
    assert not changed(weights, resumed_weights)


@pytest.mark.parametrize("kind", OTHERS)
def test_weights_that_files_name_otherwise_are_resumed_bit_equal(kind: str, tmp_path: Path) -> None:
    def run_of(folder: Path, **options: Any) -> Any:
        model = tiny_model(kind)
        return resumable(folder, model=model, calls=lambda step: make_calls(4, seed=step), lr=1e-2, **options)

    metrics, whole = run_of(tmp_path / "whole", steps=2)
    run_of(tmp_path / "cut", steps=1)
    first = tmp_path / "cut" / "checkpoint-1"
    assert not weights_of(whole).keys() <= load_file(first / "model.safetensors").keys()
    resumed, again = run_of(tmp_path / "cut", steps=2, resume_from=first)
    assert resumed == {2: metrics[2]}
    assert not changed(weights_of(whole), weights_of(again))


@pytest.mark.parametrize(
    ("former", "name", "words"),
    [
        (
            "model.norm.weight",
            "model.other.weight",
            r"1 weight \(model.norm.weight\) of Qwen3ForCausalLM is not in its files",
        ),
        ("", "model.layers.7.mlp.up_proj.weight", "of layers that config.json leaves out"),
    ],
    ids=["lacks one", "has one more"],
)
def test_weights_of_another_model_are_refused(former: str, name: str, words: str, tmp_path: Path) -> None:
    make_trainer(tmp_path / "run").train()
    path = tmp_path / "run" / "checkpoint-1"
    weights = load_file(path / "model.safetensors")
    weights[name] = weights.pop(former, torch.zeros(48, 32))
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    (path / MARKER).unlink()
    write_marker(path, 1)
    with pytest.raises(CheckpointError, match=words):
        make_trainer(tmp_path / "again", resume_from=path).train()


def test_saves_when_due_and_at_the_end_and_keeps_the_newest(tmp_path: Path) -> None:
    extras: list[int] = []

    def recorded() -> dict[str, int]:
        extras.append(trainer.steps_done)
        return {"step": trainer.steps_done}

    trainer = make_trainer(tmp_path, steps=5, save_every=2, keep=2, recorded=recorded)
    trainer.train()
    assert extras == [2, 4, 5]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint-4", "checkpoint-5"]
    assert read_extra(tmp_path / "checkpoint-5") == {"step": 5}


@pytest.mark.parametrize("use_cache", [True, False])
def test_a_saved_config_says_of_the_cache_what_the_base_says(use_cache: bool, tmp_path: Path) -> None:
    model = tiny_model()
    model.config.use_cache = use_cache
    make_trainer(tmp_path, model).train()
    assert json.loads((tmp_path / "checkpoint-1" / "config.json").read_text())["use_cache"] is use_cache


@pytest.mark.parametrize("kind", ["gemma3", "qwen3"])
def test_how_a_base_reads_images_is_saved_where_they_are_a_part_of_the_model(kind: str, tmp_path: Path) -> None:
    model, base = tiny_model(kind), tmp_path / "base"
    model.save_pretrained(base)
    (base / "preprocessor_config.json").write_text('{"do_resize": true}')
    trainer = make_trainer(tmp_path / "run", model)
    section = trainer.settings.model.model_copy(update={"path": str(base)})
    trainer.settings = replace(trainer.settings, model=section)
    trainer.train()
    save_weights(trainer.model, [], tmp_path / "pushed", None, "float32", processor_files(section, model.config))
    (tmp_path / "exported").mkdir()
    copy_full(tmp_path / "run" / "checkpoint-1", tmp_path / "exported")
    for folder in ("pushed", "exported"):
        assert (tmp_path / folder / "preprocessor_config.json").is_file() is (kind == "gemma3")


def test_a_checkpoint_that_is_not_complete_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, 1)
    (path / MARKER).unlink()
    with pytest.raises(CheckpointError, match="not a complete checkpoint"):
        make_trainer(tmp_path / "run", resume_from=path).train()
    with pytest.raises(CheckpointError, match="no such checkpoint"):
        make_trainer(tmp_path / "run", resume_from=tmp_path / "checkpoint-7").train()


MOMENTS = ["save_model", "_save_optimizer_and_scheduler", "_save_rng_state", "commit"]
KILLED = """
import gc, os, signal, sys
from pathlib import Path
from mmrl.trainer import checkpoint
from tests.helpers.trainer_cases import make_calls, make_trainer

def dies_at_step_4(name, victim, trainer):
    original = getattr(victim, name)
    def wrapped(*args, **kwargs):
        if trainer.state.global_step == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **kwargs)
    setattr(victim, name, wrapped)

gc.freeze()
# a process for each moment, forked where all is imported, since that is what takes time
for moment in sys.argv[2:]:
    if os.fork() == 0:
        folder = Path(sys.argv[1]) / moment
        trainer = make_trainer(folder, calls=lambda step: make_calls(4, seed=step), steps=6, save_every=2)
        place = ("rename", checkpoint.os) if moment == "commit" else (moment, trainer)
        dies_at_step_4(*place, trainer)
        trainer.train()
        os._exit(0)
    _, status = os.wait()
    print(os.WTERMSIG(status))
"""


def finish(folder: Path, resume: Path | None) -> tuple[dict[int, Any], Any]:
    """Metrics by step and the weights at the end of six steps."""
    seen, trainer = resumable(folder, resume, calls=lambda step: make_calls(4, seed=step), steps=6, save_every=2)
    return seen, weights_of(trainer)


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, Any], Any]:
    """A folder with a run for each moment, killed at it; metrics and weights of the run that nobody killed."""
    folder = tmp_path_factory.mktemp("killed")
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(folder), *MOMENTS],
        env={"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2]), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stdout.split() == [str(int(signal.SIGKILL))] * len(MOMENTS), done.stderr
    return folder, *finish(folder / "whole", None)


@pytest.mark.parametrize("moment", MOMENTS)
def test_killed_in_the_middle_of_a_save_the_previous_checkpoint_is_used(
    moment: str, killed: tuple[Path, dict[int, Any], Any]
) -> None:
    folder, metrics, expected = killed
    run = folder / moment
    found = newest_checkpoint(run)
    assert found is not None and found.name == "checkpoint-2"
    leftovers = {path.name for path in run.iterdir()} - {"checkpoint-2"}
    assert leftovers == {".writing-checkpoint-4"}
    resumed, weights = finish(run, found)
    assert resumed == {step: metrics[step] for step in (3, 4, 5, 6)}
    assert not changed(expected, weights)
    assert sorted(p.name for p in run.iterdir()) == ["checkpoint-4", "checkpoint-6"]


def test_adapter_checkpoint_names_its_base_and_has_what_a_policy_needs(tmp_path: Path) -> None:
    make_trainer(tmp_path, lora=LORA).train()
    files = {path.name for path in (tmp_path / "checkpoint-1").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} <= files
    assert json.loads((tmp_path / "checkpoint-1" / "adapter_config.json").read_text())["r"] == LORA.r
