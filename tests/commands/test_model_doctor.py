"""`mmrl doctor` with keys of a model alone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from mmrl.cli import main
from mmrl.models.load import TINY

ALONE = ["doctor", "model=hf", "hardware=cpu", "model.dtype=float32"]


def asked(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """Exit code, and what was printed to both streams."""
    code = main([*ALONE, *words])
    return (code, *capsys.readouterr())


def test_it_says_how_a_model_is_computed_and_how_exactly(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    shutil.copytree(TINY, tmp_path / "model")
    code, out, _ = asked(capsys, f"model.path={tmp_path / 'model'}", "model.lora.targets=[q_proj]")
    rows = dict(line.split(maxsplit=1) for line in out.splitlines() if line.startswith("  ") and len(line.split()) > 1)
    assert code == 0 and out.endswith("it can be used\n")
    assert rows["engine"] == "the native decoder" and rows["update"] == "packed tries"
    assert rows["adapter"].startswith("reaches ") and "up_proj" in rows["adapter"]
    assert "check: training mode" in out
    assert not list(tmp_path.glob("outputs*"))


def test_as_json_it_has_the_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = asked(capsys, "model.path=tiny", "engine.loop=hf", "--json")
    found = json.loads(out)
    assert code == 0
    assert [way["name"] for way in found["ways"]] == [
        "generation by the model's own forward",
        "padded rows",
        "packed tries",
        "training mode",
    ]
    assert all(way["largest"] < 1e-4 and way["tokens"] == 18 for way in found["ways"])


def test_what_a_run_would_warn_of_is_a_note(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = asked(capsys, "model.path=tiny", "model.attention=eager")
    assert code == 0 and "note: train.packing=auto: rows are padded" in out


def test_a_model_that_a_run_would_refuse_is_refused_in_its_words(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    shutil.copytree(TINY, tmp_path / "model")
    weights = tmp_path / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    code, out, err = asked(capsys, f"model.path={tmp_path / 'model'}")
    assert code == 2 and not out
    assert err.startswith("error: model.path: ") and len(err.splitlines()) == 1


def test_every_token_that_ends_a_turn_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    shutil.copytree(TINY, tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    other = next(i for i in range(len(tokenizer)) if i != tokenizer.eos_token_id)
    ends = {"eos_token_id": [tokenizer.eos_token_id, other]}
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps(ends))
    code, out, _ = asked(capsys, f"model.path={tmp_path / 'model'}")
    (row,) = [line for line in out.splitlines() if "ends of turn" in line]
    assert code == 0 and str(tokenizer.convert_ids_to_tokens(other)) in row and tokenizer.eos_token in row


def test_tokens_that_the_model_does_not_have_are_refused_where_prompts_need_them(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Words of a tokenizer that the embeddings were not resized for; then one that the chat template writes."""
    shutil.copytree(TINY, tmp_path / "model")
    path, tokenizer = f"model.path={tmp_path / 'model'}", AutoTokenizer.from_pretrained(TINY)
    size = json.loads((TINY / "config.json").read_text())["vocab_size"]
    tokenizer.add_tokens([f"<word{n}>" for n in range(size - len(tokenizer) + 2)])
    tokenizer.save_pretrained(tmp_path / "model")
    code, out, err = asked(capsys, path)
    assert code == 0 and "2 tokens of the tokenizer are none of the model's (<word" in err and "it can be used" in out
    tokenizer.chat_template = (
        "<word" + str(size - len(AutoTokenizer.from_pretrained(TINY)) + 1) + ">" + str(tokenizer.chat_template)
    )
    tokenizer.save_pretrained(tmp_path / "model")
    code, out, err = asked(capsys, path)
    assert code == 2 and err.startswith("error: model.path: prompts of ") and len(err.splitlines()) == 1
