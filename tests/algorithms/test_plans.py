"""Plans of the algorithms whose rollouts are independent, and of Tree-GRPO."""

import pytest

from mmrl.algorithms import ALGORITHMS
from mmrl.config import ALGO_SCHEMAS
from mmrl.rollout.plans import Tree


def plan(name, **options):
    algo = ALGO_SCHEMAS[name].model_validate({"name": name, **options})
    return ALGORITHMS[name].plan(algo, ("a", "b"), (0, 1, "q"))


@pytest.mark.parametrize("name", ["grpo", "grpo_mr", "mt_grpo", "mt_grpo_variable", "dr_mas", "gigpo", "igpo"])
def test_a_group_of_independent_rollouts(name):
    assert plan(name, group_size=3) == (Tree(),) * 3


@pytest.mark.parametrize("name", ["ppo", "mt_ppo", "mappo"])
def test_one_rollout_for_a_critic(name):
    assert plan(name) == (Tree(),) and ALGORITHMS[name].needs_critic


def test_trees_that_grow():
    trees = plan("tree_grpo", trees=3)
    assert [(tree.growth.rounds, tree.growth.nodes, tree.growth.keep) for tree in trees] == [(1, 2, 3)] * 3
