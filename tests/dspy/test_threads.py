"""Threads of a program's own end the run, with their place; metrics call the configured LM."""

import asyncio
import contextlib
import inspect
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context

import dspy
import pytest

from mmrl.errors import ConfigError
from mmrl.rollout import with_program
from mmrl.rollout.plans import independent
from mmrl.system.user_code import call_scorer
from mmrl.tasks.base import Score
from tests.dspy import Answer
from tests.helpers.programs import FakeEngine, FakeTask, environment, filled, forest_of, run_program


class Other(dspy.BaseLM):
    """The LM that is configured; notes what it is sent."""

    def __init__(self):
        super().__init__(model="other", cache=False)
        self.sent = []

    def __call__(self, prompt=None, *, messages=None, **options):
        self.sent.append(messages)
        return [filled(answer="other", fine="True")]

    async def acall(self, prompt=None, *, messages=None, **options):
        return self(prompt, messages=messages, **options)


@pytest.fixture
def configured():
    lm = Other()
    dspy.configure(lm=lm)
    yield lm
    dspy.configure(lm=None)


@pytest.fixture(params=[True, False], ids=["configured", "not configured"])
def other(request, configured):
    dspy.configure(lm=configured if request.param else None)
    return configured


class InAPool(Answer):
    def forward(self, text):
        with ThreadPoolExecutor(3) as pool:
            return next(pool.map(lambda n: self.answer(text=f"{text}{n}"), range(3)))  # place


class Caught(Answer):
    def forward(self, text):
        def look():
            with contextlib.suppress(Exception):
                self.answer(text=text)  # place

        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        return self.answer(text=text)


class Forgotten(Answer):
    def forward(self, text):
        first = self.answer(text=text)
        thread = threading.Thread(target=self.answer, kwargs={"text": text})
        thread.start()
        thread.join()
        return first


class Awaited(Answer):
    async def aforward(self, text):
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(None, lambda: self.answer(text=text))  # place


class Refined(Answer):
    """DSPy's own modules copy the LM that they find."""

    def __init__(self):
        super().__init__()
        self.answer = dspy.BestOfN(
            dspy.Predict("text -> answer"), N=2, reward_fn=lambda *_: 1.0, threshold=1.0, fail_count=9
        )

    def forward(self, text):
        with ThreadPoolExecutor(1) as pool:
            pool.submit(lambda: self.answer(text=text)).result()  # place
        return dspy.Prediction(answer="x")


def place_of(kind):
    """The line of the program's own that the thread runs; none where it runs a predictor itself."""
    lines, first = inspect.getsourcelines(kind)
    numbers = [first + number for number, line in enumerate(lines) if line.rstrip().endswith("# place")]
    return f"test_threads.py, line {numbers[0]}, in " if numbers else "a request outside of its rollout: threads"


def own_threads():
    """The threads that run, but those of the loops of the process, which stay."""
    return {thread for thread in threading.enumerate() if not thread.name.startswith(("mmrl-", "asyncio_"))}


def answered(request):
    return filled(answer="x")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("kind", [InAPool, Caught, Forgotten, Awaited, Refined])
def test_a_request_from_a_programs_own_thread_ends_the_run_with_its_place(kind, other):
    before, threads = dspy.settings.lm, own_threads()
    with pytest.raises(ConfigError) as caught:
        run_program(kind(), independent(2), answered, examples=8)
    (problem,) = caught.value.problems
    assert problem.startswith("task.program: a request outside of its rollout")
    assert place_of(kind) in problem and "use dspy.Parallel" in problem
    assert dspy.settings.lm is before
    # What runs in threads cannot be ended, only refused.
    until = time.monotonic() + 20
    while own_threads() - threads and time.monotonic() < until:
        time.sleep(0.01)
    assert not own_threads() - threads and other.sent == []


judge = dspy.Predict("text -> fine: bool")


def plainly(prediction):
    return judge(text=prediction.answer).fine


async def awaited(prediction):
    return (await judge.acall(text=prediction.answer)).fine


def in_a_pool(prediction):
    with ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(copy_context().run, judge, text=f"{prediction.answer}{n}") for n in range(2)]
        return all(verdict.result().fine for verdict in asked)


class Judged(FakeTask):
    async def score(self, example, prediction, path, reward_set):  # type: ignore[override]  # awaited where it is async
        return Score(reward=float(await call_scorer(self.reward, prediction)))


class AsyncAnswer(Answer):
    async def aforward(self, text):
        return await self.answer.acall(text=text)


@pytest.mark.parametrize("kind", [Answer, AsyncAnswer])
@pytest.mark.parametrize(("metric", "requests"), [(plainly, 1), (awaited, 1), (in_a_pool, 2)])
def test_a_metric_calls_the_lm_that_is_configured(kind, metric, requests, configured):
    rollouts = run_program(kind(), independent(2), answered, examples=8, kind=Judged, reward=metric)[0].rollouts
    assert [(r.error, r.error_message, r.reward) for r in rollouts] == [(None, "", 1.0)] * 16
    assert len(configured.sent) == 16 * requests and dspy.settings.lm is configured


def test_a_metric_finds_the_lm_of_whoever_started_the_run(configured):
    nearer = Other()
    with dspy.context(lm=nearer):
        run_program(Answer(), answer=answered, examples=2, kind=Judged, reward=in_a_pool)
    assert (len(nearer.sent), len(configured.sent)) == (4, 0)


def test_the_guard_stays_until_the_last_of_several_loops_has_ended(configured):
    """As with prefetching: the second loop begins while the first runs, and ends after it."""
    began, ended = threading.Event(), threading.Event()
    outcome = []

    class Waits(FakeEngine):
        async def generate(self, request):
            began.set()
            while not ended.is_set():
                await asyncio.sleep(0.01)
            return await super().generate(request)

    class Slow(Answer):
        def forward(self, text):
            began.wait(20)
            return self.answer(text=text)

    class Later(Caught):
        def forward(self, text):
            self.answer(text=text)
            return super().forward(text)

    def second():
        task = with_program(Judged(Later(), reward=plainly))
        try:
            forest_of(environment(task, Waits(answered)))
        except ConfigError as error:
            outcome.append(error)

    thread = threading.Thread(target=second)
    thread.start()
    (rollout,) = run_program(Slow(), answer=answered, kind=Judged, reward=plainly)[0].rollouts
    assert rollout.reward == 1.0 and len(configured.sent) == 1
    assert dspy.settings.lm is not configured, "the other loop still runs"
    ended.set()
    thread.join(20)
    assert "use dspy.Parallel" in str(outcome[0]) and len(configured.sent) == 2, "both metrics, and nobody else"
    assert dspy.settings.lm is configured
