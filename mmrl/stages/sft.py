"""The supervised stage: demonstrations, a user's file or the policy's own best rollouts -> updates -> a checkpoint.

A supervised step is the trainer's objective with advantage 1 and ratio 1. A demonstration is rendered to exactly the
ids that a rollout would send (`mmrl.models.chat.render_prompt`), followed by its completion, as the chat template
writes a reply, and the end-of-turn token; only these last two are trained.

Its rollouts are mmrl's own, and what is trained of them are the sampled token ids. They are written to the journal
before anything is trained, so that a stage that was killed samples none of them again.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, islice
from pathlib import Path
from typing import TYPE_CHECKING

from mmrl import rng
from mmrl.config import SftRunConfig
from mmrl.credit.entries import Entry
from mmrl.errors import CheckpointError, ConfigError, DataError, RequestFailure
from mmrl.models.assignment import ModuleAssignment
from mmrl.models.chat import (
    CLOSED_THOUGHTS,
    OPENED_THOUGHTS,
    opens_thoughts,
    refuse_unended,
    render_observation,
    render_prompt,
    render_reply,
    reply_ids,
    template_of,
    text_behind_prompt,
    thoughts_of_prompt,
)
from mmrl.models.replies import callable_tools
from mmrl.models.template import THOUGHTS
from mmrl.records import Call, Example, Forest
from mmrl.rollout.plans import independent
from mmrl.rollout.sample import sample
from mmrl.stages import Stage
from mmrl.stages.evaluate import Evaluations, chunks
from mmrl.stages.sft_data import best_rollouts, read_examples
from mmrl.stages.step_metrics import refuse_failures, rollout_metrics
from mmrl.store.journal import read_step, write_step
from mmrl.store.policy import checkpoint_step
from mmrl.tasks.base import Conversation, Demonstration, Message
from mmrl.trainer.checkpoint import saved_extra
from mmrl.trainer.objective import StepBatch, TrainCall

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from mmrl.trainer.trl_trainer import MmrlTrainer

FINGERPRINT = "warmup"
"""Key of `extra.json` in a checkpoint: the sequences that made it."""


@dataclass(kw_only=True)
class SftStage(Stage[SftRunConfig]):
    """Supervised training on given completions; its engine samples the rollouts of `algo.source=rollouts`.

    Args:
        trainer: holds the policy, before and after `improve`.
    """

    trainer: MmrlTrainer
    assignment: ModuleAssignment
    evaluations: Evaluations = field(init=False)
    facts: dict[str, float] = field(default_factory=dict)
    """Counts of the sequences, by the names of docs/metrics.md."""
    calls: Sequence[Call] = ()
    """Sequences that are trained on."""
    data: str = ""
    """Digest of it."""
    rows: Iterator[int] = field(init=False)
    """Indices into `calls`, from the next step on."""

    def improve(self, evaluations: Evaluations, checkpoint: Path | None) -> None:
        """Train to `train.steps`, from a checkpoint where there is one.

        Raises:
            ConfigError: there is nothing to train on.
            TooManyFailures: more than `train.max_failed_share` of the rollouts failed by no doing of the model.
            CheckpointError: the checkpoint belongs to other sequences.
            Stopped: the run is to end; what was trained is saved.
        """
        self.evaluations = evaluations
        algo, done = self.config.algo, 0
        self.calls = self._fitting(self._sampled() if algo.source == "rollouts" else self._demonstrated())
        self.data = fingerprint(self.calls)
        counts = Counter(item.module or "no module" for item in self.calls)
        sources = {"task": "demonstrations of the task", "file": str(algo.file), "rollouts": "own rollouts"}
        per_module = ", ".join(f"{module} {count}" for module, count in counts.items())
        training = f"training on {len(self.calls)} sequences from {sources[algo.source]}"
        self.log.progress.note(f"{training}: {per_module}")
        if checkpoint is None:
            self.log.rundir.append_metrics(0, self.facts)
        elif saved_extra(checkpoint).get(FINGERPRINT, {}).get("data") != self.data:
            raise CheckpointError(
                f"{checkpoint}: made with other data; continue with the same, or start in an empty folder"
            )
        else:
            done = checkpoint_step(checkpoint) or 0
        rows = order(self.calls, algo.modules or {}, self.config.seed)
        self.rows = islice(rows, done * self.config.train.batch_size, None)
        with self.log.stop.held():
            self.trainer.follow(self.next_batch, self.on_step_end, self.recorded)
            self.trainer.train(checkpoint)
        self.log.obey_stop()

    def next_batch(self, step: int) -> StepBatch:
        """Return the calls of step number `step`; a stop ends the run here, and the trainer saves first."""
        self.log.obey_stop()
        self.log.begin()
        self.log.progress.status("updating the weights")
        calls = [self.calls[row] for row in islice(self.rows, self.config.train.batch_size)]
        return step_batch(step, calls)

    def recorded(self) -> Mapping[str, object]:
        """Record of the sequences in a checkpoint."""
        return {**self.assignment.record(), FINGERPRINT: {"data": self.data}}

    def describe(self) -> dict[str, str]:
        """Return facts for the summary, once `improve` has begun."""
        facts = {key.removeprefix("sft/"): f"{value:,.0f}" for key, value in self.facts.items() if key in _SHOWN}
        supervised = ", ".join(f"{value} {_SHOWN[f'sft/{key}']}" for key, value in facts.items())
        facts = {**self.assignment.describe(), **self.trainer.facts}
        return {"supervised": supervised, **facts, **self.engine.describe()}

    def _demonstrated(self) -> list[tuple[str, Call]]:
        """Return the sequences of the task's demonstrations or of the file, each with its place."""
        examples = read_examples(self.config, self.task, tuple(self.assignment.untrained))
        calls: list[tuple[str, Call]] = []
        for where, example in examples:
            try:
                if isinstance(example, Demonstration):
                    # Of a file alone: what a task asks for in these marks it has asked for behind such a prompt.
                    if self.config.algo.source == "file" and example.completion.lstrip().startswith(OPENED_THOUGHTS):
                        refuse_closed(self.tokenizer, f"begins with {OPENED_THOUGHTS}")
                    calls.append((where, encode(self.tokenizer, example)))
                else:
                    calls += [(where, call) for call in turns_of(self.tokenizer, example)]
            except RequestFailure as error:
                key = "algo.file" if self.config.algo.source == "file" else "algo.source"
                raise ConfigError(f"{key}: {where}: {error}") from None
        return calls

    def _sampled(self) -> list[tuple[str, Call]]:
        """Return the calls of the best rollouts, as they were sampled, each with its id."""
        algo, untrained = self.config.algo, self.assignment.untrained
        forest = self._rollouts()
        refuse_failures(forest.rollouts, self.config.train.max_failed_share, "algo.source=rollouts")
        # Failures from outside are judged before the choice: a few lucky rollouts of a broken run are no data.
        best = best_rollouts(forest, algo, self.config.seed)
        self.facts = rollout_metrics(forest.rollouts, self.task.failed_metrics) | {
            "sft/rollouts": float(len(best)),
            "sft/examples": float(len({rollout.example for rollout in best})),
        }
        calls = [
            call
            for rollout in best
            for call in forest.path(rollout)
            # A context that was full before the first token leaves nothing to train on.
            if call.completion_ids
            and call.module not in untrained
            and (algo.modules is None or call.module in algo.modules)
        ]
        if not calls:
            raise ConfigError(f"algo.modules: no rollout that is trained on calls {', '.join(algo.modules or ())}")
        return [(f"call {call.id}", plain_call(call.module, call.prompt_ids, call.completion_ids)) for call in calls]

    def _rollouts(self) -> Forest:
        """Return all rollouts of the train split, sampled now or read back from the journal."""
        examples = self.task.examples("train")
        forests: list[Forest] = []
        for number, chunk in enumerate(chunks(examples)):
            name = f"rollouts-{number:03d}"
            if not self.log.rundir.journal_path(0, name).is_file():
                self.log.progress.status(f"sampling rollouts {sum(len(f.rollouts) for f in forests)} …")
                write_step(self.log.rundir, self._roll_out(chunk), evaluation=name, step=0)
            # Read back where they have just been written too: a resumed stage trains on the very same numbers.
            forests.append(read_step(self.log.rundir, 0, evaluation=name)[0])
        # Training needs the memory that the engine holds.
        self.engine.sleep()
        return Forest(
            calls={key: call for forest in forests for key, call in forest.calls.items()},
            rollouts=tuple(rollout for forest in forests for rollout in forest.rollouts),
            modules=tuple(self.task.program.modules),
        )

    def _roll_out(self, examples: Sequence[Example]) -> Forest:
        """Sample `algo.rollouts` independent rollouts of each example."""
        # One key for all chunks: what is sampled of an example does not depend on where a chunk begins.
        env = self.environment(self.config.algo, (self.config.seed, "sft"))
        plans = [(example, independent(self.config.algo.rollouts)) for example in examples]
        return asyncio.run(sample(env, plans, self.reward_set))

    def _fitting(self, sequences: Sequence[tuple[str, Call]]) -> list[Call]:
        """Return the sequences that fit into the context; the others are counted, and the first of them is named.

        Raises:
            DataError: none fits.
        """
        longest = getattr(self.trainer.forwards.policy.config.get_text_config(), "max_position_embeddings", None)
        limit = min((limit for limit in (longest, self.config.task.max_context) if limit is not None), default=None)
        fitting = [item for _, item in sequences if limit is None or tokens_of(item) <= limit]
        if too_long := len(sequences) - len(fitting):
            first = next(where for where, item in sequences if limit is not None and tokens_of(item) > limit)
            text = (
                f"{too_long} of {len(sequences)} sequences have more than the {limit:,} tokens of the context and are "
                f"left out (the first: {first})"
            )
            if not fitting:
                raise DataError(f"algo.source: {text}; nothing is left to train on")
            self.log.progress.note(f"warning: {text}")
        self.facts |= {
            "sft/sequences": float(len(fitting)),
            "sft/tokens": float(sum(len(item.completion_ids) for item in fitting)),
            "sft/too_long": float(too_long),
        }
        return fitting

    def on_step_end(self, step: int, update: Mapping[str, float]) -> None:
        """Record a step, with an evaluation if one is due."""
        metrics = self.log.record(update)
        # Nothing is sampled in a step of this stage.
        metrics = {name: value for name, value in metrics.items() if name not in _NOT_HERE}
        metrics["rate/tokens_per_s"] = update["train/tokens_forwarded"] / metrics["time/step"]
        if evaluated := self.evaluations.due(step) and step < self.config.train.steps:
            metrics |= self.evaluations.metrics(step)
        self.log.write(step, metrics)
        if evaluated:
            self.log.draw_page()


