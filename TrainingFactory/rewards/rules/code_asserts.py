"""Tests such as `assert double(2) == 4`, taken apart: `double(2)` is computed in the sandbox, beside the code under
test, and the 4 stays here, where no code can find it, equal everything, or change what a comparison means. A test that
compares there, or whose outcome can be guessed without computing anything, cannot be taken apart."""

from __future__ import annotations

import ast
import builtins
import math
import operator
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from textwrap import indent
from typing import Any

Holds = Callable[[Any], bool]
OPERATORS: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
    ast.GtE: operator.ge, ast.Is: operator.is_, ast.IsNot: operator.is_not,
    ast.In: lambda value, listed: value in listed, ast.NotIn: lambda value, listed: value not in listed,
}  # fmt: skip
TURNED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.Eq, ast.NotEq: ast.NotEq, ast.Lt: ast.Gt, ast.LtE: ast.GtE, ast.Gt: ast.Lt, ast.GtE: ast.LtE,
}  # fmt: skip
_COMPARING = ast.Compare | ast.Sub | ast.Match  # what an object that equals everything can answer as it likes
_LEAVING = ast.Return | ast.Yield | ast.YieldFrom | ast.Global | ast.Nonlocal
# Runs in the sandbox: a value as Python writes it. What is no plain data has no text, and then the test fails.
SHOWING = """
def _shown(value):
    if value is None or isinstance(value, bool):
        return repr(value)
    if isinstance(value, (bytes, bytearray)):
        return bytes.__repr__(bytes(value))
    for kind in (str, int, float, complex):
        if isinstance(value, kind):
            return kind.__repr__(value).replace("inf", "1e999") if kind is float else kind.__repr__(value)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_shown(key)}: {_shown(one)}" for key, one in value.items()) + "}"
    if isinstance(value, (set, frozenset)):
        return "{" + ", ".join(map(_shown, value)) + "}" if value else "set()"
    if isinstance(value, list):
        return "[" + ", ".join(map(_shown, value)) + "]"
    if isinstance(value, tuple):
        return "(" + "".join(_shown(one) + ", " for one in value) + ")"
    if hasattr(value, "tolist"):  # NumPy's
        return _shown(value.tolist())
    above, below = value.as_integer_ratio()  # fractions and decimals
    return _shown(above / below if above % below else above // below)

_found = []
"""


@dataclass(slots=True, frozen=True)
class Asserts:
    """Hold a test that was taken apart."""

    script: str  # computes the values, and leaves what `_shown` writes of them in `_found`
    wanted: Sequence[Holds]
    size: int = 0  # characters of the test that are not in the script; what is expected has no more

    def hold(self, shown: str) -> bool:
        """Return whether these are the values that are wanted, written as a list."""
        try:
            values = ast.literal_eval(shown)
        except (ValueError, SyntaxError, MemoryError, RecursionError, TypeError):
            return False
        if not isinstance(values, list) or len(values) != len(self.wanted):
            return False
        return all(map(_holds, self.wanted, values))


def read_asserts(test: str) -> Asserts | None:
    """Return None for a test that cannot be taken apart; raise ValueError for one that is not Python."""
    try:
        tree = ast.parse(test)
    except (SyntaxError, ValueError, RecursionError) as error:
        raise ValueError(f"a test is not Python ({error})") from error
    try:
        reading = _Reading(list(_statements(tree)))
        sent = [ast.unparse(ast.fix_missing_locations(each)) for each in reading.sent()]
    except _Other:
        return None
    if not reading.wanted:
        return None
    body = "\n".join(sent)
    script = f"{SHOWING}\ndef _run_here():\n{indent(body, '    ')}\n_run_here()"
    return Asserts(script, reading.wanted, max(0, len(test) - len(body)))


class _Other(Exception):
    """Not of the form that can be taken apart."""


def _statements(tree: ast.Module) -> Iterator[ast.stmt]:
    """Yield the statements of a test; of `check(double)` these are `candidate = double` and the body."""
    checks = {each.name: each for each in tree.body if isinstance(each, ast.FunctionDef) and _is_check(each)}
    for statement in tree.body:
        match statement:
            case ast.FunctionDef(name) if name in checks:
                continue
            case ast.Expr(ast.Call(ast.Name(name), [ast.expr() as given], [])) if name in checks:
                [parameter] = checks[name].args.args
                names = {parameter.arg, *(each.id for each in _names(given))}
                if isinstance(given, ast.Starred) or names & set(_bound(checks[name].body)):
                    raise _Other
                yield ast.Assign([ast.Name(parameter.arg, ast.Store())], given)
                yield from checks[name].body
            case ast.ImportFrom(names=[ast.alias("*")]):  # no function may do so
                raise _Other
            case _ if any(name.id in checks for name in _names(statement)):
                raise _Other
            case _:
                yield statement


