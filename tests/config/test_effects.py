"""Keys that are read (`test_reads.py`) and must also matter: a changed value changes what comes out.

Of credit, plans, rewards, prompts and endpoints the tests of those say with worked numbers what each key does; these
are the keys that go on to libraries, and those that only whole parts together show.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from transformers import TrainerControl

from mmrl.config.algo import CriticConfig
from mmrl.errors import ParseFailure
from mmrl.models.chat import render_prompt
from mmrl.models.load import load_model, load_tokenizer
from mmrl.rollout.environment import sampling_settings
from mmrl.stages.evaluate import Evaluations, evaluate, evaluation_metrics
from mmrl.tasks.dspy.own import FunctionProgram
from tests.helpers.configs import Options, config_of, rl_stage_of
from tests.helpers.programs import Chain, FakeEngine, FakeTask, environment, forest_of, seeded_letter
from tests.helpers.trainer_cases import gradients, make_calls, make_trainer, with_changes, with_targets

Seen = Callable[[Any, Path], object]
"""(a config, an empty folder) -> what came out of the code that has the key."""


def trainer_of(config: Any, folder: Path) -> Any:
    return make_trainer(
        folder, calls=calls_of(config), lora=config.model.lora, algo=config.algo, **config.train.model_dump()
    )


def calls_of(config: Any) -> list[Any]:
    """Of a sampler that is another policy than the trainer's, and so is the reference."""
    calls = make_calls(minibatches=config.algo.minibatches, noise=0.6)
    if isinstance(config.algo, CriticConfig):
        calls = with_targets(calls, [(0.3,) * len(call.call.completion_ids) for call in calls])
    return [with_changes(call, ref_logprobs=tuple(-3.0 for _ in call.call.completion_ids)) for call in calls]


def loss_and_gradients(config: Any, folder: Path) -> object:
    loss, found = gradients(trainer_of(config, folder), calls_of(config))
    return loss, {name: value.double().sum().item() for name, value in found.items()}


def critic_gradients(config: Any, folder: Path) -> object:
    trainer = trainer_of(config, folder)
    gradients(trainer, calls_of(config))
    return {
        name: float(p.grad.abs().sum()) for name, p in trainer.critic.named_parameters().items() if p.grad is not None
    }


def weights_and_rates(config: Any, folder: Path) -> object:
    """Weights after three optimizer steps, taken as transformers' loop does; the last group's rate at each."""
    trainer, rates = trainer_of(config, folder), []
    trainer.create_optimizer_and_scheduler(3)
    for _ in range(3):
        gradients(trainer, calls_of(config))
        trainer._clip_grad_norm(trainer.model)
        rates.append(trainer.optimizer.param_groups[-1]["lr"])
        trainer.optimizer.step()
        trainer.lr_scheduler.step()
    return rates, sum(p.detach().double().sum().item() for p in trainer.model.parameters() if p.requires_grad)


def updates(config: Any, folder: Path) -> object:
    """The packs of each optimizer step of a step: calls, and tokens forwarded."""
    made = [item["update"] for item in trainer_of(config, folder).updates()]
    return [[([c.call.id for c in p.calls], list(p.inputs["input_ids"].shape)) for p in u.packs] for u in made]


def checkpoints(config: Any, folder: Path) -> object:
    """Checkpoints that are there after three steps, of which those that are due were saved."""
    trainer = trainer_of(config, folder)
    trainer.create_optimizer_and_scheduler(3)
    for step in range(1, 4):
        control = TrainerControl()
        trainer.state.global_step = step
        trainer.end_update(control)
        if control.should_save:
            trainer.save()
    return sorted(path.name for path in folder.glob("checkpoint-*"))


def layers(config: Any, folder: Path) -> object:
    """What is trained, and the scaling and dropout of adapters."""
    trainer = trainer_of(config, folder)
    adapted = [m for m in trainer.model.modules() if hasattr(m, "lora_dropout")]
    facts = [(list(m.scaling.values()), [getattr(d, "p", 0) for d in m.lora_dropout.values()]) for m in adapted]
    return facts, sorted((n, tuple(p.shape)) for n, p in trainer.model.named_parameters() if p.requires_grad)


