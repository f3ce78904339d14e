"""Conversion of recorded trajectories to portable rows: OpenAI-style messages in the columns that TRL and others read.

    sft   messages, tools                        an episode
    kto   prompt, completion, label, tools       an episode; label: its reward is above the threshold
    prm   prompt, completion, labels, tools      an episode; labels: each turn's step reward is above the threshold
    dpo   prompt, chosen, rejected, margin, tools    best and worst episode of a group; margin: their reward difference
    rm    the same

`to_swift_row` converts a row to ms-swift's format: messages with the roles tool_call and tool_response, the rejected
side of a pair as rejected_messages, tools as a JSON string. Images are files beside the rows: messages have a
placeholder, and the column "images" their paths.

Rows hold text, so turns that text cannot represent are dropped: a truncated turn has no end (sft and prm keep the turns
before it), and an unparsable call has no name.
"""

from __future__ import annotations

import json
import random
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from TrainingFactory.common.images import IMAGES_FOLDER, ImageStore, split_text
from TrainingFactory.common.openai_format import message_to_dict, spec_to_dict
from TrainingFactory.data.datasets import DatasetRow
from TrainingFactory.data.examples import PAIR_FORMS, Form, find_unusable_reason, read_recorded_episode
from TrainingFactory.data.ranking import pick_best_and_worst, sum_rewards, warn_if_one_sided
from TrainingFactory.data.row_images import TAG
from TrainingFactory.types import Image, Message, Status, Trajectory

Layout = Literal["trl", "swift"]

DEFAULT_THRESHOLDS: dict[Form, float] = {"kto": 0.5, "prm": 0.0}

FOLDED_REASON = "was folded"  # reason to drop an episode


@dataclass(slots=True)
class Filters:
    """Selection of the episodes that become rows. The command line shows the attribute docstrings as help."""

    min_reward: float | None = None
    """Minimum reward of an episode, including step rewards."""
    max_reward: float | None = None
    """Maximum reward of an episode, including step rewards."""
    status: list[Status] = field(default_factory=list)
    """Status of the episode: done, max_turns, truncated. Repeatable."""
    tasks: list[str] = field(default_factory=list)
    """Task ids, or patterns such as 'search-*'. Repeatable."""
    max_per_task: int | None = None
    """Maximum rows per task, selected at random."""
    dedupe: bool = False
    """Drop duplicate rows of the same task."""
    min_margin: float = 0.0
    """dpo, rm: minimum reward difference of a pair."""
    threshold: float | None = None
    """kto: rewards above it are positive (default 0.5). prm: step rewards above it are positive (default 0)."""
    seed: int = 0
    """Random seed of --max-per-task."""


