"""Shell completion: `eval "$(mmrl -sc install=bash)"`, and what a shell asks for at every TAB (`mmrl -sc query=bash`).

Commands and their own keys come from their help; config keys and choices from Hydra; run directories from `outputs/`. A
word that cannot be completed gives nothing, and nothing is ever printed beside the candidates.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

from typer.models import CommandInfo

from mmrl.cli.commands import COMMANDS, app, index_app
from mmrl.system.conf import GROUPS, options

# Candidates end in a space where the word is whole, so the shell adds none itself: `train `, but `algo=`.
_BASH = """\
_mmrl_completion() {
    local IFS=$'\\n'
    COMPREPLY=($(COMP_LINE="$COMP_LINE" COMP_POINT="$COMP_POINT" mmrl -sc query=bash 2>/dev/null))
}
COMP_WORDBREAKS=${COMP_WORDBREAKS//=}
complete -o nospace -o default -F _mmrl_completion mmrl
"""
_FISH = """\
function _mmrl_completion
    set -lx COMP_LINE (commandline -cp)
    set -lx COMP_POINT (string length -- "$COMP_LINE")
    mmrl -sc query=fish 2>/dev/null
end
complete -c mmrl -f -a '(_mmrl_completion)'
"""
INSTALL = {"bash": _BASH, "zsh": f"autoload -U +X bashcompinit && bashcompinit\n{_BASH}", "fish": _FISH}
UNINSTALL = {
    "bash": "complete -r mmrl; unset -f _mmrl_completion",
    "zsh": "compdef -d mmrl; unset -f _mmrl_completion",
    "fish": "complete -c mmrl -e; functions -e _mmrl_completion",
}
COMPOSED = {"train": "train", "eval": "eval", "plan": "train", "doctor": "train", "compare": "train"}
"""Commands that take config keys -> the config that has them."""
RUN_KEYS = ("resume", "run", "runs", "policy")
"""Keys whose value is a run directory."""
NEWEST = 50
"""Run directories that are offered at most."""


def complete(request: str) -> None:
    """Print what `install=SHELL` or `uninstall=SHELL` asks for, or the candidates for the line in `COMP_LINE`."""
    action, _, shell = request.partition("=")
    if action != "query":
        print((INSTALL if action == "install" else UNINSTALL)[shell], end="\n" if action == "uninstall" else "")
        return
    line = os.environ.get("COMP_LINE", "")
    point = os.environ.get("COMP_POINT", "")
    offered = candidates(line[: int(point)] if point.isdecimal() else line)
    # fish ends a word itself
    print("\n".join(word.rstrip() if shell == "fish" else word for word in offered))


def candidates(line: str) -> list[str]:
    """What the last word of `line` may become."""
    _, *words, current = [
        *line.split()[:1],
        *line.split()[1:],
        *([""] if line.endswith(" ") or " " not in line else []),
    ]
    if not words:
        return _whole(name for name in COMMANDS if name.startswith(current))
    commands = {str(info.name or info.callback.__name__): info for info in app.registered_commands if info.callback}
    name, rest = words[0], words[1:]
    if name == "index":
        commands = {str(info.name): info for info in index_app.registered_commands}
        if not rest:
            return _whole(sorted(below for below in commands if below.startswith(current)))
        name, rest = rest[0], rest[1:]
    return sorted(set(_words_of(commands[name], name, rest, current))) if name in commands else []


def _words_of(command: CommandInfo, name: str, words: Sequence[str], current: str) -> list[str]:
    """Candidates for a word after a command."""
    key, equals, value = current.partition("=")
    if equals and key in RUN_KEYS:
        return [f"{key}={run}" for run in _run_dirs(value)]
    text = f"{command.options_metavar} {command.callback.__doc__ if command.callback else ''}".partition("Examples:")[0]
    if equals and key in GROUPS:
        return _whole(f"{key}={choice}" for choice in options(key) if choice.startswith(value))
    if equals and (listed := re.search(rf"(?<![\w.]){re.escape(key)}=([\w-]+(?:\|[\w-]+)+)", text)):
        return _whole(f"{key}={choice}" for choice in listed.group(1).split("|") if choice.startswith(value))
    typed = {word.partition("=")[0] for word in words}
    keys = dict.fromkeys(re.findall(r"(?<![\w.])([a-z_]+(?:\.[a-z_]+)*)=", text))
    offered = [f"{own}=" for own in keys if own.startswith(current) and own not in typed]
    if name in COMPOSED:
        offered += _config_words(
            COMPOSED[name], [word for word in words if word.partition("=")[0] not in keys], current
        )
    if "RUN_DIR" in str(command.options_metavar).replace("run=RUN_DIR", "") and not equals:
        offered += _run_dirs(current)
    return offered


def _whole(words: Iterable[str]) -> list[str]:
    return [f"{word} " for word in words]


def _config_words(config: str, typed: Sequence[str], current: str) -> list[str]:
    """Hydra's candidates."""
    from mmrl.cli.arguments import CommandLine
    from mmrl.cli.hydra import through_hydra
    from mmrl.cli.overrides import parse

    parsed = [word for word in typed if "=" in word and parse([word], [])]
    os.environ["COMP_LINE"] = " ".join(["mmrl", *parsed, current])
    os.environ["COMP_POINT"] = str(len(os.environ["COMP_LINE"]))
    printed = io.StringIO()
    try:
        with redirect_stdout(printed), redirect_stderr(io.StringIO()):
            through_hydra(config, CommandLine(flags=("-sc", "query=bash")), lambda sections, words: None)
    # Half a line need not compose; then there is nothing to offer.
    except (Exception, SystemExit):
        return []
    # Rows lie in folders, which Hydra would offer as groups of their own; comparisons are no part of a config.
    words = ["experiment=" if word == "experiment/" else word for word in printed.getvalue().split()]
    return [word if word.endswith(("=", ".", "/")) else f"{word} " for word in words if word != "compare="]


def _run_dirs(start: str) -> list[str]:
    """Run directories below `outputs/` that begin with `start`, the newest ones; else folders that do."""
    runs = [
        config.parent
        for depth in range(1, 5)
        for config in Path("outputs").glob("/".join(["*"] * depth) + "/config.yaml")
        if (config.parent / "journal").is_dir() and str(config.parent).startswith(start)
    ]
    if runs:
        newest = sorted(runs, key=lambda run: run.stat().st_mtime, reverse=True)[:NEWEST]
        return _whole(str(run) for run in newest)
    above, _, name = start.rpartition("/")
    parent = Path(above or ("/" if start.startswith("/") else "."))
    try:
        folders = [entry for entry in parent.iterdir() if entry.is_dir() and entry.name.startswith(name)]
    except OSError:
        return []
    prefix = start[: len(start) - len(name)]
    return [
        f"{prefix}{folder.name}{' ' if (folder / 'config.yaml').is_file() else '/'}"
        for folder in folders
        if name.startswith(".") or not folder.name.startswith(".")
    ]
