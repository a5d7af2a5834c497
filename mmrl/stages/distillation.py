"""Numbers of teachers, between sampling and credit: `algo.distill`, and turn rewards by `task.reward=privileged`.

A teacher scores the tokens that the policy has sampled; it writes none. It may read more than the policy did:
`algo.privileged` is put to the end of the prompt's last message, in a growing context to that of its first turn. So
nothing that is sampled has ever seen it. All forwards are the trainer's packs: shared beginnings once, no dropout, the
run's temperature, the full vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from statistics import fmean
from typing import TYPE_CHECKING, Any, TypeAlias

from mmrl.config import AlgoConfig
from mmrl.config.teacher import FIELD, INITIAL, POLICY
from mmrl.errors import ConfigError
from mmrl.models.chat import added_to_message, end_of_prompt
from mmrl.records import EMPTY, Call, Example, Forest, Rollout

if TYPE_CHECKING:
    from mmrl.trainer.forwards import Forwards

FEEDBACK = "feedback"
"""Field of what the task's score said in words of the rollout (`Score.feedback`); no record has it."""
EMPTY_FIELDS: tuple[object, ...] = (None, "", [], {}, ())
Scorer: TypeAlias = Callable[[Sequence[Call]], Sequence[Sequence[float]]]
"""Calls -> log-probability of each token of their completions, after their prompts."""


def template_of_text(text: str) -> str:
    """Return the text of `algo.privileged` with its fields in braces; a field alone stands behind its name."""
    return text if FIELD.search(text) else f"{text}: {{{text}}}"


def privileged_problems(algo: AlgoConfig, examples: Sequence[Example]) -> list[str]:
    """Return a sentence for each field of `algo.privileged` that a training record lacks, or that all have empty."""
    if algo.privileged is None:
        return []
    records = {example.id: {**example.inputs, **example.metadata} for example in examples}
    problems = []
    for module, text in algo.privileged.items():
        for field in sorted({*FIELD.findall(template_of_text(text))}):
            without = [name for name, fields in records.items() if field not in fields]
            if field == FEEDBACK:
                if len(without) < len(records):
                    problems.append(
                        f"algo.privileged.{module}: {{{FEEDBACK}}} is what the task's score says in words, and records "
                        "have a field of that name; rename it in the data"
                    )
            elif without:
                problems.append(
                    f"algo.privileged.{module}: {len(without)} of {len(records)} training records have no field "
                    f"'{field}' (the first: '{without[0]}'); they have {', '.join(sorted(records[without[0]]))}"
                )
            elif all(fields[field] in EMPTY_FIELDS for fields in records.values()):
                problems.append(f"algo.privileged.{module}: the field '{field}' is empty in all training records")
    return problems


def shown(value: Any) -> str:
    """Return a field's value as text: texts as they are, lists of them in a row, anything else as JSON."""
    if isinstance(value, str):
        return value
    if isinstance(value, list | tuple) and all(isinstance(part, str) for part in value):
        return "; ".join(value)
    return json.dumps(value, ensure_ascii=False, default=str)


