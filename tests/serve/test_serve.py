"""A policy behind OpenAI's protocol: called by the clients that people use, and equal to mmrl's own engine."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import io
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import openai
import pytest

from mmrl.cli import main
from mmrl.commands.serve import ServeArguments, snippets
from mmrl.config import ModelConfig
from mmrl.config.engines import TransformersConfig
from mmrl.engines import EngineSetup, build_engine
from mmrl.engines.base import Completion, Engine, Request, Sampling
from mmrl.models.chat import decode_text, encode_text, render_prompt
from mmrl.models.load import load_model, load_tokenizer
from mmrl.serve.policy import ServedPolicy, _Running, make_app
from mmrl.serve.protocol import ChatRequest
from tests.helpers.servers import fetch_json, listening

TOKEN = "serve-token-0123456789"
TOOL = {"type": "function", "function": {"name": "search", "parameters": {"type": "object", "properties": {}}}}
ASK = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Where is Porto?"}]


def engine_of(folder: str) -> tuple[Engine, Any]:
    config = ModelConfig(name="random", path=folder)
    tokenizer = load_tokenizer(config)
    model = load_model(config, "cpu").eval()
    return build_engine(
        TransformersConfig(name="transformers", schedule="greedy"), model, tokenizer, EngineSetup()
    ), tokenizer


@pytest.fixture(scope="module")
def served(random_model: str) -> Iterator[tuple[str, Engine, Any]]:
    """Address of a server of a random model; mmrl's own engine on the same weights; its tokenizer."""
    engine, tokenizer = engine_of(random_model)
    with listening(make_app(ServedPolicy(engine, tokenizer), TOKEN)) as url:
        yield f"{url}/v1", engine_of(random_model)[0], tokenizer


def client(url: str, key: str = TOKEN) -> openai.OpenAI:
    return openai.OpenAI(base_url=url, api_key=key, max_retries=0)


def refusal(url: str, body: bytes | None, headers: dict[str, str]) -> tuple[int, dict[str, Any]]:
    """Status and error object of a request that is refused."""
    with pytest.raises(urllib.error.HTTPError) as raised:
        urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=30)
    return raised.value.code, json.loads(raised.value.read())["error"]


def own(served: tuple[str, Engine, Any], messages: Any, **sampling: Any) -> Completion:
    """What mmrl's own engine writes."""
    _, engine, tokenizer = served
    request = Request(prompt_ids=render_prompt(tokenizer, messages), sampling=Sampling(temperature=0.0, **sampling))
    return asyncio.run(engine.generate(request))


def test_greedy_text_is_that_of_the_engine_in_one_piece_and_in_a_stream(served: Any) -> None:
    expected = own(served, ASK, max_tokens=24)
    with client(served[0]) as asking:
        assert [model.id for model in asking.models.list()] == ["policy"]
        options: Any = {"model": "policy", "messages": ASK, "temperature": 0, "max_tokens": 24}
        whole = asking.chat.completions.create(**options)
        parts = list(asking.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))
        prompt = list(render_prompt(served[2], ASK))
        plain = asking.completions.create(model="policy", prompt=prompt, temperature=0, max_tokens=24)
    text = decode_text(served[2], expected.ids)
    assert whole.choices[0].message.content == text == plain.choices[0].text != ""
    assert whole.choices[0].finish_reason == ("length" if expected.finish == "length" else "stop")
    assert whole.usage is not None and whole.usage.completion_tokens == len(expected.ids)
    assert whole.usage.prompt_tokens == len(prompt)
    deltas = [part.choices[0].delta.content for part in parts if part.choices and part.choices[0].delta.content]
    assert "".join(deltas) == text and len(deltas) > 3, "as tokens come, and not at the end"
    assert parts[-1].usage == whole.usage
    assert parts[-2].choices[0].finish_reason == whole.choices[0].finish_reason


