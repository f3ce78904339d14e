"""Parsing of numbers in natural language. A text is split into the longest runs that could be one number, and a run is
parsed as a whole or not at all: 1,234 does not contain 234, and 10-3 does not contain 3. A text states one number or
none; numbers that it negates, offers as alternatives or retracts do not count."""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise

from TrainingFactory.rewards.rules.units import UNITS, Unit, parse_units

MAX_TEXT_CHARS = 10_000  # of a text that is searched; of a longer one, the end
MAX_DIGITS = 1000  # of one number; longer runs are not parsed
MAX_EXPONENT = 400  # slightly above the range of a float


@dataclass(slots=True, frozen=True)
class Number:
    """A number parsed from a text, with its unit."""

    value: Fraction
    is_percent: bool = False  # 50%, whose value is 1/2
    units: tuple[Unit, ...] = ()  # possible meanings of its unit (5 pounds: weight or money)
    unit_name: str = ""  # an unknown unit: 72 clips are not 72 miles


@dataclass(slots=True, frozen=True)
class NumberSpan:
    """Span of a number in a text; `number` is None for a run that is not a plain number: 10-3, 1.2.3."""

    start: int
    end: int
    number: Number | None


def find_number_spans(text: str, decimal_comma: bool = False) -> list[NumberSpan]:
    """Return the spans of all numbers in a text, in order. `normalise_symbols` must have normalised the text."""
    spans: list[NumberSpan] = []
    for match in NUMBER_RUN.finditer(text):
        if _PART_OF_WORD.search(text[max(0, match.start() - 16) : match.start()]):
            continue
        run_spans = [match.span()]
        if " " in match.group() and _parse_value(match.group(), decimal_comma) is None:
            # two numbers side by side, not one with a space in it
            run_spans = [part.span() for part in re.compile(r"[^ ]+").finditer(text, *match.span())]
        spans += [_parse_number_span(text, start, end, decimal_comma) for start, end in run_spans]
    return spans


def is_number(text: str, decimal_comma: bool = False) -> bool:
    """Return whether the text is one number, possibly with a sign or a known unit; not `12 Angry Men`."""
    phrase = normalise_symbols(text).strip().removesuffix(".")
    spans = find_number_spans(phrase, decimal_comma)
    return len(spans) == 1 and spans[0].number is not None and phrase == phrase[spans[0].start : spans[0].end]


def is_same_number(
    answer: Number, reference: Number, tolerance: float | None = None, relative: float | None = None
) -> bool:
    """Return whether two numbers match. Without tolerances, integers must be equal, and other numbers within a relative
    1e-6. Known units are converted; units of different kinds never match. A percentage matches its value, and the
    number before the sign (50% and 50) if that is at least 1."""

    def is_close(value: Fraction, expected: Fraction) -> bool:
        max_relative = relative
        if tolerance is None and relative is None:
            if value.denominator == expected.denominator == 1:
                return value == expected
            max_relative = 1e-6
        # Exact decimals via str: 0.333333 is exactly a relative 1e-6 away from 1/3.
        margin = max(Fraction(str(tolerance or 0)), Fraction(str(max_relative or 0)) * abs(expected))
        return abs(value - expected) <= margin

    number, target = answer.value, reference.value
    if answer.units and reference.units:
        unit_pairs = [
            (unit, other) for unit in answer.units for other in reference.units if unit.kind == other.kind
        ]
        return any(is_close(number * unit.factor, target * other.factor) for unit, other in unit_pairs)
    if (answer.units and reference.unit_name) or (answer.unit_name and reference.units):
        return False
    if is_close(number, target):
        return True
    if answer.is_percent == reference.is_percent:
        return False
    number, target = number * (100 if answer.is_percent else 1), target * (100 if reference.is_percent else 1)
    plain_value = target if answer.is_percent else number
    return abs(plain_value) >= 1 and is_close(number, target)


