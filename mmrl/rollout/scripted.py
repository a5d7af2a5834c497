"""Rollout with a model whose replies a test prescribes: for tests of programs and rewards, without any weights.

The program runs in a real `ctx` (tools, parsing, typed failures, limits on what it may call); only the engine is a
script.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from mmrl.engines.base import Completion, Engine, Request
from mmrl.errors import EngineFailure
from mmrl.records import Example, Rollout
from mmrl.rollout import with_program
from mmrl.rollout.environment import Environment, SamplingSettings, no_reader
from mmrl.rollout.plans import independent
from mmrl.rollout.sample import sample
from mmrl.tasks.base import FieldProgram, Message, Task


def play(task: Task, example: Example, replies: Sequence[str | Mapping[str, object]]) -> Rollout:
    """Run the program on one example, its calls answered by `replies` in order.

    Args:
        replies: texts; for DSPy programs also output fields (`{"label": "spam"}`), which are written in DSPy's form.

    Returns:
        The rollout with prediction and reward, or with `error` and `error_message`.

    Raises:
        ValueError: the program requested fewer replies than there are.
    """
    task = with_program(task)
    # Characters are the tokens: no tokenizer, and every text encodes and decodes to itself.
    engine = _Script(task, list(replies))
    env = Environment(
        task=task,
        engine=engine,
        render=lambda messages: _ids(_text(messages)),
        extend=lambda context, added, _: (*context, *_ids(added if isinstance(added, str) else _text(added))),
        decode=_decoded,
        read=lambda prompt, ids, tools: no_reader(prompt, ids, tools) if tools else {"content": _decoded(ids)},
        settings=SamplingSettings(temperature=1.0, top_p=1.0, top_k=0, parse_retries=0, max_tokens=1 << 20),
        key=(0, 0),
    )
    forest = asyncio.run(sample(env, [(example, independent(1))], task.reward_sets[0]))
    (rollout,) = forest.rollouts
    # A failed rollout ends early, so what it left unused is no mistake of the script.
    if engine.replies and rollout.error is None:
        raise ValueError(f"{len(engine.replies)} replies were not requested: {engine.replies}")
    return rollout


@dataclass(slots=True)
class _Script(Engine):
    """Engine that replies from a list, in order."""

    task: Task
    replies: list[str | Mapping[str, object]]
    policy_version: int = 0
    requests: list[Request] = field(default_factory=list)

    async def generate(self, request: Request) -> Completion:
        """Return the next reply, one token per character."""
        self.requests.append(request)
        if not self.replies:
            raise EngineFailure(
                f"module '{request.module}' requested reply {len(self.requests)}, the script has no more"
            )
        reply = self.replies.pop(0)
        if not isinstance(reply, str):
            if not isinstance(self.task.program, FieldProgram):
                raise EngineFailure(
                    f"reply {len(self.requests)} has fields, which only DSPy programs read; give a text"
                )
            reply = self.task.program.written(request.module, reply)
        ids = _ids(reply) or _ids(" ")
        return Completion(ids=ids, logprobs=(0.0,) * len(ids), finish="eos")


def _text(messages: Sequence[Message]) -> str:
    return "".join(f"<{message['role']}>{message['content']}" for message in messages)


def _decoded(ids: Sequence[int]) -> str:
    return "".join(map(chr, ids))


def _ids(text: str) -> tuple[int, ...]:
    return tuple(map(ord, text))
