"""Routes of play: a conversation with a model of this machine and the tools of an environment, in a process of its own
for each model; and what of it is kept for training."""

from __future__ import annotations

import asyncio
import json
import re
import secrets
import tempfile
import threading
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, Field

from TrainingFactory import catalog
from TrainingFactory.data.examples import Form, load_examples
from TrainingFactory.http.api import ApiError
from TrainingFactory.http.site import Events, Site
from TrainingFactory.models.names import BUILTIN
from TrainingFactory.services.registry.catalogue import Catalogue, registry_path
from TrainingFactory.services.training.dataset import arguments_fit
from TrainingFactory.services.views.runs import Runs
from TrainingFactory.services.views.shapes import Chat, Json
from TrainingFactory.web.pool import Pool

FOLDER = "datasets"  # in the folder of runs
MOST_OPEN = 64  # conversations that are remembered
Kind = Literal["demonstration", "preference", "verdict"]
FORMS: dict[Kind, Form] = {"demonstration": "sft", "preference": "dpo", "verdict": "kto"}


class Playable(BaseModel):
    models: list[Json]  # name, what, and environment: where it was trained
    environments: list[Json]  # name, what
    datasets: list[Json]  # name, kind, rows, path


class Choose(BaseModel):
    model: str
    environment: str | None = None  # one that GET /api/play lists; None: a plain conversation
    task: str | None = None  # of the environment, by its id; None: words of one's own


class Opened(BaseModel):
    id: str
    model: str
    tools: list[Json]
    messages: list[Chat]  # that the conversation begins with
    tasks: list[Json]  # id, prompt: some of the environment's
    max_length: int  # tokens
    defaults: Json  # temperature, max_tokens
    notes: list[str]


class Say(BaseModel):
    messages: list[Chat] = Field(max_length=1000)  # the whole conversation
    temperature: float = Field(default=1.0, ge=0, le=10)
    max_tokens: int = Field(default=512, ge=1, le=100_000)
    seed: int = 0


class Stopped(BaseModel):
    stopped: bool


class Keep(BaseModel):
    kind: Kind
    messages: list[Chat]  # the whole conversation; of a preference with the better answer
    other: list[Chat] | None = None  # preference: the same with the worse one
    good: bool | None = None  # verdict
    dataset: str = "play"


class Kept(BaseModel):
    path: str
    rows: int
    command: str  # that checks the dataset


@dataclass(slots=True)
class _Play:
    kind: str  # of the process
    given: Json
    stop: Path  # there as soon as the answer shall end
    tools: list[Json]


