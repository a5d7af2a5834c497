"""The engine of an endpoint, and the router that sends some modules to endpoints and the others to an engine.

Between programs and `openai`, the client: all modules in an evaluation, frozen ones in training. Messages go out and
text comes back, so an endpoint's reply has no log-probabilities and its ids, those of the run's tokenizer, are never
trained on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, cast

from typing_extensions import override

from mmrl.config import EngineConfig
from mmrl.config.endpoint import EndpointConfig
from mmrl.config.engines import OpenAIConfig
from mmrl.engines.base import BusyClock, Completion, Engine, Request, total_usage
from mmrl.engines.openai import OpenAIChat
from mmrl.errors import ConfigError, EngineFailure
from mmrl.models.chat import decode_text, encode_text, end_of_turn, reply_ids

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

SEEDS = 2**31
"""Endpoints take seeds below it."""


class EndpointEngine(Engine):
    """Engine of an endpoint.

    Args:
        settings: the endpoint and its model.
        tokenizer: turns replies into ids; the endpoint has another.
        path: where `settings` stand in the config.

    Raises:
        ConfigError: its key is not there.
    """

    def __init__(self, settings: EndpointConfig, tokenizer: PreTrainedTokenizerBase, path: str):
        self.chat = OpenAIChat(settings, path)
        self.tokenizer = tokenizer
        self._clock = BusyClock()

    @property
    @override
    def busy_s(self) -> float:
        return self._clock.seconds

    async def generate(self, request: Request) -> Completion:
        """Raises `EngineFailure`: no usable reply, or a prompt that goes on in an earlier context."""
        if request.messages is None:
            raise EngineFailure(
                f"{self.chat.path}: module '{request.module}' goes on in the context of an earlier reply, which an "
                "endpoint that takes messages cannot"
            )
        sampling = request.sampling
        with self._clock.running():
            reply = await self.chat.reply(
                request.messages,
                max_tokens=sampling.max_tokens,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                # Equal calls stay equal where the endpoint honours seeds; most promise it only as best effort.
                seed=sampling.seed % SEEDS,
            )
        text, finish = reply.text, "length" if reply.finish == "length" else "eos"
        # Endpoints leave the stop string out and do not say which one it was, so it is not sent; the cut is made here.
        ends = [text.index(mark) + len(mark) for mark in sampling.stop if mark in text]
        if ends:
            text, finish = text[: min(ends)], "stop"
        # Not the ids that the endpoint sampled: they serve counting and programs, which read the text of them again.
        ids = (*encode_text(self.tokenizer, text), end_of_turn(self.tokenizer))
        if decode_text(self.tokenizer, ids) != text:
            # Of marked parts (gpt-oss) a program reads one alone.
            ids = reply_ids(self.tokenizer, text, request.messages)
        if finish != "eos":
            ids = ids[:-1] or ids
        return Completion(ids=ids, logprobs=None, finish=finish, policy_version=self.policy_version)

    def endpoint_usage(self) -> dict[str, float]:
        """Return requests and tokens so far, and what they cost."""
        return self.chat.usage.metrics()

    def describe(self) -> dict[str, str]:
        """Return the fact for a summary: which endpoint, how many requests, at what cost."""
        return {self.chat.path: self.chat.describe()}

    @override
    def close(self) -> None:
        self.chat.close()


class Router(Engine):
    """An engine with endpoints beside it, each for one module; all other requests go to the engine."""

    def __init__(self, engine: Engine, endpoints: dict[str, EndpointEngine]):
        self.engine = engine
        self.endpoints = endpoints
        self.policy_version = engine.policy_version
        self.max_context = engine.max_context
        self._clock = BusyClock(lambda: engine.busy_s)

    @property
    def busy_s(self) -> float:
        """Seconds of the engine, and those that only endpoints took."""
        return self.engine.busy_s + self._clock.seconds

    @property
    @override
    def computing_s(self) -> float:
        return self.engine.computing_s

    @override
    async def generate(self, request: Request) -> Completion:
        endpoint = self.endpoints.get(request.module)
        if endpoint is None:
            return await self.engine.generate(request)
        with self._clock.running():
            return await endpoint.generate(request)

    @override
    def enter(self) -> None:
        self.engine.enter()

    @override
    def leave(self) -> None:
        self.engine.leave()

    @override
    async def rest(self) -> None:
        await self.engine.rest()

    @override
    def repeats(self, module: str) -> bool:
        return (self.endpoints.get(module) or self.engine).repeats(module)

    @contextmanager
    @override
    def prefix_cache_kept(self) -> Iterator[None]:
        with self.engine.prefix_cache_kept():
            yield

    @override
    def end_session(self, session: str) -> None:
        self.engine.end_session(session)

    def set_version(self, version: int, state: Mapping[str, Tensor] | None = None) -> None:
        """Let the engine serve these weights; endpoints' replies carry the version that was current beside them."""
        # The engine first: where it refuses the weights, endpoints keep the version that the other modules still have.
        self.engine.set_version(version, state)
        for endpoint in self.endpoints.values():
            endpoint.set_version(version)
        self.policy_version = version

    @override
    def sleep(self) -> None:
        self.engine.sleep()

    @override
    def metrics(self) -> dict[str, float]:
        return {**self.engine.metrics(), **self.endpoint_usage()}

    def endpoint_usage(self) -> dict[str, float]:
        """Return sums over the endpoints, and over the engine where it is one."""
        return total_usage([self.engine, *self.endpoints.values()])

    @override
    def describe(self) -> dict[str, str]:
        return {key: fact for endpoint in self.endpoints.values() for key, fact in endpoint.describe().items()}

    @override
    def close(self) -> None:
        try:
            for endpoint in self.endpoints.values():
                endpoint.close()
        finally:
            self.engine.close()


def with_endpoints(engine: Engine, config: EngineConfig, tokenizer: PreTrainedTokenizerBase) -> Engine:
    """Return `engine`, with the engines of `engine.endpoints` beside it."""
    if not config.endpoints:
        return engine
    router = Router(engine, {})
    try:
        for module, settings in config.endpoints.items():
            router.endpoints[module] = EndpointEngine(settings, tokenizer, f"engine.endpoints.{module}")
    except BaseException:
        router.close()
        raise
    return router


def with_model(config: EngineConfig, model: str) -> EndpointConfig:
    """Return `engine.endpoint` with the model that `policy=` names."""
    return EndpointConfig(model=model, **cast("OpenAIConfig", config).endpoint.model_dump())


def unreachable(endpoints: Mapping[str, EndpointConfig]) -> list[str]:
    """Return reasons why no request to some endpoints can succeed, one sentence each; asks each for 16 tokens.

    Args:
        endpoints: where an endpoint stands in the config -> the endpoint.
    """
    problems = []
    for path, settings in endpoints.items():
        try:
            with closing(OpenAIChat(settings, path)) as chat:
                problems += chat.unreachable()
        except ConfigError as error:
            problems += error.problems
    return problems
