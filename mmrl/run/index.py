"""`mmrl index build|info|search` and `mmrl serve-retriever`: index folders made, looked into, and served.

Sizes come before anything long: an index of a whole encyclopedia takes hours and a disk.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from mmrl.config.retriever import (
    BuildIndexArguments,
    IndexArguments,
    IndexInfoArguments,
    SearchIndexArguments,
    ServeIndexArguments,
)
from mmrl.errors import ConfigError, DataError
from mmrl.models.hub import encoder_problems
from mmrl.retrieval.base import Retriever
from mmrl.retrieval.index_folder import (
    IndexInfo,
    IndexSpec,
    build_index,
    estimated_bytes,
    open_index,
    partial_of,
    read_info,
    spec_of,
)
from mmrl.retrieval.select import index_problems, packages_missing, server_problems
from mmrl.retrieval.serving import make_app
from mmrl.retrieval.store import CorpusFacts, PassageStore
from mmrl.secrets import token_of
from mmrl.system.files import user_path
from mmrl.tasks.data.corpus import Corpus

KEY = "index"
PASSAGE_BYTES = 620
"""Text of a passage of 100 words, for estimates before a corpus is read."""


def build(given: BuildIndexArguments) -> int:
    """`mmrl index build`."""
    section, folder = given.section(), user_path(given.index)
    # Nothing is downloaded or read before all of this is right.
    problems = packages_missing(section)
    if folder.exists():
        problems.append(f"index: {folder} exists, and is left as it is; choose another folder or remove it yourself")
    if not problems and section.encodes:
        problems += encoder_problems("model", str(spec_of(section).settings["model"]))
    try:
        corpus = Corpus(given.corpus)
    except DataError as error:
        problems += error.problems
    if problems:
        raise ConfigError([f"mmrl index build: {problem}" for problem in problems])
    spec = spec_of(section)
    # Sizes come before anything is read: an index may not fit on this disk, and its build takes hours.
    print(_estimate_text(spec, corpus.local_bytes(), corpus.hub_ids(), folder), flush=True)
    if given.plan:
        return 0
    if partial_of(folder).is_dir():
        print(f"continuing the build in {partial_of(folder)}", flush=True)
    try:
        built = build_index(
            folder,
            spec,
            corpus.passages,
            sources=given.corpus,
            stamp=corpus.stamp(),
            on_corpus=lambda passages: print(_corpus_text(spec, passages), flush=True),
            **section.model_dump(include={"device", "batch_size"}),
        )
    except OSError as error:
        raise ConfigError(f"mmrl index build: cannot build {folder}: {error}; the same command goes on") from None
    if corpus.skipped:
        print("\n  ".join(["without passages, left out:", *corpus.skipped]))
    print(f"built in {built.build_seconds:.1f} s: {folder}\nuse it: task.retriever.name={built.kind} ", end="")
    print(f"task.retriever.index={folder}, or mmrl serve-retriever index={folder}")
    return 0


def info(given: IndexInfoArguments) -> int:
    """`mmrl index info`."""
    folder = user_path(given.index)
    print(_info_text(folder, read_info(folder, KEY)))
    return 0


def search(given: SearchIndexArguments) -> int:
    """`mmrl index search`."""
    _, retriever, _ = _opened(given)
    _load(retriever)
    started = time.perf_counter()
    (documents,) = retriever.search([given.query], [given.top_k])
    spent = time.perf_counter() - started
    for rank, document in enumerate(documents, 1):
        title, text = (_line(part) for part in (document.title, document.text[:300]))
        print(f"{rank:3d}  {document.score:9.4f}  [{_line(document.id)}] {title}\n     {text}")
    print(f"{len(documents)} passages in {1000 * spent:.1f} ms")
    return 0


def _line(text: str) -> str:
    """Text of a corpus on one line, without what a terminal would obey."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def serve(given: ServeIndexArguments) -> int:
    """`mmrl serve-retriever`."""
    if problems := server_problems("mmrl serve-retriever"):
        raise ConfigError(problems)
    token = None if given.token_env is None else token_of(given.token_env, "mmrl serve-retriever: token_env")
    facts, retriever, passages = _opened(given)
    from mmrl.system.http_server import serve as serve_app

    served: dict[str, str | int] = {
        "kind": facts.kind,
        "documents": len(passages),
        "index": Path(given.index).name,
        "digest": facts.digest,
    }
    app = make_app(retriever, served, max_batch=given.max_batch, token=token)
    try:
        serve_app(app, given.host, given.port, announce="listening on {url}")
    except OSError as error:
        raise ConfigError(
            f"mmrl serve-retriever: cannot listen on host={given.host} port={given.port}: {error.strerror or error}"
        ) from None
    print("stopped", file=sys.stderr)
    return 0


