"""When two texts are the same in other words: normalised, by SQuAD's words, or as a part of a longer one."""

from __future__ import annotations

import re
import string
import unicodedata

from TrainingFactory.rewards.rules.numbers import lowered


def normalised(text: str) -> str:
    """Return the text without what does not matter: letter case, Unicode forms, runs of spaces, emphasis, and quotes
    and full stops around it."""
    text = unicodedata.normalize("NFKC", lowered(text)).casefold().translate(_QUOTES)
    text = re.sub(r"\\(?:text|mathrm|textbf|mathbf)\s?\{([^{}]{0,200})\}", r"\1", text)
    text = " ".join(text.replace("**", "").split())
    inside = text.lstrip(_AROUND)
    if inside[:1].isdigit() and _POINT.search(text[: len(text) - len(inside)]):
        inside = text[len(text) - len(inside) - 1 :]  # .5 is not 5
    return inside.rstrip(_AROUND) or text


_QUOTES = str.maketrans("\u2018\u2019\u201c\u201d\u2013\u2014\u2212", "''\"\"---")
_AROUND = " \"'`*_.,;:!?()[]$"
_POINT = re.compile(r"(?<![.,])[.,]\Z")


def holds(answer: str, reference: str) -> bool:
    """Return true if the reference occurs in the answer as whole words, and a number as a whole number: there is no 72
    in 7.72, -72, 1/72, x^72 and 72,000. A dash between numbers (1939-1945) is no minus."""
    wanted = normalised(reference)
    before, after = r"(?<!\w)(?<!\d[.,])", r"(?!\w)(?![.,]\d)"
    if wanted[:1].isdigit():
        before += r"(?<![.,/^\\])(?<!\d')(?<![\s(\[=:$]-)(?<!\A-)"
    if wanted[-1:].isdigit():
        after += r"(?!'\d)(?! ?[/^] ?\w)"
        after += r"(?! \d{3}(?!\d))" if re.fullmatch(r"\d{1,3}", wanted) else ""
    return re.search(f"{before}{re.escape(wanted)}{after}", normalised(answer)) is not None


def squad_words(text: str) -> list[str]:
    """Return the words as SQuAD compares them: lower case, without punctuation and articles. A text of nothing else
    keeps them: `The` and `A` are different answers. So does a number: 1.5 and 15 are too."""
    small = unicodedata.normalize("NFKC", lowered(text)).lower()
    bare = _IN_NUMBER.sub(_kept, small).translate(_PUNCTUATION)
    return _ARTICLES.sub(" ", bare).split() or bare.split() or small.split()


def _kept(mark: re.Match[str]) -> str:
    return "" if mark["thousands"] is not None else mark.group().translate(_KEPT)


_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation + "\u2018\u2019\u201c\u201d")
# Without these marks 1.5 would be 15, 3-4 would be 34, 5e-3 would be 5e3, and -7 would be 7. They are put where no
# punctuation is; only thousands are written with and without theirs.
_DASHES = "\u2212\u2013"
_IN_NUMBER = re.compile(
    r"(?<=\d)(?:(?<!\d{4})(?<!(?<!\d)0)[,'_](?=\d{3}(?!\d))(?P<thousands>)"
    rf"|[{re.escape(string.punctuation)}{_DASHES}]+(?=\d))"
    r"|(?<=\de)[-\u2212](?=\d)|(?<![\w)])[-\u2212](?=\.?\d)|(?<!\w)\.(?=\d)"
)
_KEPT = {ord(mark): 0xE000 + ord(mark) for mark in string.punctuation}
_KEPT |= {ord(dash): _KEPT[ord("-")] for dash in _DASHES}
