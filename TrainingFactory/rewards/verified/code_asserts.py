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
    """`script` computes the values, one for each of `wanted`, and leaves what `_shown` writes of them in `_found`.
    `size`: how many characters of the test are not in the script; what is expected has no more."""

    script: str
    wanted: Sequence[Holds]
    size: int = 0

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
    lines: list[str] = []
    wanted: list[Holds] = []
    try:
        blocks = list(_blocks(tree))
        reading = _Reading([statement for block in blocks for statement in block.statements])
        for block in blocks:
            sent = [each for statement in block.statements for each in reading.sent(statement, wanted)]
            lines += _called_once(sent) if block.is_function else map(ast.unparse, sent)
    except _Other:
        return None
    size = max(0, len(test) - sum(map(len, lines)))
    return Asserts("\n".join([SHOWING, *lines]), wanted, size) if wanted else None


@dataclass(slots=True, frozen=True)
class _Block:
    """Statements of a test; those of a function have names of their own, which must not replace names of the code."""

    statements: list[ast.stmt]
    is_function: bool = False


class _Other(Exception):
    """Not of the form that can be taken apart."""


class _Reading:
    def __init__(self, statements: Sequence[ast.stmt]) -> None:
        given = [pair for pair in map(_assigned, statements) if pair]
        bound = Counter(_bound(statements))
        # Names that the test gives, apart from objects of the code: what they say about the code can be guessed.
        self.own = set(bound)
        self.own -= {name for name, value in given if bound[name] == 1 and self._is_of_code(value)}
        self.known: dict[str, Any] = {}  # names of values that stand in the test
        for name, value in given:
            if bound[name] == 1 and (found := self.literal(value)):
                self.known[name] = found[0]
        self.needed = self._sent_names(statements)
        # What is sent may be changed there: a list is what is written down only if nothing else sees it.
        while changing := {name for name in self.needed & self.known.keys() if not _fixed(self.known[name])}:
            self.known = {name: value for name, value in self.known.items() if name not in changing}
            self.needed = self._sent_names(statements)

    def sent(self, statement: ast.stmt, wanted: list[Holds]) -> Iterator[ast.stmt]:
        """What the sandbox gets in its place; what must hold for the values goes to `wanted`."""
        if isinstance(statement, ast.Assert):
            for expression, holds in self.conditions(statement.test):
                wanted.append(holds)
                yield ast.parse(f"_found.append(_shown({ast.unparse(expression)}))").body[0]
        elif not self._only_expected(statement):
            if any(_asserts(node) or isinstance(node, _COMPARING) for node in ast.walk(statement)):
                raise _Other
            yield statement

    def _only_expected(self, statement: ast.stmt) -> bool:
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
        elif not (isinstance(test, ast.Constant) and test.value):  # assert True says nothing
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
        guessed = kind is not ast.Eq or (isinstance(value, bool) and self._uses_own(left))
        computed = self._call(left) if guessed else self._computed(left)
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
        if any(isinstance(each, _COMPARING | ast.BoolOp | ast.NamedExpr) for each in ast.walk(node)):
            raise _Other
        return node

    def _call(self, node: ast.expr) -> ast.expr:
        """A call of the code itself with plain arguments: what a value that can be guessed may be taken from."""
        inner = [each for child in ast.iter_child_nodes(node) for each in ast.walk(child)]
        if not self._is_of_code(node) or any(map(_calls_itself, inner)):
            raise _Other
        return self._computed(node)

    def _is_of_code(self, node: ast.expr) -> bool:
        """Whether it calls what is neither Python's nor the test's."""
        first = (_called(node) or "").partition(".")[0]
        return bool(first) and not hasattr(builtins, first) and first not in self.own

    def _uses_own(self, node: ast.expr) -> bool:
        """Whether it calls something of the test's."""
        return any(
            isinstance(each, ast.Call) and self.own & {name.id for name in _names(each.func)}
            for each in ast.walk(node)
        )

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
        return {name.id for root in sent for name in _names(root)}


def _blocks(tree: ast.Module) -> Iterator[_Block]:
    """The statements of a test, in order. Of `def check(candidate): ...` and `check(double)` its body stands for the
    call."""
    checks = {
        each.name: each
        for each in tree.body
        if isinstance(each, ast.FunctionDef)
        and any(isinstance(one, ast.Assert) for one in each.body)
        and not any(isinstance(one, _LEAVING) for one in ast.walk(each))
    }
    for statement in tree.body:
        if isinstance(statement, ast.FunctionDef) and statement.name in checks:
            continue
        if isinstance(statement, ast.Expr) and (name := _called(statement.value)) in checks:
            assert isinstance(statement.value, ast.Call)
            yield _Block(_body(checks[name], statement.value), is_function=True)
        elif any(name.id in checks for name in _names(statement)):
            raise _Other
        else:
            yield _Block([statement])


def _body(check: ast.FunctionDef, call: ast.Call) -> list[ast.stmt]:
    """The statements of the function with what it is given in place of its parameters."""
    names = [each.arg for each in check.args.args]
    given = {name.id for value in call.args for name in _names(value)}
    if (
        len(names) != len(call.args)
        or call.keywords
        or any(isinstance(each, ast.Starred) for each in call.args)
    ):
        raise _Other
    if {*names, *given} & set(_bound(check.body)) or check.decorator_list:
        raise _Other
    replacing = _Replacing(dict(zip(names, call.args, strict=True)))
    return [replacing.visit(each) for each in copy.deepcopy(check.body)]


def _called_once(statements: list[ast.stmt]) -> list[str]:
    [function] = ast.parse("def _run_here(): pass").body
    assert isinstance(function, ast.FunctionDef)
    function.body = statements or function.body
    return [ast.unparse(ast.fix_missing_locations(function)), "_run_here()"]


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


def _bound(statements: Sequence[ast.stmt]) -> Iterator[str]:
    """The names that are given to something, each as often as that is done."""
    for node in (node for statement in statements for node in ast.walk(statement)):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            yield node.id
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.alias):
            yield (node.asname or node.name).partition(".")[0]
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.ExceptHandler) and node.name:
            yield node.name


def _names(root: ast.AST) -> Iterator[ast.Name]:
    return (node for node in ast.walk(root) if isinstance(node, ast.Name))


def _fixed(value: Any) -> bool:
    """Whether nothing can change it."""
    return all(map(_fixed, value)) if isinstance(value, tuple) else not isinstance(value, list | dict | set)


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
