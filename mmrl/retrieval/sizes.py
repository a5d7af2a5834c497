"""What an index will take on disk and in memory, told before anything is fetched or built. Used by `mmrl index`.

Estimates: 100-word passages of about 620 bytes; dense and ColBERT from the arrays they write. BM25 on disk was within
20 % on corpora of 6 to 307 MB; its memory to build is what a million passages took (docs/performance.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mmrl.retrieval.index_folder import IndexInfo, IndexSpec
from mmrl.retrieval.store import Written
from mmrl.retrieval.vectors import HNSW_LINKS

PASSAGE_BYTES = 620
"""Text of a 100-word passage."""
DIMENSION, TOKEN_DIMENSION = 768, 128
"""Of contriever and E5-base; of ColBERTv2."""
TOKEN_BYTES = 4.5
"""Text per token vector."""
BM25_DISK, BM25_BUILD, BM25_SEARCH = 0.9, 8.0, 0.05
"""Bytes per byte of text: index files; memory while building; memory while searching, beside the mapped files."""


def sizes(spec: IndexSpec, passages: int, text_bytes: int) -> dict[str, float]:
    """Bytes of `disk` (finished index), `work` (more disk while building), `build` (memory), `search` (memory).

    Args:
        spec: kind and settings.
        passages: how many.
        text_bytes: of all titles and texts.
    """
    store = 1.1 * text_bytes + 16 * passages
    held = 100.0 * passages  # hashes of passages while they are written
    graph = spec.settings.get("faiss") == "hnsw"
    if spec.kind == "bm25":
        return {
            "disk": store + BM25_DISK * text_bytes,
            "work": 0,
            "build": held + BM25_BUILD * text_bytes,
            "search": BM25_DISK * text_bytes + 8 * passages,
        }
    if spec.kind == "dense":
        vectors = 4.0 * DIMENSION * passages
        index = vectors + graph * passages * (8 * HNSW_LINKS + 16)
        return {"disk": store + index, "work": vectors, "build": held + index, "search": index}
    tokens = text_bytes / TOKEN_BYTES
    vectors = 2.0 * TOKEN_DIMENSION * tokens
    index = vectors + graph * tokens * (8 * HNSW_LINKS + 16)
    return {"disk": store + vectors + index, "work": vectors, "build": held + index, "search": index + vectors}


def estimate_text(spec: IndexSpec, local_bytes: int, hub_ids: Sequence[str], folder: Path) -> str:
    """What is known before the sources are read."""
    lines = [f"index: {described(spec)} -> {folder}"]
    if hub_ids:
        lines.append(
            f"fetched from the hub first: {', '.join(hub_ids)} (size: see docs/retrieval.md; kept in the hub's cache)"
        )
    if local_bytes:
        passages = max(1, local_bytes // PASSAGE_BYTES)
        lines.append(f"files: {human(local_bytes)}, at most about {passages:,} passages of 100 words")
        lines.append(needs(sizes(spec, passages, local_bytes)))
    if not (hub_ids or local_bytes):
        lines.append("the embedded mini world: about 1,200 short passages, some megabytes of disk and memory at most")
    return "\n".join(lines)


def measured_text(spec: IndexSpec, written: Written) -> str:
    """What is known once the passages are written."""
    return (
        f"{written.documents:,} passages, {human(written.text_bytes)} of text"
        f" ({written.duplicates:,} with the same title and text left out)\n"
        + needs(sizes(spec, written.documents, written.text_bytes))
    )


def needs(found: dict[str, float]) -> str:
    """One line of sizes."""
    more = f" and {human(found['work'])} more while building" if found["work"] else ""
    return (
        f"estimated: disk {human(found['disk'])}{more}, memory {human(found['build'])} to build, "
        f"{human(found['search'])} to search (memory-mapped)"
    )


def info_text(folder: Path, info: IndexInfo) -> str:
    """What `mmrl index info` prints."""
    disk = sum(int(size) for size, _ in info.files.values())
    return "\n".join(
        [
            f"index      {folder}",
            f"retriever  {described(info.spec)}",
            f"passages   {info.documents:,} ({info.duplicates:,} repeated ones left out)",
            f"text       {human(info.text_bytes)}",
            f"disk       {human(disk)}",
            f"corpus     {', '.join(info.sources) or 'a task'}",
            f"digest     {info.digest}",
            f"built in   {info.build_seconds:.1f} s",
        ]
    )


def described(spec: IndexSpec) -> str:
    """Kind and settings in one line."""
    return f"{spec.kind} ({', '.join(f'{name} {value}' for name, value in spec.settings.items())})"


def human(size: float) -> str:
    """Bytes for people."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" or size >= 100 else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"
