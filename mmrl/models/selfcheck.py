"""The self-check: every way in which a run computes log-probabilities against the model's own plain forward.

Engines and trainer batch, pad, cache and pack rows, and each of these is right for some architectures alone. None of
their errors shows in a loss. So two short rows are computed in each way before anything is sampled, and a few calls of
the first batch before anything is trained (`model.selfcheck`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from mmrl.models.chat import encode_text
from mmrl.records import Call

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

Rows: TypeAlias = Sequence[Sequence[float]]
"""Log-probabilities of several completions."""
EXACT = 1e-4
"""Largest difference of log-probabilities in float32 that the order of sums explains."""
FLOOR, TIMES = 0.02, 4
"""In half precision: the root mean square that is always allowed, and how many times that of one more rounding."""
LEAST_TOKENS = 64
"""Fewest tokens whose mean tells a wrong way from rounding, of which single tokens may have more than 0.5."""
TEXT = (
    "A model reads this text once by itself, and once in the way that a run will take. Both must agree: token by "
    "token, in 1 row or 2, whether a row is short or long; otherwise what is sampled is not what is trained."
)
_DRAWN = 0.002
"""Standard deviation of the adapters' drawn weights: large enough that an adapter which is left out shows."""


@dataclass(frozen=True, slots=True)
class CheckRow:
    """A row of the check: tokens that are given, and tokens whose log-probabilities are compared."""

    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]

    def call(self, name: object, module: str = "") -> Call:
        """Return the row as a call of a module, for forwards that take calls."""
        return Call(
            id=str(name),
            example="",
            parent=None,
            module=module,
            prompt_ids=self.prompt_ids,
            completion_ids=self.completion_ids,
            completion_tokens=len(self.completion_ids),
        )


@dataclass(frozen=True, slots=True)
class Way:
    """One way to compute log-probabilities, compared with another; differences in nats."""

    name: str
    largest: float
    rms: float
    tokens: int

    @classmethod
    def compared(cls, name: str, first: Sequence[Sequence[float]], second: Sequence[Sequence[float]]) -> Way:
        """Compare two computations of the same rows."""
        # NumPy's, since one NaN must stay one.
        gaps = np.abs(np.concatenate([np.subtract(a, b) for a, b in zip(first, second, strict=True)]))
        return cls(name, float(gaps.max()), float(np.sqrt(np.square(gaps).mean())), len(gaps))

    def fault(self, *, half: bool, noise: float = 0.0) -> str:
        """Return what is wrong, in words; empty where rounding explains the difference.

        Args:
            half: computed in bfloat16 or float16, where fewer than `LEAST_TOKENS` say nothing.
            noise: what one more rounding makes in the same type (`rounding_noise`).
        """
        allowed = max(FLOOR, TIMES * noise) if half else EXACT
        if half and self.tokens < LEAST_TOKENS and np.isfinite(self.largest):
            return ""
        # Not the median: a token that should be seen and is not changes few of a text's words, but those by far more
        # than rounding does.
        found = self.rms if half else self.largest
        kind = "root mean square" if half else "at most"
        if found <= allowed:
            return ""
        return f"log-probabilities of {self.name} differ by {found:.2g} ({kind} {allowed:.2g} is rounding)"


