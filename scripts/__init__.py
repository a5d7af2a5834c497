"""Commands for developers: builds, checks, benchmarks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence


def key_values(arguments: Sequence[str], defaults: Mapping[str, str]) -> dict[str, str]:
    """Read `name=value` arguments over their defaults.

    Raises:
        SystemExit: an unknown name.
    """
    words = dict(argument.partition("=")[::2] for argument in arguments)
    if unknown := sorted(set(words) - set(defaults)):
        raise SystemExit(f"unknown option {', '.join(unknown)}: expected some of {'=, '.join(defaults)}=")
    return {**defaults, **words}


def expect_some_of(option: str, text: str, valid: Iterable[str]) -> list[str]:
    """Split the comma-separated words of an option; all of `valid` where there are none.

    Raises:
        SystemExit: a word that is not valid.
    """
    words = text.split(",") if text else list(valid)
    if set(words) - set(valid):
        raise SystemExit(f"{option}: got {text}, expected some of {','.join(valid)}")
    return words