_SHOWN = {
    "sft/examples": "examples",
    "sft/rollouts": "rollouts",
    "sft/sequences": "sequences",
    "sft/tokens": "trained tokens",
    "sft/too_long": "too long",
}
_NOT_HERE = {"train/calls_skipped"} | {f"time/{p}" for p in ("generate", "retrieve", "rollout", "annotate", "tokenize")}


def encode(tokenizer: PreTrainedTokenizerBase, demonstration: Demonstration) -> Call:
    """Convert a demonstration to a call; the end-of-turn token is the last of its completion.

    Raises:
        RequestFailure: the prompt ends inside of thoughts, and nothing in the reply ends them.
    """
    messages, turn = demonstration.messages, ""
    # By the same functions as in rollouts, so that the ids are those that a rollout would send.
    prompt_ids = render_prompt(tokenizer, messages)

    def written(text: str) -> tuple[int, ...]:
        text = text if turn else text_behind_prompt(tokenizer, text)
        return reply_ids(tokenizer, text, messages, begins=not turn)

    for completion, observation in demonstration.history:
        prompt_ids = render_observation(tokenizer, (*prompt_ids, *written(completion)[:-1]), observation)
        turn = turn + completion + observation if isinstance(observation, str) else ""
    refuse_unended(tokenizer, turn + demonstration.completion)
    return plain_call(demonstration.module, prompt_ids, written(demonstration.completion))


