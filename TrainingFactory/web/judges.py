"""Routes of judges: how far they agree with labels, and labels that a person gives to the episodes of a run, kept as
the gold rows that `tfactory judge audit` reads."""

from __future__ import annotations

import json
import shlex
import threading
import time
from collections.abc import Callable
from pathlib import Path

from pydantic import BaseModel, Field

from TrainingFactory.apps.views.registry import audits, where_of
from TrainingFactory.apps.views.shapes import AuditList, EpisodeView, Json, Number
from TrainingFactory.common.http.site import Site
from TrainingFactory.data.disk import write_aside
from TrainingFactory.runs.folder import RunFolder
from TrainingFactory.web.worker import index_of


class Label(BaseModel):
    """A verdict on an episode: good or bad, or a score in the range of the judge. Neither: the label is taken back."""

    run: str
    number: int  # the line of trajectories.jsonl
    label: bool | None = None
    score: float | None = Field(default=None, allow_inf_nan=False)


class LabelRow(Label):
    task: str
    reward: Number = None  # that the run gave it


class Labels(BaseModel):
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
        path = self._path(run)
        known, unread = _read(path)
        gold = f"{shlex.quote(str(path))}{where_of(self._runs)}"
        rows = [LabelRow(**row) for row in known.values()]
        command = f"tfactory judge audit --gold {gold} base_url=URL model=NAME"
        return Labels(path=str(path), rows=rows, unread=len(unread), command=command)

    def _path(self, run: str) -> Path:
        return self._runs / "labels" / f"{self._find(run).name}.jsonl"

    def label(self, asked: Label) -> Labels:
        """Label an episode, or take its label back."""
        path = self._path(asked.run)
        row = gold_row(asked, index_of(self._find(asked.run).path).episode(asked.number))
        with self._lock:
            known, unread = _read(path)
            known.pop(asked.number, None)
            if asked.label is not None or asked.score is not None:
                known[asked.number] = row
            path.parent.mkdir(parents=True, exist_ok=True)
            rows = [json.dumps(each, ensure_ascii=False) for each in known.values()]
            write_aside(path, "".join(f"{line}\n" for line in [*unread, *rows]))
        return self.labels(asked.run)


def gold_row(asked: Label, view: EpisodeView) -> Json:
    """Return the row of a gold file: the conversation up to the model's last message, the label, where it is from."""
    said = [*view.prompt, *(each for turn in view.turns for each in (turn.message, *turn.replies))]
    last = max((place for place, each in enumerate(said) if each["role"] == "assistant"), default=-1)
    if last < 0:
        raise ValueError(f"the model said nothing in episode {asked.number}; there is nothing to judge")
    row: Json = {"id": f"{asked.run}/{asked.number}", "conversation": said[: last + 1]}
    row |= {"reference": view.task.get("answer"), "time": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
    row |= asked.model_dump(exclude_none=True) | view.row.model_dump(include={"step", "task", "reward"})
    return row


def _read(path: Path) -> tuple[dict[int, Json], list[str]]:
    """Return the rows by the number of their episode, and the lines that are none of ours."""
    known, unread = dict[int, Json](), list[str]()
    for line in path.read_text(encoding="utf-8").split("\n") if path.is_file() else []:
        try:
            row = json.loads(line or "null")
            known[LabelRow(**row).number] = row
        except (ValueError, TypeError):  # pydantic's own is a ValueError
            unread += [line] if line.strip() else []
    return known, unread
