"""From a `task.retriever` section to a retriever. The plug point of `retrieval`; used by tasks."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import cast

from mmrl.config import RetrieverConfig
from mmrl.config.retriever import Bm25Config, RemoteRetrieverConfig
from mmrl.errors import ConfigError, DataError, RetrievalFailure
from mmrl.models.hub import encoder_problems
from mmrl.retrieval.base import Document, Retriever
from mmrl.retrieval.bm25 import Bm25Retriever, Bm25Settings
from mmrl.retrieval.dense import UNKNOWN, model_identity
from mmrl.retrieval.index_folder import IndexInfo, cached_index, open_index, read_info, spec_of
from mmrl.retrieval.remote import RemoteRetriever
from mmrl.retrieval.store import PassageStore
from mmrl.secrets import token_of
from mmrl.system.files import user_path

NEEDED = ("faiss", "sentence_transformers")
"""Modules of the extra `dense`."""
PROBE_RETRIES = 2
"""Most further attempts of the search that probes a server."""


def open_index_corpus(config: RetrieverConfig) -> PassageStore:
    """Open the passages of `task.retriever.index`.

    Raises:
        DataError: no such index, a damaged one, or one of another kind than `task.retriever.name`.
    """
    folder = user_path(config.get("index"))
    info = read_info(folder)
    if info.kind != config.name:
        raise DataError(
            f"task.retriever.name: got {config.name}, but {folder} is a {info.kind} index; "
            f"set task.retriever.name={info.kind}"
        )
    return PassageStore(folder)


def retriever_problems(config: RetrieverConfig) -> list[str]:
    """Return problems known before a search: missing packages, an unusable index, a server that does not answer."""
    problems = packages_missing(config)
    if config.get("index") is not None:
        try:
            open_index_corpus(config)
            problems += index_problems("task.retriever.index", read_info(user_path(config.get("index"))))
        except DataError as error:
            problems += error.problems
    elif config.encodes:
        problems += encoder_problems("task.retriever.model", str(spec_of(config).settings["model"]))
    if config.get("url") is not None:
        remote = cast("RemoteRetrieverConfig", config)
        # One small search, so that a wrong address is noticed before a model is loaded, and soon; but a busy server
        # (status 429) must not refuse a run, or its resume.
        try:
            with closing(_remote(remote.model_copy(update={"retries": min(remote.retries, PROBE_RETRIES)}))) as client:
                client.ping()
        except ConfigError as error:
            problems += error.problems
        except RetrievalFailure as failure:
            problems.append(f"task.retriever.url: {failure}; expected a server of the {remote.protocol} protocol there")
    return problems


def index_problems(key: str, info: IndexInfo) -> list[str]:
    """Return the reasons why an index's encoder cannot be loaded, or no longer fits the index."""
    if "model" not in info.settings:
        return []
    model = str(info.settings["model"])
    if problems := encoder_problems(f"{key}: its encoder", model):
        return problems
    now = model_identity(model)
    # Where nothing of it is here yet, it is fetched as it was.
    if now == info.encoder or f"{model}@{UNKNOWN}" in (now, info.encoder):
        return []
    return [f"{key}: its encoder '{model}' has changed since it was made; build it again with `mmrl index build`"]


def packages_missing(config: RetrieverConfig) -> list[str]:
    """Return the missing packages of the extra `dense`."""
    return [
        f"task.retriever.name: {config.name} needs the package of '{module}'; pip install 'mmrl[dense]'"
        for module in (NEEDED if config.encodes else ())
        if importlib.util.find_spec(module) is None
    ]


def server_problems(feature: str) -> list[str]:
    """Return a sentence about the missing packages of the extra `server`."""
    missing = [module for module in ("fastapi", "uvicorn") if importlib.util.find_spec(module) is None]
    return [f"{feature} needs {' and '.join(missing)}; pip install 'mmrl[server]'"] if missing else []


def open_retriever(config: RetrieverConfig, documents: Sequence[Document]) -> Retriever:
    """Open the retriever of a section.

    Args:
        config: checked by `retriever_problems`.
        documents: the corpus; read by retrievers without an index or address of their own.

    Raises:
        DataError: an index that cannot be opened or built.
    """
    if isinstance(config, RemoteRetrieverConfig):
        return _remote(config)
    index = config.get("index")
    if isinstance(config, Bm25Config) and index is None:
        return Bm25Retriever(documents, Bm25Settings(**spec_of(config).settings))
    cache = cache_root(config.get("cache_dir"))
    folder = user_path(index) if index is not None else cached_index(documents, config, cache)
    # Options of an index's use, not of its content; a retriever without an encoder has none.
    runtime = config.model_dump(include={"device", "batch_size"})
    try:
        return open_index(folder, read_info(folder), PassageStore(folder), **runtime)
    # Whatever a library says of damaged files, the user has to know which folder it was.
    except (OSError, ValueError, RuntimeError) as error:
        raise DataError(f"task.retriever.index: cannot open {folder}: {error}") from None


def cache_root(configured: str | None) -> Path:
    """Return the cache folder: `task.retriever.cache_dir`, else $MMRL_CACHE, else ~/.cache/mmrl."""
    return user_path(configured or os.environ.get("MMRL_CACHE") or "~/.cache/mmrl")


def _remote(config: RemoteRetrieverConfig) -> RemoteRetriever:
    token = None if config.token_env is None else token_of(config.token_env, "task.retriever.token_env")
    options = config.model_dump(include={"protocol", "timeout_s", "retries", "concurrency", "cache_size"})
    return RemoteRetriever(config.url, token=token, **options)
