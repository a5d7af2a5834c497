"""Plans of sampling: trees of forks, as the papers name them.

A plan is a tuple of trees for one example; `rollout.sample` runs them. An algorithm chooses its plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from mmrl import rng


@dataclass(frozen=True, slots=True)
class Fork:
    """Fork into `width` continuations at a call of `module` on a path (None: the path's very first call).

    A path that never makes the call does without this fork alone.
    """

    module: str | None
    width: int
    invocation: int = 0
    """Number of the module's calls before it."""


@dataclass(frozen=True, slots=True)
class Growth:
    """Growth of a tree from one rollout (Tree-GRPO): in each round, `nodes` draws of a call to go on from, anew."""

    rounds: int
    nodes: int
    keep: int
    """Leaves that are kept, drawn uniformly."""
    key: rng.Key
    """Source of the draws."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """Replays of each rollout, one for each of `modules`, without that module's replies (CCPO)."""

    modules: tuple[str, ...]
    reply: str = ""
    """Text in the place of their replies."""
    teacher: str | None = None
    """The teacher whose model replies instead; None: nobody."""
    program: str | None = None
    """`package.module:name` of a program that plays the whole rollout without the module; None: the task's."""


@dataclass(frozen=True, slots=True)
class Tree:
    """Plan of a tree of rollouts of an example: its forks. No forks: a single independent rollout."""

    forks: tuple[Fork, ...] = ()
    fork_name: str | None = None
    """Recorded as `Rollout.fork` (the module at which an RR or IS tree forked)."""
    teacher: str | None = None
    growth: Growth | None = None
    exchange: Exchange | None = None

    @property
    def size(self) -> int:
        """Rollouts that are sampled where every path makes the calls of all forks: the most."""
        grown = self.growth.rounds * self.growth.nodes if self.growth is not None else 0
        return prod(fork.width for fork in self.forks) + grown


def independent(count: int) -> tuple[Tree, ...]:
    """Plan `count` rollouts that share nothing."""
    return tuple(Tree() for _ in range(count))


def fork_on(module: str, width: int) -> tuple[Tree, ...]:
    """Plan one tree: modules before `module` run once, `module` is sampled `width` times (MHGPO Alg. 5)."""
    return (Tree((Fork(module, width),), fork_name=module),)


def fork_on_first(modules: Sequence[str], width: int, last_width: int = 1) -> tuple[Tree, ...]:
    """Fork at the first module; with `last_width` > 1 the last module is over-sampled on each branch (FoF(os))."""
    forks = [Fork(None, width)]
    if last_width > 1:
        forks.append(Fork(modules[-1], last_width))
    return (Tree(tuple(forks), fork_name=modules[0]),)


def round_robin(modules: Sequence[str], width: int, probs: Sequence[float], key: rng.Key) -> tuple[Tree, ...]:
    """Plan one tree that forks at a module drawn with `probs`; the draw is a function of `key` (MHGPO Alg. 3)."""
    module = rng.stream(*key, "fork").choices(list(modules), weights=list(probs))[0]
    return fork_on(module, width)


def independent_sampling(modules: Sequence[str], width: int) -> tuple[Tree, ...]:
    """Plan a tree per module, each forking there afresh (MHGPO-IS)."""
    return tuple(tree for module in modules for tree in fork_on(module, width))
