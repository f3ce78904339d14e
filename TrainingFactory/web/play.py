"""Routes of play: a conversation with a model of this machine and the tools of an environment, in a process of its own
for each model; and what of it is kept for training."""

from __future__ import annotations

import asyncio
import json
import secrets
import shlex
import tempfile
import threading
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, Field

from TrainingFactory.apps.views.runs import Runs
from TrainingFactory.apps.views.shapes import Chat, Json
from TrainingFactory.common import catalog
from TrainingFactory.common.http.api import ApiError
from TrainingFactory.common.http.site import Events, Site
from TrainingFactory.data.examples import Form, load_examples
from TrainingFactory.models.names import BUILTIN
from TrainingFactory.registry.catalogue import Catalogue, registry_path
from TrainingFactory.runs.folder import RunFolder
from TrainingFactory.training.dataset import arguments_fit
from TrainingFactory.web.pool import Pool

FORMS: dict[str, Form] = {"demonstration": "sft", "preference": "dpo", "verdict": "kto"}


class Playable(BaseModel):
    models: list[Json]  # name, what, and environment: where it was trained
    environments: list[Json]  # name, what


class Choose(BaseModel):
    model: str
    environment: str | None = None  # one that GET /api/play lists; None: a plain conversation
    task: str | None = None  # of the environment, by its id; None: words of one's own


class Opened(BaseModel):
    id: str
    tools: list[Json]
    messages: list[Chat]  # that the conversation begins with
    tasks: list[Json]  # id, prompt: some of the environment's
    max_length: int  # tokens
    temperature: float  # that it was trained with
    max_tokens: int


class Say(BaseModel):
    messages: list[Chat] = Field(min_length=1)  # the whole conversation
    temperature: float = Field(default=1.0, ge=0, le=10)
    max_tokens: int = Field(default=512, ge=1)
    seed: int = 0


class Keep(BaseModel):
    kind: Literal["demonstration", "preference", "verdict"]
    messages: list[Chat]  # the whole conversation; of a preference with the better answer
    other: list[Chat] = []  # preference: the same with the worse one
    good: bool = True  # verdict
    dataset: str = Field(default="play", pattern=r"^\w[\w-]{0,63}$")


class Kept(BaseModel):
    path: str
    rows: int
    command: str  # that checks the dataset


class PlayRoutes:
    def __init__(self, site: Site, runs: Runs, pool: Pool) -> None:
        self._runs, self._pool, self._lock = runs, pool, threading.Lock()
        self._open: dict[str, Json] = {}  # by id: what a job is given, and `tools`
        self._stops = tempfile.TemporaryDirectory(prefix="tfactory-play-")
        site.add("GET", "/api/play", self.choices)
        site.add("POST", "/api/play", self.begin)
        site.add("POST", "/api/play/{id}/say", self.say)
        site.add("POST", "/api/play/{id}/stop", self.stop)
        site.add("POST", "/api/play/{id}/keep", self.keep)

    def choices(self) -> Playable:
        """List the models of this machine that can be played with, and the environments to do it in."""
        known = catalog.names("environment").items()
        own = [name for name, alias in known if alias is None and not name.endswith("/")]
        environments: list[Json] = [{"name": f"environment:{name}", "what": name} for name in own]
        models: list[Json] = [{"name": BUILTIN, "what": "built in, untrained", "environment": None}]
        for row in (row for row in reversed(self._runs.rows()) if row.algorithm):
            of = f"run:{row.name}" if row.environment else None
            environments += [{"name": of, "what": f"as in run {row.name}"}] if of else []
            steps = [path.name for path in RunFolder(self._runs.folder / row.name).checkpoints()]
            which = ["", *(f"@{name}" for name in (["best", *reversed(steps)] if len(steps) > 1 else []))]
            about = {"what": f"run, {row.algorithm}", "environment": of}
            models += [about | {"name": row.name + each} for each in (which if steps else [])]
        for version in Catalogue(registry_path(self._runs.folder)).versions():
            what = ", ".join(["registered", *version.aliases])
            models.append({"name": str(version), "what": what, "environment": None})
        return Playable(models=models, environments=environments)

    async def begin(self, asked: Choose) -> Opened:
        """Load a model in a process of its own, and begin a conversation in an environment."""
        known = await asyncio.to_thread(self.choices)
        for field, there in (("model", known.models), ("environment", [{"name": None}, *known.environments])):
            if (value := getattr(asked, field)) not in [each["name"] for each in there]:
                raise ApiError(f"there is no {field} {value!r} here", field, status=404, code="not_found")
        given = asked.model_dump() | {"id": secrets.token_hex(8), "runs": str(self._runs.folder)}
        told = await self._pool.ask(f"play:{asked.model}", "begin", given)
        self._open[given["id"]] = given | {"tools": told["tools"], "stop": self._stops.name}
        return Opened(id=given["id"], **told)

    async def say(self, id: str, asked: Say) -> Events:
        """Answer a conversation: events `told` with text, message or results, then `done` with the new messages."""
        of = self._find(id)
        of["stop"] = stop = f"{self._stops.name}/{secrets.token_hex(8)}"  # one before may still be ending
        return self._pool.events(f"play:{of['model']}", "say", of | asked.model_dump(), Path(stop).touch)

    def stop(self, id: str) -> Choose:
        """End the answer that is being written, in the conversation that is returned; what there is of it is kept."""
        Path(self._find(id)["stop"]).touch()
        return Choose(**self._find(id))

    def keep(self, id: str, asked: Keep) -> Kept:
        """Append a conversation to a dataset, as a row that training reads."""
        form, tools, said = FORMS[asked.kind], self._find(id)["tools"], asked.messages
        rows = {"sft": {"messages": said}, "kto": {"messages": said, "label": asked.good}}
        row = rows.get(form, {"chosen": said, "rejected": asked.other}) | ({"tools": tools} if tools else {})
        load_examples([row], form, fits=arguments_fit)  # raises where it cannot be learned from
        path = self._runs.folder / "datasets" / f"{asked.dataset}.{form}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        with self._lock, path.open("a+", encoding="utf-8", newline="\n") as file:
            file.write(json.dumps(row) + "\n")
            file.seek(0)
            count = sum(1 for _ in file)
        command = shlex.join(["tfactory", "data", "check", str(path), "--for", form])
        return Kept(path=str(path), rows=count, command=command)

    def _find(self, id: str) -> Json:
        if (found := self._open.get(id)) is None:
            raise ApiError(
                "this conversation is not open here; begin it again", "id", status=404, code="not_found"
            )
        return found
