"""Questions about nouns that take several calls of WordNet's tools, with demonstrations that answer them. Each word is
used in at most one question, and its hash determines the split: no two splits share a word."""

from __future__ import annotations

import re
from collections import Counter
from hashlib import blake2b
from pathlib import Path

from TrainingFactory.apps.recipes.gsm8k import DEV_EVERY, PreparedRows
from TrainingFactory.apps.recipes.wordnet import MAX_ENTRIES, WordNet
from TrainingFactory.common.openai_format import message_to_dict, spec_to_dict
from TrainingFactory.types import Message, ToolCall

SenseRef = tuple[str, int]  # a word and its sense number
# (part, shared ancestor) -> word that waits for a partner.
PendingWords = dict[tuple[str, SenseRef], SenseRef]
MAX_PER_KIND, MAX_PER_ANSWER = 2500, 40  # maximum questions of a kind, and with the same answer within a kind
# Question about a word with several senses; by kind, the relation in it and the tools that lead to the answer.
QUESTION = 'Take the noun "{}" in the sense "{}". It is a {} What is that a kind of? Answer with one word.'
QUESTION_KINDS = {
    "part": ("part of something.", ["part_of", "kind_of"]),
    "two": ("kind of something.", ["kind_of"] * 2),
    "three": ("kind of something, which is a kind of something else.", ["kind_of"] * 3),
}
PAIRING = 'Of what are both "{}, sense {}" and "{}, sense {}" a kind? Answer with the one word that is nearest to both.'
NO_PARTNER = "no other word to compare with"
_PLAIN_WORD, _SINGLE_ENTRY = re.compile("[a-z]{3,}"), re.compile(r"(.+), sense (\d+)")
_RUDE = re.compile("offensive|slur|disparag|derogatory|obscene|vulgar|slang|sexual|intercourse|prostitut")


class NoQuestionError(Exception):
    """Error with the reason why a word yields no question."""


async def prepare_wordnet(folder: str | Path, plain: bool = False) -> PreparedRows:
    """Return the rows of each part, in a fixed pseudo-random order; `plain`: without tool calls."""
    wordnet, prepared, counts, unpaired = (
        WordNet(folder),
        PreparedRows(),
        Counter[tuple[str, str]](),
        PendingWords(),
    )
    with_tools = {} if plain else {"tools": [spec_to_dict(tool.spec) for tool in wordnet.tools]}
    for word in sorted(wordnet.index, key=_hash_word):
        split = {0: "dev", 1: "dev", 2: "test", 3: "test"}.get(_hash_word(word) % DEV_EVERY, "tasks")
        try:
            dialogue, answer = await _ask_about(wordnet, word, split, unpaired)
            if counts[dialogue.kind, ""] == MAX_PER_KIND or counts[dialogue.kind, answer] == MAX_PER_ANSWER:
                raise NoQuestionError("enough questions of this kind, or with this answer")
        except NoQuestionError as reason:
            prepared.dropped[f"nouns: {reason}"] += 1
            continue
        counts.update([(dialogue.kind, ""), (dialogue.kind, answer)])
        prepared.rows[split].append({"id": dialogue.id, "prompt": dialogue.prompt, "answer": answer})
        if sft_part := {"tasks": "sft", "dev": "sft_dev"}.get(split):
            calls = [] if plain else dialogue.messages
            messages = [Message("user", dialogue.prompt), *calls, Message("assistant", answer)]
            row = {"id": dialogue.id, "messages": [message_to_dict(message) for message in messages]}
            prepared.rows[sft_part].append(row | with_tools)
    prepared.dropped[f"nouns: {NO_PARTNER}"] = len(unpaired)  # the others found a partner later
    return prepared