class PlayRoutes:
    def __init__(self, site: Site, runs: Runs, pool: Pool) -> None:
        self._runs, self._pool, self._lock = runs, pool, threading.Lock()
        self._open: OrderedDict[str, _Play] = OrderedDict()
        self._stops = tempfile.TemporaryDirectory(prefix="tfactory-play-")
        site.add("GET", "/api/play", self.choices)
        site.add("POST", "/api/play", self.begin)
        site.add("POST", "/api/play/{id}/say", self.say)
        site.add("POST", "/api/play/{id}/stop", self.stop)
        site.add("POST", "/api/play/{id}/keep", self.keep)

    def choices(self) -> Playable:
        """List the models and environments of this machine, and the datasets that conversations were kept in."""
        made: list[Json] = [{"name": BUILTIN, "what": "the built-in model, untrained", "environment": None}]
        named: list[Json] = [
            {"name": f"environment:{name}", "what": name}
            for name, alias in catalog.names("environment").items()
            if alias is None and not name.endswith("/")
        ]
        for row in reversed(self._runs.rows()):
            run = self._runs.find(row.name) if row.state != "unreadable" else None
            if run is None:
                continue
            of = f"run:{row.name}" if row.environment else None
            steps = [path.name for path in run.checkpoints()]
            which = ["", *(f"@{name}" for name in (["best", *reversed(steps)] if len(steps) > 1 else []))]
            made += [
                {"name": row.name + each, "what": f"run, {row.algorithm}", "environment": of}
                for each in (which if steps else [])
            ]
            named += [{"name": of, "what": f"as in run {row.name}"}] if of else []
        catalogue = Catalogue(registry_path(self._runs.folder))
        for model in catalogue.names():
            for version in catalogue.versions(model):
                aliases = "".join(f", {alias}" for alias in version.aliases)
                made.append({"name": str(version), "what": f"registered{aliases}", "environment": None})
        return Playable(models=made, environments=named, datasets=self._datasets())

    async def begin(self, asked: Choose) -> Opened:
        """Load a model in a process of its own, and begin a conversation in an environment."""
        known = await asyncio.to_thread(self.choices)
        for field, value, there in (
            ("model", asked.model, known.models),
            ("environment", asked.environment, [{"name": None}, *known.environments]),
        ):
            if value not in [each["name"] for each in there]:
                raise ApiError(f"there is no {field} {value!r} here", field, status=404, code="not_found")
        name = secrets.token_hex(8)
        given = asked.model_dump() | {"id": name, "runs": str(self._runs.folder)}
        play = _Play(f"play:{asked.model}", given, Path(self._stops.name) / name, [])
        told = await self._pool.ask(play.kind, "begin", given)
        play.tools = told["tools"]
        self._open[name] = play
        while len(self._open) > MOST_OPEN:
            self._open.popitem(last=False)
        return Opened(id=name, model=asked.model, **told)

    async def say(self, id: str, asked: Say) -> Events:
        """Answer a conversation; events `told` with `text`, `message` or `results`, then `done` with the new messages.
        Who leaves the page stops the answer."""
        play = self._find(id)
        play.stop.unlink(missing_ok=True)
        given = play.given | asked.model_dump() | {"stop": str(play.stop)}
        return self._pool.events(play.kind, "say", given, play.stop.touch)

    def stop(self, id: str) -> Stopped:
        """End the answer that is being written; what there is of it is kept."""
        self._find(id).stop.touch()
        return Stopped(stopped=True)

    def keep(self, id: str, asked: Keep) -> Kept:
        """Append a conversation to a dataset, as a row that training reads."""
        form, play = FORMS[asked.kind], self._find(id)
        if not re.fullmatch(r"\w[\w-]{0,63}", asked.dataset):
            raise ApiError("a dataset has a name of letters, digits, _ and -, such as play", "dataset")
        row = row_of(asked) | ({"tools": play.tools} if play.tools else {})
        try:
            load_examples([row], form, fits=arguments_fit)
        except ValueError as error:
            raise ApiError(
                f"this cannot be learned from: the row {str(error).partition(' ')[2]}", "messages"
            ) from None
        path = self._runs.folder / FOLDER / f"{asked.dataset}.{form}.jsonl"
        with self._lock:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a", encoding="utf-8", newline="\n") as file:
                file.write(json.dumps(row) + "\n")
            return Kept(path=str(path), rows=_lines(path), command=f"tfactory data check {path} --for {form}")

    def _find(self, id: str) -> _Play:
        if id not in self._open:
            raise ApiError(
                "this conversation is not open any more; begin it again", "id", status=404, code="not_found"
            )
        return self._open[id]

    def _datasets(self) -> list[Json]:
        kinds = {form: kind for kind, form in FORMS.items()}
        found = []
        for path in sorted((self._runs.folder / FOLDER).glob("*.*.jsonl")):
            name, _, form = path.stem.rpartition(".")
            if form in kinds:
                found.append({"name": name, "kind": kinds[form], "rows": _lines(path), "path": str(path)})
        return found


def row_of(asked: Keep) -> dict[str, Any]:
    """Return the row of a dataset that a kept conversation is."""
    if asked.kind == "demonstration":
        return {"messages": asked.messages}
    if asked.kind == "verdict":
        if asked.good is None:
            raise ApiError("a verdict says whether the conversation is good", "good")
        return {"messages": asked.messages, "label": asked.good}
    better, worse = asked.messages, asked.other or []
    pairs = zip(better, worse, strict=False)
    same = next((at for at, (one, other) in enumerate(pairs) if one != other), min(len(better), len(worse)))
    # Up to the answer in which they part: a reply of a tool belongs to the call before it.
    while same and better[same - 1]["role"] in ("assistant", "tool"):
        same -= 1
    return {"prompt": better[:same], "chosen": better[same:], "rejected": worse[same:]}


def _lines(path: Path) -> int:
    with path.open("rb") as file:
        return sum(1 for line in file if line.strip())
