"""Judge and external model behind a real OpenAI-compatible server. Run by: make test-vllm.

vLLM's CPU build with the tiny model answers something, but never a verdict.

Its server is its own: one that `test_vllm` leaves running is dead once `test_vllm_colocated` has used vLLM in-process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mmrl.config import EndpointConfig, JudgeConfig
from mmrl.config.engines import TransformersConfig, VllmServerConfig
from mmrl.engines import Completion, EngineSetup, Request, Sampling, build_engine
from mmrl.engines.endpoint_engine import with_endpoints
from mmrl.models.chat import decode_text, render_prompt
from mmrl.models.load import load_model, load_tokenizer
from mmrl.models.selfcheck import CheckRow, plain_logprobs
from mmrl.run.distill import ScoringServer
from tests.helpers.engines import PYTHON, TINY, needs_vllm, serving
from tests.helpers.programs import filled, make, make_dspy, play, play_dspy

pytestmark = [pytest.mark.vllm, needs_vllm]

SEARCH = "<think> look </think>\n<search> Lisbon </search>"
ANSWER = "<think> so </think>\n<answer> Tagus </answer>"


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    with serving(VllmServerConfig(name="vllm_server", python=PYTHON), tmp_path_factory.mktemp("vllm")) as (engine, _):
        url = f"{engine.replicas[0].process.url}/v1"
        yield {"url": url, "model": "base", "key_env": None, "attempts": 2, "timeout_s": 300.0}


@pytest.mark.parametrize(
    ("reward_set", "texts", "turn_rewards"),
    [("judge_outcome", [ANSWER], [None]), ("judge_turn", [SEARCH, ANSWER], [0, None])],
)
def test_a_judge_that_talks_nonsense_is_asked_again_then_scored_by_rule_and_counted(
    reward_set: str, texts: list[str], turn_rewards: list[float | None], endpoint: dict[str, Any], tmp_path: Path
) -> None:
    judge = JudgeConfig(**endpoint, max_tokens=12, retries=1, temperature=0.0, on_unreadable="rule")
    task = make("search_agent", tmp_path, reward=reward_set, judge=judge, max_tokens=300)
    rollout, calls, _ = play(task, texts, reward_set)
    assert (rollout.error, rollout.reward, rollout.metrics["em"]) == (None, 0.0, 1.0)
    assert [call.turn_reward for call in calls] == turn_rewards
    assert (rollout.metrics["judge_asked"], rollout.metrics["judge_fallback"]) == (2, 1)
    usage = task.judge.chat.usage
    assert usage.prompt_tokens > 2 * 300, "the server has read both prompts"
    tokens = f"{usage.prompt_tokens} prompt tokens, {usage.completion_tokens} completion tokens"
    counts = f"(2 requests, {tokens})"
    assert task.describe()["judge"] == f"base at {endpoint['url']} {counts}"


def test_a_judge_whose_context_is_too_short_fails_from_outside_with_its_words(
    endpoint: dict[str, Any], tmp_path: Path
) -> None:
    judge = JudgeConfig(**endpoint, max_tokens=2000)
    task = make("search_agent", tmp_path, reward="judge_outcome", judge=judge, max_tokens=300)
    rollout, _, _ = play(task, [ANSWER], "judge_outcome")
    assert (rollout.error, rollout.reward) == ("judge", None)
    assert "HTTP 400" in rollout.error_message and "1024" in rollout.error_message
    assert task.describe()["judge"].endswith("(1 failures)")


def test_a_server_is_a_teacher_of_the_same_weights(endpoint: dict[str, Any]) -> None:
    """Its first model, without adapter, scores token ids as the model's plain forward does."""
    tokenizer, teacher = load_tokenizer(TINY), ScoringServer(endpoint["url"])
    assert teacher.check(tokenizer) == 1024
    rows = [
        CheckRow(render_prompt(tokenizer, [{"role": "user", "content": "Who?" * n}]), (5, 6, 7)[:n]) for n in (1, 2, 3)
    ]
    calls = [row.call(number) for number, row in enumerate(rows)]
    for call, expected in zip(calls, plain_logprobs(load_model(TINY, "cpu"), rows), strict=True):
        # One by one: a server with adapters, of the CPU build 0.31, ends where several are scored in one batch.
        (found,) = teacher.score([call])
        assert found == pytest.approx(expected, abs=1e-4)


def test_papillons_external_model_answers_and_a_judge_without_a_verdict_is_never_credited(
    endpoint: dict[str, Any],
) -> None:
    judge = {**endpoint, "max_tokens": 12, "retries": 1, "temperature": 0.0}
    task = make_dspy("papillon", external=endpoint, judge=judge)
    heard = []

    def answer(request: Any) -> str:
        if request.module == "respond_to_query":
            heard.append("".join(map(chr, request.prompt_ids)))
            return filled(response="yes")
        return filled(reasoning="so", llm_request="Who leads it?")

    (rollout,) = play_dspy(task, answer, task.examples("dev")[:1]).rollouts
    assert (rollout.error, rollout.reward) == ("judge", None)
    assert "no readable reply in 2 tries" in rollout.error_message
    facts = task.describe()
    assert "(1 requests, " in facts["external model"]
    assert "(2 requests, " in facts["judge"]
    assert task.external.usage.completion_tokens > 0
    assert "Who leads it?" in heard[0]


def test_the_server_is_looked_at_before_a_run(endpoint: dict[str, Any]) -> None:
    assert make_dspy("papillon", external=endpoint, judge=endpoint).server_problems() == []
    wrong = {**endpoint, "model": "other"}
    found = make_dspy("papillon", external=endpoint, judge=wrong).server_problems()
    assert [said.partition(": ")[0] for said in found] == ["task.judge.model"]
    assert "HTTP 404" in found[0] and "other" in found[0]


def test_a_module_at_an_endpoint_says_what_the_embedded_engine_says(endpoint: dict[str, Any]) -> None:
    """Greedy text of the same weights, through messages and chat completions."""
    tokenizer = load_tokenizer(TINY)
    own = build_engine(
        TransformersConfig(name="transformers"), load_model(TINY, "cpu"), tokenizer, EngineSetup(threads=1)
    )
    config = TransformersConfig(name="transformers", endpoints={"answerer": EndpointConfig(**endpoint)})
    engine = with_endpoints(own, config, tokenizer)
    system = "Answer the question from the documents, as briefly as possible."
    asked = [
        ({"role": "system", "content": system}, {"role": "user", "content": f"Where was {name} born?"})
        for name in ("Lenin Betal", "Verin Somel", "Tijel Gefas")
    ]

    async def both() -> list[tuple[Completion, Completion]]:
        found = []
        for messages in asked:
            request = Request(
                prompt_ids=render_prompt(tokenizer, messages),
                sampling=Sampling(max_tokens=16, temperature=0.0),
                messages=messages,
            )
            engine.enter()
            here = await engine.generate(request)
            there = await engine.generate(replace(request, module="answerer"))
            engine.leave()
            found.append((here, there))
        return found

    try:
        pairs = asyncio.run(both())
    finally:
        engine.close()
    for here, there in pairs:
        assert there.logprobs is None and here.logprobs is not None
        assert decode_text(tokenizer, here.ids) == decode_text(tokenizer, there.ids)
        assert here.finish == there.finish
