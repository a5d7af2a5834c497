"""The `ctx` of a program: record, replay, parse retries, limits, typed failures.

Sits between a program (above it, blind to engines) and an engine (below it, blind to programs). Each live call becomes
a `Call`; each call and tool result goes onto the tape, in the order of the program's requests. A context made with a
tape replays it first and is live from there, which is how every plan forks.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mmrl import rng
from mmrl.engines.base import Completion, Request, Sampling
from mmrl.errors import (
    EngineFailure,
    LengthFailure,
    ParseFailure,
    ProgramFailure,
    ReplayDivergence,
    RolloutError,
    ToolFailure,
)
from mmrl.records import EMPTY, Call, Example
from mmrl.rollout.environment import Environment, SamplingSettings
from mmrl.tasks.base import Message, Reply


@dataclass(slots=True)
class Event:
    """One thing on the tape, in the order of the program's requests."""

    kind: str
    """`call` or `tool`."""
    name: str
    """Module or tool."""
    request: object
    """Prompt ids of a call, arguments of a tool: compared on replay."""
    # Untyped: the reply of a call or a tool's result, whose type only the program knows.
    outcome: asyncio.Future[Any]
    """Reply of a call, result of a tool."""
    call: Call | None = None
    """Set when a call is recorded."""
    context: tuple[int, ...] | None = None
    """Prompt and completion ids of a recorded call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """One generation as the program requested it."""

    prompt_ids: tuple[int, ...]
    prompt_text: str
    limit: int
    stop: tuple[str, ...]
    parse: Callable[[str], object] | None
    facts: Mapping[str, object]
    turn: int
    messages: tuple[Message, ...] | None
    """None where it goes on in an earlier context."""


ForkHook = Callable[["RolloutContext", str], None]


@dataclass(slots=True)
class RolloutContext:
    """Implements `mmrl.tasks.base.Context` for one rollout."""

    env: Environment
    example: Example
    path: str
    """Path id within the example's trees: `<tree>` or `<tree>.<branch>...`; extended when the rollout forks."""
    replay: Sequence[Event] = ()
    on_live_call: ForkHook | None = None
    """Called before each live call; may start siblings that replay `events` so far."""
    events: list[Event] = field(default_factory=list)
    in_flight: int = 0

    async def call(
        self,
        module: str,
        messages: Sequence[Message] | str,
        *,
        after: Reply | None = None,
        max_observation: int | None = None,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        parse: Callable[[str], object] | None = None,
        facts: Mapping[str, object] = EMPTY,
    ) -> Reply:
        """See `mmrl.tasks.base.Context.call`."""
        if module not in self.env.task.program.modules:
            raise ProgramFailure(
                f"the program called module '{module}', its modules are {list(self.env.task.program.modules)}"
            )
        prompt_ids, earlier_turn = self._prompt(messages, after, max_observation)
        recorded = self._recorded("call", module, prompt_ids)
        if recorded is not None:
            replayed: Reply = await self._await_replayed(recorded)
            return replayed
        # Before the request is recorded: siblings replay the tape up to here and then sample on their own.
        if self.on_live_call is not None:
            self.on_live_call(self, module)
        event = self._record("call", module, prompt_ids)
        position = len(self.events) - 1
        try:
            # Everything that a retry needs: each attempt is the same request with another seed.
            generation = Generation(
                prompt_ids=prompt_ids,
                prompt_text=_shown(messages),
                limit=max_tokens or self.env.settings.max_tokens,
                stop=tuple(stop),
                parse=parse,
                facts=facts,
                turn=0 if earlier_turn is None else earlier_turn.turn + 1,
                messages=None if after is not None or isinstance(messages, str) else tuple(messages),
            )
            reply = await self._generate(event, position, generation)
        except BaseException as error:
            _settle(event.outcome, error)
            raise
        event.outcome.set_result(reply)
        return reply

    def measure(self, observation: Sequence[Message] | str, *, after: Reply) -> int:
        """See `mmrl.tasks.base.Context.measure`."""
        prompt_ids, before = self._extend(observation, after)
        return len(prompt_ids) - before

    async def tool(self, name: str, **arguments: object) -> object:
        """See `mmrl.tasks.base.Context.tool`."""
        recorded = self._recorded("tool", name, arguments)
        if recorded is not None:
            return await self._await_replayed(recorded)
        event = self._record("tool", name, arguments)
        self.env.tool_started()
        try:
            if name not in self.env.task.tools:
                raise ProgramFailure(f"the program used tool '{name}', the task has {sorted(self.env.task.tools)}")
            # Tools may be plain functions or coroutines; programs cannot tell, so a task may change one.
            result = self.env.task.tools[name](**arguments)
            if inspect.isawaitable(result):
                result = await result
        except RolloutError as error:
            _settle(event.outcome, error)
            raise
        except asyncio.CancelledError as error:
            _settle(event.outcome, error)
            raise
        except Exception as error:
            # The program gets a typed failure; the tool's own exception is the cause, for logs.
            failure = ToolFailure(f"tool '{name}' raised {type(error).__name__}: {error}")
            _settle(event.outcome, failure)
            raise failure from error
        finally:
            self.env.tool_ended()
        event.outcome.set_result(result)
        return result

    @property
    def calls(self) -> list[Call]:
        """Recorded calls of this rollout in order, replayed ones included; each has the one before it as parent.

        The order is that of the requests. Parents are set here: of concurrent calls the first requested may end last.
        """
        chain: list[Call] = []
        for event in self.events:
            if event.call is not None:
                parent = chain[-1].id if chain else None
                chain.append(event.call if event.call.parent == parent else replace(event.call, parent=parent))
        return chain

    def _recorded(self, kind: str, name: str, request: object) -> Event | None:
        """The tape's event for this request, or None when the tape is played out."""
        # By position and not by name: the order of requests is what a deterministic program repeats.
        position = len(self.events)
        if position >= len(self.replay):
            return None
        event = self.replay[position]
        if (event.kind, event.name, event.request) != (kind, name, request):
            raise ReplayDivergence(
                f"at position {position} of its tape the program requests {kind} '{name}' "
                f"where it requested {event.kind} '{event.name}'"
                + (" with other input" if (event.kind, event.name) == (kind, name) else "")
                + "; a program must depend only on its example and on what ctx returned"
            )
        self.events.append(event)
        return event

    async def _await_replayed(self, event: Event) -> Any:
        if event.outcome.done():
            return event.outcome.result()
        # Someone else's request is still under way (a program with concurrent calls): step out of the engine's count
        # of live programs meanwhile, or a deterministic batch would wait for this one forever.
        self.env.engine.leave()
        try:
            return await asyncio.shield(event.outcome)
        finally:
            self.env.engine.enter()

    def _record(self, kind: str, name: str, request: object) -> Event:
        event = Event(kind, name, request, asyncio.get_running_loop().create_future())
        # A failed event may have no sibling that replays it; its exception is raised in the program itself.
        event.outcome.add_done_callback(lambda future: future.cancelled() or future.exception())
        self.events.append(event)
        return event

    def _prompt(
        self, messages: Sequence[Message] | str, after: Reply | None, max_observation: int | None
    ) -> tuple[tuple[int, ...], Call | None]:
        """Prompt ids, and the call whose context they continue; counts its observation tokens."""
        if after is None:
            if isinstance(messages, str):
                raise ProgramFailure("a prompt given as text continues a reply: pass after=, or give messages")
            return self.env.render(messages), None
        # The newest first: a context that was continued twice is the later call's.
        event = next((e for e in reversed(self.events) if e.context is not None and e.context == after.context), None)
        if event is None or event.call is None:
            raise ProgramFailure("after= must be a reply that this rollout's ctx.call returned")
        prompt_ids, before = self._extend(messages, after)
        if max_observation is not None:
            prompt_ids = prompt_ids[: before + max_observation]
        event.call = replace(event.call, observation_tokens=len(prompt_ids) - before)
        return prompt_ids, event.call

    def _extend(self, observation: Sequence[Message] | str, after: Reply) -> tuple[tuple[int, ...], int]:
        """The context with what is added, and how many of its tokens stay: a sampled end-of-turn may be taken back."""
        prompt_ids = self.env.extend(after.context, observation)
        before = len(after.context)
        return prompt_ids, before if prompt_ids[:before] == after.context else before - 1

    async def _generate(self, event: Event, position: int, generation: Generation) -> Reply:
        """Sample until the text parses or the attempts are used up; the last attempt is recorded either way."""
        settings = self.env.settings
        # Before any await: with concurrent calls the tape grows while this one waits.
        earlier = [e for e in self.events[:position] if e.kind == "call"]
        call_id = f"{self.example.id}/{self.path}#{len(earlier)}"
        # Here rather than in the engine: the limit may be below the model's own.
        self._check_context(generation.prompt_ids, settings)
        failure: ParseFailure | None = None
        for attempt in range(settings.parse_retries + 1):
            completion = await self._request(event.name, generation, call_id, attempt)
            text = self.env.decode(completion.ids)
            parsed, failure = _parse(generation.parse, text)
            if failure is None:
                break
        call = Call(
            id=call_id,
            example=self.example.id,
            # The call requested before, if it has ended; `calls` puts right what concurrency leaves open.
            parent=earlier[-1].call.id if earlier and earlier[-1].call else None,
            module=event.name,
            invocation=sum(e.name == event.name for e in earlier),
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
            call = replace(call, penalty=score.penalty, facts={**generation.facts, **score.facts})
        event.call = call
        # Set with the call: only a reply that was recorded can be continued with `after=`.
        event.context = generation.prompt_ids + completion.ids
        if failure is not None:
            raise failure
        return Reply(
            text=text, parsed=parsed, finish=completion.finish, tokens=len(completion.ids), context=event.context
        )

    async def _request(self, module: str, generation: Generation, call_id: str, attempt: int) -> Completion:
        settings = self.env.settings
        sampling = Sampling(
            max_tokens=generation.limit,
            temperature=settings.temperature,
            top_p=settings.top_p,
            top_k=settings.top_k,
            stop=generation.stop,
            # By path and attempt, never by arrival: a resumed or reordered step samples the same tokens.
            seed=rng.digest(*self.env.key, "sample", call_id, attempt),
        )
        request = Request(
            prompt_ids=generation.prompt_ids,
            sampling=sampling,
            module=module,
            messages=generation.messages,
            order=(call_id, attempt),
        )
        self.in_flight += 1
        if self.in_flight > 1:  # a second request of the same program is one more strand that the schedule waits for
            self.env.engine.enter()
        try:
            return await self.env.engine.generate(request)
        except (RolloutError, asyncio.CancelledError):
            raise
        except Exception as error:
            raise EngineFailure(f"{type(error).__name__}: {error}") from error
        finally:
            self.in_flight -= 1
            if self.in_flight:  # whichever ends first: the program itself counts for the strand that ends last
                self.env.engine.leave()

    def _check_context(self, prompt_ids: Sequence[int], settings: SamplingSettings) -> None:
        if settings.max_context is not None and len(prompt_ids) >= settings.max_context:
            raise LengthFailure(
                f"a prompt of {len(prompt_ids)} tokens leaves no room in a context of {settings.max_context}"
            )


def _shown(messages: Sequence[Message] | str) -> str:
    """A prompt for people to read."""
    if isinstance(messages, str):
        return messages
    return "\n".join(f"[{message['role']}] {message['content']}" for message in messages)


def _parse(parse: Callable[[str], object] | None, text: str) -> tuple[object, ParseFailure | None]:
    # Free text is always well-formed.
    if parse is None:
        return None, None
    try:
        return parse(text), None
    except ParseFailure as failure:
        return None, failure


def _settle(outcome: asyncio.Future[object], error: BaseException) -> None:
    if not outcome.done():
        if isinstance(error, asyncio.CancelledError):
            outcome.cancel()
        else:
            outcome.set_exception(error)