class Dialogue:
    """Conversation that answers a question by calling tools; raises NoQuestionError unless the answer is unambiguous."""

    def __init__(self, net: WordNet, kind: str, prompt: str, *words: str) -> None:
        self.kind, self.prompt, self.id = kind, prompt, "-".join((kind, *words))
        self._net, self.messages = net, list[Message]()

    async def call(self, name: str, **arguments: str | int) -> str:
        reply, call_id = (
            (await getattr(self._net, name).run(arguments)).content,
            f"call{len(self.messages) // 2}",
        )
        self.messages.append(Message("assistant", tool_calls=[ToolCall(name, arguments, call_id)]))
        self.messages.append(Message("tool", reply, tool_call_id=call_id, name=name))
        return reply

    async def step(self, name: str, sense: SenseRef) -> SenseRef:
        match = _SINGLE_ENTRY.fullmatch(await self.call(name, word=sense[0], sense=sense[1]))
        if match is None:
            raise NoQuestionError("a step leads nowhere, or to several things")
        return match[1], int(match[2])

    async def follow(self, sense: SenseRef, steps: list[str]) -> str:
        await self.call("lookup", word=sense[0])
        for name in steps:
            sense = await self.step(name, sense)
        return self._check_answer(sense[0], [message.content for message in self.messages[1:-1:2]])

    async def climb(self, *senses: SenseRef) -> str:
        """Call `kind_of` for both words in turn until their paths meet, and return the nearest common ancestor."""
        paths = [[sense] for sense in reversed(senses)]
        while paths[0][-1] not in paths[1]:
            paths.reverse()
            paths[0].append(await self.step("kind_of", paths[0][-1]))
        return self._check_answer(paths[0][-1][0], [])

    def _check_answer(self, answer: str, earlier_texts: list[str]) -> str:
        is_mentioned = any(
            re.search(rf"\b{re.escape(answer)}\b", text) for text in (self.prompt, *earlier_texts)
        )
        if is_mentioned or not _PLAIN_WORD.fullmatch(answer):
            raise NoQuestionError("the answer is not one word of small letters, or is seen too early")
        return answer


async def _ask_about(net: WordNet, word: str, split: str, unpaired: PendingWords) -> tuple[Dialogue, str]:
    """Return a question about one sense of a word, or about what a word with a single sense shares with a pending
    word."""
    if not _PLAIN_WORD.fullmatch(word):
        raise NoQuestionError("not one word of small letters")
    senses, word_hash = [net.sense_at(offset) for offset in net.offsets(word)], _hash_word(word) // DEV_EVERY
    glosses = {chosen.gloss for chosen in senses}
    # Words with hyponyms or parts are not asked about, so that no split's demonstrations reveal another's answers.
    candidates = [
        n for n, chosen in enumerate(senses) if chosen.words[0] == word and not chosen.has_pointer("~%")
    ]
    if not candidates or not len(glosses) == len(senses) <= MAX_ENTRIES or _RUDE.search(" ".join(glosses)):
        raise NoQuestionError("others are kinds or parts of it, or its senses are too many, alike, or rude")
    sense = candidates[word_hash % len(candidates)]
    chosen, sense_ref = senses[sense], (word, sense + 1)
    if len(senses) > 1:
        kind = "part" if chosen.has_pointer("#") else ("two", "three")[word_hash // 64 % 2]
        dialogue = Dialogue(net, kind, QUESTION.format(word, chosen.gloss, QUESTION_KINDS[kind][0]), word)
        return dialogue, await dialogue.follow(sense_ref, QUESTION_KINDS[kind][1])
    probe = Dialogue(net, "both", "")
    hypernym = await probe.step("kind_of", sense_ref)
    key = split, await probe.step("kind_of", hypernym) if word_hash // 64 % 2 else hypernym
    if (partner := unpaired.pop(key, None)) is None:
        unpaired[key] = sense_ref
        raise NoQuestionError(NO_PARTNER)
    dialogue = Dialogue(net, "both", PAIRING.format(*partner, *sense_ref), partner[0], word)
    return dialogue, await dialogue.climb(partner, sense_ref)


def _hash_word(word: str) -> int:
    return int.from_bytes(blake2b(word.encode(), digest_size=8).digest(), "big")
