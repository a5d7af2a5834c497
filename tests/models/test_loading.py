"""What a folder of weights lacks is refused by the headers of its files, and again when it is loaded."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BartConfig,
    BertConfig,
    CLIPConfig,
    GPTNeoXConfig,
    GptOssConfig,
    LlamaConfig,
    MixtralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3MoeConfig,
    T5Config,
)

from mmrl.config import ModelConfig
from mmrl.errors import ConfigError
from mmrl.models.load import load_model, skeleton

SIZES: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
}
HEADS: dict[str, Any] = {"head_dim": 8}
UNDECLARED: dict[str, Any] = {"is_causal": False}
Change = Callable[[Path], None]


def make(folder: Path, config: PreTrainedConfig | None = None, **saving: Any) -> ModelConfig:
    torch.manual_seed(0)
    config = config or LlamaConfig(**SIZES)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder, **saving)
    return ModelConfig(name="x", path=str(folder), dtype="float32")


def refusals(model: ModelConfig) -> tuple[str, str]:
    """What is said by the headers, and by the loading itself, each in one line."""
    said = []
    for load in (skeleton, lambda model: load_model(model, "cpu")):
        with pytest.raises(ConfigError) as caught:
            load(model)
        (problem,) = caught.value.problems
        assert "\n" not in problem and model.path in problem
        said.append(problem)
    return said[0], said[1]


def weights(change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Change:
    def apply(folder: Path) -> None:
        file = folder / "model.safetensors"
        save_file({k: w.contiguous() for k, w in change(load_file(file)).items()}, file, {"format": "pt"})

    return apply


def renamed(change: Callable[[str], str]) -> Change:
    return weights(lambda found: {change(name): weight for name, weight in found.items()})


def without(part: str) -> Change:
    return weights(lambda found: {name: weight for name, weight in found.items() if part not in name})


def with_more(**more: torch.Tensor) -> Change:
    return weights(lambda found: found | {name.replace("__", "."): weight for name, weight in more.items()})


def config(**changed: Any) -> Change:
    def apply(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **changed}))

    return apply


def content(name: str, text: str | bytes) -> Change:
    def apply(folder: Path) -> None:
        (folder / name).write_bytes(text.encode() if isinstance(text, str) else text)

    return apply


def cut(part: float) -> Change:
    def apply(folder: Path) -> None:
        file = folder / "model.safetensors"
        file.write_bytes(file.read_bytes()[: int(file.stat().st_size * part)])

    return apply


FAULTS: dict[str, tuple[Change, str]] = {
    "compiled": (renamed(lambda n: f"_orig_mod.{n}"), r"torch\.compile, with '_orig_mod\.'.* rename"),
    "fsdp": (
        renamed(lambda n: n.replace("layers.", "layers._fsdp_wrapped_module.")),
        r"FSDP, with '_fsdp_wrapped_module\.'",
    ),
    "ddp": (renamed(lambda n: f"module.{n}"), r"DDP or DeepSpeed, with 'module\.'"),
    "two wrappers": (
        renamed(lambda n: f"module._orig_mod.{n}"),
        r"torch\.compile and DDP .* with '_orig_mod\.' and 'module\.' .*\('_orig_mod\.', ''\)\.replace\('module\.', ''",
    ),
    "peft": (renamed(lambda n: f"base_model.model.{n.replace('proj.', 'proj.base_layer.')}"), "merge_and_unload"),
    "foreign names": (
        renamed(lambda n: f"foo.{n}"),
        r"21 weights .* are not in its files and would be random; these have 21 others",
    ),
    "a layer": (without("layers.1."), r"9 weights \(model\.layers\.1\.input_layernorm\.weight, .*, …\) of Llama"),
    "a norm": (without("model.norm"), r"1 weight \(model\.norm\.weight\) of LlamaForCausalLM is not in its files"),
    "the head": (without("lm_head"), r"1 weight \(lm_head\.weight\)"),
    "fewer layers": (config(num_hidden_layers=1), r"9 weights .* are of layers that config\.json leaves out"),
    "more layers": (config(num_hidden_layers=3), r"9 weights \(model\.layers\.2\."),
    "a bias": (
        with_more(model__layers__0__self_attn__q_proj__bias=torch.ones(16)),
        r"1 weight \(.*q_proj\.bias\) is of a part that config\.json switches off",
    ),
    "norms of queries": (
        with_more(model__layers__0__self_attn__q_norm__weight=torch.ones(8)),
        r"1 weight \(model\.layers\.0\.self_attn\.q_norm\.weight\) is of parts that the layers of LlamaFor.* not have",
    ),
    "norms of a layer": (
        with_more(model__layers__0__pre_feedforward_layernorm__weight=torch.ones(16)),
        r"1 weight \(model\.layers\.0\.pre_feedforward_layernorm\.weight\) is of parts that the layers",
    ),
    "an adapter not merged": (
        with_more(model__layers__1__mlp__up_proj__lora_A__default__weight=torch.ones(2, 16)),
        r"1 weight \(.*lora_A\.default\.weight\) is of parts .* an adapter that was not merged",
    ),
    "other heads": (config(num_key_value_heads=2), r"is 8×16 in its files and 16×16 by config\.json \(and 3 more\)"),
    "vocabulary": (config(vocab_size=41), r"is 40×16 in its files and 41×16 by config\.json"),
    "no heads": (
        config(num_attention_heads=0),
        r"config\.json has a value that none can be made of: integer modulo by zero",
    ),
    "integers": (
        weights(lambda found: found | {"model.norm.weight": found["model.norm.weight"].to(torch.int8)}),
        r"1 weight \(model\.norm\.weight\) is quantised \(int8\)",
    ),
    "git-lfs": (
        content("model.safetensors", "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"),
        r"model\.safetensors cannot be read: it is a pointer of Git LFS .*git lfs pull",
    ),
    "empty file": (content("model.safetensors", b""), r"model\.safetensors cannot be read: it is empty"),
    "cut header": (cut(0.05), r"model\.safetensors cannot be read: .* cut or damaged"),
    "cut": (cut(0.5), r"model\.safetensors cannot be read: .* cut or damaged"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), r"no weights there, expected model\.safet"),
    "an adapter too": (content("adapter_config.json", "{}"), "holds an adapter beside full weights"),
    "config is a list": (content("config.json", "[]"), r"config\.json has a value that none can be made of|model_type"),
    "config is cut": (content("config.json", '{"model_type": "lla'), r"cannot load the config"),
    "rope": (config(rope_parameters={"rope_type": "foo", "rope_theta": 1e4}), r"rope_parameters\.rope_type is 'foo'"),
    "activation": (config(hidden_act="foo"), r"hidden_act is 'foo', which this transformers does not have"),
    "4 bits": (config(quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True}), "bytes, 4 bits"),
    "gptq": (config(quantization_config={"quant_method": "gptq", "bits": 4, "group_size": 8}), r"\(gptq, 4 bits\)"),
    "8 bits": (config(quantization_config={"load_in_8bit": True}), r"are quantised \(by an unnamed method\)"),
    "ends in words": (
        content("generation_config.json", '{"eos_token_id": "</s>"}'),
        r"eos_token_id of '.*generation_config\.json' is '</s>', expected token ids",
    ),
    "generation is cut": (content("generation_config.json", '{"eos_'), r"generation_config\.json cannot be read"),
    "awq": (config(quantization_config={"quant_method": "awq", "bits": 4}), r"are quantised \(awq, 4 bits\)"),
}
ALONE = {"integers"}
"""Faults of which the loading itself knows nothing."""


@pytest.mark.parametrize("fault", FAULTS)
def test_a_folder_that_lacks_weights_is_refused_in_one_line(fault: str, tmp_path: Path) -> None:
    model = make(tmp_path)
    change, expected = FAULTS[fault]
    change(tmp_path)
    if fault in ALONE:
        with pytest.raises(ConfigError, match=expected):
            skeleton(model)
        return
    by_headers, by_loading = refusals(model)
    assert re.search(expected, by_headers) and by_headers.startswith("model.path: ")
    assert by_loading.startswith("model.path: ")


def index(**files: str) -> str:
    return json.dumps({"metadata": {}, "weight_map": files})


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            lambda folder: next(folder.glob("model-00002*")).unlink(),
            "'model-00002-of-.*' is missing|which .* is not there",
        ),
        (content("model.safetensors.index.json", index(a="../outside.safetensors")), "names '../outside.safetensors'"),
        (content("model.safetensors.index.json", index(a="/outside.safetensors")), "names '/outside.safetensors'"),
        (content("model.safetensors.index.json", index()), "names no file"),
        (content("model.safetensors.index.json", "[1]"), "cannot be read"),
        (lambda folder: next(folder.glob("model-00002*")).write_bytes(b"x" * 40), "model-00002.* cannot be read"),
    ],
)
def test_shards_that_are_not_there_are_named(change: Change, expected: str, tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    model = make(tmp_path / "m", max_shard_size="4KB")
    assert skeleton(model)[1] == ""
    save_file({"a": torch.ones(1)}, tmp_path / "outside.safetensors")
    change(tmp_path / "m")
    with pytest.raises(ConfigError, match=expected):
        skeleton(model)


def test_torchs_own_format_is_read_without_its_code(tmp_path: Path) -> None:
    model = make(tmp_path)
    found = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    torch.save(found, tmp_path / "pytorch_model.bin")
    assert skeleton(model)[1] == ""
    del found["model.norm.weight"]
    torch.save(found, tmp_path / "pytorch_model.bin")
    assert "model.norm.weight" in refusals(model)[0]
    torch.save({"a": Path("x")}, tmp_path / "pytorch_model.bin")
    assert "pytorch_model.bin cannot be read: it holds code beside weights" in refusals(model)[0]


@pytest.mark.parametrize(
    "made",
    [
        LlamaConfig(**SIZES, tie_word_embeddings=True),
        Qwen3MoeConfig(**SIZES, **HEADS, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8),
        MixtralConfig(**SIZES, num_local_experts=4),
        GPTNeoXConfig(**{k: v for k, v in SIZES.items() if k != "num_key_value_heads"}),
    ],
    ids=lambda made: made.model_type,
)
def test_what_a_model_saves_is_what_it_needs(made: PreTrainedConfig, tmp_path: Path) -> None:
    """Tied heads and stacked experts, which are saved otherwise than they are held, are no faults."""
    model = make(tmp_path, made)
    empty, note = skeleton(model)
    loaded = load_model(model, "cpu")
    assert note == "" and {p.device.type for p in empty.parameters()} == {"meta"}
    shapes = [{n: p.shape for n, p in each.named_parameters()} for each in (empty, loaded)]
    assert shapes[0] == shapes[1]


@pytest.mark.parametrize("part", ["experts.3.", "experts.3.up_proj", "gate.weight"])
def test_experts_that_are_not_there_are_missed(part: str, tmp_path: Path) -> None:
    made = Qwen3MoeConfig(**SIZES, **HEADS, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8)
    model = make(tmp_path, made)
    without(part)(tmp_path)
    refusals(model)


def as_float8(found: dict[str, torch.Tensor], size: int = 8) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Quantise projections in blocks; returns what is written, and the numbers that it stands for."""
    written, numbers = dict(found), dict(found)
    for name, weight in found.items():
        if name.endswith("proj.weight"):
            blocks = weight.reshape(weight.shape[0] // size, size, weight.shape[1] // size, size)
            scale = blocks.abs().amax((1, 3), keepdim=True) / 448
            eight = (blocks / scale).to(torch.float8_e4m3fn)
            written |= {name: eight.reshape(weight.shape), f"{name}_scale_inv": scale[:, 0, :, 0]}
            numbers[name] = (eight.float() * scale).reshape(weight.shape)
    return written, numbers


def test_float8_weights_are_computed_back(tmp_path: Path) -> None:
    model = make(tmp_path)
    numbers = as_float8(load_file(tmp_path / "model.safetensors"))[1]
    weights(lambda found: as_float8(found)[0])(tmp_path)
    config(quantization_config={"quant_method": "fp8", "weight_block_size": [8, 8]})(tmp_path)
    assert skeleton(model)[1] == ""
    loaded = load_model(model, "cpu")
    assert all(torch.equal(p, numbers[name]) for name, p in loaded.named_parameters())
    assert getattr(loaded.config, "quantization_config", None) is None
    without("q_proj.weight_scale_inv")(tmp_path)
    with pytest.raises(ConfigError, match=r"2 weights .* are quantised \(float8_e4m3fn\) without a scale"):
        skeleton(model)


def test_four_bits_of_gpt_oss_are_computed_back(tmp_path: Path) -> None:
    """Two numbers of four bits in a byte, the low half first, and a power of 2 for each 32 of them."""
    sizes: dict[str, Any] = {
        **SIZES,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
    }
    model = make(tmp_path, GptOssConfig(**sizes, head_dim=16))
    blocks = torch.randint(0, 256, (2, 64, 1, 16), dtype=torch.uint8)
    scales = torch.randint(118, 124, (2, 64, 1), dtype=torch.uint8)
    name = "model.layers.0.mlp.experts.gate_up_proj"

    def change(found: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        for expert in [key for key in found if key.endswith(("gate_up_proj", "down_proj"))]:
            rows = found.pop(expert).shape[2]
            found |= {f"{expert}_blocks": blocks[:, :rows].clone(), f"{expert}_scales": scales[:, :rows].clone()}
        return found

    weights(change)(tmp_path)
    config(quantization_config={"quant_method": "mxfp4"})(tmp_path)
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    table = torch.cat([values, -values])
    pairs = torch.stack([table[(blocks & 15).long()], table[(blocks >> 4).long()]], -1).flatten(-2)  # (2, 64, 1, 32)
    expected = (pairs * 2.0 ** (scales.float() - 127)[..., None]).flatten(-2).transpose(1, 2)
    assert skeleton(model)[1] == ""
    loaded = load_model(model, "cpu")
    assert torch.equal(loaded.get_parameter(name), expected)
    assert {p.dtype for p in loaded.parameters()} == {torch.float32}
    without("0.mlp.experts.down_proj_scales")(tmp_path)
    assert all("are missing or of other sizes" in said for said in refusals(model))


def test_towers_are_left_out_with_a_word(tmp_path: Path) -> None:
    model = make(tmp_path)
    more = {f"visual__{n}__weight": torch.ones(1) for n in range(3)}
    with_more(**more, mtp__norm__weight=torch.ones(1))(tmp_path)
    _, note = skeleton(model)
    assert note.startswith("model.path: LlamaForCausalLM has no place for 4 of its weights (mtp, visual (3)); left out")
    assert load_model(model, "cpu") is not None


def test_layers_that_predict_further_ahead_are_no_fault(tmp_path: Path) -> None:
    """As DeepSeek's and GLM's are saved: behind the last layer, and counted in the config."""
    model = make(tmp_path, LlamaConfig(**{**SIZES, "num_hidden_layers": 3}))
    config(num_hidden_layers=2, num_nextn_predict_layers=1)(tmp_path)
    assert "left out" in skeleton(model)[1]
    config(num_nextn_predict_layers=0)(tmp_path)
    refusals(model)


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (BertConfig(vocab_size=40, hidden_size=16, num_hidden_layers=1, num_attention_heads=2), "is_decoder=false"),
        (LlamaConfig(**SIZES, **UNDECLARED), "is_causal=false"),
        (T5Config(vocab_size=40), "an encoder with a decoder"),
        (CLIPConfig(), "no causal language model"),
    ],
    ids=lambda value: getattr(value, "model_type", None),
)
def test_other_kinds_of_models_are_refused_by_their_config(
    made: PreTrainedConfig, expected: str, tmp_path: Path
) -> None:
    made.save_pretrained(tmp_path)
    assert expected in refusals(ModelConfig(name="x", path=str(tmp_path)))[0]


