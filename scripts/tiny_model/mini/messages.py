"""Messages from the mini world: support queries of buyers (Banking77), and private requests (PUPA).

A support query is what a buyer writes about a product, with its intent. In a private request somebody names themselves
and asks for a letter to a company or for a fact about one; an external model, who does not know who asks, serves it by
rule, and what it wrote is then made out in the asker's name. Splits follow the parts of the world (see `world`), so
nothing of one split is in another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from mmrl.tasks.mini.examples import FACTS, LETTERS, UNNAMED
from scripts.tiny_model.mini.names import WORDS, Draws
from scripts.tiny_model.mini.world import WORLD_SEED, make_world

SUPPORT_SIZES: Mapping[str, int] = {"train": 1200, "dev": 400, "test": 400}


@dataclass(frozen=True, slots=True)
class Intent:
    """One label."""

    reason: str
    """What a good reader notes before naming the label."""
    related: str
    """The label that it is most easily taken for."""
    texts: Sequence[str]
    """Ways to say it; `{x}` is a product, `{m}` its maker."""


INTENTS: Mapping[str, Intent] = {label: Intent(**words) for label, words in WORDS["intents"].items()}


@dataclass(frozen=True, slots=True)
class SupportQuery:
    """One query with its intent."""

    id: str
    text: str
    label: str
    product: str


# Cached, as the other data of the world: tests and sweeps build the same task many times in one process.
@lru_cache(maxsize=8)
def make_support(split: str, seed: int = WORLD_SEED) -> tuple[SupportQuery, ...]:
    """The support queries of one split of the world of `seed`, no text twice, labels in equal shares."""
    world = make_world(seed)
    draws = Draws(seed, "support", split)
    products = world.of("product", split)
    queries_of: dict[str, tuple[str, str]] = {}
    labels = list(INTENTS)
    while len(queries_of) < SUPPORT_SIZES[split]:
        label = labels[len(queries_of) % len(labels)]
        product = draws.pick(products)
        text = draws.pick(INTENTS[label].texts).format(x=product.name, m=world.value(product.id, "maker"))
        queries_of.setdefault(text, (label, product.name))
    queries = list(queries_of.items())
    # labels were drawn in turn
    draws.shuffle(queries)
    return tuple(
        SupportQuery(f"mini-support-{split}-{number:04d}", text, label, product)
        for number, (text, (label, product)) in enumerate(queries)
    )


REQUEST_SIZES: Mapping[str, int] = {"train": 800, "dev": 300, "test": 300}


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
            ask, known = (text.format(**names) for text in FACTS[relation][:2])
            reply = f"Dear {person.name}, {known}"
        opening, private = draws.pick(WORDS["openings"])
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