def test_a_stop_string_is_left_out_of_whole_and_streamed_text(served: Any) -> None:
    text = decode_text(served[2], own(served, ASK, max_tokens=24).ids)
    stop = text[4:7]
    with client(served[0]) as asking:
        options: Any = {"model": "policy", "messages": ASK, "temperature": 0, "max_tokens": 24, "stop": [stop, "\0no"]}
        whole = asking.chat.completions.create(**options)
        parts = list(asking.chat.completions.create(**options, stream=True))
    assert whole.choices[0].message.content == text[: text.index(stop)]
    assert whole.choices[0].finish_reason == "stop"
    assert "".join(part.choices[0].delta.content or "" for part in parts) == text[: text.index(stop)]


def test_requests_at_once_each_get_their_own_reply_and_equal_seeds_equal_ones(served: Any) -> None:
    async def asked() -> list[list[str | None]]:
        async with openai.AsyncOpenAI(base_url=served[0], api_key=TOKEN) as asking:
            replies = await asyncio.gather(
                *(
                    asking.chat.completions.create(model="policy", messages=ASK, max_tokens=16, seed=seed, n=2)  # type: ignore[arg-type]
                    for seed in (7, 8, 7)
                )
            )
        return [[choice.message.content for choice in reply.choices] for reply in replies]

    first, second, again = asyncio.run(asked())
    assert first == again != second and first[0] != first[1]


def test_dspy_reads_from_it(served: Any) -> None:
    import dspy

    lm = dspy.LM("openai/policy", api_base=served[0], api_key=TOKEN, temperature=0.0, max_tokens=16, cache=False)
    asked = [{"role": "user", "content": "Where is Porto?"}]
    assert lm("Where is Porto?") == [decode_text(served[2], own(served, asked, max_tokens=16).ids)]


def test_the_printed_snippets_run(served: Any) -> None:
    import dspy

    given = ServeArguments(token_env="SERVE_TOKEN_OF_A_TEST")
    printed = snippets(["policy"], given).replace("{url}/v1", served[0]).replace("…", "Where?")
    with_openai, with_dspy = (part.partition("\n")[2] for part in printed.split("\n\n")[1:3])
    before = dspy.settings.lm
    os.environ["SERVE_TOKEN_OF_A_TEST"] = TOKEN
    try:
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            exec(re.sub(r"(?m)^  ", "", with_openai).replace("model=", "max_tokens=4, model="), {})
        assert said.getvalue().strip()
        exec(re.sub(r"(?m)^  ", "", with_dspy), {})
        assert dspy.settings.lm.model == "openai/policy"
    finally:
        del os.environ["SERVE_TOKEN_OF_A_TEST"]
        dspy.configure(lm=before)


