"""Facts that `tiny_direct` learns: those of the world of runs, one at a time and never a run's questions.

The task `qa_direct` answers from memory, so it can only be played by a model that has one. A language model has it from
pretraining; here it is taught: for each entity what is known of it, and each fact as an answer after its step.
Questions that join two facts are demonstrated from the train split alone.
"""

from __future__ import annotations

from collections.abc import Iterator

from mmrl.tasks.agents.qa_direct import DirectQaTask
from mmrl.tasks.base import Demonstration
from mmrl.tasks.mini.draws import Draws
from scripts.tiny_model.mini.questions import ASKS, ROLES, SINGLE_FORMS
from scripts.tiny_model.mini.world import Entity, World, make_world

LISTS = "facts"
STEPS = "fact"
"""Modules of the demonstrations, for the shares of phases: all facts of an entity; one fact as a question."""
ORDERS = 3
"""Orders in which the facts of an entity are listed."""


def facts(task: DirectQaTask, seed: int) -> Iterator[Demonstration]:
    """All facts of the world of `seed`, in the words of the thoughts of the demonstrations of `qa_direct`."""
    world = make_world(seed)
    for entity in world.entities.values():
        draws = Draws(seed, "facts", entity.id)
        known = list(_known(world, entity, draws))
        for _ in range(ORDERS):
            draws.shuffle(known)
            asked = task.program.question(f"What is known of {entity.name}?", chain_of_thought=True)
            yield Demonstration(
                module=LISTS, messages=asked, completion=" ".join(f"{query}: {value}." for query, _, value in known)
            )
        for query, question, value in known:
            asked = task.program.question(question, chain_of_thought=True)
            completion = f"{query}: {value}.\nAnswer: {value}"
            yield Demonstration(module=STEPS, messages=asked, completion=completion)
            asked = task.program.question(question, chain_of_thought=False)
            yield Demonstration(module=STEPS, messages=asked, completion=value)


def _known(world: World, entity: Entity, draws: Draws) -> Iterator[tuple[str, str, str]]:
    """Query as in a thought, question, answer."""
    for relation in entity.facts:
        key, value = f"{entity.kind}.{relation}", world.value(entity.id, relation)
        query = (ASKS.get(key) or ROLES.get(key) or (None,))[0]
        if query is not None:
            form = draws.pick(SINGLE_FORMS.get(key) or ASKS[key][1] or (f"{query}?",))
            yield query.format(x=entity.name), form.format(x=entity.name), value
