"""Words that are gone are refused with what replaces them."""

import pytest

from mmrl.cli import main
from mmrl.cli.gone import GONE


@pytest.mark.parametrize(("command", "key"), [pair for pair in GONE if pair[1]])
def test_a_word_that_is_gone_is_refused_with_what_replaces_it(command, key, capsys):
    assert main([command, f"{key}=2"]) == 2
    assert f"{key}: is gone; {GONE[command, key]}" in capsys.readouterr().err


@pytest.mark.parametrize("command", [command for command, key in GONE if not key])
def test_a_command_that_is_gone_is_refused_with_what_replaces_it(command, capsys):
    assert main([command, "anything", "seed=1"]) == 2
    assert capsys.readouterr().err == f"error: mmrl {command}: is gone; {GONE[command, '']}\n"
