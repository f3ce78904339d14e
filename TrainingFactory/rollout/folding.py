"""Folding: a conversation that exceeds a token limit continues from a shorter prompt (`environment.context`).

A context is the conversation as the model sees it: the messages before the first answer, then whole turns, so that a
call is never separated from its results. A kept turn keeps its sampled ids. Changed text is foreign text: the chat
format encodes it without control tokens. `data/samples.py` starts another row at a folded prompt, because it does not
continue the sampled tokens."""

from __future__ import annotations

import copy
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

from TrainingFactory.protocols import ChatFormat
from TrainingFactory.rewards.adapt import call_function
from TrainingFactory.types import Completion, Message, Role, ToolSpec, Turn

FoldKind = Literal["window", "drop_thoughts", "drop_results", "summary", "own"]
FoldFunction = Callable[[list[Message]], "list[Message] | Awaitable[list[Message]]"]
KEY = "environment.context"
SUMMARY_REQUEST = (
    "The conversation is getting long, and its messages will be removed. Write a summary from which you can continue: "
    "facts and results that the task still needs, and the next step. Do not call a tool."
)
SUMMARY_TITLE = "Summary of the conversation so far:"
RESULT_PLACEHOLDER = "[result removed]"
TASK_LOST = "fold/task_lost"  # signal of the first turn after a fold that removed the user's task


@dataclass(slots=True, frozen=True)
class Folding:
    """Options for folding an episode's conversation. The fields are the keys of `environment.context`."""

    fold: FoldKind
    limit: int  # tokens of a prompt above which it is folded
    keep_turns: int = 2  # last turns that window, drop_thoughts and drop_results leave unchanged
    max_folds: int = 16  # per episode
    summary_tokens: int = 256
    template: str = SUMMARY_REQUEST  # asks the model for a summary
    placeholder: str = RESULT_PLACEHOLDER  # replaces a tool result
    function: FoldFunction | None = None


@dataclass(slots=True, frozen=True)
class ContextTurn:
    """A turn in a context. `token_ids` are those of its message, sampled or rendered; None: not rendered yet."""

    message: Message
    replies: list[Message]
    token_ids: list[int] | None = None


@dataclass(slots=True)
class Context:
    """A conversation as the model sees it. `head_ids` is the prompt of `head` alone; None: not rendered yet."""

    head: list[Message]
    turns: list[ContextTurn] = field(default_factory=list)
    head_ids: list[int] | None = None
    num_folds: int = 0
    task: list[Message] = field(default_factory=list)  # `head` before any fold: system prompt and task

    @classmethod
    def begin(cls, prompt: list[Message], prompt_ids: list[int] | None = None) -> Context:
        return cls(prompt, [], prompt_ids, 0, prompt)

    @classmethod
    def from_messages(cls, messages: Sequence[Message]) -> Context:
        """Return the context of a conversation that was not sampled in this run, from its messages."""
        head, turns = split_turns(messages)
        context = cls.begin(head)
        context.turns = turns
        return context

    @property
    def messages(self) -> list[Message]:
        turn_messages = [message for turn in self.turns for message in (turn.message, *turn.replies)]
        return [*self.head, *turn_messages]

    def add(self, turn: Turn) -> None:
        self.turns.append(ContextTurn(turn.message, turn.replies, turn.completion.token_ids))

    @property
    def has_task(self) -> bool:
        """Return whether a user message still contains the last text of the user before the first turn."""
        tasks = [message.content.strip() for message in self.task if message.role == "user"]
        user_texts = [message.content for message in self.messages if message.role == "user"]
        return not tasks or any(tasks[-1] in text for text in user_texts)

    def copy(self) -> Context:
        """Return a copy for a forked episode."""
        return replace(self, turns=list(self.turns))


class FoldError(ValueError):
    """Raised if the conversation could not be folded."""


def split_turns(messages: Sequence[Message]) -> tuple[list[Message], list[ContextTurn]]:
    """Split a conversation into the messages before the first answer and the turns after them."""
    head: list[Message] = []
    turns: list[ContextTurn] = []
    for message in messages:
        if message.role == "assistant":
            turns.append(ContextTurn(message, []))
        elif turns:
            turns[-1].replies.append(message)
        else:
            head.append(message)
    return head, turns


