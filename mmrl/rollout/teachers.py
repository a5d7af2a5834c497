"""Rollouts of teachers: a teacher's program runs live, then the student's program is told what the teacher answered.

Used by `rollout.sample`. The second run gives what training needs: the student's own prompts around the teacher's
inputs and outputs (arXiv 2508.04660; semantics §1.6). Calls are matched by module and invocation, tool results by
order and arguments. A student's program that asks for a call which the teacher never made has diverged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from mmrl.engines.base import Completion
from mmrl.errors import ReplayDivergence, RolloutError
from mmrl.records import Call
from mmrl.rollout.context import Environment, Event, RolloutContext, Wanted
from mmrl.tasks.base import Reply


@dataclass(frozen=True, slots=True, kw_only=True)
class Teacher:
    """One teacher in one step."""

    environment: Environment
    """Its program, engine and tokenizer."""
    retell: Callable[[Call], tuple[int, ...]]
    """A call of the teacher to completion ids of the student: the same ids where both share a vocabulary."""


@dataclass(slots=True)
class TaughtContext(RolloutContext):
    """The `ctx` of the student's program: it answers with what the teacher said."""

    teacher: Teacher | None = None
    name: str = ""
    said: RolloutContext | None = None
    """The teacher's finished rollout."""
    failure: RolloutError | None = None
    """How it failed, if it did."""
    told: dict[int, Call] = field(default_factory=dict)
    """Position among this rollout's calls -> the teacher's call there."""

    async def tool(self, name: str, **arguments: Any) -> Any:
        """The teacher's result where it asked for the same at this place, else the tool itself."""
        assert self.said is not None
        earlier = sum(event.kind == "tool" and event.name == name for event in self.events)
        asked = [event for event in self.said.events if event.kind == "tool" and event.name == name]
        if earlier < len(asked) and asked[earlier].asked == arguments and asked[earlier].outcome.done():
            event = asked[earlier]
            self.events.append(event)
            return event.outcome.result()
        # Spelled out: a dataclass with slots is another class than the one that `super()` remembers.
        return await RolloutContext.tool(self, name, **arguments)

    async def _generate(self, event: Event, position: int, wanted: Wanted) -> Reply:
        told = self._answer(event.name, position)
        self.told[sum(e.kind == "call" for e in self.events[:position])] = told
        try:
            return await RolloutContext._generate(self, event, position, wanted)
        finally:
            if event.call is not None:
                event.call = replace(
                    event.call, logprobs=None, teacher=self.name, policy_version=None, attempts=told.attempts
                )

    async def _ask(self, module: str, wanted: Wanted, call_id: str, attempt: int) -> Completion:
        assert self.teacher is not None
        told = self.told[int(call_id.rpartition("#")[2])]
        return Completion(ids=self.teacher.retell(told), logprobs=(), finish=told.finish)

    def _answer(self, module: str, position: int) -> Call:
        """The teacher's call of the same module and invocation.

        Raises:
            RolloutError: the teacher failed there, or never made such a call.
        """
        assert self.said is not None
        invocation = sum(event.kind == "call" and event.name == module for event in self.events[:position])
        asked = [event for event in self.said.events if event.kind == "call" and event.name == module]
        if invocation < len(asked):
            found = asked[invocation].call
            if found is not None:
                return found
            if asked[invocation].outcome.done():
                asked[invocation].outcome.result()  # raises what ended the teacher's rollout there
        raise self.failure or ReplayDivergence(
            f"the student's program asks for call {invocation} of module '{module}', which teacher '{self.name}' "
            "never made"
        )


def taught(
    env: Environment, teachers: Mapping[str, Teacher], name: str, said: RolloutContext, failure: RolloutError | None
) -> TaughtContext:
    """The context of the student's run after a teacher's."""
    return TaughtContext(env, said.example, said.path, teacher=teachers[name], name=name, said=said, failure=failure)