def _parse_number_span(text: str, start: int, end: int, decimal_comma: bool) -> NumberSpan:
    """Parse the run at start:end with the sign, currency, percent, scale and unit next to it."""
    value = _parse_value(text[start:end], decimal_comma)
    window = text[max(0, start - 24) : start]
    sign_match = _SIGN_AND_CURRENCY.search(window)
    assert sign_match is not None  # the pattern also matches the empty end
    text_before, text_after = window[: sign_match.start()], text[end : end + 40]
    start -= len(window) - sign_match.start()
    signs = (sign_match["sign"] or "") + (sign_match["inner"] or "")
    if (
        value is None
        or _EXPRESSION_BEFORE.search(text_before)
        or _QUALIFIER_BEFORE.search(text_before)
        or _EXPRESSION_AFTER.match(text_after)
        or (not sign_match["money"] and _AMBIGUOUS_SCALE.match(text_after))  # 5M: millions, metres, molar?
        or len(signs.replace(" ", "")) > 1
        or (sign_match["sign"] and _MINUS_IS_A_DASH.search(text_before + sign_match["sign"]))
        or ("-" in signs and text_before.endswith("|") and text_after.startswith("|"))  # |-5|
    ):
        return NumberSpan(start, end, None)
    value = -value if "-" in signs else value
    currency = (sign_match["money"] or "").strip()
    units, unit_match = UNITS.get(currency, ()), None
    for scale in (_MONEY_SCALE if currency else _SCALE_WORD, _SCALE_WORD, _SCALE_WORD):  # 5 hundred thousand
        if match := scale.match(text_after):
            value *= _SCALE_FACTORS[match.group(1).lower().removesuffix("s")]
            end += match.end()
            text_after = text_after[match.end() :]
    if percent_match := _PERCENT_SIGN.match(text_after):
        value /= 100
        end += percent_match.end()
    elif not currency:
        units, unit_length = parse_units(text_after)
        end += unit_length
        unit_match = None if units else _UNKNOWN_UNIT.match(text_after)
    return NumberSpan(
        start, end, Number(value, percent_match is not None, units, unit_match[1] if unit_match else "")
    )


def _parse_value(number_text: str, decimal_comma: bool) -> Fraction | None:
    if len(number_text) > MAX_DIGITS:
        return None
    if match := _MIXED_NUMBER.fullmatch(number_text):
        integer, numerator, denominator = (int(digits) for digits in match.groups())
        return integer + Fraction(numerator, denominator) if 0 < numerator < denominator else None
    numerator_text, slash, denominator_text = number_text.partition("/")
    numerator = _parse_scientific(numerator_text.strip(), decimal_comma)
    if not slash or numerator is None:
        return numerator
    denominator = _parse_scientific(denominator_text.strip(), decimal_comma)
    return numerator / denominator if denominator else None


def _parse_scientific(number_text: str, decimal_comma: bool) -> Fraction | None:
    match = _SCIENTIFIC_NUMBER.fullmatch(number_text)
    if match is None:
        return _parse_decimal(number_text, decimal_comma)
    mantissa = match["figure"] or match["mantissa"]
    value = _parse_decimal(mantissa, decimal_comma) if mantissa else Fraction(1)
    exponent = int(match["e"] or match["power"])
    return value * Fraction(10) ** exponent if value is not None and abs(exponent) <= MAX_EXPONENT else None


def _parse_decimal(number_text: str, decimal_comma: bool) -> Fraction | None:
    if decimal_comma:
        number_text = number_text.translate(_SWAPPED_SEPARATORS)
    if _PLAIN_DECIMAL.fullmatch(number_text):
        return Fraction(number_text)
    if _GROUPED_NUMBER.fullmatch(number_text):
        return Fraction(re.sub(r"[, '_]", "", number_text))
    if _EUROPEAN_NUMBER.fullmatch(number_text) and not decimal_comma:
        return Fraction(number_text.replace(".", "").replace(",", "."))
    return None


