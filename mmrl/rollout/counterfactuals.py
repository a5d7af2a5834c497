"""Branches that play a rollout again without the replies of one module (`plans.Exchange`; CCPO)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from mmrl.engines.base import Completion
from mmrl.rollout.branches import Branch
from mmrl.rollout.context import Generation, RolloutContext, Substitute
from mmrl.rollout.environment import Teacher
from mmrl.rollout.plans import Exchange
from mmrl.system.objects import imported


def counterfactuals(exchange: Exchange, ctx: RolloutContext) -> Iterator[tuple[str, Branch]]:
    """Yield, for each module that a finished rollout called, how it is played again.

    The tape ends before the module's first call, whose reply is the first to be exchanged; another program plays from
    the start.
    """
    for module in exchange.modules:
        events = ctx.events
        first = next((index for index, event in enumerate(events) if event.call and event.call.module == module), None)
        if first is None:
            continue  # the program did without it
        branch = Branch(example=ctx.example, path=f"{ctx.path}~{module}")
        if exchange.program is not None:
            yield module, replace(branch, program=imported("algo.program", exchange.program))
            continue
        substitute = _text(exchange.reply) if exchange.teacher is None else _model(ctx.env.teachers[exchange.teacher])
        yield module, replace(branch, tape=events[:first], substitutes={module: substitute})


def _text(text: str) -> Substitute:
    """Reply with the same text to every call."""

    async def reply(ctx: RolloutContext, generation: Generation, attempt: int) -> tuple[Completion, str]:
        return Completion(ids=ctx.env.extend((), text, False), logprobs=None, finish="stop"), text

    return reply


def _model(teacher: Teacher) -> Substitute:
    """Reply by a teacher's model to the same messages; the completion has the policy's ids of its text."""

    async def reply(ctx: RolloutContext, generation: Generation, attempt: int) -> tuple[Completion, str]:
        env = teacher.environment
        assert generation.messages is not None  # no module that goes on in a context has a teacher (`run.check`)
        rendered = replace(generation, prompt_ids=env.render(generation.messages))
        # The policy's batches must not wait for a program that waits for another engine.
        ctx.env.engine.leave()
        env.engine.enter()
        try:
            completion = await ctx.sampled(env.engine, rendered, attempt)
        finally:
            env.engine.leave()
            ctx.env.engine.enter()
        text = env.decode(completion.ids)
        ids = teacher.student_ids(completion.ids, text, completion.finish, True)
        return replace(completion, ids=ids, logprobs=None), text

    return reply
