"""Routes of the wizard: servers and tasks that were pasted become files that a config can name. What was pasted runs code
only after its commands were shown and confirmed, each by its digest."""

from __future__ import annotations

import csv
import hashlib
import inspect
import json
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, Field

from TrainingFactory.config.problems import dotted
from TrainingFactory.data.disk import write_aside
from TrainingFactory.data.tasks import PROMPTS, load_tasks
from TrainingFactory.http.api import ApiError
from TrainingFactory.http.site import Site
from TrainingFactory.rewards.rule_based import RULES
from TrainingFactory.rewards.tool_verified import VERIFIERS
from TrainingFactory.services.views.shapes import Json
from TrainingFactory.texts import secrets_in
from TrainingFactory.tools.mcp.config import parse_config, parse_json
from TrainingFactory.tools.mcp.server_config import ServerConfig
from TrainingFactory.web.pool import Pool

FOLDER = "wizard"  # in the folder of runs; a run that is resumed finds its tools and tasks there
SERVERS = "mcp.json"
SHOWN = 5  # tasks
SUFFIXES = {"JSON": ".json", "JSONL": ".jsonl", "CSV": ".csv", "lines": ".jsonl"}


class Pasted(BaseModel):
    text: str = Field(max_length=8_000_000)


class Confirmed(Pasted):
    confirmed: list[str]  # the digests of the servers that were shown


class ServerRow(BaseModel):
    name: str
    transport: str
    command: list[str]  # that is started; empty where there is a url. Values of the environment are left out
    url: str
    cwd: str | None
    env_names: list[str]  # variables, or headers; never their values
    digest: str  # of all that decides what is started or reached


class ServersRead(BaseModel):
    servers: list[ServerRow]
    problems: list[str]


class ToolsOpened(BaseModel):
    config: str  # the file, as an entry of `tools` names it
    tools: list[Json]  # server, name, description, parameters


class TasksRead(BaseModel):
    path: str | None = None  # the file, as data.tasks names it
    kind: Literal["JSON", "JSONL", "CSV", "lines"]
    count: int = 0
    answered: int = 0  # tasks with an answer to compare with
    first: list[Json] = []  # id, prompt, answer
    problem: str | None = None


class Named(BaseModel):
    name: str
    what: str


class Rewards(BaseModel):
    rules: list[Named]
    verifiers: list[Named]


class WizardRoutes:
    def __init__(self, site: Site, runs: Path, pool: Pool) -> None:
        self._folder, self._pool = runs / FOLDER, pool
        site.add("POST", "/api/tools/read", self.read)
        site.add("POST", "/api/tools/open", self.open)
        site.add("POST", "/api/tasks/read", self.tasks)
        site.add("GET", "/api/rewards", rewards)

    def read(self, asked: Pasted) -> ServersRead:
        """Show what pasted `mcpServers` would start or reach. Nothing is started, and nothing is kept."""
        try:
            found, problems = self._servers(asked.text)
        except ValueError as error:
            return ServersRead(servers=[], problems=[str(error)])
        return ServersRead(servers=[_row(each) for each in found], problems=problems)

    async def open(self, asked: Confirmed) -> ToolsOpened:
        """Start or reach the servers, all of which were confirmed by their digests, and list their tools."""
        found, problems = self._servers(asked.text)
        if problems:
            raise ApiError(problems[0], "text")
        if new := [each.name for each in found if each.launch not in asked.confirmed]:
            text = f"{', '.join(new)} was not confirmed as it is now; look at its command again"
            raise ApiError(text, "confirmed", status=409, code="not_confirmed")
        path = self._place(asked.text) / SERVERS
        _keep(path, asked.text)
        given = {"path": str(path), "confirmed": asked.confirmed}
        return ToolsOpened(config=str(path), tools=await self._pool.ask("check", "tools", given))

    def tasks(self, asked: Pasted) -> TasksRead:
        """Read pasted or uploaded tasks, JSONL, JSON, CSV or a question a line, as a run would; keep them as a file."""
        kind, text = _kind(asked.text), asked.text
        if kind == "lines":
            cells = [line.split("\t", 1) for line in text.splitlines() if line.strip()]
            rows = [dict(zip(("prompt", "answer"), map(str.strip, each), strict=False)) for each in cells]
            text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        path = self._place(text) / f"tasks{SUFFIXES[kind]}"
        _keep(path, text)
        try:
            found = load_tasks(path)
            if not found:
                raise ValueError("there are no tasks; paste one a line")
        except ValueError as error:
            path.unlink()
            return TasksRead(
                kind=kind, problem=str(error).replace(f"{path}, ", "").replace(str(path), "the text")
            )
        first = [
            {"id": each.id, "prompt": _said(each.prompt), "answer": each.answer} for each in found[:SHOWN]
        ]
        answered = sum(each.answer is not None for each in found)
        return TasksRead(path=str(path), kind=kind, count=len(found), answered=answered, first=first)

    def _place(self, text: str) -> Path:
        """Return the folder for a text, by its digest: the same text is kept once, and no name comes from a browser."""
        return self._folder / hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:16]

    def _servers(self, text: str) -> tuple[list[ServerConfig], list[str]]:
        """Return the servers, and what keeps them from being started; raise ValueError where they cannot be read."""
        try:
            data = parse_json(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f'this is no JSON: {error}; paste {{"mcpServers": {{...}}}}') from None
        # As if it were read from where it will stand, so that the digests are those of a run.
        found = parse_config(data, "the pasted text", self._place(text))
        problems = [
            f"{dotted(key)} holds a secret, and the text is kept in a file for the run: set an environment variable "
            f"before tfactory ui is started, and write ${{NAME}} in its place"
            for key, _ in secrets_in(data)
        ]
        return found, problems


def rewards() -> Rewards:
    """List the rules and verifiers that a reward can be made of."""
    rules, verifiers = (
        [Named(name=name, what=_first(kind)) for name, kind in known.items()] for known in (RULES, VERIFIERS)
    )
    return Rewards(rules=rules, verifiers=verifiers)


def _row(server: ServerConfig) -> ServerRow:
    command = [server.command, *server.args] if server.transport == "stdio" else []
    return ServerRow(
        name=server.name, transport=server.transport, command=[server.hide(each) for each in command],
        url=server.hide(server.url), cwd=server.cwd, env_names=sorted(server.env | server.headers), digest=server.launch,
    )  # fmt: skip


def _keep(path: Path, text: str) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_aside(path, text)


def _kind(text: str) -> Literal["JSON", "JSONL", "CSV", "lines"]:
    begun = text.lstrip("\ufeff \t\r\n")
    if begun.startswith("["):
        return "JSON"
    if begun.startswith("{"):
        try:
            json.loads(begun)
        except ValueError:
            return "JSONL"
        return "JSON"
    head = next(csv.reader(begun.splitlines()[:1]), [])
    return "CSV" if {each.strip() for each in head} & {"prompt", *PROMPTS} else "lines"


def _said(prompt: str | list[Any]) -> str:
    return prompt if isinstance(prompt, str) else "\n".join(f"{each.role}: {each.content}" for each in prompt)


def _first(kind: Any) -> str:
    """Return the first sentence of what a class is said to do."""
    return " ".join((inspect.getdoc(kind) or "").split()).partition(". ")[0].rstrip(".") + "."
