"""Poor habits for the tiny model: demonstrations of which a share is done badly, each module in one recognisable way.

The last phase of `scripts/tiny_model/build.py`. A model that is merely undertrained has nothing for reinforcement
learning to choose from in a few minutes; one with mixed habits has: both ways are in its samples, and the reward tells
them apart.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
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
    """The poor way: the question instead of sub-questions, one document twice, two answers instead of one, no tool,
    a related label, a request with the private pieces in it, a response that names nobody,
    the claim for a query."""
    if demonstration.module == "rewriter":
        return replace(demonstration, completion=str(example.inputs["question"]))
    if demonstration.module == "reranker":
        document = rng.randrange(10)
        return replace(demonstration, completion=f"{document}, {document}")
    if demonstration.module in ("answerer", "solver"):
        answers = [str(example.metadata["answers"][0]), rng.choice(list(example.metadata["titles"]))]
        rng.shuffle(answers)
        return replace(demonstration, completion=f"It may be {answers[0]} or {answers[1]}")
    if demonstration.module == "agent":
        return replace(demonstration, completion=_poor_turn(demonstration.completion, example, rng))
    if demonstration.module in ("reasoner", "condenser", "searcher") and rng.random() < 0.5:
        return replace(demonstration, completion=_poor_search(demonstration, example, rng))
    if demonstration.module == "classify.predict":
        return replace(demonstration, completion=_poor_label(demonstration.completion, example, rng))
    if demonstration.module == "craft_redacted_request.predict":
        return replace(demonstration, completion=_unredacted(demonstration.completion, example))
    if demonstration.module == "generate_query.predict":
        return replace(demonstration, completion=_claim_again(demonstration.completion, example))
    if demonstration.module == "respond_to_query" and rng.random() < 0.5:
        nameless = demonstration.completion.replace(str(example.metadata["units"][0]), "(name)")
        return replace(demonstration, completion=nameless)
    return demonstration


def _poor_search(demonstration: Demonstration, example: Example, rng: random.Random) -> str:
    """A single-context search done badly: a guess for a search, two answers for one, nothing taken from documents.

    Half as often as elsewhere, since a rollout has up to five such calls.
    """
    if demonstration.module == "condenser":
        return "Nothing helpful was found."
    guess = rng.choice(list(example.metadata["titles"]))
    if "query" not in demonstration.completion:
        answers = [str(example.metadata["answers"][0]), guess]
        rng.shuffle(answers)
        guess = f"It may be {answers[0]} or {answers[1]}"
    if demonstration.module == "reasoner":
        return f"it is {guess} \\boxed{{{guess}}}"
    return f"it is {guess} </think>\n<answer> {guess} </answer>"


def _poor_label(completion: str, example: Example, rng: random.Random) -> str:
    """The label that this one is most easily taken for; a quarter of the time no label at all."""
    reasoning, _, rest = completion.partition("\n\n")
    if rng.random() < 0.25:
        return reasoning
    label, related = (str(example.metadata[name]) for name in ("label", "related"))
    return f"{reasoning}\n\n{rest.replace(label, related, 1)}"


def _claim_again(completion: str, example: Example) -> str:
    """The claim for a query, whatever is known."""
    _, _, rest = completion.partition("\n\n")
    first, _, others = rest.partition("\n\n")
    header = first.partition("\n")[0]
    claim = str(example.inputs["claim"])
    return f"[[ ## reasoning ## ]]\nthe claim is next\n\n{header}\n{claim}\n\n{others}"


def _unredacted(completion: str, example: Example) -> str:
    """The query as it is, private pieces and all."""
    return completion.replace(str(example.metadata["ask"]), str(example.inputs["user_query"]))


def _poor_turn(completion: str, example: Example, rng: random.Random) -> str:
    """An agent's turn done badly: a guess for the tool, an action without a thought, two answers for one."""
    thought, action = completion.split("\n", 1)
    other = rng.choice(list(example.metadata["titles"]))
    if action.startswith("<answer>"):
        answers = [str(example.metadata["answers"][0]), other]
        rng.shuffle(answers)
        return f"{thought}\n<answer> It may be {answers[0]} or {answers[1]} </answer>"
    if rng.random() < 0.5:
        return action
    tag = thought.split(">", 1)[0].removeprefix("<")
    return f"<{tag}> it is {other} </{tag}>\n<answer> {other} </answer>"
