"""Terminal output: episodes, tables and messages. Texts of models and tools are printed literally: rich markup is not
interpreted, and terminal control characters are escaped."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from TrainingFactory.common.texts import escape_control, pluralize
from TrainingFactory.data.samples import turn_spans
from TrainingFactory.runs.episode_texts import format_reward, list_message_lines
from TrainingFactory.types import Message, ToolSpec, Trajectory

MAX_CHARS = 1500  # printed characters of one text; saved files are not truncated
PLAIN_WIDTH = 120  # columns when the output is not a terminal
INTERRUPTED_STATUS = 130  # exit status
STATUS_STYLES = {"done": "green", "max_turns": "yellow", "truncated": "yellow"}
ROLE_STYLES = {
    "system": "dim", "user": "cyan", "assistant": "bold", "tool": "magenta", "calls": "bold yellow"
}  # fmt: skip


def make_console(stderr: bool) -> Console:
    """Return a console that uses colours only on a terminal, and none if NO_COLOR is set."""
    stream = sys.stderr if stderr else sys.stdout
    return Console(stderr=stderr, highlight=False, width=None if stream.isatty() else PLAIN_WIDTH)


def note(text: str, console: Console | None = None) -> None:
    """Print a progress message, hint or warning to stderr, apart from the results on stdout."""
    (console or make_console(stderr=True)).print(Text(escape_control(text)), soft_wrap=True)


def print_error(text: str) -> None:
    make_console(stderr=True).print(
        Text.assemble(("error: ", "bold red"), escape_control(text)), soft_wrap=True
    )


def write_page(path: Path, page: str) -> None:
    """Write an HTML page and print its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page, encoding="utf-8")
    note(f"wrote {path}")


def print_table(rows: list[tuple[str, str]]) -> None:
    grid = Table.grid(padding=(0, 2))
    for name, value in rows:
        grid.add_row(Text(name, style="bold"), Text(escape_control(value)))
    make_console(stderr=False).print(grid)


def make_tool_rows(metrics: dict[str, float]) -> list[tuple[str, str]]:
    """Return table rows for the model's tool calls, then one for each tool that the model or the reward called."""
    num_calls = int(metrics["tool_calls"])
    success_note = f", {metrics['tool_success']:.0%} succeeded" if num_calls else ""
    rows = [("tool calls", f"{num_calls}{success_note}")]
    for name in re.findall(r"^tools/(.+)/calls$", "\n".join(metrics), re.MULTILINE):
        rows.append((f"  {name}", format_tool_stats(metrics, f"tools/{name}")))
    return rows


def format_tool_stats(metrics: dict[str, float], prefix: str = "tools") -> str:
    text = f"{int(metrics[f'{prefix}/calls'])}, {metrics[f'{prefix}/success']:.0%} succeeded"
    if (median := metrics.get(f"{prefix}/p50")) is not None:
        text += f", {1000 * median:.3g} ms at the median"
    for counter_name in ("schema_errors", "timeouts", "unavailable", "cache_hits", "retries"):
        if count := int(metrics.get(f"{prefix}/{counter_name}", 0)):
            text += f", {count} {counter_name.replace('_', ' ')}"
    return text


def print_columns(names: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table with a header row."""
    grid = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in names:
        grid.add_column(Text(escape_control(name)), overflow="fold")
    for row in rows:
        grid.add_row(*(Text(escape_control(cell)) for cell in row))
    make_console(stderr=False).print(grid)


def make_message_grid() -> Table:
    """Return an empty borderless table with the columns role and text."""
    rows = Table.grid(padding=(0, 1))
    rows.add_column(width=9)
    rows.add_column(overflow="fold")
    return rows


def print_episode(trajectory: Trajectory, title: str) -> None:
    """Print one episode as a conversation, followed by its status, reward and length."""
    rows = _make_prompt_rows(trajectory.prompt, trajectory.tools)
    row_index = 0
    for turn, span in zip(trajectory.turns, turn_spans(trajectory), strict=True):
        if span.row > row_index:  # an external agent may hold several conversations in one episode
            row_index = span.row
            fold_note = f", folded: {turn.fold}" if turn.fold else ""
            length_note = f"({len(turn.prompt_ids)} tokens{fold_note})"
            rows.add_row(Text(f"row {row_index + 1}", style="dim"), Text(length_note, style="dim"))
        if turn.summary:
            rows.add_row(
                Text("summary", style="dim"), Text("the model summarises the conversation", style="dim")
            )
        _add_message(rows, turn.message)
        # User replies have no result; tool replies are in the order of their results.
        results = iter(turn.tool_results)
        for reply in turn.replies:
            result = next(results, None) if reply.role == "tool" else None
            _add_message(rows, reply, is_failed=result is not None and not result.ok)
    _print_rows(title, rows, _format_ending(trajectory))


def print_conversation(title: str, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> None:
    """Print a conversation from a dataset."""
    _print_rows(title, _make_prompt_rows(messages, tools))


def _make_prompt_rows(prompt: Sequence[Message], tools: Sequence[ToolSpec]) -> Table:
    rows = make_message_grid()
    for message in prompt:
        _add_message(rows, message)
    if tools:
        # Schemas that API clients sent are not validated: `properties` may be anything.
        schemas = [(tool.name, tool.parameters.get("properties")) for tool in tools]
        names = [f"{name}({', '.join(keys) if isinstance(keys, dict) else ''})" for name, keys in schemas]
        rows.add_row(Text("tools", style="dim"), Text(escape_control(", ".join(names))))
    return rows


def _add_message(rows: Table, message: Message, is_failed: bool = False) -> None:
    if message.reasoning:
        rows.add_row(Text("thinking", style="dim italic"), escape_text(message.reasoning, "dim"))
    parse_errors = {call.error for call in message.tool_calls}
    for role, text in list_message_lines(message):
        style = "red" if is_failed or text in parse_errors else ""
        rows.add_row(Text(role, style=ROLE_STYLES[role]), escape_text(text or "(no text)", style))


def _print_rows(title: str, rows: Table, *footers: Text) -> None:
    console = make_console(stderr=False)
    console.print(Rule(Text(escape_control(title)), align="left"))
    for block in (rows, *footers, ""):
        console.print(block)


def escape_text(text: str, style: str = "") -> Text:
    """Return an untrusted text, escaped and truncated to MAX_CHARS."""
    suffix = f" [... {len(text) - MAX_CHARS} more characters]" if len(text) > MAX_CHARS else ""
    return Text(escape_control(text[:MAX_CHARS] + suffix), style=style)


def _format_ending(trajectory: Trajectory) -> Text:
    tokens = sum(turn.sampled_tokens for turn in trajectory.turns)
    reward = escape_control(format_reward(trajectory.reward))
    line = Text.assemble(
        (trajectory.status, STATUS_STYLES.get(trajectory.status, "red")),
        f" | {reward} | {pluralize(len(trajectory.turns), 'turn')}, {tokens} tokens, {trajectory.seconds:.1f} s",
    )
    if trajectory.error:
        line.append(escape_control(f"\n{trajectory.error}"), "red")
    return line