def check_rows(
    tokenizer: PreTrainedTokenizerBase, vocabulary: int, context: int | None, *, half: bool
) -> tuple[CheckRow, CheckRow]:
    """Return two rows of unlike lengths that begin with the same tokens, of at most `context` tokens.

    Args:
        vocabulary: of the model; ids of a tokenizer that has more are taken modulo this.
        half: more tokens are compared.
    """
    ids = [token % vocabulary for token in encode_text(tokenizer, TEXT)]
    if len(set(ids)) < 16:  # a tokenizer of other signs than letters
        ids = [number * number % vocabulary for number in range(96)]
    ids *= -(-96 // len(ids))
    short, long = (24, 44) if half else (6, 12)

    def divided(row: Sequence[int], count: int) -> CheckRow:
        row = row[:context]
        count = min(count, len(row) // 2)
        return CheckRow(tuple(row[: len(row) - count]), tuple(row[len(row) - count :]))

    return divided(ids[: 24 + short], short), divided([*ids[:8], *ids[9 : 37 + long]], long)


def logprobs_of(logits: torch.Tensor, ids: Sequence[int], temperature: float = 1.0) -> list[float]:
    """Return the log-probabilities of tokens, one for each row of `logits`, (T, V)."""
    import torch

    logits = logits if logits.dtype == torch.float64 else logits.float()
    chosen = torch.tensor(ids, device=logits.device)
    numbers: list[float] = (logits / temperature).log_softmax(dim=-1).gather(-1, chosen[:, None])[:, 0].tolist()
    return numbers


def plain_logprobs(model: torch.nn.Module, rows: Sequence[CheckRow], temperature: float = 1.0) -> list[list[float]]:
    """Compute the completions' log-probabilities by the model's forward of each row alone: no padding, no cache."""
    import torch

    device, results = next(model.parameters()).device, []
    with torch.no_grad(), evaluating(model):
        for row in rows:
            ids = torch.tensor([row.prompt_ids + row.completion_ids], device=device)
            logits = model(input_ids=ids, use_cache=False).logits[0, len(row.prompt_ids) - 1 : -1]  # (T, V)
            results.append(logprobs_of(logits, row.completion_ids, temperature))
    return results


def computes_in_half(model: torch.nn.Module) -> bool:
    """Return whether a model's forward computes in bfloat16 or float16 now, of float32 weights too (autocast)."""
    import torch

    weight, seen = next(model.parameters()), list[bool]()
    embeddings: torch.nn.Module = model.get_input_embeddings()  # type: ignore[operator]
    # By a look inside of a forward: while it trains a model, accelerate has autocast begin there.
    handle = embeddings.register_forward_hook(lambda *_: seen.append(torch.is_autocast_enabled(weight.device.type)))
    try:
        plain_logprobs(model, [CheckRow((0,), (0,))])
    finally:
        handle.remove()
    return weight.dtype in (torch.bfloat16, torch.float16) or seen[0]


def rounding_noise(model: torch.nn.Module, again: Callable[[], Rows], plain: Rows) -> float:
    """Return the root mean square difference from `plain` when the first layer's input is rounded once more.

    In half precision any other order of sums does as much, and how much that is depends on the weights and the text:
    0.0001 nats with drawn weights, 0.03 to 0.04 in Qwen2.5-Coder, where one unseen token makes 0.2 to 2.

    Args:
        again: computes `plain` once more.
    """
    import torch

    draws = torch.Generator().manual_seed(0)

    def rounded(_: torch.nn.Module, __: object, states: torch.Tensor) -> torch.Tensor:
        # float32 weights are computed with in bfloat16 here (autocast).
        step = torch.finfo(torch.bfloat16 if states.dtype == torch.float32 else states.dtype).eps
        signs = torch.randint(2, states.shape, generator=draws).to(states.device) * 2 - 1
        return (states.float() * (1 + step * signs)).to(states.dtype)

    embeddings: torch.nn.Module = model.get_input_embeddings()  # type: ignore[operator]
    handle = embeddings.register_forward_hook(rounded)
    try:
        # Two draws: one alone can be half of another.
        return max(Way.compared("", again(), plain).rms for _ in range(2))
    finally:
        handle.remove()


@contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Put a model in evaluation mode inside; the mode of each of its parts is as before at the end."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        model.eval()
        for module in training:
            module.training = True


@contextmanager
def drawn_adapters(model: torch.nn.Module, *, draw: bool = True) -> Iterator[None]:
    """Give adapters small random weights inside, and take their dropout away; at the end they are as before.

    At their start adapters add nothing, so whatever applies them wrongly would agree with whatever does not.

    Args:
        draw: False leaves the weights as they are (shards of them, which no process can write alone).
    """
    import torch
    from peft.tuners.tuners_utils import BaseTunerLayer

    generator = torch.Generator().manual_seed(0)
    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    weights: dict[int, torch.nn.Parameter] = {
        id(weight): weight
        for layer in (layers if draw else ())
        for name in layer.adapter_layer_names
        for weight in getattr(layer, name).parameters()
    }
    dropouts = [part for layer in layers for part in layer.modules() if isinstance(part, torch.nn.Dropout)]
    kept = [weight.detach().clone() for weight in weights.values()]
    rates = [part.p for part in dropouts]
    try:
        with torch.no_grad():
            for weight in weights.values():
                drawn = torch.randn(weight.shape, generator=generator) * _DRAWN
                weight.copy_(torch.where(weight == 0, drawn.to(weight), weight))
        for part in dropouts:
            part.p = 0.0
        yield
    finally:
        with torch.no_grad():
            for weight, before in zip(weights.values(), kept, strict=True):
                weight.copy_(before)
        for part, rate in zip(dropouts, rates, strict=True):
            part.p = rate
