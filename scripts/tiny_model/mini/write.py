"""Write a mini world as the files that `mmrl.tasks.mini` reads: `python -m scripts.tiny_model.mini.write`."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from mmrl.tasks.mini.examples import FACTS, FOLDER
from scripts.tiny_model.mini.messages import make_requests, make_support
from scripts.tiny_model.mini.questions import make_claims, make_questions, make_singles
from scripts.tiny_model.mini.world import PARTS, WORLD_SEED, make_world


def write_world(folder: Path = FOLDER, seed: int = WORLD_SEED) -> None:
    """Write the world of `seed` into `folder`, a line a record."""
    world = make_world(seed)
    entities = world.entities.values()
    _write(folder / "documents.jsonl", ({"id": d.id, "title": d.title, "text": d.text} for d in world.documents))
    companies = (entity for entity in entities if entity.kind == "company")
    _write(
        folder / "companies.jsonl",
        ({"name": e.name, **{relation: world.value(e.id, relation) for relation in FACTS}} for e in companies),
    )
    _write(folder / "products.jsonl", ({"name": entity.name} for entity in entities if entity.kind == "product"))
    for split in PARTS:
        _write(folder / split / "questions.jsonl", make_questions(split, seed))
        _write(folder / split / "singles.jsonl", make_singles(split, seed))
        for name, make in (("claims", make_claims), ("support", make_support), ("requests", make_requests)):
            _write(folder / split / f"{name}.jsonl", map(asdict, make(split, seed)))


def _write(path: Path, records: Iterable[dict[str, object]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


if __name__ == "__main__":
    write_world()
