"""Effects of `train.*`, and of `algo.*` on how a step is sampled; and the config of a command with some values."""

from __future__ import annotations

from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, patch

from transformers import TrainerControl

from mmrl.cli.hydra import composed
from mmrl.config import EvalCommandConfig, RootConfig, TrainCommandConfig, validate
from mmrl.credit.entries import Credit
from mmrl.engines.base import Completion, Request
from mmrl.errors import ToolFailure, TooManyFailures
from mmrl.rollout.environment import sampling_settings
from mmrl.stages.step_log import StepLog
from mmrl.stages.weights import WeightStage
from tests.config.effects import Options, acts, nested
from tests.config.effects.algo import GROUPS
from tests.helpers.engines import tokenizer
from tests.helpers.programs import Chain, FakeEngine, FakeTask, environment, letters, seeded_letter
from tests.helpers.trainer_cases import gradients, make_calls, make_trainer

BOTH = "train command;eval command"
TRAIN, EVAL = "train command", "eval command"


# --- one validated config with some values changed


@cache
def _composed(command: str) -> dict[str, Any]:
    return composed(command, ["policy=tiny"] if command == "eval" else ["algo=grpo"])


def _merged(base: dict[str, Any], changes: Options) -> dict[str, Any]:
    for key, value in changes.items():
        if key == "algo" and "name" in value:  # another algorithm has other keys
            base[key] = value
            continue
        base[key] = _merged(base[key], value) if isinstance(value, dict) and isinstance(base.get(key), dict) else value
    return base


def config_of(options: Options, command: str = "train") -> Any:
    """The composed config of a command with some values."""
    schema: type[RootConfig] = TrainCommandConfig if command == "train" else EvalCommandConfig
    return validate(schema, _merged(deepcopy(_composed(command)), nested(options)))


def root(name: str, options: Options) -> Any:
    """The config of the command that the section belongs to."""
    return config_of(options, "eval" if name == EVAL else "train")


# --- training


class Failing(FakeEngine):
    """Every other rollout meets a tool that is down."""

    async def generate(self, request: Request) -> Completion:
        if len(self.requests) % 2:
            self.requests.append(request)
            raise ToolFailure("down")
        return await super().generate(request)


def collector_of(config: Any, engine: FakeEngine) -> WeightStage:
    """The weight stage of a run whose task and engine are fakes."""

    class OfFakes(WeightStage):
        def environment(self, phase: Any, key: Any) -> Any:
            env = environment(self.task, self.engine, key=key)
            env.settings = sampling_settings(phase, self.config.task)
            return env

        def sync(self, version: int) -> None:
            engine.policy_version = version

    log = StepLog(rundir=MagicMock(), progress=MagicMock(), trackers=MagicMock())
    task = FakeTask(Chain(("a",)))
    sampling: Any = {"task": task, "examples": task.examples("train"), "reward_set": "outcome"}
    engines: Any = {"engine": engine, "engines": [engine], "tokenizer": MagicMock(), "trainer": MagicMock()}
    return OfFakes(config=config, log=log, **sampling, **engines)


def collected(name: str, options: Options, folder: Path) -> object:
    """Examples and replies of a first step; and whether the second is under way then."""
    config = config_of({"train.batch_size": 2, "algo.group_size": 2, **options})
    collector = collector_of(
        config, Failing(seeded_letter) if "train.max_failed_share" in options else FakeEngine(seeded_letter)
    )
    with patch("mmrl.stages.collect.annotate", lambda forwards, forest: forest):
        try:
            batch = collector.collect(1, lambda forest: None)  # type: ignore[arg-type, return-value]
        except TooManyFailures as error:
            return str(error)
        ahead = collector.prefetch.steps
        collector.prefetch.wait()
    return ahead, [example.id for example in batch.examples], sorted(c.text for c in batch.forest.calls.values())


def _train(options: Options) -> Options:
    return {key.removeprefix("train."): value for key, value in options.items()}


