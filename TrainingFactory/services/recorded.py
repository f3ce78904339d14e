"""Episodes that exist: what the environment's expert plays, and conversations that were written down."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from TrainingFactory.data.conversations import Conversation
from TrainingFactory.data.examples import Example, Examples
from TrainingFactory.data.lines import in_one
from TrainingFactory.data.rewriting import written_by
from TrainingFactory.protocols import ChatFormat, EnvironmentFactory
from TrainingFactory.rollout import play
from TrainingFactory.services.sources import Groups, Order, Publish
from TrainingFactory.tools.tape import EpisodeKey
from TrainingFactory.types import Completion, Message, Task, Trajectory, Turn

TOLD_EVERY = 10.0  # seconds


class _Demonstrations:
    """What exists is usable, and its rewards say nothing about the model."""

    def metrics(self, groups: Groups, seconds: float) -> dict[str, float]:
        turns = sum(len(trajectory.turns) for group in groups for trajectory in group)
        return {"demonstrations": len(groups), "turns": turns / sum(map(len, groups))}

    def unusable(self, groups: Groups) -> str | None:
        return None


class ExpertEpisodes(_Demonstrations):
    """The environment's own expert plays the tasks of the step."""

    def __init__(self, tasks: Sequence[Task], order: Order, environment: EnvironmentFactory, chat: ChatFormat,
                 limits: dict[str, Any]) -> None:  # fmt: skip
        self.tasks, self.order, self.environment, self.chat, self.limits = (
            tasks,
            order,
            environment,
            chat,
            limits,
        )

    def ids(self, step: int) -> list[str]:
        return [self.tasks[number].id for number in self.order.batch(step)]

    def groups(self, step: int, publish: Publish) -> Groups:
        async def play_all() -> list[Trajectory]:
            tasks = (self.tasks[number] for number in self.order.batch(step))
            return list(await asyncio.gather(*(self._play(task, step) for task in tasks)))

        return [[_checked(trajectory)] for trajectory in asyncio.run(play_all())]

    async def _play(self, task: Task, step: int) -> Trajectory:
        environment: Any = self.environment(task)
        key = EpisodeKey(step, task.id, 0)
        return await play(environment, self.chat, environment.expert(), key=key, **self.limits)


def _checked(trajectory: Trajectory) -> Trajectory:
    if trajectory.status in ("error", "tool_failure") or not trajectory.turns:
        name, why = trajectory.task.id, trajectory.error or trajectory.status
        raise ValueError(f"demonstration {name} cannot be played: {why}")
    return trajectory


@dataclass(slots=True)
class Written:
    """A conversation in tokens: one row, and where in it each learned turn begins and ends. Small: an epoch later it
    is a trajectory again, and is not written again."""

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


class Recordings:
    """Examples in tokens, written once by this model's own template; tokens that were sampled stay. Those longer than
    `max_length` are left out, whole, and counted in `long`; what the template cannot write is an error, or with
    `skip_bad_rows` one more of `bad`."""

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
        self._groups: list[list[Written | Trajectory]] = []
        problems: list[str] = []
        told = time.monotonic()
        for number, example in enumerate(examples.found):
            try:
                self._add(example)
            except ValueError as error:
                problems.append(f"{example.where} cannot be written by the chat template: {error}")
            if time.monotonic() - told > TOLD_EVERY:
                told = time.monotonic()
                say(f"{number + 1} of {len(examples.found)} rows are in tokens")
        self.bad += problems
        if problems and not skip_bad_rows:
            raise ValueError(in_one(problems))
        if not self.ids:
            raise ValueError(f"no row can be used:\n{in_one([*self.bad, *self.long])}")

    def __len__(self) -> int:
        return len(self.ids)

    def group(self, number: int) -> list[Trajectory]:
        name = self.ids[number]
        return [
            each.trajectory(name, member) if isinstance(each, Written) else each
            for member, each in enumerate(self._groups[number])
        ]

    @property
    def left_out(self) -> dict[str, float]:
        """How many rows were, and why; nothing where none was."""
        counts = {"bad": len(self.bad), "long": len(self.long), "unused": self.unused}
        return {f"rows_left_out/{why}": float(count) for why, count in counts.items() if count}

    def _add(self, example: Example) -> None:
        group = [self._written(conversation) for conversation in example.conversations]
        longest = max(map(_length, group))
        if longest > self.max_length:
            self.long.append(f"{example.where} has {longest} tokens, over the limit of {self.max_length}")
        else:
            self._groups.append(group)
            self.ids.append(example.id)

    def _written(self, conversation: Conversation) -> Written | Trajectory:
        if conversation.recorded is not None:
            return written_by(self.chat, conversation.recorded)
        chat, start = self.chat, conversation.start
        messages = [self._as_sampled(message) for message in conversation.messages]
        ids = chat.render(messages[:start], conversation.tools)
        borders: list[tuple[int, int]] = []
        said: list[Message] = []
        place = start
        while True:
            message, begin = messages[place], len(ids)
            turn = Turn(
                ids, Completion(sampled := chat.write(message), [0.0] * len(sampled), "stop"), message
            )
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
        """The last message cut into its labelled parts, as if each had been sampled by itself."""
        steps = written.conversation.steps
        begin, end = written.borders.pop()
        whole, cuts = written.token_ids[begin:end], [begin]
        for number in range(1, len(steps)):
            text = "\n".join(steps[:number]) + "\n"
            part = np.asarray(self.chat.write(Message("assistant", text))[:-1])
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

    def _as_sampled(self, message: Message) -> Message:
        """A text of the assistant is read as the model's own first, so that tags in it become the real tokens."""
        if message.role != "assistant" or message.tool_calls or message.reasoning is not None:
            return message
        read = self.chat.parse_text(message.content)
        if broken := next((call.error for call in read.tool_calls if call.error), None):
            raise ValueError(f"its text has a broken tool call: {broken}")
        # A model that always thinks reads a plain answer as a thought that did not end.
        unended = read.reasoning is not None and not read.content and not read.tool_calls
        return read if (read.tool_calls or read.reasoning is not None) and not unended else message


def _length(written: Written | Trajectory) -> int:
    if isinstance(written, Written):
        return len(written.token_ids)
    return max(len(turn.prompt_ids) + len(turn.completion.token_ids) for turn in written.turns)


class RecordedEpisodes(_Demonstrations):
    """The examples of the step, in an order of its own every epoch."""

    def __init__(self, recordings: Recordings, order: Order) -> None:
        self.recordings, self.order = recordings, order

    def ids(self, step: int) -> list[str]:
        return [self.recordings.ids[number] for number in self.order.batch(step)]

    def groups(self, step: int, publish: Publish) -> Groups:
        return [self.recordings.group(number) for number in self.order.batch(step)]

    def metrics(self, groups: Groups, seconds: float) -> dict[str, float]:
        return super().metrics(groups, seconds) | self.recordings.left_out
