"""The environment `android`: a model operates a device through its screen's elements or screenshots; the reward is the
state of the device."""

from __future__ import annotations

import asyncio
import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Annotated, Any, ClassVar, Literal, Self, get_args

from pydantic import Field
from pydantic.dataclasses import dataclass as checked_dataclass

from TrainingFactory.common.images import read_image
from TrainingFactory.common.options import STRICT, NotNegative, Text, make_from
from TrainingFactory.envs.android.adb import Device, DeviceUnavailable
from TrainingFactory.envs.android.farm import DeviceFarm, FarmOptions
from TrainingFactory.envs.android.screen import Element, Screen, ScreenError, parse_screen
from TrainingFactory.envs.android.state import Package, TaskState
from TrainingFactory.envs.android.tasks import TASK_MAKERS, TaskKind, generate_builtin_tasks, load_file_tasks
from TrainingFactory.envs.base import ForeignEnvironment, ToolEnvironment
from TrainingFactory.protocols import Episode, Tool, ToolSource
from TrainingFactory.tools import tool
from TrainingFactory.tools.threads import in_thread
from TrainingFactory.types import Message, PlacedImage, Reward, Step, Task, ToolResult

ToolName = Literal[
    "elements", "screenshot", "tap", "long_press", "swipe", "type_text", "key", "open_app", "wait", "answer"
]
TOOL_NAMES: tuple[ToolName, ...] = get_args(ToolName)
APP_PACKAGES = {"settings": "com.android.settings", "contacts": "com.android.contacts"}
PACKAGE_PATTERN = re.compile(r"[A-Za-z]\w*(\.[A-Za-z]\w*)+")
KEY_CODES = {
    "back": "KEYCODE_BACK",
    "home": "KEYCODE_HOME",
    "recents": "KEYCODE_APP_SWITCH",
    "enter": "KEYCODE_ENTER",
    "delete": "KEYCODE_DEL",
    "tab": "KEYCODE_TAB",
}
MAX_CHARS = 500  # characters of one call of type_text
LONG_PRESS_MS = "800"  # milliseconds
MAX_SCREEN_ATTEMPTS = 3  # to read a screen that moves
AXIS_MAX = 1000
ElementNumber = Annotated[int, Field(ge=1, description="number of the element")]
Thousandth = Annotated[int, Field(ge=0, le=AXIS_MAX)]
Direction = Literal["up", "down", "left", "right"]
Gesture = Literal["tap", "long_press"]
Point = tuple[int, int]  # in pixels of the device


@checked_dataclass(config=STRICT, frozen=True)
class AndroidOptions(FarmOptions):
    """`environment.options` of the environment `android`."""

    observation: Literal["elements", "screenshot", "both"] = "elements"
    """Observation after an action: the screen's elements as text, a screenshot, or both. With `screenshot`, its
    actions take points instead of elements. Screenshots need a model with images."""
    settle: NotNegative = 0.5
    """Seconds between an action and the reading of the screen."""
    tools: Annotated[list[ToolName], Field(min_length=1)] = Field(default_factory=lambda: list(TOOL_NAMES))
    """Tools that the model gets, except the one of `elements` and `screenshot` that does not fit the observation. Fewer
    tools make a shorter prompt."""
    apps: dict[str, Package] = Field(default_factory=lambda: dict(APP_PACKAGES))
    """Names for open_app, with their packages."""
    builtin: Annotated[list[TaskKind], Field(min_length=1)] = Field(default_factory=lambda: list(TASK_MAKERS))
    """Kinds of built-in tasks."""
    tasks: Text | None = None
    """YAML or JSONL file with tasks, instead of built-in ones."""
    heldout: Text | None = None
    """YAML or JSONL file with held-out tasks; required with `tasks` if the run evaluates."""


