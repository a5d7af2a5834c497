"""Commands on the pages: a shell reads each block as it stands, and `mmrl` composes and checks what it is handed.

Nothing runs. A run of the reader's (RUN_DIR, outputs/…) is one that the test has made; files need not be there.
"""

import re
import shutil
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

from mmrl.cli import main
from mmrl.cli.configs import configured
from mmrl.system.files import plain
from tests.helpers.runs import fake_run

TOP = Path(__file__).parents[2]
# docs/first-hour.md is run as it stands, by a test of its own.
PAGES = [
    TOP / "README.md",
    TOP / "CONTRIBUTING.md",
    *sorted({*(TOP / "docs").glob("*.md")} - {TOP / "docs" / "first-hour.md"}),
]
FENCE = re.compile(r"^```(?:|bash|sh|shell|console)\n(.*?)^```$", re.M | re.S)
COMMAND = re.compile(r"^(?:\$ )?(?:[\w.]*/)*mmrl |-m mmrl |^\w+=\(", re.M)
"""What only a block of commands has: a call of `mmrl`, or an array of words for later calls."""
FILE = re.compile(r"^```\w+\n((?:# @package _global_\n)?# ([\w./-]+\.(?:yaml|py))\b.*?)^```$", re.M | re.S)
"""A file that the reader has from the page, with its name in a comment on top."""
SHELL = r"""
PATH=/nowhere page=$PWD
exit() { :; }
mmrl() { printf '%s\0' "$PWD" "$@" >&9; printf '\n' >&9; }
command_not_found_handle() {  # torchrun … -m mmrl train …
  while [ $# -gt 0 ]; do
    if [ "$1" = mmrl ]; then shift; mmrl "$@"; return; fi
    shift
  done
}
"""


def called(text, folder):
    """The folder and the words of each call of `mmrl` in the blocks of a page, as a shell splits them."""
    lines = []
    for block in FENCE.findall(text):
        if not COMMAND.search(block):
            continue
        if re.search(r"^\$ ", block, re.M):  # below its commands a console shows what they print
            block = "\n".join(re.findall(r"^\$ ((?:.*\\\n)*.*)$", block, re.M))
        lines += ['cd "$page"', re.sub(r"^[\w./-]+/(python|mmrl) ", r"\1 ", block, flags=re.M)]  # found by name alone
    script = folder / "page.sh"
    script.write_text("\n".join([SHELL, *lines, "wait"]))
    done = subprocess.run(
        ["bash", "-c", 'exec 9> "$0"; . "$1"', folder / "calls", script], cwd=folder, capture_output=True, text=True
    )
    assert "syntax error" not in done.stderr and "unexpected" not in done.stderr, done.stderr
    return [call.split("\0")[:-1] for call in (folder / "calls").read_text().splitlines()]


def test_a_shell_finds_the_calls(tmp_path):
    page = """
```console
$ mmrl train seed=1 \\
    'a={b: 1}'   # why
printed
```

```
WORDS=(x=1 y=2)
.venv/bin/python -m mmrl eval "${WORDS[@]}" & exit 1
torchrun --nproc-per-node 8 -m mmrl train …
```

```
look further   mmrl show RUN (no command)
```
"""
    calls = called(page, tmp_path)
    assert sorted(words for _, *words in calls) == [
        ["eval", "x=1", "y=2"],
        ["train", "seed=1", "a={b: 1}"],
        ["train", "…"],
    ]
    assert {folder for folder, *_ in calls} == {str(tmp_path)}


RUN = re.compile(r"\b(?:[A-Z]+_)?RUN(?:_DIR)?\b|^outputs/[\w/]+$|^exported$")
"""A run of the reader's."""
STORED = plain(configured([]).model_dump(mode="json"))
REST = "…"
"""What a command of a page leaves out."""


def replaced(word, runs):
    """A word, with the reader's own things in the place of what stands for them."""
    key, equals, value = word.rpartition("=")
    return f"{key}{equals}{runs}" if RUN.search(value) and key not in ("run.dir", "out") else word


WORK = (
    *("run.evaluate", "run.session.resume", "run.eval.resume_evaluation", "run.check.check_all"),
    *("commands.doctor.doctor", "commands.model_doctor.examine_model", "commands.plan.planned"),
    *("commands.credit.credit_command", "commands.export.export", "commands.serve.serve_policy"),
    *("commands.index.build", "commands.index.serve", "commands.audit.audit"),
    *("report.console.show_run", "report.html.report_run", "sets.sweep.sweep", "sets.command._run"),
)
"""What commands hand their checked configs and arguments to."""


@pytest.fixture(autouse=True)
def programs_of_pages_are_forgotten(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield
    for name, module in [*sys.modules.items()]:
        if str(getattr(module, "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.fixture(autouse=True)
def nothing_runs(monkeypatch):
    for name in WORK:  # first: a module that is imported while another is replaced would keep the replacement
        import_module(f"mmrl.{name}".rpartition(".")[0])
    for name in WORK:
        monkeypatch.setattr(f"mmrl.{name}", lambda *given, **options: 0)
    monkeypatch.setattr("mmrl.run.train", lambda config: ("", 0))
    # as if the run had been trained
    monkeypatch.setattr("mmrl.store.policy.newest_checkpoint", lambda folder: TOP / "mmrl" / "assets" / "tiny")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_are_composed_and_checked(page, tmp_path, monkeypatch, capsys):
    text = page.read_text(encoding="utf-8")
    shutil.copytree(TOP / "docs" / "programs", tmp_path / "docs" / "programs")
    for content, name in FILE.findall(text):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    fake_run(tmp_path / "run", config=STORED)
    wrong = []
    for folder, *call in called(text, tmp_path):
        if find_spec("hydra_plugins") is None and any(word.startswith("hydra/") for word in call):
            continue  # Hydra's sweepers and launchers are extras
        monkeypatch.chdir(folder)
        words = [replaced(word, tmp_path / "run") for word in call if word != REST]
        if main(words) != 0:
            wrong.append(f"{' '.join(call)}\n{capsys.readouterr().err}")
    assert not wrong, "\n".join(wrong)
