"""Conversion of other row formats to our columns: ms-swift's pairs and query/response rows, Alpaca's rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from TrainingFactory.data.conversations import read_list

MEDIA_COLUMNS = ("videos", "audios")
SPEAKERS = ("human", "user", "assistant", "gpt", "bot")  # keys of a turn, the user's before the assistant's


def normalize_columns(columns: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a row's columns, with those of other formats converted to "messages", "chosen" and "rejected"."""
    if media_column := next((name for name in MEDIA_COLUMNS if columns.get(name)), None):
        raise ValueError(f'has "{media_column}", but only text and images are supported')
    if "messages" not in columns and (messages := _collect_messages(columns)) is not None:
        columns = {**columns, "messages": messages}
    if "messages" not in columns or "rejected" in columns:
        return columns
    if "rejected_messages" in columns:
        return {**columns, "chosen": columns["messages"], "rejected": columns["rejected_messages"]}
    messages = read_list(columns["messages"], "messages")
    if "rejected_response" in columns:
        rejected_messages = _make_rejected_side(messages, columns["rejected_response"])
        return {**columns, "chosen": messages, "rejected": rejected_messages}
    return _split_masked_messages({**columns, "messages": messages})


def _make_rejected_side(messages: list[Any], rejected_response: Any) -> list[Any]:
    """Return the messages with the part after the last user message replaced by the rejected response."""
    user_indices = [index for index, row in enumerate(messages) if _has_role(row, "user")]
    if not user_indices:
        raise ValueError('has "rejected_response", but no user message in "messages" that it could follow')
    if isinstance(rejected_response, str):
        rejected_response = [{"role": "assistant", "content": rejected_response}]
    return [*messages[: user_indices[-1] + 1], *read_list(rejected_response, "rejected_response")]


def _split_masked_messages(columns: dict[str, Any]) -> dict[str, Any]:
    """Move the messages that ms-swift excludes from the loss ("loss" is false) to a prompt."""
    rows = list(enumerate(columns["messages"]))
    masked_rows = [i for i, row in rows if isinstance(row, Mapping) and row.get("loss") in (False, 0)]
    if not masked_rows:
        return columns
    trained_rows = [i for i, row in rows if _has_role(row, "assistant", "tool_call") and i not in masked_rows]
    if not trained_rows or trained_rows[0] < masked_rows[-1]:
        raise ValueError(
            f'has "loss" false in message {masked_rows[-1]}, but no trained message or one before it; only the first '
            "messages can be excluded from the loss"
        )
    messages = columns.pop("messages")
    return columns | {"prompt": messages[: trained_rows[0]], "completion": messages[trained_rows[0] :]}


def _has_role(row: Any, *roles: str) -> bool:
    return isinstance(row, Mapping) and row.get("role") in roles


def _collect_messages(columns: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """Return the messages of a row with questions and answers in separate columns; None for other formats."""
    turns: list[Any]
    if "conversation" in columns:
        rows = read_list(columns["conversation"], "conversation")
        turns = [isinstance(row, Mapping) and [row[name] for name in SPEAKERS if name in row] for row in rows]
    elif "query" in columns and "response" in columns:
        turns = [*read_list(columns.get("history") or [], "history"), [columns["query"], columns["response"]]]
    elif "instruction" in columns and "output" in columns:
        prompt_texts = [str(text) for name in ("instruction", "input") if (text := columns.get(name))]
        turns = [["\n".join(prompt_texts), columns["output"]]]
    else:
        return None
    if not all(isinstance(turn, list | tuple) and len(turn) == 2 for turn in turns):
        raise ValueError('has a "history" or "conversation" that is not a list of question-answer pairs')
    messages = [{"role": "system", "content": columns["system"]}] if columns.get("system") else []
    for question, answer in turns:
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return messages
