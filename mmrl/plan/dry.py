"""Dry rollouts: a few examples through the real program and engine, counted; nothing is written, nothing trained.

Part of `plan`; the only part that loads weights, and only those of a model on this machine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace

from mmrl.algorithms import ALGORITHMS, assign_credit
from mmrl.config import TrainCommandConfig
from mmrl.config.engine import TransformersConfig
from mmrl.plan.load import Load, unique_tokens
from mmrl.records import Call, Forest
from mmrl.rollout.plans import Tree
from mmrl.tasks.base import Task


def dry_loads(config: TrainCommandConfig, task: Task, reward_set: str, examples: int) -> dict[str, Load]:
    """Load of each module in a step of `config`, scaled up from `examples` examples."""
    forest = _sample(config, task, reward_set, examples)
    return loads_of(forest, trained_calls(forest, config), config.train.batch_size / examples)


def loads_of(forest: Forest, trained: set[str], factor: float) -> dict[str, Load]:
    """Load of each module of a forest, `factor` times.

    Args:
        trained: ids of the calls that the update reads.
    """
    found = {}
    shared_before = 0
    calls: list[Call] = []
    for module in forest.modules:
        own = [call for call in forest.calls.values() if call.module == module]
        calls += own
        prompts = unique_tokens({call.prompt_ids for call in own})
        completion = sum(call.completion_tokens for call in own)
        read = [call for call in calls if call.id in trained]
        shared = unique_tokens(call.prompt_ids + call.completion_ids for call in read)
        load = Load(
            calls=len(own),
            prompt=sum(len(call.prompt_ids) for call in own),
            prompt_unique=max(0, prompts - _reread(own)),
            completion=completion,
            trained=sum(len(c.prompt_ids) + c.completion_tokens for c in own if c.id in trained),
            trained_unique=shared - shared_before,
        )
        shared_before = shared
        steps = max((call.completion_tokens for call in own), default=0) * (1 + max((c.turn for c in own), default=0))
        found[module] = replace(load.scaled(factor), decode_steps=float(steps))
    return found


def _reread(calls: list[Call]) -> int:
    """Completion tokens that stand again in the prompts of later turns of their own contexts: never prefilled anew."""
    parents = {call.parent for call in calls if call.turn > 0}
    return sum(call.completion_tokens for call in calls if call.id in parents)


def trained_calls(forest: Forest, config: TrainCommandConfig) -> set[str]:
    """Ids of the calls that carry a weight under the algorithm (values and references taken as zero)."""
    filled: Mapping[str, Call] = {
        key: replace(
            call,
            values=(0.0,) * (call.completion_tokens + call.observation_tokens),
            ref_logprobs=call.logprobs,
        )
        for key, call in forest.calls.items()
    }
    if getattr(config.algo, "obs", "all") != "all":
        filled = {k: replace(call, values=(0.0,) * call.completion_tokens) for k, call in filled.items()}
    frozen = [module for module, given in (config.model.modules or {}).items() if given.frozen]
    frozen += config.engine.endpoints or ()
    credit = assign_credit(replace(forest, calls=filled), config.algo, config.seed, frozen=frozen)
    return {entry.call for entry in credit.entries if any(entry.weights)}


def _sample(config: TrainCommandConfig, task: Task, reward_set: str, examples: int) -> Forest:
    import torch

    from mmrl.engines import engine_class
    from mmrl.models.load import load_model, load_tokenizer
    from mmrl.rollout.environment import make_environment, sampling_settings
    from mmrl.rollout.sample import sample

    torch.set_num_threads(config.hardware.threads or 1)
    algo = config.algo
    tokenizer = load_tokenizer(config.model)
    engine = engine_class("transformers")(
        load_model(config.model, "cuda" if torch.cuda.is_available() else "cpu").eval(),
        tokenizer,
        config.engine if isinstance(config.engine, TransformersConfig) else TransformersConfig(),
        max_context=config.task.max_context,
        threads=config.hardware.threads,
    )
    settings = sampling_settings(algo, config.task)
    env = make_environment(task, engine, tokenizer, settings, (config.seed, "plan"))
    chosen = task.examples("train")[:examples]
    modules = task.program.modules
    plans = [
        (example, _students(ALGORITHMS[algo.name].plan(algo, modules, (config.seed, 1, example.id))))
        for example in chosen
    ]
    return asyncio.run(sample(env, plans, reward_set))


def _students(trees: Sequence[Tree]) -> list[Tree]:
    """The plan with the student in the place of teachers, whose calls cost about the same."""
    return [replace(tree, teacher=None) for tree in trees]
