"""Make the animation of README.md from the folders that `make demo` leaves: the terminal above, the web page below.

    pip install pillow
    make demo
    python -m benchmarks.readme_animation --runs runs

Replays the recorded GRPO run: every frame shows the progress display and the page of `tfactory ui`, with the metrics of
the run up to that step, in the tests' browser (`make servers`). The clock of the progress bar is that of the recording.
Writes docs/assets/demo-light.gif and docs/assets/demo-dark.gif.
"""

from __future__ import annotations

import argparse
import importlib
import io
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.terminal_theme import TerminalTheme

from tests.kits.browser import Browser, Tab
from tests.kits.page import serving
from TrainingFactory.cli.display import Display
from TrainingFactory.runs.folder import RunFolder, Status

ROOT = Path(__file__).parents[1]
RUN = "demo"
COLUMNS = 108
WIDTH = 900
TERMINAL_HEIGHT = 176
PAGE_HEIGHT = 636
LARGEST = 1_000_000  # bytes of one animation; both together stay below 2 MB
FRAME_MS = 300
LAST_FRAME_MS = 6000
TITLE = "$ make demo\nGRPO: the only reward is whether the answer is right\n"
PAGE = """<body style="margin:0;background:{background};border-bottom:1px solid {border}"><pre style="margin:10px 14px;
color:{foreground};font:13px/17px 'DejaVu Sans Mono',monospace">{code}</pre></body>"""


def terminal_theme(background: str, foreground: str, colours: Sequence[str]) -> TerminalTheme:
    def rgb(colour: str) -> tuple[int, int, int]:
        return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)

    table = [rgb(colour) for colour in colours]
    return TerminalTheme(rgb(background), rgb(foreground), table, table)


# Colours in the order of terminals: black, red, green, yellow, blue, magenta, cyan, white.
LIGHT = "#57606a #cf222e #1a7f37 #9a6700 #0969da #8250df #1b7c83 #57606a".split()
DARK = "#6e7681 #ff7b72 #3fb950 #d29922 #58a6ff #bc8cff #39c5cf #b1bac4".split()
THEMES = {
    "light": (terminal_theme("#f6f8fa", "#1f2328", LIGHT), "#d0d7de"),
    "dark": (terminal_theme("#0d1117", "#e6edf3", DARK), "#30363d"),
}


class Terminal:
    """The progress display of a recorded run, with the clock of the recording."""

    def __init__(self, rows: list[dict[str, Any]], report: dict[str, Any]) -> None:
        self.rows, self.report = rows, report
        self.now = self.started = rows[0]["time"] - rows[0].get("seconds", 0.0)

    def page(self, steps: int, theme: str) -> str:
        """Return an HTML page with the display after that number of steps; 0: before the first one."""
        self.now = self.started
        console = Console(
            record=True, force_terminal=True, width=COLUMNS, file=io.StringIO(), get_time=lambda: self.now
        )
        display = Display(console=console)
        display.task = "GRPO"
        display._find_task_id(display.task, len(self.rows))
        for row in self.rows[:steps]:
            self.now = row["time"]
            display.step(row["step"], len(self.rows), row)
        console.print(TITLE, end="", highlight=False)
        console.print(display._draw())
        if steps == len(self.rows):
            console.print("\n[bold]held-out tasks  before              after[/]", highlight=False)
            before, after = (self._success(self.report[name]) for name in ("before", "after"))
            console.print(f"success         {before:18}  {after}", highlight=False)
        colours, border = THEMES[theme]
        text = console.export_html(theme=colours, inline_styles=True, code_format="{code}")
        background, foreground = (
            colour.hex for colour in (colours.background_color, colours.foreground_color)
        )
        return PAGE.format(code=text, border=border, background=background, foreground=foreground)

    def _success(self, side: dict[str, float]) -> str:
        return f"{side['success']:.1%} ({side['low']:.0%} to {side['high']:.0%})"


