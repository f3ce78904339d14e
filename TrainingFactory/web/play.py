"""Routes of the playground: conversations with a model (one worker process each) and tools, saved as datasets. The
model is local, or behind an endpoint that the user named outside of the browser: when starting the UI, or in a file of
the working directory. This way no address from a browser receives a request or an API key."""

from __future__ import annotations

import asyncio
import json
import secrets
import shlex
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, Field

from TrainingFactory.apps.views.runs import Runs
from TrainingFactory.apps.views.shapes import ChatMessage, Json
from TrainingFactory.common import catalog
from TrainingFactory.common.endpoints.names import endpoint_files, find_endpoint
from TrainingFactory.common.http.api import ApiError
from TrainingFactory.common.http.site import Events, Site
from TrainingFactory.data.examples import Form, load_examples
from TrainingFactory.models.names import TINY_ID
from TrainingFactory.registry.catalogue import Catalogue, get_registry_path
from TrainingFactory.runs.folder import RunFolder
from TrainingFactory.training.dataset import find_call_problem
from TrainingFactory.web.pool import Pool

FORM_BY_KIND: dict[str, Form] = {"demonstration": "sft", "preference": "dpo", "verdict": "kto"}
ENDPOINT_KIND = "endpoint"  # what a model behind an endpoint is


class PlayChoices(BaseModel):
    models: list[Json]  # name, what, environment (in which it was trained)
    environments: list[Json]  # name, what


class ConversationRequest(BaseModel):
    model: str
    environment: str | None = None  # name from GET /api/play; None: a plain conversation
    task: str | None = None  # id of one of the environment's tasks; None: the user writes the first message


class OpenedConversation(BaseModel):
    id: str
    tools: list[Json]
    messages: list[ChatMessage]  # initial messages of the conversation
    tasks: list[Json]  # id, prompt: some of the environment's tasks
    max_length: int | None  # tokens; None: the endpoint limits its own context
    temperature: float  # sampling temperature of its training
    max_tokens: int
    # of a model behind an endpoint: model, host, key (its variable), notes (what it cannot do), ignored (settings that
    # are not sent), spent (requests, tokens, cost, limits)
    endpoint: Json | None = None


class AnswerRequest(BaseModel):
    messages: list[ChatMessage] = Field(min_length=1)  # the whole conversation
    temperature: float = Field(default=1.0, ge=0, le=10)
    max_tokens: int = Field(default=512, ge=1)
    seed: int = 0


class SaveRequest(BaseModel):
    kind: Literal["demonstration", "preference", "verdict"]
    messages: list[ChatMessage]  # the whole conversation; for a preference, with the better answer
    other: list[ChatMessage] = []  # for a preference: the same conversation with the worse answer
    good: bool = True  # for a verdict
    dataset: str = Field(default="play", pattern=r"^\w[\w-]{0,63}$")


class SavedRow(BaseModel):
    path: str
    rows: int
    command: str  # command that checks the dataset


