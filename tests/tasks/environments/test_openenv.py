"""Environments behind real OpenEnv servers: its own example, started and ended here, and servers at an address."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from mmrl.errors import ConfigError
from mmrl.rollout.plans import independent
from mmrl.system.child_process import ChildProcess
from mmrl.system.portal import Job, rollout_loop
from mmrl.tasks.base import Context
from tests.helpers.gateway import Scripted, one, rolled_out, tokenizer
from tests.helpers.openenv import PYTHON, needs_openenv, written
from tests.helpers.servers import Scripted as Page
from tests.helpers.servers import serving
from tests.helpers.worlds import actions, environment_task, tool_call
from tests.tasks.environments.test_replay import Pathwise, forked

pytestmark = needs_openenv


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("openenv")
    command = [PYTHON, "-m", "uvicorn", f"{written(folder)}:app", "--app-dir", str(folder), "--log-level", "warning"]
    server = ChildProcess(lambda port: [*command, "--port", str(port)], log=folder / "log", timeout_s=120)
    server.start()
    yield server.url
    server.stop()


@pytest.fixture(scope="module")
def own_example(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A task around the example that OpenEnv's own command writes, and whose server has one session."""
    folder = tmp_path_factory.mktemp("example")
    command = [str(Path(PYTHON).with_name("openenv")), "init", "my_env", "-o", str(folder)]
    subprocess.run(command, check=True, capture_output=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        task = served("my_env", environment_python=PYTHON)
        yield task
        task.close()


def served(where: str, **options: Any) -> Any:
    """A task around an OpenEnv server."""
    return environment_task(None, environment=f"openenv:{where}", **options)


HELLO = (tool_call("step", message="hello"), tool_call("step", message="hi"))


def test_openenvs_own_example_is_played(own_example: Any) -> None:
    """It echoes, and a message is worth a tenth of its length: TRL's examples take the last step's."""
    engine = actions(*HELLO)
    rollout, _ = one(own_example, engine)
    assert (rollout.error, rollout.reward) == (None, pytest.approx(0.2))
    assert "Count." in engine.prompts[0] and '{"echoed_message": "My Env environment ready!"' in engine.prompts[0]
    assert '<tool_response>\n{"echoed_message": "hello", "message_length": 5}\n</tool_response>' in engine.prompts[1]
    assert "original_message" not in engine.prompts[1], "metadata are not for the model"
    (tool,) = own_example.worlds[""].tools
    assert tool["function"]["parameters"]["properties"] == {
        "message": {"description": "Message to echo back", "type": "string"}
    }


def test_rollouts_wait_for_the_only_session_of_a_server(own_example: Any) -> None:
    engine = actions(*HELLO)
    forest = rolled_out(own_example, engine, independent(6))
    assert [rollout.reward for rollout in forest.rollouts] == pytest.approx([0.2] * 6)
    assert engine.live == 0


def test_a_server_that_is_killed_fails_its_rollouts_and_is_started_again(own_example: Any) -> None:
    world = own_example.worlds[""]

    def answer(prompt: str) -> str:
        if 'echoed_message": "hello' in prompt:
            psutil.Process(world._process.pid).kill()
            time.sleep(0.2)
        return HELLO[0]

    rollout, _ = one(own_example, Scripted(answer=answer, tokenizer=tokenizer("qwen3")))
    assert (rollout.error, rollout.reward) == ("tool", None) and "closed the connection" in rollout.error_message
    rollout, _ = one(own_example, actions(*HELLO))
    assert rollout.reward == pytest.approx(0.2)
    process = psutil.Process(world._process.pid)
    own_example.close()
    assert not process.is_running()


def test_a_fork_inside_an_episode_is_replayed_in_a_session_of_its_own(url: str) -> None:
    """4 is reached by all; then 3 is added twice, or 4 or 5 once: the counter ends the episode at 8."""
    task = served(f"{url}/counter")
    engine = Pathwise(tool="step")
    forest = forked(task, engine)
    assert [rollout.error for rollout in forest.rollouts] == [None] * 3
    assert [len(forest.path(rollout)) for rollout in forest.rollouts] == [4, 3, 3]
    assert [rollout.reward for rollout in forest.rollouts] == pytest.approx([0.3, 0.4, 0.5])
    assert '{"count": 7, "seed": null}' in engine.prompts[-1]


def test_each_steps_reward_may_be_its_turns(url: str) -> None:
    task = served(f"{url}/counter", step_rewards="sum")
    twice = tool_call("step", step=1) + tool_call("step", step=2)
    calls = (twice, tool_call("step", step=0), tool_call("step", step=5))
    rollout, path = one(task, actions(*calls), examples=task.examples("train")[3:4], reward_set="turn", max_tokens=128)
    assert [call.turn_reward for call in path] == pytest.approx([1.3, 0.0, None])
    assert rollout.reward == pytest.approx(0.5), "of the last turn; with the others' 1.8 in all"
    rollout, _ = one(task, actions(*calls), examples=task.examples("train")[3:4], max_tokens=128)
    assert rollout.reward == pytest.approx(1.8)
    assert served(f"{url}/counter").reward_sets == ("outcome",)


def test_an_environment_that_does_not_repeat_itself_fails_the_fork(url: str) -> None:
    task = served(f"{url}/counter", rows=[{"id": n, "target": 99} for n in range(6)])
    forest = forked(task, Pathwise(tool="step"))
    assert [rollout.error for rollout in forest.rollouts] == [None, "replay", "replay"]


def test_all_episodes_of_a_record_have_its_seed(url: str) -> None:
    rows = [{"id": "a"}, {"id": "b"}, {"id": "c", "seed": 7}]
    task = served(f"{url}/counter", rows=rows)
    engine = actions()
    rolled_out(task, engine, independent(2), task.examples("train"))
    seeds = [prompt.rpartition('"seed": ')[2].partition("}")[0] for prompt in engine.prompts]
    assert len(set(seeds)) == 3 and sorted(map(seeds.count, seeds)) == [2] * 6 and "7" in seeds


def test_what_an_action_does_wrong_is_an_observation(url: str) -> None:
    task = served(f"{url}/counter")
    wrong = (tool_call("step", step=-1), tool_call("step", stride=1), tool_call("step", step="x"), tool_call("walk"))
    engine = actions(*wrong, tool_call("step", step=2))
    rollout, _ = one(task, engine)
    assert (rollout.error, rollout.reward, rollout.metrics["tool_errors"]) == (None, pytest.approx(0.2), 4)
    said = ("step must not be negative", "stride: Extra inputs are not permitted", "unable to parse", "walk not found")
    assert all(text in prompt for text, prompt in zip(said, engine.prompts[1:], strict=False))


def test_an_environment_with_tools_has_those(url: str) -> None:
    task = served(f"{url}/tools", metric=lambda record, prediction: float(prediction["text"] == "I am done."))
    assert list(task.worlds[""].names) == ["add", "fail"]
    engine = actions(tool_call("add", step=2), tool_call("add", step=2), tool_call("fail", text="oh"))
    rollout, _ = one(task, engine)
    assert (rollout.error, rollout.reward, rollout.metrics["tool_errors"]) == (None, 1.0, 1)
    assert "<tool_response>\n4\n</tool_response>" in engine.prompts[2] and "{'error': " in engine.prompts[3]
    unrewarded, _ = one(served(f"{url}/tools"), actions(tool_call("add", step=2)))
    assert unrewarded.error == "reward", "its steps never have one"


@pytest.mark.parametrize("place", ["counter", "few"])
def test_64_at_once(url: str, place: str) -> None:
    """Also of two sessions, one after another."""
    task = served(f"{url}/{place}")
    engine = actions(*[tool_call("step", step=1)] * 4)
    forest = rolled_out(task, engine, independent(64), task.examples("train")[4:5])
    assert [rollout.reward for rollout in forest.rollouts] == pytest.approx([1.1] * 64)


def test_sessions_that_others_have_fail_a_rollout(url: str) -> None:
    ours, theirs = served(f"{url}/few"), served(f"{url}/few").worlds[""]
    taken = [Job(theirs.open(Context), rollout_loop()).ended.result() for _ in range(2)]
    rollout, _ = one(ours, actions())
    assert rollout.error == "tool" and "2/2 sessions active" in rollout.error_message
    for session in taken:
        Job(session.close(), rollout_loop()).ended.result()
    assert one(ours, actions())[0].error is None


def refusal(environment: str, **options: Any) -> str:
    with pytest.raises(ConfigError) as refused:
        environment_task(None, environment=environment, **options)
    return str(refused.value)


def test_what_is_no_server_of_openenv_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "task.environment: openenv:http://127.0.0.1:1: ConnectError" in refusal("openenv:http://127.0.0.1:1")
    for page in (Page("hello"), Page({"action": None}), Page({"action": {"properties": {"x": {}}}})):
        with serving([page]) as (url, _):
            said = refusal(f"openenv:{url}")
        assert "expected a server of OpenEnv" in said
    assert "expected openenv:http(s)://host:port or openenv:package" in refusal("openenv:ftp://host")
    said = refusal("openenv:no_such_env", environment_python=PYTHON)
    assert "no package of that name" in said and "pip install" in said
    assert 'Attribute "app" not found' in refusal("openenv:json", environment_python=PYTHON)
    assert "cannot run /no/python" in refusal("openenv:json", environment_python="/no/python")
    (tmp_path / "lacking").mkdir()
    (tmp_path / "lacking" / "__init__.py").write_text("import no_such_module_of_its_server")
    monkeypatch.chdir(tmp_path)
    assert "task.environment_python=PYTHON names an interpreter" in refusal("openenv:lacking")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install 'mmrl[openenv]'" in refusal("openenv:http://127.0.0.1:1")
