from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from TrainingFactory.rewards.rules.numbers import (
    Number,
    find_last_number,
    is_number,
    is_same_number,
    parse_only_number,
)
from TrainingFactory.rewards.rules.units import UNITS


def value(text: str) -> Fraction | None:
    number = parse_only_number(text)
    return number.value if number else None


READ: dict[str, list[str]] = {
    "5": ["+5", "CO2: 5", "$5/hour", "x = 5", "The total is...5", "add\n5 more"],
    "-5": ["-$5", "$-5", "- 5", "minus 5"],
    "7": ["7 dozen eggs"],
    "-7": ["−7"],
    "1/2": [".5", "1/2", "50%", "50 percent", "５０％", "50\\%"],
    "-1/2": ["-½", "-\\dfrac{1}{2}"],
    "3/2": ["1 1/2", "1½"],
    "5/2": ["2\\frac12"],
    "3/4": ["\\frac{3}{4}", "3/4 or 0.75"],
    "1/3": ["1/3 ≈ 0.33"],
    "3.14": ["x ≈ 3.14"],
    "25": ["25 m²"],
    "42": ["٤٢"],
    "300": ["3 hundred"],
    "1000": ["1'000", "1_000", "1{,}000", "1\\,000", "1e3", "10³", "10**3"],
    "1234": ["1,234", "The total is 1,234"],
    "1000.5": ["$1,000.50"],
    "1234.56": ["1.234,56"],
    "1500": ["1.5×10^3"],
    "3/2000": ["1.5 \\times 10^{-3}"],
    "-3/20000000": ["-1.5E-7"],
    "3000": ["3k"],
    "1000000": ["1 000 000"],
    "1234567": ["12,34,567", "1.234.567"],
    "1500000": ["$1.5 million"],
    "5000000": ["5 million"],
    "-72": ["(-72)"],
    "72": [
        *("72", "72.", "共72个", "**72**", "*72*", "`72`", "_72_", "$72$"),
        *("\\(72\\)", "=> 72", "(72)", "|72|"),
        *("72 clips in April", "48+24=72", "he got 72 questions wrong", "it adds up to 72"),
        *("he tried 72 times", "a total of 72", "the price rose by $72", "72 to the nearest dollar"),
        *("x = 12*6 = 72", "x = 72, x = 72", "he has no more money; 72 is left", "72 <end>", "72<br/>"),
        *("Since he pays no tax and does not tip, 12*6 = 72", "C = 1.2 hours = 72 minutes"),
        *("The melons that were not ready are 84-12 = 72", "If x = 6, then 12*x = 72"),
        *("The maximum is 72", "He runs at 6 mph, or 12*6 = 72 miles"),
    ],
}


@pytest.mark.parametrize(("text", "meant"), [(text, meant) for meant in READ for text in READ[meant]])
def test_numbers_in_every_notation(text: str, meant: str):
    assert value(text) == Fraction(meant)


NOT_READ = [
    *("10-3", "48+24", "3 x 4", "3 * 4", "2^10", "5²", "10--3", "x - 5", "5 + x", "3(x+1)", "72 = 48+24"),
    *("1.2.3", "12:30", "2021-05-03", "555-1234", "0x1F", "5-7", "±2", "5 ± 1", "1\u202f234,5", "3,14"),
    *("1,2,3", "0,123", "1,23", "12,3456", "2π", "2\\pi", "π/2", "\\sqrt{2}", "√2", "sin 30", "\\log 5"),
    *("2x", "5i", "f(5)", "half of 5", "twice 5", "10 minus 3", "-(72)", "−(72)", "-{72}", "-|72|"),
    *("x = -(72)", "$-\\left(72\\right)$", "- (72)", "(72)^2", "{72}^2", "less than 72", "no more than $72"),
    *("at most 72", "at least 72", "72 at least", "72+", "72 and up", "up to 72", "it is over 72"),
    *("72 squared", "72 cubed", "72 to the third power", "72 factorial", "5M", "a third of 72"),
    *("the square of 72", "twice the 72", "two times 72", "72 times two", "72 plus tax", "one in 72"),
    *("72 divided by two", "72 and a half", "72 hundredths", "72 is wrong", "72 is a wrong answer"),
    *("72? No.", "wrong: 72", "72 (incorrect)", "< 5", ">= 5", "≤ 5", "\\leq 5", "!= 5", "not 5"),
    *("it isn't 5", "不是5", "\\neq 5", "5 or 7", "5 or seven", "5 to 7", "5, 7", "3 apples and 4 pears"),
    *("24 of 36", "5 = ", "72\n71.9 ≈ 48", "add 3\n5 more", "not x = 72", "It is not = 72", "not 12*6 = 72"),
    *("wrong: x = 72", "5 < x = 72", "either 5 or x = 72", "either a = 1 or a = 72"),
    *("x = 71, x = 72 or x = 73", "n = 5, n = 72", "if x = 1 then y = 72", "72 < x", "72 > x", "72 ≤ x"),
    *("72 halves", "72 billionths", "72 doubled", "log_2 72", "\\log_{2} 72", "max 72", "min. 72"),
    *("one of 72", "72₂", "|-72|", "\\left|-72\\right|", "\\boxed{twice 5}", "", "none", "1/0", "1e999"),
    *("1e99999", "9" * 2000, "inf", "nan", "--", "1/2/3", "/5", "5/x", "x/2"),
]


