"""Messages from the mini world: support queries of buyers (Banking77), and private requests (PUPA).

A support query is what a buyer writes about a product, with its intent. In a private request somebody names themselves
and asks for a letter to a company or for a fact about one; an external model, who does not know who asks, serves it by
rule, and what it wrote is then made out in the asker's name. Splits follow the parts of the world (see `world`), so
nothing of one split is in another.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from mmrl.tasks.mini.examples import FACTS, LETTERS, UNNAMED
from scripts.tiny_model.mini.names import Draws
from scripts.tiny_model.mini.world import WORLD_SEED, make_world

SUPPORT_SIZES: Mapping[str, int] = {"train": 1200, "dev": 400, "test": 400}


@dataclass(frozen=True, slots=True)
class Intent:
    """One label."""

    reason: str
    """What a good reader notes before naming the label."""
    related: str
    """The label that it is most easily taken for."""
    texts: tuple[str, ...]
    """Ways to say it; `{x}` is a product, `{m}` its maker."""


INTENTS: Mapping[str, Intent] = {
    "refund": Intent(
        "wants the money back",
        "exchange",
        (
            "I want my money back for the {x}.",
            "Please pay me back, I do not want the {x}.",
            "The {x} is not for me. When do I get my money?",
            "I sent the {x} back to {m}. Where is my money?",
        ),
    ),
    "exchange": Intent(
        "wants another one instead",
        "refund",
        (
            "I want another {x} for this one.",
            "The {x} is not for me. May I have another one from {m}?",
            "Please take the {x} back and send another.",
            "I sent the {x} back. When do I get another?",
        ),
    ),
    "late": Intent(
        "it is on its way too long",
        "lost",
        (
            "When does my {x} arrive?",
            "I have been waiting for the {x} for weeks. Is it still coming?",
            "{m} said the {x} was sent, but it takes long.",
            "My {x} should be here by now. Is it on its way?",
        ),
    ),
    "lost": Intent(
        "it is lost",
        "late",
        (
            "My {x} was sent, but it is lost.",
            "They said the {x} was here by now. Nobody has seen it.",
            "I have been waiting for the {x}. {m} said it is lost.",
            "Nobody knows where my {x} is. It was sent weeks before.",
        ),
    ),
    "broken": Intent(
        "it does not work",
        "part",
        (
            "My {x} does not work.",
            "The {x} was broken when I opened it.",
            "I opened the {x} from {m}, and it is broken.",
            "After two days the {x} does not start.",
        ),
    ),
    "part": Intent(
        "a part is not there",
        "broken",
        (
            "A part of my {x} is not there.",
            "I opened the {x}, and a part was missing.",
            "{m} sent the {x} without one part.",
            "The {x} does not start, since a part is missing.",
        ),
    ),
    "colour": Intent(
        "the colour is another",
        "item",
        (
            "My {x} has another colour.",
            "I wanted a red {x}, and this one is blue.",
            "{m} sent me the {x} in green. I wanted it in white.",
            "The {x} is black, not grey.",
        ),
    ),
    "item": Intent(
        "it is another thing",
        "colour",
        (
            "I wanted the {x}, and {m} sent another thing.",
            "This is not the {x}.",
            "I opened it, and it is not the {x} that I wanted.",
            "Where is the {x}? You sent me another product.",
        ),
    ),
    "cancel": Intent(
        "does not want it sent",
        "address",
        (
            "Please do not send the {x}.",
            "I want to stop my order of the {x}.",
            "My order at {m} was a mistake. I do not want the {x}.",
            "Stop the {x} before it is sent.",
        ),
    ),
    "address": Intent(
        "wants it sent elsewhere",
        "cancel",
        (
            "Please send the {x} to my new home.",
            "I live in another city now. Where does the {x} go?",
            "My order of the {x} has the old address.",
            "{m} has my old home. Stop the {x} before it is sent there.",
        ),
    ),
    "warranty": Intent(
        "asks who repairs it",
        "price",
        (
            "Who repairs the {x}?",
            "How many years does {m} repair the {x}?",
            "My {x} is two years old. Is a repair free?",
            "Do I pay when the {x} needs a repair?",
        ),
    ),
    "price": Intent(
        "asks what it costs",
        "warranty",
        (
            "What does the {x} cost?",
            "How much do I pay for the {x}?",
            "Is the {x} of {m} cheaper now?",
            "I need a new {x}. What do I pay?",
        ),
    ),
}


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

OPENINGS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("I am {person} from {city}. {ask}", ("person", "city")),
    ("My name is {person} and I live in {city}. {ask}", ("person", "city")),
    ("{ask} My name is {person}, born in {year}.", ("person", "year")),
    ("{ask} I am {person} and live in {city}.", ("person", "city")),
)
"""Ways to say who asks, and which facts of them are private."""


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
