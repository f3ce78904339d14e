"""The environment `web_page`: a model operates an HTML page in a headless Chromium by screenshots; the reward is the
state of the page."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field
from pydantic.dataclasses import dataclass as checked_dataclass

from TrainingFactory.common.images import read_image
from TrainingFactory.common.options import STRICT, NotNegative, Positive, Text, make_from
from TrainingFactory.envs.base import ForeignEnvironment, ToolEnvironment
from TrainingFactory.envs.builtin.drawing import make_blank_image
from TrainingFactory.envs.builtin.splits import generate_tasks
from TrainingFactory.envs.web_page.devtools import (
    BrowserLost,
    BrowserPage,
    ScriptError,
    SharedBrowser,
    find_browser,
)
from TrainingFactory.envs.web_page.pages import CELL, MARGIN, PageKind, make_page_task, render_page
from TrainingFactory.protocols import Episode, Tool, ToolSource
from TrainingFactory.tools import tool
from TrainingFactory.tools.threads import in_thread
from TrainingFactory.types import Image, Message, PlacedImage, Step, Task, ToolCall, ToolResult

AXIS_MAX = 1000
MAX_CHARS = 500  # characters of one call of type_text
SCROLL_FRACTION = 0.8  # of the window's height
Thousandth = Annotated[int, Field(ge=0, le=AXIS_MAX)]
Direction = Literal["up", "down"]


@checked_dataclass(config=STRICT, frozen=True)
class WebPageOptions:
    """`environment.options` of the environment `web_page`."""

    kinds: Annotated[list[PageKind], Field(min_length=1)] = Field(default_factory=lambda: ["button"])
    """Kinds of built-in pages, in turn: button, field, boxes, list."""
    page: Text | None = None
    """HTML file that all tasks show, instead of built-in pages. A task's column `page` replaces it."""
    width: Annotated[int, Field(ge=128, le=2048)] = 448
    """Width of the window and of the screenshots in pixels."""
    height: Annotated[int, Field(ge=128, le=2048)] = 320
    """Height of the window and of the screenshots in pixels."""
    browser: Text | None = None
    """Program of Chromium; null: the first of its usual names in PATH."""
    settle: NotNegative = 0.05
    """Seconds between an action and the screenshot."""
    call_timeout: Positive = 20.0
    """Maximum seconds for the browser to answer; then the episode ends as `tool_failure`."""
    max_pages: Annotated[int, Field(ge=1)] = 16
    """Maximum number of pages, and therefore of episodes, that are open at the same time."""
    blind: bool = False
    """Show an empty picture of the same size instead, to measure the success of a model that sees nothing."""