@pytest.mark.parametrize("text", NOT_READ)
def test_what_states_no_number(text: str):
    assert value(text) is None


def test_the_last_number_of_a_text():
    read = find_last_number
    assert read("48/2 = 24, then 48+24 = 72 clips. Done!") == "72"
    assert read("she has 3 apples and 4 pears, total 7.") == "7"
    assert read("It isn't 5, it's -$7.50") == "-$7.50"
    assert read("The total is 1,234") == "1,234"
    for text in ("5 or 7", "The answer is not 7", "it is 10-3", "", "version 1.2.3", "72 is wrong"):
        assert read(text) is None, text
    assert read("less than 7") is read("x < y = 7") is None


def test_which_references_are_numbers():
    for text in ("72", "$5", "-1/2", "50%", "5 km", "1,234.", "3.5e2", "5 sq. km", "5 degrees C"):
        assert is_number(text), text
    assert is_number("5 miles per hour")
    for text in ("12 Angry Men", "Paris", "Route 66", "5 or 7", "10-3", "", "B2"):
        assert not is_number(text), text


def same(answer: str, reference: str, **options: float) -> bool:
    left, right = parse_only_number(answer), parse_only_number(reference)
    assert left and right
    return is_same_number(left, right, **options)


def test_tolerances():
    assert same("0.333333", "1/3") and not same("0.3333", "1/3")
    assert not same("70000001", "70000000")  # whole numbers are whole
    assert same("70000001", "70000000", relative=1e-6) and same("7.4", "7", tolerance=0.5)
    assert not same("7.6", "7", tolerance=0.5, relative=0.01) and not same("7", "0", relative=0.5)
    assert not same("3.14", "3.14159") and same("3.14", "3.14159", tolerance=0.01)
    assert not same("1/2", "1/3") and not same("-5", "5") and not same("1e3", "3")


def test_percentages():
    assert same("50%", "0.5") and same("50%", "50") and same("50", "50%") and same("0.5", "50%")
    assert not same("0.5%", "0.5") and not same("50%", "5") and not same("5000%", "0.5")


def test_units():
    assert same("1500 m", "1.5 km") and same("5 kilometres", "5 km") and same("50 cents", "$0.50")
    assert not same("5 miles", "5 km") and not same("5 kg", "5 km") and not same("€5", "$5")
    assert same("72 clips", "72") and same("5 km", "5") and same("5", "5 km")
    assert all(unit.factor > 0 for units in UNITS.values() for unit in units)


