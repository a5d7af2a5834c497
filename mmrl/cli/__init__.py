"""The `mmrl` command: reads the command line, composes the config, hands over to `run`.

Imports here stay light (`mmrl --help` loads neither torch nor Hydra); Hydra is imported in `cli.compose` alone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from mmrl import __version__
from mmrl.errors import MmrlError, nearest

HELP = """\
mmrl {version}: train language-model programs by reinforcement learning.

Usage:
  mmrl train [key=value ...]          train; ends with a table before/after and a report
  mmrl train -m [key=a,b ...]         a sweep: one run for every combination
  mmrl train resume=RUN_DIR           continue a stopped or killed run to the same numbers
  mmrl eval policy=P [key=value ...]  evaluate a run, checkpoint, adapter, model folder or hub id
  mmrl eval -m policy=P task=a,b,c    several evaluations, side by side as columns
  mmrl eval resume=EVAL_DIR           continue a stopped evaluation
  mmrl show RUN_DIR [example=ID] [step=N [--json]]
                                      a run's curves, the tree of calls of an example, a step's rollouts as JSON
  mmrl report RUN_DIR                 write a run's report.html again
  mmrl compare RUN_DIR [RUN_DIR ...]  runs side by side: one figure, tables, which algorithm learned
  mmrl compare algo=A,B seed=0,1,2 [task=T] [jobs=N] [key=value ...]
                                      the same, starting what is missing and resuming what is unfinished
  mmrl compare plan=mini              the same for all runs of conf/compare/mini.yaml
  mmrl credit algo=A[,B] rollouts=FILE [--json]
                                      rewards, groups, advantages and weights of recorded rollouts
  mmrl plan [key=value ...] [device=h200] [dry=N]
                                      what a run will do and cost, before it starts
  mmrl index build corpus=A[,B] index=DIR [retriever=bm25|dense|colbert]
  mmrl index info|search index=DIR [query=TEXT]
                                      a retrieval index: sizes first, then built; looked into
  mmrl serve-retriever index=DIR [port=8000]
                                      serve an index over HTTP (Search-R1's and DSPy's protocols)
  mmrl new-task NAME [kind=async|dspy] [dir=FOLDER]
                                      write a task package of your own: data, program, tool, reward, test

Compose a run from:
  task=       {task}
  algo=       {algo}
  model=      {model}
  hardware=   {hardware}
  engine=     {engine}
  experiment= {experiment}

Any other key of the config can be set too: docs/configuration.md lists them all with defaults, and each command's
own arguments; `--cfg job` prints what a command line sets. docs/reproducing.md lists the rows of the papers' tables
(experiment=).
`mmrl train` alone does the main job: algo=mhgpo_rr task=hotpotqa model=tiny, in minutes on two cores.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point. Returns the exit code: 0 done, 1 stopped, 2 bad input, 130 interrupted."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")  # a name that the terminal cannot show is no reason to end
    try:
        return _dispatch(arguments)
    except MmrlError as error:
        print_error(error)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)  # what had begun has said how to go on
        return 130
    except BrokenPipeError:  # the reader of a pipe (`mmrl show RUN | head`) has seen enough
        sys.stderr.close()
        return 0


def print_error(error: MmrlError) -> None:
    """One line per problem on stderr."""
    lines = getattr(error, "problems", None) or [str(error)]
    for line in lines:
        print(f"error: {line}", file=sys.stderr)


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_help(), end="")
        return 0
    if arguments[0] in ("-V", "--version"):
        print(f"mmrl {__version__}")
        return 0
    if arguments[0] in ("-sc", "--shell-completion"):
        from mmrl.cli.compose import complete

        return complete(arguments)
    command, rest = arguments[0], arguments[1:]
    if command not in COMMANDS:
        hint = nearest(command, list(COMMANDS))
        print(f"error: unknown command '{command}'{hint} (commands: {', '.join(COMMANDS)})", file=sys.stderr)
        return 2
    if rest and rest[0] in ("-h", "--help"):
        print(_help(), end="")
        return 0
    return COMMANDS[command](rest)


def _help() -> str:
    from textwrap import fill

    from mmrl.config.groups import GROUPS, options

    names = {group: options(group) for group in GROUPS}
    rows = names["experiment"]  # the rows of a table count as one choice: there are too many to read
    names["experiment"] = list(dict.fromkeys(f"{row.rpartition('/')[0]}/*" if "/" in row else row for row in rows))
    wrapped = {group: fill(" ".join(found) or "-", 104, subsequent_indent=" " * 14) for group, found in names.items()}
    return HELP.format(version=__version__, **wrapped)


def _train(arguments: list[str]) -> int:
    from mmrl.cli.commands import train_command

    return train_command(arguments)


def _eval(arguments: list[str]) -> int:
    from mmrl.cli.commands import eval_command

    return eval_command(arguments)


def _show(arguments: list[str]) -> int:
    from mmrl.cli.commands import show_command

    return show_command(arguments)


def _report(arguments: list[str]) -> int:
    from mmrl.cli.commands import report_command

    return report_command(arguments)


def _compare(arguments: list[str]) -> int:
    from mmrl.cli.compare import compare_command

    return compare_command(arguments)


def _credit(arguments: list[str]) -> int:
    from mmrl.cli.commands import credit_command

    return credit_command(arguments)


def _plan(arguments: list[str]) -> int:
    from mmrl.cli.planning import plan_command

    return plan_command(arguments)


def _index(arguments: list[str]) -> int:
    from mmrl.cli.index import index_command

    return index_command(arguments)


def _serve_retriever(arguments: list[str]) -> int:
    from mmrl.cli.index import serve_command

    return serve_command(arguments)


def _new_task(arguments: list[str]) -> int:
    from mmrl.cli.new_task import new_task_command

    return new_task_command(arguments)


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "train": _train,
    "eval": _eval,
    "show": _show,
    "report": _report,
    "compare": _compare,
    "credit": _credit,
    "plan": _plan,
    "index": _index,
    "serve-retriever": _serve_retriever,
    "new-task": _new_task,
}


if __name__ == "__main__":
    sys.exit(main())
