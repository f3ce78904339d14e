"""`tfactory tools`: list tools, call one, benchmark one."""

from __future__ import annotations

import asyncio
import inspect
import json
import statistics
import textwrap
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Parameter

from TrainingFactory.cli import show
from TrainingFactory.cli.display import Display
from TrainingFactory.cli.options import Count
from TrainingFactory.common.texts import escape_control
from TrainingFactory.types import ToolCall, ToolFailure, ToolResult, ToolSpec

FAILED_STATUS = 1
MAX_DESCRIPTION_CHARS = 80  # printed characters of a tool's description
WARMUP_CALLS = 5  # calls before the measurement
ToolFile = Annotated[
    str | None,
    Parameter(
        help="File that provides the tool: a config (YAML) with tools or an environment, a Python file, or an "
        "mcpServers file (JSON or .pydata). Without it, NAME is a built-in tool or FILE.py:FUNCTION."
    ),
]
Call = Callable[[], Awaitable[ToolResult]]

tools = App(name="tools", help="List tools, call one, benchmark one.")


@tools.command(name="list")
async def list_tools(
    config: Path | None = None, as_json: Annotated[bool, Parameter(name="--json")] = False
) -> None:
    """List the built-in tools, or MCP servers with their tools, arguments and options.

    ```
    tfactory tools list --config mcp.json
    ```

    Args:
        config: mcpServers file (JSON or .pydata). Default: list the built-in tools.
        as_json: Print JSON with the full schemas.
    """
    from TrainingFactory.common import catalog
    from TrainingFactory.tools import MCPTools

    if config is None:
        docs = [(name, inspect.getdoc(catalog.find("tool", name)) or "") for name in catalog.names("tool")]
        if as_json:
            print(json.dumps(dict(docs), indent=2, ensure_ascii=False))
        else:
            show.print_table([(name, _shorten(doc)) for name, doc in docs])
            show.note("list the tools of your MCP servers: tfactory tools list --config mcp.json")
        return
    async with MCPTools.load_from_config(config) as servers:
        if as_json:
            print(json.dumps([asdict(offer) for offer in servers.offers], indent=2, ensure_ascii=False))
            return
        sources = {
            name: f"{server.target} ({server.transport}, {server.settings.isolation})"
            for name, server in servers.configs.items()
        }
        if servers.named_tools:
            sources[""] = "built-in tools named in the file"
        for name, source in sources.items():
            offers = [offer for offer in servers.offers if offer.server == name]
            show.print_table([(name, f"{source}: {show.pluralize(len(offers), 'tool')}")])
            rows = []
            for offer in offers:
                spec = offer.spec
                options_text = _format_changed_options(offer.options)
                rows.append((spec.name, _format_arguments(spec), options_text, _shorten(spec.description)))
            show.print_columns(("tool", "arguments", "options", "description"), rows)


@tools.command(name="call")
async def call_tool(name: str, /, *arguments: str, config: ToolFile = None) -> int:
    """Call one tool and print its result as the model sees it.

    ```
    tfactory tools call calculator expression=2+3
    tfactory tools call mytools.py:lookup '{"city": "Oslo"}'
    tfactory tools call search query=tea --config configs/tiny_grpo.yaml
    tfactory tools call echo message=hello --config mcp.json
    ```

    Args:
        name: Tool name, or FILE.py:FUNCTION.
        arguments: Tool arguments as key=value, or one JSON object. Values of non-string parameters are parsed as JSON.
    """
    async with _prepare_call(config, name, arguments) as call:
        result = await call()
    if result.ok:
        print(escape_control(result.content))
    else:
        show.print_error(f"{name}: {result.error}: {result.content}")
    show.note(f"{result.seconds * 1000:.1f} ms")
    return 0 if result.ok else FAILED_STATUS


