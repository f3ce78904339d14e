"""The conversations of one episode as a tree of turns. The prompt of a request that continues an earlier turn is that
turn's sampled tokens plus the new messages; any other request is rendered from scratch and starts a training row."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from TrainingFactory.protocols import ChatFormat, SamplingSession
from TrainingFactory.types import Completion, Message, ToolSpec, Turn

MIN_QUOTE = 20  # characters: shorter answers, such as "yes", occur in other texts by chance


@dataclass(slots=True, eq=False)
class RequestNode:
    """A request in an episode's tree of turns. `parent` is the turn that it continues, `replies` are the messages after
    that turn. `prompt_reason` is "extended", or the reason why the request continues no turn. Once it is answered,
    the KV cache of `session` holds its tokens for a request that continues it."""

    turn: Turn
    messages: list[Message]  # of the request, then the answer
    tools: list[ToolSpec]
    prompt_reason: str
    parent: RequestNode | None = None
    replies: list[Message] = field(default_factory=list)
    session: SamplingSession | None = None


class Conversations:
    """The turns of one episode, stored in the order in which they ended, so that a turn always follows its parent."""

    def __init__(self, chat: ChatFormat) -> None:
        self._chat = chat
        self.answered_nodes: list[RequestNode] = []

    def make_node(self, messages: list[Message], tools: list[ToolSpec]) -> RequestNode:
        """Return the node of a request, with its prompt tokens; raise ValueError if the chat template cannot render
        it."""
        parent, reason = self._find_parent(messages, tools)
        no_answer = Completion([], [], "length"), Message("assistant")
        if parent is not None:
            replies, turn = messages[len(parent.messages) :], parent.turn
            try:
                prompt_ids = turn.prompt_ids + turn.completion.token_ids + self._chat.extend(turn, replies)
                return RequestNode(Turn(prompt_ids, *no_answer), messages, tools, "extended", parent, replies)
            except ValueError:  # the template does not allow such a reply there
                reason = "template"
        return RequestNode(Turn(self._chat.render(messages, tools), *no_answer), messages, tools, reason)

    def add_answer(
        self, node: RequestNode, completion: Completion, message: Message, session: SamplingSession
    ) -> None:
        turn, messages = Turn(node.turn.prompt_ids, completion, message), [*node.messages, message]
        self.answered_nodes.append(replace(node, turn=turn, messages=messages, session=session))

    def number_rows(self) -> list[RequestNode]:
        """Return all turns, row by row, and number the rows. The row that ended last comes last, because the last turn
        counts as the end of the episode."""
        last_index: dict[RequestNode, int] = {}  # node -> index of the last turn among its descendants
        for index, node in reversed(list(enumerate(self.answered_nodes))):
            last_index.setdefault(node, index)
            if node.parent is not None:
                last_index[node.parent] = max(last_index[node], last_index.get(node.parent, 0))
        sort_keys: dict[RequestNode | None, tuple[int, ...]] = {None: ()}
        for node in self.answered_nodes:
            sort_keys[node] = (*sort_keys[node.parent], last_index[node])
        nodes = sorted(self.answered_nodes, key=sort_keys.__getitem__)
        row_number = 0.0
        for previous_node, node in zip([None, *nodes], nodes, strict=False):
            if previous_node is not None and node.parent is previous_node:
                previous_node.turn.replies = node.replies
            else:
                row_number += 1
            node.turn.signals = {"proxy/row": row_number}
        return nodes

    def _find_parent(self, messages: list[Message], tools: list[ToolSpec]) -> tuple[RequestNode | None, str]:
        """Return the longest conversation that the messages continue, or None and the reason why there is none."""
        shorter_nodes = [node for node in self.answered_nodes if len(node.messages) < len(messages)]
        shorter_nodes.sort(key=lambda node: -len(node.messages))
        prefix_nodes = [node for node in shorter_nodes if _starts_with(messages, node.messages)]
        is_assistant = [message.role == "assistant" for message in messages]
        if same_tool_nodes := [node for node in prefix_nodes if node.tools == tools]:
            parent = same_tool_nodes[0]
            if any(is_assistant[len(parent.messages) :]):
                return None, "rewritten"  # with a turn that was not sampled here, or was edited
            return (parent, "") if parent.turn.completion.finish == "stop" else (None, "cut")
        if prefix_nodes or any(_starts_with(messages, node.messages, False) for node in shorter_nodes):
            return None, "tools" if prefix_nodes else "arguments"
        if any(is_assistant) or any(_is_summary_of(messages, node.messages) for node in self.answered_nodes):
            return None, "rewritten"
        return None, "begun"


def _starts_with(messages: Sequence[Message], prefix: Sequence[Message], with_arguments: bool = True) -> bool:
    return all(
        _is_same_message(recorded, received, with_arguments)
        for recorded, received in zip(prefix, messages, strict=False)
    )


def _is_summary_of(messages: Sequence[Message], previous: Sequence[Message]) -> bool:
    """Return whether a request without sampled turns summarises an earlier conversation: under the same system prompt,
    another message replaces the first answer, or quotes the question or a longer answer or tool result."""
    roles, common_length = [message.role for message in previous], 0
    while common_length < min(len(messages), len(previous)) and _is_same_message(
        previous[common_length], messages[common_length], True
    ):
        common_length += 1
    first_answer = roles.index("assistant")
    if common_length == len(messages) or "system" in roles[common_length:first_answer]:
        return False  # asks the same question again, or has another system prompt
    quotes = [message.content for message in previous[first_answer:] if len(message.content) >= MIN_QUOTE]
    quotes += [message.content for message in previous[:first_answer] if message.role == "user"][-1:]
    new_text = "\n".join(message.content for message in messages[common_length:])
    return common_length >= first_answer or any(text and text in new_text for text in quotes)


def _is_same_message(recorded: Message, received: Message, with_arguments: bool) -> bool:
    """Return whether a client sent a message back unchanged. Clients may omit the reasoning, for which OpenAI has no
    field, and add an agent's name to a sampled message. The JSON of arguments may have other spaces and escapes, but
    must have the same keys in the same order and the same numbers."""

    def list_fields(message: Message) -> list[object]:
        calls = [(c.id, c.name, with_arguments and json.dumps(c.arguments)) for c in message.tool_calls]
        return [message.role, message.content, message.images, message.tool_call_id, calls]

    is_same_name = recorded.name == received.name or (recorded.role == "assistant" and recorded.name is None)
    is_same_reasoning = (received.reasoning or None) in (None, recorded.reasoning)
    return is_same_name and is_same_reasoning and list_fields(recorded) == list_fields(received)
