import pytest

from mmrl.cli import main
from tests.cli.test_cli import COMMANDS


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("mmrl tr", ["train"]),
        ("mmrl ", COMMANDS),
        ("mmrl index ", ["build", "info", "search"]),
        ("mmrl x", []),
    ],
)
def test_a_shell_gets_the_commands(line, expected, monkeypatch, capsys):
    monkeypatch.setenv("_MMRL_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", line)
    monkeypatch.setenv("COMP_CWORD", str(line.count(" ")))
    with pytest.raises(SystemExit):
        main([])
    assert sorted(capsys.readouterr().out.split()) == sorted(expected)


def test_a_shell_without_completion_is_named(monkeypatch, capsys):
    monkeypatch.setattr("shellingham.detect_shell", lambda: ("sh", "/bin/sh"))
    assert main(["--show-completion"]) == 1
    assert "Shell sh not supported." in capsys.readouterr().err
