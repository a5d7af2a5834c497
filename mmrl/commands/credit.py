"""`mmrl credit`: every call of recorded rollouts with its credit under one or several algorithms.

Above `credit` because it runs algorithms; no task, no model, no torch. A step of a run is credited as it was trained:
with the run's config, its frozen modules, and the examples and mini-batches of that step.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from mmrl.algorithms import assign_credit, minibatches
from mmrl.algorithms import problems as check
from mmrl.config import AlgoConfig, RlRunConfig
from mmrl.credit.entries import Credit, Entry
from mmrl.errors import ConfigError, DataError, gathered, refuse
from mmrl.records import Forest
from mmrl.report.text import align, clean, filled
from mmrl.store.forest import VERSION, check_forest
from mmrl.store.journal import fields_of, load_rollouts, read_step
from mmrl.store.rundir import RunDir
from mmrl.system.files import JsonObject, dumps

TURN_REWARD_SETS = ("outcome", "turn")
"""A file may hold both kinds of reward; whether it does is its own matter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CreditRequest:
    """Settings of `mmrl credit`."""

    algos: Sequence[AlgoConfig]
    seed: int
    rollouts: Path | None = None
    """A forest file or a journal's step; None: a step of a run."""
    run: RlRunConfig | None = None
    """The config of the run, whose folder is its `run.dir`."""
    step: int | None = None
    """Of the run."""
    user_keys: Sequence[str] = ()
    page: Path | None = None
    """A file for a page (`.html`) or a picture (`.svg`) of the credit."""

    @property
    def folder(self) -> str:
        """Folder of the run."""
        assert self.run is not None and self.run.run.dir is not None  # a stored config is in its folder
        return self.run.run.dir

    @property
    def as_trained(self) -> bool:
        """True if only the run's own algorithm is asked for, unchanged: the result must equal its journal."""
        return self.run is not None and list(self.algos) == [self.run.algo] and not self.user_keys


@dataclass(frozen=True, slots=True)
class Source:
    """Recorded rollouts, with the facts of their source that decide their credit."""

    forest: Forest
    """The part that a run's step trained on, or all of a file."""
    frozen: tuple[str, ...] = ()
    """Modules that are out of the loss, whatever the algorithm says."""
    entries: Sequence[JsonObject] = ()


def credited_calls(request: CreditRequest) -> list[dict[str, object]]:
    """Return the credit of each call under each algorithm, with the fields of an entry."""
    source, credits = _credited(request)
    pairs = zip(request.algos, credits, strict=True)
    records = [(credit.algo, _credit_json(algo, source.forest, credit)["calls"]) for algo, credit in pairs]
    return [{"algo": algo, **call} for algo, calls in records for call in calls]


def _credited(request: CreditRequest) -> tuple[Source, list[Credit]]:
    """Compute the credit of each algorithm, and write its page where one is asked for."""
    source = Source(load_rollouts(request.rollouts)) if request.rollouts is not None else recorded_step(request)
    credits = credit_all(request.algos, source, request.seed, request.user_keys)
    if request.page is not None:
        # matplotlib and templates: only here
        from mmrl.commands.credit_page import write_page

        pairs = zip(request.algos, credits, strict=True)
        write_page(request.page, source.forest, credits, [table([a], source.forest, [c]) for a, c in pairs])
        print(f"page: {request.page}", file=sys.stderr)
    return source, credits


def credit_command(request: CreditRequest, as_json: bool) -> int:
    """Print the credit of each algorithm; 1 where it is to be what a journal has and is not."""
    source, credits = _credited(request)
    if as_json:
        print(json_report(request.algos, source.forest, credits))
    else:
        width = shutil.get_terminal_size((0, 0)).columns or None  # not a terminal: as wide as it gets
        print("\n".join([*_origin(request, source, width), table(request.algos, source.forest, credits, width)]))
    if request.as_trained and (wrong := unlike_journal(credits[0], source.entries)):
        print(f"error: {request.folder}: step {request.step}: {wrong}", file=sys.stderr)
        return 1
    return 0


