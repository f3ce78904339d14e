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
from TrainingFactory.options import did_you_mean, nearest
from TrainingFactory.services.reports.texts import clean
from TrainingFactory.types import ToolCall, ToolFailure, ToolResult, ToolSpec

TOOL_FAILED = 1
MAX_BRIEF = 80  # characters of a description
WARM_UP = 5  # calls before the clock starts
Config = Annotated[Path, Parameter(help="The mcpServers file (JSON or .pydata).")]

tools = App(name="tools", help="Look at tools, call one, measure one.")


@tools.command(name="list")
def list_tools(
    config: Path | None = None, as_json: Annotated[bool, Parameter(name="--json")] = False
) -> None:
    """Show servers, their tools, the arguments of each and the options it has.

    ```
    tfactory tools list --config mcp.json
    ```

    Parameters
    ----------
    config
        The mcpServers file (JSON or .pydata). Without one, the tools that come with TrainingFactory.
    as_json
        Print JSON, with the whole schemas.
    """
    if config is None:
        _list_builtin(as_json)
    else:
        asyncio.run(_list_servers(config, as_json))


async def _list_servers(config: Path, as_json: bool) -> None:
    from TrainingFactory.tools import MCPTools

    async with MCPTools.load_from_config(config) as loaded:
        if as_json:
            print(json.dumps([asdict(offer) for offer in loaded.offers], indent=2, ensure_ascii=False))
            return
        for name, server in loaded.configs.items():
            offers = [offer for offer in loaded.offers if offer.server == name]
            how = f"{server.transport}, {server.settings.isolation}"
            show.table([(name, f"{server.target} ({how}): {show.count(len(offers), 'tool')}")])
            rows = [
                (spec.name, _arguments(spec), _marks(offer.options), _brief(spec.description))
                for offer in offers
                for spec in [offer.spec]
            ]
            show.columns(("tool", "arguments", "options", "description"), rows)


@tools.command(name="call")
def call_tool(name: str, /, *arguments: str, config: Config) -> int:
    """Call one tool and print its result as a model would see it.

    ```
    tfactory tools call echo message=hello --config mcp.json
    tfactory tools call add '{"a": 1, "b": 2}' --config mcp.json
    ```

    Parameters
    ----------
    name
        The tool, as `tfactory tools list` shows it.
    arguments
        key=value, or one JSON object. Values are read as JSON where the tool takes no text.
    """
    result = asyncio.run(_call(config, name, arguments))
    if result.ok:
        print(clean(result.content))
    else:
        show.fail(f"{name}: {result.error}: {result.content}")
    for attached in result.attachments:
        kept = {key: value for key, value in attached.items() if key not in ("data", "blob", "text")}
        show.note(f"attached: {json.dumps(kept, ensure_ascii=False)}")
    show.note(f"{result.seconds * 1000:.1f} ms")
    return 0 if result.ok else TOOL_FAILED


@tools.command(name="bench")
def bench_tool(
    name: str, /, *arguments: str, config: Config, calls: Count = 200, concurrency: Count = 16
) -> int:
    """Measure latency and throughput of one tool, one call at a time and many at once.

    ```
    tfactory tools bench echo message=hello --config mcp.json --concurrency 64
    ```

    Parameters
    ----------
    name
        The tool. It is really called, so choose one that may be.
    arguments
        key=value, or one JSON object.
    calls
        Calls in each of the two measurements.
    concurrency
        Calls at the same time in the second one.
    """
    return asyncio.run(_bench(config, name, arguments, calls, concurrency))


Call = Callable[[], Awaitable[ToolResult]]


