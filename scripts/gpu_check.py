"""The update on one big GPU, built, checked and timed: `python -m scripts.gpu_check [device=cuda] [dtype=bfloat16]`.

Two parts, each with random weights: Qwen3-8B with LoRA (r = 16) and a small Qwen3 at full parameters, on rollouts with
the lengths of MHGPO's Reranker, with shared prompts (IS) and without (FoF). For each: log-probabilities and gradients
of packed tries against padded rows, TRL's GRPOTrainer and the packing of TRL's AsyncGRPOTrainer; seconds, tokens/s, MFU
on unique tokens against a matrix product measured in this run and against the card's own figure, peak memory; the
ratios to TRL. In 16 bits the same by `train.packing=trie_varlen`. Then Qwen3-0.6B with LoRA on completions of 16,000
tokens, without TRL. Prints a table and writes JSON to `out=`, to the folder `$OUT` where that is set, else to
`outputs/bench/`. Exit code 1 when a check fails or a bar is missed. `device=cpu tiny=1` runs all of it with tiny
models, to test the script itself; its numbers mean nothing.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from mmrl.config import LoraConfig, ModelConfig
from mmrl.engines.embedded.prefixes import common_prefix
from mmrl.plan.shapes import KNOWN, Shape
from mmrl.trainer.settings import Settings
from scripts import expect_some_of
from scripts.bench import tree_rows
from scripts.bench.common import MODELS, Bar, cosine, finish, once, options, random_model, token_counts
from scripts.bench.sides import Ours, Trl
from scripts.bench.update_shapes import Dice, Row, calls, forked_first, independent

SMALL = Shape(layers=28, hidden=1024, heads=16, kv_heads=8, head_dim=128, intermediate=3072, vocab=151936, tied=True)
"""Qwen3-0.6B's."""
RANK = LoraConfig(r=16, alpha=64)
TOLERANCE = {"float32": (1e-4, 0.9999), "bfloat16": (0.2, 0.995)}
"""dtype -> largest difference of a log-probability, least cosine of gradients. bfloat16 has 8 bits of mantissa, and
packed and padded attention sum in different orders."""
DTYPES = {"cuda": "bfloat16", "cpu": "float32"}
"""device -> the dtype that is checked on it by default."""
CARDS = {"H100": 989e12, "H200": 989e12}
"""Part of a device's name -> FLOP/s in bfloat16 without sparsity by its maker, which others divide by."""
MFU_BAR = 45.0
"""Least percent of the device's matrix product rate that LoRA on an 8B model reaches on unique tokens."""
Lengths = tuple[int, tuple[int, int], tuple[int, int]]
"""Groups of rollouts, and ranges of the tokens of a prompt and of a completion."""
LONG_BAR = 13_342.0
"""Tokens/s that prime-rl publishes for Qwen3-0.6B with LoRA (r = 16) at 16,000 tokens on one H100."""
OPTIONS = {"device": "cuda", "dtype": "", "repeats": "3", "tiny": "", "only": ""}
KINDS = {"is": independent, "fof": forked_first, "long": forked_first}
RATIO_BARS = {"is": 4.0, "fof": 1.0}
"""Least ratio of TRL to mmrl on a GPU: the tokens that sharing saves; never slower where nothing is shared."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """One model to train."""

    name: str
    shape: Shape
    lora: LoraConfig | None
    micro: int | None
    """TRL's micro-batch; None: not compared with TRL."""


def parts(tiny: bool) -> list[Part]:
    """Models to check."""
    if tiny:
        return [
            Part(name="tiny, LoRA r=16", shape=MODELS["1M"], lora=RANK, micro=4),
            Part(name="tiny, full", shape=MODELS["1M"], lora=None, micro=4),
        ]
    return [
        Part(name="Qwen3-8B, LoRA r=16", shape=KNOWN["Qwen/Qwen3-8B"], lora=RANK, micro=4),
        Part(name="Qwen3-0.6B, full", shape=SMALL, lora=None, micro=8),
    ]


def product_rate(device: str, dtype: str, size: int) -> float:
    """FLOP/s of a square matrix product, best of several."""
    left, right = (torch.randn(size, size, device=device, dtype=getattr(torch, dtype)) for _ in range(2))
    return 2 * size**3 / min(once(lambda: left @ right)[1] for _ in range(20))


