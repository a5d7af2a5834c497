"""Words that are gone are refused with what replaces them."""

import pytest

from mmrl.cli import main
from mmrl.cli.gone import GONE


@pytest.mark.parametrize(("command", "key"), GONE)
def test_a_word_that_is_gone_is_refused_with_what_replaces_it(command, key, capsys):
    assert main([command, f"{key}=2" if key else "word"]) == 2
    assert f"{key or command}: is gone; {GONE[command, key]}" in capsys.readouterr().err
