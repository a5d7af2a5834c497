"""Python objects by name, `package.module:name`: programs, metrics and data that a config names (`task=dspy`).

`mmrl.optimize` is handed objects instead of names; it puts them here, where a config finds them for the life of this
process under `mmrl.system.objects:NAME`.
"""

from __future__ import annotations

import importlib
import re
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from mmrl.errors import ConfigError, ProgramFailure, Stopped, nearest
from mmrl.system.user_code import user_failure

OBJECT = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
"""Pattern of such a name; no path of a file with a format of ours and no hub id of data does."""

_ADDED: list[str] = []
"""Folders that this process has looked for modules in, beside those of Python's own path."""
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
    """Import a module of the user's, which may be installed or in the current folder.

    Args:
        key: the config key, for errors.

    Raises:
        ConfigError: there is none, there are two of the name, or it raises.
    """
    folder = str(Path.cwd())
    if folder not in sys.path and "" not in sys.path:
        # Behind what is installed: in front, a file `datasets.py` there would be what any library imports by that name.
        earlier = [sys.path.index(place) for place in _ADDED if place in sys.path]
        sys.path.insert(min(earlier, default=len(sys.path)), folder)
        _ADDED.append(folder)
    if problem := _two_of_a_name(name.partition(".")[0], folder):
        raise ConfigError(f"{key}: got '{name}', and {problem}")
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


def _two_of_a_name(name: str, folder: str) -> str:
    """Return in words that a module of the current folder has the name of another one; empty where it has not."""
    own = next((place for place in (Path(folder, name), Path(folder, f"{name}.py")) if place.exists()), None)
    if own is None or (own.is_dir() and not any(own.glob("*.py"))):
        return ""
    if name in sys.builtin_module_names:
        return f"{own} has the name of a module of Python itself; rename it"
    own_places = {Path(place).resolve() for place in (folder, *_ADDED)}
    elsewhere = [place for place in sys.path if place and Path(place).resolve() not in own_places]
    found = PathFinder.find_spec(name, elsewhere)
    # Installed from here, it is the same file.
    if found is None or found.origin is None or Path(found.origin).resolve().is_relative_to(own.resolve()):
        return ""
    return f"{own} has the name of {found.origin}; rename it"


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
