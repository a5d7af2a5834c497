"""Log-probabilities of scored tokens under a causal language model, logits computed nowhere else.

Part of `trainer`. The model's own forward is run, wrapper and head included (tied heads, biases, adapters, soft caps,
logit scales), so any Hugging Face causal LM works; only the rows that reach its head are chosen here.
"""

from __future__ import annotations

import functools
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from mmrl.errors import MmrlError
from mmrl.trainer.packing import Pack, Taught

CHUNK = 2**26
"""Logits that exist at once (256 MB in float32); where there are more, the backward pass computes them again."""
ENTROPY_CHUNK = 512
"""Positions whose entropy is computed at once; it needs a second copy of their logits."""
KL_CHUNK = 512
"""Positions whose divergence from a teacher is computed at once, with about six arrays as large as their logits in
float32: 1.9 GB of 152 000 tokens, 0.3 GB of which wait for the backward pass where one chunk is all there is."""


@dataclass(frozen=True, slots=True)
class Scores:
    """Scores of N positions, in the order of `Pack.positions`."""

    logprobs: torch.Tensor
    """(N,), with gradient if enabled."""
    entropy: torch.Tensor | None
    """(N,) nats per token of the distribution at the sampling temperature; None unless requested."""
    hits: torch.Tensor | None
    """(N,) whether the target is the likeliest token; None unless requested."""
    hidden: torch.Tensor
    """(N, H) what the head saw, detached."""
    kl: torch.Tensor | None = None
    """(N,) KL(policy || teacher) in nats with gradient, 0 where there is no teacher; None without `taught`."""


def score(
    model: torch.nn.Module,
    head: torch.nn.Module,
    pack: Pack,
    temperature: float,
    *,
    entropy: bool = False,
    hits: bool = False,
    last: Sequence[torch.nn.Module] = (),
    taught: Sequence[Taught] = (),
) -> Scores:
    """Compute log-softmax(logits / temperature) of the pack's targets, over the full vocabulary.

    Args:
        model: called with `Pack.inputs`; may be wrapped (DDP, FSDP, peft).
        head: the module inside `model` that turns hidden states into logits (`get_output_embeddings()`).
        temperature: of sampling; > 0.
        last: modules of the model's last layer, of which only scored positions are then computed (of tries).
        taught: compute the divergence from these teachers too.
    """
    # Full log-softmax at the sampling temperature: the policy that sampled is the whole distribution at that
    # temperature, not the one cut by top-k or top-p, so ratios between sampler and trainer are 1 before an update.
    if pack.tree is not None or taught:
        with _narrowed(last, pack.positions):
            return _score_in_chunks(model, head, pack, temperature, entropy, hits, taught)
    with _only(head, pack.positions) as states:
        logits = model(**pack.inputs).logits
    if logits.numel() != pack.positions.numel() * logits.shape[-1]:
        raise MmrlError(
            f"model.path: {type(model).__name__} computes its logits outside its output head, "
            "so the trainer cannot choose the positions; expected a standard causal language model"
        )
    logits = logits.reshape(-1, logits.shape[-1])
    logprobs, entropies = _measure(_tempered(logits, temperature), pack.targets, entropy)
    return Scores(logprobs, entropies, _likeliest(logits, pack.targets) if hits else None, states[0])


def hidden_states(model: torch.nn.Module, head: torch.nn.Module, pack: Pack) -> torch.Tensor:
    """Return the head's input at the scored positions, (N, H), with gradient if enabled; no logits are computed.

    The whole model is called, for the wrappers' sake (FSDP gathers from its root on), and its head does nothing.
    """
    states: list[torch.Tensor] = []

    def record(hidden: torch.Tensor) -> torch.Tensor:
        rows = hidden.reshape(1, -1, hidden.shape[-1])[:, pack.positions]  # (1, N, H) of (R, W, H)
        states.append(rows[0])
        return rows

    # On the instance: it hides the class's forward, and `del` brings that back.
    head.forward = record
    try:
        model(**pack.inputs)
    finally:
        del head.forward
    return states[0]


