"""AsyncGRPOTrainer's packing of the benchmarks' rollouts: TRL's own planner and layout, counted, and run as a side.

TRL 1.16 folds samples into prefix tries as well (`TreeRow`). Per layer it copies, for each segment of a trie, the keys
and values of the whole path to it. Its kernel is on the Hugging Face hub, so the side attends by PyTorch's own
variable-length flash kernel, over TRL's layout; on a CPU by SDPA, segment by segment, to check the layout.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

import torch
from torch.nn.attention.bias import causal_lower_right
from transformers import AttentionInterface, AttentionMaskInterface

from mmrl.models.load import causal_lm
from scripts.bench.sides import Side
from scripts.bench.update_shapes import GROUP, Row, advantages

PLACES = ("trl.experimental.async_grpo.async_grpo_trainer", "trl.trainer.async_grpo_trainer")
"""Modules with the planner, in TRL 1.16 and since 1.18."""
IMPLEMENTATION = "bench_tree_row"


def plan(rows: list[Row], budget: int) -> list[Any] | None:
    """Return TRL's rows of at most `budget` tokens, one forward each; None where this TRL has no such planner."""
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    for place in PLACES:
        try:
            batcher = importlib.import_module(place).TokenBudgetBatcher
        except (ImportError, AttributeError):
            continue
        samples: list[dict[str, Any]] = [
            {
                "input_ids": torch.tensor(row.prompt + row.completion),
                "completion_mask": torch.tensor([0] * len(row.prompt) + row.mask),
                "old_log_probs": torch.zeros(len(row.prompt) + len(row.completion)),
                "advantage": advantage,
                "group_id": number // GROUP,
                "weight": 1 / (len(rows) * sum(row.mask)),
            }
            for number, (row, advantage) in enumerate(zip(rows, advantages(rows), strict=True))
        ]
        # The planner drops what is longer than its budget, and keeps its last row back: its stream has no end.
        budget = max(budget, *(len(sample["input_ids"]) for sample in samples))
        end = {"input_ids": -1 - torch.arange(budget), "completion_mask": torch.zeros(budget), "group_id": -1}
        return [row for (row,) in batcher([*samples, end], 1, budget, {"batch/dropped_oversize_total": []})]
    return None


def counts(rows: list[Row], budget: int) -> dict[str, int]:
    """Count the tokens that TRL forwards, and the keys that it copies per layer; empty without its planner."""
    planned = plan(rows, budget)
    if planned is None:
        return {}
    copied = sum(len(row.pack()["tree_kv_index"]) for row in planned)
    return {"tree_row": sum(len(row.tokens) for row in planned), "copied_keys": copied}


def attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    *,
    tree: dict[str, Any],
    scaling: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Implement transformers' attention over the layout of a `TreeRow`: each segment sees the path to it."""
    q, k, v = (states.transpose(1, 2)[0].to(value.dtype) for states in (query, key, value))  # (N, heads, D)
    k, v = k.index_select(0, tree["tree_kv_index"]), v.index_select(0, tree["tree_kv_index"])  # (K, kv heads, D)
    of_q, of_k = tree["tree_cu_seqlens_q"], tree["tree_cu_seqlens_k"]
    if q.is_cuda:
        longest = tree["tree_max_seqlens"].tolist()
        flash = torch.ops.aten._flash_attention_forward
        return flash(q, k, v, of_q, of_k, *longest, 0.0, True, False, scale=scaling)[0][None], None
    sizes_q, sizes_k = of_q.diff().tolist(), of_k.diff().tolist()
    parts = []
    for of_segment in zip(q.split(sizes_q), k.split(sizes_k), v.split(sizes_k), strict=True):
        a, b, c = (states.transpose(0, 1)[None] for states in of_segment)
        sees: Any = causal_lower_right(a.shape[2], b.shape[2])
        part = torch.nn.functional.scaled_dot_product_attention(a, b, c, sees, scale=scaling, enable_gqa=True)
        parts.append(part[0].transpose(0, 1))
    return torch.cat(parts)[None], None


class TreeRows(Side):
    """AsyncGRPOTrainer's layout and kernel calls; loss and optimizer are those of the other sides."""

    def __init__(self, model: Any, rows: list[Row], budget: int):
        AttentionInterface.register(IMPLEMENTATION, attention)
        AttentionMaskInterface.register(IMPLEMENTATION, lambda **_: None)
        causal_lm(model).set_attn_implementation(IMPLEMENTATION)
        self.model, self.rows, self.budget = model.train(), rows, budget
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=0.0)

    def backward(self) -> None:
        """Plan the rows and run them."""
        base = causal_lm(self.model)
        device = base.device
        for row in plan(self.rows, self.budget) or []:
            packed = {name: tensor.to(device) for name, tensor in row.pack().items()}
            with torch.autocast(device.type, torch.bfloat16, enabled=base.dtype == torch.bfloat16):
                states = base.model(
                    input_ids=packed["input_ids"][None],
                    position_ids=packed["position_ids"][None],
                    use_cache=False,
                    tree=packed,
                ).last_hidden_state[0]
                # Only what is trained reaches the head, as in TRL's own.
                index = packed["token_index"]
                logits = base.get_output_embeddings()(states[index]).float()
            labels = torch.cat([sample["input_ids"][sample["completion_mask"].bool()] for sample in row.samples])
            found = logits.gather(-1, labels.to(device)[:, None])[:, 0] - logits.logsumexp(-1)
            weights = torch.tensor([sample["weight"] for sample in row.samples], device=device)[packed["segment_id"]]
            ratio = torch.exp(found - found.detach())
            term = torch.minimum(ratio * packed["advantages"], ratio.clamp(0.8, 1.2) * packed["advantages"])
            (-(term * weights).sum()).backward()
