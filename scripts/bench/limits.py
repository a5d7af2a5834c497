"""The floor of a step: `python -m scripts.bench.limits [gpu=h200] [model=8B] [parameters=lora|full] [result=FILE]`.

Prints, for the MHGPO shapes of the papers (512 questions), tokens before and after sharing and the least seconds that
arithmetic allows on one device for the update, one extra forward, and the rollout's prefill: FLOPs over what the device
reaches in a matrix product (`mmrl.plan.cost`). With `gpu=cpu` this machine is measured, and a packed update of a
random model is timed: the percent of the floor that it reaches. For a GPU that percent comes from the JSON that
`scripts/gpu_check.py` wrote (`result=`); without one it is not known, and the table says so.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmrl.plan.cost import NAMES, Device, device
from mmrl.plan.shapes import KNOWN, Shape, read_shape
from mmrl.trainer.objective import TrainCall
from scripts.bench.common import MODELS, Bar, finish, make_model, once, options
from scripts.bench.sides import Ours
from scripts.bench.update_shapes import GROUP, SHAPES, Dice, calls

MODEL_OF = {"8B": "Qwen/Qwen3-8B", "7B": "Qwen/Qwen2.5-7B"}
BAR = 45.0
"""Percent of the device's matrix product rate on unique tokens; a GPU's."""
QUESTIONS = 512
AGENTS = ((250, 30), (2000, 15), (1200, 15))
"""Prompt and completion tokens of Rewriter, Reranker, Answerer."""
ROUND_ROBIN = (0.7, 0.1, 0.2)
"""How often each agent is the fork point of MHGPO-RR."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """Groups of one shape: `count` groups of `size` completions over one prompt each."""

    name: str
    groups: tuple[tuple[float, int, int, int], ...]
    """(count, size, prompt, completion)."""

    @property
    def raw(self) -> float:
        """Tokens, each call's counted in full."""
        return sum(count * size * (prompt + made) for count, size, prompt, made in self.groups)

    @property
    def unique(self) -> float:
        """Tokens with each prompt counted once per group."""
        return sum(count * (prompt + size * made) for count, size, prompt, made in self.groups)

    def pairs(self, shared: bool) -> float:
        """(Query, key) pairs of causal attention, with or without sharing."""
        total = 0.0
        for count, size, prompt, made in self.groups:
            prompts = 1 if shared else size
            total += count * (prompts * prompt * (prompt + 1) / 2 + size * (prompt * made + made * (made + 1) / 2))
        return total


def works() -> list[Work]:
    """The samplers of MHGPO with the paper's group size: a prompt is shared until its branches begin to differ."""
    rewriter, reranker, answerer = AGENTS
    first = (1.0 * QUESTIONS, GROUP, *rewriter)
    fork = [first, (1.0 * QUESTIONS * GROUP, 1, *reranker), (1.0 * QUESTIONS * GROUP, 1, *answerer)]
    second = [(1.0 * QUESTIONS, 1, *rewriter), (1.0 * QUESTIONS, GROUP, *reranker), fork[2]]
    third = [second[0], (1.0 * QUESTIONS, 1, *reranker), (1.0 * QUESTIONS, GROUP, *answerer)]
    robin = [
        (share * count, *rest)
        for share, groups in zip(ROUND_ROBIN, (fork, second, third), strict=True)
        for count, *rest in groups
    ]
    shared = tuple((1.0 * QUESTIONS, GROUP, *agent) for agent in AGENTS)
    return [
        Work(name="IS", groups=shared),
        Work(name="FoF, branches differ", groups=tuple(fork)),
        Work(name="FoF, converged", groups=shared),
        Work(name="FoF(os)", groups=(first, fork[1], (1.0 * QUESTIONS * GROUP, GROUP, *answerer))),
        Work(name="RR", groups=tuple(robin)),  # type: ignore[arg-type]
    ]


def flops(shape: Shape, tokens: float, pairs: float, scored: float) -> float:
    """Of one forward: layers, attention, and the head at the scored positions."""
    attention = 4 * shape.layers * shape.heads * shape.head_dim * pairs
    return 2 * shape.block_parameters * tokens + attention + 2 * shape.vocab * shape.hidden * scored


def passes(lora: bool) -> int:
    """Forwards that an update costs: with a frozen base no gradients of its weights are needed."""
    return 2 if lora else 3


