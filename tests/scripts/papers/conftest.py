"""The stand-in for the runs of a set."""

from tests.helpers.stand_in import calls  # noqa: F401
