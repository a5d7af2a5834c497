"""Python objects by name, `package.module:name`: programs, metrics and data that a config names (`task=dspy`).

`mmrl.optimize` is handed objects instead of names; it puts them here, where a config finds them for the life of this
process under `mmrl.system.objects:NAME`.
"""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from mmrl.errors import ConfigError, ProgramFailure, Stopped, nearest
from mmrl.system.user_code import user_failure

OBJECT = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
"""Pattern of such a name; no path of a file with a format of ours and no hub id of data does."""

_NAMED = re.compile(rf"{re.escape(__name__)}:(?:program|metric)_\d+_(\w+)")
_LISTS = re.compile(rf"{re.escape(__name__)}:(?:train|dev)_\d+_\w+")


def register(name: str, value: object) -> str:
    """Keep an object under a name, in place of what had it before. Returns what a config calls it."""
    setattr(sys.modules[__name__], name, value)
    return f"{__name__}:{name}"


put = register
"""The earlier name, under which scripts outside of mmrl import it; deleted at the first release."""


def is_registered(path: str) -> bool:
    """True for the name of an object which was put here, perhaps by another process."""
    return path.startswith(f"{__name__}:")


def import_module(key: str, name: str) -> ModuleType:
    """Import a module of the user's, which may be in the current folder, as with `python -m`.

    Args:
        key: the config key, for errors.

    Raises:
        ConfigError: there is none, or it raises.
    """
    folder = str(Path.cwd())
    if folder not in sys.path and "" not in sys.path:
        sys.path.insert(0, folder)  # the `mmrl` script has the folder of the script there
    try:
        return importlib.import_module(name)
    except ConfigError:  # a plugin refuses its own settings
        raise
    except (Exception, SystemExit) as error:  # whatever the user's own module raises, also to end the process
        if isinstance(error, SystemExit) and error.code == Stopped.exit_code:  # SIGTERM, for `mmrl.cli`
            raise
        hint = ""
        if isinstance(error, ModuleNotFoundError) and error.name and name.startswith(error.name):
            hint = f"; it is neither installed nor in {folder}"
            hint += nearest(error.name, [file.stem for file in Path.cwd().glob("*.py")])
        text = str(user_failure(ProgramFailure, error, f"{key}: cannot import '{name}': "))
        raise ConfigError(text + hint) from None


def display_name(text: str) -> str:
    """Replace the stored names of `mmrl.optimize` objects in a text by their Python names."""
    return _LISTS.sub("a Python list", _NAMED.sub(r"\1", text))


def imported(key: str, path: str) -> Any:
    """Import the object `package.module:name`.

    Args:
        key: the config key, for errors.

    Raises:
        ConfigError: there is none.
    """
    module, _, name = path.partition(":")
    if not module or not name:
        raise ConfigError(f"{key}: got '{path}', expected package.module:name")
    target: Any = import_module(key, module)
    for part in name.split("."):
        if not hasattr(target, part):
            if is_registered(path):
                raise ConfigError(
                    f"{key}: was given to mmrl.optimize as a Python object, which is gone with its process; continue "
                    "from Python: MMRL(metric=…).compile(program, trainset=…, valset=…, resume=RUN_DIR)"
                )
            public = [name for name in dir(target) if not name.startswith("_")]
            raise ConfigError(f"{key}: '{module}' has no '{name}'{nearest(part, public)}")
        target = getattr(target, part)
    return target
