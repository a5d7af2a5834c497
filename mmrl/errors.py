"""Every failure that mmrl knows by name, one type per boundary.

Bottom of the import order: everything may raise these, nothing here imports mmrl.

The error model in five points:

1. What the user typed is wrong  -> `ConfigError` (all problems at once), exit code 2, no traceback.
2. One rollout failed            -> a `RolloutError`; the rollout becomes data: typed, journalled, counted.
   *Model-caused* failures are trained with the task's failure rule; *outside-caused* ones are never credited.
3. Too many rollouts failed      -> `TooManyFailures`: the run stops with its state saved, exit code 1.
4. The disk refuses a file        -> `StorageError`, one line that names it, exit code 1; what was saved is whole.
5. Anything else is a bug        -> a traceback.
"""

from __future__ import annotations

import difflib
import errno
import os
import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class MmrlError(Exception):
    """Base of all errors with a message meant for the user; `exit_code` is what the command returns."""

    # 1 is "stopped, and resumable"; what the user typed wrong is 2, so that scripts can tell the two apart.
    exit_code = 1


class ConfigError(MmrlError, ValueError):
    """Bad input, reported before any model loads.

    Args:
        problems: one sentence each, starting with the path that the user would type
            (`algo.group_size: got 1, expected at least 2`).
    """

    exit_code = 2

    def __init__(self, problems: str | Iterable[str]):
        self.problems: list[str] = [problems] if isinstance(problems, str) else list(problems)
        # Joined for logs and tests; the command line prints `problems` one by one.
        super().__init__("\n".join(self.problems))


@contextmanager
def gathered(problems: list[str], where: str = "") -> Iterator[None]:
    """Collect the sentences of a `ConfigError`, which ends the block, in `problems`, each after `where`."""
    try:
        yield
    except ConfigError as error:
        problems += [where + problem for problem in error.problems]


def refuse(problems: Iterable[str]) -> None:
    """Raise `ConfigError` with all of `problems`; without any, go on."""
    if found := list(problems):
        raise ConfigError(found)


@contextmanager
def located(where: str) -> Iterator[None]:
    """Put `where` in front of each sentence of a `ConfigError`: nobody has typed the keys that it names."""
    problems: list[str] = []
    with gathered(problems, where):
        yield
    refuse(problems)


def reason_of(error: BaseException) -> str:
    """Return the first line of another library's error, printable; with its type where the text alone is too little."""
    first, *rest = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    # What follows a colon is the reason itself.
    line = f"{first} {rest[0]}" if rest and first.endswith(":") else first
    line = "".join(letter if letter.isprintable() else "?" for letter in line)
    # A KeyError is a name alone.
    return line if " " in line else f"{type(error).__name__} {line}".strip()


class DataError(ConfigError):
    """A data file, corpus or forest file is missing or malformed; names file and line or record id."""


class CheckpointError(MmrlError):
    """A run directory or checkpoint cannot be used in this way."""

    exit_code = 2


class StorageError(MmrlError):
    """A file could not be read or written: a full disk, a read-only one, a folder in a file's place."""


class Stopped(KeyboardInterrupt):
    """The process was to end (SIGTERM): unwound like Ctrl-C, with an exit code of its own."""

    # Exit code that a shell reports after SIGTERM: a script that continues runs needs to know only one code.
    exit_code = 143


class TooManyFailures(MmrlError):
    """More than `max_failed_share` of the rollouts of a step or an evaluation failed from outside causes."""


class ProcessLost(MmrlError):
    """Another process of the run has ended, so that this one cannot go on."""

    # Of a process, never of a command: whoever watches the processes tells it from a stop of the run's own (1).
    exit_code = 75


class SyncFailure(MmrlError):
    """New weights did not reach the engine, or its base weights are no longer what they were."""


class RolloutError(MmrlError):
    """A failure that ends one rollout.

    Class attributes:
        kind: the type written to the journal and counted in metrics.
        model_caused: True if the policy's own output is to blame (trained with the failure rule).
        traceback: position in the user's code where it was raised, for the record; empty if unknown.
    """

    kind = "program"
    model_caused = False
    traceback = ""