def _origin(request: CreditRequest, source: Source, width: int | None) -> list[str]:
    """Return the step of a run that was credited, and the settings."""
    if request.run is None:
        return []
    facts = [f"{request.folder} step {request.step}", f"seed {request.seed}"]
    facts += [f"{algo.name}: {algo.minibatches} mini-batches" for algo in request.algos if algo.minibatches > 1]
    facts += [f"frozen: {', '.join(source.frozen)}"] if source.frozen else []
    left_out = len(_untrained_examples(source.forest))
    facts += [f"{left_out} examples sampled and not trained on"] if left_out else []
    facts.append("as trained" if request.as_trained else "not as trained: settings were changed")
    return [filled(" · ".join(facts), width)]


def recorded_step(request: CreditRequest) -> Source:
    """Read what a step of a run trained on.

    Raises:
        ConfigError: the run has no such step.
        CheckpointError: its journal is damaged.
    """
    # only for a run: a file is to be credited in less than a second
    from mmrl.run.settle import module_assignment

    run, config = RunDir.read(request.folder), request.run
    assert config is not None
    steps = run.journal_steps()
    if request.step not in steps:
        available = f"{steps[0]} to {steps[-1]}" if steps else "none yet"
        raise ConfigError(f"step: got {request.step}, expected a step that {run.path} has a journal of: {available}")
    forest, entries = read_step(run, request.step)
    check_forest(forest, str(run.journal_path(request.step)))
    frozen = module_assignment(config, forest.modules).frozen
    left_out = _untrained_examples(forest)
    return Source(forest.part(e for e in forest.examples if e not in left_out), frozen, entries)


def _untrained_examples(forest: Forest) -> Sequence[str]:
    """Return the examples that a step did not train on: dynamic sampling journals everything that it sampled."""
    left_out: Sequence[str] = forest.meta.get("refill", {}).get("left_out", ())
    return left_out


def credit_all(
    algos: Sequence[AlgoConfig], source: Source, seed: int, user_keys: Sequence[str] = ("algo.minibatches",)
) -> list[Credit]:
    """Compute the credit of a step under each of `algos`.

    Args:
        user_keys: the user's config keys. Papers' mini-batches may be more than a file has examples: each example
            is then one.

    Raises:
        ConfigError: an algorithm that does not fit the forest's modules or examples, or lacks what it needs of the
            records (the first record of each algorithm that does).
    """
    forest = source.forest
    problems = [p for algo in algos for p in check(algo, forest.modules, TURN_REWARD_SETS)]
    example_count = len(forest.examples)
    problems += [
        f"algo.minibatches: got {algo.minibatches}, expected at most {example_count}, the number of examples"
        for algo in algos
        if algo.minibatches > example_count > 0 and "algo.minibatches" in user_keys
    ]
    refuse(dict.fromkeys(problems))
    credits = []
    for algo in algos:
        split = minibatches(forest.examples, algo.minibatches)
        # What one of several algorithms lacks is reported with its name.
        with gathered(problems, f"algo={algo.name}: "):
            credits.append(assign_credit(forest, algo, seed, split, source.frozen))
    if problems:
        raise DataError(problems)
    return credits


def unlike_journal(credit: Credit, recorded: Sequence[JsonObject]) -> str:
    """Compare a credit with the journal's entries, to the bit: the difference in a sentence, empty without any."""
    derived = [fields_of(entry) for entry in credit.entries]
    if len(derived) != len(recorded):
        return f"{len(derived)} entries, the journal has {len(recorded)}; another version of mmrl may have written it"
    other = [str(new["call"]) for new, old in zip(derived, recorded, strict=True) if dumps(new) != dumps(old)]
    if not other:
        return ""
    return (
        f"{len(other)} of {len(derived)} entries differ from the journal's, the first of call {other[0]}; "
        "another version of mmrl may have written it, or the run's config.yaml was changed"
    )


def json_report(algos: Sequence[AlgoConfig], forest: Forest, credits: Sequence[Credit]) -> str:
    """Return an object, or a list for several algorithms: the contents of the table, and every token's numbers."""
    records = [_credit_json(algo, forest, credit) for algo, credit in zip(algos, credits, strict=True)]
    return json.dumps(records[0] if len(records) == 1 else records, indent=1)


