"""`tfactory tools` as users meet it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.kits import mcp as kit
from tests.kits.cli import Run


@pytest.fixture
def tools(tfactory: Run) -> Run:
    """Runs a command over one tiny server: (status, stdout, stderr)."""
    entry = kit.own("tiny.py", pure=["count"], timeout=5, error_text="^Database")
    Path("mcp.json").write_text(json.dumps({"mcpServers": {"tiny": entry}}))

    def run(*arguments: str, config: bool = True) -> tuple[int, str, str]:
        return tfactory("tools", *arguments, *(("--config", "mcp.json") if config else ()))

    return run


def test_list(tools: Run) -> None:
    status, out, err = tools("list")
    assert status == 0, err
    assert "tiny.py (stdio, shared): 5 tools" in out
    assert "say" in out and "text" in out and "pure" in out and "timeout=5" in out
    status, out, _ = tools("list", "--json")
    listed = json.loads(out)
    assert [item["spec"]["name"] for item in listed] == ["say", "count", "die", "fail", "number"]
    assert listed[0]["spec"]["parameters"]["required"] == ["text"]
    assert listed[0]["server"] == "tiny"
    assert listed[0].keys() == {"server", "remote_name", "spec", "options"}


def test_list_of_what_comes_along(tools: Run) -> None:
    status, out, _ = tools("list", config=False)
    assert status == 0 and "calculator" in out
    assert "python" in json.loads(tools("list", "--json", config=False)[1])


def test_call(tools: Run) -> None:
    assert tools("call", "say", "text=123")[:2] == (0, "123\n")  # a text stays one
    assert tools("call", "say", '{"text": "a=b"}')[:2] == (0, "a=b\n")
    for command, says in (
        (("call", "say"), "'text' is a required property"),
        (("call", "fail"), "Database error"),
        (("call", "die"), "unavailable"),
        (("call", "sey", "text=x"), "The tools are: say"),
    ):
        status, out, err = tools(*command)
        assert (status, out) == (1, "") and says in err
    for arguments, says in (
        (("say", "text"), "'text' is not key=value"),
        (("say", "{text"), "property name"),
    ):
        status, _, err = tools("call", *arguments)
        assert status == 2 and says in err
    Path("mcp.json").write_text(json.dumps({"mcpServers": {"tiny": kit.own("tiny.py", isolation="process")}}))
    status, _, err = tools("call", "die")
    assert status == 1 and "the session of this episode ended" in err and "Traceback" not in err


def test_any_tool_can_be_called(tfactory: Run) -> None:
    Path("mine.py").write_text("def twice(text: str) -> str:\n    'Say it twice.'\n    return text * 2\n")
    Path("city.py").write_text(
        "from TrainingFactory.envs import ToolEnvironment\n"
        "from TrainingFactory.tools import tool\n"
        "from TrainingFactory.types import Task\n"
        "class City(ToolEnvironment):\n"
        "    @classmethod\n"
        "    def tasks(cls, split, seed, count):\n"
        "        return [Task('oslo', 'Oslo?')]\n"
        "    @tool\n"
        "    def where(self) -> str:\n"
        "        'Tell the task.'\n"
        "        return self.task.id\n"
    )
    Path("run.yaml").write_text("environment: city.py\ntools: [calculator, 'mine.py:twice']\n")
    for arguments, expected in (
        (["calculator", "expression=2+3"], "5"),
        (["mine.py:twice", "text=ab"], "abab"),
        (["where", "--config", "city.py"], "oslo"),
        (["where", "--config", "run.yaml"], "oslo"),
        (["twice", "text=ab", "--config", "run.yaml"], "abab"),
        (["calculator", "expression=2*3", "--config", "run.yaml"], "6"),
    ):
        status, out, err = tfactory("tools", "call", *arguments)
        assert (status, out) == (0, f"{expected}\n"), err
    status, _, err = tfactory("tools", "call", "nosuch")
    assert status == 2 and "'nosuch'" in err and "--config" in err
    status, _, err = tfactory("tools", "call", "nosuch", "--config", "run.yaml")
    assert status == 1 and "calculator" in err and "where" in err
    assert not Path("runs").exists()


def test_bench(tools: Run) -> None:
    status, out, err = tools("bench", "count", "--calls", "20", "--concurrency", "4")
    assert status == 0, err
    header, serial, wide = out.strip().splitlines()
    assert header.split() == ["concurrency", "calls/s", "p50", "ms", "p95", "ms", "failed"]
    assert serial.split()[0] == "1" and wide.split()[0] == "4" and wide.split()[-1] == "0"
    status, _, err = tools("bench", "fail", "--calls", "3")
    assert status == 1 and "fail: exception: Database error" in err
