"""Which keys of the config a run reads, seen by the sections themselves."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from pydantic import BaseModel

from mmrl.config.base import Section

Key = tuple[type[Section], str]
"""By class and not by place: what reads an endpoint's keys is one client, wherever a config has an endpoint."""


@contextmanager
def reads() -> Iterator[set[Key]]:
    """Fill a set with (section, key) of each key that code of mmrl reads, or dumps by name; checks do not count."""
    seen: set[Key] = set()

    def read(section: Section, name: str) -> Any:
        kind = type(section)
        if (kind, name) not in seen and name in kind.__pydantic_fields__ and _acts(sys._getframe(1)):
            seen.add((kind, name))
        return object.__getattribute__(section, name)

    def dump(section: Section, *, include: Any = frozenset(), **options: Any) -> dict[str, Any]:
        if _acts(sys._getframe(1)):
            seen.update((type(section), name) for name in include & section.__pydantic_fields__.keys())
        return BaseModel.model_dump(section, include=include or None, **options)

    patched: Any = Section
    patched.__getattribute__, patched.model_dump = read, dump
    try:
        yield seen
    finally:
        del Section.__getattribute__, Section.model_dump


def _acts(frame: FrameType | None) -> bool:
    """True if the reader is code of mmrl and no check; what a section's own methods read, their caller does.

    Validators are called by pydantic; a whole dump, equality and hash read no key by name.
    """
    while frame is not None and _module(frame).startswith(("mmrl.config", __name__)):
        if _module(frame) == "mmrl.config.rules":
            return False
        frame = frame.f_back
    if frame is None or not _module(frame).startswith("mmrl."):
        return False
    while frame is not None:
        if frame.f_code.co_name.endswith("problems") or _module(frame) == "mmrl.run.check":
            return False
        frame = frame.f_back
    return True


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))