def _is_check(function: ast.FunctionDef) -> bool:
    """Return whether the function only tests what it is given."""
    return (
        any(isinstance(each, ast.Assert) for each in function.body)
        and not any(isinstance(each, _LEAVING) for each in ast.walk(function))
        and not function.decorator_list
        and len(function.args.args) == 1
        and not function.args.defaults
    )


class _Reading:
    def __init__(self, statements: Sequence[ast.stmt]) -> None:
        self.statements = statements
        self.wanted: list[Holds] = []  # what must hold for the values
        bound = Counter(_bound(statements))
        given = [pair for pair in map(_assigned, statements) if pair and bound[pair[0]] == 1]
        # Names that the test gives, apart from objects of the code: what they say about the code can be guessed.
        self.own = set(bound)
        self.own -= {name for name, value in given if self._is_of_code(value)}
        # Names of values that stand in the test. What is used other than in a comparison may be changed there, and a
        # list is then not what is written down.
        used = Counter(name.id for each in statements for name in _names(each, ast.Load))
        used.subtract(_compared(statements))
        self.known: dict[str, Any] = {}
        for name, value in given:
            if (found := self.literal(value)) and (_fixed(found[0]) or not used[name]):
                self.known[name] = found[0]

    def sent(self) -> list[ast.stmt]:
        """Return what the sandbox gets."""
        found = [each for statement in self.statements for each in self._rewritten(statement)]
        used = {name.id for each in found if self._expected(each) is None for name in _names(each)}
        return [each for each in found if (name := self._expected(each)) is None or name in used]

    def _expected(self, statement: ast.stmt) -> str | None:
        """Return the name that the statement gives to a value of the test, which the code must not see."""
        given = _assigned(statement)
        return given[0] if given is not None and given[0] in self.known else None

    def _rewritten(self, statement: ast.stmt) -> Iterator[ast.stmt]:
        if isinstance(statement, ast.Assert):
            for expression, holds in self._conditions(statement.test):
                self.wanted.append(holds)
                yield ast.parse(f"_found.append(_shown({ast.unparse(expression)}))").body[0]
        elif any(_asserts(node) or isinstance(node, _COMPARING) for node in ast.walk(statement)):
            raise _Other
        else:
            yield statement

    def _conditions(self, test: ast.expr) -> Iterator[tuple[ast.expr, Holds]]:
        """Yield what is to be computed, and what must hold for its value."""
        if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
            for each in test.values:
                yield from self._conditions(each)
        elif isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            yield self._call(test.operand), operator.not_
        elif isinstance(test, ast.Compare) and len(test.ops) == 1:
            yield self._comparison(test.left, type(test.ops[0]), test.comparators[0])
        elif _called(test) in ("math.isclose", "isclose"):
            assert isinstance(test, ast.Call)
            yield self._isclose(test)
        elif not (isinstance(test, ast.Constant) and test.value):  # assert True says nothing
            yield self._call(test), bool

    def literal(self, node: ast.expr) -> tuple[Any] | None:
        """Return the value that the node writes down, if it does."""
        if isinstance(node, ast.Name) and node.id in self.known:
            return (self.known[node.id],)
        try:
            if ast.unparse(node) in ("float('inf')", "math.inf"):
                return (math.inf,)
            return (ast.literal_eval(node),)
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            return None

    def _split(self, one: ast.expr, other: ast.expr) -> tuple[ast.expr, Any]:
        """Return what is computed and the value that it is compared with, whichever side that is."""
        for left, right in ((one, other), (other, one)):
            if expected := self.literal(right):
                return self._computed(left), expected[0]
        raise _Other

    def _comparison(self, left: ast.expr, kind: type[ast.cmpop], right: ast.expr) -> tuple[ast.expr, Holds]:
        expected = self.literal(right)
        if expected is None and kind in TURNED and (expected := self.literal(left)):
            left, kind = right, TURNED[kind]
        if expected is None:
            raise _Other
        compare, value = OPERATORS[kind], expected[0]
        match left:
            case ast.Call(ast.Name("abs"), [ast.BinOp(one, ast.Sub(), other)], []):
                computed, reference = self._split(one, other)
                return computed, lambda given: compare(abs(given - reference), value)
        guessed = kind is not ast.Eq or (isinstance(value, bool) and self._calls_own(left))
        computed = self._call(left) if guessed else self._computed(left)
        return computed, lambda given: compare(given, value)

    def _isclose(self, node: ast.Call) -> tuple[ast.expr, Holds]:
        given = {each.arg: self.literal(each.value) for each in node.keywords}
        if len(node.args) != 2 or not given.keys() <= {"rel_tol", "abs_tol"} or None in given.values():
            raise _Other
        limits = {str(name): value[0] for name, value in given.items() if value}
        computed, reference = self._split(*node.args)
        return computed, lambda value: math.isclose(value, reference, **limits)

    def _computed(self, node: ast.expr) -> ast.expr:
        """Return an expression in which nothing is compared with, or taken off, what is written beside it."""
        if any(isinstance(each, _COMPARING | ast.BoolOp | ast.NamedExpr) for each in ast.walk(node)):
            raise _Other
        return node

    def _call(self, node: ast.expr) -> ast.expr:
        """Return a call of the code itself with plain arguments: what a value that can be guessed may be taken from."""
        inner = [each for child in ast.iter_child_nodes(node) for each in ast.walk(child)]
        nested = any(isinstance(each, ast.Call | ast.comprehension | ast.Lambda) for each in inner)
        if nested or not isinstance(node, ast.Call) or not self._is_of_code(node):
            raise _Other
        return self._computed(node)

    def _is_of_code(self, node: ast.expr) -> bool:
        """Return whether it calls, or is, what is neither Python's nor the test's."""
        first = (_called(node) or _dotted(node) or "").partition(".")[0]
        return bool(first) and not hasattr(builtins, first) and first not in self.own

    def _calls_own(self, node: ast.expr) -> bool:
        return any(
            isinstance(each, ast.Call) and self.own & {name.id for name in _names(each.func)}
            for each in ast.walk(node)
        )


