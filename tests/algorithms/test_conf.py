"""conf/algo: one file per algorithm, valid, complete, and every option has an effect where it is offered."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from mmrl.config import ALGO_SCHEMAS, TrainConfig
from mmrl.config.schema import LoraConfig
from mmrl.config.validate import as_tuples

CONF = Path(__file__).parents[2] / "conf" / "algo"
PAPER_FREE = {
    "distill",
    "distill_coef",
    "distill_kl",
    "privileged",
    "parse_retries",
    "top_k",
    "clip_high",
    "loss_length",
    "scale",
    "std_over",
    "baseline",
    "zero_variance",
}
"""Off by default and in no paper: not in the files."""
PAPER_FREE |= {
    "loss",
    "whiten_within",
    "advantage_scale",
    "penalty_scale",
    "distill",
    "distill_coef",
    "distill_kl",
    "privileged",
    "frozen_serving",
    "ratio_one",
    "refill_rounds",
    "reserialise",
}


@pytest.mark.parametrize("name", ALGO_SCHEMAS)
def test_files_validate_and_spell_out_the_algorithms_own_options(name):
    text = (CONF / f"{name}.yaml").read_text(encoding="utf-8")
    assert text.startswith("# @package _global_\n# ")
    raw: Any = as_tuples(yaml.safe_load(text))
    if name == "distill":
        raw["algo"]["distill"] = {"a": "policy"}  # left to the user
    algo = ALGO_SCHEMAS[name].model_validate(raw["algo"])
    assert algo.name == name
    TrainConfig.model_validate(raw["train"])
    if "model" in raw:
        LoraConfig.model_validate(raw["model"]["lora"])
    own = set(ALGO_SCHEMAS[name].model_fields) - PAPER_FREE - {"train_modules", "freeze_modules", "penalties"}
    assert own <= set(raw["algo"]) | {"penalties"}
