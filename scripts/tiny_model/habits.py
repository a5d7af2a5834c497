"""Poor habits for the tiny model: demonstrations of which a share is done badly, each module in one recognisable way.

The last phase of `scripts/tiny_model/build.py`. A model that is merely undertrained has nothing for reinforcement
learning to choose from in a few minutes; one with mixed habits has: both ways are in its samples, and the reward tells
them apart.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from mmrl import rng
from mmrl.records import Example
from mmrl.tasks.base import Demonstration, Task
from mmrl.tasks.mini.teach import demonstrations

SHARE = 0.6
"""Share of demonstrations that are poor."""


def habits(task: Task, split: str, seed: int) -> Iterator[Demonstration]:
    """Demonstrations of `task` in `split`, a share of them poor; which ones is a function of `seed`."""
    for example in task.examples(split):
        for number, demonstration in enumerate(demonstrations(task, example)):
            draw = rng.stream(seed, "habit", example.id, number)
            yield poor(demonstration, example, draw) if draw.random() < SHARE else demonstration


def poor(demonstration: Demonstration, example: Example, rng: random.Random) -> Demonstration:
    """Do a demonstration in the poor way of its module (`HABITS`)."""
    habit = HABITS.get(demonstration.module)
    if habit is None or (demonstration.module in HALF_AS_OFTEN and rng.random() >= 0.5):
        return demonstration
    return replace(demonstration, completion=habit(demonstration.completion, example, rng))


def _either(example: Example, other: str, rng: random.Random) -> str:
    """Two answers for one."""
    answers = [str(example.metadata["answers"][0]), other]
    rng.shuffle(answers)
    return f"It may be {answers[0]} or {answers[1]}"


def _title(example: Example, rng: random.Random) -> str:
    titles: list[str] = example.metadata["titles"]
    return rng.choice(titles)


def _document_twice(completion: str, example: Example, rng: random.Random) -> str:
    document = rng.randrange(10)
    return f"{document}, {document}"


def _poor_turn(completion: str, example: Example, rng: random.Random) -> str:
    """An agent's turn done badly: a guess for the tool, an action without a thought, two answers for one."""
    thought, action = completion.split("\n", 1)
    other = _title(example, rng)
    if action.startswith("<answer>"):
        return f"{thought}\n<answer> {_either(example, other, rng)} </answer>"
    if rng.random() < 0.5:
        return action
    tag = thought.split(">", 1)[0].removeprefix("<")
    return f"<{tag}> it is {other} </{tag}>\n<answer> {other} </answer>"


def _guess(completion: str, example: Example, rng: random.Random) -> str:
    """A guess for a search, or two answers for one."""
    guess = _title(example, rng)
    return guess if "query" in completion else _either(example, guess, rng)


def _whole_question(completion: str, example: Example, rng: random.Random) -> str:
    """The question itself in a tool call, or two answers for one."""
    question = str(example.inputs["question"])
    if "<tool_call>" in completion:
        return re.sub(r'(": ")[^"]*("\}\})', lambda found: found[1] + question + found[2], completion)
    return _either(example, _title(example, rng), rng)


def _boxed_guess(completion: str, example: Example, rng: random.Random) -> str:
    guess = _guess(completion, example, rng)
    return f"it is {guess} \\boxed{{{guess}}}"


def _tagged_guess(completion: str, example: Example, rng: random.Random) -> str:
    guess = _guess(completion, example, rng)
    return f"it is {guess} </think>\n<answer> {guess} </answer>"


def _related_label(completion: str, example: Example, rng: random.Random) -> str:
    """The label that this one is most easily taken for; a quarter of the time no label at all."""
    reasoning, _, rest = completion.partition("\n\n")
    if rng.random() < 0.25:
        return reasoning
    label, related = (str(example.metadata[name]) for name in ("label", "related"))
    return f"{reasoning}\n\n{rest.replace(label, related, 1)}"


def _claim_again(completion: str, example: Example, rng: random.Random) -> str:
    """The claim for a query, whatever is known."""
    _, _, rest = completion.partition("\n\n")
    first, _, others = rest.partition("\n\n")
    header = first.partition("\n")[0]
    claim = str(example.inputs["claim"])
    return f"[[ ## reasoning ## ]]\nthe claim is next\n\n{header}\n{claim}\n\n{others}"


HABITS: Mapping[str, Callable[[str, Example, random.Random], str]] = {
    "rewriter": lambda completion, example, rng: str(example.inputs["question"]),
    "reranker": _document_twice,
    "answerer": lambda completion, example, rng: _either(example, _title(example, rng), rng),
    "solver": lambda completion, example, rng: _either(example, _title(example, rng), rng),
    "agent": _poor_turn,
    "planner": _whole_question,
    "worker": _whole_question,
    "reasoner": _boxed_guess,
    "condenser": lambda completion, example, rng: "Nothing helpful was found.",
    "searcher": _tagged_guess,
    "classify.predict": _related_label,
    "craft_redacted_request.predict": lambda completion, example, rng: completion.replace(
        str(example.metadata["ask"]), str(example.inputs["user_query"])
    ),
    "generate_query.predict": _claim_again,
    "respond_to_query": lambda completion, example, rng: completion.replace(
        str(example.metadata["units"][0]), "(name)"
    ),
}
"""Module -> its poor way to complete a demonstration."""
HALF_AS_OFTEN = ("worker", "reasoner", "condenser", "searcher", "respond_to_query")
"""Modules that are poor half as often as the others: a rollout has up to five calls of a search in one context."""
