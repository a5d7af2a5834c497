"""LoRA adapters: a saved one fits in all of its weights or is refused; a new one reaches the experts of a mixture."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import IA3Config, LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    FalconH1Config,
    Gemma3Config,
    GptOssConfig,
    LlamaConfig,
    MixtralConfig,
    PhimoeConfig,
    PreTrainedConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

from mmrl.config import ModelConfig
from mmrl.config.schema import LoraConfig as Section
from mmrl.errors import ConfigError
from mmrl.models.adapter import targets_of, with_adapters
from mmrl.models.load import load_model, load_policy, skeleton
from mmrl.models.save import write_merged
from mmrl.store.policy import Policy
from mmrl.trainer.settings import Settings
from tests.models.test_loading import SIZES, content, make

EVERYWHERE = Section(r=2, alpha=4, targets=("all-linear",))
IDS = torch.arange(3, 15)[None]


def drawn(model: torch.nn.Module, seed: int = 1) -> None:
    """Draw the second matrices of all adapters, which start at 0."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data = torch.randn(parameter.shape, generator=generator) * 0.3


def saved(folder: Path, model: ModelConfig, **settings: Any) -> Path:
    """Save an adapter that changes what the model says."""
    options: dict[str, Any] = {"r": 2, "target_modules": ["q_proj", "down_proj"], "task_type": "CAUSAL_LM", **settings}
    wrapped = get_peft_model(load_model(model, "cpu"), LoraConfig(**options))
    drawn(wrapped)
    wrapped.save_pretrained(str(folder), save_embedding_layers=False)
    return folder


