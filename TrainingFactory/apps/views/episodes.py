"""Views of an episode (a list row, or the full episode) made from a line of trajectories.jsonl without a Trajectory
object."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from urllib.parse import quote

from TrainingFactory.apps.views.files import Problems, error_reason, read_json
from TrainingFactory.apps.views.shapes import EpisodeRow, EpisodeView, Json, Reward, TurnView
from TrainingFactory.common.image_parts import MEDIA_TYPE
from TrainingFactory.data.trajectories import trajectory_to_dict
from TrainingFactory.runs.folder import TRAJECTORIES
from TrainingFactory.types import Trajectory

# Most of a line is lists of numbers, of which views show only the length. Quotes in texts are escaped: no match there.
NUMBERS = re.compile(rb'"(new_ids|token_ids|logprobs|versions)": ?\[([^\]"]*)\]')
NEVER_ESCAPED = re.compile(r"[ !#-.0-\[\]-~]+")  # characters that JSON writes as they are
FIELDS = ("content", "ok", "error", "cached", "seconds", "id", "images")
READ_ERRORS = (ValueError, LookupError, TypeError, AttributeError, OverflowError)


def read_line(line: bytes) -> Json:
    """Parse a line of trajectories.jsonl. Each list of numbers is replaced by its length."""
    data = read_json(NUMBERS.sub(lambda m: b'"%s":%d' % (m[1], m[2].count(b",") + bool(m[2].strip())), line))
    if not isinstance(data, dict):
        raise ValueError("not a JSON object")
    return data


def read_row(line: bytes, number: int) -> tuple[EpisodeRow, list[str]]:
    """Return the list row of a line, and the names of its failed tools. For an invalid line, return a row with the
    error."""
    try:
        return episode_row(read_line(line), number)
    except READ_ERRORS as error:
        problem = f"Line {number} of {TRAJECTORIES} is not an episode: {error_reason(error)}"
        return EpisodeRow(number=number, status="unreadable", error=problem[:300]), []


def episode_row(data: Json, number: int) -> tuple[EpisodeRow, list[str]]:
    turns, reward, group = data["turns"], data.get("reward"), str(data["group"])
    results = [result for turn in turns for result in _results(turn)]
    failed = [name for name, result in results if not result.get("ok", True)]
    sampled = [turn["completion"]["token_ids"] for turn in turns]
    step = group.partition("/")[0]
    row = EpisodeRow(
        number=number, step=int(step) + 1 if step.isdecimal() and len(step) < 16 else None,
        task=str(data["task"]["id"]), group=group, member=int(data["member"]) % (1 << 53),
        status=str(data["status"]),
        reward=None if reward is None else float(reward["outcome"]) + sum(reward.get("steps", ())),
        turns=len(turns), tokens=sum(ids if isinstance(ids, int) else len(ids) for ids in sampled) % (1 << 53),
        tool_calls=len(results), tool_failures=len(failed), cached=sum(bool(r.get("cached")) for _, r in results),
        seconds=float(data.get("seconds", 0.0)), error=data.get("error") and str(data["error"]),
        parent=None if data.get("parent") is None else int(data["parent"]) % (1 << 53),
        fork_turn=int(data.get("fork_turn") or 0) % (1 << 53),
    )  # fmt: skip
    return row, sorted(set(failed))


def _results(turn: Json) -> Iterator[tuple[str, Json]]:
    """Yield (tool name, result) for each result of a turn."""
    calls = turn["message"].get("tool_calls") or []
    names = [(call.get("id"), str(call.get("function", call).get("name"))) for call in calls]
    for index, result in enumerate(turn.get("tool_results") or ()):
        fallback_name = names[index][1] if index < len(names) else ""
        yield dict(names).get(result.get("id") or None) or fallback_name, result


def episode_view(source: bytes | Trajectory, number: int, run: str | None = None) -> EpisodeView:
    """Return the view of an episode, without its token ids. `problem` names the parts that cannot be read. `run` is the
    run whose folder has the images; None: the source contains them."""
    line = json.dumps(trajectory_to_dict(source)).encode() if isinstance(source, Trajectory) else source
    view, problems = EpisodeView(row=read_row(line, number)[0]), Problems()
    with problems.reading(f"line {number}"):
        data = read_line(line)
        with problems.reading("images"):
            _set_sources(data, run)
        with problems.reading("task"):
            view.task = dict(data["task"])
        with problems.reading("prompt"):
            view.prompt = [dict(message) for message in data["prompt"]]
        with problems.reading("tools"):
            specs = [spec.get("function", spec) for spec in data["tools"]]
            view.tools = [spec["name"] for spec in specs]
            view.thousandths = [spec["name"] for spec in specs if _takes_thousandths(spec)]
        with problems.reading("reward"):
            if (reward := data.get("reward")) is not None:
                view.reward = Reward(*(reward[key] for key in ("outcome", "steps", "parts")))
        with problems.reading("turns"):
            steps = [] if view.reward is None else view.reward.steps
            for index, turn in enumerate(data["turns"]):
                view.turns.append(_turn_view(turn, steps[index] if index < len(steps) else None))
            view.answer = str(view.turns[-1].message.get("content") or "") if view.turns else ""
    if problems.texts:
        view.problem = f"Some parts of this episode cannot be read: {'; '.join(problems.texts)}"[:300]
    return view


def _turn_view(turn: Json, step_reward: float | None) -> TurnView:
    sampled = turn["completion"]
    results = [{key: result.get(key) for key in FIELDS} | {"call": name} for name, result in _results(turn)]
    return TurnView(
        message=turn["message"], replies=turn.get("replies", []), tool_results=results, step_reward=step_reward,
        signals=turn.get("signals", {}), finish=str(sampled.get("finish")), tokens=sampled["token_ids"],
        policy_version=sampled.get("policy_version", 0), fold=turn.get("fold"), summary=bool(turn.get("summary")),
        prompt_tokens=turn["new_ids"] if turn.get("fold") else None,
    )  # fmt: skip


def _takes_thousandths(spec: Json) -> bool:
    properties = spec.get("parameters", {}).get("properties", {})
    schemas = [properties[name] for name in ("x", "y") if isinstance(properties.get(name), dict)]
    return len(schemas) == 2 and all(
        schema.get("maximum", schema.get("exclusiveMaximum")) == 1000 for schema in schemas
    )


def _set_sources(data: Json, run: str | None) -> None:
    """Set the address `src` of every image: in the run's folder, or with the data of the image."""
    turns = data["turns"]
    prompt = data["task"]["prompt"]
    messages = [*data["prompt"], *(prompt if isinstance(prompt, list) else [])]
    for turn in turns:
        messages += [*turn["replies"], *turn["tool_results"]]
    for image in (image for message in messages for image in message.get("images") or ()):
        image["src"] = (
            f"data:{MEDIA_TYPE};base64,{image.pop('data')}"
            if run is None
            else f"/api/runs/{quote(run, safe='')}/images/{quote(str(image['digest']), safe='')}"
        )


def contains_text(line: bytes, text: str) -> bool:
    """Return whether an episode's messages, calls, error or task id contain a text, ignoring case. The raw bytes are
    searched first, because that is fast. An invalid line is searched as plain text."""
    needle = text.lower()
    if NEVER_ESCAPED.fullmatch(needle) and needle.encode() not in line.lower():
        return False
    try:
        return any(needle in content.lower() for content in _searched_texts(read_line(line)))
    except READ_ERRORS:
        return needle in line.decode("utf-8", "replace").lower()


def _searched_texts(data: Json) -> Iterator[str]:
    yield from (str(data["task"]["id"]), str(data.get("error") or ""))
    replies = [message for turn in data["turns"] for message in (turn["message"], *turn["replies"])]
    for message in [*data["prompt"], *replies]:
        yield from (str(message.get(key) or "") for key in ("content", "reasoning_content"))
        for call in message.get("tool_calls") or ():
            yield from map(str, call.get("function", call).values())
