"""`mmrl new-task NAME`: writes a working task package into a folder of the user's; nothing there is overwritten.

The texts are in `mmrl/assets/new_task`. No torch, no Hydra.
"""

from __future__ import annotations

import importlib.util
import keyword
import shlex
from collections.abc import Sequence
from pathlib import Path
from string import Template
from typing import Literal

from pydantic import Field

from mmrl.cli.arguments import read_arguments
from mmrl.config.base import Section
from mmrl.errors import ConfigError, refuse
from mmrl.system.conf import conf_dir
from mmrl.system.files import user_path

TEXTS = Path(__file__).resolve().parent.parent / "assets" / "new_task"
# The function's reply is one digit; DSPy writes its field markers around each value.
KINDS = {
    "async": {"program": "function.txt", "right": '"0"', "wrong": '"1"', "max_tokens": "8"},
    "dspy": {
        "program": "dspy.txt",
        "right": '{"department": "billing"}',
        "wrong": '{"department": "repair"}',
        "max_tokens": "64",
    },
}
"""Kind -> the text of its program, and what the texts leave open: replies of the written test, and their length."""
DSPY_NOTE = (
    "The shipped tiny model writes no DSPy field markers for a program of yours: its replies do not parse, and the\n"
    "reward stays 0. Train a real model: model=NAME (of conf/model), or model=hf model.path=FOLDER_OR_HUB_ID"
)


class NewTaskArguments(Section):
    """`mmrl new-task`."""

    name: str
    kind: Literal["async", "dspy"] = Field("async", description="program: a plain async function, or a DSPy module")
    dir: str = Field(".", description="folder that the package and conf/task/NAME.yaml are written into")


def create(words: Sequence[str]) -> None:
    """Run `mmrl new-task NAME [kind=async|dspy] [dir=FOLDER]`."""
    arguments = read_arguments("mmrl new-task", NewTaskArguments, words, name="name")
    top = user_path(arguments.dir)
    problems = [] if top.is_dir() else [f"dir: no folder '{arguments.dir}'"]
    refuse([*problems, *name_problems(arguments.name, top)])
    files = write(arguments.name, top, arguments.kind)
    print("written:\n" + "\n".join(f"  {path}" for path in files))
    print(f"\nnext:\n{next_commands(arguments.name, top)}")
    if arguments.kind == "dspy":
        print("\n" + DSPY_NOTE)


def name_problems(name: str, top: Path) -> list[str]:
    """Return the reasons against a package and task of that name in `top`, one sentence each."""
    # `task=null` would choose no task, `task=true` a truth value.
    value = name.lower() in ("null", "true", "false", "nan", "inf")
    if value or not name.isidentifier() or not name.isascii() or keyword.iskeyword(name):
        return [f"mmrl new-task: got '{name}', expected a name for a Python package: letters, digits, _"]
    # The current folder is searched last when plugins are imported, so an installed package of that name would win.
    if (conf_dir() / "task" / f"{name}.yaml").exists() or importlib.util.find_spec(name) is not None:
        return [f"mmrl new-task: '{name}' is a task of mmrl or an installed Python package; expected another name"]
    existing = [path for path in (top / name, top / "conf" / "task" / f"{name}.yaml") if path.exists()]
    return [f"mmrl new-task: {path} exists, and nothing is overwritten; expected another name" for path in existing]


def write(name: str, top: Path, kind: str) -> list[Path]:
    """Write the package and its config; the files in the order in which one would read them."""
    values = {"name": name, **KINDS[kind]}
    files = {
        top / name / "__init__.py": values["program"],
        top / name / "train.jsonl": "train.jsonl",
        top / name / "dev.jsonl": "dev.jsonl",
        top / name / f"test_{name}.py": "test.txt",
        top / "conf" / "task" / f"{name}.yaml": "conf.txt",
    }
    try:
        (top / "conf" / "task").mkdir(parents=True, exist_ok=True)
        # no exist_ok: a folder that came to be there since the check is the user's
        (top / name).mkdir()
        for path, source in files.items():
            text = (TEXTS / source).read_text(encoding="utf-8")
            # "x": a file that came to be there since the check is not overwritten either.
            with path.open("x", encoding="utf-8") as file:
                file.write(Template(text).substitute(values) if source.endswith(".txt") else text)
    except OSError as error:
        raise ConfigError(f"mmrl new-task: cannot write {error.filename}: {error.strerror}") from None
    return list(files)


def next_commands(name: str, top: Path) -> str:
    """Return the next commands: the test, a short training run, an evaluation of it."""
    lines = [
        f"python -m pytest {name}" + ("" if importlib.util.find_spec("pytest") else "    # after: pip install pytest"),
        f"mmrl train task={name} algo=mmgrpo train.steps=15 train.batch_size=8 run.dir=outputs/{name}_first",
        f"mmrl eval task={name} policy=outputs/{name}_first",
    ]
    # Plugins and conf/ are looked up in the current folder.
    if top.resolve() != Path.cwd():
        lines.insert(0, f"cd {shlex.quote(str(top))}")
    return "\n".join(f"  {line}" for line in lines)
