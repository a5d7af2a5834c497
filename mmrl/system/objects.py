"""Python objects by name, `package.module:name`: programs, metrics and data that a config names (`task=dspy`).

`mmrl.optimize` is handed objects instead of names; it puts them here, where a config finds them for the life of this
process under `mmrl.system.objects:NAME`.
"""

from __future__ import annotations

import importlib
import re
import sys
from typing import Any

from mmrl.errors import ConfigError, ProgramFailure
from mmrl.system.user_code import located

OBJECT = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
"""What such a name looks like; no path of a file with a format of ours and no hub id of data does."""


def put(name: str, value: object) -> str:
    """Keep an object under a name, in place of what had it before. Returns what a config calls it."""
    setattr(sys.modules[__name__], name, value)
    return f"{__name__}:{name}"


def is_given(path: str) -> bool:
    """Whether a name is that of an object which was put here, perhaps by another process."""
    return path.startswith(f"{__name__}:")


def imported(key: str, path: str) -> Any:
    """The object at `package.module:name`.

    Args:
        key: the config key, for errors.

    Raises:
        ConfigError: there is none.
    """
    module, _, name = path.partition(":")
    if not module or not name:
        raise ConfigError(f"{key}: got '{path}', expected package.module:name")
    try:
        target: Any = importlib.import_module(module)
    except Exception as error:  # whatever the user's own module raises
        raise ConfigError(str(located(ProgramFailure, error, f"{key}: cannot import '{module}': "))) from None
    for part in name.split("."):
        if not hasattr(target, part):
            if is_given(path):
                raise ConfigError(
                    f"{key}: was given to mmrl.optimize as a Python object, which is gone with its process; continue "
                    "from Python: MMRL(metric=…).compile(program, trainset=…, valset=…, resume=RUN_DIR)"
                )
            raise ConfigError(f"{key}: '{module}' has no '{name}'")
        target = getattr(target, part)
    return target
