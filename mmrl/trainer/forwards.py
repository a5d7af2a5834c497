"""Forwards of the trainer's models: log-probabilities of policy and reference, values of the critic.

Part of `trainer`; `trl_trainer` owns one. Callers in other packages use `policy_logprobs`, `values` and `annotate`,
between steps or inside `next_batch`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import torch
from peft import PeftModel

from mmrl.models.load import rope_border
from mmrl.records import Call, Forest
from mmrl.trainer.logprobs import Scores, score
from mmrl.trainer.objective import StepBatch, TrainCall
from mmrl.trainer.packing import Pack, Taught, make_packs, share_of_process
from mmrl.trainer.sharding import is_sharded
from mmrl.trainer.tree_attention import last_parts

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import PreTrainedModel, Trainer

    from mmrl.trainer.adapters import Adapters
    from mmrl.trainer.critic import Critic
    from mmrl.trainer.settings import Settings


class Forwards:
    """Forwards of packs through the models of a trainer.

    Args:
        trainer: its models are read anew at each forward, since it wraps and prepares them when training starts.
        tries: True if packs are prefix tries; else rows are padded.
        budget: tokens per pack.
        most: tokens of a pack that would otherwise repeat more than it adds.
    """

    def __init__(
        self,
        trainer: Trainer,
        settings: Settings,
        critic: Critic | None,
        adapters: Adapters | None,
        *,
        tries: bool,
        budget: int,
        max_tokens: int,
    ):
        self.trainer, self.settings, self.critic, self.adapters = trainer, settings, critic, adapters
        self.tries, self.budget, self.max_tokens = tries, budget, max_tokens
        self.ref_model: torch.nn.Module | None = None
        """Frozen copy of the initial policy; without one, disabled adapters are the reference."""
        self.teachers: dict[str, Callable[[str], tuple[PreTrainedModel, bool]]] = {}
        """Loaded teachers by name: module -> the weights for it, and whether they can forward packs of tries."""
        self.kept: dict[tuple[str, str], torch.Tensor] = {}
        """What a teacher's head saw at each token of a call, (T, H) by (teacher, call), from scoring to `teach`."""
        self._keeping: str | None = None
        self.scored = 0
        """Tokens forwarded for `policy_logprobs` and `values`."""

    @property
    def accelerator(self) -> Accelerator:
        """The processes of this run, and how they share weights."""
        return self.trainer.accelerator

    @property
    def device(self) -> torch.device:
        """Device of all forwards."""
        return self.trainer.args.device

    @property
    def policy(self) -> PreTrainedModel:
        """The model in training, unwrapped (but for peft): what an engine in the same process samples from."""
        return cast("PreTrainedModel", self.trainer.model)

    @property
    def wrapped(self) -> torch.nn.Module:
        """The model in training inside DDP or FSDP, where there are several processes."""
        return self.trainer.model_wrapped

    def policy_logprobs(self, calls: Sequence[Call], *, reference: bool = False) -> list[tuple[float, ...]]:
        """Compute every completion token's log-probability under the current policy (or the reference), dropout off.

        Returns one tuple of length T per call, in the order of `calls`.
        """
        return self._per_call(calls, self.reference if reference else self.policy_of)

    def logprobs_of(self, model: PreTrainedModel, calls: Sequence[Call], *, tries: bool) -> list[tuple[float, ...]]:
        """Compute the log-probabilities of `policy_logprobs` under a model of the same tokenizer that is not trained.

        Args:
            tries: it can forward packs of tries (`packing.choose_packing`).
        """
        return self._per_call(calls, lambda pack: self._no_grad(model, pack), model, tries=tries)

    @contextmanager
    def keeping(self, teacher: str) -> Iterator[None]:
        """Keep what the head sees of the calls that this teacher scores, so that it forwards them once."""
        self._keeping = teacher
        try:
            yield
        finally:
            self._keeping = None

    def values(self, calls: Sequence[Call]) -> list[tuple[float, ...]]:
        """Return the critic's value before every completion token; tuples as from `policy_logprobs`.

        With `algo.obs=all`, pass calls whose completions have their observation ids appended.
        """
        return self._per_call(calls, self._values)

    def _per_call(
        self,
        calls: Sequence[Call],
        forward: Callable[[Pack], torch.Tensor],
        model: PreTrainedModel | None = None,
        *,
        tries: bool | None = None,
    ) -> list[tuple[float, ...]]:
        train, modules = [TrainCall(call=call) for call in calls], module_names(calls)
        packs = self.make_packs(train, modules, score_all=True, tries=tries, model=model)
        results: dict[int, tuple[float, ...]] = {}
        for pack in [*packs, *(self._in_step(len(packs)) if model is None else ())]:
            numbers = forward(pack.to(self.device)).tolist()
            self.scored += pack.forwarded
            for train in pack.calls:
                count = len(train.call.completion_ids)
                # By identity: whoever compares two forests may hand in two calls of one id.
                results[id(train.call)], numbers = tuple(numbers[:count]), numbers[count:]
        return [results.get(id(call), ()) for call in calls]

    def _in_step(self, count: int) -> list[Pack]:
        """Return fillers beyond this process's `count` packs where weights are sharded: gathering them takes everyone,
        and each process brings its own calls here."""
        if not is_sharded(self.accelerator):
            return []
        largest = int(self.reduce(torch.tensor(float(count), device=self.device), "max"))
        empty = Call(
            id="", example="", parent=None, module="", prompt_ids=(0,), completion_ids=(0,), completion_tokens=1
        )
        filler = [TrainCall(call=empty)]
        return [pack for _ in range(largest - count) for pack in self.make_packs(filler, [""], score_all=True)]

    def make_packs(
        self,
        calls: Sequence[TrainCall],
        modules: Sequence[str],
        *,
        score_all: bool = False,
        tries: bool | None = None,
        model: PreTrainedModel | None = None,
    ) -> list[Pack]:
        """Return packs within the token budget; no pack mixes adapters. `model`: None: the policy."""
        packs = [
            pack
            for of_adapter in ([calls] if self.adapters is None else self.adapters.split(calls))
            for pack in make_packs(
                of_adapter,
                self.budget,
                beta=self.settings.beta,
                modules=modules,
                # Per-token numbers as exact as the model's: float64 in the tests that compare gradients.
                dtype=torch.float64 if self.policy.dtype == torch.float64 else torch.float32,
                score_all=score_all,
                tries=self.tries if tries is None else tries,
                share=self.accelerator.num_processes,
                max_tokens=self.max_tokens,
                border=rope_border((model or self.policy).config),
            )
        ]
        for pack in packs:
            if pack.tree is not None:
                pack.tree.varlen = self.settings.train.packing == "trie_varlen"
        return packs

    def minibatch_packs(self, batch: StepBatch, modules: Sequence[str]) -> tuple[list[list[Pack]], int]:
        """Make this process's packs of each mini-batch; also count the calls that have no effect and are in none."""
        processes, rank = self.accelerator.num_processes, self.accelerator.process_index
        minibatches, trained = [], set()
        for index in range(batch.minibatches):
            # Every process splits the whole batch, so all agree on the packs without exchanging them.
            packs = self.make_packs([train for train in batch.calls if train.minibatch == index], modules)
            trained |= {train.call.id for pack in packs for train in pack.calls}
            minibatches.append([pack.to(self.device) for pack in share_of_process(packs, processes, rank)])
        return minibatches, sum(train.call.id not in trained for train in batch.calls)

    def freeze_old(self, packs: Sequence[Pack]) -> None:
        """Compute, before the first update, the denominators that need the sampling weights, dropout off."""
        recompute = self.settings.train.old_logprobs == "recompute"
        for pack in packs:
            # Processes must agree on whether to forward, and each sees only its own packs.
            missing = torch.tensor(float(recompute or bool(pack.sampled.isnan().any())), device=self.device)
            if float(self.reduce(missing, "max")):
                pack.old = pack.old_logprobs(self.policy_of(pack), recompute)
            else:
                pack.old = pack.sampled

    def use_adapter(self, pack: Pack) -> None:
        """Make the adapter of the pack's calls the policy's active one."""
        # Not set back: every forward sets its own, and gradient checkpointing forwards again in the backward pass.
        if self.adapters is not None:
            cast("PeftModel", self.policy).set_adapter(self.adapters.by_module[pack.calls[0].call.module])

    def autocast(self) -> AbstractContextManager[None]:
        """Enter the run's mixed precision: every forward is made inside of it, so that results are comparable."""
        # accelerate has a model enter it by itself, but only from the start of training on, after the self-check. FSDP2
        # casts by a policy of its own.
        return nullcontext() if is_sharded(self.accelerator) else self.accelerator.autocast()

    def reference(self, pack: Pack) -> torch.Tensor:
        """Return reference log-probabilities, (N,): the calls', else with adapters off, else of the frozen copy."""
        if not pack.known_ref.isnan().any():
            return pack.known_ref
        with self.initial() as model:
            return self._no_grad(model, pack)

    @contextmanager
    def initial(self) -> Iterator[torch.nn.Module]:
        """Give the weights that the run began with."""
        if isinstance(self.policy, PeftModel):
            # A LoRA policy needs no second model: without its adapters it is the initial policy.
            with self.policy.disable_adapter():
                yield self.wrapped
        else:
            assert self.ref_model is not None
            yield self.ref_model

    def policy_of(self, pack: Pack) -> torch.Tensor:
        """Return the policy's log-probabilities as it is now, (N,), without gradient."""
        self.use_adapter(pack)
        return self._no_grad(self.wrapped, pack)

    @torch.no_grad()
    def _no_grad(self, model: torch.nn.Module, pack: Pack) -> torch.Tensor:
        model.eval()
        with self.autocast():
            scores = self.score(model, pack)
        if self._keeping is not None:
            parts = scores.hidden.split([len(train.call.completion_ids) for train in pack.calls])
            for train, part in zip(pack.calls, parts, strict=True):
                self.kept[self._keeping, train.call.id] = part
        return scores.logprobs

    @torch.no_grad()
    def _values(self, pack: Pack) -> torch.Tensor:
        assert self.critic is not None
        self.policy.eval()
        self.critic.module.eval()
        self.use_adapter(pack)
        with self.critic.active(), self.autocast():
            return self.critic.values(pack)

    def score(
        self,
        model: torch.nn.Module,
        pack: Pack,
        *,
        entropy: bool = False,
        hits: bool = False,
        taught: Sequence[Taught] = (),
    ) -> Scores:
        """Return the scores of the pack's scored positions (`logprobs.score`), with gradient if enabled."""
        unwrapped = self.accelerator.unwrap_model(model)
        # Recomputed in the backward pass, the last layer would be the whole one again.
        last = () if pack.tree is None or self.settings.model.gradient_checkpointing else last_parts(unwrapped)
        head = unwrapped.get_output_embeddings()
        temperature = self.settings.algo.temperature
        return score(model, head, pack, temperature, entropy=entropy, hits=hits, last=last, taught=taught)

    def reduce(self, tensor: torch.Tensor, reduction: str) -> torch.Tensor:
        """Join the processes' tensors: `sum`, or `max` of scalars."""
        if self.accelerator.num_processes == 1:
            return tensor
        if reduction == "max":
            joined: torch.Tensor = self.accelerator.gather(tensor.reshape(1)).max()
            return joined
        summed: torch.Tensor = self.accelerator.reduce(tensor, reduction=reduction)
        return summed


