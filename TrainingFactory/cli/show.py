"""Episodes, summaries and messages on a terminal. Texts of models and tools are shown as they are, never as
markup and never as terminal commands."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from TrainingFactory.services.reports.texts import clean, reward_text
from TrainingFactory.types import Message, ToolResult, ToolSpec, Trajectory, Turn

MAX_CHARS = 1500  # of one text; the saved file has it whole
PLAIN_WIDTH = 120  # columns where there is no terminal to ask
INTERRUPTED = 130  # exit status
STATUS_STYLES = {"done": "green", "max_turns": "yellow", "truncated": "yellow"}
ROLE_STYLES = {"system": "dim", "user": "cyan", "assistant": "bold", "tool": "magenta"}


def console(stderr: bool) -> Console:
    """Colours only on a terminal, and none where NO_COLOR is set."""
    stream = sys.stderr if stderr else sys.stdout
    return Console(stderr=stderr, highlight=False, width=None if stream.isatty() else PLAIN_WIDTH)


def count(number: int, thing: str) -> str:
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def note(text: str, screen: Console | None = None) -> None:
    """Print a line beside the results: what is going on, where a file is."""
    (screen or console(stderr=True)).print(Text(clean(text)), soft_wrap=True)


def fail(text: str) -> None:
    console(stderr=True).print(Text.assemble(("error: ", "bold red"), clean(text)), soft_wrap=True)


def table(rows: list[tuple[str, str]]) -> None:
    grid = Table.grid(padding=(0, 2))
    for name, value in rows:
        grid.add_row(Text(name, style="bold"), Text(clean(value)))
    console(stderr=False).print(grid)


def tool_rows(metrics: dict[str, float]) -> list[tuple[str, str]]:
    """How the tools did: all calls of the model, then every tool that was called, by the reward too."""
    calls = int(metrics["tool_calls"])
    succeeded = f", {metrics['tool_success']:.0%} succeeded" if calls else ""
    rows = [("tool calls", f"{calls}{succeeded}")]
    found = (name.removeprefix("tools/") for name in metrics if name.startswith("tools/"))
    names = [name.removesuffix("/calls") for name in found if name.endswith("/calls")]
    for name in names if len(names) > 1 or metrics["tools/calls"] != calls else []:
        rows.append((f"  {name}", tool_text(metrics, f"tools/{name}")))
    if len(names) == 1 and len(rows) == 1:
        rows[0] = ("tool calls", tool_text(metrics, f"tools/{names[0]}"))
    return rows


def tool_text(metrics: dict[str, float], prefix: str = "tools") -> str:
    text = f"{int(metrics[f'{prefix}/calls'])}, {metrics[f'{prefix}/success']:.0%} succeeded"
    if (median := metrics.get(f"{prefix}/p50")) is not None:
        text += f", {1000 * median:.3g} ms at the median"
    for figure, name in (
        ("schema_errors", "wrong arguments"),
        ("timeouts", "timed out"),
        ("unavailable", "with the server down"),
        ("cache_hits", "from the cache"),
        ("retries", "tried again"),
    ):
        if number := int(metrics.get(f"{prefix}/{figure}", 0)):
            text += f", {number} {name}"
    return text


def columns(names: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    grid = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in names:
        grid.add_column(Text(clean(name)), overflow="fold")
    for row in rows:
        grid.add_row(*(Text(clean(value)) for value in row))
    console(stderr=False).print(grid)


def episode(trajectory: Trajectory, title: str) -> None:
    """One episode as a conversation, with a line on how it ended."""
    screen = console(stderr=False)
    grid = _opened(screen, title, trajectory.prompt, trajectory.tools)
    for turn in trajectory.turns:
        _add_turn(grid, turn)
    screen.print(grid)
    screen.print(_ending(trajectory))
    screen.print()


def conversation(
    title: str, prompt: Sequence[Message], tools: Sequence[ToolSpec], said: Sequence[Message]
) -> None:
    """A conversation of a dataset."""
    screen = console(stderr=False)
    grid = _opened(screen, title, prompt, tools)
    for message in said:
        _add_message(grid, message)
    screen.print(grid)
    screen.print()


def _opened(screen: Console, title: str, prompt: Sequence[Message], tools: Sequence[ToolSpec]) -> Table:
    screen.print(Rule(Text(clean(title)), align="left"))
    grid = Table.grid(padding=(0, 1))
    grid.add_column(width=9)
    grid.add_column(overflow="fold")
    for message in prompt:
        _add_message(grid, message)
    if tools:
        listed = ", ".join(_signature(tool) for tool in tools)
        grid.add_row(Text("tools", style="dim"), Text(listed))
    return grid


def _add_message(grid: Table, message: Message) -> None:
    if message.reasoning:
        grid.add_row(Text("thinking", style="dim italic"), body(message.reasoning, "dim"))
    if message.content or not message.tool_calls:
        grid.add_row(*_message(message))
    for call in message.tool_calls:
        readable = f"{call.name} {json.dumps(call.arguments, ensure_ascii=False)}"
        text = body(call.error, "red") if call.error else body(readable)
        grid.add_row(Text("calls", style="bold yellow"), text)


def _add_turn(grid: Table, turn: Turn) -> None:
    _add_message(grid, turn.message)
    # Replies of the user's side carry no result; those of tools come in the order of their results.
    results = iter(turn.tool_results)
    for reply in turn.replies:
        result = next(results, None) if reply.role == "tool" else None
        grid.add_row(*_message(reply, result))


def _message(message: Message, result: ToolResult | None = None) -> tuple[Text, Text]:
    failed = result is not None and not result.ok
    label = Text(message.role, style=ROLE_STYLES[message.role])
    return label, body(message.content or "(no text)", "red" if failed else "")


def body(text: str, style: str = "") -> Text:
    """A text of anybody, cut if it is very long."""
    cut = f" [... {len(text) - MAX_CHARS} more characters]" if len(text) > MAX_CHARS else ""
    return Text(clean(text[:MAX_CHARS] + cut), style=style)


def _signature(tool: ToolSpec) -> str:
    parameters: dict[str, Any] = tool.parameters.get("properties", {})
    return clean(f"{tool.name}({', '.join(parameters)})")


def _ending(trajectory: Trajectory) -> Text:
    tokens = sum(len(turn.completion.token_ids) for turn in trajectory.turns)
    scored = clean(reward_text(trajectory.reward))
    line = Text.assemble(
        (trajectory.status, STATUS_STYLES.get(trajectory.status, "red")),
        f" | {scored} | {count(len(trajectory.turns), 'turn')}, {tokens} tokens, {trajectory.seconds:.1f} s",
    )
    if trajectory.error:
        line.append(clean(f"\n{trajectory.error}"), "red")
    return line
