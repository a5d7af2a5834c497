"""OpenEnv servers for tests, run by an interpreter that has `openenv`: its own example, and two environments of ours.

`openenv` needs versions of packages that mmrl's environment cannot have (mcp<2): $MMRL_OPENENV names another one's
interpreter (`make test-openenv` makes one); without it the tests that need one are skipped.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest

PYTHON = os.environ.get("MMRL_OPENENV") or (sys.executable if importlib.util.find_spec("openenv") else "")
needs_openenv = pytest.mark.skipif(not PYTHON, reason="needs an interpreter with openenv (MMRL_OPENENV=PYTHON)")

WORLDS = '''
import os, random
from fastapi import FastAPI
from fastmcp import FastMCP
from openenv.core.env_server import Action, Environment, MCPEnvironment, Observation, State, create_app
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation


class Add(Action):
    """Adds to the counter."""

    step: int


class Count(Observation):
    count: int
    seed: int | None = None


class Counter(Environment):
    """Ends at 8 or more; a step is worth a tenth of itself, and reaching the target exactly 1 more."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, target=4, **columns):
        self.count, self.target = 0, target
        return Count(count=0, seed=seed)

    def step(self, action, timeout_s=None, **kwargs):
        if action.step == 13:
            os._exit(1)
        if action.step < 0:
            raise ValueError("step must not be negative")
        self.count += action.step
        reward = None if action.step == 0 else action.step / 10 + (self.count == self.target)
        seen = self.count + (random.SystemRandom().random() if self.target == 99 else 0)
        return Count(count=int(seen * 1000) if self.target == 99 else seen, reward=reward, done=self.count >= 8)

    @property
    def state(self):
        return State()


class Tools(MCPEnvironment):
    """Two tools, of which one fails."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        server = FastMCP("tools")

        @server.tool
        def add(step: int) -> int:
            """Adds to the counter."""
            self.count += step
            return self.count

        @server.tool
        def fail(text: str) -> str:
            """Fails."""
            raise ValueError(text)

        super().__init__(server)

    def reset(self, seed=None, episode_id=None, **columns):
        self.count = 0
        return Observation()

    def _step_impl(self, action, timeout_s=None, **kwargs):
        raise ValueError(f"got {action}, which calls no tool")

    @property
    def state(self):
        return State()


app = FastAPI()
app.mount("/counter", create_app(Counter, Add, Count, max_concurrent_envs=64))
app.mount("/few", create_app(Counter, Add, Count, max_concurrent_envs=2))
app.mount("/tools", create_app(Tools, CallToolAction, CallToolObservation, max_concurrent_envs=64))


@app.get("/health")
def health():
    return {}
'''


def written(folder: Path) -> str:
    """Write the environments of ours as a module there; returns its name."""
    (folder / "openenv_worlds.py").write_text(WORLDS)
    return "openenv_worlds"
