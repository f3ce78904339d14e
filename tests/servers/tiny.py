"""An MCP server without the SDK, for tests: it starts in a blink, and can misbehave. `tiny.py [MODE] [FILE]`.

Modes: exit (says why on stderr, and ends), hang (never answers), noise (writes what is no message, then never
answers), nonsense (answers the handshake with a text), chatty (writes noise, but works), schema (offers a tool
with an invalid schema), outside (one whose schema points elsewhere), stubborn (ignores the end of its stdin),
fragile (ends at the first call), other (offers other tools once FILE is there), gone (cannot start once FILE is
there), slow (takes 2 s to start), backwards (writes the id of an answer last). To say "a lot" is answered with 24 MB,
"children" with the numbers of two processes that do not end by themselves.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

MODE = sys.argv[1] if len(sys.argv) > 1 else ""
TEXT = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
NOTHING: dict[str, Any] = {"type": "object", "properties": {}}
TOOLS: dict[str, dict[str, Any]] = {
    "say": TEXT,
    "count": NOTHING,
    "die": NOTHING,
    "fail": NOTHING,
    "number": NOTHING,
}
notes: list[str] = []


def write(message: dict[str, Any]) -> None:
    row = {"jsonrpc": "2.0"} | message
    if MODE == "backwards":
        row = dict(reversed(row.items()))
    sys.stdout.write(json.dumps(row) + "\n")
    sys.stdout.flush()


def tools() -> dict[str, dict[str, Any]]:
    if MODE == "schema":
        return {"bad": {"type": "object", "properties": {"x": {"type": "strange"}}}}
    if MODE == "outside":
        return {"bad": {"type": "object", "properties": {"x": {"$ref": "file:///etc/passwd"}}}}
    if MODE == "other" and Path(sys.argv[2]).exists():
        return {"say": TEXT, "new": NOTHING}
    return TOOLS


def call(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    if name == "die" or MODE == "fragile":
        print("the end is near\x1b]0;owned\x07\x9b2J\rok", file=sys.stderr, flush=True)
        os._exit(3)
    if name == "fail":
        return {"content": [{"type": "text", "text": "Database error: no such table"}]}
    if name == "number":
        return {"content": [], "structuredContent": {"n": "three" if notes else 3}}
    if arguments.get("text") == "a lot":
        return {"content": [{"type": "text", "text": "[]," * 8_000_000}]}
    if arguments.get("text") == "children":
        sleep = ["sleep", "600"]
        both = [subprocess.Popen(sleep, start_new_session=own) for own in (False, True)]
        return {"content": [{"type": "text", "text": " ".join(str(each.pid) for each in both)}]}
    if name == "say":
        notes.append(arguments["text"])
    text = f"{len(notes)} {os.getpid()}" if name == "count" else ",".join(notes)
    if text == "everything":  # a resource that holds what the server was told in secret
        resource = {"uri": "env:", "text": json.dumps(dict(os.environ) | {"argv": sys.argv})}
        return {"content": [{"type": "resource", "resource": resource}]}
    return {"content": [{"type": "text", "text": text}]}


def answer(request: dict[str, Any]) -> dict[str, Any] | None:
    parameters = request.get("params", {})
    if request["method"] == "initialize":
        version = parameters["protocolVersion"]
        about = {"name": "tiny", "version": "1"}
        return {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": about}
    if request["method"] == "tools/list":
        listed = [{"name": name, "inputSchema": schema} for name, schema in tools().items()]
        for tool in listed:
            if tool["name"] == "number":
                tool["outputSchema"] = {
                    "type": "object",
                    "properties": {"n": {"type": "integer"}},
                    "required": ["n"],
                }
        return {"tools": listed}
    if request["method"] == "tools/call":
        return call(parameters["name"], parameters.get("arguments", {}))
    return None


def main() -> None:
    if MODE == "exit" or (MODE == "gone" and Path(sys.argv[2]).exists()):
        print("cannot start: the licence has expired", "with key", os.environ.get("API_KEY"), file=sys.stderr)
        sys.exit(3)
    if MODE in ("noise", "chatty"):
        print("Welcome to tiny!", flush=True)
    if MODE in ("hang", "noise"):
        time.sleep(600)
    if MODE == "slow":
        time.sleep(2)
    if MODE == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    for line in sys.stdin:
        request = json.loads(line)
        if "id" not in request:
            continue
        if MODE == "nonsense":
            write({"id": request["id"], "result": "hello"})
            continue
        result = answer(request)
        if result is None:
            write({"id": request["id"], "error": {"code": -32601, "message": "no such method"}})
        else:
            write({"id": request["id"], "result": result})
    if MODE == "stubborn":
        time.sleep(600)


main()
