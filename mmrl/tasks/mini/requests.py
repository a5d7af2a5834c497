"""Private requests of the mini world, in the style of PUPA, and an external model that serves them by rule.

Somebody names themselves and asks for a letter to a company or for a fact about one. A stranger can do what is asked
without knowing who asks; what they wrote is then made out in the asker's name. People, companies and products belong to
one part of the world (see `world`), so no request of a split is in another.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from mmrl.tasks.mini.names import Draws
from mmrl.tasks.mini.world import WORLD_SEED, Entity, World, make_world

REQUEST_SIZES: Mapping[str, int] = {"train": 800, "dev": 300, "test": 300}

OPENINGS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("I am {person} from {city}. {ask}", ("person", "city")),
    ("My name is {person} and I live in {city}. {ask}", ("person", "city")),
    ("{ask} My name is {person}, born in {year}.", ("person", "year")),
    ("{ask} I am {person} and live in {city}.", ("person", "city")),
)
"""Ways to say who asks, and which facts of them are private."""

LETTERS: Mapping[str, tuple[str, str]] = {
    # what marks the request -> how it is asked, what the letter says
    "price": (
        "Write a letter to {m} that asks for the price of the {x}.",
        "Dear {m}, I would like to know the price of the {x}. Yours, {name}",
    ),
    "repair": (
        "Write a letter to {m} that asks for a repair of the {x}.",
        "Dear {m}, my {x} does not work and needs a repair. Yours, {name}",
    ),
}
FACTS: Mapping[str, tuple[str, str]] = {
    "city": ("In which city is {m} based?", "{m} is based in {value}."),
    "founder": ("Who founded {m}?", "{m} was founded by {value}."),
    "head": ("Who leads {m}?", "{m} is led by {value}."),
}
MARKS: Mapping[str, str] = {"city": "based", "founder": "founded", "head": "leads"}
"""Relation of a company -> the word that shows that a request asks for it."""
UNNAMED = "(name)"
"""Stands for the asker in a letter by somebody who does not know them."""


@dataclass(frozen=True, slots=True)
class PrivateRequest:
    """One request with all that a demonstration or a reward may use."""

    id: str
    text: str
    target: str
    """A good response."""
    units: tuple[str, ...]
    """Private pieces of the text; the asker's name is the first."""
    ask: str
    """The request without its private pieces."""


@lru_cache(maxsize=8)
def make_requests(split: str, seed: int = WORLD_SEED) -> tuple[PrivateRequest, ...]:
    """The private requests of one split of the world of `seed`, no text twice."""
    world = make_world(seed)
    draws = Draws(seed, "requests", split)
    people, products = world.of("person", split), world.of("product", split)
    companies = world.of("company", split)
    requests: dict[str, PrivateRequest] = {}
    while len(requests) < REQUEST_SIZES[split]:
        person = draws.pick(people)
        if draws.chance(0.5):
            product = draws.pick(products)
            names = {"m": world.value(product.id, "maker"), "x": product.name}
            ask, known = (text.format(name=UNNAMED, **names) for text in LETTERS[draws.pick(list(LETTERS))])
            reply = known.replace(UNNAMED, person.name)
        else:
            relation, company = draws.pick(list(FACTS)), draws.pick(companies)
            names = {"m": company.name, "value": world.value(company.id, relation)}
            ask, known = (text.format(**names) for text in FACTS[relation])
            reply = f"Dear {person.name}, {known}"
        opening, private = draws.pick(OPENINGS)
        facts = {
            "person": person.name,
            "city": world.value(person.id, "birth_city"),
            "year": world.value(person.id, "birth_year"),
        }
        text = opening.format(ask=ask, **facts)
        units = tuple(facts[name] for name in private)
        if not any(unit in f"{ask} {known}" for unit in units):  # nobody asks for what would give them away
            requests.setdefault(text, PrivateRequest("", text, reply, units, ask))
    return tuple(
        PrivateRequest(f"mini-request-{split}-{number:04d}", r.text, r.target, r.units, r.ask)
        for number, r in enumerate(requests.values())
    )


def make_external(seed: int = WORLD_SEED) -> Callable[[str], str]:
    """A deterministic stand-in for a powerful external model: it knows the companies and products of the world and
    writes the letters above, whatever else a request says; to anything else it has one polite sentence."""
    world = make_world(seed)
    companies = _by_name(world, "company")
    products = _by_name(world, "product")

    # Rules, so that the mini world needs no server and every rollout of one request gets the same response.
    def external(request: str) -> str:
        company = _named(request, companies)
        product = _named(request, products)
        words = set(re.findall(r"\w+", request.lower()))
        if company is not None and product is not None:
            # by a single word of the request: a redacted request in the policy's own words must still be understood
            for mark, (_, letter) in LETTERS.items():
                if mark in words:
                    return letter.format(m=company.name, x=product.name, name=UNNAMED)
        if company is not None:
            for relation, mark in MARKS.items():
                if mark in words:
                    return FACTS[relation][1].format(m=company.name, value=world.value(company.id, relation))
        return "I can not help with this."

    return external


def _by_name(world: World, kind: str) -> dict[str, Entity]:
    return {entity.name: entity for entity in world.entities.values() if entity.kind == kind}


def _named(text: str, entities: Mapping[str, Entity]) -> Entity | None:
    """The entity that a text names first."""
    pairs = re.findall(r"(?=\b([A-Z]\w* [A-Z]\w*))", text)
    return next((entities[name] for name in pairs if name in entities), None)
