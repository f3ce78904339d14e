"""Questions about a small SQLite database made for each task; the answer is a query.

    Which customers have no orders at all? Give their names.
        sql("SELECT name FROM customers WHERE id NOT IN (SELECT customer_id FROM orders)") -> Anna ...
        SELECT name FROM customers WHERE id NOT IN (SELECT customer_id FROM orders)

What is rewarded is the query's rows: they must be those of the right query on the database that the model sees and on
hidden ones with the same words, other rows and another result. A query that writes down what it has seen is right on
the first only.
"""

from __future__ import annotations

import contextlib
import random
import re
import sqlite3
import tempfile
from collections import Counter
from collections.abc import Iterator
from itertools import chain, islice
from itertools import count as endlessly
from pathlib import Path
from typing import Any, Literal

from TrainingFactory.common.sql.compare import same_result
from TrainingFactory.common.sql.database import Database
from TrainingFactory.envs.base import ToolEnvironment
from TrainingFactory.envs.builtin.splits import made_up
from TrainingFactory.envs.builtin.text2sql_data import DOMAINS, QUESTIONS, ask, script_of
from TrainingFactory.protocols import Episode
from TrainingFactory.tools import tool
from TrainingFactory.tools.threads import in_thread
from TrainingFactory.types import Message, Reward, Task, ToolCall, ToolResult

HIDDEN = 2  # databases that the model does not see
MAX_VARIANTS = 60  # that are looked through for them
QUERY_SECONDS = 2.0
SHOWN_ROWS, COMPARED_ROWS = 20, 1000
_FENCE = re.compile(r"```[\w+-]*[ \t]*\n(.*)```", re.S)


class Text2SqlEnvironment(ToolEnvironment):
    system_prompt = (
        "Write a SQLite query that answers the question. Try it with the tool sql, which can only read. "
        "Then answer with the query alone."
    )

    _folder: tempfile.TemporaryDirectory[str] | None = None
    _shown: Database | None = None

    @classmethod
    def tasks(cls, split: str, seed: int, count: int) -> Iterator[Task]:
        made = made_up("text2sql", split, seed, _task)
        # Many queries find nothing on the database that the model sees.
        return islice((t for t in made if _finds_something(_rows(t, 0, str(t.answer)))), count)

    async def reset(self) -> list[Message]:
        self._folder = tempfile.TemporaryDirectory(prefix="tf-text2sql-", ignore_cleanup_errors=True)
        self._shown = await self._opened(0, "table", SHOWN_ROWS)
        return await super().reset()

    @tool(stateful=True)
    async def sql(self, query: str) -> ToolResult:
        """Run one SQLite query (read-only)."""
        return await in_thread(self.database.run, query)

    @property
    def database(self) -> Database:
        """Return what the model sees, for rewards that run its query."""
        assert self._shown is not None, "reset comes first"
        return self._shown

    async def reward(self, episode: Episode) -> Reward:
        """Return 1 if the answer gives the right rows on all databases. `shown`: on the one that the model sees."""
        query = _query_in(episode.trajectory.answer)
        shown = bool(query) and await self._same(query, 0)
        right = shown
        for variant in await in_thread(hidden_variants, self.task) if shown else ():
            right = right and await self._same(query, variant)
        return Reward(float(right), parts={"right": float(right), "shown": float(shown)})

    async def close(self) -> None:
        if self._shown is not None:
            await in_thread(self._shown.close)
        if self._folder is not None:
            await in_thread(self._folder.cleanup)

    def expert(self) -> Iterator[Message]:
        """Write what somebody would who does it right."""
        yield _try(str(self.task.answer))
        yield Message("assistant", str(self.task.answer))

    def novice(self, rng: random.Random) -> Iterator[Message]:
        """Make one of the usual mistakes: warm starts that contain some leave something to learn."""
        mistake = rng.choice(("answers in words", "forgets the condition", "asks and repeats a number"))
        words = DOMAINS[self.task.metadata["domain"]]
        if mistake == "answers in words":
            yield Message("assistant", f"The {words.people} are in the table.")
            return
        everything = f"SELECT * FROM {rng.choice((words.people, words.things, words.links))}"
        yield _try(everything)
        yield Message(
            "assistant", everything if mistake == "forgets the condition" else f"SELECT {rng.randint(1, 9)}"
        )

    async def _same(self, query: str, variant: int) -> bool:
        database = await self._opened(variant, "exact", COMPARED_ROWS)
        try:
            return await same_result(lambda text: in_thread(database.run, text), query, str(self.task.answer))
        finally:
            await in_thread(database.close)

    async def _opened(self, variant: int, form: Literal["table", "exact"], max_rows: int) -> Database:
        assert self._folder is not None, "reset comes first"
        path = Path(self._folder.name, f"{variant}.db")
        if not path.exists():
            await in_thread(_build, path, self.task, variant)
        return await in_thread(Database, path, timeout=QUERY_SECONDS, max_rows=max_rows, format=form)


