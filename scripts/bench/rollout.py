"""The embedded engine against Hugging Face generate: `python -m scripts.bench.rollout [shapes=short,fork] [threads=1]`.

Both make the same number of tokens from the same prompts with the same random weights; `generate` gets each prompt
repeated for its samples, left-padded, as TRL calls it. Runs alternate (A B C A B C ...); the best of each counts.
With one thread the clock is the process's CPU time, which on an idle machine is the wall-clock time and on a shared one
is not moved by neighbours; wall-clock seconds stand in the JSON too. Before anything is timed, the own loop's
log-probabilities are compared with a plain forward's.
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from mmrl.config import EngineConfig
from mmrl.engines.base import Completion, Request, Sampling
from mmrl.engines.transformers import TransformersEngine

BARS = {"short": 1.5, "fork": 3.0}
"""Least ratio of `generate` to the own loop: independent short calls, several samples per prompt."""
MODELS = {"1M": (128, 4, 4, 2, 32, 384, 2048), "9M": (320, 6, 5, 5, 64, 960, 4096)}
"""hidden, layers, heads, kv heads, head_dim, intermediate, vocabulary."""


@dataclass(frozen=True)
class Shape:
    """`prompts` × `samples` rows; prompt lengths and completion lengths are drawn from ranges."""

    name: str
    kind: str
    prompts: int
    samples: int
    prompt: tuple[int, int]
    completion: tuple[int, int]


SHAPES = [
    Shape("B 1", "short", 1, 1, (32, 32), (64, 64)),
    Shape("B 16", "short", 16, 1, (32, 32), (64, 64)),
    Shape("B 64", "short", 64, 1, (32, 32), (64, 64)),
    Shape("B 64 ragged", "short", 64, 1, (16, 128), (5, 60)),
    Shape("16 x n4 P512 C32", "fork", 16, 4, (512, 512), (32, 32)),
    Shape("8 x n4 P1024 C32", "fork", 8, 4, (1024, 1024), (32, 32)),
    Shape("4 x n12 P512 C64", "fork", 4, 12, (512, 512), (64, 64)),
]


class NoTokenizer:
    """Nothing ends early: no end-of-turn id, no stop strings."""

    eos_token_id = None
    all_special_ids = ()

    def decode(self, ids: list[int], **_: Any) -> str:
        """Never asked in a bench."""
        return ""


def make_model(size: str) -> torch.nn.Module:
    """A random Qwen3 of one of the sizes in `MODELS`."""
    hidden, layers, heads, kv_heads, head_dim, inner, vocabulary = MODELS[size]
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=inner,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    return transformers.Qwen3ForCausalLM(config).eval()


def requests(shape: Shape, vocabulary: int) -> list[Request]:
    """The rows of a shape."""
    dice = random.Random(0)
    made = []
    for number in range(shape.prompts):
        prompt = tuple(dice.randrange(1, vocabulary) for _ in range(dice.randint(*shape.prompt)))
        for sample in range(shape.samples):
            seed = number * shape.samples + sample
            sampling = Sampling(max_tokens=dice.randint(*shape.completion), seed=seed)
            made.append(Request(prompt_ids=prompt, sampling=sampling, order=(seed,)))
    return made


def run_engine(engine: TransformersEngine, asked: list[Request]) -> list[Completion]:
    """All requests as concurrent programs, the way rollouts reach the engine."""

    async def program(request: Request) -> Completion:
        try:
            return await engine.generate(request)
        finally:
            engine.leave()

    async def everything() -> list[Completion]:
        for _ in asked:
            engine.enter()
        return list(await asyncio.gather(*(program(request) for request in asked)))

    return asyncio.run(everything())


def run_generate(model: Any, asked: list[Request]) -> None:
    """Hugging Face generate on the padded batch; it runs to the longest completion."""
    width = max(len(request.prompt_ids) for request in asked)
    ids = torch.zeros(len(asked), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for index, request in enumerate(asked):
        ids[index, width - len(request.prompt_ids) :] = torch.tensor(request.prompt_ids)
        mask[index, width - len(request.prompt_ids) :] = 1
    with torch.no_grad():
        model.generate(
            input_ids=ids,
            attention_mask=mask,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=max(request.sampling.max_tokens for request in asked),
            disable_compile=True,
        )


def check(model: torch.nn.Module, engine: TransformersEngine, asked: list[Request]) -> float:
    """Largest difference between recorded log-probabilities and a plain forward's."""
    worst = 0.0
    for request, made in list(zip(asked, run_engine(engine, asked), strict=True))[:4]:
        with torch.no_grad():
            logits = model(torch.tensor([request.prompt_ids + made.ids])).logits[0].float()
        logprobs = logits.log_softmax(dim=-1)[len(request.prompt_ids) - 1 : -1]
        plain = logprobs.gather(1, torch.tensor(made.ids).unsqueeze(1)).squeeze(1)
        worst = max(worst, float((plain - torch.tensor(made.logprobs)).abs().max()))
    return worst


