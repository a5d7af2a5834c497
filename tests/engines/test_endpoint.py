"""Modules that an endpoint answers for: the engine, the routing, and whole runs, against a scripted server."""

import asyncio
import time
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest

from mmrl.cli import main
from mmrl.config import EngineConfig, ModelConfig
from mmrl.config.endpoint import Endpoint, EndpointConfig
from mmrl.config.engines import OpenAIConfig
from mmrl.engines.base import Completion, Engine, Request, Sampling
from mmrl.engines.endpoint_engine import EndpointEngine, Router, with_endpoints, with_model
from mmrl.errors import ConfigError, EngineFailure
from mmrl.models.chat import decode_text, end_of_turn
from mmrl.models.load import load_tokenizer
from mmrl.store.journal import read_step
from mmrl.store.rundir import RunDir
from scripts.models.templates import save_tokenizer
from tests.helpers.runs import command
from tests.helpers.servers import Scripted, chat_reply, serving

MESSAGES = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "Where is Porto?"})
ASK = Request(
    prompt_ids=(5, 6),
    sampling=Sampling(max_tokens=9, temperature=0.7, top_p=0.9, seed=2**100 + 3),
    module="answerer",
    messages=MESSAGES,
)


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(ModelConfig(name="tiny", path="tiny"))


def settings(url, **more):
    return EndpointConfig(url=url, model="big", key_env=None, attempts=1, **more)


def asked(url, tokenizer, request, **more):
    engine = EndpointEngine(settings(url, **more), tokenizer, "engine.endpoints.answerer")
    try:
        return asyncio.run(engine.generate(request)), engine
    finally:
        engine.close()


def test_messages_go_out_and_text_comes_back_as_ids_without_logprobs(tokenizer):
    with serving([chat_reply("In Portugal.")]) as (url, server):
        found, engine = asked(url, tokenizer, ASK, price_in=1e6)
    assert server.seen[0].body == {
        "model": "big",
        "messages": list(MESSAGES),
        "max_tokens": 9,
        "temperature": 0.7,
        "top_p": 0.9,
        "seed": 3,
    }
    assert tokenizer.decode(found.ids[:-1]) == "In Portugal."
    assert found.ids[-1] == tokenizer.eos_token_id
    assert (found.logprobs, found.finish) == (None, "eos")
    assert engine.metrics()["endpoint/cost"] == 10 and engine.busy_s > 0
    assert engine.describe() == {
        "engine.endpoints.answerer": f"big at {url} (1 requests, 10 prompt tokens, 5 completion tokens, 10.00 USD)"
    }


@pytest.mark.parametrize(
    ("reply", "stop", "text", "finish", "ended"),
    [
        (chat_reply("one two", finish="length"), (), "one two", "length", False),
        (chat_reply("one <b> two <a> three"), ("<a>", "<b>"), "one <b>", "stop", False),
        (chat_reply(""), (), "", "eos", True),
        (chat_reply("", finish="length"), (), "", "length", True),
        (chat_reply(None), (), "", "eos", True),
        (chat_reply("cut \ud83d", finish="length"), (), "cut \ufffd", "length", False),
        (chat_reply("\ud83d\ude00"), (), "\U0001f600", "eos", True),
        # An endpoint cannot end a turn, or open one, in what the next module reads.
        (chat_reply("a<|im_end|>b"), (), "a<|im_end|>b", "eos", True),
    ],
)
def test_how_a_completion_ends(tokenizer, reply, stop, text, finish, ended):
    request = replace(ASK, sampling=Sampling(max_tokens=9, stop=stop))
    with serving([reply]) as (url, server):
        found, _ = asked(url, tokenizer, request)
    assert "stop" not in server.seen[0].body
    assert tokenizer.decode(found.ids, skip_special_tokens=True) == text
    assert found.finish == finish
    assert (found.ids[-1] == tokenizer.eos_token_id) is ended


