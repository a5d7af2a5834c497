"""Names, shapes and types of the weights in a model's files, by the files' headers: nothing is loaded.

A damaged file, a missing one or one of Git LFS is found here, in milliseconds, whatever the size of the model.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from mmrl.errors import ConfigError, reason_of
from mmrl.system.files import LFS

if TYPE_CHECKING:
    import torch
    from torch import Tensor

SINGLE, INDEX = ("model.safetensors", "pytorch_model.bin"), ".index.json"
_TYPES = {"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "BF16": "bfloat16", "BOOL": "bool"}
_KINDS = {"F": "float", "I": "int", "U": "uint"}


def saved_weights(find: Callable[[str], str | None], named: str | None = None) -> dict[str, Tensor]:
    """Return the weights of a model by name, as tensors on the meta device.

    Args:
        find: name of a file of the model -> its path on this machine; None: the model has none of that name.
        named: the file that the config names (`transformers_weights`).

    Raises:
        ConfigError: there are no weights, or a file that is missing, damaged or elsewhere; without a path in front.
    """
    for name in (named,) if named else (name + end for name in SINGLE for end in ("", INDEX)):
        if (path := find(name)) is None:
            continue
        files = [path]
        if name.endswith(INDEX):
            files = [_shard(find, part, name) for part in _parts(Path(path))]
        return {key: weight for file in files for key, weight in file_weights(Path(file)).items()}
    raise ConfigError(f"no weights there, expected {named or ' or '.join(SINGLE)}, or their {INDEX.removeprefix('.')}")


def _parts(index: Path) -> list[str]:
    """Return the file names of an index, each once."""
    try:
        files = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        parts = sorted({str(PurePosixPath(name)) for name in files.values()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{index} cannot be read: {_why(index, error)}") from None
    if not parts:
        raise ConfigError(f"{index} names no file")
    # transformers would open whatever is there.
    for part in parts:
        if PurePosixPath(part).is_absolute() or ".." in PurePosixPath(part).parts:
            raise ConfigError(f"{index} names '{part}', expected files inside its folder")
    return parts


def _shard(find: Callable[[str], str | None], part: str, index: str) -> str:
    if (path := find(part)) is None:
        raise ConfigError(f"'{part}', which {index} names, is not there")
    return path


def file_weights(path: Path) -> Mapping[str, Tensor]:
    """Return the weights of one file (safetensors, or PyTorch's own format), on the meta device.

    Raises:
        ConfigError: the file is not there, cut or damaged.
    """
    import torch
    from safetensors import safe_open

    try:
        if path.suffix != ".safetensors":
            weights: dict[str, torch.Tensor] = torch.load(path, map_location="meta", weights_only=True)
            return weights
        with safe_open(path, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            return {
                name: torch.empty(part.get_shape(), dtype=_dtype(part.get_dtype()), device="meta")
                for name, part in slices.items()
            }
    except Exception as error:  # of safetensors, zip, pickle and torch, each with types of its own
        if type(error).__name__ == "UnpicklingError" and "GLOBAL" in str(error):
            raise ConfigError(f"{path} cannot be read: it holds code beside weights, which is not run") from None
        raise ConfigError(f"{path} cannot be read: {_why(path, error)}") from None


def _dtype(name: str) -> torch.dtype:
    """Return torch's type for one of safetensors."""
    import torch

    found: torch.dtype = getattr(torch, _TYPES.get(name) or _KINDS[name[0]] + name[1:])
    return found


def _why(path: Path, error: Exception) -> str:
    """Say why a file cannot be read."""
    if not path.is_file():
        return "it is not there"
    with path.open("rb") as file:
        start = file.read(len(LFS))
    if start == LFS:
        return (
            "it is a pointer of Git LFS and not the file itself; get it by `git lfs pull`, or download the model again"
        )
    if not start:
        return "it is empty"
    return f"{reason_of(error)}; it is cut or damaged, download it again"