class PlayRoutes:
    def __init__(self, site: Site, runs: Runs, pool: Pool, endpoints: Sequence[str]) -> None:
        self._runs, self._pool, self._lock = runs, pool, threading.Lock()
        self._named_endpoints = endpoints
        self._sessions: dict[str, Json] = {}  # id -> arguments of its jobs, and `tools`
        self._folder = tempfile.TemporaryDirectory(prefix="tfactory-play-")
        self._cost_files: dict[str, str] = {}  # endpoint -> file with its paid replies; its process may end
        site.add("GET", "/api/play", self.list_choices)
        site.add("POST", "/api/play", self.begin)
        site.add("POST", "/api/play/{id}/say", self.say)
        site.add("POST", "/api/play/{id}/stop", self.stop)
        site.add("POST", "/api/play/{id}/keep", self.keep)

    def list_choices(self) -> PlayChoices:
        """List the models and environments of the playground."""
        aliases = catalog.names("environment").items()
        names = [name for name, alias in aliases if alias is None and not name.endswith("/")]
        environments: list[Json] = [{"name": f"environment:{name}", "what": name} for name in names]
        models: list[Json] = [{"name": TINY_ID, "what": "built in, untrained", "environment": None}]
        for row in (row for row in reversed(self._runs.list_rows()) if row.algorithm):
            environment = f"run:{row.name}" if row.environment else None
            environments += [{"name": environment, "what": f"as in run {row.name}"}] if environment else []
            steps = [path.name for path in RunFolder(self._runs.folder / row.name).checkpoints()]
            suffixes = ["", *(f"@{name}" for name in (["best", *reversed(steps)] if len(steps) > 1 else []))]
            fields = {"what": f"run, {row.algorithm}", "environment": environment}
            models += [fields | {"name": row.name + suffix} for suffix in (suffixes if steps else [])]
        for version in Catalogue(get_registry_path(self._runs.folder)).versions():
            label = ", ".join(["registered", *version.aliases])
            models.append({"name": str(version), "what": label, "environment": None})
        local_names = {model["name"] for model in models}
        models += [_make_endpoint_row(name) for name in self._list_endpoints() if name not in local_names]
        return PlayChoices(models=models, environments=environments)

    def _list_endpoints(self) -> list[str]:
        """Return the unique endpoints of the command line and of the working directory's endpoint files."""
        return list(dict.fromkeys([*self._named_endpoints, *(str(path) for path in endpoint_files(Path()))]))

    async def begin(self, request: ConversationRequest) -> OpenedConversation:
        """Load a model in its worker process, and begin a conversation in an environment."""
        play_choices = await asyncio.to_thread(self.list_choices)
        choices = {"model": play_choices.models, "environment": [{"name": None}, *play_choices.environments]}
        for field, options in choices.items():
            if (value := getattr(request, field)) not in [option["name"] for option in options]:
                raise ApiError(f"unknown {field} {value!r}", field, status=404, code="not_found")
        arguments = request.model_dump() | {"id": secrets.token_hex(8), "runs": str(self._runs.folder)}
        arguments["spending"] = self._find_spending_file(request.model, play_choices.models)
        reply = await self._pool.ask(f"play:{request.model}", "begin", arguments)
        self._sessions[arguments["id"]] = arguments | {"tools": reply["tools"], "stop": self._folder.name}
        return OpenedConversation(id=arguments["id"], **reply)

    async def say(self, id: str, request: AnswerRequest) -> Events:
        """Sample an answer: events `told` with text, message or results, then `done` with the new messages."""
        conversation = self._find_session(id)
        # A new file per answer, because the previous one may still be ending.
        conversation["stop"] = stop_file = f"{self._folder.name}/{secrets.token_hex(8)}"
        arguments = conversation | request.model_dump()
        return self._pool.stream(f"play:{conversation['model']}", "say", arguments, Path(stop_file).touch)

    def stop(self, id: str) -> ConversationRequest:
        """Stop the answer that is being sampled; keep what was sampled. Return the conversation."""
        Path(self._find_session(id)["stop"]).touch()
        return ConversationRequest(**self._find_session(id))

    def keep(self, id: str, request: SaveRequest) -> SavedRow:
        """Append a conversation to a dataset as a training row."""
        form, tools, messages = FORM_BY_KIND[request.kind], self._find_session(id)["tools"], request.messages
        rows_by_form = {"sft": {"messages": messages}, "kto": {"messages": messages, "label": request.good}}
        row = rows_by_form.get(form, {"chosen": messages, "rejected": request.other})
        row |= {"tools": tools} if tools else {}
        load_examples([row], form, check_call=find_call_problem)  # raises if training could not use the row
        path = self._runs.folder / "datasets" / f"{request.dataset}.{form}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        with self._lock, path.open("a+", encoding="utf-8", newline="\n") as file:
            file.write(json.dumps(row) + "\n")
            file.seek(0)
            num_rows = sum(1 for _ in file)
        command = shlex.join(["tfactory", "data", "check", str(path), "--for", form])
        return SavedRow(path=str(path), rows=num_rows, command=command)

    def _find_spending_file(self, model: str, model_rows: Sequence[Json]) -> str | None:
        """Return the file in which an endpoint's paid replies are logged; None for a local model."""
        if next(row["what"] for row in model_rows if row["name"] == model).partition(",")[0] != ENDPOINT_KIND:
            return None
        return self._cost_files.setdefault(model, f"{self._folder.name}/{secrets.token_hex(8)}.jsonl")

    def _find_session(self, id: str) -> Json:
        if (conversation := self._sessions.get(id)) is None:
            raise ApiError("unknown conversation; begin a new one", "id", status=404, code="not_found")
        return conversation


def _make_endpoint_row(endpoint_name: str) -> Json:
    """Return the list row of an endpoint with the host and the API key's variable, never the key itself."""
    try:
        endpoint = find_endpoint(endpoint_name).make_endpoint()
        description = f"{endpoint.model} at {endpoint.host}, key {endpoint.api_key_env or 'none'}"
    except ValueError:  # beginning a conversation reports it
        description = "invalid options"
    return {"name": endpoint_name, "what": f"{ENDPOINT_KIND}, {description}", "environment": None}