@dataclass(slots=True)
class ConversionResult:
    """Converted rows. `dropped` counts episodes or pairs by reason; `note` is a warning about one-sided labels,
    turns that forked episodes share, or skipped folded episodes."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    num_read: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    note: str | None = None
    images: dict[str, Image] = field(default_factory=dict)  # of the rows, by the path beside the rows' file


@dataclass(slots=True)
class _Episode:
    """The parts of a trajectory that rows need, without the tokens, to save memory."""

    group_id: str
    row: dict[str, Any]  # with "prompt" and "completion"
    reward: float
    step_rewards: list[float]
    images: dict[str, Image]  # by their paths in the row


def convert(rows: Iterable[DatasetRow], form: Form, filters: Filters | None = None) -> ConversionResult:
    """Convert the rows of a trajectories file to the form `form`, one row at a time."""
    filters, result = filters or Filters(), ConversionResult()
    episodes: list[_Episode] = []
    num_forked = num_folded = 0
    for row in rows:
        result.num_read += 1
        episode = _read_episode(row, form, filters)
        if isinstance(episode, str):
            result.dropped[episode] += 1
            num_folded += episode == FOLDED_REASON
        else:
            episodes.append(episode)
            num_forked += row.columns.get("parent") is not None
    threshold = DEFAULT_THRESHOLDS.get(form, 0.0) if filters.threshold is None else filters.threshold
    if form in PAIR_FORMS:
        converted_rows = _make_pairs(episodes, filters, result.dropped)
    else:
        converted_rows = [_make_single_row(episode, form, threshold) for episode in episodes]
    if form in DEFAULT_THRESHOLDS:
        rewards = [reward for e in episodes for reward in (e.step_rewards if form == "prm" else [e.reward])]
        result.note = warn_if_one_sided(rewards, threshold, "--threshold")
    if num_forked:
        note = f"{num_forked} episodes were forked from others: turns that they share are in the rows of all of them"
        result.note = note if result.note is None else f"{result.note}; {note}"
    if num_folded:
        note = (
            f"{num_folded} folded episodes were skipped, because their later prompts are known as tokens only: train "
            "on the trajectories themselves"
        )
        result.note = note if result.note is None else f"{result.note}; {note}"
    if filters.dedupe:
        converted_rows = _deduplicate_rows(converted_rows, result.dropped)
    result.images = {path: image for episode in episodes for path, image in episode.images.items()}
    result.rows = (
        converted_rows
        if filters.max_per_task is None
        else _limit_rows_per_task(converted_rows, filters, result.dropped)
    )
    return result


def _read_episode(row: DatasetRow, form: Form, filters: Filters) -> _Episode | str:
    """Return the episode of a row, or the reason for dropping it."""
    try:
        episode = read_recorded_episode(row)
    except (ValueError, KeyError, TypeError, AttributeError):
        return "is not a trajectory"
    reward = None if episode.reward is None else sum_rewards(episode.reward)
    if reason := find_unusable_reason(episode, form) or _find_rejecting_filter(episode, reward, filters):
        return reason
    if any(turn.signals.get("proxy/row", 1) > 1 for turn in episode.turns):  # from a user's own agent
        return "has several conversations"
    if episode.is_folded:  # its rows have prompts of tokens, not of messages
        return FOLDED_REASON
    turns = [turn for turn in episode.turns if turn.completion.finish == "stop"]
    if not turns or (len(turns) < len(episode.turns) and form not in ("sft", "prm")):
        return "was truncated"
    if any(call.error for turn in turns for call in turn.message.tool_calls):
        return "has an unparsable call"
    messages = [message for turn in turns for message in (turn.message, *turn.replies)]
    messages = messages[: len(messages) - len(turns[-1].replies)]
    columns = {
        "id": f"{episode.group}/{episode.member}",
        "task": episode.task.id,
        "reward": reward,
        "prompt": [_make_message_row(message) for message in episode.prompt],
        "completion": [_make_message_row(message) for message in messages],
    }
    prompt_images, images = _list_images(episode.prompt), _list_images(messages)
    if prompt_images or images:
        columns["images"] = [get_image_path(image) for image in (*prompt_images, *images)]
    if episode.tools:
        columns["tools"] = [spec_to_dict(spec) for spec in episode.tools]
    step_rewards = episode.reward.steps[: len(turns)] if episode.reward else []
    images_by_path = {get_image_path(image): image for image in (*prompt_images, *images)}
    return _Episode(episode.group, columns, reward or 0.0, step_rewards, images_by_path)


def get_image_path(image: Image) -> str:
    """Return the path of an image in rows, relative to the folder of the rows' file."""
    return ImageStore(Path(IMAGES_FOLDER)).find_path(image.digest).as_posix()


def _list_images(messages: Iterable[Message]) -> list[Image]:
    return [image for message in messages for _, image in message.images]


def _make_message_row(message: Message) -> dict[str, Any]:
    """Convert a message to a row, with TRL's placeholders in place of images, which are in the column "images"."""
    row = message_to_dict(replace(message, images=[]))
    if message.images:
        row["content"] = [
            {"type": "text", "text": segment} if isinstance(segment, str) else {"type": "image"}
            for segment in split_text(message.content, message.images)
        ]
    return row


def _find_rejecting_filter(trajectory: Trajectory, reward: float | None, filters: Filters) -> str | None:
    if filters.status and trajectory.status not in filters.status:
        return "--status"
    if filters.tasks and not any(fnmatchcase(trajectory.task.id, pattern) for pattern in filters.tasks):
        return "--tasks"
    if filters.min_reward is not None and (reward is None or reward < filters.min_reward):
        return "--min-reward"
    if filters.max_reward is not None and (reward is None or reward > filters.max_reward):
        return "--max-reward"
    return None


def _make_single_row(episode: _Episode, form: Form, threshold: float) -> dict[str, Any]:
    row = episode.row
    # A prompt that contains assistant messages stays a prompt, so that they are not trained.
    if form == "sft" and not any(message["role"] == "assistant" for message in row["prompt"]):
        row["messages"] = row.pop("prompt") + row.pop("completion")
    elif form == "kto":
        row["label"] = episode.reward > threshold
    elif form == "prm":
        row["labels"] = [step_reward > threshold for step_reward in episode.step_rewards]
    return row


