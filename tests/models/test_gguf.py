"""GGUF files by path: the same model as the one they were made of; what cannot be converted is refused at once.

The files are written by the package `gguf`, from small random models.
"""

import json
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from mmrl.cli import main
from mmrl.config import ModelConfig
from mmrl.errors import ConfigError
from mmrl.models import gguf_folder as folder_module
from mmrl.models.gguf import ARCHITECTURES, TYPES, gguf_problems, layout, read_header
from mmrl.models.gguf_folder import convert, converted, plain_gguf
from mmrl.models.load import load_model, load_tokenizer, model_path

TEXT = "In 1990 12 men founded the city, didn't they? <|im_end|> Müller  two"


def write_gguf(path, source, *, architecture="qwen3", quant=None, eos="<|im_end|>", **facts):
    """A GGUF file of the model in the folder `source`, quantised as `quant` says where a row is long enough."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(source), AutoTokenizer.from_pretrained(source)
    config, weights = model.config, {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    saved = json.loads((Path(source) / "tokenizer.json").read_text())["model"]
    tokens = [tokenizer.convert_ids_to_tokens(n) for n in range(config.vocab_size)]
    heads, keys = config.num_attention_heads, config.num_key_value_heads
    with plain_gguf() as gguf:
        writer = gguf.GGUFWriter(path, architecture)
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
        writer.add_tokenizer_pre(facts.pop("pre", "gpt-2"))
        writer.add_token_list(tokens)
        writer.add_token_types([3 if token in tokenizer.all_special_tokens else 1 for token in tokens])
        merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in saved["merges"]]
        writer.add_token_merges(facts.pop("merges", merges))
        writer.add_eos_token_id(tokens.index(eos))
        if facts.pop("template", True):
            writer.add_chat_template(tokenizer.chat_template)
        for name, value in facts.pop("more", {}).items():
            writer.add_uint32(name, value) if isinstance(value, int) else writer.add_string(name, value)
        for name, target in _names(config, architecture, facts.pop("drop", ())).items():
            value = weights[target]
            if architecture == "llama" and target.endswith(("q_proj.weight", "k_proj.weight")):
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


def _names(config, architecture, dropped):
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
    parts |= {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"} if architecture == "qwen3" else {}
    for n in range(config.num_hidden_layers):
        names |= {f"blk.{n}.{a}.weight": f"model.layers.{n}.{b}.weight" for a, b in parts.items()}
        if architecture == "qwen2":
            names |= {f"blk.{n}.attn_{x}.bias": f"model.layers.{n}.self_attn.{x}_proj.bias" for x in "qkv"}
    return {name: target for name, target in names.items() if name not in dropped}


@pytest.fixture(scope="module")
def sources(random_model, tmp_path_factory):
    """Architecture -> folder of a small random model; all with the tokenizer of `random_model`."""
    folders, tokenizer = {"qwen3": random_model}, AutoTokenizer.from_pretrained(random_model)
    sizes = {
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "intermediate_size": 64,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
    }
    torch.manual_seed(0)
    for name, model in (
        ("llama", LlamaForCausalLM(LlamaConfig(**sizes))),
        ("qwen2", Qwen2ForCausalLM(Qwen2Config(**sizes))),
    ):
        folders[name] = str(tmp_path_factory.mktemp(name))
        model.save_pretrained(folders[name])
        tokenizer.save_pretrained(folders[name])
    return folders


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MMRL_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_gguf_file_is_the_model_that_it_was_made_of(architecture, sources, tmp_path, capfd):
    file = write_gguf(tmp_path / "m.gguf", sources[architecture], architecture=architecture)
    config = ModelConfig(name="hf", path=file)
    model, tokenizer = load_model(config, "cpu"), load_tokenizer(config)
    there = AutoModelForCausalLM.from_pretrained(sources[architecture])
    ids = torch.tensor([AutoTokenizer.from_pretrained(sources[architecture]).encode(TEXT)])
    assert tokenizer.encode(TEXT) == ids[0].tolist() and tokenizer.decode(ids[0]) == TEXT
    torch.testing.assert_close(model(ids).logits, there(ids).logits, rtol=1e-5, atol=1e-6)
    assert tokenizer.eos_token == "<|im_end|>" and model.generation_config.eos_token_id == tokenizer.eos_token_id
    said = capfd.readouterr().err
    assert f"m.gguf: {architecture} of 0.0 M parameters (float32, from F32)" in said
    assert "chat template, end of turn <|im_end|> (2)" in said
    # once: the second load says nothing and makes nothing
    load_tokenizer(config)
    assert Path(model_path(config)).is_dir() and "end of turn" not in capfd.readouterr().err


@pytest.mark.parametrize("quant", ["Q4_1", "Q8_0", "F16"])
def test_quantised_weights_are_near_and_it_is_said_what_they_were(quant, sources, tmp_path):
    lines = []
    folder = converted(
        write_gguf(tmp_path / "m.gguf", sources["llama"], architecture="llama", quant=quant), lines.append
    )
    made, there = (AutoModelForCausalLM.from_pretrained(path).state_dict() for path in (folder, sources["llama"]))
    worst = max(float((made[name] - there[name]).abs().max()) for name in there)
    assert 0 < worst < {"Q4_1": 0.01, "Q8_0": 1e-3, "F16": 1e-4}[quant]
    assert ("de-quantised from " if quant != "F16" else "from ") + quant in lines[0]


def test_large_models_are_written_in_parts_and_at_half_width(sources, tmp_path, monkeypatch):
    monkeypatch.setattr(folder_module, "SHARD_NUMBERS", 8_000)
    monkeypatch.setattr(folder_module, "LARGE", 1)
    folder = converted(write_gguf(tmp_path / "m.gguf", sources["qwen3"]), lambda line: None)
    assert len(list(folder.glob("model-*.safetensors"))) > 1
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.dtype == torch.float16
    there = AutoModelForCausalLM.from_pretrained(sources["qwen3"]).state_dict()
    assert all(float((tensor.float() - there[name]).abs().max()) < 1e-4 for name, tensor in model.state_dict().items())


def test_the_end_of_turn_is_what_the_template_writes(sources, tmp_path):
    lines = []
    wrong = converted(write_gguf(tmp_path / "w.gguf", sources["qwen3"], eos="<|im_start|>"), lines.append)
    assert AutoTokenizer.from_pretrained(wrong).eos_token == "<|im_end|>"
    assert "end of turn <|im_end|> (2) (the file says <|im_start|>, which its template never writes)" in lines[0]
    bare = converted(write_gguf(tmp_path / "b.gguf", sources["qwen3"], template=False), lines.append)
    assert "no chat template (model.chat_template=plain), end of turn <|im_end|>" in lines[1]
    with pytest.raises(ConfigError, match=r"model\.chat_template: .* has no chat template"):
        load_tokenizer(ModelConfig(name="hf", path=str(tmp_path / "b.gguf")))
    assert not (bare / "chat_template.jinja").exists()


def test_words_are_cut_as_the_model_cuts_them(sources, tmp_path):
    def pieces(pre):
        folder = converted(write_gguf(tmp_path / f"{pre}.gguf", sources["qwen3"], pre=pre), lambda line: None)
        cut = AutoTokenizer.from_pretrained(folder).backend_tokenizer.pre_tokenizer
        return [piece for piece, _ in cut.pre_tokenize_str("it's 1990  x")]

    assert pieces("gpt-2") == ["it", "'s", "Ġ1990", "Ġ", "Ġx"]
    assert pieces("smollm") == ["it", "'s", "Ġ", "1", "9", "9", "0", "Ġ", "Ġx"]
    assert pieces("qwen2") == ["it", "'s", "Ġ", "1", "9", "9", "0", "Ġ", "Ġx"]
    assert pieces("llama-bpe") == ["it", "'s", "Ġ", "199", "0", "Ġ", "Ġx"]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"architecture": "gemma"}, "has the architecture gemma, expected one of llama, qwen2, qwen3"),
        ({"kind": "llama"}, "has a tokenizer of the kind llama, expected gpt2"),
        ({"pre": "tekken"}, "cuts text as 'tekken' does, expected one of gpt-2"),
        ({"drop": ("blk.1.ffn_up.weight",)}, "lacks the tensors blk.1.ffn_up.weight"),
        ({"architecture": "llama"}, "has tensors of no such architecture"),
        ({"more": {"qwen3.expert_count": 8}}, "is a mixture of experts"),
        ({"more": {"split.count": 3}}, "is one part of several"),
        ({"more": {"qwen3.rope.scaling.type": "yarn"}}, "scales its rotary positions"),
    ],
)
def test_other_models_are_refused_in_words(change, says, sources, tmp_path):
    names = {"architecture": "qwen3"} | change
    file = str(tmp_path / "m.gguf")
    if change == {"architecture": "llama"}:  # the layers of another one under its name
        raw = Path(write_gguf(file, sources["qwen3"])).read_bytes()
        Path(file).write_bytes(raw.replace(b"qwen3", b"llama"))
    else:
        source, names["architecture"] = (
            sources["qwen3"],
            "qwen3" if names["architecture"] == "gemma" else names["architecture"],
        )
        raw = Path(write_gguf(file, source, **names)).read_bytes()
        Path(file).write_bytes(raw.replace(b"qwen3", b"gemma") if change.get("architecture") == "gemma" else raw)
    (problem,) = gguf_problems("model.path", file)
    assert problem.startswith(f"model.path: '{file}' ") and says in problem
    assert problem.endswith("use the model's hub id or folder instead")


def _with_type(raw, name, number):
    """The file's bytes with another type for a tensor."""
    key = name.encode()
    at = raw.index(struct.pack("<Q", len(key)) + key) + 8 + len(key)
    at += 4 + 8 * struct.unpack("<I", raw[at : at + 4])[0]
    return raw[:at] + struct.pack("<I", number) + raw[at + 4 :]


