"""Checks that the Hugging Face hub can be reached and that a model exists, before anything is loaded.

Used by `models` and by retrievers; needs neither torch nor transformers.
"""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path

from mmrl.config.base import SHIPPED
from mmrl.store.policy import from_index, gone_problems
from mmrl.system.files import user_path
from mmrl.system.http_client import HttpClient, HttpFailure

HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
HUB_S = 6.0
"""The hub has to send its front page within that."""
PAGE_BYTES = 1 << 20


@lru_cache(maxsize=1)
def hub_answers() -> bool:
    """Return True if the hub (or the mirror in HF_ENDPOINT) answers at all; queried once per process."""
    from huggingface_hub import constants

    client = HttpClient("hub", timeout_s=HUB_S, concurrency=1, redirects=True, proxies=True)
    try:
        # Without this query the hub's client tries for a minute per file before it gives up.
        client.wait(client.attempt("GET", constants.ENDPOINT, limit=PAGE_BYTES))
    except HttpFailure as failure:
        # An error page is an answer: a mirror may refuse its own front page.
        return failure.cause in ("status", "garbage")
    finally:
        client.close()
    return True


def encoder_problems(key: str, model: str) -> list[str]:
    """Return reasons why no encoder can be loaded from `model`, a folder or a hub id; `key` is the user's word for it.

    What only loading can tell (a folder with other weights) is no problem here.
    """
    if problems := gone_problems(key, model):
        return problems
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
    away = "is no folder and not in the hub's local cache, and the hub does not answer"
    return [f"{key}: '{model}' {away}{from_index(model)}"]


def licence_of(model: str, revision: str | None = None) -> str | None:
    """Return the licence of a shipped model, a folder or a hub id, as its card abbreviates it; None: there is none."""
    from huggingface_hub import ModelCard, try_to_load_from_cache
    from yaml import YAMLError

    if model in SHIPPED:
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
