"""Every form of config that users have, and what they are told about a wrong one."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.kits.mcp import ROOT
from TrainingFactory.config import load_config
from TrainingFactory.tools import AsyncToolExecutor, MCPTools
from TrainingFactory.tools.mcp.config import parse_config, read_config
from TrainingFactory.tools.mcp.server_config import ServerConfig, ServerSettings
from TrainingFactory.types import ToolCall, ToolResult

HERE = Path(__file__).resolve().parent
ECHO = {"command": sys.executable, "args": ["-V"]}


def servers(data: Any, folder: Path = HERE) -> dict[str, ServerConfig]:
    return {config.name: config for config in parse_config(data, "mcp.json", folder)}


def wrong(data: Any, folder: Path = HERE) -> str:
    with pytest.raises(ValueError) as caught:
        parse_config(data, "mcp.json", folder)
    return str(caught.value)


def entry(**changes: Any) -> dict[str, Any]:
    return {"mcpServers": {"one": ECHO | changes}}


def test_the_file_of_other_programs(tmp_path: Path) -> None:
    path = tmp_path / "mcp.json"
    remote = {"type": "http", "url": "https://example.org/mcp", "headers": {"Authorization": "Bearer x"}}
    given = {"mcpServers": {"local": ECHO | {"env": {"A": "1"}}, "remote": remote, "off": {"disabled": True}}}
    path.write_text("\ufeff" + json.dumps(given), encoding="utf-8")
    (local, remote), _ = read_config(path)
    assert (local.name, local.transport, local.args, local.env) == ("local", "stdio", ("-V",), {"A": "1"})
    assert (remote.transport, remote.url) == ("http", "https://example.org/mcp")
    assert remote.headers == {"Authorization": "Bearer x"}
    assert local.settings == ServerSettings()


def test_comments_and_last_commas_are_read_over(tmp_path: Path) -> None:
    path = tmp_path / "mcp.json"
    text = """// of my editor
    {"servers": { /* two
        lines */ "one": {"command": "sh", // "args": [],
        "args": ["http://a//b", "/* no */ \\",]", ",}", ], /* , */ },
    },}"""
    path.write_text(text, encoding="utf-8")
    [server], _ = read_config(path)
    assert server.args == ("http://a//b", '/* no */ ",]', ",}")
    path.write_text(text.replace("],", "]]"), encoding="utf-8")
    with pytest.raises(ValueError, match="line 4 column"):
        read_config(path)
    path.write_text("[" * 100_000, encoding="utf-8")
    with pytest.raises(ValueError, match=r"mcp.json: cannot read"):
        read_config(path)


def test_python_is_our_own_where_there_is_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert servers(entry(command="python"))["one"].command == sys.executable
    assert "program 'ruby'" in wrong(entry(command="ruby"))
    other = tmp_path / "python"
    other.write_text("#!/bin/sh\n", encoding="utf-8")
    other.chmod(0o755)
    assert servers(entry(command="python"))["one"].command == str(other)


@pytest.mark.parametrize(
    "data",
    [
        {"servers": {"one": ECHO}, "inputs": [{"id": "key"}]},  # VS Code
        {"mcp": {"servers": {"one": ECHO}}},  # its settings
        [{"mcpServers": {"one": ECHO}}],
    ],
)
def test_other_spellings(data: Any) -> None:
    assert servers(data)["one"].command == sys.executable


@pytest.mark.parametrize(
    ("given", "transport", "url"),
    [
        ({"url": "http://h:1/sse"}, "sse", "http://h:1/sse"),
        ({"serverUrl": "http://h:1/x"}, "http", "http://h:1/x"),
        ({"url": "http://h:1"}, "http", "http://h:1/mcp"),
        ({"url": "http://h:1/"}, "http", "http://h:1/"),
        ({"url": "http://h:1/x", "type": "sse"}, "sse", "http://h:1/x"),
        ({"url": "http://h:1/x", "transport": "streamable-http"}, "http", "http://h:1/x"),
        ({"url": "http://h:1/x", "type": "streamableHttp"}, "http", "http://h:1/x"),
    ],
)
def test_transports(given: dict[str, Any], transport: str, url: str) -> None:
    found = servers({"mcpServers": {"one": given}})["one"]
    assert (found.transport, found.url) == (transport, url)


def test_the_form_with_one_tool() -> None:
    schema = {"type": "object", "properties": {"query": {"type": "string"}}}
    search = {
        "name": "search",
        "description": "Look it up.",
        "parameters": schema,
        "mcp_server": "http://h:1",
    }
    other = {"name": "fetch", "mcp_server": "http://h:1"}
    program = {"name": "echo", "mcp_server": f"'{sys.executable}' -m 'a server'"}
    as_object = {"name": "again", "mcp_server": ECHO, "tfactory": {"timeout": 3}}
    first, second, third = servers([search, other, program, as_object]).values()
    assert first.url == "http://h:1/mcp"
    assert first.overrides is not None and first.overrides["search"].description == "Look it up."
    assert first.overrides["search"].parameters == schema
    assert list(first.overrides) == ["search", "fetch"]  # one connection for both
    assert (second.command, second.args) == (sys.executable, ("-m", "a server"))
    assert third.settings.timeout == 3
    assert len({first.name, second.name, third.name}) == 3


def test_pydata_is_read_and_never_executed(tmp_path: Path) -> None:
    path = tmp_path / "tools.pydata"
    path.write_text("\n[ # RL-Factory\n {'mcpServers': {'one': {'command': '" + sys.executable + "'}}},\n]\n")
    assert read_config(path)[0][0].command == sys.executable
    path.write_text(f"[open({str(tmp_path / 'made')!r}, 'w')]")
    with pytest.raises(ValueError, match=r"tools.pydata: .*malformed node"):
        read_config(path)
    assert not (tmp_path / "made").exists()


def test_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN_OF_MINE", "sesame-1234")
    monkeypatch.delenv("NOT_SET", raising=False)
    given = {"url": "http://${HOST:-h}:1/${TOKEN_OF_MINE}", "headers": {"X": "Bearer ${env:TOKEN_OF_MINE}"}}
    found = servers({"mcpServers": {"one": given}})["one"]
    assert found.url == "http://h:1/sesame-1234" and found.headers == {"X": "Bearer sesame-1234"}
    assert servers(entry(args=["${workspaceFolder}"]), HERE / ".vscode")["one"].args == (str(HERE),)
    for broken in (entry(env={"A": "${NOT_SET}"}), entry(args=["${NOT_SET}"]), entry(cwd="${NOT_SET}")):
        text = wrong(broken)
        assert "mcp.json: server 'one'" in text and "NOT_SET is not set" in text
    assert "input:key is not set" in wrong(entry(env={"A": "${input:key}"}))


def test_paths_are_found_from_beside_the_file(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "serve"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    (tmp_path / "server.py").touch()
    found = servers({"mcpServers": {"one": {"command": "bin/serve", "args": ["server.py", "-x"]}}}, tmp_path)
    assert found["one"].command == str(program)
    assert found["one"].args == (str(tmp_path / "server.py"), "-x")
    assert servers(entry(cwd="bin"), tmp_path)["one"].cwd == str(tmp_path / "bin")


def one(**given: Any) -> dict[str, Any]:
    return {"mcpServers": {"one": given}}


def seed(**given: Any) -> dict[str, Any]:
    return {"name": "x", "mcp_server": "http://h"} | given


@pytest.mark.parametrize(
    ("data", "told"),
    [
        ({"mcpServers": {}}, "no servers"),
        ({"mcpServer": {"one": ECHO}}, "found 'mcpServer'"),
        ({"mcpServers": []}, 'servers by name under "mcpServers"'),
        ({"mcpServers": {"one": "npx"}}, "must be an object such as"),
        (one(), "a command or a url"),
        (entry(url="http://h"), "either a command or a url"),
        (entry(type="carrier-pigeon"), "type must be one of stdio, http, streamable-http"),
        (entry(type="sse"), "must begin with http://"),
        (one(url="http://h", type="stdio"), "program ''"),
        (one(url="ftp://h"), "must begin with http://"),
        (one(comand="x", url="http://h"), "comand is not an option of a server; did you mean command?"),
        (entry(command="no-such-program"), "program 'no-such-program' not found; install it"),
        (entry(command="./no/such"), "program './no/such'"),
        (entry(args="-V"), "args must be a valid list"),
        (entry(env=["A=1"]), "env must be a valid dictionary"),
        (entry(envFile=".env"), "envFile is not an option of a server"),
        (
            entry(tfactory={"isolaton": "a"}),
            "tfactory.isolaton is not an option of a server; did you mean isolation?",
        ),
        (
            entry(tfactory={"isolation": "alone"}),
            'tfactory.isolation must be one of shared, session, process (got "alone")',
        ),
        (entry(tfactory={"instances": 0}), "tfactory.instances must be greater than or equal to 1 (got 0)"),
        (entry(tfactory={"timeout": True}), "tfactory.timeout must be a valid number (got true)"),
        (entry(tfactory={"error_text": "("}), "tfactory.error_text must be a valid regular expression"),
        (entry(tfactory={"stateful": True}), "cannot be stateful"),
        (one(url="http://h", tfactory={"isolation": "process"}), "isolation process needs a command"),
        (seed(name=3), "name must be a valid string"),
        (seed(mcp_server=3), "mcp_server"),
        (seed(parameter={}), "did you mean parameters?"),
        ([seed(), seed()], "two entries describe the tool 'x'"),
        ("code_interpreter", "found str"),
        (3, "found int"),
    ],
)
def test_a_wrong_config_is_told_with_file_and_remedy(data: Any, told: str) -> None:
    text = wrong(data)
    assert told in text and text.startswith("mcp.json")


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (None, "No such file"),
        (b'{\n  "mcpServers": {"one": {"command" "x"}}\n}', "line 2 column 36"),
        (b"\xff\xfe\x00", "utf-8"),
    ],
)
def test_files_that_cannot_be_read(tmp_path: Path, content: bytes | None, told: str) -> None:
    path = tmp_path / "mcp.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"mcp.json: .*{told}"):
        read_config(path)


def test_secrets_are_in_no_repr_and_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN_OF_MINE", "sesame-1234")
    remote = {
        "url": "https://user:hunter22@h/mcp?key=${TOKEN_OF_MINE}",
        "headers": {"Authorization": "Bearer abcdefgh"},
    }
    found = servers({"mcpServers": {"one": remote, "two": ECHO | {"env": {"API_KEY": "qwertyuiop"}}}})
    shown = repr(found) + found["one"].target + found["two"].target
    assert not [secret for secret in ("sesame", "hunter22", "abcdefgh", "qwertyuiop") if secret in shown]
    assert found["one"].hide_secrets("x sesame-1234 y") == "x *** y"
    assert set(found["one"].secrets) == {"Bearer abcdefgh", "sesame-1234", "abcdefgh", "hunter22"}
    assert found["two"].secrets == ["qwertyuiop"]
    hidden = {
        "DB_PASS": "one-one-one",
        "AUTH": "two-two-two",
        "SENTRY_DSN": "three-three",
        "PWD_X": "four-four",
    }
    links = {"A": "pg://me:five%40five@h/x", "B": "https://h/x?token=six-six-six&page=long-enough"}
    plain = {"AUTHOR_NAME": "Jane Doe Jr.", "PLACE": "/some/folder", "SITE": "https://example.org/a"}
    (shy,) = servers(entry(env=hidden | links | plain, args=["pg://me:seven-seven@h/x"])).values()
    inside = {"five%40five", "five@five", "six-six-six", "seven-seven"}
    assert set(shy.secrets) == {*hidden.values(), *inside}
    given = ECHO | {
        "env": {"API_KEY": "qwertyuiop"},
        "headers": {"X": "Bearer abcdefgh"},
        "command": "nowhere",
    }
    assert "qwertyuiop" not in wrong({"mcpServers": {"one": given}})


def test_another_launch_is_another_server_whatever_its_name(tmp_path: Path) -> None:
    def launch(**changes: Any) -> str:
        return servers(entry(**changes))["one"].digest

    def remote(**changes: Any) -> str:
        return servers({"mcpServers": {"x": {"url": "http://h/mcp"} | changes}})["x"].digest

    assert launch() == servers({"mcpServers": {"other": ECHO}})["other"].digest == launch(tfactory={"max": 3})
    others = [launch(args=["-VV"]), launch(args=["-V", "-V"]), launch(cwd=str(tmp_path))]
    others += [launch(env={"A": "1"}), launch(env={"A": "2"}), launch(env={"B": "1"})]
    others += [launch(tfactory={"error_text": "x"}), remote(), remote(headers={"K": "v"})]
    others += [remote(url="http://h/b"), remote(type="sse")]
    assert len({launch(), *others}) == 1 + len(others)


def test_the_file_that_the_printed_config_names(tmp_path: Path) -> None:
    [entry] = load_config(ROOT / "configs" / "qwen3_grpo.yaml").tools
    data = json.loads((ROOT / str(entry.config)).read_text())
    program, argument = data["mcp_server"].split()
    assert program == "python"  # here: this one, which may have to be told where the package is
    server = {"command": sys.executable, "args": [argument], "env": {"PYTHONPATH": str(ROOT)}}
    servers = MCPTools.from_dict(data | {"mcp_server": server}, folder=ROOT / "tools")

    async def search() -> ToolResult:
        async with servers:
            assert [spec.name for spec in servers.specs] == [entry.name]
            call = ToolCall(entry.name, {"query": "replay a recording"})
            return (await AsyncToolExecutor([servers]).batch_execute([call]))[0]

    found = asyncio.run(search())
    assert found.ok and "TOOLS.md" in found.content
