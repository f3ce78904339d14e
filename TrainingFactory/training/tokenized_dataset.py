"""A dataset in tokens: its examples, written once by the model's own chat template."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from TrainingFactory.data.conversations import Conversation
from TrainingFactory.data.datasets import in_one
from TrainingFactory.data.examples import Example, Examples, reward_of
from TrainingFactory.data.ranking import best_and_worst
from TrainingFactory.data.rewriting import Unreadable, written_by
from TrainingFactory.data.trajectories import Kept
from TrainingFactory.types import Completion, Message, Sample, Task, Trajectory, Turn

TOLD = 3  # rows that were left out, by name
TOLD_EVERY = 10.0  # seconds


class Told:
    """Tells how far long work is, every few seconds."""

    def __init__(self, say: Callable[[str], None], total: int) -> None:
        self._say, self._total, self._told = say, total, time.monotonic()

    def at(self, number: int, what: str) -> None:
        if time.monotonic() - self._told > TOLD_EVERY:
            self._told = time.monotonic()
            self._say(f"{number} of {self._total} {what}")


@dataclass(slots=True)
class Written:
    """A conversation in tokens, written once, and where in it each learned turn begins and ends."""

    conversation: Conversation
    token_ids: np.ndarray  # [N]
    borders: list[tuple[int, int]]
    messages: list[Message]  # of the turns

    def trajectory(self, group: str, member: int) -> Trajectory:
        ids, given = self.token_ids.tolist(), self.conversation
        turns = [
            Turn(ids[:begin], Completion(ids[begin:end], [0.0] * (end - begin), "stop"), message)
            for (begin, end), message in zip(self.borders, self.messages, strict=True)
        ]
        prompt = given.messages[: given.start]
        return Trajectory(Task(given.id, ""), group, member, prompt, given.tools, turns, reward=given.reward)

    @property
    def length(self) -> int:
        return len(self.token_ids)


class TokenizedDataset:
    """Examples in tokens, written once by this model's own template; tokens that were sampled stay. Those longer than
    `max_length` are left out and counted in `long`; what the template cannot write is an error, or with `skip_bad_rows`
    one more of `bad`. Of recorded episodes that belong together there are the best and the worst of those that fit."""

    def __init__(
        self,
        examples: Examples,
        chat: Any,
        max_length: int,
        skip_bad_rows: bool = False,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.chat, self.max_length = chat, max_length
        self.bad, self.long = list(examples.bad), list[str]()
        self.unused = sum(examples.unused.values())
        self.ids: list[str] = []
        # log-probs of the rows of each example, if known beforehand
        self.references: list[list[list[float]]] = []
        self._groups: list[list[Written | Kept]] = []
        problems: list[str] = []
        told = Told(say, len(examples.found))
        for number, example in enumerate(examples.found, 1):
            try:
                self._add(example)
            except ValueError as error:
                problems.append(f"{example.where} cannot be written by the chat template: {error}")
            told.at(number, "rows are in tokens")
        self.bad += problems
        if problems and not skip_bad_rows:
            raise ValueError(in_one(problems))
        if not self.ids:
            unused = [f"{self.unused} recorded episodes teach nothing here"] if self.unused else []
            raise ValueError(f"no row can be used:\n{in_one([*self.bad, *self.long, *unused])}")
        for note in [*examples.notes, *self._told()]:
            say(note)

    def __len__(self) -> int:
        return len(self.ids)

    def group(self, number: int) -> list[Trajectory]:
        name = self.ids[number]
        return [
            each.trajectory(name, member) if isinstance(each, Written) else each.trajectory()
            for member, each in enumerate(self._groups[number])
        ]

    def fill(self, number: int, rows: list[Sample]) -> list[Sample]:
        """Give the rows of an example the log-probs of the reference model where these are known; return them."""
        for row, known in zip(rows, self.references[number], strict=True) if self.references else ():
            row.reference = known
        return rows

    @property
    def left_out(self) -> dict[str, float]:
        """Return how many rows were left out, and why; nothing where none was."""
        counts = {"bad": len(self.bad), "long": len(self.long), "unused": self.unused}
        return {f"rows_left_out/{why}": float(count) for why, count in counts.items() if count}

    def _told(self) -> Iterator[str]:
        """Yield what a user should know about rows that are not learned from."""
        if self.bad:
            yield f"{len(self.bad)} bad rows are left out: {_first(self.bad)}"
        if self.long:
            yield f"{len(self.long)} rows are longer than model.max_length and left out: {_first(self.long)}"
        if self.unused:
            yield f"{self.unused} recorded episodes teach nothing here and are left out"

    def _add(self, example: Example) -> None:
        recorded = example.conversations[0].recorded is not None
        if recorded and len(example.conversations) > 1:
            group = self._best_and_worst(example)
        elif recorded:
            group = self._fitting(example, example.conversations)
        else:
            group = self._if_it_fits(example, [self._written(each) for each in example.conversations])
        if group:
            self._groups.append(group)
            self.ids.append(example.id)

    def _best_and_worst(self, example: Example) -> list[Written | Kept]:
        """Return the two; where one cannot be used, the next best or the next worst takes its place."""
        left, found = example.conversations, dict[int, list[Written | Kept]]()
        while pair := best_and_worst(left, reward_of):
            for side in pair:
                if id(side) not in found:
                    found[id(side)] = self._fitting(example, [side])
            if all(found[id(side)] for side in pair):
                return [each for side in pair for each in found[id(side)]]
            left = [each for each in left if found.get(id(each), True)]
        self.unused += len(left)
        return []

    def _fitting(self, example: Example, episode: list[Conversation]) -> list[Written | Kept]:
        """Return one recorded episode; nothing where it cannot be used, which is counted."""
        try:
            return self._if_it_fits(example, [self._written(each) for each in episode])
        except Unreadable:
            self.unused += 1
            return []

    def _if_it_fits(self, example: Example, group: list[Written | Kept]) -> list[Written | Kept]:
        """Return the group, or nothing where it does not fit."""
        longest = max(each.length for each in group)
        if longest <= self.max_length:
            return group
        self.long.append(f"{example.where} has {longest} tokens, over the limit of {self.max_length}")
        return []

    def _written(self, conversation: Conversation) -> Written | Kept:
        if (kept := conversation.recorded) is not None:
            episode = kept.trajectory()
            written = written_by(self.chat, episode)
            return kept if written is episode else Kept.of(written)
        chat, start = self.chat, conversation.start
        messages = [
            self._as_sampled(message, number in conversation.bad)
            for number, message in enumerate(conversation.messages)
        ]
        ids = chat.render(messages[:start], conversation.tools)
        borders: list[tuple[int, int]] = []
        said: list[Message] = []
        place = start
        while True:
            message, begin = messages[place], len(ids)
            sampled = chat.write(message, ids, conversation.tools, exact=place not in conversation.bad)
            turn = Turn(ids, Completion(sampled, [0.0] * len(sampled), "stop"), message)
            ids = ids + sampled
            borders.append((begin, len(ids)))
            said.append(message)
            replies = next(
                (n for n in range(place + 1, len(messages)) if messages[n].role == "assistant"), None
            )
            if replies is None:
                break
            ids = ids + chat.extend(turn, messages[place + 1 : replies])
            place = replies
        written = Written(conversation, np.asarray(ids, np.int32), borders, said)
        return self._in_steps(written) if conversation.steps else written

    def _in_steps(self, written: Written) -> Written:
        """Cut the last message into its labelled parts, as if each had been sampled by itself."""
        steps = written.conversation.steps
        begin, end = written.borders.pop()
        whole, cuts = written.token_ids[begin:end], [begin]
        for number in range(1, len(steps)):
            text = "\n".join(steps[:number]) + "\n"
            part = np.asarray(self.chat.write(Message("assistant", text), exact=False)[:-1])
            size = min(len(part), len(whole))
            same = np.flatnonzero(part[:size] != whole[:size])
            cuts.append(begin + (int(same[0]) if len(same) else size))
        cuts.append(end)
        borders = list(pairwise(cuts))
        if any(left >= right for left, right in borders):
            raise ValueError('two of its "completions" share their only token')
        written.borders += borders
        written.messages[-1:] = [Message("assistant", step) for step in steps]
        return written

    def _as_sampled(self, message: Message, bad: bool) -> Message:
        """Read a text of the assistant as the model's own, so that tags become tokens; a bad one may stay a text."""
        if message.role != "assistant" or message.tool_calls or message.reasoning is not None:
            return message
        read = self.chat.parse_text(message.content)
        if broken := next((call.error for call in read.tool_calls if call.error), None):
            if bad:
                return message
            raise ValueError(f"its text has a broken tool call: {broken}")
        # A model that always thinks reads a plain answer as a thought that did not end.
        unended = read.reasoning is not None and not read.content and not read.tool_calls
        return read if (read.tool_calls or read.reasoning is not None) and not unended else message


def _first(texts: Sequence[str]) -> str:
    return "; ".join(texts[:TOLD]) + (" ..." if len(texts) > TOLD else "")
