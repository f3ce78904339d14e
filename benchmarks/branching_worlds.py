"""The environments of `benchmarks.branching`, with words as tokens: a call is `call go left`, an answer is a word.

    chain     six rooms, each with one right way of three. A wrong one leads back a room
    spoiled   five rooms, each with one right way of three. A wrong one spoils the episode, and no reply says so
    wordnet   the tools of `apps/recipes/wordnet.py` over a small WordNet: senses of a word, then what it is a kind of

The reward is 1 for a right answer in the end, else 0. `novice` plays with mistakes, which warm starts imitate.
"""

from __future__ import annotations

import random
import re
import tempfile
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

from tests.kits.wordnet import ambiguous, write_wordnet
from TrainingFactory.apps.recipes.wordnet import WordNet
from TrainingFactory.envs import ToolEnvironment
from TrainingFactory.tools import tool
from TrainingFactory.types import Message, Step, Task, ToolCall, ToolSpec, Turn

WAYS = ["left", "right", "ahead"]
RIGHT = [
    "ahead",
    "left",
    "left",
    "right",
    "ahead",
    "right",
]  # the way out of each room, the same in all tasks
SLIP = 0.45  # share of the novice's turns that may go wrong
WORDS = 3  # with two senses each
ROLES = ["system", "user", "tool", "assistant"]


class BenchmarkWorld(ToolEnvironment):
    def expert(self) -> Iterator[Message]:
        raise NotImplementedError

    def novice(self, rng: random.Random) -> Iterator[Message]:
        raise NotImplementedError

    @property
    def state(self) -> str:
        raise NotImplementedError

    def is_right(self, answer: str) -> bool:
        return answer == str(self.task.answer)

    async def step(self, message: Message) -> Step:
        """End after an answer, and after a call that cannot be read."""
        step = await super().step(message)
        step.done = step.done or any(call.error for call in message.tool_calls)
        return step

    async def reward(self, episode: Any) -> float:
        return float(self.is_right(episode.trajectory.answer.strip()))


class RoomsWorld(BenchmarkWorld):
    """Rooms in a row. Which way is right must be learned: no reply says it."""

    rooms: ClassVar[int] = 6
    spoils: ClassVar[bool] = False  # a wrong way leads on and spoils the episode; else it leads back a room

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.room, self.spoiled = 0, False

    @classmethod
    def tasks(cls, split: str, seed: int, count: int) -> Iterator[Task]:
        yield from (Task(f"{split}-{seed}-{number}", "room0", "out") for number in range(count))

    @property
    def state(self) -> str:
        return f"{self.room} {self.spoiled}"

    @tool
    async def go(self, way: str) -> str:
        """Leave the room; the reply is the next one."""
        if self.room < self.rooms:
            is_right = way == RIGHT[self.room]
            self.spoiled |= self.spoils and not is_right
            self.room = self.room + 1 if is_right or self.spoils else max(self.room - 1, 0)
        return f"room{self.room}"

    async def fork(self) -> RoomsWorld:
        other = type(self)(self.task)
        other.room, other.spoiled = self.room, self.spoiled
        return other

    def is_right(self, answer: str) -> bool:
        return answer == "out" and self.room == self.rooms and not self.spoiled

    def expert(self) -> Iterator[Message]:
        while self.room < self.rooms:
            yield call("go", way=RIGHT[self.room])
        yield Message("assistant", "out")

    def novice(self, rng: random.Random) -> Iterator[Message]:
        for message in self.expert():
            slips = bool(message.tool_calls) and rng.random() < SLIP
            yield call("go", way=rng.choice(WAYS)) if slips else message


class ChainWorld(RoomsWorld):
    pass


class SpoiledWorld(RoomsWorld):
    rooms, spoils = 5, True


class WordNetWorld(BenchmarkWorld):
    """Which kind of thing is a word in the sense that the task describes, three levels up?"""

    def __init__(self, task: Task, tools: Sequence[Any] = ()) -> None:
        super().__init__(task, [wordnet(), *tools])
        self.calls: list[str] = []

    @classmethod
    def tasks(cls, split: str, seed: int, count: int) -> Iterator[Task]:
        rng = random.Random(f"wordnet {split} {seed}")
        words = sorted({name.partition(" ")[0] for name in ambiguous(WORDS)})
        for number in range(count):
            word, is_tool = rng.choice(words), rng.random() < 0.5
            hint, answer = ("sharp", "whole") if is_tool else ("sour", "thing")
            path = ("hand tool", "tool", "whole") if is_tool else ("fruit", "food", "thing")
            metadata = {"word": word, "sense": 1 + is_tool, "path": path}
            yield Task(f"{split}-{seed}-{number}", f"{hint} {word}", answer, metadata)

    @property
    def state(self) -> str:
        return " ".join(self.calls)

    async def step(self, message: Message) -> Step:
        self.calls += map(describe_call, message.tool_calls)
        return await super().step(message)

    def is_right(self, answer: str) -> bool:
        """The answer must have been looked up: guesses are worth nothing."""
        needed = {describe_call(written) for message in self.expert() for written in message.tool_calls}
        return super().is_right(answer) and needed <= set(self.calls)

    async def fork(self) -> WordNetWorld:
        other = type(self)(self.task)
        other.calls = list(self.calls)
        return other

    def expert(self) -> Iterator[Message]:
        word, sense, path = (self.task.metadata[key] for key in ("word", "sense", "path"))
        yield call("lookup", word=word)
        for name, number in [(word, sense), (path[0], 1), (path[1], 1)]:
            yield call("kind_of", word=name, sense=number)
        yield Message("assistant", str(self.task.answer))

    def novice(self, rng: random.Random) -> Iterator[Message]:
        for message in self.expert():
            slip = rng.random()
            if slip < SLIP / 2:
                yield Message("assistant", rng.choice(["whole", "thing", "food", "tool"]))
                return
            [arguments] = [call.arguments for call in message.tool_calls] or [{}]
            if slip < 1.5 * SLIP and "sense" in arguments:
                message = call("kind_of", word=arguments["word"], sense=rng.choice([1, 2]))
            yield message


