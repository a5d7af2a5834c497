"""Threads of a program's own end the run, with their place; metrics call the configured LM, also from threads."""

import asyncio
import contextlib
import inspect
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import dspy
import pytest

from mmrl.errors import ConfigError
from mmrl.rollout import with_program
from mmrl.rollout.dspy import guard
from mmrl.rollout.plans import independent
from mmrl.rollout.sample import sample
from mmrl.system.user_code import call_scorer
from mmrl.tasks.base import Score
from tests.helpers.programs import FakeEngine, FakeTask, environment, filled, play_dspy

STDLIB = (threading.Thread.start, ThreadPoolExecutor.submit)


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


@pytest.fixture(params=[True, False], ids=["configured", "not configured"])
def other(request):
    lm = Other()
    dspy.configure(lm=lm if request.param else None)
    PAID.sent.clear()
    yield lm
    dspy.configure(lm=None)


@pytest.fixture
def configured():
    lm = Other()
    dspy.configure(lm=lm)
    yield lm
    dspy.configure(lm=None)


class Plain(dspy.Module):
    def __init__(self):
        super().__init__()
        self.a = dspy.Predict("text -> answer")

    def forward(self, text):
        return self.a(text=text)


class InAPool(Plain):
    def forward(self, text):
        with ThreadPoolExecutor(3) as pool:
            return next(pool.map(lambda n: self.a(text=f"{text}{n}"), range(3)))  # here


class Handed(Plain):
    def forward(self, text):
        with ThreadPoolExecutor(3) as pool:
            return pool.submit(self.a, text=text).result()  # here


class Caught(Plain):
    def forward(self, text):
        def look():
            with contextlib.suppress(Exception):
                self.a(text=text)  # here

        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        return self.a(text=text)


class Forgotten(Plain):
    def forward(self, text):
        first = self.a(text=text)
        thread = threading.Thread(target=self.a, kwargs={"text": text})
        thread.start()  # here
        thread.join()
        return first


class Awaited(Plain):
    async def aforward(self, text):
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(None, lambda: self.a(text=text))  # here


class Nested(Plain):
    def forward(self, text):
        def outer():
            thread = threading.Thread(target=self.a, kwargs={"text": text})
            thread.start()  # not here, but in the thread that the rollout has started
            thread.join()

        with ThreadPoolExecutor(1) as pool:
            pool.submit(outer).result()  # here
        return self.a(text=text)


PAID = Other()


class Called(Plain):
    """A predictor that is handed another LM reaches no LM that is configured."""

    def forward(self, text):
        with ThreadPoolExecutor(1) as pool:
            pool.submit(self.a, text=text, lm=PAID).result()  # here


def asked(predictor, text):
    with dspy.context(lm=PAID):
        return predictor(text=text)  # here


class Elsewhere(Plain):
    """Sets another LM in a function that is none of the module's."""

    def forward(self, text):
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(asked, self.a, text).result()


class Refined(Plain):
    """DSPy's own modules copy the LM that they find."""

    def __init__(self):
        super().__init__()
        self.a = dspy.BestOfN(
            dspy.Predict("text -> answer"), N=2, reward_fn=lambda *_: 1.0, threshold=1.0, fail_count=9
        )

    def forward(self, text):
        with ThreadPoolExecutor(1) as pool:
            pool.submit(lambda: self.a(text=text)).result()  # here
        return dspy.Prediction(answer="x")


def line_of(kind):
    lines, first = inspect.getsourcelines(asked if kind is Elsewhere else kind)
    return first + next(number for number, line in enumerate(lines) if line.rstrip().endswith("# here"))


def answered(request):
    return filled(answer="x")


@pytest.mark.parametrize("kind", [InAPool, Handed, Caught, Forgotten, Awaited, Nested, Called, Elsewhere, Refined])
def test_a_request_from_a_programs_own_thread_ends_the_run_with_its_place(kind, other, capfd):
    before, threads = dspy.settings.lm, set(threading.enumerate())
    task = with_program(FakeTask(kind()))
    with pytest.raises(ConfigError) as caught:
        play_dspy(task, answered, task.examples("train"), independent(2))
    (problem,) = caught.value.problems
    assert problem.startswith("task.program: a request outside of its rollout (")
    assert f"test_threads.py, line {line_of(kind)}, in " in problem and problem.endswith("; use dspy.Parallel")
    assert dspy.settings.lm is before
    # What runs in threads cannot be ended, only refused.
    until = time.monotonic() + 20
    while set(threading.enumerate()) - threads and time.monotonic() < until:
        time.sleep(0.01)
    assert not set(threading.enumerate()) - threads and other.sent == PAID.sent == []
    # As long as code of a program runs anywhere (that of another test may wait for ever), its threads are known.
    assert ((threading.Thread.start, ThreadPoolExecutor.submit) == STDLIB) == (not guard._under_way)
    assert "Traceback" not in capfd.readouterr().err


