"""`mmrl credit`: every call of recorded rollouts with its credit under one or several algorithms.

Above `credit` because it runs algorithms; no task, no model, no torch. A step of a run is credited as it was trained:
with the run's config, its frozen modules, and the examples and mini-batches of that step.
"""

from __future__ import annotations

import json
import shutil
import sys
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mmrl.algorithms import assign_credit, minibatches
from mmrl.algorithms import problems as check
from mmrl.config import AlgoConfig, TrainCommandConfig
from mmrl.credit.entries import Credit
from mmrl.errors import CheckpointError, ConfigError, DataError
from mmrl.records import Forest
from mmrl.report.forest import check_forest, parse_forest
from mmrl.report.journal import decode_step, encode_step, parse_lines, read_step
from mmrl.report.rundir import RunDir
from mmrl.run.credit_report import joined, json_report, table
from mmrl.system.files import JsonObject, dumps, gunzip

GZIP = b"\x1f\x8b"
LARGEST_FILE = 2**30
"""Bytes that a zipped file may unpack to."""
TURN_REWARD_SETS = ("outcome", "turn")
"""A file may hold both kinds of reward; whether it does is its own matter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CreditRequest:
    """What `mmrl credit` computes."""

    algos: Sequence[AlgoConfig]
    seed: int
    rollouts: Path | None = None
    """A forest file or a journal's step; None: a step of a run."""
    run: TrainCommandConfig | None = None
    """The config of the run, whose folder is its `run.dir`."""
    step: int | None = None
    typed: Sequence[str] = ()
    """The config keys that were typed."""

    @property
    def as_trained(self) -> bool:
        """The run's own algorithm, nothing changed: the result is what its journal has."""
        return self.run is not None and list(self.algos) == [self.run.algo] and not self.typed


@dataclass(frozen=True, slots=True)
class Source:
    """Recorded rollouts, and what their source says of how they are credited."""

    forest: Forest
    """Of a run: the part that the step trained on."""
    frozen: tuple[str, ...] = ()
    """Modules that are out of the loss, whatever the algorithm says."""
    entries: Sequence[JsonObject] = ()
    """What the journal has as trained."""


def credit_command(request: CreditRequest, as_json: bool) -> int:
    """Print the credit of each algorithm; 1 where it is to be what a journal has and is not."""
    source = Source(load_rollouts(request.rollouts)) if request.rollouts is not None else recorded_step(request)
    credits = credit_all(request.algos, source, request.seed, request.typed)
    if as_json:
        print(json_report(request.algos, source.forest, credits))
    else:
        width = shutil.get_terminal_size((0, 0)).columns or None  # not a terminal: as wide as it gets
        print("\n".join([*_origin(request, source, width), table(request.algos, source.forest, credits, width)]))
    if request.as_trained and (wrong := unlike_journal(credits[0], source.entries)):
        print(f"error: {request.run and request.run.run.dir}: step {request.step}: {wrong}", file=sys.stderr)
        return 1
    return 0


def _origin(request: CreditRequest, source: Source, width: int | None) -> list[str]:
    """What was credited and how, for a step of a run."""
    if request.run is None:
        return []
    facts = [f"{request.run.run.dir} step {request.step}", f"seed {request.seed}"]
    facts += [f"{algo.name}: {algo.minibatches} mini-batches" for algo in request.algos if algo.minibatches > 1]
    facts += [f"frozen: {', '.join(source.frozen)}"] if source.frozen else []
    left_out = len(_left_out(source.forest))
    facts += [f"{left_out} examples sampled and not trained on"] if left_out else []
    facts.append("as trained" if request.as_trained else "not as trained: settings were changed")
    return [joined(facts, width)]


