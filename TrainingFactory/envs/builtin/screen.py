"""The environment `screen`: a drawn screen of buttons and switches at random places. The model sees a picture and acts
by tapping. Nothing in the text says where to tap.

    Tap red.  [picture of 8 coloured buttons]     tap(cell=6) -> the screen closes; reward 1 if button 6 is red
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Annotated, Any, ClassVar, Literal, Self, TypedDict

from pydantic import Field
from pydantic.dataclasses import dataclass as checked_dataclass

from TrainingFactory.common.options import STRICT, make_from
from TrainingFactory.envs.base import ForeignEnvironment, ToolEnvironment
from TrainingFactory.envs.builtin.drawing import COLORS, GRAY, INK, PAPER, SHAPES, Canvas, make_blank_image
from TrainingFactory.envs.builtin.splits import generate_tasks
from TrainingFactory.protocols import Episode, Tool, ToolSource
from TrainingFactory.tools import tool
from TrainingFactory.types import Image, Message, PlacedImage, Step, Task, ToolCall, ToolResult

TaskKind = Literal["color", "shape", "label", "switch", "switches", "reveal"]
CLOSING_KINDS = ("color", "shape", "label")  # kinds whose screen closes at the first tap
BUTTON_LABELS = "ADD BUY CUT END FAX LOG MAP NEW OFF PAY RUN SET TOP USE VIP WEB ZIP".split()
NUMBERS = [str(number) for number in range(10, 100)]
WIDGET_SIZE = 12  # of a widget, in 16ths of its cell
AXIS_MAX = 1000
Thousandth = Annotated[int, Field(ge=0, lt=AXIS_MAX)]


@checked_dataclass(config=STRICT, frozen=True)
class ScreenOptions:
    """`environment.options` of the environment `screen`."""

    kinds: Annotated[list[TaskKind], Field(min_length=1)] = Field(default_factory=lambda: ["color"])
    """Kinds of tasks, in turn: color, shape, label, switch, switches, reveal."""
    columns: Annotated[int, Field(ge=2, le=8)] = 4
    """Buttons in a row."""
    rows: Annotated[int, Field(ge=2, le=8)] = 2
    """Rows of buttons."""
    widgets: Annotated[int, Field(ge=1)] | None = None
    """Number of cells with a button or switch; null: all. Fewer widgets make a task easier to learn."""
    cell: Annotated[int, Field(ge=16, le=256)] = 16
    """Width and height of a button's cell in pixels."""
    tap: Literal["cell", "point"] = "cell"
    """Arguments of `tap`: the number of a cell, from 1 in reading order, or x and y in thousandths of the picture."""
    blind: bool = False
    """Show an empty picture of the same size instead, to measure the success of a model that sees nothing."""


class Widget(TypedDict):
    """A button, or a switch with a state, in one cell of the screen."""

    cell: int  # from 0
    color: str
    shape: str
    text: str
    on: bool | None  # None: a button
    shift: tuple[int, int]  # from the corner of the cell, in 16ths of its size


