"""Lossless storage of trajectories as JSONL. Of a turn's prompt only the tokens that the previous turn does not have
are stored (`new_ids`), because each prompt repeats the whole conversation. Images are stored by digest in the folder
`images` beside the file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic_core import to_json

from TrainingFactory.common.image_tokens import VIRTUAL, find_images, from_disk_ids, load_picture, to_disk_ids
from TrainingFactory.common.images import ImageStore, images_from_rows, images_to_rows
from TrainingFactory.common.openai_format import (
    message_from_dict,
    message_to_dict,
    spec_from_dict,
    spec_to_dict,
)
from TrainingFactory.data.disk import name_file_on_error
from TrainingFactory.types import (
    Completion,
    Image,
    Message,
    PlacedImage,
    Reward,
    Task,
    ToolResult,
    Trajectory,
    Turn,
)

if TYPE_CHECKING:
    import numpy as np

_COMPLETION_FIELDS = [field.name for field in fields(Completion)]
_RESULT_FIELDS = [field.name for field in fields(ToolResult) if field.name != "images"]
_FORK_FIELDS = ("parent", "fork_turn")  # stored for forked episodes
_OPTIONAL_FIELDS = {
    "fold": None,
    "summary": False,
    "state": None,
    "masked": False,
}  # stored where they differ from these defaults
ENCODING_ERRORS = "surrogatepass"  # lone surrogates are written and read back unchanged


def save_trajectories(path: str | Path, trajectories: Iterable[Trajectory], append: bool = False) -> None:
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    mode, store = "a" if append else "w", ImageStore.for_file(path)
    with (
        name_file_on_error(path),
        path.open(mode, encoding="utf-8", errors=ENCODING_ERRORS, newline="\n") as file,
    ):
        for trajectory in trajectories:
            file.write(_serialize_checked(trajectory, store))


def check_tasks(tasks: Iterable[Task]) -> None:
    """Raise ValueError if an episode of one of the tasks could not be saved."""
    for task in tasks:
        if not isinstance(
            task.prompt, str
        ):  # its messages are JSON, and their images need not be encoded here
            task = replace(task, prompt="")
        _serialize_checked(Trajectory(task, group=""), None)


def _serialize_checked(trajectory: Trajectory, store: ImageStore | None) -> str:
    try:
        return _serialize_line(trajectory, store)
    except TypeError as error:
        task_id = trajectory.task.id
        raise ValueError(f"task {task_id}: answer and metadata must be JSON values ({error})") from error


def _serialize_line(trajectory: Trajectory, store: ImageStore | None) -> str:
    """Return the same line as `json.dumps`, but serialize the turns with pydantic, which is 20 times as fast."""
    row = trajectory_to_dict(trajectory, store)
    turns = row.pop("turns")
    turns_json = ""
    with suppress(ValueError):  # pydantic rejects lone surrogates
        turns_json = to_json(turns).decode() if all(map(_has_plain_values, trajectory.turns)) else ""
    turns_json = turns_json or json.dumps(turns, ensure_ascii=False)
    return f'{json.dumps(row, ensure_ascii=False)[:-1]}, "turns": {turns_json}}}\n'


def _has_plain_values(turn: Turn) -> bool:
    """Return whether both serializers agree on a turn, because it has no values of a tool's or environment's own
    types."""
    value_types = set(map(type, turn.signals)) | set(map(type, turn.signals.values()))
    return value_types <= {str, int, float} and not any(result.attachments for result in turn.tool_results)


def load_trajectories(
    path: str | Path, group_prefix: str = "", is_growing: bool = False
) -> Iterator[Trajectory]:
    """Yield the trajectories whose group name starts with `group_prefix`. `is_growing`: skip a partial last line."""
    store = ImageStore.for_file(Path(path))
    with Path(path).open(encoding="utf-8", errors=ENCODING_ERRORS) as file:
        for line_number, line in enumerate(file, 1):
            if is_growing and not line.endswith("\n"):
                return
            try:
                row = json.loads(line)
                if str(row["group"]).startswith(group_prefix):
                    yield trajectory_from_dict(row, store)
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{path}, line {line_number} is not a trajectory: {error!r}") from error


def task_to_dict(task: Task, store: ImageStore | None = None) -> dict[str, Any]:
    """Convert a task to JSON, with its images in the store, or in the JSON if there is no store."""
    prompt = (
        task.prompt if isinstance(task.prompt, str) else [_message_to_dict(m, store) for m in task.prompt]
    )
    return {"id": task.id, "prompt": prompt, "answer": task.answer, "metadata": task.metadata}


def task_from_dict(row: dict[str, Any], store: ImageStore | None = None) -> Task:
    """Restore a task from the output of `task_to_dict`."""
    prompt = row["prompt"]
    prompt = prompt if isinstance(prompt, str) else [_message_from_dict(message, store) for message in prompt]
    return Task(row["id"], prompt, row.get("answer"), row["metadata"])


def trajectory_to_dict(trajectory: Trajectory, store: ImageStore | None = None) -> dict[str, Any]:
    """Convert a trajectory to JSON, with its images in the store, or in the JSON if there is no store."""
    turns, previous_ids = [], []
    for index, turn in enumerate(trajectory.turns):
        row = _turn_to_dict(turn, previous_ids, store)
        if "image_tokens" in row:
            _add_prompt_images(row, trajectory, index, store)
        turns.append(row)
        previous_ids = turn.prompt_ids + turn.completion.token_ids
    reward = trajectory.reward
    return {
        "task": task_to_dict(trajectory.task, store),
        "group": trajectory.group,
        "member": trajectory.member,
        "status": trajectory.status,
        "reward": reward and {"outcome": reward.outcome, "steps": reward.steps, "parts": reward.parts},
        "error": trajectory.error,
        "seconds": trajectory.seconds,
        "tools": [spec_to_dict(spec) for spec in trajectory.tools],
        "prompt": [_message_to_dict(message, store) for message in trajectory.prompt],
        **({} if trajectory.parent is None else {name: getattr(trajectory, name) for name in _FORK_FIELDS}),
        **({} if trajectory.role is None else {"role": trajectory.role}),
        "turns": turns,
    }


def trajectory_from_dict(row: dict[str, Any], store: ImageStore | None = None) -> Trajectory:
    """Restore a trajectory from the output of `trajectory_to_dict`. `store` has its images, unless their data is in the
    JSON."""
    messages = [_message_from_dict(message, store) for message in row["prompt"]]
    images = _collect_images(messages)
    turns, previous_ids = [], []
    for turn_row in row["turns"]:
        turn = _turn_from_dict(turn_row, previous_ids, store, images)
        turns.append(turn)
        previous_ids = turn.prompt_ids + turn.completion.token_ids
    return Trajectory(
        task=task_from_dict(row["task"], store),
        group=row["group"],
        member=row["member"],
        prompt=messages,
        tools=[spec_from_dict(spec) for spec in row["tools"]],
        turns=turns,
        status=row["status"],
        reward=None if row.get("reward") is None else Reward(**row["reward"]),
        error=row.get("error"),  # readers of datasets drop null keys
        seconds=row["seconds"],
        parent=row.get("parent"),
        fork_turn=row.get("fork_turn") or 0,
        role=row.get("role"),
    )


def _message_to_dict(message: Message, store: ImageStore | None) -> dict[str, Any]:
    if not message.images:
        return message_to_dict(message)
    return message_to_dict(replace(message, images=[])) | {"images": images_to_rows(message.images, store)}


def _message_from_dict(row: dict[str, Any], store: ImageStore | None) -> Message:
    message = message_from_dict(row)
    if images := row.get("images"):
        message.images = images_from_rows(images, store)
    return message


def _result_to_dict(result: ToolResult, store: ImageStore | None) -> dict[str, Any]:
    row = {name: getattr(result, name) for name in _RESULT_FIELDS}
    if result.images:
        row["images"] = images_to_rows(result.images, store)
    return row


def _result_from_dict(row: dict[str, Any], store: ImageStore | None) -> ToolResult:
    result = ToolResult(**{name: value for name, value in row.items() if name != "images"})
    result.images = images_from_rows(row.get("images", ()), store)
    return result


@dataclass(slots=True, eq=False, repr=False)
class CompactTrajectory:
    """Compact form of a trajectory: ids and log-probs are arrays, and prompts hold only their new tokens."""

    without_turns: Trajectory  # without its turns
    turns: list[tuple[bool, np.ndarray, np.ndarray, np.ndarray, Turn]]

    def __repr__(self) -> str:
        """Return a text that depends on every token id, because the fingerprint of a run's data hashes it."""
        turns = [
            (*turn[:1], *(_make_ids_portable(ids).tobytes() for ids in turn[1:3]), turn[4])
            for turn in self.turns
        ]
        return f"Kept({self.without_turns!r}, {turns!r})"

    @classmethod
    def from_trajectory(cls, trajectory: Trajectory) -> CompactTrajectory:
        import numpy as np  # a quarter of a second that most commands and reward processes do without

        turns, previous_ids = [], []
        for turn in trajectory.turns:
            continues, new_ids = _find_new_ids(turn, previous_ids)
            completion = turn.completion
            previous_ids = turn.prompt_ids + completion.token_ids
            bare = replace(turn, prompt_ids=[], completion=replace(completion, token_ids=[], logprobs=[]))
            ids = np.asarray(completion.token_ids, np.int32)
            turns.append(
                (continues, np.asarray(new_ids, np.int32), ids, np.asarray(completion.logprobs), bare)
            )
        return cls(replace(trajectory, turns=[]), turns)

    def restore(self) -> Trajectory:
        turns, previous_ids = [], []
        for is_continuation, new_ids, token_ids, logprobs, stripped_turn in self.turns:
            completion = replace(
                stripped_turn.completion, token_ids=token_ids.tolist(), logprobs=logprobs.tolist()
            )
            prompt_ids = (previous_ids if is_continuation else []) + new_ids.tolist()
            turns.append(replace(stripped_turn, prompt_ids=prompt_ids, completion=completion))
            previous_ids = prompt_ids + completion.token_ids
        return replace(self.without_turns, turns=turns)

    @property
    def length(self) -> int:
        """Return the length of the longest prompt plus completion, in tokens."""
        turns = self.restore().turns
        return max((len(turn.prompt_ids) + len(turn.completion.token_ids) for turn in turns), default=0)


