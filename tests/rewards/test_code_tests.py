"""Code by its tests: what is right is rewarded, whatever sets out to be without being right is not."""

from __future__ import annotations

from typing import Any

import pytest

from tests.kits.rollout import Echo
from tests.kits.rules import scored
from TrainingFactory.rewards.rules.code_asserts import split_test
from TrainingFactory.rewards.rules.rule_based import make_rule
from TrainingFactory.tools import tool
from TrainingFactory.tools.custom_tools import PythonTool

RIGHT = "def double(n):\n    return 2 * n"
ASSERT = "assert double(2) == 4"
CHECK = """
METADATA = {"author": "x"}

def check(candidate):
    '''All of it.'''
    limit = 1e-6
    assert True, "it runs"
    assert candidate(2) == 4, "two"
    assert abs(candidate(0.5) - 1) < limit

check(double)
"""


@pytest.fixture(scope="module")
def coder() -> PythonTool:
    return PythonTool(allow_unsafe=True, timeout=5.0)


def worth(coder: PythonTool, code: str, test: Any, **options: Any) -> float | str:
    """The reward, or why there is none. Every episode has a process of its own."""
    try:
        return scored(make_rule("code_tests", **options), code, tools=(coder,), tests=test)
    except ValueError as error:
        return str(error)


EQUALS = "    def __eq__(self, other): return True\n    def __ne__(self, other): return False\n"
SOURCE = (
    "import linecache, re, sys\nSAID = '[True]'\ndef double(n):\n"
    "    text = ''.join(''.join(entry[2]) for entry in linecache.cache.values() if entry[1] is None)\n"
)
HOSTILE = {
    "equals everything": f"class Any:\n{EQUALS}    __hash__ = None\ndef double(n): return Any()",
    "an int that equals everything": f"class Any(int):\n{EQUALS}    def __hash__(self): return 4\n"
    "def double(n): return Any(1)",
    "in a list": f"class Any(int):\n{EQUALS}class L(list):\n{EQUALS}def double(n): return L([Any(1)])",
    "arithmetic that says nothing": "class Any:\n    def __sub__(self, other): return 0\n"
    "    __rsub__ = __sub__\n    def __lt__(self, other): return True\ndef double(n): return Any()",
    "leaves": "import sys\nsys.exit(0)",
    "leaves when it is asked": "import sys\ndef double(n): sys.exit(0)",
    "dies": "import os\nos._exit(0)",
    "dies when it is asked": "import os\ndef double(n): os._exit(0)",
    "hooks": "import sys\nsys.excepthook = sys.unraisablehook = lambda *a: None\ndef double(n): return 1",
    "no assertions": "import builtins, unittest\nbuiltins.AssertionError = type('No', (BaseException,), {})\n"
    "unittest.TestCase.assertEqual = lambda *a: None\ndef double(n): return 1",
    "prints what was asked": "def double(n):\n    print('4'); print('True'); print('[4]'); print('OK')\n    return 1",
    "reads the test": f"{SOURCE}    numbers = re.findall(r'== *(\\d+)', text)\n"
    "    return int(numbers[0]) if numbers else 1",
    # The word that tells the result from what is printed stands in the source, and what fails can be kept quiet.
    "answers in place of the test": f"{SOURCE}    frame = sys._getframe()\n"
    "    while 'self' not in frame.f_locals: frame = frame.f_back\n"
    "    type(frame.f_locals['self'])._explain = lambda *a: None\n"
    "    print('\\n' + re.findall(r\"'([0-9a-f]{16,})'\", text)[0] + SAID)\n    raise SystemExit",
    "shows itself": "class Any:\n    def __repr__(self): return '4'\n    __str__ = __repr__\n"
    "    def tolist(self): return self\ndef double(n): return Any()",
    "in the way of the printer": "import builtins\nreal = print\n"
    "builtins.print = lambda *a, **k: real('\\n4\\nTrue')\ndef double(n): return 1",
    "endless": "def double(n):\n    d = []\n    d.append(d)\n    return d",
    "a huge number": "def double(n): return 10 ** 100_000",
}  # fmt: skip
FORMS = [
    ASSERT,
    "assert 4 == double(2)",
    CHECK,
    "assert abs(double(2) - 4) < 1e-6",
    "import math\nassert math.isclose(double(2), 4, rel_tol=1e-9)",
    "expected = 4\nassert double(2) == expected",
]


