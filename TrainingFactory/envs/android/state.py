"""Device state of a task, as typed entries: `setup` brings it about before an episode, `checks` score it afterwards.

    {"prompt": "Turn Wi-Fi on", "setup": [{"type": "wifi", "enabled": false}],
     "checks": [{"type": "setting", "namespace": "global", "key": "wifi_on", "equals": ["1", "2"]}]}

Entries come from the task file alone. None of them is a shell command, and every value is quoted, so neither a model
nor an app on the screen can add one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, StringConstraints
from pydantic.dataclasses import dataclass

from TrainingFactory.common.options import STRICT, OptionError, make_named
from TrainingFactory.envs.android.adb import Device, DeviceUnavailable

MAX_FILE_BYTES = 65536  # bytes of a file that a check reads
Namespace = Literal["global", "secure", "system"]
Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.:-]+$")]
Package = Annotated[str, StringConstraints(pattern=r"^[A-Za-z]\w*(\.[A-Za-z]\w*)+$")]
Uri = Annotated[str, StringConstraints(pattern=r"^content://\S+$")]
Column = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_]\w*$")]
FilePath = Annotated[str, StringConstraints(pattern=r"^/\S.*$")]
Texts = Annotated[str | list[str], Field(min_length=1)]
RESUMED_ACTIVITY_PATTERN = re.compile(
    r"(?:topResumedActivity|mResumedActivity)[=:] ?ActivityRecord\{\S+ \S+ ([\w.]+)/([\w.$]+)"
)


@dataclass(config=STRICT, frozen=True)
class SettingCheck:
    """Check of a value of `settings get`."""

    namespace: Namespace
    key: Name
    equals: Texts

    async def is_satisfied(self, device: Device, answer: str | None) -> bool:
        result = await device.shell("settings", "get", self.namespace, self.key)
        return result.status == 0 and result.output.strip() in _as_list(self.equals)


@dataclass(config=STRICT, frozen=True)
class ContentCheck:
    """Check for a row with these values in a content provider. The device compares them, so the text of a row cannot
    imitate another row."""

    uri: Uri
    where: Annotated[dict[Column, Texts], Field(min_length=1)]
    exists: bool = True

    async def is_satisfied(self, device: Device, answer: str | None) -> bool:
        command = (
            "content",
            "query",
            "--uri",
            self.uri,
            "--projection",
            "_id",
            "--where",
            _make_sql_condition(self.where),
        )
        result = await device.shell(*command)
        if result.status != 0 or not result.output.startswith(("Row: 0 ", "No result found")):
            raise DeviceUnavailable(f"{device.serial} cannot query {self.uri}: {result.output[:200].strip()}")
        return result.output.startswith("Row: 0 ") == self.exists


@dataclass(config=STRICT, frozen=True)
class FileCheck:
    """Check of a file's existence and contents."""

    path: FilePath
    exists: bool = True
    equals: str | None = None
    contains: str | None = None

    async def is_satisfied(self, device: Device, answer: str | None) -> bool:
        result = await device.shell("head", "-c", str(MAX_FILE_BYTES), self.path)
        if result.status != 0 or not self.exists:
            return (result.status == 0) == self.exists
        if self.equals is not None and result.output.strip() != self.equals.strip():
            return False
        return self.contains is None or self.contains in result.output


@dataclass(config=STRICT, frozen=True)
class ForegroundCheck:
    """Check of the app, and optionally the activity, in the foreground."""

    package: Package | list[Package]
    activity: Name | None = None

    async def is_satisfied(self, device: Device, answer: str | None) -> bool:
        result = await device.shell("dumpsys", "activity", "activities")
        match = RESUMED_ACTIVITY_PATTERN.search(result.output)
        if match is None or match[1] not in _as_list(self.package):
            return False
        return self.activity is None or match[2].endswith(self.activity)


@dataclass(config=STRICT, frozen=True)
class AnswerCheck:
    """Check of the text that the model passed to the tool `answer`, ignoring case."""

    equals: Texts

    async def is_satisfied(self, device: Device, answer: str | None) -> bool:
        accepted_answers = {text.strip().casefold() for text in _as_list(self.equals)}
        return answer is not None and answer.strip().casefold() in accepted_answers


@dataclass(config=STRICT, frozen=True)
class WifiSetup:
    enabled: bool

    def list_commands(self) -> list[tuple[str, ...]]:
        return [("svc", "wifi", "enable" if self.enabled else "disable")]


