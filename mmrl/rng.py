"""Counter-based randomness: every random choice is a pure function of a key.

A key is `(run seed, step, example, purpose, index, ...)`. Nothing is drawn from shared mutable state, so
neither concurrency nor a restart changes a choice.
"""

from __future__ import annotations

import hashlib
import random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

Key = tuple[int | str | None, ...]


def digest(*key: int | str | None) -> int:
    """Return a 128-bit integer that depends on every part of `key` and on its order."""
    # The type is part of the text, so that step 1 and example "1" differ; the separator stands in no name.
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in key)
    return int.from_bytes(hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).digest(), "big")


def stream(*key: int | str | None) -> random.Random:
    """Return a fresh `random.Random` for one purpose; two equal keys give equal streams."""
    # The standard library's generator: light to import, and its streams are the same on every machine.
    return random.Random(digest(*key))


def uniforms(seed: int, count: int) -> np.ndarray:
    """Draw `count` float64 uniforms in [0, 1) from a 128-bit `seed`; a longer draw begins with the shorter one."""
    # Imported here: `mmrl credit` and `mmrl --help` need this module and no arrays.
    import numpy as np

    # Philox is counter-based: draw i depends on the key and on i alone, so drawing more changes none before.
    return np.random.Generator(np.random.Philox(key=seed)).random(count)