async def fold(context: Context, folding: Folding) -> Context:
    """Shorten a context by any method except a summary (see `with_summary`). Return the folded context, or the same
    object if nothing can be removed."""
    older_turns, recent_turns = context.turns[: -folding.keep_turns], context.turns[-folding.keep_turns :]
    if folding.fold == "own":
        return await _fold_with_function(context, folding)
    if folding.fold == "window":
        turns = recent_turns
    elif folding.fold == "drop_thoughts":
        turns = [*map(_drop_reasoning, older_turns), *recent_turns]
    else:
        turns = [*(_replace_results(turn, folding.placeholder) for turn in older_turns), *recent_turns]
    if turns == context.turns:
        return context
    return replace(context, turns=turns, num_folds=context.num_folds + 1)


def with_summary(context: Context, summary: str) -> Context:
    """Return the context of the system prompt, the task and a summary, without turns. The summary follows the text of
    the last user message, because many chat templates reject two user messages in a row."""
    head = with_user_text(context.task, f"{SUMMARY_TITLE}\n{summary}")
    return replace(context, head=head, head_ids=None, turns=[], num_folds=context.num_folds + 1)


def render_context(context: Context, chat: ChatFormat, tools: Sequence[ToolSpec]) -> list[int]:
    """Return the prompt of a context. Raise ValueError if the chat template cannot render it."""
    if context.head_ids is None:
        context.head_ids = chat.render(context.head, tools)
    ids = list(context.head_ids)
    for index, turn in enumerate(context.turns):
        token_ids = _render_turn(turn, ids, chat, tools)
        if token_ids is not turn.token_ids:
            context.turns[index] = replace(turn, token_ids=token_ids)
        ids += token_ids
        ids += chat.extend(_make_turn(turn.message, token_ids), turn.replies)
    return ids


def render_request(turn: Turn, request: str, chat: ChatFormat) -> list[int]:
    """Return the prompt of a summary after a turn: its tokens, its replies and the request. A template that allows no
    user message there gets the request in the last reply."""
    ids = turn.prompt_ids + turn.completion.token_ids
    try:
        return ids + chat.extend(turn, [*turn.replies, Message("user", request)])
    except ValueError:
        if not turn.replies:
            raise
        return ids + chat.extend(turn, _append_text(turn.replies, request))


def with_user_text(messages: Sequence[Message], text: str) -> list[Message]:
    """Append a user's text to the last message if it is the user's, else as a new message."""
    if messages[-1].role == "user":
        return _append_text(messages, text)
    return [*messages, Message("user", text)]


def _append_text(messages: Sequence[Message], text: str) -> list[Message]:
    """Append a text to the last message."""
    *earlier_messages, last_message = messages
    return [*earlier_messages, replace(last_message, content=f"{last_message.content}\n\n{text}")]


def _render_turn(
    turn: ContextTurn, prompt_ids: list[int], chat: ChatFormat, tools: Sequence[ToolSpec]
) -> list[int]:
    """Return the ids of a turn's message after `prompt_ids`: the sampled ids, unless they parse differently after this
    prompt, because only one of the two prompts opens a thought; then the message is encoded again."""
    if turn.token_ids is not None:
        message = chat.parse(turn.token_ids, prompt_ids, tools)
        if (message.content, message.reasoning) == (turn.message.content, turn.message.reasoning):
            return turn.token_ids
    return chat.write(turn.message, prompt_ids, tools, exact=False)


def _make_turn(message: Message, token_ids: list[int]) -> Turn:
    return Turn([], Completion(token_ids, [0.0] * len(token_ids), "stop"), message)


def _drop_reasoning(turn: ContextTurn) -> ContextTurn:
    """Remove a turn's reasoning. A turn with an unparsable call keeps it, because the call cannot be written again."""
    if not turn.message.reasoning or any(call.error for call in turn.message.tool_calls):
        return turn
    return ContextTurn(replace(turn.message, reasoning=None), turn.replies)


def _replace_results(turn: ContextTurn, placeholder: str) -> ContextTurn:
    """Replace a turn's tool results by `placeholder` if they contain images or are longer than it."""
    replies = [
        replace(reply, content=placeholder, images=[])
        if reply.role == "tool" and (reply.images or len(reply.content) > len(placeholder))
        else reply
        for reply in turn.replies
    ]
    return turn if replies == turn.replies else replace(turn, replies=replies)


