"""Agents that fail in every way: typed, bounded in time, nothing credited, nothing left running."""

import asyncio
import json
import random
import subprocess
import sys
import threading
import time
from typing import Any

import httpx
import psutil
import pytest

from mmrl.algorithms import assign_credit
from mmrl.config import ALGO_SCHEMAS
from mmrl.errors import ConfigError
from mmrl.records import Example
from mmrl.rollout.plans import independent
from mmrl.system.portal import agent_loop
from tests.helpers.gateway import Scripted, agent_task, one, post, right, rolled_out

BODY = {"model": "m", "messages": [{"role": "user", "content": "Where?"}]}
CLIENT = """
import json, os, sys, urllib.request
example = json.load(sys.stdin)
def asked(url, key, body):
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Authorization": "Bearer " + key})
    return json.load(urllib.request.urlopen(request, timeout=60))
url, key = os.environ["MMRL_BASE_URL"], os.environ["MMRL_API_KEY"]
body = {"model": "m", "messages": [{"role": "user", "content": example["question"]}]}
text = asked(url + "/chat/completions", key, body)["choices"][0]["message"]["content"]
"""


def command(folder, code, **options):
    """A task whose agent is a script."""
    path = folder / "my_agent.py"
    path.write_text(CLIENT + code)
    return agent_task(command=f"{sys.executable} {path} {{base_url}}", **options)


def test_a_command_gets_its_example_and_prints_or_posts_its_result(tmp_path):
    engine = Scripted(lambda prompt: "0")
    rollout, (call,) = one(command(tmp_path, "print('thinking'); print(json.dumps(text))"), engine)
    assert (rollout.error, rollout.prediction, rollout.reward) == (None, "0", 1.0), rollout.error_message
    assert "What is 0?" in call.prompt_text
    posts = """
assert sys.argv[1] == url
result = os.environ["MMRL_RESULT_KEY"]
asked(url + "/mmrl/result", result, {"score": 0.75})
for path, key, body in (("/mmrl/result", result, 1), ("/mmrl/result", key, 1), ("/chat/completions", result, body)):
    try:
        asked(url + path, key, body)
    except urllib.error.HTTPError as error:
        print(error.code)
"""
    rollout, _ = one(command(tmp_path, posts, metric=None), engine)
    assert (rollout.prediction, rollout.reward) == ({"score": 0.75}, 0.75), rollout.error_message


def test_a_command_finds_no_other_server_in_its_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-of-the-user")
    monkeypatch.setenv("ANTHROPIC_BASE_URL", "http://elsewhere")
    code = "print(json.dumps({k: v for k, v in os.environ.items() if k[:6] in ('OPENAI', 'ANTHRO')}))"
    rollout, _ = one(command(tmp_path, code), Scripted(lambda prompt: "x"))
    assert rollout.prediction == {}
    rollout, _ = one(command(tmp_path, code, client_env=True), Scripted(lambda prompt: "x"))
    assert set(rollout.prediction) == {"OPENAI_API_KEY", "OPENAI_BASE_URL", "ANTHROPIC_API_KEY", "ANTHROPIC_BASE_URL"}
    assert "sk-of-the-user" not in json.dumps(rollout.prediction)


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("print('no json at all')", "the result is not JSON: b'no json at all'"),
        ("", "it ended without a result on stdout"),
        ("print('x' * 5_000_000)", "more than 4194304 bytes"),
        ("raise SystemExit('broken')", "exit code 1: broken"),
        ("sys.stdout.buffer.write(bytes(range(256))); os.kill(os.getpid(), 9)", "exit code -9"),
    ],
    ids=["garbage", "nothing", "endless", "exit", "killed"],
)
def test_a_command_that_fails_says_how(tmp_path, code, says):
    rollout, _ = one(command(tmp_path, code), Scripted(lambda prompt: "x"))
    assert (rollout.error, rollout.reward) == ("program", None) and says in rollout.error_message


def left_over(word):
    return [p for p in psutil.process_iter(["cmdline"]) if word in " ".join(p.info["cmdline"] or ())]


def test_what_a_command_starts_ends_with_it(tmp_path):
    """A child in its group, one in a session of its own, one whose parent has died; all hold its stdout open."""
    code = """
import subprocess
sleep = [sys.executable, "-c", "import time; time.sleep(600)", "LEFT-OVER"]
subprocess.Popen(sleep)
subprocess.Popen(sleep, start_new_session=True)
subprocess.Popen([sys.executable, "-c", f"import subprocess; subprocess.Popen({sleep!r}, start_new_session=True)"])
print(json.dumps("0"))
"""
    started = time.monotonic()
    rollout, _ = one(command(tmp_path, code), Scripted(lambda prompt: "x"))
    assert rollout.reward == 1.0, rollout.error_message
    rollout, _ = one(
        command(tmp_path, code + "import time; time.sleep(600)"), Scripted(lambda prompt: "x"), timeout_s=3.0
    )
    assert (rollout.error, rollout.reward) == ("timeout", None)
    assert not left_over("LEFT-OVER") and not left_over("my_agent.py") and time.monotonic() - started < 30


