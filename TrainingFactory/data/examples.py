"""Training examples from the rows of a dataset: groups of conversations with rewards.

    sft   a conversation                         no reward
    dpo   a pair: "chosen" and "rejected"        1 (or the row's "margin") and 0
    rm    the same, for an outcome reward model
    kto   a conversation with a "label"          1 or 0
    prm   a conversation with "labels"           1 or -1 as step reward per turn of the assistant

Recorded trajectories are accepted for every form, with their own rewards.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from TrainingFactory.common.images import IMAGES_FOLDER, ImageStore
from TrainingFactory.data.conversations import (
    CallChecker,
    Conversation,
    check_calls,
    check_roles,
    name_tool_messages,
    read_conversation,
    read_list,
    read_prompt,
    read_text_or_messages,
    read_tools,
    with_system,
)
from TrainingFactory.data.datasets import DatasetRow, join_problems, read_rows
from TrainingFactory.data.other_forms import normalize_columns
from TrainingFactory.data.ranking import pick_best_and_worst, sum_rewards, warn_if_one_sided
from TrainingFactory.data.row_images import with_images
from TrainingFactory.data.trajectories import CompactTrajectory, trajectory_from_dict
from TrainingFactory.types import Message, Reward, ToolSpec, Trajectory

Form = Literal["sft", "dpo", "kto", "rm", "prm"]
PAIR_FORMS = ("dpo", "rm")
COLUMNS = {"kto": ["label"], "prm": ["labels"], "dpo": ["chosen", "rejected"], "rm": ["chosen", "rejected"]}
FAILED_STATUSES = ("error", "tool_failure")  # statuses that the model did not cause
CONVERSATION_COLUMNS = ("messages", "conversations")
REQUIRED_COLUMNS: dict[Form, str] = {
    "sft": '"messages" (and "tools"), "conversations" in ShareGPT format, or "prompt" and "completion"',
    "dpo": '"chosen" and "rejected", with "prompt" or as whole conversations with a common beginning',
    "kto": '"label" with "prompt" and "completion", or with "messages"',
    "prm": '"labels" with "messages", or with "prompt" and "completions"',
}
REQUIRED_COLUMNS["rm"] = REQUIRED_COLUMNS["dpo"]
TRUE_TEXTS, FALSE_TEXTS = ("true", "1", "1.0", "yes"), ("false", "0", "0.0", "no")  # strings, for CSV


@dataclass(slots=True)
class Example:
    """One training example: a conversation, a pair, or the recorded episodes of a task."""

    id: str
    location: str  # location of its row, for messages
    conversations: list[Conversation]


@dataclass(slots=True)
class Examples:
    form: Form
    usable: list[Example]
    num_rows: int = 0  # rows read
    row_problems: list[str] = field(default_factory=list)  # one message per invalid row
    unused_counts: Counter[str] = field(default_factory=Counter)  # unusable recorded episodes, by reason
    notes: list[str] = field(default_factory=list)  # warnings for the user

    def __len__(self) -> int:
        return len(self.usable)


def load_examples(
    source: Any,
    form: Form,
    *,
    split: str = "train",
    count: int | None = None,
    skip_bad_rows: bool = False,
    check_call: CallChecker | None = None,
    columns: Mapping[str, str] | None = None,
    image_urls: bool = False,
) -> Examples:
    """Return the first `count` examples (None: all). Raise one ValueError with all invalid rows, or collect them in
    `row_problems` with `skip_bad_rows`. `check_call` validates tool calls. `columns` maps expected to actual column
    names, like `columns` of `read_rows`. `image_urls`: download images from addresses."""
    examples, stem = Examples(form, []), Path(source).stem if isinstance(source, str | Path) else "row"
    groups: dict[str, Example] = {}  # recorded episodes by group name, for pairs
    check_call = check_call and _with_shared_specs(check_call)
    for row in read_rows(source, split, columns):
        examples.num_rows += 1
        try:
            if row.problem is not None:
                raise ValueError(row.problem)
            row_id = str(row.columns.get("id", f"{stem}-{examples.num_rows}"))
            if "turns" in row.columns and "task" in row.columns:
                episode = _convert_recorded_episode(row, form)
                if isinstance(episode, str):
                    examples.unused_counts[episode] += 1
                    continue
                example = Example(episode.id, row.location, [episode])
                if form in PAIR_FORMS and (pair := groups.setdefault(episode.id, example)) is not example:
                    pair.conversations.append(episode)
                    continue
            else:
                example = Example(
                    row_id, row.location, _read_conversations(row, form, row_id, check_call, image_urls)
                )
        except ValueError as error:
            examples.row_problems.append(f"{row.location} {error}")
            continue
        examples.usable.append(example)
        if len(examples.usable) == count and not groups:
            break
    for example in groups.values():
        if pick_best_and_worst(example.conversations, compute_total_reward) is None:
            examples.unused_counts["are in a group with equal rewards"] += len(example.conversations)
            example.conversations = []
    examples.usable = [example for example in examples.usable if example.conversations]
    if examples.row_problems and not skip_bad_rows:
        raise ValueError(join_problems(examples.row_problems))
    examples.usable = examples.usable[:count]
    if not examples.usable:
        raise ValueError(_explain_empty(examples, source))
    examples.notes += _warn_of_equal_labels(examples)
    return examples


def _with_shared_specs(check_call: CallChecker) -> CallChecker:
    """Pass the same object for equal tools to `check_call`, because it compiles each object's schema once."""
    specs: dict[str, ToolSpec] = {}

    def check_with_shared_spec(spec: ToolSpec, arguments: dict[str, Any]) -> str | None:
        return check_call(specs.setdefault(repr(spec), spec), arguments)

    return check_with_shared_spec


