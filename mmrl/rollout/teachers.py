"""Rollouts of teachers: a teacher's program runs live, then its outputs are teacher-forced through the student's.

Used by `rollout.sample`. The second run gives what training needs: the student's own prompts around the teacher's
inputs and outputs (arXiv 2508.04660, Sec. 3.3; docs/mmgrpo.md). Calls are matched by module and invocation, tool
results by order and arguments. A student's program that requests a call which the teacher never made has diverged.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from mmrl import rng
from mmrl.engines.base import Completion, Engine
from mmrl.errors import ReplayDivergence, RolloutError
from mmrl.models.chat import refuse_unended, reply_ids, text_behind_prompt
from mmrl.records import Call, Reply
from mmrl.rollout.context import Generation, RolloutContext
from mmrl.rollout.environment import SamplingSettings, Teacher, make_environment
from mmrl.rollout.tape import Event
from mmrl.system.user_code import own_containers
from mmrl.tasks.base import Task

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedTeacher:
    """A teacher of mmGRPO for a whole run: its task (with its prompts), engine and tokenizer."""

    task: Task
    engine: Engine
    tokenizer: PreTrainedTokenizerBase
    shares_vocabulary: bool
    """True if its token ids are the student's, so that its samples are trained as they are."""


def teachers_of_step(
    loaded: Mapping[str, LoadedTeacher], settings: SamplingSettings, key: rng.Key, tokenizer: PreTrainedTokenizerBase
) -> dict[str, Teacher]:
    """Return the teachers as rollouts of one step use them; `tokenizer` is the student's."""

    def reencoded(ids: tuple[int, ...], text: str, finish: str, begins: bool) -> tuple[int, ...]:
        spoken = text_behind_prompt(tokenizer, text) if begins else text
        written = reply_ids(tokenizer, spoken, begins=begins)
        # The student learns to end its turn where the teacher ended its own.
        return written if finish == "eos" else written[:-1] or written

    return {
        name: Teacher(
            environment=make_environment(teacher.task, teacher.engine, teacher.tokenizer, settings, key),
            student_ids=(lambda ids, *_: ids) if teacher.shares_vocabulary else reencoded,
            refuse=(lambda text: None)
            if teacher.shares_vocabulary
            else partial(refuse_unended, tokenizer, where=f"algo.teachers: {name}"),
        )
        for name, teacher in loaded.items()
    }


@dataclass(slots=True, kw_only=True)
class TeacherForcedContext(RolloutContext):
    """The `ctx` of the student's program after a teacher's rollout: calls return what the teacher's calls returned."""

    teacher: str
    source: RolloutContext
    """The teacher's finished rollout."""
    failure: RolloutError | None
    """Error that ended it, if it failed."""

    async def remember(
        self, name: str, arguments: Mapping[str, object], run: Callable[[], Awaitable[object]]
    ) -> object:
        """Return the teacher's result if it used the tool with the same arguments at this place, else run the tool."""
        # By order among the uses of this tool: the two programs may interleave tools and calls differently.
        position = sum(event.kind == "tool" and event.name == name for event in self.events)
        uses = self._of_teacher("tool", name)
        match = uses[position] if position < len(uses) else None
        if match is not None and match.request == arguments and match.outcome.done() and not match.nested:
            self.events.append(match)
            return own_containers(match.outcome.result())
        # Spelled out: a dataclass with slots is another class than the one that `super()` remembers.
        return await RolloutContext.remember(self, name, arguments, run)

    async def _generate(self, event: Event, generation: Generation) -> Reply:
        # The prompt is the student's own, the completion the teacher's (teacher forcing).
        match = self._match(generation)
        try:
            return await RolloutContext._generate(self, event, generation)
        finally:
            if event.call is not None:
                # The student never sampled these tokens: the trainer computes its own log-probabilities of them.
                event.call = replace(
                    event.call, logprobs=None, teacher=self.teacher, policy_version=None, attempts=match.attempts
                )

    async def _reply(self, generation: Generation, attempt: int) -> tuple[Completion, str]:
        match, teacher = self._match(generation), self.env.teachers[self.teacher]
        if generation.begins and match.finish == "eos":  # one that was cut may be all thoughts
            teacher.refuse(match.text)
        ids = teacher.student_ids(match.completion_ids, match.text, match.finish, generation.begins)
        return Completion(ids=ids, logprobs=(), finish=match.finish), self.env.decode(ids)

    def _match(self, generation: Generation) -> Call:
        """Return the teacher's call of the same module and invocation.

        Raises:
            RolloutError: the teacher failed there, or never made such a call.
        """
        module = generation.module
        invocation = sum(event.name == module for event in generation.earlier)
        calls = self._of_teacher("call", module)
        if invocation < len(calls):
            call = calls[invocation].call
            if call is not None:
                return call
            if calls[invocation].outcome.done():
                calls[invocation].outcome.result()  # raises what ended the teacher's rollout there
        raise self.failure or ReplayDivergence(
            f"the student's program requests call {invocation} of module '{module}', which teacher '{self.teacher}' "
            "never made"
        )

    def _of_teacher(self, kind: str, name: str) -> list[Event]:
        return [event for event in self.source.events if event.kind == kind and event.name == name]
