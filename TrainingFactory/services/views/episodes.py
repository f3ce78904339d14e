"""The episodes of a run as shapes: one line of trajectories.jsonl in a row, or in full."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from TrainingFactory.services.views.files import read_json
from TrainingFactory.services.views.shapes import EpisodeRow, EpisodeView, ResultView, TaskView, TurnView
from TrainingFactory.types import Reward

# Most of a line is numbers, of which a row has only how many there are. Inside a text a quote has a \ before it.
NUMBERS = re.compile(rb'"(new_ids|token_ids|logprobs|versions)": ?\[([^\]"]*)\]')
MOST = 1 << 53  # what a number of JSON holds exactly, and SQLite


def read_row(number: int, line: bytes) -> tuple[EpisodeRow, list[str]]:
    """Return the row of a line, and the tools that failed in it. What is no episode is a row that says so."""
    try:
        found = read_json(without_numbers(line))
        return _row(number, found)
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError) as error:
        return EpisodeRow(number=number, status="unreadable", error=f"it is no episode: {error!r}"[:300]), []


def without_numbers(line: bytes) -> bytes:
    return NUMBERS.sub(
        lambda found: b'"%s":%d' % (found[1], found[2].count(b",") + bool(found[2].strip())), line
    )


def _row(number: int, found: dict[str, Any]) -> tuple[EpisodeRow, list[str]]:
    turns, reward, group = found["turns"], found.get("reward"), str(found["group"])
    results = [result for turn in turns for result in _results(turn)]
    failed = [name for name, result in results if not result.get("ok", True)]
    sampled = [turn["completion"]["token_ids"] for turn in turns]
    step = group.partition("/")[0]
    row = EpisodeRow(
        number=number,
        step=min(int(step), MOST) + 1 if step.isdecimal() else None,
        task=str(found["task"]["id"]),
        group=group,
        member=max(-MOST, min(MOST, int(found["member"]))),
        status=str(found["status"]),
        reward=None if reward is None else float(reward["outcome"]) + sum(reward.get("steps", ())),
        turns=len(turns),
        tokens=sum(each if isinstance(each, int) else len(each) for each in sampled),
        tool_calls=len(results),
        tool_failures=len(failed),
        cached=sum(bool(result.get("cached")) for _, result in results),
        seconds=float(found.get("seconds", 0.0)),
        error=None if found.get("error") is None else str(found["error"]),
    )
    return row, sorted(set(failed))


def _results(turn: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the results of a turn, each with the name of its tool."""
    calls = turn["message"].get("tool_calls") or []
    names = [(call.get("id"), str(call.get("function", call).get("name"))) for call in calls]
    for place, result in enumerate(turn.get("tool_results") or ()):
        known = dict(names).get(result.get("id") or None)
        yield known or (names[place][1] if place < len(names) else ""), result


def episode_view(number: int, line: bytes) -> EpisodeView:
    """Return all of an episode, but for the ids of its tokens. What cannot be read of it is told in `problem`."""
    row, _ = read_row(number, line)
    view = EpisodeView(
        row=row, task=TaskView(id=row.task), problem=row.error if row.status == "unreadable" else None
    )
    if view.problem is not None:
        return view
    try:
        found = read_json(without_numbers(line))
        reward, task = found.get("reward"), found["task"]
        view.reward = (
            None if reward is None else Reward(**{key: reward[key] for key in ("outcome", "steps", "parts")})
        )
        steps = view.reward.steps if view.reward is not None else []
        for place, turn in enumerate(found["turns"]):
            view.turns.append(_turn(turn, steps[place] if place < len(steps) else None))
        view.prompt, view.tools = (
            found["prompt"],
            [each.get("function", each)["name"] for each in found["tools"]],
        )
        view.answer = str(found["turns"][-1]["message"].get("content") or "") if found["turns"] else ""
        asked = task["prompt"]
        asked = [{"role": "user", "content": asked}] if isinstance(asked, str) else asked
        view.task = TaskView(
            id=row.task, prompt=asked, answer=task.get("answer"), metadata=task.get("metadata", {})
        )
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        view.problem = f"only the beginning could be read: {error!r}"[:300]
    return view


def _turn(turn: dict[str, Any], step_reward: float | None) -> TurnView:
    sampled = turn["completion"]
    results = [
        ResultView(
            content=str(result["content"]), ok=result["ok"], error=result.get("error"), cached=result.get("cached", False),
            seconds=result.get("seconds", 0.0), call=name, id=str(result.get("id") or ""),
            attachments=len(result.get("attachments") or ()),
        )
        for name, result in _results(turn)
    ]  # fmt: skip
    return TurnView(
        message=turn["message"], replies=turn.get("replies", []), tool_results=results, step_reward=step_reward,
        signals=turn.get("signals", {}), finish=str(sampled.get("finish")), policy_version=sampled.get("policy_version", 0),
        tokens=sampled["token_ids"],
    )  # fmt: skip


def texts(line: bytes) -> Iterator[str]:
    """Yield what is written in an episode: its task's id, its messages, calls and errors."""
    found = read_json(without_numbers(line))
    yield str(found["task"]["id"])
    yield str(found.get("error") or "")
    for message in [
        *found["prompt"],
        *(m for turn in found["turns"] for m in (turn["message"], *turn["replies"])),
    ]:
        yield str(message.get("content") or "")
        yield str(message.get("reasoning_content") or "")
        for call in message.get("tool_calls") or ():
            yield " ".join(map(str, call.get("function", call).values()))
