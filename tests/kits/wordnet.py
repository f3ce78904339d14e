"""Files in WordNet's format, from a few meanings."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

# name -> words, what it is a kind of, what it is a part of, definition. The name is for pointers alone.
Meanings = dict[str, tuple[str, str, str, str]]
TOP: Meanings = {
    "thing": ("thing", "", "", "what there is"),
    "whole": ("whole", "thing", "", "all of something"),
    "tool": ("tool implement", "whole", "", "what is used"),
    "food": ("food", "thing", "", 'what is eaten; "food is scarce"'),
    "fruit": ("fruit", "food", "", "the ripened body of a seed plant"),
    "hand tool": ("hand_tool", "tool", "", "held in the hand"),
    "sweet": ("sweet", "food", "", "with sugar"),
}


def write_wordnet(folder: Path, more: Meanings) -> Path:
    """Write data.noun and index.noun; a pointer has its opposite, as it has there."""
    meanings = TOP | more
    links, senses = defaultdict[str, list[tuple[str, str]]](list), defaultdict[str, list[str]](list)
    for name, (words, kinds, wholes, _) in meanings.items():
        for symbol, back, others in (("@", "~", kinds), ("#p", "%p", wholes)):
            for other in filter(None, others.split(", ")):
                links[name].append((symbol, other))
                links[other].append((back, name))
        for word in words.split():
            senses[word.lower()].append(name)
    places, text = dict.fromkeys(meanings, 0), ""
    for _ in range(2):  # places have eight digits whatever they are
        text = "  1 A licence.  \n"
        for name, (words, _, _, gloss) in meanings.items():
            places[name] = len(text)
            listed = "".join(f"{word} 0 " for word in words.split())
            pointers = "".join(f"{symbol} {places[other]:08} n 0000 " for symbol, other in links[name])
            head = f"{places[name]:08} 03 n {len(words.split()):02x} {listed}{len(links[name]):03} {pointers}"
            text += f"{head}| {gloss}  \n"
    lines = [
        f"{word} n {len(names)} 1 @ {len(names)} 0 {' '.join(f'{places[name]:08}' for name in names)}  "
        for word, names in sorted(senses.items())
    ]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "data.noun").write_text(text, encoding="utf-8")
    (folder / "index.noun").write_text("\n".join(["  1 A licence.  ", *lines, ""]), encoding="utf-8")
    return folder


def ambiguous(count: int) -> Meanings:
    """Return words with two senses each, of which questions are made."""
    made: Meanings = {}
    for n in range(count):
        word = "word" + chr(97 + n // 26) + chr(97 + n % 26)
        made[f"{word} 1"] = (word, "fruit", "", f"a sour one like number {n}")
        made[f"{word} 2"] = (word, "hand tool", "", f"a sharp one like number {n}")
    return made
