"""Equal calls: which base batches a budget is worth, and base batches that are credited as one."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mmrl.audit.budgets import base_batches, joined, runs, scaled_alike
from mmrl.audit.gradients import gradient
from mmrl.credit.scored import scored_rollouts
from mmrl.stages.collect import train_calls
from tests.helpers.forests import credit
from tests.helpers.trainer_cases import make_trainer
from tests.trainer.test_laws_gradients import MODULES, forest_of


def test_runs_by_hand():
    assert runs(24, 8, 4, 1) == [range(3), range(3, 6), range(6, 9), range(9, 12)]
    assert runs(24, 8, 4, 4) == [range(12)]
    # Base batches begin at 0, 20, 40, 60, 80 and 100 calls, units at 0, 24, 48, 72 and 96.
    assert runs(24, 20, 5, 1) == [range(2), range(2, 3), range(3, 4), range(4, 5), range(5, 6)]
    assert runs(24, 20, 5, 2) == [range(3), range(3, 5)], "the fifth unit is left over"
    assert runs(24, 24, 3, 4) == []


@given(st.integers(1, 400), st.floats(0.05, 1), st.integers(3, 20), st.integers(1, 6))
def test_runs_are_disjoint_and_worth_their_budget(unit, share, batches, budget):
    size = max(1.0, unit * share)
    found = runs(unit, size, batches, budget)
    assert [n for run in found for n in run] == list(range(found[-1].stop if found else 0))
    assert len(found) == batches // budget and (not found or found[-1].stop <= base_batches(unit, size, batches))
    for run in found:
        assert len(run) and abs(len(run) * size - budget * unit) <= size * (1 + 1e-9)
    assert abs(sum(map(len, found)) * size - len(found) * budget * unit) < size * (1 + 1e-9), "no drift over runs"


def some(draw):
    return draw.randint(1, 6)


FORESTS = [forest_of(MODULES, some, seed=seed, examples=2, rollouts=4) for seed in range(3)]


def test_joined_batches_keep_their_own_groups_and_paths():
    whole = joined(FORESTS)
    assert whole.examples == ("0:q0", "0:q1", "1:q0", "1:q1", "2:q0", "2:q1")
    assert len(whole.calls) == sum(len(forest.calls) for forest in FORESTS)
    parts = [rollout for forest in FORESTS for rollout in forest.rollouts]
    for rollout, part in zip(whole.rollouts, parts, strict=True):
        assert rollout.reward == part.reward and rollout.id.endswith(part.id)
        forest = FORESTS[int(rollout.id.partition(":")[0])]
        for call, before in zip(whole.path(rollout), forest.path(part), strict=True):
            assert call.completion_ids == before.completion_ids and call.example == rollout.example
    trees = [scored.tree for forest in FORESTS for scored in scored_rollouts(forest)]
    assert [scored.tree for scored in scored_rollouts(whole)] == trees
    assert {entry.group_size for entry in credit(whole, "grpo").entries} == {4}


ALIKE: Mapping[str, tuple[str, dict[str, Any]]] = {
    "grpo": ("grpo", {}),
    "rloo": ("grpo", {"scale": False, "baseline": "leave_one_out", "loss_mean": "constant", "loss_length": 9}),
    "mmgrpo": ("mmgrpo", {"rollouts": 4, "padding_mode": "ragged"}),
    "mhgpo_fof": ("mhgpo_fof", {}),
    "dr_mas": ("dr_mas", {}),
}
OTHERWISE: Mapping[str, tuple[str, dict[str, Any]]] = {
    "token mean": ("grpo", {"loss_mean": "token"}),
    "longest sequence": ("grpo", {"loss_mean": "constant"}),
    "deviation of the batch": ("grpo", {"std_over": "batch"}),
    "regrouped over the batch": ("mhgpo_rr", {"regroup": "agent_chunks"}),
}


def credits_of(name, options):
    """Of the batches, and of all as one. With a single rollout of an example, mhgpo_rr has calls without siblings."""
    forests = (
        FORESTS
        if name != "mhgpo_rr"
        else [forest_of(MODULES, some, seed=seed, examples=5, rollouts=1) for seed in range(3)]
    )
    whole = joined(forests)
    return forests, whole, [credit(f, name, **options) for f in forests], credit(whole, name, **options)


@pytest.mark.parametrize("row", ALIKE)
def test_where_weights_are_alike_the_mean_of_the_gradients_is_the_gradient(row, tmp_path):
    name, options = ALIKE[row]
    forests, whole, parts, of_whole = credits_of(name, options)
    assert scaled_alike(parts, of_whole)
    trainer = make_trainer(tmp_path)

    def of(forest, found):
        return gradient(trainer.forwards, train_calls(forest, found, dict.fromkeys(forest.examples, 0)))

    mean = sum(of(forest, found) for forest, found in zip(forests, parts, strict=True)) / len(parts)
    assert torch.allclose(of(whole, of_whole), mean, atol=1e-6 * float(mean.norm()) + 1e-7)
    assert float(mean.norm()) > 0.01


@pytest.mark.parametrize("row", OTHERWISE)
def test_what_is_normalised_over_a_batch_is_not_alike(row):
    _, _, parts, whole = credits_of(*OTHERWISE[row])
    assert not scaled_alike(parts, whole)
    assert scaled_alike([whole], whole) is False, "ids of another forest"


def test_a_single_batch_is_alike():
    for name, options in (*ALIKE.values(), *OTHERWISE.values()):
        forests, _, parts, _ = credits_of(name, options)
        if name != "mhgpo_rr":  # which draws its groups by name
            assert scaled_alike(parts[:1], credit(joined(forests[:1]), name, **options)), name
