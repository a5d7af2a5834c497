"""Forwards of the trainer's models: log-probabilities of policy and reference, values of the critic.

Part of `trainer`; `trl_trainer` inherits from it. Callers outside use `policy_logprobs` and `values`, between steps or
inside `next_batch`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from peft import PeftModel

from mmrl.errors import MmrlError
from mmrl.trainer.adapters import Adapters
from mmrl.trainer.critic import Critic
from mmrl.trainer.logprobs import Scores, score
from mmrl.trainer.objective import TrainCall
from mmrl.trainer.packing import Pack, make_packs
from mmrl.trainer.settings import Settings
from mmrl.trainer.sharding import is_sharded
from mmrl.trainer.tree_attention import last_parts


class Forwards:
    """The part of the trainer that forwards packs; the attributes are the Trainer's."""

    settings: Settings
    critic: Critic | None
    adapters: Adapters | None
    accelerator: Any
    args: Any
    model: Any
    model_wrapped: Any
    ref_model: Any
    compute_loss_context_manager: Callable[[], Any]
    tries: bool
    """Whether packs are prefix tries; else rows are padded."""
    budget: int
    """Tokens per pack."""

    @property
    def policy(self) -> Any:
        """The model in training, unwrapped: what an engine in the same process samples from."""
        return self.model

    def policy_logprobs(self, calls: Sequence[TrainCall], *, reference: bool = False) -> list[tuple[float, ...]]:
        """Log-probability of every completion token under the policy (or the reference) as it is now, dropout off.

        Returns one tuple of length T per call, in the order of `calls`.
        """
        return self._per_call(calls, self._reference if reference else self._policy)

    def values(self, calls: Sequence[TrainCall]) -> list[tuple[float, ...]]:
        """The critic's value before every completion token; tuples as from `policy_logprobs`.

        With `algo.obs=all`, hand in calls whose completions have their observation ids appended.
        """
        if self.critic is None:
            raise MmrlError(f"algo: {self.settings.algo.name} has no critic")
        return self._per_call(calls, self._values)

    def _per_call(self, calls: Sequence[TrainCall], forward: Callable[[Pack], torch.Tensor]) -> list[tuple[float, ...]]:
        modules = list(dict.fromkeys(call.module for call in calls))
        packs = self._make_packs(calls, modules, score_all=True)
        found: dict[int, tuple[float, ...]] = {}
        for pack in [*packs, *self._in_step(len(packs))]:
            numbers = forward(pack.to(self.args.device)).tolist()
            for call in pack.calls:
                count = len(call.completion_ids)
                found[id(call)], numbers = tuple(numbers[:count]), numbers[count:]
        return [found.get(id(call), ()) for call in calls]

    def _in_step(self, count: int) -> list[Pack]:
        """What a process forwards beyond its `count` packs where weights are sharded: gathering them takes everyone,
        and each process brings its own calls here."""
        if not is_sharded(self.accelerator):
            return []
        most = int(self.reduce(torch.tensor(float(count), device=self.args.device), "max"))
        call = TrainCall(id="", module="", prompt_ids=(0,), completion_ids=(0,))
        return [pack for _ in range(most - count) for pack in self._make_packs([call], [""], score_all=True)]

    def _make_packs(
        self,
        calls: Sequence[TrainCall],
        modules: Sequence[str],
        *,
        score_all: bool = False,
        tries: bool | None = None,
    ) -> list[Pack]:
        """Packs within the token budget; no pack mixes adapters."""
        return [
            pack
            for own in ([calls] if self.adapters is None else self.adapters.split(calls))
            for pack in make_packs(
                own,
                self.budget,
                beta=self.settings.beta,
                modules=modules,
                dtype=self._number_type(),
                score_all=score_all,
                tries=self.tries if tries is None else tries,
                share=self.accelerator.num_processes,
            )
        ]

    def _with_adapter(self, pack: Pack) -> AbstractContextManager[None]:
        return nullcontext() if self.adapters is None else self.adapters.using(self.model, pack.calls[0])

    def _reference(self, pack: Pack) -> torch.Tensor:
        """Reference log-probabilities, (N,): as handed in, else adapters off, else the frozen copy."""
        if not pack.known_ref.isnan().any():
            return pack.known_ref
        if isinstance(self.model, PeftModel):
            with self.model.disable_adapter():
                return self._no_grad(self.model_wrapped, pack)
        if self.ref_model is None:
            raise MmrlError("algo.beta: got 0, so there is no reference policy to compare with; expected more than 0")
        return self._no_grad(self.ref_model, pack)

    def _policy(self, pack: Pack) -> torch.Tensor:
        with self._with_adapter(pack):
            return self._no_grad(self.model_wrapped, pack)

    @torch.no_grad()
    def _no_grad(self, model: Any, pack: Pack) -> torch.Tensor:
        model.eval()
        with self.compute_loss_context_manager():
            return self._score(model, pack).logprobs

    @torch.no_grad()
    def _values(self, pack: Pack) -> torch.Tensor:
        assert self.critic is not None
        self.model.eval()
        self.critic.module.eval()
        with self._with_adapter(pack), self.critic.active(), self.compute_loss_context_manager():
            return self.critic.values(pack)

    def _score(self, model: Any, pack: Pack, *, entropy: bool = False) -> Scores:
        plain = self.accelerator.unwrap_model(model)
        # Recomputed in the backward pass, the last layer would be the whole one again.
        last = () if pack.tree is None or self.settings.model.gradient_checkpointing else last_parts(plain)
        head = plain.get_output_embeddings()
        return score(model, head, pack, self.settings.algo.temperature, entropy=entropy, last=last)

    def _number_type(self) -> torch.dtype:
        return torch.float64 if self.policy.dtype == torch.float64 else torch.float32

    def reduce(self, tensor: torch.Tensor, reduction: str) -> torch.Tensor:
        """Join the processes' tensors: `sum`, or `max` of scalars."""
        if self.accelerator.num_processes == 1:
            return tensor
        if reduction == "max":
            joined: torch.Tensor = self.accelerator.gather(tensor.reshape(1)).max()
            return joined
        summed: torch.Tensor = self.accelerator.reduce(tensor, reduction=reduction)
        return summed