def load_rows(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text("utf-8").splitlines()]


def capture(tab: Tab, html: str, path: Path) -> None:
    tab.run(f"document.open(); document.write({json.dumps(html)}); document.close()")
    tab.screenshot(path)


def pictures(recorded: Path, draw: Callable[[int, Path], None], work: Path, theme: str) -> list[Path]:
    """Capture the page of the run after every second step, and after the last. `draw` captures the terminal."""
    rows = load_rows(recorded)
    lines = (recorded / "metrics.jsonl").read_text("utf-8").splitlines(keepends=True)
    runs = work / theme / "runs"
    runs.mkdir(parents=True)
    run = RunFolder(runs / RUN)
    run.path.mkdir()
    for name in ("config.yaml", "environment.json"):
        shutil.copy(recorded / name, run.path / name)
    frames: list[Path] = []
    browser = Browser()
    try:
        with serving(runs) as page, browser.tab(page.entry, WIDTH, PAGE_HEIGHT, dark=theme == "dark") as tab:
            run.lock()
            for steps in [*range(2, len(rows), 2), len(rows)]:
                done = steps == len(rows)
                seconds = rows[steps - 1]["time"] - rows[0]["time"]
                run.write_status(Status("finished" if done else "running", steps, len(rows), None, seconds))
                (run.path / "metrics.jsonl").write_text("".join(lines[:steps]), encoding="utf-8")
                if not frames:
                    tab.goto(f"{page.url}/#/run/{RUN}")
                tab.wait(f"document.body.innerText.includes('{steps} / {len(rows)}')")
                time.sleep(0.5)  # the curves are drawn last
                frame = work / theme / f"{steps:03d}.png"
                tab.screenshot(frame)
                draw(steps, frame.with_name(f"terminal-{frame.name}"))
                frames.append(frame)
                print(f"{theme}: step {steps}", flush=True)
    finally:
        browser.close()
    return frames


def save(frames: list[Path], path: Path) -> None:
    """Write the animation: terminal above, page below."""
    image: Any = importlib.import_module("PIL.Image")
    whole = []
    for frame in frames:
        picture = image.new("RGB", (WIDTH, TERMINAL_HEIGHT + PAGE_HEIGHT))
        picture.paste(image.open(frame.with_name(f"terminal-{frame.name}")), (0, 0))
        picture.paste(image.open(frame), (0, TERMINAL_HEIGHT))
        whole.append(picture)
    palette = whole[-1].quantize(128)  # one palette for all frames, so that unchanged pixels cost nothing
    small = [picture.quantize(palette=palette, dither=image.Dither.NONE) for picture in whole]
    times = [FRAME_MS] * (len(small) - 1) + [LAST_FRAME_MS]
    path.parent.mkdir(parents=True, exist_ok=True)
    small[0].save(path, save_all=True, append_images=small[1:], duration=times, loop=0, optimize=True)
    size = path.stat().st_size
    print(f"{path}  {len(small)} frames, {size / 1000:.0f} kB", flush=True)
    if size > LARGEST:
        raise SystemExit(f"{path} has {size} bytes, more than {LARGEST}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder with the run `demo`")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "assets")
    arguments = parser.parse_args()
    recorded = arguments.runs / RUN
    terminal = Terminal(load_rows(recorded), json.loads((recorded / "report.json").read_text("utf-8")))
    with tempfile.TemporaryDirectory() as work:
        for theme in THEMES:
            browser = Browser()
            try:
                with browser.tab(width=WIDTH, height=TERMINAL_HEIGHT) as tab:

                    def draw(steps: int, path: Path, theme: str = theme, tab: Tab = tab) -> None:
                        capture(tab, terminal.page(steps, theme), path)

                    frames = pictures(recorded, draw, Path(work), theme)
            finally:
                browser.close()
            save(frames, arguments.out / f"demo-{theme}.gif")


if __name__ == "__main__":
    main()
