"""Conversion of sampled tokens to the response: streamed text, reasoning, tool calls, stop strings.

Streamed text is always a prefix of the final text, because a stream cannot retract anything. Ambiguous text (half a
character, half a stop string, trailing white space) is held back until the next tokens decide it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from TrainingFactory.types import Completion, Message, ToolSpec

if TYPE_CHECKING:
    from TrainingFactory.models import TemplateChatFormat

REPLACEMENT_CHARACTER = "\ufffd"  # decoded in place of a character with missing bytes


@dataclass(slots=True)
class StopMatch:
    """The position of a stop string in the text and tokens of a turn."""

    start: int  # index in the text
    num_tokens: int  # up to and including the stop string
    stop_string: str


class TurnReader:
    """Parser of an unfinished turn. Unlike `ChatFormat.parse`, it keeps a closing think tag without an opening one as
    text, because the text before it may have been streamed already."""

    def __init__(self, chat: TemplateChatFormat, prompt: Sequence[int], tools: Sequence[ToolSpec]) -> None:
        self._chat, self._prompt_ids, self._tools = chat, prompt, tools
        self._think_start, self._think_end = chat.family.think
        self._starts_in_thought = chat.opens_thought(prompt)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the decoded text without the stop token."""
        has_stop_token = bool(token_ids) and token_ids[-1] in self._chat.stop_ids
        return self._chat.decode(token_ids[:-1] if has_stop_token else token_ids)

    def parse_message(self, token_ids: Sequence[int], text: str) -> Message:
        """Parse a finished turn with this text. Invalid tool calls stay in the content as the model wrote them."""
        reasoning, content = self._split_text(text)
        if self._tools and text == self.decode(token_ids):
            parsed_turn = self._chat.parse(token_ids, self._prompt_ids, self._tools)
            if parsed_turn.tool_calls and not any(call.error for call in parsed_turn.tool_calls):
                return Message("assistant", parsed_turn.content, parsed_turn.tool_calls, reasoning=reasoning)
        return Message("assistant", content.strip(), reasoning=reasoning)

    def parse_partial(self, text: str, stop_strings: Sequence[str]) -> Message:
        """Return the part of an unfinished turn that can be streamed. With tools, the content is held back until the
        turn ends, because it may be a call."""
        text = _strip_partial_marker(text, [*stop_strings, self._think_end])
        if self._think_start.startswith(text.lstrip()):
            return Message("assistant")
        reasoning, content = self._split_text(text)
        return Message("assistant", "" if self._tools else content.strip(), reasoning=reasoning)

    def _split_text(self, text: str) -> tuple[str | None, str]:
        """Split a turn's text into reasoning (None if there is none) and content."""
        if self._chat.family.read_turn is not None:  # a turn of several messages
            parsed_turn = self._chat.family.read_turn(text, ())
            return parsed_turn.reasoning, parsed_turn.content
        stripped_text = text.lstrip()
        if not (self._starts_in_thought or stripped_text.startswith(self._think_start)):
            return None, text
        thought, _, answer = stripped_text.removeprefix(self._think_start).partition(self._think_end)
        return thought.strip(), answer

    def find_stop(self, token_ids: Sequence[int], text: str, stop_strings: Sequence[str]) -> StopMatch | None:
        """Return the stop string that was complete first, so that the result does not depend on the chunk size."""
        matches = [(index + len(stop), index) for stop in stop_strings if (index := text.find(stop)) >= 0]
        if not matches:
            return None
        end, start = min(matches)
        return StopMatch(start, self._count_tokens_for(token_ids, end), text[start:end])

    def _count_tokens_for(self, token_ids: Sequence[int], num_characters: int) -> int:
        """Return the number of tokens after which the text has at least `num_characters` whole characters."""

        def has_characters(num_tokens: int) -> bool:
            return len(self.decode(token_ids[:num_tokens]).rstrip(REPLACEMENT_CHARACTER)) >= num_characters

        return 1 + bisect_left(range(1, len(token_ids)), True, key=has_characters)

    def make_logprobs(self, completion: Completion, stop_match: StopMatch | None) -> list[dict[str, Any]]:
        """Return one entry per token of the text, without the stop token and stop string."""
        token_ids = completion.token_ids
        if stop_match is not None:
            num_tokens = 0 if stop_match.start == 0 else self._count_tokens_for(token_ids, stop_match.start)
        else:
            num_tokens = len(token_ids) - (completion.finish == "stop")
        return [self._make_logprob_entry(token_ids[i], completion.logprobs[i]) for i in range(num_tokens)]

    def _make_logprob_entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        token = self._chat.decode([token_id])
        # A token that is only a part of a character has no text of its own.
        token_bytes = None if REPLACEMENT_CHARACTER in token else list(token.encode())
        return {"token": token, "logprob": logprob, "bytes": token_bytes, "top_logprobs": []}


def _strip_partial_marker(text: str, markers: Sequence[str]) -> str:
    """Remove the end of a text if it may be the beginning of a marker, or of a character of several tokens."""
    text = text.rstrip(REPLACEMENT_CHARACTER)
    lengths = [size for marker in markers for size in range(1, len(marker)) if text.endswith(marker[:size])]
    return text[: len(text) - max(lengths, default=0)]
