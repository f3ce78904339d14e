"""From recorded trajectories to portable rows: OpenAI-style messages in the columns that TRL and others read.

    sft   messages, tools                        an episode
    kto   prompt, completion, label, tools       an episode; label: its reward is over the threshold
    prm   prompt, completion, labels, tools      an episode; labels: each turn's step reward is over the threshold
    dpo   prompt, chosen, rejected, margin, tools    the best and the worst episode of a group; margin: by how much
    rm    the same

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
from typing import Any

from TrainingFactory.data.datasets import Row
from TrainingFactory.data.examples import Form
from TrainingFactory.data.ranking import best_and_worst, one_sided, total
from TrainingFactory.data.recordings import LOST
from TrainingFactory.data.trajectories import trajectory_from_dict
from TrainingFactory.openai_form import message_to_dict, spec_to_dict
from TrainingFactory.types import Message, Trajectory

PAIRS = ("dpo", "rm")
THRESHOLDS: dict[Form, float] = {"kto": 0.5, "prm": 0.0}


@dataclass(slots=True)
class Filters:
    """What is kept. `tasks` are ids or patterns such as search-*; empty lists keep everything. `max_per_task` rows are
    chosen at random by `seed`. `threshold` tells good from bad, rewards for kto (0.5 if None) and step rewards for prm
    (0 if None)."""

    min_reward: float | None = None
    max_reward: float | None = None
    status: list[str] = field(default_factory=list)
    tasks: list[str] = field(default_factory=list)
    max_per_task: int | None = None
    dedupe: bool = False
    min_margin: float = 0.0
    threshold: float | None = None
    seed: int = 0


@dataclass(slots=True)
class Converted:
    """`dropped` counts episodes, or pairs, by what they were dropped for; `note` is what to know about the labels."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    read: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    note: str | None = None


@dataclass(slots=True)
class _Episode:
    """What a row needs of a trajectory; its tokens would fill the memory."""

    id: str
    task: str
    group: str
    prompt: list[dict[str, Any]]
    said: list[dict[str, Any]]
    tools: list[dict[str, Any]]
    reward: float | None
    steps: list[float]


def convert(rows: Iterable[Row], to: Form, filters: Filters | None = None) -> Converted:
    """`rows` are those of a trajectories file, of which one at a time is in memory."""
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
    made = _pairs(episodes, filters, done.dropped) if to in PAIRS else _singles(episodes, to, threshold)
    if to in THRESHOLDS:
        judged = [reward for each in episodes for reward in (each.steps if to == "prm" else [_reward(each)])]
        done.note = one_sided(judged, threshold, "--threshold")
    if filters.dedupe:
        made = _once(made, done.dropped)
    done.rows = _limited(made, filters, done.dropped)
    return done


def _read(row: Row, to: Form, filters: Filters) -> _Episode | str:
    """An episode, or what it is dropped for."""
    try:
        trajectory = trajectory_from_dict(row.columns)
    except (ValueError, KeyError, TypeError, AttributeError):
        return "is not a trajectory"
    reward = None if trajectory.reward is None else total(trajectory.reward)
    kept = _turns(trajectory, to in ("sft", "prm"))
    if why := _outside(trajectory, reward, filters):
        return why
    if not kept:
        return "was cut"
    if any(call.error for turn in kept for call in turn[0].tool_calls):
        return "has a call that cannot be read"
    steps = trajectory.reward.steps if trajectory.reward is not None else []
    if to != "sft" and reward is None:
        return "has no reward"
    if to == "prm" and len(steps) != len(trajectory.turns):
        return "has no reward for each turn"
    return _Episode(
        f"{trajectory.group}/{trajectory.member}",
        trajectory.task.id,
        trajectory.group,
        [message_to_dict(message) for message in trajectory.prompt],
        [message_to_dict(message) for turn in kept for message in turn][: -len(kept[-1]) + 1 or None],
        [spec_to_dict(spec) for spec in trajectory.tools],
        reward,
        steps[: len(kept)],
    )


