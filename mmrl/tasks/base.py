"""Task interface: data, program, tools, reward. The contract between `tasks` and the layers above.

A program is ordinary async Python. It never sees metadata, rewards, groups or engines; it only awaits `ctx`.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol, TypedDict, runtime_checkable

from mmrl.records import EMPTY, Call, Example, Reply

if TYPE_CHECKING:
    from mmrl.engines.openai import OpenAIChat

Message = Mapping[str, Any]
"""`{"role": "system" | "user" | "assistant", "content": text}`; with tools also the role `tool`, and `tool_calls`."""


class Context(Protocol):
    """Interface of a program to its rollout. Implemented by `mmrl.rollout.context` (record, replay, retries)."""

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
        """Generate with `module` on `messages` (rendered with the model's chat template).

        Args:
            messages: a prompt; with `after`, what is added to that reply's context: messages (its turn ends, a new one
                opens) or plain text (inside the same turn).
            after: go on in the context of this reply; the call is its next turn. What is added are observation tokens,
                never trained.
            max_observation: cut what is added to this many tokens (plain text only).
            max_tokens: limit on the completion; None takes `task.max_tokens`.
            stop: strings that end the completion; they stay in its text.
            parse: turns the text into a value, or raises `ParseFailure`; retried up to the allowed number of times,
                then raised here, which ends the rollout unless the program catches it; the failure's `reply` is the
                unread one. Only the last attempt is recorded.
            facts: numbers that the module's penalty and behaviour metrics need (e.g. `{"documents": 10}`); `state`, a
                text, names what the call is made in: GiGPO compares calls of the same state.
            tools: functions that the model may call, as in OpenAI's protocol. `parse` then gets the message that was
                written (`content`, `reasoning_content`, `tool_calls`, `unread_call` where one cannot be read), which is
                also `Reply.parsed` without one.
            as_message: so it does without tools, whose reply is a text else, thoughts included.
        """
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, without special tokens."""
        ...

    def unchanged_by(self, arguments: Mapping[str, object]) -> bool:
        """Return True if prompts are the same with these further arguments of the model's chat template."""
        ...

    def leave_out(self, reply: Reply) -> None:
        """Leave the call of a reply out of the rollout, which has no part in how it ends: nobody read it."""
        ...

    def leave(self) -> None:
        """Let the engine's batches no longer wait for this rollout, which has no request under way."""
        ...

    def enter(self) -> None:
        """Let the engine's batches wait for this rollout again, after `leave`."""
        ...

    def measure(self, observation: Sequence[Message] | str, *, after: Reply) -> int:
        """Count the tokens that `observation` would add to the context of a reply, the frame of a new turn included."""
        ...

    async def tool(self, name: str, /, **arguments: object) -> Any:
        """Run a tool of the task; its result is recorded on the tape, so it must be JSON-serialisable."""
        ...

    async def remember(self, name: str, arguments: Mapping[str, object], run: Callable[[], Awaitable[object]]) -> Any:
        """Record, as `tool`, anything else whose result may differ between runs: a tool of the program's own.

        Args:
            run: makes the result; not called on replay, unless it made requests of its own to this context.
        """
        ...


class Program(Protocol):
    """A language-model program. Stateless: `run` may be called many times at once.

    What only some programs can do has a protocol of its own: `ContinuingProgram`, `Canonical`, `Described`,
    `Guarded`, `FieldProgram`.
    """

    modules: tuple[str, ...]
    """Names that it passes to `ctx.call`, in program order."""

    async def run(self, example: Example, ctx: Context) -> object:
        """Execute on `example.inputs`; returns a prediction of JSON values, or what `Described` describes."""
        ...


@runtime_checkable
class ContinuingProgram(Protocol):
    """A program some of whose calls pass `after=`, so that an engine that cannot do that is refused before a run."""

    continues: Collection[str]
    """Modules that go on in the context of an earlier reply."""


def continuing_modules(program: Program) -> tuple[str, ...]:
    """Return the modules of a program that go on in the context of an earlier reply, in program order."""
    continues = program.continues if isinstance(program, ContinuingProgram) else ()
    return tuple(module for module in program.modules if module in continues)


