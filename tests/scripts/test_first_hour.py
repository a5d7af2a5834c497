"""docs/first-hour.md, run as it stands: its files are written, its commands run, what it prints is what they print."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from mmrl.cli import main
from mmrl.system.child_process import ChildProcess, free_port

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "first-hour.md"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PORT = "8765"
"""The one on the page; the test takes a free one."""


def blocks(page: str) -> list[tuple[str, str]]:
    """Language and text of each block of code."""
    return BLOCK.findall(page)


def commands(text: str) -> list[tuple[str, list[str]]]:
    """A console block's commands, each with the lines that are shown below it."""
    shown: list[tuple[str, list[str]]] = []
    for line in text.splitlines():
        if line.startswith("$ "):
            shown.append((line[2:], []))
        elif line.strip():
            shown[-1][1].append(line)
    return shown


def printed(expected: list[str], output: str) -> list[str]:
    """Expected lines that the output does not have; blanks count once, … stands for anything."""
    lines = [" ".join(line.split()) for line in output.splitlines()]
    patterns = {line: ".*".join(map(re.escape, " ".join(line.split()).split("…"))) for line in expected}
    return [line for line, pattern in patterns.items() if not any(re.fullmatch(pattern, one) for one in lines)]


def test_the_check_sees_what_is_not_printed():
    assert printed(["a  … c", "d"], "a b c\nd") == []
    assert printed(["a … c", "d"], "a b\nd e") == ["a … c", "d"]


SCRIPT = Path(sys.executable).with_name("mmrl")
"""What people type: unlike `python -m`, it has not the current folder on its path."""
# This checkout's code, wherever the script was installed from; no module of the page's is found by it.
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT)}


def run(command: str, folder: Path, capfd: pytest.CaptureFixture[str]) -> str:
    """Run a command in this process, where its imports are done already; a script of the page's in its own."""
    program, *words = shlex.split(command)
    if program == "python":
        return subprocess.run(
            [sys.executable, *words], cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, check=True
        ).stdout
    assert program == "mmrl"
    capfd.readouterr()
    assert main(words) == int(words[0] == "doctor" and len(words) > 1)
    return "".join(capfd.readouterr())


def serve(command: str, port: int) -> ChildProcess:
    words = [sys.executable, str(SCRIPT), *shlex.split(command)[1:]]
    server = ChildProcess(lambda port: words, log=Path("serve.log").absolute(), timeout_s=120, env=ENVIRONMENT)
    server.port = port
    server.start()
    return server


@pytest.mark.slow
def test_the_page_runs(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    port = free_port()
    page = PAGE.read_text(encoding="utf-8").replace(PORT, str(port))
    servers = []
    try:
        for language, text in blocks(page):
            if language != "console":
                file = tmp_path / text.splitlines()[0].removeprefix("# ")
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(text)
                continue
            for command, expected in commands(text):
                if command.endswith(" &"):
                    servers.append(serve(command.removesuffix(" &"), port))
                    output = servers[-1].log.read_text()
                else:
                    output = run(command, tmp_path, capfd)
                missing = printed([line for line in expected if line != "…"], output)
                assert not missing, f"{command}\n{missing}\n{output}"
    finally:
        for server in servers:
            server.stop()
