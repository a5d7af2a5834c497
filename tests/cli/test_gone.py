"""Words that are gone are refused with what replaces them."""

import pytest

from mmrl.cli import main
from mmrl.cli.gone import GONE


@pytest.mark.parametrize(("command", "key"), [pair for pair in GONE if pair[1]])
def test_a_word_that_is_gone_is_refused_with_what_replaces_it(command, key, capsys):
    assert main([command, key if "=" in key else f"{key}=2"]) == 2
    assert f"{key}: is gone; {GONE[command, key]}" in capsys.readouterr().err


@pytest.mark.parametrize("command", [command for command, key in GONE if not key])
def test_a_command_that_is_gone_is_refused_with_what_replaces_it(command, capsys):
    assert main([command, "anything", "seed=1"]) == 2
    assert capsys.readouterr().err == f"error: mmrl {command}: is gone; {GONE[command, '']}\n"


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["train", "stage.miprov2.algo.auto=light"], "stage"),
        (["train", "-m", "algo=mmgrpo,better_together"], "algo=better_together"),
        (["compare", "algo=mmgrpo,better_together"], "algo=better_together"),
    ],
)
def test_a_key_below_one_that_is_gone_and_a_value_in_a_list_are_refused(words, key, capsys):
    assert main(words) == 2
    assert f"{key}: is gone; {GONE[words[0], key]}" in capsys.readouterr().err