class ParseFailure(RolloutError):
    """A completion that the program could not parse.

    Args:
        message: expected format.
        present: output fields that it has.
        expected: output fields required (0 when unknown: scored as the full format failure).
    """

    kind = "parse"
    model_caused = True
    reply: Any = None
    """The reply that could not be parsed, where `ctx.call` raised this."""

    def __init__(self, message: str, present: int = 0, expected: int = 0):
        super().__init__(message)
        self.present = present
        self.expected = expected


class LengthFailure(RolloutError):
    """The context of a call grew past the model's or the task's limit."""

    kind = "length"
    model_caused = True


class LimitFailure(RolloutError):
    """The program reached a limit on turns, calls or searches without an answer."""

    kind = "limit"
    model_caused = True


class ToolFailure(RolloutError):
    """A tool (retriever, external model) failed."""

    kind = "tool"


class RetrievalFailure(ToolFailure):
    """A retriever gave no usable answer.

    Args:
        message: retriever and cause.
        cause: `timeout`, `connection`, `status`, `garbage`, or `refused` (not sent: too many have failed).
        transient: True if another attempt may do better.
    """

    def __init__(self, message: str, cause: str, transient: bool = False):
        super().__init__(message)
        self.cause = cause
        self.transient = transient


class EngineFailure(RolloutError):
    """The generation engine failed on a request."""

    kind = "engine"


class RequestFailure(EngineFailure):
    """No engine could generate for the request: an empty prompt, a token id outside the vocabulary; or an endpoint
    refused its length or content."""


class JudgeFailure(RolloutError):
    """A judge gave no answer. (What it replied is scored by a fixed rule where it cannot be read.)"""

    kind = "judge"


class RolloutTimeout(RolloutError):
    """The rollout took longer than `task.timeout_s`."""

    kind = "timeout"


class RewardFailure(RolloutError):
    """A reward function raised, or returned what is no finite number, or a number beyond `records.LARGEST`."""

    kind = "reward"


class ProgramFailure(RolloutError):
    """The program's own code raised."""

    kind = "program"


class ReplayDivergence(RolloutError):
    """A program, run again on its own tape, requested something else than it did the first time."""

    kind = "replay"


# Names, not classes: journals and forest files store the kind as text.
MODEL_CAUSED = frozenset({ParseFailure.kind, LengthFailure.kind, LimitFailure.kind})
OWN_CODE = frozenset({ProgramFailure.kind, RewardFailure.kind, ReplayDivergence.kind})
"""Failures of the code of a program or a reward, which no server has caused and another try does not mend."""


def failure_summary(kinds: Iterable[str]) -> str:
    """Describe why rollouts failed through no fault of the model, by kind of failure: the words after "failed"."""
    causes = {kind in OWN_CODE for kind in kinds}
    code = "in the code of the program or its reward"
    return code if causes == {True} else f"from outside causes and {code}" if True in causes else "from outside causes"


_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_PLACE = (*(errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO), errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.ENOENT)
"""Errors of a file that the operating system refuses; others are bugs, or have types of their own."""


_TORCH_CANNOT_WRITE = {
    **{f"strerror: {os.strerror(number)}": number for number in (*_ROOM, *_PLACE)},
    # Another process of the run has failed first, and removed the folder.
    "Parent directory": errno.ENOENT,
}
"""Messages of `torch.save` -> errors of the system."""
_TORCH_SAYS_NO_REASON = ("PytorchStreamWriter", "iostream", "unexpected pos")
"""Words of messages of `torch.save` about a write that failed."""


def storage_error(error: Exception, path: object = None) -> StorageError | None:
    """Return the error for a file that the operating system refuses; None if another error happened.

    Args:
        path: path to be written, if the error does not name it.
    """
    file, number, reason = path, 0, ""
    if isinstance(error, OSError):
        file = path if error.filename is None else error.filename
        number, reason = error.errno or 0, error.strerror or str(error)
    elif match := re.search(r"\(os error (\d+)\)", str(error)):
        # safetensors and tokenizers say it in words, the latter as a plain `Exception`
        number, reason = int(match.group(1)), os.strerror(int(match.group(1)))
    elif isinstance(error, RuntimeError):
        number = next((number for words, number in _TORCH_CANNOT_WRITE.items() if words in str(error)), 0)
        reason = os.strerror(number)
        if not number and file is not None and any(words in str(error) for words in _TORCH_SAYS_NO_REASON):
            place = Path(str(file)).absolute()
            free = shutil.disk_usage(next(folder for folder in (place, *place.parents) if folder.exists())).free
            number = errno.ENOSPC if free < 1e9 else errno.EIO  # a checkpoint that did not fit leaves some room
            reason = f"PyTorch could not write it, with {free / 1e9:.2f} GB free on its disk"
    # A full or failing disk always counts; other errors only if they name a file (a pipe or socket has none).
    if number not in _ROOM + _PLACE or (file is None and number not in (errno.ENOSPC, errno.EDQUOT, errno.EIO)):
        return None
    remedy = "free some space there" if number in _ROOM else "see that a file can be read and written there"
    return StorageError(f"{'the output' if file is None else file}: {reason}; {remedy}, and run it again")