def _make_ids_portable(ids: np.ndarray) -> np.ndarray:
    """Convert image tokens to their form on disk, because their numbers in memory differ between processes."""
    import numpy as np

    return np.asarray(to_disk_ids(ids.tolist())[0], np.int32) if ids.size and ids.max() >= VIRTUAL else ids


def _find_new_ids(turn: Turn, previous_ids: list[int]) -> tuple[bool, list[int]]:
    """Return whether the turn's prompt continues the tokens of the turn before, and the prompt's new tokens."""
    is_continuation = bool(previous_ids) and turn.prompt_ids[: len(previous_ids)] == previous_ids
    return is_continuation, turn.prompt_ids[len(previous_ids) :] if is_continuation else turn.prompt_ids


def _turn_to_dict(turn: Turn, previous_ids: list[int], store: ImageStore | None) -> dict[str, Any]:
    is_continuation, new_ids = _find_new_ids(turn, previous_ids)
    completion = {name: getattr(turn.completion, name) for name in _COMPLETION_FIELDS}
    if completion["versions"] is None:  # `policy_version` applies to all tokens
        del completion["versions"]
    disk_ids, images = to_disk_ids(new_ids)
    row: dict[str, Any] = {
        "message": message_to_dict(turn.message),
        "replies": [_message_to_dict(reply, store) for reply in turn.replies],
        "tool_results": [_result_to_dict(result, store) for result in turn.tool_results],
        "signals": turn.signals,
        "continues": is_continuation,
        "new_ids": disk_ids,
    }
    if images:
        row["image_tokens"] = [[image.digest, image.num_tokens] for image in images]
    row["completion"] = completion
    for name, default in _OPTIONAL_FIELDS.items():
        if (value := getattr(turn, name)) != default:
            row[name] = value
    return row


