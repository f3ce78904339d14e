"""One spelling for what has many: signs, digits of other scripts, LaTeX and markdown, names of units."""

from __future__ import annotations

import re
import unicodedata
from fractions import Fraction
from typing import NamedTuple

MAX_CHARS = 10_000  # of a text in which numbers are looked for; the end of a longer one is kept


def plain(text: str) -> str:
    """The text with numbers in the notation that `numbers` reads. What stands for no number is kept as it is, as far
    as possible; lines stay lines."""
    text = text[-MAX_CHARS:]
    if not text.isascii():
        text = _FRACTION_SIGN.sub(_fraction_sign, text)
        text = lowered(text)
        text = _FOREIGN.sub(lambda match: _ascii(match.group()), text)
    if "\\" in text or "{" in text:
        text = _without_latex(text)
    text = _MATHS.sub(r" \1 ", text)
    for written, meant in _ARROWS.items():
        text = text.replace(written, meant)
    text = _MINUS_WORD.sub("-", text)
    text = _POWER_STARS.sub("^", text).replace("**", "")
    text = _EMPHASIS.sub("", text)
    return re.sub(r"[ \t\f\v]+", " ", text)


def lowered(text: str) -> str:
    """Raised figures in a line with the others: 2\u2078 is 2^8, and not 28."""
    return _RAISED.sub(lambda match: "^" + match.group().translate(_LOWERED), text)


def _without_latex(text: str) -> str:
    for pattern, replacement in _LATEX:
        text = pattern.sub(replacement, text)
    return text


def _fraction_sign(match: re.Match[str]) -> str:
    above, below = unicodedata.normalize("NFKC", match.group(2)).split("\u2044")
    return f"{match.group(1)} {above}/{below}" if match.group(1) else f"{above}/{below}"


def _ascii(character: str) -> str:
    if character in _SIGNS:
        return _SIGNS[character]
    digit = unicodedata.decimal(character, None)  # also of Arabic, Devanagari and full-width digits
    if digit is not None:
        return str(digit)
    if "\uff01" <= character <= "\uff5e":  # full-width forms of ASCII
        return chr(ord(character) - 0xFEE0)
    return " " if unicodedata.category(character) == "Zs" else character


_FOREIGN = re.compile(r"[^\x00-\x7f]")
_FRACTION_SIGN = re.compile("(\\d?)([\u00bc-\u00be\u2150-\u215e\u2189])")
_RAISED = re.compile("[\u2070\u00b9\u00b2\u00b3\u2074-\u2079\u207a\u207b]+")
_LOWERED = str.maketrans(
    "\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079\u207a\u207b", "0123456789+-"
)
_SIGNS = dict.fromkeys("\u2212\u2010\u2011\u2012\u2013\u2014\ufe63", "-")  # minus and dashes
_SIGNS |= dict.fromkeys("\u00d7\u00b7\u22c5\u2217", "*") | dict.fromkeys("\u2044\u2215\u00f7", "/")
_SIGNS |= dict.fromkeys("\u2018\u2019\u02bc", "'") | {
    "\u2248": "≈",
    "\u2243": "≈",
    "\u2060": "",
    "\u200b": "",
}
_SIGNS |= {"\u3002": ". ", "\u3001": ", ", "\uff0c": ",", "\u066b": ".", "\u066c": ",", "\ufeff": ""}
_SIGNS |= {"\u2103": "°C", "\u2109": "°F"}