def turns_of(tokenizer: PreTrainedTokenizerBase, conversation: Conversation) -> Iterator[Call]:
    """Yield a call for each reply of a conversation with tools that has not weight 0, in a rollout's growing context.

    Raises:
        RequestFailure: the chat template does not write it, or not its thoughts, which its prompts may have closed.
    """
    messages, tools = conversation.messages, callable_tools(tokenizer, conversation.tools)
    replies = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    prompt = messages[: replies[0]]
    context = render_prompt(tokenizer, prompt, tools)
    for number, following in zip(replies, [*replies[1:], None], strict=True):
        reply = _with_thoughts(tokenizer, {key: value for key, value in messages[number].items() if key != "weight"})
        if any(reply.get(name, "").strip() for name in THOUGHTS):
            refuse_closed(tokenizer, "has some", f"messages.{number}")
        completion = render_reply(tokenizer, [*prompt, reply], tools)
        text = str(tokenizer.decode(list(completion), clean_up_tokenization_spaces=False))
        for name in THOUGHTS:
            if reply.get(name, "").strip() not in text:
                raise RequestFailure(f"messages.{number}.{name}: the model's chat template does not write it")
        if messages[number].get("weight") != 0:
            yield plain_call(conversation.module, context, completion)
        if following is not None:
            added = messages[number + 1 : following]
            context = render_observation(tokenizer, (*context, *completion), added, ended=True)