def _outside(trajectory: Trajectory, reward: float | None, filters: Filters) -> str | None:
    if trajectory.status in LOST or not trajectory.turns:
        return "ended in an error"
    if filters.status and trajectory.status not in filters.status:
        return "--status"
    if filters.tasks and not any(fnmatchcase(trajectory.task.id, pattern) for pattern in filters.tasks):
        return "--tasks"
    if filters.min_reward is not None and (reward is None or reward < filters.min_reward):
        return "--min-reward"
    if filters.max_reward is not None and (reward is None or reward > filters.max_reward):
        return "--max-reward"
    return None


def _turns(trajectory: Trajectory, partly: bool) -> list[list[Message]]:
    """The messages of each turn that has an end; none where one was cut, unless `partly`."""
    whole = [turn for turn in trajectory.turns if turn.completion.finish == "stop"]
    if len(whole) < len(trajectory.turns) and not partly:
        return []
    return [[turn.message, *turn.replies] for turn in whole]


def _singles(episodes: list[_Episode], to: Form, threshold: float) -> list[tuple[str, dict[str, Any]]]:
    made = []
    for each in episodes:
        row: dict[str, Any] = {"id": each.id, "task": each.task, "reward": each.reward}
        # A prompt with answers in it stays a prompt: they are not what was learned from.
        if to == "sft" and not any(message["role"] == "assistant" for message in each.prompt):
            row["messages"] = each.prompt + each.said
        else:
            row |= {"prompt": each.prompt, "completion": each.said}
        if to == "kto":
            assert each.reward is not None
            row["label"] = each.reward > threshold
        elif to == "prm":
            row["labels"] = [step > threshold for step in each.steps]
        made.append((each.task, row | _tools(each)))
    return made


def _pairs(
    episodes: list[_Episode], filters: Filters, dropped: Counter[str]
) -> list[tuple[str, dict[str, Any]]]:
    """One for each group: the first of its best episodes against the first of its worst."""
    groups: dict[str, list[_Episode]] = defaultdict(list)
    for each in episodes:
        groups[each.group].append(each)
    made = []
    for name, group in groups.items():
        pair = best_and_worst(group, _reward)
        if pair is None or pair[0].said == pair[1].said:
            dropped["pair: nothing better or worse in the group"] += 1
            continue
        best, worst = pair
        if (margin := _reward(best) - _reward(worst)) < filters.min_margin:
            dropped["pair: --min-margin"] += 1
        else:
            row = {"id": name, "task": best.task, "prompt": best.prompt}
            row |= {"chosen": best.said, "rejected": worst.said, "margin": margin}
            made.append((best.task, row | _tools(best)))
    return made


def _reward(episode: _Episode) -> float:
    assert episode.reward is not None
    return episode.reward


def _tools(episode: _Episode) -> dict[str, Any]:
    return {"tools": episode.tools} if episode.tools else {}


def _once(made: list[tuple[str, dict[str, Any]]], dropped: Counter[str]) -> list[tuple[str, dict[str, Any]]]:
    """Rows that say the same of the same task count once."""
    seen: dict[str, tuple[str, dict[str, Any]]] = {}
    for task, row in made:
        told = {key: value for key, value in row.items() if key not in ("id", "reward", "margin")}
        seen.setdefault(json.dumps(told, sort_keys=True), (task, row))
    dropped["--dedupe"] += len(made) - len(seen)
    return list(seen.values())


def _limited(
    made: list[tuple[str, dict[str, Any]]], filters: Filters, dropped: Counter[str]
) -> list[dict[str, Any]]:
    if filters.max_per_task is None:
        return [row for _, row in made]
    numbers: dict[str, list[int]] = defaultdict(list)
    for number, (task, _) in enumerate(made):
        numbers[task].append(number)
    rng = random.Random(filters.seed)
    kept = {
        number
        for found in numbers.values()
        for number in rng.sample(found, min(filters.max_per_task, len(found)))
    }
    dropped["--max-per-task"] += len(made) - len(kept)
    return [row for number, (_, row) in enumerate(made) if number in kept]
