"""`model.matmul=onednn`: the same numbers as torch's own products but for the last digits, and where it is refused."""

import peft
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from mmrl.cli.configs import train_configs
from mmrl.cli.overrides import read_line
from mmrl.config import ModelConfig, RlRunConfig
from mmrl.config.schema import LoraConfig
from mmrl.engines.embedded.decode import NativeLoop
from mmrl.engines.embedded.prefixes import PrefixSegment
from mmrl.engines.embedded.shared_prefix import Groups, SharedPrefix, after_prefix
from mmrl.errors import ConfigError
from mmrl.models.linear import OneDnnLinear, onednn, use_onednn
from mmrl.models.load import load_model
from mmrl.models.save import write_merged
from mmrl.run.build import _long_warmup, _slow_products
from tests.engines.test_decode import assert_logits_of, build, row
from tests.helpers.trainer_cases import gradients, make_calls, make_trainer, tiny_model, tiny_tokenizer

needs_onednn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")


@needs_onednn
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(7,), (80,), (2, 80), (1, 0)])
@pytest.mark.parametrize(("inner", "outer"), [(96, 128), (5, 130), (70, 3)])
def test_output_and_gradients_of_a_layer_are_those_of_torch(shape, inner, outer, bias):
    generator = torch.Generator().manual_seed(0)
    plain = nn.Linear(inner, outer, bias=bias)
    other = nn.Linear(inner, outer, bias=bias)
    other.load_state_dict(plain.state_dict())
    use_onednn(other)
    assert type(other) is OneDnnLinear
    x = torch.randn(*shape, inner, generator=generator)
    weights = torch.randn(*shape, outer, generator=generator)
    results = []
    for layer in (plain, other):
        given = x.clone().requires_grad_()
        out = layer(given)
        (out * weights).sum().backward()
        results.append([out.detach(), given.grad, *(p.grad for p in layer.parameters())])
    for one, two in zip(*results, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-4)


@needs_onednn
def test_frozen_weights_get_no_gradient_and_other_types_are_torchs():
    layer = nn.Linear(80, 96)
    use_onednn(layer)
    layer.requires_grad_(False)
    x = torch.randn(4, 80, requires_grad=True)
    out = layer(x)
    assert out.grad_fn.saved_tensors[0] is None  # the input, which only the weight's gradient needs
    out.sum().backward()
    assert layer.weight.grad is None
    torch.testing.assert_close(x.grad, layer.weight.sum(0).expand(4, -1))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16
    double = layer.double()
    torch.testing.assert_close(double(x.double()), F.linear(x.double(), double.weight, double.bias))


@needs_onednn
@pytest.mark.parametrize("lora", [None, LoraConfig(r=4)], ids=["full", "lora"])
def test_an_update_has_the_same_loss_and_gradients(tmp_path, lora):
    """Packed tries, the narrowed last layer and the head's chunks among it."""
    found = []
    for matmul in ("torch", "onednn"):
        model = tiny_model()
        if matmul == "onednn":
            use_onednn(model)
        trainer = make_trainer(tmp_path / matmul, model=model, lora=lora)
        found.append(gradients(trainer, make_calls()))
    (loss, plain), (other_loss, other) = found
    assert other_loss == pytest.approx(loss, rel=1e-5)
    assert plain.keys() == other.keys()
    for name, gradient in plain.items():
        torch.testing.assert_close(gradient, other[name], rtol=1e-3, atol=1e-5)


@needs_onednn
def test_a_weight_with_gaps_between_its_rows_is_multiplied_as_any_other():
    """oneDNN's kernel for such a weight is hundreds of times slower; it gets a dense one."""
    wide = torch.randn(30, 3, 8)
    x = torch.randn(5, 8)
    for weight, given in [(wide[:, 1], x), (wide[:, 2].t(), torch.randn(5, 30))]:
        assert not weight.is_contiguous() and not weight.t().is_contiguous()
        torch.testing.assert_close(onednn(given, weight, None), given @ weight.t())


@pytest.mark.parametrize("by_onednn", [False, pytest.param(True, marks=needs_onednn)])
def test_rows_of_a_shared_prefix_are_attended_as_if_each_had_all_of_it(by_onednn):
    heads, width, rows, size = 2, 3, 4, 8
    cache = [torch.randn(2, heads, 300, size)]
    prefix = SharedPrefix(PrefixSegment(tuple(range(300)), leaf=True, cache=cache), 290)
    query = torch.randn(rows, heads, width, size)
    key, value = torch.randn(2, rows, heads, 6, size)
    groups = Groups([prefix, None, prefix, prefix], torch.device("cpu"), by_onednn)
    found = groups.attend(query, key, value, None, 0)
    for one in range(rows):
        before = prefix.layer(0) if one != 1 else prefix.layer(0)[:, :, :0]
        keys, values = torch.cat([before[0], key[one]], dim=1), torch.cat([before[1], value[one]], dim=1)
        expected = torch.nn.functional.scaled_dot_product_attention(query[one], keys, values)
        torch.testing.assert_close(found[one], expected, rtol=1e-4, atol=1e-5)


