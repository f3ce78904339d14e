"""An episode as a shape: a line of trajectories.jsonl as a row of a list, or in full. No object of a run is made."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from TrainingFactory.apps.views.files import Problems, read_json, reason_of
from TrainingFactory.apps.views.shapes import EpisodeRow, EpisodeView, Json, Reward, TurnView
from TrainingFactory.data.trajectories import trajectory_to_dict
from TrainingFactory.runs.folder import TRAJECTORIES
from TrainingFactory.types import Trajectory

# Most of a line is numbers, of which a view has only how many there are. Inside a text a quote has a \ before it.
NUMBERS = re.compile(rb'"(new_ids|token_ids|logprobs|versions)": ?\[([^\]"]*)\]')
NEVER_ESCAPED = re.compile(r"[ !#-.0-\[\]-~]+")  # in JSON
RESULT = ("content", "ok", "error", "cached", "seconds", "id")
WRONG = (ValueError, LookupError, TypeError, AttributeError, OverflowError)


def read_line(line: bytes) -> Json:
    """Return what a line says, with a count in place of each list of tokens."""
    found = read_json(NUMBERS.sub(lambda m: b'"%s":%d' % (m[1], m[2].count(b",") + bool(m[2].strip())), line))
    if not isinstance(found, dict):
        raise ValueError("it is not a JSON object")
    return found


def read_row(line: bytes, number: int) -> tuple[EpisodeRow, list[str]]:
    """Return the row of a line, and the tools that failed in it. What is no episode is a row that says so."""
    try:
        return row_of(read_line(line), number)
    except WRONG as error:
        text = f"Line {number} of {TRAJECTORIES} is not an episode: {reason_of(error)}"
        return EpisodeRow(number=number, status="unreadable", error=text[:300]), []


def row_of(found: Json, number: int) -> tuple[EpisodeRow, list[str]]:
    turns, reward, group = found["turns"], found.get("reward"), str(found["group"])
    results = [result for turn in turns for result in _results(turn)]
    failed = [name for name, result in results if not result.get("ok", True)]
    sampled = [turn["completion"]["token_ids"] for turn in turns]
    step = group.partition("/")[0]
    row = EpisodeRow(
        number=number, step=int(step) + 1 if step.isdecimal() and len(step) < 16 else None,
        task=str(found["task"]["id"]), group=group, member=int(found["member"]) % (1 << 53),
        status=str(found["status"]),
        reward=None if reward is None else float(reward["outcome"]) + sum(reward.get("steps", ())),
        turns=len(turns), tokens=sum(each if isinstance(each, int) else len(each) for each in sampled) % (1 << 53),
        tool_calls=len(results), tool_failures=len(failed), cached=sum(bool(r.get("cached")) for _, r in results),
        seconds=float(found.get("seconds", 0.0)), error=found.get("error") and str(found["error"]),
    )  # fmt: skip
    return row, sorted(set(failed))


def _results(turn: Json) -> Iterator[tuple[str, Json]]:
    """Yield the results of a turn, each with the name of its tool."""
    calls = turn["message"].get("tool_calls") or []
    names = [(call.get("id"), str(call.get("function", call).get("name"))) for call in calls]
    for place, result in enumerate(turn.get("tool_results") or ()):
        beside = names[place][1] if place < len(names) else ""
        yield dict(names).get(result.get("id") or None) or beside, result


def episode_view(given: bytes | Trajectory, number: int) -> EpisodeView:
    """Return all of an episode but its token ids. `problem` names the parts that cannot be read."""
    line = json.dumps(trajectory_to_dict(given)).encode() if isinstance(given, Trajectory) else given
    view, problems = EpisodeView(row=read_row(line, number)[0]), Problems()
    with problems.reading(f"line {number}"):
        found = read_line(line)
        with problems.reading("task"):
            view.task = dict(found["task"])
        with problems.reading("prompt"):
            view.prompt = [dict(message) for message in found["prompt"]]
        with problems.reading("tools"):
            view.tools = [each.get("function", each)["name"] for each in found["tools"]]
        with problems.reading("reward"):
            if (reward := found.get("reward")) is not None:
                view.reward = Reward(*(reward[key] for key in ("outcome", "steps", "parts")))
        with problems.reading("turns"):
            steps = [] if view.reward is None else view.reward.steps
            for place, turn in enumerate(found["turns"]):
                view.turns.append(_turn(turn, steps[place] if place < len(steps) else None))
            view.answer = str(view.turns[-1].message.get("content") or "") if view.turns else ""
    if problems.texts:
        view.problem = f"Some of this episode cannot be read: {'; '.join(problems.texts)}"[:300]
    return view


def _turn(turn: Json, step_reward: float | None) -> TurnView:
    sampled = turn["completion"]
    results = [{key: each.get(key) for key in RESULT} | {"call": name} for name, each in _results(turn)]
    return TurnView(
        message=turn["message"], replies=turn.get("replies", []), tool_results=results, step_reward=step_reward,
        signals=turn.get("signals", {}), finish=str(sampled.get("finish")), tokens=sampled["token_ids"],
        policy_version=sampled.get("policy_version", 0),
    )  # fmt: skip


def says(line: bytes, text: str) -> bool:
    """Tell whether an episode says something in its messages, calls, error or task's id, in whatever case. It is
    first looked for among the bytes; a line that is no episode is searched as it is."""
    wanted = text.lower()
    if NEVER_ESCAPED.fullmatch(wanted) and wanted.encode() not in line.lower():
        return False
    try:
        return any(wanted in each.lower() for each in _texts(read_line(line)))
    except WRONG:
        return wanted in line.decode("utf-8", "replace").lower()


def _texts(found: Json) -> Iterator[str]:
    yield from (str(found["task"]["id"]), str(found.get("error") or ""))
    said = [message for turn in found["turns"] for message in (turn["message"], *turn["replies"])]
    for message in [*found["prompt"], *said]:
        yield from (str(message.get(key) or "") for key in ("content", "reasoning_content"))
        for call in message.get("tool_calls") or ():
            yield from map(str, call.get("function", call).values())
