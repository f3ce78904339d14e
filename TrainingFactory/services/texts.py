"""Texts of models, tools and files, made safe to show."""

from __future__ import annotations

# Marks that reorder the text around them: what is shown must be what is there.
REORDERING = set("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")


def clean(text: str) -> str:
    """The text with everything that a terminal would obey written out, an escape as \\x1b."""
    return "".join(
        character
        if character in "\n\t" or (character.isprintable() and character not in REORDERING)
        else character.encode("unicode_escape").decode()
        for character in text
    )
