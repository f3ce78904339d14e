"""Questions about a small SQLite database that is generated for each task; the answer is a query.

    Which customers have no orders at all? Give their names.
        sql("SELECT name FROM customers WHERE id NOT IN (SELECT customer_id FROM orders)") -> Anna ...
        SELECT name FROM customers WHERE id NOT IN (SELECT customer_id FROM orders)

The reward compares result rows: the query must give the rows of the reference query on the visible database and on
hidden ones with the same vocabulary, other rows and another result. A query that hard-codes the visible rows fails on
the hidden databases.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import re
import sqlite3
import tempfile
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal, Self

from TrainingFactory.common.sql.compare import rows_match
from TrainingFactory.common.sql.database import SqlDatabase
from TrainingFactory.envs.base import ToolEnvironment
from TrainingFactory.envs.builtin.splits import generate_tasks
from TrainingFactory.envs.builtin.text2sql_data import (
    ALL_DOMAINS,
    DOMAINS,
    QUESTIONS,
    RECIPE_SPLITS,
    make_question,
)
from TrainingFactory.envs.builtin.text2sql_layouts import draw_layout, make_creation_script
from TrainingFactory.protocols import Episode
from TrainingFactory.tools import tool
from TrainingFactory.tools.threads import in_thread
from TrainingFactory.types import Message, Reward, Task, ToolCall, ToolResult

NUM_HIDDEN_DATABASES = 2  # number of databases that the model does not see
MAX_VARIANTS = 60  # candidates for hidden databases
QUERY_SECONDS = 2.0
MAX_SHOWN_ROWS, MAX_COMPARED_ROWS = 20, 1000
_FENCE_PATTERN = re.compile(r"```[\w+-]*[ \t]*\n(.*)```", re.S)


class Text2SqlEnvironment(ToolEnvironment):
    system_prompt = (
        "Write a SQLite query that answers the question. Try it with the tool sql, which can only read. "
        "Then answer with the query alone."
    )

    _folder: tempfile.TemporaryDirectory[str] | None = None
    _visible_database: SqlDatabase | None = None

    @classmethod
    def tasks(cls, split: str, seed: int, count: int) -> Iterator[Task]:
        tasks = generate_tasks("text2sql", split, seed, _make_task)
        # Many generated queries return nothing on the visible database.
        return islice((task for task in tasks if _is_informative(_query(task, 0, str(task.answer)))), count)

    async def reset(self) -> list[Message]:
        self._folder = tempfile.TemporaryDirectory(prefix="tf-text2sql-", ignore_cleanup_errors=True)
        self._visible_database = await self._open_database(0, "table", MAX_SHOWN_ROWS)
        return await super().reset()

    async def fork(self) -> Self:
        """Return another environment of the task, with its own copy of the database, which queries only read."""
        clone = type(self)(self.task)
        await clone.reset()
        return clone

    @tool(stateful=True)
    async def sql(self, query: str) -> ToolResult:
        """Run one SQLite query (read-only)."""
        return await in_thread(self.database.run, query)

    @property
    def database(self) -> SqlDatabase:
        """Return the visible database, for rewards that run the model's query."""
        assert self._visible_database is not None, "call reset first"
        return self._visible_database

    async def reward(self, episode: Episode) -> Reward:
        """Return 1 if the answer gives the reference rows on all databases. Part `shown`: 1 if it gives them on the
        visible database."""
        query = _extract_query(episode.trajectory.answer)
        is_visible_match = bool(query) and await self._matches_reference(query, 0)
        is_correct = is_visible_match
        for variant in await in_thread(select_hidden_variants, self.task) if is_visible_match else ():
            is_correct = is_correct and await self._matches_reference(query, variant)
        return Reward(float(is_correct), parts={"right": float(is_correct), "shown": float(is_visible_match)})

    async def close(self) -> None:
        if self._visible_database is not None:
            await in_thread(self._visible_database.close)
        if self._folder is not None:
            await in_thread(self._folder.cleanup)

    def expert(self) -> Iterator[Message]:
        """Yield the turns of the reference solution. It first explores the database if the prompt does not show its
        schema."""
        if self.task.metadata.get("layout") == "drawn":
            yield _call_sql("SELECT sql FROM sqlite_master")
            layout = draw_layout(self.task.metadata["domain"], self.task.metadata["database_seed"])
            for table in layout.find_tables(str(self.task.answer)):
                yield _call_sql(f"SELECT * FROM {table} LIMIT 2")
        yield _call_sql(str(self.task.answer))
        yield Message("assistant", str(self.task.answer))

    def novice(self, rng: random.Random) -> Iterator[Message]:
        """Yield turns with a typical mistake, so that a warm start on them leaves room for RL to improve."""
        mistake = rng.choice(("answers in words", "forgets the condition", "asks and repeats a number"))
        domain = ALL_DOMAINS[self.task.metadata["domain"]]
        if mistake == "answers in words":
            yield Message("assistant", f"The {domain.people} are in the table.")
            return
        select_all = f"SELECT * FROM {rng.choice((domain.people, domain.things, domain.links))}"
        yield _call_sql(select_all)
        yield Message(
            "assistant", select_all if mistake == "forgets the condition" else f"SELECT {rng.randint(1, 9)}"
        )

    async def _matches_reference(self, query: str, variant: int) -> bool:
        database = await self._open_database(variant, "exact", MAX_COMPARED_ROWS)
        try:
            return await rows_match(lambda text: in_thread(database.run, text), query, str(self.task.answer))
        finally:
            await in_thread(database.close)

    async def _open_database(
        self, variant: int, result_format: Literal["table", "exact"], max_rows: int
    ) -> SqlDatabase:
        assert self._folder is not None, "call reset first"
        path = Path(self._folder.name, f"{variant}.db")
        if not path.exists():
            await in_thread(_build_database, path, self.task, variant)
        return await in_thread(
            SqlDatabase, path, timeout=QUERY_SECONDS, max_rows=max_rows, format=result_format
        )