WORLDS: dict[str, type[BenchmarkWorld]] = {
    "chain": ChainWorld,
    "spoiled": SpoiledWorld,
    "wordnet": WordNetWorld,
}


@cache
def wordnet() -> WordNet:
    with tempfile.TemporaryDirectory() as folder:
        return WordNet(write_wordnet(Path(folder), ambiguous(WORDS)))


def call(tool_name: str, **arguments: Any) -> Message:
    return Message("assistant", tool_calls=[ToolCall(tool_name, arguments)])


def describe_call(written: ToolCall) -> str:
    return " ".join([written.name, *map(str, written.arguments.values())])


def split_words(text: str) -> list[str]:
    return re.findall(r"\w+|[^\w\s]", text)


class WordChat:
    """A `ChatFormat` with one token for each word. Roles and `end` are tokens too; unknown words are one token."""

    sees_images = False

    def __init__(self, words: Sequence[str]) -> None:
        listed = dict.fromkeys(["pad", "end", "unknown", "call", *ROLES, *words])
        self.ids = {word: number for number, word in enumerate(listed)}
        self.words = list(listed)
        self.stop_ids = (self.ids["end"],)

    def _encode(self, text: str) -> list[int]:
        return [self.ids.get(word, self.ids["unknown"]) for word in split_words(text)]

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> list[int]:
        ids: list[int] = []
        for message in messages:
            ids += [self.ids[message.role], *self._encode(message.content), self.ids["end"]]
        return [*ids, self.ids["assistant"]]

    def extend(self, turn: Turn, replies: Sequence[Message]) -> list[int]:
        return self.render(replies)

    def parse(
        self, token_ids: Sequence[int], prompt_ids: Sequence[int] = (), tools: Sequence[ToolSpec] = ()
    ) -> Message:
        words = self.decode(token_ids).split()
        if words[:1] != ["call"]:
            return Message("assistant", " ".join(words))
        name = " ".join(words[1:2])
        spec = next((spec for spec in tools if spec.name == name), None)
        properties = {} if spec is None else spec.parameters["properties"]
        values = words[2:]
        if len(values) > len(properties) > 0:  # the first argument may be several words
            spare = len(values) - len(properties) + 1
            values = [" ".join(values[:spare]), *values[spare:]]
        if spec is None or len(values) != len(properties):
            return Message("assistant", tool_calls=[ToolCall(name, error="unknown tool or wrong arguments")])
        arguments: dict[str, Any] = dict(zip(properties, values, strict=True))
        for key, schema in properties.items():
            if schema.get("type") == "integer" and arguments[key].isdecimal():
                arguments[key] = int(arguments[key])
        return Message("assistant", tool_calls=[ToolCall(name, arguments)])

    def write(
        self,
        message: Message,
        prompt_ids: Sequence[int] = (),
        tools: Sequence[ToolSpec] = (),
        exact: bool = True,
    ) -> list[int]:
        text = message.content
        for written in message.tool_calls:
            text = " ".join(["call", written.name, *map(str, written.arguments.values())])
        return [*self._encode(text), self.ids["end"]]

    def truncate(self, text: str, max_tokens: int) -> str:
        return " ".join(split_words(text)[:max_tokens])

    def decode(self, token_ids: Sequence[int]) -> str:
        return " ".join(self.words[token] for token in token_ids if self.words[token] != "end")


@cache
def vocabulary() -> list[str]:
    """All words that a task, a reply, a call or an answer can have."""
    senses = ["lookup kind_of part_of", *(wordnet().read_sense(place).gloss for place in _all_places())]
    rooms = [f"room{number}" for number in range(len(RIGHT) + 1)]
    texts = [*senses, *wordnet().index, *rooms, *WAYS, "hand tool , sense 1 2 : nothing go out sour sharp"]
    return sorted({word for text in texts for word in split_words(text)})


def _all_places() -> list[int]:
    return [place for word in wordnet().index for place in wordnet().offsets(word)]