@dataclass(frozen=True, slots=True, kw_only=True)
class Teachers:
    """What scores the calls of a run's modules."""

    algo: AlgoConfig
    forwards: Forwards
    tokenizer: Any
    others: Mapping[str, Scorer] = EMPTY
    """Scorers of teachers by name, but for `policy` and `initial`."""
    limits: Mapping[str, int | None] = EMPTY
    """Teacher -> longest prompt + completion that it scores; None, or no entry: no limit."""

    def describe(self) -> dict[str, str]:
        """Return the summary's line of who teaches which module, and what it reads beside the prompt."""
        reads = {module: f", which reads: {text}" for module, text in (self.algo.privileged or {}).items()}
        distilled = self.algo.distill or {}
        texts = [f"{module} by {teacher}{reads.get(module, '')}" for module, teacher in distilled.items()]
        return {"teachers": "; ".join(texts)} if texts else {}

    def complete(self, forest: Forest, examples: Mapping[str, Example], evidence: str | None) -> Forest:
        """Return the forest with `distillation` on the calls of distilled modules, and turn rewards by evidence.

        Args:
            evidence: `sum` or `mean` over a turn's tokens (`task.privileged`); None: other turn rewards.

        Raises:
            ConfigError: a prompt whose last message has no end that the chat template writes.
        """
        distilled = self.algo.distill or {}
        pairs = set(distilled.items())
        if evidence is not None:
            pairs |= {(module, POLICY) for module in self.algo.privileged or ()}
        gaps = self._gaps(forest, examples, sorted(pairs))
        calls = {}
        for name, call in forest.calls.items():
            facts, turn_reward = call.facts, call.turn_reward
            own = gaps.get((name, POLICY)) if call.module in (self.algo.privileged or ()) else None
            if evidence is not None and own:
                gain = sum(own) if evidence == "sum" else fmean(own)
                facts = {**facts, "privileged_gain": gain}
                # The last call of a rollout has the outcome.
                turn_reward = gain if forest.children[name] else None
            teacher = distilled.get(call.module)
            distillation = gaps.get((name, teacher)) if teacher is not None else None
            calls[name] = replace(call, facts=facts, turn_reward=turn_reward, distillation=distillation)
        return replace(forest, calls=calls)

    def views(self, forest: Forest, examples: Mapping[str, Example]) -> dict[str, Call]:
        """Return what its teacher reads of each distilled call, by id; empty but with `algo.distill_kl=exact`.

        A call of which the policy itself would read the same is left out: it has nothing to learn.
        """
        if self.algo.distill is None or self.algo.distill_kl != "exact":
            return {}
        first, views = _first_rollouts(forest), dict[str, Call]()
        for call in forest.calls.values():
            if call.distillation:
                view = self._view(forest, call, examples[call.example], first.get(call.id))
                if view is not None and (view is not call or self.algo.distill[call.module] != POLICY):
                    views[call.id] = view
        return views

    def _gaps(
        self, forest: Forest, examples: Mapping[str, Example], pairs: Sequence[tuple[str, str]]
    ) -> dict[tuple[str, str], tuple[float, ...]]:
        """Return (call, teacher) -> log pi_T - log pi_S of each token; without calls that no teacher can read."""
        first = _first_rollouts(forest)
        gaps: dict[tuple[str, str], tuple[float, ...]] = {}
        # Also of teachers that this process asks for nothing: forwards of sharded weights take all processes.
        asked: dict[str, list[tuple[Call, Call]]] = {teacher: [] for _, teacher in pairs}
        for module, teacher in pairs:
            for call in forest.calls.values():
                if call.module != module or not call.completion_ids or call.teacher is not None:
                    continue
                view = self._view(forest, call, examples[call.example], first.get(call.id))
                if view is None:
                    continue
                limit = self.limits.get(teacher)
                if limit is not None and len(view.prompt_ids) + call.completion_tokens > limit:
                    continue
                if teacher == POLICY and view is call:
                    # The same numbers twice: exactly nothing to learn.
                    gaps[call.id, teacher] = (0.0,) * call.completion_tokens
                else:
                    asked[teacher].append((call, view))
        students = {call.id: call for seen in asked.values() for call, _ in seen}
        known = dict(zip(students, self.forwards.policy_logprobs(list(students.values())), strict=True))
        distilled = set((self.algo.distill or {}).values())
        for teacher, seen in asked.items():
            kept = self.algo.distill_kl == "exact" and teacher in distilled
            with self.forwards.keeping(teacher) if kept else nullcontext():
                scored = self._scorer(teacher)([view for _, view in seen])
            for (call, _), theirs in zip(seen, scored, strict=True):
                gaps[call.id, teacher] = tuple(t - s for t, s in zip(theirs, known[call.id], strict=True))
        return gaps

    def _scorer(self, teacher: str) -> Scorer:
        if teacher in (POLICY, INITIAL):
            # Without what is known of them: of sharded weights all processes forward, or none does.
            return lambda calls: self.forwards.policy_logprobs(
                [replace(call, ref_logprobs=None) for call in calls], reference=teacher == INITIAL
            )
        return lambda calls: self.others[teacher](calls) if calls else ()

    def _view(self, forest: Forest, call: Call, example: Example, rollout: Rollout | None) -> Call | None:
        """Return a call as its teacher reads it; the call itself where nothing is privileged.

        None where a field that it would read is empty: the record has none, or the score has said nothing.
        """
        text = (self.algo.privileged or {}).get(call.module)
        if text is None:
            return call
        template = template_of_text(text)
        fields = {**example.inputs, **example.metadata, FEEDBACK: _feedback(rollout, call.module)}
        if any(fields[field] in EMPTY_FIELDS for field in FIELD.findall(template)):
            return None
        added = FIELD.sub(lambda match: shown(fields[match[1]]), template)
        begin = _opening(forest, call)
        frame = end_of_prompt(self.tokenizer)
        place = len(begin.prompt_ids) - len(frame)
        if begin.prompt_ids[place:] != frame:
            raise ConfigError(
                f"algo.privileged.{call.module}: the prompt of call {begin.id} does not end as the chat template ends "
                "a user's message, so there is no place for more text; expected a module whose prompt ends with one"
            )
        ids = added_to_message(self.tokenizer, added)
        # Read by a teacher, not sampled: log-probabilities of other prompts are none of its own.
        return replace(
            call,
            prompt_ids=call.prompt_ids[:place] + ids + call.prompt_ids[place:],
            logprobs=None,
            ref_logprobs=None,
            values=None,
        )


def _opening(forest: Forest, call: Call) -> Call:
    """Return the first call of the call's own context: itself, or the one whose prompt it goes on from."""
    above = call
    while above.parent is not None and call.turn:
        above = forest.calls[above.parent]
        if above.turn == 0 and call.prompt_ids[: len(above.prompt_ids)] == above.prompt_ids:
            return above
    return call


def _first_rollouts(forest: Forest) -> dict[str, Rollout]:
    """Return the first rollout through each call of which the score has said something in words."""
    found: dict[str, Rollout] = {}
    for rollout in forest.rollouts:
        for call in forest.path(rollout) if rollout.feedback else ():
            found.setdefault(call.id, rollout)
    return found


def _feedback(rollout: Rollout | None, module: str) -> str:
    return "" if rollout is None else rollout.feedback.get(module) or rollout.feedback.get("", "")
