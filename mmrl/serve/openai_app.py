"""A policy behind OpenAI's protocol: chat completions, completions, models, health, over any engine.

Concurrent requests wait in the engine, whose batcher decodes them together. Text streams as it is sampled where the
engine says so (`Request.on_token`: the embedded engine), else in one piece when it is complete.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

from mmrl import rng
from mmrl.engines.base import Engine, Request, Sampling
from mmrl.errors import LengthFailure
from mmrl.models.chat import decode_text, marked, render_prompt
from mmrl.serve.front import Answer, Backend, Finished, Running, add_dialects, until_stop
from mmrl.serve.openai_dialect import ChatCompletions, Completions
from mmrl.serve.protocol import ChatRequest, CompletionRequest, Refused, SamplingRequest, error_object
from mmrl.system.http_server import require_token

if TYPE_CHECKING:
    from fastapi import FastAPI, Response
    from fastapi import Request as HttpRequest
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")

MOST_REQUESTS = 256
"""Requests in flight; further ones are refused with 429."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A policy to serve."""

    engine: Engine
    tokenizer: PreTrainedTokenizerBase
    models: Mapping[str, str]
    """Model name in the protocol -> module of the policy (empty where all modules share its weights)."""


def make_app(served: Served, token: str | None = None) -> FastAPI:
    """Build the HTTP application.

    Args:
        token: every request must bring it (`Authorization: Bearer …`); None: anybody may ask.
    """
    from fastapi import FastAPI
    from fastapi.responses import JSONResponse

    app = FastAPI(title="mmrl policy", docs_url=None, redoc_url=None, openapi_url=None)
    if token is not None:
        refusal = error_object(401, "a token is needed: Authorization: Bearer TOKEN", code="invalid_api_key")
        require_token(app, token, refusal)
    policy = _Policy(served)

    async def health(request: HttpRequest) -> Response:
        return JSONResponse({"status": "ok", "models": list(served.models), "requests": policy.in_flight})

    dialects = {"/v1/chat/completions": ChatCompletions(ChatRequest), "/v1/completions": Completions()}
    add_dialects(app, lambda request: policy, dialects)
    app.add_route("/health", health)
    return app


class _Policy(Backend):
    """Backend of an engine; all of it runs in the server's event loop but rendering."""

    def __init__(self, served: Served):
        self.served, self.models = served, served.models
        self.in_flight = 0
        # One thread: the renderer keeps what it has rendered, and is not made for several.
        self._renderer = ThreadPoolExecutor(1, thread_name_prefix="mmrl-render")
        # As the vocabulary spells tokens: a byte is at least one character there, so no token stands for more text.
        self._longest = max(map(len, served.tokenizer.get_vocab()))

    def refuse_crowd(self) -> None:
        """See `Backend.refuse_crowd`."""
        if self.in_flight >= MOST_REQUESTS:
            raise Refused(429, f"more than {MOST_REQUESTS} requests at once")

    async def begin(self, parsed: SamplingRequest, headers: Mapping[str, str], body: bytes) -> Running:
        """See `Backend.begin`."""
        self.in_flight += 1
        try:
            return _Running(self.served, parsed, await self._generation(parsed), self._ended)
        except BaseException:
            self._ended()
            raise

    def _ended(self) -> None:
        self.in_flight -= 1

    async def _generation(self, parsed: SamplingRequest) -> Request:
        """Return the request to the engine.

        Raises:
            Refused: an unknown model, messages that the chat template does not take, or several prompts.
        """
        if parsed.model not in self.served.models:
            text = f"model: got '{parsed.model[:100]}', expected one of {', '.join(self.served.models)}"
            raise Refused(404, text, "model", "model_not_found")
        if isinstance(parsed, ChatRequest):
            ids = await self._chat(parsed)
        else:
            assert isinstance(parsed, CompletionRequest)
            ids = await self._encode_prompt(parsed.prompt)
        # Without a seed a repeated request must give another completion; with one, the same.
        seed = secrets.randbits(64) if parsed.seed is None else parsed.seed
        sampling = Sampling(
            max_tokens=parsed.limit,
            temperature=parsed.temperature,
            top_p=parsed.top_p,
            top_k=parsed.top_k,
            stop=parsed.stops,
            seed=rng.digest("serve", seed),
        )
        return Request(prompt_ids=tuple(ids), sampling=sampling, module=self.served.models[parsed.model])

    async def _chat(self, parsed: ChatRequest) -> Sequence[int]:
        messages = parsed.conversation()
        self._refuse_endless(sum(len(message["content"]) for message in messages))
        # A long conversation takes a while to encode, in which no other request's token could be sent.
        return await self._in_thread(lambda: render_prompt(self.served.tokenizer, messages))

    async def _encode_prompt(self, prompt: str | list[int] | list[str]) -> Sequence[int]:
        # OpenAI's clients send one text as a list of one as often as they send it bare.
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str):
            prompt = prompt[0]
        if isinstance(prompt, str):
            text = prompt
            self._refuse_endless(len(text))
            return await self._in_thread(lambda: self.served.tokenizer.encode(text))
        ids = [token for token in prompt if isinstance(token, int)]
        if len(ids) < len(prompt):
            raise Refused(400, "prompt: got several texts, expected one", "prompt")
        return ids

    def _refuse_endless(self, characters: int) -> None:
        """Refuse a prompt that no context could hold before it is encoded, which takes seconds for all others too."""
        context = self.served.engine.max_context
        if context is not None and characters > context * self._longest:
            raise LengthFailure(
                f"a prompt of {characters:,} characters leaves no room in a context of {context} tokens of at most "
                f"{self._longest} characters"
            )

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._renderer, work)


