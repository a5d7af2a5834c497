"""TRL's GRPOTrainer on a task of mmrl's: `python -m scripts.peer FOLDER [micro=8] [key=value of mmrl train ...]`.

For programs of one call under `algo=grpo`: the examples of each step, their prompts, rewards, model and settings are
those of `mmrl train` with the same words, of which those that TRL does not have are refused; rendering, sampling,
batches and update are TRL's, on the CPU. FOLDER gets `steps.jsonl`
(reward, wall-clock and CPU seconds of each step) and the policy, which `mmrl eval policy=FOLDER/policy` evaluates.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any, cast

import torch
import transformers
import trl
from datasets import Dataset

from mmrl.cli.configs import configured
from mmrl.config import RlRunConfig
from mmrl.engines.base import Completion, Engine, Request
from mmrl.models.chat import eos_ids
from mmrl.models.load import load_policy
from mmrl.records import Example
from mmrl.rollout.environment import make_environment, sampling_settings
from mmrl.rollout.plans import independent
from mmrl.rollout.sample import sample
from mmrl.run.build import build_task, reward_set
from mmrl.run.settle import settle
from mmrl.stages.collect import batch_of
from mmrl.store.policy import Policy
from mmrl.trainer.settings import Settings

TAKEN = {
    *(f"train.{key}" for key in ("steps", "batch_size", "lr", "schedule", "warmup_steps", "grad_clip")),
    *(f"train.{key}" for key in ("adam_beta1", "adam_beta2", "weight_decay")),
    *(f"algo.{key}" for key in ("group_size", "epochs", "temperature", "top_p", "top_k", "beta", "clip", "clip_high")),
}
"""Keys of `train` and `algo` that TRL gets; the others stay at the defaults of `algo=grpo`, which are TRL's too."""


class Replies(Engine):
    """Completions that are there already, by the example's id; keeps each request's messages."""

    def __init__(self, completions: Mapping[str, Sequence[int]], ends: Collection[int]):
        self.completions, self.ends = completions, ends
        self.messages: dict[str, list[Mapping[str, str]]] = {}
        self.foreign = False
        """A request was none that TRL could have: a second one, one in a context, or one with stop strings."""

    async def generate(self, request: Request) -> Completion:
        """See `Engine.generate`."""
        self.foreign |= request.messages is None or request.session in self.messages or bool(request.sampling.stop)
        self.messages[request.session] = list(request.messages or ())
        ids = tuple(self.completions[request.session])
        return Completion(ids=ids, logprobs=None, finish="eos" if ids[-1] in self.ends else "length")


