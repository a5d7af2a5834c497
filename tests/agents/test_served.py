"""Agents on their own served policy: they play as they were trained, and only the base URL is another."""

import asyncio
import importlib
import inspect
import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mmrl.cli import main
from mmrl.serve.policy import ServedPolicy, make_app
from mmrl.store.rundir import RunDir
from tests.agents.test_clients import CALLED, FOUND, react
from tests.helpers import TOP
from tests.helpers.gateway import Scripted, agent_task, one, tokenizer
from tests.helpers.servers import fetch_json, listening


def with_tool(prompt):
    """Thoughts that no prompt of the template would show again, and a call; then the answer."""
    return "<think>\nSo.\n</think>\n\nDone." if FOUND in prompt else f"<think>\nHm.\n</think>\n\n{CALLED}"


def planned(prompt):
    return "Look for Porto." if "Say what to look for" in prompt else with_tool(prompt)


def played(agent, example, url):
    result: Any = agent(example, url, "none")
    return asyncio.run(result) if inspect.iscoroutine(result) else result


@pytest.mark.parametrize(
    ("module", "package", "reply", "modules"),
    [
        ("openai_client", "openai", with_tool, ("agent",)),
        ("anthropic_client", "anthropic", with_tool, ("agent",)),
        ("langgraph_agent", "langgraph", with_tool, ("agent",)),
        ("agents_sdk", "agents", planned, ("planner", "worker")),
        ("dspy_agent", "dspy", react, ("agent",)),
    ],
)
@pytest.mark.parametrize("apart", [False, True], ids=["shared weights", "modules apart"])
def test_an_agent_plays_on_its_served_policy_as_it_was_trained(module, package, reply, modules, apart):
    """The same prompts token for token, its own thoughts and calls in them, and the same answer."""
    pytest.importorskip(package)
    agent = importlib.import_module(f"docs.agents.{module}").run
    task = agent_task(agent, metric=lambda record, result: float(result == "Done."), modules=modules)
    rollout, calls = one(task, Scripted(reply, tokenizer("qwen3")))
    assert (rollout.error, rollout.reward) == (None, 1.0), rollout.error_message
    engine = Scripted(reply, tokenizer("qwen3"))
    with listening(make_app(ServedPolicy(engine, engine.tokenizer, modules if apart else ()))) as url:
        assert played(agent, {"question": "What is 0?"}, f"{url}/v1") == "Done."
        assert fetch_json(f"{url}/health")[1]["requests"] == 0
    asked = [(request.module, request.prompt_ids) for request in engine.requests]
    assert asked == [(call.module if apart else "", call.prompt_ids) for call in calls]
    assert package == "dspy" or "Hm." in engine.prompts[-1], "thoughts stay as they were sampled"


def test_what_was_trained_with_tools_is_served_and_plays_as_it_was_evaluated(tmp_path, monkeypatch):
    """Greedy answers of the planner and worker, from the evaluation of a run and from `mmrl serve` of it."""
    sdk = pytest.importorskip("agents")
    from docs.agents import planner_worker

    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(TOP))
    names = {"agent": "run", "metric": "metric", "data.train": "TRAIN", "data.dev": "DEV"}
    trained = [
        *("train", "task=agent", "task.inputs=[question]", "task.modules=[planner,worker]", "model.path=tiny_agent"),
        *(f"task.{key}={planner_worker.__name__}:{name}" for key, name in names.items()),
        *("algo=mmgrpo", "algo.rollouts=4", "train.batch_size=4", "train.steps=1", "train.lr=5e-4"),
        *("hardware.threads=1", "run.dir=run", "run.doctor=false", "eval.items=8", "eval.temperature=0"),
    ]
    assert main(trained) == 0
    lines = RunDir(Path("run")).eval_path(1, "dev").read_text().splitlines()
    evaluated = {item["id"]: item["predictions"] for item in map(json.loads, lines)}
    team = planner_worker.team

    def greedy(model):
        players = team(model)
        for player in players:
            player.model_settings = sdk.ModelSettings(temperature=0)
        return players

    monkeypatch.setattr(planner_worker, "team", greedy)
    words = [sys.executable, "-m", "mmrl", "serve", "policy=run", "port=0", "hardware.threads=1"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as server:
        try:
            url = re.findall(r"http://\S+/v1", server.stdout.readline())[0]
            answers = {
                record["id"]: [asyncio.run(planner_worker.run(record, url, "none"))]
                for record in planner_worker.DEV
                if record["id"] in evaluated
            }
        finally:
            server.send_signal(signal.SIGTERM)
    assert answers == evaluated and len(answers) == 8