def trained(name: str, options: Options, folder: Path) -> object:
    """Weights after three optimizer steps, taken as transformers' loop does, without its seconds of preparation."""
    values = {"lr": 1e-2, **_train(options)}
    trainer = make_trainer(folder, calls=make_calls(), steps=3, **values)
    trainer.create_optimizer_and_scheduler(3)
    for _ in range(3):
        gradients(trainer, make_calls())
        trainer._clip_grad_norm(trainer.model)
        trainer.optimizer.step()
        trainer.lr_scheduler.step()
    return next(iter(trainer.model.parameters())).detach().double().sum().item()


def step_gradients(name: str, options: Options, folder: Path) -> object:
    """Loss and gradients of one optimizer step."""
    calls = make_calls(noise=0.6)
    loss, found = gradients(make_trainer(folder, calls=calls, **_train(options)), calls)
    return loss, [value.double().sum().item() for value in found.values()]


def packed(name: str, options: Options, folder: Path) -> object:
    """Packs of one optimizer step: tokens forwarded in each."""
    trainer = make_trainer(folder, calls=make_calls(count=12), **_train(options))
    (item,) = trainer.updates()
    return [
        [call.call.id for call in pack.calls] + list(pack.inputs["input_ids"].shape) for pack in item["update"].packs
    ]


def saved(name: str, options: Options, folder: Path) -> object:
    """Checkpoints after three of them were saved."""
    trainer = make_trainer(folder, calls=make_calls(), steps=3, save_every=1, **_train(options))
    trainer.create_optimizer_and_scheduler(3)
    for step in range(1, 4):
        trainer.state.global_step = step
        trainer.save()
    return sorted(path.name for path in folder.glob("checkpoint-*"))


def saves(name: str, options: Options, folder: Path) -> object:
    """The steps after which a checkpoint is due."""
    trainer = make_trainer(folder, calls=make_calls(), **{"steps": 3, **_train(options)})
    due = []
    for step in range(1, 4):
        control = TrainerControl()
        trainer.state.global_step = step
        trainer.end_update(control)
        due += [step] if control.should_save else []
    return due, len(trainer.get_train_dataloader())


def without_signal(name: str, options: Options, folder: Path) -> object:
    """Calls sampled in a step in which no example has signal, with what is trained of them: as sampled or rewritten."""

    class Canon(Chain):
        def canonical(self, call: Any) -> str:
            return call.text.upper()

    config = config_of({"algo": {"name": name, **options}, "train.batch_size": 2})
    collector = collector_of(config, FakeEngine(seeded_letter))
    collector.task = FakeTask(Canon(("a",)))
    collector.tokenizer = tokenizer()
    with (
        patch("mmrl.stages.collect.annotate", lambda forwards, forest: forest),
        patch("mmrl.stages.collect.encode_text", lambda tokenizer, text: letters(text)),
    ):
        batch = collector.collect(1, lambda forest: Credit(algo=name, entries=()))
    return sorted((call.id, call.completion_ids) for call in batch.forest.calls.values())


acts(GROUPS, "refill_rounds", without_signal, 1, 2, zero_variance="refill")
acts("algo.mmgrpo", "reserialise", without_signal, False, True)
acts(TRAIN, "train.steps", saves, 3, 2)
acts(TRAIN, "train.save_every", saves, 1, 2)
acts(TRAIN, "train.keep", saved, 1, 2)
acts(TRAIN, "train.batch_size", collected, 2, 3)
acts(TRAIN, "train.staleness", collected, 0, 1)
acts(TRAIN, "train.max_failed_share", collected, 0.5, 0.1)
acts(TRAIN, "train.lr", trained, 1e-2, 1e-3)
acts(TRAIN, "train.schedule", trained, "constant", "cosine")
acts(TRAIN, "train.warmup_steps", trained, 0, 2, train__schedule="constant_with_warmup")
acts(TRAIN, "train.grad_clip", trained, 1e-3, 1e-5)
acts(TRAIN, "train.adam_beta1", trained, 0.9, 0.1)
acts(TRAIN, "train.adam_beta2", trained, 0.999, 0.1)
acts(TRAIN, "train.weight_decay", trained, 0.0, 0.5)
acts(TRAIN, "train.microbatch_tokens", packed, None, 64)
acts(TRAIN, "train.packing", packed, "trie", "padded")
acts(TRAIN, "train.old_logprobs", step_gradients, "sampler", "recompute")
acts(TRAIN, "train.tis", step_gradients, None, 1.0, train__old_logprobs="recompute")
