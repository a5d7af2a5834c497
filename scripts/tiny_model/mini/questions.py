"""Questions and claims about the mini world: bridge, comparison (HotpotQA), single-hop (NQ), claims (HoVer).

A bridge question names a subject and asks for a fact of something that only the subject's document identifies (the
director of a film). The bridge's document names the subject too, so both can be reached from the question. A comparison
asks for a fact of two named things, a single-hop question for a fact of one. A claim names a work, company or product
and a country: three documents in a chain (work, person, city) say whether it holds. Splits follow the parts of the
world (see `world`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from mmrl.tasks.mini.draws import Draws
from scripts.tiny_model.mini.world import WORLD_SEED, Entity, World, make_world

SIZES: Mapping[str, int] = {"train": 2400, "dev": 400, "test": 400}
COMPARISON_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class Hop:
    """One step of the reasoning."""

    query: str
    """A self-contained sub-question."""
    title: str
    """Title of the document that answers it."""
    answer: str


@dataclass(frozen=True, slots=True)
class Question:
    """One question with all that a demonstration or a reward may use."""

    id: str
    text: str
    answer: str
    kind: str
    """`bridge` or `comparison`, as in HotpotQA."""
    form: str
    """Which template family: `film.director.birth_city`, `person.birth_year`, ..."""
    hops: tuple[Hop, ...]
    entities: tuple[str, ...]
    """Ids of subjects and bridges."""


# Queries and phrases are plain and few, so that a small model meets each of them often; what it has to learn is to
# search, not to understand paraphrases.
ROLES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    # subject kind.relation -> (sub-question of the first hop, noun phrases for the bridge)
    "film.director": (
        "Who directed the film {x}",
        ("the director of the film {x}", "the person who directed {x}", "the film director of {x}"),
    ),
    "film.star": (
        "Who is the star of the film {x}",
        ("the star of the film {x}", "the person who starred in {x}", "the star of {x}"),
    ),
    "book.writer": (
        "Who wrote the book {x}",
        ("the writer of the book {x}", "the person who wrote {x}", "the writer of {x}"),
    ),
    "book.illustrator": (
        "Who illustrated the book {x}",
        ("the illustrator of the book {x}", "the person who illustrated {x}", "the illustrator of {x}"),
    ),
    "company.founder": ("Who founded {x}", ("the founder of {x}", "the person who founded the company {x}")),
    "company.head": ("Who leads {x}", ("the head of {x}", "the person who leads the company {x}")),
    "company.city": ("In which city is {x} based", ("the city where {x} is based", "the home city of {x}")),
    "product.designer": ("Who designed the {x}", ("the designer of the {x}", "the person who designed the {x}")),
    "product.maker": ("Which company makes the {x}", ("the company that makes the {x}", "the maker of the {x}")),
    "person.birth_city": ("In which city was {x} born", ("the city where {x} was born", "the birth city of {x}")),
}

ASKS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    # kind.relation -> (sub-question, phrasings of the question); {x} is a name or a noun phrase
    "person.birth_city": (
        "In which city was {x} born",
        ("In which city was {x} born?", "Where was {x} born?", "What is the birth city of {x}?"),
    ),
    "person.birth_year": ("When was {x} born", ("When was {x} born?", "In which year was {x} born?")),
    "person.instrument": (
        "Which instrument does {x} play",
        ("Which instrument does {x} play?", "What instrument is played by {x}?"),
    ),
    "company.city": ("In which city is {x} based", ("In which city is {x} based?", "Where is {x} based?")),
    "company.founded": ("When was {x} founded", ("When was {x} founded?", "In which year was {x} founded?")),
    "company.founder": ("Who founded {x}", ("Who founded {x}?", "Who is the founder of {x}?")),
    "city.country": ("In which country is {x}", ("In which country is {x}?", "To which country does {x} belong?")),
    "city.river": ("On which river is {x}", ("On which river is {x}?", "Which river flows through {x}?")),
    "film.year": ("When was the film {x} made", ()),
    "film.genre": ("What genre is the film {x}", ()),
    "book.year": ("When was the book {x} published", ()),
}

BRIDGES: Mapping[str, tuple[str, ...]] = {
    # relation that leads to the bridge -> kind.relation that the bridge is about
    "film.director": ("person.birth_city", "person.birth_year", "person.instrument"),
    "film.star": ("person.birth_city", "person.birth_year", "person.instrument"),
    "book.writer": ("person.birth_city", "person.birth_year", "person.instrument"),
    "book.illustrator": ("person.birth_city", "person.birth_year", "person.instrument"),
    "company.founder": ("person.birth_city", "person.birth_year", "person.instrument"),
    "company.head": ("person.birth_city", "person.birth_year", "person.instrument"),
    "product.designer": ("person.birth_city", "person.birth_year", "person.instrument"),
    "product.maker": ("company.city", "company.founded", "company.founder"),
    "company.city": ("city.country", "city.river"),
    "person.birth_city": ("city.country", "city.river"),
}

EARLIER: Mapping[str, tuple[str, ...]] = {
    "film.year": ("Which film is older, {x} or {y}?", "Which film came out first, {x} or {y}?"),
    "book.year": ("Which book is older, {x} or {y}?", "Which book was published first, {x} or {y}?"),
    "company.founded": ("Which company is older, {x} or {y}?", "Which company was founded first, {x} or {y}?"),
    "person.birth_year": ("Who is older, {x} or {y}?", "Who was born first, {x} or {y}?"),
}
# The answers are yes and no, which the yes/no rule of the official metric treats apart (`metrics.f1`).
SAME: Mapping[str, tuple[str, ...]] = {
    "person.birth_city": ("Were {x} and {y} born in the same city?", "Do {x} and {y} come from the same city?"),
    "person.instrument": ("Do {x} and {y} play the same instrument?", "Is the instrument of {x} also that of {y}?"),
    "film.genre": ("Are the films {x} and {y} of the same genre?", "Do {x} and {y} have the same film genre?"),
    "city.country": ("Are {x} and {y} in the same country?", "Do {x} and {y} lie in one country?"),
}

SINGLE_SIZES: Mapping[str, int] = {"train": 1600, "dev": 240, "test": 240}

SINGLE_FORMS: Mapping[str, tuple[str, ...]] = {
    # kind.relation -> phrasings where `ASKS` has none for a named thing
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
SINGLES: tuple[str, ...] = (*SINGLE_FORMS, *(ask for ask, (_, forms) in ASKS.items() if forms))
"""kind.relation of every single-hop question."""


@lru_cache(maxsize=8)
def make_questions(split: str, seed: int = WORLD_SEED) -> tuple[Question, ...]:
    """The questions of one split of the world of `seed`, in a fixed order; cached in the process."""
    world = make_world(seed)
    draws = Draws(seed, "questions", split)
    bridges = _bridges(world, split, draws)
    # All of them are made before the cut, so that the kinds keep their natural shares.
    draws.shuffle(bridges)
    comparisons = round(SIZES[split] * COMPARISON_SHARE)
    questions = bridges[: SIZES[split] - comparisons] + _comparisons(world, split, draws, comparisons)
    draws.shuffle(questions)
    return tuple(
        Question(f"mini-{split}-{number:04d}", q.text, q.answer, q.kind, q.form, q.hops, q.entities)
        for number, q in enumerate(questions)
    )


def _bridges(world: World, part: str, draws: Draws) -> list[Question]:
    """Every (subject, role, fact) of the part once, in one drawn phrasing."""
    questions = []
    for role, asks in BRIDGES.items():
        kind, relation = role.split(".")
        first_query, phrases = ROLES[role]
        for subject in world.of(kind, part):
            bridge = world.entities[subject.facts[relation]]
            # Only where the bridge's document names the subject can both documents be retrieved from the question.
            if subject.id not in bridge.mentions:
                continue
            for ask in asks:
                second_query, forms = ASKS[ask]
                answer = world.value(bridge.id, ask.split(".")[1])
                text = draws.pick(forms).format(x=draws.pick(phrases).format(x=subject.name))
                hops = (
                    Hop(first_query.format(x=subject.name), subject.name, bridge.name),
                    Hop(second_query.format(x=phrases[0].format(x=subject.name)), bridge.name, answer),
                )
                form = f"{role}.{ask.split('.')[1]}"
                questions.append(Question("", text, answer, "bridge", form, hops, (subject.id, bridge.id)))
    return questions


def _comparisons(world: World, part: str, draws: Draws, count: int) -> list[Question]:
    """`count` different comparisons: six of ten which-is-earlier, the others yes/no in equal shares."""
    questions: dict[str, Question] = {}
    while len(questions) < count:
        number = len(questions)
        if number % 10 < 6:
            question = _earlier(world, part, draws)
        else:
            question = _same(world, part, draws, yes_or_no="yes" if number % 2 else "no")
        if question is not None:
            questions.setdefault(question.text, question)
    return list(questions.values())


def _earlier(world: World, part: str, draws: Draws) -> Question | None:
    form = draws.pick(list(EARLIER))
    kind, relation = form.split(".")
    entities = world.of(kind, part)
    x, y = draws.pick(entities), draws.pick(entities)
    years = [int(entity.facts[relation]) for entity in (x, y)]
    # neither is earlier; also covers x and y being the same
    if years[0] == years[1]:
        return None
    return _compare(world, form, draws.pick(EARLIER[form]), x, y, (x if years[0] < years[1] else y).name)


def _same(world: World, part: str, draws: Draws, yes_or_no: str) -> Question | None:
    form = draws.pick(list(SAME))
    kind, relation = form.split(".")
    entities = world.of(kind, part)
    x, y = draws.pick(entities), draws.pick(entities)
    answer = "yes" if x.facts[relation] == y.facts[relation] else "no"
    if x.id == y.id or answer != yes_or_no:
        return None
    return _compare(world, form, draws.pick(SAME[form]), x, y, answer)


def _compare(world: World, form: str, template: str, x: Entity, y: Entity, answer: str) -> Question:
    query, relation = ASKS[form][0], form.split(".")[1]
    hops = tuple(Hop(query.format(x=entity.name), entity.name, world.value(entity.id, relation)) for entity in (x, y))
    return Question(
        "", template.format(x=x.name, y=y.name), answer, "comparison", f"compare.{form}", hops, (x.id, y.id)
    )


@lru_cache(maxsize=8)
def make_singles(split: str, seed: int = WORLD_SEED) -> tuple[Question, ...]:
    """The single-hop questions of one split of the world of `seed`, in a fixed order; cached in the process."""
    world = make_world(seed)
    draws = Draws(seed, "singles", split)
    questions = []
    for form in SINGLES:
        kind, relation = form.split(".")
        forms = SINGLE_FORMS.get(form) or ASKS[form][1]
        query = (ASKS.get(form) or ROLES[form])[0]
        for subject in world.of(kind, split):
            answer = world.value(subject.id, relation)
            hop = Hop(query.format(x=subject.name), subject.name, answer)
            text = draws.pick(forms).format(x=subject.name)
            questions.append(Question("", text, answer, "single", form, (hop,), (subject.id,)))
    draws.shuffle(questions)
    return tuple(
        Question(f"mini-single-{split}-{number:04d}", q.text, q.answer, q.kind, q.form, q.hops, q.entities)
        for number, q in enumerate(questions[: SINGLE_SIZES[split]])
    )


def in_steps(question: Question) -> Question:
    """The question with a second hop whose query names the result of the first; only bridges have such a hop."""
    if question.kind != "bridge":
        return question
    role, _, fact = question.form.rpartition(".")
    first, second = question.hops
    ask = next(ask for ask in BRIDGES[role] if ask.endswith(f".{fact}"))
    second = Hop(ASKS[ask][0].format(x=second.title), second.title, second.answer)
    return Question(
        question.id, question.text, question.answer, question.kind, question.form, (first, second), question.entities
    )


CLAIM_SIZES: Mapping[str, int] = {"train": 800, "dev": 300, "test": 300}
CLAIM_ROLES = (
    "film.director",
    "film.star",
    "book.writer",
    "book.illustrator",
    "company.founder",
    "company.head",
    "product.designer",
)
"""Facts that lead from a subject to a person."""
# None of the forms names the city: the three documents must be read in turn.
FORMS = ("{who} was born in {country}.", "{who} comes from {country}.", "{who} is from {country}.")


@dataclass(frozen=True, slots=True)
class Claim:
    """One claim with its chain of documents."""

    id: str
    text: str
    label: str
    """`SUPPORTED` or `NOT_SUPPORTED`, as HoVer writes them."""
    titles: tuple[str, str, str]
    """Subject, person, city: the gold documents."""
    notes: tuple[str, str, str]
    """What each of them says about the claim."""


@lru_cache(maxsize=8)
def make_claims(split: str, seed: int = WORLD_SEED) -> tuple[Claim, ...]:
    """The claims of one split of the world of `seed`, no text twice, half of them supported."""
    world = make_world(seed)
    draws = Draws(seed, "claims", split)
    subjects = {role: world.of(role.split(".")[0], split) for role in CLAIM_ROLES}
    countries = [entity.name for entity in world.of("country", "all")]
    claims: dict[str, Claim] = {}
    while len(claims) < CLAIM_SIZES[split]:
        role = draws.pick(CLAIM_ROLES)
        subject = draws.pick(subjects[role])
        person = world.entities[subject.facts[role.split(".")[1]]]
        city = world.entities[person.facts["birth_city"]]
        country = world.value(city.id, "country")
        # by the number that have been accepted, so that labels stay in equal shares whatever is rejected
        supported = len(claims) % 2 == 0
        claimed = country if supported else draws.pick([name for name in countries if name != country])
        phrases = [phrase.format(x=subject.name) for phrase in ROLES[role][1]]
        text = draws.pick(FORMS).format(who=draws.pick(phrases), country=claimed)
        claim = Claim(
            "",
            text[0].upper() + text[1:],
            "SUPPORTED" if supported else "NOT_SUPPORTED",
            (subject.name, person.name, city.name),
            (
                f"{phrases[0][0].upper()}{phrases[0][1:]} is {person.name}.",
                f"{person.name} was born in {city.name}.",
                f"{city.name} is in {country}.",
            ),
        )
        # A claim whose form happens to name the person would skip a hop.
        if person.name not in text:
            claims.setdefault(claim.text, claim)
    return tuple(
        Claim(f"mini-claim-{split}-{number:04d}", c.text, c.label, c.titles, c.notes)
        for number, c in enumerate(claims.values())
    )