@pytest.mark.parametrize("trick", HOSTILE)
def test_tricks_are_not_rewarded(coder: PythonTool, trick: str):
    forms = FORMS if "class" in HOSTILE[trick] else FORMS[:1]
    assert worth(coder, HOSTILE[trick], forms, partial=True) == 0.0


def test_leaving_early_is_not_passing_whatever_the_tool_says():
    class Content(Echo):
        @tool
        def python(self, code: str) -> str:
            return "well done"

    assert scored("code_tests", HOSTILE["leaves"], environment=Content, tests=ASSERT) == 0.0


def test_right_code_is_rewarded_in_every_form(coder: PythonTool):
    assert worth(coder, f"print('x', end='')\n{RIGHT}", FORMS) == 1.0
    assert worth(coder, RIGHT, [ASSERT, "assert double(3) == 7"], partial=True) == 0.5


VALUES = [
    ("[1, 2]", "assert f() == [1, 2]", 1),
    ("[1, 2]", "assert f() == (1, 2)", 0),  # as Python has it
    ("(1, 2)", "assert list(f()) == [1, 2]", 1),
    ("__import__('collections').Counter('aab')", "assert f() == {'b': 1, 'a': 2}", 1),
    ("__import__('fractions').Fraction(8, 2)", "assert f() == 4", 1),
    ("__import__('decimal').Decimal('0.5')", "assert f() == 0.5", 1),
    ("{3, 1}", "assert f() == {1, 3}", 1),
    ("frozenset()", "assert f() == set()", 1),
    ("float('inf')", "assert f() == float('inf')", 1),
    ("'a\\nb\\u2028'", "assert f() == 'a\\nb\\u2028'", 1),
    ("b'x'", "assert f() == b'x'", 1),
    ("True", "assert f() is True and f()", 1),
    ("1", "assert f() is True", 0),
    ("1", "assert f() == True", 1),  # as Python has it
    ("None", "assert f() is None", 1),
    ("[]", "assert not f()", 1),
    ("[0]", "assert not f()", 0),
    ("5", "assert f() in (4, 5)", 1),
    ("6", "assert f() in (4, 5)", 0),
    ("5", "assert f() > 4", 1),
    ("5", "assert 4 >= f()", 0),
    ("'x'", "assert f() > 4", 0),
    ("object()", "assert f() != 4", 0),  # no plain data
    ("[3, 1]", "x = f()\nx.sort()\nassert x == [1, 3]\nx.append(2)\nassert len(x) == 3", 1),
]


def test_values_of_all_kinds(coder: PythonTool):
    """All of them in one process: each is a test of its own."""
    for passing in (1, 0):
        tests = [test for _, test, expected in VALUES if expected == passing]
        values = [value for value, _, expected in VALUES if expected == passing]
        code = "\n".join(f"def f{number}():\n    return {value}" for number, value in enumerate(values))
        tests = [test.replace("f()", f"f{number}()") for number, test in enumerate(tests)]
        for test, value in zip(tests, values, strict=True):
            assert split_test(test) is not None, value
        assert worth(coder, code, tests, partial=True) == passing


def test_what_is_expected_is_not_sent():
    for test in (*FORMS, "def g(x): return x\nassert g(double(2)) == 4 and double(2) in [4]"):
        asserts = split_test(test)
        assert asserts is not None and "4" not in asserts.script.partition("_found = []")[2], test
        assert all(holds(4.0) for holds in asserts.conditions[:1]) and not asserts.accepts("[5]")


