"""Data files: a few records of every format, spoilt, and read as every task reads them."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from tests.fuzz.values import spoilt, spoilt_bytes
from tests.helpers.programs import default_config

RECORDS: dict[str, list[dict[str, Any]]] = json.loads(Path(__file__).with_name("records.json").read_text("utf-8"))
"""Data set, or `corpus` -> records as official files have them."""
SUFFIXES = (".jsonl", ".jsonl", ".json", ".csv", ".tsv", ".txt", ".parquet")


@st.composite
def files(draw: st.DrawFn) -> tuple[str, str, bytes]:
    """A data set's name, and a file of a few of its records, spoilt as records or as bytes."""
    name = draw(st.sampled_from(sorted(RECORDS)))
    rows = [draw(spoilt(row)) for row in draw(st.lists(st.sampled_from(RECORDS[name]), min_size=1, max_size=3))]
    suffix = draw(st.sampled_from(SUFFIXES))
    data = _written(rows, suffix)
    return name, suffix, draw(st.just(data) | spoilt_bytes(data))


def _written(rows: list[Any], suffix: str) -> bytes:
    if suffix == ".json":
        return json.dumps(rows).encode()
    if suffix not in (".csv", ".tsv", ".txt"):
        return "".join(json.dumps(row) + "\n" for row in rows).encode()
    lines, sign = [row for row in rows if isinstance(row, dict)], "," if suffix == ".csv" else "\t"
    cells = [list(lines[0]) if lines else ["a"], *(row.values() for row in lines)]
    return "\n".join(sign.join(map(str, row)) for row in cells).encode("utf-8", "replace")


_FOLDER = tempfile.TemporaryDirectory(prefix="mmrl-fuzz-")
"""Ends with this process."""


def run(file: tuple[str, str, bytes]) -> str | None:
    """A file is refused, or its records are texts that a program can read."""
    from mmrl.tasks.data.corpus import load_corpus
    from mmrl.tasks.data.layouts import LAYOUTS, load_records, to_example
    from mmrl.tasks.data.rows import Source

    name, suffix, data = file
    path = str(Path(_FOLDER.name) / f"data{suffix}")
    Path(path).write_bytes(data)
    if name == "corpus":
        documents = load_corpus("task.corpus", path)
        return None if all(isinstance(d.text, str) for d in documents) else "a passage without text"
    if name not in LAYOUTS:
        return _run_dspy(name, path)
    for record in load_records(Source("task.data.train", path), "train", LAYOUTS[name]):
        example = to_example(record, "given")
        if not example.inputs["question"].strip() or not example.metadata["answers"]:
            return f"an example without question or answers: {example!r}"
    return None


def _run_dspy(name: str, path: str) -> str | None:
    from mmrl.tasks import TASKS

    task = TASKS[name](default_config(name, data=dict.fromkeys(("train", "dev", "test"), path)), 0)
    for example in task.examples("train")[:3]:
        if not all(isinstance(text, str) for text in example.inputs.values()):
            return f"inputs that are no texts: {example.inputs!r}"
    return None
