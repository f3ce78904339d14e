"""Parser for exact arithmetic. Never uses eval, because the expression comes from a model."""

from __future__ import annotations

import re
from fractions import Fraction

MAX_CHARS = 200
_TOKEN_PATTERN = re.compile(r"\s*(\d+\.?\d*|\.\d+|[-+*/()])\s*")


def format_result(expression: str) -> str:
    """Return the value of an expression as a calculator shows it: an integer, or ten significant digits."""
    value = calculate(expression)
    return str(value.numerator) if value.denominator == 1 else f"{float(value):.10g}"


def calculate(expression: str) -> Fraction:
    """Return the exact value of an arithmetic expression (0.1 + 0.2 is 0.3)."""
    if len(expression) > MAX_CHARS:
        raise ValueError(f"the expression has {len(expression)} characters, at most {MAX_CHARS} are allowed")
    parser = _Parser(split_tokens(expression))
    value = parser.parse_sum()
    if parser.tokens:
        raise ValueError(f"unexpected {parser.tokens[0]!r}")
    return Fraction(value)


def split_tokens(expression: str) -> list[str]:
    """Split an expression into its numbers, operators and parentheses, as written."""
    tokens, position = [], 0
    while position < len(expression):
        match = _TOKEN_PATTERN.match(expression, position)
        if match is None:
            unparsed_text = expression[position:].strip()[:10]
            raise ValueError(f"cannot read {unparsed_text!r}: only numbers, + - * / and parentheses")
        tokens.append(match.group(1))
        position = match.end()
    return tokens


class _Parser:
    """Recursive-descent parser with one method per precedence level. Integers stay int, which is faster than
    Fraction."""

    def __init__(self, tokens: list[str]) -> None:
        self.tokens = tokens

    def parse_sum(self) -> Fraction | int:
        total = self.parse_product()
        while operator := self.take_operator("+", "-"):
            operand = self.parse_product()
            total = total + operand if operator == "+" else total - operand
        return total

    def parse_product(self) -> Fraction | int:
        product = self.parse_factor()
        while operator := self.take_operator("*", "/"):
            operand = self.parse_factor()
            product = product * operand if operator == "*" else Fraction(product) / operand
        return product

    def parse_factor(self) -> Fraction | int:
        if sign := self.take_operator("-", "+"):
            factor = self.parse_factor()
            return -factor if sign == "-" else factor
        if self.take_operator("("):
            factor = self.parse_sum()
            if not self.take_operator(")"):
                raise ValueError("a closing parenthesis is missing")
            return factor
        if not self.tokens or self.tokens[0] in "+-*/()":
            raise ValueError(f"a number is missing before {self.tokens[0] if self.tokens else 'the end'}")
        number = self.tokens.pop(0)
        return int(number) if number.isdecimal() else Fraction(number)

    def take_operator(self, *operators: str) -> str | None:
        return self.tokens.pop(0) if self.tokens and self.tokens[0] in operators else None