def _warn_of_equal_labels(examples: Examples) -> list[str]:
    """Return a warning if all labels are equal, at the default thresholds of the algorithms."""
    conversations = [conversation for example in examples.usable for conversation in example.conversations]
    warning = None
    if examples.form == "kto":
        warning = warn_if_one_sided(
            [compute_total_reward(conversation) for conversation in conversations], 0.5, "kto.threshold"
        )
    elif examples.form == "prm":
        rewards = [conversation.reward for conversation in conversations if conversation.reward]
        step_rewards = [step for reward in rewards for step in reward.steps]
        warning = warn_if_one_sided(step_rewards, 0.0, "reward_model.threshold")
    return [warning] if warning else []


def compute_total_reward(conversation: Conversation) -> float:
    assert conversation.reward is not None
    return sum_rewards(conversation.reward)


def find_unusable_reason(trajectory: Trajectory, form: str) -> str | None:
    """Return the reason why an episode cannot be used for training of this form; None if it can."""
    if trajectory.status in FAILED_STATUSES:
        return f"ended with status {trajectory.status}"
    if not trajectory.turns:
        return "have no complete turn"
    if form != "sft" and trajectory.reward is None:
        return "have no reward"
    if form == "prm" and trajectory.reward and len(trajectory.reward.steps) != len(trajectory.turns):
        return "have no step reward for every turn"
    return None


def _convert_recorded_episode(row: DatasetRow, form: str) -> Conversation | str:
    """Return a recorded episode as a conversation, or the reason why it cannot be used."""
    try:
        episode = read_recorded_episode(row)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"is not a trajectory: {error!r}") from error
    if form == "sft" and episode.turns and episode.turns[-1].completion.finish != "stop":
        episode = replace(episode, turns=episode.turns[:-1])  # a truncated turn does not show how to end one
    if reason := find_unusable_reason(episode, form):
        return reason
    prompt, name = episode.prompt, episode.group or episode.task.id
    messages = [*prompt, *(message for turn in episode.turns for message in (turn.message, *turn.replies))]
    return Conversation(
        name, messages, episode.tools, CompactTrajectory.from_trajectory(episode), len(prompt), episode.reward
    )


