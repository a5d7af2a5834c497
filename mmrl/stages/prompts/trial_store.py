"""What a stage that optimises prompts has paid for, or written, in files that a kill leaves whole."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pydantic_core import to_jsonable_python

from mmrl.errors import CheckpointError
from mmrl.system.files import JsonObject, append_jsonl, plain, read_jsonl, repair_jsonl


class Store:
    """A file of JSON lines that only grows: rollouts, or completions of a prompt model."""

    def __init__(self, path: Path):
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        # A line torn by a kill is as if it had never been written.
        repair_jsonl(path)
        self.lines = read_jsonl(path)

    def append(self, record: Mapping[str, object]) -> JsonObject:
        """Store a record; as a resume will read it, so that both go on with the same."""
        append_jsonl(self.path, [record])
        made: JsonObject = plain(record)
        return made


class Table:
    """A file of JSON lines that an optimiser which is run again writes again, to the same lines.

    Raises:
        CheckpointError: a line differs from the one that is there.
    """

    def __init__(self, path: Path):
        self._store = Store(path)
        self.path = path
        self.count = 0
        """Lines that this process has come to."""

    @property
    def again(self) -> bool:
        """Whether the next line is there already."""
        return self.count < len(self._store.lines)

    def add(self, record: Mapping[str, object]) -> None:
        """Write the next line, or find it there."""
        if not self.again:
            self._store.append(record)
        elif self._store.lines[self.count] != plain(record):
            raise CheckpointError(
                f"{self.path}:{self.count + 1}: differs from what this run computes again from its stored rollouts; "
                f"restore {self.path.parent} from a copy, or delete it to optimise from the start"
            )
        self.count += 1


def as_json(value: object) -> JsonObject:
    """A value as JSON would read it back, whatever objects it holds; the same in every process.

    What JSON has no form for becomes text: the value is for prompts, where it would be text as well.
    """
    made: JsonObject = plain(to_jsonable_python(_sorted(value), fallback=str, inf_nan_mode="strings"))
    return made


def _sorted(value: object) -> object:
    """With sets in an order that no process chooses."""
    if isinstance(value, Mapping):
        return {str(key): _sorted(item) for key, item in value.items()}
    if isinstance(value, set | frozenset):
        return sorted((_sorted(item) for item in value), key=str)
    if isinstance(value, list | tuple):
        return [_sorted(item) for item in value]
    return value
