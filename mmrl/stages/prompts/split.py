"""What an optimiser of prompts works on: the split of the train examples, and instructions from a file.

Imports neither DSPy nor torch: whoever checks a config asks here before a model loads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mmrl import rng
from mmrl.config import PromptRunConfig
from mmrl.config.base import literal
from mmrl.config.prompts import SMALLEST_MINIBATCHED, BootstrapConfig
from mmrl.errors import ConfigError, DataError, gathered, refuse, unknown
from mmrl.records import Example
from mmrl.system.files import read_yaml, user_path
from mmrl.tasks.base import Task
from mmrl.tasks.prompts import PromptedTask

MOST_VALIDATION = 1000
"""DSPy's limit for MIPROv2, where `algo.validation_items` says nothing."""


def split(config: PromptRunConfig, examples: Sequence[Example]) -> tuple[list[Example], list[Example]]:
    """Return the train part and the validation part of the train split.

    The validation part is the end of the split, as in DSPy's MIPROv2, which has a seed of its own for all that is
    random; DSPy's random search has none, so the order of its train part comes from the run's. Rows of files are
    shuffled before: Banking77's official file is sorted by intent, its last 200 messages are of two of 77.
    """
    algo, rows = config.algo, list(examples)
    if "train" in config.task.data.files:
        rng.stream(config.seed, "prompts", "split").shuffle(rows)
    limit = MOST_VALIDATION if algo.validation_items is None else algo.validation_items
    # At least one: without validation nothing can be compared. Nothing to learn from is refused (`prompt_problems`).
    count = min(limit, max(1, int(len(rows) * algo.validation)))
    cut = len(rows) - count
    train, validation = rows[:cut], rows[cut:]
    if algo.shuffles:
        rng.stream(config.seed, "prompts").shuffle(train)
    return train[: algo.train_items], validation


def labeled_demos(config: BootstrapConfig, task: Task) -> int:
    """Return `algo.max_labeled_demos`, with null resolved."""
    if config.max_labeled_demos is not None:
        return config.max_labeled_demos
    if isinstance(task, PromptedTask):
        return 0
    return config.plain_demos


def read_instructions(path: str, modules: Sequence[str]) -> dict[str, list[str]]:
    """Read `algo.instructions`: the texts of each module, none where the file does not name it.

    Raises:
        ConfigError: every problem of the file.
    """
    try:
        content = read_yaml(user_path(path))
    except DataError as error:
        raise ConfigError(f"algo.instructions: {error}") from None
    where, problems = f"algo.instructions: {path}", []
    if not isinstance(content, Mapping):
        raise ConfigError(f"{where}: got {type(content).__name__}, expected module: [text, ...]")
    for module, texts in content.items():
        if module not in modules:
            problems.append(unknown(where, module, modules))
        elif not (isinstance(texts, list) and texts and all(isinstance(text, str) and text.strip() for text in texts)):
            problems.append(f"{where}: {module}: got {literal(texts)[:60]}, expected a list of texts")
    refuse(problems)
    return {module: content.get(module, []) for module in modules}


def prompt_problems(config: PromptRunConfig, task: Task) -> list[str]:
    """Return reasons why the optimiser cannot run on this task, one sentence each, with the key to set."""
    algo, examples = config.algo, task.examples("train")
    program: Any = task.program
    if isinstance(task, PromptedTask):
        modules = list(task.all_prompts.by_module())
    elif hasattr(program, "module"):  # DSPy's program is not imported for this
        modules = [name for name, _ in program.module.named_predictors()]
    else:
        return [f"task: '{task.name}' has no prompts that can be optimised: they are its program's own code"]
    problems: list[str] = []
    if (path := getattr(algo, "instructions", None)) is not None:
        with gathered(problems):
            read_instructions(path, modules)
    train, validation = split(config, examples)
    # With MIPROv2's `auto` DSPy draws them.
    count = len(validation) if algo.drawn is None else min(algo.drawn, len(validation))
    if isinstance(task, PromptedTask) and (labeled := getattr(algo, "max_labeled_demos", None)):
        problems.append(
            f"algo.max_labeled_demos: got {labeled}, which has no effect with the program of this task: "
            "its examples hold no replies of its modules; leave it out"
        )
    elif not train or not validation:
        parts = f"{len(train)} to learn from and {len(validation)} to compare candidates on"
        problems.append(
            f"task.data.train: has {len(examples)} examples, of which algo.validation={algo.validation:g} leaves "
            f"{parts}; algo={algo.name} needs at least one of each: give more examples"
        )
    elif (size := algo.minibatch_of(count)) is not None and size > count:
        problems.append(
            f"algo.minibatch_size: got {size}, more than the {count} validation examples "
            f"(algo.validation={algo.validation:g} of the {len(examples)} in task.data.train)"
        )
    elif algo.minibatch_of(count) is None:
        # Set to something else than by default, and of no effect.
        problems += [
            f"algo.{name}: has no effect: trials are on all of {count} validation examples, as with no more than "
            f"{SMALLEST_MINIBATCHED}; give more, or set algo.auto=null and algo.minibatch=true"
            for name in ("minibatch_size", "minibatch_full_eval_steps")
            if name in type(algo).model_fields and getattr(algo, name) != type(algo).model_fields[name].default
        ]
    return problems
