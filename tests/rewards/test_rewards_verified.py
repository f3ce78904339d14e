from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from tests.kits.rollout import Echo
from tests.kits.rules import reward as rewarded
from tests.kits.rules import scored
from TrainingFactory.common.sql.compare import has_order_by
from TrainingFactory.rewards.rules.tool_verified import make_verifier
from TrainingFactory.tools import tool
from TrainingFactory.tools.custom_tools import PythonTool, SqlTool
from TrainingFactory.types import Reward, ToolFailure

SCHEMA = "CREATE TABLE t (n INTEGER, s TEXT, x REAL);"


def database(path: Path, rows: str) -> Path:
    connection = sqlite3.connect(path)
    connection.executescript(f"{SCHEMA} INSERT INTO t VALUES {rows};")
    connection.close()
    return path


@pytest.fixture
def shown(tmp_path: Path) -> Path:
    return database(tmp_path / "a.db", "(1,'a',0.1),(2,'b',0.2),(2,'b',0.3),(3,NULL,0.7)")


@pytest.fixture
def hidden(tmp_path: Path) -> Path:
    return database(tmp_path / "b.db", "(4,'a',0.1),(5,'b',0.2)")


RIGHT = "SELECT n, s FROM t"
ON_A = [
    (RIGHT, RIGHT, 1),
    ("```sql\nSELECT n AS number, s FROM t ORDER BY n DESC;\n```", RIGHT, 1),  # order does not matter here
    ("SELECT n, s FROM t ORDER BY n DESC", f"{RIGHT} ORDER BY n", 0),
    ("SELECT n, s FROM t ORDER BY n, x", f"{RIGHT} ORDER BY n, x", 1),
    ("SELECT DISTINCT n, s FROM t", RIGHT, 0),
    ("SELECT s, n FROM t", RIGHT, 0),
    ("SELECT n FROM t", RIGHT, 0),
    ("SELECT n * 1.0, s FROM t", RIGHT, 1),
    ("SELECT CAST(n AS TEXT), s FROM t", RIGHT, 0),
    ("SELECT n, COALESCE(s, 'NULL') FROM t", RIGHT, 0),  # the text NULL is not NULL
    ("SELECT 0.1 + 0.2 + 0.3 + 0.7", "SELECT SUM(x) FROM t", 1),
    ("SELECT 1.31", "SELECT SUM(x) FROM t", 0),
    ("The rows are 1, 2, 2 and 3.", RIGHT, 0),
    ("", RIGHT, 0),
]
HOSTILE = [
    "DELETE FROM t",
    "DROP TABLE t",
    "ATTACH 'b.db' AS other",
    f"{RIGHT}; DELETE FROM t",
    "PRAGMA writable_schema = 1",
    "SELECT load_extension('x')",
    "WITH RECURSIVE r(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM r) SELECT n, 'a' FROM r",  # huge
    "WITH RECURSIVE r(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM r) SELECT COUNT(*), 'a' FROM r",  # endless
    "SELECT " + "(" * 5000,
    "\x00",
]


@pytest.mark.parametrize(("said", "right", "expected"), ON_A)
def test_queries_by_their_rows(shown: Path, said: str, right: str, expected: float):
    assert scored(make_verifier("sql_execution"), said, right, database=str(shown)) == expected
    through = make_verifier("sql_execution")
    assert scored(through, said, right, (SqlTool(shown, format="json"),)) == expected


@pytest.mark.parametrize("said", HOSTILE)
def test_hostile_queries_are_worth_nothing_and_change_nothing(shown: Path, said: str):
    before = shown.read_bytes()
    reward = make_verifier("sql_execution", timeout=0.2, max_rows=50)
    assert scored(reward, said, RIGHT, database=str(shown)) == 0
    assert scored(reward, said, RIGHT, (SqlTool(shown, timeout=0.2),)) == 0
    assert scored(reward, RIGHT, RIGHT, database=str(shown)) == 1
    assert shown.read_bytes() == before


def test_constants_are_right_on_one_database_only(shown: Path, hidden: Path):
    reward, right = make_verifier("sql_execution"), "SELECT MAX(n) FROM t"
    assert rewarded(reward, "SELECT 3", right, database=str(shown)) == Reward(1, parts={"sql_execution": 1})
    assert scored(reward, "SELECT 3", right, database=[str(shown), str(hidden)]) == 0
    first = "SELECT n FROM t ORDER BY n DESC LIMIT 1"
    assert scored(reward, first, right, database=[str(shown), str(hidden)]) == 1