def module_names(calls: Sequence[Call]) -> list[str]:
    """List each module once, in the order of its first call: the rows of the step's sums."""
    return list(dict.fromkeys(call.module for call in calls))


def annotate(forwards: Forwards, forest: Forest) -> Forest:
    """Return the forest with `values` and `ref_logprobs` on the calls of algorithms that need them before credit.

    Other algorithms' forests are returned as they are. Values run over a call's observation too with `algo.obs=all`;
    an observation's tokens are read from the prompt of the call that follows in the same context. Calls without
    sampled tokens get empty tuples.
    """
    settings = forwards.settings
    critic = settings.critic
    if critic is None:
        return forest
    calls = [call for call in forest.calls.values() if call.completion_ids]
    continued = [_continued(call) for call in calls]
    references: list[tuple[float, ...]] | list[None] = [None] * len(calls)
    if settings.algo.beta > 0:
        # Credit needs them where the KL term is part of the reward; where it is in the loss, the update reuses them.
        references = forwards.policy_logprobs(continued, reference=True)
    kept = [len(call.completion_ids) for call in calls]
    lengths = [call.observation_tokens for call in calls]
    if getattr(critic, "obs", "skip") == "all":
        observed = [observation_ids(forest, call) for call in calls]
        kept, lengths = [stay for _, stay in observed], [len(ids) for ids, _ in observed]
        continued = [_continued(call, ids, stay) for call, (ids, stay) in zip(calls, observed, strict=True)]
    # Where an end of turn was taken back, its value and that of the observation's first token are of one context.
    values = [
        values[:stay] + values[stay : stay + 1] * (len(call.completion_ids) - stay) + values[stay:]
        for call, stay, values in zip(calls, kept, forwards.values(continued), strict=True)
    ]
    annotated = {
        call.id: replace(call, values=value, ref_logprobs=reference, observation_tokens=length)
        for call, value, reference, length in zip(calls, values, references, lengths, strict=True)
    }
    unsampled = {
        call.id: replace(call, values=(), ref_logprobs=()) for call in forest.calls.values() if not call.completion_ids
    }
    # In the forest's own order of calls, which later sums follow.
    return replace(forest, calls={name: (annotated | unsampled)[name] for name in forest.calls})


def observation_ids(forest: Forest, call: Call) -> tuple[tuple[int, ...], int]:
    """Return the tool tokens that follow `call` in its own context, length `call.observation_tokens`.

    Also returns how many of the call's tokens stand before them: all, or all but an end of turn that was taken back.

    Those of a call that was left out of the rollout are gone: none then.
    """
    context, length = call.prompt_ids + call.completion_ids, call.observation_tokens
    # Not the next call alone: those of another context may lie between.
    later = [*forest.children[call.id]]
    for name in later:
        later += forest.children[name]
    for end in (len(context), len(context) - 1) if length else ():
        for ids in (forest.calls[name].prompt_ids for name in later):
            if ids[:end] == context[:end] and len(ids) >= end + length:
                return ids[end : end + length], end - len(call.prompt_ids)
    return (), len(call.completion_ids)


def _continued(call: Call, observation: tuple[int, ...] = (), stay: int | None = None) -> Call:
    """Return the call's ids alone, the first `stay` of them, with `observation` as if sampled: each needs a value."""
    ids = call.completion_ids[:stay] + observation
    return replace(
        call,
        completion_ids=ids,
        completion_tokens=len(ids),
        observation_tokens=0,
        logprobs=None,
        ref_logprobs=None,
        values=None,
    )
