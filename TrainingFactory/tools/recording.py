"""Writes down every tool call of a run, and serves the calls again with no tool called, whoever comes first."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from TrainingFactory.common.texts import describe, redacted
from TrainingFactory.types import ToolCall, ToolFailure, ToolResult, ToolSpec

CALLS, SPECS = "tool_calls.jsonl", "tools.json"
_ROW = ("step", "task", "member", "batch", "call", "tool", "arguments")
_USUAL = dataclasses.asdict(ToolResult(""))
_encoded = json.JSONEncoder(default=str).encode  # a reward may call a tool with any Python value
MAX_SHOWN = 300  # characters of a call in an error text
REMEDY = (
    "A replay needs the config, the model, the seed and the code of the recorded run, and "
    "sampling.deterministic=true in both"
)


class EpisodeKey(NamedTuple):
    """Whose calls they are. `step` is a number in training and a text elsewhere, such as eval-20."""

    step: int | str
    task: str
    member: int


class Place(NamedTuple):
    """Names a call of a run: fixed by what the model did, whoever comes first."""

    key: Hashable  # of the episode, as it was given to `attach`
    # Of a turn: calls of `batch_execute` before this one, and the number in the batch. Of calls that a reward or
    # another tool makes, which may come in any order: who makes them, and what is called how many times before.
    batch: int | str
    index: int | str  # type: ignore[assignment]  # tuples have a method of this name


class BrokenOff(Exception):
    """Says that a call was cancelled: nobody got an answer."""


class NotRecorded(ToolFailure):
    """Says that a replay was asked for a call that the recording does not have, or made one again with another result.
    It ends the episode, and then the run."""


class Recorder:
    """Serves the calls of the folder `replay`, if there is one; writes calls down once `record_to` says where."""

    def __init__(self, replay: Path | None = None) -> None:
        self._target: Path | None = None
        self._waiting: dict[Place, str] = {}
        self._replay, self._file = replay, None
        self._offsets: dict[Place, int] = {}  # where calls stand in the file: only that is kept in memory
        self._problem: NotRecorded | None = None
        if replay is not None:
            self._file = _opened(replay)
            offset = 0
            for number, line in enumerate(self._file, 1):
                if line.endswith(b"\n"):  # else half a line, from a process that was killed
                    # A step that was broken off and done again is there twice; the last one counts.
                    self._offsets[_place(line, f"{replay / CALLS}:{number}")] = offset
                offset += len(line)

    def record_to(self, folder: Path) -> None:
        self._target = folder / CALLS
        self._target.touch()  # a run that calls nothing can be replayed too

    def record(self, place: Place, call: ToolCall, result: ToolResult | ToolFailure | BrokenOff) -> None:
        """Keep a call until `commit`: of a batch of episodes that is broken off, nothing is to remain."""
        if self._target is not None:
            self._waiting[place] = _line(place, call, result)

    def replay(self, place: Place, call: ToolCall) -> ToolResult | None:
        """Answer as when it was recorded (a failure of the tools is raised again); None if nothing is replayed."""
        if self._file is None:
            return None
        offset = self._offsets.get(place)
        if offset is None:
            raise self._departure(place, call, "and no such call was recorded")
        self._file.seek(offset)
        row = json.loads(self._file.readline())
        if row["tool"] != call.name or _canonical(row["arguments"]) != _canonical(call.arguments):
            recorded = _shown(ToolCall(row["tool"], row["arguments"]))
            raise self._departure(place, call, f"but what was recorded there is {recorded}")
        if "result" not in row:
            raise ToolFailure(row["failure"]) if "failure" in row else BrokenOff
        return ToolResult(**row["result"])

    def compare(
        self, place: Place, call: ToolCall, recorded: ToolResult, made: ToolResult | ToolFailure
    ) -> None:
        """Check a method of the environment, which a replay runs again, against the recording."""
        said = [
            (result.ok, result.error, result.content, result.attachments)
            if isinstance(result, ToolResult)
            else (False, "failure", str(result), [])
            for result in (recorded, made)
        ]
        if said[0] != said[1]:
            before, now = (_cut(repr(content)) for _, _, content, _ in said)
            told = f"a method of the environment, which now answers {now}, and what was recorded is {before}"
            remedy = "such methods are run again, except pure ones: hand in as a tool what answers by chance"
            raise self._departure(place, call, f"{told}; {remedy}")

    def check(self) -> None:
        """End a run that has left its recording; whoever called the tool may have swallowed the error."""
        if self._problem is not None:
            raise ValueError(str(self._problem)) from self._problem

    def commit(self, wanted: Callable[[EpisodeKey], bool] = lambda _: True) -> None:
        """Append the calls of these episodes since the last time, in the order of their places: equal runs have equal
        files. Those of others wait on."""
        # A list first: other episodes may go on recording meanwhile.
        places = sorted((place for place in list(self._waiting) if wanted(_key(place))), key=_order)
        lines = [self._waiting.pop(place) for place in places]
        if self._target is not None and lines:
            with self._target.open("a", encoding="utf-8", newline="\n") as file:
                file.writelines(lines)

    def drop(self, unwanted: Callable[[EpisodeKey], bool]) -> None:
        """Forget the calls of these episodes, which are not learned from."""
        for place in list(self._waiting):
            if unwanted(_key(place)):
                del self._waiting[place]

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _departure(self, place: Place, call: ToolCall, difference: str) -> NotRecorded:
        step, task, member = _key(place)
        part = f"turn {place.batch}" if isinstance(place.batch, int) else place.batch
        where = f"step {step}, task {task}, member {member}, {part}, call {place.index}"
        text = f"replay of {self._replay}: {where}: the run calls {_shown(call)}, {difference}. {REMEDY}"
        self._problem = self._problem or NotRecorded(text)
        return NotRecorded(text)


def save_specs(folder: Path, specs: Iterable[ToolSpec]) -> None:
    """Write what the model is told; a run that is replayed reads it instead of asking a server."""
    rows = redacted([dataclasses.asdict(spec) for spec in specs])
    (folder / SPECS).write_text(json.dumps(rows, indent=1, ensure_ascii=False), encoding="utf-8")


@dataclass(slots=True)
class RecordedTool:
    """A tool of a recording: shown to the model; its calls are answered before they get here."""

    spec: ToolSpec

    async def run(self, arguments: dict[str, Any]) -> ToolResult:
        raise NotRecorded(f"{self.spec.name} is replayed from a recording and cannot be called")


def recorded_tools(folder: Path) -> Sequence[RecordedTool]:
    path = folder / SPECS
    try:
        return [RecordedTool(ToolSpec(**row)) for row in json.loads(path.read_text(encoding="utf-8"))]
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f"{path} is not the list of tools of a recording: {error}") from error


def _opened(folder: Path) -> BinaryIO:
    if not (folder / CALLS).is_file() or not (folder / SPECS).is_file():
        raise ValueError(
            f"{folder} has no recording of tool calls ({CALLS} and {SPECS}); record one with "
            "logging.record_tools=true"
        )
    return (folder / CALLS).open("rb")


def _key(place: Place) -> EpisodeKey:
    assert isinstance(place.key, EpisodeKey), "rollouts attach their executors with an EpisodeKey"
    return place.key


def _line(place: Place, call: ToolCall, result: ToolResult | ToolFailure | BrokenOff) -> str:
    values = (*_key(place), place.batch, place.index, call.name, call.arguments)
    row: dict[str, Any] = dict(zip(_ROW, values, strict=True))
    if isinstance(result, ToolFailure):
        row["failure"] = str(result)
    elif isinstance(result, BrokenOff):
        row["broken_off"] = True
    else:
        row["result"] = {"content": result.content} | {
            name: value for name, usual in _USUAL.items() if (value := getattr(result, name)) != usual
        }
    return _encoded(row) + "\n"


def _place(line: bytes, where: str) -> Place:
    """Read the place of one line of a recording; ValueError if it is none."""
    try:
        row = json.loads(line)
        return Place(EpisodeKey(row["step"], row["task"], row["member"]), row["batch"], row["call"])
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError(f"{where} is not a recorded call: {describe(error)}") from error


def _order(place: Place) -> tuple[Any, ...]:
    step, task, member = _key(place)
    return (str(step), task, member, isinstance(place.batch, str), place.batch, place.index)


def _canonical(arguments: Any) -> str:
    return json.dumps(arguments, sort_keys=True, default=str)


def _shown(call: ToolCall) -> str:
    return _cut(f"{call.name} {json.dumps(call.arguments, ensure_ascii=False, default=str)}")


def _cut(text: str) -> str:
    return text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "..."
