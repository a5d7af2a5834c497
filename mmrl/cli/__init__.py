"""The `mmrl` command: Typer finds the command and its help, every other word is a setting or Hydra's.

It parses and hands over to `mmrl.run`. Imports here stay light: no help loads torch or Hydra, that of all commands not
even pydantic; each command imports what it needs when it runs.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from textwrap import fill

import typer

from mmrl.cli import gone
from mmrl.cli.commands import WORKER, app
from mmrl.errors import ENDED, ConfigError, MmrlError, Stopped, print_error, refuse, storage, with_notes
from mmrl.secrets import HidingStream, add_environment, holder, looks_like_a_key
from mmrl.system import portal
from mmrl.system.conf import GROUPS, options
from mmrl.system.stop import quiet_loops

SPINS = "1000"
"""Looks of a thread of OpenMP's at what it waits for, before it sleeps; numbers do not depend on it."""
LOADING = ("train", "eval", "audit", "doctor", "plan", "serve", "compare", "export")
"""Commands that load packages for seconds, on a busy machine for a minute, before they have a word to say."""
QUICK = {"-h", "--help", "help", "--cfg", "-c"}
GROUP_CHOICES = """\b
Compose a run from:
{groups}

Any other key of the config can be set too: docs/keys-*.md list them all with defaults, `--cfg job` prints what
a command line sets. experiment= takes settings of your own under one name."""


def main(argv: Sequence[str] | None = None, dispatch: Callable[[Sequence[str]], int] | None = None) -> int:
    """Run `mmrl`. Returns the exit code: 0 done, 1 stopped, 2 bad input, 130 interrupted, 143 ended by SIGTERM.

    Args:
        dispatch: another program that takes the same words, such as `python -m scripts.papers`.
    """
    # Around the handlers too, which hold the traceback, and with it the loop whose constructor was ended.
    with quiet_loops():
        code = _main(argv, dispatch or _dispatch)
    if argv is None:
        portal.exit_code = code
    return code


def _main(argv: Sequence[str] | None, dispatch: Callable[[Sequence[str]], int]) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    if hasattr(sys.stdout, "reconfigure"):
        # a name that the terminal cannot show is no reason to end
        sys.stdout.reconfigure(errors="backslashreplace")
    # Before torch is loaded: its threads spin while they wait for each other, which beside other work takes its time.
    os.environ.setdefault("GOMP_SPINCOUNT", SPINS)
    add_environment()
    # For the life of the process: what ends it with a traceback is printed after this function.
    sys.stdout, sys.stderr = HidingStream.around(sys.stdout), HidingStream.around(sys.stderr)
    try:
        with storage(), _sigterm_ends(words):
            refuse_words(words)
            return dispatch(words)
    except MmrlError as error:
        if isinstance(error, ConfigError):
            error.problems = list(map(gone.explained, error.problems))
        print_error(error)
        return error.exit_code
    # Typer's own report is a box over several lines, which no script can read; its sentence is what is needed.
    except typer.TyperException as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except SystemExit as end:
        if end.code not in ENDED:
            raise
        # Of several processes, the one that has started them says it, when they have ended.
        if words[:1] != [WORKER]:
            print(with_notes(ENDED[end.code], end.__cause__), file=sys.stderr)
        return end.code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader of a pipe (`mmrl show RUN | head`) has seen enough; at exit Python would complain of the lost text.
        if sys.__stderr__ is not None:
            sys.__stderr__.close()
        return 0
    finally:
        if argv is None and threading.current_thread() is threading.main_thread():
            # All is done: a Ctrl-C from here on would end in a traceback of some library's own clean-up.
            signal.signal(signal.SIGINT, signal.SIG_IGN)


@contextmanager
def _sigterm_ends(words: Sequence[str]) -> Iterator[None]:
    """End by SIGTERM with a word and its exit code also before anything else listens, as while packages load."""
    # Not a process of a run, whose parent speaks for it; nor where the caller handles signals.
    ours = words[:1] != [WORKER] and threading.current_thread() is threading.main_thread()
    if not ours or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return

    def end(number: int, frame: object) -> None:
        raise SystemExit(Stopped.exit_code)

    signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def refuse_words(words: Sequence[str]) -> None:
    """Raise `ConfigError` for words that are gone, and for those that hold a secret.

    Args:
        words: the command, and what was typed after it.
    """
    problems = gone.problems(words)
    try:
        os.getcwd()
    except FileNotFoundError:
        problems.append("the current folder has been deleted: change to another one")
    for word in words:
        key = word.partition("=")[0] if "=" in word else "argument"
        if (name := holder(word)) is not None:
            problems.append(
                f"{key}: holds the value of the environment variable {name}, which run directories would keep; type "
                f"'${{oc.env:{name}}}', in single quotes"
            )
        elif looks_like_a_key(word):
            problems.append(
                f"{key}: holds what looks like the key of a service, which run directories and the shell's history "
                "would keep; put it into an environment variable, whose name a setting such as "
                "engine.endpoint.key_env takes"
            )
    refuse(problems)


def _dispatch(words: Sequence[str]) -> int:
    # `mmrl help`, `mmrl help train`, `mmrl train help`
    if words and "help" in (words[0], words[-1]) and not os.path.exists("help"):
        words = [*(word for word in (words[1:] if words[0] == "help" else words[:-1])), "--help"]
    if words[:1] in ([], ["-h"], ["--help"]):
        app.info.epilog = GROUP_CHOICES.format(groups="\n".join(map(_choices, GROUPS)))
    if words[:1] and words[0] in LOADING and not QUICK & set(words) and sys.stderr.isatty():
        print(f"mmrl {words[0]}: loading …", file=sys.stderr)
    return app(words or ["--help"], standalone_mode=False, prog_name="mmrl") or 0


def _choices(group: str) -> str:
    return fill(" ".join(options(group)), 78, initial_indent=f"  {group + '=':<12}", subsequent_indent=" " * 14)
