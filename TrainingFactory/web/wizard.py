"""Routes of the wizard: servers and tasks that were pasted become files that a config can name. What was pasted runs
code only after its commands were shown and confirmed, each by its digest."""

from __future__ import annotations

import csv
import hashlib
import json
import os
from pathlib import Path

from pydantic import BaseModel

from TrainingFactory.apps.views.shapes import Json
from TrainingFactory.common.http.api import ApiError
from TrainingFactory.common.http.site import Site
from TrainingFactory.common.texts import secrets_in
from TrainingFactory.config.problems import dotted
from TrainingFactory.data.disk import write_aside
from TrainingFactory.data.tasks import PROMPTS, load_tasks
from TrainingFactory.tools.mcp.config import parse_config, parse_json
from TrainingFactory.tools.mcp.server_config import ServerConfig
from TrainingFactory.web.pool import Pool

FOLDER = "wizard"  # in the folder of runs; a run that is resumed finds its tools and tasks there
SHOWN = 5  # tasks


class Pasted(BaseModel):
    text: str
    confirmed: list[str] = []  # to open: the digests of the servers that were shown


class ServersRead(BaseModel):
    servers: list[Json]  # name, command (a list) or url, cwd, variables (NAME=VALUE), digest of all of it
    problems: list[str]


class ToolsOpened(BaseModel):
    config: str  # the file, as an entry of `tools` names it
    tools: list[Json]  # server, name, description, parameters


class TasksRead(BaseModel):
    kind: str  # JSON, CSV, lines
    path: str | None = None  # the file, as data.tasks names it
    count: int = 0
    answered: int = 0  # tasks with an answer to compare with
    first: list[Json] = []  # id, prompt, answer
    problem: str | None = None


class WizardRoutes:
    def __init__(self, site: Site, runs: Path, pool: Pool) -> None:
        self._folder, self._pool = (runs / FOLDER).resolve(), pool
        site.add("POST", "/api/tools/read", self.read)
        site.add("POST", "/api/tools/open", self.open)
        site.add("POST", "/api/tasks/read", self.tasks)

    def read(self, asked: Pasted) -> ServersRead:
        """Show what pasted `mcpServers` would start or reach. Nothing is started, and nothing is kept."""
        try:
            found, problems = self._servers(asked.text)
        except ValueError as error:
            found, problems = [], [str(error)]
        return ServersRead(servers=[_shown(each) for each in found], problems=problems)

    async def open(self, asked: Pasted) -> ToolsOpened:
        """Start or reach the servers, all of which were confirmed by their digests, and list their tools."""
        found, problems = self._servers(asked.text)
        if problems:
            raise ApiError(problems[0], "text")
        if new := [each.name for each in found if each.launch not in asked.confirmed]:
            text = f"{', '.join(new)} was not confirmed as it is now; look at its command again"
            raise ApiError(text, "confirmed", status=409, code="not_confirmed")
        path = str(self._kept(asked.text, "mcp.json"))
        return ToolsOpened(config=path, tools=await self._pool.ask("check", "tools", {"path": path}))

    def tasks(self, asked: Pasted) -> TasksRead:
        """Read pasted or uploaded tasks, JSONL, JSON, CSV or a question a line, as a run would; keep them as a file."""
        kind, text = _kind(asked.text), asked.text
        if kind == "lines":  # with the answer behind a tab
            cells = [map(str.strip, line.split("\t", 1)) for line in text.splitlines() if line.strip()]
            rows = [dict(zip(("prompt", "answer"), each, strict=False)) for each in cells]
            text = "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows)
        path = self._kept(text, "tasks" + {"JSON": ".json", "CSV": ".csv"}.get(kind, ".jsonl"))
        try:
            found = load_tasks(path)
        except ValueError as error:
            path.unlink()
            problem = str(error).replace(f"{path}, ", "").replace(str(path), "the text")
            return TasksRead(kind=kind, problem=problem)
        first = [{"id": each.id, "prompt": each.prompt, "answer": each.answer} for each in found[:SHOWN]]
        answered = sum(each.answer is not None for each in found)
        return TasksRead(path=str(path), kind=kind, count=len(found), answered=answered, first=first)

    def _servers(self, text: str) -> tuple[list[ServerConfig], list[str]]:
        """Return the servers, and what keeps them from being started; raise ValueError where they cannot be read."""
        try:
            data = parse_json(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f'this is no JSON: {error}; paste {{"mcpServers": {{...}}}}') from None
        # As if it were read from where it will stand, so that the digests are those of a run.
        found = parse_config(data, "the pasted text", self._place(text))
        why = "holds a secret, and the text is kept as a file: write ${NAME}, and set that variable for tfactory ui"
        return found, [f"{dotted(key)} {why}" for key, _ in secrets_in(data)]

    def _place(self, text: str) -> Path:
        """Return the folder for a text, by its digest: the same text is kept once, and no name comes from a browser."""
        return self._folder / hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:16]

    def _kept(self, text: str, name: str) -> Path:
        folder = self._place(text)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_aside(folder / name, text)
        return folder / name


def _shown(server: ServerConfig) -> Json:
    """Return what would be started or reached, whole: only what this machine's environment fills in has its name."""

    def plain(text: str) -> str:
        for name, value in server.filled.items():
            if len(value) > 3 and value == os.environ.get(name):
                text = text.replace(value, f"${{{name}}}")
        return text

    command = [plain(each) for each in (server.command, *server.args) if each]
    variables = [f"{name}={plain(value)}" for name, value in sorted((server.env | server.headers).items())]
    about = {"url": plain(server.url), "cwd": plain(server.cwd or "") or None, "variables": variables}
    return {"name": server.name, "command": command, "digest": server.launch} | about


def _kind(text: str) -> str:
    begun = text.lstrip("\ufeff \t\r\n")
    head = next(csv.reader(begun.splitlines()[:1]), [])
    if begun.startswith(("[", "{")):
        return "JSON"  # or an object a line, which is read the same way
    return "CSV" if {each.strip() for each in head} & {"prompt", *PROMPTS} else "lines"
