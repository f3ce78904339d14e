"""Splitting of tests such as `assert double(2) == 4`: `double(2)` runs in the sandbox with the code under test, and the
4 is compared here, where that code cannot read it, return an object that equals everything, or override comparison. A
test that must compare in the sandbox, or whose outcome can be guessed without computing anything, cannot be split."""

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

Condition = Callable[[Any], bool]
OPERATORS: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
    ast.GtE: operator.ge, ast.Is: operator.is_, ast.IsNot: operator.is_not,
    ast.In: lambda value, container: value in container, ast.NotIn: lambda value, container: value not in container,
}  # fmt: skip
MIRRORED_OPERATORS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.Eq, ast.NotEq: ast.NotEq, ast.Lt: ast.Gt, ast.LtE: ast.GtE, ast.Gt: ast.Lt, ast.GtE: ast.LtE,
}  # fmt: skip
_OVERRIDABLE = ast.Compare | ast.Sub | ast.Match  # an object of the code can override these
_NOT_INLINABLE_NODES = ast.Return | ast.Yield | ast.YieldFrom | ast.Global | ast.Nonlocal
# Runs in the sandbox: formats a value as a Python literal. It raises for other objects, which fails the test.
FORMAT_SCRIPT = """
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
class SplitTest:
    """A test, split into a script for the sandbox and conditions on the values that the script computes."""

    script: str  # computes the values and appends their literals to `_found`
    conditions: Sequence[Condition]  # the condition on each value
    max_chars: int = 0  # limit of the expected values' length: the test's characters outside the script

    def accepts(self, output: str) -> bool:
        """Return whether the values, formatted as a list literal, meet the conditions."""
        try:
            values = ast.literal_eval(output)
        except (ValueError, SyntaxError, MemoryError, RecursionError, TypeError):
            return False
        if not isinstance(values, list) or len(values) != len(self.conditions):
            return False
        return all(map(_is_met, self.conditions, values))


def split_test(test: str) -> SplitTest | None:
    """Split a test. Return None if it cannot be split; raise ValueError if it is not Python."""
    try:
        tree = ast.parse(test)
    except (SyntaxError, ValueError, RecursionError) as error:
        raise ValueError(f"a test is not valid Python ({error})") from error
    try:
        splitter = _Splitter(list(_inline_checks(tree)))
        statements = [ast.unparse(ast.fix_missing_locations(node)) for node in splitter.split()]
    except _NotSplittable:
        return None
    if not splitter.conditions:
        return None
    body = "\n".join(statements)
    script = f"{FORMAT_SCRIPT}\ndef _run_here():\n{indent(body, '    ')}\n_run_here()"
    return SplitTest(script, splitter.conditions, max(0, len(test) - len(body)))


class _NotSplittable(Exception):
    """Raised for a test that cannot be split."""


def _inline_checks(tree: ast.Module) -> Iterator[ast.stmt]:
    """Yield the statements of a test; a call `check(double)` is inlined as `candidate = double` and the body."""
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    checks = {function.name: function for function in functions if _is_check_function(function)}
    for statement in tree.body:
        match statement:
            case ast.FunctionDef(name) if name in checks:
                continue
            case ast.Expr(ast.Call(ast.Name(name), [ast.expr() as argument], [])) if name in checks:
                [parameter] = checks[name].args.args
                argument_names = {parameter.arg, *(node.id for node in _get_names(argument))}
                if isinstance(argument, ast.Starred) or argument_names & set(_bound_names(checks[name].body)):
                    raise _NotSplittable
                yield ast.Assign([ast.Name(parameter.arg, ast.Store())], argument)
                yield from checks[name].body
            case ast.ImportFrom(names=[ast.alias("*")]):  # not allowed inside a function
                raise _NotSplittable
            case _ if any(name.id in checks for name in _get_names(statement)):
                raise _NotSplittable
            case _:
                yield statement


def _is_check_function(function: ast.FunctionDef) -> bool:
    """Return whether the function only tests its one argument, so that its body can be inlined."""
    return (
        any(isinstance(node, ast.Assert) for node in function.body)
        and not any(isinstance(node, _NOT_INLINABLE_NODES) for node in ast.walk(function))
        and not function.decorator_list
        and len(function.args.args) == 1
        and not function.args.defaults
    )


class _Splitter:
    """Splits statements into statements that the sandbox runs, and conditions on the values that these compute."""

    def __init__(self, statements: Sequence[ast.stmt]) -> None:
        self.statements = statements
        self.conditions: list[Condition] = []  # on the values, in order
        num_bindings = Counter(_bound_names(statements))
        assignments = [pair for pair in map(_assignment, statements) if pair and num_bindings[pair[0]] == 1]
        # Names that the test binds, except to objects of the code: results of their calls could be guessed.
        self.local_names = set(num_bindings)
        self.local_names -= {name for name, value in assignments if self._is_tested_code(value)}
        # Names of literals of the test. One that is used outside comparisons may be changed there, so a mutable one
        # does not count.
        name_counts = Counter(name.id for statement in statements for name in _get_names(statement, ast.Load))
        name_counts.subtract(_find_compared_names(statements))
        self.constants: dict[str, Any] = {}
        for name, value in assignments:
            if (literal := self.read_literal(value)) and (_is_frozen(literal[0]) or not name_counts[name]):
                self.constants[name] = literal[0]

    def split(self) -> list[ast.stmt]:
        """Return the statements that the sandbox runs, and fill `conditions`."""
        nodes = [node for statement in self.statements for node in self._rewrite_statement(statement)]
        used_names = {
            name.id for node in nodes if self._get_literal_name(node) is None for name in _get_names(node)
        }
        return [
            node for node in nodes if (name := self._get_literal_name(node)) is None or name in used_names
        ]

    def _get_literal_name(self, statement: ast.stmt) -> str | None:
        """Return the name that a statement binds to a literal, which the tested code must not see; else None."""
        assignment = _assignment(statement)
        return assignment[0] if assignment is not None and assignment[0] in self.constants else None

    def _rewrite_statement(self, statement: ast.stmt) -> Iterator[ast.stmt]:
        if isinstance(statement, ast.Assert):
            for expression, condition in self._split_conditions(statement.test):
                self.conditions.append(condition)
                yield ast.parse(f"_found.append(_shown({ast.unparse(expression)}))").body[0]
        elif any(_is_assertion(node) or isinstance(node, _OVERRIDABLE) for node in ast.walk(statement)):
            raise _NotSplittable
        else:
            yield statement

    def _split_conditions(self, test: ast.expr) -> Iterator[tuple[ast.expr, Condition]]:
        """Yield each expression that the sandbox must compute, with the condition on its value."""
        if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
            for operand in test.values:
                yield from self._split_conditions(operand)
        elif isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            yield self._require_call(test.operand), operator.not_
        elif isinstance(test, ast.Compare) and len(test.ops) == 1:
            yield self._split_comparison(test.left, type(test.ops[0]), test.comparators[0])
        elif _get_called_name(test) in ("math.isclose", "isclose"):
            assert isinstance(test, ast.Call)
            yield self._split_isclose(test)
        elif not (isinstance(test, ast.Constant) and test.value):  # assert True tests nothing
            yield self._require_call(test), bool

    def read_literal(self, node: ast.expr) -> tuple[Any] | None:
        """Return the value of a literal or of a name for one, as a tuple; None for other expressions."""
        if isinstance(node, ast.Name) and node.id in self.constants:
            return (self.constants[node.id],)
        try:
            if ast.unparse(node) in ("float('inf')", "math.inf"):
                return (math.inf,)
            return (ast.literal_eval(node),)
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            return None

    def _split_operands(self, left: ast.expr, right: ast.expr) -> tuple[ast.expr, Any]:
        """Return the side that the sandbox must compute, and the value of the other side, which is a literal."""
        for computed_side, literal_side in ((left, right), (right, left)):
            if literal_value := self.read_literal(literal_side):
                return self._check_computable(computed_side), literal_value[0]
        raise _NotSplittable

    def _split_comparison(
        self, left: ast.expr, op_type: type[ast.cmpop], right: ast.expr
    ) -> tuple[ast.expr, Condition]:
        expected = self.read_literal(right)
        if expected is None and op_type in MIRRORED_OPERATORS and (expected := self.read_literal(left)):
            left, op_type = right, MIRRORED_OPERATORS[op_type]
        if expected is None:
            raise _NotSplittable
        compare, value = OPERATORS[op_type], expected[0]
        match left:
            case ast.Call(ast.Name("abs"), [ast.BinOp(minuend, ast.Sub(), subtrahend)], []):
                computed_side, reference = self._split_operands(minuend, subtrahend)
                return computed_side, lambda result: compare(abs(result - reference), value)
        is_guessable = op_type is not ast.Eq or (isinstance(value, bool) and self._calls_local_name(left))
        computed_side = self._require_call(left) if is_guessable else self._check_computable(left)
        return computed_side, lambda result: compare(result, value)

    def _split_isclose(self, node: ast.Call) -> tuple[ast.expr, Condition]:
        options = {keyword.arg: self.read_literal(keyword.value) for keyword in node.keywords}
        if len(node.args) != 2 or not options.keys() <= {"rel_tol", "abs_tol"} or None in options.values():
            raise _NotSplittable
        tolerances = {str(name): value[0] for name, value in options.items() if value}
        computed_side, reference = self._split_operands(*node.args)
        return computed_side, lambda value: math.isclose(value, reference, **tolerances)

    def _check_computable(self, node: ast.expr) -> ast.expr:
        """Return the node; raise _NotSplittable if the code under test could override an operator in it."""
        if any(isinstance(inner, _OVERRIDABLE | ast.BoolOp | ast.NamedExpr) for inner in ast.walk(node)):
            raise _NotSplittable
        return node

    def _require_call(self, node: ast.expr) -> ast.expr:
        """Return the node if it is a direct call of the code under test with plain arguments; else raise
        _NotSplittable. Conditions whose value can be guessed require such a call."""
        nodes = [inner for child in ast.iter_child_nodes(node) for inner in ast.walk(child)]
        is_nested = any(isinstance(inner, ast.Call | ast.comprehension | ast.Lambda) for inner in nodes)
        if is_nested or not isinstance(node, ast.Call) or not self._is_tested_code(node):
            raise _NotSplittable
        return self._check_computable(node)

    def _is_tested_code(self, node: ast.expr) -> bool:
        """Return whether the node calls or names an object of the code under test: neither a builtin nor a name bound
        by the test."""
        root_name = (_get_called_name(node) or _get_dotted_name(node) or "").partition(".")[0]
        return bool(root_name) and not hasattr(builtins, root_name) and root_name not in self.local_names

    def _calls_local_name(self, node: ast.expr) -> bool:
        return any(
            isinstance(inner, ast.Call) and self.local_names & {name.id for name in _get_names(inner.func)}
            for inner in ast.walk(node)
        )


def _assignment(statement: ast.stmt) -> tuple[str, ast.expr] | None:
    """Return the name and the value of a statement `name = value`; None for other statements."""
    match statement:
        case ast.Assign([ast.Name(name)], value):
            return name, value
    return None


def _bound_names(statements: Sequence[ast.stmt]) -> Iterator[str]:
    """Yield the names that the statements bind, once per binding."""
    for node in (node for statement in statements for node in ast.walk(statement)):
        match node:
            case ast.Name(name, ast.Store() | ast.Del()) | ast.ExceptHandler(name=str(name)) | ast.arg(name):
                yield name
            case ast.FunctionDef(name) | ast.AsyncFunctionDef(name) | ast.ClassDef(name):
                yield name
            case ast.alias(name, alias):
                yield (alias or name).partition(".")[0]


def _find_compared_names(statements: Sequence[ast.stmt]) -> Iterator[str]:
    """Yield the names that are one side of a comparison in an assert, once per occurrence."""
    for test in (statement.test for statement in statements if isinstance(statement, ast.Assert)):
        for node in ast.walk(test):
            if isinstance(node, ast.Compare):
                yield from (side.id for side in (node.left, *node.comparators) if isinstance(side, ast.Name))


def _get_names(root: ast.AST, context: type[ast.expr_context] = ast.expr_context) -> Iterator[ast.Name]:
    return (node for node in ast.walk(root) if isinstance(node, ast.Name) and isinstance(node.ctx, context))


def _is_frozen(value: Any) -> bool:
    """Return whether the value is immutable."""
    return (
        all(map(_is_frozen, value)) if isinstance(value, tuple) else not isinstance(value, list | dict | set)
    )


def _get_called_name(node: ast.AST) -> str | None:
    """Return the dotted name of the called function: `f`, `Solution.run`; None for other nodes."""
    return _get_dotted_name(node.func) if isinstance(node, ast.Call) else None


def _get_dotted_name(node: ast.AST) -> str | None:
    name = ast.unparse(node)
    return name if name.replace(".", "_").isidentifier() else None


def _is_assertion(node: ast.AST) -> bool:
    """Return whether the node is an assert, or a call such as `self.assertEqual`."""
    name = _get_called_name(node) or ""
    return isinstance(node, ast.Assert) or name.rpartition(".")[2].startswith("assert")


def _is_met(condition: Condition, value: Any) -> bool:
    try:
        return bool(condition(value))
    except (TypeError, ValueError, ArithmeticError, RecursionError):
        return False