@tools.command(name="bench")
async def bench_tool(
    name: str, /, *arguments: str, config: ToolFile = None, calls: Count = 200, concurrency: Count = 16
) -> int:
    """Measure latency and throughput of one tool, with sequential and with concurrent calls.

    ```
    tfactory tools bench echo message=hello --config mcp.json --concurrency 64
    ```

    Args:
        name: Tool name, or FILE.py:FUNCTION. The tool is really called, so choose one without side effects.
        arguments: Tool arguments as key=value, or one JSON object.
        calls: Number of calls in each of the two measurements.
        concurrency: Number of concurrent calls in the second measurement.
    """
    rows = []
    async with _prepare_call(config, name, arguments) as call:
        result = await call()
        for _ in range(WARMUP_CALLS):
            await call()
        for num_workers in (1, concurrency):
            with Display() as display:
                rows.append(await _measure_calls(call, calls, num_workers, display))
    show.print_columns(("concurrency", "calls/s", "p50 ms", "p95 ms", "failed"), rows)
    if not result.ok:
        show.print_error(f"{name}: {result.error}: {result.content}")
    return 0 if result.ok else FAILED_STATUS


@asynccontextmanager
async def _prepare_call(path: str | None, name: str, arguments: tuple[str, ...]) -> AsyncIterator[Call]:
    """Open the tools and yield a function that makes the call."""
    # Imported here because it is slow: --help and invalid options should be answered at once.
    from TrainingFactory.assembly.tool_calls import open_tools

    async with open_tools(path, name) as executor:
        specs = {tool.spec.name: tool.spec for tool in executor.tools}
        if path is None and len(specs) == 1:  # NAME is FILE.py:FUNCTION or an alias of the tool
            name = next(iter(specs))
        parsed_arguments = _parse_arguments(specs.get(name, ToolSpec(name, "")), arguments)

        async def call() -> ToolResult:
            try:
                (result,) = await executor.batch_execute([ToolCall(name, parsed_arguments)])
            except ToolFailure as failure:  # the server session is lost; in a run this ends the episode
                result = ToolResult(str(failure), ok=False, error="tool_failure")
            return result

        yield call


async def _measure_calls(call: Call, num_calls: int, num_workers: int, display: Display) -> tuple[str, ...]:
    """Make `num_calls` calls from `num_workers` concurrent workers and return a row of the table."""
    remaining_calls = iter(range(num_calls))
    num_failed = 0
    call_seconds: list[float] = []

    async def make_calls() -> None:
        nonlocal num_failed
        for _ in remaining_calls:
            call_start_time = time.perf_counter()
            result = await call()
            call_seconds.append(time.perf_counter() - call_start_time)
            num_failed += not result.ok
            display.advance(f"calls, {num_workers} concurrent", num_calls)

    start_time = time.perf_counter()
    await asyncio.gather(*(make_calls() for _ in range(num_workers)))
    calls_per_second = num_calls / (time.perf_counter() - start_time)
    p95_seconds = sorted(call_seconds)[int(num_calls * 0.95)]
    latencies = (f"{statistics.median(call_seconds) * 1000:.1f}", f"{p95_seconds * 1000:.1f}")
    return str(num_workers), f"{calls_per_second:.0f}", *latencies, str(num_failed)


def _parse_arguments(spec: ToolSpec, arguments: tuple[str, ...]) -> dict[str, Any]:
    """Parse key=value arguments or one JSON object. The tool's own schema validates the values."""
    if len(arguments) == 1 and arguments[0].lstrip().startswith("{"):
        return json.loads(arguments[0])  # JSONDecodeError is a ValueError that names the position
    parsed_arguments = {}
    for argument in arguments:
        key, separator, value = argument.partition("=")
        if not separator:
            raise ValueError(f"{argument!r} is not key=value. Write NAME=VALUE, or one JSON object.")
        parsed_arguments[key] = value
        if spec.parameters.get("properties", {}).get(key, {}).get("type") != "string":
            with suppress(json.JSONDecodeError):
                parsed_arguments[key] = json.loads(value)
    return parsed_arguments


def _format_arguments(spec: ToolSpec) -> str:
    required_names = spec.parameters.get("required", [])
    properties: dict[str, Any] = spec.parameters.get("properties", {})
    return ", ".join(name if name in required_names else f"[{name}]" for name in properties)


def _format_changed_options(options: Any) -> str:
    """Return the options that differ from their defaults."""
    from TrainingFactory.tools import ToolOptions

    defaults = asdict(ToolOptions()) | {"server": options.server, "version": options.version}
    changed_options = {name: value for name, value in asdict(options).items() if value != defaults[name]}
    return " ".join(name if value is True else f"{name}={value}" for name, value in changed_options.items())


def _shorten(text: str) -> str:
    return textwrap.shorten(text.strip().partition("\n")[0], MAX_DESCRIPTION_CHARS, placeholder="...")