@dataclass(config=STRICT, frozen=True)
class AirplaneSetup:
    enabled: bool

    def list_commands(self) -> list[tuple[str, ...]]:
        return [("cmd", "connectivity", "airplane-mode", "enable" if self.enabled else "disable")]


@dataclass(config=STRICT, frozen=True)
class SettingSetup:
    namespace: Namespace
    key: Name
    value: str

    def list_commands(self) -> list[tuple[str, ...]]:
        return [("settings", "put", self.namespace, self.key, self.value)]


@dataclass(config=STRICT, frozen=True)
class ContentSetup:
    """Delete the rows with these values."""

    uri: Uri
    where: Annotated[dict[Column, Texts], Field(min_length=1)]

    def list_commands(self) -> list[tuple[str, ...]]:
        return [("content", "delete", "--uri", self.uri, "--where", _make_sql_condition(self.where))]


@dataclass(config=STRICT, frozen=True)
class FileSetup:
    """Delete a file."""

    path: FilePath

    def list_commands(self) -> list[tuple[str, ...]]:
        return [("rm", "-f", self.path)]


@dataclass(config=STRICT, frozen=True)
class StopSetup:
    """Stop an app."""

    package: Package

    def list_commands(self) -> list[tuple[str, ...]]:
        return [("am", "force-stop", self.package)]


class TaskState:
    """The setup and the checks of one task."""

    CHECK_TYPES: ClassVar[dict[str, Any]] = {
        "setting": SettingCheck,
        "content": ContentCheck,
        "file": FileCheck,
        "foreground": ForegroundCheck,
        "answer": AnswerCheck,
    }
    SETUP_TYPES: ClassVar[dict[str, Any]] = {
        "wifi": WifiSetup,
        "airplane_mode": AirplaneSetup,
        "setting": SettingSetup,
        "delete_content": ContentSetup,
        "delete_file": FileSetup,
        "stop_app": StopSetup,
    }

    def __init__(self, task_id: str, metadata: Mapping[str, Any]) -> None:
        """Read the entries of a task. Raise ValueError with the task, the entry and the problem."""
        self.setup = _read_entries(task_id, metadata, "setup", self.SETUP_TYPES)
        self.checks = _read_entries(task_id, metadata, "checks", self.CHECK_TYPES)
        if not self.checks:
            raise ValueError(
                f"task {task_id} has no `checks`; add at least one, of type {', '.join(self.CHECK_TYPES)}"
            )

    async def prepare(self, device: Device) -> None:
        """Run the setup commands; raise DeviceUnavailable if one fails, because the task could not start correctly."""
        for command in (command for entry in self.setup for command in entry.list_commands()):
            result = await device.shell(*command)
            if result.status != 0:
                reason = (result.stderr or result.output).strip()[:200]
                raise DeviceUnavailable(
                    f"{device.serial}: setup command {' '.join(command[:3])} failed: {reason}"
                )

    async def score_checks(self, device: Device, answer: str | None) -> dict[str, float]:
        """Return the result of each check, 1 or 0, by the check's number and type."""
        type_names = {check_type: name for name, check_type in self.CHECK_TYPES.items()}
        return {
            f"{number}_{type_names[type(check)]}": float(await check.is_satisfied(device, answer))
            for number, check in enumerate(self.checks, 1)
        }


def _read_entries(task_id: str, metadata: Mapping[str, Any], key: str, types: Mapping[str, Any]) -> list[Any]:
    entries = metadata.get(key) or []
    if not isinstance(entries, list):
        raise ValueError(
            f"task {task_id}: `{key}` must be a list of entries such as {{type: {next(iter(types))}}}"
        )
    parsed_entries = []
    for number, entry in enumerate(entries, 1):
        try:
            parsed_entries.append(make_named(types, entry, "type", key))
        except OptionError as error:
            raise ValueError(f"task {task_id}, {key} entry {number}: {error}") from error
    return parsed_entries


def _make_sql_condition(where: Mapping[str, str | list[str]]) -> str:
    """Return an SQL condition; values are SQL strings, so their quotes are doubled."""
    conditions = []
    for column, values in where.items():
        quoted_values = ", ".join("'" + value.replace("'", "''") + "'" for value in _as_list(values))
        conditions.append(f"{column} IN ({quoted_values})")
    return " AND ".join(conditions)


def _as_list(value: str | list[str]) -> list[str]:
    return [value] if isinstance(value, str) else value