def _with_thoughts(tokenizer: PreTrainedTokenizerBase, reply: Message) -> Message:
    """Return a reply whose content, if it begins with thoughts in their marks, has them in the template's own field."""
    name, match = template_of(tokenizer).thoughts, _THOUGHTFUL.match(reply["content"])
    if not name or match is None or any(reply.get(field) for field in THOUGHTS):
        return reply
    opened, thoughts, content = match.groups()
    return {**reply, "content": content, name: thoughts.strip()} if opened or opens_thoughts(tokenizer) else reply


_THOUGHTFUL = re.compile(rf"\s*({OPENED_THOUGHTS})?(.*?){CLOSED_THOUGHTS}\s*(.*)", re.DOTALL)
"""Content that begins with thoughts: the mark that opens them, which a prompt may have, they, and what follows them."""


def refuse_closed(tokenizer: PreTrainedTokenizerBase, fault: str, where: str = "messages") -> None:
    """Refuse a reply with thoughts, in `fault`'s words, behind prompts that have written an end of thoughts.

    Raises:
        RequestFailure: prompts end so.
    """
    if CLOSED_THOUGHTS in thoughts_of_prompt(tokenizer):
        other = "model.thinking=true, or " if template_of(tokenizer).thinks else ""
        raise RequestFailure(
            f"{where}: prompts of the model's chat template close the thoughts, and the reply {fault}; use "
            f"{other}replies without thoughts"
        )


def plain_call(module: str, prompt_ids: tuple[int, ...], completion_ids: tuple[int, ...]) -> Call:
    """Return a call of ids alone: without log-probabilities nothing is compared with a sampler."""
    bare = Call(id="", example="", parent=None, module=module, completion_tokens=len(completion_ids))
    return replace(bare, prompt_ids=prompt_ids, completion_ids=completion_ids)


def tokens_of(call: Call) -> int:
    """Return the tokens of prompt and completion together."""
    return len(call.prompt_ids) + len(call.completion_ids)


def order(calls: Sequence[Call], mix: Mapping[str, float], seed: int) -> Iterator[int]:
    """Yield indices into `calls` without end: one pass after the other (`passes`), each in a new order.

    A step may take the end of a pass and the start of the next: all steps are of one size, and no call is left out.
    """
    for rows, draws in passes(calls, mix, seed):
        draws.shuffle(rows)
        yield from rows


def passes(calls: Sequence[Call], mix: Mapping[str, float], seed: int) -> Iterator[tuple[list[int], random.Random]]:
    """Yield each pass's indices into `calls`, in their order, and its source of draws; passes never end.

    Args:
        mix: module -> how often a pass has each of its calls, relative to 1 for modules not named; rounded up or down
            at random.
    """
    for number in count():
        # Ahead of time and a pure function of the seed: what was killed continues with the same steps.
        draws = rng.stream(seed, "warmup", number)
        rows: list[int] = []
        for index, call in enumerate(calls):
            share = mix.get(call.module, 1.0)
            rows += [index] * (int(share) + (draws.random() < share - int(share)))
        yield rows, draws


def step_batch(step: int, calls: Sequence[Call]) -> StepBatch:
    """Return the calls of a step: the loss is the mean over all their completion tokens."""
    weight = 1 / sum(len(call.completion_ids) for call in calls)
    trained = [train_call(f"{index}", call, weight) for index, call in enumerate(calls)]
    return StepBatch(step=step, calls=trained, metrics={"train/sequences": float(len(calls))})


def train_call(name: str, call: Call, weight: float) -> TrainCall:
    """Return a call whose tokens all have advantage 1 and one weight; `name`: its id within the step."""
    tokens = len(call.completion_ids)
    entry = Entry(call=name, reward=1.0, advantages=(1.0,) * tokens, weights=(weight,) * tokens)
    return TrainCall(call=replace(call, id=name), entries=(entry,))


def fingerprint(calls: Sequence[Call]) -> str:
    """Return the digest of the sequences, which tells those of two runs apart."""
    return f"{rng.digest(*(str((call.module, call.prompt_ids, call.completion_ids)) for call in calls)):032x}"