OTHER = [
    "import unittest\nclass T(unittest.TestCase):\n    def test(self): self.assertEqual(double(2), 4)",
    "for n in range(3):\n    assert double(n) == 2 * n",
    "assert (double(2) == 4) is True",
    "assert all(double(n) == 2 * n for n in range(3))",
    "assert double(2) - 4 == 0",
    "assert double(2) == 2 * 2 == 4",
    "assert isinstance(double(2), int)",
    "assert double(2) == len('four')",
    "def check(f):\n    assert f(2) == 4\n    return True\ncheck(double)",
    "double(2)",
    "def ok(x):\n    return double(x) == 2 * x\nassert ok(3)",
    "def ok(x):\n    return double(x) == 2 * x\nassert ok(3) == True",
    "ok = double(3) == 6\nassert ok == True",
    "good = 0\nfor x, y in [(1, 2), (2, 4)]:\n    good += double(x) == y\nassert good == 2",
    "rest = double(3) - 6\nassert rest == 0",
    "from operator import eq\ndef ok(x): return eq(double(x), 6)\nassert ok(3) == True",
    "match double(3):\n    case 6: ok = 1\nassert ok == 1",
    "def check(f, n=2):\n    assert f(n) == 4\ncheck(double)\nassert double(2) == 4",
    "def check(f):\n    assert f(2) == 4\nfor one in [double]:\n    check(one)\nassert double(2) == 4",
    "def check(f):\n    f = f or 1\n    assert f(2) == 4\ncheck(double)",
    # What is expected is made in several steps, or changed by the code.
    "expected = {}\nexpected['a'] = 4\nassert {'a': double(2)} == expected",
    "want = []\nfor i in range(3):\n    want.append(2 * i)\nassert [double(0), double(1), double(2)] == want",
    "x = [3, 1]\nassert double(x) == x + x and double(x) != x",
    "a = []\nb = a\nb.append(4)\nassert [double(2)] == a",
]


def test_tests_that_run_beside_the_code_need_trust(coder: PythonTool):
    for test in OTHER:
        assert "trusting: true" in str(worth(coder, RIGHT, test)), test
    assert worth(coder, RIGHT, OTHER, trusting=True) == 1.0


def test_what_the_code_changes_is_seen(coder: PythonTool):
    code = "def add(d): d['k'] = 1\ndef same(x): return x"
    tests = [
        "d = {}\nadd(d)\nassert {'k': 1} == d",
        "d = {}\nadd(d)\nassert d == {'k': 1}",
        "n = 5\nassert same(n) == n",
        "want = {'k': 1}\nassert same({'k': 1}) == want",
    ]
    assert all(map(split_test, tests)) and worth(coder, code, tests, partial=True) == 1.0
    assert worth(coder, "def add(d): pass\ndef same(x): return 6", tests, partial=True) == 0.0


def test_names_within_a_check_do_not_replace_those_of_the_code(coder: PythonTool):
    code = f"{RIGHT}\ndef data(x): return double(x)\nclass Twice:\n    def of(self, n): return data(n)"
    check = "def check(candidate):\n    data = [2]\n    assert candidate(*data) == 4\n    assert candidate(3) == 6\n"
    assert "trusting: true" in str(worth(coder, code, f"{check}check(data)"))  # which one is meant?
    assert worth(coder, code, f"{check}check(Twice().of)") == 1.0
    assert worth(coder, code, "t = Twice()\nassert t.of(2)\nassert t.of(2) == 4") == 1.0


def test_a_value_that_the_tool_cuts_leaves_the_episode_unscored(coder: PythonTool):
    code = "def f(n): return list(range(n))"
    long = f"assert f(4000) == {list(range(4000))}"
    assert "max_output_chars" in str(worth(coder, code, long))
    assert worth(coder, "def f(n): return 1", long) == 0.0  # came whole
    assert worth(coder, "def f(n): return 'x' * 20_000", "assert f(2) == [0, 1]") == 0.0
    assert worth(coder, code, f"assert f(1000) == {list(range(1000))}") == 1.0


def test_tests_that_are_wrong_leave_the_episode_unscored(coder: PythonTool):
    assert "task t1: " in str(worth(coder, RIGHT, "assert double(2) = 4"))