def loaded(config: Any, folder: Path) -> object:
    """The weights' type and sum, and what computes with them."""
    model = load_model(config.model, "cpu")
    weights = next(model.parameters())
    kinds = {type(part).__name__ for part in model.modules()}
    return weights.dtype, weights.double().sum().item(), kinds, model.config._attn_implementation


def rendered(config: Any, folder: Path) -> object:
    """The ids of a prompt by a template that thinks and knows the day, where the config names one."""
    template = "{{ strftime_now('%d %B %Y') }}{% if enable_thinking %}<think>{% endif %}"
    template += "{% for m in messages %}{{ m.content }}{% endfor %}"
    (folder / "mine.jinja").write_text(template, encoding="utf-8")
    model = config.model
    if model.chat_template is not None:
        model = model.model_copy(update={"chat_template": str(folder / model.chat_template)})
    return render_prompt(load_tokenizer(model), [{"role": "user", "content": "Who made it?"}])


async def stubborn(example: Any, ctx: Any) -> None:
    """A program whose replies never parse."""

    def parse(text: str) -> None:
        raise ParseFailure("never")

    await ctx.call("a", [{"role": "user", "content": "?" * 40}], parse=parse)


def requested(phase: str) -> Seen:
    """What an engine is asked for in one rollout of a phase, and how the rollout ends."""

    def seen(config: Any, folder: Path) -> object:
        engine = FakeEngine(lambda request: "no", pause=lambda: 0.05)
        env = environment(FakeTask(FunctionProgram(stubborn, ("a",))), engine)
        env.settings = sampling_settings(getattr(config, phase), config.task)
        (rollout,) = forest_of(env).rollouts
        return [request.sampling for request in engine.requests], rollout.error

    return seen


def evaluated(config: Any, folder: Path) -> object:
    """Requests and metrics of an evaluation, and the steps after which one is due."""
    engine, task = FakeEngine(seeded_letter), FakeTask(Chain(("a",)))
    examples = task.examples(config.eval.split)
    items = evaluate(lambda key: environment(task, engine, key=key), examples, config.eval, config.seed, "outcome")
    due = Evaluations(examples=examples, last_step=9, stage=rl_stage_of(config, engine)).due
    metrics = evaluation_metrics(items, config.eval, config.seed)
    return [r.prompt_ids for r in engine.requests], metrics, [step for step in range(1, 10) if due(step)]


def sampled(config: Any, folder: Path) -> object:
    """Examples and replies of a first step; whether the second is under way then."""
    stage = rl_stage_of(config, FakeEngine(seeded_letter))
    with patch("mmrl.stages.collect.annotate", lambda forwards, forest: forest):
        batch = stage.collect(1, lambda forest: None)
        ahead = stage.prefetch.steps
        stage.prefetch.wait()
    return ahead, [example.id for example in batch.examples], sorted(c.text for c in batch.forest.calls.values())