class AndroidEnvironment(ToolEnvironment):
    """One episode on one device, from the lease in `reset` to the release in `close`."""

    system_prompt = (
        "You operate an Android phone. Its screen is shown as numbered elements. Act by calling tools; element numbers "
        "refer to the screen that was shown last. Call answer when the task is done."
    )
    options: ClassVar[AndroidOptions]
    farm: ClassVar[DeviceFarm]
    max_episodes: ClassVar[int]  # a device plays one episode at a time
    fork = None  # a device cannot be copied

    def __init__(self, task: Task, tools: Sequence[Tool | ToolSource] = ()) -> None:
        # A tool makes several calls of adb, each with its own limit.
        super().__init__(task, tools, timeout=8 * self.options.call_timeout)
        self._task_state = TaskState(task.id, task.metadata)
        self._device_or_none: Device | None = None
        self.screen: Screen | None = None
        self._answer: str | None = None

    @classmethod
    def tasks(cls, split: str, seed: int, count: int) -> Iterable[Task]:
        options = cls.options
        if options.tasks is None:
            return islice(generate_builtin_tasks(list(options.builtin), split, seed), count)
        path = options.tasks if split == "train" else options.heldout
        if path is None:
            raise ValueError("set environment.options.heldout or data.heldout to a file of held-out tasks")
        return load_file_tasks(path, count)

    @classmethod
    def run_metrics(cls) -> dict[str, float]:
        """Return metrics of all episodes, for the log of a training step."""
        return cls.farm.metrics()

    async def reset(self) -> list[Message]:
        self._device_or_none = await self.farm.lease_device()
        await self._task_state.prepare(self._device_or_none)
        try:
            screen = await self._observe_screen()
        except ScreenError as error:
            raise DeviceUnavailable(f"{self._device_or_none.serial}: {error}") from error
        *earlier_messages, last_message = await super().reset()
        content = "\n\n".join(filter(None, (last_message.content, screen.content)))
        return [*earlier_messages, dataclasses.replace(last_message, content=content, images=screen.images)]

    async def step(self, message: Message) -> Step:
        step = await super().step(message)
        return dataclasses.replace(step, done=True) if self._answer is not None else step

    async def reward(self, episode: Episode) -> Reward:
        """Return 1 if all checks of the task pass on the device, else 0."""
        check_results = await self._task_state.score_checks(self._device, self._answer)
        return Reward(float(all(check_results.values())), parts=check_results)

    async def close(self) -> None:
        device, self._device_or_none = self._device_or_none, None
        if device is not None:
            self.farm.release_device(device)

    @tool
    async def elements(self) -> ToolResult:
        """Read the screen again."""
        return await self._observe_or_fail()

    @tool
    async def tap(self, element: ElementNumber) -> ToolResult:
        """Tap an element."""
        return await self._press_element(element, "tap")

    @tool
    async def long_press(self, element: ElementNumber) -> ToolResult:
        """Press an element for a second."""
        return await self._press_element(element, "long_press")

    @tool
    async def swipe(self, direction: Direction, element: ElementNumber | None = None) -> ToolResult:
        """Swipe over the screen or an element. up shows what is further down."""
        target_element = None if element is None else self._find_element(element)
        if element is not None and target_element is None:
            return self._reject_element(element)
        left, top, right, bottom = target_element.bounds if target_element else self._screen_bounds
        return await self._swipe(
            direction, ((left + right) // 2, (top + bottom) // 2), right - left, bottom - top
        )

    @tool
    async def type_text(self, text: str, element: ElementNumber | None = None) -> ToolResult:
        """Type text into an element, or where the cursor is."""
        target_element = None if element is None else self._find_element(element)
        if element is not None and target_element is None:
            return self._reject_element(element)
        return await self._type_text(text, None if target_element is None else target_element.center)

    @tool
    async def key(self, name: Literal["back", "home", "recents", "enter", "delete", "tab"]) -> ToolResult:
        """Press a key."""
        return await self._send_input("keyevent", KEY_CODES[name])

    @tool
    async def open_app(self, app: str) -> ToolResult:
        """Open an app by its name or package."""
        package = self.options.apps.get(app.strip().lower(), app.strip())
        if PACKAGE_PATTERN.fullmatch(package) is None:
            return _make_failure(
                f"There is no app of this name. Names: {', '.join(self.options.apps)}; or give a package."
            )
        launcher_args = ("-c", "android.intent.category.LAUNCHER", "1")
        result = await self._device.shell("monkey", "-p", package, *launcher_args)
        if result.status != 0 or "No activities found" in result.output:
            return _make_failure(f"{package} is not installed.")
        return await self._show_when_settled()

    @tool
    async def wait(self, seconds: Annotated[float, Field(ge=0, le=10)] = 1.0) -> ToolResult:
        """Wait, then read the screen."""
        await asyncio.sleep(seconds)
        return await self._observe_or_fail()

    @tool
    async def answer(self, text: str = "") -> str:
        """End the task, with the answer if it asks for one."""
        self._answer = text
        return "The task has ended."

    @property
    def _device(self) -> Device:
        if self._device_or_none is None:
            raise DeviceUnavailable("the episode has no device: it was not reset, or it is closed")
        return self._device_or_none

    @property
    def _screen_bounds(self) -> tuple[int, int, int, int]:
        assert self.screen is not None  # since `reset`
        return self.screen.bounds

    def _find_element(self, element_number: int) -> Element | None:
        return None if self.screen is None else self.screen.get_element(element_number)

    def _reject_element(self, element_number: int) -> ToolResult:
        num_elements = 0 if self.screen is None else len(self.screen.elements)
        return _make_failure(f"There is no element {element_number}. The elements are 1 to {num_elements}.")

    async def _press_element(self, element_number: int, gesture: Gesture) -> ToolResult:
        if (target_element := self._find_element(element_number)) is None:
            return self._reject_element(element_number)
        return await self._touch_point(target_element.center, gesture)

    async def _touch_point(self, point: Point, gesture: Gesture) -> ToolResult:
        coordinates = [str(coordinate) for coordinate in point]
        if gesture == "tap":
            return await self._send_input("tap", *coordinates)
        return await self._send_input("swipe", *coordinates, *coordinates, LONG_PRESS_MS)

    async def _swipe(self, direction: Direction, center: Point, width: int, height: int) -> ToolResult:
        """Swipe over half of the area with this center and size."""
        x_sign, y_sign = {"up": (0, -1), "down": (0, 1), "left": (-1, 0), "right": (1, 0)}[direction]
        dx, dy = x_sign * (width // 4), y_sign * (height // 4)
        (x, y), duration_ms = center, 300
        return await self._send_input("swipe", *map(str, (x - dx, y - dy, x + dx, y + dy, duration_ms)))

    async def _type_text(self, text: str, point: Point | None = None) -> ToolResult:
        if not text or len(text) > MAX_CHARS or not (text.isascii() and text.isprintable()):
            return _make_failure(
                f"type_text takes 1 to {MAX_CHARS} printable ASCII characters. For a new line: key enter."
            )
        if point is not None:
            await self._device.shell("input", "tap", *map(str, point))
        # Android reads %s as a space, so a literal %s is typed in two parts.
        for chunk in re.split(r"(?<=%)(?=s)", text):
            await self._device.shell("input", "text", chunk.replace(" ", "%s"))
        return await self._show_when_settled()

    async def _send_input(self, *arguments: str) -> ToolResult:
        result = await self._device.shell("input", *arguments)
        if result.status != 0:
            return _make_failure(
                f"The device rejected the action: {(result.stderr or result.output).strip()[:200]}"
            )
        return await self._show_when_settled()

    async def _show_when_settled(self) -> ToolResult:
        await asyncio.sleep(self.options.settle)
        return await self._observe_or_fail()

    async def _observe_or_fail(self) -> ToolResult:
        try:
            return await self._observe_screen()
        except ScreenError as error:
            return _make_failure(f"The screen cannot be read: {error}")

    async def _observe_screen(self) -> ToolResult:
        """Read the screen; retry, because Android refuses to dump a moving screen."""
        for attempt in range(MAX_SCREEN_ATTEMPTS):
            try:
                return await self._read_screen()
            except ScreenError:
                if attempt == MAX_SCREEN_ATTEMPTS - 1:
                    raise
                await asyncio.sleep(self.options.settle)
        raise AssertionError("unreachable")

    async def _read_screen(self) -> ToolResult:
        dump_result = await self._device.call("exec-out", "uiautomator", "dump", "/dev/tty")
        self.screen = parse_screen(dump_result.output)
        images = [await self._take_screenshot()] if self.options.observation == "both" else []
        return ToolResult(str(self.screen), images=images)

    async def _take_screenshot(self) -> PlacedImage:
        result = await self._device.call("exec-out", "screencap", "-p")
        try:
            return PlacedImage(0, await in_thread(read_image, result.stdout))
        except ValueError as error:
            raise ScreenError(f"screencap returned no picture: {error}") from error


class ScreenshotEnvironment(AndroidEnvironment):
    """An episode in which the model sees screenshots alone and acts on points."""

    system_prompt = (
        "You operate an Android phone. Its screen is shown as a picture. Act by calling tools; x and y are thousandths "
        "of the picture's width and height, from its top left corner. Call answer when the task is done."
    )
    elements = None  # type: ignore[assignment]

    def __init__(self, task: Task, tools: Sequence[Tool | ToolSource] = ()) -> None:
        super().__init__(task, tools)
        self._screenshot_size = (0, 0)  # of the last screenshot

    @tool
    async def screenshot(self) -> ToolResult:
        """Look at the screen again."""
        return await self._observe_or_fail()

    @tool
    async def tap(self, x: Thousandth, y: Thousandth) -> ToolResult:  # type: ignore[override]
        """Tap a point."""
        return await self._touch_point(self._to_pixel(x, y), "tap")

    @tool
    async def long_press(self, x: Thousandth, y: Thousandth) -> ToolResult:  # type: ignore[override]
        """Press a point for a second."""
        return await self._touch_point(self._to_pixel(x, y), "long_press")

    @tool
    async def swipe(  # type: ignore[override]
        self, direction: Direction, x: Thousandth = AXIS_MAX // 2, y: Thousandth = AXIS_MAX // 2
    ) -> ToolResult:
        """Swipe over half of the screen, through a point. up shows what is further down."""
        return await self._swipe(direction, self._to_pixel(x, y), *self._screenshot_size)

    @tool
    async def type_text(self, text: str) -> ToolResult:  # type: ignore[override]
        """Type text where the cursor is."""
        return await self._type_text(text)

    def _to_pixel(self, x: int, y: int) -> Point:
        """Return the pixel at a point of the last screenshot."""
        width, height = self._screenshot_size
        return min(x * width // AXIS_MAX, width - 1), min(y * height // AXIS_MAX, height - 1)

    async def _read_screen(self) -> ToolResult:
        screenshot = await self._take_screenshot()
        self._screenshot_size = screenshot.image.width, screenshot.image.height
        return ToolResult("", images=[screenshot])


class AndroidAdapter(ForeignEnvironment):
    """Adapter that makes the environment class for the devices in a config's `environment.options`."""

    def __init__(self, options: AndroidOptions) -> None:
        self.options = options

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> Self:
        if not options.get("devices"):
            raise ValueError(
                "environment android needs its devices: set environment.options.devices to serials of `adb devices`, "
                "such as [emulator-5554]"
            )
        return cls(make_from(AndroidOptions, options, "environment android"))

    def as_environment(self) -> type[ToolEnvironment]:
        disabled_tools: dict[str, Any] = dict.fromkeys(set(TOOL_NAMES) - set(self.options.tools))
        uses_points = self.options.observation == "screenshot"
        if set(self.options.tools) <= {"elements" if uses_points else "screenshot"}:
            raise ValueError(
                f"environment.options.tools={self.options.tools} leaves no tool with observation="
                f"{self.options.observation}; add others"
            )
        members = {
            "options": self.options,
            "shows_images": self.options.observation != "elements",
            "farm": DeviceFarm(self.options),
            "max_episodes": len(self.options.devices),
        }
        base_class: Any = ScreenshotEnvironment if uses_points else AndroidEnvironment
        return type("android", (base_class,), members | disabled_tools)


def _make_failure(message: str) -> ToolResult:
    return ToolResult(message, ok=False, error="exception")
