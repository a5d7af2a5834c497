"""mmrl: train language-model programs by reinforcement learning."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mmrl.api import Run, compose, evaluate, resume, train

__version__ = "0.1.0"
__all__ = ["Run", "compose", "evaluate", "resume", "train"]


def __getattr__(name: str) -> object:
    # At the first use: the command line imports this file too, and is to be there at once.
    if name in __all__:
        return getattr(import_module("mmrl.api"), name)
    raise AttributeError(f"module 'mmrl' has no attribute '{name}'")