def _turn_from_dict(
    row: dict[str, Any], previous_ids: list[int], store: ImageStore | None, images: dict[str, Image]
) -> Turn:
    """Restore a turn. `images` has the images of the messages before the turn, by digest; the images of the turn's
    prompt and replies are added to it."""
    prompt_images = images_from_rows(row.get("prompt_images", ()), store)
    images.update({image.digest: image for _, image in prompt_images})
    images_and_counts = [(images[digest], count) for digest, count in row.get("image_tokens", ())]
    new_ids = from_disk_ids(row["new_ids"], images_and_counts)
    turn = Turn(
        prompt_ids=previous_ids + new_ids if row["continues"] else new_ids,
        completion=Completion(**row["completion"]),
        message=message_from_dict(row["message"]),
        replies=[_message_from_dict(reply, store) for reply in row["replies"]],
        tool_results=[_result_from_dict(result, store) for result in row["tool_results"]],
        signals=row["signals"],
        **{name: row[name] for name in _OPTIONAL_FIELDS if name in row},
    )
    images.update(_collect_images(turn.replies))
    return turn


def _add_prompt_images(
    row: dict[str, Any], trajectory: Trajectory, turn_index: int, store: ImageStore | None
) -> None:
    """Store images of a prompt that no earlier message has, because an agent may start another conversation."""
    replies = [reply for turn in trajectory.turns[:turn_index] for reply in turn.replies]
    digests = {digest for digest, _ in row["image_tokens"]} - _collect_images(
        [*trajectory.prompt, *replies]
    ).keys()
    if digests:
        shown_images = [
            load_picture(tokens) for tokens in find_images(trajectory.turns[turn_index].prompt_ids)
        ]
        images = [PlacedImage(0, image) for image in shown_images if image.digest in digests]
        row["prompt_images"] = images_to_rows(images, store)


def _collect_images(messages: Iterable[Message]) -> dict[str, Image]:
    return {image.digest: image for message in messages for _, image in message.images}
