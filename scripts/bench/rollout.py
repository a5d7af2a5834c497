"""The embedded engine against Hugging Face generate: `python -m scripts.bench rollout [shapes=short,fork] [threads=1]`.

Both make the same number of tokens from the same prompts with the same random weights; `generate` gets each prompt
repeated for its samples, left-padded, as TRL calls it. Runs alternate (A B C A B C ...); the best of each counts.
Wall-clock seconds stand in the JSON beside those that count (`common.summary`). Before anything is timed, the native
decoder's log-probabilities are compared with a plain forward's. `brief=1` leaves out the warm-up round.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from mmrl.config.engines import TransformersConfig
from mmrl.engines.base import Completion, EngineSetup, Request, Sampling
from mmrl.engines.embedded.transformers_engine import TransformersEngine
from mmrl.plan.workload import unique_tokens
from scripts import expect_some_of
from scripts.bench.common import Bar, Measured, make_model, show, summary, timed, token_counts

BARS = {"short": 1.5, "fork": 3.0, "shared": 3.0, "one": 0.9}
"""Least ratio of `generate` to the native decoder: independent short calls, several samples per prompt; of a model of
real size prompts that differ in their ends, and one prompt (level, but for noise)."""


@dataclass(frozen=True)
class Shape:
    """`prompts` × `samples` rows; prompt lengths and completion lengths are drawn from ranges."""

    name: str
    kind: str
    prompts: int
    samples: int
    prompt: tuple[int, int]
    completion: tuple[int, int]
    shared: int = 0
    """Tokens that all prompts begin with."""


SHAPES = [
    Shape("B 1", "short", 1, 1, (32, 32), (64, 64)),
    Shape("B 16", "short", 16, 1, (32, 32), (64, 64)),
    Shape("B 64", "short", 64, 1, (32, 32), (64, 64)),
    Shape("B 64 ragged", "short", 64, 1, (16, 128), (5, 60)),
    Shape("16 x n4 P512 C32", "fork", 16, 4, (512, 512), (32, 32)),
    Shape("8 x n4 P1024 C32", "fork", 8, 4, (1024, 1024), (32, 32)),
    Shape("4 x n12 P512 C64", "fork", 4, 12, (512, 512), (64, 64)),
    Shape("B 64 P1000, 970 shared", "shared", 64, 1, (1000, 1000), (32, 32), shared=970),
    Shape("B 1 P1000", "one", 1, 1, (1000, 1000), (32, 32)),
]
SMALL = [Shape("B 2", "short", 2, 1, (4, 6), (2, 4)), Shape("1 x n2 P8 C4", "fork", 1, 2, (8, 8), (4, 4))]
"""Shapes for the tests' model, whose numbers mean nothing."""
OPTIONS = {"shapes": "short,fork", "repeats": "2", "model": "1M", "brief": ""}


class NoTokenizer:
    """Nothing ends early: no end-of-turn id, no stop strings."""

    chat_template = eos_token_id = None
    all_special_ids = ()

    def decode(self, ids: list[int], **_: Any) -> str:
        """Not called in a bench."""
        return ""


def requests(shape: Shape, vocabulary: int) -> list[Request]:
    """The rows of a shape."""
    # By the shape, so that no prefix cache has seen the prompts of another one.
    dice = random.Random(shape.name)
    found, start = [], tuple(dice.randrange(1, vocabulary) for _ in range(shape.shared))
    for number in range(shape.prompts):
        rest = dice.randint(*shape.prompt) - shape.shared
        prompt = start + tuple(dice.randrange(1, vocabulary) for _ in range(rest))
        for sample in range(shape.samples):
            seed = number * shape.samples + sample
            sampling = Sampling(max_tokens=dice.randint(*shape.completion), seed=seed)
            found.append(Request(prompt_ids=prompt, sampling=sampling, order=(seed,)))
    return found


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


@torch.no_grad()
def check(model: torch.nn.Module, engine: TransformersEngine, asked: list[Request]) -> float:
    """Largest difference between recorded log-probabilities and a plain forward's."""
    worst = 0.0
    for request, completion in list(zip(asked, run_engine(engine, asked), strict=True))[:4]:
        logits = model(torch.tensor([request.prompt_ids + completion.ids])).logits[0].float()
        logprobs = logits.log_softmax(dim=-1)[len(request.prompt_ids) - 1 : -1]
        plain = logprobs.gather(1, torch.tensor(completion.ids).unsqueeze(1)).squeeze(1)
        worst = max(worst, float((plain - torch.tensor(completion.logprobs)).abs().max()))
    return worst


def measure_shape(shape: Shape, model: Any, threads: int, repeats: int, warm: bool) -> dict[str, Any]:
    """Measure one shape; with `warm`, a first round is left out."""
    asked = requests(shape, model.config.vocab_size)
    engine = TransformersEngine(model, NoTokenizer(), TransformersConfig(), EngineSetup(threads=threads))  # type: ignore[arg-type]
    worst = check(model, engine, asked)
    if worst > 1e-4:
        raise SystemExit(f"{shape.name}: log-probabilities differ by {worst:.2g}, expected at most 1e-4")
    sides: dict[str, Callable[[], object]] = {
        "generate": lambda: run_generate(model, asked),
        "mmrl": lambda: run_engine(engine, asked),
    }
    line = summary(timed(sides, repeats, warm), threads)
    best, sampled = line["seconds"], sum(request.sampling.max_tokens for request in asked)
    show(f"{shape.name}, {sampled / best['mmrl']:.0f} tokens/s", best)
    unique = unique_tokens({request.prompt_ids for request in asked}) + sampled
    return line | {
        "shape": shape.name,
        "kind": shape.kind,
        "tokens": token_counts([(len(r.prompt_ids), r.sampling.max_tokens) for r in asked], unique),
        "ratio_generate": best["generate"] / best["mmrl"],
        "max_logprob_difference": worst,
    }


def measure(args: dict[str, str]) -> Measured:
    """Measure the shapes."""
    size, kinds = args["model"], expect_some_of("shapes", args["shapes"], BARS)
    model = make_model(size)
    print(f"{size}: {sum(p.numel() for p in model.parameters()):,} parameters, load {os.getloadavg()}", flush=True)
    lines = [
        measure_shape(shape, model, int(args["threads"]), int(args["repeats"]), warm=not args["brief"])
        for shape in (SMALL if size == "test" else SHAPES)
        if shape.kind in kinds
    ]
    bars = [
        Bar(
            f"engine: generate / mmrl, {line['shape']}",
            line["ratio_generate"],
            BARS[line["kind"]] if size != "hybrid" else None,  # there are no bars for it
            **line["tokens"],
        )
        for line in lines
    ]
    return bars, {"model": size, "lines": lines}
