"""How DSPy's optimisers run here: batches and bootstrapping on rollouts sampled at once, printing in a file.

What they do one after the other, or in threads, is replaced while they run, and put back after it.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TextIO

import dspy
from dspy.teleprompt import BootstrapFewShot
from dspy.teleprompt.gepa.gepa_utils import DspyAdapter
from dspy.utils.parallelizer import ParallelExecutor

from mmrl.stages.evaluate import CHUNK
from mmrl.stages.prompts.model import TaskLM
from mmrl.stages.prompts.rollouts import Rollouts

NO_LIMIT = 10**9
"""Of errors: a failed rollout is no error here, so that DSPy's limits have nothing to count."""
AHEAD = "mmrl_ahead"
"""Attribute of one bootstrapping: how many examples it rolls out at once next."""


@contextmanager
def on_rollouts(rollouts: Rollouts, log: TextIO, ahead: int) -> Iterator[None]:
    """Inside, DSPy's optimisers run on rollouts.

    Args:
        log: what they print.
        ahead: examples that a bootstrapping rolls out at once first.
    """
    settings = {"lm": TaskLM(), "trace": None, "disable_history": True, "track_usage": False, "max_errors": NO_LIMIT}
    with ExitStack() as stack:
        stack.enter_context(_printing_to(log, rollouts))
        # Settings of this thread, never those that are configured.
        stack.enter_context(dspy.context(**settings))
        stack.enter_context(replaced(ParallelExecutor, "execute", partial(_execute, rollouts)))
        stack.enter_context(replaced(DspyAdapter, "batch_evaluate", _one_by_one))
        one = partial(_bootstrap_one, rollouts, ahead)
        stack.enter_context(replaced(BootstrapFewShot, "_bootstrap_one_example", one))
        yield


# DSPy calls these two as methods of its objects, which come after the first arguments.
_dspy_execute = ParallelExecutor.execute
_dspy_bootstrap_one = BootstrapFewShot._bootstrap_one_example


def _execute(rollouts: Rollouts, executor: Any, function: Callable[[Any], object], data: Sequence[Any]) -> Any:
    """DSPy's batches: evaluations, and pairs of program and example."""
    served, needs = rollouts.batch(function, data)
    # Nothing is left to wait for, and one thread has one order.
    executor.num_threads, executor.disable_progress_bar = 1, True
    results = _dspy_execute(executor, served, data)
    rollouts.on_batch(needs)
    return results


def _bootstrap_one(rollouts: Rollouts, ahead: int, optimiser: Any, example: dspy.Example, round_idx: int = 0) -> Any:
    """One example of DSPy's bootstrapping, with the rollouts of those that may come after it."""

    def attempt(one: dspy.Example) -> object:
        # The original takes the example itself out of the demonstrations, and puts it back only where nothing raises.
        demos = {name: predictor.demos for name, predictor in optimiser.teacher.named_predictors()}
        try:
            return _dspy_bootstrap_one(optimiser, one, round_idx)
        finally:
            for name, predictor in optimiser.teacher.named_predictors():
                predictor.demos = demos[name]

    place = next(i for i, one in enumerate(optimiser.trainset) if one is example)
    size = vars(optimiser).setdefault(AHEAD, ahead)
    # A second round is for the examples that failed in the first, of which the next is not known.
    following = optimiser.trainset[place + 1 : place + size] if round_idx == 0 else []
    if rollouts.ahead(attempt, example, following):
        # Where few go well, one goes through many: at most as many again as are needed are rolled out for nothing.
        setattr(optimiser, AHEAD, min(2 * size, CHUNK))
    return _dspy_bootstrap_one(optimiser, example, round_idx)


def _one_by_one(adapter: Any, items: Sequence[Any], *, capture_traces: bool = True) -> list[Any]:
    """GEPA's evaluations of several candidates, which it runs in threads."""
    return [adapter.evaluate(batch, candidate, capture_traces=capture_traces) for candidate, batch in items]


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Another attribute inside; a function becomes a method as the one before it was."""
    before = vars(owner)[name]
    if isinstance(owner, type):
        function = value

        def method(self: Any, *args: Any, **options: Any) -> Any:
            return function(self, *args, **options)

        value = method
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@dataclass
class _Printed:
    """Standard output or error while DSPy runs: what its code prints goes to a file, all else where it went before."""

    log: TextIO
    before: Any
    thread: int = field(default_factory=threading.get_ident)
    diverted: bool = True

    def write(self, text: str) -> int:
        """See `TextIO.write`."""
        # Other threads draw the display, and run the rollouts of the user's program.
        here = self.diverted and threading.get_ident() == self.thread
        return int((self.log if here else self.before).write(text))

    def flush(self) -> None:
        """See `TextIO.flush`."""
        self.log.flush()
        self.before.flush()

    def __getattr__(self, name: str) -> Any:
        # rich draws to the terminal behind a file that stands in its place
        return getattr(self.before, name)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Inside, nothing is diverted: code of the user's runs."""
        before, self.diverted = self.diverted, False
        try:
            yield
        finally:
            self.diverted = before


@contextmanager
def _printing_to(log: TextIO, rollouts: Rollouts) -> Iterator[None]:
    """What DSPy and Optuna print, log and draw goes to a file."""
    out, err = sys.stdout, sys.stderr
    printed, logged = _Printed(log, out), _Printed(log, err)

    @contextmanager
    def aside() -> Iterator[None]:
        with printed.aside(), logged.aside():
            yield

    sys.stdout, sys.stderr, rollouts.sampler.aside = printed, logged, aside
    try:
        yield
    finally:
        sys.stdout, sys.stderr, rollouts.sampler.aside = out, err, nullcontext
        log.flush()
