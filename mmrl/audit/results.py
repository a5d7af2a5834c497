"""The result of an audit, out of its ledger: what `audit.json`, the table and the page have. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from statistics import fmean
from typing import Any

from mmrl.audit import numbers
from mmrl.audit.alignment import alignment, strength
from mmrl.audit.gradients import Projection
from mmrl.audit.ledger import Ledger
from mmrl.audit.numbers import Credited, Decision, Measured, Paths, Truth
from mmrl.audit.settings import BLOCKS, AuditKeys
from mmrl.errors import MmrlError
from mmrl.system.files import JsonObject


def result_of(
    ledger: Ledger, keys: AuditKeys, settings: JsonObject, units: Mapping[str, float | None], seed: int
) -> JsonObject:
    """Compute everything that is reported.

    Args:
        units: row -> `gradients.length_unit`.
    """
    pieces = ledger.pieces
    recorded = pieces["paths"]
    decisions, dropped = _decisions(pieces)
    outcomes: dict[str, list[float]] = {}
    for block in range(BLOCKS):
        for example, values in pieces[f"reference {block}"].items():
            outcomes.setdefault(example, []).extend(values)
    credits = {name: _credits(pieces, name) for name in units}
    judged = {name: numbers.judged(decisions, credits[name]) for name in units}
    gram = pieces["gram"]
    reference = strength(gram)
    any_row = next(iter(judged.values()))
    modules = list(recorded["calls"])
    shares = numbers.influence(decisions, Paths(examples=recorded["examples"], calls=recorded["calls"]), outcomes, seed)
    span = numbers.outcome_range(decisions)
    return {
        "settings": settings,
        "outcome": fmean(fmean(values) for values in outcomes.values()),
        "modules": {
            module: {
                "influence": _shown(shares[module]),
                "decisions": sum(one.module == module for one in any_row),
                "clear": sum(one.module == module and one.clear for one in any_row),
            }
            for module in modules
        },
        "clear_share": fmean(one.clear for one in any_row),
        "dropped": dropped,
        "failed": {
            "recorded paths": recorded["failed"],
            "rollouts of the reference": keys.examples * keys.reference - sum(map(len, outcomes.values())),
        },
        "ceiling": {
            name: _shown(numbers.over_examples(part, numbers.ceiling, seed))
            for name, part in {
                "all": decisions,
                **{m: [d for d in decisions if d.module == m] for m in modules},
            }.items()
        },
        "reference": {
            "rollouts": keys.reference,
            "measurable": reference.measurable,
            "squared": reference.product,
            "error": reference.error,
            "needed": reference.needed,
        },
        "unit": pieces["unit"]["calls"],
        "rows": {
            name: _row(pieces, name, judged[name], modules, keys, unit, gram, seed) for name, unit in units.items()
        },
        "decisions": [
            {
                "example": decision.example,
                "call": decision.call,
                "module": decision.module,
                "difference": decision.truth.difference,
                "error": decision.truth.error(*span),
                "rows": {name: asdict(credits[name][decision.call]) for name in units},
            }
            for decision in decisions
        ],
    }


def _decisions(pieces: Mapping[str, Any]) -> tuple[list[Decision], int]:
    """Return decisions with a truth, and the number of those without; raises `MmrlError` where none has one."""
    truths = {
        truth["call"]: Truth(continued=truth["continued"], others=[(a, b) for a, b in truth["others"]])
        for name, chunk in pieces.items()
        if name.startswith("truth ")
        for truth in chunk
        if truth is not None
    }
    drawn = pieces["paths"]["decisions"]
    decisions = [
        Decision(example=one["example"], call=one["call"], module=one["module"], truth=truths[one["call"]])
        for one in drawn
        if one["call"] in truths
    ]
    if not decisions:
        raise MmrlError(f"all {len(drawn)} decisions were dropped: what follows them failed from outside causes")
    return decisions, len(drawn) - len(decisions)


def _credits(pieces: Mapping[str, Any], name: str) -> dict[str, Credited]:
    return {
        call: Credited(**credited)
        for piece, numbers in pieces.items()
        if piece.startswith(f"credit {name} ")
        for call, credited in numbers["credits"].items()
    }


def _row(
    pieces: Mapping[str, Any],
    name: str,
    judged: Sequence[numbers.Judged],
    modules: Sequence[str],
    keys: AuditKeys,
    unit: float | None,
    gram: Sequence[Sequence[float]],
    seed: int,
) -> JsonObject:
    batches = [numbers for piece, numbers in pieces.items() if piece.startswith(f"credit {name} ")]
    of_module = {module: [one for one in judged if one.module == module] for module in modules}
    by_budget = {
        budget: alignment(
            [Projection(numbers["norm2"], tuple(numbers["products"])) for numbers in _gradients(pieces, name, budget)],
            gram,
            unit,
        )
        for budget in keys.budgets
    }
    credits = [one.credited.credit for one in judged]
    fitted = pieces.get(f"critic {name}")
    explained = [batch["explained"] for batch in batches if batch["explained"] is not None]
    return {
        "fidelity": {
            "all": _shown(numbers.over_examples(judged, numbers.fidelity, seed)),
            "within": _shown(numbers.within_examples(judged, seed)),
            **{m: _shown(numbers.over_examples(part, numbers.fidelity, seed)) for m, part in of_module.items()},
        },
        "right_sign": _shown(numbers.over_examples(judged, numbers.right_sign, seed)),
        "signal": _shown(numbers.over_examples(judged, numbers.signal, seed)),
        "zero": fmean(credit == 0 for credit in credits),
        "not_credited": fmean(credit is None for credit in credits),
        "alignment": {str(budget): asdict(found) for budget, found in by_budget.items()},
        "calls": pieces["unit"]["batches"][name],
        "scored": fmean(batch["scored"] for batch in batches),
        "failed": sum(numbers["failed"] for numbers in _gradients(pieces, name, keys.budgets[0])),
        "explained_variance": fmean(explained) if explained else None,
        "critic": fitted and {"calls": fitted["calls"], "explained_variance": max(fitted["explained"])},
    }


def _gradients(pieces: Mapping[str, Any], name: str, budget: int) -> list[Any]:
    """Return the numbers of a row's gradients at a budget, in the order of their batches."""
    start = f"gradient {name} {budget} "
    found = {int(piece.removeprefix(start)): numbers for piece, numbers in pieces.items() if piece.startswith(start)}
    return [found[number] for number in sorted(found)]


def _shown(measured: Measured) -> JsonObject:
    value, interval = measured
    low, high = interval or (None, None)
    return {"value": value, "low": low, "high": high}