class _Running(Running):
    """Completion under way."""

    def __init__(self, served: Served, parsed: SamplingRequest, generation: Request, ended: Callable[[], None]):
        self._tokenizer, self._ended = served.tokenizer, ended
        self._stops = generation.sampling.stop
        self._new: asyncio.Queue[int | None] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        if parsed.stream:
            # from the decoder's thread
            def on_token(token: int) -> None:
                with suppress(RuntimeError):  # the server has ended meanwhile
                    loop.call_soon_threadsafe(self._new.put_nowait, token)

            # Only for streams: otherwise each token would wake the event loop in vain.
            generation = replace(generation, on_token=on_token)
        task = loop.create_task(self._generated(served.engine, generation))
        # Also where it fails or is cancelled: `pieces` must not wait for a token that never comes.
        task.add_done_callback(lambda task: self._new.put_nowait(None))
        super().__init__(parsed=parsed, task=task, created=int(time.time()), id=secrets.token_hex(12))

    async def _generated(self, engine: Engine, generation: Request) -> Finished:
        """Return the one choice: its text up to the first stop string."""
        completion = await engine.generate(generation)
        text, stop = until_stop(decode_text(self._tokenizer, completion.ids), self._stops)
        answer = Answer(text=text, finish="length" if completion.finish == "length" else "stop", stop=stop)
        return Finished(id=self.id, answers=[answer], tokens=(len(generation.prompt_ids), len(completion.ids)))

    def release(self) -> None:
        """See `Running.release`."""
        self._ended()
        self.task.cancel()

    async def pieces(self) -> AsyncIterator[str]:
        """Yield the text in parts, as tokens come; together they are the answer's."""
        # So many characters may be the beginning of a stop string, which must not be sent.
        held = max((len(stop) for stop in self._stops), default=1) - 1
        ids: list[int] = []
        # Text is decoded from a token before the new ones on: some tokenizers drop a space at the left edge.
        context, decoded, text, sent, parts = 0, 0, "", 0, False
        while (token := await self._new.get()) is not None:
            ids.append(token)
            # What is text so far may be thoughts: the rest is sent when it is complete.
            parts = parts or marked(self._tokenizer, [token])
            if parts:
                continue
            before = decode_text(self._tokenizer, ids[context:decoded])
            after = decode_text(self._tokenizer, ids[context:])
            if len(after) <= len(before) or after.endswith("\ufffd"):  # half of a character
                continue
            text, context, decoded = text + after[len(before) :], decoded, len(ids)
            ends = [start for stop in self._stops if (start := text.find(stop, max(0, sent - held))) >= 0]
            until = min(ends) if ends else len(text) - held
            if until > sent:
                yield text[sent:until]
                sent = until
            if ends:
                break
        await asyncio.wait([self.task])
        final = self.finished.answers[0].text
        if final[:sent] == text[:sent] and len(final) > sent:
            yield final[sent:]
