"""Prompts with demonstrations and other instructions, for a tiny model of DSPy programs: what optimising can find.

Used by the phases of `scripts/tiny_model/build.py` that say so. A tiny model that has only seen its programs' own
prompts writes nonsense as soon as one word of them is another. One that has seen demonstrations and instructions of
many kinds goes on answering; and where its habits are as poor as those in its demonstrations, good demonstrations are
worth finding.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from mmrl import rng
from mmrl.records import Example
from mmrl.tasks.base import Demonstration
from mmrl.tasks.dspy.base import DspyTask
from mmrl.tasks.mini.teach import Filled, demonstrations, module_calls
from scripts.tiny_model.habits import SHARE, poor

if TYPE_CHECKING:
    import dspy

Fields = Mapping[str, object]
POOL = 200
"""Examples of a split from which demonstrations are drawn."""
MOST = 4
"""Demonstrations of a prompt; half of the prompts have none."""
PLAIN = 0.5
"""Share of prompts with the program's own instructions."""
POOR_AFTER = {True: 0.1, False: 0.9}
"""Good demonstrations or poor ones -> share of poor completions after them; without any it is `habits.SHARE`."""
HALF = 0.25
"""Share of demonstrations without their reasoning: DSPy's labelled ones."""
VERBS = ("Name", "Give", "Write", "Find", "State", "Choose", "Work out", "Decide on")
FORMS = (
    "{verb} {outputs} from {inputs}.{manner}",
    "From {inputs}, {lower} {outputs}.{manner}",
    "You read {inputs}. {verb} {outputs}.{manner}",
    "Your task: {lower} {outputs}, given {inputs}.{manner}",
)
MANNERS = ("", " Be exact.", " Be brief.", " Think first.", " Look at every word.", " Answer with care.")


def varied(task: DspyTask, split: str, seed: int, habits: bool = False) -> Iterator[Demonstration]:
    """Demonstrations of `task` in `split`, under prompts that vary; which ones is a function of `seed`.

    Args:
        habits: a share of the completions is poor: a small one after good demonstrations, a large one after poor ones.
    """
    examples = task.examples(split)
    pool = {good: _pool(task, examples[:POOL], seed, good) for good in (True, False)}
    for example in examples:
        draw = rng.stream(seed, "varied", habits, example.id)
        with other_prompts(task):
            # Demonstrations of the example itself would show the answer.
            good = not habits or draw.random() < 0.5
            count = {name: _dress(name, one, pool[good], draw, example) for name, one in task.predictors.items()}
            for demonstration in demonstrations(task, example):
                share = POOR_AFTER[good] if count[demonstration.module] else SHARE
                bad = habits and draw.random() < share
                yield poor(demonstration, example, draw) if bad else demonstration


@contextmanager
def other_prompts(task: DspyTask) -> Iterator[None]:
    """The predictors get their prompts back at the end."""
    before = {name: (one.signature, one.demos) for name, one in task.predictors.items()}
    try:
        yield
    finally:
        for name, one in task.predictors.items():
            one.signature, one.demos = before[name]


def instructions(signature: Any, draw: random.Random) -> str:
    """One of the ways to say what a signature asks for."""
    verb = draw.choice(VERBS)
    wanted = ", ".join(f"`{name}`" for name in signature.output_fields if name != "reasoning")
    inputs = ", ".join(f"`{name}`" for name in signature.input_fields)
    return draw.choice(FORMS).format(
        verb=verb, lower=verb.lower(), outputs=wanted, inputs=inputs, manner=draw.choice(MANNERS)
    )


def _dress(
    name: str,
    predictor: dspy.Predict,
    pool: Mapping[str, Sequence[tuple[str, Fields]]],
    draw: random.Random,
    example: Example,
) -> int:
    """Give a predictor drawn instructions and demonstrations; returns how many."""
    if draw.random() >= PLAIN:
        predictor.signature = predictor.signature.with_instructions(instructions(predictor.signature, draw))
    others = [fields for of, fields in pool.get(name, ()) if of != example.id]
    shown = draw.sample(others, min(len(others), draw.choice([0] * MOST + list(range(1, MOST + 1)))))
    predictor.demos = [_shortened(fields, draw) for fields in shown]
    return len(shown)


def _shortened(fields: Fields, draw: random.Random) -> dict[str, object]:
    if draw.random() < HALF:
        return {name: value for name, value in fields.items() if name != "reasoning"}
    return {"augmented": True, **fields}


def _pool(task: DspyTask, examples: Sequence[Example], seed: int, good: bool) -> dict[str, list[tuple[str, Fields]]]:
    """Module -> (example, fields of one of its calls), done well or poorly; without poor ones that cannot be read."""
    found: dict[str, list[tuple[str, Fields]]] = {}
    for example in examples:
        for call, demonstration in zip(module_calls(task, example), demonstrations(task, example), strict=True):
            draw = rng.stream(seed, "pool", example.id, call.module)
            outputs = call.outputs if good else _read(task, call, poor(demonstration, example, draw).completion)
            if outputs is not None:
                found.setdefault(call.module, []).append((example.id, {**call.inputs, **outputs}))
    return found


def _read(task: DspyTask, call: Filled, completion: str) -> Fields | None:
    import dspy
    from dspy.utils.exceptions import AdapterParseError

    try:
        outputs: Fields = dspy.ChatAdapter().parse(task.predictors[call.module].signature, completion)
    except AdapterParseError:
        return None
    return outputs
