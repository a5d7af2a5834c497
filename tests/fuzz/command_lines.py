"""Random command lines: words of mmrl, of Hydra and of nobody, in every order; `in_process` runs them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml
from hypothesis import strategies as st
from typer.main import get_group

from mmrl.cli.commands import app

_COMMANDS: dict[str, Any] = {**get_group(app).commands}
COMMANDS = {
    name: re.findall(r"\b(\w+)=", command.help or "")
    for name, command in (*_COMMANDS.items(), *((f"index {n}", c) for n, c in _COMMANDS["index"].commands.items()))
    if not command.hidden
}
"""Command -> keys that its help names."""
NO_COMMANDS = ("worker", "trian", "", "--help", "-V", "help", "-x", "-sc", "index", "index burn")
WORDS = {
    name: text.split() for name, text in yaml.safe_load(Path(__file__).with_name("words.yaml").read_text()).items()
}
VALUES = (
    *WORDS["values"],
    *("", "a b", "'a b'", '"a b"', "é", "日本", "\u202e", "\ufeff", "\x1b[31m", "\t", "\n", "a\nb", "\x7f", "\udcff"),
    *("💥", "x" * 5000),
)
DEEP = {
    "train": "",
    "plan": "",
    "doctor": "",
    "eval": "policy=tiny",
    "compare": "algo=grpo seed=0",
    "credit": "algo=mhgpo_rr rollouts=file.json",
}
"""Commands that compose a config, and words without which they refuse everything."""
VALUE = st.sampled_from(VALUES) | st.lists(st.sampled_from(VALUES), min_size=2, max_size=3).map(",".join)
SIGNS = st.sampled_from(("", "", "", "", "+", "++", "~", "~~", "@"))
CONFIG_WORDS = st.sampled_from((["--cfg", "job"], ["--cfg=job"], ["-m"], ["--config-dir", "folder"]))


@st.composite
def _settings(draw: st.DrawFn, keys: list[str]) -> str:
    """A `KEY=VALUE`, at times with a piece of it dropped, doubled or replaced."""
    word = f"{draw(SIGNS)}{draw(st.sampled_from(keys))}={draw(VALUE)}"
    if draw(st.integers(0, 9)) == 5:
        at = draw(st.integers(0, len(word) - 1))
        word = word[:at] + draw(st.just("") | st.just(word[at] * 2) | st.sampled_from(VALUES)) + word[at + 1 :]
    return word


@st.composite
def command_lines(draw: st.DrawFn) -> list[str]:
    """A command and some words that are keys, values, flags and names, mostly nearly right."""
    if draw(st.booleans()):  # one or two strange words in a line that is composed
        command = draw(st.sampled_from(sorted(DEEP)))
        right = st.lists(st.sampled_from(WORDS["right"]), max_size=2)
        strange = st.lists(_settings(WORDS["keys"]), min_size=1, max_size=2)
        words = [*DEEP[command].split(), *draw(right), *draw(strange), *draw(st.just([]) | CONFIG_WORDS)]
        return [command, *draw(st.permutations(words))]
    command = draw(st.sampled_from((*COMMANDS, *NO_COMMANDS)))
    keys = COMMANDS.get(command, [])
    keys = keys * (len(WORDS["keys"]) // (len(keys) or 1))
    a_word = _settings([*keys, *WORDS["keys"]]) | st.sampled_from((*WORDS["flags"], *VALUES))
    return [*(command.split(" ") if command else [""]), *draw(st.lists(a_word, max_size=6))]
