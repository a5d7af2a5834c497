"""OpenAI's dialect: the objects and streams of chat completions and completions."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

from typing_extensions import override

from mmrl.serve.front import Answer, Dialect, Running, failed
from mmrl.serve.protocol import ChatRequest, CompletionRequest, SamplingRequest, parse_request


class Completions(Dialect):
    """`POST /v1/completions`."""

    prefix, kind, chunk = "cmpl", "text_completion", "text_completion"
    schema: type[SamplingRequest] = CompletionRequest

    @override
    def parse(self, body: bytes) -> SamplingRequest:
        return parse_request(self.schema, body)

    def content(self, answer: Answer) -> dict[str, Any]:
        """Return the fields of a choice."""
        return {"text": answer.text, "logprobs": self.logprobs(answer)}

    def logprobs(self, answer: Answer) -> dict[str, Any] | None:
        """Return the log-probabilities of an answer's tokens, where they were asked for."""
        return None

    def delta(self, text: str = "", **fields: object) -> dict[str, Any]:
        """Return the fields of a choice's part in a stream."""
        return {"text": text, "logprobs": None}

    @override
    def reply(self, running: Running) -> dict[str, Any]:
        choices = [
            {"index": index, **self.content(answer), "finish_reason": answer.finish}
            for index, answer in enumerate(running.finished.answers)
        ]
        return {**self._head(running, self.kind), "choices": choices, "usage": _usage(running)}

    @override
    async def events(self, running: Running) -> AsyncIterator[str]:
        head = self._head(running, self.chunk)

        def event(index: int, choice: dict[str, Any], finish: str | None = None) -> str:
            return _event(head, choices=[{"index": index, **choice, "finish_reason": finish}])

        try:
            if self.chunk != self.kind:
                for index in range(len(running.finished.answers) if running.begun is None else 1):
                    yield event(index, self.delta(role="assistant", content=""))
            if running.begun is not None:
                async for text in running.pieces():
                    yield event(0, self.delta(text))
            for index, answer in enumerate(running.finished.answers):
                if answer.reasoning:
                    yield event(index, self.delta(reasoning_content=answer.reasoning))
                if answer.text and running.begun is None:
                    yield event(index, self.delta(answer.text))
                if answer.tool_calls:
                    calls = [{"index": number, **call} for number, call in enumerate(answer.tool_calls)]
                    yield event(index, self.delta(tool_calls=calls))
                yield event(index, {**self.delta(), "logprobs": self.logprobs(answer)}, answer.finish)
            options = running.parsed.stream_options
            if options is not None and options.include_usage:
                yield _event(head, choices=[], usage=_usage(running))
        except Exception as error:  # the status is sent already
            yield f"data: {json.dumps(failed(error)[1])}\n\n"
        yield "data: [DONE]\n\n"

    def _head(self, running: Running, kind: str) -> dict[str, Any]:
        return {
            "id": f"{self.prefix}-{running.id}",
            "object": kind,
            "created": running.created,
            "model": running.parsed.model,
        }


class ChatCompletions(Completions):
    """`POST /v1/chat/completions`."""

    prefix, kind, chunk = "chatcmpl", "chat.completion", "chat.completion.chunk"
    schema = ChatRequest

    @override
    def content(self, answer: Answer) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": answer.text}
        if answer.reasoning:
            message["reasoning_content"] = answer.reasoning
        if answer.tool_calls:
            message |= {"content": answer.text or None, "tool_calls": list(answer.tool_calls)}
        return {"message": message, "logprobs": self.logprobs(answer)}

    @override
    def logprobs(self, answer: Answer) -> dict[str, Any] | None:
        if answer.logprobs is None:
            return None
        tokens = [
            {"token": text, "logprob": value, "bytes": list(text.encode()), "top_logprobs": []}
            for text, value in answer.logprobs
        ]
        return {"content": tokens, "refusal": None}

    @override
    def delta(self, text: str = "", **fields: object) -> dict[str, Any]:
        return {"delta": ({"content": text} if text else {}) | fields}


def _usage(running: Running) -> dict[str, int]:
    prompt, new = running.finished.tokens
    return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}


def _event(head: Mapping[str, object], **fields: object) -> str:
    return f"data: {json.dumps({**head, **fields})}\n\n"
