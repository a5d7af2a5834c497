"""A row's critic, fitted to a policy that stays: against V by enumeration, and bit for bit beside the policy."""

import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mmrl import rng
from mmrl.algorithms import assign_credit
from mmrl.audit import critic
from mmrl.audit.critic import fit
from mmrl.config.algo import ALGO_SCHEMAS
from mmrl.records import Forest
from mmrl.stages.rl import RlStage
from mmrl.trainer.forwards import annotate
from mmrl.trainer.trl_trainer import MmrlTrainer
from tests.helpers.forests import Grow
from tests.helpers.tabular import History, Table, two, word
from tests.helpers.tabular_model import tabular_model, vocabulary
from tests.helpers.trainer_cases import LORA, changed, make_trainer, tiny_model, weights_of

near: Any = pytest.approx

TABLE = two(examples=4)
COUNT = 64
"""Rollouts of a batch."""


def played(table: Table, key: object) -> Forest:
    """One rollout for each of `COUNT` examples, drawn in plain Python."""
    grow, words = Grow(table.modules), vocabulary(table)
    for number in range(COUNT):
        draw, history, parent = rng.stream(str(key), number), tuple[int, ...](), None
        while table.following(history) is not None:
            chances = table.probabilities(history)
            reply = draw.choices(range(len(chances)), weights=chances)[0]
            parent = grow.call(
                f"q{number}/0#{len(history)}",
                parent,
                table.module(history),
                prompt_ids=(words.index(word(history)),),
                completion_ids=(words.index(f"r{reply}"),),
                logprobs=(math.log(chances[reply]),),
            )
            history = (*history, reply)
        grow.end(parent, table.outcome(number % table.examples, history), id=f"q{number}/0")
    return grow.forest


def row_of(trainer: MmrlTrainer) -> RlStage:
    algo: Any = trainer.settings.algo
    stage: Any = SimpleNamespace(
        trainer=trainer,
        config=SimpleNamespace(train=trainer.settings.train, algo=algo, seed=0),
        credit=lambda forest: assign_credit(forest, algo, 0),
        assignment=SimpleNamespace(frozen=frozenset()),
    )
    found: RlStage = stage
    return found


def batches(trainer: MmrlTrainer, table: Table = TABLE) -> Callable[[int], Forest]:
    return lambda number: annotate(trainer.forwards, played(table, number))


def with_critic(folder: Path, name: str = "ppo", model: Any = None, lora: Any = None, **keys: Any) -> MmrlTrainer:
    train = {key: keys.pop(key) for key in ("lr", "packing") if key in keys}
    algo = ALGO_SCHEMAS[name].model_validate({"name": name, "beta": 0.0, **keys})
    policy = tabular_model(TABLE) if model is None else model
    return make_trainer(folder, policy, lora=lora, algo=algo, selfcheck=False, **train)


def mean_v(history: History) -> float:
    """V that a critic can know, to which all examples look alike."""
    return math.fsum(TABLE.v(e, history) for e in range(TABLE.examples)) / TABLE.examples


def values(weights: dict[str, torch.Tensor]) -> dict[History, float]:
    words = vocabulary(TABLE)
    at = {history: words.index(word(history)) for history in TABLE.histories}
    return {h: float(weights["head.weight"][0, i] + weights["head.bias"][0]) for h, i in at.items()}


def explainable() -> float:
    """1 - E[(R - V)²] / Var R over the calls of all rollouts."""
    found = [
        (p, TABLE.outcome(e, path), mean_v(path[:n]))
        for e in range(TABLE.examples)
        for p, path in TABLE.paths()
        for n in range(len(path))
    ]
    total = math.fsum(p for p, _, _ in found)
    mean = math.fsum(p * r for p, r, _ in found) / total
    return 1 - math.fsum(p * (r - v) ** 2 for p, r, v in found) / math.fsum(p * (r - mean) ** 2 for p, r, _ in found)


