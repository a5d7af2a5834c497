import pytest

from mmrl.cli import main
from tests.cli.test_cli import COMMANDS


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("mmrl tr", ["train"]),
        ("mmrl ", COMMANDS),
        ("mmrl index ", ["build"]),
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