def weights(change: Callable[[str], str | None]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        file = folder / "adapter_model.safetensors"
        save_file({name: w for n, w in load_file(file).items() if (name := change(n))}, file, {"format": "pt"})

    return apply


def config(**changed: Any) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        file = folder / "adapter_config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **changed}))

    return apply


FAULTS: dict[str, tuple[Callable[[Path], None], str]] = {
    "other names": (weights(lambda n: f"foo.{n.removeprefix('base_model.model.')}"), "lacks 8 of the weights"),
    "one layer": (weights(lambda n: n if "layers.0" in n else None), r"lacks 4 of the weights .*model\.layers\.1\."),
    "one matrix": (
        weights(lambda n: None if n.endswith("1.mlp.down_proj.lora_B.weight") else n),
        "lacks 1 of the weights",
    ),
    "more": (config(target_modules=["q_proj"]), r"has, beside those that fit, 4 of the weights"),
    "IA3": (config(peft_type="IA3"), "is an adapter of the kind IA3, expected LORA"),
    "no kind": (config(peft_type="FOO"), r"adapter_config\.json cannot be read"),
    "other rank": (config(r=3), "does not fit its base, a LlamaForCausalLM: .*size mismatch"),
    "other targets": (config(target_modules=["foo"]), "does not fit its base.*foo.*not found"),
    "no weights": (lambda folder: (folder / "adapter_model.safetensors").unlink(), "has no weights of its adapter"),
    "config is cut": (content("adapter_config.json", "{"), r"adapter_config\.json cannot be read"),
    "git-lfs": (
        content("adapter_model.safetensors", "version https://git-lfs.github.com/spec/v1\noid x\n"),
        r"adapter_model\.safetensors cannot be read: it is a pointer of Git LFS",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_an_adapter_that_does_not_fit_is_refused(fault: str, tmp_path: Path) -> None:
    model = make(tmp_path / "base")
    folder = saved(tmp_path / "adapter", model)
    change, expected = FAULTS[fault]
    change(folder)
    policy = Policy(base=model.path, adapter=str(folder))
    for load in (lambda: load_policy(policy, model, "cpu"), lambda: with_adapters(skeleton(model)[0], policy.folders)):
        with pytest.raises(ConfigError, match=f"^policy: .*{expected}") as caught:
            load()
        assert len(caught.value.problems) == 1 and "\n" not in str(caught.value)


def test_an_adapter_of_a_base_of_another_size_is_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path / "adapter", make(tmp_path / "base"))
    other = make(tmp_path / "other", LlamaConfig(**{**SIZES, "hidden_size": 32}))
    with pytest.raises(ConfigError, match=r"does not fit its base, a LlamaForCausalLM: .*size mismatch"):
        with_adapters(skeleton(other)[0], {"default": str(folder)})
    with pytest.raises(ConfigError, match="expected LORA"):
        wrapped = get_peft_model(load_model(other, "cpu"), IA3Config(task_type="CAUSAL_LM"))
        wrapped.save_pretrained(str(tmp_path / "ia3"))
        with_adapters(skeleton(other)[0], {"default": str(tmp_path / "ia3")})


KINDS: dict[str, dict[str, Any]] = {
    "pissa": {"init_lora_weights": "pissa"},
    "olora": {"init_lora_weights": "olora"},
    "dora": {"use_dora": True},
    "biases": {"bias": "all"},
    "biases of its layers": {"bias": "lora_only"},
    "own biases": {"lora_bias": True},
    "whole head": {"modules_to_save": ["lm_head"]},
    "embeddings": {"target_modules": ["embed_tokens", "q_proj"]},
    "tokens": {"trainable_token_indices": [3, 5]},
    "ranks": {"rank_pattern": {"q_proj": 3}, "alpha_pattern": {"down_proj": 7}, "use_rslora": True},
}
LEFT_OUT = {
    "dora": "lora_magnitude",
    "biases": "mlp.down_proj.base_layer.bias",
    "biases of its layers": "1.self_attn.q_proj.base_layer.bias",
    "own biases": "lora_B.bias",
    "whole head": "lm_head",
    "embeddings": "lora_embedding_B",
    "tokens": "tokens_delta",
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_lora_is_pefts_or_refused_where_a_part_of_it_is_not_there(kind: str, tmp_path: Path) -> None:
    model = make(tmp_path / "base", LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True))
    folder = saved(tmp_path / "adapter", model, **KINDS[kind])
    file = folder / "adapter_model.safetensors"
    generator = torch.Generator().manual_seed(2)
    drawn_ = {name: w + torch.randn(w.shape, generator=generator) * 0.1 for name, w in load_file(file).items()}
    save_file(drawn_, file, {"format": "pt"})
    plain = PeftModel.from_pretrained(load_model(model, "cpu"), str(folder)).eval()
    loaded = with_adapters(load_model(model, "cpu"), {"default": str(folder)}).eval()
    assert torch.allclose(loaded(IDS).logits, plain(IDS).logits, atol=1e-5)
    with_adapters(skeleton(model)[0], {"default": str(folder)})
    if (part := LEFT_OUT.get(kind)) is None:
        return
    kept = {name: w for name, w in drawn_.items() if part not in name}
    assert len(kept) < len(drawn_)
    save_file(kept, file, {"format": "pt"})
    for base in (load_model(model, "cpu"), skeleton(model)[0]):
        with pytest.raises(ConfigError, match=r"^policy: the adapter .* (lacks|does not fit)"):
            with_adapters(base, {"default": str(folder)})


def test_adapters_that_fit_are_those_of_peft(tmp_path: Path) -> None:
    model = make(tmp_path / "base")
    one, two = saved(tmp_path / "one", model), saved(tmp_path / "two", model, r=3)
    plain = PeftModel.from_pretrained(load_model(model, "cpu"), str(two)).eval()
    loaded = with_adapters(load_model(model, "cpu"), {"a": str(one), "b": str(two)}).eval()
    assert loaded.active_adapter == "a"
    loaded.set_adapter("b")
    assert torch.equal(loaded(IDS).logits, plain(IDS).logits)
    assert with_adapters(skeleton(model)[0], {"a": str(one), "b": str(two)}) is not None


# -- a new adapter -----------------------------------------------------------------------------------------------------

MIXTURES: dict[str, PreTrainedConfig] = {
    "qwen3_moe": Qwen3MoeConfig(
        **{**SIZES, "num_hidden_layers": 3, "head_dim": 8},
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=8,
        mlp_only_layers=[1],
    ),
    "qwen2_moe": Qwen2MoeConfig(
        **SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8, shared_expert_intermediate_size=8
    ),
    "mixtral": MixtralConfig(**SIZES, num_local_experts=4),
    "gpt_oss": GptOssConfig(**SIZES, head_dim=8, num_local_experts=4, num_experts_per_tok=2),
    "phimoe": PhimoeConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2),
}


def lora_config(model: Any, path: str, section: Section) -> LoraConfig:
    """The config of peft that a run makes."""
    from mmrl.config import AlgoConfig, TrainConfig

    sections: dict[str, Any] = {"train": TrainConfig(), "algo": AlgoConfig(name="grpo")}
    config = ModelConfig(name="x", path=path, lora=section)
    made = Settings(**sections, model=config, seed=0).lora(model)
    assert made is not None
    return made


@pytest.mark.parametrize("kind", MIXTURES)
def test_an_adapter_reaches_all_experts_and_comes_back(kind: str, tmp_path: Path) -> None:
    """Every matrix of the blocks but the router changes, by the saved adapter and merged as by the trained one."""
    model = make(tmp_path / "base", MIXTURES[kind])
    base = load_model(model, "cpu")
    before = {name: p.detach().clone() for name, p in base.named_parameters()}
    wrapped = get_peft_model(base, lora_config(base, model.path, EVERYWHERE))
    drawn(wrapped)
    wrapped.save_pretrained(str(tmp_path / "adapter"), save_embedding_layers=False)
    trained = wrapped.eval()(IDS).logits
    policy = Policy(base=model.path, adapter=str(tmp_path / "adapter"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mmrl.models.load.load_tokenizer", lambda *_: None)
        loaded = load_policy(policy, model, "cpu")[0].eval()
        write_merged(model.path, tmp_path / "adapter", model, tmp_path / "merged")
    assert torch.allclose(loaded(IDS).logits, trained, atol=1e-6)
    merged = load_model(ModelConfig(name="x", path=str(tmp_path / "merged"), dtype="float32"), "cpu").eval()
    assert torch.allclose(merged(IDS).logits, trained, atol=1e-5)
    same = {name for name, p in merged.named_parameters() if p.ndim > 1 and torch.equal(p, before[name])}
    still = ("embed_tokens.weight", "lm_head.weight", "gate.weight", "router.weight", "_bias")
    assert [name for name in same if not name.endswith(still)] == []
    assert len(same) < len(before) / 2


@pytest.mark.parametrize("kind", MIXTURES)
def test_the_described_share_is_that_of_the_changed_weights(kind: str, tmp_path: Path) -> None:
    model = make(tmp_path, MIXTURES[kind])
    base = load_model(model, "cpu")
    total = sum(p.numel() for p in base.parameters())
    described = targets_of(base, EVERYWHERE).described
    wrapped = get_peft_model(base, lora_config(base, model.path, EVERYWHERE))
    drawn(wrapped)
    merged = dict(wrapped.merge_and_unload().named_parameters())
    plain = dict(load_model(model, "cpu").named_parameters())
    changed = sum(p.numel() for name, p in merged.items() if not torch.equal(p, plain[name]))
    assert described.startswith(f"reaches {changed / total:.1%} of the weights; not embed_tokens")


def test_names_of_one_experts_projections_stand_for_all_of_them(tmp_path: Path) -> None:
    empty = skeleton(make(tmp_path, MIXTURES["qwen2_moe"]))[0]
    named = targets_of(empty, Section(targets=("q_proj", "up_proj")))
    assert named.modules == ["q_proj"]
    assert named.parameters == ["experts.gate_up_proj", "shared_expert.up_proj.weight"]
    with pytest.raises(
        ConfigError, match=r"model\.lora\.targets: .* called w9; expected some of q_proj, .*gate_up_proj"
    ):
        targets_of(empty, Section(targets=("q_proj", "w9")))


def test_dropout_leaves_experts_out_with_a_word(tmp_path: Path) -> None:
    """peft has none for them: with names it is refused, everywhere they are left out."""
    base = load_model(make(tmp_path, MIXTURES["qwen2_moe"]), "cpu")
    section = EVERYWHERE.model_copy(update={"dropout": 0.1})
    found = targets_of(base, section)
    assert found.parameters == [] and "model.lora.dropout=0" in found.warning
    assert targets_of(base, EVERYWHERE).warning == ""
    assert get_peft_model(base, lora_config(base, "x", section)) is not None
    with pytest.raises(ConfigError, match=r"model\.lora\.dropout: got 0\.1, .*experts \(gate_up_proj\)"):
        targets_of(skeleton(make(tmp_path, MIXTURES["qwen2_moe"]))[0], Section(dropout=0.1, targets=("up_proj",)))


def test_several_adapters_and_the_base_itself_are_apart(tmp_path: Path) -> None:
    model = make(tmp_path, MIXTURES["qwen3_moe"])
    plain = load_model(model, "cpu").eval()(IDS).logits
    base = load_model(model, "cpu")
    config = lora_config(base, model.path, EVERYWHERE)
    wrapped = get_peft_model(base, config, adapter_name="a")
    wrapped.add_adapter("b", config)
    drawn(wrapped)
    results = {}
    for name in ("a", "b"):
        wrapped.set_adapter(name)
        results[name] = wrapped.eval()(IDS).logits
    assert not torch.allclose(results["a"], results["b"], atol=1e-3)
    with wrapped.disable_adapter():
        assert torch.equal(wrapped(IDS).logits, plain)
    wrapped.set_adapter("a")
    assert torch.equal(wrapped(IDS).logits, results["a"])


def test_towers_of_images_get_no_adapter(tmp_path: Path) -> None:
    """They have no gradient in a run on text, and their layers are called like the text's."""
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {**SIZES, "head_dim": 8, "layer_types": ["full_attention"] * 2}
    made = Gemma3Config(text_config=text, vision_config={**vision, "image_size": 28, "patch_size": 14})
    base = load_model(make(tmp_path, made), "cpu")
    assert any("vision" in name and name.endswith("q_proj.weight") for name, _ in base.named_parameters())
    wrapped = get_peft_model(base, lora_config(base, "x", EVERYWHERE))
    adapted = {name for name, _ in wrapped.named_parameters() if "lora_" in name}
    assert adapted and not [name for name in adapted if "language_model" not in name]
    wrapped(IDS).logits.sum().backward()
    assert all(p.grad is not None for name, p in wrapped.named_parameters() if "lora_" in name)


def test_a_layer_that_peft_refuses_is_left_out_and_named() -> None:
    sizes: dict[str, Any] = {
        **SIZES,
        "mamba_d_ssm": 16,
        "mamba_n_heads": 4,
        "mamba_d_head": 4,
        "mamba_d_state": 4,
        "mamba_n_groups": 1,
    }
    model = AutoModelForCausalLM.from_config(FalconH1Config(**sizes))
    found = targets_of(model, EVERYWHERE)
    assert "out_proj" not in found.modules and "mamba.out_proj" in found.described
    with pytest.raises(ConfigError, match="called out_proj"):
        targets_of(model, Section(targets=("q_proj", "out_proj")))
    assert get_peft_model(model, lora_config(model, "x", EVERYWHERE)) is not None


def test_a_base_that_names_its_type_in_its_text_part_is_merged_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the published config of Gemma 3 does; without a type of its own it would be taken for float32."""
    monkeypatch.setattr("mmrl.models.load.load_tokenizer", lambda *_: None)
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {**SIZES, "head_dim": 8, "layer_types": ["full_attention"] * 2}
    made = Gemma3Config(text_config=text, vision_config={**vision, "image_size": 28, "patch_size": 14})
    model = make(tmp_path / "base", made)
    file = tmp_path / "base" / "config.json"
    stored = json.loads(file.read_text())
    stored.pop("dtype", None)
    stored["text_config"]["dtype"] = "bfloat16"
    file.write_text(json.dumps(stored))
    base = load_model(model, "cpu")
    get_peft_model(base, lora_config(base, model.path, EVERYWHERE)).save_pretrained(str(tmp_path / "adapter"))
    (tmp_path / "base" / "preprocessor_config.json").write_text("{}")
    assert write_merged(model.path, tmp_path / "adapter", model, tmp_path / "merged") == "bfloat16"
    assert (tmp_path / "merged" / "preprocessor_config.json").is_file(), "vLLM loads no model of images without it"