@pytest.mark.parametrize("name, kind", [("ppo", "separate"), ("ppo", "head"), ("mappo", "head")])
def test_values_approach_those_by_enumeration(name: str, kind: str, tmp_path: Path) -> None:
    trainer = with_critic(tmp_path, name, critic=kind, lr=0.002, critic_lr_factor=10.0)
    before = weights_of(trainer)
    explained = fit(row_of(trainer), batches(trainer), tmp_path / "critic")
    assert not changed(before, weights_of(trainer)) and all(w.grad is None for w in trainer.model.parameters())
    found = values(load_file(tmp_path / "critic" / "critic.safetensors"))
    for history in TABLE.histories:
        assert found[history] == near(mean_v(history), abs=0.06)
    # 512 held-out rollouts: at most what can be explained, and their own noise.
    assert explained[0] < 0 < max(explained) == near(explainable(), abs=0.06)
    assert critic.PATIENCE < len(explained) < critic.ROUNDS, "it ended by itself"


def test_a_perfect_critic_has_nothing_to_learn(tmp_path: Path) -> None:
    """What it explains at first is what can be explained, and rounds end at once."""
    trainer = with_critic(tmp_path, critic="head", critic_init="zero", lr=1e-6)
    assert trainer.critic is not None
    words = vocabulary(TABLE)
    with torch.no_grad():
        for history in TABLE.histories:
            trainer.critic.module.head.weight[0, words.index(word(history))] = mean_v(history)
    explained = fit(row_of(trainer), batches(trainer), tmp_path / "critic")
    assert explained[0] == near(explainable(), abs=0.06) and len(explained) == 1 + 2 * critic.PATIENCE


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["separate", "adapter", "head"])
def test_the_policy_stays_bit_for_bit_and_the_fit_is_the_same_again(kind: str, tmp_path: Path) -> None:
    """A transformer with an adapter: the critic's own weights move, and nothing that the policy replies with."""
    files = []
    for again in ("first", "second"):
        trainer = with_critic(tmp_path / again, model=tiny_model(), lora=LORA, critic=kind, lr=1e-4)
        assert trainer.critic is not None
        calls = list(played(TABLE, 0).calls.values())
        before, own, replied = weights_of(trainer), trainer.critic.state(), trainer.forwards.policy_logprobs(calls)
        own = {name: weight.clone() for name, weight in own.items()}
        fit(row_of(trainer), batches(trainer), tmp_path / again / "critic")
        of_critic = {name for name in before if ".critic." in name}
        moved = changed(before, weights_of(trainer))
        assert moved <= of_critic and bool(moved) == (kind == "adapter")
        assert changed(own, trainer.critic.state()), "the critic learns"
        assert trainer.forwards.policy_logprobs(calls) == replied
        files.append((tmp_path / again / "critic" / "critic.safetensors").read_bytes())
    assert files[0] == files[1]


def test_a_level_that_is_wrong_counts_and_bootstrapping_does_not_flatter(tmp_path: Path) -> None:
    """With lambda 0 a constant's returns are nearly its own values; what it explains is 0 less its squared error."""
    trainer = with_critic(tmp_path, critic="head", critic_init="zero", gae_lambda=0.0, lr=1e-9)
    found = []
    for level in (0.0, 5.0):
        assert trainer.critic is not None
        with torch.no_grad():
            trainer.critic.module.head.bias.fill_(level)
        found.append(fit(row_of(trainer), batches(trainer), tmp_path / "critic")[0])
    returns = [r.reward for n in range(critic.HELD_OUT) for r in played(TABLE, n).rollouts if r.reward is not None]
    mean = math.fsum(returns) / len(returns)
    variance = math.fsum((r - mean) ** 2 for r in returns) / len(returns)
    assert found == near([1 - (variance + (level - mean) ** 2) / variance for level in (0.0, 5.0)], rel=1e-5)


def test_a_warm_up_is_waited_for(tmp_path: Path) -> None:
    trainer = with_critic(tmp_path, critic="head", critic_warmup_steps=48, lr=1e-9)
    explained = fit(row_of(trainer), batches(trainer), tmp_path / "critic")
    assert len(explained) == 1 + 48 // critic.ROUND + critic.PATIENCE