def flops(shape: Shape, tokens: float, pairs: float, scored: float) -> float:
    """FLOPs of one forward: layers, attention, and the head at the scored positions."""
    attention = 4 * shape.layers * shape.heads * shape.head_dim * pairs
    return 2 * shape.block_parameters * tokens + attention + 2 * shape.vocab * shape.hidden * scored


def trie_pairs(sequences: Iterable[tuple[int, ...]]) -> tuple[int, int]:
    """Count the unique tokens of sequences, and the (query, key) pairs of their attention."""
    nodes, pairs, before = 0, 0, ()  # type: tuple[int, int, tuple[int, ...]]
    for ids in sorted(sequences):
        shared = common_prefix(before, ids)
        nodes += len(ids) - shared
        pairs += sum(range(shared + 1, len(ids) + 1))
        before = ids
    return nodes, pairs


def peak_bytes(run: Callable[[], object]) -> int:
    """Run once; return the GPU's peak of allocated bytes, weights included (without a GPU: 0)."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    once(run)
    return torch.cuda.max_memory_allocated()


def free_memory() -> None:
    """Empty the device's cache of what nothing refers to."""
    gc.collect()
    torch.cuda.empty_cache()


def host(tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Copies of tensors, by name, in host memory."""
    return {name: tensor.detach().float().cpu().clone() for name, tensor in tensors}


@torch.no_grad()
def shake(model: Any) -> None:
    """Adapters that do something: at their start one of their two matrices is 0, and so is the other's gradient."""
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.normal_(0, 0.01)


@dataclass
class Mine:
    """Results of the packed side, for comparison with TRL."""

    weights: dict[str, torch.Tensor]
    gradients: dict[str, torch.Tensor]
    found: dict[str, Any]


def mine(part: Part, rows: list[Row], few: list[Row], device: str, dtype: str, repeats: int, folder: Path) -> Mine:
    """Check packed against padded on `few` rollouts, then time `rows` and look at memory."""
    model = random_model(part.shape, device=device, dtype=getattr(torch, dtype))
    side = Ours(model, calls(few), folder, lora=part.lora)
    trainer: Any = side.trainer
    if not trainer.forwards.tries:
        raise SystemExit(f"{part.name}: the model was not prepared for packed tries")
    shake(trainer.model)
    trainer.accelerator.prepare_model(trainer.model)  # the mixed precision of a run
    packed, packed_logprobs = host(side.gradients().items()), side.logprobs()
    trainer.forwards.tries = False
    padded, padded_logprobs = host(side.gradients().items()), side.logprobs()
    trainer.forwards.tries = True
    pairs = zip(packed_logprobs, padded_logprobs, strict=True)
    found: dict[str, Any] = {
        "max_logprob_difference": max(abs(a - b) for one, two in pairs for a, b in zip(one, two, strict=True)),
        "cosine_padded": cosine(packed, padded),
    }
    weights = host((name, p) for name, p in trainer.model.named_parameters() if p.requires_grad)
    side.batch = calls(rows)
    found["peak_bytes"] = peak_bytes(side.run)
    found["seconds"] = min(once(side.run)[1] for _ in range(repeats))
    found["pack_tokens"] = trainer.forwards.budget
    if device == "cpu" or dtype != "float32":  # which the kernel does not have
        found |= by_varlen(side, packed, packed_logprobs, rows, few, repeats)
    return Mine(weights, packed, found)


def by_varlen(
    side: Ours,
    gradients: dict[str, torch.Tensor],
    logprobs: list[tuple[float, ...]],
    rows: list[Row],
    few: list[Row],
    repeats: int,
) -> dict[str, float]:
    """Compare `train.packing=trie_varlen` with FlexAttention on `few` rollouts, and time `rows`."""
    forwards = side.trainer.forwards
    train = forwards.settings.train.model_copy(update={"packing": "trie_varlen"})
    forwards.settings = replace(forwards.settings, train=train)
    side.batch = calls(few)
    pairs = zip(logprobs, side.logprobs(), strict=True)
    found = {
        "varlen_max_logprob_difference": max(abs(a - b) for one, two in pairs for a, b in zip(one, two, strict=True)),
        "varlen_cosine": cosine(gradients, host(side.gradients().items())),
    }
    side.batch = calls(rows)
    once(side.run)
    return found | {"varlen_seconds": min(once(side.run)[1] for _ in range(repeats))}


def peer_model(part: Part, mine: Mine, device: str, dtype: str) -> Any:
    """Make a peer's model, with mmrl's weights and, of those that are trained, in float32."""
    model = random_model(part.shape, device=device, dtype=getattr(torch, dtype))
    if part.lora is not None:
        import peft

        model_config = ModelConfig(name="gpu_check", path="tiny", lora=part.lora)
        settings = Settings(train=None, algo=None, model=model_config, seed=0)  # type: ignore[arg-type]
        lora = settings.lora(model)
        assert lora is not None
        model = peft.get_peft_model(model, lora)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in mine.weights:
                parameter.copy_(mine.weights[name])
    return model


def peer(part: Part, mine: Mine, rows: list[Row], few: list[Row], device: str, dtype: str, repeats: int, folder: Path) -> dict[str, Any]:  # fmt: skip  # noqa: E501
    """Time TRL's GRPOTrainer on the same rollouts, from the same weights."""
    model = peer_model(part, mine, device, dtype)
    assert part.micro is not None
    side = Trl(model, few, part.micro, folder)
    side.trainer.accelerator.prepare_model(side.trainer.model)
    found: dict[str, Any] = {"cosine_trl": cosine(mine.gradients, host(side.gradients().items()))}
    side.rows, side.steps = rows, len(rows) // part.micro
    side.trainer.args.gradient_accumulation_steps = side.trainer.current_gradient_accumulation_steps = side.steps
    side.trainer.args.steps_per_generation = side.steps  # type: ignore[attr-defined]  # of TRL's GRPOConfig
    side.trainer._step, side.trainer._buffered_inputs = 0, None
    found["trl_peak_bytes"] = peak_bytes(side.run)
    found["trl_seconds"] = min(once(side.run)[1] for _ in range(repeats))
    found["ratio_trl"] = found["trl_seconds"] / mine.found["seconds"]
    return found


def tree_row_peer(part: Part, mine: Mine, rows: list[Row], few: list[Row], device: str, dtype: str, repeats: int) -> dict[str, Any]:  # fmt: skip  # noqa: E501
    """Time the packing of TRL's AsyncGRPOTrainer likewise, with mmrl's tokens per pack."""
    side = tree_rows.TreeRows(peer_model(part, mine, device, dtype), few, mine.found["pack_tokens"])
    found: dict[str, Any] = {"cosine_tree_row": cosine(mine.gradients, host(side.gradients().items()))}
    side.rows = rows
    found["tree_row_peak_bytes"] = peak_bytes(side.run)
    found["tree_row_seconds"] = min(once(side.run)[1] for _ in range(repeats))
    found["ratio_tree_row"] = found["tree_row_seconds"] / mine.found["seconds"]
    return found


def measure(part: Part, kind: str, lengths: Lengths, device: str, dtype: str, rate: float, repeats: int) -> dict[str, Any]:  # fmt: skip  # noqa: E501
    """Measure one model on one kind of rollouts."""
    most, prompt, completion = lengths
    rows, few = (KINDS[kind](Dice(part.shape.vocab), groups, prompt, completion) for groups in (most, 2))
    folder = Path(tempfile.mkdtemp())
    ours = mine(part, rows, few, device, dtype, repeats, folder / "mmrl")
    free_memory()
    theirs: dict[str, Any] = {}
    packed: dict[str, int] = {}
    if part.micro is not None:
        theirs = peer(part, ours, rows, few, device, dtype, repeats, folder / "trl")
        free_memory()
        if packed := tree_rows.counts(rows, ours.found["pack_tokens"]):
            theirs |= tree_row_peer(part, ours, rows, few, device, dtype, repeats)
            free_memory()
    # The last token of a call is only predicted.
    unique, pairs = trie_pairs((row.prompt + row.completion)[:-1] for row in rows)
    scored = sum(len(row.completion) for row in rows)
    passes = 3 if part.lora is None else 2  # a frozen base needs no gradients of its weights
    work = passes * flops(part.shape, unique, pairs, scored)
    found = ours.found | theirs
    return found | {
        "lora": part.lora is not None,
        "tokens": token_counts([(len(row.prompt), len(row.completion)) for row in rows], unique) | packed,
        "tokens_per_s": unique / found["seconds"],
        "mfu_percent": 100 * work / found["seconds"] / rate,
        "work_flops": work,
    }


def bars_of(name: str, kind: str, found: dict[str, Any], dtype: str, meaningful: bool) -> list[Bar]:
    """Bars of one part; speeds and memory have limits only where they mean something."""
    most, least = TOLERANCE[dtype]

    def bar(what: str, value: float, limit: float | None, unit: str = "", at_most: bool = False) -> Bar:
        return Bar(f"{name}, {kind}: {what}", value, limit, unit=unit, at_most=at_most, **found["tokens"])

    bars = [
        bar("|Δ log-prob|", found["max_logprob_difference"], most, at_most=True),
        bar("gradient, padded", found["cosine_padded"], least),
        bar("MFU", found["mfu_percent"], MFU_BAR if meaningful and found["lora"] and kind != "long" else None, "%"),
        *([bar("MFU of the card", found["card_percent"], None, "%")] if "card_percent" in found else []),
        bar("tokens/s", found["tokens_per_s"], LONG_BAR if meaningful and kind == "long" else None),
        bar("peak GiB", found["peak_bytes"] / 2**30, None),
    ]
    if "varlen_seconds" in found:
        bars += [
            bar("|Δ log-prob|, varlen", found["varlen_max_logprob_difference"], most, at_most=True),
            bar("gradient, varlen", found["varlen_cosine"], least),
            bar("FlexAttention / varlen", found["seconds"] / found["varlen_seconds"], None, "x"),
        ]
    if kind in RATIO_BARS:
        bars += [
            bar("gradient, TRL", found["cosine_trl"], least),
            bar("TRL / mmrl", found["ratio_trl"], RATIO_BARS[kind] if meaningful else None, "x"),
            bar("TRL's peak GiB", found["trl_peak_bytes"] / 2**30, None),
        ]
    if "ratio_tree_row" in found:
        bars += [
            bar("gradient, TreeRow", found["cosine_tree_row"], least),
            bar("TreeRow / mmrl", found["ratio_tree_row"], None, "x"),
            bar("TreeRow's peak GiB", found["tree_row_peak_bytes"] / 2**30, None),
        ]
    return bars


def main(arguments: Sequence[str]) -> int:
    """Print the table, write the JSON; returns 1 when a check fails or a bar is missed."""
    args = options(arguments, OPTIONS | {"threads": str(torch.get_num_threads())})
    (device,) = expect_some_of("device", args["device"], DTYPES)
    tiny, repeats = bool(args["tiny"]), int(args["repeats"])
    if device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("device=cuda: there is no CUDA device here; device=cpu tiny=1 tests the script itself")
    (dtype,) = expect_some_of("dtype", args["dtype"] or DTYPES[device], TOLERANCE)
    lengths: Lengths = (4, (8, 24), (2, 6)) if tiny else (16, (1500, 2500), (10, 60))
    long: Lengths = (2, (4, 8), (40, 60)) if tiny else (2, (200, 400), (15_500, 16_000))
    cases = [(part, kind, lengths) for part in parts(tiny) for kind in RATIO_BARS]
    shape, name = (MODELS["1M"], "tiny") if tiny else (SMALL, "Qwen3-0.6B")
    cases.append((Part(name=f"{name}, LoRA r=16", shape=shape, lora=RANK, micro=None), "long", long))
    cases = [case for case in cases if args["only"] in f"{case[0].name}, {case[1]}"]
    rate = product_rate(device, dtype, 256 if tiny else 8192)
    where = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    print(f"{where}, {dtype}: matrix product {rate / 1e12:.3g} TFLOP/s", flush=True)
    card = next((flops for name, flops in CARDS.items() if name in where), None)
    bars, kept = [], {}
    for part, kind, size in cases:
        started = time.perf_counter()
        found = measure(part, kind, size, device, dtype, rate, repeats)
        if card is not None:
            found["card_percent"] = 100 * found["work_flops"] / found["seconds"] / card
        kept[f"{part.name}, {kind}"] = found
        bars += bars_of(part.name, kind, found, dtype, meaningful=device == "cuda" and not tiny)
        # In full: whoever stops it has the cases so far.
        print(f"{part.name}, {kind}, in {time.perf_counter() - started:.0f} s: {json.dumps(found)}", flush=True)
    out = args["out"] or (f"{os.environ['OUT']}/gpu_check.json" if os.environ.get("OUT") else "")
    return finish("gpu_check", bars, out, device=where, dtype=dtype, product_flops=rate, parts=kept)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
