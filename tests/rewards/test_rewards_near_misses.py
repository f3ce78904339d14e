"""Answers that are nearly right, and texts that are made to be slow."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from TrainingFactory.rewards.rule_based import rule_from_options
from TrainingFactory.rewards.rules.wording import normalised
from TrainingFactory.rewards.workers.finished_episode import FinishedEpisode
from TrainingFactory.types import Completion, Message, Reward, Task, Trajectory, Turn


def scored(rule: Any, text: str, answer: Any, **metadata: Any) -> float:
    turn = Turn([1], Completion([1], [0.0], "stop"), Message("assistant", text))
    trajectory = Trajectory(Task("t1", "?", answer, metadata), "g", turns=[turn], status="done")
    made: Any = rule_from_options(rule)
    reward = made(FinishedEpisode(trajectory))
    assert isinstance(reward, Reward)
    return reward.outcome


@pytest.mark.parametrize("rule", ["auto", "numeric", {"rule": "numeric", "extract": "boxed"}])
@pytest.mark.parametrize(
    "text",
    [
        "\\boxed{-(72)}",
        "$-\\boxed{72}$",
        "It is -\\boxed{72}.",
        "x = - \\boxed{72}",
        "−\\boxed{72}",
        "$-\\left(\\boxed{72}\\right)$",
        "-{\\boxed{72}}",
        "\\boxed{less than 72}",
        "\\boxed{72 \\text{ millions}}",
    ],
)
def test_what_stands_around_a_number_counts(rule: Any, text: str):
    assert scored(rule, text, 72) == 0.0


def test_a_dash_before_a_box_is_no_minus():
    assert scored("auto", "$-\\boxed{72}$", -72) == 1.0
    for text in ("- \\boxed{72}", "The sum – \\boxed{72}", "100-\\boxed{72} = 28", "- first\n- \\boxed{72}"):
        assert scored("auto", text, 72) == 1.0, text


def test_texts_that_are_no_numbers_keep_their_zeros():
    for text in ("02139", "The zip code is 02139.", "Answer: 02139", "**02139**"):
        assert scored("auto", text, "02139") == 1.0, text
    for text in ("2139", "002139", "02139 or 02140", "not 02139", "021390", "2,139"):
        assert scored("auto", text, "02139") == 0.0, text
    assert scored("auto", "0.50", "0.5") == 1.0 and scored("auto", "0", "0") == 1.0
    assert scored("numeric", "2139", "02139") == 1.0


def test_normalised_keeps_a_decimal_point():
    for text in (".5", "(.5)", "$.5", ",5"):
        assert scored("normalised", text, "5") == 0.0, text
    for text in ("5.", "'5'", "(5)", "...5", " 5 ", "5!"):
        assert scored("normalised", text, "5") == 1.0, text
    assert normalised(".5") == ".5" and normalised("...") == "..." and normalised("") == ""


def test_contains_finds_whole_numbers_only():
    for text in (
        "it is .5",
        "-5",
        "it is -5",
        "x=-5",
        "1/5",
        "5/7",
        "x^5",
        "5^2",
        "5'000",
        "5 000",
        "1'5",
        "0.5",
        "55",
    ):
        assert scored("contains", text, "5") == 0.0, text
    for text in ("it is 5.", "5", "'5'", "Apollo-5", "1-5", "5 1234", "(5)", "5, 6", "a:5"):
        assert scored("contains", text, "5") == 1.0, text
    assert scored("contains", "World War II (1939–1945)", "1945") == 1.0
    assert scored("contains", "in 1945 500 ships", "1945") == 1.0


def test_a_decimal_comma_in_right_answers_and_in_the_last_number():
    for text, answer in [
        ("1.234", "1.234"),
        ("3,14", "3,14"),
        ("3,14", "3.14"),
        ("1.234", 1234),
        ("3,14", 3.14),
    ]:
        for rule in ("numeric", "auto"):
            assert scored({"rule": rule, "decimal_comma": True}, text, answer) == 1.0, (rule, text)
    last = {"rule": "numeric", "decimal_comma": True, "extract": "last_number"}
    assert scored(last, "Das Ergebnis ist 3,14 Meter", 3.14) == 1.0
    assert scored(last, "erst 2, dann 1.234,5", "1.234,5") == 1.0 and scored(last, "1.234", 1.234) == 0.0


CHOICES = ["Oslo", "Rome", "Bonn", "Kyiv"]


@pytest.mark.parametrize("choices", [[], CHOICES])
def test_choices_with_a_word_after_the_letter(choices: list[str]):
    for text in (
        *(
            "B (Rome)",
            "B is correct",
            "B because it is",
            "The answer is B since it is a city",
            "B, I think",
            "b.",
        ),
        *(
            "B; Rome",
            "B. Rome, a city",
            "B is right, as I said",
            "B. Vitamin A",
            "B) is a no-brainer",
            "B. f(x) = e^x",
            "B. x = a + c",
        ),
    ):
        assert scored("choice", text, "B", choices=choices) == 1.0, text
    for text in (
        *(
            "b, a",
            "b) a) c)",
            "B: wrong. A: right",
            "B. No, A.",
            "B is wrong",
            "B is not right",
            "B, not",
            "B; C",
        ),
        *("B, c or d", "B. The answer is C", "B (or C)", "b: a", "B. Or is it (C)?", "B - A", "B, maybe a"),
    ):
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


def test_formulas_that_would_run_for_ever():
    for formula in (
        *(
            "((9^{99})^{99})^{99}",
            "(((9^{9})^{9})^{9})^{9}",
            "{{9^{99}}^{99}}^{99}",
            "9^{9^{9}}",
            "9^9^9^9",
            "2^(9^9)",
        ),
        *(
            "9^{9*9*9*9*9}",
            "2^{100!}",
            "9^{99999}",
            "(999!)!",
            "123456789!",
            "5!!!!",
            "(99\\cdot 99)!",
            "((9)(9)(9))!",
        ),
        *(
            "(x+y+z)^{60}",
            "(a+b+c+d+e)^{30}",
            "(a+b+c+d+e+f)" * 20,
            "\\binom{9999999}{4999999}",
            "\\sum_{n=1}^9 n",
        ),
        *("9" * 40, "x" * 301),
    ):
        assert endless(formula), formula
    for formula in (
        *(
            "x^2+y^2",
            "(x+1)^2",
            "e^{-x^2}",
            "x^{10}+x^9+x^8+x^7+x^6+x^5+x^4+x^3+x^2+x+1",
            "(x-1)^2(x-2)^3(x-3)^4",
        ),
        *(
            "n!",
            "(n-1)!",
            "5!",
            "2^{10}",
            "3^{100}",
            "10^{-19}",
            "\\left(\\frac{3}{4}\\right)^{10}",
            "\\binom{10}{3}",
        ),
        *(
            "\\frac{n(n+1)(2n+1)}{6}",
            "\\{1,2\\}",
            "(1+\\frac{1}{n})^n",
            "\\sin^2(x)+\\cos^2(x)",
            "{x}^{2}+{y}^{2}",
        ),
    ):
        assert not endless(formula), formula


def test_no_text_is_slow_to_read():
    """Four times the text takes four times as long, not sixteen times."""
    names = ("auto", "numeric", "normalised", "choice", "contains", "f1", "json", "regex")
    rules = [(rule_from_options(name), {"numeric": 72, "json": [1]}.get(name, "B")) for name in names]

    def seconds(text: str) -> float:
        def run() -> float:
            started = time.perf_counter()
            for rule, answer in rules:
                turn = Turn([1], Completion([1], [0.0], "stop"), Message("assistant", text))
                made: Any = rule
                made(FinishedEpisode(Trajectory(Task("t1", "?", answer), "g", turns=[turn], status="done")))
            return time.perf_counter() - started

        return min(run(), run())

    shapes: list[Callable[[int], str]] = [
        lambda n: "#" * n + "\nx",
        lambda n: "Answer: " + "</a>" * (n // 4) + "x",
        lambda n: "answer" + " " * n + "x",
        lambda n: "answer " * (n // 7),
        lambda n: "final" + " " * n + "x",
        lambda n: "a" + "_" * n + "a",
        lambda n: "B, " + "a " * (n // 2),
        lambda n: "```\n" * (n // 4),
        lambda n: "\\boxed{" * (n // 7),
        lambda n: "-(" * (n // 2) + "5",
        lambda n: "5 " + "per " * (n // 4),
    ]
    for shape in shapes:
        short, long = seconds(shape(4_000)), seconds(shape(16_000))
        assert long < 0.05 or long < 9 * short, (shape(20), short, long)