def test_damaged_files_are_refused_in_words_and_in_no_time(sources, tmp_path):
    whole = Path(write_gguf(tmp_path / "m.gguf", sources["qwen3"])).read_bytes()
    assert 9 not in TYPES
    cases = {
        "empty": (b"", "damaged or no GGUF file"),
        "text": (b"hello, world", "it does not begin with GGUF"),
        "version": (whole[:4] + struct.pack("<I", 9) + whole[8:], "version 9, expected 2 or 3"),
        "header": (whole[:300], "ends in the middle of its header"),
        "half": (whole[: len(whole) // 2], "it is cut off: "),
        "count": (
            whole[:16] + struct.pack("<Q", 2**60) + whole[24:],
            "says that 1,152,921,504,606,846,976 things follow",
        ),
        "layers": (_with_fact(whole, b"qwen3.block_count", 2**31), "says that it has 2,147,483,648 layers"),
        "type": (_with_type(whole, "blk.0.ffn_up.weight", 9), "quantised in a way that cannot be read (type 9)"),
    }
    for name, (content, says) in cases.items():
        file = tmp_path / f"{name}.gguf"
        file.write_bytes(content)
        (problem,) = gguf_problems("model.path", str(file))
        assert problem.startswith(f"model.path: '{file}' ") and says in problem, name
    # every byte of the header, one at a time: refused in words, or the same model
    rng, end = np.random.default_rng(0), read_header(tmp_path / "m.gguf").tensors["token_embd.weight"].start
    for place in rng.integers(0, end, 200):
        spoiled = tmp_path / "spoiled.gguf"
        spoiled.write_bytes(whole[:place] + bytes([whole[place] ^ 0x41]) + whole[place + 1 :])
        for problem in gguf_problems("model.path", str(spoiled)):
            assert problem.startswith(f"model.path: '{spoiled}' ")


def _with_fact(raw, key, value):
    at = raw.index(key) + len(key) + 4
    return raw[:at] + struct.pack("<I", value) + raw[at + 4 :]


def test_numbers_that_are_none_leave_no_folder(sources, tmp_path):
    file = Path(write_gguf(tmp_path / "m.gguf", sources["qwen3"]))
    start = read_header(file).tensors["blk.0.ffn_up.weight"].start
    with file.open("r+b") as raw:
        raw.seek(start)
        raw.write(struct.pack("<f", float("nan")))
    with pytest.raises(ConfigError, match=r"is damaged: blk\.0\.ffn_up\.weight holds values that are no numbers"):
        converted(str(file))
    assert [path for path in (tmp_path / "cache" / "models").iterdir() if path.is_dir()] == []


def test_merges_of_other_words_are_no_traceback(sources, tmp_path):
    for merges in (["qqq zzz"], ["q"]):
        file = write_gguf(tmp_path / "m.gguf", sources["qwen3"], merges=merges)
        with pytest.raises(ConfigError, match=r"no tokenizer can be made of .*its merges do not fit its vocabulary"):
            converted(file)


def test_the_layout_names_what_transformers_has(sources, tmp_path):
    for architecture, source in sources.items():
        file = write_gguf(tmp_path / f"{architecture}.gguf", source, architecture=architecture)
        named = dict(layout(read_header(Path(file))).values())
        model = AutoModelForCausalLM.from_pretrained(source)
        assert named == {name: tuple(value.shape) for name, value in model.named_parameters()}
        out = tmp_path / architecture
        out.mkdir()
        convert(Path(file), out)
        _, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
        assert not info["missing_keys"] and not info["unexpected_keys"]


def test_the_command_refuses_before_anything_loads_and_takes_a_file(sources, tmp_path, capsys):
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF")
    common = ["task=qa_direct", "eval.items=1", "task.max_tokens=4", "hardware.device=cpu"]
    assert main(["eval", f"policy={file}", *common]) == 2
    assert f"error: policy: '{file}' is damaged or no GGUF file" in capsys.readouterr().err
    assert main(["train", "model=hf", f"model.path={tmp_path / 'gone.gguf'}", "train.batch_size=99999"]) == 2
    said = capsys.readouterr().err
    assert f"error: model.path: no file '{tmp_path / 'gone.gguf'}', expected a GGUF file" in said
    assert "error: train.batch_size: got 99999" in said
    write_gguf(file, sources["qwen3"])
    assert main(["eval", "model=hf", f"model.path={file}", *common, f"run.dir={tmp_path / 'run'}"]) == 0
    assert f"{file} on qa_direct" in capsys.readouterr().out
    assert main(["eval", f"policy={file}", "model.revision=x", *common]) == 2
    assert "model.revision" in capsys.readouterr().err