def floor_table(shape: Shape, on: Device, lora: bool) -> list[dict[str, Any]]:
    """One line per work: tokens, and the least seconds of each phase."""
    lines = []
    for work in works():
        scored = sum(count * size * made for count, size, _, made in work.groups)
        naive = flops(shape, work.raw, work.pairs(False), scored) / on.flops
        least = flops(shape, work.unique, work.pairs(True), scored) / on.flops
        lines.append(
            {
                "step": work.name,
                "raw_tokens": work.raw,
                "unique_tokens": work.unique,
                "update_naive_s": passes(lora) * naive,
                "update_s": passes(lora) * least,
                "forward_s": least,
                "tokens_per_s": work.unique / (passes(lora) * least),
            }
        )
    return lines


def trie_pairs(batch: Sequence[TrainCall]) -> tuple[int, int]:
    """Unique tokens that an update forwards, and (query, key) pairs of their attention, of calls that are all trained.

    The last token of a call is only predicted.
    """
    nodes, pairs, before = 0, 0, ()  # type: tuple[int, int, tuple[int, ...]]
    for ids in sorted((train.call.prompt_ids + train.call.completion_ids)[:-1] for train in batch):
        shared = 0
        for left, right in zip(before, ids, strict=False):
            if left != right:
                break
            shared += 1
        nodes += len(ids) - shared
        pairs += sum(range(shared + 1, len(ids) + 1))
        before = ids
    return nodes, pairs


def reached_here(size: str, on: Device, repeats: int, scale: int, groups: int | None) -> tuple[float, int]:
    """Percent of this machine's matrix product rate that a packed update of a random model reaches, and its tokens."""
    batch = calls(SHAPES["is"](Dice(MODELS[size][-1], scale=scale))[: groups * GROUP if groups else None])
    model = make_model(size)
    shape = read_shape(model.config.to_dict(), size)
    side = Ours(model, batch, Path(tempfile.mkdtemp()))
    spent = min(once(side.run)[0] for _ in range(repeats + 1))
    tokens, pairs = trie_pairs(batch)
    scored = sum(len(train.call.completion_ids) for train in batch)
    return 100 * passes(False) * flops(shape, tokens, pairs, scored) / on.flops / spent, tokens


def of_result(found: dict[str, Any]) -> list[Bar]:
    """The percentages that `scripts/gpu_check.py` measured; the bar holds for LoRA on an 8B model."""
    return [
        Bar(
            what=f"MFU, {name}",
            value=part["mfu_percent"],
            bar=BAR if part["lora"] else None,
            unit="%",
            unique=part["unique_tokens"],
        )
        for name, part in found["parts"].items()
    ]


def main(arguments: list[str]) -> int:
    """Print the table, write the JSON; returns 1 when a measured percentage misses its bar."""
    known = {
        "gpu": "h200",
        "model": "8B",
        "parameters": "lora",
        "result": "",
        "size": "1M",
        "repeats": "3",
        "groups": "",
        "quick": "",
    }
    given = options(arguments, known)
    if given["gpu"] not in NAMES or given["model"] not in MODEL_OF or given["parameters"] not in ("lora", "full"):
        raise SystemExit(
            f"got gpu={given['gpu']} model={given['model']} parameters={given['parameters']}: expected gpu= one of "
            f"{','.join(NAMES)}, model= one of {','.join(MODEL_OF)}, parameters=lora or full"
        )
    lora, name = given["parameters"] == "lora", MODEL_OF[given["model"]]
    on, shape = device(given["gpu"], int(given["threads"])), KNOWN[name]
    print(f"{name}, {given['parameters']}, {on.name}: {on.flops / 1e12:.3g} TFLOP/s; least seconds of a step")
    print(f"{'step':22}{'tokens':>9}{'unique':>9}{'ratio':>7}{'update':>9}{'shared':>9}{'forward':>9}{'tok/s':>9}")
    lines = floor_table(shape, on, lora)
    for line in lines:
        print(
            f"{line['step']:22}{line['raw_tokens'] / 1e6:8.2f}M{line['unique_tokens'] / 1e6:8.2f}M"
            f"{line['raw_tokens'] / line['unique_tokens']:7.2f}{line['update_naive_s']:9.0f}{line['update_s']:9.0f}"
            f"{line['forward_s']:9.0f}{line['tokens_per_s']:9.0f}"
        )
    bars = []
    if given["gpu"] == "cpu":
        size = "test" if given["quick"] else given["size"]
        groups = int(given["groups"]) if given["groups"] else None
        percent, tokens = reached_here(size, on, int(given["repeats"]), 32 if given["quick"] else 1, groups)
        bars.append(
            Bar(what=f"of the CPU's floor, {size} update, IS", value=percent, bar=None, unit="%", unique=tokens)
        )
    elif given["result"]:
        bars += of_result(json.loads(Path(given["result"]).read_text(encoding="utf-8")))
    else:
        print("percent of the floor reached: not measured; give result=FILE of scripts/gpu_check.py")
    return finish("limits", bars, given["out"], device=on.name, flops=on.flops, lines=lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
