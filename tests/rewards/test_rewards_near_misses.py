"""Answers that are nearly right."""

from __future__ import annotations

from typing import Any

import pytest

from tests.kits.rules import scored
from TrainingFactory.rewards.rules.text import normalised

SIGNS_BEFORE = [
    *("\\boxed{-(72)}", "$-\\boxed{72}$", "It is -\\boxed{72}.", "x = - \\boxed{72}", "−\\boxed{72}"),
]
WORDS_AROUND = ["\\boxed{less than 72}", "\\boxed{72 \\text{ millions}}"]


@pytest.mark.parametrize("rule", ["auto", "numeric", {"rule": "numeric", "extract": "boxed"}])
@pytest.mark.parametrize(
    "text", [*SIGNS_BEFORE, *WORDS_AROUND, "$-\\left(\\boxed{72}\\right)$", "-{\\boxed{72}}"]
)
def test_what_stands_around_a_number_counts(rule: Any, text: str):
    assert scored(rule, text, 72) == 0.0


# rule, right answer, texts that give it, texts that do not
NEAR: list[tuple[Any, Any, tuple[str, ...], tuple[str, ...]]] = [
    ("auto", -72, ("$-\\boxed{72}$",), ()),
    # a dash before a box is no minus
    ("auto", 72, ("- \\boxed{72}", "The sum – \\boxed{72}", "100-\\boxed{72} = 28", "- first\n- \\boxed{72}"), ()),
    # texts that are no numbers keep their zeros
    ("auto", "02139", ("02139", "The zip code is 02139.", "Answer: 02139", "**02139**"),
     ("2139", "002139", "02139 or 02140", "not 02139", "021390", "2,139")),
    ("auto", "0.5", ("0.50",), ()),
    ("auto", "0", ("0",), ()),
    ("numeric", "02139", ("2139",), ()),
    ("normalised", "5", ("5.", "'5'", "(5)", "...5", " 5 ", "5!"), (".5", "(.5)", "$.5", ",5")),
    # contains finds whole numbers only
    ("contains", "5", ("it is 5.", "5", "'5'", "Apollo-5", "1-5", "5 1234", "(5)", "5, 6", "a:5"),
     ("it is .5", "-5", "it is -5", "x=-5", "1/5", "5/7", "x^5", "5^2", "5'000", "5 000", "1'5", "0.5", "55")),
    ("contains", "1945", ("World War II (1939–1945)", "in 1945 500 ships"), ()),
    # a decimal comma, in right answers and in the last number
    *(({"rule": rule, "decimal_comma": True}, answer, (text,), ())
      for rule in ("numeric", "auto")
      for text, answer in [("1.234", "1.234"), ("3,14", "3,14"), ("3,14", "3.14"), ("1.234", 1234), ("3,14", 3.14)]),
    *(({"rule": "numeric", "decimal_comma": True, "extract": "last_number"}, *row)
      for row in [(3.14, ("Das Ergebnis ist 3,14 Meter",), ()), ("1.234,5", ("erst 2, dann 1.234,5",), ()),
                  (1.234, (), ("1.234",))]),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "answer", "right", "wrong"), NEAR)
def test_near_misses(rule: Any, answer: Any, right: tuple[str, ...], wrong: tuple[str, ...]):
    for text in right:
        assert scored(rule, text, answer) == 1.0, text
    for text in wrong:
        assert scored(rule, text, answer) == 0.0, text


def test_normalised_keeps_a_decimal_point():
    assert normalised(".5") == ".5" and normalised("...") == "..." and normalised("") == ""


CHOSEN = [
    *("B (Rome)", "B is correct", "B because it is", "The answer is B since it is a city", "B, I think"),
    *("b.", "B; Rome", "B. Rome, a city", "B is right, as I said", "B. Vitamin A", "B) is a no-brainer"),
    *("B. f(x) = e^x", "B. x = a + c"),
]
NOT_CHOSEN = [
    *("b, a", "b) a) c)", "B: wrong. A: right", "B. No, A.", "B is wrong", "B is not right", "B, not"),
    *("B; C", "B, c or d", "B. The answer is C", "B (or C)", "b: a", "B. Or is it (C)?", "B - A"),
    "B, maybe a",
]


@pytest.mark.parametrize("choices", [[], ["Oslo", "Rome", "Bonn", "Kyiv"]])
def test_choices_with_a_word_after_the_letter(choices: list[str]):
    for text in CHOSEN:
        assert scored("choice", text, "B", choices=choices) == 1.0, text
    for text in NOT_CHOSEN:
        assert scored("choice", text, "B", choices=choices) == 0.0, text


def test_numbers_without_end_are_wrong_and_not_unscored():
    huge = "1" + "0" * 400
    for text, answer in [(huge, 1.5), (f'{{"a": {huge}}}', {"a": 1.5}), (f"[{huge}]", [0.1])]:
        assert scored("json", text, answer) == 0.0
    assert scored("json", huge, 10**400) == 1.0 and scored("numeric", huge, 10**400) == 1.0
    assert scored("json", "1.5", 10**400) == 0.0
    multiple = {"rule": "schema", "schema": {"type": "number", "multipleOf": 0.5}}
    assert scored(multiple, huge, None) in (0.0, 1.0) and scored(multiple, "1.5", None) == 1.0
    deep = {"$defs": {"x": {"items": {"$ref": "#/$defs/x"}}}, "$ref": "#/$defs/x"}
    assert scored({"rule": "schema", "schema": deep}, "[" * 900 + "]" * 900, None) in (0.0, 1.0)
