"""What an audit plays: recorded paths, the truth of decisions on them, each row's batches, the reference's rollouts.

The decisions are the same for all rows: the recorded path of an example is played again as a branch of a tree of each
row's own plan. The batch keeps the law that its plan gives it, since such a path is a rollout of the policy like any
other, and rows are compared on the same calls.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from mmrl import rng
from mmrl.audit.numbers import Credited
from mmrl.audit.settings import BLOCKS, AuditKeys
from mmrl.credit.entries import Credit
from mmrl.errors import ConfigError, ReplayDivergence
from mmrl.records import Call, Example, Forest
from mmrl.rollout.branches import Branch, Leaf, forest_of
from mmrl.rollout.environment import Environment
from mmrl.rollout.plans import Tree
from mmrl.rollout.sample import play
from mmrl.stages.rl import RlStage
from mmrl.stages.step_metrics import refuse_failures

AGAIN = 3
"""Further draws of a rollout that failed from an outside cause."""


@dataclass(frozen=True, slots=True)
class Place:
    """An audited call on its recorded path."""

    call: Call
    path: int
    """Number of the path among those of the example."""
    position: int
    """Number of the calls before it."""


@dataclass(kw_only=True)
class Plays:
    """Plays for one audit; what it has played depends on the settings alone."""

    keys: AuditKeys
    stage: RlStage
    """The policy and its task; of any row."""
    examples: Sequence[Example]
    reward_set: str
    """Of the truth."""
    value: Callable[[Leaf], float | None]
    """What a rollout is worth: its outcome, or the reward that the rows optimise."""
    advance: Callable[[int], object] = lambda calls: None
    """Called with the number of calls that were generated."""
    recorded: Mapping[tuple[str, int], Leaf] = field(default_factory=dict)
    """Example and number of the path -> the path; none where it failed from an outside cause again and again."""

    @property
    def seed(self) -> int:
        """Seed of all draws."""
        return self.stage.config.seed

    @property
    def trained(self) -> tuple[str, ...]:
        """Modules that are in the loss."""
        untrained = self.stage.assignment.untrained
        return tuple(module for module in self.stage.task.program.modules if module not in untrained)

    @property
    def paths(self) -> int:
        """Recorded paths of each example: as many as have about the wanted number of decisions."""
        return min(-(-self.keys.decisions // len(self.trained)), self.keys.batches)

    def record(self) -> None:
        """Play the paths that decisions are drawn from."""
        names = [(example, number) for example in self.examples for number in range(self.paths)]
        # Names that no tree of a batch has: its calls keep theirs where it is planted.
        roots = [Branch(example=example, path=f"p{number}") for example, number in names]
        leaves = self._single(self._environment("paths"), roots)
        self.recorded = {
            (example.id, number): leaf for (example, number), leaf in zip(names, leaves, strict=True) if leaf
        }

    def draw(self) -> list[Place]:
        """Draw the decisions, equally many of each module; before any credit is known."""
        places: dict[str, list[Place]] = {module: [] for module in self.trained}
        for (_, number), leaf in self.recorded.items():
            for position, call in enumerate(leaf.calls):
                if call.module in places and call.completion_tokens:
                    places[call.module].append(Place(call, number, position))
        each = len(self.examples) * self.keys.decisions // len(self.trained)
        drawn = [
            place
            for module, found in places.items()
            for place in rng.stream(self.seed, "decisions", module).sample(found, min(each, len(found)))
        ]
        order = {example.id: number for number, example in enumerate(self.examples)}
        # Calls of the same history one after the other: the first ones of an example.
        return sorted(drawn, key=lambda place: (order[place.call.example], place.position, place.path))

    def truths(self, places: Sequence[Place]) -> list[dict[str, object] | None]:
        """Play on from decisions, and from other replies in their place; None where outside causes left too little."""
        env = self._environment("truth")
        example_of = {example.id: example for example in self.examples}
        m, n = self.keys.continuations, self.keys.replies
        first: dict[object, Place] = {}
        shared = [first.setdefault(self._history(place), place) for place in places]
        continued = [
            Branch(
                example=example_of[p.call.example],
                path=f"{_own_path(p.call)}~q{number}",
                tape=self.recorded[p.call.example, p.path].after(p.call.id),
            )
            for p in places
            for number in range(m)
        ]
        fresh = [
            Branch(
                example=example_of[p.call.example],
                path=f"{_own_path(p.call)}~v{number}.0",
                tape=self.recorded[p.call.example, p.path].before(p.call.id),
            )
            for p in first.values()
            for number in range(n)
        ]
        leaves = self._single(env, [*continued, *fresh])
        of_q, of_v = leaves[: len(continued)], leaves[len(continued) :]
        # Each other reply, the first event behind its tape, once more: a single outcome would not tell its worth from
        # what followed it.
        roots = [
            replace(root, path=f"{root.path[:-2]}.1", tape=leaf.events[: len(root.tape) + 1])
            for root, leaf in zip(fresh, of_v, strict=True)
            if leaf is not None
        ]
        twins = iter(self._single(env, roots))
        pairs = [(leaf, next(twins)) if leaf is not None else (None, None) for leaf in of_v]
        others = {id(p): pairs[k * n : (k + 1) * n] for k, p in enumerate(first.values())}
        found: list[dict[str, object] | None] = []
        for k, (place, owner) in enumerate(zip(places, shared, strict=True)):
            mine = [self._worth(leaf) for leaf in of_q[k * m : (k + 1) * m]]
            two = [(self._worth(a), self._worth(b)) for a, b in others[id(owner)]]
            whole = None not in mine and not any(None in pair for pair in two)
            found.append({"call": place.call.id, "continued": mine, "others": two} if whole else None)
        return found

    def batch(self, row: RlStage, number: int) -> tuple[Forest, int, int]:
        """Play base batch `number` of a row, with the recorded path of that number where there is one.

        Returns:
            The forest, ready for credit; calls that engines generated for it, as if nothing were recorded; tokens that
            the trainer's models scored for it.
        """
        env, plans = row.planned(self.examples, (self.seed, f"audit-{number}"))
        roots = [root for example, trees in plans for root in self._planted(example, trees, number)]
        return self._batch(row, env, roots, number)

    def critic_batch(self, row: RlStage, number: int) -> tuple[Forest, int]:
        """Play batch `number` of those that a row's critic is fitted on, without recorded paths: forest and calls."""
        env, plans = row.planned(self.examples, (self.seed, f"audit-critic-{number}"))
        roots = [
            Branch(example=example, path=str(index), plan=tree)
            for example, trees in plans
            for index, tree in enumerate(trees)
        ]
        forest, calls, _ = self._batch(row, env, roots, number)
        return forest, calls

    def _batch(self, row: RlStage, env: Environment, roots: Sequence[Branch], number: int) -> tuple[Forest, int, int]:
        trees = asyncio.run(play(env, roots, row.reward_set))
        _refuse_divergence(leaf for leaves in trees for leaf in leaves)
        replayed = sum(event.call.attempts for root in roots for event in root.tape if event.call is not None)
        generated = self._counted(env) + replayed
        forest = forest_of([leaf for leaves in trees for leaf in leaves], row.task.program.modules, number + 1)
        # The trainer needs the memory that a server on the same GPU would hold.
        row.engine.sleep()
        scored = row.trainer.forwards.scored
        forest = row.complete((forest, {}), self.examples, number + 1, [])
        return forest, generated, row.trainer.forwards.scored - scored

    def independent(self, block: int) -> tuple[Forest, dict[str, float]]:
        """Play the rollouts of a block of the reference; returns them, and the outcome of each by its id."""
        count = self.keys.reference // BLOCKS
        roots = [Branch(example=example, path=str(n)) for example in self.examples for n in range(count)]
        leaves = [leaf for leaf in self._single(self._environment(f"reference-{block}"), roots) if leaf is not None]
        self.stage.engine.sleep()
        outcomes = {leaf.rollout.id: self._worth(leaf) for leaf in leaves}
        forest = forest_of(leaves, self.stage.task.program.modules, block)
        return forest, {name: outcome for name, outcome in outcomes.items() if outcome is not None}

    def calls_of_truth(self, places: Sequence[Place]) -> int:
        """Estimate the calls of `truths` by those that the recorded paths have after each decision."""
        owners = {self._history(place): place for place in places}
        of_v = sum(self.keys.replies * (1 + 2 * self._following(place)) for place in owners.values())
        return self.keys.continuations * sum(map(self._following, places)) + of_v

    def _following(self, place: Place) -> int:
        return len(self.recorded[place.call.example, place.path].calls) - place.position - 1

    def _history(self, place: Place) -> object:
        """Return what two decisions share whose truth has the same V: the example, and all that came before."""
        leaf = self.recorded[place.call.example, place.path]
        return (
            place.call.example,
            place.call.module,
            # Prompts too: what tools returned need not be the same after the same replies.
            place.call.prompt_ids,
            tuple((call.prompt_ids, call.completion_ids) for call in leaf.calls[: place.position]),
        )

    def _environment(self, phase: str) -> Environment:
        return self.stage.environment(self.stage.config.algo, (self.seed, f"audit-{phase}"))

    def _single(self, env: Environment, roots: Sequence[Branch]) -> list[Leaf | None]:
        """Play single rollouts; what fails from an outside cause is drawn anew, at most three times.

        Raises:
            ConfigError: the program does not repeat its requests.
            TooManyFailures: more than `train.max_failed_share` failed each time: a tool or server is not there.
        """
        leaves = _played(env, roots, self.reward_set)
        for attempt in range(AGAIN):
            missing = [index for index, leaf in enumerate(leaves) if leaf.rollout.reward is None]
            again = [replace(roots[index], path=f"{roots[index].path}r{attempt + 1}") for index in missing]
            for index, leaf in zip(missing, _played(env, again, self.reward_set), strict=True):
                leaves[index] = leaf
        self._counted(env)
        limit = self.stage.config.train.max_failed_share
        refuse_failures([leaf.rollout for leaf in leaves], limit, f"{env.key[-1]}, {1 + AGAIN} times")
        return [leaf if leaf.rollout.reward is not None else None for leaf in leaves]

    def _counted(self, env: Environment) -> int:
        """Report what was generated in an environment since the last time; return all of it."""
        environments = [env, *(teacher.environment for teacher in env.teachers.values())]
        generated = sum(one.generated for one in environments)
        self.advance(generated)
        for one in environments:
            one.generated = 0
        return generated

    def _planted(self, example: Example, trees: Sequence[Tree], number: int) -> Iterator[Branch]:
        """Yield the roots of an example's trees; a drawn one has the recorded path of this number as a branch."""
        leaf = self.recorded.get((example.id, number))
        place = rng.stream(self.seed, "planted", example.id, number).randrange(len(trees))
        for index, tree in enumerate(trees):
            planted = leaf is not None and index == place
            yield Branch(example=example, path=str(index), plan=tree, tape=leaf.events if leaf and planted else ())

    def _worth(self, leaf: Leaf | None) -> float | None:
        return None if leaf is None else self.value(leaf)


def _played(env: Environment, roots: Sequence[Branch], reward_set: str) -> list[Leaf]:
    leaves = [leaf for (leaf,) in asyncio.run(play(env, roots, reward_set, keeps_tapes=True))] if roots else []
    _refuse_divergence(leaves)
    return leaves


def _refuse_divergence(leaves: Iterable[Leaf]) -> None:
    """Raise `ConfigError` for a program that does not repeat its requests."""
    for leaf in leaves:
        if leaf.rollout.error == ReplayDivergence.kind:
            raise ConfigError(f"task: mmrl audit plays on from recorded calls, and {leaf.rollout.error_message}")


def _own_path(call: Call) -> str:
    """Return a call's id within its example."""
    return call.id.removeprefix(f"{call.example}/")


def credited(credit: Credit, call: str) -> Credited:
    """Return a row's credit of a call, over all its entries and tokens."""
    weight = push = 0.0
    for entry in credit.entries:
        if entry.call == call:
            weight += sum(entry.weights)
            push += sum(w * a for w, a in zip(entry.weights, entry.advantages, strict=True))
    return Credited(push / weight if weight else None, push)
