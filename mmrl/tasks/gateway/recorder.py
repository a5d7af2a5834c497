"""Requests of an agent as calls of its rollout: module, context, reply, limits; the agent knows nothing of it.

A request whose messages extend those of an earlier call, its reply included, goes on in that call's context, token for
token (`after=`). Any other opens a new context. Sampled tokens are never rendered again.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from mmrl.config.tasks import AnyAgentConfig, CallRule
from mmrl.errors import LimitFailure, ParseFailure, RequestFailure, RolloutError
from mmrl.serve.front import Answer, Finished, until_stop
from mmrl.serve.gateway import ENDED
from mmrl.serve.json_schema import violations
from mmrl.serve.protocol import RecordedRequest, Refused
from mmrl.tasks.base import Context, Message, Reply

log = logging.getLogger("mmrl.gateway")

PREFIX = "policy/"
"""Begins the model name of a request that names its module."""


@dataclass(frozen=True, slots=True)
class _PastCall:
    """Call that a later request may extend."""

    module: str
    tools: str
    """Tools that its prompt has, as JSON; empty without any."""
    messages: Sequence[Message]
    """Those of its request, and its reply as clients send it back."""
    reply: Reply


class Recorder:
    """Recorder of one rollout, in its event loop."""

    def __init__(self, ctx: Context, config: AnyAgentConfig):
        self.failure: RolloutError | None = None
        """The first failure of a call, which the agent may have swallowed."""
        self.calls = 0
        """Calls that were begun."""
        self.answered = 0
        """Requests that were answered by a rule."""
        self._ctx, self._config = ctx, config
        self._history: list[_PastCall] = []
        self._contexts: Counter[tuple[int, ...]] = Counter()
        """Replies by the ids up to their end."""
        self._shots: dict[str, int] = {}
        """Module -> replies in its first request: demonstrations."""
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closed = False
        self._away = False
        """The engine does not wait for this rollout."""
        self._timer: asyncio.TimerHandle | None = None
        self._watch()

    async def chat(self, parsed: RecordedRequest, header: str | None) -> Finished:
        """Answer a request.

        Raises:
            Refused: it cannot be had.
            RolloutError: the call failed.
        """
        if self._closed:
            raise Refused(401, ENDED, code="invalid_api_key")
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._return()
        try:
            return await self._answered(parsed, header)
        except RolloutError as error:
            self.failure = self.failure or error
            raise
        finally:
            self._tasks.discard(task)
            if not self._tasks and not self._closed:
                self._watch()

    async def close(self) -> None:
        """End the calls under way; later requests are refused."""
        self._closed = True
        running = list(self._tasks)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        self._return()

    # -- the schedule waits for this agent, for so long

    def _watch(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._config.idle_s, self._step_out)

    def _step_out(self) -> None:
        self._away = True
        self._ctx.leave()

    def _return(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._away:
            self._away = False
            self._ctx.enter()

    # -- a request

    async def _answered(self, parsed: RecordedRequest, header: str | None) -> Finished:
        messages = parsed.conversation()
        module = self._module(parsed.model, header, messages)
        if isinstance(module, CallRule):
            self.answered += 1
            answer = Answer(text=module.reply or "", finish="stop")
            return Finished(id=reply_id((), self.answered), answers=[answer], tokens=(0, 0))
        parsed.refuse_other_prompts(self._ctx.unchanged_by)
        self.calls += parsed.n
        if self.calls > self._config.max_calls:
            raise LimitFailure(f"the agent made more than task.max_calls={self._config.max_calls} calls")
        tools = parsed.functions()
        key = json.dumps(tools) if tools else ""
        before = self._extended(module, key, messages)
        if before is not None:
            key = before.tools
        # Replies beyond the demonstrations of the first request, in a context that extends none: a compaction, a drift.
        replies_in = sum(message["role"] == "assistant" for message in messages)
        rewritten = before is None and replies_in > self._shots.setdefault(module, replies_in)
        added = messages if before is None else _named(before.messages[-1], messages[len(before.messages) :])
        choices = [
            self._call(parsed, module, added, before, tools, {"rewritten_history": float(rewritten)})
            for _ in range(parsed.n)
        ]
        # Choices are calls of their own, at once; the first to be requested is the first choice.
        replies = await asyncio.gather(*choices, return_exceptions=True)
        recorded, answers = [], []
        for reply in replies:
            if isinstance(reply, BaseException):
                raise reply
            # Two calls may have the same tokens; the second is another reply all the same.
            self._contexts[reply.context] += 1
            name = reply_id(reply.context, self._contexts[reply.context])
            answer = self._answer(parsed, reply, name)
            self._history.append(_PastCall(module, key, [*messages, _as_sent_back(answer)], reply))
            recorded.append((name, reply))
            answers.append(answer)
        name, first = recorded[0]
        tokens = len(first.context) - first.tokens, sum(reply.tokens for _, reply in recorded)
        return Finished(id=name, answers=answers, tokens=tokens)

    def _module(self, model: str, header: str | None, messages: Sequence[Message]) -> str | CallRule:
        """Return the module of a request, or the rule that answers it."""
        modules = self._config.modules
        named = model.removeprefix(PREFIX) if model.startswith(PREFIX) else header
        if named is not None:
            if named not in modules:
                raise Refused(404, f"model: got '{named[:100]}', expected one of {', '.join(modules)}", "model")
            return named
        system = "\n".join(message["content"] for message in messages if message["role"] == "system")
        for rule in self._config.rules:
            if re.search(rule.pattern, system):
                return rule if rule.module is None else rule.module
        if len(modules) == 1:
            return modules[0]
        raise Refused(
            400,
            f"model: nothing says which of the modules {', '.join(modules)} this is; expected the model policy/MODULE, "
            "a header X-Mmrl-Module, or a pattern of task.rules in the system message",
            "model",
        )

    def _extended(self, module: str, tools: str, messages: Sequence[Message]) -> _PastCall | None:
        """Return the longest earlier call that these messages extend; of equals, the newest."""
        extended = (
            past
            for past in reversed(self._history)
            # Tools that a later request leaves out are in the context still: it wants no more calls.
            if past.module == module
            and tools in ("", past.tools)
            and len(past.messages) < len(messages)
            and all(map(_same, past.messages, messages))
        )
        return max(extended, key=lambda past: len(past.messages), default=None)

    async def _call(
        self,
        parsed: RecordedRequest,
        module: str,
        messages: Sequence[Message],
        before: _PastCall | None,
        tools: Sequence[Message],
        facts: Mapping[str, float],
    ) -> Reply:
        try:
            return await self._ctx.call(
                module,
                messages,
                after=None if before is None else before.reply,
                max_tokens=min(parsed.limit, self._config.max_tokens),
                stop=parsed.stops,
                parse=lambda value: _checked(parsed, value),
                facts=facts,
                tools=tools,
            )
        except ParseFailure as failure:
            # The agent reads what the model wrote; where it fails over that, the model is to blame.
            return failure.reply

    def _answer(self, parsed: RecordedRequest, reply: Reply, name: str) -> Answer:
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
            logprobs = [(self._ctx.decode([token]), value) for token, value in zip(ids, values, strict=False)]
        return Answer(
            text=text,
            stop=stop,
            finish="tool_calls" if calls else "length" if reply.finish == "length" else "stop",
            tool_calls=calls,
            reasoning=message.get("reasoning_content") or "",
            logprobs=logprobs,
        )


def reply_id(context: Sequence[int], number: int) -> str:
    """Return the name of a reply: the same when an agent is played again.

    Args:
        context: ids up to its end.
        number: of the replies of the rollout that end this context, counted from 1.
    """
    return hashlib.sha256(",".join(map(str, (number, *context))).encode()).hexdigest()[:24]


def _as_sent_back(answer: Answer) -> Message:
    """Return a reply as clients send it back, in the form of `RecordedRequest.conversation`."""
    message: dict[str, Any] = {"role": "assistant", "content": answer.text}
    if answer.tool_calls:
        message["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": json.loads(call["function"]["arguments"])}}
            for call in answer.tool_calls
        ]
    return message


def _same(past: Message, message: Message) -> bool:
    """Return True if a message is sent again: agents put their name on the replies that they send back."""
    if past["role"] == "assistant" and "name" not in past:
        message = {key: value for key, value in message.items() if key != "name"}
    return past == message


def _named(reply: Message, added: Sequence[Message]) -> Sequence[Message]:
    """Return what follows a reply, with the name of its function in each tool result: some templates write it."""
    names = {call["id"]: call["function"]["name"] for call in reply.get("tool_calls", ())}
    return [
        {**message, "name": names[message["tool_call_id"]]}
        if message["role"] == "tool" and "name" not in message and message.get("tool_call_id") in names
        else message
        for message in added
    ]


def _checked(parsed: RecordedRequest, value: Any) -> Any:
    """Return what a model wrote, a text or a message, if it is of the form that the request asks for.

    Raises:
        ParseFailure: it is not.
    """
    message = value if isinstance(value, Mapping) else {"content": value}
    calls = message.get("tool_calls") or ()
    choice = parsed.tool_choice
    if choice == "none" and calls:
        raise ParseFailure("tool_choice is none, and the reply calls a tool")
    wanted = None if isinstance(choice, str) else choice["function"]["name"]
    if parsed.tools and not calls and (wanted is not None or choice == "required"):
        raise ParseFailure("tool_choice asks for a tool call, and the reply has none")
    if wanted is not None and any(call["function"]["name"] != wanted for call in calls):
        raise ParseFailure(f"tool_choice asks for {wanted}, and the reply calls something else")
    if not parsed.parallel_tool_calls and len(calls) > 1:
        raise ParseFailure(f"parallel_tool_calls is false, and the reply makes {len(calls)} calls")
    if message.get("unread_call"):
        raise ParseFailure("a tool call of the reply cannot be read")
    for call in calls:
        _check_call(parsed.tools, call["function"])
    form = parsed.response_format
    if form is not None and form.type != "text" and not calls:
        _check_form(form.wanted, message["content"])
    return value


def _check_call(tools: Sequence[Message], called: Mapping[str, Any]) -> None:
    name, arguments = called["name"], called["arguments"]
    described = [tool["function"] for tool in tools if tool["function"]["name"] == name]
    if not described:
        raise ParseFailure(f"the reply calls {name!r:.60}, which is no tool of the request")
    if not isinstance(arguments, Mapping):
        raise ParseFailure(f"{name}: the arguments are no JSON object")
    # What is no schema describes nothing.
    with suppress(ValueError):
        for _, problem in violations(described[0].get("parameters") or {}, arguments):
            raise ParseFailure(f"{name}: the arguments are not those of its parameters: {problem}")


def _check_form(schema: Mapping[str, Any], text: str) -> None:
    required = schema.get("required", ())
    try:
        read = json.loads(text, parse_constant=_no_number)
    except (ValueError, RecursionError):
        raise ParseFailure("response_format asks for JSON, and the reply is none", 0, len(required)) from None
    try:
        wrong = violations(schema, read)
    except ValueError as error:
        raise RequestFailure(f"response_format: {error}") from None
    if wrong:
        fields = {field for field, _ in wrong}
        present = [name for name in required if isinstance(read, dict) and name in read and name not in fields]
        raise ParseFailure(f"response_format asks for something else: {wrong[0][1]}", len(present), len(required))


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no JSON")