async def _fold_with_function(context: Context, folding: Folding) -> Context:
    assert folding.function is not None
    original_messages = context.messages
    folded_messages = await call_function(folding.function, copy.deepcopy(original_messages))
    if folded_messages == original_messages:
        return context
    _check_messages(folded_messages, f"{KEY}.function")
    head, turns = split_turns(folded_messages)
    _check_turns([turn for turn in turns if not _has_turn(context, turn)], f"{KEY}.function")
    unmatched_turns = list(context.turns)
    for index, turn in enumerate(turns):  # an unchanged answer keeps its sampled ids
        match = next((candidate for candidate in unmatched_turns if candidate.message == turn.message), None)
        if match is not None:
            unmatched_turns.remove(match)
            turns[index] = replace(turn, token_ids=match.token_ids)
    head_ids = context.head_ids if head == context.head else None
    return replace(context, head=head, head_ids=head_ids, turns=turns, num_folds=context.num_folds + 1)


def _check_messages(messages: object, name: str) -> None:
    """Raise FoldError unless a fold function returned a conversation from which the model can continue."""
    if not isinstance(messages, list) or not all(isinstance(item, Message) for item in messages):
        raise FoldError(f"{name} must return a list of Message, not {str(messages)[:60]}")
    for message in messages:
        if message.role not in get_args(Role):
            raise FoldError(f"{name} returned the role {message.role!r:.40}: use {', '.join(get_args(Role))}")
        if not isinstance(message.content, str) or not isinstance(message.tool_calls, list):
            raise FoldError(
                f"{name} returned a {message.role} message whose content is no str, or tool_calls no list"
            )
    if not any(message.role == "user" for message in messages):
        raise FoldError(f"{name} returned no user message: keep the message with the task")
    if messages[-1].role == "assistant":
        raise FoldError(f"{name} returned an assistant message at the end: the next turn is the model's")
    head, _ = split_turns(messages)
    if not head or any(message.role == "tool" for message in head):
        problem = "the first assistant message needs a user message before it, and a tool result its call"
        raise FoldError(f"{name} returned a conversation that starts in the middle: {problem}")


def _has_turn(context: Context, turn: ContextTurn) -> bool:
    """Return whether the context contains the turn unchanged. An unchanged turn is valid even if its tool messages
    answer no call, because an environment may send such messages."""
    return any((other.message, other.replies) == (turn.message, turn.replies) for other in context.turns)


def _check_turns(turns: Sequence[ContextTurn], name: str) -> None:
    """Raise FoldError if a fold function separated tool calls from their results."""
    for turn in turns:
        call_ids = {call.id for call in turn.message.tool_calls}
        result_ids = {reply.tool_call_id for reply in turn.replies if reply.role == "tool"} - {None}
        if result_ids - call_ids or (result_ids and call_ids - result_ids):
            raise FoldError(
                f"{name} separated tool calls from their results: calls {sorted(call_ids)}, results "
                f"{sorted(map(str, result_ids))}; keep or remove whole turns"
            )


def format_first_prompt_error(size: int, folding: Folding) -> str:
    return (
        f"{KEY}.limit is {folding.limit}, but the first prompt already has {size} tokens: raise the limit above the "
        "prompt with its tools, or shorten the prompt"
    )


def format_too_long_error(size: int, max_length: int, folding: Folding) -> str:
    option = f"{KEY}.fold={folding.fold}"
    return f"the prompt has {size} tokens after folding ({option}), but model.max_length is {max_length}"


def format_no_fold_error(size: int, max_length: int, num_folds: int, folding: Folding) -> str:
    reason = f"{KEY}.max_folds={num_folds} is reached"
    if num_folds < folding.max_folds:
        reason = "nothing more can be removed"
    return f"the prompt has {size} tokens, model.max_length is {max_length}, and {reason} ({KEY}.fold={folding.fold})"


def format_no_room_error(size: int, max_length: int, folding: Folding) -> str:
    return (
        f"the prompt with the request for a summary has {size} tokens, but model.max_length is {max_length}: lower "
        f"{KEY}.limit ({folding.limit}), so that the last tool result and the summary fit below it"
    )