def test_what_cannot_be_verified_is_not_zero(shown: Path):
    reward = make_verifier("sql_execution")
    with pytest.raises(ValueError, match="task t1: the reference query failed: SQL error: no such table"):
        scored(reward, RIGHT, "SELECT n FROM gone", database=str(shown))
    with pytest.raises(ValueError, match="task t1: the reference query returns more than"):
        scored(make_verifier("sql_execution", max_rows=2), RIGHT, RIGHT, database=str(shown))
    with pytest.raises(ValueError, match="SQLite file not found"):
        scored(reward, RIGHT, RIGHT, database=str(shown) + ".gone")
    with pytest.raises(ValueError, match="no answer to compare with"):
        scored(reward, RIGHT, None, database=str(shown))
    with pytest.raises(ToolFailure, match="no tool 'sql'"):
        scored(reward, RIGHT, RIGHT)
    with pytest.raises(ValueError, match="status error"):
        scored(reward, RIGHT, RIGHT, database=str(shown), status="error")
    assert scored(reward, RIGHT, RIGHT, database=str(shown), status="max_turns") == 0
    # As many rows as can be shown are right, and then one more.
    cut = make_verifier("sql_execution", max_rows=4)
    assert scored(cut, RIGHT, RIGHT, database=str(shown)) == 1
    assert scored(cut, f"{RIGHT} UNION ALL SELECT 9, 'z'", RIGHT, database=str(shown)) == 0


@pytest.mark.parametrize(
    ("ordered", "query"),
    [
        (True, "SELECT 1 ORDER BY 1"),
        (True, "select a from (select 1) order\n by a"),
        (True, "WITH x AS (SELECT 1) SELECT 1 Order By 1"),
        (False, "SELECT 1"),
        (False, "SELECT * FROM (SELECT 1 ORDER BY 1)"),
        (False, "SELECT 'order by'"),
        (False, 'SELECT "order by" FROM t -- ORDER BY 1'),
        (False, "SELECT 1 /* (ORDER BY 1 */"),
        (False, "SELECT row_number() OVER (ORDER BY n) FROM t"),
        (False, "SELECT border, bystander FROM t"),
        (False, "SELECT '(' FROM (SELECT 1 ORDER BY 1)"),
    ],
)
def test_which_queries_order_their_rows(ordered: bool, query: str):
    assert has_order_by(query) == ordered


@pytest.fixture(scope="module")
def python() -> PythonTool:
    return PythonTool(allow_unsafe=True, timeout=2.0)


CASES = [{"args": [2], "expected": 4}, {"args": [3], "expected": 6}]


@pytest.mark.parametrize(
    ("code", "share"),
    [
        ("```python\ndef double(n):\n    return 2 * n\n```", 1.0),
        ("def double(n):\n    print('noise')\n    return n + n", 1.0),
        ("def double(n):\n    return 4", 0.5),
        ("def double(n):\n    return 2.0 * n", 1.0),
        ("def double(n):\n    return str(2 * n)", 0.0),
        ("def double(n):\n    return True", 0.0),
        ("def double(n:", 0.0),
        ("import sys\nsys.exit(0)", 0.0),
        ("def double(n):\n    return None", 0.0),
        # equals everything, in Python
        ("class Any(int):\n    def __eq__(self, other): return True\ndef double(n):\n    return Any(1)", 0.0),
        # prints what it thinks is wanted, several times
        (
            "import sys\ndef double(n):\n    words = [c for c in sys._getframe(1).f_code.co_consts if type(c) is str]\n"
            "    [print(w + str(v)) for w in words for v in (4, 6)]\n    return 4",
            0.0,
        ),
    ],
)
def test_code_by_what_it_computes(python: PythonTool, code: str, share: float):
    data: dict[str, Any] = {"cases": CASES, "entry": "double"}
    assert scored(make_verifier("code_cases", partial=True), code, tools=(python,), **data) == share
    if share in (0.5, 1.0):
        whole = make_verifier("code_cases", entry="double")
        assert scored(whole, code, tools=(python,), cases=CASES) == float(share == 1)


def test_code_with_values_of_all_kinds(python: PythonTool):
    code = "def f(a, b=0):\n    return {'a': (a, [0.1 + 0.2]), 'b': b}"
    cases = [{"args": ["x"], "expected": {"a": ["x", [0.3]], "b": 0}}]
    assert scored(make_verifier("code_cases"), code, tools=(python,), cases=cases, entry="f") == 1
    wrong = [{"args": ["x"], "expected": {"a": ["x", [0.3]]}}]
    assert scored(make_verifier("code_cases"), code, tools=(python,), cases=wrong, entry="f") == 0
    truth = [{"args": [], "expected": 1}]  # True is not 1
    code_cases = make_verifier("code_cases", entry="f")
    assert scored(code_cases, "def f(): return True", tools=(python,), cases=truth) == 0
    for data, told in (
        ({"cases": CASES}, "entry is ''"),
        ({"cases": CASES, "entry": "f; import os"}, "entry is 'f; import os'"),
        ({"entry": "f"}, "metadata.cases must be a list such as"),
        (
            {"entry": "f", "cases": [{"args": 3, "expected": 1}]},
            "metadata.cases must be a list such as",
        ),
    ):
        with pytest.raises(ValueError, match=told):
            scored(make_verifier("code_cases"), code, tools=(python,), **data)


