"""The `ctx` of a program: record, replay, parse retries, limits, typed failures.

Sits between a program (above it, blind to engines) and an engine (below it, blind to programs). Each live call becomes
a `Call`; each call and tool result goes onto the tape, in the order of the program's requests. A context made with a
tape replays it first and is live from there, which is how every plan forks.
"""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias

from typing_extensions import override

from mmrl import rng
from mmrl.engines.base import Completion, Engine, Request, Sampling
from mmrl.errors import (
    EngineFailure,
    LengthFailure,
    ParseFailure,
    ProgramFailure,
    ReplayDivergence,
    RolloutError,
    ToolFailure,
)
from mmrl.records import EMPTY, LARGEST, Call, Example, Reply
from mmrl.rollout.environment import Environment
from mmrl.rollout.tape import Event, Tape
from mmrl.system.user_code import finite_numbers, own_containers, user_failure
from mmrl.tasks.base import Context, Message

MEASURED = frozenset(
    {"calls", "penalty", "length", "finish_length_share", "format_rate", "attempts", "surprise", "reward"}
)
"""Metrics of every module (`stages.step_metrics`), whose names no fact of a program can have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """Generation as the program requested it: each attempt is the same request with another seed."""

    module: str
    call_id: str
    earlier: Sequence[Event]
    """The rollout's calls before it."""
    prompt_ids: tuple[int, ...]
    prompt_text: str
    limit: int
    stop: tuple[str, ...]
    parse: Callable[[Any], object] | None
    facts: Mapping[str, object]
    turn: int
    tools: tuple[Message, ...]
    as_message: bool
    messages: tuple[Message, ...] | None
    """None where it goes on in an earlier context."""
    begins: bool
    """False where it goes on inside of an earlier turn."""


