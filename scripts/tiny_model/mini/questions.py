"""Questions and claims about the mini world: bridge, comparison (HotpotQA), single-hop (NQ), claims (HoVer).

A bridge question names a subject and asks for a fact of something that only the subject's document identifies (the
director of a film). The bridge's document names the subject too, so both can be reached from the question. A comparison
asks for a fact of two named things, a single-hop question for a fact of one. A claim names a work, company or product
and a country: three documents in a chain (work, person, city) say whether it holds. Splits follow the parts of the
world (see `world`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from mmrl.records import Example
from mmrl.tasks.mini.draws import Draws
from scripts.tiny_model.mini.names import WORDS
from scripts.tiny_model.mini.world import WORLD_SEED, Entity, World, make_world

SIZES: Mapping[str, int] = {"train": 2400, "dev": 400, "test": 400}
COMPARISON_SHARE = 0.25


Record = dict[str, Any]
"""A question as it is written: `id`, `inputs`, `metadata`; of a bridge also `second_query`, the query of its second hop
that names the result of the first. The metadata's `hops` are self-contained sub-questions, each with the title of the
document that answers it; `type` is HotpotQA's, `form` the template family: `film.director.birth_city`."""


ROLES: Mapping[str, tuple[str, Sequence[str]]] = WORDS["roles"]
ASKS: Mapping[str, tuple[str, Sequence[str]]] = WORDS["asks"]
BRIDGES: Mapping[str, Sequence[str]] = WORDS["bridges"]
EARLIER: Mapping[str, Sequence[str]] = WORDS["earlier"]
SAME: Mapping[str, Sequence[str]] = WORDS["same"]

SINGLE_SIZES: Mapping[str, int] = {"train": 1600, "dev": 240, "test": 240}

SINGLE_FORMS: Mapping[str, Sequence[str]] = WORDS["singles"]
SINGLES: tuple[str, ...] = (*SINGLE_FORMS, *(ask for ask, (_, forms) in ASKS.items() if forms))
"""kind.relation of every single-hop question."""


@lru_cache(maxsize=8)
def make_questions(split: str, seed: int = WORLD_SEED) -> tuple[Record, ...]:
    """The questions of one split of the world of `seed`, in a fixed order; cached in the process."""
    world = make_world(seed)
    draws = Draws(seed, "questions", split)
    bridges = _bridges(world, split, draws)
    # All of them are made before the cut, so that the kinds keep their natural shares.
    draws.shuffle(bridges)
    comparisons = round(SIZES[split] * COMPARISON_SHARE)
    questions = bridges[: SIZES[split] - comparisons] + _comparisons(world, split, draws, comparisons)
    draws.shuffle(questions)
    return _numbered(f"mini-{split}", questions)


def _numbered(name: str, questions: Sequence[Record]) -> tuple[Record, ...]:
    return tuple({"id": f"{name}-{number:04d}", **question} for number, question in enumerate(questions))


def _question(text: str, answer: str, kind: str, form: str, hops: Sequence[dict[str, str]], **more: str) -> Record:
    titles = [hop["title"] for hop in hops]
    metadata = {"answers": [answer], "titles": titles, "type": kind, "form": form, "hops": list(hops)}
    return {"inputs": {"question": text}, "metadata": metadata, **more}


def _hop(query: str, title: str, answer: str) -> dict[str, str]:
    return {"query": query, "title": title, "answer": answer}


def _bridges(world: World, part: str, draws: Draws) -> list[Record]:
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
                    _hop(first_query.format(x=subject.name), subject.name, bridge.name),
                    _hop(second_query.format(x=phrases[0].format(x=subject.name)), bridge.name, answer),
                )
                form, by_name = f"{role}.{ask.split('.')[1]}", second_query.format(x=bridge.name)
                questions.append(_question(text, answer, "bridge", form, hops, second_query=by_name))
    return questions


def _comparisons(world: World, part: str, draws: Draws, count: int) -> list[Record]:
    """`count` different comparisons: six of ten which-is-earlier, the others yes/no in equal shares."""
    questions: dict[str, Record] = {}
    while len(questions) < count:
        number = len(questions)
        if number % 10 < 6:
            question = _earlier(world, part, draws)
        else:
            question = _same(world, part, draws, yes_or_no="yes" if number % 2 else "no")
        if question is not None:
            questions.setdefault(question["inputs"]["question"], question)
    return list(questions.values())