def _tempered(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    # float32: in bfloat16 a logit near 20 is rounded to a multiple of 1/8, and the difference of two such roundings
    # would be read as a ratio between two policies. float64 models (tests) stay as they are.
    if logits.dtype in (torch.bfloat16, torch.float16):
        logits = logits.float()
    return logits if temperature == 1 else logits / temperature


def _measure(logits: torch.Tensor, targets: torch.Tensor, entropy: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return log-probabilities of targets, (N,), from logits at the run's temperature, (N, V), and the entropies."""
    return _TargetLogprobs.apply(logits, targets, entropy)  # type: ignore[no-untyped-call, no-any-return]


class _TargetLogprobs(torch.autograd.Function):
    """log-softmax at the targets, with one exponential of each logit for value, entropy and gradient together."""

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, targets: torch.Tensor, entropy: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return log-probabilities of (N,) targets under (N, V) logits; with `entropy` entropies, without gradient."""
        largest = logits.amax(-1, keepdim=True)
        probabilities = (logits - largest).exp_()  # (N, V): all that the backward pass needs
        norm = probabilities.sum(-1, keepdim=True)
        probabilities.div_(norm)
        total = (largest + norm.log_())[:, 0]  # (N,)
        logprobs = logits.gather(-1, targets[:, None])[:, 0] - total
        ctx.save_for_backward(probabilities, targets)
        ctx.set_materialize_grads(False)
        if not entropy:
            return logprobs, None
        parts = zip(probabilities.split(ENTROPY_CHUNK), logits.split(ENTROPY_CHUNK), strict=True)
        entropies = total - torch.cat([(some * part).sum(-1) for some, part in parts])
        ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _: None) -> tuple[torch.Tensor, None, None]:
        """Return grad * (onehot(target) - probabilities), written over the probabilities."""
        probabilities, targets = ctx.saved_tensors
        found = probabilities.mul_(-grad[:, None])
        return found.scatter_add_(1, targets[:, None], grad[:, None]), None, None


class ReverseKl(torch.autograd.Function):
    """KL(student || teacher) of each row over the tokens that both have, with the gradient of the student alone."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
        """Return (n,) nats of (n, V) and (n, V') logits; the wider ones lose what pads them."""
        size = min(logits.shape[-1], theirs.shape[-1])
        ours = logits[:, :size].log_softmax(-1)
        gaps = ours - theirs[:, :size].log_softmax(-1)
        probabilities = ours.exp_()
        kl = (probabilities * gaps).sum(-1)
        # d KL / d logit = p (log p - log q - KL): exactly 0 where the two agree.
        ctx.save_for_backward(gaps.sub_(kl[:, None]).mul_(probabilities))
        ctx.padding = logits.shape[-1] - size
        return kl

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Return grad * d KL / d logits."""
        (slopes,) = ctx.saved_tensors
        return torch.nn.functional.pad(slopes * grad[:, None], (0, ctx.padding)), None


def _divergence(logits: torch.Tensor, start: int, taught: Sequence[Taught], temperature: float) -> torch.Tensor:
    """Return the KL of the scored positions from `start` on, (n,), of the policy's tempered logits, (n, V)."""
    kl = logits.new_zeros(len(logits))
    for teacher in taught:
        begin, end = (bisect_left(teacher.places, place) for place in (start, start + len(logits)))
        if begin < end:
            rows = torch.tensor(teacher.places[begin:end], device=logits.device) - start
            with torch.no_grad():
                theirs = _tempered(teacher.logits(teacher.states[begin:end]), temperature)
            kl = kl.index_add(0, rows, ReverseKl.apply(logits[rows], theirs))  # type: ignore[no-untyped-call]
    return kl


def _likeliest(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return logits.detach().argmax(dim=-1) == targets


def _score_in_chunks(
    model: torch.nn.Module,
    head: torch.nn.Module,
    pack: Pack,
    temperature: float,
    entropy: bool,
    hits: bool,
    taught: Sequence[Taught],
) -> Scores:
    """Score without more than `CHUNK` logits at once; with teachers, of no more than `KL_CHUNK` positions.

    It all runs inside the head's own forward, where every wrapper has the head's weights ready.
    """
    logits_of, states = head_logits(model, head), []
    found: list[torch.Tensor] = []
    divergences: list[torch.Tensor] = []
    entropies: list[torch.Tensor] = []
    likeliest: list[torch.Tensor] = []

    def measure(
        hidden: torch.Tensor, targets: torch.Tensor, start: int, recomputed: list[bool]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        # `recomputed` is this chunk's own list, filled by its first run: when the backward pass runs the chunk a second
        # time, nothing that carries no gradient is computed or counted twice.
        logits = _tempered(logits_of(hidden), temperature)
        logprobs, chunk_entropy = _measure(logits, targets, entropy and not recomputed)
        if chunk_entropy is not None:
            entropies.append(chunk_entropy)
        if hits and not recomputed:
            likeliest.append(_likeliest(logits, targets))
        recomputed.append(True)
        return logprobs, _divergence(logits, start, taught, temperature) if taught else None

    def measured(hidden: torch.Tensor) -> torch.Tensor:
        rows = hidden.reshape(-1, hidden.shape[-1])[pack.positions]  # (N, H) of (1, packed tokens, H)
        states.append(rows.detach())
        size = max(1, CHUNK // int(head.weight.shape[0]))  # type: ignore[index]
        size = min(size, KL_CHUNK) if taught else size
        # A single chunk keeps its probabilities for the backward pass, which is faster than computing them again.
        run: Callable[..., tuple[torch.Tensor, torch.Tensor | None]] = measure
        if len(rows) > size and torch.is_grad_enabled():
            run = functools.partial(checkpoint, measure, use_reentrant=False, preserve_rng_state=False)
        chunks = zip(rows.split(size), pack.targets.split(size), range(0, len(rows), size), strict=True)
        parts = [run(part, ids, start, []) for part, ids, start in chunks]
        # Not a view of the parts: FSDP2 hangs its hooks on what the head returns.
        found.append(torch.cat([part[None] for part, _ in parts], dim=1))
        divergences.extend(kl for _, kl in parts if kl is not None)
        return found[0]

    head.forward = measured
    try:
        output = model(**pack.inputs).logits
    finally:
        del head.forward
    # What the model did to them as if they were logits is of no use, but wrappers hang their hooks on what it returns.
    logprobs = torch.where(torch.zeros_like(output[0, :1], dtype=torch.bool), output.sum(), found[0][0])
    return Scores(
        logprobs,
        torch.cat(entropies) if entropy else None,
        torch.cat(likeliest) if hits else None,
        states[0],
        torch.cat(divergences) if taught else None,
    )


def head_logits(
    model: torch.nn.Module, head: torch.nn.Module, used: torch.nn.Module | None = None
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return what makes a model's logits, (n, V), of its head's input, (n, H); `used`: a copy of the head in its place.

    It goes on to work inside of the head's own forward, and where that is another one for a while.
    """
    forward, finished = (head if used is None else used).forward, _after_head(model, head)
    return lambda hidden: finished(forward(hidden))


def _after_head(model: torch.nn.Module, head: torch.nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return what a causal LM does to the logits of its head, a cap or a scale: its own forward with nothing else left.

    (N, V) to (N, V).
    """
    causal = next(part for part in model.modules() if isinstance(part, PreTrainedModel) and _is_over(part, head))
    # Not by `copy`: FSDP2 gives the class a constructor that makes another object.
    alone = object.__new__(type(causal))
    alone.__dict__.update(causal.__dict__)
    # Of their own, so that the model keeps its parts.
    parts: dict[str, torch.nn.Module | None] = {
        name: torch.nn.Identity() if part is head else part for name, part in causal._modules.items()
    }
    alone.__dict__["_modules"] = parts
    ids = torch.zeros(1, 1, dtype=torch.long)

    def finish(logits: torch.Tensor) -> torch.Tensor:
        parts[causal.base_model_prefix] = _Given(logits[None])
        finished: torch.Tensor = type(causal).forward(alone, input_ids=ids, use_cache=False).logits
        parts[causal.base_model_prefix] = None  # or it would hold the logits as long as the graph lives
        return finished[0]

    return finish


def _is_over(model: PreTrainedModel, head: torch.nn.Module) -> bool:
    return any(part is head for part in model._modules.values()) and model.base_model_prefix in model._modules


class _Given(torch.nn.Module):
    """A backbone whose last hidden state is given."""

    def __init__(self, state: torch.Tensor):
        super().__init__()
        self.state = state

    def forward(self, *_: object, **__: object) -> _Output:
        """Return it, whatever is asked."""
        return _Output(self.state)


class _Output(tuple[torch.Tensor, ...]):
    """A backbone's output that has nothing but the last hidden state."""

    def __new__(cls, state: torch.Tensor) -> _Output:
        return super().__new__(cls, (state,))

    def __getattr__(self, name: str) -> torch.Tensor | None:
        return self[0] if name == "last_hidden_state" else None


@contextmanager
def _narrowed(modules: Sequence[torch.nn.Module], positions: torch.Tensor) -> Iterator[None]:
    """Let `modules` compute only the tokens at `positions`: nothing reads the last layer's states of others."""
    read = positions.unique()  # sorted; calls that share a prefix score the same position with different targets

    def narrow(forward: Callable[..., torch.Tensor], hidden: torch.Tensor, *more: object) -> torch.Tensor:
        rows = None if more else forward(hidden[:, read])  # (1, read, width) of (1, packed tokens, width)
        if not isinstance(rows, torch.Tensor):  # experts that say how they were chosen, or are told more of each token
            return forward(hidden, *more)
        # Zeros elsewhere, so that residual additions keep their shapes.
        return rows.new_zeros(*hidden.shape[:-1], rows.shape[-1]).index_copy(1, read, rows)

    for module in modules:
        module.forward = functools.partial(narrow, module.forward)
    try:
        yield
    finally:
        for module in modules:
            del module.forward


@contextmanager
def _only(head: torch.nn.Module, positions: torch.Tensor) -> Iterator[list[torch.Tensor]]:
    """Show `head` just the hidden states at `positions` of the flattened (R, W) grid; yields them in a list."""
    states: list[torch.Tensor] = []

    def select(_: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        hidden = args[0].reshape(-1, args[0].shape[-1])[positions]  # (N, H) of (R, W, H)
        states.append(hidden.detach())
        return (hidden[None], *args[1:])

    handle = head.register_forward_pre_hook(select)
    try:
        yield states
    finally:
        handle.remove()
