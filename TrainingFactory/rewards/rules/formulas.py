"""Which formulas are not worth working out: a few characters can stand for a number or a polynomial without end."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

MAX_CHARS = 300
MAX_POWER = 300  # to which numbers are raised, all nested exponents multiplied
MAX_FACTORIAL = 200
MAX_TERMS = 5000  # of a polynomial when it is multiplied out


def endless(formula: str) -> bool:
    """Whether working it out could take for ever; rather yes where that is not clear."""
    if (
        len(formula) > MAX_CHARS
        or _NEVER.search(formula)
        or any(map(_huge_factorial, _FACTORIAL.finditer(formula)))
    ):
        return True
    single, nested = 1, 1  # exponents of x and 5, and of what stands in brackets, which may hold each other
    for in_brackets, exponent in _exponents(formula):
        if "!" in exponent or _POWER_INSIDE.search(exponent):
            return True
        size = _product(exponent)
        single, nested = (single, nested * size) if in_brackets else (max(single, size), nested)
    variables = len(set(_VARIABLE.findall(_COMMAND.sub(" ", formula))))
    degree = nested + len(_PRODUCT.findall(formula))
    return single * nested > MAX_POWER or (
        variables > 0 and math.comb(degree + variables, variables) > MAX_TERMS
    )


def _exponents(formula: str) -> Iterator[tuple[bool, str]]:
    """What stands after each ^, and whether the base before it is in brackets."""
    for match in re.finditer(r"\^\s*", formula):
        base = formula[: match.start()].rstrip()
        depth, end = 0, match.end()
        for end, character in enumerate(formula[match.end() :], match.end() + 1):
            depth += (character in "{(") - (character in "})")
            if depth <= 0 and not _GOES_ON.match(formula, end - 1):
                break
        yield base.endswith((")", "}", "]")), formula[match.end() : end]


def _huge_factorial(match: re.Match[str]) -> bool:
    """5!, n! and (n-1)! are none; what stands in several brackets may be."""
    inside = match["simple"] if match["simple"] is not None else match["group"]
    return inside is None or "!" in inside or "^" in inside or _product(inside) > MAX_FACTORIAL


def _product(text: str) -> int:
    """More than any sum or product of the whole numbers in a text, up to a few."""
    return math.prod(max(1, int(number)) for number in re.findall(r"\d+", text))


_NEVER = re.compile(r"\d{40,}|\^\s*-?\d+\s*\^|\\(?:prod|sum|int)(?![A-Za-z])|binom.*\d{4,}", re.S)
_FACTORIAL = re.compile(r"(?:(?P<simple>\d+|[A-Za-z])|\((?P<group>[^()]*)\)|\S?)\s*!")
_POWER_INSIDE = re.compile(r"[\d)}\]]\s*\^")  # e^{-x^2} is none
_GOES_ON = re.compile(r"-|\d(?=\d)|\\|[A-Za-z](?=[A-Za-z])")
_COMMAND, _VARIABLE = re.compile(r"\\[A-Za-z]+"), re.compile(r"[A-Za-z]")
_PRODUCT = re.compile(r"\)\s*(?:\\cdot\s*|\\times\s*|\*\s*)?\(|\)\s*\\left\s*\(")
