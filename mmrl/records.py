"""The records of one training step: example, call, rollout, forest. Immutable, no torch.

Made by `rollout`, completed by the task's rewards, read by `credit`, written to the journal.

Worked example. One question, FoF with group size 2 on the program rewriter -> answerer:

    calls     q1/0#0 rewriter  parent -        completion "### a; b ###"   (branch 0)
              q1/0#1 answerer  parent q1/0#0   completion "Lisbon"
              q1/1#0 rewriter  parent -        completion "### a ###"      (branch 1, same prompt)
              q1/1#1 answerer  parent q1/1#0   completion "Porto"
    rollouts  q1/0  leaf q1/0#1  reward 1.0
              q1/1  leaf q1/1#1  reward 0.0

With a fork at the answerer instead there is one `q1/0#0`, and both `q1/0#1` and `q1/1#1` have it as parent:
a shared prefix is one call, never a copy per rollout.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from mmrl.errors import MODEL_CAUSED, ParseFailure


class _Empty(Mapping[str, Any]):
    """The empty mapping that nobody can fill; hashable, or Python 3.11 refuses it as default of a dataclass field."""

    def __getitem__(self, key: str) -> Any:
        raise KeyError(key)

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0

    def __hash__(self) -> int:
        return 0

    def __repr__(self) -> str:
        return "{}"


LARGEST = 1e100
"""Largest size of a reward, penalty, value or log-probability: its square, summed over a batch, is still a number."""
EMPTY: Mapping[str, Any] = _Empty()


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """Record of a task's data set."""

    id: str
    """Unique within its split."""
    inputs: Mapping[str, Any]
    """Fields for the program."""
    metadata: Mapping[str, Any] = EMPTY
    """Fields for the reward alone (gold answers, titles)."""


@dataclass(frozen=True, slots=True)
class Reply:
    """A model's reply, as `ctx.call` returns it."""

    text: str
    """The completion without special tokens."""
    parsed: Any
    """Result of the `parse` function given to `ctx.call`; None without one. With tools, the message that was written
    where there is no such function, or it raised."""
    finish: str
    """`stop`, `eos` or `length`."""
    tokens: int = 0
    """Completion tokens."""
    context: tuple[int, ...] = ()
    """Prompt and completion token ids: pass the reply as `after=` to go on in the same context, token for token."""
    logprobs: tuple[float, ...] | None = None
    """Sampling log-probabilities of the completion's tokens; None where the engine has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """Generation by one module: prompt tokens in, completion tokens out.

    Per-token tuples have length `completion_tokens` (T), aligned with `completion_ids`; an end-of-turn token
    that was sampled is part of the completion and is trained.
    """

    id: str
    """Unique within the forest."""
    example: str
    """Id of the example."""
    parent: str | None
    """Id of the call before it on the path; None for the first."""
    module: str
    """Module name, as listed in `Forest.modules`."""
    invocation: int = 0
    """Number of earlier calls of the same module on the call's path (0-based)."""
    turn: int = 0
    """Turn within its context (0-based); 0 for calls with a context of their own."""
    completion_tokens: int
    """T, the number of trained tokens."""
    prompt_tokens: int | None = None
    """P; None when the forest was read from a file that does not say."""
    prompt_ids: tuple[int, ...] = ()
    """The exact prompt, length P; empty when unknown."""
    completion_ids: tuple[int, ...] = ()
    """The trained ids, length T: as sampled, but for `algo.reserialise` and calls of a teacher; empty when unknown."""
    sampled_ids: tuple[int, ...] = ()
    """Sampled ids, if `completion_ids` differ from them; empty otherwise."""
    logprobs: tuple[float, ...] | None = None
    """Sampling log-probabilities: log-softmax(logits / temperature) over the full vocabulary. Length T."""
    ref_logprobs: tuple[float, ...] | None = None
    """Log-probabilities under the reference policy, when the algorithm asks for them. Length T."""
    distillation: tuple[float, ...] | None = None
    """Log-probability under the teacher of the call's module less that under the policy (`algo.distill`). Length T."""
    values: tuple[float, ...] | None = None
    """Critic values, when there is a critic: length T, or T + observation_tokens with `algo.obs=all`."""
    text: str = ""
    """The completion decoded, without special tokens; for people and parsers, never trained on."""
    prompt_text: str = ""
    """The prompt decoded; for people only."""
    finish: str = "stop"
    """Why generation ended: `stop` (stop string), `eos`, `length`."""
    observation_tokens: int = 0
    """Tool tokens that follow inside the same context; never trained."""
    ok: bool = True
    """False for a call whose completion could not be parsed; its rollout ended there, or the program caught it."""
    present_fields: int = 0
    """Output fields parsed, for the format-failure reward of a failing call."""
    expected_fields: int = 0
    """Output fields required."""
    penalty: float = 0.0
    """Module-specific reward R_spe (<= 0 in MHGPO)."""
    turn_reward: float | None = None
    """Intermediate reward of this turn; None on the last call of a rollout and where a task has none."""
    teacher: str | None = None
    """Name of the teacher program that made the rollout; None for the student."""
    policy_version: int | None = None
    """Version of the weights that sampled it."""
    attempts: int = 1
    """Generations made for it, parse retries included; only the last one is recorded."""
    facts: Mapping[str, Any] = EMPTY
    """Behaviour facts from the program or the task (numbers of queries, documents, validity)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """Execution of the program on an example: a root-to-leaf path of calls with its reward."""

    id: str
    """`<example>/<path>`, unique within the forest."""
    example: str
    leaf: str | None
    """Id of the last call; None if the rollout failed before its first call."""
    reward: float | None
    """Outcome reward; None where the task scores nothing, or when it failed from an outside cause: never credited."""
    error: str | None = None
    """`RolloutError.kind`, or None."""
    error_message: str = ""
    error_traceback: str = ""
    """The end of the traceback of an exception in the code of a program or a reward; no more than 4,000 characters."""
    fork: str | None = None
    """Module at which the tree of this rollout forked (None: independent)."""
    teacher: str | None = None
    prediction: Any = None
    """Return value of the program; JSON-serialisable."""
    metrics: Mapping[str, float] = EMPTY
    """Task metrics of this rollout (em, f1, accuracy, ...)."""
    parts: Mapping[str, float] = EMPTY
    """Components of the reward, by name."""
    feedback: Mapping[str, str] = EMPTY
    """What the task's score says in words, by module; of all of them under an empty name."""
    counterfactuals: Mapping[str, float] = EMPTY
    """Module -> outcome of the same rollout played again with that module's replies exchanged."""
    counterfactual_calls: int = 0
    """Calls that were made for these outcomes and are in no forest."""

    @property
    def failed_outside(self) -> bool:
        """True if it failed by no doing of the model: then it counts for nothing in the loss."""
        return self.error is not None and self.error not in MODEL_CAUSED