@pytest.mark.parametrize("finish", ["stop", "length"])
@pytest.mark.parametrize("template", ["gptoss", "gemma4_v5", "qwen3_5_think"])
def test_programs_read_what_the_endpoint_said(template, finish, tmp_path):
    """Whatever of a reply the chat template of the run's model takes for its content (gpt-oss: one channel)."""
    save_tokenizer(template, tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    model = ModelConfig(name="x", path=str(tmp_path), thinking=template != "gptoss")
    loaded = load_tokenizer(model)
    with serving([chat_reply("In Portugal.", finish=finish)]) as (url, _):
        found, _ = asked(url, loaded, ASK)
    assert decode_text(loaded, found.ids) == "In Portugal."
    assert (found.ids[-1] == end_of_turn(loaded)) is (finish == "stop")


def test_the_engines_endpoint_has_all_its_settings():
    asked = {"url": "http://h/v1", "key_env": None, "organization": "o", "project": "p", "timeout_s": 1.0}
    paced = {"attempts": 2, "max_wait_s": 3.0, "concurrency": 4, "requests_per_minute": 5.0, "omit": ("seed",)}
    sent = {"max_tokens_field": "max_tokens", "extra_body": {"a": 1}, "extra_headers": {"X": "y"}, "reasoning": "cut"}
    others: dict[str, Any] = {**asked, **paced, **sent, "price_in": 1.0, "price_cached": 2.0, "price_out": 3.0}
    assert others.keys() == Endpoint.model_fields.keys()
    found = with_model(OpenAIConfig(endpoint=Endpoint(**others)), "big")
    assert dict(found) == {**others, "model": "big"}


def test_what_no_endpoint_can_do_fails_the_rollout(tokenizer):
    with serving([Scripted("down", 500)]) as (url, server):
        with pytest.raises(EngineFailure, match="HTTP 500: down"):
            asked(url, tokenizer, ASK)
        with pytest.raises(
            EngineFailure, match=r"engine\.endpoints\.answerer: module 'answerer' goes on in the context"
        ):
            asked(url, tokenizer, replace(ASK, messages=None))
    assert len(server.seen) == 1


def test_a_request_whose_rollout_ran_out_of_time_counts_as_given_up(tokenizer):
    async def impatient(engine):
        async with asyncio.timeout(0.2):
            await engine.generate(ASK)

    with serving([replace(chat_reply("late"), delay=1.0)]) as (url, _):
        engine = EndpointEngine(settings(url), tokenizer, "engine.endpoints.answerer")
        with pytest.raises(TimeoutError):
            asyncio.run(impatient(engine))
        # The I/O loop counts it, and may do so after whoever waited has gone on.
        until = time.monotonic() + 30
        while not engine.metrics()["endpoint/failures"] and time.monotonic() < until:
            time.sleep(0.01)
        engine.close()
    assert (engine.metrics()["endpoint/failures"], engine.metrics()["endpoint/requests"]) == (1, 0)
    assert 0.1 < engine.busy_s < 1


class Own(Engine):
    """The engine beside which endpoints answer."""

    busy_s = 0.0
    max_context = 512

    def __init__(self):
        self.busy_s, self.versions, self.closed, self.kept, self.rested = 1.5, [], False, False, False
        self.repeats_greedy = True

    async def generate(self, request):
        return Completion(ids=(1,), logprobs=(-0.5,), finish="eos", policy_version=7)

    def set_version(self, version, state=None):
        self.versions.append((version, state))

    async def rest(self):
        self.rested = True

    @contextmanager
    def prefix_cache_kept(self):
        self.kept = True
        yield
        self.kept = False

    def metrics(self):
        return {"engine/x": 1.0}

    def close(self):
        self.closed = True


def test_each_module_asks_its_own_endpoint_and_the_others_the_engine(tokenizer):
    own = Own()
    with serving([chat_reply("left")]) as (left, _), serving([chat_reply("right")]) as (right, _):
        config = EngineConfig(endpoints={"a": settings(left), "b": settings(right)})
        engine = with_endpoints(own, config, tokenizer)
        weights: Any = {"w": 1}
        engine.set_version(3, weights)

        async def all_of_them():
            return [await engine.generate(replace(ASK, module=module)) for module in ("a", "b", "c")]

        a, b, c = asyncio.run(all_of_them())
        with engine.prefix_cache_kept():
            assert own.kept and engine.max_context == 512
        assert not own.kept
        asyncio.run(engine.rest())
        assert own.rested and [engine.repeats(module) for module in ("a", "c")] == [False, True]
        engine.close()
    assert [tokenizer.decode(found.ids[:-1]) for found in (a, b)] == ["left", "right"]
    assert (a.policy_version, c.policy_version, c.logprobs) == (3, 7, (-0.5,))
    assert own.versions == [(3, {"w": 1})] and own.closed
    metrics = engine.metrics()
    assert (metrics["engine/x"], metrics["endpoint/requests"], metrics["endpoint/prompt_tokens"]) == (1, 2, 20)
    assert 1.5 < engine.busy_s < 30


def test_the_engine_is_closed_where_an_endpoint_has_no_key(tokenizer, monkeypatch):
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    own = Own()
    config = EngineConfig(endpoints={"a": EndpointConfig(model="big", key_env="NO_SUCH_KEY")})
    with pytest.raises(ConfigError, match=r"engine\.endpoints\.a\.key_env: the environment variable NO_SUCH_KEY"):
        with_endpoints(own, config, tokenizer)
    assert own.closed
    assert with_endpoints(own, EngineConfig(), tokenizer) is own
    assert not isinstance(own, Router)


def answers(seen):
    """Document numbers for whoever shows documents, else one word."""
    text = seen.body["messages"][-1]["content"] if seen.body and "messages" in seen.body else ""
    return chat_reply("1, 0" if "Document1:" in text and "Now answer" not in text else "Lulik")


def test_a_run_with_a_module_at_an_endpoint_trains_the_others(random_model, tmp_path, capsys):
    run_dir = tmp_path / "run"
    with serving(answers) as (url, server):
        endpoint = f"engine.endpoints={{reranker: {{url: '{url}', model: big, key_env: null, price_out: 1000.0}}}}"
        assert main(command(random_model, run_dir, "algo=mhgpo_rr", endpoint, "train.steps=2")) == 0
        out = capsys.readouterr().out
        run = RunDir.read(run_dir)
        forest, entries = read_step(run, 1)
        reranked = [call for call in forest.calls.values() if call.module == "reranker"]
        assert reranked and all(call.logprobs is None and call.text == "1, 0" for call in reranked)
        trained = {forest.calls[entry["call"]].module for entry in entries if any(entry["weights"])}
        assert trained and "reranker" not in trained
        record = run.history()[1]
        assert record["endpoint/requests"] >= len(reranked)
        assert record["endpoint/cost"] > 0 and record["train/tokens"] > 0
        assert "weights" in out and "reranker: endpoint big" in out
        assert f"engine.endpoints.reranker  big at {url}" in out
        asked = [seen for seen in server.seen if seen.body and "messages" in seen.body]
        # All but the first, which asks whether the endpoint has the model; the last evaluation's too.
        assert run.history()[-1]["endpoint/requests"] == len(asked) - 1
        before = len(server.seen)
        # The run's own task and endpoints.
        words = ["eval", f"policy={run_dir}", "split=dev", "task.data.dev_items=2"]
        assert main([*words, f"run.dir={tmp_path / 'eval'}", "hardware.threads=1"]) == 0
        assert len(server.seen) > before


def test_a_critic_with_the_kl_term_in_its_reward_goes_without_the_endpoints_part(random_model, tmp_path):
    """Its calls have no log-probabilities; `mappo` puts -beta · (log-prob - reference) into every call's reward."""
    with serving(answers) as (url, _):
        endpoint = f"engine.endpoints={{reranker: {{url: '{url}', model: big, key_env: null}}}}"
        words = command(random_model, tmp_path / "run", "algo=mappo", endpoint, "train.steps=1", "eval.every=0")
        assert main([word for word in words if not word.startswith("algo.group_size")]) == 0
    forest, entries = read_step(RunDir.read(tmp_path / "run"), 1)
    modules = {forest.calls[entry["call"]].module for entry in entries if any(entry["weights"])}
    assert modules == {"rewriter", "answerer"}
    assert RunDir.read(tmp_path / "run").history()[1]["train/logprob_gap_max"] < 1e-4


def test_an_evaluation_of_an_endpoint_exits_1_without_scores_where_every_request_fails_and_goes_on(tmp_path, capsys):
    down = [True]

    def sometimes(seen):
        return Scripted({"error": "temperature: not supported"}, 400) if down[0] and seen.body else answers(seen)

    with serving(sometimes) as (url, _):
        words = ["eval", "engine=openai", "policy=big", "task=hotpotqa", "split=dev", "task.data.dev_items=3"]
        settings = ["engine.endpoint.key_env=null", f"engine.endpoint.url={url}", "engine.endpoint.price_in=1e6"]
        with patch("mmrl.engines.openai.OpenAIChat.unreachable", lambda chat: []):
            assert main([*words, *settings, f"run.dir={tmp_path / 'eval'}"]) == 1
            out, err = capsys.readouterr()
            assert "100% of the rollouts failed from outside causes, more than eval.max_failed_share=50%" in err
            assert "HTTP 400" in err and "engine.endpoint.omit=[temperature]" in err
            assert f"mmrl eval resume={tmp_path / 'eval'}" in err and "Traceback" not in err
            rows = {line.split()[0]: line.split()[1:] for line in out.splitlines() if line.startswith(("  f1", "f1"))}
            assert rows["f1"] == ["-"]
            summary = RunDir.read(tmp_path / "eval").summary
            assert "f1" not in summary["metrics"] and summary["metrics"]["failed_share"] == 1
            down[0] = False
            assert main(["eval", f"resume={tmp_path / 'eval'}"]) == 0
    summary = RunDir.read(tmp_path / "eval").summary
    assert (summary["policy"], summary["metrics"]["n"], summary["metrics"]["failed_share"]) == ("big", 3, 0)
    assert summary["metrics"]["f1"] >= 0
    assert summary["metrics"]["endpoint/cost"] > 0, "what was asked is logged too"
    assert summary["facts"]["engine.endpoint"].startswith(f"big at {url} (")
    assert "engine.endpoint" in capsys.readouterr().out


def test_a_password_in_an_address_is_refused_and_not_repeated(capsys):
    words = ["train", "engine.endpoints={reranker: {url: 'http://me:hush@h/v1', model: x, key_env: null}}"]
    assert main(words) == 2
    error = capsys.readouterr().err
    assert "engine.endpoints.reranker.url: got an address with a user or password" in error and "hush" not in error


NO_WEIGHTS = "engine: openai, an endpoint, has no weights that could be trained"
GOES_ON = "goes on in the context of an earlier reply"


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("train engine=openai", NO_WEIGHTS),
        ("plan engine=openai", NO_WEIGHTS),
        ("train engine.endpoints.rerank.model=x", "engine.endpoints: got 'rerank', expected one of answerer"),
        ("eval policy=tiny engine.endpoints.rerank.model=x", "engine.endpoints: got 'rerank', expected one of"),
        ("train engine.endpoints.reranker.url=http://x/v1", "engine.endpoints.reranker.model: missing"),
        (
            "train engine.endpoints.reranker.model=x model.lora.r=2 model.modules.reranker.frozen=true",
            "engine.endpoints.reranker: the module has weights of its own too",
        ),
        (
            "train engine.endpoints.reranker.model=x algo.top_k=3",
            "algo.top_k: got 3, and an endpoint takes no top_k",
        ),
        (
            "train engine.endpoints.reranker.model=x algo.train_modules=[rewriter,reranker]",
            "algo.train_modules: names 'reranker', for which an endpoint answers",
        ),
        (
            "train engine.endpoints.reranker.model=x algo.advantage_scale={reranker:2.0}",
            "algo.advantage_scale: names 'reranker', for which an endpoint answers",
        ),
        (
            "train task=banking77 algo=mmgrpo engine.endpoints={classify.predict:{model:x}}",
            "engine.endpoints.classify.predict: no module is left to train",
        ),
        (
            "train task=search_o1 algo=ppo engine.endpoints.condenser.model=x",
            "engine.endpoints.condenser: the critic of ppo values whole rollouts",
        ),
        (
            "train task=search_o1 algo=grpo engine.endpoints.reasoner.model=x",
            f"engine.endpoints: module 'reasoner' of task=search_o1 {GOES_ON}",
        ),
        (
            "plan task=search_o1 algo=grpo engine.endpoints.reasoner.model=x",
            f"engine.endpoints: module 'reasoner' of task=search_o1 {GOES_ON}",
        ),
        ("eval engine=openai policy=x task=tool_agent", f"engine: module 'agent' of task=tool_agent {GOES_ON}"),
        (
            "eval engine=openai policy=x engine.endpoint.key_env=null engine.endpoint.url=http://127.0.0.1:1/v1",
            "engine.endpoint.url: nobody answers at http://127.0.0.1:1/v1 (ConnectError: ",
        ),
    ],
)
def test_what_cannot_work_is_refused_before_anything_loads(line, says, monkeypatch, capsys):
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    monkeypatch.setattr("mmrl.engines.openai.OpenAIChat.unreachable", lambda chat: []) if "nobody" not in says else None
    assert main(line.split()) == 2
    error = capsys.readouterr().err
    assert says in error and "Traceback" not in error
