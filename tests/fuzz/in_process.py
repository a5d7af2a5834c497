"""Runs command lines in this process, with nothing behind them that trains, samples or serves.

Every line must be served or refused. The exit code is 0, 1 or 2, there is no traceback, the line is done within
`LIMIT_S`, and nothing is written outside of the current folder, except where the line itself names a place.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import re
import signal
import sys
import tempfile
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from unittest import mock

from tests.helpers.watch import stopped_after

LIMIT_S = 20.0
"""Longest time of one line."""


def run(words: Sequence[str]) -> str | None:
    """Run a line in a fresh folder; None, or what was wrong."""
    with tempfile.TemporaryDirectory(prefix="mmrl-fuzz-") as top:
        here = Path(top) / "above" / "here"
        (here / "folder").mkdir(parents=True)
        (here / "notes.txt").write_text("mine")
        (here / "file.json").write_text("{}")
        with nothing_runs():
            finding = call(words, here)
        if finding is None and (here / "notes.txt").read_text() != "mine":
            return f"{shown(words)}: a file of the user's was overwritten"
        return finding


def call(words: Sequence[str], here: Path, limit_s: float = LIMIT_S) -> str | None:
    """Run `mmrl WORDS` in the folder `here`; None, or what was wrong with its end, its time, or what it wrote."""
    from mmrl.cli import main

    out, err = io.StringIO(), io.StringIO()
    before, argv, environment, level = Path.cwd(), sys.argv, dict(os.environ), logging.root.level
    os.chdir(here)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), _watched(here) as strays:
            try:
                with time_limit(limit_s):
                    code: object = main(list(words))
            except SystemExit as end:
                code = end.code if end.code is not None else 0
    except TooLong:
        return f"{shown(words)}: not done after {limit_s:g} s"
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        where = "".join(traceback.format_tb(error.__traceback__)[-2:])
        return f"{shown(words)}: {type(error).__name__}: {str(error)[:300]}\n{where}"
    finally:
        os.chdir(before)
        sys.argv = argv
        os.environ.clear()
        os.environ.update(environment)
        logging.disable(logging.NOTSET)
        logging.root.setLevel(level)  # hydra.verbose=true raises it for the whole process
    if code not in (0, 1, 2):
        return f"{shown(words)}: exit code {code!r}"
    if "Traceback (most recent call last)" in err.getvalue() + out.getvalue():
        return f"{shown(words)}: a traceback was printed: {err.getvalue()[-600:]}"
    if code and not err.getvalue().strip():
        return f"{shown(words)}: exit code {code} without a word"
    strays = [
        path for path in strays if not any(path.startswith(word.partition("=")[2] or word) for word in words if word)
    ]
    return f"{shown(words)}: wrote {strays[:3]}" if strays else None


def shown(words: Sequence[str]) -> str:
    """A line as one would send it on."""
    return repr([word if len(word) < 200 else f"{word[:60]}… ({len(word)} characters)" for word in words])


@contextlib.contextmanager
def nothing_runs() -> Iterator[None]:
    """Replace whatever trains, samples, builds an index, serves or plans by a stand-in that ends at once."""
    with contextlib.ExitStack() as stack:
        for target, value in _STAND_INS.items():
            stack.enter_context(mock.patch(target, lambda *args, _value=value, **options: _value))
        yield


_STAND_INS: Mapping[str, object] = {
    "mmrl.run.session.begin": (Path(), 0),
    "mmrl.sets.sweep.begin": (Path(), 0),
    "mmrl.run.eval.evaluate_policy": Path(),
    "mmrl.run.eval.resume_evaluation": None,
    "mmrl.run.check.check_all": [None],
    "mmrl.sets.sweep.check_all": [None],
    "mmrl.sets.command.check_all": None,
    "mmrl.sets.command.RunQueue.run": 0,
    "mmrl.commands.plan.make_plan": mock.Mock(text=lambda: "plan", as_json=lambda: "{}"),
    "mmrl.commands.doctor.doctor": 0,
    "mmrl.commands.model_doctor.examine_model": None,
    "mmrl.commands.serve.serve_policy": 0,
    "mmrl.system.http_server.serve": None,
    "mmrl.commands.index.build_index": mock.Mock(build_seconds=0.0, kind="bm25"),
    "mmrl.models.hub.encoder_problems": [],
}
"""Function that a command hands over to -> what its stand-in returns."""


class TooLong(BaseException):
    """The time limit has passed. Not an `Exception`, which mmrl might handle."""


def time_limit(seconds: float) -> contextlib.AbstractContextManager[None]:
    """Raise `TooLong` in what takes longer; in the main thread, which alone gets signals."""
    return stopped_after(seconds, TooLong(), signal.ITIMER_REAL, signal.SIGALRM)


_WRITES = {"open": 0, "os.mkdir": 0, "os.rename": 1, "os.remove": 0, "os.rmdir": 0, "os.symlink": 1, "os.link": 1}
"""Audit event -> which of its arguments is the path that changes."""
_watching: list[tuple[str, list[str]]] = []


def _audit(event: str, args: tuple[object, ...]) -> None:
    if not _watching or event not in _WRITES:
        return
    path = args[_WRITES[event]]
    reads = event == "open" and not (isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
    if reads or not isinstance(path, str | bytes | os.PathLike):
        return
    here, strays = _watching[-1]
    full = os.path.abspath(os.fsdecode(path))
    if not full.startswith((here, "/dev/")) and not _CACHES.search(full):
        strays.append(full)


@contextlib.contextmanager
def _watched(here: Path) -> Iterator[list[str]]:
    """Collect paths outside of `here` that are written or removed meanwhile."""
    if not _audit_added:
        sys.addaudithook(_audit)  # stays for the life of the process, and does nothing while nobody watches
        _audit_added.append(True)
    strays: list[str] = []
    _watching.append((str(here), strays))
    try:
        yield strays
    finally:
        _watching.pop()


_CACHES = re.compile(r"__pycache__|/matplotlib\b")
"""Caches of libraries."""
_audit_added: list[bool] = []
