"""Formulas, by math-verify in one worker process."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.kits.rollout import rollout
from tests.kits.rules import episode, scored
from TrainingFactory.common.workers import Worker
from TrainingFactory.rewards.rules.rule_based import make_rule, make_rule_from_options
from TrainingFactory.types import Reward

PLAIN = ["8", "8.0", "-8", "1,234", "1/2", "0.5", "50%", "1e3", "1000", "$5", "5 km", "3.14159", "0"]
SAME = [
    ("\\boxed{\\frac{\\sqrt{2}}{2}}", "\\frac{1}{\\sqrt{2}}"),
    ("\\boxed{(x+1)^2}", "x^2+2x+1"),
    ("Answer: $\\{1,2\\}$", "\\{2,1\\}"),
    ("\\boxed{0.5}", "\\frac{1}{2}"),
    ("1,234", "1234"),
]
OTHER = [
    ("\\boxed{\\sqrt{3}}", "\\sqrt{2}"),
    ("\\boxed{__import__('os')}", "\\sqrt{2}"),
    ("\\boxed{2\\pi}", "2"),
    *(
        (text, "8")
        for text in ("7" * 10**6, "1e999999", "\\frac{1}{0}", "8" + "\u200b" * 5000 + "1", "10^400", "nan")
    ),
]
ENDLESS = [
    *("9^{9^{9}}", "123456789!", "(x+y+z)^{60}", "\\binom{9999999}{4999999}", "(((9^{9})^{9})^{9})^{9}"),
    *("{{9^{99}}^{99}}^{99}", "9^9^9^9", "9^{9*9*9*9*9}", "9^{99999}", "(999!)!", "5!!!!", "(99\\cdot 99)!"),
    *("((9)(9)(9))!", "\\sum_{n=1}^9 n", "9" * 40),
]
FINITE = [
    *("x^2+y^2", "(x+1)^2", "e^{-x^2}", "x^{10}+x^9+x^8+x^7+x^6+x^5+x^4+x^3+x^2+x+1"),
    *("(x-1)^2(x-2)^3(x-3)^4", "n!", "(n-1)!", "5!", "2^{10}", "3^{100}", "10^{-19}"),
    *("\\left(\\frac{3}{4}\\right)^{10}", "\\binom{10}{3}", "\\frac{n(n+1)(2n+1)}{6}"),
    *("(1+\\frac{1}{n})^n", "\\sin^2(x)+\\cos^2(x)", "{x}^{2}+{y}^{2}"),
]


def test_math_without_its_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(__import__("sys").modules, "math_verify", None)
    with pytest.raises(ValueError, match="pip install math-verify"):
        make_rule_from_options("math")


@pytest.mark.parametrize(
    "endless",
    [[], ENDLESS[::5], pytest.param(ENDLESS, marks=pytest.mark.slow)],
    ids=["finite", "endless", "all"],
)
def test_formulas(endless: list[str]):
    pytest.importorskip("math_verify", reason="math-verify is not installed")
    # A busy machine may need seconds for what has an end; what has none takes all of them.
    rule: Any = make_rule("math", timeout=1 if endless else 30)
    wrong = [(f"\\boxed{{{formula}}}", "\\sqrt{2}") for formula in endless] if endless else OTHER
    right = [] if endless else SAME + [(f"\\boxed{{{formula} + 0}}", formula) for formula in FINITE]

    async def compared() -> dict[tuple[str, str], float]:
        try:
            found = {pair: (await rule(episode(*pair))).outcome for pair in wrong + right}
            if endless:
                with pytest.raises(ValueError, match="math-verify cannot parse"):
                    await rule(episode("\\sqrt{3}", "\\binom{9999999}{4999999}"))
            return found
        finally:
            await rule.close()

    assert asyncio.run(compared()) == dict.fromkeys(wrong, 0.0) | dict.fromkeys(right, 1.0)


def test_plain_numbers_have_the_verdict_of_numeric(monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("math_verify", reason="math-verify is not installed")
    monkeypatch.setattr(Worker, "ask", None)  # nobody is asked
    rule, numeric = make_rule("math"), make_rule("numeric")
    for right in PLAIN:
        for said in PLAIN:
            assert scored(rule, said, right) == scored(numeric, said, right), (said, right)
    [[played]] = rollout(say=lambda *_: "ok", reward=rule)
    assert played.reward == Reward(1.0, [], {"math": 1.0})
