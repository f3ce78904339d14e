"""Recording of every tool call of a run, and replay of the results without calling a tool. Both identify a call by its
position in the episode, so the order in which episodes run does not matter."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from TrainingFactory.common.images import IMAGES_FOLDER, ImageStore, as_text, images_from_rows, images_to_rows
from TrainingFactory.common.texts import describe, redact_environment
from TrainingFactory.types import ToolCall, ToolFailure, ToolResult, ToolSpec

CALLS_FILE, SPECS_FILE = "tool_calls.jsonl", "tools.json"
_CALL_FIELDS = ("step", "task", "member", "batch", "call", "tool", "arguments")
_DEFAULTS = {name: value for name, value in dataclasses.asdict(ToolResult("")).items() if name != "images"}
_to_json = json.JSONEncoder(default=str).encode  # a reward may call a tool with any Python value
FORK_BATCH = "fork"  # batch of the row of a dropped fork
MAX_SHOWN_CHARS = 300  # characters of a call in an error text
MISMATCH_REMEDY = (
    "Use the config, model, seed and code of the recorded run, with sampling.deterministic=true in both runs"
)


class EpisodeKey(NamedTuple):
    """Identifies an episode of a run. `step` is a number in training and a text elsewhere, such as eval-20."""

    step: int | str
    task: str
    member: int


class CallPosition(NamedTuple):
    """Identifies a call of a run by its position in the episode, which does not depend on timing."""

    key: Hashable  # of the episode, as passed to `attach`
    # For a turn of the model: the number of earlier `batch_execute` calls, and the index in the batch. For calls by a
    # reward or another tool, whose order may vary: the caller's name, and "hash of the call#number of repetitions".
    batch: int | str
    index: int | str  # type: ignore[assignment]  # tuples have a method of this name


class RecordedCancellation(Exception):
    """Outcome of a recorded call that was cancelled before it returned a result. A replay raises it."""


class ReplayMismatch(ToolFailure):
    """Raised for a call that differs from the recording, or whose rerun returns another result. It ends the run."""


class Recorder:
    """Replays the tool calls recorded in `folder`, if there is one, and records calls after `record_to`."""

    def __init__(self, folder: Path | None = None) -> None:
        self._output_file: Path | None = None
        self._image_store: ImageStore | None = None  # of the recorded calls
        self._uncommitted_lines: dict[CallPosition, str] = {}
        self._replay_folder, self._replay_file = folder, None
        self._row_offsets: dict[CallPosition, int] = {}  # results are read on demand, to save memory
        self._mismatch: ReplayMismatch | None = None  # the first one
        if folder is not None:
            self._replay_file = _open_calls(folder)
            offset = 0
            for line_number, line in enumerate(self._replay_file, 1):
                if line.endswith(b"\n"):  # skip a partial last line, left by a killed process
                    # A step that was interrupted and repeated appears twice; the last one counts.
                    self._row_offsets[_decode_position(line, f"{folder / CALLS_FILE}:{line_number}")] = offset
                offset += len(line)

    def record_to(self, folder: Path) -> None:
        self._output_file = folder / CALLS_FILE
        self._image_store = ImageStore.for_file(self._output_file)
        self._output_file.touch()  # a run without tool calls can be replayed too

    def record(
        self, position: CallPosition, call: ToolCall, result: ToolResult | ToolFailure | RecordedCancellation
    ) -> None:
        """Buffer a call until `commit`, so that an interrupted batch of episodes leaves nothing in the file."""
        if self._output_file is not None:
            self._uncommitted_lines[position] = _encode_call(position, call, result, self._image_store)

    def replay(self, position: CallPosition, call: ToolCall) -> ToolResult | None:
        """Return the recorded result, or raise the recorded ToolFailure; None if this run is not a replay."""
        if self._replay_file is None:
            return None
        offset = self._row_offsets.get(position)
        if offset is None:
            raise self._make_mismatch(position, call, "but no such call was recorded")
        self._replay_file.seek(offset)
        row = json.loads(self._replay_file.readline())
        if row["tool"] != call.name or _canonical_json(row["arguments"]) != _canonical_json(call.arguments):
            recorded_call = _format_call(ToolCall(row["tool"], row["arguments"]))
            raise self._make_mismatch(position, call, f"but the recorded call is {recorded_call}")
        if "result" not in row:
            raise ToolFailure(row["failure"]) if "failure" in row else RecordedCancellation
        return _decode_result(row["result"], self._replay_folder)

    def record_dropped_fork(self, key: EpisodeKey, reason: str) -> None:
        """Record that this episode was not played because its environment could not be forked."""
        self.record(CallPosition(key, FORK_BATCH, ""), ToolCall(FORK_BATCH), ToolFailure(reason))

    def find_dropped_fork(self, key: EpisodeKey) -> str | None:
        """Return the reason if the recorded run dropped the fork with this key; None otherwise and outside replays."""
        offset = self._row_offsets.get(CallPosition(key, FORK_BATCH, ""))
        if self._replay_file is None or offset is None:
            return None
        self._replay_file.seek(offset)
        return json.loads(self._replay_file.readline())["failure"]

    def compare_rerun(
        self, position: CallPosition, call: ToolCall, recorded: ToolResult, rerun: ToolResult | ToolFailure
    ) -> None:
        """Raise ReplayMismatch if a method of the environment, which a replay runs again, returned another result."""
        outcomes = [
            (result.ok, result.error, as_text(result.content, result.images, repr), result.attachments)
            if isinstance(result, ToolResult)
            else (False, "failure", str(result), [])
            for result in (recorded, rerun)
        ]
        if outcomes[0] != outcomes[1]:
            recorded_text, rerun_text = (_shorten(repr(content)) for _, _, content, _ in outcomes)
            problem = (
                f"a method of the environment that now returns {rerun_text}; "
                f"the recorded result is {recorded_text}"
            )
            remedy = "A replay reruns such methods unless they are pure: make a random one a separate tool"
            raise self._make_mismatch(position, call, f"{problem}. {remedy}")

    def check_replay(self) -> None:
        """Raise ValueError if a call differed from the recording, because callers may swallow the ReplayMismatch."""
        if self._mismatch is not None:
            raise ValueError(str(self._mismatch)) from self._mismatch

    def commit(self, selects: Callable[[EpisodeKey], bool] = lambda _: True) -> None:
        """Append the uncommitted calls of the episodes whose key `selects` accepts, sorted by position so that equal
        runs have equal files. The calls of other episodes stay uncommitted."""
        # Copied first, because other episodes may record meanwhile.
        positions = [position for position in list(self._uncommitted_lines) if selects(_get_key(position))]
        lines = [self._uncommitted_lines.pop(position) for position in sorted(positions, key=_make_sort_key)]
        if self._output_file is not None and lines:
            with self._output_file.open("a", encoding="utf-8", newline="\n") as file:
                file.writelines(lines)

    def drop(self, selects: Callable[[EpisodeKey], bool]) -> None:
        """Discard the uncommitted calls of the episodes whose key `selects` accepts, which are not trained on."""
        for position in list(self._uncommitted_lines):
            if selects(_get_key(position)):
                del self._uncommitted_lines[position]

    def close(self) -> None:
        if self._replay_file is not None:
            self._replay_file.close()

    def _make_mismatch(self, position: CallPosition, call: ToolCall, difference: str) -> ReplayMismatch:
        step, task, member = _get_key(position)
        caller = f"turn {position.batch}" if isinstance(position.batch, int) else position.batch
        location = f"step {step}, task {task}, member {member}, {caller}, call {position.index}"
        problem = f"{location}: the run calls {_format_call(call)}"
        message = f"replay of {self._replay_folder}: {problem}, {difference}. {MISMATCH_REMEDY}"
        self._mismatch = self._mismatch or ReplayMismatch(message)
        return ReplayMismatch(message)


def save_specs(folder: Path, specs: Iterable[ToolSpec]) -> None:
    """Write the tool specs that the model sees. A replay reads them instead of connecting to servers."""
    rows = redact_environment([dataclasses.asdict(spec) for spec in specs])
    (folder / SPECS_FILE).write_text(json.dumps(rows, indent=1, ensure_ascii=False), encoding="utf-8")


@dataclass(slots=True)
class RecordedTool:
    """A tool of a recording. The executor replays its calls, so `run` is never called."""

    spec: ToolSpec

    async def run(self, arguments: dict[str, Any]) -> ToolResult:
        raise ReplayMismatch(f"cannot call {self.spec.name}: it exists only in the recording")


def load_recorded_tools(folder: Path) -> Sequence[RecordedTool]:
    path = folder / SPECS_FILE
    try:
        return [RecordedTool(ToolSpec(**row)) for row in json.loads(path.read_text(encoding="utf-8"))]
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f"{path}: cannot read the tool specs of the recording: {error}") from error


def _open_calls(folder: Path) -> BinaryIO:
    if not (folder / CALLS_FILE).is_file() or not (folder / SPECS_FILE).is_file():
        raise ValueError(
            f"{folder} has no recording of tool calls: {CALLS_FILE} or {SPECS_FILE} is missing; record one with "
            "logging.record_tools=true"
        )
    return (folder / CALLS_FILE).open("rb")


def _get_key(position: CallPosition) -> EpisodeKey:
    assert isinstance(position.key, EpisodeKey), "rollouts attach their executors with an EpisodeKey"
    return position.key


def _encode_call(
    position: CallPosition,
    call: ToolCall,
    result: ToolResult | ToolFailure | RecordedCancellation,
    image_store: ImageStore | None,
) -> str:
    field_values = (*_get_key(position), position.batch, position.index, call.name, call.arguments)
    row: dict[str, Any] = dict(zip(_CALL_FIELDS, field_values, strict=True))
    if isinstance(result, ToolFailure):
        row["failure"] = str(result)
    elif isinstance(result, RecordedCancellation):
        row["broken_off"] = True
    else:
        row["result"] = {"content": result.content} | {
            name: value for name, default in _DEFAULTS.items() if (value := getattr(result, name)) != default
        }
        if result.images:
            row["result"]["images"] = images_to_rows(result.images, image_store)
    return _to_json(row) + "\n"


def _decode_result(row: dict[str, Any], folder: Path | None) -> ToolResult:
    result = ToolResult(**{name: value for name, value in row.items() if name != "images"})
    image_store = None if folder is None else ImageStore(folder / IMAGES_FOLDER)
    result.images = images_from_rows(row.get("images", ()), image_store)
    return result


def _decode_position(line: bytes, location: str) -> CallPosition:
    """Return the position of the call in one line of a recording; raise ValueError if the line is invalid."""
    try:
        row = json.loads(line)
        return CallPosition(EpisodeKey(row["step"], row["task"], row["member"]), row["batch"], row["call"])
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError(f"{location}: invalid recorded call: {describe(error)}") from error


def _make_sort_key(position: CallPosition) -> tuple[Any, ...]:
    step, task, member = _get_key(position)
    return (str(step), task, member, isinstance(position.batch, str), position.batch, position.index)


def _canonical_json(arguments: Any) -> str:
    return json.dumps(arguments, sort_keys=True, default=str)


def _format_call(call: ToolCall) -> str:
    return _shorten(f"{call.name} {json.dumps(call.arguments, ensure_ascii=False, default=str)}")


def _shorten(text: str) -> str:
    return text if len(text) <= MAX_SHOWN_CHARS else text[:MAX_SHOWN_CHARS] + "..."
