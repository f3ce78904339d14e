"""`tfactory tools` as users meet it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.kits import mcp as kit
from TrainingFactory.cli import main

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command over one tiny server: (status, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    entry = kit.own("tiny.py", pure=["count"], timeout=5, error_text="^Database")
    Path("mcp.json").write_text(json.dumps({"mcpServers": {"tiny": entry}}))

    def run(*arguments: str, config: bool = True) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(["tools", *arguments, *(("--config", "mcp.json") if config else ())])
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

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
    status, out, err = tools("call", "say")
    assert (status, out) == (1, "") and "'text' is a required property" in err
    status, _, err = tools("call", "fail")
    assert status == 1 and "Database error" in err
    status, _, err = tools("call", "die")
    assert status == 1 and "unavailable" in err
    Path("mcp.json").write_text(json.dumps({"mcpServers": {"tiny": kit.own("tiny.py", isolation="process")}}))
    status, _, err = tools("call", "die")
    assert status == 1 and "the session of this episode ended" in err and "Traceback" not in err


def test_mistakes(tools: Run) -> None:
    status, _, err = tools("call", "sey", "text=x")
    assert status == 2 and "did you mean say?" in err
    status, _, err = tools("call", "say", "text")
    assert status == 2 and "'text' is not key=value" in err
    status, _, err = tools("call", "say", "{text")
    assert status == 2 and "property name" in err
    Path("mcp.json").write_text("{")
    status, _, err = tools("list")
    assert (
        status == 2
        and "mcp.json: cannot be read" in err
        and "line 1 column 2" in err
        and "Traceback" not in err
    )


def test_bench(tools: Run) -> None:
    status, out, err = tools("bench", "count", "--calls", "20", "--concurrency", "4")
    assert status == 0, err
    header, serial, wide = out.strip().splitlines()
    assert header.split() == ["at", "once", "calls/s", "p50", "ms", "p95", "ms", "failed"]
    assert serial.split()[0] == "1" and wide.split()[0] == "4" and wide.split()[-1] == "0"
    status, _, err = tools("bench", "fail", "--calls", "3")
    assert status == 1 and "every call of fail failed: Database error" in err