def test_a_thread_that_outlives_its_rollouts_reaches_no_other_model(configured):
    ended, done, raised = threading.Event(), threading.Event(), []

    class Late(Plain):
        def forward(self, text):
            def late():
                ended.wait(20)
                try:
                    self.a(text=text)
                except Exception as error:
                    raised.append(str(error))
                finally:
                    done.set()

            threading.Thread(target=late).start()
            return self.a(text=text)

    task = with_program(FakeTask(Late()))
    (rollout,) = play_dspy(task, answered, task.examples("train")[:1]).rollouts
    ended.set()
    assert done.wait(20) and rollout.error is None
    assert configured.sent == [] and "use dspy.Parallel" in raised[0]


judge = dspy.Predict("text -> fine: bool")


def plainly(prediction):
    return judge(text=prediction.answer).fine


async def awaited(prediction):
    return (await judge.acall(text=prediction.answer)).fine


def in_a_pool(prediction):
    with ThreadPoolExecutor(2) as pool:
        return all(verdict.fine for verdict in pool.map(lambda n: judge(text=f"{prediction.answer}{n}"), range(2)))


def in_a_thread(prediction):
    verdicts = []
    thread = threading.Thread(target=lambda: verdicts.append(in_a_pool(prediction)))
    thread.start()
    thread.join()
    return verdicts[0]


class Judged(FakeTask):
    async def score(self, example, prediction, path, reward_set):
        return Score(reward=float(await call_scorer(self.reward, prediction)))


class AsyncPlain(Plain):
    async def aforward(self, text):
        return await self.a.acall(text=text)


@pytest.mark.parametrize("kind", [Plain, AsyncPlain])
@pytest.mark.parametrize(("metric", "requests"), [(plainly, 1), (awaited, 1), (in_a_pool, 2), (in_a_thread, 2)])
def test_a_metric_calls_the_lm_that_is_configured(kind, metric, requests, configured):
    task = with_program(Judged(kind(), reward=metric))
    rollouts = play_dspy(task, answered, task.examples("train"), independent(2)).rollouts
    assert [(r.error, r.error_message, r.reward) for r in rollouts] == [(None, "", 1.0)] * 16
    assert len(configured.sent) == 16 * requests and dspy.settings.lm is configured


def test_a_metric_finds_the_lm_of_whoever_started_the_run(configured):
    nearer = Other()
    task = with_program(Judged(Plain(), reward=in_a_pool))
    with dspy.context(lm=nearer):
        play_dspy(task, answered, task.examples("train")[:2])
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

    class Slow(Plain):
        def forward(self, text):
            began.wait(20)
            return self.a(text=text)

    class Later(Caught):
        def forward(self, text):
            self.a(text=text)
            return super().forward(text)

    def second():
        task = with_program(Judged(Later(), reward=plainly))
        env = environment(task, Waits(answered))
        try:
            asyncio.run(sample(env, [(task.examples("train")[0], independent(1))], "outcome"))
        except ConfigError as error:
            outcome.append(error)

    thread = threading.Thread(target=second)
    thread.start()
    task = with_program(Judged(Slow(), reward=plainly))
    (rollout,) = play_dspy(task, answered, task.examples("train")[:1]).rollouts
    assert rollout.reward == 1.0 and len(configured.sent) == 1
    assert dspy.settings.lm is not configured, "the other loop still runs"
    ended.set()
    thread.join(20)
    assert "use dspy.Parallel" in str(outcome[0]) and len(configured.sent) == 2, "both metrics, and nobody else"
    assert dspy.settings.lm is configured


def test_dspys_own_ways_to_run_beside_each_other_stay_in_the_rollout(other):
    class Beside(Plain):
        def forward(self, text):
            pairs = [(self.a, {"text": f"{text}{n}"}) for n in range(3)]
            return dspy.Parallel(num_threads=3, disable_progress_bar=True)(pairs)[0]

    task = with_program(FakeTask(Beside()))
    forest = play_dspy(task, answered, task.examples("train")[:1])
    assert [r.error for r in forest.rollouts] == [None] and len(forest.calls) == 3 and other.sent == []
