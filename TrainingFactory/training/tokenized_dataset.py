"""A dataset's examples, tokenized once with the model's own chat template."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from TrainingFactory.common.texts import pluralize
from TrainingFactory.data.conversations import Conversation
from TrainingFactory.data.datasets import join_problems
from TrainingFactory.data.examples import Example, Examples, compute_total_reward
from TrainingFactory.data.ranking import pick_best_and_worst
from TrainingFactory.data.rewriting import FoldedEpisodeError, UnparsableCallError, rerender
from TrainingFactory.data.trajectories import CompactTrajectory
from TrainingFactory.types import Completion, Message, Sample, Task, Trajectory, Turn

MAX_NAMED_ROWS = 3  # skipped rows that a message names
REPORT_SECONDS = 10.0  # seconds


class ProgressReporter:
    """Reports the progress of long work every `REPORT_SECONDS`."""

    def __init__(self, notify: Callable[[str], None], num_rows: int) -> None:
        self._notify, self._num_rows, self._last_report_time = notify, num_rows, time.monotonic()

    def report(self, num_done: int, subject: str) -> None:
        if time.monotonic() - self._last_report_time > REPORT_SECONDS:
            self._last_report_time = time.monotonic()
            self._notify(f"{num_done} of {self._num_rows} {subject}")


@dataclass(slots=True)
class TokenizedConversation:
    """A tokenized conversation, with the token range of each trained turn."""

    conversation: Conversation
    token_ids: np.ndarray  # [N]
    turn_spans: list[tuple[int, int]]
    messages: list[Message]  # of the turns

    def trajectory(self, group: str, member: int) -> Trajectory:
        token_ids, conversation = self.token_ids.tolist(), self.conversation
        turns = [
            Turn(token_ids[:start], Completion(token_ids[start:end], [0.0] * (end - start), "stop"), message)
            for (start, end), message in zip(self.turn_spans, self.messages, strict=True)
        ]
        prompt = conversation.messages[: conversation.start]
        task = Task(conversation.id, "")
        return Trajectory(task, group, member, prompt, conversation.tools, turns, reward=conversation.reward)

    @property
    def length(self) -> int:
        return len(self.token_ids)


class TokenizedDataset:
    """Examples tokenized with the model's own chat template; recorded episodes keep their sampled tokens. Examples over
    `max_length` tokens are skipped and listed in `long_rows`. Examples that the template cannot render are an error, or
    with `skip_bad_rows` listed in `bad_rows`. Of a group of recorded episodes, the best and the worst one that fit are
    kept."""

    def __init__(
        self,
        examples: Examples,
        chat: Any,
        max_length: int,
        skip_bad_rows: bool = False,
        notify: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.chat, self.max_length = chat, max_length
        self.bad_rows, self.long_rows = list(examples.row_problems), list[str]()
        self.unused = sum(examples.unused_counts.values())
        self.ids: list[str] = []
        # precomputed log-probs of the reference model, per row of each example
        self.references: list[list[list[float]]] = []
        self._groups: list[list[TokenizedConversation | CompactTrajectory]] = []
        problems: list[str] = []
        reporter = ProgressReporter(notify, len(examples.usable))
        for number, example in enumerate(examples.usable, 1):
            try:
                self._add_example(example)
            except ValueError as error:
                problems.append(f"{example.location}: the chat template cannot render it: {error}")
            reporter.report(number, "rows tokenized")
        self.bad_rows += problems
        if problems and not skip_bad_rows:
            raise ValueError(join_problems(problems))
        if not self.ids:
            unused_notes = [f"{self.unused} recorded episodes give no training signal"] if self.unused else []
            raise ValueError(
                f"No usable row in the dataset:\n{join_problems([*self.bad_rows, *self.long_rows, *unused_notes])}"
            )
        for note in [*examples.notes, *self._describe_skipped_rows()]:
            notify(note)

    def __len__(self) -> int:
        return len(self.ids)

    def group(self, index: int) -> list[Trajectory]:
        name = self.ids[index]
        return [
            entry.trajectory(name, member) if isinstance(entry, TokenizedConversation) else entry.restore()
            for member, entry in enumerate(self._groups[index])
        ]

    def fill_rows(self, index: int, rows: list[Sample]) -> list[Sample]:
        """Set the precomputed reference log-probs of an example's rows, if there are any; return the rows."""
        for row, logprobs in zip(rows, self.references[index], strict=True) if self.references else ():
            row.reference = logprobs
        return rows

    @property
    def skipped_row_counts(self) -> dict[str, float]:
        """Return the numbers of skipped rows by reason, without zeros."""
        counts = {"bad": len(self.bad_rows), "long": len(self.long_rows), "unused": self.unused}
        return {f"rows_left_out/{reason}": float(count) for reason, count in counts.items() if count}

    def _describe_skipped_rows(self) -> Iterator[str]:
        if self.bad_rows:
            yield f"Skipping {len(self.bad_rows)} bad rows: {_join_first_rows(self.bad_rows)}"
        if self.long_rows:
            row_count = pluralize(len(self.long_rows), "row")
            yield f"Skipping {row_count} longer than model.max_length: {_join_first_rows(self.long_rows)}"
        if self.unused:
            yield f"Skipping {self.unused} recorded episodes that give no training signal"

    def _add_example(self, example: Example) -> None:
        is_recorded = example.conversations[0].recorded is not None
        if is_recorded and len(example.conversations) > 1:
            group = self._select_best_and_worst(example)
        elif is_recorded:
            group = self._select_usable_episode(example, example.conversations)
        else:
            group = self._require_max_length(
                example, list(map(self._tokenize_conversation, example.conversations))
            )
        if group:
            self._groups.append(group)
            self.ids.append(example.id)

    def _select_best_and_worst(self, example: Example) -> list[TokenizedConversation | CompactTrajectory]:
        """Return the best and the worst recorded episode of an example. Replace an unusable one by the next best or
        next worst."""
        candidates, usable = (
            example.conversations,
            dict[int, list[TokenizedConversation | CompactTrajectory]](),
        )
        while pair := pick_best_and_worst(candidates, compute_total_reward):
            for episode in pair:
                if id(episode) not in usable:
                    usable[id(episode)] = self._select_usable_episode(example, [episode])
            if all(usable[id(episode)] for episode in pair):
                return [conversation for episode in pair for conversation in usable[id(episode)]]
            candidates = [conversation for conversation in candidates if usable.get(id(conversation), True)]
        self.unused += len(candidates)
        return []

    def _select_usable_episode(
        self, example: Example, episode: list[Conversation]
    ) -> list[TokenizedConversation | CompactTrajectory]:
        """Return one recorded episode, or an empty list if it is unusable; then count it."""
        try:
            return self._require_max_length(example, list(map(self._tokenize_conversation, episode)))
        except (UnparsableCallError, FoldedEpisodeError):
            self.unused += 1
            return []

    def _require_max_length(
        self, example: Example, group: list[TokenizedConversation | CompactTrajectory]
    ) -> list[TokenizedConversation | CompactTrajectory]:
        """Return the group, or an empty list if it exceeds `max_length`; then add it to `long_rows`."""
        max_length = max(conversation.length for conversation in group)
        if max_length <= self.max_length:
            return group
        self.long_rows.append(
            f"{example.location} has {max_length} tokens, over the limit of {self.max_length}"
        )
        return []

    def _tokenize_conversation(self, conversation: Conversation) -> TokenizedConversation | CompactTrajectory:
        if (recording := conversation.recorded) is not None:
            episode = recording.restore()
            new_episode = rerender(self.chat, episode)
            return recording if new_episode is episode else CompactTrajectory.from_trajectory(new_episode)
        chat, start = self.chat, conversation.start
        messages = [
            self._as_sampled(message, message_index in conversation.bad)
            for message_index, message in enumerate(conversation.messages)
        ]
        ids = chat.render(messages[:start], conversation.tools)
        turn_spans: list[tuple[int, int]] = []
        trained_messages: list[Message] = []
        index = start
        while True:
            message, begin = messages[index], len(ids)
            completion_ids = chat.write(message, ids, conversation.tools, exact=index not in conversation.bad)
            turn = Turn(ids, Completion(completion_ids, [0.0] * len(completion_ids), "stop"), message)
            ids = ids + completion_ids
            turn_spans.append((begin, len(ids)))
            trained_messages.append(message)
            later_indices = range(index + 1, len(messages))
            next_assistant = next((i for i in later_indices if messages[i].role == "assistant"), None)
            if next_assistant is None:
                break
            ids = ids + chat.extend(turn, messages[index + 1 : next_assistant])
            index = next_assistant
        conversation_tokens = TokenizedConversation(
            conversation, np.asarray(ids, np.int32), turn_spans, trained_messages
        )
        return self._split_into_steps(conversation_tokens) if conversation.steps else conversation_tokens

    def _split_into_steps(self, tokenized: TokenizedConversation) -> TokenizedConversation:
        """Split the last message into its labelled steps, as if each had been sampled as a turn."""
        steps = tokenized.conversation.steps
        begin, end = tokenized.turn_spans.pop()
        turn_ids, cut_positions = tokenized.token_ids[begin:end], [begin]
        for num_steps in range(1, len(steps)):
            text = "\n".join(steps[:num_steps]) + "\n"
            prefix_ids = np.asarray(self.chat.write(Message("assistant", text), exact=False)[:-1])
            common_length = min(len(prefix_ids), len(turn_ids))
            mismatches = np.flatnonzero(prefix_ids[:common_length] != turn_ids[:common_length])
            cut_positions.append(begin + (int(mismatches[0]) if len(mismatches) else common_length))
        cut_positions.append(end)
        step_spans = list(pairwise(cut_positions))
        if any(start >= end_index for start, end_index in step_spans):
            raise ValueError('two of its "completions" share their only token')
        tokenized.turn_spans += step_spans
        tokenized.messages[-1:] = [Message("assistant", step) for step in steps]
        return tokenized

    def _as_sampled(self, message: Message, is_negative: bool) -> Message:
        """Parse an assistant text as model output, so that tags become tokens. `is_negative`: keep a text with a broken
        tool call unchanged instead of raising ValueError."""
        if message.role != "assistant" or message.tool_calls or message.reasoning is not None:
            return message
        parsed = self.chat.parse_text(message.content)
        if call_error := next((call.error for call in parsed.tool_calls if call.error), None):
            if is_negative:
                return message
            raise ValueError(f"its text has a broken tool call: {call_error}")
        # The parser of an always-thinking model reads a plain answer as unfinished reasoning.
        is_partial = parsed.reasoning is not None and not parsed.content and not parsed.tool_calls
        return parsed if (parsed.tool_calls or parsed.reasoning is not None) and not is_partial else message


def _join_first_rows(rows: Sequence[str]) -> str:
    return "; ".join(rows[:MAX_NAMED_ROWS]) + (" ..." if len(rows) > MAX_NAMED_ROWS else "")
