"""The algorithms of the three papers, one file per family, behind one literal dict.

A user's own package (`plugins=[pkg]`) adds an algorithm by writing its instance to `ALGORITHMS` and its schema to
`mmrl.config.ALGO_SCHEMAS` under the same name.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from mmrl.algorithms.base import Algorithm
from mmrl.algorithms.c3 import C3
from mmrl.algorithms.ccpo import Ccpo
from mmrl.algorithms.checks import scale_problems, turn_problems
from mmrl.algorithms.distill import Distill
from mmrl.algorithms.dr_mas import DrMas
from mmrl.algorithms.gigpo import Gigpo
from mmrl.algorithms.grpo import Grpo
from mmrl.algorithms.igpo import Igpo
from mmrl.algorithms.mhgpo import Mhgpo, MhgpoFofOs, MhgpoIs, MhgpoRr
from mmrl.algorithms.mmgrpo import Mmgrpo
from mmrl.algorithms.mt_grpo import MtGrpo
from mmrl.algorithms.ppo import Mappo, Ppo
from mmrl.algorithms.tree_grpo import TreeGrpo
from mmrl.config import AlgoConfig
from mmrl.credit.distillation import distillation_metrics, distilled_entries
from mmrl.credit.entries import Credit, Group
from mmrl.credit.loss_weights import Minibatches
from mmrl.errors import ConfigError
from mmrl.records import Forest

ALGORITHMS: dict[str, Algorithm[Any]] = {
    "c3": C3(),
    "ccpo": Ccpo(),
    "distill": Distill(),
    "dr_mas": DrMas(),
    "gigpo": Gigpo(),
    "grpo": Grpo("grpo", merge=False),
    "grpo_mr": Grpo("grpo_mr", merge=True),
    "igpo": Igpo(),
    "mappo": Mappo(),
    "mhgpo_fof": Mhgpo("mhgpo_fof"),
    "mhgpo_fof_os": MhgpoFofOs("mhgpo_fof_os"),
    "mhgpo_is": MhgpoIs("mhgpo_is"),
    "mhgpo_rr": MhgpoRr("mhgpo_rr"),
    "mmgrpo": Mmgrpo(),
    "mt_grpo": MtGrpo("mt_grpo"),
    "mt_grpo_variable": MtGrpo("mt_grpo_variable"),
    "mt_ppo": Ppo("mt_ppo", turns=True),
    "ppo": Ppo("ppo", turns=False),
    "tree_grpo": TreeGrpo(),
}
"""Plug point: algorithm name -> algorithm."""


def problems(algo: AlgoConfig, modules: Sequence[str], reward_sets: Sequence[str]) -> list[str]:
    """Return problems of a config section with a program's modules and a task's reward sets, one sentence each.

    Raises:
        ConfigError: a plugin has added the algorithm with the section of another kind.
    """
    algorithm = ALGORITHMS[algo.name]
    if not isinstance(algo, section := getattr(algorithm, "section", AlgoConfig)):
        raise ConfigError(f"algo: the section of '{algo.name}' is no {section.__name__}, which its algorithm takes")
    missing = []
    if algorithm.needs_turn_rewards:
        missing = turn_problems(algo.name, "ppo" if algorithm.needs_critic else "grpo", reward_sets)
    return [*missing, *algorithm.check(algo, modules, reward_sets), *scale_problems(algo, modules)]


def assign_credit(
    forest: Forest,
    algo: AlgoConfig,
    seed: int,
    minibatch: Minibatches = None,
    frozen: Collection[str] = (),
) -> Credit:
    """Compute the algorithm's credit, then apply the config's factors and frozen modules.

    Args:
        minibatch: see `Algorithm.credit`.
        frozen: modules left out of the loss (`model.modules`): their tokens count in no |o|, no token mean and no
            whitening. Groups of them alone keep their share, so that no other group's weights change.
    """
    algo = algo.leaving_out(frozen)
    credit = ALGORITHMS[algo.name].credit(_without_kl(forest, frozen), algo, seed, minibatch)
    if credit.groups is not None:
        credit = replace(credit, metrics={**_group_metrics(forest, credit.groups), **credit.metrics})
    if algo.advantage_scale is not None:
        credit = _scale_advantages(credit, forest, algo.advantage_scale)
    if algo.distill is not None or algo.privileged is not None:
        # After all that compares rewards, scales or whitens: a teacher's numbers are none of them.
        entries = (*credit.entries, *distilled_entries(forest, algo, minibatch))
        metrics = {**credit.metrics, **distillation_metrics(forest, algo, entries)}
        credit = replace(credit, entries=entries, metrics=metrics)
    return _leave_out(credit, forest, frozen) if frozen else credit


def minibatches(examples: Sequence[str], count: int) -> dict[str, int]:
    """Return example id -> mini-batch: consecutive examples of a step, sizes differing by at most one."""
    # By example and not by call: the calls of a group stay in one optimizer step.
    return {example: index * count // len(examples) for index, example in enumerate(examples)}


def _scale_advantages(credit: Credit, forest: Forest, factors: Mapping[str, float]) -> Credit:
    """Multiply every advantage of a module by its factor (1 where there is none): c · A.

    Rewards, statistics of groups, weights and the critic's targets stay as they are. 0 leaves a module's KL term.
    """
    entries = []
    for entry in credit.entries:
        factor = factors.get(forest.calls[entry.call].module, 1.0)
        entries.append(
            entry if factor == 1.0 else replace(entry, advantages=tuple(factor * a for a in entry.advantages))
        )
    return replace(credit, entries=tuple(entries))


def _without_kl(forest: Forest, frozen: Collection[str]) -> Forest:
    """Give calls of frozen modules without log-probabilities (an endpoint's) a KL term of 0."""
    calls = dict(forest.calls)
    for call_id, call in forest.calls.items():
        if call.module in frozen and call.logprobs is None:
            # Equal to the reference's, so beta · (log-prob - reference) adds nothing to the reward.
            zeros = (0.0,) * call.completion_tokens
            calls[call_id] = replace(call, logprobs=zeros, ref_logprobs=zeros)
    return replace(forest, calls=calls)


def _leave_out(credit: Credit, forest: Forest, frozen: Collection[str]) -> Credit:
    """Give every token of the frozen modules weight 0, also in rollouts of which other calls are trained."""
    entries = [
        replace(entry, weights=(0.0,) * len(entry.weights)) if forest.calls[entry.call].module in frozen else entry
        for entry in credit.entries
    ]
    return replace(credit, entries=tuple(entries))


def _group_metrics(forest: Forest, groups: Sequence[Group]) -> dict[str, float]:
    """Return the credit metrics of a step (docs/metrics.md)."""
    compared = [group for group in groups if not group.is_singleton]
    metrics = {
        "credit/groups": float(len(compared)),
        "credit/groups_of_one": float(len(groups) - len(compared)),
        "credit/zero_variance_share": fmean([group.constant for group in compared] or [0.0]),
    }
    for module in forest.modules:
        of_module = [group for group in compared if any(member.call.module == module for member in group.members)]
        if of_module:
            metrics[f"credit/{module}/zero_variance_share"] = fmean(group.constant for group in of_module)
    return metrics