@asynccontextmanager
async def _episode(config: Path, name: str, arguments: tuple[str, ...]) -> AsyncIterator[Call]:
    """Start the servers and give a function that makes the call."""
    # Imported here, so that help and a wrong flag do not wait for it.
    from TrainingFactory.tools import AsyncToolExecutor, MCPTools

    async with MCPTools.load_from_config(config) as servers:
        given = _read_arguments(_spec(servers.specs, name, config), arguments)
        executor = AsyncToolExecutor([servers])

        async def call() -> ToolResult:
            try:
                (result,) = await executor.batch_execute([ToolCall(name, given)])
            except ToolFailure as failure:  # the session is gone; an episode would end here
                result = ToolResult(str(failure), ok=False, error="tool_failure")
            return result

        try:
            yield call
        finally:
            await executor.close()


async def _call(config: Path, name: str, arguments: tuple[str, ...]) -> ToolResult:
    async with _episode(config, name, arguments) as call:
        return await call()


async def _bench(config: Path, name: str, arguments: tuple[str, ...], calls: int, concurrency: int) -> int:
    """Print the table and return the exit status."""
    rows = []
    async with _episode(config, name, arguments) as call:
        for _ in range(WARM_UP):
            await call()
        for width in dict.fromkeys((1, min(concurrency, calls))):
            with Display() as display:
                row, problems = await _measure(call, calls, width, display)
            if len(problems) == calls:
                show.fail(f"every call of {name} failed: {problems[-1]}")
                return TOOL_FAILED
            rows.append(row)
    show.columns(("at once", "calls/s", "p50 ms", "p95 ms", "failed"), rows)
    return 0


async def _measure(call: Call, calls: int, width: int, display: Display) -> tuple[tuple[str, ...], list[str]]:
    """Return a row of the table, and what went wrong."""
    left = iter(range(calls))
    seconds: list[float] = []
    problems: list[str] = []

    async def work() -> None:
        for _ in left:
            begun = time.perf_counter()
            result = await call()
            seconds.append(time.perf_counter() - begun)
            if not result.ok:
                problems.append(result.content)
            display.advance(f"calls, {width} at a time", calls)

    started = time.perf_counter()
    await asyncio.gather(*(work() for _ in range(width)))
    rate = calls / (time.perf_counter() - started)
    p95 = sorted(seconds)[min(calls - 1, int(calls * 0.95))]
    times = (f"{statistics.median(seconds) * 1000:.1f}", f"{p95 * 1000:.1f}")
    return (str(width), f"{rate:.0f}", *times, str(len(problems))), problems


def _list_builtin(as_json: bool) -> None:
    from TrainingFactory import catalog

    known = {name: _brief(inspect.getdoc(catalog.find("tool", name)) or "") for name in catalog.names("tool")}
    if as_json:
        print(json.dumps(known, indent=2, ensure_ascii=False))
    else:
        show.table(list(known.items()))
        show.note("the tools of your servers: tfactory tools list --config mcp.json")


def _spec(specs: list[ToolSpec], name: str, config: Path) -> ToolSpec:
    by_name = {spec.name: spec for spec in specs}
    if name not in by_name:
        near = did_you_mean(nearest(name, by_name)) or f"; there are {', '.join(by_name)}"
        raise ValueError(f"{config}: no server offers a tool {name!r}{near}")
    return by_name[name]


def _read_arguments(spec: ToolSpec, given: tuple[str, ...]) -> dict[str, Any]:
    """What is not readable is left to the tool's own schema to complain about."""
    if len(given) == 1 and given[0].lstrip().startswith("{"):
        return json.loads(given[0])  # its ValueError says where it is none
    values = {}
    for text in given:
        key, equals, value = text.partition("=")
        if not equals:
            raise ValueError(
                f"{text!r} is not key=value; {spec.name} takes {_arguments(spec) or 'no arguments'}"
            )
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
    """The options that are not at their defaults."""
    from TrainingFactory.tools import ToolOptions

    defaults = asdict(ToolOptions()) | {"server": options.server, "version": options.version}
    changed = {name: value for name, value in asdict(options).items() if value != defaults[name]}
    return " ".join(name if value is True else f"{name}={value}" for name, value in changed.items())


def _brief(text: str) -> str:
    return textwrap.shorten(text.strip().partition("\n")[0], MAX_BRIEF, placeholder="...")
