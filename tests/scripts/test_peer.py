"""TRL's GRPOTrainer on a task of mmrl's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import cast

import pytest

from mmrl.cli.configs import configured
from mmrl.config import RlRunConfig
from mmrl.models.load import load_tokenizer
from mmrl.system.conf import later_wins
from scripts import peer

WORDS = ["task=qa_direct", "train.steps=2", "train.batch_size=2", "algo.group_size=2", "algo.clip=0.2"]


def test_examples_prompts_and_rewards_are_those_of_the_task() -> None:
    config = cast(RlRunConfig, configured(["algo=grpo", *WORDS]))
    tokenizer = load_tokenizer(config.model)
    task = peer.Peer(config, tokenizer, {int(tokenizer.eos_token_id)})
    rows = task.dataset()
    assert len(rows) == 4 and len({example.id for example in task.examples}) == 4
    for prompt, example in zip(rows["prompt"], task.examples, strict=True):
        assert example.inputs["question"] in prompt[-1]["content"]

    def said(text: str) -> list[int]:
        return [*tokenizer(text, add_special_tokens=False)["input_ids"], int(tokenizer.eos_token_id)]

    golds = [example.metadata["answers"][0] for example in task.examples]
    right = task.reward(number=[2, 0], completion_ids=[said(golds[2]), said(golds[0])])
    wrong = task.reward(number=[2, 0], completion_ids=[said(golds[0]), said("nobody")])
    assert right == [1.0, 1.0] and max(wrong) < 1.0


def test_a_line_for_each_step_and_a_policy(tmp_path: Path) -> None:
    assert peer.main([str(tmp_path / "peer"), "micro=4", *WORDS, "hardware.threads=1"]) == 0
    lines = [json.loads(line) for line in (tmp_path / "peer" / "steps.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2] and all(line["cpu_s"] > 0 for line in lines)
    assert (tmp_path / "peer" / "policy" / "config.json").is_file()


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["algo.zero_variance=drop", "train.tis=2", "seed=1"], "not taken by TRL: algo.zero_variance, train.tis"),
        (["micro=3"], "micro: got 3, expected a divisor of 4, the rollouts of a step"),
        (["task=hotpotqa"], "the program calls more than once"),
    ],
    ids=["options", "micro", "program"],
)
def test_what_trl_would_do_otherwise_is_refused(words: list[str], why: str, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=why):
        peer.main([str(tmp_path / "peer"), *later_wins(["micro=4", *WORDS, "hardware.threads=1", *words])])
