"""A whole step against TRL: `python -m scripts.bench.step [prompts=long,short] [model=1M] [threads=1] [micro=4,8,32]`.

A step is everything from prompts as text to changed weights: tokenizing, generating, rewards, advantages, forward,
backward, clipping, AdamW; learning rate 0, so that every step does the same work. Both sides run their own `train()`,
with the same random weights, prompts and completion lengths (no token ends a completion), without logging. TRL's
micro-batch is the best of `micro`; blocks of steps alternate (TRL, mmrl, TRL, mmrl ...) and the best step of each side
counts. Before that, log-probabilities and gradients of all sides are compared on rollouts that mmrl's engine made.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import transformers
import trl
from datasets import Dataset

from mmrl.config import AlgoConfig, ModelConfig, TrainConfig
from mmrl.config.algo import GrpoConfig
from mmrl.config.engines import TransformersConfig
from mmrl.credit.entries import Entry, Group, Member, Reward
from mmrl.credit.groups import compare
from mmrl.engines.base import Completion, EngineSetup, Request, Sampling
from mmrl.engines.embedded.transformers_engine import TransformersEngine
from mmrl.records import Call
from mmrl.trainer.objective import StepBatch, TrainCall
from mmrl.trainer.settings import Settings
from mmrl.trainer.trl_trainer import MmrlTrainer
from scripts.bench.common import MODELS, Bar, clock, finish, make_model, options
from scripts.bench.rollout import NoTokenizer, run_engine
from scripts.bench.sides import Ours, Plain, Trl, check, tokenizer, trl_config
from scripts.bench.update_shapes import GROUP, Row, calls

BARS = {"long": 7.0, "short": 2.5}


@dataclass(frozen=True)
class Prompts:
    """`count` prompts, `GROUP` completions of `completion` tokens each."""

    count: int
    length: tuple[int, int]
    completion: int = 32


PROMPTS = {"long": Prompts(8, (256, 768)), "short": Prompts(16, (32, 64))}
QUICK = {"long": Prompts(2, (8, 24), 4), "short": Prompts(2, (2, 4), 4)}
"""Of no meaning as numbers; for the tests."""


def reward(ids: Sequence[int]) -> float:
    """Share of even tokens: cheap, and different within a group."""
    return sum(token % 2 == 0 for token in ids) / len(ids)


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

    def start(self) -> None:
        """A step begins."""
        self.started = (time.process_time(), time.perf_counter())

    def stop(self) -> None:
        """It has ended."""
        self.steps.append((time.process_time() - self.started[0], time.perf_counter() - self.started[1]))

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Told by transformers."""
        self.start()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Told by transformers."""
        self.stop()


def trl_steps(size: str, prompts: Prompts, micro: int, steps: int) -> list[tuple[float, float]]:
    """Seconds of `steps` steps of TRL's GRPOTrainer."""
    vocabulary, timer = MODELS[size].vocab, StepClock()
    rows = prompts.count * GROUP
    with tempfile.TemporaryDirectory() as folder:
        trainer = trl.GRPOTrainer(
            model=make_model(size),
            reward_funcs=lambda completion_ids, **_: [reward(ids) for ids in completion_ids],
            args=trl_config(
                Path(folder),
                micro,
                rows,
                max_steps=steps,
                max_completion_length=prompts.completion,
                use_cpu=True,
                bf16=False,
            ),
            train_dataset=Dataset.from_dict({"prompt": texts(prompts, vocabulary)}),
            processing_class=tokenizer(vocabulary),
            callbacks=[timer],
        )
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
    return timer.steps


class Sampler:
    """mmrl's side of a step before the update."""

    def __init__(self, model: Any, prompts: Prompts, threads: int):
        self.prompts, self.vocabulary = prompts, model.config.vocab_size
        self.texts, self.tokenizer = texts(prompts, self.vocabulary), tokenizer(self.vocabulary)
        self.engine = TransformersEngine(model, NoTokenizer(), TransformersConfig(), EngineSetup(threads=threads))  # type: ignore[arg-type]

    def sample(self, step: int) -> tuple[list[Request], list[Completion]]:
        """Text to completions."""
        asked = []
        for number, text in enumerate(self.texts):
            ids = tuple(self.tokenizer(text)["input_ids"])
            for branch in range(GROUP):
                sampling = Sampling(max_tokens=self.prompts.completion, seed=(step * 1000 + number) * GROUP + branch)
                asked.append(Request(prompt_ids=ids, sampling=sampling, order=(number, branch)))
        return asked, run_engine(self.engine, asked)

    def batch(self, step: int) -> StepBatch:
        """A step's calls: rewards normalised within each prompt's group, each call with an equal share of the loss."""
        asked, made = self.sample(step)
        found = []
        for start in range(0, len(asked), GROUP):
            rewards = [Member((), Reward(reward(one.ids))) for one in made[start : start + GROUP]]
            (group,) = compare([Group("", tuple(rewards))], GrpoConfig(name="grpo", eps=1e-4))
            for index, member in enumerate(group.members, start):
                advantage, tokens = member.advantage, len(made[index].ids)
                entry = Entry(
                    call="", reward=0.0, advantages=(advantage,) * tokens, weights=(1 / (len(asked) * tokens),) * tokens
                )
                found.append(
                    TrainCall(
                        call=Call(
                            id=str(index),
                            example="",
                            parent=None,
                            module="m",
                            prompt_ids=asked[index].prompt_ids,
                            completion_ids=made[index].ids,
                            completion_tokens=tokens,
                            logprobs=made[index].logprobs,
                        ),
                        entries=(entry,),
                    )
                )
        return StepBatch(step=step, calls=found)


