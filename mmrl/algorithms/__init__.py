"""The algorithms of the three papers, one file per family, behind one literal dict.

A user's own package (`plugins=[pkg]`) adds an algorithm by writing its instance to `ALGORITHMS` and its schema to
`mmrl.config.ALGO_SCHEMAS` under the same name.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from mmrl.algorithms.base import Algorithm
from mmrl.algorithms.checks import scale_problems, turn_problems
from mmrl.algorithms.grpo import Grpo
from mmrl.algorithms.mappo import Mappo
from mmrl.algorithms.mhgpo import Mhgpo
from mmrl.algorithms.mhgpo_samplers import MhgpoFofOs, MhgpoIs, MhgpoRr
from mmrl.algorithms.mmgrpo import Mmgrpo
from mmrl.algorithms.mt_grpo import MtGrpo, MtGrpoVariable
from mmrl.algorithms.ppo import Ppo
from mmrl.config import AlgoConfig
from mmrl.config.algo import MhgpoConfig
from mmrl.credit.entries import Credit
from mmrl.credit.shared import group_metrics, leave_out, scale_advantages, without_kl
from mmrl.records import Forest

ALGORITHMS: dict[str, Algorithm] = {
    "grpo": Grpo("grpo", merge=False),
    "grpo_mr": Grpo("grpo_mr", merge=True),
    "mappo": Mappo(),
    "mhgpo_fof": Mhgpo("mhgpo_fof"),
    "mhgpo_fof_os": MhgpoFofOs("mhgpo_fof_os"),
    "mhgpo_is": MhgpoIs("mhgpo_is"),
    "mhgpo_rr": MhgpoRr("mhgpo_rr"),
    "mmgrpo": Mmgrpo(),
    "mt_grpo": MtGrpo("mt_grpo"),
    "mt_grpo_variable": MtGrpoVariable("mt_grpo_variable"),
    "mt_ppo": Ppo("mt_ppo", turns=True),
    "ppo": Ppo("ppo", turns=False),
}
"""Plug point: algorithm name -> algorithm."""


def problems(algo: AlgoConfig, modules: Sequence[str], reward_sets: Sequence[str]) -> list[str]:
    """What is wrong with a config section for a program's modules and a task's reward sets, one sentence each."""
    algorithm = ALGORITHMS[algo.name]
    missing = []
    if algorithm.needs_turn_rewards:
        missing = turn_problems(algo.name, "ppo" if algorithm.needs_critic else "grpo", reward_sets)
    return [*missing, *algorithm.check(algo, modules, reward_sets), *scale_problems(algo, modules)]


def assign_credit(
    forest: Forest,
    algo: AlgoConfig,
    seed: int,
    minibatch: Mapping[str, int] | None = None,
    frozen: Collection[str] = (),
) -> Credit:
    """The algorithm's credit, and what the config says of single modules.

    Args:
        minibatch: see `Algorithm.credit`.
        frozen: modules left out of the loss (`model.modules`). MHGPO counts them out of n as its own frozen modules;
            elsewhere the other modules' weights stay as they are.
    """
    # MHGPO divides by n, the number of trained slots, so it must know; elsewhere a frozen module's share is just lost.
    if frozen and isinstance(algo, MhgpoConfig):
        algo = algo.model_copy(update={"freeze_modules": tuple(dict.fromkeys((*algo.freeze_modules, *frozen)))})
    credit = ALGORITHMS[algo.name].credit(without_kl(forest, frozen), algo, seed, minibatch)
    if credit.groups is not None:
        credit = replace(credit, metrics={**group_metrics(forest, credit.groups), **credit.metrics})
    if algo.advantage_scale is not None:
        credit = scale_advantages(credit, forest, algo.advantage_scale)
    return leave_out(credit, forest, frozen) if frozen else credit