SAME = """
72 miles per hour = 72 mph | 72 miles an hour = 72 mi/h | 72 km per hour = 72 km/h
36 km/h = 10 meters per second | 25 degrees Celsius = 25°C | 25 degrees C = 25 °C | 25 degrees = 25°C
25℃ = 25 degrees | 5 pounds = £5 | 5 pounds = 5 lb | 72 square meters = 72 m^2 | 72 sq. km = 72 km²
1000 liters = 1 cubic meter | 9.8 m/s² = 9.8 meters per second^2 | $5 per hour = 5 dollars
5 dollars an hour = $5/hour | $2.5M = 2.5 million dollars | $72K = $72,000 | 5 hundred thousand = 500000
72 millions = 72000000 | 5千万 = 50000000 | 12 months = 1 year | 4 quarts = 1 gallon | 1000 MB = 1 GB
1024 MB = 1 GB | 1.5 kW = 1500 watts | 25 C = 25°C | 5 bucks = $5 | 5 gb = 5 GB | 3 working days = 3 days
3 days in all = 3 days
"""
DIFFERENT = """
72 miles per hour = 72 miles | 72 square meters = 72 m | 72 cubic meters = 72 m
72 sq km = 72 km | 72 m/s^2 = 72 m/s | 72 m^3 = 72 m^2 | 25°C = 25°F
25 degrees Celsius = 25 degrees Fahrenheit | £5 = 5 kg | 72 millions = 72 | 72 mn = 72 | 3 years = 3 days
3 months = 3 weeks | 12 years = 12 months | 1 gallon = 1 liter | 5 MB = 5 GB | 5 kW = 5 W | 5 mW = 5 MW
5 Mb = 5 MB | 25 F = 25 C | 5 laps = 5 km | 5 GHz. = 5 MHz | 5 kN = 5 kg
"""


def pairs(table: str, alike: bool) -> list[tuple[str, str, bool]]:
    found = (pair.partition(" = ") for line in table.strip().splitlines() for pair in line.split(" | "))
    return [(answer, reference, alike) for answer, _, reference in found]


@pytest.mark.parametrize(("answer", "reference", "alike"), pairs(SAME, True) + pairs(DIFFERENT, False))
def test_values_in_other_units(answer: str, reference: str, alike: bool):
    assert same(answer, reference) == same(reference, answer) == alike


@settings(deadline=None, max_examples=80)
@given(st.floats(allow_nan=False, allow_infinity=False))
def test_floats_read_back_from_any_notation(x: float):
    mantissa, exponent = f"{x:.17e}".split("e")
    powers = f"{mantissa}×10^{int(exponent)}", f"{mantissa} \\times 10^{{{int(exponent)}}}"
    for text in (repr(x), f"{x:.17e}", f"{x:.17E}", *powers, f"The answer is {x!r}.", f"**{x!r}**"):
        found = parse_only_number(text)
        assert found is not None and float(found.value) == x, text


@settings(deadline=None, max_examples=60)
@given(st.integers(-(10**15), 10**15), st.integers(1, 10**6), st.integers(0, 99))
def test_exact_values_read_back(n: int, d: int, cents: int):
    grouped, sign = f"{abs(n):,}", "-" if n < 0 else ""
    whole = [f"{n:,}", f"{n:_}", f"{sign}{grouped.replace(',', ' ')}", f"{sign}${grouped}"]
    whole.append(f"{n}".replace("-", "−"))
    assert all(value(text) == n for text in whole), whole
    assert value(f"{n}/{d}") == value(f"{sign}\\frac{{{abs(n)}}}{{{d}}}") == Fraction(n, d)
    assert value(f"{n}%") == Fraction(n, 100)
    assert value(f"{sign}${grouped}.{cents:02}") == (-1 if n < 0 else 1) * (abs(n) + Fraction(cents, 100))
    digits = str(abs(n))
    if len(digits) > 1:  # no part of a number is ever read out of it
        assert all(value(text) != int(digits[1:]) or abs(n) == int(digits[1:]) for text in whole)


@settings(deadline=None, max_examples=40)
@given(
    st.text(max_size=80) | st.text(alphabet="0123456789.,'/^*x+-eE%$€ \n{}\\fracπ=≈½²onk_", max_size=60),
)
def test_junk_never_raises(text: str):
    for read in (parse_only_number(text), parse_only_number(text, decimal_comma=True)):
        assert read is None or isinstance(read, Number)
    is_number(text)
    last = find_last_number(text)
    assert last is None or isinstance(last, str)


PIECES = [
    *("x = 1, ", "a", "a ", "not ", "9", "1,", "1 ", "-", "1/", "\\frac{", "$1", "**", "1e", "^{2", "½"),
]


@pytest.mark.parametrize("piece", [*PIECES, "<", "5 or "])
def test_long_hostile_texts_are_read_at_once(piece: str):
    text = piece * (200_000 // len(piece))
    assert parse_only_number(text) is None
    last = find_last_number(text + " 7")
    assert last is None or last.endswith("7")
