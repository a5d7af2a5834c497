"""Reading drills for the tiny model: many questions about a few documents, in the words of the answerer's prompt.

Not a task: a stage on the way of a model that starts from random weights. A demonstration of the answerer teaches with
the three or four tokens of its answer; a drill asks ten questions of the same documents.
"""

from __future__ import annotations

from collections.abc import Iterator

from mmrl.tasks.base import Demonstration
from mmrl.tasks.mini.draws import Draws
from mmrl.tasks.search_program import MultihopQaTask
from scripts.tiny_model.mini.questions import ASKS, BRIDGES, ROLES
from scripts.tiny_model.mini.world import Entity, World, make_world

MODULE = "drill"
QUESTIONS = 8
"""Facts asked of one set of documents, besides the example's own question."""


def drills(task: MultihopQaTask, split: str, seed: int) -> Iterator[Demonstration]:
    """One drill for each example of a split of a task that lives in the mini world of `seed`."""
    world = make_world(seed)
    named = {entity.name: entity for entity in world.entities.values()}
    documents = {document.title: document for document in world.documents}
    titles = list(documents)
    for example in task.examples(split):
        draws = Draws(seed, "drill", split, example.id)
        gold = [hop["title"] for hop in example.metadata["hops"]]
        shown = list(dict.fromkeys(gold + [draws.pick(titles) for _ in range(draws.below(3))]))
        draws.shuffle(shown)
        asked = [pair for title in gold for pair in _facts(world, named[title], gold, draws)]
        draws.shuffle(asked)
        del asked[QUESTIONS:]
        asked.insert(draws.below(len(asked) + 1), (example.inputs["question"], example.metadata["answers"][0]))
        (question, answer), *more = asked
        found = [{"title": documents[title].title, "text": documents[title].text} for title in shown]
        yield Demonstration(
            module=MODULE,
            messages=task.program.answerer(question, found),
            completion="\n".join([answer, *(f"Now answer: {other}\n{value}" for other, value in more)]),
        )


def _facts(world: World, entity: Entity, gold: list[str], draws: Draws) -> Iterator[tuple[str, str]]:
    """Questions and answers about one entity, and through it about another one whose document is shown too."""
    for relation in entity.facts:
        key, value = f"{entity.kind}.{relation}", world.value(entity.id, relation)
        forms = [*ASKS[key][1], f"{ASKS[key][0]}?"] if key in ASKS else []
        forms += [f"{ROLES[key][0]}?"] if key in ROLES else []
        if forms:
            yield draws.pick(forms).format(x=entity.name), value
        if key in BRIDGES and value in gold:
            bridge = entity.facts[relation]
            for ask in BRIDGES[key]:
                phrase = draws.pick(ROLES[key][1]).format(x=entity.name)
                yield draws.pick(ASKS[ask][1]).format(x=phrase), world.value(bridge, ask.split(".")[1])