@runtime_checkable
class Searching(Protocol):
    """A task whose corpus is known to hold, or not to hold, what its examples ask for."""

    @property
    def gold_shares(self) -> Mapping[str, float]:
        """Split -> share of its examples that the corpus can answer; absent where that is not known."""
        ...


@runtime_checkable
class Closing(Protocol):
    """A task whose program can be made to answer at once: what turn rewards by information gain need (`gain`)."""

    def closing(self, example: Example) -> tuple[str, Sequence[str]]:
        """Return the text up to the answer, were this the model's last turn; and the gold answers, as written."""
        ...


@runtime_checkable
class Canonical(Protocol):
    """A program that can write again its modules' outputs, in one way: what `algo.reserialise` trains on."""

    def canonical(self, call: Call) -> str | None:
        """Return the canonical form of `call.text`, or None if it has none.

        Parsing it again must give what parsing `call.text` gives.

        Raises:
            ParseFailure: the text cannot be parsed.
        """
        ...


@runtime_checkable
class Described(Protocol):
    """A program whose predictions are objects: the task scores the object, the journal keeps its description."""

    def description(self, prediction: Any) -> object:
        """Return the prediction as JSON values.

        Raises:
            ProgramFailure: it holds something that JSON has no form for.
        """
        ...


@runtime_checkable
class Guarded(Protocol):
    """A program that something has to hold for, in this process, while its rollouts run."""

    def guarded(self) -> AbstractContextManager[None]:
        """Return a context that the sampling coroutine enters before the first rollout and leaves after the last.

        Raises:
            ConfigError: on leaving, something that the program must not do; also ends the sampling.
        """
        ...


@runtime_checkable
class FieldProgram(Protocol):
    """A program whose modules read and write named fields (DSPy's), so that fields are enough for a demonstration."""

    def demonstration(self, module: str, inputs: Mapping[str, object], outputs: Mapping[str, object]) -> Demonstration:
        """Return the prompt that a rollout sends a module for `inputs`, with `outputs` as the module would write them.

        Raises:
            ConfigError: fields that the module does not have or that are missing, or values of another type.
        """
        ...

    def written(self, module: str, fields: Mapping[str, object]) -> str:
        """Return output fields as the text that `module` would write: `rollout.scripted` takes replies as fields."""
        ...


class Passage(TypedDict):
    """A retrieved document as the tool `search` of question answering tasks gives it to a program."""

    id: str
    title: str
    text: str
    score: float


Tool = Callable[..., object]
"""`tool(**arguments)`, sync or async."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """Task's score of one finished rollout."""

    reward: float
    """Outcome reward of the chosen reward set."""
    metrics: Mapping[str, float] = EMPTY
    """Reported numbers of the rollout (em, f1, accuracy, ...)."""
    parts: Mapping[str, float] = EMPTY
    """Components of the reward."""
    feedback: Mapping[str, str] = EMPTY
    """What is said of it in words, for optimisers of prompts: by module; of all of them under an empty name."""
    turn_rewards: Mapping[str, float] = EMPTY
    """Call id -> intermediate reward; only for reward sets with turn rewards, never for the last call."""


RESERVED = re.compile(r"|n|reward|failed_share|model_failed|caught_parse|.*_(low|high)|(module|failed|lost)/.*")
"""Names of metrics that evaluations give to numbers of their own (`stages.evaluate.evaluation_metrics`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleScore:
    """Task's score of one call by itself."""

    penalty: float = 0.0
    """R_spe of the module."""
    facts: Mapping[str, float] = EMPTY
    """Behaviour metrics of the call, averaged per module in the step's metrics."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstration:
    """Supervised example for the warm start: a prompt and the completion expected of a module."""

    module: str
    messages: Sequence[Message]
    completion: str
    history: Sequence[tuple[str, str | Sequence[Message]]] = ()
    """Earlier turns of the same context, in order: a completion, and what was added after it. Seen, never trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """Supervised example of an agent with tools: every reply is trained, after the very tokens of those before it."""

    module: str
    messages: Sequence[Message]
    """The last one is a reply."""
    tools: Sequence[Message]


