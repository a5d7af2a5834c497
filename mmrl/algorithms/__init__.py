"""The algorithms of the three papers, one file per family, behind one literal dict.

A user's own package (`plugins=[pkg]`) adds an algorithm by writing its instance to `ALGORITHMS` and its schema to
`mmrl.config.ALGO_SCHEMAS` under the same name.
"""

from mmrl.algorithms.base import Algorithm
from mmrl.algorithms.mhgpo import Mhgpo, MhgpoFofOs, MhgpoIs, MhgpoRr

ALGORITHMS: dict[str, Algorithm] = {
    "mhgpo_is": MhgpoIs("mhgpo_is"),
    "mhgpo_fof": Mhgpo("mhgpo_fof"),
    "mhgpo_rr": MhgpoRr("mhgpo_rr"),
    "mhgpo_fof_os": MhgpoFofOs("mhgpo_fof_os"),
}
"""Plug point: algorithm name -> algorithm."""
