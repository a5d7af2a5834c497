"""conf/experiment: every row of a table composes and validates, without data or weights, and says what it is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from mmrl.cli import main
from mmrl.cli.hydra import composed
from mmrl.config import EvalCommandConfig, TrainCommandConfig, validate
from mmrl.system.conf import options
from mmrl.tasks import TASKS

ROWS = options("experiment")
FOLDER = Path(__file__).parents[2] / "conf" / "experiment"


def text_of(row):
    return (FOLDER / f"{row}.yaml").read_text(encoding="utf-8")


def trains(row):
    """A row that names an algorithm is a training run; the others are evaluations."""
    return "override /algo:" in text_of(row)


def config_of(row):
    if trains(row):
        return validate(TrainCommandConfig, composed("train", [f"experiment={row}"]))
    overrides = [f"experiment={row}"] + ([] if "\npolicy:" in text_of(row) else ["++policy=RUN"])
    return validate(EvalCommandConfig, composed("eval", overrides))


def test_all_three_papers_have_rows():
    assert {row.split("/")[0] for row in ROWS} >= {"mmgrpo", "mhgpo", "mt_grpo", "mt_ppo"}
    assert all(len(row.split("/")) == 3 for row in ROWS)


@pytest.mark.parametrize("row", ROWS)
def test_every_row_composes_and_validates(row):
    config = config_of(row)
    chosen = {key: value for part in yaml.safe_load(text_of(row))["defaults"] for key, value in part.items()}
    assert config.task.name == chosen["override /task"]
    assert config.model.name == chosen["override /model"] != "tiny"
    assert config.task.name in TASKS
    if trains(row):
        assert config.algo.name == chosen["override /algo"]
    assert text_of(row).startswith("# @package _global_\n# ")


@pytest.mark.parametrize("row", ["mhgpo/table1/mhgpo_rr", "mt_grpo/table5/mt_grpo", "mt_ppo/figure6/mt_ppo_judge"])
def test_a_row_is_printed_by_the_command(row, capfd):
    assert main(["train", f"experiment={row}", "--cfg", "job"]) == 0
    assert f"name: {row.split('/')[-1].removesuffix('_judge')}" in capfd.readouterr().out


def test_a_column_is_printed_by_the_command(capfd):
    assert main(["eval", "experiment=mhgpo/columns/2wiki", "policy=RUN", "--cfg", "job"]) == 0
    assert "2wikimultihopqa" in capfd.readouterr().out


# The papers' numbers, from the papers: what a row must come to, whatever file sets it.
NUMBERS = {
    "mmgrpo/table1/banking77_qwen3_8b_mmgrpo": {
        "train.steps": 750,
        "train.batch_size": 4,
        "algo.rollouts": 12,
        "train.lr": 1e-5,
        "algo.beta": 0.01,
        "train.grad_clip": 0.1,
        "algo.temperature": 0.6,
        "algo.max_context": 8192,
        "task.max_tokens": 1032,
        "task.max_context": 32768,
        "eval.temperature": 0.6,
        "eval.top_p": 0.95,
        "eval.top_k": 20,
        "eval.parse_retries": 3,
        "model.lora.r": 16,
        "model.lora.alpha": 64,
        "model.lora.dropout": 0.05,
    },
    "mmgrpo/table1/banking77_llama31_8b_mmgrpo": {
        "algo.beta": 0.04,
        "train.grad_clip": 0.5,
        "eval.top_p": 0.9,
        "eval.top_k": 0,
    },
    "mmgrpo/table1/papillon_qwen3_8b_mmgrpo": {
        "task.external.model": "gpt-4.1-mini-2025-04-14",
        "task.judge.model": "gpt-4.1-mini-2025-04-14",
        "algo.rollouts": 12,
    },
    "mmgrpo/table1/hover_llama31_8b_mmgrpo": {
        "task.hop_top_k": 10,
        "task.last_top_k": 30,
        "task.passages": 100,
        "task.search_hops": 4,
        "task.retriever.name": "colbert",
        "algo.beta": 0.04,
    },
    "mhgpo/table1/mhgpo_rr": {
        "train.lr": 5e-7,
        "train.batch_size": 512,
        "train.steps": 176,
        "algo.group_size": 4,
        "algo.clip": 0.2,
        "algo.top_p": 0.9,
        "algo.beta": 0.001,
        "algo.epochs": 1,
        "task.data.dev_items": 500,
        "eval.every": 5,
        "model.lora": None,
    },
    "mhgpo/table1/mappo": {"algo.critic_lr_factor": 2.0, "train.lr": 5e-7, "algo.gamma": 1.0},
    "mt_grpo/table5/mt_grpo": {
        "algo.group_size": 21,
        "train.lr": 1e-6,
        "train.warmup_steps": 20,
        "algo.beta": 0.0,
        "algo.epochs": 2,
        "train.steps": 150,
        "train.batch_size": 16,
        "train.adam_beta2": 0.99,
        "train.grad_clip": 0.1,
        "algo.temperature": 0.9,
        "task.max_completion": 1024,
        "task.retriever.top_k": 1,
    },
    "mt_ppo/table2/mt_ppo": {
        "train.lr": 1e-6,
        "algo.critic_lr_factor": 10.0,
        "train.steps": 500,
        "train.batch_size": 512,
        "algo.minibatches": 2,
        "train.warmup_steps": 284,
        "algo.critic_warmup_steps": 14,
        "algo.gamma": 1.0,
        "algo.gae_lambda": 1.0,
        "task.max_tokens": 500,
        "task.max_observation": 500,
        "task.max_context": 4096,
        "task.max_turns": 4,
        "task.retriever.top_k": 3,
        "task.search_penalty": 0.1,
        "algo.beta": 0.001,
    },
    "mt_ppo/table2/grpo": {"algo.group_size": 5, "algo.eps": 1e-6, "algo.beta": 0.001, "train.batch_size": 512},
    "mt_ppo/figure4/lambda_0": {"task.search_penalty": 0.0},
    "mt_ppo/figure6/mt_ppo_judge": {
        "task.reward": "judge_turn",
        "task.judge.max_tokens": 2048,
        "task.judge.concurrency": 64,
        "task.judge.retries": 2,
    },
    "mt_ppo/figure6/ppo_judge": {"task.reward": "judge_outcome"},
    "mhgpo/table4/mappo_final_only": {"algo.penalties": False},
    "mhgpo/table3/mhgpo_rr_random": {"algo.aggregate": "random"},
    "mhgpo/table2/only_rewriter": {"algo.train_modules": ("rewriter",)},
    "mhgpo/group_size/fof_6": {"algo.group_size": 6},
    "mhgpo/table1/r1_searcher_ppo_stage1": {"task.reward": "stage1"},
    "mhgpo/table1/r1_searcher_ppo_stage2": {"task.reward": "outcome"},
}


@pytest.mark.parametrize("row", NUMBERS)
def test_the_papers_numbers(row):
    config = config_of(row)
    for key, expected in NUMBERS[row].items():
        value = config
        for part in key.split("."):
            value = getattr(value, part)
        assert value == expected, key


def test_every_row_stands_in_the_docs():
    """docs/reproducing.md names each row, or the pattern it belongs to."""
    text = (FOLDER.parent.parent / "docs" / "reproducing.md").read_text(encoding="utf-8")
    named = re.findall(r"experiment=([\w/{},]+)", text.replace("RUN experiment", "experiment"))
    patterns = [re.compile(re.sub(r"\{([\w,]+)\}", lambda m: f"({m[1].replace(',', '|')})", name)) for name in named]
    assert [row for row in ROWS if not any(pattern.fullmatch(row) for pattern in patterns)] == []
