"""`mmrl replay`: the credit of a whole run derived again from its journal, and what other algorithms would have given.

Above `run.credit`, which does one step. No task, no model, no torch.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from math import sqrt

from mmrl.config import AlgoConfig
from mmrl.credit.entries import Credit
from mmrl.errors import ConfigError
from mmrl.report.rundir import RunDir
from mmrl.report.text import align, joined
from mmrl.run.credit import CreditRequest, credit_all, recorded_step, unlike_journal

Push = dict[str, list[float]]
"""Call -> per token, advantage × weight over all its entries: what multiplies the gradient of its log-probability."""


@dataclass(frozen=True, slots=True)
class Likeness:
    """How another algorithm's credit of a step stands to what was trained; shares are of the calls that both push."""

    algo: str
    pushed: int
    """Calls with some weight times advantage that is not 0."""
    both: int
    """Of these, calls that the trained credit pushes too."""
    same: float | None
    """Share that both push in the same direction, up or down; None: there is no call that both push."""
    cosine: float | None
    """Of all tokens' pushes, as vectors; None: one of them is 0."""


@dataclass(frozen=True, slots=True)
class ReplayedStep:
    """One step."""

    step: int
    entries: int
    pushed: int
    """Calls that were trained with something other than 0."""
    problem: str
    """How the credit differs from what was trained on; empty where it is equal, to the bit."""
    others: tuple[Likeness, ...] = ()


def replay_command(request: CreditRequest, as_json: bool) -> int:
    """Print every step's comparison; 1 where a step's credit is not what its journal has."""
    steps = replayed(request)
    if as_json:
        print(json.dumps([asdict(step) for step in steps], indent=1))
    else:
        print(_text(request, steps))
    wrong = [step for step in steps if step.problem]
    for step in wrong[:3]:
        print(f"error: {request.run and request.run.run.dir}: step {step.step}: {step.problem}", file=sys.stderr)
    return 1 if wrong else 0


def replayed(request: CreditRequest) -> list[ReplayedStep]:
    """The steps of a run, or one of them.

    Args:
        request: `algos` that are not the run's own are compared with it.

    Raises:
        ConfigError: a step that the run has not, an algorithm that does not fit it.
        CheckpointError: a damaged journal.
    """
    run = request.run
    assert run is not None and run.run.dir is not None  # a stored config is in its folder
    steps = RunDir.read(run.run.dir).journal_steps() if request.step is None else [request.step]
    if not steps:
        raise ConfigError(f"step: {run.run.dir} has a journal of no step yet")
    others = [algo for algo in request.algos if algo != run.algo]
    return [_replayed(replace(request, step=step), run.algo, others) for step in steps]


def _replayed(request: CreditRequest, trained: AlgoConfig, others: Sequence[AlgoConfig]) -> ReplayedStep:
    assert request.run is not None and request.step is not None
    source = recorded_step(request)
    (own,) = credit_all([trained], source, request.run.seed)
    pushes = _pushes(own)
    credits = credit_all(others, source, request.seed, request.typed)
    return ReplayedStep(
        step=request.step,
        entries=len(own.entries),
        pushed=len(pushes),
        problem=unlike_journal(own, source.entries),
        others=tuple(_likeness(credit, pushes) for credit in credits),
    )


def _pushes(credit: Credit) -> Push:
    """Those of calls with something other than 0."""
    pushes: Push = {}
    for entry in credit.entries:
        tokens = [a * w for a, w in zip(entry.advantages, entry.weights, strict=True)]
        before = pushes.get(entry.call)
        pushes[entry.call] = tokens if before is None else [a + b for a, b in zip(before, tokens, strict=True)]
    return {call: tokens for call, tokens in pushes.items() if any(tokens)}


def _likeness(credit: Credit, trained: Push) -> Likeness:
    pushes = _pushes(credit)
    both = [call for call in pushes if call in trained]
    same = [sum(pushes[call]) * sum(trained[call]) > 0 for call in both]
    # A call may have more tokens to one algorithm than to another, which leaves some out: those are 0.
    product = sum(a * b for call in both for a, b in zip(pushes[call], trained[call], strict=False))
    lengths = _length(pushes) * _length(trained)
    return Likeness(
        algo=credit.algo,
        pushed=len(pushes),
        both=len(both),
        same=sum(same) / len(same) if same else None,
        cosine=product / lengths if lengths else None,
    )


def _length(pushes: Push) -> float:
    return sqrt(sum(a * a for tokens in pushes.values() for a in tokens))


def _text(request: CreditRequest, steps: Sequence[ReplayedStep]) -> str:
    assert request.run is not None
    names = [name for other in steps[0].others for name in (other.algo, "", "", "")]
    columns = ["calls", "both", "same way", "cosine"] * len(steps[0].others)
    rows = [["", "", "", "", *names]] if names else []
    rows.append(["step", "entries", "calls", "as trained", *columns])
    for step in steps:
        cells = [
            cell
            for one in step.others
            for cell in (str(one.pushed), str(one.both), _share(one.same), _share(one.cosine))
        ]
        rows.append([str(step.step), str(step.entries), str(step.pushed), "NO" if step.problem else "yes", *cells])
    equal = sum(not step.problem for step in steps)
    width = shutil.get_terminal_size((0, 0)).columns or None
    facts = [f"{request.run.run.dir}", request.run.algo.name, f"seed {request.run.seed}"]
    lines = [joined(facts, width), "", align(rows), ""]
    lines.append(f"{equal} of {len(steps)} steps: the credit derived again equals what was trained on, to the bit")
    if columns:
        lines.append(
            "calls: with credit other than 0; both: of these, those that training credited too; same way: their "
            "share pushed up or down alike; cosine: of advantage x weight over all tokens"
        )
    return "\n".join(lines)


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
