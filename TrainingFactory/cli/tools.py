"""`tfactory tools`: what servers offer, one call, and how fast calls are."""

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
from TrainingFactory.common.texts import clean
from TrainingFactory.types import ToolCall, ToolFailure, ToolResult, ToolSpec

TOOL_FAILED = 1
MAX_BRIEF = 80  # characters of a description
WARM_UP = 5  # calls before the clock starts
Config = Annotated[
    str | None,
    Parameter(
        help="What offers the tool: a config (YAML) with tools or an environment, a Python file, or an mcpServers "
        "file (JSON or .pydata). Without it, NAME is a tool that comes along, or FILE.py:FUNCTION."
    ),
]
Call = Callable[[], Awaitable[ToolResult]]

tools = App(name="tools", help="Look at tools, call one, measure one.")


@tools.command(name="list")
async def list_tools(
    config: Path | None = None, as_json: Annotated[bool, Parameter(name="--json")] = False
) -> None:
    """Show servers, their tools, the arguments of each and the options it has.

    ```
    tfactory tools list --config mcp.json
    ```

    Args:
        config: The mcpServers file (JSON or .pydata). Without one, the tools that come with
            TrainingFactory.
        as_json: Print JSON, with the whole schemas.
    """
    from TrainingFactory.common import catalog
    from TrainingFactory.tools import MCPTools

    if config is None:
        known = [(name, inspect.getdoc(catalog.find("tool", name)) or "") for name in catalog.names("tool")]
        if as_json:
            print(json.dumps(dict(known), indent=2, ensure_ascii=False))
        else:
            show.table([(name, _brief(text)) for name, text in known])
            show.note("the tools of your servers: tfactory tools list --config mcp.json")
        return
    async with MCPTools.load_from_config(config) as loaded:
        if as_json:
            print(json.dumps([asdict(offer) for offer in loaded.offers], indent=2, ensure_ascii=False))
            return
        about = {
            name: f"{server.target} ({server.transport}, {server.settings.isolation})"
            for name, server in loaded.configs.items()
        }
        for name, target in (
            about | ({"": "built-in tools that the file names"} if loaded.named else {})
        ).items():
            offers = [offer for offer in loaded.offers if offer.server == name]
            show.table([(name, f"{target}: {show.count(len(offers), 'tool')}")])
            rows = [
                (each.spec.name, _arguments(each.spec), _marks(each.options), _brief(each.spec.description))
                for each in offers
            ]
            show.columns(("tool", "arguments", "options", "description"), rows)


@tools.command(name="call")
async def call_tool(name: str, /, *arguments: str, config: Config = None) -> int:
    """Call one tool and print its result as a model would see it.

    ```
    tfactory tools call calculator expression=2+3
    tfactory tools call mytools.py:lookup '{"city": "Oslo"}'
    tfactory tools call search query=tea --config configs/tiny_grpo.yaml
    tfactory tools call echo message=hello --config mcp.json
    ```

    Args:
        name: The tool's name, or FILE.py:FUNCTION.
        arguments: key=value, or one JSON object. Values are read as JSON where the tool takes no text.
    """
    async with _episode(config, name, arguments) as call:
        result = await call()
    if result.ok:
        print(clean(result.content))
    else:
        show.fail(f"{name}: {result.error}: {result.content}")
    show.note(f"{result.seconds * 1000:.1f} ms")
    return 0 if result.ok else TOOL_FAILED


@tools.command(name="bench")
async def bench_tool(
    name: str, /, *arguments: str, config: Config = None, calls: Count = 200, concurrency: Count = 16
) -> int:
    """Measure latency and throughput of one tool, one call at a time and many at once.

    ```
    tfactory tools bench echo message=hello --config mcp.json --concurrency 64
    ```

    Args:
        name: The tool. It is really called, so choose one that may be.
        arguments: key=value, or one JSON object.
        calls: Calls in each of the two measurements.
        concurrency: Calls at the same time in the second one.
    """
    rows = []
    async with _episode(config, name, arguments) as call:
        result = await call()
        for _ in range(WARM_UP):
            await call()
        for width in (1, concurrency):
            with Display() as display:
                rows.append(await _measure(call, calls, width, display))
    show.columns(("at once", "calls/s", "p50 ms", "p95 ms", "failed"), rows)
    if not result.ok:
        show.fail(f"{name}: {result.error}: {result.content}")
    return 0 if result.ok else TOOL_FAILED


@asynccontextmanager
async def _episode(config: str | None, name: str, arguments: tuple[str, ...]) -> AsyncIterator[Call]:
    """Open the tools and give a function that makes the call."""
    # Imported here, so that help and a wrong flag do not wait for it.
    from TrainingFactory.assembly.tool_calls import open_tools

    async with open_tools(config, name) as executor:
        specs = {tool.spec.name: tool.spec for tool in executor.tools}
        if config is None and len(specs) == 1:  # NAME is the tool's file, or another name of it
            name = next(iter(specs))
        given = _read_arguments(specs.get(name, ToolSpec(name, "")), arguments)

        async def call() -> ToolResult:
            try:
                (result,) = await executor.batch_execute([ToolCall(name, given)])
            except ToolFailure as failure:  # the session is gone; an episode would end here
                result = ToolResult(str(failure), ok=False, error="tool_failure")
            return result

        yield call


async def _measure(call: Call, calls: int, width: int, display: Display) -> tuple[str, ...]:
    """Return a row of the table."""
    left, failed, seconds = iter(range(calls)), 0, list[float]()

    async def work() -> None:
        nonlocal failed
        for _ in left:
            begun = time.perf_counter()
            result = await call()
            seconds.append(time.perf_counter() - begun)
            failed += not result.ok
            display.advance(f"calls, {width} at a time", calls)

    started = time.perf_counter()
    await asyncio.gather(*(work() for _ in range(width)))
    rate = calls / (time.perf_counter() - started)
    p95 = sorted(seconds)[int(calls * 0.95)]
    times = (f"{statistics.median(seconds) * 1000:.1f}", f"{p95 * 1000:.1f}")
    return str(width), f"{rate:.0f}", *times, str(failed)


def _read_arguments(spec: ToolSpec, given: tuple[str, ...]) -> dict[str, Any]:
    """Read key=value or JSON; what is wrong with the values is for the tool's own schema to say."""
    if len(given) == 1 and given[0].lstrip().startswith("{"):
        return json.loads(given[0])  # its ValueError says where it is none
    values = {}
    for text in given:
        key, equals, value = text.partition("=")
        if not equals:
            raise ValueError(f"{text!r} is not key=value")
        values[key] = value
        if spec.parameters.get("properties", {}).get(key, {}).get("type") != "string":
            with suppress(json.JSONDecodeError):
                values[key] = json.loads(value)
    return values


def _arguments(spec: ToolSpec) -> str:
    required = spec.parameters.get("required", [])
    properties: dict[str, Any] = spec.parameters.get("properties", {})
    return ", ".join(name if name in required else f"[{name}]" for name in properties)


def _marks(options: Any) -> str:
    """Return the options that are not at their defaults."""
    from TrainingFactory.tools import ToolOptions

    defaults = asdict(ToolOptions()) | {"server": options.server, "version": options.version}
    changed = {name: value for name, value in asdict(options).items() if value != defaults[name]}
    return " ".join(name if value is True else f"{name}={value}" for name, value in changed.items())


def _brief(text: str) -> str:
    return textwrap.shorten(text.strip().partition("\n")[0], MAX_BRIEF, placeholder="...")