def test_what_a_command_starts_ends_with_a_process_that_is_killed(tmp_path):
    """Also what ignores SIGTERM, or has left the session."""
    hang = tmp_path / "hang.py"
    hang.write_text("import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)")
    starts = f"{sys.executable} {hang} KILLED & setsid {sys.executable} {hang} KILLED & wait"
    code = f"""
import asyncio, os
from mmrl.system.command import run_command
asyncio.run(run_command(["sh", "-c", {starts!r}], "", os.environ, "no mark"))
"""
    with subprocess.Popen([sys.executable, "-c", code]) as process:
        assert until(lambda: len(left_over("KILLED")) >= 3)
        process.kill()
    assert until(lambda: not left_over("KILLED"))


def until(true, seconds=20):
    ends = time.monotonic() + seconds
    while not (reached := true()) and time.monotonic() < ends:
        time.sleep(0.05)
    return reached


@pytest.mark.parametrize("fault", ["sleeps", "exits", "asks"])
def test_an_async_function_that_blocks_holds_up_itself_alone(fault):
    """Plain clients and pauses in async code are common, and the reply comes from the loop that they would block."""

    async def agent(example, base_url, api_key):
        headers = {"Authorization": f"Bearer {api_key}"}
        with httpx.Client(base_url=base_url, headers=headers, timeout=10) as asking:
            reply = asking.post("/chat/completions", json=BODY).json()
        if example["question"] == "bad" and fault != "asks":
            time.sleep(5) if fault == "sleeps" else sys.exit(3)
        return reply["choices"][0]["message"]["content"]

    questions = ("bad", "good", "good")
    examples = [Example(id=str(n), inputs={"question": q}, metadata={"gold": "0"}) for n, q in enumerate(questions)]
    started = time.monotonic()
    forest = rolled_out(agent_task(agent), Scripted(lambda prompt: "0"), independent(1), examples, timeout_s=2.0)
    took = time.monotonic() - started
    expected = {"sleeps": "timeout", "exits": "program", "asks": None}[fault]
    asyncio.run_coroutine_threadsafe(asyncio.sleep(0), agent_loop()).result(10)  # free for the next test
    assert [rollout.error for rollout in forest.rollouts] == [expected, None, None] and took < 4


def test_an_async_function_is_cancelled_at_its_time():
    ended = threading.Event()

    async def agent(example, base_url, api_key):
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    rollout, _ = one(agent_task(agent), Scripted(lambda prompt: "x"), timeout_s=0.3)
    assert rollout.error == "timeout" and ended.wait(5)


def test_a_thread_that_goes_on_after_the_end_reaches_nothing():
    said, ended = [], threading.Event()

    def hangs(example, base_url, api_key):
        with httpx.Client(headers={"Authorization": f"Bearer {api_key}"}, base_url=base_url) as asking:
            asking.post("/chat/completions", json=BODY)
            time.sleep(0.6)
            said.append(asking.post("/chat/completions", json=BODY))
        ended.set()

    rollout, calls = one(agent_task(hangs), Scripted(lambda prompt: "x"), timeout_s=0.3)
    assert (rollout.error, rollout.reward, len(calls)) == ("timeout", None, 1)
    assert ended.wait(10) and said[0].status_code == 401


def test_calls_that_an_agent_left_open_end_with_it():
    async def leaves(example, base_url, api_key):
        waits = asyncio.create_task(post(base_url, api_key))
        while not engine.waiting:
            await asyncio.sleep(0.01)
        waits.cancel()
        return "0"

    engine = Scripted(lambda prompt: "x", delay=60.0)
    rollout, calls = one(agent_task(leaves), engine)
    assert (rollout.error, rollout.reward) == ("program", None) and "read no reply" in rollout.error_message
    assert not calls and (engine.cancelled, engine.live) == (1, 0)


@pytest.mark.parametrize(
    ("result", "says"),
    [(object(), "not JSON"), (float("nan"), "finite"), ({"answer": 1}, "'score'")],
    ids=["object", "nan", "mapping"],
)
def test_a_result_that_is_none_is_a_failure(result, says):
    async def agent(example, base_url, api_key):
        await post(base_url, api_key)
        return result

    rollout, _ = one(agent_task(agent, metric=None), Scripted(lambda prompt: "x"))
    assert rollout.error in ("program", "reward") and rollout.reward is None and says in rollout.error_message


PICTURE = {"type": "image_url", "image_url": {"url": "data:x"}}
BAD: dict[str, Any] = {
    "many": {"n": 64},
    "images": {"messages": [{"role": "user", "content": [PICTURE]}]},
    "unknown": {"frobnicate": 1},
    "large": {"messages": [{"role": "user", "content": "x" * (5 << 20)}]},
}
"""Requests that are refused."""
FAULTS = ("never", "crash", "hang", "garbage", "streams", "stolen", "late", "swallow", *BAD)


