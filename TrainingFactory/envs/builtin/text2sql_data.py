"""Small databases and questions about them, generated from seeds. All domains have the same structure: people, things,
and links between them."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from TrainingFactory.models.words import NAMES, PLACES, THINGS
from TrainingFactory.types import Task

# Rows per table, and distinct values per column.
NUM_PEOPLE, NUM_TITLES, NUM_CITIES, NUM_KINDS, NUM_LINKS = 10, 8, 4, 3, 24
YEARS = range(2018, 2026)


@dataclass(frozen=True, slots=True)
class SqlDomain:
    """Vocabulary of one database; text2sql.yaml explains the fields."""

    people: str
    things: str
    links: str
    person_id: str
    thing_id: str
    kind: str
    kinds: list[str]
    value: str
    most: str
    amount: str
    did: str

    @property
    def schema(self) -> list[str]:
        """Return one CREATE TABLE statement per table, as the model sees it."""
        return [
            f"CREATE TABLE {self.people} (id INTEGER PRIMARY KEY, name TEXT, city TEXT)",
            f"CREATE TABLE {self.things} (id INTEGER PRIMARY KEY, title TEXT, {self.kind} TEXT, {self.value} INTEGER)",
            f"CREATE TABLE {self.links} (id INTEGER PRIMARY KEY, {self.person_id} INTEGER, {self.thing_id} INTEGER, "
            f"{self.amount} INTEGER, year INTEGER)",
        ]

    @property
    def join_clause(self) -> str:
        return (
            f"{self.links} l JOIN {self.people} p ON p.id = l.{self.person_id} "
            f"JOIN {self.things} t ON t.id = l.{self.thing_id}"
        )


_VOCABULARY = yaml.safe_load(Path(__file__).with_name("text2sql.yaml").read_text(encoding="utf-8"))
DOMAINS = {name: SqlDomain(**words) for name, words in _VOCABULARY["domains"].items()}
ALL_DOMAINS = DOMAINS | {name: SqlDomain(**words) for name, words in _VOCABULARY["more_domains"].items()}
RECIPE_SPLITS: dict[str, list[str]] = _VOCABULARY["recipe_splits"]  # split -> domains
QUESTIONS: dict[str, list[str]] = _VOCABULARY["questions"]  # kind -> [question, reference query]


@dataclass(frozen=True, slots=True)
class SharedValues:
    """Values that all variants of one database share, so that a question about one of them, such as Oslo, makes sense
    in each variant."""

    names: tuple[str, ...]
    cities: tuple[str, ...]
    titles: tuple[str, ...]
    kinds: tuple[str, ...]


def draw_values(domain: str, seed: str) -> SharedValues:
    rng = random.Random(f"text2sql values {domain} {seed}")
    return SharedValues(
        tuple(rng.sample(NAMES, NUM_PEOPLE)),
        tuple(rng.sample(PLACES, NUM_CITIES)),
        tuple(rng.sample(THINGS, NUM_TITLES)),
        tuple(rng.sample(ALL_DOMAINS[domain].kinds, NUM_KINDS)),
    )


def draw_rows(task: Task, variant: int) -> list[tuple[Any, ...]]:
    """Return the rows of a database; each row starts with the name of its table. Variants have different rows over the
    same values. Names, titles and values of things are unique, so that sorting them has one result. In hidden variants
    (1 and up), one value is the average."""
    domain, seed = task.metadata["domain"], task.metadata["database_seed"]
    words, values = ALL_DOMAINS[domain], draw_values(domain, seed)
    rng = random.Random(f"text2sql rows {domain} {seed} {variant}")
    names, titles = rng.sample(values.names, NUM_PEOPLE), rng.sample(values.titles, NUM_TITLES)
    thing_values = _draw_with_average(rng) if variant else rng.sample(range(5, 100), NUM_TITLES)
    rows: list[tuple[Any, ...]] = [
        (words.people, i, name, rng.choice(values.cities)) for i, name in enumerate(names, 1)
    ]
    rows += [
        (words.things, i, title, rng.choice(values.kinds), value)
        for i, (title, value) in enumerate(zip(titles, thing_values, strict=True), 1)
    ]
    people = rng.sample(range(1, NUM_PEOPLE + 1), NUM_PEOPLE - 2)  # two people have no links
    return rows + [
        (words.links, i, rng.choice(people), rng.randint(1, NUM_TITLES), rng.randint(1, 9), rng.choice(YEARS))
        for i in range(1, NUM_LINKS + 1)
    ]


def _draw_with_average(rng: random.Random) -> list[int]:
    """Draw distinct numbers of which one is the average, so that `>` and `>=` give different rows."""
    while True:
        other_values = rng.sample(range(5, 100), NUM_TITLES - 1)
        average, remainder = divmod(sum(other_values), NUM_TITLES - 1)
        if remainder == 0 and average not in other_values:
            return rng.sample([*other_values, average], NUM_TITLES)


PLACEHOLDERS: dict[str, Callable[[SharedValues, random.Random], Any]] = {  # placeholders in questions
    "city": lambda values, rng: rng.choice(values.cities),
    "kind": lambda values, rng: rng.choice(values.kinds),
    "name": lambda values, rng: rng.choice(values.names),
    "few": lambda _, rng: rng.randint(2, 4),
    "year": lambda _, rng: rng.choice(YEARS[:4]),
    "how": lambda _, rng: rng.choice(
        (("average", "AVG"), ("highest", "MAX"), ("lowest", "MIN"), ("total", "SUM"))
    ),
}


def make_question(kind: str, domain: str, seed: str, rng: random.Random) -> tuple[str, str]:
    """Return a question of this kind about a database, and the reference query."""
    values, templates = draw_values(domain, seed), QUESTIONS[kind]
    placeholder_values = {
        name: draw(values, rng) for name, draw in PLACEHOLDERS.items() if f"{{{name}" in "".join(templates)
    }
    question, query = (template.format(d=ALL_DOMAINS[domain], **placeholder_values) for template in templates)
    return question, query