@dataclass(slots=True)
class RolloutContext(Context):
    """Implementation of `mmrl.tasks.base.Context` for one rollout."""

    env: Environment
    example: Example
    path: str
    """Path id within the example's trees: `<tree>` or `<tree>.<branch>...`; extended when the rollout forks."""
    replay: Sequence[Event] = ()
    on_live_call: Callable[[RolloutContext, str], None] | None = None
    """Called before each live call; may start siblings that replay `events` so far."""
    substitutes: Mapping[str, Substitute] = EMPTY
    """Module -> what replies to its live calls in place of the policy."""
    tape: Tape = field(init=False)

    def __post_init__(self) -> None:
        self.tape = Tape(self.env.engine, self.replay)

    @property
    def events(self) -> list[Event]:
        """Events on the tape so far."""
        return self.tape.events

    @override
    async def call(
        self,
        module: str,
        messages: Sequence[Message] | str,
        *,
        after: Reply | None = None,
        max_observation: int | None = None,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        parse: Callable[[Any], object] | None = None,
        facts: Mapping[str, object] = EMPTY,
        tools: Sequence[Message] = (),
        as_message: bool = False,
    ) -> Reply:
        if module not in self.env.task.program.modules:
            raise ProgramFailure(
                f"the program called module '{module}', its modules are {list(self.env.task.program.modules)}"
            )
        for name, value in facts.items():
            if name in MEASURED:
                raise ProgramFailure(f"facts: '{name}' is a metric of mmrl's own; choose another name")
            if isinstance(value, int | float) and not abs(value) <= LARGEST:
                raise ProgramFailure(f"facts: got {value!r:.60} for '{name}', expected a finite number")
        prompt_ids, before, observed = self._prompt(messages, after, max_observation, tools)
        try:
            recorded = await self.tape.recorded("call", module, prompt_ids)
        except ReplayDivergence as error:
            raise ReplayDivergence(f"{error}{self._difference(messages)}") from None
        if recorded is not None:
            return _with_own_parsed(await self.tape.outcome_of(recorded))
        # Before the request is recorded: siblings replay the tape up to here and then sample on their own.
        if self.on_live_call is not None:
            self.on_live_call(self, module)
        # Before any await: with concurrent calls the tape grows while this one waits.
        earlier = [event for event in self.events if event.kind == "call"]
        event = self.tape.record("call", module, prompt_ids)
        try:
            generation = Generation(
                module=module,
                call_id=f"{self.example.id}/{self.path}#{len(earlier)}",
                earlier=earlier,
                prompt_ids=prompt_ids,
                prompt_text=_to_text(messages),
                limit=max_tokens or self.env.settings.max_tokens,
                stop=tuple(stop),
                parse=parse,
                facts=facts,
                turn=0 if before is None or before.call is None else before.call.turn + 1,
                tools=tuple(tools),
                as_message=as_message or bool(tools),
                messages=None if after is not None or isinstance(messages, str) else tuple(messages),
                begins=not isinstance(messages, str),
            )
            reply = await self._generate(event, generation)
        except BaseException as error:
            _settle(event.outcome, error)
            raise
        finally:
            # Of a request that became no call nobody has read the observation.
            if before is not None and before.call is not None and event.call is not None:
                before.call = replace(before.call, observation_tokens=observed)
        event.outcome.set_result(_with_own_parsed(reply))
        return reply

    @override
    def decode(self, ids: Sequence[int]) -> str:
        return self.env.decode(ids)

    @override
    def unchanged_by(self, arguments: Mapping[str, object]) -> bool:
        return self.env.unchanged_by(arguments)

    @override
    def leave_out(self, reply: Reply) -> None:
        self.tape.leave_out(reply.context)

    @override
    def leave(self) -> None:
        self.env.engine.leave()

    @override
    def enter(self) -> None:
        self.env.engine.enter()

    @override
    def measure(self, observation: Sequence[Message] | str, *, after: Reply) -> int:
        prompt_ids, before = self._extend(observation, after)
        return len(prompt_ids) - before

    @override
    async def tool(self, name: str, /, **arguments: object) -> object:
        return await self.remember(name, arguments, partial(self._use, name, arguments))

    async def _use(self, name: str, arguments: Mapping[str, object]) -> object:
        if name not in self.env.task.tools:
            raise ProgramFailure(f"the program used tool '{name}', the task has {sorted(self.env.task.tools)}")
        try:
            # Tools may be plain functions or coroutines; programs cannot tell, so a task may change one.
            # Of its arguments it has copies: on a replay it is not used, and the program's own would be as they were.
            result = self.env.task.tools[name](**own_containers(arguments))
            return await result if inspect.isawaitable(result) else result
        except RolloutError:
            raise
        except Exception as error:
            # The program gets a typed failure; the tool's own exception is the cause, for logs.
            raise user_failure(ToolFailure, error, f"tool '{name}' raised ") from error

    @override
    async def remember(
        self, name: str, arguments: Mapping[str, object], run: Callable[[], Awaitable[object]]
    ) -> object:
        event = await self.tape.recorded("tool", name, arguments)
        if event is not None and not event.nested:
            return own_containers(await self.tape.outcome_of(event))
        event = self.tape.record("tool", name, own_containers(arguments), replaced=event)
        with self.tape.inside(event), self.env.using(name) as results:
            try:
                result = await run()
                await self.tape.turn_of(event)
            except BaseException as error:
                _settle(event.outcome, error)
                raise
            results.append(result)
            # Each branch has its own: what one of them takes out of a list, the others have still.
            event.outcome.set_result(own_containers(result))
            return result

    @property
    def empty_searches(self) -> float:
        """Share of its tool results that should be a list and have nothing in it; 0 without such a tool."""
        ended = [e.outcome for e in self.events if e.kind == "tool" and e.outcome.done() and not e.outcome.cancelled()]
        results = [outcome.result() for outcome in ended if outcome.exception() is None]
        lists = [result for result in results if isinstance(result, list | tuple)]
        return sum(not result for result in lists) / len(lists) if lists else 0.0

    @property
    def calls(self) -> list[Call]:
        """Recorded calls of this rollout in order, replayed ones included; each has the one before it as parent."""
        return self.tape.calls()

    @property
    def unread(self) -> list[Call]:
        """Calls so far whose reply does not parse."""
        return [call for call in self.calls if not call.ok]

    @property
    def too_long(self) -> bool:
        """True if a prompt so far left no room in the context, of which no call is recorded."""
        outcomes = [event.outcome for event in self.events if event.kind == "call"]
        return any(o.done() and not o.cancelled() and isinstance(o.exception(), LengthFailure) for o in outcomes)

    def _prompt(
        self,
        messages: Sequence[Message] | str,
        after: Reply | None,
        max_observation: int | None,
        tools: Sequence[Message],
    ) -> tuple[tuple[int, ...], Event | None, int]:
        """Return the prompt ids, the event of the call whose context they continue, and the tokens observed since."""
        if after is None:
            if isinstance(messages, str):
                raise ProgramFailure("a prompt given as text continues a reply: pass after=, or give messages")
            return self.env.render(messages, tools) if tools else self.env.render(messages), None, 0
        # The newest first: a context that was continued twice is the later call's.
        event = next((e for e in reversed(self.events) if e.context is not None and e.context == after.context), None)
        if event is None or event.call is None:
            raise ProgramFailure("after= must be a reply that this rollout's ctx.call returned")
        prompt_ids, before = self._extend(messages, after)
        if max_observation is not None:
            prompt_ids = prompt_ids[: before + max_observation]
        return prompt_ids, event, len(prompt_ids) - before

    def _extend(self, observation: Sequence[Message] | str, after: Reply) -> tuple[tuple[int, ...], int]:
        """Extend the context; also return how many of its tokens stay: a sampled end-of-turn may be taken back."""
        # Whichever token ended the turn: a model may have several (Llama 3.1 has three), and the tokenizer names one.
        prompt_ids = self.env.extend(after.context, observation, after.finish == "eos")
        before = len(after.context)
        return prompt_ids, before if prompt_ids[:before] == after.context else before - 1

    async def _generate(self, event: Event, generation: Generation) -> Reply:
        """Sample until the text parses or the attempts are used up; the last attempt is recorded either way."""
        settings, module, earlier = self.env.settings, generation.module, generation.earlier
        # Here rather than in the engine: the limit may be below the model's own.
        tokens = len(generation.prompt_ids)
        if settings.max_context is not None and tokens >= settings.max_context:
            raise LengthFailure(f"a prompt of {tokens} tokens leaves no room in a context of {settings.max_context}")
        failure: ParseFailure | None = None
        for attempt in range(self.env.attempts(module)):
            completion, text = await self._reply(generation, attempt)
            message: Message | None = None
            if generation.as_message:
                message = self.env.read(generation.prompt_ids, completion.ids, generation.tools)
            parsed: Any = message
            try:
                # Free text is always well-formed.
                if generation.parse is not None:
                    parsed = generation.parse(text if message is None else message)
                failure = None
                break
            except ParseFailure as error:
                failure = error
        call = Call(
            id=generation.call_id,
            example=self.example.id,
            # The call requested before, if it has ended; `calls` puts right what concurrency leaves open.
            parent=earlier[-1].call.id if earlier and earlier[-1].call else None,
            module=module,
            invocation=sum(e.name == module for e in earlier),
            turn=generation.turn,
            completion_tokens=len(completion.ids),
            prompt_tokens=len(generation.prompt_ids),
            prompt_ids=generation.prompt_ids,
            completion_ids=completion.ids,
            logprobs=completion.logprobs,
            text=text,
            prompt_text=generation.prompt_text,
            finish=completion.finish,
            ok=failure is None,
            present_fields=failure.present if failure else 0,
            expected_fields=failure.expected if failure else 0,
            policy_version=completion.policy_version,
            attempts=attempt + 1,
            facts=dict(generation.facts),
        )
        # A reply that does not parse has no fields to judge.
        if failure is None:
            score = self.env.task.score_call(call)
            penalty = finite_numbers({"penalty": score.penalty})["penalty"]
            call = replace(call, penalty=penalty, facts={**generation.facts, **finite_numbers(score.facts)})
        event.call = call
        # Set with the call: only a reply that was recorded can be continued with `after=`.
        event.context = generation.prompt_ids + completion.ids
        reply = Reply(
            text=text,
            parsed=parsed,
            finish=completion.finish,
            tokens=len(completion.ids),
            context=event.context,
            logprobs=completion.logprobs,
        )
        if failure is not None:
            failure.reply = reply
            raise failure
        return reply

    def _difference(self, messages: Sequence[Message] | str) -> str:
        """Describe the first message in which a call differs from the one that the tape has in its place."""
        recorded = self.events[self.tape.unplayed[0]].call if self.tape.unplayed else None
        if recorded is None or isinstance(messages, str):
            return ""
        before, position = recorded.prompt_text, 0
        for number, message in enumerate(messages):
            text = _to_text([message])
            if not before.startswith(text, position):
                start = next((i for i, (a, b) in enumerate(zip(text, before[position:], strict=False)) if a != b), 0)
                now, then = text[max(0, start - 20) :][:80], before[position + max(0, start - 20) :][:80]
                return f"; message {number} is now {now!r}, it was {then!r}"
            position += len(text) + 1
        return ""

    async def _reply(self, generation: Generation, attempt: int) -> tuple[Completion, str]:
        """Return an attempt's completion and its text."""
        if substitute := self.substitutes.get(generation.module):
            return await substitute(self, generation, attempt)
        completion = await self.sampled(self.env.engine, generation, attempt)
        return completion, self.env.decode(completion.ids)

    async def sampled(self, engine: Engine, generation: Generation, attempt: int) -> Completion:
        """Sample a completion by an engine, the policy's or another."""
        settings = self.env.settings
        sampling = Sampling(
            max_tokens=generation.limit,
            temperature=settings.temperature,
            top_p=settings.top_p,
            top_k=settings.top_k,
            stop=generation.stop,
            # By path and attempt, never by arrival: a resumed or reordered step samples the same tokens.
            seed=rng.digest(*self.env.key, "sample", generation.call_id, attempt),
        )
        request = Request(
            prompt_ids=generation.prompt_ids,
            sampling=sampling,
            module=generation.module,
            session=self.example.id,
            version=self.env.version,
            messages=generation.messages,
            order=(generation.call_id, attempt),
        )
        self.tape.begin()
        try:
            completion = await engine.generate(request)
            self.env.generated += 1
            return completion
        except (RolloutError, asyncio.CancelledError):
            raise
        except Exception as error:
            raise EngineFailure(f"{type(error).__name__}: {error}") from error
        finally:
            self.tape.end()


Substitute: TypeAlias = Callable[[RolloutContext, Generation, int], Awaitable[tuple[Completion, str]]]
"""Takes a rollout's context, a generation and the number of the attempt; returns the completion and its text."""


def _to_text(messages: Sequence[Message] | str) -> str:
    """Return a prompt for people to read."""
    if isinstance(messages, str):
        return messages
    texts = []
    for message in messages:
        calls = message.get("tool_calls")
        texts.append(f"[{message['role']}] {message.get('content') or ''}{json.dumps(calls) if calls else ''}")
    return "\n".join(texts)


def _with_own_parsed(reply: Reply) -> Reply:
    """Return a reply with a parsed value of its own: branches that replay it may change theirs."""
    plain = reply.parsed is None or isinstance(reply.parsed, str)
    return reply if plain else replace(reply, parsed=own_containers(reply.parsed))


def _settle(outcome: asyncio.Future[object], error: BaseException) -> None:
    if not outcome.done():
        if isinstance(error, asyncio.CancelledError):
            outcome.cancel()
        else:
            outcome.set_exception(error)
