"""Choice between packed tries and padded rows, for a model that has just been loaded.

Part of `trainer`. What attention gets says whether a model's layers can share prefixes; whether they do is tried.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING

import torch
from accelerate.utils import broadcast_object_list

from mmrl.errors import ConfigError
from mmrl.models.attending import attended_layers
from mmrl.models.load import HYBRIDS, causal_lm, unknown_layers
from mmrl.models.selfcheck import CheckRow, Way, evaluating, plain_logprobs, rounding_noise
from mmrl.trainer.logprobs import score
from mmrl.trainer.objective import TrainCall
from mmrl.trainer.packing import make_packs
from mmrl.trainer.tree_attention import install, last_parts, unsupported_reason

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LOG = logging.getLogger("mmrl.trainer")


def choose_packing(packing: str, model: PreTrainedModel) -> bool:
    """Return True for packs that are tries, by `train.packing`; sets the model's attention.

    Raises:
        ConfigError: not `auto`, and the model's layers cannot share prefixes in this way.
    """
    if packing == "padded":
        return False
    varlen = packing == "trie_varlen"
    reason = unsupported_reason(model) or (_varlen_fault(model) if varlen else None)
    before = str(model.config._attn_implementation)
    if reason is None:
        install(model)
        # Of the families that everybody trains, the self-check's rows are enough.
        reason = _of_main(_differing(model, varlen)) if unknown_layers(model) is not None else None
    if reason is None:
        return True
    causal_lm(model).set_attn_implementation(before)
    if packing != "auto":
        raise ConfigError(f"train.packing: got '{packing}', which this model cannot do: {reason}; use auto or padded")
    LOG.warning("train.packing=auto: rows are padded (slower), since %s", reason)
    return False


def _of_main(reason: str | None) -> str | None:
    """Return the main process's finding: processes that packed in two ways would wait for each other for ever.

    With FSDP2 the others may have no weights yet by which they could tell.
    """
    from torch import distributed

    if not (distributed.is_available() and distributed.is_initialized()):
        return reason
    found = [reason]
    broadcast_object_list(found)
    return found[0]


def _varlen_fault(model: PreTrainedModel) -> str | None:
    layers = [] if type(causal_lm(model)).__name__ in HYBRIDS else attended_layers(model)
    if model.device.type != "cuda":
        return f"its kernel is for CUDA, and the device is {model.device.type}"
    if model.dtype == torch.float32:
        return "its kernel computes in 16 bits alone, and model.dtype=float32"
    if any(layer.softcap is not None or layer.key_size != layer.value_size for layer in layers):
        return "its kernel has no caps, and values of the size of keys alone"
    return None


def _differing(model: PreTrainedModel, varlen: bool) -> str | None:
    """Compare a small trie with plain forwards; returns what is different, or None.

    Whatever else mixes tokens, or counts them, shows here: a convolution, a state, positions of the row.
    """
    vocabulary = model.config.get_text_config().vocab_size
    ids = [(7 + 31 * number * number) % vocabulary for number in range(140)]
    # A trie of three levels: one row leaves the others in the middle of a completion.
    beginnings = (ids[:20] + ids[20:40], ids[:20] + ids[20:30] + ids[90:100], ids[:20] + ids[100:120])
    rows = [CheckRow(tuple(ids[:20]), tuple(whole[20:] + ids[n : n + 5])) for n, whole in enumerate(beginnings)]
    calls = [TrainCall(call=row.call(number)) for number, row in enumerate(rows)]
    half = model.dtype in (torch.bfloat16, torch.float16)
    try:
        (pack,) = make_packs(calls, 10**6, beta=0.0, modules=[""], score_all=True, tries=True)
        assert pack.tree is not None
        pack.tree.varlen = varlen
        with torch.no_grad(), evaluating(model):
            plain = plain_logprobs(model, rows)
            noise = rounding_noise(model, partial(plain_logprobs, model, rows), plain) if half else 0.0
            head = model.get_output_embeddings()
            found = score(model, head, pack.to(model.device), 1.0, last=last_parts(model)).logprobs
        packed = [found[pack.of_call == place].tolist() for place in range(len(pack.calls))]
    except Exception as error:  # whatever the code of an architecture raises on a pack
        return f"{type(model).__name__} cannot forward a packed trie ({type(error).__name__})"
    return (
        Way.compared("packed tries", packed, [plain[calls.index(train)] for train in pack.calls]).fault(
            half=half, noise=noise
        )
        or None
    )
