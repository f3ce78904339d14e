"""What somebody is told who uses tools wrongly: every text in one table."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from TrainingFactory.common.endpoints.openai import ChatEndpoint
from TrainingFactory.tools import AsyncToolExecutor, ToolCache, as_tool, tool
from TrainingFactory.tools.custom_tools import AgentTool, PythonTool, SearchTool, SqlTool, calculator
from TrainingFactory.tools.making import make_tool
from TrainingFactory.tools.recording import CALLS_FILE, Recorder, load_recorded_tools
from TrainingFactory.tools.schema import check_schema
from TrainingFactory.types import ToolResult, ToolSpec

Mistake = tuple[Callable[[Path], Any], str]


def many(*words: str) -> str:
    return ""


class ByHand:
    def __init__(self, parameters: Any) -> None:
        self.spec = ToolSpec("lookup", "", parameters)

    async def run(self, arguments: dict[str, Any]) -> ToolResult:
        return ToolResult("")


def written(folder: Path, name: str, text: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def python(**options: Any) -> PythonTool:
    return PythonTool(**options)


def searching(text: str | bytes) -> Callable[[Path], Any]:
    return lambda folder: SearchTool(written(folder, "bad.jsonl", text), index_dir=folder)


def recording(calls: str) -> Callable[[Path], Any]:
    def read(folder: Path) -> None:
        written(folder, "tools.json", "[]")
        written(folder, CALLS_FILE, calls)
        Recorder(folder)

    return read


DECLARED: list[Mistake] = [
    (lambda _: tool(name="f")(lambda x: x), "'x' needs a type hint"),
    (lambda _: tool(many), "named parameters only"),
    (lambda _: tool(name="two words")(lambda: ""), "name 'two words'.*1 to 64"),
    (lambda _: tool(timeout=0), r"timeout must be greater than 0 \(got 0\)"),
    (lambda _: tool(rate=0), r"rate must be greater than 0 \(got 0\)"),
    (lambda _: tool(time_out=3), r"time_out is not an option of @tool; did you mean timeout\?"),  # type: ignore[call-overload]
    (lambda _: tool(retries=3), "retries needs pure=True or idempotent=True"),
    (lambda _: tool(pure=True, stateful=True), "both pure and stateful"),
    (lambda _: AsyncToolExecutor([calculator, calculator]), "the same name: calculator"),
    *((lambda _, thing=thing: as_tool(thing), "is not a tool") for thing in (3, "text", object(), dict)),
]
SCHEMAS: list[tuple[Any, str]] = [
    ("text", "its parameters are 'text'"),
    ({"type": "array"}, "have the type 'array'"),
    ({"type": "object", "properties": {"a": {"type": "strng"}}}, "properties.a.type is not"),
    ({"type": "object", "properties": [1]}, "properties is not"),
    ({"type": "object", "required": "a"}, "required is not"),
    ({"type": "object", "properties": {"a": {"$ref": "#/$defs/B"}}}, r"refer to #/\$defs/B"),
    ({"type": "object", "properties": {"a": {"$ref": "http://host/x.json"}}}, "refer to http://host/x.json"),
]
NAMED: list[Mistake] = [
    (lambda _: make_tool("calculater"), "did you mean calculator"),
    (lambda _: make_tool({"name": "sql"}), "path is missing; tool sql needs it"),
    (
        lambda _: make_tool({"name": "sql", "options": {"paht": "x"}}),
        "paht is not an option of tool sql; did you mean path",
    ),
    (
        lambda _: make_tool({"name": "sql", "options": {"path": "x.db", "max_rows": 0}}),
        r"max_rows must be greater than or equal to 1 \(got 0\)",
    ),
    (
        lambda _: make_tool({"name": "sql", "options": {"path": "x.db", "format": "xml"}}),
        r'format must be one of table, json, exact.* \(got "xml"\)',
    ),
    (lambda _: make_tool({"name": "sql", "options": {"path": "gone.db"}}), "SQLite file not found.*gone.db"),
    (lambda _: make_tool({"name": "calculator", "options": {"x": 1}}), "tool calculator takes no options"),
    (lambda _: make_tool({"nome": "sql"}), "invalid tool .*nome"),
    (
        lambda _: make_tool({"name": "search", "options": {"path": "x", "top_k": 21}}),
        r"top_k must be less than or equal to 20 \(got 21\)",
    ),
    (
        lambda _: make_tool(
            {
                "name": "agent",
                "options": {
                    "name": "a",
                    "description": "",
                    "model": {"base_url": "http://h", "modell": 1},
                },
            }
        ),
        "model.modell is not an option of an agent's model; did you mean model",
    ),
    (lambda _: AgentTool("a", "", ChatEndpoint("http://h/v1", "m"), max_turns=0), "max_turns"),
    *(
        (lambda _, given={option: 0}: python(**given), rf"{option}\n  Input should be greater than")
        for option in ("timeout", "memory_mb", "disk_mb", "cpu_seconds", "max_output_chars")
    ),
    *(
        (lambda _, url=url: ChatEndpoint(url, "m"), "base_url")
        for url in ("localhost:80", "ftp://host", "", "https://user:pass@host/v1")
    ),
]
FILES: list[Mistake] = [
    (
        lambda folder: SqlTool(folder / "gone.db"),
        r"tool sql: .*gone\.db; set path to an existing",
    ),
    (
        lambda folder: SqlTool(
            written(folder, "text.db", "this is no database, however long it may be " * 50)
        ),
        r"text\.db is not a readable SQLite file",
    ),
    (searching('{"text": "a"}\n{"text"\n'), r"bad\.jsonl:2: not a JSON object"),
    (
        searching('{"body": "a", "n": 1}\n'),
        r"jsonl:1: no text in 'text'; set text_field .*body, n",
    ),
    (searching('{"text": 3}\n'), "no text in 'text'"),
    (searching("[1]\n"), "not a JSON object"),
    (searching(b"\xff\xfe\x00"), "can't decode byte"),
    (lambda folder: SearchTool(folder / "gone", index_dir=folder), "no file or folder .*gone"),
    (lambda folder: SearchTool(folder, index_dir=folder), r"has no \.txt or \.md files"),
    (lambda folder: SearchTool(folder, index_dir=folder, top_k=0), "top_k"),
    (lambda folder: ToolCache(folder / "x.sqlite", ttl=0), "ttl"),
    (lambda folder: ToolCache(folder / "x.sqlite", max_bytes=0), "max_bytes"),
    (
        lambda folder: ToolCache(written(folder, "a", "") / "b.sqlite"),
        r"cannot open the cache .*b\.sqlite: .*another path",
    ),
    (Recorder, "no recording of tool calls.*logging.record_tools=true"),
    (recording("{\n"), "tool_calls.jsonl:1: invalid"),
    (recording('{"step": 1}\n'), "tool_calls.jsonl:1: invalid"),
    (
        lambda folder: load_recorded_tools(written(folder, "tools.json", json.dumps([{"nam": 1}])).parent),
        "tools.json: cannot read",
    ),
]


@pytest.mark.parametrize(("do", "says"), DECLARED + NAMED + FILES)
def test_mistakes_are_told(tmp_path: Path, do: Callable[[Path], Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        do(tmp_path)


@pytest.mark.parametrize(("parameters", "says"), SCHEMAS)
def test_a_schema_that_is_none_is_told_by_name(parameters: Any, says: str) -> None:
    with pytest.raises(ValueError, match=f"^file.json: tool lookup: .*{says}.*JSON schema of type object"):
        check_schema(ToolSpec("lookup", "", parameters), "file.json")
    with pytest.raises(ValueError, match="tool lookup"):
        as_tool(ByHand(parameters))
