"""What DSPy says of a search: in a file, and not between the lines of the run."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from dspy.propose import dataset_summary_generator, grounded_proposer
from dspy.teleprompt import bootstrap, random_search, utils
from dspy.utils import parallelizer
from gepa.core import engine

PRINTING = (utils, bootstrap, random_search, grounded_proposer, dataset_summary_generator)
"""Modules that print what others log."""


class _NoBar(parallelizer.tqdm.tqdm):
    """A progress bar that does not show; most of DSPy's and GEPA's have no option for that."""

    def __init__(self, *given: Any, **options: Any):
        super().__init__(*given, **{**options, "disable": True})


@contextmanager
def logged_to(path: Path) -> Iterator[None]:
    """Write what DSPy logs and prints to a file inside, and not to the screen, which has no bars of it either."""
    logger = logging.getLogger("dspy")

    def said(*parts: object, **options: object) -> None:
        logger.info(" ".join(map(str, parts)))

    bars = SimpleNamespace(tqdm=_NoBar)
    replaced: list[tuple[object, str, object]] = [(module, "print", said) for module in PRINTING]
    replaced += [(parallelizer, "tqdm", bars), (bootstrap, "tqdm", bars), (engine, "tqdm", _NoBar)]
    handlers = logger.handlers
    with ExitStack() as stack:
        logger.handlers = [stack.enter_context(closing(logging.FileHandler(path, encoding="utf-8")))]
        stack.callback(setattr, logger, "handlers", handlers)
        for module, name, value in replaced:
            stack.callback(setattr, module, name, getattr(module, name, print))
            setattr(module, name, value)
        yield