_SWAPPED_SEPARATORS = str.maketrans(".,", ",.")
_PLAIN_DECIMAL = re.compile(r"\d+(?:\.\d*)?|\.\d+")
_GROUPED_NUMBER = re.compile(
    r"[1-9]\d{0,2}(?:(?:,\d{3})+|(?: \d{3})+|(?:'\d{3})+|(?:_\d{3})+)(?:\.\d+)?"
    r"|[1-9]\d?(?:,\d\d)+,\d{3}(?:\.\d+)?"  # as in India: 12,34,567
)
_EUROPEAN_NUMBER = re.compile(r"[1-9]\d{0,2}(?:(?:\.\d{3})+,\d+|(?:\.\d{3}){2,})")  # 1.234,5 and 1.234.567
_MIXED_NUMBER = re.compile(r"(\d{1,9}) (\d{1,9}) ?/ ?(\d{1,9})")
_SCIENTIFIC_NUMBER = re.compile(
    r"(?P<figure>.+?)[eE](?P<e>[+-]?\d{1,4})|(?:(?P<mantissa>.+?) ?[x*] ?)?10\^(?P<power>[+-]?\d{1,4})"
)
# The longest run that could be one number: digits, and the characters allowed between digits of a number or expression.
NUMBER_RUN = re.compile(
    r"(?:(?<![\d.A-Za-z])\.)?\d"
    r"(?:\d+"
    r"|[.,'_:](?=\d)"
    r"| ?[-+*x/^]{1,2} ?(?=[.\d])"
    r"|\^[-+](?=\d)|[eE][-+]?(?=\d)"
    r"| (?=\d{3}(?!\d))| (?=\d{1,9} ?/ ?\d)"
    r")*"
)
_PART_OF_WORD = re.compile(r"(?:[A-Za-z]_?|[A-Za-z)]\^[-+]?)\Z")  # the 2 of CO2, x_2 and m^2
_SIGN_AND_CURRENCY = re.compile(
    r"(?P<sign>[-+] ?)?(?P<money>(?:US)?[$€£¥₹] ?|\b(?:USD|EUR|GBP|CNY|INR|JPY) )?(?P<inner>[-+])?\Z"
)
_MINUS_IS_A_DASH = re.compile(r"[A-Za-z)\]}][-+] ?\Z|[A-Za-z)\]}] [-+] \Z")  # x-5, x - 5
# Text before or after a number that makes it part of a larger expression, or not a plain number.
_EXPRESSION_BEFORE = re.compile(
    r"(?:[/^*√±<>≤≥≠]|[A-Za-z]\(|\b(?:(?:sin|cos|tan|log|ln|exp|sqrt)(?:_\w{1,3})?|(?:max|min)\.?)[ ({]?"
    r"|\\[A-Za-z]+(?:_\{?\w{1,3}\}?)?[ ({]?)[ ({]?\Z"
    r"|[-+] ?[({\[|\"'<]+ ?\Z",  # -(5), -{5}
    re.I,
)
_QUALIFIER_BEFORE = re.compile(
    r"\b(?:than|at most|at least|under|over|above|below|exceed(?:s|ing)?|plus|times"
    r"|out of|one in|(?:one|each|some|any) of"
    r"|(?:divided|multiplied|divisible) by) \Z|(?:\A|[:=,(] ?|\b(?:is|are|was|be) )up to \Z"
    r"|\b(?:half|third|quarter|(?:four|fif|six|seven|eigh|nin|ten)th|percent|multiple|factor|power|square|cube|root"
    r"|twice|double|triple) (?:of )?(?:the )?\Z",
    re.I,
)
_OPERAND = r"(?:one|two|three|four|five|six|seven|eight|nine|ten|twelve|twenty|a hundred|itself|[xyzn]\b)"
_EXPRESSION_AFTER = re.compile(
    r" ?(?:π|√|±|\\|pi\b|\+|[*^] ?[A-Za-z(]|[/-] ?[xyzn(](?![a-z]))|[xyznie](?![A-Za-z])|\([\dxyzn]|[A-Za-z]+\d"
    r"|[)\]}|]+ ?\^|[₀-₉]| ?[≤≥≠]| ?> ?[\w-]| ?<(?!\w+ ?/?>) ?[\w-]"
    r"|[ -](?:(?:halves|halved|doubled|tripled|quadrupled)\b"
    r"|(?:squared|cubed|factorial|plus|minus|multiplied|divided|modulo|mod|choose|to the (?:\w+ )?power)\b"
    r"|at (?:most|least|best)\b|and[ -](?:up|above|over|below|under|more)\b"
    r"|and[ -](?:a|one|two|three)[ -](?:half|third|quarter)"
    rf"|(?:third|(?:fif|six|seven|eigh|nin|ten|hundred|thousand|(?:m|b|tr)illion)th)s\b|times {_OPERAND})",
)
_PERCENT_SIGN = re.compile(r" ?(?:%|(?:percent|per cent|pct)\b)", re.I)
_SCALE_FACTORS = {"hundred": 100, "thousand": 10**3, "lakh": 10**5, "million": 10**6, "crore": 10**7}
_SCALE_FACTORS |= {"billion": 10**9, "trillion": 10**12, "k": 10**3, "m": 10**6, "mn": 10**6, "mio": 10**6}
_SCALE_FACTORS |= {"b": 10**9, "bn": 10**9, "tn": 10**12}
_SCALE_FACTORS |= {"百": 100, "千": 10**3, "万": 10**4, "萬": 10**4, "亿": 10**8, "億": 10**8}
_SCALE_WORD = re.compile(
    r" ?((?i:(?:hundred|thousand|lakh|million|crore|billion|trillion)s?)\b|(?:k|mn|mio|bn|tn)\b|[百千万萬亿億])"
)
_MONEY_SCALE, _AMBIGUOUS_SCALE = re.compile(r"([KMB])\b"), re.compile(r"[MB]\b")
_UNKNOWN_UNIT = re.compile(  # 5 clips, 5 kΩ
    r" ?([A-Za-z]{2,20}[a-rt-z]s|[a-zµ]?[A-Z]{1,2}[a-z]?)(?=[\s.,;!)]*\Z)"
)