class Faulty:
    """An agent that does what its example says; keys of ended rollouts are used again."""

    def __init__(self):
        self.old, self.done = [], {}

    async def __call__(self, example, base_url, api_key):
        number, fault = example["question"], example["fault"]
        # Without certificates, which take most of the time of two hundred clients.
        async with httpx.AsyncClient(base_url=base_url, timeout=20, verify=False) as asking:

            async def asked(key=api_key, **body):
                headers = {"Authorization": f"Bearer {key}"}
                return await asking.post("/chat/completions", json={**BODY, **body}, headers=headers)

            match fault:
                case "never":
                    return number
                case "crash":
                    await asked()
                    raise KeyError("crashed")
                case "hang":
                    await asked()
                    await asyncio.sleep(60)
                case "garbage":
                    await asked()
                    return {1, 2}
                case "streams":
                    for _ in range(3):
                        headers = {"Authorization": f"Bearer {api_key}"}
                        body = {**BODY, "stream": True}
                        async with asking.stream("POST", "/chat/completions", json=body, headers=headers):
                            pass
                case "stolen":
                    (await asked(key=self.old[0] if self.old else "mmrl-none")).raise_for_status()
                case "late":
                    self.done[number] = asyncio.create_task(self._later(base_url, api_key))
                case "swallow":
                    await asked(messages=[{"role": "user", "content": "BREAK"}])
                case _ if fault in BAD:
                    (await asked(**BAD[fault])).raise_for_status()
            answer = (await asked()).json()["choices"][0]["message"]["content"]
        self.old.append(api_key)
        return answer

    async def _later(self, base_url, api_key):
        await asyncio.sleep(0.5)
        await post(base_url, api_key)


class Breaks(Scripted):
    def reply(self, request):
        if "BREAK" in self.tokenizer.decode(list(request.prompt_ids)):
            raise RuntimeError("out of order")
        return request.session


def test_two_hundred_rollouts_with_every_fault():
    """No wrong credit, nothing left running, and every sound rollout as if it had been alone."""
    draws = random.Random(0)
    faults = [None if draws.random() < 0.2 else draws.choice(FAULTS) for _ in range(200)]
    faults[: len(FAULTS)] = FAULTS
    examples = [
        Example(id=f"q{n}", inputs={"question": f"q{n}", "fault": fault}, metadata={"gold": f"q{n}"})
        for n, fault in enumerate(faults)
    ]
    agent, engine, started, threads = Faulty(), Breaks(delay=0.01), time.monotonic(), threading.active_count()
    forest = rolled_out(agent_task(agent), engine, independent(1), examples, timeout_s=15.0)
    assert time.monotonic() - started < 60
    expected = dict.fromkeys(("never", "crash", "garbage", "stolen", *BAD), "program")
    expected |= {"hang": "timeout", "swallow": "engine"}
    for rollout, fault in zip(forest.rollouts, faults, strict=True):
        assert rollout.error == expected.get(fault), (fault, rollout.error_message)
        assert rollout.reward == (1.0 if rollout.error is None else None), fault
        calls = forest.path(rollout)
        assert all(call.example == rollout.example and call.text == rollout.example for call in calls), "no leak"
        assert len(calls) <= 4
    credit = assign_credit(forest, ALGO_SCHEMAS["grpo"].model_validate({"name": "grpo"}), 0)
    sound = {call.id for rollout in forest.rollouts if rollout.error is None for call in forest.path(rollout)}
    assert {entry.call for entry in credit.entries} <= sound
    assert (engine.live, engine.waiting) == (0, 0) and threading.active_count() <= threads + 3


def test_what_cannot_be_an_agent_is_refused_before_a_run():
    def problems(**options):
        with pytest.raises(ConfigError) as caught:
            agent_task(**options)
        return "\n".join(caught.value.problems)

    assert "task.agent: expected package.module:name of a function, or task.command" in problems()
    assert "task.inputs: missing" in problems(agent=right, inputs=())
    for modules, shown in ((("a", "a"), "a, a"), ((), "[]")):
        problem = f"task.modules: got {shown}, expected at least one name, and each once"
        assert problem in problems(agent=right, modules=modules)
    assert "expected a function (example, base_url, api_key)" in problems(agent=right)
    assert "there is no executable program 'no-such-program'" in problems(command="no-such-program x")
    assert "no command line" in problems(command="'")
    rules = ({"pattern": "x", "module": "other"},)
    said = problems(command="python x.py", rules=rules, frozen=("third",), metric="no_such:metric")
    assert "task.rules.0.module: got 'other'" in said and "task.frozen: got 'third'" in said


def test_a_metric_that_ends_the_process_is_the_metrics_fault():
    async def agent(example, base_url, api_key):
        await post(base_url, api_key, "policy/agent")

    rollout, _ = one(agent_task(agent, metric=lambda record, result: sys.exit(3)), Scripted(lambda prompt: "a"))
    assert (rollout.error, rollout.reward, rollout.error_message) == ("reward", None, "SystemExit: 3")
