"""Find the code blocks of the documents that the project grew out of, where they lie beside the checkout."""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

SEEDS = Path(__file__).resolve().parents[2].parent / "shared" / "seeds"
FENCE = re.compile(
    r"^(?P<indent>[ \t]*)```(?P<language>\w*)\n(?P<text>.*?)^(?P=indent)```[ \t]*$", re.S | re.M
)


@dataclass(frozen=True, slots=True)
class Block:
    """Holds one fenced block: `002-3` is the third block of document 002, counted over all languages."""

    document: str
    number: int
    language: str
    line: int  # of the document, counted from 1
    text: str

    def __str__(self) -> str:
        return f"{self.document}-{self.number}"


def blocks(document: str, language: str | None = None) -> list[Block]:
    """Return the blocks of a document such as `000`; none where the documents are not here."""
    found = []
    for path in SEEDS.glob(f"{document}_*.txt"):
        text = path.read_text(encoding="utf-8").replace("\r\n", "\n")
        for number, match in enumerate(FENCE.finditer(text), 1):
            line = text.count("\n", 0, match.start()) + 1
            body = textwrap.dedent(match["text"])
            found.append(Block(document, number, match["language"], line, body))
    return [block for block in found if language in (None, block.language)]
