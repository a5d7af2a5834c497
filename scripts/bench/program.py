"""Concurrent programs against lock step: `python -m scripts.bench.program [latency=0,50ms] [lengths=5-60,20-1032]`.

Rollouts of several modules with a tool after each. Lock step is what a loop over modules does: all rollouts generate
together, then all wait for the slowest tool, then the next module. Concurrent programs each go on when their own tool
has answered, and one batcher serves whoever waits (`engine.schedule=greedy`). Both use the same engine, prompts,
lengths and latencies: an exponential distribution with the given mean, cut at four times the mean. Wall-clock time,
since waiting is what is measured; runs alternate, the best of each counts. Log-probabilities of both are compared with
a plain forward's before anything is timed.
"""

from __future__ import annotations

import asyncio
import random
import sys
from dataclasses import dataclass
from typing import Any

import torch

from mmrl.config.engines import TransformersConfig
from mmrl.engines.base import Completion, EngineSetup, Request, Sampling
from mmrl.engines.embedded.transformers_engine import TransformersEngine
from scripts.bench.common import MODELS, Bar, finish, make_model, options, timed
from scripts.bench.rollout import NoTokenizer

BAR = 1.5
"""Where tools take uneven times. Without any there is only the decode batches' filling to gain: no bar."""
ROLLOUTS, MODULES, PROMPT = 16, 4, (40, 120)


@dataclass(frozen=True)
class Turn:
    """One call of a program and the tool after it."""

    request: Request
    latency_s: float


def programs(vocabulary: int, lengths: tuple[int, int], mean_s: float, rollouts: int = ROLLOUTS) -> list[list[Turn]]:
    """Rollout -> its turns; the same for the same arguments."""
    dice = random.Random(0)
    made = []
    for rollout in range(rollouts):
        turns = []
        for module in range(MODULES):
            prompt = tuple(dice.randrange(1, vocabulary) for _ in range(dice.randint(*PROMPT)))
            sampling = Sampling(max_tokens=dice.randint(*lengths), seed=rollout * MODULES + module)
            wait = min(dice.expovariate(1.0), 4.0) * mean_s
            turns.append(Turn(Request(prompt_ids=prompt, sampling=sampling, order=(module, rollout)), wait))
        made.append(turns)
    return made


async def concurrent(engine: TransformersEngine, rollouts: list[list[Turn]]) -> list[list[Completion]]:
    """Every program on its own."""

    async def program(turns: list[Turn]) -> list[Completion]:
        made = []
        try:
            for turn in turns:
                made.append(await engine.generate(turn.request))
                await asyncio.sleep(turn.latency_s)
        finally:
            engine.leave()
        return made

    for _ in rollouts:
        engine.enter()
    return list(await asyncio.gather(*(program(turns) for turns in rollouts)))


async def lock_step(engine: TransformersEngine, rollouts: list[list[Turn]]) -> list[list[Completion]]:
    """Module after module: all generate, then all tools, then the next."""
    made: list[list[Completion]] = [[] for _ in rollouts]

    async def call(index: int, turn: Turn) -> None:
        try:
            made[index].append(await engine.generate(turn.request))
        finally:
            engine.leave()

    for module in range(len(rollouts[0])):
        for _ in rollouts:
            engine.enter()
        await asyncio.gather(*(call(index, turns[module]) for index, turns in enumerate(rollouts)))
        await asyncio.gather(*(asyncio.sleep(turns[module].latency_s) for turns in rollouts))
    return made


def worst_gap(model: Any, rollouts: list[list[Turn]], made: list[list[Completion]]) -> float:
    """Largest difference between recorded log-probabilities and a plain forward's, over the first rollouts."""
    worst = 0.0
    for turns, completions in list(zip(rollouts, made, strict=True))[:2]:
        for turn, one in zip(turns, completions, strict=True):
            if len(one.ids) != turn.request.sampling.max_tokens:
                raise SystemExit(f"got {len(one.ids)} tokens, asked for {turn.request.sampling.max_tokens}")
            prompt = turn.request.prompt_ids
            with torch.no_grad():
                logprobs = model(torch.tensor([prompt + one.ids])).logits[0].float().log_softmax(-1)
            plain = logprobs[len(prompt) - 1 : -1].gather(1, torch.tensor(one.ids)[:, None])[:, 0]
            worst = max(worst, float((plain - torch.tensor(one.logprobs)).abs().max()))
    return worst


def measure(model: Any, rollouts: list[list[Turn]], threads: int, repeats: int) -> dict[str, Any]:
    """Seconds of both, and how far recorded log-probabilities are from a plain forward's."""
    # Lock step has whole batches by itself, and a schedule that waits for them.
    ways = {"concurrent": (concurrent, "greedy"), "lock step": (lock_step, "deterministic")}
    runs, gaps = {}, {}
    for name, (way, schedule) in ways.items():
        engine = TransformersEngine(
            model, NoTokenizer(), TransformersConfig(schedule=schedule), EngineSetup(threads=threads)
        )  # type: ignore[arg-type]
        gaps[name] = worst_gap(model, rollouts, asyncio.run(way(engine, rollouts)))
        if gaps[name] > 1e-4:
            raise SystemExit(f"{name}: log-probabilities differ by {gaps[name]:.2g}, expected at most 1e-4")
        runs[name] = lambda way=way, engine=engine: asyncio.run(way(engine, rollouts))
    seconds = timed(runs, repeats)
    best = {name: min(wall for _, wall in several) for name, several in seconds.items()}
    return {
        "seconds": best,
        "cpu_seconds": {name: min(cpu for cpu, _ in several) for name, several in seconds.items()},
        "ratio": best["lock step"] / best["concurrent"],
        "max_logprob_difference": max(gaps.values()),
    }


def main(arguments: list[str]) -> int:
    """Print the table, write the JSON; returns 1 when a bar is missed."""
    known = {"latency": "0,50ms", "lengths": "5-60", "model": "1M", "repeats": "3", "quick": ""}
    given = options(arguments, known)
    size = "test" if given["quick"] else given["model"]
    rollouts = 3 if given["quick"] else ROLLOUTS
    model, lines, bars = make_model(size), [], []
    for lengths in ["2-4"] if given["quick"] else given["lengths"].split(","):
        low, high = (int(part) for part in lengths.split("-"))
        for latency in given["latency"].split(","):
            mean_s = float(latency.removesuffix("ms")) / 1000
            asked = programs(MODELS[size][-1], (low, high), mean_s, rollouts)
            line = measure(model, asked, int(given["threads"]), int(given["repeats"]))
            turns = [turn.request for program in asked for turn in program]
            made = sum(request.sampling.max_tokens for request in turns)
            line |= {"lengths": lengths, "latency": latency, "rollouts": rollouts, "modules": MODULES}
            lines.append(line)
            bars.append(
                Bar(
                    what=f"programs: lock step / own, {lengths}, {mean_s * 1000:g} ms",
                    value=line["ratio"],
                    bar=BAR if mean_s else None,
                    real=sum(len(request.prompt_ids) for request in turns) + made,
                )
            )
    return finish("program", bars, given["out"], model=size, lines=lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
