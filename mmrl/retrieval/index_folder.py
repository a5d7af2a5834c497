"""Index folders: a corpus and what searches it, built once, opened in a moment, whole or absent.

Above the retrievers, below tasks and `mmrl index`. A folder is built as `NAME.partial` beside its place and renamed
when it is done, so a killed build continues and nobody opens half of one. `index.json` says what is in it.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mmrl.config import RetrieverConfig
from mmrl.config.retriever import Bm25Config, ColbertConfig, DenseConfig
from mmrl.errors import DataError
from mmrl.retrieval.base import Document, Retriever
from mmrl.retrieval.store import PassageStore, Written, write_passages
from mmrl.system.artifacts import checksum, write_whole

FORMAT = 1
INFO, PLAN, DONE, LOCK = "index.json", "plan.json", "passages.json", "lock"

log = logging.getLogger("mmrl.retrieval")


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexSpec:
    """What an index is made of, apart from its passages."""

    kind: str
    """`bm25`, `dense` or `colbert`."""
    settings: Mapping[str, Any]
    """`k1`, `b`; or `model`, `faiss`, and `encoder` where it is dense."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexInfo:
    """What `index.json` holds."""

    format: int
    kind: str
    settings: Mapping[str, Any]
    documents: int
    duplicates: int
    text_bytes: int
    digest: str
    sources: Sequence[str]
    build_seconds: float
    files: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """File name -> size in bytes, checksum (null for large files)."""

    @property
    def spec(self) -> IndexSpec:
        """Kind and settings."""
        return IndexSpec(kind=self.kind, settings=self.settings)


def spec_of(config: RetrieverConfig) -> IndexSpec:
    """The index that a `task.retriever` section without `index` asks for."""
    from mmrl.retrieval import colbert, dense

    if isinstance(config, Bm25Config):
        return IndexSpec(kind="bm25", settings={"k1": config.k1, "b": config.b})
    if isinstance(config, DenseConfig):
        model = config.model or dense.DEFAULT_MODEL
        encoder = dense.convention_of(model, config.encoder)
        return IndexSpec(kind="dense", settings={"model": model, "encoder": encoder, "faiss": config.faiss})
    assert isinstance(config, ColbertConfig), "a remote retriever has no index"
    model = config.model or colbert.DEFAULT_MODEL
    return IndexSpec(kind="colbert", settings={"model": model, "faiss": config.faiss})


def read_info(folder: Path, key: str = "task.retriever.index") -> IndexInfo:
    """What is in an index folder.

    Args:
        folder: made by `build_index`.
        key: what the user typed, for messages.

    Raises:
        DataError: no index, one that is not finished, or a damaged one.
    """
    partial = partial_of(folder)
    if not (folder / INFO).is_file():
        why = "its build is not finished: run `mmrl index build` again" if partial.is_dir() else f"has no {INFO}"
        raise DataError(f"{key}: {folder}: {why}; expected a folder made by `mmrl index build`")
    try:
        info = IndexInfo(**json.loads((folder / INFO).read_text(encoding="utf-8")))
        if info.format != FORMAT:
            raise ValueError(f"format {info.format}, this mmrl reads {FORMAT}")
        for name, (size, content) in info.files.items():
            got = (folder / name).stat().st_size
            if got != size:
                raise ValueError(f"{name} has {got} bytes, expected {size}")
            if content is not None and checksum(folder / name) != content:
                raise ValueError(f"{name} has another content than was written")
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise DataError(f"{key}: {folder} is damaged: {error}; build it again") from None
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
    told: Callable[[Written], None] = lambda written: None,
) -> IndexInfo:
    """Build an index folder, or go on with a build that was killed.

    Args:
        folder: does not exist; made in one step when the build is done.
        spec: kind and settings.
        documents: gives the passages; called unless an earlier attempt has already written them.
        sources: where they come from, for people.
        stamp: changes when the content of the sources does; an earlier attempt with another is not continued.
        device: of the encoder.
        batch_size: of the encoder.
        told: called with the passages' counts before anything is encoded.

    Raises:
        DataError: the folder exists, no passages, another build of the same folder is running, or an unfinished one
            was started with other settings.
    """
    if folder.exists():
        raise DataError(f"index: {folder} exists, and is left as it is; choose another folder or remove it yourself")
    work = partial_of(folder)
    work.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()
    with _locked(work):
        _same_plan(work, spec, stamp)
        if (work / DONE).is_file():
            written = Written(**json.loads((work / DONE).read_text(encoding="utf-8")))
        else:
            written = write_passages(work, documents())
            if not written.documents:
                shutil.rmtree(work)
                raise DataError(f"index: {', '.join(sources) or 'the corpus'}: has no passages")
            write_whole(work / DONE, json.dumps(asdict(written)))
        told(written)
        _build(work, PassageStore(work), spec, device, batch_size)
        return _finish(work, folder, spec, written, sources, time.perf_counter() - started)


