"""Stages: each maps a policy to a better one. A run goes through a list of them (`mmrl.run.build`)."""

from pathlib import Path
from typing import Protocol


class Stage(Protocol):
    """One stage of a run."""

    name: str

    def run(self, checkpoint: Path | None) -> None:
        """Improve the policy, from a checkpoint of this stage where there is one."""
        ...

    def close(self) -> None:
        """Free what the stage holds, however it ended."""
        ...