def read_recorded_episode(row: DatasetRow) -> Trajectory:
    """Return the recorded episode in a row of a trajectories file. The folder of the file has its images."""
    store = None if row.folder is None else ImageStore(row.folder / IMAGES_FOLDER)
    return trajectory_from_dict(dict(row.columns), store)


def _explain_empty(examples: Examples, source: Any) -> str:
    dataset_name = f"{source}" if isinstance(source, str | Path) else "the dataset"
    if examples.row_problems:
        return f"no row of {dataset_name} is valid:\n{join_problems(examples.row_problems)}"
    if examples.unused_counts:
        reasons = "; ".join(f"{count} {reason}" for reason, count in examples.unused_counts.items())
        return f"no episode in {dataset_name} can be used for {examples.form}: {reasons}"
    return f"{dataset_name} is empty; {examples.form} needs rows with {REQUIRED_COLUMNS[examples.form]}"


def _read_conversations(
    row: DatasetRow, form: Form, row_id: str, check_call: CallChecker | None, image_urls: bool
) -> list[Conversation]:
    columns = with_images(normalize_columns(row.columns), row, image_urls)
    if not all(key in columns for key in COLUMNS.get(form, [])):
        raise ValueError(_describe_missing_columns(columns, form))
    if form in PAIR_FORMS:
        return _read_pair(columns, row_id, check_call)
    if form == "prm":
        return [_read_labelled_turns(columns, row_id, check_call)]
    is_positive = form == "sft" or _parse_label(columns["label"], "label")
    conversation, column = _read_single_conversation(columns, form, row_id, is_negative=not is_positive)
    if form == "kto":
        conversation.reward = Reward(float(is_positive))
    check_calls(conversation, column, check_call)
    return [conversation]


def _read_single_conversation(
    columns: Mapping[str, Any], form: Form, row_id: str, is_negative: bool = False
) -> tuple[Conversation, str]:
    """Return the conversation of a row, and the column of its calls. `is_negative`: negative example, allow invalid
    calls."""
    if (column := next((key for key in CONVERSATION_COLUMNS if key in columns), None)) is not None:
        messages = check_roles(read_conversation(columns, column, is_negative), column)
        return Conversation(
            row_id, messages, read_tools(columns), bad=_find_negative_indices(messages, is_negative)
        ), column
    if "prompt" not in columns or "completion" not in columns:
        raise ValueError(_describe_missing_columns(columns, form))
    prompt = read_prompt(columns)
    answer = read_text_or_messages(columns, "completion", "assistant", is_negative)
    messages = _join_answer(prompt, answer, "completion")
    tools = read_tools(columns)
    return Conversation(
        row_id, messages, tools, context=len(prompt), bad=_find_negative_indices(messages, is_negative)
    ), "completion"


def _find_negative_indices(messages: list[Message], is_negative: bool) -> frozenset[int]:
    return frozenset(range(len(messages) if is_negative else 0))


def _join_answer(prompt: list[Message], answer: list[Message], column: str) -> list[Message]:
    if not any(message.role == "assistant" for message in answer):
        raise ValueError(f'has no assistant message in "{column}", so there is nothing to train on')
    return check_roles(name_tool_messages([*prompt, *answer]), f"prompt and {column}")


def _read_pair(columns: Mapping[str, Any], row_id: str, check_call: CallChecker | None) -> list[Conversation]:
    tools = read_tools(columns)
    prompt = read_prompt(columns) if "prompt" in columns else []
    sides = [_read_side(columns, side, prompt) for side in ("chosen", "rejected")]
    num_common_messages = _count_common_messages(*sides)
    has_prompt = bool(prompt) and all(side[: len(prompt)] == prompt for side in sides)
    if sides[0] == sides[1]:
        raise ValueError('has the same conversation in "chosen" and "rejected"')
    try:
        margin = float(columns.get("margin", 1.0))
    except (TypeError, ValueError):
        margin = math.nan
    if not 0 < margin < math.inf:
        text = str(columns["margin"])[:40]
        raise ValueError(f'has a "margin" of {text}, by which "chosen" is better; it must be greater than 0')
    context_length = len(prompt) if has_prompt else num_common_messages
    chosen, rejected = (
        Conversation(row_id, messages, tools, context=context_length, reward=Reward(reward))
        for messages, reward in zip(sides, (margin, 0.0), strict=True)
    )
    rejected.bad = _find_negative_indices(rejected.messages, True)
    check_calls(chosen, "chosen", check_call)
    return [chosen, rejected]