def _estimate_text(spec: IndexSpec, local_bytes: int, hub_ids: Sequence[str], folder: Path) -> str:
    """What is known before the sources are read."""
    lines = [f"index: {_spec_text(spec)} -> {folder}"]
    if hub_ids:
        lines.append(
            f"fetched from the hub first: {', '.join(hub_ids)} (size: see docs/retrieval.md; stays in the hub's cache)"
        )
    if local_bytes:
        passages = max(1, local_bytes // PASSAGE_BYTES)
        lines.append(f"files: {_bytes_text(local_bytes)}, at most about {passages:,} passages of 100 words")
        lines.append(_sizes_text(spec, passages, local_bytes))
    if not (hub_ids or local_bytes):
        lines.append("the embedded mini world: about 1,200 short passages, some megabytes of disk and memory at most")
    return "\n".join(lines)


def _corpus_text(spec: IndexSpec, corpus: CorpusFacts) -> str:
    """What is known once the passages are written."""
    return (
        f"{corpus.documents:,} passages, {_bytes_text(corpus.text_bytes)} of text"
        f" ({corpus.duplicates:,} with the same title and text left out)\n"
        + _sizes_text(spec, corpus.documents, corpus.text_bytes)
    )


def _sizes_text(spec: IndexSpec, passages: int, text_bytes: int) -> str:
    """One line of estimated sizes."""
    sizes = estimated_bytes(spec, passages, text_bytes)
    more = f" and {_bytes_text(sizes['work'])} more while building" if sizes["work"] else ""
    return (
        f"estimated: disk {_bytes_text(sizes['disk'])}{more}, memory {_bytes_text(sizes['build'])} to build, "
        f"{_bytes_text(sizes['search'])} to search (memory-mapped)"
    )


def _info_text(folder: Path, info: IndexInfo) -> str:
    """What `mmrl index info` prints."""
    disk = sum(int(size) for size, _ in info.files.values())
    return "\n".join(
        [
            f"index      {folder}",
            f"retriever  {_spec_text(info)}",
            f"passages   {info.documents:,} ({info.duplicates:,} repeated ones left out)",
            f"text       {_bytes_text(info.text_bytes)}",
            f"disk       {_bytes_text(disk)}",
            f"corpus     {', '.join(info.sources) or 'a task'}",
            f"digest     {info.digest}",
            f"built in   {info.build_seconds:.1f} s",
        ]
    )


def _spec_text(spec: IndexSpec) -> str:
    """Kind and settings in one line."""
    # Prompts end in spaces: in quotes.
    shown = {n: repr(v) if isinstance(v, str) and v != v.strip() else v for n, v in spec.settings.items() if v != ""}
    return f"{spec.kind} ({', '.join(f'{name} {value}' for name, value in shown.items())})"


def _bytes_text(size: float) -> str:
    """Bytes for people."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" or size >= 100 else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def _load(retriever: Retriever) -> None:
    """Load what searches need, without a bar among the results."""
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    retriever.load()


def _opened(given: IndexArguments) -> tuple[IndexInfo, Retriever, PassageStore]:
    """Info, retriever and passages of an index folder."""
    folder = user_path(given.index)
    facts = read_info(folder, KEY)
    if problems := index_problems(KEY, facts):
        raise DataError(problems)
    try:
        passages = PassageStore(folder)
        retriever = open_index(
            folder,
            facts,
            passages,
            device=given.device,
            batch_size=given.batch_size,
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise DataError(f"{KEY}: cannot open {folder}: {error}") from None
    return facts, retriever, passages
