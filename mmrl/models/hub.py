"""Checks that the Hugging Face hub can be reached and that a model exists, before anything is loaded.

Used by `models` and by retrievers; needs neither torch nor transformers.
"""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path

from mmrl.config.base import FETCHED, SHIPPED
from mmrl.models.fetched import PACKAGES, encoder_source, of_hub_id
from mmrl.system.files import user_path
from mmrl.system.http_client import HttpClient, HttpFailure

HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
HUB_S = 6.0
"""The hub has to send a page, such as a model's config, within that."""
PAGE_BYTES = 1 << 20


@lru_cache(maxsize=1)
def hub_answers() -> bool:
    """Return True if the hub (or the mirror in HF_ENDPOINT) answers at all; queried once per process."""
    from huggingface_hub import constants

    # Without this query the hub's client tries for a minute per file before it gives up. An error page is an answer: a
    # mirror may refuse its own front page.
    return _failure(constants.ENDPOINT) in (None, "status", "garbage")


@lru_cache(maxsize=8)
def hub_serves(model: str) -> bool:
    """Return True if a hub id's weights are available: in the hub's local cache, or from a hub that answers in time."""
    from huggingface_hub import constants, try_to_load_from_cache

    if isinstance(try_to_load_from_cache(model, "model.safetensors"), str):
        return True
    if constants.HF_HUB_OFFLINE:
        return False
    return _failure(f"{constants.ENDPOINT}/{model}/resolve/main/config.json") in (None, "garbage")


def _failure(url: str) -> str | None:
    """Return the cause for which the hub does not send a page in time; `garbage` where it sends more than is read."""
    client = HttpClient("hub", timeout_s=HUB_S, concurrency=1, redirects=True, proxies=True)
    try:
        client.wait(client.attempt("GET", url, limit=PAGE_BYTES))
    except HttpFailure as failure:
        return failure.cause
    finally:
        client.close()
    return None


def at_hand(path: str, revision: str | None) -> str:
    """Return `model.path` or `policy`, or the fetched model's name if the hub does not serve that id."""
    package = of_hub_id(path) if revision is None and path in FETCHED.values() else None
    return path if package is None or not package.fetched or hub_serves(path) else package.name


def weights_problems(key: str, path: str, revision: str | None) -> list[str]:
    """Return reasons why the weights of `model.path` or `policy` cannot be had; what only loading can tell is none."""
    if path in FETCHED and not PACKAGES[path].fetched:
        return [f"{key}: {path} is not on this machine; {PACKAGES[path].missing}"]
    if path in FETCHED and (fault := PACKAGES[path].fault):
        return [f"{key}: {fault}"]
    package = of_hub_id(path) if path in FETCHED.values() else None
    if package is None or (package.fetched and revision is None) or hub_serves(path):
        return []
    return [f"{key}: the hub does not serve '{path}'; {package.missing}"]


def encoder_problems(key: str, model: str) -> list[str]:
    """Return reasons why no encoder can be loaded from `model`, a folder or a hub id; `key` is the user's word for it.

    What only loading can tell (a folder with other weights) is no problem here.
    """
    package = PACKAGES.get(model) or of_hub_id(model)
    if package is not None and package.fault:
        return [f"{key}: {package.fault}"]
    word, model = model, encoder_source(model)
    folder = user_path(model)
    if folder.exists() or not HUB_ID.fullmatch(model):
        if any((folder / name).is_file() for name in ("config.json", "modules.json")):
            return []
        missing = "has no config.json and no modules.json" if folder.is_dir() else "no such folder"
        fault = "is a file" if folder.is_file() else missing
        return [f"{key}: '{model}': {fault}; expected the folder of an encoder, or a hub id owner/name"]
    from huggingface_hub import try_to_load_from_cache

    if isinstance(try_to_load_from_cache(model, "config.json"), str) or hub_answers():
        return []
    advice = "" if package is None else f"; {package.missing}"
    return [f"{key}: '{word}' is no folder and not in the hub's local cache, and the hub does not answer{advice}"]


def licence_of(model: str, revision: str | None = None) -> str | None:
    """Return the licence of a shipped model, a folder or a hub id, as its card abbreviates it; None: there is none."""
    from huggingface_hub import ModelCard, try_to_load_from_cache
    from yaml import YAMLError

    if model in SHIPPED or model in FETCHED:
        return "apache-2.0"
    folder = user_path(model)
    card: object = folder / "README.md"
    if not folder.is_dir():
        card = try_to_load_from_cache(model, "README.md", revision=revision)
        if not isinstance(card, str) and hub_answers():
            card = model
    try:
        licence = ModelCard.load(card).data.license if isinstance(card, str | Path) else None
    except (OSError, ValueError, YAMLError):  # no card, or a front matter that is none
        return None
    return str(licence) if licence else None
