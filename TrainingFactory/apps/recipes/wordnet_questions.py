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
_PLAIN_WORD, _ONE_ENTRY = re.compile("[a-z]{3,}"), re.compile(r"(.+), sense (\d+)")
_RUDE = re.compile("offensive|slur|disparag|derogatory|obscene|vulgar|slang|sexual|intercourse|prostitut")


class NoQuestionError(Exception):
    """Error with the reason why a word yields no question."""


async def prepare_wordnet(folder: str | Path, plain: bool = False) -> PreparedRows:
    """Return the rows of each part, in a fixed pseudo-random order; `plain`: without tool calls."""
    wordnet, prepared_rows = WordNet(folder), PreparedRows()
    counts, unpaired_words = Counter[tuple[str, str]](), PendingWords()
    tools_column = {} if plain else {"tools": [spec_to_dict(tool.spec) for tool in wordnet.tools]}
    for word in sorted(wordnet.index, key=_hash_word):
        split = {0: "dev", 1: "dev", 2: "test", 3: "test"}.get(_hash_word(word) % DEV_EVERY, "tasks")
        try:
            dialogue, answer = await _ask_about(wordnet, word, split, unpaired_words)
            if counts[dialogue.kind, ""] == MAX_PER_KIND or counts[dialogue.kind, answer] == MAX_PER_ANSWER:
                raise NoQuestionError("enough questions of this kind, or with this answer")
        except NoQuestionError as reason:
            prepared_rows.dropped[f"nouns: {reason}"] += 1
            continue
        counts.update([(dialogue.kind, ""), (dialogue.kind, answer)])
        prepared_rows.rows[split].append({"id": dialogue.id, "prompt": dialogue.prompt, "answer": answer})
        if sft_split := {"tasks": "sft", "dev": "sft_dev"}.get(split):
            calls = [] if plain else dialogue.messages
            messages = [Message("user", dialogue.prompt), *calls, Message("assistant", answer)]
            row = {"id": dialogue.id, "messages": [message_to_dict(message) for message in messages]}
            prepared_rows.rows[sft_split].append(row | tools_column)
    prepared_rows.dropped[f"nouns: {NO_PARTNER}"] = len(unpaired_words)  # the others found a partner later
    return prepared_rows


class Dialogue:
    """Conversation that answers a question by calling tools; raises NoQuestionError if the answer is ambiguous."""

    def __init__(self, wordnet: WordNet, kind: str, prompt: str, *words: str) -> None:
        self.kind, self.prompt, self.id = kind, prompt, "-".join((kind, *words))
        self._wordnet, self.messages = wordnet, list[Message]()

    async def call(self, tool_name: str, **arguments: str | int) -> str:
        reply = (await getattr(self._wordnet, tool_name).run(arguments)).content
        call_id = f"call{len(self.messages) // 2}"
        self.messages.append(Message("assistant", tool_calls=[ToolCall(tool_name, arguments, call_id)]))
        self.messages.append(Message("tool", reply, tool_call_id=call_id, name=tool_name))
        return reply

    async def find_related(self, tool_name: str, sense: SenseRef) -> SenseRef:
        match = _ONE_ENTRY.fullmatch(await self.call(tool_name, word=sense[0], sense=sense[1]))
        if match is None:
            raise NoQuestionError("a step leads nowhere, or to several things")
        return match[1], int(match[2])

    async def follow_tools(self, sense: SenseRef, tool_names: list[str]) -> str:
        await self.call("lookup", word=sense[0])
        for tool_name in tool_names:
            sense = await self.find_related(tool_name, sense)
        return self._check_answer(sense[0], [message.content for message in self.messages[1:-1:2]])

    async def find_ancestor(self, *senses: SenseRef) -> str:
        """Call `kind_of` for both words in turn until their paths meet, and return the nearest common ancestor."""
        paths = [[sense] for sense in reversed(senses)]
        while paths[0][-1] not in paths[1]:
            paths.reverse()
            paths[0].append(await self.find_related("kind_of", paths[0][-1]))
        return self._check_answer(paths[0][-1][0], [])

    def _check_answer(self, answer: str, earlier_texts: list[str]) -> str:
        is_mentioned = any(
            re.search(rf"\b{re.escape(answer)}\b", text) for text in (self.prompt, *earlier_texts)
        )
        if is_mentioned or not _PLAIN_WORD.fullmatch(answer):
            raise NoQuestionError("the answer is not one word of small letters, or is seen too early")
        return answer


async def _ask_about(wordnet: WordNet, word: str, split: str, unpaired: PendingWords) -> tuple[Dialogue, str]:
    """Return a question about one sense of a word, or about what a word with a single sense shares with a pending
    word."""
    if not _PLAIN_WORD.fullmatch(word):
        raise NoQuestionError("not one word of small letters")
    senses = [wordnet.read_sense(offset) for offset in wordnet.offsets(word)]
    word_hash = _hash_word(word) // DEV_EVERY
    glosses = {sense.gloss for sense in senses}
    # Words with hyponyms or parts are not asked about, so that no split's demonstrations reveal another's answers.
    candidates = [
        index for index, sense in enumerate(senses) if sense.words[0] == word and not sense.has_pointer("~%")
    ]
    if not candidates or not len(glosses) == len(senses) <= MAX_ENTRIES or _RUDE.search(" ".join(glosses)):
        raise NoQuestionError("others are kinds or parts of it, or its senses are too many, alike, or rude")
    sense_index = candidates[word_hash % len(candidates)]
    sense, sense_ref = senses[sense_index], (word, sense_index + 1)
    if len(senses) > 1:
        kind = "part" if sense.has_pointer("#") else ("two", "three")[word_hash // 64 % 2]
        dialogue = Dialogue(wordnet, kind, QUESTION.format(word, sense.gloss, QUESTION_KINDS[kind][0]), word)
        return dialogue, await dialogue.follow_tools(sense_ref, QUESTION_KINDS[kind][1])
    probe = Dialogue(wordnet, "both", "")
    hypernym = await probe.find_related("kind_of", sense_ref)
    pair_key = split, await probe.find_related("kind_of", hypernym) if word_hash // 64 % 2 else hypernym
    if (partner := unpaired.pop(pair_key, None)) is None:
        unpaired[pair_key] = sense_ref
        raise NoQuestionError(NO_PARTNER)
    dialogue = Dialogue(wordnet, "both", PAIRING.format(*partner, *sense_ref), partner[0], word)
    return dialogue, await dialogue.find_ancestor(partner, sense_ref)


def _hash_word(word: str) -> int:
    return int.from_bytes(blake2b(word.encode(), digest_size=8).digest(), "big")
