"""Requests of an agent as calls of its rollout: module, reply, limits; the agent knows nothing of it."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from mmrl.config.tasks import AnyAgentConfig, CallRule
from mmrl.errors import LengthFailure, LimitFailure, ParseFailure, RequestFailure, RolloutError
from mmrl.records import Reply
from mmrl.serve.conversations import Conversations, Messages
from mmrl.serve.front import Answer, Finished
from mmrl.serve.gateway import ENDED
from mmrl.serve.json_schema import violations
from mmrl.serve.protocol import ChatRequest, Refused
from mmrl.tasks.base import Context

log = logging.getLogger("mmrl.gateway")


class Recorder:
    """Recorder of one rollout, in its event loop."""

    def __init__(self, ctx: Context, config: AnyAgentConfig):
        self.failure: RolloutError | None = None
        """The first failure of a call, which the agent may have swallowed."""
        self.ended = asyncio.Event()
        """A call failed in a way that no later one makes good: the rollout ends, whatever the agent does."""
        self.calls = 0
        """Calls that were begun."""
        self.answered = 0
        """Requests that were answered by a rule."""
        self._ctx, self._config = ctx, config
        self._conversations = Conversations(ctx.decode)
        self._contexts: Counter[tuple[int, ...]] = Counter()
        """Replies by the ids up to their end."""
        self._replies: dict[str, list[Reply]] = {}
        """Those of a request, by its id."""
        self._shots: dict[str, int] = {}
        """Module -> replies in its first request: demonstrations."""
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closed = False
        self._away = False
        """The engine does not wait for this rollout."""
        self._timer: asyncio.TimerHandle | None = None
        self._watch()

    async def chat(self, parsed: ChatRequest, named: str | None) -> Finished:
        """Answer a request.

        Args:
            named: the module that it names.

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
            return await self._answered(parsed, named)
        except RolloutError as error:
            # A prompt that was too long is forgiven where the agent goes on; what fails later is not.
            if self.failure is None or isinstance(self.failure, LengthFailure):
                self.failure = error
            if not isinstance(self.failure, LengthFailure):
                self.ended.set()
            raise
        finally:
            self._tasks.discard(task)
            if not self._tasks and not self._closed:
                self._watch()

    @property
    def replied(self) -> bool:
        """True if the agent has read a reply of the policy."""
        return any(self._replies.values())

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

    async def _answered(self, parsed: ChatRequest, named: str | None) -> Finished:
        module = named or self._module(parsed)
        if isinstance(module, CallRule):
            self.answered += 1
            answer = Answer(text=module.reply or "", finish="stop")
            return Finished(id=reply_id((), self.answered), answers=[answer], tokens=(0, 0))
        parsed.refuse_other_prompts(self._ctx.unchanged_by)
        self.calls += parsed.n
        if self.calls > self._config.max_calls:
            raise LimitFailure(f"the agent made more than task.max_calls={self._config.max_calls} calls")
        replies, made = list[Reply](), list[Reply]()

        async def call(messages: Messages, after: Reply | None, tools: Messages) -> Reply:
            made.append(await self._call(parsed, module, messages, after, tools))
            return made[-1]

        try:
            finished = await self._conversations.answered(parsed, module, call, partial(self._name, replies))
        except BaseException:
            # Of several choices some were there before one failed, or before the client left: nobody has read them.
            for reply in made:
                self._ctx.leave_out(reply)
            raise
        self._replies[finished.id] = replies
        return finished

    def leave_out(self, requests: Sequence[str]) -> None:
        """Leave the calls of requests, by their ids, out of the rollout: the agent knows nothing of their replies."""
        for name in requests:
            for reply in self._replies.pop(name, ()):
                self._ctx.leave_out(reply)

    def _name(self, replies: list[Reply], reply: Reply) -> str:
        replies.append(reply)
        # Two calls may have the same tokens; the second is another reply all the same.
        self._contexts[reply.context] += 1
        return reply_id(reply.context, self._contexts[reply.context])

    def _module(self, parsed: ChatRequest) -> str | CallRule:
        """Return the module of a request that names none, or the rule that answers it."""
        modules = self._config.modules
        system = "\n".join(message["content"] for message in parsed.conversation() if message["role"] == "system")
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

    async def _call(
        self,
        parsed: ChatRequest,
        module: str,
        messages: Messages,
        after: Reply | None,
        tools: Messages,
    ) -> Reply:
        # Replies that are not the policy's as it gave them: a compaction, a drift. In a context that extends none those
        # beyond the demonstrations of the first request; else any, since `messages` is what was added.
        replies_in = sum(message["role"] == "assistant" for message in messages)
        rewritten = replies_in > (self._shots.setdefault(module, replies_in) if after is None else 0)
        try:
            return await self._ctx.call(
                module,
                messages,
                after=after,
                max_tokens=min(parsed.limit, self._config.max_tokens),
                stop=parsed.stops,
                parse=lambda value: _checked(parsed, value),
                facts={"rewritten_history": float(rewritten)},
                tools=tools,
                as_message=True,
            )
        except ParseFailure as failure:
            # The agent reads what the model wrote; where it fails over that, the model is to blame.
            unread: Reply = failure.reply
            return unread


def reply_id(context: Sequence[int], number: int) -> str:
    """Return the name of a reply: the same when an agent is played again.

    Args:
        context: ids up to its end.
        number: of the replies of the rollout that end this context, counted from 1.
    """
    return hashlib.sha256(",".join(map(str, (number, *context))).encode()).hexdigest()[:24]


def _checked(parsed: ChatRequest, value: Any) -> Any:
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
    if not calls and (wanted is not None or choice == "required"):
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


def _check_call(tools: Messages, called: Mapping[str, Any]) -> None:
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