_MATHS = re.compile(r"\$([^$\n]{1,200})\$(?![\d.])")  # $5$, not the prices in: from $5 to $7
_ARROWS = {"=>": ": ", "->": ": ", ">=": "≥", "<=": "≤", "!=": "≠"}  # no equals signs, and no minus
_MINUS_WORD = re.compile(r"\b(?:minus|negative) (?=[\d.$])", re.I)
_POWER_STARS = re.compile(r"(?<=\d)\*\*(?=[-+]?\d)")
_EMPHASIS = re.compile(r"`|(?<![\d\s)])\*|\*(?![\d\s(.])|(?<!\w)_++|(?<!_)_++(?!\w)")
_LATEX = [
    (re.compile(pattern), replacement)
    for pattern, replacement in [
        (r"\\[\[\]()]|\\(?:left|right|displaystyle)(?![A-Za-z])|\\!", ""),
        (r"\{,\}", ","),
        (r"\\[,;: ]|\\q?quad(?![A-Za-z])|~", " "),
        (r"\\([%$#&_{}])", r"\1"),
        (r"\\(?:text|mathrm|textbf|mathbf|mbox|operatorname)\s?\{([^{}]{0,100})\}", r" \1 "),
        (r"\^\s?\{?\s?\\circ\s?\}?|\\(?:degree|circ)(?![A-Za-z])", "°"),
        (r"\\(?:times|cdot)(?![A-Za-z])", "*"),
        (r"\\div(?![A-Za-z])", "/"),
        (r"\\approx(?![A-Za-z])", "≈"),
        (r"\\pm(?![A-Za-z])", "±"),
        (r"\\pi(?![A-Za-z])", "π"),
        (r"\\neq?(?![A-Za-z])", "≠"),
        (r"\^\s?\{\s?([-+]?\d{1,9})\s?\}", r"^\1"),
        (r"(?<=\d)\s?(?=\\[dt]?frac)", " "),  # 2\frac12 is a mixed number
        (r"\\[dt]?frac\s?\{([^{}]{0,100})\}\s?\{([^{}]{0,100})\}", r"\1/\2"),
        (r"\\[dt]?frac\s?(\d)\s?(\d)", r"\1/\2"),
    ]
]


class Unit(NamedTuple):
    """What is measured, and how much of it. Values with different kinds never match."""

    kind: str
    factor: Fraction


def units_of(text: str) -> tuple[tuple[Unit, ...], int]:
    """What the unit at the start of a text may mean, and where it ends: km, sq km, m/s^2, miles per hour. Nothing for
    other words: clips say nothing about a number."""
    match = _UNIT.match(text)
    units = _named(match["name"]) if match else ()
    if match is None or not units:
        return (), 0
    power = int(match["power"] or 0) or {"sq": 2, "cu": 3}.get((match["shape"] or "")[:2].lower(), 1)
    units, end = (
        tuple(_raised(unit, power) for unit in units),
        match.end("power" if match["power"] else "name"),
    )
    if match["per"] and (below := _named(match["per"])):
        lower = [_raised(unit, int(match["per_power"] or 1)) for unit in below]
        units, end = tuple(_over(unit, other) for unit in units for other in lower), match.end()
    return units, end


def _over(unit: Unit, other: Unit) -> Unit:
    """A price is often given with what it is for, and often without."""
    return unit if unit.kind in MONEY else Unit(f"{unit.kind}/{other.kind}", unit.factor / other.factor)


def _raised(unit: Unit, power: int) -> Unit:
    return unit if power == 1 else Unit(f"{unit.kind}^{power}", unit.factor**power)


def _named(name: str) -> tuple[Unit, ...]:
    """kg and Kilograms are known."""
    if temperature := _TEMPERATURE.fullmatch(name):
        name = f"°{temperature[1].upper()}"
    lower = name.lower()
    spellings = (name, lower, lower.removesuffix("s"), lower.removesuffix("es"))
    return next((UNITS[spelling] for spelling in spellings if spelling in UNITS), ())