def draw_screen(widgets: Sequence[Widget], options: ScreenOptions) -> Image:
    canvas = Canvas(options.columns * options.cell, options.rows * options.cell)
    unit_pixels = options.cell // 16
    size = WIDGET_SIZE * unit_pixels
    for widget in widgets:
        row, column = divmod(widget["cell"], options.columns)
        x, y = (
            column * options.cell + widget["shift"][0] * unit_pixels,
            row * options.cell + widget["shift"][1] * unit_pixels,
        )
        color, center = COLORS[widget["color"]], (x + size // 2, y + size // 2)
        if widget["on"] is not None:  # a switch: its knob is at the right and its groove dark if it is on
            groove_color, knob_shift = (INK, size // 2) if widget["on"] else (GRAY, 0)
            canvas.draw_box((x, y + size // 4), (size, size // 2), groove_color)
            canvas.draw_shape("square", (x + knob_shift, y + size // 4), size // 2, color)
        else:
            canvas.draw_shape(widget["shape"], (x, y), size, color)
        canvas.draw_text(widget["text"], center, unit_pixels, PAPER)
    return canvas.to_image()


class ScreenEnvironment(ToolEnvironment):
    """One screen of widgets. `ScreenOptions.kinds` describes the tasks and the actions that end them."""

    system_prompt = "Look, then tap."
    options: ClassVar[ScreenOptions] = ScreenOptions()
    shows_images = True

    def __init__(self, task: Task, tools: Sequence[Tool | ToolSource] = ()) -> None:
        super().__init__(task, tools)
        self.taps: list[int] = []  # cells

    @classmethod
    def tasks(cls, split: str, seed: int, count: int) -> Iterable[Task]:
        new_task = _TaskMaker(cls.options)
        return islice(generate_tasks("screen", split, seed, new_task, lambda task: str(task.metadata)), count)

    @classmethod
    def get_chance_rate(cls, task: Task) -> float:
        """Return the highest success rate of a policy that does not see the picture."""
        kind, num_cells = task.metadata["kind"], cls.options.columns * cls.options.rows
        return {"switches": 1 / math.comb(num_cells, 2), "reveal": 1 / len(NUMBERS)}.get(kind, 1 / num_cells)

    async def reset(self) -> list[Message]:
        *messages, last_message = await super().reset()
        return [*messages, dataclasses.replace(last_message, images=[PlacedImage(0, self.screenshot())])]

    async def step(self, message: Message) -> Step:
        step = await super().step(message)
        closes_screen = self.task.metadata["kind"] in CLOSING_KINDS
        return dataclasses.replace(step, done=step.done or (closes_screen and bool(self.taps)))

    async def fork(self) -> Self:
        clone = type(self)(self.task)
        clone.taps = list(self.taps)
        return clone

    def reward(self, episode: Episode) -> float:
        """Return 1 if the right widgets were tapped, and the number that appeared is the answer, else 0."""
        if self.task.answer is not None and episode.trajectory.answer.strip() != self.task.answer:
            return 0.0
        toggled_cells = {cell for cell in self.taps if self.taps.count(cell) % 2}  # a second tap undoes it
        return float(toggled_cells == set(self.task.metadata["targets"]))

    reward.runs_inline = True  # type: ignore[attr-defined]

    def screenshot(self) -> Image:
        widgets: list[Widget] = [dict(widget) for widget in self.task.metadata["widgets"]]  # type: ignore[misc]
        for widget in widgets:
            num_taps = self.taps.count(widget["cell"])
            if widget["on"] is not None:
                widget["on"] ^= num_taps % 2 == 1
            elif num_taps and self.task.metadata["kind"] == "reveal":
                widget["text"] = self.task.metadata["numbers"][widget["cell"]]
        image = draw_screen(widgets, self.options)
        return make_blank_image(image) if self.options.blind else image

    @tool(stateful=True)
    async def tap(self, cell: int) -> ToolResult:
        """Tap a cell."""
        num_cells = self.options.columns * self.options.rows
        if not 1 <= cell <= num_cells:
            return ToolResult(
                f"There is no cell {cell}. Cells are 1 to {num_cells}.", ok=False, error="exception"
            )
        return self._record_tap(cell - 1)

    def _record_tap(self, cell: int) -> ToolResult:
        self.taps.append(cell)
        return ToolResult("", images=[PlacedImage(0, self.screenshot())])

    def expert(self) -> Iterator[Message]:
        """Yield the turns of the reference solution."""
        yield from (self._make_tap_message(cell) for cell in self.task.metadata["targets"])
        if self.task.metadata["kind"] not in CLOSING_KINDS:
            yield Message("assistant", self.task.answer or "Done")

    def novice(self, rng: random.Random) -> Iterator[Message]:
        """Yield turns that tap random cells, so that a warm start on them leaves room for RL to improve."""
        yield self._make_tap_message(rng.randrange(self.options.columns * self.options.rows))
        if self.task.metadata["kind"] not in CLOSING_KINDS:
            yield Message("assistant", "Done" if self.task.answer is None else rng.choice(NUMBERS))

    def _make_tap_message(self, cell: int) -> Message:
        return Message("assistant", tool_calls=[ToolCall("tap", {"cell": cell + 1})])


class PointScreenEnvironment(ScreenEnvironment):
    """Screen environment whose taps have coordinates instead of cell numbers."""

    @tool(stateful=True)
    async def tap(self, x: Thousandth, y: Thousandth) -> ToolResult:  # type: ignore[override]
        """Tap a point, in thousandths of the picture from its left and from its top."""
        column, row = x * self.options.columns // AXIS_MAX, y * self.options.rows // AXIS_MAX
        return self._record_tap(row * self.options.columns + column)

    def _make_tap_message(self, cell: int) -> Message:
        row, column = divmod(cell, self.options.columns)
        x = (2 * column + 1) * AXIS_MAX // (2 * self.options.columns)
        y = (2 * row + 1) * AXIS_MAX // (2 * self.options.rows)
        return Message("assistant", tool_calls=[ToolCall("tap", {"x": x, "y": y})])


class ScreenAdapter(ForeignEnvironment):
    """Adapter that makes the environment class for a config's `environment.options`."""

    def __init__(self, options: ScreenOptions) -> None:
        self.options = options

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> Self:
        settings = make_from(ScreenOptions, options, "environment screen")
        if (settings.widgets or 0) > settings.columns * settings.rows:
            raise ValueError(
                f"environment.options.widgets={settings.widgets} is more than the {settings.columns} x {settings.rows} "
                "cells; make the screen larger"
            )
        if settings.widgets == 1 and "switches" in settings.kinds:
            raise ValueError(
                "environment.options.widgets=1 has too few widgets for the kind switches; set 2 or more"
            )
        return cls(settings)

    def as_environment(self) -> type[ScreenEnvironment]:
        base_class: Any = ScreenEnvironment if self.options.tap == "cell" else PointScreenEnvironment
        return type("screen", (base_class,), {"options": self.options})


class _TaskMaker:
    """Generator of tasks, which draws targets and layouts independently so that prompts do not reveal where to tap."""

    def __init__(self, options: ScreenOptions) -> None:
        self._options = options
        self._num_cells = options.columns * options.rows

    def __call__(self, task_id: str, rng: random.Random) -> Task:
        kind = self._options.kinds[int(task_id.rpartition("-")[2]) % len(self._options.kinds)]
        num_targets = 2 if kind == "switches" else 1
        colors = rng.sample(list(COLORS), len(COLORS))
        target_colors, other_colors = colors[:num_targets], colors[num_targets:]
        target_shape, *other_shapes = rng.sample(list(SHAPES), len(SHAPES))
        target_label, *other_labels = rng.sample(BUTTON_LABELS, len(BUTTON_LABELS))
        cells = rng.sample(range(self._num_cells), self._options.widgets or self._num_cells)
        target_cells = cells[:num_targets]
        switch_states = [rng.random() < 0.5 for _ in range(self._num_cells)]
        color_pool = target_colors + other_colors * self._num_cells  # different colors if there are enough
        widgets = []
        for index, cell in enumerate(cells):
            is_target = cell in target_cells
            widget = Widget(
                cell=cell,
                color=color_pool[index],
                shape="square",
                text="",
                on=None,
                shift=(rng.randint(1, 3), rng.randint(1, 3)),
            )
            if kind == "shape":  # others have the color or the shape, and never both
                widget["shape"] = target_shape if is_target else rng.choice([target_shape, *other_shapes])
                if not is_target and widget["shape"] != target_shape:
                    widget["color"] = rng.choice([*target_colors, *other_colors])
            elif kind == "label":
                widget["text"] = target_label if is_target else rng.choice(other_labels)
                widget["color"] = "black"
            elif kind in ("switch", "switches"):
                widget["on"] = False if is_target else switch_states[cell]
            widgets.append(widget)
        prompts = {
            "shape": f"Tap the {target_colors[0]} {target_shape}.",
            "label": f"Tap {target_label}.",
            "switch": f"Turn {target_colors[0]} on.",
            "switches": f"Turn {' and '.join(target_colors)} on.",
            "reveal": f"Tap {target_colors[0]}. Which number appears?",
        }
        widgets.sort(key=lambda widget: widget["cell"])  # an order that does not tell the target
        metadata: dict[str, Any] = {"kind": kind, "targets": sorted(target_cells), "widgets": widgets}
        if kind == "reveal":
            metadata["numbers"] = rng.sample(NUMBERS, self._num_cells)
        answer = metadata["numbers"][target_cells[0]] if kind == "reveal" else None
        return Task(task_id, prompts.get(kind, f"Tap {target_colors[0]}."), answer, metadata)
