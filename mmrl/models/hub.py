"""Whether the Hugging Face hub can be reached, and whether a model can be had at all, before anything is loaded.

Used by `models` and by retrievers; needs neither torch nor transformers.
"""

from __future__ import annotations

import re
from functools import lru_cache

from mmrl.system.files import user_path

HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


@lru_cache(maxsize=1)
def hub_answers() -> bool:
    """Whether the hub (or the mirror in HF_ENDPOINT) answers at all; queried once per process."""
    # Without this query the hub's client tries for a minute per file before it gives up.
    import urllib.error
    import urllib.request

    from huggingface_hub import constants

    try:
        urllib.request.urlopen(constants.ENDPOINT, timeout=5).close()
    except urllib.error.HTTPError:
        # An error page is an answer: a mirror may refuse its own front page.
        return True
    except (OSError, ValueError):
        return False
    return True


def encoder_problems(key: str, model: str) -> list[str]:
    """Why no encoder can be loaded from `model`, a folder or a hub id; `key` is what the user would type.

    What only loading can tell (a folder with other weights) is no problem here.
    """
    folder = user_path(model)
    if folder.is_dir():
        files = ("config.json", "modules.json")
        if any((folder / name).is_file() for name in files):
            return []
        return [f"{key}: '{model}' has no {' and no '.join(files)}; expected the folder of a saved encoder"]
    if folder.exists() or not HUB_ID.fullmatch(model):
        what = "is a file" if folder.exists() else "no such folder"
        return [f"{key}: '{model}': {what}; expected the folder of an encoder, or a hub id owner/name"]
    from huggingface_hub import try_to_load_from_cache

    if isinstance(try_to_load_from_cache(model, "config.json"), str) or hub_answers():
        return []
    return [f"{key}: '{model}' is no folder and not in the hub's local cache, and the hub does not answer"]
