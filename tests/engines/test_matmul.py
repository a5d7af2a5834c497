"""`engine.matmul=onednn`: the same distributions as torch's own products, and where it cannot be had."""

import pytest
import torch

from mmrl.cli import main
from mmrl.config.engines import TransformersConfig
from mmrl.engines.embedded.architecture import onednn
from mmrl.engines.embedded.decode import NativeLoop
from mmrl.engines.embedded.transformers_engine import TransformersEngine
from mmrl.errors import ConfigError
from tests.engines.test_decode import build, row
from tests.helpers.trainer_cases import tiny_model, tiny_tokenizer

needs_onednn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")


@needs_onednn
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "lora"])
def test_the_same_logits_but_for_the_last_digits(name):
    """Prompts of several lengths, then a step; biases (qwen2) and LoRA updates among them."""
    policy = build(name)
    loops = [NativeLoop(policy), NativeLoop(policy)]
    loops[1].weights.multiply_with(onednn)
    made = []
    with torch.no_grad():
        for own in loops:
            own.start()
            made.append([own.prefill([row([3] * 20), row([4, 5, 6]), row([3] * 19 + [7])]), own.step([1, 2, 3])])
    for plain, other in zip(*made, strict=True):
        assert (plain - other).abs().max() < 1e-4


@needs_onednn
def test_with_another_loop_or_precision_it_is_refused():
    def engine(dtype, **options):
        return TransformersEngine(
            tiny_model(dtype=dtype), tiny_tokenizer(), TransformersConfig(matmul="onednn", **options)
        )

    engine(torch.float32).close()
    with pytest.raises(ConfigError, match=r"engine\.matmul: got onednn, .*; the weights are bfloat16 on cpu"):
        engine(torch.bfloat16)
    with pytest.raises(ConfigError, match=r"engine\.matmul: has no effect with engine\.loop=hf"):
        engine(torch.float32, loop="hf")


@pytest.mark.parametrize("other", ["engine.loop=hf", "hardware=gpu1"])
def test_typed_where_it_does_nothing_it_is_refused_before_anything_loads(other, capsys, monkeypatch):
    monkeypatch.setattr("mmrl.models.load.load_model", None)
    assert main(["train", "engine.matmul=onednn", other]) == 2
    assert "engine.matmul: got onednn, which has no effect with " in capsys.readouterr().err
