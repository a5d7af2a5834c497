"""conf/algo: one file per algorithm, valid, complete, and every option has an effect where it is offered."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from mmrl.config import ALGO_SCHEMAS, TrainConfig
from mmrl.config.schema import LoraConfig

CONF = Path(__file__).parents[2] / "conf" / "algo"
PAPER_FREE = {"parse_retries", "top_k", "clip_high", "loss_length", "scale", "std_over", "baseline", "zero_variance"}
"""Off by default and in no paper: not in the files."""
PAPER_FREE |= {
    "loss",
    "whiten_within",
    "advantage_scale",
    "penalty_scale",
    "frozen_serving",
    "ratio_one",
    "refill_rounds",
    "reserialise",
}


def tuples(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: tuples(item) for key, item in value.items()}
    return tuple(map(tuples, value)) if isinstance(value, list) else value


def test_every_algorithm_has_its_file_and_no_other():
    assert {path.stem for path in CONF.glob("*.yaml")} >= set(ALGO_SCHEMAS)


@pytest.mark.parametrize("name", ALGO_SCHEMAS)
def test_files_validate_and_spell_out_the_algorithms_own_options(name):
    text = (CONF / f"{name}.yaml").read_text(encoding="utf-8")
    assert text.startswith("# @package _global_\n# ")
    raw = tuples(yaml.safe_load(text))
    algo = ALGO_SCHEMAS[name].model_validate(raw["algo"])
    assert algo.name == name
    TrainConfig.model_validate(raw["train"])
    if "model" in raw:
        LoraConfig.model_validate(raw["model"]["lora"])
    own = set(ALGO_SCHEMAS[name].model_fields) - PAPER_FREE - {"train_modules", "freeze_modules", "penalties"}
    assert own <= set(raw["algo"]) | {"penalties"}


@pytest.mark.parametrize("name", ALGO_SCHEMAS)
def test_lines_with_a_value_are_aligned_comments_or_plain(name):
    for line in (CONF / f"{name}.yaml").read_text(encoding="utf-8").splitlines():
        assert len(line) <= 120 and line == line.rstrip()
