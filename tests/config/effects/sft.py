"""Effects of `algo.*` and `train.*` of a supervised stage."""

from __future__ import annotations

import json
from pathlib import Path

from mmrl.engines.base import Completion, Request
from mmrl.errors import ParseFailure, ToolFailure, TooManyFailures
from tests.config.effects import Options, acts, refused
from tests.helpers.fakes import Chain, FakeEngine, seeded_letter
from tests.helpers.sft import CHAT, OWN, Teachable, run, stage_of

ALGO, TRAIN = "supervised.algo", "supervised.train"


def sequences(name: str, options: Options, folder: Path) -> object:
    """What is trained on, by module and ids."""
    for number in (1, 2):
        (folder / f"{number}.jsonl").write_text(f"{json.dumps(CHAT)}\n" * number, encoding="utf-8")
    own = {f"algo.{key}": str(folder / value) if key == "file" else value for key, value in options.items()}
    task = Teachable(Chain(("a", "b")), reward=lambda prediction: 1.0 + sum(map(ord, prediction)) % 3)
    stage, _ = stage_of(folder / "run", own, task=task)
    taken = stage._sampled() if stage.config.algo.source == "rollouts" else stage._given()
    return [(item.module, item.completion_ids) for _, item in taken]


class _Picky(Chain):
    """Half of its replies do not parse."""

    async def run(self, example: object, ctx: object) -> str:
        def parse(text: str) -> str:
            if text > "m":
                raise ParseFailure("late letter")
            return text

        reply = await ctx.call("a", [{"role": "user", "content": example.inputs["text"]}], parse=parse)  # type: ignore[attr-defined]
        return str(reply.text)


def requested(name: str, options: Options, folder: Path) -> object:
    """How the rollouts are sampled."""
    engine = FakeEngine(seeded_letter)
    own = {**OWN, "algo.min_reward": 0.0, **{f"algo.{key}": value for key, value in options.items()}}
    stage_of(folder / "run", own, task=Teachable(_Picky(("a",))), engine=engine)[0]._rollouts()
    return sorted(str(request.sampling) for request in engine.requests)


class _Failing(FakeEngine):
    """Every other rollout meets a tool that is down."""

    async def generate(self, request: Request) -> Completion:
        self.requests.append(request)
        if len(self.requests) % 2:
            raise ToolFailure("down")
        return Completion(ids=(100,), logprobs=(-0.5,), finish="eos")


def stopped(name: str, options: Options, folder: Path) -> object:
    """Whether failed rollouts stop the stage."""
    own = {**OWN, "algo.min_reward": 0.0, **{f"train.{key}": value for key, value in options.items()}}
    try:
        stage_of(folder / "run", own, engine=_Failing(seeded_letter))[0]._sampled()
    except TooManyFailures as error:
        return str(error)
    return ""


def trained(name: str, options: Options, folder: Path) -> object:
    """Weights after two steps, and the checkpoints."""
    own = {f"{name}.{key}": value for key, value in options.items()}
    short = {"train.steps": 2, "train.save_every": 1, "train.keep": 3, "train.lr": 1e-2, "train.grad_clip": 9.0}
    _, weights, history = run(folder / "run", {**short, **own})
    there = sorted(path.name for path in (folder / "run" / "checkpoints").iterdir())
    forwarded = [record.get("train/tokens_forwarded") for record in history]
    return there, forwarded, [value.double().sum().item() for value in weights.values()]


acts(ALGO, "source", sequences, "task", "rollouts")
acts(ALGO, "file", sequences, "1.jsonl", "2.jsonl", source="file")
acts(ALGO, "modules", sequences, None, {"b": 1.0})
acts(ALGO, "prompt_weight", trained, 0.0, 0.5)
acts(ALGO, "rollouts", sequences, 1, 2, source="rollouts", per_example=None)
acts(ALGO, "min_reward", sequences, 1.0, 3.0, source="rollouts", per_example=None)
acts(ALGO, "per_example", sequences, 1, 2, source="rollouts", rollouts=2)
acts(ALGO, "temperature", requested, 1.0, 0.5)
acts(ALGO, "top_p", requested, 1.0, 0.5)
acts(ALGO, "top_k", requested, 0, 5)
acts(ALGO, "parse_retries", requested, 0, 2)

acts(TRAIN, "steps", trained, 1, 2)
acts(TRAIN, "batch_size", trained, 2, 3)
acts(TRAIN, "lr", trained, 1e-2, 1e-3)
acts(TRAIN, "schedule", trained, "constant", "linear")
acts(TRAIN, "warmup_steps", trained, 0, 1, schedule="constant_with_warmup")
acts(TRAIN, "grad_clip", trained, 1e-8, 1e-9)
acts(TRAIN, "adam_beta1", trained, 0.9, 0.1)
acts(TRAIN, "adam_beta2", trained, 0.999, 0.1)
acts(TRAIN, "weight_decay", trained, 0.0, 0.5)
acts(TRAIN, "microbatch_tokens", trained, 64, 512)
acts(TRAIN, "save_every", trained, 1, 2)
acts(TRAIN, "keep", trained, 1, 2)
acts(TRAIN, "max_failed_share", stopped, 0.6, 0.1)
for key, value in {"packing": "trie", "old_logprobs": "recompute", "tis": "2.0", "staleness": "1"}.items():
    refused(TRAIN, key, value, "with algo=sft", typed=f"train.{key}", starts=f"train.{key}")
