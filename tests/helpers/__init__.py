"""What tests of several folders share."""

from pathlib import Path
from typing import Any

TOP = Path(__file__).parents[2]
"""The repository."""
Fake: Any = object
"""Base of a fake, which mypy then takes for whatever it stands for."""