def test_a_result_that_the_tool_cuts_leaves_the_episode_unscored(python: PythonTool):
    reward = make_verifier("code_cases", entry="f")
    cases = [{"args": [12_000], "expected": "a" * 12_000}]
    with pytest.raises(ValueError, match="max_output_chars"):
        scored(reward, "def f(n): return 'a' * n", tools=(python,), cases=cases)
    assert scored(reward, "def f(n): return 'a'", tools=(python,), cases=cases) == 0
    short = [{"args": [12_000], "expected": "a"}]
    assert scored(reward, "def f(n): return 'a' * n", tools=(python,), cases=short) == 0


def test_cases_run_side_by_side():
    """Where the tool can: here it answers nobody before all have asked."""
    asked: list[str] = []

    class Patient(Echo):
        @tool(ordered=False)
        async def python(self, code: str) -> str:
            asked.append(code)
            async with asyncio.timeout(20):
                while len(asked) < len(CASES):
                    await asyncio.sleep(0)
            return "no"

    reward = make_verifier("code_cases", entry="f", partial=True)
    assert scored(reward, "def f(): pass", environment=Patient, cases=CASES) == 0
    assert len(asked) == len(CASES)


def test_the_same_code_makes_the_same_calls():
    """Else no recording could answer them."""
    sent: list[str] = []

    class Listening(Echo):
        @tool
        async def python(self, code: str) -> str:
            sent.append(code)
            return "no"

    for _ in range(2):
        reward = make_verifier("code_cases", entry="f", partial=True)
        scored(reward, "def f(n): return n", environment=Listening, cases=CASES)
    assert sorted(sent[:2]) == sorted(sent[2:]) and sent[0] != sent[1]


def test_code_that_never_ends_is_stopped_once(python: PythonTool):
    cases = [{"args": [], "expected": 1}] * 100
    endless = "def f():\n    while True: pass"
    assert scored(make_verifier("code_cases", entry="f"), endless, tools=(python,), cases=cases) == 0


CALCULATED = [
    ("The answer is 1,234.", {"expression": "1000+234"}, 1),
    ("1235", {"expression": "1000+234"}, 0),
    ("It is 0.3333333", {"expression": "1/3"}, 1),
    ("I do not know", {"expression": "1+1"}, 0),
    ("7", {"answer": 7}, 1),
]
EXPRESSIONS = [  # of 3, 4 and 5, for 32
    ("Answer: (3+5)*4", 1),
    ("(3+5)*4 = 32", 1),
    ("(3+4)*4 = 32", 0),  # 4 twice
    ("3+5 = 32", 0),  # not so
    ("32", 0),  # none of the numbers
    ("(3+5)*4*1", 0),
    ("3+5*4", 0),
    ("(3+5)/0", 0),
    ("__import__('os')", 0),
    ("Answer: (3+5)×4", 1),
    ("Answer: $(3+5)\\times 4$", 1),
    ("32 = (3+5)*4", 1),
    ("(3+5)*4 = 8*4 = 32", 1),
    ("32 = 32", 0),
    ("4*8 = 32", 0),
]
NOT_GIVEN = [  # found in every notation
    ("8 thousand", [8], 8000),
    ("50%", [50], 0.5),
    ("5 万", [5], 50000),
    ("6½", [6], 6.5),
    ("1.5e3", [1.5, 3], 1500),
    ("10*.5", [10, 5], 5),
    ("3 kg", [3], 3),
]


@pytest.mark.parametrize(
    ("text", "expressions", "data", "expected"),
    [
        *((text, False, data, expected) for text, data, expected in CALCULATED),
        *((text, True, {"answer": 32, "numbers": [3, 4, 5]}, expected) for text, expected in EXPRESSIONS),
        *((text, True, {"answer": answer, "numbers": given}, 0) for text, given, answer in NOT_GIVEN),
    ],
)
def test_answers_by_the_calculator(text: str, expressions: bool, data: dict[str, Any], expected: float):
    assert scored(make_verifier("calculated", expressions=expressions), text, **data) == expected


def test_what_cannot_be_calculated():
    for expression in ("1/0", "two", "(" * 150):
        with pytest.raises(ValueError, match="task t1"):
            scored(make_verifier("calculated"), "2", expression=expression)
    for numbers in (3, [None], ["two"]):
        with pytest.raises(ValueError, match="task t1"):
            scored(make_verifier("calculated", expressions=True), "2", 2, numbers=numbers)