class WebPageEnvironment(ToolEnvironment):
    """One episode on one page, which `reset` opens and `close` closes."""

    system_prompt = (
        "You operate a web page, which is shown as a picture. Act by calling tools; x and y are thousandths of the "
        "picture's width and height, from its top left corner. Call done when the task is done."
    )
    options: ClassVar[WebPageOptions]
    pool: ClassVar[SharedBrowser]
    max_episodes: ClassVar[int]
    shows_images = True
    fork = None  # a page cannot be copied

    def __init__(self, task: Task, tools: Sequence[Tool | ToolSource] = ()) -> None:
        super().__init__(task, tools, timeout=8 * self.options.call_timeout)
        self._open_page: BrowserPage | None = None
        self._is_done = False

    @classmethod
    def tasks(cls, split: str, seed: int, count: int) -> Iterable[Task]:
        options = cls.options
        if options.page is not None:
            raise ValueError(
                "environment.options.page shows your own page: set data.tasks to a file of tasks with the columns "
                "prompt and check, a JavaScript expression that is true when the task is done"
            )

        def create(task_id: str, rng: random.Random) -> Task:
            kind = options.kinds[int(task_id.rpartition("-")[2]) % len(options.kinds)]
            return make_page_task(task_id, kind, rng, options.width, options.height)

        return islice(generate_tasks("web_page", split, seed, create, lambda task: str(task.metadata)), count)

    @classmethod
    def run_metrics(cls) -> dict[str, float]:
        return cls.pool.metrics()

    async def reset(self) -> list[Message]:
        options, html = self.options, await in_thread(self._read_html)
        self._open_page = await self.pool.open_page(html, options.width, options.height)
        *messages, message = await super().reset()
        return [*messages, dataclasses.replace(message, images=[PlacedImage(0, await self._take_image())])]

    def _read_html(self) -> str:
        if "widgets" in self.task.metadata:
            return render_page(self.task.metadata["widgets"])
        page_file = self.task.metadata.get("page") or self.options.page
        if page_file is None or not self.task.metadata.get("check"):
            raise ValueError(
                f"task {self.task.id} needs the column `check`, and an HTML file in `page` or environment.options.page"
            )
        try:
            return Path(page_file).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"task {self.task.id}: cannot read the page {page_file}: {error}") from error

    async def step(self, message: Message) -> Step:
        step = await super().step(message)
        return dataclasses.replace(step, done=step.done or self._is_done)

    async def reward(self, episode: Episode) -> float:
        """Return 1 if the task's expression is true in the page, else 0."""
        try:
            return float(await self._page.evaluate(self.task.metadata["check"]) is True)
        except ScriptError as error:
            raise ValueError(f"task {self.task.id}: its check failed in the page: {error}") from error

    async def close(self) -> None:
        page, self._open_page = self._open_page, None
        if page is not None:
            await self.pool.close_page(page)

    @tool(stateful=True)
    async def tap(self, x: Thousandth, y: Thousandth) -> ToolResult:
        """Tap a point."""
        width, height = self.options.width, self.options.height
        await self._page.tap(min(x * width / AXIS_MAX, width - 1), min(y * height / AXIS_MAX, height - 1))
        return await self._show_page()

    @tool(stateful=True)
    async def type_text(self, text: str) -> ToolResult:
        """Type text into the field that was tapped last."""
        if not text or len(text) > MAX_CHARS:
            return ToolResult(f"type_text takes 1 to {MAX_CHARS} characters.", ok=False, error="exception")
        await self._page.type_text(text)
        return await self._show_page()

    @tool(stateful=True)
    async def scroll(self, direction: Direction) -> ToolResult:
        """Scroll the page. down shows what is further down."""
        distance = SCROLL_FRACTION * self.options.height * (1 if direction == "down" else -1)
        await self._page.evaluate(f"window.scrollBy({{top: {json.dumps(distance)}, behavior: 'instant'}})")
        return await self._show_page()

    @tool(stateful=True)
    async def done(self) -> str:
        """End the task."""
        self._is_done = True
        return "The task has ended."

    @property
    def _page(self) -> BrowserPage:
        if self._open_page is None:
            raise BrowserLost("the episode has no page: it was not reset, or it is closed")
        return self._open_page

    async def _show_page(self) -> ToolResult:
        await asyncio.sleep(self.options.settle)
        return ToolResult("", images=[PlacedImage(0, await self._take_image())])

    async def _take_image(self) -> Image:
        image = await in_thread(read_image, await self._page.take_screenshot())
        return make_blank_image(image) if self.options.blind else image

    def expert(self) -> Iterator[Message]:
        """Yield the turns of the reference solution of a built-in page."""
        expected_state, scroll_top = self.task.metadata["expected"], 0.0
        widgets = {widget["name"]: widget for widget in self.task.metadata["widgets"]}
        max_scroll = max(widget["y"] for widget in widgets.values()) + CELL[1] - MARGIN - self.options.height
        for name in [*expected_state["fields"], *expected_state["ticked"], *expected_state["pressed"]]:
            y = widgets[name]["y"] + CELL[1] // 2 - MARGIN // 2
            while y - scroll_top >= self.options.height:
                yield _call_tool("scroll", direction="down")
                scroll_top = min(scroll_top + SCROLL_FRACTION * self.options.height, max_scroll)
            x = widgets[name]["x"] + CELL[0] // 2 - MARGIN // 2
            point = x * AXIS_MAX // self.options.width, int((y - scroll_top) * AXIS_MAX / self.options.height)
            yield _call_tool("tap", x=point[0], y=point[1])
            if name in expected_state["fields"]:
                yield _call_tool("type_text", text=expected_state["fields"][name])
        yield _call_tool("done")


class WebPageAdapter(ForeignEnvironment):
    """Adapter that makes the environment class for a config's `environment.options`."""

    def __init__(self, options: WebPageOptions) -> None:
        self.options = options

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> Self:
        return cls(make_from(WebPageOptions, options, "environment web_page"))

    def as_environment(self) -> type[WebPageEnvironment]:
        members = {
            "options": self.options,
            "pool": SharedBrowser(find_browser(self.options.browser), self.options.call_timeout),
            "max_episodes": self.options.max_pages,
        }
        return type("web_page", (WebPageEnvironment,), members)


def _call_tool(name: str, **arguments: Any) -> Message:
    return Message("assistant", tool_calls=[ToolCall(name, arguments)])
