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

from mmrl.records import Example
from mmrl.tasks.mini.examples import FACTS, LETTERS, UNNAMED
from scripts.tiny_model.mini.names import WORDS, Draws
from scripts.tiny_model.mini.world import WORLD_SEED, make_world

SUPPORT_SIZES: Mapping[str, int] = {"train": 1200, "dev": 400, "test": 400}


@dataclass(frozen=True, slots=True)
class Intent:
    """A label."""

    reason: str
    """Note of a good reader before the label."""
    related: str
    """Label that it is most easily taken for."""
    texts: Sequence[str]
    """Phrasings; `{x}` is a product, `{m}` its maker."""


INTENTS: Mapping[str, Intent] = {label: Intent(**words) for label, words in WORDS["intents"].items()}


# Cached, as the other data of the world: tests and sweeps build the same task many times in one process.
@lru_cache(maxsize=8)
def make_support(split: str, seed: int = WORLD_SEED) -> tuple[Example, ...]:
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
    examples = []
    for number, (text, (label, product_name)) in enumerate(queries):
        intent = INTENTS[label]
        metadata = {"label": label, "reason": f"{product_name}: {intent.reason}", "related": intent.related}
        examples.append(Example(id=f"mini-support-{split}-{number:04d}", inputs={"text": text}, metadata=metadata))
    return tuple(examples)


REQUEST_SIZES: Mapping[str, int] = {"train": 800, "dev": 300, "test": 300}


@lru_cache(maxsize=8)
def make_requests(split: str, seed: int = WORLD_SEED) -> tuple[Example, ...]:
    """The private requests of one split of the world of `seed`, no text twice.

    Their metadata: `target`, a good response; `units`, private pieces of the text, the asker's name first; `ask`, the
    request without them.
    """
    world = make_world(seed)
    draws = Draws(seed, "requests", split)
    people, products = world.of("person", split), world.of("product", split)
    companies = world.of("company", split)
    requests: dict[str, dict[str, object]] = {}
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
        units = tuple(facts[name] for name in private)
        if not any(unit in f"{ask} {known}" for unit in units):  # nobody asks for what would give them away
            requests.setdefault(opening.format(ask=ask, **facts), {"target": reply, "units": units, "ask": ask})
    return tuple(
        Example(id=f"mini-request-{split}-{number:04d}", inputs={"user_query": text}, metadata=metadata)
        for number, (text, metadata) in enumerate(requests.items())
    )
