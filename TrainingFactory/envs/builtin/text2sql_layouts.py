"""Tables and columns that differ from database to database, drawn from the database's seed.

A layout stores the rows of people, things and links under other names and in other forms: cities and kinds as text, as
codes or in tables of their own, years as numbers or inside dates. Its reference query is the domain's query behind
common table expressions that restore the domain's tables, so every question has a reference in every layout."""

from __future__ import annotations

import random
import re
from typing import Any, NamedTuple

from TrainingFactory.envs.builtin.text2sql_data import (
    ALL_DOMAINS,
    SharedValues,
    SqlDomain,
    draw_rows,
    draw_values,
)
from TrainingFactory.types import Task

TABLE_NAMES = (
    "tbl_{}",
    "{}_data",
    "all_{}",
    "my_{}",
)  # never the domain's own name, which a model would guess
CITY_COLUMNS = ("city", "town", "home_city", "residence")
DATE_FORMATS = {"iso": "{year}-{month:02}-{day:02}", "dotted": "{day:02}.{month:02}.{year}"}


class Column(NamedTuple):
    """A column as stored, and the expression that restores the domain's column from the table `x` or `y`."""

    name: str
    type: str
    expression: str


class Layout:
    """The physical schema of one database. All variants of a database share it."""

    def __init__(self, domain: SqlDomain, values: SharedValues, seed: str) -> None:
        rng = random.Random(f"text2sql layout {domain.people} {seed}")
        self._domain, self._shared_values = domain, values
        table_name = rng.choice(TABLE_NAMES)
        logical_table_names = (domain.people, domain.things, domain.links, "cities", "kinds")
        self._table_names = dict(
            zip(logical_table_names, (table_name.format(name) for name in logical_table_names), strict=True)
        )
        person, thing = domain.person_id.removesuffix("_id"), domain.thing_id.removesuffix("_id")
        self._name_column = rng.choice(("name", "full_name", f"{person}_name"))
        self._title_column = rng.choice(("title", "label", f"{thing}_title"))
        self._person_column, self._thing_column = rng.choice(
            ((f"{person}_id", f"{thing}_id"), (person, thing), (f"{person}_no", f"{thing}_no"))
        )
        self._has_city_table = rng.random() < 0.5
        self._city_column = rng.choice(CITY_COLUMNS)
        self._kind_format = rng.choice(("text", "code", "table"))
        self._year_format = rng.choice(("number", *DATE_FORMATS))

    @property
    def _person_columns(self) -> list[Column]:
        city = self._city_column
        city_column = (
            Column(f"{city}_id", "INTEGER", "y.name")
            if self._has_city_table
            else Column(city, "TEXT", f"x.{city}")
        )
        return [
            Column("id", "INTEGER PRIMARY KEY", "x.id"),
            Column(self._name_column, "TEXT", f"x.{self._name_column}"),
            city_column,
        ]

    @property
    def _thing_columns(self) -> list[Column]:
        kind, value = self._domain.kind, self._domain.value
        when_clauses = " ".join(f"WHEN '{_encode_kind(name)}' THEN '{name}'" for name in self._domain.kinds)
        kind_column = {
            "text": Column(kind, "TEXT", f"x.{kind}"),
            "code": Column(f"{kind}_code", "TEXT", f"CASE x.{kind}_code {when_clauses} END"),
            "table": Column(f"{kind}_id", "INTEGER", "y.name"),
        }[self._kind_format]
        title_column = Column(self._title_column, "TEXT", f"x.{self._title_column}")
        return [
            Column("id", "INTEGER PRIMARY KEY", "x.id"),
            title_column,
            kind_column,
            Column(value, "INTEGER", f"x.{value}"),
        ]

    @property
    def _link_columns(self) -> list[Column]:
        year_column = {
            "number": Column("year", "INTEGER", "x.year"),
            "iso": Column("date", "TEXT", "CAST(substr(x.date, 1, 4) AS INTEGER)"),
            "dotted": Column("date", "TEXT", "CAST(substr(x.date, 7, 4) AS INTEGER)"),
        }[self._year_format]
        number_columns = (self._person_column, self._thing_column, self._domain.amount)
        return [
            Column("id", "INTEGER PRIMARY KEY", "x.id"),
            *(Column(name, "INTEGER", f"x.{name}") for name in number_columns),
            year_column,
        ]

    @property
    def schema(self) -> list[str]:
        """Return one CREATE TABLE statement per table."""
        domain = self._domain
        tables = {
            domain.people: self._person_columns,
            domain.things: self._thing_columns,
            domain.links: self._link_columns,
        }
        lookup_columns = [Column("id", "INTEGER PRIMARY KEY", ""), Column("name", "TEXT", "")]
        if self._has_city_table:
            tables["cities"] = lookup_columns
        if self._kind_format == "table":
            tables["kinds"] = lookup_columns
        return [
            f"CREATE TABLE {self._table_names[key]} ({', '.join(f'{column.name} {column.type}' for column in columns)})"
            for key, columns in tables.items()
        ]

    def convert_rows(self, rows: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
        """Convert rows of the domain's tables, each with its table's name first, to rows of this layout."""
        cities, kinds = list(self._shared_values.cities), list(self._shared_values.kinds)
        converted_rows = [self._convert_row(row, cities, kinds) for row in rows]
        lookups = [("cities", cities)] * self._has_city_table + [("kinds", kinds)] * (
            self._kind_format == "table"
        )
        converted_rows += [
            (self._table_names[name], i, text) for name, texts in lookups for i, text in enumerate(texts, 1)
        ]
        return converted_rows

    def _convert_row(self, row: tuple[Any, ...], cities: list[str], kinds: list[str]) -> tuple[Any, ...]:
        table, row_id = row[:2]
        fields: Any = list(row[2:])
        if table == self._domain.people and self._has_city_table:
            fields[1] = cities.index(fields[1]) + 1
        if table == self._domain.things and self._kind_format != "text":
            fields[1] = _encode_kind(fields[1]) if self._kind_format == "code" else kinds.index(fields[1]) + 1
        if table == self._domain.links and self._year_format != "number":
            date = {"year": fields[3], "month": row_id % 12 + 1, "day": row_id % 28 + 1}
            fields[3] = DATE_FORMATS[self._year_format].format(**date)
        return (self._table_names[table], row_id, *fields)

    def find_tables(self, query: str) -> list[str]:
        """Return the names of this layout's tables that a query reads."""
        return [table for table in self._table_names.values() if re.search(rf"\b{table}\b", query)]

    def rewrite_query(self, query: str) -> str:
        """Return the domain's reference query, rewritten for this layout."""
        domain = self._domain
        tables = {
            domain.people: (self._person_columns, ("id", "name", "city"), self._has_city_table, "cities"),
            domain.things: (
                self._thing_columns,
                ("id", "title", domain.kind, domain.value),
                self._kind_format == "table",
                "kinds",
            ),
            domain.links: (
                self._link_columns,
                ("id", domain.person_id, domain.thing_id, domain.amount, "year"),
                False,
                "",
            ),
        }
        subqueries = []
        query_tables = {table: entry for table, entry in tables.items() if re.search(rf"\b{table}\b", query)}
        for table, (columns, aliases, has_lookup_table, lookup_table) in query_tables.items():
            from_clause = f"main.{self._table_names[table]} x"
            if has_lookup_table:
                from_clause += f" JOIN main.{self._table_names[lookup_table]} y ON y.id = x.{columns[2].name}"
            expressions = ", ".join(column.expression for column in columns)
            subqueries.append(f"{table}({', '.join(aliases)}) AS (SELECT {expressions} FROM {from_clause})")
        return f"WITH {', '.join(subqueries)} {query}"


def draw_layout(domain: str, seed: str) -> Layout:
    return Layout(ALL_DOMAINS[domain], draw_values(domain, seed), seed)


def make_creation_script(task: Task, variant: int) -> str:
    """Return the SQL that creates a database of a task: in its own layout if the task's `layout` is "drawn"."""
    domain, seed = task.metadata["domain"], task.metadata["database_seed"]
    schema, rows = ALL_DOMAINS[domain].schema, draw_rows(task, variant)
    if task.metadata.get("layout") == "drawn":
        layout = draw_layout(domain, seed)
        schema, rows = layout.schema, layout.convert_rows(rows)
    inserts = [f"INSERT INTO {table} VALUES ({', '.join(map(repr, row))})" for table, *row in rows]
    return ";\n".join([*schema, *inserts]) + ";"


def _encode_kind(kind: str) -> str:
    return kind[:3].upper()
