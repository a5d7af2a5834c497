"""`task.timeout_s`: the time in which an engine of this process computes is not a rollout's."""

import asyncio
import time
from dataclasses import dataclass

import pytest

from tests.helpers.programs import Chain, FakeEngine, FakeTask, environment, forest_of, seeded_letter
from tests.rollout.test_sample import Faulty


@dataclass
class SlowEngine(FakeEngine):
    """Computes each reply in this process, for 0.3 s."""

    computed: float = 0.0
    since: float | None = None

    @property
    def computing_s(self):
        return self.computed + (time.perf_counter() - self.since if self.since is not None else 0.0)

    async def generate(self, request):
        self.since = time.perf_counter()
        await asyncio.sleep(0.3)
        self.computed, self.since = self.computing_s, None
        return await super().generate(request)


@pytest.mark.parametrize(
    ("program", "error"), [(Chain(), None), (Faulty("timeout"), "timeout")], ids=["of the engine", "of its own"]
)
def test_the_time_in_which_the_engine_computes_is_not_the_rollouts(program, error):
    env = environment(FakeTask(program), SlowEngine(seeded_letter), timeout_s=0.2)
    (rollout,) = forest_of(env).rollouts
    assert rollout.error == error