def load_rollouts(path: Path) -> Forest:
    """The forest of a JSON file, or of one step of a run's journal (`journal/step-*.jsonl.gz`); either may be zipped.

    Raises:
        DataError: the file is missing or malformed.
    """
    try:
        data = path.read_bytes()
        text = (gunzip(data, LARGEST_FILE) if data.startswith(GZIP) else data).decode("utf-8-sig")
        if _is_journal(text):
            forest = decode_step(parse_lines(text.encode(), str(path)), str(path))[0]
            check_forest(forest, str(path))
            return forest
        return parse_forest(text, str(path))
    except OSError as error:
        hint = "; a journal is a file in RUN_DIR/journal" if path.is_dir() else ""
        raise DataError(f"rollouts: {path} cannot be read ({error.strerror or error}){hint}") from None
    except UnicodeDecodeError:
        raise DataError(f"rollouts: {path} is not UTF-8 text") from None
    except DataError:
        raise
    except (EOFError, zlib.error, ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
        raise DataError(f"rollouts: {path} is a damaged journal ({type(error).__name__}: {error})") from None


def _is_journal(text: str) -> bool:
    """Whether the first line is a record of its own, as in a journal."""
    try:
        first = json.loads(text.partition("\n")[0])
    except (ValueError, RecursionError):
        return False
    return isinstance(first, dict) and "line" in first


def run_config(folder: Path) -> TrainCommandConfig:
    """The config of a training run.

    Raises:
        CheckpointError: the folder is no run, or one of `mmrl eval`.
        ConfigError: this version does not understand its config.
    """
    if "policy" in RunDir.read(folder).config:
        raise CheckpointError(f"run: {folder} is an evaluation, which trains nothing; expected a run of mmrl train")
    # only for a run: a file is to be credited in less than a second
    from mmrl.run.settle import stored_config

    return stored_config(folder, TrainCommandConfig)


def recorded_step(request: CreditRequest) -> Source:
    """What a step of a run trained on.

    Raises:
        ConfigError: the run has no such step; names those that it has.
        CheckpointError: its journal is damaged.
    """
    from mmrl.run.settle import module_assignment

    assert request.run is not None and request.run.run.dir is not None  # a stored config is in its folder
    run, config = RunDir.read(request.run.run.dir), request.run
    steps = run.journal_steps()
    if request.step not in steps:
        got = "missing" if request.step is None else f"got {request.step}"
        raise ConfigError(f"step: {got}, expected one of the steps that {run.path} has a journal of: {_spans(steps)}")
    forest, entries = read_step(run, request.step)
    check_forest(forest, str(run.journal_path(request.step)))
    frozen = module_assignment(config.model, config.algo, forest.modules, config.engine.endpoints).frozen
    left_out = _left_out(forest)
    return Source(forest.part(e for e in forest.examples if e not in left_out), frozen, entries)


def _left_out(forest: Forest) -> Sequence[str]:
    """Examples that a step did not train on: dynamic sampling journals everything that it sampled."""
    refill = forest.meta.get("refill") if isinstance(forest.meta, Mapping) else None
    left_out = refill.get("left_out") if isinstance(refill, Mapping) else None
    return left_out if isinstance(left_out, list) else ()


def _spans(steps: Sequence[int]) -> str:
    """`1 to 8, 12`; what to say where there are none."""
    spans: list[list[int]] = []
    for step in steps:
        if spans and step == spans[-1][-1] + 1:
            spans[-1] = [spans[-1][0], step]
        else:
            spans.append([step])
    return ", ".join(" to ".join(map(str, span)) for span in spans) or "none yet"


def credit_all(
    algos: Sequence[AlgoConfig], source: Source, seed: int, typed: Sequence[str] = ("algo.minibatches",)
) -> list[Credit]:
    """The credit of a step under each of `algos`.

    Args:
        typed: config keys that the user chose. Papers' mini-batches may be more than a file has examples: each example
            is then one.

    Raises:
        ConfigError: an algorithm that does not fit the forest's modules or examples, or lacks what it needs of the
            records (the first record of each algorithm that does).
    """
    forest = source.forest
    problems = [p for algo in algos for p in check(algo, forest.modules, TURN_REWARD_SETS)]
    most = len(forest.examples)
    problems += [
        f"algo.minibatches: got {algo.minibatches}, expected at most {most}, the number of examples"
        for algo in algos
        if algo.minibatches > most > 0 and "algo.minibatches" in typed
    ]
    if problems:
        raise ConfigError(dict.fromkeys(problems))
    credits = []
    for algo in algos:
        split = minibatches(forest.examples, algo.minibatches)
        try:
            credits.append(assign_credit(forest, algo, seed, split, source.frozen))
        except DataError as error:  # what one of several algorithms lacks is reported with its name
            problems += [f"algo={algo.name}: {problem}" for problem in error.problems]
    if problems:
        raise DataError(problems)
    return credits


def unlike_journal(credit: Credit, recorded: Sequence[JsonObject]) -> str:
    """How a credit differs from the journal's entries, compared to the bit; empty where it does not."""
    nothing = Forest(calls={}, rollouts=(), modules=())
    _, *lines = encode_step(nothing, credit.entries)
    own = [{key: value for key, value in line.items() if key != "line"} for line in lines]
    if len(own) != len(recorded):
        return f"{len(own)} entries, the journal has {len(recorded)}; another version of mmrl may have written it"
    other = [str(mine["call"]) for mine, theirs in zip(own, recorded, strict=True) if dumps(mine) != dumps(theirs)]
    if not other:
        return ""
    return (
        f"{len(other)} of {len(own)} entries differ from the journal's, the first of call {other[0]}; "
        "another version of mmrl may have written it, or the run's config.yaml was changed"
    )