def caught(rollout: Rollout, path: Sequence[Call]) -> tuple[Call, ...]:
    """Return the calls of a rollout that could not be parsed and after which its program continued."""
    failing = tuple(call for call in path if not call.ok)
    ended = rollout.error == ParseFailure.kind and bool(path) and not path[-1].ok
    return failing[:-1] if ended else failing


@dataclass(frozen=True, kw_only=True)
class Forest:
    """Calls and rollouts of one step. Calls are in a topological order: parents come first."""

    calls: Mapping[str, Call]
    rollouts: tuple[Rollout, ...]
    modules: tuple[str, ...]
    """Module names in program order."""
    step: int = 0
    meta: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def children(self) -> Mapping[str, tuple[str, ...]]:
        """Call id -> ids of its direct successors, in order."""
        successors: dict[str, list[str]] = {call_id: [] for call_id in self.calls}
        for call in self.calls.values():
            if call.parent is not None:
                successors[call.parent].append(call.id)
        return {call_id: tuple(ids) for call_id, ids in successors.items()}

    @cached_property
    def examples(self) -> tuple[str, ...]:
        """Example ids in order of first appearance among the rollouts."""
        return tuple(dict.fromkeys(rollout.example for rollout in self.rollouts))

    @cached_property
    def caught(self) -> Mapping[str, Call]:
        """Calls that could not be parsed and after which their program went on, by id."""
        return {call.id: call for rollout in self.rollouts for call in caught(rollout, self.path(rollout))}

    def part(self, examples: Iterable[str]) -> Forest:
        """Return the part that belongs to some examples."""
        # Mostly all of it: then the same forest, without a copy of a large batch.
        ids = set(examples)
        if ids.issuperset(self.examples) and all(call.example in ids for call in self.calls.values()):
            return self
        calls = {key: call for key, call in self.calls.items() if call.example in ids}
        return replace(self, calls=calls, rollouts=tuple(r for r in self.rollouts if r.example in ids))

    def path(self, rollout: Rollout) -> tuple[Call, ...]:
        """Return the calls of `rollout`, root first; empty if it failed before its first call."""
        # Calls know their parents alone: a call may have many successors, but lies on one way up.
        upwards: list[Call] = []
        call_id = rollout.leaf
        while call_id is not None:
            upwards.append(self.calls[call_id])
            call_id = upwards[-1].parent
        return tuple(reversed(upwards))
