"""What an algorithm is: the choices that every one of them makes, with the common ones as defaults."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Protocol, TypeVar, get_args

from mmrl import rng
from mmrl.config import AlgoConfig
from mmrl.config.algo import GroupConfig
from mmrl.credit.entries import Credit
from mmrl.credit.loss_weights import Minibatches
from mmrl.errors import ConfigError
from mmrl.records import Forest
from mmrl.rollout import plans

AlgoT = TypeVar("AlgoT", bound=AlgoConfig, contravariant=True)


class Algorithm(Protocol[AlgoT]):
    """Four named choices: plan, rewards, groups, advantages (and the weights of the loss mean).

    Stateless and pure: no torch, no engine. `plan` says who is sampled how; `credit` turns a forest into entries.
    `Algorithm[GroupConfig]` takes that section of the config and its subclasses.
    """

    # Attributes of the algorithm, whatever its config says: checks and `mmrl plan` read them before anything is built.
    name: str
    """`algo.name`."""
    needs_turn_rewards: bool = False
    """True if its task must offer a reward set with turn rewards."""
    reads_turn_rewards: bool = False
    """True if it credits turn rewards where there are any, and needs none."""
    needs_critic: bool = False
    """True if it needs values of a critic, which is then trained too."""
    section: type[AlgoConfig] = AlgoConfig
    """What stands in the brackets."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        for base in vars(cls).get("__orig_bases__", ()):
            for named in get_args(base):
                named = getattr(named, "__bound__", named)
                if isinstance(named, type) and issubclass(named, AlgoConfig):  # not Any, nor a class by its name
                    cls.section = named

    def check(self, algo: AlgoT, modules: Sequence[str], reward_sets: Sequence[str]) -> list[str]:
        """Return problems of this algorithm with a program's modules and a task's reward sets, one sentence each."""
        return []

    def plan(self, algo: AlgoT, modules: Sequence[str], key: rng.Key) -> tuple[plans.Tree, ...]:
        """Return the trees to sample for one example, here G independent rollouts.

        Args:
            key: (run seed, step, example id), the source of any draw.
        """
        if not isinstance(algo, GroupConfig):
            raise ConfigError(f"algo: '{algo.name}' has no group_size, and its algorithm no plan of its own")
        return plans.independent(algo.group_size)

    @abstractmethod
    def credit(self, forest: Forest, algo: AlgoT, seed: int, minibatch: Minibatches = None) -> Credit:
        """Compute rewards -> groups -> advantages and weights.

        Args:
            minibatch: example id -> mini-batch index; weights are normalised within each. None: one mini-batch.
        """
        ...
