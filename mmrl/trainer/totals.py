"""Sums over the tokens of one step, of reinforcement learning or supervised, and the metrics made of them.

Part of `trainer`. Sums of packs stay on the device until the step ends; means are over trained tokens, exact over any
split into packs and processes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from mmrl.errors import MmrlError
from mmrl.trainer.logprobs import Scores
from mmrl.trainer.objective import TokenLoss
from mmrl.trainer.packing import Pack

# Columns of `StepTotals.sums`: per entry token a count and three sums, and of truncated importance sampling its weight
# and whether it was truncated; then per scored token, once for each optimizer step that trains it, a count and a sum;
# and of supervised steps its negative log-likelihood and whether it is the likeliest; and whether a teacher's whole
# distribution is its target, and the divergence from that.
COLUMNS = 12
_ENTRIES, _CLIPPED, _RATIO, _KL, _TIS, _TRUNCATED, _TOKENS, _ENTROPY, _NLL, _HITS, _TAUGHT, _TEACHER = range(COLUMNS)


class StepTotals:
    """Totals of one step.

    Args:
        modules: module names; rows of the sums.
        device: where the packs are.
    """

    def __init__(self, modules: Sequence[str], device: torch.device):
        self.modules = list(modules)
        # float64 on the device: a step of millions of tokens would lose the last ones in float32, and reading each
        # pack's sums on the host would wait for the device.
        self.sums = torch.zeros(len(self.modules), COLUMNS, dtype=torch.float64, device=device)
        self.counts = torch.zeros(3, dtype=torch.float64, device=device)
        """Tokens forwarded; gap sum; gap count."""
        self.gaps = torch.zeros(len(self.modules), 2, dtype=torch.float64, device=device)
        """Gap sum and count of each module."""
        self.gap_max = torch.zeros((), dtype=torch.float64, device=device)
        self.gaps_of_packs: list[torch.Tensor] = []
        """Gap of each token whose log-probability the sampler has recorded."""
        self.with_kl = False
        self.with_tis = self.supervised = False
        self.losses: list[float] = []
        self.grad_norms: list[float] = []
        self.adapter_norms: list[dict[str, float]] = []
        self.adapter_lr: dict[str, float] = {}
        self.lr = 0.0
        self.seconds = 0.0

    @torch.no_grad()
    def add(self, pack: Pack, scores: Scores, loss: TokenLoss) -> None:
        """Count one forward and backward."""
        self.counts[0] += pack.forwarded
        if loss.kl is not None:
            self.with_kl = True
        if pack.filler:
            return
        entries, tokens = pack.modules[pack.entry_index], pack.modules  # (E,), (N,) module indices
        of_entries = {_ENTRIES: torch.ones_like(loss.ratio), _CLIPPED: loss.clipped, _RATIO: loss.ratio}
        of_tokens = {_TOKENS: torch.ones_like(scores.logprobs)}
        if loss.kl is not None:
            of_entries[_KL] = loss.kl
        if loss.correction is not None:
            self.with_tis = True
            of_entries |= {_TIS: loss.correction.weights, _TRUNCATED: loss.correction.truncated}
        if scores.entropy is not None:
            of_tokens[_ENTROPY] = scores.entropy
        if scores.hits is not None:
            self.supervised = True
            of_tokens |= {_NLL: -scores.logprobs, _HITS: scores.hits}
        if scores.kl is not None:
            of_tokens |= {_TAUGHT: pack.kl_weights != 0, _TEACHER: scores.kl}
        for index, columns in ((entries, of_entries), (tokens, of_tokens)):
            for column, values in columns.items():
                self.sums[:, column].index_add_(0, index, values.double())

    @torch.no_grad()
    def add_gap(self, pack: Pack, logprobs: torch.Tensor) -> None:
        """Compare what the trainer computes, before any update of the step, with what the sampler recorded."""
        if pack.filler:
            return
        recorded = ~pack.sampled.isnan()  # (N,) bool
        gap = (logprobs.detach() - pack.sampled).abs()[recorded].double()
        if gap.numel():
            self.counts[1] += gap.sum()
            self.counts[2] += gap.numel()
            self.gaps[:, 0].index_add_(0, pack.modules[recorded], gap)
            self.gaps[:, 1].index_add_(0, pack.modules[recorded], torch.ones_like(gap))
            self.gap_max = torch.maximum(self.gap_max, gap.max())
            self.gaps_of_packs.append(gap)

    def metrics(self, reduce: Callable[[torch.Tensor, str], torch.Tensor]) -> dict[str, float]:
        """Return the step's metrics; `reduce(tensor, "sum" | "max")` joins the processes' totals."""
        sums = reduce(self.sums, "sum").tolist()
        forwarded, gap_sum, gap_count = reduce(self.counts, "sum").tolist()
        gap_max = float(reduce(self.gap_max, "max"))
        updates = max(len(self.losses), 1)
        metrics = {
            "train/loss": math.fsum(self.losses) / updates,
            "train/grad_norm": math.fsum(self.grad_norms) / updates,
            "train/lr": self.lr,
            "train/tokens": sum(row[_TOKENS] for row in sums),
            "train/tokens_forwarded": forwarded,
            "time/update": self.seconds,
        }
        if gap_count:
            metrics |= {"train/logprob_gap_mean": gap_sum / gap_count, "train/logprob_gap_max": gap_max}
        for module, (gap, count) in zip(self.modules, reduce(self.gaps, "sum").tolist(), strict=True):
            if count:
                metrics[f"module/{module}/logprob_gap_mean"] = gap / count
        for name in self.adapter_norms[0] if self.adapter_norms else ():
            metrics[f"adapter/{name}/grad_norm"] = math.fsum(norms[name] for norms in self.adapter_norms) / updates
        metrics |= {f"adapter/{name}/lr": lr for name, lr in self.adapter_lr.items()}
        totals = [sum(column) for column in zip(*sums, strict=True)] if sums else []
        modules = [(f"module/{m}", row) for m, row in zip(self.modules, sums, strict=True) if m]
        for prefix, row in [("train", totals), *modules]:
            # `train/loss` is there already, summed as it was trained.
            metrics |= {f"{prefix}/{name}": value for name, value in self._means(row).items()} | metrics
        return metrics | self._tis(sums)

    def _tis(self, sums: Sequence[Sequence[float]]) -> dict[str, float]:
        """Return the mean weight and truncated share of truncated importance sampling; empty without it."""
        metrics, count = {}, math.fsum(row[_ENTRIES] for row in sums)
        if self.with_tis and count:
            metrics["train/tis_mean"] = math.fsum(row[_TIS] for row in sums) / count
            metrics["train/tis_clip_share"] = math.fsum(row[_TRUNCATED] for row in sums) / count
            for module, row in zip(self.modules, sums, strict=True):
                if row[_ENTRIES]:
                    metrics[f"module/{module}/tis_clip_share"] = row[_TRUNCATED] / row[_ENTRIES]
        return metrics

    def _means(self, row: Sequence[float]) -> dict[str, float]:
        """Return the means of one row of the sums (or of their total); empty where nothing was trained."""
        if not row or not row[_TOKENS]:
            return {}
        entries, clipped, ratio, kl, _, _, tokens, entropy, nll, hits, taught, divergence = row
        if self.supervised:
            return {"loss": nll / tokens, "token_accuracy": hits / tokens}
        means = {"entropy": entropy / tokens}
        if entries:
            means |= {"clip_share": clipped / entries, "ratio_mean": ratio / entries}
            means |= {"kl": kl / entries} if self.with_kl else {}
        if taught:
            means["teacher_kl"] = divergence / taught
        return means


def finite(value: float, name: str, step: int) -> float:
    """Return the loss of a step or the norm of its gradient; raises `MmrlError` where that is no number."""
    if not math.isfinite(value):
        raise MmrlError(f"step {step}: the {name} is {value}; lower train.lr, or resume an earlier checkpoint")
    return value
