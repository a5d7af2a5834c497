"""The mini world: invented entities, the facts that hold of them, and one short document for each.

Everything that asks something about the world (`questions`; later claims, support queries, private requests) reads
entities and facts here and never the other way round.

Every entity but the countries belongs to one of three *parts* (train, dev, test), and facts link entities of one part
only. Questions of a split are about its part alone, so the splits share no person, work, company, product or city:
neither as subject, nor as bridge, nor as answer. They share the countries and the values of closed lists (years,
genres, instruments, rivers), the words of which names are made, and the corpus, which is one for all (open book).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice

from mmrl.retrieval.base import Document
from scripts.tiny_model.mini.names import WORDS, Draws, invent_words

WORLD_SEED = 0
"""Seed of the world that the shipped tiny model was warmed up on; a run's seed does not change it."""

PARTS: Mapping[str, float] = {"train": 0.64, "dev": 0.18, "test": 0.18}
COUNTS: Mapping[str, int] = {"city": 100, "film": 220, "book": 110, "company": 100, "product": 140, "person": 500}
COUNTRIES = 12
RIVERS = 24
CAPITALS_PART = "train"
"""The part in which every country has a city: its capital."""
CITY_YEARS, BIRTH_YEARS, WORK_YEARS = (1100, 1799), (1900, 1954), (1972, 2024)


@dataclass(frozen=True, slots=True)
class Entity:
    """A thing of the world."""

    id: str
    """`<kind>-<number>`."""
    kind: str
    """`country`, `city`, `person`, `film`, `book`, `company` or `product`."""
    name: str
    """Unique in the world; the title of its document."""
    part: str
    """`train`, `dev`, `test`; `all` for countries."""
    facts: dict[str, str]
    """Relation -> id of an entity, or a literal (years, genres): see `World.value`."""
    mentions: list[str] = field(default_factory=list)
    """Ids of entities that its document names although none of its facts does (works of a person, ...)."""


@dataclass(frozen=True, slots=True)
class World:
    """All entities with their documents."""

    entities: Mapping[str, Entity]
    documents: tuple[Document, ...] = field(repr=False)

    def value(self, entity: str, relation: str) -> str:
        """The fact as it is written in documents: a name or a literal."""
        fact = self.entities[entity].facts[relation]
        return self.entities[fact].name if fact in self.entities else fact

    def of(self, kind: str, part: str) -> list[Entity]:
        """Entities of a kind and part, in a fixed order."""
        return [entity for entity in self.entities.values() if entity.kind == kind and entity.part == part]


@lru_cache(maxsize=2)
def make_world(seed: int = WORLD_SEED) -> World:
    """Draw the world of `seed`: equal on every machine, cached in the process."""
    builder = _Builder(seed)
    builder.countries()
    for part in PARTS:
        builder.populate(part)
    entities = builder.entities
    for city in [entity for entity in entities.values() if entity.kind == "city"]:
        # A capital is the first city of its country; `CAPITALS_PART` gives each country one.
        entities[city.facts["country"]].facts.setdefault("capital", city.id)
    documents = tuple(_document(entities, entity, Draws(seed, "document", entity.id)) for entity in entities.values())
    return World(entities, documents)


