"""What tests of several folders share."""

from pathlib import Path

TOP = Path(__file__).parents[2]
"""The repository."""