PPO, PAIRS = {"algo.name": "ppo"}, {"algo.group_size": 2}
LORA = {"model.lora.r": 4, "model.lora.alpha": 8}
DRAWN = {"eval.temperature": 1.0}
MINE = {"model.chat_template": "mine.jinja", "model.date": "2024-02-29"}
CASES: list[tuple[str, Any, Any, Seen, Options]] = [
    ("seed", 0, 1, sampled, PAIRS),
    ("train.batch_size", 2, 3, sampled, PAIRS),
    ("train.staleness", 0, 1, sampled, PAIRS),
    ("algo.loss", "clip", "cispo", loss_and_gradients, {}),
    ("algo.clip", 0.2, 0.01, loss_and_gradients, {}),
    ("algo.clip_high", None, 0.01, loss_and_gradients, {}),
    ("algo.ratio_one", False, True, loss_and_gradients, {}),
    ("algo.beta", 0.0, 0.5, loss_and_gradients, {}),
    ("train.old_logprobs", "sampler", "recompute", loss_and_gradients, {}),
    ("train.tis", None, 1.0, loss_and_gradients, {"train.old_logprobs": "recompute"}),
    ("algo.epochs", 1, 2, updates, {}),
    ("algo.minibatches", 1, 2, updates, {}),
    ("train.microbatch_tokens", None, 64, updates, {}),
    ("train.packing", "trie", "padded", updates, {}),
    ("train.lr", 1e-2, 1e-3, weights_and_rates, {}),
    ("train.schedule", "constant", "cosine", weights_and_rates, {}),
    ("train.warmup_steps", 0, 2, weights_and_rates, {"train.schedule": "constant_with_warmup"}),
    ("train.grad_clip", 1e-3, 1e-5, weights_and_rates, {}),
    ("train.adam_beta1", 0.9, 0.1, weights_and_rates, {}),
    ("train.adam_beta2", 0.999, 0.1, weights_and_rates, {}),
    ("train.weight_decay", 0.0, 0.5, weights_and_rates, {}),
    ("train.steps", 3, 2, checkpoints, {"train.save_every": 3}),
    ("train.save_every", 1, 2, checkpoints, {"train.keep": 3}),
    ("train.keep", 1, 2, checkpoints, {"train.save_every": 1}),
    ("algo.critic", "separate", "head", critic_gradients, PPO),
    ("algo.critic_init", "random", "zero", critic_gradients, PPO),
    ("algo.value_clip", 0.5, 0.001, critic_gradients, PPO),
    ("algo.critic_lr_factor", 10.0, 2.0, weights_and_rates, PPO),
    ("algo.critic_warmup_steps", 0, 2, weights_and_rates, PPO),
    *(
        (f"model.lora.{key}", *values, layers, LORA)
        for key, values in {
            "r": (4, 8),
            "alpha": (4, 8),
            "dropout": (0.0, 0.5),
            "targets": (("q_proj",), ("v_proj",)),
        }.items()
    ),
    ("model.path", "tiny", "tiny_dspy", loaded, {}),
    ("model.dtype", "float32", "bfloat16", loaded, {}),
    ("model.matmul", "torch", "onednn", loaded, {}),
    ("model.attention", "auto", "eager", loaded, {}),
    ("model.chat_template", None, "mine.jinja", rendered, {"model.date": "2024-02-29"}),
    ("model.thinking", False, True, rendered, MINE),
    ("model.date", "2024-02-29", "2026-11-28", rendered, MINE),
    *(
        (f"{phase}.{key}", *values, requested(phase), DRAWN)
        for phase in ("algo", "eval")
        for key, values in {
            "temperature": (1.0, 0.5),
            "top_p": (1.0, 0.5),
            "top_k": (0, 2),
            "parse_retries": (0, 2),
        }.items()
    ),
    ("task.max_tokens", 100, 7, requested("eval"), {}),
    ("task.max_context", 4096, 20, requested("eval"), {}),
    ("task.timeout_s", 600.0, 0.01, requested("eval"), {}),
    ("eval.split", "dev", "test", evaluated, {}),
    ("eval.every", 0, 2, evaluated, {}),
    ("eval.items", None, 3, evaluated, {}),
    ("eval.samples", 1, 2, evaluated, DRAWN),
    ("eval.bootstrap", 100, 1000, evaluated, {}),
]


@pytest.mark.parametrize(("key", "one", "other", "seen", "also"), CASES, ids=[case[0] for case in CASES])
def test_a_changed_value_changes_what_comes_out(
    key: str, one: Any, other: Any, seen: Seen, also: Options, tmp_path: Path
) -> None:
    found = []
    for number, value in enumerate((one, other, one)):
        folder = tmp_path / str(number)
        folder.mkdir()
        found.append(
            seen(
                config_of(
                    {"algo.epochs": 1, "train.batch_size": 2, "train.steps": 3, "train.lr": 1e-2, **also, key: value}
                ),
                folder,
            )
        )
    first, changed, again = found
    assert first != changed
    assert first == again, "what differs without a change proves nothing"
