"""The journal: every rollout of a step with its calls and their credit, written once, read back exactly.

One gzip-compressed JSON-lines file per step (or evaluation), replaced whole; the first field of each
line says what it is: `forest`, `prompt` (each distinct prompt once, calls refer to it by number), `call`, `rollout`,
`entry`. Fields at their default value are left out. Values come back as JSON has them: lists for tuples inside
`facts`, `meta` and predictions.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeAlias, cast

from mmrl.errors import CheckpointError, DataError
from mmrl.records import Call, Forest, Rollout
from mmrl.store.forest import check_forest, parse_forest
from mmrl.store.rundir import RunDir
from mmrl.system.files import JsonObject, atomic_write, dumps, gunzip, parse_jsonl, similar

GZIP = b"\x1f\x8b"
LARGEST_FILE = 2**30
"""Bytes that a zipped file may unpack to."""
DAMAGE = (EOFError, zlib.error, ValueError, KeyError, TypeError, IndexError, RecursionError)
"""Errors that a damaged journal makes its readers raise."""
_PROMPT = ("prompt_ids", "prompt_text")
_STORED_AS = {"counterfactual_calls": "calls_again"}
"""Fields -> their names in the file, where these differ."""
_READ_AS = {stored: name for name, stored in _STORED_AS.items()}

Prompt: TypeAlias = tuple[tuple[int, ...], str]


def write_step(
    run: RunDir,
    forest: Forest,
    entries: Sequence[object] = (),
    *,
    evaluation: str | None = None,
    step: int | None = None,
) -> None:
    """Write one step's forest and credit.

    Args:
        entries: credit entries, as dataclasses or mappings (fields of `mmrl.credit.entries.Entry`).
        evaluation: name of the split, for the journal of an evaluation.
        step: step number; None takes `forest.step`.
    """
    lines = encode_step(forest, entries)
    text = "".join(dumps(line) + "\n" for line in lines)
    # The fastest level and no time stamp: a journal costs little and equal steps give equal files.
    data = gzip.compress(text.encode(), compresslevel=1, mtime=0)
    atomic_write(run.journal_path(forest.step if step is None else step, evaluation), data)


class JournalWriter:
    """Writer of the steps' journals, one after the other, each in the background while its step trains."""

    def __init__(self) -> None:
        # Its thread starts with the first journal.
        self._pool = ThreadPoolExecutor(1, "mmrl-journal")
        self._written: Future[None] | None = None

    def write(self, run: RunDir, forest: Forest, entries: Sequence[object]) -> None:
        """Begin `write_step`; see `wait` for what writing the one before raised."""
        # One write at a time, in order; an error of the last one surfaces here at the latest.
        self.wait()
        self._written = self._pool.submit(write_step, run, forest, entries)

    def wait(self) -> None:
        """Return once all is on disk.

        Raises:
            OSError: it cannot be written.
        """
        written, self._written = self._written, None
        if written is not None:
            written.result()

    def close(self) -> None:
        """Let what has begun end; may be called twice."""
        self._pool.shutdown(wait=True)


def read_step(run: RunDir, step: int, *, evaluation: str | None = None) -> tuple[Forest, list[JsonObject]]:
    """Read the forest and the credit entries of one step.

    Raises:
        CheckpointError: there is no such journal, or its file is damaged.
    """
    path = run.journal_path(step, evaluation)
    if not path.is_file():
        steps = run.journal_steps(evaluation)
        have = f"journals exist for steps {steps[0]} to {steps[-1]}" if steps else "the run has no journals yet"
        raise CheckpointError(f"{run.path}: no journal of step {step}; {have}")
    try:
        return decode_step(parse_jsonl(_unzipped(path), str(path)))
    except DataError as error:
        raise CheckpointError(f"{error.problems[0]} (damaged journal)") from None
    except (OSError, *DAMAGE) as error:
        raise CheckpointError(f"{path}: damaged journal ({type(error).__name__}: {error})") from None


