"""The conversations of one episode, as a tree of turns. A request that continues what was answered gets the tokens of
that turn and what the template puts behind it; any other is written anew, and begins a row of its own."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from TrainingFactory.protocols import ChatFormat, SamplingSession
from TrainingFactory.types import Completion, Message, ToolSpec, Turn

MIN_QUOTE = 20  # characters: shorter answers, such as "yes", occur in other texts by chance


@dataclass(slots=True, eq=False)
class Node:
    """A request: the turn that it continues, and what came after that, or `why` there is no such turn. When it has been
    answered, `session` has the tokens of the answer, until a request that continues it takes the session over."""

    turn: Turn
    messages: list[Message]  # that were sent, and the answer
    tools: list[ToolSpec]
    why: str
    parent: Node | None = None
    replies: list[Message] = field(default_factory=list)
    session: SamplingSession | None = None


class Conversations:
    """Keeps turns in the order in which they ended, so that each stands behind the one that it continues."""

    def __init__(self, chat: ChatFormat) -> None:
        self._chat = chat
        self.answered: list[Node] = []

    def begin(self, messages: list[Message], tools: list[ToolSpec]) -> Node:
        """Return a request with its prompt; raise ValueError where the template cannot write it."""
        before, why = self._continued(messages, tools)
        nothing = Completion([], [], "length"), Message("assistant")
        if before is not None:
            replies, turn = messages[len(before.messages) :], before.turn
            try:
                ids = turn.prompt_ids + turn.completion.token_ids + self._chat.extend(turn, replies)
                return Node(Turn(ids, *nothing), messages, tools, "extended", before, replies)
            except ValueError:  # a reply that the template does not write there
                why = "template"
        return Node(Turn(self._chat.render(messages, tools), *nothing), messages, tools, why)

    def add(self, begun: Node, completion: Completion, message: Message, session: SamplingSession) -> None:
        turn, messages = Turn(begun.turn.prompt_ids, completion, message), [*begun.messages, message]
        self.answered.append(replace(begun, turn=turn, messages=messages, session=session))

    def ordered(self) -> list[Node]:
        """Return all turns, row after row. The row that ended last comes last: its last turn is the episode's."""
        latest: dict[Node, int] = {}
        for number, each in reversed(list(enumerate(self.answered))):
            latest.setdefault(each, number)
            if each.parent is not None:
                latest[each.parent] = max(latest[each], latest.get(each.parent, 0))
        paths: dict[Node | None, tuple[int, ...]] = {None: ()}
        for each in self.answered:
            paths[each] = (*paths[each.parent], latest[each])
        order, row = sorted(self.answered, key=paths.__getitem__), 0.0
        for before, each in zip([None, *order], order, strict=False):
            if before is not None and each.parent is before:
                before.turn.replies = each.replies
            else:
                row += 1
            each.turn.signals = {"proxy/row": row}
        return order

    def _continued(self, messages: list[Message], tools: list[ToolSpec]) -> tuple[Node | None, str]:
        """Return the longest conversation that this one continues, or why there is none."""
        held = [each for each in self.answered if len(each.messages) < len(messages)]
        held.sort(key=lambda each: -len(each.messages))
        whole = [each for each in held if _begins(messages, each.messages)]
        sampled = [message.role == "assistant" for message in messages]
        if same := [each for each in whole if each.tools == tools]:
            if any(sampled[len(same[0].messages) :]):
                return None, "rewritten"  # with a turn that was not sampled here, or not like this
            return (same[0], "") if same[0].turn.completion.finish == "stop" else (None, "cut")
        if whole or any(_begins(messages, each.messages, arguments=False) for each in held):
            return None, "tools" if whole else "arguments"
        if any(sampled) or any(_retells(messages, each.messages) for each in self.answered):
            return None, "rewritten"
        return None, "begun"


def _begins(messages: Sequence[Message], sent: Sequence[Message], arguments: bool = True) -> bool:
    return all(_same(ours, theirs, arguments) for ours, theirs in zip(sent, messages, strict=False))


def _retells(messages: Sequence[Message], earlier: Sequence[Message]) -> bool:
    """Tell whether a request without sampled turns summarises an earlier conversation: under the same system prompt,
    another message replaces the first answer, or quotes the question or a longer answer or tool result."""
    roles, common = [message.role for message in earlier], 0
    while common < min(len(messages), len(earlier)) and _same(earlier[common], messages[common], True):
        common += 1
    first_answer = roles.index("assistant")
    if common == len(messages) or "system" in roles[common:first_answer]:
        return False  # asks the same question again, or has another system prompt
    quotable = [message.content for message in earlier[first_answer:] if len(message.content) >= MIN_QUOTE]
    quotable += [message.content for message in earlier[:first_answer] if message.role == "user"][-1:]
    rest = "\n".join(message.content for message in messages[common:])
    return common >= first_answer or any(text and text in rest for text in quotable)


def _same(sent: Message, found: Message, arguments: bool) -> bool:
    """Tell whether a message came back as it was. Clients may leave out reasoning, for which OpenAI has no field, and
    add the name of an agent to what was sampled, which has none; JSON of arguments may be spaced and escaped otherwise,
    but has the same keys in the same order, and the same numbers."""

    def known(message: Message) -> list[object]:
        calls = [[c.id, c.name, json.dumps(c.arguments) if arguments else ""] for c in message.tool_calls]
        return [message.role, message.content, message.tool_call_id, calls]

    named = sent.name == found.name or (sent.role == "assistant" and sent.name is None)
    return named and known(sent) == known(found) and (found.reasoning or None) in (None, sent.reasoning)
