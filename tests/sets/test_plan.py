"""Runs of a set: which ones are the same."""

from mmrl.cli.configs import configured
from mmrl.sets.plan import settings_digest


def test_another_endpoint_is_another_run():
    words = ["algo=mhgpo_rr", "task=hotpotqa"]
    at = [f"engine.endpoints.reranker.{setting}" for setting in ("url=http://127.0.0.1:9/v1", "key_env=null")]
    digests = [
        settings_digest(configured([*words, *more]), {})
        for more in ([], [*at, "engine.endpoints.reranker.model=small"], [*at, "engine.endpoints.reranker.model=big"])
    ]
    assert len(set(digests)) == 3
    assert settings_digest(configured([*words, "engine=vllm_server", "hardware=cpu2"]), {}) == digests[0]
