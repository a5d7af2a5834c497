"""Conversations of clients with a policy: the contexts in which their requests go on, and replies as clients read them.

A request whose messages extend those of an earlier one, its reply included, goes on in that one's context, token for
token. Any other opens a new context. Sampled tokens are never rendered again.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mmrl.records import Reply
from mmrl.serve.front import Answer, Finished, until_stop
from mmrl.serve.protocol import ChatRequest
from mmrl.system.growing_text import GrowingText

Messages = Sequence[Mapping[str, Any]]

Call = Callable[[Messages, Reply | None, Messages], Awaitable[Reply]]
"""Has a reply sampled: to messages, or to what they add after an earlier reply; the last are its tools."""


@dataclass(frozen=True, slots=True)
class _Past:
    """Reply that a later request may go on after."""

    tools: str
    """Tools that its prompt has, as JSON; empty without any."""
    reply: Reply


class Conversations:
    """The replies so far, for later requests that go on after them.

    Args:
        decode: token ids -> text.
        most: tokens of contexts that are kept, those of the newest replies; None: all.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], most: int | None = None):
        self._decode, self._most = decode, most
        self._past: dict[bytes, list[_Past]] = {}
        """By a digest of what a request that goes on after them begins with; the newest last."""
        self._tokens = 0

    async def answered(self, parsed: ChatRequest, module: str, call: Call, name: Callable[[Reply], str]) -> Finished:
        """Return the choices of a request.

        Args:
            call: called once for each, for all of them at once.
            name: id of a reply.
        """
        messages, tools = parsed.conversation(), parsed.functions()
        digests = _digests([{"module": module}, *messages])
        shown = json.dumps(tools) if tools else ""
        before, length = self._before(digests, shown)
        added: Messages = messages[length:]
        after = None
        if before is not None:
            added, after, shown = _named(messages[length - 1], added), before.reply, before.tools
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
            self._keep(_digests([_as_sent_back(answers[-1])], digests[-1])[-1], _Past(shown, reply))
            prompt, sampled = len(reply.context) - reply.tokens, sampled + reply.tokens
        return Finished(id=names[0], answers=answers, tokens=(prompt, sampled))

    def _before(self, digests: Sequence[bytes], tools: str) -> tuple[_Past | None, int]:
        """Return the reply that a request extends with most messages, of equals the newest, and how many they are."""
        for length in range(len(digests) - 2, 0, -1):
            for past in reversed(self._past.get(digests[length], ())):
                # Tools that a later request leaves out are in the context still: it wants no more calls.
                if tools in ("", past.tools):
                    return past, length
        return None, 0

    def _keep(self, digest: bytes, past: _Past) -> None:
        former = self._past.pop(digest, [])
        self._past[digest] = [*(other for other in former if other.tools != past.tools), past]
        self._tokens += _size(self._past[digest]) - _size(former)
        while self._most is not None and self._tokens > self._most:
            self._tokens -= _size(self._past.pop(next(iter(self._past))))

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
            logprobs = list(zip(texts_added(self._decode, ids), values, strict=False))
        return Answer(
            text=text,
            stop=stop,
            finish="tool_calls" if calls else "length" if reply.finish == "length" else "stop",
            tool_calls=calls,
            reasoning=message.get("reasoning_content") or "",
            logprobs=logprobs,
        )


def texts_added(decode: Callable[[Sequence[int]], str], ids: Sequence[int]) -> list[str]:
    """Return what each token adds to the text of those before: alone, some would lose a space or half a character.

    A character that several tokens spell is the last one's.
    """
    growing = GrowingText(decode)
    texts = [growing.add(token) for token in ids]
    if texts:
        texts[-1] += decode(ids)[len(growing.text) :]
    return texts


def _size(replies: Sequence[_Past]) -> int:
    return sum(len(past.reply.context) for past in replies)


def _digests(parts: Sequence[Mapping[str, Any]], digest: bytes = b"") -> list[bytes]:
    """Return for each part a digest of all parts up to it.

    Args:
        digest: of the parts before.
    """
    digests = []
    for part in parts:
        # Agents put their name on the replies that they send back.
        named = part if part.get("role") != "assistant" else {**part, "name": None}
        digest = hashlib.sha256(digest + json.dumps(named, sort_keys=True).encode()).digest()
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
