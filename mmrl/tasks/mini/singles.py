"""Single-hop questions about the mini world, in the style of NQ: one fact of one named thing.

Splits follow the parts of the world like those of `questions`, so they share no subject and no named answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from mmrl.tasks.mini.names import Draws
from mmrl.tasks.mini.questions import ASKS, BRIDGES, ROLES, Hop, Question, make_questions
from mmrl.tasks.mini.world import WORLD_SEED, make_world

SINGLE_SIZES: Mapping[str, int] = {"train": 1600, "dev": 240, "test": 240}

FORMS: Mapping[str, tuple[str, ...]] = {
    # kind.relation -> phrasings where `questions` has none for a named thing
    "film.director": ("Who directed the film {x}?", "Who is the director of the film {x}?"),
    "film.star": ("Who is the star of the film {x}?", "Who starred in {x}?"),
    "film.year": ("When was the film {x} made?", "In which year was the film {x} made?"),
    "book.writer": ("Who wrote the book {x}?", "Who is the writer of {x}?"),
    "book.illustrator": ("Who illustrated the book {x}?", "Who is the illustrator of {x}?"),
    "book.year": ("When was the book {x} published?", "In which year was {x} published?"),
    "company.head": ("Who leads {x}?", "Who is the head of {x}?"),
    "product.designer": ("Who designed the {x}?", "Who is the designer of the {x}?"),
    "product.maker": ("Which company makes the {x}?", "Who is the maker of the {x}?"),
}
SINGLES: tuple[str, ...] = (*FORMS, *(ask for ask, (_, forms) in ASKS.items() if forms))
"""kind.relation of every single-hop question."""


@lru_cache(maxsize=8)
def make_singles(split: str, seed: int = WORLD_SEED) -> tuple[Question, ...]:
    """The single-hop questions of one split of the world of `seed`, in a fixed order; cached in the process."""
    world = make_world(seed)
    draws = Draws(seed, "singles", split)
    questions = []
    for asked in SINGLES:
        kind, relation = asked.split(".")
        forms = FORMS.get(asked) or ASKS[asked][1]
        query = (ASKS.get(asked) or ROLES[asked])[0]
        for subject in world.of(kind, split):
            answer = world.value(subject.id, relation)
            hop = Hop(query.format(x=subject.name), subject.name, answer)
            text = draws.pick(forms).format(x=subject.name)
            questions.append(Question("", text, answer, "single", asked, (hop,), (subject.id,)))
    draws.shuffle(questions)
    return tuple(
        Question(f"mini-single-{split}-{number:04d}", q.text, q.answer, q.kind, q.form, q.hops, q.entities)
        for number, q in enumerate(questions[: SINGLE_SIZES[split]])
    )


@lru_cache(maxsize=8)
def make_bridges(split: str, seed: int = WORLD_SEED) -> tuple[Question, ...]:
    """Two-hop questions, half as many as single ones: bridges of `questions`, to be answered one search at a time."""
    bridges = [question for question in make_questions(split, seed) if question.kind == "bridge"]
    return tuple(in_steps(question) for question in bridges[: SINGLE_SIZES[split] // 2])


def in_steps(question: Question) -> Question:
    """The question with a second hop whose query names what the first one found; only bridges have such a hop."""
    if question.kind != "bridge":
        return question
    role, _, fact = question.form.rpartition(".")
    first, second = question.hops
    ask = next(ask for ask in BRIDGES[role] if ask.endswith(f".{fact}"))
    second = Hop(ASKS[ask][0].format(x=second.title), second.title, second.answer)
    return Question(
        question.id, question.text, question.answer, question.kind, question.form, (first, second), question.entities
    )
