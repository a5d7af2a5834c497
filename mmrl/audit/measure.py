"""The measurements of an audit, piece by piece into its ledger: paths, truth, credit and gradients, reference."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property, partial
from itertools import groupby
from math import prod
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from mmrl import rng
from mmrl.algorithms import ALGORITHMS
from mmrl.audit import critic
from mmrl.audit.budgets import joined, runs, scaled_alike
from mmrl.audit.gradients import Reference, gradient, reference_calls
from mmrl.audit.ledger import Ledger
from mmrl.audit.plays import Place, Plays, credited
from mmrl.audit.settings import BLOCKS
from mmrl.credit.entries import Credit
from mmrl.errors import CheckpointError, MmrlError
from mmrl.records import Call, Forest
from mmrl.rollout.plans import Tree
from mmrl.stages.collect import train_calls
from mmrl.stages.rl import RlStage

CHUNK = 8
"""Examples whose decisions are one piece of work."""


@dataclass(kw_only=True)
class Measurement:
    """One audit under way."""

    plays: Plays
    rows: Mapping[str, RlStage]
    """Row -> the stage of its config; they share policy, engine and task."""
    fitted: Collection[str] = ()
    """Rows whose critic is fitted here, to the policy as it is."""
    ledger: Ledger
    folder: Path
    forests: dict[tuple[str, int], tuple[Forest, int, int]] = field(default_factory=dict)
    """Batches that are needed again, by the first row with their plan."""

    @property
    def reference(self) -> Reference:
        """Blocks of the reference gradient."""
        return Reference(self.folder / "reference")

    def record(self) -> list[Place]:
        """Play the recorded paths and draw the decisions; the same ones each time.

        Raises:
            MmrlError: no path has a call that could be audited.
            CheckpointError: an audit that goes on has played other paths than before.
        """
        self.plays.record()
        places = self.plays.draw()
        if not places:
            raise MmrlError(f"no call of {', '.join(self.plays.trained)} on any of the recorded paths; see mmrl doctor")
        replies = {
            f"{c.example} {leaf.rollout.id} {c.id}": c.completion_ids
            for leaf in self.plays.recorded.values()
            for c in leaf.calls
        }
        called = Counter(c.module for leaf in self.plays.recorded.values() for c in leaf.calls if c.completion_tokens)
        now = {
            "digest": f"{rng.digest(repr(sorted(replies.items()))):032x}",
            "examples": [example for example, _ in self.plays.recorded],
            "failed": len(self.plays.examples) * self.plays.paths - len(self.plays.recorded),
            "calls": {module: called[module] for module in self.plays.trained},
            "decisions": [
                {"example": p.call.example, "call": p.call.id, "module": p.call.module, "path": p.path} for p in places
            ],
        }
        if self.ledger.piece("paths", lambda: now) != now:
            raise CheckpointError(
                f"{self.folder}: the program, played again, has made other calls than before; an audit that was "
                "stopped can go on only where it repeats them; begin in another folder"
            )
        return places

    def expected_calls(self, places: Sequence[Place]) -> dict[str, int]:
        """Estimate the calls of each part, by the recorded paths and the plans."""
        plays, paths = self.plays, [leaf.calls for leaf in self.plays.recorded.values()]
        batches = {
            name: len(plays.examples) * fmean(sum(planned_calls(tree, path) for tree in trees) for path in paths)
            for name, trees in ((n, self._plan(self.rows[n], plays.examples[0].id, 0)) for n in self._by_plan)
        }
        # When a critic is fitted is not known before: half as many rounds again as the fewest.
        of_critic = critic.HELD_OUT + 3 * critic.PATIENCE * critic.ROUND
        critics = round(sum(batches[name] for name in self.fitted) * of_critic)
        return {
            "truth": plays.calls_of_truth(places),
            **({"critics": critics} if critics else {}),
            "rows": round(max(batches.values()) * plays.keys.batches * len(batches)),
            "reference": round(fmean(map(len, paths)) * len(plays.examples) * plays.keys.reference),
        }

    def measure(self, places: Sequence[Place]) -> None:
        """Measure everything that is not in the ledger yet."""
        self._truths(places)
        for name in self.fitted:
            self._fit(name)
        first = {name: [self._batch(name, number, places) for number in range(self.plays.paths)] for name in self.rows}
        sizes = {name: fmean(batch["calls"] for batch in batches) for name, batches in first.items()}
        unit = max(sizes.values())
        self.ledger.piece("unit", lambda: {"calls": unit, "batches": sizes})
        self._reference()
        for row, of_plan in self._by_plan.items():
            self._gradients(of_plan, unit, sizes[row])
            self.forests = {key: forest for key, forest in self.forests.items() if key[0] != row}

    def _truths(self, places: Sequence[Place]) -> None:
        order = {example.id: number for number, example in enumerate(self.plays.examples)}
        for chunk, members in groupby(places, lambda place: order[place.call.example] // CHUNK):
            self.ledger.piece(f"truth {chunk}", partial(self.plays.truths, list(members)))

    def _fit(self, name: str) -> None:
        """Fit the critic of a row, or take the one that was fitted before."""
        row, folder = self.rows[name], self.folder / "critics" / name

        def measured() -> object:
            calls = list[int]()

            def batch(number: int) -> Forest:
                forest, generated = self.plays.critic_batch(row, number)
                calls.append(generated)
                return forest

            return {"explained": critic.fit(row, batch, folder), "calls": sum(calls)}

        self.ledger.piece(f"critic {name}", measured)
        assert row.trainer.critic is not None
        # From the file also where it was just written: the best round is not the last.
        row.trainer.critic.load(folder)

    def _reference(self) -> None:
        reference, frozen = self.reference, self.plays.stage.assignment.untrained
        forwards = self.plays.stage.trainer.forwards

        def measured(block: int) -> object:
            forest, outcomes = self.plays.independent(block)
            reference.put(block, gradient(forwards, reference_calls(forest, outcomes, frozen)))
            return {e: [outcomes[r.id] for r in forest.rollouts if r.example == e] for e in forest.examples}

        for block in range(BLOCKS):
            self.ledger.piece(f"reference {block}", partial(measured, block))
        self.ledger.piece("gram", reference.gram)

    def _plan(self, row: RlStage, example: str, number: int) -> Sequence[Tree]:
        algo, modules = row.config.algo, row.task.program.modules
        return ALGORITHMS[algo.name].plan(algo, modules, (row.config.seed, f"audit-{number}", example))

    @cached_property
    def _by_plan(self) -> dict[str, list[str]]:
        """Return the rows that can share forests, by the first of them."""
        found: dict[object, list[str]] = {}
        for name, row in self.rows.items():
            algo = row.config.algo
            plans = tuple(self._plan(row, e.id, n) for e in self.plays.examples for n in range(self.plays.keys.batches))
            # What `complete` adds to a forest: values of a critic, what teachers say, gains, canonical texts.
            taught = algo.distill is not None or algo.privileged is not None
            own = name if taught or getattr(algo, "critic", None) or getattr(algo, "reserialise", False) else ""
            found.setdefault((plans, row.reward_set, own), []).append(name)
        return {names[0]: names for names in found.values()}

    def _forest(self, name: str, number: int) -> tuple[Forest, int, int]:
        first = next(first for first, names in self._by_plan.items() if name in names)
        if (first, number) not in self.forests:
            self.forests[first, number] = self.plays.batch(self.rows[first], number)
        return self.forests[first, number]

    def _batch(self, name: str, number: int, places: Sequence[Place]) -> dict[str, Any]:
        """Credit a batch whose forest has recorded paths: the row's credit of the decisions on them."""

        def measured() -> object:
            forest, calls, scored = self._forest(name, number)
            credit = self.rows[name].credit(forest)
            credits = {p.call.id: asdict(credited(credit, p.call.id)) for p in places if p.path == number}
            explained = credit.metrics.get("credit/explained_variance")
            return {"calls": calls, "scored": scored, "explained": explained, "credits": credits}

        piece: dict[str, Any] = self.ledger.piece(f"credit {name} {number}", measured)
        return piece

    def _gradients(self, names: Sequence[str], unit: float, calls: float) -> None:
        """Project the gradients of rows with one plan at each budget, one run of the largest budget after the other."""
        budgets = self.plays.keys.budgets
        levels = [runs(unit, calls, self.plays.keys.batches, budget) for budget in budgets]
        for largest in levels[-1]:
            for name in names:
                pieces = [
                    f"gradient {name} {budget} {span.start}"
                    for budget, spans in zip(budgets, levels, strict=True)
                    for span in spans
                    if _inside(span, largest)
                ]
                if not all(piece in self.ledger for piece in pieces):
                    self._vector(name, levels, len(levels) - 1, largest)
            self.forests = {key: found for key, found in self.forests.items() if key[1] not in largest}

    def _vector(self, name: str, levels: Sequence[Sequence[range]], level: int, span: range) -> Part:
        """Return a row's gradient of a run of base batches, and note its projection; before it those of its parts."""
        if level:
            found = self._together(
                name, (self._vector(name, levels, level - 1, part) for part in levels[level - 1] if _inside(part, span))
            )
        else:
            found = self._gradient(name, [self._forest(name, number)[0] for number in span])

        def measured() -> object:
            failed = sum(rollout.reward is None for rollout in found.forest.rollouts)
            return {"failed": failed, **asdict(self.reference.project(found.vector))}

        self.ledger.piece(f"gradient {name} {self.plays.keys.budgets[level]} {span.start}", measured)
        return found

    def _together(self, name: str, parts: Iterator[Part]) -> Part:
        """Return the gradient of several runs as one: the mean of theirs, or one of its own where weights differ."""
        first = next(parts)
        total, forests, credits = first.vector, [first.forest], [first.credit]
        for part in parts:
            total += part.vector  # in place: two vectors at once, not one for each part
            forests.append(part.forest)
            credits.append(part.credit)
        whole = joined(forests)
        credit = self.rows[name].credit(whole)
        if scaled_alike(credits, credit):
            return Part(total.div_(len(forests)), whole, credit)
        return self._gradient(name, [whole])

    def _gradient(self, name: str, forests: Sequence[Forest]) -> Part:
        """Return a row's gradient of batches, credited as one."""
        row = self.rows[name]
        forest = joined(forests) if len(forests) > 1 else forests[0]
        credit = row.credit(forest)
        calls = train_calls(forest, credit, dict.fromkeys(forest.examples, 0))
        return Part(gradient(row.trainer.forwards, calls), forest, credit)


def planned_calls(tree: Tree, path: Sequence[Call]) -> float:
    """Return the calls of a tree whose rollouts all call the modules that a recorded path does."""
    branches, calls = 1, 0.0
    for position, call in enumerate(path):
        at = [f for f in tree.forks if (f.module, f.invocation) == (call.module, call.invocation)]
        branches *= prod(fork.width for fork in (at if position else [*at, *(f for f in tree.forks if not f.module)]))
        calls += branches
    if tree.growth is not None:
        calls += tree.growth.rounds * tree.growth.nodes * (len(path) + 1) / 2
    for module in tree.exchange.modules if tree.exchange is not None else ():
        # A second play, live from the module's first call on.
        calls += branches * (len(path) - next((n for n, call in enumerate(path) if call.module == module), len(path)))
    return calls


@dataclass(frozen=True, slots=True)
class Part:
    """A row's gradient of some base batches as one."""

    vector: torch.Tensor
    forest: Forest
    credit: Credit


def _inside(part: range, span: range) -> bool:
    return part.start >= span.start and part.stop <= span.stop