def _read_side(columns: Mapping[str, Any], column: str, prompt: list[Message]) -> list[Message]:
    """Return the whole conversation of one side of a pair, whose column may repeat the prompt."""
    answer = read_text_or_messages(columns, column, "assistant", is_negative=column == "rejected")
    if answer[0].role == "user":
        answer = with_system(columns, answer)
    if not prompt and answer[0].role == "assistant":
        raise ValueError(f'has no "prompt", and "{column}" begins with the assistant')
    question = [message for message in prompt if message.role == "user"][-1:]
    repeats_prompt = isinstance(columns.get("prompt"), str) and any(message in question for message in answer)
    is_complete = answer[0].role in ("system", "user") and (repeats_prompt or answer[: len(prompt)] == prompt)
    if not prompt or is_complete:
        return check_roles(name_tool_messages(answer), column)
    return _join_answer(prompt, answer, column)


def _count_common_messages(chosen: list[Message], rejected: list[Message]) -> int:
    """Return the number of common messages before the assistant messages that differ."""
    pairs = list(zip(chosen, rejected, strict=False))
    common_length = next((index for index, (left, right) in enumerate(pairs) if left != right), len(pairs))
    # If the assistant messages are equal and only the replies differ, split before those assistant messages.
    answer_indices = [i for i, (left, right) in enumerate(pairs) if left.role == right.role == "assistant"]
    if num_messages := max((index for index in answer_indices if index <= common_length), default=0):
        return num_messages
    raise ValueError('has no common prompt before the differing answers in "chosen" and "rejected"')


def _read_labelled_turns(
    columns: Mapping[str, Any], row_id: str, check_call: CallChecker | None
) -> Conversation:
    labels = [_parse_label(label, "labels") for label in read_list(columns["labels"], "labels")]
    if "completions" in columns and "prompt" in columns:
        steps = read_list(columns["completions"], "completions")
        if not steps or not all(isinstance(step, str) and step.strip() for step in steps):
            raise ValueError('has invalid "completions": they must be a list of non-empty strings')
        messages = [*read_prompt(columns), Message("assistant", "\n".join(steps))]
        conversation = Conversation(row_id, check_roles(messages), read_tools(columns), steps=steps)
        num_label_slots, unit = len(steps), '"completions"'
    else:
        conversation, column = _read_single_conversation(columns, "prm", row_id, is_negative=True)
        roles = [message.role for message in conversation.messages]
        turn_indices = [i for i, role in enumerate(roles) if role == "assistant" and i >= conversation.start]
        num_label_slots, unit = len(turn_indices), "assistant turns"
        # Turns with a negative label may contain invalid calls.
        conversation.bad = frozenset(
            i for i, is_positive in zip(turn_indices, labels, strict=False) if not is_positive
        )
        check_calls(conversation, column, check_call)
    if len(labels) != num_label_slots:
        raise ValueError(f'has {len(labels)} "labels" for {num_label_slots} {unit}; give one label for each')
    rewards = [1.0 if is_positive else -1.0 for is_positive in labels]
    conversation.reward = Reward(min(rewards), rewards)
    return conversation


def _describe_missing_columns(columns: Mapping[str, Any], form: Form) -> str:
    keys = ", ".join(map(str, columns)) or "none"
    return f"lacks columns: {form} needs {REQUIRED_COLUMNS[form]}, or a recorded trajectory; its columns are: {keys}"


def _parse_label(label: Any, column: str) -> bool:
    if str(label).lower() in (*TRUE_TEXTS, *FALSE_TEXTS):
        return str(label).lower() in TRUE_TEXTS
    raise ValueError(f'has {str(label)[:40]!r} in "{column}"; it must be true or false, or 1 or 0')