@needs_onednn
@pytest.mark.parametrize(("count", "width", "length"), [(1, 1, 300), (3, 7, 257), (40, 9, 600)])
def test_segments_after_a_prefix_are_attended_as_if_each_had_all_of_it(count, width, length):
    kv_heads, groups, size = 2, 3, 8
    # As `decode` has them: views of one product.
    qkv = torch.randn(count, width, kv_heads * (groups + 2), size)
    query = qkv[:, :, : kv_heads * groups].transpose(1, 2)
    key, value = qkv[:, :, kv_heads * groups :].view(count, width, 2, kv_heads, size).permute(2, 0, 3, 1, 4)
    prefix = 3 * torch.randn(2, kv_heads, length + 5, size)[:, :, :length]
    found = after_prefix(query, key, value, prefix)
    keys, values = (
        torch.cat([part.expand(count, -1, -1, -1), own], dim=2).repeat_interleave(groups, 1)
        for part, own in zip(prefix, (key, value), strict=True)
    )
    seen = torch.ones(width, length + width, dtype=torch.bool).tril(length)
    expected = torch.nn.functional.scaled_dot_product_attention(query, keys, values, attn_mask=seen)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("by_onednn", [False, pytest.param(True, marks=needs_onednn)])
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "lora"])  # biases and LoRA updates among them
@pytest.mark.parametrize("samples", [1, 3])
def test_prompts_after_a_long_prefix_have_the_logits_of_the_model(name, by_onednn, samples):
    """Prefilled together, one later than the others, and one more that goes on from a stored prompt; then a step."""
    policy = build(name)
    if by_onednn:
        use_onednn(policy)
    shared = [(7 * n) % 29 + 1 for n in range(300)]
    prompts = [[*shared, *tail] for tail in ([3], [4, 5, 6], [3, 3, 8, 9, 1, 2], list(range(1, 20)))]
    own = NativeLoop(policy)
    with torch.no_grad():
        own.start()
        asked = [prompts[0], *[prompts[1]] * samples, prompts[2]]
        first = own.prefill([row(prompt) for prompt in asked])
        later = own.prefill([row(prompts[3])])
        step = own.step([5] * (len(asked) + 1))
        products = {linear.product for layer in own.weights.layers for linear in (layer.qkv, layer.down)}
        assert products == {onednn if by_onednn else F.linear}
    rows = [*asked, prompts[3]]
    assert_logits_of(policy, [*rows, *([*prompt, 5] for prompt in rows)], [*first, *later, *step])


@needs_onednn
def test_weights_that_are_not_float32_are_refused():
    load = ModelConfig(name="tiny", path="tiny", matmul="onednn", dtype="bfloat16")
    with pytest.raises(ConfigError, match=r"model\.matmul: got onednn, .*; the weights are bfloat16 on cpu"):
        load_model(load, "cpu")
    kinds = {type(part) for part in load_model(load.model_copy(update={"dtype": "auto"}), "cpu").modules()}
    assert OneDnnLinear in kinds
    assert nn.Linear not in kinds


@needs_onednn
def test_merging_into_a_base_of_another_type_computes_in_that_type(tmp_path):
    """`mmrl export`, and a stage from the adapter of the one before."""
    base = tiny_model(dtype=torch.bfloat16)
    base.save_pretrained(tmp_path / "base")
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    peft.get_peft_model(base, config).save_pretrained(tmp_path / "adapter")
    tiny_tokenizer().save_pretrained(tmp_path / "base")
    run = ModelConfig(name="x", path=str(tmp_path / "base"), matmul="onednn", chat_template="plain")
    made = write_merged(str(tmp_path / "base"), tmp_path / "adapter", run, tmp_path / "merged")
    assert made == "bfloat16" and (tmp_path / "merged" / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("dtype", "device", "bf16", "amx", "said"),
    [
        ("bfloat16", "cpu", False, False, True),
        ("bfloat16", "cpu", True, False, False),
        ("bfloat16", "cpu", False, True, False),
        ("float32", "cpu", False, False, False),
        ("bfloat16", "cuda", False, False, False),
    ],
)
def test_a_cpu_without_bfloat16_products_is_said(dtype, device, bf16, amx, said, monkeypatch):
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: bf16)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    assert _slow_products(dtype, device).startswith("model.dtype: got bfloat16") is said


@pytest.mark.parametrize(("steps", "said"), [(7, True), (8, False)])
def test_a_critic_that_warms_up_all_through_a_run_is_said(steps, said):
    (config,) = train_configs(read_line(["algo=ppo", "task=search_agent", f"train.steps={steps}"]))
    assert isinstance(config, RlRunConfig)
    assert bool(_long_warmup(config)) is said