def _assigned(statement: ast.stmt) -> tuple[str, ast.expr] | None:
    """Return the name and the value of `name = value`."""
    match statement:
        case ast.Assign([ast.Name(name)], value):
            return name, value
    return None


def _bound(statements: Sequence[ast.stmt]) -> Iterator[str]:
    """Yield the names that are given to something, each as often as that is done."""
    for node in (node for statement in statements for node in ast.walk(statement)):
        match node:
            case ast.Name(name, ast.Store() | ast.Del()) | ast.ExceptHandler(name=str(name)) | ast.arg(name):
                yield name
            case ast.FunctionDef(name) | ast.AsyncFunctionDef(name) | ast.ClassDef(name):
                yield name
            case ast.alias(name, other):
                yield (other or name).partition(".")[0]


def _compared(statements: Sequence[ast.stmt]) -> Iterator[str]:
    """Yield the names that stand on one side of a comparison in an assert, each as often as it does."""
    for test in (each.test for each in statements if isinstance(each, ast.Assert)):
        for node in ast.walk(test):
            if isinstance(node, ast.Compare):
                yield from (side.id for side in (node.left, *node.comparators) if isinstance(side, ast.Name))


def _names(root: ast.AST, context: type[ast.expr_context] = ast.expr_context) -> Iterator[ast.Name]:
    return (node for node in ast.walk(root) if isinstance(node, ast.Name) and isinstance(node.ctx, context))


def _fixed(value: Any) -> bool:
    """Return whether nothing can change it."""
    return all(map(_fixed, value)) if isinstance(value, tuple) else not isinstance(value, list | dict | set)


def _called(node: ast.AST) -> str | None:
    """Return the plain name of what a call calls: `f`, `Solution.run`."""
    return _dotted(node.func) if isinstance(node, ast.Call) else None


def _dotted(node: ast.AST) -> str | None:
    name = ast.unparse(node)
    return name if name.replace(".", "_").isidentifier() else None


def _asserts(node: ast.AST) -> bool:
    """Return whether it tests something: an assert, or a call of `self.assertEqual` and its like."""
    name = _called(node) or ""
    return isinstance(node, ast.Assert) or name.rpartition(".")[2].startswith("assert")


def _holds(holds: Holds, value: Any) -> bool:
    try:
        return bool(holds(value))
    except (TypeError, ValueError, ArithmeticError, RecursionError):
        return False
