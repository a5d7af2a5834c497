"""Environment of all rollouts of one step or evaluation: task, engine, tokenizer, sampling settings, teachers.

Made by `stages.collect`, `stages.evaluate` and `mmrl plan`; read by `rollout.context` and `rollout.sample`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from mmrl import rng
from mmrl.config import AlgoConfig, EvalConfig, TaskConfig
from mmrl.config.sft import SftConfig
from mmrl.engines.base import Engine
from mmrl.errors import RequestFailure
from mmrl.models.chat import decode_text, render_observation, render_prompt, template_of
from mmrl.models.replies import callable_tools, message_of
from mmrl.tasks.base import Message, Task

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingSettings:
    """Sampling of calls in one phase (training or evaluation)."""

    temperature: float
    top_p: float
    top_k: int
    parse_retries: int
    max_tokens: int
    max_context: int | None = None
    timeout_s: float = 600.0
    """Longest that one rollout may take."""
    caught_parse_penalty: float = 0.0
    """Penalty of a call that does not parse and after which its program goes on."""


def sampling_settings(phase: AlgoConfig | SftConfig | EvalConfig, task: TaskConfig) -> SamplingSettings:
    """Return the sampling settings of training (`algo.*`) or in evaluation (`eval.*`)."""
    return SamplingSettings(
        temperature=phase.temperature,
        top_p=phase.top_p,
        top_k=phase.top_k,
        parse_retries=phase.parse_retries,
        max_tokens=task.max_tokens,
        max_context=task.max_context,
        timeout_s=task.timeout_s,
        # only programs of a user's own catch anything
        caught_parse_penalty=getattr(task, "caught_parse_penalty", 0.0),
    )


@dataclass(slots=True)
class Stopwatch:
    """Number and time of uses of something; several may run at once."""

    seconds: float = 0.0
    """During which at least one ran."""
    calls: int = 0
    """Uses that have ended."""
    spent: float = 0.0
    """Seconds of all calls together."""
    longest: float = 0.0
    """Seconds of the longest call."""
    empty: int = 0
    """Calls that brought nothing."""
    under_way: int = 0
    since: float = 0.0
    """When the first of those that run now started."""

    @contextmanager
    def running(self, results: Sequence[object] = ()) -> Iterator[None]:
        """Time a use inside; at its end `results` has what it brought."""
        started = time.perf_counter()
        # Concurrent ones overlap: the clock runs from the first start to the last end, so no second counts twice.
        if self.under_way == 0:
            self.since = started
        self.under_way += 1
        try:
            yield
        finally:
            now = time.perf_counter()
            self.under_way -= 1
            self.calls += 1
            self.spent += now - started
            self.longest = max(self.longest, now - started)
            self.empty += any(isinstance(result, list | tuple) and not result for result in results)
            if self.under_way == 0:
                self.seconds += now - self.since


def no_reader(prompt: Sequence[int], ids: Sequence[int], tools: Sequence[Message]) -> Message:
    """Refuse to read a message: stands for the reader where there is no tokenizer."""
    raise RequestFailure("tools: this environment has no tokenizer that reads their calls")


@dataclass(slots=True, kw_only=True)
class Environment:
    """Everything that the rollouts of one step share."""

    task: Task
    engine: Engine
    render: Callable[..., tuple[int, ...]]
    """Messages, and tools where there are any -> prompt token ids, generation prompt included; special tokens in
    contents are plain text."""
    extend: Callable[[Sequence[int], str | Sequence[Message], bool], tuple[int, ...]]
    """Context ids, an observation, whether the last id is an end of turn -> the next prompt of the same context."""
    decode: Callable[[Sequence[int]], str]
    """Token ids -> text without special tokens."""
    settings: SamplingSettings
    key: rng.Key
    """(run seed, step): with the example and the path, the source of every sampling seed."""
    version: int | None = None
    """Version of the policy that samples; None: the newest."""
    read: Callable[[Sequence[int], Sequence[int], Sequence[Message]], Message] = no_reader
    """Prompt, completion and tools -> the message that was written: its content and its tool calls."""
    unchanged_by: Callable[[Mapping[str, object]], bool] = lambda arguments: False
    """Further arguments of the chat template -> whether prompts are the same with them."""
    teachers: Mapping[str, Teacher] = field(default_factory=dict)
    """Teachers by name, for plans that have rollouts of theirs."""
    retrieving: Stopwatch = field(default_factory=Stopwatch)
    """Time of all tools together."""
    tools: dict[str, Stopwatch] = field(default_factory=dict)
    """Time of each tool that was used."""
    scoring: Stopwatch = field(default_factory=Stopwatch)
    """The task's reward of finished rollouts."""
    generated: int = 0
    """Completions that engines made, of dropped rollouts, second plays and replies that do not parse too."""

    def attempts(self, module: str) -> int:
        """Return the samples of a call until its reply parses: one where it would be the same reply again."""
        same = self.settings.temperature == 0 and self.engine.repeats(module)
        return 1 if same else self.settings.parse_retries + 1

    @contextmanager
    def using(self, tool: str) -> Iterator[list[object]]:
        """Time the use of a tool; its results are put into the list."""
        results: list[object] = []
        with self.retrieving.running(results), self.tools.setdefault(tool, Stopwatch()).running(results):
            yield results


@dataclass(frozen=True, slots=True, kw_only=True)
class Teacher:
    """Teacher in a step."""

    environment: Environment
    """Environment of the teacher: program, engine and tokenizer."""
    student_ids: Callable[[tuple[int, ...], str, str, bool], tuple[int, ...]]
    """Ids, text and end of a teacher's completion, and whether a turn begins with it, to ids of the student: the same
    where both share a vocabulary."""
    refuse: Callable[[str], None] = lambda text: None
    """Raises `RequestFailure` where the text of a whole reply cannot be trained behind the student's prompts."""


def make_environment(
    task: Task, engine: Engine, tokenizer: PreTrainedTokenizerBase, settings: SamplingSettings, key: rng.Key
) -> Environment:
    """Return the environment of a task whose prompts `tokenizer` renders and `engine` answers."""
    # Functions rather than the tokenizer itself, so that tests run programs without one.
    return Environment(
        task=task,
        engine=engine,
        render=lambda messages, tools=(): render_prompt(tokenizer, messages, callable_tools(tokenizer, tools)),
        extend=partial(render_observation, tokenizer),
        decode=lambda ids: decode_text(tokenizer, ids),
        read=lambda prompt, ids, tools: message_of(tokenizer, prompt, ids, tools),
        unchanged_by=lambda arguments: template_of(tokenizer).unchanged_by(arguments),
        settings=settings,
        key=key,
    )
