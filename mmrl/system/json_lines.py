"""Files of JSON lines that only grow: what a stage has paid for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from mmrl.errors import CheckpointError, DataError
from mmrl.system.files import JsonObject, append_jsonl, plain, read_jsonl, repair_jsonl


class Store:
    """A file of JSON lines that only grows: rollouts, or completions of a prompt model.

    Args:
        path: the file, which need not exist.
        key: key that every line has.

    Raises:
        CheckpointError: a line is damaged.
    """

    def __init__(self, path: Path, key: str):
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        # A line torn by a kill is as if it had never been written.
        repair_jsonl(path)
        self.lines = stored_lines(path, key)

    def append(self, record: Mapping[str, object]) -> JsonObject:
        """Store a record; as a resume will read it, so that both go on with the same."""
        append_jsonl(self.path, [record])
        stored: JsonObject = plain(record)
        return stored


class Table(Store):
    """A file of JSON lines that an optimiser which is run again writes again, to the same lines.

    Raises:
        CheckpointError: a line differs from the one that is there.
    """

    count = 0
    """Lines that this process has come to."""

    def add(self, record: Mapping[str, object]) -> None:
        """Write the next line, or find it there."""
        if self.count >= len(self.lines):
            self.append(record)
        elif self.lines[self.count] != plain(record):
            raise CheckpointError(
                f"{self.path}:{self.count + 1}: differs from what this run computes again from its stored rollouts; "
                f"{_way_out(self.path)}"
            )
        self.count += 1


def stored_lines(path: Path, key: str) -> list[JsonObject]:
    """Return the lines of a `Store`, each of which has `key`.

    Raises:
        CheckpointError: one is damaged; it names the line, and what to do.
    """
    try:
        lines = read_jsonl(path)
    except DataError as error:
        raise CheckpointError(f"{error}; {_way_out(path)}") from None
    if without := [number for number, line in enumerate(lines, start=1) if key not in line]:
        raise CheckpointError(f"{path}:{without[0]}: damaged, it has no '{key}'; {_way_out(path)}")
    return lines


def _way_out(path: Path) -> str:
    return f"restore {path.parent} from a copy, or delete it to optimise from the start"
