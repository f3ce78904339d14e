"""Bring rows as other programs write them into our columns: ms-swift's pairs and query/response rows, Alpaca's rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from TrainingFactory.data.conversations import as_list

MEDIA = ("images", "videos", "audios")
SPEAKERS = ("human", "user", "assistant", "gpt", "bot")  # of a conversation; a question goes first


def in_our_form(columns: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the row with "messages", "chosen" and "rejected" where it has them by other names."""
    if media := next((name for name in MEDIA if columns.get(name)), None):
        raise ValueError(f'has "{media}", and only text is understood')
    if "messages" not in columns and (said := _said(columns)) is not None:
        columns = {**columns, "messages": said}
    if "messages" not in columns or "rejected" in columns:
        return columns
    if "rejected_messages" in columns:
        return {**columns, "chosen": columns["messages"], "rejected": columns["rejected_messages"]}
    messages = as_list(columns["messages"], "messages")
    if "rejected_response" in columns:
        other = _other_side(messages, columns["rejected_response"])
        return {**columns, "chosen": messages, "rejected": other}
    return _without_unlearned({**columns, "messages": messages})


def _other_side(messages: list[Any], rejected: Any) -> list[Any]:
    """Return the messages with another answer after the last user's."""
    asked = [number for number, row in enumerate(messages) if _is(row, "user")]
    if not asked:
        raise ValueError(
            'has "rejected_response" in the place of what follows the last user, and there is none'
        )
    if isinstance(rejected, str):
        rejected = [{"role": "assistant", "content": rejected}]
    return [*messages[: asked[-1] + 1], *as_list(rejected, "rejected_response")]


def _without_unlearned(columns: dict[str, Any]) -> dict[str, Any]:
    """Make a prompt of what ms-swift marks as not to be learned: "loss" is false."""
    rows = list(enumerate(columns["messages"]))
    marked = [n for n, row in rows if isinstance(row, Mapping) and row.get("loss") in (False, 0)]
    if not marked:
        return columns
    learned = [n for n, row in rows if _is(row, "assistant", "tool_call") and n not in marked]
    if not learned or learned[0] < marked[-1]:
        raise ValueError(
            f'has a message {marked[-1]} with "loss" false after one that is learned, or none that is; what is not '
            "learned comes first"
        )
    messages = columns.pop("messages")
    return columns | {"prompt": messages[: learned[0]], "completion": messages[learned[0] :]}


def _is(row: Any, *roles: str) -> bool:
    return isinstance(row, Mapping) and row.get("role") in roles


def _said(columns: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """Return the messages of a row that has questions and answers in columns of their own."""
    turns: list[Any]
    if "conversation" in columns:
        rows = as_list(columns["conversation"], "conversation")
        turns = [isinstance(row, Mapping) and [row[name] for name in SPEAKERS if name in row] for row in rows]
    elif "query" in columns and "response" in columns:
        turns = [*as_list(columns.get("history") or [], "history"), [columns["query"], columns["response"]]]
    elif "instruction" in columns and "output" in columns:
        asked = [str(text) for name in ("instruction", "input") if (text := columns.get(name))]
        turns = [["\n".join(asked), columns["output"]]]
    else:
        return None
    if not all(isinstance(turn, list | tuple) and len(turn) == 2 for turn in turns):
        raise ValueError('has a "history" or "conversation" that is no list of questions with their answers')
    system = [{"role": "system", "content": columns["system"]}] if columns.get("system") else []
    said = [[{"role": "user", "content": a}, {"role": "assistant", "content": b}] for a, b in turns]
    return [*system, *(message for turn in said for message in turn)]
