"""Rules against answers that set out to be long, odd or invisible: none hangs or fails, no wrong one is rewarded."""

from __future__ import annotations

from typing import Any

import pytest

from tests.kits.rules import episode, scored
from TrainingFactory.rewards.rules.rule_based import make_rule
from TrainingFactory.rewards.rules.text import split_squad_words
from TrainingFactory.rewards.rules.tool_verified import make_verifier

MANY = 1_000
LONG = 30_000  # characters
HOSTILE = {
    "digits": "7" * MANY,
    "leading zeros": "0" * MANY + "7",
    "decimals": "0." + "3" * MANY,
    "exponents": "1e999999 1E+999999999 -1e-999999 10^400 10^-400",
    "powers": "7**99999999 9^9^9^9 7!!!!",
    "nothing below": "1/0",
    "zeros": "0/0",
    "fractions": "1/" + "9" * MANY,
    "mixed": "1 1/" * MANY,
    "brackets": "(" * MANY + "7" + ")" * MANY,
    "lists": "7, " * MANY,
    "groups": "7,777" * MANY,
    "dots": "1.2.3." * MANY,
    "dashes": "- " * MANY + "7",
    "stars": "*" * MANY + "_" * MANY + "`" * MANY,
    "boxes": "\\boxed{" * MANY + "7",
    "fences": "```" * MANY,
    "tags": "<answer>" * MANY + "</answer>" * MANY,
    "end tags": "Answer: 7" + "</a>" * MANY + "x",
    "thoughts": "<think>" * MANY + "</think>" * MANY,
    "markers": "Answer: " * MANY,
    "headings": "#### " * MANY,
    "blank after a marker": "The answer is" + " \n" * 10 * MANY + "x",
    "blank before a colon": "Answer" + " " * 20 * MANY + "x",
    "final": ("final" + " " * 1000) * 100,
    "equations": "7=" * MANY,
    "nearly": "7≈" * MANY,
    "not a number": "nan",
    "infinity": "-Infinity",
    "hexadecimal": "0x8",
    "Roman": "Ⅷ",
    "not to be seen": "\u200b\u200d\u2060\ufeff\u00ad" * MANY + "9",
    "from right to left": "\u202e81\u202c \u200f\u061c9",
    "marks": "7\u0335\u0301" * 1000,
    "no text": "\ud800\x00",
    # texts on which a careless pattern would take for ever
    "hashes": "#" * LONG + "\nx",
    "blank after answer": "answer" + " " * LONG + "x",
    "answers": "answer " * (LONG // 10),
    "low lines": "a" + "_" * LONG + "a",
    "letters": "C, " + "a " * MANY,
    "open fences": "```\n" * MANY,
    "open brackets": "-(" * MANY + "5",
    "units": "5 " + "per " * MANY,
}
RULES: dict[str, Any] = {
    name: make_rule(name)
    for name in ("auto", "exact", "normalised", "numeric", "contains", "em", "f1", "json")
}
RULES |= {
    extract: make_rule("numeric", extract=extract) for extract in ("boxed", "tag", "marker", "last_number")
}
RULES |= {"letter": make_rule("choice"), "near": make_rule("numeric", relative=0.01)}
RULES |= {"calculated": make_verifier("calculated"), "sums": make_verifier("calculated", expressions=True)}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_answers_are_worth_nothing(name: str):
    for which, rule in RULES.items():
        for text in (HOSTILE[name], f"So the answer is {HOSTILE[name]}."):
            assert scored(rule, text, "B" if which == "letter" else 8) == 0.0, which


def test_digits_without_end():
    for text in ("8" * LONG, "0" * LONG + "7", "8." + "0" * LONG + "1", "1/" + "8" * LONG):
        for name in ("auto", "numeric", "calculated", "sums"):
            assert scored(RULES[name], text, 8) == 0.0, name
        with_numbers = episode(text, answer=8)
        with_numbers.task.metadata["numbers"] = [3, 5]
        assert RULES["sums"](with_numbers).outcome == 0.0


SIGNED = [
    ("1.5", 15),
    ("1/2", 12),
    ("-7", 7),
    ("\u22127", 7),
    (".5", 5),
    ("-.5", 0.5),
    ("2^3", 23),
    ("2³", 23),
]


@pytest.mark.parametrize(("said", "right"), [*SIGNED, ("7/0", 70)])
def test_signs_and_points_count(said: str, right: float):
    for name in ("em", "f1", "contains", "auto", "numeric", "normalised"):
        for text in (said, f"It is {said} in all", f"({said})"):
            assert scored(RULES[name], text, f"{right:g}") < 1, (name, text)


def test_plain_words_and_numbers_are_compared_as_before():
    assert split_squad_words("The U.S., in 1,000 words - e.g. well-known (7).") == split_squad_words(
        "us in 1000 words eg wellknown 7"
    )
    for name in ("em", "contains", "auto"):
        assert scored(RULES[name], "1.5", "1.5") == scored(RULES[name], "-7", "-7") == 1
    for text in ("It was 7.", "in Boeing-7", "(7)", "1990-7", "7, or so", "about $7"):
        assert scored(RULES["contains"], text, "7") == 1, text


def test_digits_of_all_scripts_and_what_cannot_be_seen():
    for text in ("٨", "८", "８", "\u200b8", "8\u2060", "\ufeff8", "8.0", "16/2", "8e0", "0008"):
        assert scored(RULES["auto"], text, 8) == 1, text