def _earlier(world: World, part: str, draws: Draws) -> Record | None:
    form = draws.pick(list(EARLIER))
    kind, relation = form.split(".")
    entities = world.of(kind, part)
    x, y = draws.pick(entities), draws.pick(entities)
    years = [int(entity.facts[relation]) for entity in (x, y)]
    # neither is earlier; also covers x and y being the same
    if years[0] == years[1]:
        return None
    return _compare(world, form, draws.pick(EARLIER[form]), x, y, (x if years[0] < years[1] else y).name)


def _same(world: World, part: str, draws: Draws, yes_or_no: str) -> Record | None:
    form = draws.pick(list(SAME))
    kind, relation = form.split(".")
    entities = world.of(kind, part)
    x, y = draws.pick(entities), draws.pick(entities)
    answer = "yes" if x.facts[relation] == y.facts[relation] else "no"
    if x.id == y.id or answer != yes_or_no:
        return None
    return _compare(world, form, draws.pick(SAME[form]), x, y, answer)


def _compare(world: World, form: str, template: str, x: Entity, y: Entity, answer: str) -> Record:
    query, relation = ASKS[form][0], form.split(".")[1]
    hops = [_hop(query.format(x=entity.name), entity.name, world.value(entity.id, relation)) for entity in (x, y)]
    return _question(template.format(x=x.name, y=y.name), answer, "comparison", f"compare.{form}", hops)


@lru_cache(maxsize=8)
def make_singles(split: str, seed: int = WORLD_SEED) -> tuple[Record, ...]:
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
            hop = _hop(query.format(x=subject.name), subject.name, answer)
            text = draws.pick(forms).format(x=subject.name)
            questions.append(_question(text, answer, "single", form, [hop]))
    draws.shuffle(questions)
    return _numbered(f"mini-single-{split}", questions[: SINGLE_SIZES[split]])


CLAIM_SIZES: Mapping[str, int] = {"train": 800, "dev": 300, "test": 300}


@lru_cache(maxsize=8)
def make_claims(split: str, seed: int = WORLD_SEED) -> tuple[Example, ...]:
    """The claims of one split of the world of `seed`, no text twice, half of them supported.

    Their metadata: `titles` of the gold documents (subject, person, city); `label`, as HoVer writes it; `notes`, what
    each document says about the claim.
    """
    world = make_world(seed)
    draws = Draws(seed, "claims", split)
    subjects = {role: world.of(role.split(".")[0], split) for role in WORDS["claim_roles"]}
    countries = [entity.name for entity in world.of("country", "all")]
    claims: dict[str, dict[str, object]] = {}
    while len(claims) < CLAIM_SIZES[split]:
        role = draws.pick(WORDS["claim_roles"])
        subject = draws.pick(subjects[role])
        person = world.entities[subject.facts[role.split(".")[1]]]
        city = world.entities[person.facts["birth_city"]]
        country = world.value(city.id, "country")
        # by the number that have been accepted, so that labels stay in equal shares whatever is rejected
        supported = len(claims) % 2 == 0
        claimed = country if supported else draws.pick([name for name in countries if name != country])
        phrases = [phrase.format(x=subject.name) for phrase in ROLES[role][1]]
        text = draws.pick(WORDS["claims"]).format(who=draws.pick(phrases), country=claimed)
        notes = (
            f"{phrases[0][0].upper()}{phrases[0][1:]} is {person.name}.",
            f"{person.name} was born in {city.name}.",
            f"{city.name} is in {country}.",
        )
        # A claim whose form happens to name the person would skip a hop.
        if person.name not in text:
            titles, label = (subject.name, person.name, city.name), "SUPPORTED" if supported else "NOT_SUPPORTED"
            metadata = {"titles": titles, "label": label, "hops": 3, "notes": notes}
            claims.setdefault(text[0].upper() + text[1:], metadata)
    return tuple(
        Example(id=f"mini-claim-{split}-{number:04d}", inputs={"claim": text}, metadata=metadata)
        for number, (text, metadata) in enumerate(claims.items())
    )