def _call_sql(query: str) -> Message:
    return Message("assistant", tool_calls=[ToolCall("sql", {"query": query})])


def _extract_query(answer: str) -> str:
    """Return the answer without a Markdown code fence."""
    match = _FENCE_PATTERN.fullmatch(answer.strip())
    return (match.group(1) if match else answer).strip()


def _make_task(task_id: str, rng: random.Random) -> Task:
    domain, kind = rng.choice(list(DOMAINS)), rng.choice(list(QUESTIONS))
    database_seed = f"{rng.getrandbits(48):012x}"
    question, query = make_question(kind, domain, database_seed, rng)
    metadata = {"domain": domain, "database_seed": database_seed, "kind": kind}
    return Task(task_id, f"{'; '.join(DOMAINS[domain].schema)}\n\n{question}", query, metadata)


def generate_explored_tasks(split: str, count: int) -> Iterator[Task]:
    """Yield tasks of the recipe's split `tasks`, `dev` or `test`. The prompt has no schema: each database has a layout
    of its own, which the model explores with the tool. Splits share no domain, so they share no database."""
    rng = random.Random(f"text2sql recipe {split}")
    tasks = (_make_explored_task(f"{split}-{i}", RECIPE_SPLITS[split], rng) for i in itertools.count())
    return islice((task for task in tasks if _is_informative(_query(task, 0, str(task.answer)))), count)


def _make_explored_task(task_id: str, domains: list[str], rng: random.Random) -> Task:
    domain, kind = rng.choice(domains), rng.choice(list(QUESTIONS))
    database_seed = f"{rng.getrandbits(48):012x}"
    question, query = make_question(kind, domain, database_seed, rng)
    metadata = {"domain": domain, "database_seed": database_seed, "kind": kind, "layout": "drawn"}
    return Task(task_id, question, draw_layout(domain, database_seed).rewrite_query(query), metadata)


def select_hidden_variants(task: Task) -> list[int]:
    """Return the hidden databases of a task: variants on which the reference query gives another result than on the
    visible database, so that constants fail. Prefer variants on which it also gives another result than near misses of
    it. If there are no such variants, return any."""
    database_fields = (task.metadata["domain"], task.metadata["database_seed"], task.metadata.get("layout"))
    return list(_select_variants(str(task.answer), *database_fields))


@lru_cache(maxsize=4096)  # the episodes of a group share them
def _select_variants(reference: str, domain: str, seed: str, layout: str | None) -> tuple[int, ...]:
    task = Task("", "", reference, {"domain": domain, "database_seed": seed, "layout": layout})
    visible_rows = Counter(_query(task, 0, str(task.answer)))
    candidates = (
        variant
        for variant in range(1, MAX_VARIANTS)
        if _is_informative(rows := _query(task, variant, str(task.answer))) and Counter(rows) != visible_rows
    )
    undetected_queries = _keep_same_rows(task, 0, _make_near_misses(str(task.answer)))
    selected_variants, fallback_variants = list[int](), list[int]()
    for variant in candidates:
        remaining_queries = _keep_same_rows(task, variant, undetected_queries)
        is_last_slot = len(selected_variants) == NUM_HIDDEN_DATABASES - 1
        if len(remaining_queries) < len(undetected_queries) or not (undetected_queries and is_last_slot):
            selected_variants.append(variant)
        else:
            fallback_variants.append(variant)
        undetected_queries = remaining_queries
        if len(selected_variants) == NUM_HIDDEN_DATABASES:
            break
    variants = chain(selected_variants, fallback_variants, itertools.count(MAX_VARIANTS))
    return tuple(islice(variants, NUM_HIDDEN_DATABASES))


def _make_near_misses(query: str) -> list[str]:
    """Return variants of the query with one mistake each: a missing DISTINCT, > for >= or the other way round."""
    mistakes = ((r"\bDISTINCT ", ""), (">=", ">"), (">(?!=)", ">="), ("<=", "<"), ("<(?![=>])", "<="))
    return [near_miss for old, new in mistakes if (near_miss := re.sub(old, new, query, count=1)) != query]


def _keep_same_rows(task: Task, variant: int, queries: list[str]) -> list[str]:
    """Return the queries that give the same rows as the reference query on a database variant."""
    expected_rows = Counter(_query(task, variant, str(task.answer)))
    return [query for query in queries if Counter(_query(task, variant, query)) == expected_rows]


def _is_informative(rows: list[Any]) -> bool:
    return bool(rows) and rows not in ([(None,)], [(0,)])


def _query(task: Task, variant: int, query: str) -> list[Any]:
    """Return the rows of a query on a database variant; no rows if it is invalid, as a near miss may be."""
    with contextlib.closing(sqlite3.connect(":memory:")) as connection:
        connection.executescript(make_creation_script(task, variant))
        with contextlib.suppress(sqlite3.Error):
            return connection.execute(query).fetchall()
        return []


def _build_database(path: Path, task: Task, variant: int) -> None:
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA synchronous = OFF")  # the file is temporary
        connection.execute("PRAGMA journal_mode = OFF")
        connection.executescript(f"BEGIN;{make_creation_script(task, variant)}COMMIT;")
