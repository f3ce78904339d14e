"""Views of an episode (a list row, or the full episode) made from a line of trajectories.jsonl without a Trajectory
object."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from urllib.parse import quote

from TrainingFactory.apps.views.files import ReadProblems, format_reason, read_json
from TrainingFactory.apps.views.shapes import EpisodeRow, EpisodeView, Json, Reward, TurnView
from TrainingFactory.common.image_parts import MEDIA_TYPE
from TrainingFactory.data.trajectories import trajectory_to_dict
from TrainingFactory.runs.folder import TRAJECTORIES
from TrainingFactory.types import Trajectory

# Most of a line is lists of numbers, of which views show only the length. Quotes in texts are escaped: no match there.
NUMBER_LISTS = re.compile(rb'"(new_ids|token_ids|logprobs|versions)": ?\[([^\]"]*)\]')
NEVER_ESCAPED = re.compile(r"[ !#-.0-\[\]-~]+")  # characters that JSON writes as they are
RESULT_FIELDS = ("content", "ok", "error", "cached", "seconds", "id", "images")
READ_ERRORS = (ValueError, LookupError, TypeError, AttributeError, OverflowError)


def read_line(line: bytes) -> Json:
    """Parse a line of trajectories.jsonl. Each list of numbers is replaced by its length."""
    episode = read_json(
        NUMBER_LISTS.sub(lambda m: b'"%s":%d' % (m[1], m[2].count(b",") + bool(m[2].strip())), line)
    )
    if not isinstance(episode, dict):
        raise ValueError("not a JSON object")
    return episode


def read_row(line: bytes, line_number: int) -> tuple[EpisodeRow, list[str]]:
    """Return the list row of a line, and the names of its failed tools. For an invalid line, return a row with the
    error."""
    try:
        return make_episode_row(read_line(line), line_number)
    except READ_ERRORS as error:
        problem = f"Line {line_number} of {TRAJECTORIES} is not an episode: {format_reason(error)}"
        return EpisodeRow(number=line_number, status="unreadable", error=problem[:300]), []


def make_episode_row(episode: Json, line_number: int) -> tuple[EpisodeRow, list[str]]:
    turns, reward, group = episode["turns"], episode.get("reward"), str(episode["group"])
    results = [result for turn in turns for result in _iterate_results(turn)]
    failed_tools = [name for name, result in results if not result.get("ok", True)]
    sampled_ids = [turn["completion"]["token_ids"] for turn in turns]
    step_text = group.partition("/")[0]
    row = EpisodeRow(
        number=line_number, step=int(step_text) + 1 if step_text.isdecimal() and len(step_text) < 16 else None,
        task=str(episode["task"]["id"]), group=group, member=int(episode["member"]) % (1 << 53),
        status=str(episode["status"]),
        reward=None if reward is None else float(reward["outcome"]) + sum(reward.get("steps", ())),
        turns=len(turns), tokens=sum(ids if isinstance(ids, int) else len(ids) for ids in sampled_ids) % (1 << 53),
        tool_calls=len(results), tool_failures=len(failed_tools), cached=sum(bool(r.get("cached")) for _, r in results),
        seconds=float(episode.get("seconds", 0.0)), error=episode.get("error") and str(episode["error"]),
        parent=None if episode.get("parent") is None else int(episode["parent"]) % (1 << 53),
        fork_turn=int(episode.get("fork_turn") or 0) % (1 << 53),
    )  # fmt: skip
    return row, sorted(set(failed_tools))


def _iterate_results(turn: Json) -> Iterator[tuple[str, Json]]:
    """Yield (tool name, result) for each result of a turn."""
    calls = turn["message"].get("tool_calls") or []
    call_names = [(call.get("id"), str(call.get("function", call).get("name"))) for call in calls]
    for index, result in enumerate(turn.get("tool_results") or ()):
        fallback_name = call_names[index][1] if index < len(call_names) else ""
        yield dict(call_names).get(result.get("id") or None) or fallback_name, result


def make_episode_view(
    source: bytes | Trajectory, line_number: int, run_name: str | None = None
) -> EpisodeView:
    """Return the view of an episode, without its token ids. `problem` names the parts that cannot be read. `run_name`
    is the run whose folder has the images; None: the source contains them."""
    line = json.dumps(trajectory_to_dict(source)).encode() if isinstance(source, Trajectory) else source
    view, problems = EpisodeView(row=read_row(line, line_number)[0]), ReadProblems()
    with problems.record_errors(f"line {line_number}"):
        episode_json = read_line(line)
        with problems.record_errors("images"):
            _set_image_sources(episode_json, run_name)
        with problems.record_errors("task"):
            view.task = dict(episode_json["task"])
        with problems.record_errors("prompt"):
            view.prompt = [dict(message) for message in episode_json["prompt"]]
        with problems.record_errors("tools"):
            specs = [spec.get("function", spec) for spec in episode_json["tools"]]
            view.tools = [spec["name"] for spec in specs]
            view.thousandths = [spec["name"] for spec in specs if _uses_thousandths(spec)]
        with problems.record_errors("reward"):
            if (reward := episode_json.get("reward")) is not None:
                view.reward = Reward(*(reward[key] for key in ("outcome", "steps", "parts")))
        with problems.record_errors("turns"):
            rewards = [] if view.reward is None else view.reward.steps
            for index, turn in enumerate(episode_json["turns"]):
                view.turns.append(_make_turn_view(turn, rewards[index] if index < len(rewards) else None))
            view.answer = str(view.turns[-1].message.get("content") or "") if view.turns else ""
    if problems.texts:
        view.problem = f"Some parts of this episode cannot be read: {'; '.join(problems.texts)}"[:300]
    return view


def _make_turn_view(turn: Json, step_reward: float | None) -> TurnView:
    completion = turn["completion"]
    results = [
        {key: result.get(key) for key in RESULT_FIELDS} | {"call": name}
        for name, result in _iterate_results(turn)
    ]
    return TurnView(
        message=turn["message"], replies=turn.get("replies", []), tool_results=results, step_reward=step_reward,
        signals=turn.get("signals", {}), finish=str(completion.get("finish")), tokens=completion["token_ids"],
        policy_version=completion.get("policy_version", 0), fold=turn.get("fold"), summary=bool(turn.get("summary")),
        prompt_tokens=turn["new_ids"] if turn.get("fold") else None,
    )  # fmt: skip


def _uses_thousandths(spec: Json) -> bool:
    properties = spec.get("parameters", {}).get("properties", {})
    schemas = [properties[name] for name in ("x", "y") if isinstance(properties.get(name), dict)]
    return len(schemas) == 2 and all(
        schema.get("maximum", schema.get("exclusiveMaximum")) == 1000 for schema in schemas
    )


def _set_image_sources(episode: Json, run_name: str | None) -> None:
    """Set the address `src` of every image: in the run's folder, or with the data of the image."""
    turns = episode["turns"]
    prompt = episode["task"]["prompt"]
    messages = [*episode["prompt"], *(prompt if isinstance(prompt, list) else [])]
    for turn in turns:
        messages += [*turn["replies"], *turn["tool_results"]]
    for image in (image for message in messages for image in message.get("images") or ()):
        image["src"] = (
            f"data:{MEDIA_TYPE};base64,{image.pop('data')}"
            if run_name is None
            else f"/api/runs/{quote(run_name, safe='')}/images/{quote(str(image['digest']), safe='')}"
        )


def contains_text(line: bytes, text: str) -> bool:
    """Return whether an episode's messages, calls, error or task id contain a text, ignoring case. The raw bytes are
    searched first, because that is fast. An invalid line is searched as plain text."""
    needle = text.lower()
    if NEVER_ESCAPED.fullmatch(needle) and needle.encode() not in line.lower():
        return False
    try:
        return any(needle in message_text.lower() for message_text in _iterate_texts(read_line(line)))
    except READ_ERRORS:
        return needle in line.decode("utf-8", "replace").lower()


def _iterate_texts(episode: Json) -> Iterator[str]:
    yield from (str(episode["task"]["id"]), str(episode.get("error") or ""))
    replies = [message for turn in episode["turns"] for message in (turn["message"], *turn["replies"])]
    for message in [*episode["prompt"], *replies]:
        yield from (str(message.get(key) or "") for key in ("content", "reasoning_content"))
        for call in message.get("tool_calls") or ():
            yield from map(str, call.get("function", call).values())
