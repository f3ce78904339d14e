"""Questions about nouns that take several calls of WordNet's tools, with dialogues that answer them. Each word is asked
about once at most, and its hash says in which part: no two parts ask about the same word."""

from __future__ import annotations

import re
from collections import Counter
from hashlib import blake2b
from pathlib import Path

from TrainingFactory.apps.recipes.gsm8k import ONE_IN, Prepared
from TrainingFactory.apps.recipes.wordnet import MOST, WordNet
from TrainingFactory.common.openai_format import message_to_dict, spec_to_dict
from TrainingFactory.types import Message, ToolCall

Thing = tuple[str, int]  # a word, and which of its senses
Waiting = dict[tuple[str, Thing], Thing]  # words by their part, and what another that comes shares with them
PER_KIND, PER_ANSWER = 2500, 40  # questions of a kind, and those of them with the same answer
# What is asked of a word in one of several senses, and the tools that lead to the answer.
TAKE = 'Take the noun "{}" in the sense "{}". It is a {} What is that a kind of? Answer with one word.'
PATHS = {
    "part": ("part of something.", ["part_of", "kind_of"]),
    "two": ("kind of something.", ["kind_of"] * 2),
    "three": ("kind of something, which is a kind of something else.", ["kind_of"] * 3),
}
BOTH = 'Of what are both "{}, sense {}" and "{}, sense {}" a kind? Answer with the one word that is nearest to both.'
ALONE = "no other word to compare with"
_WORD, _ONE = re.compile("[a-z]{3,}"), re.compile(r"(.+), sense (\d+)")
_RUDE = re.compile("offensive|slur|disparag|derogatory|obscene|vulgar|slang|sexual|intercourse|prostitut")


class Unasked(Exception):
    """Says why a word gives no question."""


async def ask(folder: str | Path, plain: bool = False) -> Prepared:
    """Return the rows of each part, in an order by chance that is always the same; `plain` ones have no calls."""
    net, done, asked, waiting = WordNet(folder), Prepared(), Counter[tuple[str, str]](), Waiting()
    given = {} if plain else {"tools": [spec_to_dict(each.spec) for each in net.tools]}
    for word in sorted(net.index, key=_hashed):
        part = {0: "dev", 1: "dev", 2: "test", 3: "test"}.get(_hashed(word) % ONE_IN, "tasks")
        try:
            talk, answer = await _about(net, word, part, waiting)
            if asked[talk.kind, ""] == PER_KIND or asked[talk.kind, answer] == PER_ANSWER:
                raise Unasked("enough questions of this kind, or with this answer")
        except Unasked as why:
            done.dropped[f"nouns: {why}"] += 1
            continue
        asked.update([(talk.kind, ""), (talk.kind, answer)])
        done.rows[part].append({"id": talk.id, "prompt": talk.prompt, "answer": answer})
        if taught := {"tasks": "sft", "dev": "sft_dev"}.get(part):
            said = [Message("user", talk.prompt), *([] if plain else talk.said), Message("assistant", answer)]
            done.rows[taught].append({"id": talk.id, "messages": list(map(message_to_dict, said))} | given)
    done.dropped[f"nouns: {ALONE}"] = len(waiting)  # others came to those that had to wait
    return done


class Dialogue:
    """Answers a question by calling the tools; Unasked where there is not one clear answer."""

    def __init__(self, net: WordNet, kind: str, prompt: str, *words: str) -> None:
        self.kind, self.prompt, self.id = kind, prompt, "-".join((kind, *words))
        self._net, self.said = net, list[Message]()

    async def call(self, name: str, **arguments: str | int) -> str:
        reply, number = (await getattr(self._net, name).run(arguments)).content, f"call{len(self.said) // 2}"
        self.said.append(Message("assistant", tool_calls=[ToolCall(name, arguments, number)]))
        self.said.append(Message("tool", reply, tool_call_id=number, name=name))
        return reply

    async def step(self, name: str, thing: Thing) -> Thing:
        found = _ONE.fullmatch(await self.call(name, word=thing[0], sense=thing[1]))
        if found is None:
            raise Unasked("a step leads nowhere, or to several things")
        return found[1], int(found[2])

    async def follow(self, thing: Thing, steps: list[str]) -> str:
        await self.call("lookup", word=thing[0])
        for name in steps:
            thing = await self.step(name, thing)
        return self._clear(thing[0], [each.content for each in self.said[1:-1:2]])

    async def climb(self, *both: Thing) -> str:
        """Go up from both in turn, until one comes to where the other has been: that is the nearest."""
        ways = [[thing] for thing in reversed(both)]
        while ways[0][-1] not in ways[1]:
            ways.reverse()
            ways[0].append(await self.step("kind_of", ways[0][-1]))
        return self._clear(ways[0][-1][0], [])

    def _clear(self, answer: str, before: list[str]) -> str:
        seen = any(re.search(rf"\b{re.escape(answer)}\b", text) for text in (self.prompt, *before))
        if seen or not _WORD.fullmatch(answer):
            raise Unasked("the answer is not one word of small letters, or is seen too early")
        return answer


async def _about(net: WordNet, word: str, part: str, waiting: Waiting) -> tuple[Dialogue, str]:
    """Ask what a sense of a word leads to; of a word with one sense, what it shares with another that waits for one."""
    if not _WORD.fullmatch(word):
        raise Unasked("not one word of small letters")
    meanings, chance = [net.at(place) for place in net.places(word)], _hashed(word) // ONE_IN
    glosses = {each.gloss for each in meanings}
    # What leads to other things is itself not asked about: no answer of one part is told by the dialogues of another.
    found = [n for n, each in enumerate(meanings) if each.words[0] == word and not each.leads("~%")]
    if not found or not len(glosses) == len(meanings) <= MOST or _RUDE.search(" ".join(glosses)):
        raise Unasked("others are kinds or parts of it, or its senses are too many, alike, or rude")
    meaning, thing = meanings[found[chance % len(found)]], (word, found[chance % len(found)] + 1)
    if len(meanings) > 1:
        kind = "part" if meaning.leads("#") else ("two", "three")[chance // 64 % 2]
        talk = Dialogue(net, kind, TAKE.format(word, meaning.gloss, PATHS[kind][0]), word)
        return talk, await talk.follow(thing, PATHS[kind][1])
    scout = Dialogue(net, "both", "")
    above = await scout.step("kind_of", thing)
    key = part, await scout.step("kind_of", above) if chance // 64 % 2 else above
    if (other := waiting.pop(key, None)) is None:
        waiting[key] = thing
        raise Unasked(ALONE)
    talk = Dialogue(net, "both", BOTH.format(*other, *thing), other[0], word)
    return talk, await talk.climb(other, thing)


def _hashed(word: str) -> int:
    return int.from_bytes(blake2b(word.encode(), digest_size=8).digest(), "big")
