"""Routes of judges: how far they agree with labels, and labels that a person gives to the episodes of a run, kept as the
gold rows that `tfactory judge audit` reads."""

from __future__ import annotations

import json
import shlex
import threading
import time
from collections.abc import Callable
from pathlib import Path

from pydantic import BaseModel, Field

from TrainingFactory.data.disk import write_aside
from TrainingFactory.http.api import ApiError
from TrainingFactory.http.site import Site
from TrainingFactory.options import make_from
from TrainingFactory.services.judge_audit.gold import Row
from TrainingFactory.services.runs.folder import RunFolder
from TrainingFactory.services.views.files import read_json
from TrainingFactory.services.views.registry import audits
from TrainingFactory.services.views.shapes import AuditList, EpisodeView, Json, Number
from TrainingFactory.web.worker import index_of

FOLDER = "labels"  # in the folder of runs
KEPT = ("number", "step", "task", "reward", "label", "score", "time")


class Label(BaseModel):
    """A verdict on an episode: good or bad, or a score in the range of the judge. Neither: the label is taken back."""

    run: str
    number: int  # the line of trajectories.jsonl
    label: bool | None = None
    score: float | None = Field(default=None, allow_inf_nan=False)


class LabelRow(BaseModel):
    number: int
    step: int | None = None
    task: str = ""
    reward: Number = None  # that the run gave it
    label: bool | None = None
    score: Number = None
    time: str = ""


class Labels(BaseModel):
    run: str
    path: str  # of the gold rows
    rows: list[LabelRow]
    unread: int  # lines of the file that are no labels of this page; they stay as they are
    command: str  # that compares a judge with them


class JudgeRoutes:
    """`find` looks a run up by its name."""

    def __init__(self, site: Site, runs: Path, find: Callable[[str], RunFolder]) -> None:
        self._runs, self._find, self._lock = runs, find, threading.Lock()
        site.add("GET", "/api/audits", self.audits)
        site.add("GET", "/api/labels", self.labels)
        site.add("POST", "/api/labels", self.label)

    def audits(self) -> AuditList:
        """List the audits of judges, the oldest first."""
        return audits(self._runs)

    def labels(self, run: str) -> Labels:
        """List the labels that the episodes of a run were given."""
        known, unread = self._read(self._path(run))
        return self._told(run, known, len(unread))

    def label(self, asked: Label) -> Labels:
        """Label an episode, or take its label back."""
        path, view = self._path(asked.run), index_of(self._find(asked.run).path).episode(asked.number)
        row = gold_row(asked, view)
        with self._lock:
            known, unread = self._read(path)
            known.pop(asked.number, None)
            if asked.label is not None or asked.score is not None:
                try:
                    make_from(Row, row, "a gold item")
                except ValueError as error:
                    raise ApiError(f"episode {asked.number} cannot be labelled: {error}", "number") from None
                known[asked.number] = row
            path.parent.mkdir(parents=True, exist_ok=True)
            rows = [json.dumps(each, ensure_ascii=False) for each in known.values()]
            write_aside(path, "".join(f"{line}\n" for line in [*unread, *rows]))
        return self._told(asked.run, known, len(unread))

    def _path(self, run: str) -> Path:
        return self._runs / FOLDER / f"{self._find(run).name}.jsonl"

    def _read(self, path: Path) -> tuple[dict[int, Json], list[str]]:
        """Return the rows by the number of their episode, and the lines that are none."""
        known, unread = dict[int, Json](), list[str]()
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []
        for line in filter(str.strip, lines):
            try:
                row = read_json(line.encode())
                known[LabelRow(**{key: row[key] for key in KEPT if key in row}).number] = row
            except (ValueError, TypeError):  # pydantic's own is a ValueError
                unread.append(line)
        return known, unread

    def _told(self, run: str, known: dict[int, Json], unread: int) -> Labels:
        path = str(self._path(run))
        rows = [LabelRow(**{key: row[key] for key in KEPT if key in row}) for row in known.values()]
        command = f"tfactory judge audit --gold {shlex.quote(path)} --runs {shlex.quote(str(self._runs))}"
        command += " base_url=URL model=NAME"
        return Labels(run=run, path=path, rows=rows, unread=unread, command=command)


def gold_row(asked: Label, view: EpisodeView) -> Json:
    """Return the row of a gold file: the conversation up to the model's last message, the label, and where it is from."""
    said = [*view.prompt, *(each for turn in view.turns for each in (turn.message, *turn.replies))]
    last = max((place for place, each in enumerate(said) if each["role"] == "assistant"), default=-1)
    row = {
        "id": f"{asked.run}/{asked.number}",
        "conversation": said[: last + 1],
        "reference": view.task.get("answer"),
    }
    row |= {key: value for key in ("label", "score") if (value := getattr(asked, key)) is not None}
    about = {"run": asked.run, "number": asked.number, "time": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
    return row | about | {key: getattr(view.row, key) for key in ("step", "task", "reward")}
