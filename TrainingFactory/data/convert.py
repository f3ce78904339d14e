"""From recorded trajectories to portable rows: OpenAI-style messages in the columns that TRL and others read.

    sft   messages, tools                        an episode
    kto   prompt, completion, label, tools       an episode; label: its reward is over the threshold
    prm   prompt, completion, labels, tools      an episode; labels: each turn's step reward is over the threshold
    dpo   prompt, chosen, rejected, margin, tools    the best and the worst episode of a group; margin: by how much
    rm    the same

`swift_row` writes the same as ms-swift has it: messages with the roles tool_call and tool_response, the other side of a
pair as rejected_messages, tools as JSON in a text.

Rows hold texts, so what texts cannot say is left out: a turn that was cut has no end (sft and prm keep the turns before
it), and a call that could not be read has no name.
"""

from __future__ import annotations

import json
import random
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from itertools import chain
from typing import Any, Literal

from TrainingFactory.common.openai_format import message_to_dict, spec_to_dict
from TrainingFactory.data.datasets import Row
from TrainingFactory.data.examples import PAIRS, Form, useless
from TrainingFactory.data.ranking import best_and_worst, one_sided, total
from TrainingFactory.data.trajectories import trajectory_from_dict
from TrainingFactory.types import Status, Trajectory

Layout = Literal["trl", "swift"]

THRESHOLDS: dict[Form, float] = {"kto": 0.5, "prm": 0.0}


@dataclass(slots=True)
class Filters:
    """Choose the episodes that become rows; the text under each is its help on the command line."""

    min_reward: float | None = None
    """Least reward, step rewards included."""
    max_reward: float | None = None
    """Greatest reward."""
    status: list[Status] = field(default_factory=list)
    """How the episode ended: done, max_turns, truncated. May be given several times."""
    tasks: list[str] = field(default_factory=list)
    """Ids of tasks, or patterns such as 'search-*'. May be given several times."""
    max_per_task: int | None = None
    """At most so many rows of a task, chosen at random."""
    dedupe: bool = False
    """Rows that say the same of the same task count once."""
    min_margin: float = 0.0
    """dpo, rm: by how much the better side of a pair must lead."""
    threshold: float | None = None
    """kto: rewards above it are good (0.5 if not given). prm: turns with step rewards above it are good (0)."""
    seed: int = 0
    """For the choice that --max-per-task makes."""


