"""Which examples an optimiser of prompts learns from and which it compares candidates on, and whether they are enough.

Imports neither DSPy nor torch: whoever checks a config asks here before a model loads.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from mmrl import rng
from mmrl.config import PromptCommandConfig
from mmrl.config.other_stages import (
    SMALLEST_MINIBATCHED,
    BootstrapConfig,
    BootstrapFewshotConfig,
    Miprov2Config,
    PromptConfig,
)
from mmrl.records import Example
from mmrl.tasks.base import Task
from mmrl.tasks.prompts import PromptedTask

MOST_VALIDATION = 1000
"""DSPy's limit for MIPROv2, where `algo.validation_items` says nothing."""
AUTO_VALIDATION = {"light": 100, "medium": 300, "heavy": 1000}
"""DSPy's numbers of validation examples for MIPROv2's `auto`."""


def split(config: PromptConfig, examples: Sequence[Example], seed: int) -> tuple[list[Example], list[Example]]:
    """The train part and the validation part of the train split.

    The validation part is the end of the split, as in DSPy's MIPROv2, which has a seed of its own for all that is
    random; DSPy's random search has none, so the order of its train part comes from the run's.
    """
    most = MOST_VALIDATION if config.validation_items is None else config.validation_items
    # At least one: without validation nothing can be compared. Nothing to learn from is refused (`prompt_problems`).
    count = min(most, max(1, int(len(examples) * config.validation)))
    cut = len(examples) - count
    train, validation = list(examples[:cut]), list(examples[cut:])
    if isinstance(config, BootstrapFewshotConfig):
        rng.stream(seed, "prompts").shuffle(train)
    return train, validation


def compared(config: PromptConfig, validation: Sequence[Example], seed: int) -> list[Example]:
    """The examples of the validation part that a full evaluation has: with MIPROv2's `auto`, DSPy draws them."""
    if not isinstance(config, Miprov2Config) or config.auto is None:
        return list(validation)
    # DSPy's own draw, the first one of its generator.
    size = min(AUTO_VALIDATION[config.auto], len(validation))
    return [validation[i] for i in random.Random(seed).sample(range(len(validation)), size)]


def minibatched(config: Miprov2Config, validation: int) -> bool:
    """Whether the trials of MIPROv2 are evaluated on minibatches of so many validation examples."""
    return config.minibatch if config.minibatch is not None else validation > SMALLEST_MINIBATCHED


def expected_trials(config: PromptConfig, modules: int, validation: int) -> int:
    """About how many trials the optimiser will make, for a progress bar.

    Args:
        modules: of the program.
        validation: examples, as `split` gives them.
    """
    if isinstance(config, BootstrapFewshotConfig):
        # Besides: the start, demonstrations by label alone, and one bootstrapping in the order of the examples.
        return config.num_candidate_programs + 3
    if isinstance(config, Miprov2Config):
        trials = config.num_trials
        if trials is None:
            candidates = {"light": 6, "medium": 12, "heavy": 18}[config.auto or "medium"]
            # As DSPy counts: instructions are one choice of a module, demonstrations another.
            sets = 2 if config.max_bootstrapped_demos else 1
            trials = int(max(2 * sets * modules * math.log2(candidates), 1.5 * candidates))
        every = config.minibatch_full_eval_steps
        # The start comes first; where trials are minibatches, the best so far is evaluated on all every so often.
        return 1 + trials + (trials // every + bool(trials % every) if minibatched(config, validation) else 0)
    return 0  # GEPA: as many as its budget of rollouts allows


def labeled_demos(config: BootstrapConfig, task: Task) -> int:
    """`algo.max_labeled_demos`, with what null stands for."""
    if config.max_labeled_demos is not None:
        return config.max_labeled_demos
    if isinstance(task, PromptedTask):
        return 0
    # DSPy's defaults.
    return 16 if isinstance(config, BootstrapFewshotConfig) else 4


def prompt_problems(config: PromptCommandConfig, task: Task) -> list[str]:
    """Why the optimiser cannot run on this task: one sentence each, with the key that the user would type."""
    algo, examples = config.algo, task.examples("train")
    prompted = isinstance(task, PromptedTask)
    if not prompted and not hasattr(task.program, "module"):  # DSPy's program is not imported for this
        return [f"task: '{task.name}' has no prompts that can be optimised: they are its program's own code"]
    have = f"task.data.train: has {len(examples)} examples"
    if isinstance(algo, BootstrapConfig) and prompted and algo.max_labeled_demos:
        return [
            f"algo.max_labeled_demos: got {algo.max_labeled_demos}, which has no effect with the program of this task: "
            "its examples hold no replies of its modules; leave it out"
        ]
    train, validation = split(algo, examples, config.seed)
    if not train or not validation:
        parts = f"{len(train)} to learn from and {len(validation)} to compare candidates on"
        return [
            f"{have}, of which algo.validation={algo.validation:g} leaves {parts}; algo={algo.name} needs at least one "
            "of each: give more examples"
        ]
    count = len(compared(algo, validation, config.seed))
    if isinstance(algo, Miprov2Config) and minibatched(algo, count) and algo.minibatch_size > count:
        return [
            f"algo.minibatch_size: got {algo.minibatch_size}, more than the {count} validation examples "
            f"(algo.validation={algo.validation:g} of the {len(examples)} in task.data.train)"
        ]
    return []
