"""Index folders: a corpus and what searches it, built once, opened in a moment, whole or absent.

Above the retrievers, below tasks and `mmrl index`. A folder is built as `NAME.partial` beside its place and renamed
when it is complete, so a killed build continues and nobody opens half of one. `index.json` describes it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from filelock import FileLock

from mmrl.config import RetrieverConfig
from mmrl.config.retriever import DenseConfig
from mmrl.errors import DataError
from mmrl.retrieval import bm25, dense
from mmrl.retrieval.base import Document, Retriever
from mmrl.retrieval.store import CorpusFacts, PassageStore, write_passages
from mmrl.system.files import atomic_write, differences, file_digest, take_lock, user_path

FORMATS = {"bm25": 5, "dense": 4}
"""Kind of index -> the format in which it is built; those of any other are not read."""
INFO, PLAN, LOCK = "index.json", "plan.json", "lock"
"""File of a finished index; files of an unfinished one: its settings, and the process that builds it."""

CHECKED_BYTES = 64 * 2**20
"""Files up to this size are checked by content, larger ones by size alone: start-up must not read gigabytes."""

Settings: TypeAlias = Mapping[str, Any]

log = logging.getLogger("mmrl.retrieval")


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexSpec:
    """Kind and settings of an index."""

    kind: str
    """`bm25` or `dense`."""
    settings: Settings
    """`Bm25Settings`; or `model`, `faiss` and `Treatment`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexInfo(IndexSpec):
    """Content of `index.json`."""

    format: int
    documents: int
    duplicates: int
    text_bytes: int
    digest: str
    sources: Sequence[str]
    build_seconds: float
    encoder: str = ""
    """`model_identity` of the encoder, as it was when the index was made."""
    files: Mapping[str, tuple[int, str | None]] = field(default_factory=dict)
    """File name below the folder -> size in bytes, SHA-256 of the content (None for large files)."""


def spec_of(config: RetrieverConfig) -> IndexSpec:
    """Return the spec of the index that a `task.retriever` section without `index` describes."""
    if isinstance(config, DenseConfig):
        model = config.model or dense.DEFAULT_MODEL
        # As a library reads it, from whatever folder it is read; links stay, for they may be what has the model's name.
        if (folder := user_path(model)).is_dir():
            model = os.path.abspath(folder)
        settings = {"model": model, **asdict(dense.treatment_of(config, model)), "faiss": config.faiss}
    else:
        settings = config.model_dump(include={"k1", "b", "stemmer", "stopwords"})
    return IndexSpec(kind=config.name, settings=settings)


def _encoder(settings: Settings, device: str, batch_size: int, revision: str | None = None) -> dense.Encoder:
    treatment = dense.Treatment(**{key: settings[key] for key in dense.Treatment.__dataclass_fields__})
    return dense.Encoder(settings["model"], treatment, device=device, batch_size=batch_size, revision=revision)


def read_info(folder: Path, key: str = "task.retriever.index") -> IndexInfo:
    """Read and verify what an index folder holds.

    Args:
        folder: made by `build_index`.
        key: key that the user typed, for messages.

    Raises:
        DataError: no index, one that is not finished, or a damaged one.
    """
    if not (folder / INFO).is_file():
        why = "its build is not finished: run `mmrl index build` again" if is_started(folder) else f"has no {INFO}"
        raise DataError(f"{key}: {folder}: {why}; expected a folder made by `mmrl index build`")
    try:
        info = IndexInfo(**json.loads((folder / INFO).read_text(encoding="utf-8")))
        for file, text in differences({folder / name: check for name, check in info.files.items()}).items():
            raise ValueError(f"{file.name} {text}")
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise DataError(f"{key}: {folder} is damaged: {error}; build it again") from None
    if info.format != (expected := FORMATS.get(info.kind)):
        version = f"another version of mmrl (format {info.format}, expected {expected})"
        raise DataError(f"{key}: {folder} was built by {version}; build it again")
    return info


def build_index(
    folder: Path,
    spec: IndexSpec,
    documents: Callable[[], Iterable[Document]],
    *,
    sources: Sequence[str] = (),
    stamp: str = "",
    device: str = "cpu",
    batch_size: int = 32,
) -> IndexInfo:
    """Build an index folder, or go on with a build that was killed.

    Args:
        folder: does not exist; made in one step when the build is done.
        spec: kind and settings.
        documents: gives the passages; those of an earlier attempt are written again, their vectors kept.
        sources: origin of the documents, for people.
        stamp: changes when the content of the sources does; an earlier attempt with another is not continued.
        device: device of the encoder.
        batch_size: batch size of the encoder.

    Raises:
        DataError: the folder exists, no passages, another build of the same folder is running, an unfinished one was
            started with other settings, or the folder beside it is no build at all.
    """
    # Never overwritten: it may have taken hours, and other processes may have it mapped.
    if folder.exists():
        raise DataError(f"index: {folder} exists, and is left as it is; choose another folder or remove it yourself")
    work = partial_of(folder)
    work.mkdir(parents=True, exist_ok=True)
    # Before the lock, which would be a file in somebody's folder. A build has its plan until it is done.
    names = {path.name for path in work.iterdir()}
    if PLAN not in names and names - {LOCK}:
        raise DataError(
            f"index: {work} is no unfinished build (it has no {PLAN}), and is left as it is; the index is built there "
            f"before it is moved to {folder}: choose another folder, or rename that one"
        )
    started = time.perf_counter()
    try:
        lock = take_lock(work / LOCK)
    except BlockingIOError:
        raise DataError(f"index: {work} is being built by another process") from None
    try:
        _check_plan(work, spec, stamp)
        _remove_earlier_attempt(work)
        try:
            corpus = write_passages(work, documents())
            if not corpus.documents:
                raise DataError(f"index: {', '.join(sources) or 'the corpus'}: has no passages")
        except DataError:
            # Nothing to go on with once the sources are mended, but for vectors of an earlier attempt.
            if not (work / "shards").is_dir():
                shutil.rmtree(work)
            raise
        passages, settings = PassageStore(work), spec.settings
        if spec.kind == "bm25":
            bm25.write_index(work / "bm25", passages, bm25.Bm25Settings(**settings))
        else:
            dense.build(work, passages, _encoder(settings, device, batch_size), settings["faiss"])
        return _finish(work, folder, spec, corpus, sources, time.perf_counter() - started)
    finally:
        os.close(lock)


