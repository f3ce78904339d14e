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


def test_bench(tools: Run) -> None:
    status, out, err = tools("bench", "count", "--calls", "20", "--concurrency", "4")
    assert status == 0, err
    header, serial, wide = out.strip().splitlines()
    assert header.split() == ["at", "once", "calls/s", "p50", "ms", "p95", "ms", "failed"]
    assert serial.split()[0] == "1" and wide.split()[0] == "4" and wide.split()[-1] == "0"
    status, _, err = tools("bench", "fail", "--calls", "3")
    assert status == 1 and "fail: exception: Database error" in err
