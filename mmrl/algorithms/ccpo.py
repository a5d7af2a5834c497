"""Counterfactual credit after CCPO (arXiv 2603.21563): what a module's replies were worth to the outcome.

    b: mean outcome of the example's rollouts, played again with the replies of module k exchanged
    bonus:       r_k = R_i + lambda · ([R_i > s and b < s] - [R_i < s and b > s])
    difference:  r_k = R_i - R_i without module k
    A = r_k - mean over the calls of module k of the example;  token weight = 1 / (groups · calls of the group · |o|)

A rollout is replayed up to the first call of the module; from there its calls have `algo.reply`, or what another model
writes (`algo.teachers`), instead of what the policy would write, and everything after them is live. Or another program
plays anew (`algo.program`). What is played a second time is never trained and stands in no
group; the last module has no counterfactual and keeps R_i. Replay makes this exact for every program that depends on
its example and on what models and tools return alone. The second play costs up to a rollout for each module.

Use it where some modules may not matter: a module whose exchange changes nothing has, with `difference`, advantage 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from typing_extensions import override

from mmrl import rng
from mmrl.algorithms.base import Algorithm
from mmrl.config.algo import CcpoConfig
from mmrl.credit.entries import Credit, Group, Member, Reward
from mmrl.credit.groups import compare, weigh
from mmrl.credit.loss_weights import Minibatches
from mmrl.credit.scored import ScoredRollout, by_example
from mmrl.errors import unknown
from mmrl.records import Forest
from mmrl.rollout import plans


class Ccpo(Algorithm[CcpoConfig]):
    """A group per example and module; rewards that tell what the module changed."""

    name = "ccpo"

    def check(self, algo: CcpoConfig, modules: Sequence[str], reward_sets: Sequence[str]) -> list[str]:
        """Return unknown names in `exchanged`, or no module left to exchange."""
        problems = [unknown("algo.exchanged", name, modules) for name in algo.exchanged or () if name not in modules]
        if not problems and not algo.exchanged_modules(modules):
            problems.append(
                f"algo.exchanged: the program has only '{modules[0]}', which answers; use algo=grpo, or name it"
            )
        return problems

    def plan(self, algo: CcpoConfig, modules: Sequence[str], key: rng.Key) -> tuple[plans.Tree, ...]:
        """Plan G independent rollouts, each played again for every exchanged module."""
        teacher = next((teacher.name for teacher in algo.teachers or ()), None)
        exchange = plans.Exchange(algo.exchanged_modules(modules), algo.reply, teacher, algo.program)
        return (plans.Tree(exchange=exchange),) * algo.group_size

    @override
    def credit(self, forest: Forest, algo: CcpoConfig, seed: int, minibatch: Minibatches = None) -> Credit:
        exchanged = algo.exchanged_modules(forest.modules)
        groups: dict[tuple[str, str], list[Member]] = {}
        replayed, expected = 0, 0
        for example, rollouts in by_example(forest).items():
            for module in forest.modules:
                calling = [r for r in rollouts if any(call.module == module for call in r.path)]
                # A file, or a run with other settings, may have those of further modules.
                counterfactuals = [
                    r.rollout.counterfactuals[module]
                    for r in calling
                    if module in exchanged and module in r.rollout.counterfactuals
                ]
                if module in exchanged:
                    expected, replayed = expected + len(calling), replayed + len(counterfactuals)
                for rollout in calling:
                    # Where nothing says what a module's calls were worth, they have the outcome, as the last module's.
                    reward = _reward(rollout, module, counterfactuals, algo) if counterfactuals else rollout.outcome
                    members = [Member((call,), reward) for call in rollout.path if call.module == module]
                    groups.setdefault((example, module), []).extend(members)
        compared = compare([Group(":".join(name), tuple(members)) for name, members in groups.items()], algo)
        weighed = weigh(compared, algo, minibatch)
        entries = tuple(entry for group in weighed for entry in group.entries())
        metrics = {"credit/counterfactual_share": replayed / expected} if expected else {}
        return Credit(algo=self.name, entries=entries, groups=tuple(weighed), metrics=metrics)


def _reward(rollout: ScoredRollout, module: str, counterfactuals: Sequence[float], algo: CcpoConfig) -> Reward:
    """Return the reward of a module's calls in one rollout.

    Args:
        counterfactuals: outcomes of the example's rollouts without the module.
    """
    if algo.credit == "difference":
        # A second play that failed for outside causes has the mean of the others in its place.
        without = rollout.rollout.counterfactuals.get(module, fmean(counterfactuals))
        return Reward(rollout.reward - without, {"outcome": rollout.reward, "without": without})
    mean = fmean(counterfactuals)
    sign = (rollout.reward > algo.success > mean) - (rollout.reward < algo.success < mean)
    return Reward(
        rollout.reward + algo.bonus_coef * sign,
        {"outcome": rollout.reward, "without": mean, "bonus": algo.bonus_coef * sign},
    )
