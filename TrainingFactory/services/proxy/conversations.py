"""The conversations of one episode, as a tree of turns. A request that continues what was answered gets the tokens of
that turn and what the template puts behind it; any other is written anew, and begins a row of its own."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from TrainingFactory.protocols import ChatFormat, SamplingSession
from TrainingFactory.types import Completion, Message, ToolSpec, Turn


@dataclass(slots=True, eq=False)
class Begun:
    """A prompt to be answered: the turn that it continues, and what came after that. `why` there is no such turn."""

    prompt: list[int]
    messages: list[Message]
    tools: list[ToolSpec]
    why: str = "extended"
    parent: Answered | None = None
    replies: list[Message] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Answered:
    """A turn that was sampled after `begun.messages`. `session` has its tokens, until another turn takes it over."""

    begun: Begun
    turn: Turn
    session: SamplingSession | None = None

    @property
    def messages(self) -> list[Message]:
        return [*self.begun.messages, self.turn.message]


class Conversations:
    """Keeps them in the order in which turns ended, so that a turn stands behind the one that it continues."""

    def __init__(self, chat: ChatFormat) -> None:
        self._chat = chat
        self.answered: list[Answered] = []

    def begin(self, messages: list[Message], tools: list[ToolSpec]) -> Begun:
        """Return the prompt of a request; raise ValueError where the template cannot write it."""
        before, why = self._continued(messages, tools)
        if before is not None and why == "extended":
            replies, turn = messages[len(before.messages) :], before.turn
            try:
                ids = turn.prompt_ids + turn.completion.token_ids + self._chat.extend(turn, replies)
                return Begun(ids, messages, tools, why, before, replies)
            except ValueError:  # a reply that the template does not write there
                why = "template"
        return Begun(self._chat.render(messages, tools), messages, tools, why)

    def add(self, begun: Begun, completion: Completion, message: Message, session: SamplingSession) -> None:
        self.answered.append(Answered(begun, Turn(begun.prompt, completion, message), session))

    def turns(self) -> list[Turn]:
        """Return all turns, row after row. The row that ends last comes last: its last turn is the episode's."""
        latest: dict[Answered, int] = {}
        for number, each in reversed(list(enumerate(self.answered))):
            latest.setdefault(each, number)
            if (parent := each.begun.parent) is not None:
                latest[parent] = max(latest[each], latest.get(parent, 0))
        paths: dict[Answered | None, tuple[int, ...]] = {None: ()}
        for each in self.answered:
            paths[each] = (*paths[each.begun.parent], latest[each])
        order = sorted(self.answered, key=lambda each: paths[each])
        row = 0
        for before, each in pairwise([None, *order]):
            assert each is not None
            if before is not None and each.begun.parent is before:
                before.turn.replies = each.begun.replies
            else:
                row += 1
            each.turn.signals = {"row": float(row)}
        return [each.turn for each in order]

    def _continued(self, messages: list[Message], tools: list[ToolSpec]) -> tuple[Answered | None, str]:
        """Return the longest conversation that this one continues, or why there is none."""
        held = sorted(self.answered, key=lambda each: -len(each.messages))
        held = [each for each in held if len(each.messages) < len(messages)]
        whole = [each for each in held if _begins(messages, each.messages)]
        if same := [each for each in whole if each.begun.tools == tools]:
            if any(message.role == "assistant" for message in messages[len(same[0].messages) :]):
                return None, "rewritten"  # with a turn that was not sampled here, or not like this
            return same[0], "extended" if same[0].turn.completion.finish == "stop" else "cut"
        if whole:
            return None, "tools"
        if any(_begins(messages, each.messages, arguments=False) for each in held):
            return None, "arguments"
        return None, "rewritten" if any(message.role == "assistant" for message in messages) else "begun"


def _begins(messages: Sequence[Message], sent: Sequence[Message], arguments: bool = True) -> bool:
    return all(_same(ours, theirs, arguments) for ours, theirs in zip(sent, messages, strict=False))


def _same(sent: Message, found: Message, arguments: bool) -> bool:
    """Tell whether a message came back as it was. Clients may leave out reasoning, for which OpenAI has no field; JSON
    of arguments may be spaced and escaped otherwise, but has the same keys in the same order, and the same numbers."""

    def known(message: Message) -> list[object]:
        calls = [[c.id, c.name, json.dumps(c.arguments) if arguments else ""] for c in message.tool_calls]
        return [message.role, message.content, message.tool_call_id, message.name, calls]

    return known(sent) == known(found) and (found.reasoning or None) in (None, sent.reasoning)
