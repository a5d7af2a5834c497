"""What effects are observed on: records in the layouts of the tasks' data sets, and bodies of HTTP replies."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx

from tests.helpers.programs import write_csv


class Body(httpx.AsyncByteStream):
    """Not read yet, as a reply comes from a network."""

    def __init__(self, content: object):
        self.content = content if isinstance(content, bytes) else json.dumps(content).encode()

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield self.content


def records_of(name: str, start: int) -> list[dict[str, Any]]:
    numbers = range(start, start + 8)
    if name == "banking77":
        return [{"text": f"text {n}", "category": f"label {n % 2}"} for n in numbers]
    if name == "papillon":
        return [{"user_query": f"query {n}", "target_response": f"target {n}", "pii_units": "ann"} for n in numbers]
    if name == "hover":
        return [
            {
                "uid": f"u{n}",
                "claim": f"claim {n}",
                "supporting_facts": [["Lisbon", 0], ["Porto", 0]],
                "label": "SUPPORTED",
                "num_hops": 2 + n % 2,
                "hpqa_id": f"q{n // 2}",
            }
            for n in numbers
        ]
    if name == "dspy":
        return [{"id": f"r{n}", "question": f"Who made {n}?", "gold": f"a{n}"} for n in numbers]
    context = [["Thing", ["Made by Ada.", " In Porto."]], ["Ada", ["Ada lives."]]]
    facts = [["Thing", 0], ["Ada", 0]]
    return [
        {
            "_id": f"r{n}",
            "question": f"Who made thing {n}?",
            "answer": "Ada",
            "type": "bridge",
            "level": "hard",
            "supporting_facts": facts,
            "context": context,
        }
        for n in numbers
    ]


def file_of(name: str, folder: Path, start: int) -> str:
    records = records_of(name, start)
    if name in ("banking77", "papillon"):
        return write_csv(folder / f"{start}.csv", records)
    path = folder / f"{start}.{'jsonl' if name == 'dspy' else 'json'}"
    path.write_text("\n".join(map(json.dumps, records)) if name == "dspy" else json.dumps(records), encoding="utf-8")
    return str(path)
