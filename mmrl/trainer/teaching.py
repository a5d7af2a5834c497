"""What teachers know of a step's tokens, for the divergence over the whole vocabulary (`algo.distill_kl=exact`).

Part of `trainer`. Of a teacher, its head's input is kept from before the first update on, and its logits are made of
that chunk by chunk (`logprobs`): those of a whole step would not fit into any memory.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

import torch

from mmrl.config.teacher import INITIAL, POLICY
from mmrl.errors import ConfigError
from mmrl.models.load import causal_lm
from mmrl.models.selfcheck import evaluating
from mmrl.trainer.logprobs import head_logits, hidden_states
from mmrl.trainer.objective import TrainCall
from mmrl.trainer.packing import Pack, Taught

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from mmrl.records import Call
    from mmrl.trainer.forwards import Forwards


@torch.no_grad()
def teach(forwards: Forwards, packs: Sequence[Pack]) -> None:
    """Fill in `Pack.taught`, before the first update of a step; dropout off.

    Of a call's T tokens, T · H numbers are kept until the step ends, in the precision that the teacher computes in.
    """
    own = [pack for pack in packs if not pack.filler]
    views: dict[str, list[Call]] = {}
    for train in (train for pack in own for train in pack.calls):
        if train.view is not None and train.kl_weights:
            views.setdefault(train.view.module, []).append(train.view)
    copies = dict[int, torch.nn.Module]()
    for module, calls in views.items():
        states, logits = _states(forwards, module, calls, copies)
        for pack in own:
            taught = [number for number, train in enumerate(pack.calls) if id(train.view) in states]
            if taught:
                places = torch.isin(pack.of_call.cpu(), torch.tensor(taught)).nonzero()[:, 0]
                rows = torch.cat([states[id(pack.calls[number].view)] for number in taught])
                pack.taught += (Taught(places=tuple(places.tolist()), states=rows, logits=logits),)
    forwards.kept.clear()


def _states(
    forwards: Forwards, module: str, calls: Sequence[Call], copies: dict[int, torch.nn.Module]
) -> tuple[dict[int, torch.Tensor], Callable[[torch.Tensor], torch.Tensor]]:
    """Return what the teacher's head sees at each token of a module's calls, (T, H) by the call's identity; its head.

    The head is a copy where it will be another one in the update: it is trained (`copies`: one for all modules), or has
    adapters, which may be others for other modules.
    """
    teacher = (forwards.settings.algo.distill or {})[module]
    model, tries, loaded = forwards.wrapped, forwards.tries, None
    found: dict[int, torch.Tensor] = {}
    unseen: list[Call] = []
    for call in calls:
        # Missing where another process has scored the call, or nobody: its log-probabilities were known.
        if (kept := forwards.kept.pop((teacher, call.id), None)) is None:
            unseen.append(call)
        else:
            found[id(call)] = kept
    with ExitStack() as stack:
        if teacher == INITIAL:
            model = stack.enter_context(forwards.initial())
        elif teacher != POLICY:
            loaded, tries = forwards.teachers[teacher](module)
            model = loaded
        model.eval()
        head = forwards.accelerator.unwrap_model(model).get_output_embeddings()
        packs = forwards.make_packs(
            [TrainCall(call=call) for call in unseen], [module], score_all=True, tries=tries, model=loaded
        )
        for pack in packs:
            if teacher == POLICY:
                forwards.use_adapter(pack)
            with forwards.autocast():
                rows = hidden_states(model, head, pack.to(forwards.device))
            parts = rows.split([len(train.call.completion_ids) for train in pack.calls])
            found |= {id(train.call): part for train, part in zip(pack.calls, parts, strict=True)}
        used = head
        if not isinstance(head, torch.nn.Linear):
            used = copy.deepcopy(head)
        elif forwards.settings.updates > 1 and head.weight.requires_grad:
            if id(head) not in copies:
                copies[id(head)] = copy.deepcopy(head)
            used = copies[id(head)]
        return found, head_logits(forwards.accelerator.unwrap_model(model), head, used)


@torch.no_grad()
def require_own_logits(forwards: Forwards, model: PreTrainedModel) -> None:
    """Look whether a model's logits are made of its head's input alone.

    Raises:
        ConfigError: they are not, or cannot be made so here.
    """
    causal, head = causal_lm(model), model.get_output_embeddings()
    ids = torch.arange(8, device=model.device)[None] % causal.config.get_text_config().vocab_size
    seen: list[torch.Tensor] = []
    handle = head.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    try:
        with evaluating(model), forwards.autocast():
            expected = model(input_ids=ids, use_cache=False).logits[0].float()
            own = torch.allclose(head_logits(model, head)(seen[0][0]).float(), expected, rtol=1e-2, atol=1e-2)
    except Exception:  # whatever the code of an architecture raises where only its head is left
        own = False
    finally:
        handle.remove()
    if not own:
        raise ConfigError(
            f"algo.distill_kl: got exact, and {type(causal).__name__} computes its logits of more than its output "
            "head's input; use sampled"
        )
