"""The algorithms of the three papers, one file per family, behind one literal dict.

A user's own package (`plugins=[pkg]`) adds an algorithm by writing its instance to `ALGORITHMS` and its schema to
`mmrl.config.ALGO_SCHEMAS` under the same name.
"""

from mmrl.algorithms.base import Algorithm
from mmrl.algorithms.grpo import Grpo
from mmrl.algorithms.mappo import Mappo
from mmrl.algorithms.mhgpo import Mhgpo, MhgpoFofOs, MhgpoIs, MhgpoRr
from mmrl.algorithms.mmgrpo import Mmgrpo
from mmrl.algorithms.mt_grpo import MtGrpo, MtGrpoVariable
from mmrl.algorithms.ppo import Ppo

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
