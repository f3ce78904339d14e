"""Tests such as `assert double(2) == 4`, taken apart: `double(2)` is computed in the sandbox, beside the code under
test, and the 4 stays here, where no code can find it, equal everything, or change what a comparison means."""

from __future__ import annotations

import ast
import builtins
import copy
import math
import operator
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
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
FOLDED: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Pow: operator.pow
}  # fmt: skip
MAX_POWER, MAX_BASE = 200, 10**6
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
    """`script` computes the values, one for each of `wanted`, and leaves what `_shown` writes of them in `_found`."""

    script: str
    wanted: Sequence[Holds]

    def hold(self, shown: str) -> bool:
        """Whether these are the values that are wanted, written as a list."""
        try:
            values = ast.literal_eval(shown)
        except (ValueError, SyntaxError, MemoryError, RecursionError, TypeError):
            return False
        if not isinstance(values, list) or len(values) != len(self.wanted):
            return False
        return all(_holds(one, value) for one, value in zip(self.wanted, values, strict=True))


def read_asserts(test: str) -> Asserts | None:
    """None for a test that cannot be taken apart; ValueError for one that is not Python."""
    try:
        tree = ast.parse(test)
    except (SyntaxError, ValueError, RecursionError) as error:
        raise ValueError(f"a test is not Python ({error})") from error
    statements = list(_statements(tree))
    reading = _Reading(statements)
    lines: list[str] = []
    wanted: list[Holds] = []
    try:
        for statement in statements:
            if not isinstance(statement, ast.Assert):
                if any(map(_asserts, ast.walk(statement))):
                    return None
                lines += [] if reading.only_expected(statement) else [ast.unparse(statement)]
                continue
            for expression, holds in reading.conditions(statement.test):
                lines.append(f"_found.append(_shown({ast.unparse(expression)}))")
                wanted.append(holds)
    except _Other:
        return None
    return Asserts("\n".join([SHOWING, *lines]), wanted) if wanted else None


class _Other(Exception):
    """Not of the form that can be taken apart."""


class _Reading:
    def __init__(self, statements: Sequence[ast.stmt]) -> None:
        nodes = [node for statement in statements for node in ast.walk(statement)]
        stored = Counter(
            node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        )
        self.imported = {
            (alias.asname or alias.name).partition(".")[0]
            for node in nodes
            if isinstance(node, ast.Import | ast.ImportFrom)
            for alias in node.names
        }
        self.known: dict[str, Any] = {}  # names of values that stand in the test
        for statement in statements:
            if (
                (given := _assigned(statement))
                and stored[given[0]] == 1
                and (found := self.literal(given[1]))
            ):
                self.known[given[0]] = found[0]
        self.needed = self._sent_names(statements)

    def only_expected(self, statement: ast.stmt) -> bool:
        """Whether it gives a name to what is expected, which the code must not see."""
        given = _assigned(statement)
        return given is not None and given[0] in self.known and given[0] not in self.needed

    def conditions(self, test: ast.expr) -> Iterator[tuple[ast.expr, Holds]]:
        """What is to be computed, and what must hold for its value."""
        if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
            for each in test.values:
                yield from self.conditions(each)
        elif isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            yield self._call(test.operand), lambda value: not value
        elif isinstance(test, ast.Compare) and len(test.ops) == 1:
            yield self._comparison(test.left, type(test.ops[0]), test.comparators[0])
        elif close := self._isclose(test):
            yield close
        else:
            yield self._call(test), bool

    def literal(self, node: ast.expr) -> tuple[Any] | None:
        """The value that the node writes down, if it does."""
        if isinstance(node, ast.Name) and node.id in self.known:
            return (self.known[node.id],)
        try:
            if ast.unparse(node) in ("float('inf')", "math.inf"):
                return (math.inf,)
            if isinstance(node, ast.BinOp):  # 10**9 + 7
                return (_whole(node),)
            return (ast.literal_eval(node),)
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            return None

    def _comparison(self, left: ast.expr, kind: type[ast.cmpop], right: ast.expr) -> tuple[ast.expr, Holds]:
        expected = self.literal(right)
        if expected is None and kind in TURNED and (expected := self.literal(left)):
            left, kind = right, TURNED[kind]
        if expected is None:
            raise _Other
        value = expected[0]
        if near := self._distance(left):
            computed, reference = near
            return computed, lambda given: OPERATORS[kind](abs(given - reference), value)
        compare = OPERATORS[kind]
        computed = self._computed(left) if kind is ast.Eq else self._call(left)
        return computed, lambda given: bool(compare(given, value))

    def _distance(self, node: ast.expr) -> tuple[ast.expr, Any] | None:
        """`abs(f(2) - 4)`: what is computed, and the 4."""
        if not isinstance(node, ast.Call) or _called(node) != "abs" or len(node.args) != 1:
            return None
        inner = node.args[0]
        if not isinstance(inner, ast.BinOp) or not isinstance(inner.op, ast.Sub):
            return None
        for one, other in ((inner.left, inner.right), (inner.right, inner.left)):
            if value := self.literal(other):
                return self._computed(one), value[0]
        return None

    def _isclose(self, node: ast.expr) -> tuple[ast.expr, Holds] | None:
        if not isinstance(node, ast.Call) or _called(node) not in ("math.isclose", "isclose"):
            return None
        given = {each.arg: self.literal(each.value) for each in node.keywords}
        if len(node.args) != 2 or not given.keys() <= {"rel_tol", "abs_tol"} or None in given.values():
            raise _Other
        limits = {str(name): value[0] for name, value in given.items() if value}
        for one, other in (node.args, node.args[::-1]):
            if expected := self.literal(other):
                return self._computed(one), lambda value: math.isclose(value, expected[0], **limits)
        raise _Other

    def _computed(self, node: ast.expr) -> ast.expr:
        """An expression whose value cannot be had without knowing what is expected: in it nothing is compared with, or
        taken off, something that is written beside it."""
        if any(
            isinstance(each, ast.Compare | ast.BoolOp | ast.Sub | ast.NamedExpr) for each in ast.walk(node)
        ):
            raise _Other
        return node

    def _call(self, node: ast.expr) -> ast.expr:
        """A call of the code itself with plain arguments: what a value that can be guessed may be taken from."""
        name = _called(node) or ""
        first = name.partition(".")[0]
        inner = [each for child in ast.iter_child_nodes(node) for each in ast.walk(child)]
        if not name or hasattr(builtins, first) or first in self.imported or any(map(_calls_itself, inner)):
            raise _Other
        return self._computed(node)

    def _sent_names(self, statements: Sequence[ast.stmt]) -> set[str]:
        """Names that stand in what the sandbox gets."""
        sent: list[ast.AST] = []
        for statement in statements:
            if isinstance(statement, ast.Assert):
                try:
                    sent += [expression for expression, _ in self.conditions(statement.test)]
                except _Other:
                    return set(self.known)
            elif not (given := _assigned(statement)) or given[0] not in self.known:
                sent.append(statement)
        return {node.id for root in sent for node in ast.walk(root) if isinstance(node, ast.Name)}