def normalise_symbols(text: str) -> str:
    """Return the text with signs, digits of other scripts, LaTeX and markdown normalised to plain ASCII."""
    text = text[-MAX_TEXT_CHARS:]
    if not text.isascii():
        text = convert_superscripts(_FRACTION_SIGN.sub(_expand_fraction, text))
        text = re.sub(r"[^\x00-\x7f]", lambda match: _to_ascii(match.group()), text)
    if "\\" in text or "{" in text:
        for pattern, replacement in _LATEX_REPLACEMENTS:
            text = pattern.sub(replacement, text)
    text = _INLINE_MATHS.sub(r" \1 ", text)
    for symbol, meaning in _ARROW_MEANINGS.items():
        text = text.replace(symbol, meaning)
    text = _MINUS_WORD.sub("-", text)
    text = _POWER_STARS.sub("^", text).replace("**", "")
    text = _EMPHASIS_MARK.sub("", text)
    return re.sub(r"[ \t\f\v]+", " ", text)


def convert_superscripts(text: str) -> str:
    """Return the text with superscript digits as exponents: 2\u2078 becomes 2^8, not 28."""
    return _SUPERSCRIPT_RUN.sub(lambda match: "^" + match.group().translate(_SUPERSCRIPT_DIGITS), text)


def _expand_fraction(match: re.Match[str]) -> str:
    numerator, denominator = unicodedata.normalize("NFKC", match.group(2)).split("\u2044")
    return f"{match.group(1)} {numerator}/{denominator}" if match.group(1) else f"{numerator}/{denominator}"


def _to_ascii(character: str) -> str:
    if character in _ASCII_SIGNS:
        return _ASCII_SIGNS[character]
    digit = unicodedata.decimal(character, None)  # covers Arabic, Devanagari and full-width digits
    if digit is not None:
        return str(digit)
    if "\uff01" <= character <= "\uff5e":  # full-width forms of ASCII
        return chr(ord(character) - 0xFEE0)
    return " " if unicodedata.category(character) == "Zs" else character


