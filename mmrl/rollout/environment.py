"""What all rollouts of one step or evaluation share: task, engine, tokenizer, sampling settings, teachers.

Made by `stages.collect`, `stages.evaluate` and `mmrl plan`; read by `rollout.context` and `rollout.sample`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mmrl import rng
from mmrl.config import AlgoConfig, EvalConfig, TaskConfig
from mmrl.engines.base import Engine
from mmrl.models.chat import decode_text, render_observation, render_prompt
from mmrl.records import Call
from mmrl.tasks.base import Message, Task

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingSettings:
    """How calls are sampled in one phase (training or evaluation)."""

    temperature: float
    top_p: float
    top_k: int
    parse_retries: int
    max_tokens: int
    max_context: int | None = None
    timeout_s: float = 600.0
    """Longest that one rollout may take."""


def sampling_settings(phase: AlgoConfig | EvalConfig, task: TaskConfig) -> SamplingSettings:
    """Sampling in training (`algo.*`) or in evaluation (`eval.*`)."""
    return SamplingSettings(
        temperature=phase.temperature,
        top_p=phase.top_p,
        top_k=phase.top_k,
        parse_retries=phase.parse_retries,
        max_tokens=task.max_tokens,
        max_context=task.max_context,
        timeout_s=task.timeout_s,
    )


@dataclass(slots=True, kw_only=True)
class Environment:
    """What all rollouts of one step share."""

    task: Task
    engine: Engine
    render: Callable[[Sequence[Message]], tuple[int, ...]]
    """Messages -> prompt token ids, generation prompt included; special tokens in contents are plain text."""
    extend: Callable[[Sequence[int], str | Sequence[Message]], tuple[int, ...]]
    """Context ids and an observation -> the next prompt of the same context."""
    decode: Callable[[Sequence[int]], str]
    """Token ids -> text without special tokens."""
    settings: SamplingSettings
    key: rng.Key
    """(run seed, step): with the example and the path, the source of every sampling seed."""
    teachers: Mapping[str, Teacher] = field(default_factory=dict)
    """Teachers by name, for plans that have rollouts of theirs."""
    retrieve_s: float = 0.0
    """Seconds during which at least one tool ran."""
    running_tools: int = 0
    tools_since: float = 0.0
    """When the first of the running tools started."""

    def tool_started(self) -> None:
        """Count a tool that starts."""
        # Concurrent tools overlap: the clock runs from the first start to the last end, so that no second counts twice.
        if self.running_tools == 0:
            self.tools_since = time.perf_counter()
        self.running_tools += 1

    def tool_ended(self) -> None:
        """Count a tool that ended."""
        self.running_tools -= 1
        if self.running_tools == 0:
            self.retrieve_s += time.perf_counter() - self.tools_since


@dataclass(frozen=True, slots=True, kw_only=True)
class Teacher:
    """One teacher in one step."""

    environment: Environment
    """Its program, engine and tokenizer."""
    student_ids: Callable[[Call], tuple[int, ...]]
    """A call of the teacher to completion ids of the student: the same ids where both share a vocabulary."""


def make_environment(
    task: Task, engine: Engine, tokenizer: PreTrainedTokenizerBase, settings: SamplingSettings, key: rng.Key
) -> Environment:
    """The environment of a task whose prompts `tokenizer` renders and `engine` answers."""
    # Functions rather than the tokenizer itself, so that tests run programs without one.
    return Environment(
        task=task,
        engine=engine,
        render=lambda messages: render_prompt(tokenizer, messages),
        extend=lambda context, observation: render_observation(tokenizer, context, observation),
        decode=lambda ids: decode_text(tokenizer, ids),
        settings=settings,
        key=key,
    )