@contextmanager
def storage(path: object = None) -> Iterator[None]:
    """Raise `StorageError` for files that the operating system refuses inside; see `storage_error`."""
    before = os.stat(".")
    try:
        yield
    except MmrlError:
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
            raise ConfigError(f"{error.filename}: {error.strerror}") from error
        if (refusal := storage_error(error, path)) is None:
            raise
        # Not by name: the folder may be gone that the process is in now.
        if not os.path.samestat(before, os.stat(".")):
            moved = "the working directory has changed meanwhile: os.chdir in a program moves the whole run"
            raise StorageError(f"{refusal} ({moved}, so give it full paths)") from error
        raise refusal from error


SHOWN, LONGEST = 100, 2_000
"""Problems that are printed, of a file that may be wrong on every line; characters of one, which may quote a value."""
_CODES = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def without_codes(text: str) -> str:
    """Make codes visible that a terminal would obey, of names and values of others; line ends and tabs stay."""
    return _CODES.sub(lambda code: repr(code[0])[1:-1], text)


ENDED = {130: "interrupted", Stopped.exit_code: "stopped by SIGTERM"}
"""Exit code of a command that a signal has ended -> how."""


def continue_with(error: BaseException, command: str) -> None:
    """Note the command that continues what `error` ends, which is printed as the last line of all."""
    error.add_note(f"continue with: {command}")


def with_notes(text: str, error: BaseException | None) -> str:
    """Return a sentence on how a command ended, and after it the command that continues it, where there is one."""
    return "; ".join([text, *getattr(error, "__notes__", ())])


def print_error(error: MmrlError) -> None:
    """Print one line per problem on stderr, and last the command that continues what the error has stopped."""
    lines = error.problems if isinstance(error, ConfigError) else [str(error)]
    for text in lines[:SHOWN]:
        # A value that it quotes may have several lines, and codes that a terminal would obey.
        line = without_codes(" ".join(text.splitlines()))
        message = line if len(line) <= LONGEST else f"{line[:LONGEST]}... ({len(line) - LONGEST} more characters)"
        print(f"error: {message}", file=sys.stderr)
    if len(lines) > SHOWN:
        print(f"error: {len(lines) - SHOWN} more problems", file=sys.stderr)
    if (stopped := with_notes("stopped", error)) != "stopped":
        print(stopped, file=sys.stderr)


def nearest(name: str, choices: Sequence[str]) -> str:
    """Return `"; did you mean 'x'?"` for the closest of `choices`, or an empty string."""
    # 0.6 accepts a swapped or missing letter or two; names that merely share a prefix would only mislead.
    match = difflib.get_close_matches(str(name), list(choices), n=1, cutoff=0.6)
    return f"; did you mean '{match[0]}'?" if match else ""


MANY = 30
"""More valid names than this are not all printed (the rows of the papers' tables are over seventy)."""


def unknown(path: str, got: object, choices: Iterable[str]) -> str:
    """Return the sentence for a name that is not among the valid choices; of very many, it names the nearest."""
    valid = sorted(choices)
    names = ", ".join(valid)
    # The nearest names are listed at any distance: a list without names is worse than a poor guess.
    if len(valid) > MANY:
        near = difflib.get_close_matches(str(got), valid, n=5, cutoff=0.0)
        names = f"{len(valid)} names, the nearest are {', '.join(near)}"
    return f"{path}: got '{got}', expected one of {names}{nearest(str(got), valid)}"