def encode_step(forest: Forest, entries: Sequence[object]) -> list[JsonObject]:
    """Convert a forest and its credit to JSON-ready lines."""
    head = {"line": "forest", "step": forest.step, "modules": forest.modules, "meta": dict(forest.meta)}
    lines: list[JsonObject] = [head]
    # Calls of a group share their prompt, which is most of the text of a journal.
    prompts: dict[Prompt, int] = {}
    for call in forest.calls.values():
        prompt = (call.prompt_ids, call.prompt_text)
        if prompt not in prompts:
            prompts[prompt] = len(prompts)
            lines.append({"line": "prompt", "ids": call.prompt_ids, "text": call.prompt_text})
        lines.append({"line": "call", "prompt": prompts[prompt], **fields_of(call, leave_out=_PROMPT)})
    lines += [{"line": "rollout", **fields_of(rollout)} for rollout in forest.rollouts]
    # Entries come as dataclasses of `credit`, a layer that this one must not import.
    lines += [{"line": "entry", **fields_of(entry)} for entry in entries]
    return lines


def decode_step(lines: Sequence[JsonObject]) -> tuple[Forest, list[JsonObject]]:
    """Invert `encode_step`.

    Raises:
        KeyError, ValueError, TypeError, IndexError: lines that are none of a journal.
    """
    head: JsonObject | None = None
    prompts: list[JsonObject] = []
    calls: list[Call] = []
    rollouts: list[Rollout] = []
    entries: list[JsonObject] = []
    for line in lines:
        record = dict(line)
        kind = record.pop("line")
        if kind == "forest":
            head = record
        elif kind == "prompt":
            prompts.append({"prompt_ids": tuple(record["ids"]), "prompt_text": record["text"]})
        elif kind == "call":
            prompt = prompts[record.pop("prompt")]
            calls.append(Call(**_tuples(record), **prompt))
        elif kind == "rollout":
            rollouts.append(Rollout(**{_READ_AS.get(key, key): value for key, value in record.items()}))
        elif kind == "entry":
            entries.append(_tuples(record))
        else:
            raise ValueError(f"unknown kind of line '{kind}'")
    if head is None:
        raise ValueError("no forest line")
    modules, step, meta = tuple(head["modules"]), head["step"], head["meta"]
    if not isinstance(step, int) or not isinstance(meta, dict):
        raise TypeError(f"step: got {step!r:.40}, meta: got {meta!r:.40}, expected a number and an object")
    forest = Forest(
        calls={call.id: call for call in calls}, rollouts=tuple(rollouts), modules=modules, step=step, meta=meta
    )
    return forest, entries


def _tuples(record: JsonObject) -> JsonObject:
    """Convert the lists of a call or an entry, which are ids and numbers per token, to tuples; facts stay lists."""
    return {key: tuple(value) if isinstance(value, list) else value for key, value in record.items()}


def fields_of(record: object, leave_out: Sequence[str] = ()) -> JsonObject:
    """Return the fields of a dataclass or mapping, without those that equal their default."""
    if isinstance(record, Mapping):
        return dict(record)
    written = {}
    for field in dataclasses.fields(cast(Any, record)):
        value = getattr(record, field.name)
        if field.name not in leave_out and (field.default is dataclasses.MISSING or value != field.default):
            written[_STORED_AS.get(field.name, field.name)] = value
    return written


def load_rollouts(path: Path) -> Forest:
    """Load the forest of a JSON file, or of a step of a journal (`journal/step-*.jsonl.gz`); either may be zipped.

    Raises:
        DataError: the file is missing or malformed.
    """
    try:
        data = _unzipped(path)
        if not _is_journal(data):
            return parse_forest(data.decode("utf-8-sig"), str(path))
        forest = decode_step(parse_jsonl(data, str(path)))[0]
        check_forest(forest, str(path))
        return forest
    except OSError as error:
        hint = "; a journal is a file in RUN_DIR/journal" if path.is_dir() else similar(path)
        raise DataError(f"rollouts: {path} cannot be read ({error.strerror or error}){hint}") from None
    except UnicodeDecodeError:
        raise DataError(f"rollouts: {path} is not UTF-8 text") from None
    except DataError:
        raise
    except DAMAGE as error:
        raise DataError(f"rollouts: {path} is a damaged journal ({type(error).__name__}: {error})") from None


def _unzipped(path: Path) -> bytes:
    data = path.read_bytes()
    return gunzip(data, LARGEST_FILE) if data.startswith(GZIP) else data


def _is_journal(data: bytes) -> bool:
    """True where the first line is a record, as in a journal."""
    try:
        first = json.loads(data.partition(b"\n")[0])
    except (ValueError, RecursionError):
        return False
    return isinstance(first, dict) and "line" in first