class Peer:
    """A task of mmrl's as TRL wants it: a dataset of prompts, and a reward function."""

    def __init__(self, config: RlRunConfig, tokenizer: Any, ends: Collection[int]):
        self.config, self.tokenizer, self.ends = config, tokenizer, ends
        self.task = build_task(config.task, config.seed)
        batch, examples = config.train.batch_size, self.task.examples("train")
        steps = range(1, config.train.steps + 1)
        self.examples = [example for step in steps for example in batch_of(examples, batch, step, config.seed)]

    def play(self, examples: Sequence[Example], completions: Sequence[Sequence[int]]) -> tuple[Replies, list[float]]:
        """Run the program of each example with its completion; return the engine, and each reward."""
        named = [replace(example, id=str(number)) for number, example in enumerate(examples)]
        replies = Replies({example.id: ids for example, ids in zip(named, completions, strict=True)}, self.ends)
        settings = sampling_settings(self.config.algo, self.config.task)
        env = make_environment(self.task, replies, self.tokenizer, settings, (self.config.seed, "peer"))
        rewards = reward_set(self.task, self.config.task.reward)
        forest = asyncio.run(sample(env, [(example, independent(1)) for example in named], rewards))
        if replies.foreign:
            raise SystemExit("the program calls more than once, goes on in a context, or has stop strings")
        scored = [rollout.reward for rollout in forest.rollouts if rollout.reward is not None]
        if len(scored) < len(named):
            raise SystemExit("a rollout failed from outside, and has no reward")
        return replies, scored

    def dataset(self) -> Dataset:
        """Return prompt and number of each example, in the order of the steps."""
        replies, _ = self.play(self.examples, [[*self.ends][:1]] * len(self.examples))
        prompts = [replies.messages[str(number)] for number in range(len(self.examples))]
        return Dataset.from_dict({"prompt": prompts, "number": list(range(len(prompts)))})

    def reward(self, *, number: Sequence[int], completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
        """Return the reward of each completion."""
        return self.play([self.examples[index] for index in number], completion_ids)[1]


class Clock(transformers.TrainerCallback):
    """Writes a line for each step: optimizer steps that share rollouts are one."""

    def __init__(self, file: Path, updates: int):
        self.file, self.updates, self.rewards = file, updates, list[float]()
        self.since = (0.0, 0.0)

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Start the clock."""
        self.since = (time.perf_counter(), time.process_time())

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Write the line."""
        if state.global_step % self.updates:
            return
        now = (time.perf_counter(), time.process_time())
        wall, cpu = (round(after - before, 3) for after, before in zip(now, self.since, strict=True))
        line = {"step": state.global_step // self.updates, "reward": fmean(self.rewards), "wall_s": wall, "cpu_s": cpu}
        with self.file.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(line, flush=True)
        self.since, self.rewards = now, []


def read(words: Sequence[str]) -> RlRunConfig:
    """Return the config of the words; exits with those that TRL would not follow."""
    keys = [word.partition("=")[0] for word in words]
    if foreign := [key for key in keys if key.partition(".")[0] in ("train", "algo") and key not in TAKEN]:
        raise SystemExit(f"not taken by TRL: {', '.join(foreign)}")
    return settle(cast(RlRunConfig, configured(["algo=grpo", *words]))).config


def main(arguments: Sequence[str]) -> int:
    """Train."""
    folder, *words = arguments
    micro = next((int(word.removeprefix("micro=")) for word in words if word.startswith("micro=")), 8)
    config = read([word for word in words if not word.startswith("micro=")])
    algo, train = cast(Any, config.algo), config.train
    if (rows := train.batch_size * algo.group_size) % micro:
        raise SystemExit(f"micro: got {micro}, expected a divisor of {rows}, the rollouts of a step")
    torch.set_num_threads(config.hardware.threads or 1)
    transformers.set_seed(config.seed)
    model, tokenizer, _ = load_policy(Policy(base=config.model.path), config.model, "cpu")
    peer = Peer(config, tokenizer, eos_ids(tokenizer, model.generation_config))
    settings = Settings(train=train, algo=config.algo, model=config.model, seed=config.seed)
    Path(folder).mkdir(parents=True)
    clock = Clock(Path(folder) / "steps.jsonl", algo.epochs)

    def reward(**facts: Any) -> list[float | None]:
        rewards = peer.reward(**facts)
        clock.rewards += rewards
        return [*rewards]

    # The optimizer's as in mmrl's own trainer; what TRL does itself here is set.
    trl_settings = settings.arguments(Path(folder) / "trl", on_cpu=True, autocast=False, dense=True) | {
        "per_device_train_batch_size": micro,
        "gradient_accumulation_steps": rows // micro,
        "num_generations": algo.group_size,
        "num_iterations": algo.epochs,
        "temperature": algo.temperature,
        "top_p": algo.top_p,
        "top_k": algo.top_k,
        "max_completion_length": config.task.max_tokens,
        "beta": algo.beta,
        "use_bias_correction_kl": False,
        "epsilon": algo.clip,
        "epsilon_high": algo.clip_high,
        "loss_type": "grpo",
        "shuffle_dataset": False,
        "report_to": "none",
    }
    trainer = trl.GRPOTrainer(
        model=model,
        reward_funcs=reward,
        train_dataset=peer.dataset(),
        processing_class=tokenizer,
        peft_config=settings.lora(model),
        callbacks=[clock],
        args=trl.GRPOConfig(**trl_settings),
    )
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    trainer.save_model(str(Path(folder) / "policy"))
    tokenizer.save_pretrained(Path(folder) / "policy")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
