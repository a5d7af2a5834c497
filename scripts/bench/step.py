"""A whole step against TRL: `python -m scripts.bench step [prompts=long,short] [model=1M] [threads=1] [micro=4,8,32]`.

A step is everything from prompts as text to changed weights: tokenizing, generating, rewards, advantages, forward,
backward, clipping, AdamW; learning rate 0, so that every step does the same work. Both sides run their own `train()`,
with the same random weights, prompts and completion lengths (no token ends a completion), without logging. TRL's
micro-batch is the best of `micro`; blocks of steps alternate (TRL, mmrl, TRL, mmrl ...) and the best step of each side
counts. That the sides compute the same is checked by `update` and, for the engine, by `rollout`.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import transformers
import trl
from datasets import Dataset

from mmrl.config import TrainConfig
from mmrl.config.engines import TransformersConfig
from mmrl.engines.base import EngineSetup, Request, Sampling
from mmrl.engines.embedded.transformers_engine import TransformersEngine
from mmrl.trainer.objective import StepBatch
from mmrl.trainer.trl_trainer import MmrlTrainer
from scripts import expect_some_of
from scripts.bench.common import MODELS, Bar, Measured, Seconds, make_model, show, summary, token_counts
from scripts.bench.rollout import NoTokenizer, run_engine
from scripts.bench.sides import tokenizer, trainer_settings, trl_config
from scripts.bench.update_shapes import GROUP, Row, calls

BARS = {"long": 7.0, "short": 2.5}


@dataclass(frozen=True)
class Prompts:
    """`count` prompts, `GROUP` completions of `completion` tokens each."""

    count: int
    length: tuple[int, int]
    completion: int = 32


PROMPTS = {"long": Prompts(8, (256, 768)), "short": Prompts(16, (32, 64))}
SHORT = {"long": Prompts(2, (8, 24), 4), "short": Prompts(2, (2, 4), 4)}
"""Prompts for the tests' model, whose numbers mean nothing."""
OPTIONS = {"prompts": "long,short", "model": "1M", "micro": "4,8,32", "steps": "2"}


def reward(ids: Sequence[int]) -> float:
    """Share of even tokens: cheap, and different within a group."""
    return sum(token % 2 == 0 for token in ids) / len(ids)


def _rewards(completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float | None]:
    return [reward(ids) for ids in completion_ids]


def texts(prompts: Prompts, vocabulary: int) -> list[str]:
    """Prompts whose words are one token each."""
    dice = random.Random(0)
    lengths = [dice.randint(*prompts.length) for _ in range(prompts.count)]
    return [" ".join(f"w{dice.randrange(1, vocabulary)}" for _ in range(length)) for length in lengths]


class StepClock(transformers.TrainerCallback):
    """(CPU seconds, wall-clock seconds) of every optimizer step of a Trainer."""

    def __init__(self) -> None:
        self.steps: list[tuple[float, float]] = []
        self.started = (0.0, 0.0)

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """A step begins."""
        self.started = (time.process_time(), time.perf_counter())

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """A step has ended."""
        self.steps.append((time.process_time() - self.started[0], time.perf_counter() - self.started[1]))


def trl_steps(size: str, prompts: Prompts, micro: int, steps: int) -> list[tuple[float, float]]:
    """Seconds of `steps` steps of TRL's GRPOTrainer."""
    vocabulary, timer = MODELS[size].vocab, StepClock()
    rows = prompts.count * GROUP
    with tempfile.TemporaryDirectory() as folder:
        trainer = trl.GRPOTrainer(
            model=make_model(size),
            reward_funcs=_rewards,
            args=trl_config(Path(folder), micro, rows, max_steps=steps, max_completion_length=prompts.completion),
            train_dataset=Dataset.from_dict({"prompt": texts(prompts, vocabulary)}),
            processing_class=tokenizer(vocabulary),
            callbacks=[timer],
        )
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
    return timer.steps


def our_steps(size: str, prompts: Prompts, threads: int, steps: int) -> list[tuple[float, float]]:
    """Seconds of `steps` steps of mmrl."""
    model, timer = make_model(size), StepClock()
    words, texts_of_step = tokenizer(model.config.vocab_size), texts(prompts, model.config.vocab_size)
    engine = TransformersEngine(model, NoTokenizer(), TransformersConfig(), EngineSetup(threads=threads))  # type: ignore[arg-type]

    def next_batch(step: int) -> StepBatch:
        timer.on_step_begin()
        asked = []
        for number, text in enumerate(texts_of_step):
            ids = tuple(words(text)["input_ids"])
            for branch in range(GROUP):
                sampling = Sampling(max_tokens=prompts.completion, seed=(step * 1000 + number) * GROUP + branch)
                asked.append(Request(prompt_ids=ids, sampling=sampling, order=(number, branch)))
        completions = run_engine(engine, asked)
        rows = [Row(request.prompt_ids, (c.ids,), reward(c.ids)) for request, c in zip(asked, completions, strict=True)]
        return StepBatch(step=step, calls=calls(rows, [completion.logprobs or () for completion in completions]))

    def on_step_end(step: int, metrics: dict[str, float]) -> None:
        engine.set_version(step)
        timer.on_step_end()

    with tempfile.TemporaryDirectory() as folder:
        trainer = MmrlTrainer(
            model,
            words,
            trainer_settings(TrainConfig(lr=0.0, steps=steps, save_every=steps + 1)),
            output_dir=folder,
        )
        trainer.follow(next_batch, on_step_end)
        trainer.train()
    return timer.steps


def measure_prompts(size: str, prompts: Prompts, micro: Sequence[int], threads: int, steps: int) -> dict[str, Any]:
    """Seconds of both sides, and tokens."""
    seconds: Seconds = {"mmrl": []}
    for size_of_batch in micro:
        if prompts.count * GROUP % size_of_batch == 0:
            seconds[f"TRL, micro-batch {size_of_batch}"] = trl_steps(size, prompts, size_of_batch, steps)
            # The first step of a run also compares packed with padded; users pay it once per run.
            seconds["mmrl"] += our_steps(size, prompts, threads, steps + 1)[1:]
    line = summary(seconds, threads)
    best = line["seconds"]
    peer = min((name for name in best if name != "mmrl"), key=best.__getitem__)
    lengths = [len(text.split()) for text in texts(prompts, MODELS[size].vocab)]
    rows = [(length, prompts.completion) for length in lengths for _ in range(GROUP)]
    unique = sum(lengths) + len(rows) * prompts.completion
    return line | {"best_peer": peer, "ratio": best[peer] / best["mmrl"], "tokens": token_counts(rows, unique)}


def measure(args: dict[str, str]) -> Measured:
    """Measure the kinds of prompts."""
    size, micro = args["model"], [int(many) for many in args["micro"].split(",")]
    lines, bars = [], []
    for kind in expect_some_of("prompts", args["prompts"], PROMPTS):
        prompts = SHORT[kind] if size == "test" else PROMPTS[kind]
        line = measure_prompts(size, prompts, micro, int(args["threads"]), int(args["steps"])) | {"prompts": kind}
        lines.append(line)
        show(kind, line["seconds"])
        bars.append(Bar(f"step: TRL / mmrl, {kind} prompts", line["ratio"], BARS[kind], **line["tokens"]))
    return bars, {"model": size, "lines": lines}