def our_steps(size: str, prompts: Prompts, threads: int, steps: int) -> list[tuple[float, float]]:
    """Seconds of `steps` steps of mmrl."""
    model, timer = make_model(size), StepClock()
    sampler = Sampler(model, prompts, threads)

    def next_batch(step: int) -> StepBatch:
        timer.start()
        return sampler.batch(step)

    def on_step_end(step: int, metrics: dict[str, float]) -> None:
        sampler.engine.set_version(step)
        timer.stop()

    with tempfile.TemporaryDirectory() as folder:
        trainer = MmrlTrainer(
            model,
            sampler.tokenizer,
            Settings(
                train=TrainConfig(lr=0.0, steps=steps, save_every=steps + 1),
                algo=AlgoConfig(name="bench", beta=0.0),
                model=ModelConfig(name="bench", path="tiny"),
                seed=0,
            ),
            output_dir=folder,
            next_batch=next_batch,
            on_step_end=on_step_end,
        )
        trainer.train()
    return timer.steps


def compared(size: str, prompts: Prompts, threads: int) -> dict[str, float]:
    """Agreement of the sides on two groups that the engine made, its own log-probabilities included.

    Raises:
        SystemExit: beyond the tolerances.
    """
    asked, made = Sampler(make_model(size), prompts, threads).sample(1)
    pairs = list(zip(asked, made, strict=True))[: 2 * GROUP]
    rows = [Row(request.prompt_ids, (one.ids,), reward(one.ids)) for request, one in pairs]
    with tempfile.TemporaryDirectory() as folder:
        ours = Ours(make_model(size), calls(rows), Path(folder) / "ours")
        agreement = check(ours, Plain(make_model(size), rows, 4), Trl(make_model(size), rows, 4, Path(folder) / "trl"))
        scored = ours.logprobs()
    gap = max(
        abs(a - b) for (_, one), two in zip(pairs, scored, strict=True) for a, b in zip(one.logprobs, two, strict=True)
    )
    if gap > 1e-4:
        raise SystemExit(f"engine and trainer differ by {gap:.2g} in a log-probability, expected at most 1e-4")
    return agreement | {"max_engine_difference": gap}


def measure(size: str, prompts: Prompts, micro: Sequence[int], threads: int, steps: int) -> dict[str, Any]:
    """Seconds of both sides, tokens, and their agreement."""
    agreement = compared(size, prompts, threads)
    rows, counts = prompts.count * GROUP, clock(threads)
    found: dict[str, list[tuple[float, float]]] = {"mmrl": []}
    for many in micro:
        if rows % many == 0:
            block: Callable[[], list[tuple[float, float]]] = lambda many=many: trl_steps(size, prompts, many, steps)  # noqa: E731
            found[f"TRL, micro-batch {many}"] = block()
            # The first step of a run also compares packed with padded; users pay it once per run.
            found["mmrl"] += our_steps(size, prompts, threads, steps + 1)[1:]
    lengths = [len(text.split()) for text in texts(prompts, MODELS[size].vocab)]
    seconds = {name: min(one[counts] for one in several) for name, several in found.items()}
    peer = min((name for name in seconds if name != "mmrl"), key=seconds.__getitem__)
    return {
        "seconds": seconds,
        "all_seconds": found,
        "best_peer": peer,
        "ratio": seconds[peer] / seconds["mmrl"],
        "padded_tokens": rows * (max(lengths) + prompts.completion),
        "real_tokens": GROUP * sum(lengths) + rows * prompts.completion,
        "unique_tokens": sum(lengths) + rows * prompts.completion,
        **agreement,
    }


def main(arguments: list[str]) -> int:
    """Print the table, write the JSON; returns 1 when a bar is missed."""
    known = {"prompts": "long,short", "model": "1M", "micro": "4,8,32", "steps": "2", "quick": ""}
    given = options(arguments, known)
    kinds, micro = given["prompts"].split(","), [int(many) for many in given["micro"].split(",")]
    if set(kinds) - set(PROMPTS):
        raise SystemExit(f"prompts: got {given['prompts']}, expected some of {','.join(PROMPTS)}")
    size = "test" if given["quick"] else given["model"]
    lines, bars = [], []
    for kind in kinds:
        prompts = QUICK[kind] if given["quick"] else PROMPTS[kind]
        line = measure(size, prompts, micro, int(given["threads"]), int(given["steps"])) | {"prompts": kind}
        lines.append(line)
        print(f"{kind}: " + ", ".join(f"{name} {spent:.3f} s" for name, spent in line["seconds"].items()), flush=True)
        tokens = {name: line[f"{name}_tokens"] for name in ("padded", "real", "unique")}
        bars.append(Bar(what=f"step: TRL / mmrl, {kind} prompts", value=line["ratio"], bar=BARS[kind], **tokens))
    return finish("step", bars, given["out"], model=size, lines=lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