def timed(runs: dict[str, Callable[[], object]], repeats: int) -> dict[str, list[tuple[float, float]]]:
    """(CPU seconds, wall-clock seconds) of each run, alternating; the first round warms up and does not count."""
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    for _ in range(repeats + 1):
        for name, run in runs.items():
            cpu, wall = time.process_time(), time.perf_counter()
            run()
            seconds[name].append((time.process_time() - cpu, time.perf_counter() - wall))
    return {name: several[1:] for name, several in seconds.items()}


def measure(shape: Shape, model: torch.nn.Module, vocabulary: int, threads: int, repeats: int) -> dict[str, Any]:
    """One line of the table."""
    asked = requests(shape, vocabulary)
    engines = {
        loop: TransformersEngine(model, NoTokenizer(), EngineConfig(loop=loop), threads=threads)  # type: ignore[arg-type]
        for loop in ("own", "hf")
    }
    worst = check(model, engines["own"], asked)
    if worst > 1e-4:
        raise SystemExit(f"{shape.name}: log-probabilities differ by {worst:.2g}, expected at most 1e-4")
    seconds = timed(
        {
            "generate": lambda: run_generate(model, asked),
            "hf": lambda: run_engine(engines["hf"], asked),
            "own": lambda: run_engine(engines["own"], asked),
        },
        repeats,
    )
    clock = 0 if threads == 1 else 1
    counted = {name: sorted(one[clock] for one in several) for name, several in seconds.items()}
    best = {name: several[0] for name, several in counted.items()}
    tokens = sum(request.sampling.max_tokens for request in asked)
    return {
        "shape": shape.name,
        "kind": shape.kind,
        "rows": len(asked),
        "tokens": tokens,
        "seconds": best,
        "median": {name: several[len(several) // 2] for name, several in counted.items()},
        "wall_clock": {name: min(wall for _, wall in several) for name, several in seconds.items()},
        "clock": ("cpu", "wall")[clock],
        "tokens_per_s": tokens / best["own"],
        "ratio_generate": best["generate"] / best["own"],
        "ratio_hf_loop": best["hf"] / best["own"],
        "max_logprob_difference": worst,
    }


def main(arguments: list[str]) -> int:
    """Print the table, write the JSON; returns 1 when a bar is missed."""
    options = dict(argument.split("=", 1) for argument in arguments)
    unknown = set(options) - {"shapes", "threads", "repeats", "model", "out"}
    if unknown:
        raise SystemExit(f"unknown option {sorted(unknown)}: expected shapes=, threads=, repeats=, model=, out=")
    threads, size = int(options.get("threads", "1")), options.get("model", "1M")
    kinds = options.get("shapes", "short,fork").split(",")
    torch.set_num_threads(threads)
    model = make_model(size)
    print(
        f"{size}: {sum(p.numel() for p in model.parameters()):,} parameters, {threads} threads, load {os.getloadavg()}"
    )
    print(
        f"{'shape':20}{'generate s':>11}{'hf loop s':>11}{'own s':>9}{'own tok/s':>11}{'generate/own':>14}{'hf/own':>8}"
    )
    lines = []
    for shape in SHAPES:
        if shape.kind not in kinds:
            continue
        line = measure(shape, model, MODELS[size][-1], threads, int(options.get("repeats", "2")))
        lines.append(line)
        s = line["seconds"]
        print(
            f"{shape.name:20}{s['generate']:11.3f}{s['hf']:11.3f}{s['own']:9.3f}{line['tokens_per_s']:11.0f}"
            f"{line['ratio_generate']:14.2f}{line['ratio_hf_loop']:8.2f}",
            flush=True,
        )
    missed = [line["shape"] for line in lines if line["ratio_generate"] < BARS[line["kind"]]]
    result = {
        "bench": "rollout",
        "model": size,
        "threads": threads,
        "load": os.getloadavg(),
        "machine": platform.processor() or platform.machine(),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "bars": BARS,
        "missed": missed,
        "lines": lines,
    }
    path = Path(options.get("out", f"outputs/bench/rollout_{time.strftime('%Y%m%d_%H%M%S')}.json"))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1))
    print(f"load {os.getloadavg()}; {'bars missed: ' + ', '.join(missed) if missed else 'all bars reached'}; {path}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
