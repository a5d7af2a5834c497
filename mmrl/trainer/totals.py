"""Sums over the tokens of one step, and the metrics made of them.

Part of `trainer`. Sums stay on the device until the step ends; means are over trained tokens, exact over any split
into packs and processes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from mmrl.trainer.logprobs import Scores
from mmrl.trainer.objective import TokenLoss
from mmrl.trainer.packing import Pack

_ENTRY_SUMS = ("entries", "clip_share", "ratio_mean", "kl")
"""Per entry token: count and three sums."""
_TOKEN_SUMS = ("tokens", "entropy")
"""Per scored token, once for each optimizer step that trains it."""


class StepTotals:
    """Totals of one step.

    Args:
        modules: module names; rows of the sums.
        device: where the packs are.
    """

    def __init__(self, modules: Sequence[str], device: torch.device):
        self.modules = list(modules)
        self.sums = torch.zeros(len(self.modules), len(_ENTRY_SUMS + _TOKEN_SUMS), dtype=torch.float64, device=device)
        self.plain = torch.zeros(3, dtype=torch.float64, device=device)
        """Tokens forwarded; gap sum; gap count."""
        self.gaps = torch.zeros(len(self.modules), 2, dtype=torch.float64, device=device)
        """Gap sum and count of each module."""
        self.gap_max = torch.zeros((), dtype=torch.float64, device=device)
        self.with_kl = False
        self.corrections = torch.zeros(len(self.modules), 2, dtype=torch.float64, device=device)
        """Of truncated importance sampling, over entry tokens: sum of weights, and how many were truncated."""
        self.with_tis = False
        self.losses: list[float] = []
        self.grad_norms: list[float] = []
        self.adapter_norms: list[dict[str, float]] = []
        self.adapter_lr: dict[str, float] = {}
        self.lr = 0.0
        self.seconds = 0.0

    @torch.no_grad()
    def add(self, pack: Pack, scores: Scores, loss: TokenLoss) -> None:
        """Count one forward and backward."""
        self.plain[0] += pack.forwarded
        if loss.kl is not None:
            self.with_kl = True
        if pack.filler:
            return
        of_entry = pack.modules[pack.entry_index]
        columns = [torch.ones_like(loss.ratio), loss.clipped, loss.ratio]
        if loss.kl is not None:
            columns.append(loss.kl)
        for column, values in enumerate(columns):
            self.sums[:, column].index_add_(0, of_entry, values.double())
        self.sums[:, 4].index_add_(0, pack.modules, torch.ones_like(scores.logprobs).double())
        if loss.correction is not None:
            self.with_tis = True
            for column, values in enumerate((loss.correction.weights, loss.correction.truncated)):
                self.corrections[:, column].index_add_(0, of_entry, values.double())
        if scores.entropy is not None:
            self.sums[:, 5].index_add_(0, pack.modules, scores.entropy.double())

    @torch.no_grad()
    def add_gap(self, pack: Pack, logprobs: torch.Tensor) -> None:
        """Compare what the trainer computes, before any update of the step, with what the sampler recorded."""
        known = ~pack.sampled.isnan()
        gap = (logprobs.detach() - pack.sampled).abs()[known].double()
        if gap.numel():
            self.plain[1] += gap.sum()
            self.plain[2] += gap.numel()
            self.gaps[:, 0].index_add_(0, pack.modules[known], gap)
            self.gaps[:, 1].index_add_(0, pack.modules[known], torch.ones_like(gap))
            self.gap_max = torch.maximum(self.gap_max, gap.max())

    def metrics(self, reduce: Callable[[torch.Tensor, str], torch.Tensor]) -> dict[str, float]:
        """The step's metrics; `reduce(tensor, "sum" | "max")` joins the processes' totals."""
        sums = reduce(self.sums, "sum").tolist()
        forwarded, gap_sum, gap_count = reduce(self.plain, "sum").tolist()
        gap_max = float(reduce(self.gap_max, "max"))
        updates = max(len(self.losses), 1)
        found = {
            "train/loss": math.fsum(self.losses) / updates,
            "train/grad_norm": math.fsum(self.grad_norms) / updates,
            "train/lr": self.lr,
            "train/tokens": sum(row[4] for row in sums),
            "train/tokens_forwarded": forwarded,
            "time/update": self.seconds,
        }
        if gap_count:
            found |= {"train/logprob_gap_mean": gap_sum / gap_count, "train/logprob_gap_max": gap_max}
        for module, (own, count) in zip(self.modules, reduce(self.gaps, "sum").tolist(), strict=True):
            if count:
                found[f"module/{module}/logprob_gap_mean"] = own / count
        for name in self.adapter_norms[0] if self.adapter_norms else ():
            found[f"adapter/{name}/grad_norm"] = math.fsum(norms[name] for norms in self.adapter_norms) / updates
        found |= {f"adapter/{name}/lr": lr for name, lr in self.adapter_lr.items()}
        totals = [sum(column) for column in zip(*sums, strict=True)] if sums else []
        for prefix, row in [("train", totals), *((f"module/{m}", r) for m, r in zip(self.modules, sums, strict=True))]:
            found |= {f"{prefix}/{name}": value for name, value in self._means(row).items()}
        return found | self._tis(reduce(self.corrections, "sum").tolist(), [row[0] for row in sums])

    def _tis(self, rows: Sequence[Sequence[float]], entries: Sequence[float]) -> dict[str, float]:
        found, count = {}, math.fsum(entries)
        if self.with_tis and count:
            found["train/tis_mean"] = math.fsum(weight for weight, _ in rows) / count
            found["train/tis_clip_share"] = math.fsum(cut for _, cut in rows) / count
            for module, (_, cut), own in zip(self.modules, rows, entries, strict=True):
                if own:
                    found[f"module/{module}/tis_clip_share"] = cut / own
        return found

    def _means(self, row: Sequence[float]) -> dict[str, float]:
        if not row or not row[0]:
            return {}
        entries, clipped, ratio, kl, tokens, entropy = row
        means = {"clip_share": clipped / entries, "ratio_mean": ratio / entries, "entropy": entropy / tokens}
        if self.with_kl:
            means["kl"] = kl / entries
        return means