# The order of draws is the world: any change here gives other names and facts, and the shipped models, whose words
# are these, would no longer fit.
class _Builder:
    """Draws names first, then the facts of one part at a time."""

    def __init__(self, seed: int):
        self.draws = Draws(seed, "facts")
        sizes = (COUNTRIES, COUNTRIES, RIVERS, COUNTS["city"], 60, 120, 120, 50, 60)
        # All worlds are written in the same words and differ in who is called what and which facts hold: a model
        # that was warmed up on other worlds knows the words of this one, as a language model would, and no fact of it.
        words = iter(invent_words(Draws(WORLD_SEED, "words"), sum(sizes)))
        pools = [list(islice(words, size)) for size in sizes]
        self.country_names, self.languages, self.rivers, city_names, firsts, lasts, titles, makers, brands = pools
        self.city_names = iter(city_names)
        self.names = {
            "person": self._combine("{} {}", firsts, lasts),
            "film": self._combine("{} {}", WORDS["film_words"], titles),
            "book": self._combine("{} of {}", WORDS["book_words"], titles),
            "company": self._combine("{1} {0}", WORDS["company_words"], makers),
            "product": self._combine("{1} {0}", WORDS["product_words"], brands),
        }
        self.entities: dict[str, Entity] = {}

    def _combine(self, pattern: str, left: list[str], right: list[str]) -> list[str]:
        names = [pattern.format(a, b) for a in left for b in right]
        self.draws.shuffle(names)
        return names

    def add(self, kind: str, part: str, name: str, **facts: str) -> str:
        entity = f"{kind}-{sum(other.kind == kind for other in self.entities.values())}"
        self.entities[entity] = Entity(entity, kind, name, part, facts)
        return entity

    def countries(self) -> None:
        for name, language in zip(self.country_names, self.languages, strict=True):
            self.add("country", "all", name, language=language)

    def populate(self, part: str) -> None:
        """Cities, people and what people made, all linked inside `part`."""
        draws, size = self.draws, {kind: round(count * PARTS[part]) for kind, count in COUNTS.items()}
        countries = [entity.id for entity in self.entities.values() if entity.kind == "country"]
        cities = [
            self.add(
                "city",
                part,
                next(self.city_names),
                country=countries[number] if part == CAPITALS_PART and number < COUNTRIES else draws.pick(countries),
                river=draws.pick(self.rivers),
                founded=str(draws.between(*CITY_YEARS)),
            )
            for number in range(size["city"])
        ]
        people = [
            self.add(
                "person",
                part,
                self.names["person"].pop(),
                birth_city=draws.pick(cities),
                birth_year=str(draws.between(*BIRTH_YEARS)),
                instrument=draws.pick(WORDS["instruments"]),
            )
            for _ in range(size["person"])
        ]
        self._works(part, size, _Turns(people, draws), cities)
        for person in people:
            natives = self.entities[self.entities[person].facts["birth_city"]].mentions
            # two at most, so that documents of cities stay short
            if sum(other.startswith("person") for other in natives) < 2:
                natives.append(person)

    def _works(self, part: str, size: Mapping[str, int], people: _Turns, cities: list[str]) -> None:
        draws = self.draws
        for kind, relations in (("film", ("director", "star")), ("book", ("writer", "illustrator"))):
            for _ in range(size[kind]):
                made_by = dict(zip(relations, people.take(2), strict=True))
                year = str(draws.between(*WORK_YEARS))
                name = self.names[kind].pop()
                work = self.add(kind, part, name, year=year, genre=draws.pick(WORDS["genres"]), **made_by)
                self._mention(work, *made_by.values())
        companies = []
        for _ in range(size["company"]):
            founder, head = people.take(2)
            company = self.add(
                "company",
                part,
                self.names["company"].pop(),
                industry=draws.pick(WORDS["industries"]),
                founder=founder,
                head=head,
                city=draws.pick(cities),
                founded=str(draws.between(*WORK_YEARS)),
            )
            companies.append(company)
            self._mention(company, founder, head)
            city = self.entities[company].facts["city"]
            if not any(other.startswith("company") for other in self.entities[city].mentions):
                self._mention(company, city)
        makers = _Turns(companies, draws)
        for _ in range(size["product"]):
            (designer,), (maker,) = people.take(1), makers.take(1)
            year, colour = str(draws.between(*WORK_YEARS)), draws.pick(WORDS["colours"])
            name = self.names["product"].pop()
            product = self.add("product", part, name, designer=designer, maker=maker, year=year, colour=colour)
            self._mention(product, designer, maker)

    def _mention(self, what: str, *where: str) -> None:
        for entity in where:
            self.entities[entity].mentions.append(what)


class _Turns:
    """Hands out entities in turn, in a new order each round, so that work is spread evenly."""

    def __init__(self, entities: list[str], draws: Draws):
        self.entities, self.draws = list(entities), draws
        self.left: list[str] = []

    def take(self, count: int) -> list[str]:
        taken: list[str] = []
        # An entity drawn twice in one call is skipped for this round: nobody is both director and star of a film.
        while len(taken) < count:
            if not self.left:
                self.left = list(self.entities)
                self.draws.shuffle(self.left)
            entity = self.left.pop()
            if entity not in taken:
                taken.append(entity)
        return taken


def _document(entities: Mapping[str, Entity], entity: Entity, draws: Draws) -> Document:
    values = {key: entities[fact].name if fact in entities else fact for key, fact in entity.facts.items()}
    text = draws.pick(WORDS["documents"][entity.kind]).format(
        name=entity.name, mentions=_mentions(entities, entity), **values
    )
    return Document(id=entity.id, title=entity.name, text=text)


def _mentions(entities: Mapping[str, Entity], entity: Entity) -> str:
    """The part of a document that names what other documents say of this entity."""
    named = [entities[other] for other in entity.mentions]
    if entity.kind == "person":
        return " and ".join(f"the {other.kind} {other.name}" for other in named) or "nothing yet"
    if entity.kind == "city":
        people = [other.name for other in named if other.kind == "person"]
        born = f" {' and '.join(people)} {'was' if len(people) == 1 else 'were'} born there." if people else ""
        return born + "".join(f" {other.name} is based there." for other in named if other.kind == "company")
    if entity.kind == "company":
        return f" Maker of the {' and the '.join(other.name for other in named)}." if named else ""
    return ""