def _credit_json(algo: AlgoConfig, forest: Forest, credit: Credit) -> JsonObject:
    split, credited = minibatches(forest.examples, algo.minibatches), {entry.call for entry in credit.entries}
    calls = []
    for entry in credit.entries:
        call = forest.calls[entry.call]
        numbers = {field.name: getattr(entry, field.name) for field in fields(Entry) if field.name != "call"}
        calls.append({"id": call.id, "module": call.module, "minibatch": split[call.example], **numbers})
    return {
        "version": VERSION,
        "algo": credit.algo,
        "step": forest.step,
        "calls": calls,
        "calls_without_entry": [call for call in forest.calls if call not in credited],
    }


def table(algos: Sequence[AlgoConfig], forest: Forest, credits: Sequence[Credit], width: int | None = None) -> str:
    """Return a table per algorithm, with a row per entry in the forest's order of calls; then the calls without credit.

    Several algorithms have a table before these, with the advantages of each side by side.

    Args:
        width: columns of the terminal; None: any number.
    """
    lines = ["advantages", _aligned(_side_by_side(forest, credits), width), ""] if len(credits) > 1 else []
    for algo, credit in zip(algos, credits, strict=True):
        rows = _rows(forest, credit, minibatches(forest.examples, algo.minibatches))
        lines.append(f"{credit.algo}: {len(rows)} entries")
        lines += [_aligned([list(rows[0]), *(list(row.values()) for row in rows)], width)] if rows else []
        lines += [""] * (len(credits) > 1)
    credited = {entry.call for credit in credits for entry in credit.entries}
    if missing := [call for call in forest.calls if call not in credited]:
        lines.append(filled(f"calls without an entry: {', '.join(missing)}", width))
    return "\n".join(lines).rstrip("\n")


def _aligned(rows: Sequence[Sequence[str]], width: int | None) -> str:
    return align([[clean(cell) for cell in row] for row in rows], indent="", width=width, words=True)


def _side_by_side(forest: Forest, credits: Sequence[Credit]) -> list[list[str]]:
    """Return a row per call, a column per algorithm; a call with several entries has all their advantages."""
    columns = []
    for credit in credits:
        advantages: dict[str, list[str]] = {}
        for entry in credit.entries:
            advantages.setdefault(entry.call, []).append(_per_token(entry.advantages))
        columns.append([" | ".join(advantages.get(call, ["-"])) for call in forest.calls])
    calls = [[call.id, call.module, *cells] for call, *cells in zip(forest.calls.values(), *columns, strict=True)]
    return [["call", "module", *(credit.algo for credit in credits)], *calls]


def _rows(forest: Forest, credit: Credit, split: Mapping[str, int]) -> list[dict[str, str]]:
    """Return column -> cell, for each entry; `split` maps examples to mini-batches."""
    critic, has_batches = any(entry.returns is not None for entry in credit.entries), any(split.values())
    order = {call: number for number, call in enumerate(forest.calls)}
    rows = []
    for entry in sorted(credit.entries, key=lambda entry: order[entry.call]):
        call = forest.calls[entry.call]
        row = {"call": call.id, "module": call.module}
        row |= {"minibatch": str(split[call.example])} if has_batches else {}
        parts = " ".join(f"{name}={_number(value)}" for name, value in entry.parts.items())
        row |= {"reward": _number(entry.reward), "parts": parts}
        if critic:
            row["token rewards"] = _per_token(entry.token_rewards or ())
            row["raw advantage"] = _per_token(entry.raw_advantages or ())
            row["advantage"] = _per_token(entry.advantages)
            row["returns"] = _per_token(entry.returns or ())
        else:
            row["group"] = (entry.group or "-") + (" (filler)" if entry.filler_of else "")
            row |= {"size": str(entry.group_size), "mean": _number(entry.mean), "std": _number(entry.std)}
            row["advantage"] = _per_token(entry.advantages)
        rows.append(row | {"weight": _per_token(entry.weights)})
    return rows


def _number(value: float | None) -> str:
    """Format a number with six decimals, as the papers' worked examples have; with six digits where it is smaller."""
    if value is None:
        return "-"
    if value and abs(value) < 1e-3:
        return f"{value:.6g}"
    return f"{value + 0.0:.6f}".rstrip("0").rstrip(".")


def _per_token(values: Sequence[float]) -> str:
    """Format numbers per token: `0.5 x4` for four that print alike, else each."""
    texts = [_number(value) for value in values]
    if len(texts) > 1 and len(set(texts)) == 1:
        return f"{texts[0]} x{len(texts)}"
    return " ".join(texts) or "-"
