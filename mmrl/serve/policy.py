"""A policy behind the protocols of OpenAI and Anthropic, over any engine: what `mmrl serve` serves.

Concurrent requests wait in the engine, whose batcher decodes them together. Text streams as it is sampled where the
engine says so (`Request.on_token`: the embedded engine), else in one piece when it is complete.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from typing_extensions import override

from mmrl import rng
from mmrl.engines.base import Completion, Engine, Request, Sampling
from mmrl.errors import LengthFailure, RequestFailure
from mmrl.models.chat import decode_text, growing_text, render_observation, render_prompt, template_of
from mmrl.models.replies import callable_tools, message_of, reads_thoughts
from mmrl.models.template import Messages, Tools
from mmrl.records import Reply
from mmrl.serve.conversations import Conversations
from mmrl.serve.front import Answer, Backend, Finished, Running, until_stop
from mmrl.serve.openai_dialect import Completions
from mmrl.serve.protocol import ChatRequest, CompletionRequest, Refused, SamplingRequest, error_object
from mmrl.serve.routes import add_routes
from mmrl.system.http_server import guard
from mmrl.system.user_code import carried

if TYPE_CHECKING:
    from fastapi import FastAPI, Response
    from fastapi import Request as HttpRequest
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")

MOST_REQUESTS = 256
"""Requests in flight; further ones are refused with 429."""
MOST_KEPT = 2**22
"""Tokens of earlier contexts that requests may go on in, about 150 MB; older replies are rendered like any message."""


def make_app(policy: ServedPolicy, token: str | None = None) -> FastAPI:
    """Build the HTTP application.

    Args:
        token: every request must bring it; None: anybody on this machine may ask, but no web page
            (`http_server.guard`).
    """
    from fastapi import FastAPI
    from fastapi.responses import JSONResponse

    app = FastAPI(title="mmrl policy", docs_url=None, redoc_url=None, openapi_url=None)
    codes = {401: "invalid_api_key"}
    guard(app, token, lambda status, text: error_object(status, text, code=codes.get(status)))

    async def health(request: HttpRequest) -> Response:
        return JSONResponse({"status": "ok", "models": policy.models, "requests": policy.in_flight})

    add_routes(app, lambda request: policy, {"/v1/completions": Completions()})
    app.add_route("/health", health)
    return app


class ServedPolicy(Backend):
    """Backend of an engine; all of it runs in the server's event loop but the work on texts.

    Args:
        modules: modules with weights of their own; none where all share the policy's.
        name: see `Backend`.
    """

    def __init__(
        self, engine: Engine, tokenizer: PreTrainedTokenizerBase, modules: Sequence[str] = (), name: str = "policy"
    ):
        super().__init__(modules, name)
        self.engine, self.tokenizer = engine, tokenizer
        self.conversations = Conversations(partial(decode_text, tokenizer), MOST_KEPT)
        self.in_flight = 0
        # One thread: the renderer keeps what it has rendered, and is not made for several.
        self._renderer = ThreadPoolExecutor(1, thread_name_prefix="mmrl-render")
        # As the vocabulary spells tokens: a byte is at least one character there, so no token stands for more text.
        self._longest = max(map(len, tokenizer.get_vocab()))

    @override
    def refuse_crowd(self) -> None:
        if self.in_flight >= MOST_REQUESTS:
            raise Refused(429, f"more than {MOST_REQUESTS} requests at once")

    @override
    async def begin(self, parsed: SamplingRequest, headers: Mapping[str, str], body: bytes) -> Running:
        module = self.named(parsed.model, headers)
        if not self.modules:  # whatever its name: an agent goes on with those that it was trained with
            module = ""
        elif module is None and len(self.modules) > 1:
            text = f"model: got '{parsed.model[:100]}', expected one of {', '.join(self.models)}"
            raise Refused(404, text, "model", "model_not_found")
        return _Running(self, parsed, self.modules[0] if module is None else module)

    async def check(self, parsed: ChatRequest) -> None:
        """Refuse a request whose prompts would not be those of training, which is found by rendering some."""
        await self._in_thread(lambda: parsed.refuse_other_prompts(template_of(self.tokenizer).unchanged_by))

    async def prompt(self, messages: Messages, after: Reply | None, tools: Tools) -> tuple[int, ...]:
        """Return the ids of messages, or of a context with what they add to it.

        Raises:
            LengthFailure: no context could hold them.
            RequestFailure: the chat template does not take them.
        """

        def rendered() -> tuple[int, ...]:
            if after is None:
                return render_prompt(self.tokenizer, messages, callable_tools(self.tokenizer, tools))
            return render_observation(self.tokenizer, after.context, messages, after.finish == "eos")

        self._refuse_endless(sum(len(message["content"]) for message in messages) + len(json.dumps(tools)))
        # A long conversation takes a while to encode, in which no other request's token could be sent.
        return await self._in_thread(rendered)

    async def encoded(self, prompt: str | list[int] | list[str], add_special_tokens: bool = True) -> tuple[int, ...]:
        """Return the ids of a bare prompt.

        Args:
            add_special_tokens: begin a text with those that the tokenizer puts before one.

        Raises:
            LengthFailure: no context could hold it.
            Refused: there are several.
        """
        # OpenAI's clients send one text as a list of one as often as they send it bare.
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str):
            prompt = prompt[0]
        if isinstance(prompt, str):
            text = prompt
            self._refuse_endless(len(text))
            return await self._in_thread(
                lambda: tuple(self.tokenizer.encode(text, add_special_tokens=add_special_tokens))
            )
        ids = [token for token in prompt if isinstance(token, int)]
        if len(ids) < len(prompt):
            raise Refused(400, "prompt: got several texts, expected one", "prompt")
        return tuple(ids)

    async def read(self, prompt: tuple[int, ...], completion: Completion, tools: Tools) -> Reply:
        """Return what was sampled as a reply."""

        def reply() -> Reply:
            return Reply(
                text=decode_text(self.tokenizer, completion.ids),
                parsed=message_of(self.tokenizer, prompt, completion.ids, tools),
                finish=completion.finish,
                tokens=len(completion.ids),
                context=(*prompt, *completion.ids),
                logprobs=completion.logprobs,
            )

        return await self._in_thread(reply)

    def _refuse_endless(self, characters: int) -> None:
        """Refuse a prompt that no context could hold before it is encoded, which takes seconds for all others too."""
        context = self.engine.max_context
        if context is not None and characters > context * self._longest:
            raise LengthFailure(
                f"a prompt of {characters:,} characters leaves no room in a context of {context} tokens of at most "
                f"{self._longest} characters"
            )

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._renderer, carried(work))


class _Running(Running):
    """Reply under way; it holds a place until it is released."""

    id = ""
    prompt_tokens = 0

    def __init__(self, policy: ServedPolicy, parsed: SamplingRequest, module: str):
        loop = asyncio.get_running_loop()
        self._policy, self._module = policy, module
        self._new: asyncio.Queue[int | None] = asyncio.Queue()
        # Without a seed a repeated request must give another reply; with one, the same.
        self._seed = secrets.randbits(64) if parsed.seed is None else parsed.seed
        self._choices = 0
        # Several replies, or text beside thoughts and calls of tools, can be told apart when they are complete.
        chat = parsed if isinstance(parsed, ChatRequest) else None
        alone = chat is None or (chat.n == 1 and not chat.tools and not reads_thoughts(policy.tokenizer))
        begun = loop.create_future() if parsed.stream and alone else None
        policy.in_flight += 1
        task = loop.create_task(self._finished(parsed))
        # Also where it fails or is cancelled: `pieces` must not wait for a token that never comes.
        task.add_done_callback(lambda task: self._new.put_nowait(None))
        super().__init__(parsed=parsed, task=task, created=int(time.time()), begun=begun)
        self.id = secrets.token_hex(12)

    @override
    def release(self) -> None:
        self._policy.in_flight -= 1
        self.task.cancel()

    async def _finished(self, parsed: SamplingRequest) -> Finished:
        if isinstance(parsed, ChatRequest):
            await self._policy.check(parsed)
            answered = self._policy.conversations.answered
            return await answered(parsed, self._module, self._call, lambda reply: secrets.token_hex(12))
        assert isinstance(parsed, CompletionRequest)
        prompt = await self._policy.encoded(parsed.prompt, parsed.add_special_tokens)
        reply = await self._sampled(prompt, ())
        text, stop = until_stop(reply.text, parsed.stops)
        answer = Answer(text=text, finish="length" if reply.finish == "length" else "stop", stop=stop)
        return Finished(id=self.id, answers=[answer], tokens=(len(prompt), reply.tokens))

    async def _call(self, messages: Messages, after: Reply | None, tools: Tools) -> Reply:
        """Sample one choice of a chat's reply."""
        return await self._sampled(await self._policy.prompt(messages, after, tools), tools)

    async def _sampled(self, prompt: tuple[int, ...], tools: Tools) -> Reply:
        parsed = self.parsed
        self.prompt_tokens = len(prompt)
        number, self._choices = self._choices, self._choices + 1
        sampling = Sampling(
            max_tokens=parsed.limit,
            temperature=parsed.temperature,
            top_p=parsed.top_p,
            top_k=parsed.top_k,
            stop=parsed.stops,
            seed=rng.digest("serve", self._seed, number),
        )
        # Only for streams: otherwise each token would wake the event loop in vain.
        on_token = None if self.begun is None else partial(self._take, asyncio.get_running_loop())
        completion = await self._policy.engine.generate(
            Request(prompt_ids=prompt, sampling=sampling, module=self._module, on_token=on_token)
        )
        if isinstance(parsed, ChatRequest) and parsed.logprobs and completion.logprobs is None:
            raise RequestFailure("logprobs: the engine has none with this sampling")
        return await self._policy.read(prompt, completion, tools)

    def _take(self, loop: asyncio.AbstractEventLoop, token: int) -> None:
        """Take a token, in the decoder's thread."""

        def add() -> None:
            assert self.begun is not None
            if not self.begun.done():
                self.begun.set_result(None)
            self._new.put_nowait(token)

        with suppress(RuntimeError):  # the server has ended meanwhile
            loop.call_soon_threadsafe(add)

    async def pieces(self) -> AsyncIterator[str]:
        """Yield the text in parts, as tokens come; together they are the answer's."""
        growing, stops, sent = growing_text(self._policy.tokenizer), self.parsed.stops, 0
        # So many characters may be the beginning of a stop string, which must not be sent.
        held = max((len(stop) for stop in stops), default=1) - 1
        while (token := await self._new.get()) is not None:
            if not growing.add(token):
                continue
            text = growing.text
            ends = [start for stop in stops if (start := text.find(stop, max(0, sent - held))) >= 0]
            until = min(ends) if ends else len(text) - held
            if until > sent:
                yield text[sent:until]
                sent = until
            if ends:
                break
        await asyncio.wait([self.task])
        final = self.finished.answers[0].text
        if final[:sent] == growing.text[:sent] and len(final) > sent:
            yield final[sent:]