_FRACTION_SIGN = re.compile("(\\d?)([\u00bc-\u00be\u2150-\u215e\u2189])")
_SUPERSCRIPT_RUN = re.compile("[\u2070\u00b9\u00b2\u00b3\u2074-\u2079\u207a\u207b]+")
_SUPERSCRIPT_DIGITS = str.maketrans(
    "\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079\u207a\u207b", "0123456789+-"
)
_ASCII_SIGNS = dict.fromkeys("\u2212\u2010\u2011\u2012\u2013\u2014\ufe63", "-")  # minus and dashes
_ASCII_SIGNS |= dict.fromkeys("\u00d7\u00b7\u22c5\u2217", "*") | dict.fromkeys("\u2044\u2215\u00f7", "/")
_ASCII_SIGNS |= dict.fromkeys("\u2018\u2019\u02bc", "'") | dict.fromkeys("\u2060\u200b\ufeff", "")
_ASCII_SIGNS |= {"\u2243": "≈", "\u3002": ". ", "\u3001": ", ", "\uff0c": ",", "\u066b": ".", "\u066c": ","}
_ASCII_SIGNS |= {"\u2103": "°C", "\u2109": "°F"}
_INLINE_MATHS = re.compile(r"\$([^$\n]{1,200})\$(?![\d.])")  # $5$, not the prices in: from $5 to $7
_ARROW_MEANINGS = {"=>": ": ", "->": ": ", ">=": "≥", "<=": "≤", "!=": "≠"}  # no equals or minus signs
_MINUS_WORD = re.compile(r"\b(?:minus|negative) (?=[\d.$])", re.I)
_POWER_STARS = re.compile(r"(?<=\d)\*\*(?=[-+]?\d)")
_EMPHASIS_MARK = re.compile(r"`|(?<![\d\s)])\*|\*(?![\d\s(.])|(?<!\w)_++|(?<!_)_++(?!\w)")
_LATEX_REPLACEMENTS = [
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


@lru_cache(maxsize=4096)  # the reference is parsed for every member of a group
def parse_only_number(text: str, decimal_comma: bool = False) -> Number | None:
    """Return the number that the text states; None if there is none, or several with different values. An equation
    states its right side (48+24 = 72), an approximation its left side (1/3 ≈ 0.33)."""
    text = normalise_symbols(text).strip() if len(text) <= MAX_TEXT_CHARS else ""
    if "≈" in text and "\n" in text:
        return None  # ambiguous: the approximated line is unknown
    stated_text = next((side for side in text.split("≈") if NUMBER_RUN.search(side)), "")
    equation_text, _, stated_text = stated_text.rpartition("=")
    numbers = [span.number for span in find_number_spans(stated_text, decimal_comma)]
    result = numbers[0] if numbers else None
    if result is None or any(number is None or number.value != result.value for number in numbers):
        return None
    if (
        _DENIAL_WORD.search(stated_text)
        or _REFUSAL_TEXT.search(stated_text)
        or (len(numbers) == 1 and _OR_WORD.search(stated_text))
    ):
        return None
    return None if equation_text and _is_unclear(equation_text, stated_text, decimal_comma) else result


def find_last_number(text: str, decimal_comma: bool = False) -> str | None:
    """Return the last number of the text as written, with its sign and unit; None if it is negated (not 7), one of
    several alternatives (5 or 7), or not a plain number (10-3)."""
    text = normalise_symbols(text)
    spans = find_number_spans(text, decimal_comma)
    if not spans or spans[-1].number is None:
        return None
    start, end = spans[-1].start, spans[-1].end
    text_before = text[spans[-2].end if len(spans) > 1 else 0 : start].rpartition("\n")[2]
    text_after = text[end:].partition("\n")[0]
    is_denied = (
        _DENIAL_WORD.search(text_before)
        or _OR_WORD.search(text_before)
        or _REFUSAL_TEXT.search(text_before + "5" + text_after)
    )
    return None if is_denied or _RETRACTION_TEXT.search(text_before.rpartition("=")[0]) else text[start:end]


def _is_unclear(equation: str, stated_text: str, decimal_comma: bool) -> bool:
    """Return whether the text before the last = of a line retracts the value or states another one: not x = 72,
    x = 5 or x = 72, 5 < x = 72."""
    line = equation.rpartition("\n")[2]
    lhs = _CLAUSE_SEPARATOR.split(line)[-1].rpartition("=")[2]
    if _REJECTED_LINE.search(line) or _RETRACTION_TEXT.search(lhs):
        return True
    if not re.search(r"\d", lhs) and (_DENIAL_WORD.search(lhs) or _OR_WORD.search(lhs)):
        return True
    sides = f"{line}={stated_text}".split("=")
    right_sides = [_CLAUSE_END.split(rhs)[0] for lhs, rhs in pairwise(sides) if _LEFT_SIDE.search(lhs)]
    single_spans = [
        spans for spans in (find_number_spans(side, decimal_comma) for side in right_sides) if len(spans) == 1
    ]
    return len({span.number.value for [span] in single_spans if span.number}) > 1


_DENIAL_WORD = re.compile(r"\b(?:not|neither|nor|never|cannot)\b|n't\b|≠|不是|并非", re.I)
_REFUSAL_TEXT = re.compile(  # 72 is wrong; 72? No; wrong: 72. Not: he got 72 wrong
    r"\b(?:is|are|was|be|seems|looks) (?:an? |the )?(?:wrong|incorrect|false|untrue|mistaken|impossible)\b"
    r"|[?(] ?(?:no|nope|wrong|incorrect|false)\b|\b(?:wrong|incorrect|false) ?:",
    re.I,
)
_OR_WORD = re.compile(r"\bor\b(?! so\b)", re.I)
_CLAUSE_SEPARATOR = re.compile(r"[,;.:] ")
_REJECTED_LINE = re.compile(r"\b(?:wrong|incorrect|false) ?:", re.I)
_RETRACTION_TEXT = re.compile(  # not 12*6 = 72, 5 or x = 72, 5 < x = 72
    r"(?:\b(?:not|never)|n't) [-+*/x^()$.\d ]+\Z|\d or (?:[A-Za-z]\w*|[-+*/x^()$.\d ]+) ?\Z|[<>≤≥≠] ?[\w.]+ ?\Z",
    re.I,
)
_CLAUSE_END = re.compile(r"[,;:] |\. |\b(?:or|and|then|so|but)\b", re.I)
_LEFT_SIDE = re.compile(  # the left side of an equation: x, then the total
    r"(?:\A|[,;:.] ?|\b(?:or|and|then|so|but|if|let|are|either) )(?:\b[A-Za-z_]\w*+(?:\([A-Za-z]\))? ?){1,4}\Z",
    re.I,
)