def test_a_decoder_that_counts_padding_is_taken(tmp_path: Path) -> None:
    """BART's, saved alone: whole rows serve it, and `test_architectures` says how exactly."""
    sizes: dict[str, Any] = {"d_model": 16, "decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_dim": 16}
    model = make(tmp_path, BartConfig(vocab_size=40, **sizes, is_encoder_decoder=False, is_decoder=True))
    assert skeleton(model)[1] == ""


def test_transformers_own_ignore_lists_hold(tmp_path: Path) -> None:
    """Old checkpoints keep rotary tables, which are computed anew."""
    model = make(tmp_path, Qwen2Config(**SIZES))
    with_more(model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(4))(tmp_path)
    assert skeleton(model)[1] == "" and AutoConfig.from_pretrained(tmp_path).model_type == "qwen2"


def test_an_adapter_alone_is_named_as_one(tmp_path: Path) -> None:
    content("adapter_config.json", "{}")(tmp_path)
    assert "is an adapter alone" in refusals(ModelConfig(name="x", path=str(tmp_path)))[0]


@pytest.mark.parametrize(
    ("files", "says"),
    [
        (("config.json", "adapter_config.json"), "'owner/both' holds an adapter beside full weights, expected full"),
        (("adapter_config.json",), "'owner/both' is an adapter alone, expected full weights"),
    ],
)
def test_an_adapter_on_the_hub_is_refused_too(
    files: tuple[str, ...], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the hub's local cache, as a download leaves it; transformers would load the adapter's base instead."""
    repository = tmp_path / "models--owner--both"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("abc")
    make(repository / "snapshots" / "abc")
    content("adapter_config.json", '{"base_model_name_or_path": "owner/other"}')(repository / "snapshots" / "abc")
    for file in (repository / "snapshots" / "abc").glob("*.json"):
        if file.name not in files:
            file.unlink()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("mmrl.models.load.hub_answers", lambda: False)
    assert all(says in said for said in refusals(ModelConfig(name="x", path="owner/both")))
