"""Which examples an optimiser of prompts learns from and which it compares candidates on, and whether they are enough.

Imports neither DSPy nor torch: whoever checks a config asks here before a model loads.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from mmrl import rng
from mmrl.config import PromptCommandConfig
from mmrl.config.optimisers import (
    SMALLEST_MINIBATCHED,
    BootstrapFewshotConfig,
    Miprov2Config,
    PromptConfig,
    SimbaConfig,
    ValidatedConfig,
)
from mmrl.records import Example
from mmrl.tasks.base import Task

MOST_VALIDATION = 1000
"""DSPy's limit for MIPROv2, where `algo.validation_items` says nothing."""
AUTO_VALIDATION = {"light": 100, "medium": 300, "heavy": 1000}
"""DSPy's numbers of validation examples for MIPROv2's `auto`."""


def split(config: PromptConfig, examples: Sequence[Example], seed: int) -> tuple[list[Example], list[Example]]:
    """The train part and the validation part of the train split; both are all of it for SIMBA, which holds none back.

    The validation part is the end of the split, as in DSPy's MIPROv2, which has a seed of its own for all that is
    random; DSPy's random search has none, so the order of its train part comes from the run's.
    """
    if not isinstance(config, ValidatedConfig):
        return list(examples), list(examples)
    most = MOST_VALIDATION if config.validation_items is None else config.validation_items
    count = min(most, max(1, int(len(examples) * config.validation)))
    cut = len(examples) - count
    train, validation = list(examples[:cut]), list(examples[cut:])
    if isinstance(config, Miprov2Config) and config.auto is not None:
        # DSPy's own draw, with its generator, so that the examples of its first full evaluation are known here.
        size = min(AUTO_VALIDATION[config.auto], count)
        validation = [validation[i] for i in random.Random(seed).sample(range(count), size)]
    if isinstance(config, BootstrapFewshotConfig):
        rng.stream(seed, "prompts").shuffle(train)
    return train, validation


def minibatched(config: Miprov2Config, validation: int) -> bool:
    """Whether the trials of MIPROv2 are evaluated on minibatches of so many validation examples."""
    return config.minibatch if config.minibatch is not None else validation > SMALLEST_MINIBATCHED


def prompt_problems(config: PromptCommandConfig, task: Task) -> list[str]:
    """Why the optimiser cannot run on this task: one sentence each, with the key that the user would type."""
    algo, examples = config.algo, task.examples("train")
    have = f"task.data.train: has {len(examples)} examples"
    if isinstance(algo, SimbaConfig):
        if len(examples) < algo.bsize:
            return [f"{have}, fewer than algo.bsize={algo.bsize}; give more examples, or a smaller minibatch"]
        return []
    train, validation = split(algo, examples, config.seed)
    if not train or not validation:
        share = algo.validation if isinstance(algo, ValidatedConfig) else 0.0
        return [
            f"{have}, of which algo.validation={share:g} leaves {len(train)} to learn from and {len(validation)} to "
            f"compare candidates on; algo={algo.name} needs at least one of each: give more examples"
        ]
    if isinstance(algo, Miprov2Config) and minibatched(algo, len(validation)):
        if algo.minibatch_size > len(validation):
            return [
                f"algo.minibatch_size: got {algo.minibatch_size}, more than the {len(validation)} validation examples "
                f"(algo.validation={algo.validation:g} of {len(examples)} in task.data.train)"
            ]
    return []
