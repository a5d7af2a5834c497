"""Conversations of clients with a policy: the contexts in which their requests go on, and replies as clients read them.

A request whose messages extend those of an earlier one, its reply included, goes on in that one's context, token for
token. Any other opens a new context. Sampled tokens are never rendered again.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from mmrl.records import Reply
from mmrl.serve.front import Answer, Finished, until_stop
from mmrl.serve.protocol import ChatRequest

Messages = Sequence[Mapping[str, Any]]

Call = Callable[[Messages, Reply | None, Messages], Awaitable[Reply]]
"""Has a reply sampled: to messages, or to what they add after an earlier reply; the last are its tools."""


class Conversations:
    """The replies so far, for later requests that go on after them.

    Args:
        decode: token ids -> text.
        most: tokens of contexts that are kept, those of the newest replies; None: all.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], most: int | None = None):
        self._decode, self._most = decode, most
        self._replies: dict[bytes, tuple[Reply, Messages]] = {}
        """Replies, and the tools that their prompts have, by what a request that goes on after them begins with."""
        self._tokens = 0

    async def answered(self, parsed: ChatRequest, module: str, call: Call, name: Callable[[Reply], str]) -> Finished:
        """Return the choices of a request.

        Args:
            call: called once for each, for all of them at once.
            name: id of a reply.
        """
        messages, tools = parsed.conversation(), parsed.functions()
        before = _chain(module, tools, messages)
        # The longest that it extends, and of several equal ones the newest.
        length, (after, held) = next(
            ((n, self._replies[before[n]]) for n in range(len(messages) - 1, 0, -1) if before[n] in self._replies),
            (0, (None, tools)),
        )
        added = messages if after is None else _named(messages[length - 1], messages[length:])
        # The first to be requested is the first choice.
        calls = [call(added, after, tools) for _ in range(parsed.n)]
        replies = await asyncio.gather(*calls, return_exceptions=True)
        names: list[str] = []
        answers: list[Answer] = []
        prompt = sampled = 0
        for reply in replies:
            if isinstance(reply, BaseException):
                raise reply
            names.append(name(reply))
            answers.append(self._answer(parsed, reply, names[-1]))
            told = [*messages, _as_sent_back(answers[-1])]
            # A later request may leave the tools out: they are in the context still, and it wants no more calls.
            for offered in (held, ()) if held else ((),):
                self._keep(_chain(module, offered, told)[-1], reply, held)
            prompt, sampled = len(reply.context) - reply.tokens, sampled + reply.tokens
        return Finished(id=names[0], answers=answers, tokens=(prompt, sampled))

    def _keep(self, key: bytes, reply: Reply, tools: Messages) -> None:
        former = self._replies.pop(key, None)
        self._replies[key] = reply, tools
        self._tokens += len(reply.context) - (0 if former is None else len(former[0].context))
        while self._most is not None and self._tokens > self._most:
            self._tokens -= len(self._replies.pop(next(iter(self._replies)))[0].context)

    def _answer(self, parsed: ChatRequest, reply: Reply, name: str) -> Answer:
        message: Mapping[str, Any] = reply.parsed if isinstance(reply.parsed, Mapping) else {"content": reply.text}
        if parsed.tool_choice == "none" and message.get("tool_calls"):
            message = {"content": reply.text}
        text, stop = until_stop(message["content"], parsed.stops)
        calls = [
            {
                "id": f"call_{name}_{number}",
                "type": "function",
                "function": {
                    "name": call["function"]["name"],
                    "arguments": json.dumps(call["function"]["arguments"], ensure_ascii=False),
                },
            }
            for number, call in enumerate(message.get("tool_calls") or ())
        ]
        logprobs = None
        if parsed.logprobs:
            ids = reply.context[len(reply.context) - reply.tokens :]
            values = reply.logprobs or ()
            logprobs = [(self._decode([token]), value) for token, value in zip(ids, values, strict=False)]
        return Answer(
            text=text,
            stop=stop,
            finish="tool_calls" if calls else "length" if reply.finish == "length" else "stop",
            tool_calls=calls,
            reasoning=message.get("reasoning_content") or "",
            logprobs=logprobs,
        )


def _chain(module: str, tools: Messages, messages: Messages) -> list[bytes]:
    """Return for nothing and for each message a digest of all up to it; agents put their name on replies sent back."""
    digest, digests = b"", []
    for part in [{"module": module, "tools": list(tools)}, *messages]:
        if part.get("role") == "assistant":
            part = {key: value for key, value in part.items() if key != "name"}
        digest = hashlib.sha256(digest + json.dumps(part, sort_keys=True).encode()).digest()
        digests.append(digest)
    return digests


def _as_sent_back(answer: Answer) -> Mapping[str, Any]:
    """Return a reply as clients send it back, in the form of `ChatRequest.conversation`."""
    message: dict[str, Any] = {"role": "assistant", "content": answer.text}
    if answer.tool_calls:
        message["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": json.loads(call["function"]["arguments"])}}
            for call in answer.tool_calls
        ]
    return message


def _named(reply: Mapping[str, Any], added: Messages) -> Messages:
    """Return what follows a reply, with the name of its function in each tool result: some templates write it."""
    names = {call["id"]: call["function"]["name"] for call in reply.get("tool_calls", ())}
    return [
        {**message, "name": names[message["tool_call_id"]]}
        if message["role"] == "tool" and "name" not in message and message.get("tool_call_id") in names
        else message
        for message in added
    ]
