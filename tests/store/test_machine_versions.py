"""What `mmrl --version` prints."""

import sys

import pytest

from mmrl import __version__
from mmrl.cli import main


@pytest.mark.parametrize("broken", [False, True])
def test_versions_and_devices_are_printed_with_a_torch_that_cannot_be_used_too(broken, monkeypatch, capsys):
    if broken:
        monkeypatch.setitem(sys.modules, "torch", None)
    assert main(["--version"]) == 0
    first, *rows = capsys.readouterr().out.splitlines()
    names = {row.split("  ")[1] for row in rows}
    assert first == f"mmrl {__version__}"
    assert {"python", "transformers", "CPU"} <= names
    assert ("torch cannot be used" in names) == broken
