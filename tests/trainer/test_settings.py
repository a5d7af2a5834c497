"""What the trainer's settings hand to Hugging Face's Trainer."""

from pathlib import Path

import pytest

from mmrl.config import ModelConfig, TrainConfig
from mmrl.config.algo import GrpoConfig
from mmrl.trainer.settings import Settings


@pytest.mark.parametrize(
    ("key", "value", "argument"),
    [
        ("lr", 0.02, "learning_rate"),
        ("schedule", "cosine", "lr_scheduler_type"),
        ("warmup_steps", 3, "warmup_steps"),
        ("grad_clip", 0.3, "max_grad_norm"),
        ("adam_beta1", 0.7, "adam_beta1"),
        ("adam_beta2", 0.8, "adam_beta2"),
        ("weight_decay", 0.05, "weight_decay"),
    ],
)
def test_an_optimizer_key_reaches_the_trainer(key: str, value: float | str, argument: str) -> None:
    train = TrainConfig.model_validate({"steps": 10, key: value})
    model = ModelConfig(name="tiny", path="tiny")
    settings = Settings(train=train, algo=GrpoConfig(name="grpo", epochs=2), model=model, seed=0)
    arguments = settings.arguments(Path("out"), on_cpu=True, autocast=False, dense=True)
    assert arguments[argument] == value
    assert arguments["max_steps"] == 20
