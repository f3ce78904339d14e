"""Routes of the wizard: save pasted MCP servers and tasks as files that a config can name. A pasted server starts only
after the user has seen its command and confirmed its digest."""

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
from TrainingFactory.common.texts import iter_secrets
from TrainingFactory.config.problems import dotted
from TrainingFactory.data.disk import write_atomically
from TrainingFactory.data.tasks import PROMPT_COLUMNS, load_tasks
from TrainingFactory.tools.mcp.config import parse_config, parse_json
from TrainingFactory.tools.mcp.server_config import ServerConfig
from TrainingFactory.web.pool import Pool

WIZARD_FOLDER = "wizard"  # in the folder of runs, so that a resumed run finds its tools and tasks
PREVIEW_TASKS = 5  # tasks in the preview


class PastedText(BaseModel):
    text: str
    confirmed: list[str] = []  # digests of the servers that the user confirmed


class ServerList(BaseModel):
    servers: list[Json]  # name, command (a list) or url, cwd, variables (NAME=VALUE), digest of all these
    problems: list[str]


class ServerTools(BaseModel):
    config: str  # path of the file, for an entry of `tools`
    tools: list[Json]  # server, name, description, parameters


class TaskPreview(BaseModel):
    kind: str  # JSON, CSV, lines
    path: str | None = None  # path of the file, for data.tasks
    count: int = 0
    answered: int = 0  # tasks with a reference answer
    first: list[Json] = []  # id, prompt, answer
    problem: str | None = None


class WizardRoutes:
    def __init__(self, site: Site, runs_folder: Path, pool: Pool) -> None:
        self._folder, self._pool = (runs_folder / WIZARD_FOLDER).resolve(), pool
        site.add("POST", "/api/tools/read", self.read)
        site.add("POST", "/api/tools/open", self.open)
        site.add("POST", "/api/tasks/read", self.save_tasks)

    def read(self, pasted: PastedText) -> ServerList:
        """Show what pasted `mcpServers` would start or connect to. Start and save nothing."""
        try:
            servers, problems = self._parse_servers(pasted.text)
        except ValueError as error:
            servers, problems = [], [str(error)]
        return ServerList(servers=[_describe_server(server) for server in servers], problems=problems)

    async def open(self, pasted: PastedText) -> ServerTools:
        """Start or connect to the servers, all confirmed by their digests, and list their tools."""
        servers, problems = self._parse_servers(pasted.text)
        if problems:
            raise ApiError(problems[0], "text")
        if new_servers := [server.name for server in servers if server.digest not in pasted.confirmed]:
            text = f"{', '.join(new_servers)} changed since it was confirmed; check its command and confirm it again"
            raise ApiError(text, "confirmed", status=409, code="not_confirmed")
        path = str(self._save_text(pasted.text, "mcp.json"))
        return ServerTools(config=path, tools=await self._pool.ask("check", "tools", {"path": path}))

    def save_tasks(self, pasted: PastedText) -> TaskPreview:
        """Read pasted or uploaded tasks (JSONL, JSON, CSV or one question per line) as a run would; save them."""
        syntax, text = _detect_format(pasted.text), pasted.text
        if syntax == "lines":  # the answer may follow after a tab
            cell_rows = [map(str.strip, line.split("\t", 1)) for line in text.splitlines() if line.strip()]
            rows = [dict(zip(("prompt", "answer"), cells, strict=False)) for cells in cell_rows]
            text = "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows)
        path = self._save_text(text, "tasks" + {"JSON": ".json", "CSV": ".csv"}.get(syntax, ".jsonl"))
        try:
            tasks = load_tasks(path)
        except ValueError as error:
            path.unlink()
            problem = str(error).replace(f"{path}, ", "").replace(str(path), "the text")
            return TaskPreview(kind=syntax, problem=problem)
        shown_tasks = [
            {"id": task.id, "prompt": task.prompt, "answer": task.answer} for task in tasks[:PREVIEW_TASKS]
        ]
        num_answered = sum(task.answer is not None for task in tasks)
        return TaskPreview(
            path=str(path), kind=syntax, count=len(tasks), answered=num_answered, first=shown_tasks
        )

    def _parse_servers(self, text: str) -> tuple[list[ServerConfig], list[str]]:
        """Return the servers, and the problems that prevent their start; raise ValueError if the text is invalid."""
        try:
            server_config = parse_json(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f'invalid JSON: {error}; paste {{"mcpServers": {{...}}}}') from None
        # Parsed as if read from its future path, so that the digests equal those of a run.
        servers = parse_config(server_config, "the pasted text", self._get_text_folder(text))
        note = "contains a secret, which would be saved to a file: write ${NAME}, and set that variable for tfactory ui"
        return servers, [f"{dotted(key)} {note}" for key, _ in iter_secrets(server_config)]

    def _get_text_folder(self, text: str) -> Path:
        """Return the folder for a pasted text, named by its digest, because the browser must not choose paths."""
        return self._folder / hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:16]

    def _save_text(self, text: str, file_name: str) -> Path:
        folder = self._get_text_folder(text)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomically(folder / file_name, text)
        return folder / file_name


def _describe_server(server: ServerConfig) -> Json:
    """Return the command or URL of a server entry in full, with environment values shown as ${NAME}."""

    def mask(text: str) -> str:
        for name, value in server.variables.items():
            if len(value) > 3 and value == os.environ.get(name):
                text = text.replace(value, f"${{{name}}}")
        return text

    command = [mask(word) for word in (server.command, *server.args) if word]
    variables = [f"{name}={mask(value)}" for name, value in sorted((server.env | server.headers).items())]
    fields = {"url": mask(server.url), "cwd": mask(server.cwd or "") or None, "variables": variables}
    return {"name": server.name, "command": command, "digest": server.digest} | fields


def _detect_format(text: str) -> str:
    stripped_text = text.lstrip("\ufeff \t\r\n")
    header = next(csv.reader(stripped_text.splitlines()[:1]), [])
    if stripped_text.startswith(("[", "{")):
        return "JSON"  # or JSONL, which is read the same way
    return "CSV" if {cell.strip() for cell in header} & {"prompt", *PROMPT_COLUMNS} else "lines"