def _try(query: str) -> Message:
    return Message("assistant", tool_calls=[ToolCall("sql", {"query": query})])


def _query_in(answer: str) -> str:
    """Return the answer without the fence that many models put around code."""
    match = _FENCE.fullmatch(answer.strip())
    return (match.group(1) if match else answer).strip()


def _task(task_id: str, rng: random.Random) -> Task:
    domain, kind = rng.choice(list(DOMAINS)), rng.choice(list(QUESTIONS))
    database = f"{rng.getrandbits(48):012x}"
    question, query = ask(kind, domain, database, rng)
    metadata = {"domain": domain, "database_seed": database, "kind": kind}
    return Task(task_id, f"{'; '.join(DOMAINS[domain].schema)}\n\n{question}", query, metadata)


def hidden_variants(task: Task) -> list[int]:
    """Return the first databases on which the right query finds something else than on the one that is shown (there
    constants are wrong), those first on which near misses do not find the same; any, if it is the same everywhere."""
    shown = Counter(_rows(task, 0, str(task.answer)))
    good = (
        variant
        for variant in range(1, MAX_VARIANTS)
        if _finds_something(rows := _rows(task, variant, str(task.answer))) and Counter(rows) != shown
    )
    unseen = _as_right(task, 0, _near_misses(str(task.answer)))
    chosen, passed_over = list[int](), list[int]()
    for variant in good:
        left = _as_right(task, variant, unseen)
        useful = len(left) < len(unseen) or len(chosen) + bool(unseen) < HIDDEN
        (chosen if useful else passed_over).append(variant)
        unseen = left
        if len(chosen) == HIDDEN:
            break
    return list(islice(chain(chosen, passed_over, endlessly(MAX_VARIANTS)), HIDDEN))


def _near_misses(query: str) -> list[str]:
    """Return the query with one slip each: a DISTINCT forgotten, > for >= or the other way round."""
    slips = ((r"\bDISTINCT ", ""), (">=", ">"), (">(?!=)", ">="), ("<=", "<"), ("<(?![=>])", "<="))
    return [miss for slip, other in slips if (miss := re.sub(slip, other, query, count=1)) != query]


def _as_right(task: Task, variant: int, queries: list[str]) -> list[str]:
    """Return the queries that give the rows of the right one."""
    right = Counter(_rows(task, variant, str(task.answer)))
    return [query for query in queries if Counter(_rows(task, variant, query)) == right]


def _finds_something(rows: list[Any]) -> bool:
    return bool(rows) and rows not in ([(None,)], [(0,)])


def _rows(task: Task, variant: int, query: str) -> list[Any]:
    """Return what a query finds in a database; a slip may leave no query, which finds nothing."""
    with contextlib.closing(sqlite3.connect(":memory:")) as connection:
        connection.executescript(script_of(task, variant))
        with contextlib.suppress(sqlite3.Error):
            return connection.execute(query).fetchall()
        return []


def _build(path: Path, task: Task, variant: int) -> None:
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA synchronous = OFF")  # thrown away after the episode
        connection.execute("PRAGMA journal_mode = OFF")
        connection.executescript(f"BEGIN;{script_of(task, variant)}COMMIT;")
