"""The first records of real files, as what data targets start from."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from scripts.fuzz.data import EXTRA

FOLDERS: Mapping[str, tuple[str, ...]] = {
    "hotpotqa": ("hotpotqa", "multihop_qa"),
    "2wiki": ("2wikimultihopqa",),
    "musique": ("musique",),
    "nq": ("nq_open",),
    "triviaqa": ("triviaqa",),
    "popqa": ("popqa",),
    "banking77": ("banking77",),
    "papillon": ("pupa",),
    "hover": ("hover",),
}
"""Data set -> folders that may hold it."""
RECORDS, LARGEST = 20, 64 << 20


def read_real(folder: Path) -> None:
    """Take the first records of every file below `folder` that can be read."""
    for name, inner in FOLDERS.items():
        records = [record for one in inner for path in sorted((folder / one).rglob("*")) for record in _first(path)]
        if records:
            EXTRA[name] = records
    print(f"real records: {', '.join(f'{name} {len(records)}' for name, records in EXTRA.items())}", flush=True)


def _first(path: Path) -> Iterator[dict[str, Any]]:
    try:
        if not path.is_file() or path.stat().st_size > LARGEST:
            return
        yield from (dict(record) for record in islice(_records(path), RECORDS) if isinstance(record, dict))
    except (ValueError, OSError):
        return


def _records(path: Path) -> Iterator[Any]:
    with path.open(encoding="utf-8") as file:
        if path.suffix == ".jsonl":
            yield from map(json.loads, file)
        elif path.suffix == ".json":
            found = json.load(file)
            yield from found if isinstance(found, list) else ()
        elif path.suffix in (".csv", ".tsv"):
            yield from csv.DictReader(file, delimiter="," if path.suffix == ".csv" else "\t")