def _statements(tree: ast.Module) -> Iterator[ast.stmt]:
    """Those of a test, in order. Of `def check(candidate): ...` and `check(double)` its body stands for the call."""
    checks = {
        each.name: each
        for each in tree.body
        if isinstance(each, ast.FunctionDef)
        and any(isinstance(one, ast.Assert) for one in each.body)
        and not any(isinstance(one, ast.Return | ast.Global | ast.Nonlocal) for one in ast.walk(each))
    }
    for statement in tree.body:
        if isinstance(statement, ast.FunctionDef) and statement.name in checks:
            continue
        if not isinstance(statement, ast.Expr) or (name := _called(statement.value)) not in checks:
            yield statement
            continue
        check, call = checks[name], statement.value
        assert isinstance(call, ast.Call)
        names = [each.arg for each in check.args.args]
        if len(names) != len(call.args) or call.keywords:
            yield statement
            continue
        replacing = _Replacing(dict(zip(names, call.args, strict=True)))
        for each in copy.deepcopy(check.body):
            yield replacing.visit(each)


class _Replacing(ast.NodeTransformer):
    def __init__(self, given: dict[str, ast.expr]) -> None:
        self.given = given

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return self.given.get(node.id, node)


def _assigned(statement: ast.stmt) -> tuple[str, ast.expr] | None:
    """The name and the value of `name = value`."""
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
        target = statement.targets[0]
        return (target.id, statement.value) if isinstance(target, ast.Name) else None
    return None


def _called(node: ast.AST) -> str | None:
    """The plain name of what a call calls: `f`, `Solution.run`."""
    if not isinstance(node, ast.Call):
        return None
    name = ast.unparse(node.func)
    return name if name.replace(".", "_").isidentifier() else None


def _whole(node: ast.expr) -> int:
    """The value of a sum of whole numbers, their products and powers."""
    if isinstance(node, ast.BinOp) and type(node.op) in FOLDED:
        left, right = _whole(node.left), _whole(node.right)
        if isinstance(node.op, ast.Pow) and not (0 <= right <= MAX_POWER and abs(left) <= MAX_BASE):
            raise ValueError("too large")
        return FOLDED[type(node.op)](left, right)
    value = ast.literal_eval(node)
    if type(value) is not int:
        raise ValueError("not a whole number")
    return value


def _calls_itself(node: ast.AST) -> bool:
    return isinstance(node, ast.Call | ast.comprehension | ast.Lambda)


def _asserts(node: ast.AST) -> bool:
    """Whether it tests something: an assert, or a call of `self.assertEqual` and its like."""
    name = _called(node) or ""
    return isinstance(node, ast.Assert) or name.rpartition(".")[2].startswith("assert")


def _holds(holds: Holds, value: Any) -> bool:
    try:
        return bool(holds(value))
    except (TypeError, ValueError, ArithmeticError, RecursionError):
        return False
