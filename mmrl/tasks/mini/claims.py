"""Claims about the mini world, in the style of HoVer: three documents in a chain say whether a claim holds.

A claim names a work, company or product and a country: the document of the work names a person, that of the person a
city, that of the city its country. Splits follow the parts of the world (see `world`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from mmrl.tasks.mini.names import Draws
from mmrl.tasks.mini.questions import ROLES
from mmrl.tasks.mini.world import WORLD_SEED, make_world

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
