"""On-policy distillation alone: no reward has a part in it (`algo.distill`, `credit.distillation`).

Use it where a teacher knows more than rewards can say, or, with `algo.privileged`, where the policy itself would with
the answer at hand; beside rewards, set `algo.distill` of another algorithm.
"""

from __future__ import annotations

from collections.abc import Sequence

from typing_extensions import override

from mmrl import rng
from mmrl.algorithms.base import Algorithm
from mmrl.config.algo import DistillConfig
from mmrl.credit.entries import Credit
from mmrl.credit.loss_weights import Minibatches
from mmrl.records import Forest
from mmrl.rollout import plans


class Distill(Algorithm[DistillConfig]):
    """Independent rollouts, and no entry of its own."""

    name = "distill"

    @override
    def plan(self, algo: DistillConfig, modules: Sequence[str], key: rng.Key) -> tuple[plans.Tree, ...]:
        return plans.independent(algo.group_size)

    @override
    def credit(self, forest: Forest, algo: DistillConfig, seed: int, minibatch: Minibatches = None) -> Credit:
        return Credit(algo=self.name, entries=())
