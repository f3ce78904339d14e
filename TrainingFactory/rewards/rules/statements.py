"""Which number a text states, if it states one: not what it denies, leaves open or takes back."""

from __future__ import annotations

import re
from itertools import pairwise

from TrainingFactory.rewards.rules.numbers import MAX_CHARS, RUN, Number, figures, plain


def only_number(text: str, decimal_comma: bool = False) -> Number | None:
    """Return the only number in the text, or the value that several in it have; else None. An equation states its
    right side (48+24 = 72), an approximation its left one (1/3 ≈ 0.33)."""
    text = plain(text).strip() if len(text) <= MAX_CHARS else ""
    if "≈" in text and "\n" in text:
        return None  # whose approximation the last line is cannot be known
    stated = next((part for part in text.split("≈") if RUN.search(part)), "")
    equation, _, stated = stated.rpartition("=")
    found = [figure.number for figure in figures(stated, decimal_comma)]
    first = found[0] if found else None
    if first is None or any(number is None or number.value != first.value for number in found):
        return None
    if _DENIAL.search(stated) or _REFUSAL.search(stated) or (len(found) == 1 and _CHOICE.search(stated)):
        return None
    return None if equation and _is_unclear(equation, stated, decimal_comma) else first


def last_number_text(text: str, decimal_comma: bool = False) -> str | None:
    """Return the last number of the text as it is written, with its sign and unit; None if it is denied (not 7), one
    of a choice (5 or 7), or no number after all (10-3)."""
    text = plain(text)
    found = figures(text, decimal_comma)
    if not found or found[-1].number is None:
        return None
    start, end = found[-1].start, found[-1].end
    between = text[found[-2].end if len(found) > 1 else 0 : start].rpartition("\n")[2]
    after = text[end:].partition("\n")[0]
    denied = _DENIAL.search(between) or _CHOICE.search(between) or _REFUSAL.search(between + "5" + after)
    return None if denied or _TAKEN_BACK.search(between.rpartition("=")[0]) else text[start:end]


def _is_unclear(equation: str, stated: str, decimal_comma: bool) -> bool:
    """Return true if what stands before the last = of a line takes it back, or gives other values: not x = 72,
    x = 5 or x = 72, 5 < x = 72."""
    line = equation.rpartition("\n")[2]
    left = _CLAUSE.split(line)[-1].rpartition("=")[2]
    if _REFUSED_LINE.search(line) or _TAKEN_BACK.search(left):
        return True
    if not re.search(r"\d", left) and (_DENIAL.search(left) or _CHOICE.search(left)):
        return True
    sides = f"{line}={stated}".split("=")
    named = [_NEXT.split(right)[0] for left, right in pairwise(sides) if _NAME.search(left)]
    values = [each for each in (figures(side, decimal_comma) for side in named) if len(each) == 1]
    return len({figure.number.value for [figure] in values if figure.number}) > 1


_DENIAL = re.compile(r"\b(?:not|neither|nor|never|cannot)\b|n't\b|≠|不是|并非", re.I)
_REFUSAL = re.compile(  # 72 is wrong; 72? No; wrong: 72. Not: he got 72 wrong
    r"\b(?:is|are|was|be|seems|looks) (?:an? |the )?(?:wrong|incorrect|false|untrue|mistaken|impossible)\b"
    r"|[?(] ?(?:no|nope|wrong|incorrect|false)\b|\b(?:wrong|incorrect|false) ?:",
    re.I,
)
_CHOICE = re.compile(r"\bor\b(?! so\b)", re.I)
_CLAUSE = re.compile(r"[,;.:] ")
_REFUSED_LINE = re.compile(r"\b(?:wrong|incorrect|false) ?:", re.I)
_TAKEN_BACK = re.compile(  # not 12*6 = 72, 5 or x = 72, 5 < x = 72
    r"(?:\b(?:not|never)|n't) [-+*/x^()$.\d ]+\Z|\d or (?:[A-Za-z]\w*|[-+*/x^()$.\d ]+) ?\Z|[<>≤≥≠] ?[\w.]+ ?\Z",
    re.I,
)
_NEXT = re.compile(r"[,;:] |\. |\b(?:or|and|then|so|but)\b", re.I)
_NAME = re.compile(  # of what is said to be equal: x, then the total
    r"(?:\A|[,;:.] ?|\b(?:or|and|then|so|but|if|let|are|either) )(?:\b[A-Za-z_]\w*+(?:\([A-Za-z]\))? ?){1,4}\Z",
    re.I,
)
