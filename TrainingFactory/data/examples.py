"""Turn rows of a dataset into what an algorithm learns from: groups of conversations with rewards.

    sft   a conversation                         no reward
    dpo   a pair: "chosen" and "rejected"        1 (or the row's "margin") and 0
    rm    the same, for an outcome reward model
    kto   a conversation with a "label"          1 or 0
    prm   a conversation with "labels"           1 or -1 as step reward per turn of the assistant

Recorded trajectories fit every form, with the rewards they have.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from TrainingFactory.data.conversations import (
    Conversation,
    Fits,
    as_list,
    check_calls,
    checked,
    conversation_in,
    named_replies,
    prompt_in,
    text_or_messages,
    tools_in,
    with_system,
)
from TrainingFactory.data.datasets import in_one, read_rows
from TrainingFactory.data.other_forms import in_our_form
from TrainingFactory.data.ranking import best_and_worst, one_sided, total
from TrainingFactory.data.trajectories import Kept, trajectory_from_dict
from TrainingFactory.types import Message, Reward, ToolSpec, Trajectory

Form = Literal["sft", "dpo", "kto", "rm", "prm"]
PAIRS = ("dpo", "rm")
COLUMNS = {"kto": ["label"], "prm": ["labels"], "dpo": ["chosen", "rejected"], "rm": ["chosen", "rejected"]}
LOST = ("error", "tool_failure")  # ends of an episode that say nothing about the model
WHOLE = ("messages", "conversations")
NEEDS: dict[Form, str] = {
    "sft": '"messages" (and "tools"), "conversations" as ShareGPT has them, or "prompt" and "completion"',
    "dpo": '"chosen" and "rejected", with "prompt" or as whole conversations that begin alike',
    "kto": '"label" with "prompt" and "completion", or with "messages"',
    "prm": '"labels" with "messages", or with "prompt" and "completions"',
}
NEEDS["rm"] = NEEDS["dpo"]
TRUE, FALSE = ("true", "1", "1.0", "yes"), ("false", "0", "0.0", "no")  # as CSV has them


@dataclass(slots=True)
class Example:
    """Becomes a group of trajectories: one conversation, a pair, or the recorded episodes of a task."""

    id: str
    where: str  # the row it came from, for messages
    conversations: list[Conversation]


@dataclass(slots=True)
class Examples:
    form: Form
    found: list[Example]
    rows: int = 0
    bad: list[str] = field(default_factory=list)  # a text for each row that was skipped
    unused: Counter[str] = field(default_factory=Counter)  # recorded episodes that teach nothing, by why
    notes: list[str] = field(default_factory=list)  # what a user should know

    def __len__(self) -> int:
        return len(self.found)


def load_examples(
    source: Any,
    form: Form,
    *,
    split: str = "train",
    count: int | None = None,
    skip_bad_rows: bool = False,
    fits: Fits | None = None,
    names: Mapping[str, str] | None = None,
) -> Examples:
    """Return the first `count` examples; raise one ValueError with all problems, by row and column, or with
    `skip_bad_rows` keep them in `bad`. `names` are the `columns` of `read_rows`."""
    examples, stem = Examples(form, []), Path(source).stem if isinstance(source, str | Path) else "row"
    together: dict[str, Example] = {}  # recorded episodes of a group, by its name
    fits = fits and _shared(fits)
    for row in read_rows(source, split, names):
        examples.rows += 1
        try:
            if row.problem is not None:
                raise ValueError(row.problem)
            name = str(row.columns.get("id", f"{stem}-{examples.rows}"))
            if "turns" in row.columns and "task" in row.columns:
                found = _recorded(row.columns, form)
                if isinstance(found, str):
                    examples.unused[found] += 1
                    continue
                example = Example(found.id, row.where, [found])
                if form in PAIRS and (first := together.setdefault(found.id, example)) is not example:
                    first.conversations.append(found)
                    continue
            else:
                example = Example(name, row.where, _conversations(row.columns, form, name, fits))
        except ValueError as error:
            examples.bad.append(f"{row.where} {error}")
            continue
        examples.found.append(example)
        if len(examples.found) == count and not together:
            break
    for example in together.values():
        if best_and_worst(example.conversations, reward_of) is None:
            examples.unused["are in a group with nothing better or worse in it"] += len(example.conversations)
            example.conversations = []
    examples.found = [example for example in examples.found if example.conversations]
    if examples.bad and not skip_bad_rows:
        raise ValueError(in_one(examples.bad))
    examples.found = examples.found[:count]
    if not examples.found:
        raise ValueError(_why_empty(examples, source))
    examples.notes += _one_sided(examples)
    return examples


def _shared(fits: Fits) -> Fits:
    """Ask `fits` with one object for all equal tools: it looks at the schema of each object once."""
    known: dict[str, ToolSpec] = {}

    def shared(spec: ToolSpec, arguments: dict[str, Any]) -> str | None:
        return fits(known.setdefault(repr(spec), spec), arguments)

    return shared


def _one_sided(examples: Examples) -> list[str]:
    """Return a note where all labels are the same, by the thresholds that algorithms have unless told otherwise."""
    scored = [each for example in examples.found for each in example.conversations]
    note = None
    if examples.form == "kto":
        note = one_sided([reward_of(each) for each in scored], 0.5, "kto.threshold")
    elif examples.form == "prm":
        steps = [step for each in scored if each.reward for step in each.reward.steps]
        note = one_sided(steps, 0.0, "reward_model.threshold")
    return [note] if note else []


def reward_of(conversation: Conversation) -> float:
    assert conversation.reward is not None
    return total(conversation.reward)


def useless(trajectory: Trajectory, form: str) -> str | None:
    """Return why an episode teaches nothing of that form."""
    if trajectory.status in LOST:
        return f"ended as {trajectory.status}"
    if not trajectory.turns:
        return "have no turn that came to its end"
    if form != "sft" and trajectory.reward is None:
        return "have no reward"
    if form == "prm" and trajectory.reward and len(trajectory.reward.steps) != len(trajectory.turns):
        return "have no reward for each turn"
    return None


def _recorded(columns: Mapping[str, Any], form: str) -> Conversation | str:
    """Return a recorded episode, or why it teaches nothing."""
    try:
        episode = trajectory_from_dict(dict(columns))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"is not a trajectory: {error!r}") from error
    if form == "sft" and episode.turns and episode.turns[-1].completion.finish != "stop":
        episode = replace(episode, turns=episode.turns[:-1])  # no example of how to end a turn
    if why := useless(episode, form):
        return why
    said = [message for turn in episode.turns for message in (turn.message, *turn.replies)]
    found = Conversation(episode.group or episode.task.id, [*episode.prompt, *said], episode.tools)
    return replace(found, recorded=Kept.of(episode), context=len(episode.prompt), reward=episode.reward)


def _why_empty(examples: Examples, source: Any) -> str:
    named = f"{source}" if isinstance(source, str | Path) else "the dataset"
    if examples.bad:
        return f"no row of {named} can be used:\n{in_one(examples.bad)}"
    if examples.unused:
        reasons = "; ".join(f"{count} {why}" for why, count in examples.unused.items())
        return f"nothing in {named} can be used for {examples.form}: {reasons}"
    return f"{named} is empty: {examples.form} needs rows with {NEEDS[examples.form]}"


def _conversations(
    columns: Mapping[str, Any], form: Form, name: str, fits: Fits | None
) -> list[Conversation]:
    columns = in_our_form(columns)
    if not all(key in columns for key in COLUMNS.get(form, [])):
        raise ValueError(_missing(columns, form))
    if form in PAIRS:
        return _pair(columns, name, fits)
    if form == "prm":
        return [_labelled_turns(columns, name, fits)]
    good = form == "sft" or _label(columns["label"], "label")
    conversation, column = _single(columns, form, name, bad=not good)
    if form == "kto":
        conversation.reward = Reward(float(good))
    check_calls(conversation, column, fits)
    return [conversation]


def _single(columns: Mapping[str, Any], form: Form, name: str, bad: bool = False) -> tuple[Conversation, str]:
    """Return the conversation of a row, and the column to blame for its calls; a `bad` one may show bad calls."""
    if (column := next((key for key in WHOLE if key in columns), None)) is not None:
        messages = checked(conversation_in(columns, column, bad), column)
        return Conversation(name, messages, tools_in(columns), bad=_numbers(messages, bad)), column
    if "prompt" not in columns or "completion" not in columns:
        raise ValueError(_missing(columns, form))
    prompt, answer = prompt_in(columns), text_or_messages(columns, "completion", "assistant", bad)
    messages = _joined(prompt, answer, "completion")
    found = Conversation(name, messages, tools_in(columns), context=len(prompt), bad=_numbers(messages, bad))
    return found, "completion"


def _numbers(messages: list[Message], bad: bool) -> frozenset[int]:
    return frozenset(range(len(messages) if bad else 0))


def _joined(prompt: list[Message], answer: list[Message], column: str) -> list[Message]:
    if not any(message.role == "assistant" for message in answer):
        raise ValueError(f'has no message of the assistant in "{column}", so there is nothing to learn from')
    return checked(named_replies([*prompt, *answer]), f"prompt and {column}")


def _pair(columns: Mapping[str, Any], name: str, fits: Fits | None) -> list[Conversation]:
    tools, prompt = tools_in(columns), prompt_in(columns) if "prompt" in columns else []
    sides = [_side(columns, side, prompt) for side in ("chosen", "rejected")]
    common = _common(*sides)
    given = bool(prompt) and all(side[: len(prompt)] == prompt for side in sides)
    if sides[0] == sides[1]:
        raise ValueError('has the same dialogue in "chosen" and in "rejected"')
    try:
        margin = float(columns.get("margin", 1.0))
    except (TypeError, ValueError):
        margin = math.nan
    if not 0 < margin < math.inf:
        told = str(columns["margin"])[:40]
        raise ValueError(f'has a "margin" of {told}; by so much "chosen" is better, so it must be over 0')
    chosen, rejected = (
        Conversation(name, messages, tools, context=len(prompt) if given else common, reward=Reward(reward))
        for messages, reward in zip(sides, (margin, 0.0), strict=True)
    )
    rejected.bad = _numbers(rejected.messages, True)
    check_calls(chosen, "chosen", fits)
    return [chosen, rejected]


def _side(columns: Mapping[str, Any], column: str, prompt: list[Message]) -> list[Message]:
    """Return the whole conversation of one side; it may repeat the prompt."""
    answer = text_or_messages(columns, column, "assistant", bad=column == "rejected")
    if answer[0].role == "user":
        answer = with_system(columns, answer)
    if not prompt and answer[0].role == "assistant":
        raise ValueError(f'has no "prompt", and "{column}" begins with the answer')
    asked = [message for message in prompt if message.role == "user"][-1:]
    repeats = isinstance(columns.get("prompt"), str) and any(message in asked for message in answer)
    whole = answer[0].role in ("system", "user") and (repeats or answer[: len(prompt)] == prompt)
    if not prompt or whole:
        return checked(named_replies(answer), column)
    return _joined(prompt, answer, column)


def _common(chosen: list[Message], rejected: list[Message]) -> int:
    """Return how many messages both begin with, before an answer that differs."""
    pairs = list(zip(chosen, rejected, strict=False))
    same = next((number for number, (one, other) in enumerate(pairs) if one != other), len(pairs))
    # Where the answer is the same and what came back differs, that answer is where they part.
    answers = [n for n, pair in enumerate(pairs) if all(each.role == "assistant" for each in pair)]
    if found := max((number for number in answers if number <= same), default=0):
        return found
    raise ValueError('has no common prompt before answers that differ in "chosen" and "rejected"')


def _labelled_turns(columns: Mapping[str, Any], name: str, fits: Fits | None) -> Conversation:
    labels = [_label(label, "labels") for label in as_list(columns["labels"], "labels")]
    if "completions" in columns and "prompt" in columns:
        steps = as_list(columns["completions"], "completions")
        if not steps or not all(isinstance(step, str) and step.strip() for step in steps):
            raise ValueError('has "completions" that must be a list of texts, none of them empty')
        messages = [*prompt_in(columns), Message("assistant", "\n".join(steps))]
        conversation = Conversation(name, checked(messages), tools_in(columns), steps=steps)
        count, what = len(steps), '"completions"'
    else:
        conversation, column = _single(columns, "prm", name, bad=True)
        roles = [message.role for message in conversation.messages]
        turns = [n for n, role in enumerate(roles) if role == "assistant" and n >= conversation.start]
        count, what = len(turns), "turns of the assistant"
        # the turns that are labelled bad may show bad calls
        conversation.bad = frozenset(n for n, good in zip(turns, labels, strict=False) if not good)
        check_calls(conversation, column, fits)
    if len(labels) != count:
        raise ValueError(f'has {len(labels)} "labels" for {count} {what}: one each is needed')
    judged = [1.0 if good else -1.0 for good in labels]
    conversation.reward = Reward(min(judged), judged)
    return conversation


def _missing(columns: Mapping[str, Any], form: Form) -> str:
    keys = ", ".join(map(str, columns)) or "none"
    return f"has not what {form} needs: {NEEDS[form]}, or a recorded trajectory; its keys are: {keys}"


def _label(value: Any, column: str) -> bool:
    if str(value).lower() in (*TRUE, *FALSE):
        return str(value).lower() in TRUE
    raise ValueError(f'has "{column}" with {str(value)[:40]!r}; it must be true or false, or 1 or 0')