@runtime_checkable
class Demonstrating(Protocol):
    """A task that makes supervised examples itself, for `algo=sft` (the built-in ones: `mmrl.tasks.mini.teach`)."""

    def demonstrations(self, example: Example) -> Sequence[Demonstration]:
        """Return good modules' calls on an example, by its metadata; empty if the metadata does not tell."""
        ...


# The entries of a task decide which options are refused as without effect, so a wrong entry hides an option.
FEATURES = ("observations", "penalties", "parse_failures", "repeated_calls")
"""Features that some programs never have: text added to contexts, penalties of single modules, replies that do
not parse, and modules that a rollout calls more than once."""


class Task(ABC):
    """Data, program, tools, reward. Built by the factory in `mmrl.tasks.TASKS`.

    Members with a value or a body here need not be written.
    """

    name: str
    """`task.name`."""
    program: Program
    """What is trained: it gets an example's inputs, and calls modules and tools."""
    tools: Mapping[str, Tool]
    """Name -> function `tool(**arguments)`, sync or async, with a JSON result."""
    reward_sets: tuple[str, ...]
    """Names of the reward sets it offers; the first is its default outcome set."""
    failure_score: float
    """Reward of a rollout that failed by the model's own doing."""
    main_metric: str = "reward"
    """The metric shown in progress and summaries."""
    endpoints: Mapping[str, OpenAIChat] = EMPTY
    """Clients of judges and external models, by their names in metrics."""

    # cached, not a plain property: an instance may also set them
    @cached_property
    def failed_metrics(self) -> Mapping[str, float]:
        """Official metrics -> the value that a failed rollout counts in an evaluation, so that all are reported.

        What is below 0 holds for failures of the model alone.
        """
        # Where outcomes may be below 0, a rollout that breaks must not look better than one that loses.
        is_reward = self.main_metric in ("reward", "score")
        return {self.main_metric: min(0.0, self.failure_score) if is_reward else 0.0}

    @cached_property
    def absent_features(self) -> Collection[str]:
        """Members of `FEATURES` that the program never has, so that options about them are refused."""
        return frozenset()

    @property
    def unrepeatable(self) -> Sequence[str]:
        """Return the settings by which a rollout cannot be played again (`task.key: got VALUE`)."""
        return ()

    @abstractmethod
    def examples(self, split: str) -> Sequence[Example]:
        """Return all examples of `train`, `dev` or `test`, in a stable order."""

    @abstractmethod
    def score(
        self, example: Example, prediction: Any, path: Sequence[Call], reward_set: str
    ) -> Score | Awaitable[Score]:
        """Score a finished rollout (may be async: then it is awaited).

        Args:
            prediction: return value of the program.
            path: the rollout's calls, the first one first.
            reward_set: one of `reward_sets`.
        """

    def score_call(self, call: Call) -> ModuleScore:
        """Return penalty and behaviour facts of one call, from its text and its facts."""
        return ModuleScore()

    @abstractmethod
    def describe(self) -> Mapping[str, object]:
        """Return facts for the run's summary: data sources, sizes, corpus, 'mini world' or 'partial corpus' labels."""

    def server_problems(self) -> list[str]:
        """Check the task's servers (judges, external models): one sentence with the config key for each unusable one.

        Called before a model loads.
        """
        return [problem for chat in self.endpoints.values() for problem in chat.unreachable()]

    def reset_counts(self) -> None:
        """Forget requests to servers so far; called where a run begins (a sweep uses one task for several)."""
        for chat in self.endpoints.values():
            chat.forget_counts()

    def endpoint_usage(self) -> Mapping[str, float]:
        """Return the requests to judges and external models so far, by metric name (`endpoint/judge/requests`)."""
        counts = [chat.usage.metrics(f"endpoint/{name}") for name, chat in self.endpoints.items()]
        return {name: count for usage in counts for name, count in usage.items()}

    def close(self) -> None:  # noqa: B027 (most tasks have nothing to close)
        """Close what the task has opened (a retriever's connections); called where a run ends.

        A later use starts it again.
        """