@dataclass(slots=True)
class Converted:
    """`dropped` counts episodes, or pairs, by what they were dropped for; `note` is what to know about the labels."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    read: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    note: str | None = None


@dataclass(slots=True)
class _Episode:
    """What rows need of a trajectory; its tokens would fill the memory."""

    group: str
    row: dict[str, Any]  # with "prompt" and "completion"
    reward: float
    steps: list[float]


def convert(rows: Iterable[Row], to: Form, filters: Filters | None = None) -> Converted:
    """Read `rows`, those of a trajectories file, one at a time."""
    filters, done = filters or Filters(), Converted()
    episodes: list[_Episode] = []
    for row in rows:
        done.read += 1
        episode = _read(row, to, filters)
        if isinstance(episode, str):
            done.dropped[episode] += 1
        else:
            episodes.append(episode)
    threshold = THRESHOLDS.get(to, 0.0) if filters.threshold is None else filters.threshold
    if to in PAIRS:
        made = _pairs(episodes, filters, done.dropped)
    else:
        made = [_single(each, to, threshold) for each in episodes]
    if to in THRESHOLDS:
        judged = [reward for each in episodes for reward in (each.steps if to == "prm" else [each.reward])]
        done.note = one_sided(judged, threshold, "--threshold")
    if filters.dedupe:
        made = _once(made, done.dropped)
    done.rows = made if filters.max_per_task is None else _limited(made, filters, done.dropped)
    return done


def _read(row: Row, to: Form, filters: Filters) -> _Episode | str:
    """An episode, or what it is dropped for."""
    try:
        episode = trajectory_from_dict(row.columns)
    except (ValueError, KeyError, TypeError, AttributeError):
        return "is not a trajectory"
    reward = None if episode.reward is None else total(episode.reward)
    if why := useless(episode, to) or _outside(episode, reward, filters):
        return why
    if any(turn.signals.get("proxy/row", 1) > 1 for turn in episode.turns):  # of a user's own agent
        return "has several conversations"
    kept = [turn for turn in episode.turns if turn.completion.finish == "stop"]
    if not kept or (len(kept) < len(episode.turns) and to not in ("sft", "prm")):
        return "was cut"
    if any(call.error for turn in kept for call in turn.message.tool_calls):
        return "has a call that cannot be read"
    said = [message for turn in kept for message in (turn.message, *turn.replies)]
    row_of = {
        "id": f"{episode.group}/{episode.member}",
        "task": episode.task.id,
        "reward": reward,
        "prompt": [message_to_dict(message) for message in episode.prompt],
        "completion": [message_to_dict(message) for message in said[: len(said) - len(kept[-1].replies)]],
    }
    if episode.tools:
        row_of["tools"] = [spec_to_dict(spec) for spec in episode.tools]
    steps = episode.reward.steps[: len(kept)] if episode.reward else []
    return _Episode(episode.group, row_of, reward or 0.0, steps)


def _outside(trajectory: Trajectory, reward: float | None, filters: Filters) -> str | None:
    if filters.status and trajectory.status not in filters.status:
        return "--status"
    if filters.tasks and not any(fnmatchcase(trajectory.task.id, pattern) for pattern in filters.tasks):
        return "--tasks"
    if filters.min_reward is not None and (reward is None or reward < filters.min_reward):
        return "--min-reward"
    if filters.max_reward is not None and (reward is None or reward > filters.max_reward):
        return "--max-reward"
    return None


def _single(episode: _Episode, to: Form, threshold: float) -> dict[str, Any]:
    row = episode.row
    # A prompt with answers in it stays a prompt: they are not what was learned from.
    if to == "sft" and not any(message["role"] == "assistant" for message in row["prompt"]):
        row["messages"] = row.pop("prompt") + row.pop("completion")
    elif to == "kto":
        row["label"] = episode.reward > threshold
    elif to == "prm":
        row["labels"] = [step > threshold for step in episode.steps]
    return row


def _pairs(episodes: list[_Episode], filters: Filters, dropped: Counter[str]) -> list[dict[str, Any]]:
    """One for each group: the first of its best episodes against the first of its worst."""
    groups: dict[str, list[_Episode]] = defaultdict(list)
    for each in episodes:
        groups[each.group].append(each)
    made = []
    for name, group in groups.items():
        pair = best_and_worst(group, lambda episode: episode.reward)
        if pair is None or pair[0].row["completion"] == pair[1].row["completion"]:
            dropped["pair: nothing better or worse in the group"] += 1
        elif (margin := pair[0].reward - pair[1].reward) < filters.min_margin:
            dropped["pair: --min-margin"] += 1
        else:
            best, worst = (each.row for each in pair)
            row = {key: value for key, value in best.items() if key not in ("reward", "completion")}
            sides = {"chosen": best["completion"], "rejected": worst["completion"]}
            made.append(row | sides | {"id": name, "margin": margin})
    return made


def _once(made: list[dict[str, Any]], dropped: Counter[str]) -> list[dict[str, Any]]:
    seen: dict[str, dict[str, Any]] = {}
    for row in made:
        told = {key: value for key, value in row.items() if key not in ("id", "reward", "margin")}
        seen.setdefault(json.dumps(told, sort_keys=True), row)
    dropped["--dedupe"] += len(made) - len(seen)
    return list(seen.values())


def _limited(made: list[dict[str, Any]], filters: Filters, dropped: Counter[str]) -> list[dict[str, Any]]:
    numbers: dict[str, list[int]] = defaultdict(list)
    for number, row in enumerate(made):
        numbers[row["task"]].append(number)
    rng = random.Random(filters.seed)
    drawn = (rng.sample(found, min(filters.max_per_task or 0, len(found))) for found in numbers.values())
    kept = sorted(chain.from_iterable(drawn))
    dropped["--max-per-task"] += len(made) - len(kept)
    return [made[number] for number in kept]


def swift_row(row: dict[str, Any]) -> dict[str, Any]:
    """Return a converted row in the form that ms-swift reads."""
    if "labels" in row:
        raise ValueError("ms-swift has no rows with labels for turns: --to prm has no --format swift")
    # What a prompt contains is not learned.
    prompt = _swift_messages(row.get("prompt", []), {"loss": False})
    answer = row["chosen"] if "chosen" in row else row.get("completion", row.get("messages", []))
    made: dict[str, Any] = {"messages": prompt + _swift_messages(answer)}
    if "rejected" in row:
        made["rejected_messages"] = prompt + _swift_messages(row["rejected"])
    if "tools" in row:
        made["tools"] = json.dumps(row["tools"], ensure_ascii=False)
    return {key: row[key] for key in ("id", "label", "margin") if key in row} | made


def _swift_messages(
    rows: Iterable[dict[str, Any]], marks: dict[str, Any] | None = None
) -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = []
    for row in rows:
        role, text = row["role"], row["content"]
        if role != "assistant":
            made.append({"role": "tool_response" if role == "tool" else role, "content": text})
            continue
        if thought := row.get("reasoning_content"):
            text = f"<think>\n{thought}\n</think>\n\n{text}"
        calls = [call["function"] for call in row.get("tool_calls", [])]
        written = [{"name": call["name"], "arguments": json.loads(call["arguments"])} for call in calls]
        said = [("assistant", text)] if text or not calls else []
        said += [("tool_call", json.dumps(call, ensure_ascii=False)) for call in written]
        made += [{"role": kind, "content": content, **(marks or {})} for kind, content in said]
    return made
