"""From sampled tokens to what a client sees: text that grows, reasoning, tool calls, stop strings.

A stream shows the beginning of what the whole turn will be and never takes anything back. So what may still turn
out to be something else (half a character, half a stop string, white space at the end) is held until it is known."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from TrainingFactory.types import Completion, Message, ToolSpec

if TYPE_CHECKING:
    from TrainingFactory.models import TemplateChatFormat

HALF = "\ufffd"  # what a character gives of which some bytes are missing


@dataclass(slots=True)
class Cut:
    """A stop string: where it begins in the text, and how many tokens it took to write it."""

    start: int
    tokens: int


class TurnReader:
    """Unlike `ChatFormat.parse`, a text is reasoning only if it begins as such: an end of thinking that nobody
    opened cannot change what has been streamed already, and stays text."""

    def __init__(self, chat: TemplateChatFormat, prompt: Sequence[int], tools: Sequence[ToolSpec]) -> None:
        self._chat, self._prompt, self._tools = chat, prompt, tools
        self._opening, self._closing = chat.family.think
        self._opened = chat.opens_thought(prompt)

    def text(self, token_ids: Sequence[int]) -> str:
        """What was written, without the end of the turn."""
        stopped = bool(token_ids) and token_ids[-1] in self._chat.stop_ids
        return self._chat.decode(token_ids[:-1] if stopped else token_ids)

    def message(self, token_ids: Sequence[int], text: str) -> Message:
        """Read a turn that ended with this text. Calls that cannot be read are left in it, as the model wrote them."""
        reasoning, content = self._split(text)
        if self._tools and text == self.text(token_ids):
            read = self._chat.parse(token_ids, self._prompt, self._tools)
            if read.tool_calls and not any(call.error for call in read.tool_calls):
                return Message("assistant", read.content, read.tool_calls, reasoning=reasoning)
        return Message("assistant", content.strip(), reasoning=reasoning)

    def so_far(self, text: str, stops: Sequence[str]) -> Message:
        """Return what is certain of a turn that goes on. Where calls are read, the content waits for its end."""
        text = _certain(text, [*stops, self._closing])
        if self._opening.startswith(text.lstrip()):
            return Message("assistant")
        reasoning, content = self._split(text)
        return Message("assistant", "" if self._tools else content.strip(), reasoning=reasoning)

    def _split(self, text: str) -> tuple[str | None, str]:
        begun = text.lstrip()
        if not (self._opened or begun.startswith(self._opening)):
            return None, text
        thought, _, rest = begun.removeprefix(self._opening).partition(self._closing)
        return thought.strip(), rest

    def cut(self, token_ids: Sequence[int], text: str, stops: Sequence[str]) -> Cut | None:
        """The stop string that was complete first, so that it does not matter how many tokens come at a time."""
        found = [(at + len(stop), at) for stop in stops if (at := text.find(stop)) >= 0]
        if not found:
            return None
        end, start = min(found)
        return Cut(start, self._tokens_for(token_ids, end))

    def _tokens_for(self, token_ids: Sequence[int], characters: int) -> int:
        """How many tokens it took to write so many whole characters."""
        sizes = range(1, len(token_ids))
        enough = bisect_left(
            sizes, True, key=lambda size: len(self.text(token_ids[:size]).rstrip(HALF)) >= characters
        )
        return 1 + enough

    def logprobs(self, completion: Completion, cut: Cut | None) -> list[dict[str, Any]]:
        """One entry for each token of the text: neither the end of the turn nor a stop string is in it."""
        ids = completion.token_ids
        if cut is not None:
            count = 0 if cut.start == 0 else self._tokens_for(ids, cut.start)
        else:
            count = len(ids) - (completion.finish == "stop")
        return [self._entry(ids[i], completion.logprobs[i]) for i in range(count)]

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        token = self._chat.decode([token_id])
        # A token may be a part of a character, and then it has no text of its own.
        octets = None if HALF in token else list(token.encode())
        return {"token": token, "logprob": logprob, "bytes": octets, "top_logprobs": []}


def _certain(text: str, markers: Sequence[str]) -> str:
    """The text without an end that may be the beginning of a marker or of a character."""
    text = text.rstrip(HALF)
    held = max(
        (size for marker in markers for size in range(1, len(marker)) if text.endswith(marker[:size])),
        default=0,
    )
    return text[: len(text) - held]
