"""Support queries of the mini world, in the style of Banking77: what a buyer writes about a product, and the intent.

Products belong to one part of the world (see `world`), and every query names one, so no query of a split is in another.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from mmrl.tasks.mini.names import Draws
from mmrl.tasks.mini.world import WORLD_SEED, make_world

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
