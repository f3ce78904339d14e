"""Built-in pages with random layouts: buttons, text fields, boxes to tick, and a list longer than the window."""

from __future__ import annotations

import html
import json
import random
from typing import Any, Literal, TypedDict

from TrainingFactory.types import Task

PageKind = Literal["button", "field", "boxes", "list"]
WIDGET_NAMES = (
    "Add Buy Cut Edit Find Help Join Keep Load Move Next Open Pay Quit Run Save Tag Undo View Zoom".split()
)
FIELD_WORDS = "apple bread candle dragon engine forest garden harbor island jungle kettle lemon".split()
CELL = (110, 40)  # width and height in pixels
MARGIN = 10  # around a widget, in its cell


class PageWidget(TypedDict):
    """A widget of a page. Its position is in pixels from the page's top left corner."""

    kind: Literal["button", "field", "box"]
    name: str
    x: int
    y: int


def make_page_task(task_id: str, kind: PageKind, rng: random.Random, width: int, height: int) -> Task:
    """Return a task with a page of its own. The prompt does not say where the widgets are."""
    columns, rows = width // CELL[0], height // CELL[1]
    cells = rng.sample(range(columns * rows), columns * rows)
    names = rng.sample(WIDGET_NAMES, len(WIDGET_NAMES))
    if kind == "list":  # one column, twice as high as the window
        length = min(2 * rows, len(names))
        widgets = [_place("button", name, columns * row, columns) for row, name in enumerate(names[:length])]
        target_index = rng.randrange(length)
        prompt, expected_state = f"Press {names[target_index]}.", {"pressed": [names[target_index]]}
    elif kind == "boxes":
        targets = sorted(rng.sample(names[:6], 2))
        widgets = [_place("box", name, cell, columns) for name, cell in zip(names[:6], cells, strict=False)]
        prompt, expected_state = f"Tick {' and '.join(targets)}, and nothing else.", {"ticked": targets}
    elif kind == "field":
        word, field_names = rng.choice(FIELD_WORDS), names[:3]
        widgets = [
            _place("button" if name == names[3] else "field", name, cell, columns)
            for name, cell in zip(names[:4], cells, strict=False)
        ]
        prompt = f"Write {word} into {field_names[0]}, then press {names[3]}."
        expected_state = {"pressed": [names[3]], "fields": {field_names[0]: word}}
    else:
        widgets = [
            _place("button", name, cell, columns) for name, cell in zip(names[:8], cells, strict=False)
        ]
        prompt, expected_state = f"Press {names[0]}.", {"pressed": [names[0]]}
    page_state = {"pressed": [], "ticked": [], "fields": {}} | expected_state
    widgets.sort(key=lambda widget: (widget["y"], widget["x"]))  # an order that does not tell the target
    check = f"pageState() === {json.dumps(json.dumps(page_state, separators=(',', ':')))}"
    return Task(
        task_id, prompt, metadata={"kind": kind, "widgets": widgets, "expected": page_state, "check": check}
    )


def _place(kind: Any, name: str, cell: int, columns: int) -> PageWidget:
    row, column = divmod(cell, columns)
    return PageWidget(kind=kind, name=name, x=column * CELL[0] + MARGIN // 2, y=row * CELL[1] + MARGIN // 2)


def render_page(widgets: list[PageWidget]) -> str:
    widgets_html = "".join(_render_widget(widget) for widget in widgets)
    return (
        PAGE_TEMPLATE.replace("BODY", widgets_html)
        .replace("WIDTH", str(CELL[0] - MARGIN))
        .replace("HEIGHT", str(CELL[1] - MARGIN))
    )


def _render_widget(widget: PageWidget) -> str:
    name, style = html.escape(widget["name"]), f'style="left:{widget["x"]}px;top:{widget["y"]}px"'
    if widget["kind"] == "button":
        return f"<button {style}>{name}</button>"
    if widget["kind"] == "field":
        return f'<input {style} name="{name}" placeholder="{name}">'
    return f'<label {style}><input type="checkbox" name="{name}">{name}</label>'


PAGE_TEMPLATE = """<!doctype html><html><head><meta charset="utf-8"><title>page</title><style>
* { box-sizing: border-box; font: 15px sans-serif; }
body { margin: 0; background: white; }
button, input:not([type]), label { position: absolute; width: WIDTHpx; height: HEIGHTpx; }
label { padding: 4px; border: 1px solid silver; }
</style></head><body>BODY<script>
const pressed = [];
document.addEventListener("click", ({ target }) => target.matches("button") && pressed.push(target.textContent));
function pageState() {
  const ticked = [...document.querySelectorAll(":checked")].map((box) => box.name).sort();
  const filled = [...document.querySelectorAll("input:not([type])")].filter((field) => field.value);
  return JSON.stringify({ pressed, ticked, fields: Object.fromEntries(filled.map((f) => [f.name, f.value])) });
}
</script></body></html>
"""
