"""Small databases and questions about them, made from seeds. Four domains of one form: people, things, and who did what
with which of them."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from TrainingFactory.models.words import NAMES, PLACES, THINGS

PEOPLE, TITLES, CITIES, KINDS, LINKS = 10, 8, 4, 3, 24  # rows, and different values in a column
YEARS = range(2018, 2026)


@dataclass(frozen=True, slots=True)
class Domain:
    """The words of one database. Columns: people(id, name, city), things(id, title, kind, value),
    links(id, person_id, thing_id, amount, year), each under the names given here."""

    people: str
    things: str
    links: str
    person_id: str
    thing_id: str
    kind: str
    kinds: tuple[str, ...]
    value: str  # a whole number that belongs to a thing
    most: str  # who has the highest one
    amount: str
    did: str  # what a person did with a thing: "ordered"

    @property
    def schema(self) -> list[str]:
        """Return one statement per table, as the model sees it."""
        return [
            f"CREATE TABLE {self.people} (id INTEGER PRIMARY KEY, name TEXT, city TEXT)",
            f"CREATE TABLE {self.things} (id INTEGER PRIMARY KEY, title TEXT, {self.kind} TEXT, {self.value} INTEGER)",
            f"CREATE TABLE {self.links} (id INTEGER PRIMARY KEY, {self.person_id} INTEGER, {self.thing_id} INTEGER, "
            f"{self.amount} INTEGER, year INTEGER)",
        ]

    @property
    def joined(self) -> str:
        return (
            f"{self.links} l JOIN {self.people} p ON p.id = l.{self.person_id} "
            f"JOIN {self.things} t ON t.id = l.{self.thing_id}"
        )


DOMAINS = {
    "shop": Domain(
        "customers", "products", "orders", "customer_id", "product_id",
        "category", ("food", "tools", "toys", "books", "garden"), "price", "most expensive", "quantity", "ordered",
    ),
    "library": Domain(
        "members", "books", "loans", "member_id", "book_id",
        "genre", ("history", "crime", "poetry", "science", "travel"), "pages", "longest", "weeks", "borrowed",
    ),
    "school": Domain(
        "students", "courses", "exams", "student_id", "course_id",
        "subject", ("maths", "music", "art", "physics", "sport"), "hours", "longest", "points", "took",
    ),
    "museum": Domain(
        "visitors", "exhibits", "visits", "visitor_id", "exhibit_id",
        "epoch", ("roman", "gothic", "baroque", "modern", "ancient"), "age", "oldest", "minutes", "visited",
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Values:
    """What occurs in all variants of one database, so that a question about Oslo makes sense in each."""

    names: tuple[str, ...]
    cities: tuple[str, ...]
    titles: tuple[str, ...]
    kinds: tuple[str, ...]


def values_of(domain: str, seed: str) -> Values:
    rng = random.Random(f"text2sql values {domain} {seed}")
    return Values(
        tuple(rng.sample(NAMES, PEOPLE)),
        tuple(rng.sample(PLACES, CITIES)),
        tuple(rng.sample(THINGS, TITLES)),
        tuple(rng.sample(DOMAINS[domain].kinds, KINDS)),
    )


def script_of(domain: str, seed: str, variant: int) -> str:
    """Return the SQL that makes the database: for each variant other rows of the same values. Names, titles and the
    values of things are unique, so that orders by them are. In hidden variants (from 1) one value is the average."""
    words, values = DOMAINS[domain], values_of(domain, seed)
    rng = random.Random(f"text2sql rows {domain} {seed} {variant}")
    names, titles = rng.sample(values.names, PEOPLE), rng.sample(values.titles, TITLES)
    numbers = _with_average(rng) if variant else rng.sample(range(5, 100), TITLES)
    rows = [
        (words.people, number, name, rng.choice(values.cities)) for number, name in enumerate(names, 1)
    ] + [
        (words.things, number, title, rng.choice(values.kinds), numbers[number - 1])
        for number, title in enumerate(titles, 1)
    ]
    active = rng.sample(range(1, PEOPLE + 1), PEOPLE - 2)  # two people did nothing
    rows += [
        (
            words.links,
            number,
            rng.choice(active),
            rng.randint(1, TITLES),
            rng.randint(1, 9),
            rng.choice(YEARS),
        )
        for number in range(1, LINKS + 1)
    ]
    inserts = [f"INSERT INTO {table} VALUES ({', '.join(map(_literal, row))})" for table, *row in rows]
    return ";\n".join([*words.schema, *inserts]) + ";"


def _with_average(rng: random.Random) -> list[int]:
    """Draw different numbers of which one is the average of all: there `>` and `>=` do not give the same."""
    while True:
        others = rng.sample(range(5, 100), TITLES - 1)
        average, rest = divmod(sum(others), TITLES - 1)
        if rest == 0 and average not in others:
            return rng.sample([*others, average], TITLES)


def _literal(value: str | int) -> str:
    return str(value) if isinstance(value, int) else "'" + value.replace("'", "''") + "'"


Question = tuple[str, str]  # what is asked, and the query that answers it


def _count(d: Domain, v: Values, rng: random.Random) -> Question:
    city = rng.choice(v.cities)
    return f"How many {d.people} live in {city}?", f"SELECT COUNT(*) FROM {d.people} WHERE city = '{city}'"


def _listed(d: Domain, v: Values, rng: random.Random) -> Question:
    kind = rng.choice(v.kinds)
    return (
        f"List the titles of the {d.things} whose {d.kind} is {kind}, in alphabetical order.",
        f"SELECT title FROM {d.things} WHERE {d.kind} = '{kind}' ORDER BY title",
    )


def _aggregate(d: Domain, v: Values, rng: random.Random) -> Question:
    kind = rng.choice(v.kinds)
    word, function = rng.choice((("average", "AVG"), ("highest", "MAX"), ("lowest", "MIN"), ("total", "SUM")))
    return (
        f"What is the {word} of {d.value} over the {d.things} whose {d.kind} is {kind}?",
        f"SELECT {function}({d.value}) FROM {d.things} WHERE {d.kind} = '{kind}'",
    )


def _joined(d: Domain, v: Values, rng: random.Random) -> Question:
    name = rng.choice(v.names)
    return (
        f"Which {d.things} has {name} {_participle(d)}? Give each title once.",
        f"SELECT DISTINCT t.title FROM {d.joined} WHERE p.name = '{name}'",
    )


def _per_group(d: Domain, v: Values, rng: random.Random) -> Question:
    return (
        f"For each city, how many {d.people} live there? Give city and number.",
        f"SELECT city, COUNT(*) FROM {d.people} GROUP BY city",
    )


def _having(d: Domain, v: Values, rng: random.Random) -> Question:
    least = rng.randint(2, 4)
    return (
        f"Which {d.people} have at least {least} {d.links}? Give their names.",
        f"SELECT p.name FROM {d.joined} GROUP BY p.id HAVING COUNT(*) >= {least}",
    )


def _top(d: Domain, v: Values, rng: random.Random) -> Question:
    number = rng.randint(2, 4)
    return (
        f"What are the titles of the {number} {d.most} {d.things} (by {d.value}), the {d.most} first?",
        f"SELECT title FROM {d.things} ORDER BY {d.value} DESC LIMIT {number}",
    )


def _never(d: Domain, v: Values, rng: random.Random) -> Question:
    return (
        f"Which {d.people} have no {d.links} at all? Give their names.",
        f"SELECT name FROM {d.people} WHERE id NOT IN (SELECT {d.person_id} FROM {d.links})",
    )


def _sum_joined(d: Domain, v: Values, rng: random.Random) -> Question:
    city, year = rng.choice(v.cities), rng.choice(YEARS[:4])
    return (
        f"What is the total {d.amount} over all {d.links} since {year} of {d.people} who live in {city}?",
        f"SELECT SUM(l.{d.amount}) FROM {d.joined} WHERE p.city = '{city}' AND l.year >= {year}",
    )


def _above_average(d: Domain, v: Values, rng: random.Random) -> Question:
    return (
        f"Which {d.things} have more than the average {d.value}? Give title and {d.value}.",
        f"SELECT title, {d.value} FROM {d.things} WHERE {d.value} > (SELECT AVG({d.value}) FROM {d.things})",
    )


def _participle(d: Domain) -> str:
    return {"took": "taken"}.get(d.did, d.did)


QUESTIONS: dict[str, Callable[[Domain, Values, random.Random], Question]] = {
    "count": _count,
    "list": _listed,
    "aggregate": _aggregate,
    "join": _joined,
    "group": _per_group,
    "having": _having,
    "top": _top,
    "never": _never,
    "sum": _sum_joined,
    "above": _above_average,
}