def _finish(
    work: Path, folder: Path, spec: IndexSpec, written: Written, sources: Sequence[str], seconds: float
) -> IndexInfo:
    shutil.rmtree(work / "shards", ignore_errors=True)
    (work / DONE).unlink()
    (work / PLAN).unlink()
    files = [f for f in sorted(work.rglob("*")) if f.is_file() and f.name != LOCK]
    info = IndexInfo(
        format=FORMAT,
        kind=spec.kind,
        settings=dict(spec.settings),
        **asdict(written),
        sources=list(sources),
        build_seconds=round(seconds, 3),
        files={str(f.relative_to(work)): [f.stat().st_size, checksum(f)] for f in files},
    )
    write_whole(work / INFO, json.dumps(asdict(info), indent=1))
    (work / LOCK).unlink()
    os.replace(work, folder)
    return info


def partial_of(folder: Path) -> Path:
    """Where the index that will be `folder` is built."""
    return folder.with_name(f"{folder.name}.partial")


def _same_plan(work: Path, spec: IndexSpec, stamp: str) -> None:
    plan = json.dumps({"format": FORMAT, "kind": spec.kind, "settings": dict(spec.settings), "stamp": stamp})
    file = work / PLAN
    if file.is_file() and file.read_text(encoding="utf-8") != plan:
        raise DataError(
            f"index: {work} is an unfinished build with other settings or sources; continue it as it was started, "
            "or remove it"
        )
    write_whole(file, plan)


@contextmanager
def _locked(work: Path) -> Iterator[None]:
    with (work / LOCK).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise DataError(f"index: {work} is being built by another process") from None
        yield


def _build(work: Path, passages: PassageStore, spec: IndexSpec, device: str, batch_size: int) -> None:
    settings = spec.settings
    if spec.kind == "bm25":
        from mmrl.retrieval import bm25

        bm25.write_index(work / "bm25", passages, settings["k1"], settings["b"])
    elif spec.kind == "dense":
        from mmrl.retrieval import dense

        one = dense.Encoder(settings["model"], settings["encoder"], device=device, batch_size=batch_size)
        dense.build(work, passages, one, settings["faiss"])
    else:
        from mmrl.retrieval import colbert

        many = colbert.TokenEncoder(settings["model"], device=device, batch_size=batch_size)
        colbert.build(work, passages, many, settings["faiss"])


def open_index(
    folder: Path,
    info: IndexInfo,
    passages: PassageStore,
    *,
    device: str = "cpu",
    batch_size: int = 32,
    candidates: int = 256,
) -> Retriever:
    """The retriever of an index folder; everything large is memory-mapped, encoders load at the first query.

    Raises:
        OSError, ValueError, RuntimeError: damaged files.
    """
    settings = info.settings
    if info.kind == "bm25":
        from mmrl.retrieval.bm25 import Bm25Retriever

        return Bm25Retriever(passages, k1=settings["k1"], b=settings["b"], built=folder / "bm25")
    if info.kind == "dense":
        from mmrl.retrieval.dense import DenseRetriever, Encoder

        one = Encoder(settings["model"], settings["encoder"], device=device, batch_size=batch_size)
        return DenseRetriever(folder, passages, one)
    from mmrl.retrieval.colbert import ColbertRetriever, TokenEncoder

    return ColbertRetriever(
        folder, passages, TokenEncoder(settings["model"], device=device, batch_size=batch_size), candidates
    )


def cached_index(documents: Sequence[Document], config: RetrieverConfig, cache: Path) -> Path:
    """The index folder of a corpus in memory, built in the cache where it is not there yet or is damaged.

    Raises:
        DataError: it cannot be built.
    """
    spec = spec_of(config)
    state = hashlib.blake2b(json.dumps([FORMAT, spec.kind, dict(spec.settings)]).encode(), digest_size=16)
    if model := spec.settings.get("model"):
        state.update(model_identity(model).encode())
    for document in documents:
        state.update(f"\x1e{document.id}\x1f{document.title}\x1f{document.text}".encode("utf-8", "surrogatepass"))
    folder = cache / "index" / f"{spec.kind}-{state.hexdigest()}"
    if folder.is_dir():
        try:
            read_info(folder)
            return folder
        except DataError as error:
            log.warning("cached index is rebuilt (%s)", error)
            shutil.rmtree(folder, ignore_errors=True)
    try:
        build_index(folder, spec, lambda: documents, **config.model_dump(include={"device", "batch_size"}))
    except DataError:
        if not (folder / INFO).is_file():  # else another process finished first; its content is the same
            raise
    return folder


def model_identity(model: str) -> str:
    """What changes when the weights behind a model's name do: a folder's files, or a hub id's cached revision."""
    folder = Path(model).expanduser()
    if not folder.is_dir():
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(model, "config.json")
        return f"{model}@{Path(found).parent.name if isinstance(found, str) else 'main'}"
    state = hashlib.blake2b(digest_size=16)
    for file in sorted(f for f in folder.rglob("*") if f.is_file()):
        stat = file.stat()
        state.update(f"{file.relative_to(folder)} {stat.st_size} ".encode())
        with file.open("rb") as content:
            state.update(content.read(2**20))
            content.seek(max(0, stat.st_size - 2**20))
            state.update(content.read())
    return state.hexdigest()