_UNIT = re.compile(
    r" ?(?:(?P<shape>square|sq\.?|cubic|cu\.?) )?"
    r"(?P<name>(?:° ?|deg(?:rees?|\.)? )(?:[CF]\b|celsius\b|fahrenheit\b)|°|[$€£¥₹]|[A-Za-zµΩ]+)(?:\^(?P<power>[23]))?"
    r"(?:(?: ?/ ?| per | an (?=hour))(?P<per>[A-Za-z]+)(?:\^(?P<per_power>[23]))?)?",
    re.I,
)
_TEMPERATURE = re.compile(r"(?:°|deg).*? ?([cf])(?:elsius|ahrenheit)?", re.I)
MONEY = ("dollars", "euros", "pounds", "yen", "rupees", "yuan")
UNITS: dict[str, tuple[Unit, ...]] = {}
for _kind, _names in {
    "length": {
        "mm millimeter millimetre": "1/1000",
        "cm centimeter centimetre": "1/100",
        "m meter metre": "1",
        "km kilometer kilometre": "1000",
        "inch": "0.0254",
        "ft foot feet": "0.3048",
        "yd yard": "0.9144",
        "mi mile": "1609.344",
    },
    "mass": {
        "mg milligram": "1/1000000",
        "g gram": "1/1000",
        "kg kilogram": "1",
        "ton tonne": "1000",
        "oz ounce": "0.028349523125",
        "lb lbs pound": "0.45359237",
    },
    "time": {
        "ms millisecond": "1/1000",
        "s sec second": "1",
        "min minute": "60",
        "h hr hour": "3600",
        "day": "86400",
        "week": "604800",
        "fortnight": "1209600",
    },
    "months": {
        "mo month": "1",
        "yr year": "12",
        "decade": "120",
        "century centurie": "1200",
    },  # not all as long
    "length^3": {
        "ml mL milliliter millilitre": "1/1000000",
        "cl cL centiliter centilitre": "1/100000",
        "dl dL deciliter decilitre": "1/10000",
        "l L liter litre": "1/1000",
        "gal gallon": "0.003785411784",
        "qt quart": "0.000946352946",
        "pint": "0.000473176473",
        "cup": "0.0002365882365",
    },
    "bytes": {
        "B byte": "1",
        "kb kB KB kilobyte": "1000",
        "mb MB megabyte": "1e6",
        "gb GB gigabyte": "1e9",
        "tb TB terabyte": "1e12",
    },
    "bytes by 1024": {
        "B byte": "1",
        "kb kB KB KiB kilobyte": "1024",
        "mb MB MiB megabyte": "1048576",
        "gb GB GiB gigabyte": "1073741824",
        "tb TB TiB terabyte": "1099511627776",
    },
    "bits": {"bit": "1", "kb Kb kilobit": "1000", "Mb megabit": "1e6", "Gb gigabit": "1e9"},
    "power": {
        "mW milliwatt": "1/1000",
        "W watt": "1",
        "kw kW kilowatt": "1000",
        "MW megawatt": "1e6",
        "GW gigawatt": "1e9",
    },
    "energy": {
        "J joule": "1",
        "kJ kilojoule": "1000",
        "MJ megajoule": "1e6",
        "cal calorie": "4.184",
        "kcal kilocalorie": "4184",
        "wh": "3600",
        "kwh": "3600000",
    },
    "frequency": {"hz hertz": "1", "khz": "1000", "mhz": "1e6", "ghz": "1e9"},
    "voltage": {"mV millivolt": "1/1000", "V volt": "1", "kV kilovolt": "1000"},
    "current": {"mA milliampere milliamp": "1/1000", "ampere amp": "1"},
    "length/time": {"kph kmh kmph": "5/18", "mph": "0.44704"},
    "dollars": {"$ US$ USD usd dollar buck": "1", "cent": "1/100"},
    "euros": {"€ EUR eur euro": "1"},
    "pounds": {"£ GBP gbp pound": "1"},
    "yen": {"¥ JPY jpy yen": "1"},
    "rupees": {"₹ INR inr rupee": "1"},
    "yuan": {"¥ CNY cny yuan": "1"},
    "celsius": {"°C C celsius ° degree deg": "1"},
    "fahrenheit": {"°F F fahrenheit ° degree deg": "1"},
    "angle": {"° degree deg": "1"},
}.items():
    for _spellings, _factor in _names.items():
        for _spelling in _spellings.split():
            UNITS[_spelling] = (*UNITS.get(_spelling, ()), Unit(_kind, Fraction(_factor)))