@pytest.mark.parametrize(
    ("change", "status", "says"),
    [
        ({"messages": [{"role": "user", "content": "x " * 5000}]}, 400, "context_length_exceeded"),
        ({"messages": [{"role": "user", "content": "x " * 5000}], "stream": True}, 400, "context_length_exceeded"),
        ({"messages": []}, 400, "messages"),
        ({"messages": [{"role": "god", "content": "x"}]}, 400, r"messages\.0\.role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            400,
            "reads text alone",
        ),
        ({"n": 99}, 400, "n: Input should be less than or equal to 16"),
        ({"tools": [{"type": "function"}]}, 400, "expected {type: function, function: {name"),
        ({"tools": [TOOL]}, 400, "tools: the model's chat template does not write them; leave them out"),
        ({"logit_bias": {"5": 1}}, 400, "logit_bias: this server does not have it"),
        ({"max_tokens": 0}, 400, "max_tokens"),
        ({"temperature": -1}, 400, "temperature"),
        ({"stop": ["x"] * 99}, 400, "stop: expected at most 16"),
        ({"extra_body": {"min_p": 0.1}}, 400, "min_p: this server does not have it"),
        ({"extra_body": {"min_q": 0.1}}, 400, "min_q: unknown field"),
        ({"messages": [{"role": "user", "content": "x" * (5 << 20)}]}, 413, "more than 4194304 bytes"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_cannot_be_had_is_refused_as_an_openai_error(
    served: Any, change: dict[str, Any], status: int, says: str
) -> None:
    with client(served[0]) as asking, pytest.raises(openai.APIStatusError) as raised:
        create: Any = asking.chat.completions.create
        create(**{"model": "policy", "messages": ASK, "max_tokens": 4} | change)
    assert raised.value.status_code == status
    assert isinstance(raised.value.body, dict) and "message" in raised.value.body
    assert re.search(says, str(raised.value.body))


def test_parts_of_text_developers_and_fields_without_effect_are_taken(served: Any) -> None:
    messages: Any = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Where "}, {"type": "text", "text": "is Porto?"}]},
    ]
    with client(served[0]) as asking:
        reply = asking.chat.completions.create(
            model="policy", messages=messages, temperature=0, max_completion_tokens=8, user="me", n=1, tools=[]
        )
    assert reply.choices[0].message.content == decode_text(served[2], own(served, ASK, max_tokens=8).ids)


@pytest.mark.parametrize("path", ["/v1/models", "/health", "/v1/chat/completions", "/nothing"])
def test_a_wrong_token_is_let_in_nowhere(served: Any, path: str) -> None:
    root = served[0].removesuffix("/v1")
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": TOKEN}):
        status, error = refusal(root + path, b"{}" if "chat" in path else None, headers)
        assert (status, error["code"]) == (401, "invalid_api_key")
    with client(served[0], "wrong") as asking, pytest.raises(openai.AuthenticationError):
        asking.models.list()


@pytest.mark.parametrize("body", [b"", b"[", b"[1]", b'{"model": 3}', b"\xff", b'{"model": "policy"}', b"[" * 100_000])
def test_a_body_that_is_no_request_is_refused_and_the_server_goes_on(served: Any, body: bytes) -> None:
    status, error = refusal(served[0] + "/chat/completions", body, {"Authorization": f"Bearer {TOKEN}"})
    assert (status, error["type"]) == (400, "invalid_request_error")


@functools.cache
def tiny() -> Any:
    """The tiny model's tokenizer."""
    return load_tokenizer(ModelConfig(name="tiny", path="tiny"))


class Gate(Engine):
    """Completes nothing, but a first token, until as many requests wait as it was told; then names each module."""

    def __init__(self, together: int, token: bool = False):
        self.token = token
        self.together, self.waiting, self.asked = together, 0, [0]
        self.opened: asyncio.Event | None = None
        self.cancelled = 0

    async def generate(self, request: Request) -> Completion:
        self.opened = self.opened or asyncio.Event()
        self.waiting += 1
        self.asked.append(self.waiting)
        if self.waiting >= self.together:
            self.opened.set()
        if self.token and request.on_token is not None:
            request.on_token(encode_text(tiny(), "a")[0])
        try:
            await self.opened.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.waiting -= 1
        if request.module == "broken":
            raise RuntimeError("secret of the server")
        ids = (*encode_text(tiny(), request.module), tiny().eos_token_id)
        return Completion(ids=ids, logprobs=None, finish="eos")


def app_of(engine: Engine, modules: Sequence[str] = ()) -> Any:
    return make_app(ServedPolicy(engine, tiny(), modules))


def none_left(url: str) -> bool:
    for _ in range(500):
        if not fetch_json(f"{url}/health")[1]["requests"]:
            return True
        time.sleep(0.01)
    return False


def test_each_module_is_a_model_of_its_own_and_requests_wait_together() -> None:
    modules = ["rewriter", "answerer", "broken"]
    names = [f"policy/{module}" for module in modules]
    engine = Gate(together=3)

    async def asked(url: str) -> list[Any]:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as asking:
            return await asyncio.gather(
                *(asking.chat.completions.create(model=name, messages=ASK) for name in names),  # type: ignore[arg-type]
                return_exceptions=True,
            )

    with listening(app_of(engine, modules)) as url:
        one, other, broken = asyncio.run(asked(url))
    assert [one.choices[0].message.content, other.choices[0].message.content] == ["rewriter", "answerer"]
    assert max(engine.asked) == 3, "all three were in the engine at once"
    assert isinstance(broken, openai.InternalServerError) and "secret" not in str(broken)


def test_more_requests_than_allowed_are_told_to_come_back_and_who_goes_away_is_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("mmrl.serve.policy.MOST_REQUESTS", 1)
    engine = Gate(together=99)

    async def until(true: Callable[[], bool]) -> None:
        async with asyncio.timeout(30):
            while not true():
                await asyncio.sleep(0.01)

    async def impatient(url: str, stream: bool) -> None:
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as asking:
            create: Any = asking.chat.completions.create
            async for _ in await create(model="policy", messages=ASK, stream=stream):
                pass

    async def asked(url: str) -> None:
        for gone, stream in enumerate((False, True), 1):
            first = asyncio.create_task(impatient(url, stream))
            await until(lambda: engine.waiting == 1)
            with pytest.raises(openai.RateLimitError) as raised:
                await impatient(url, stream)
            assert raised.value.response.headers["retry-after"] == "1"
            first.cancel()
            await until(lambda gone=gone: engine.cancelled == gone)  # type: ignore[misc]

    with listening(app_of(engine)) as url:
        asyncio.run(asked(f"{url}/v1"))
        assert none_left(url), "whoever has gone makes room for others"


def post(url: str, body: bytes, announced: int | None = None, path: str = "/v1/chat/completions") -> socket.socket:
    """A connection on which a request was sent; its body may be shorter than it announces."""
    host, port = url.removeprefix("http://").split(":")
    sent = socket.create_connection((host, int(port)), timeout=30)
    length = len(body) if announced is None else announced
    head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Length: {length}\r\n\r\n"
    sent.sendall(head.encode() + body)
    return sent


@pytest.mark.parametrize("token", [False, True])
def test_clients_that_leave_before_a_streams_first_byte_leave_nothing_behind(token: bool) -> None:
    engine = Gate(together=99, token=token)
    ask = json.dumps({"model": "policy", "messages": ASK, "stream": True}).encode()
    app = app_of(engine)

    async def gone_at_once() -> None:
        """The application as its server calls it, with a client to whom nothing can be sent any more."""
        scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": [], "query_string": b""}
        parts = iter([{"type": "http.request", "body": ask}])

        async def receive() -> dict[str, Any]:
            if part := next(parts, None):
                return part
            while token or not engine.waiting:  # leaves when the engine has the request, or cannot be sent its token
                await asyncio.sleep(0.001)
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            raise OSError("the client has gone")

        for _ in range(3):
            parts = iter([{"type": "http.request", "body": ask}])
            with contextlib.suppress(Exception):
                await app(scope, receive, send)
        await asyncio.sleep(0.05)

    asyncio.run(gone_at_once())
    assert engine.cancelled == 3 and engine.waiting == 0
    with listening(app) as url:
        assert fetch_json(f"{url}/health")[1]["requests"] == 0
        for _ in range(5):
            post(url, ask).close()
        assert none_left(url)


def test_bodies_that_do_not_come_hold_no_place(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("mmrl.serve.policy.MOST_REQUESTS", 2)
    monkeypatch.setattr("mmrl.system.http_server.BODY_S", 1.0)
    app = app_of(Gate(together=1))
    with listening(app) as url:
        slow = [post(url, b"{", announced=100) for _ in range(10)]
        with client(f"{url}/v1") as asking:
            assert asking.chat.completions.create(model="policy", messages=ASK).choices  # type: ignore[arg-type]
        for sent in slow:
            assert sent.recv(1000).startswith(b"HTTP/1.1 408 ")
            sent.close()
        post(url, b"{", announced=100).close()  # leaves while its body is read, which is no error
        time.sleep(0.3)
        assert none_left(url)
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": [-1]},
        {"prompt": [10**30]},
        {"prompt": []},
        {"prompt": ""},
        {"prompt": "\ud800"},
        {"messages": [{"role": "user", "content": "\ud800"}]},
        {"prompt": "a", "model": "\ud800"},
        {"prompt": "a", "\ud800": 1},
        {"prompt": "a", "temperature": 1e-39},
        {"prompt": "a " * 1_500_000},
    ],
    ids=lambda fields: f"{fields!a:.40}",
)
def test_mistakes_of_a_client_are_its_own(served: Any, fields: dict[str, Any]) -> None:
    """Clients repeat a request that got a 5xx, and wait in between."""
    path = "/chat/completions" if "messages" in fields else "/completions"
    body = json.dumps({"model": "policy", "max_tokens": 2, **fields}).encode()
    status, error = refusal(f"{served[0]}{path}", body, {"Authorization": f"Bearer {TOKEN}"})
    assert (status, error["type"]) == (400, "invalid_request_error") and error["message"]
    if len(body) > 1e6:
        assert "a prompt of 3,000,000 characters leaves no room" in error["message"], "refused without being encoded"


def test_text_comes_in_whole_characters_however_tokens_cut_them(random_model: str) -> None:
    tokenizer = load_tokenizer(ModelConfig(name="random", path=random_model))
    text = "Olá, ação — 東京 🙂!"
    ids = tuple(tokenizer.encode(text, add_special_tokens=False))
    assert len(ids) > len(text), "several tokens to a character"

    class Says(Engine):
        async def generate(self, request: Request) -> Completion:
            for token in ids:
                assert request.on_token is not None
                request.on_token(token)
            return Completion(ids=ids, logprobs=None, finish="eos")

    async def pieces(stop: tuple[str, ...]) -> list[str]:
        asked = ChatRequest(model="policy", messages=[{"role": "user", "content": "x"}], stream=True, stop=list(stop))  # type: ignore[list-item]
        running = _Running(ServedPolicy(Says(), tokenizer), asked, "")
        return [piece async for piece in running.pieces()]

    whole = asyncio.run(pieces(()))
    assert "".join(whole) == text and "\ufffd" not in "".join(whole) and len(whole) > 10
    assert "".join(asyncio.run(pieces(("東京",)))) == text.partition("東京")[0]
    assert "".join(asyncio.run(pieces(("not there",)))) == text


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "policy: "),
        (["policy=tiny", "host=0.0.0.0"], "host: got '0.0.0.0', which other machines reach; expected a token too"),
        (["policy=tiny", "host=0.0.0.0", "token_env=NO_SUCH"], "token_env: the environment variable NO_SUCH is not"),
        (["policy=no/such/folder"], "policy: "),
        (["policy=tiny", "eval.items=3"], "eval.items: has no effect on mmrl serve"),
        (["policy=tiny", "task=banking77"], "task: has no effect on mmrl serve"),
        (["policy=tiny", "engine.schedule=greedy"], "engine.schedule: has no effect on mmrl serve"),
        (["policy=x", "engine=openai"], "an endpoint is served already"),
        (["policy=tiny", "port=x"], "port: got 'x'"),
        (["policy=tiny", "-m"], "-m: not for mmrl serve"),
        (["policy=tiny", "prot=3"], "prot"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_cannot_be_served_is_refused_before_a_model_loads(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", *words]) == 2
    error = capsys.readouterr().err
    assert says in error and "Traceback" not in error


def test_the_command_serves_until_it_is_told_to_end(random_model: str) -> None:
    words = [sys.executable, "-m", "mmrl", "serve", f"policy={random_model}", "port=0", "hardware.threads=1"]
    child = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        url = re.findall(r"http://\S+/v1", child.stdout.readline())[0]
        with client(url, "none") as asking:
            reply = asking.chat.completions.create(model="policy", messages=ASK, max_tokens=3)  # type: ignore[arg-type]
        assert reply.usage is not None and reply.usage.completion_tokens <= 3
        child.send_signal(signal.SIGTERM)
        _, error = child.communicate(timeout=60)
    finally:
        child.kill()
    assert (child.returncode, error.splitlines()[-1:]) == (0, ["stopped"]), error