def _remove_earlier_attempt(work: Path) -> None:
    """Remove all that a killed build has written but its settings and the vectors, which take hours."""
    for path in work.iterdir():
        if path.is_dir() and path.name != "shards":
            shutil.rmtree(path)
        elif path.is_file() and path.name not in (LOCK, PLAN):
            path.unlink()


def _finish(
    work: Path, folder: Path, spec: IndexSpec, corpus: CorpusFacts, sources: Sequence[str], seconds: float
) -> IndexInfo:
    shutil.rmtree(work / "shards", ignore_errors=True)
    written = [file for file in sorted(work.rglob("*")) if file.is_file() and file.name not in (LOCK, PLAN)]
    sizes = {file: file.stat().st_size for file in written}
    info = IndexInfo(
        format=FORMATS[spec.kind],
        kind=spec.kind,
        settings=dict(spec.settings),
        **asdict(corpus),
        sources=list(sources),
        build_seconds=round(seconds, 3),
        encoder=dense.model_identity(spec.settings["model"]) if "model" in spec.settings else "",
        files={
            str(file.relative_to(work)): (size, file_digest(file) if size <= CHECKED_BYTES else None)
            for file, size in sizes.items()
        },
    )
    atomic_write(work / INFO, json.dumps(asdict(info), indent=1))
    # Before the rename: the lock is no part of an index, and `folder.exists()` keeps later builds away.
    (work / LOCK).unlink()
    os.replace(work, folder)
    # After the rename: a folder without a plan is never taken for a build.
    (folder / PLAN).unlink()
    return info


def partial_of(folder: Path) -> Path:
    """Return the folder in which an index is built before it is moved to `folder`."""
    return folder.with_name(f"{folder.name}.partial")


def is_started(folder: Path) -> bool:
    """Return True if a build of an index folder was started and is not done."""
    return (partial_of(folder) / PLAN).is_file()


def _check_plan(work: Path, spec: IndexSpec, stamp: str) -> None:
    plan = json.dumps(
        {"format": FORMATS[spec.kind], "kind": spec.kind, "settings": dict(spec.settings), "stamp": stamp}
    )
    file = work / PLAN
    if file.is_file() and file.read_bytes() != plan.encode():
        raise DataError(
            f"index: {work} is an unfinished build with other settings, or of sources that have changed since; go on "
            "as it was started, or remove it"
        )
    atomic_write(file, plan)


def open_index(
    folder: Path, info: IndexInfo, passages: PassageStore, *, device: str = "cpu", batch_size: int = 32
) -> Retriever:
    """Return the retriever of an index folder; everything large is memory-mapped, encoders load at the first query.

    Raises:
        OSError, ValueError, RuntimeError: damaged files.
    """
    settings = info.settings
    if info.kind == "bm25":
        return bm25.Bm25Retriever(passages, bm25.Bm25Settings(**settings), built=folder / "bm25")
    # On a machine that has nothing of the encoder yet, the hub's newest may be another than that of the index.
    encoder = _encoder(settings, device, batch_size, dense.commit_in(info.encoder))
    return dense.DenseRetriever(folder, passages, encoder)


def cached_index(documents: Sequence[Document], config: RetrieverConfig, cache: Path) -> Path:
    """Return the index folder of a corpus in memory, built in the cache if it is missing or damaged.

    Raises:
        DataError: it cannot be built.
    """
    spec = spec_of(config)
    state = hashlib.blake2b(json.dumps([FORMATS[spec.kind], spec.kind, dict(spec.settings)]).encode(), digest_size=16)
    if model := spec.settings.get("model"):
        state.update(dense.model_identity(model).encode())
    for document in documents:
        state.update(f"\x1e{document.id}\x1f{document.title}\x1f{document.text}".encode("utf-8", "surrogatepass"))
    folder = cache / "index" / f"{spec.kind}-{state.hexdigest()}"
    if _is_whole(folder):
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    # One process builds, and the others wait for it.
    with FileLock(folder.with_name(f".{folder.name}.lock")):
        if not _is_whole(folder):
            shutil.rmtree(folder, ignore_errors=True)
            build_index(folder, spec, lambda: documents, **config.model_dump(include={"device", "batch_size"}))
    return folder


def _is_whole(folder: Path) -> bool:
    """True where an index is there; one that is damaged is warned of."""
    try:
        read_info(folder)
    except DataError as error:
        if folder.is_dir():
            log.warning("cached index is rebuilt (%s)", error)
        return False
    return True
