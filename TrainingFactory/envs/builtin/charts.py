"""The environment `charts`: one question about one picture, a bar chart or a grid of shapes. There are no tools. The
answer is one word or number, and the text alone says nothing about it.

    Which bar is highest?  [bar chart]     C
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field
from pydantic.dataclasses import dataclass as checked_dataclass

from TrainingFactory.common.options import STRICT, make_from
from TrainingFactory.envs.base import ForeignEnvironment, ToolEnvironment
from TrainingFactory.envs.builtin.drawing import COLORS, GRAY, SHAPES, Canvas, make_blank_image
from TrainingFactory.envs.builtin.splits import generate_tasks
from TrainingFactory.types import Image, Message, PlacedImage, Task

ChartKind = Literal["highest", "value", "color", "count"]
BARS = "ABCDEF"
MAX_VALUE = 9
COLUMNS, ROWS = 6, 4  # of a grid
CELL_SIZE, SHAPE_SIZE, UNIT_HEIGHT = 16, 12, 6  # pixels of a cell or bar, of a shape, of a bar's unit


@checked_dataclass(config=STRICT, frozen=True)
class ChartOptions:
    """`environment.options` of the environment `charts`."""

    kinds: Annotated[list[ChartKind], Field(min_length=1)] = Field(
        default_factory=lambda: ["highest", "value", "color", "count"]
    )
    """Kinds of questions, in turn."""
    scale: Annotated[int, Field(ge=1, le=16)] = 1
    """Multiple of the smallest size of the pictures, 96 x 64 pixels."""
    blind: bool = False
    """Show an empty picture of the same size instead, to measure the success of a model that sees nothing."""


class ChartEnvironment(ToolEnvironment):
    """A question about a picture in the task's prompt, like a row of a dataset with images."""

    system_prompt = "Look, then answer with one word or number."
    options: ClassVar[ChartOptions] = ChartOptions()

    @classmethod
    def tasks(cls, split: str, seed: int, count: int) -> Iterable[Task]:
        def new_task(task_id: str, rng: random.Random) -> Task:
            kinds = cls.options.kinds
            return _make_task(task_id, kinds[int(task_id.rpartition("-")[2]) % len(kinds)], rng, cls.options)

        return islice(generate_tasks("charts", split, seed, new_task, lambda task: str(task.metadata)), count)

    @classmethod
    def get_chance_rate(cls, task: Task) -> float:
        """Return the highest success rate of a policy that does not see the picture."""
        kind = task.metadata["kind"]
        return {"highest": 1 / len(BARS), "color": 1 / len(COLORS)}.get(kind, 1 / MAX_VALUE)

    def expert(self) -> Iterable[Message]:
        """Yield the turns of the reference solution."""
        yield Message("assistant", str(self.task.answer))


class ChartAdapter(ForeignEnvironment):
    """Adapter that makes the environment class for a config's `environment.options`."""

    def __init__(self, options: ChartOptions) -> None:
        self.options = options

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> Self:
        return cls(make_from(ChartOptions, options, "environment charts"))

    def as_environment(self) -> type[ChartEnvironment]:
        return type("charts", (ChartEnvironment,), {"options": self.options})


def _make_task(task_id: str, kind: ChartKind, rng: random.Random, options: ChartOptions) -> Task:
    """Generate a task: first the answer, uniformly, then a picture with this answer."""
    metadata: dict[str, Any]
    if kind in ("highest", "value"):
        heights = [rng.randint(1, MAX_VALUE) for _ in BARS]
        bar = rng.randrange(len(BARS))
        if kind == "highest":
            heights[bar] = rng.randint(2, MAX_VALUE)
            heights = [h if i == bar else rng.randint(1, heights[bar] - 1) for i, h in enumerate(heights)]
        metadata = {"kind": kind, "heights": heights, "colors": [rng.choice(list(COLORS)) for _ in BARS]}
        answer = BARS[bar] if kind == "highest" else str(heights[bar])
        text = "Which bar is highest?" if kind == "highest" else f"How high is bar {BARS[bar]}, from 1 to 9?"
        image = _draw_bar_chart(metadata, options.scale)
    else:
        answer, *other_colors = rng.sample(list(COLORS), len(COLORS))
        row, column, num_shapes = rng.randrange(ROWS), rng.randrange(COLUMNS), rng.randint(1, MAX_VALUE)
        cells = rng.sample(range(COLUMNS * ROWS), num_shapes) if kind == "count" else [row * COLUMNS + column]
        distractors = other_colors if kind == "count" else list(COLORS)
        colors = [answer if i in cells else rng.choice(distractors) for i in range(COLUMNS * ROWS)]
        metadata = {"kind": kind, "colors": colors, "shapes": [rng.choice(list(SHAPES)) for _ in colors]}
        text = f"Which color is in row {row + 1}, column {column + 1}?"
        if kind == "count":
            text, answer = f"How many shapes are {answer}?", str(num_shapes)
        image = _draw_grid(metadata, options.scale)
    image = make_blank_image(image) if options.blind else image
    prompt = Message("user", text, images=[PlacedImage(0, image)])
    return Task(task_id, [prompt], answer, metadata)


def _draw_bar_chart(metadata: Mapping[str, Any], scale: int) -> Image:
    baseline = (MAX_VALUE + 1) * UNIT_HEIGHT - 4
    canvas = Canvas(len(BARS) * CELL_SIZE * scale, ROWS * CELL_SIZE * scale)
    for gridline in range(MAX_VALUE + 1):
        canvas.draw_box((0, (baseline - gridline * UNIT_HEIGHT) * scale), (canvas.width, scale), GRAY)
    for bar, (height, color) in enumerate(zip(metadata["heights"], metadata["colors"], strict=True)):
        left, top = (bar * CELL_SIZE + 2) * scale, (baseline - height * UNIT_HEIGHT) * scale
        canvas.draw_box((left, top), (SHAPE_SIZE * scale, height * UNIT_HEIGHT * scale), COLORS[color])
        canvas.draw_text(BARS[bar], (left + SHAPE_SIZE * scale // 2, (baseline + 4) * scale), scale)
    return canvas.to_image()


def _draw_grid(metadata: Mapping[str, Any], scale: int) -> Image:
    canvas = Canvas(COLUMNS * CELL_SIZE * scale, ROWS * CELL_SIZE * scale)
    for cell, (shape, color) in enumerate(zip(metadata["shapes"], metadata["colors"], strict=True)):
        row, column = divmod(cell, COLUMNS)
        corner = (column * CELL_SIZE + 2) * scale, (row * CELL_SIZE + 2) * scale
        canvas.draw_shape(shape, corner, SHAPE_SIZE * scale, COLORS[color])
    return canvas.to_image()