def _make_pairs(episodes: list[_Episode], filters: Filters, drops: Counter[str]) -> list[dict[str, Any]]:
    """Return one pair per group: its best and its worst episode, the first of equally good ones."""
    groups: dict[str, list[_Episode]] = defaultdict(list)
    for episode in episodes:
        groups[episode.group_id].append(episode)
    rows = []
    for group_name, group in groups.items():
        pair = pick_best_and_worst(group, lambda episode: episode.reward)
        if pair is None or pair[0].row["completion"] == pair[1].row["completion"]:
            drops["pair: equal rewards or completions"] += 1
        elif (margin := pair[0].reward - pair[1].reward) < filters.min_margin:
            drops["pair: --min-margin"] += 1
        else:
            best, worst = pair[0].row, pair[1].row
            if best.get("images") != worst.get("images"):  # a row has one column of images for both sides
                drops["pair: the episodes saw different images"] += 1
                continue
            row = {key: value for key, value in best.items() if key not in ("reward", "completion")}
            pair_columns = {"chosen": best["completion"], "rejected": worst["completion"]}
            rows.append(row | pair_columns | {"id": group_name, "margin": margin})
    return rows


def _deduplicate_rows(rows: list[dict[str, Any]], drops: Counter[str]) -> list[dict[str, Any]]:
    unique_rows: dict[str, dict[str, Any]] = {}
    for row in rows:
        columns = {key: value for key, value in row.items() if key not in ("id", "reward", "margin")}
        unique_rows.setdefault(json.dumps(columns, sort_keys=True), row)
    drops["--dedupe"] += len(rows) - len(unique_rows)
    return list(unique_rows.values())


def _limit_rows_per_task(
    rows: list[dict[str, Any]], filters: Filters, drops: Counter[str]
) -> list[dict[str, Any]]:
    indices_by_task: dict[str, list[int]] = defaultdict(list)
    for index, row in enumerate(rows):
        indices_by_task[row["task"]].append(index)
    rng = random.Random(filters.seed)
    max_rows = filters.max_per_task or 0
    selections = (rng.sample(indices, min(max_rows, len(indices))) for indices in indices_by_task.values())
    selected_indices = sorted(chain.from_iterable(selections))
    drops["--max-per-task"] += len(rows) - len(selected_indices)
    return [rows[index] for index in selected_indices]


def to_swift_row(row: dict[str, Any]) -> dict[str, Any]:
    """Convert a row to ms-swift's format; raise ValueError for rows with labels for turns."""
    if "labels" in row:
        raise ValueError("ms-swift has no format for turn labels; use --to prm without --format swift")
    # The prompt is excluded from the loss.
    prompt_messages = to_swift_messages(row.get("prompt", []), {"loss": False})
    answer_rows = row["chosen"] if "chosen" in row else row.get("completion", row.get("messages", []))
    swift_columns: dict[str, Any] = {"messages": prompt_messages + to_swift_messages(answer_rows)}
    if "rejected" in row:
        swift_columns["rejected_messages"] = prompt_messages + to_swift_messages(row["rejected"])
    if "images" in row:
        swift_columns["images"] = row["images"]
    if "tools" in row:
        swift_columns["tools"] = json.dumps(row["tools"], ensure_ascii=False)
    return {key: row[key] for key in ("id", "label", "margin") if key in row} | swift_columns


def _insert_image_tags(content: Any) -> str:
    """Convert a message's content to text with <image> tags; raise ValueError if its text has such a tag."""
    if not isinstance(content, list):
        return content
    if any(TAG in part.get("text", "") for part in content):
        raise ValueError(f"a message with an image has the text {TAG}, which ms-swift takes for an image")
    return "".join(part.get("text", TAG) for part in content)


def to_swift_messages(
    rows: Iterable[dict[str, Any]], loss_fields: dict[str, Any] | None = None
) -> list[dict[str, Any]]:
    """Convert messages to ms-swift's roles, with `loss_fields` added to the assistant's messages."""
    messages: list[dict[str, Any]] = []
    for row in rows:
        role, text = row["role"], _insert_image_tags(row["content"])
        if role != "assistant":
            messages.append({"role": "tool_response" if role == "tool" else role, "content": text})
            continue
        if reasoning := row.get("reasoning_content"):
            text = f"<think>\n{reasoning}\n</think>\n\n{text}"
        functions = [call["function"] for call in row.get("tool_calls", [])]
        calls = [{"name": call["name"], "arguments": json.loads(call["arguments"])} for call in functions]
        contents = [("assistant", text)] if text or not calls else []
        contents += [("tool_call", json.dumps(call, ensure_ascii=False)) for call in calls]
        messages += [{"role": role, "content": content, **(loss_fields or {})} for role, content in contents]
    return messages
