"""HTTP routes for judges: their audits, and labels of a run's episodes, saved as gold rows for `tfactory judge
audit`."""

from __future__ import annotations

import json
import shlex
import threading
import time
from collections.abc import Callable
from pathlib import Path

from pydantic import BaseModel, Field

from TrainingFactory.apps.views.registry import format_runs_option, load_audits
from TrainingFactory.apps.views.shapes import AuditList, EpisodeView, Json, Number
from TrainingFactory.common.http.site import Site
from TrainingFactory.data.disk import write_atomically
from TrainingFactory.runs.folder import RunFolder
from TrainingFactory.web.worker import find_index


class Label(BaseModel):
    """Label of an episode: good or bad, or a score in the judge's range; without either, the label is removed."""

    run: str
    number: int  # line of trajectories.jsonl
    label: bool | None = None
    score: float | None = Field(default=None, allow_inf_nan=False)


class LabelRow(Label):
    task: str
    reward: Number = None  # reward that the run gave


class Labels(BaseModel):
    path: str  # file of the gold rows
    rows: list[LabelRow]
    unread: int  # lines of the file that this page did not write; they are preserved
    command: str  # command that audits a judge with these labels


class JudgeRoutes:
    """HTTP routes for judge audits and labels; `find_run` returns the run with a given name."""

    def __init__(self, site: Site, runs_folder: Path, find_run: Callable[[str], RunFolder]) -> None:
        self._runs_folder, self._find_run, self._lock = runs_folder, find_run, threading.Lock()
        site.add("GET", "/api/audits", self.list_audits)
        site.add("GET", "/api/labels", self.list_labels)
        site.add("POST", "/api/labels", self.label)

    def list_audits(self) -> AuditList:
        """List the judge audits, the oldest first."""
        return load_audits(self._runs_folder)

    def list_labels(self, run: str) -> Labels:
        """List the labels of a run's episodes."""
        path = self._get_label_file(run)
        labels, unread_lines = _read_labels(path)
        gold_arguments = f"{shlex.quote(str(path))}{format_runs_option(self._runs_folder)}"
        rows = [LabelRow(**row) for row in labels.values()]
        command = f"tfactory judge audit --gold {gold_arguments} base_url=URL model=NAME"
        return Labels(path=str(path), rows=rows, unread=len(unread_lines), command=command)

    def _get_label_file(self, run_name: str) -> Path:
        return self._runs_folder / "labels" / f"{self._find_run(run_name).name}.jsonl"

    def label(self, request: Label) -> Labels:
        """Label an episode, or remove its label."""
        path = self._get_label_file(request.run)
        row = make_gold_row(request, find_index(self._find_run(request.run).path).get_episode(request.number))
        with self._lock:
            labels, other_lines = _read_labels(path)
            labels.pop(request.number, None)
            if request.label is not None or request.score is not None:
                labels[request.number] = row
            path.parent.mkdir(parents=True, exist_ok=True)
            rows = [json.dumps(label_row, ensure_ascii=False) for label_row in labels.values()]
            write_atomically(path, "".join(f"{line}\n" for line in [*other_lines, *rows]))
        return self.list_labels(request.run)


def make_gold_row(request: Label, view: EpisodeView) -> Json:
    """Return a row of a gold file: the conversation up to the model's last message, the label and its source."""
    messages = [*view.prompt, *(message for turn in view.turns for message in (turn.message, *turn.replies))]
    roles = [message["role"] for message in messages]
    last_index = max((index for index, role in enumerate(roles) if role == "assistant"), default=-1)
    if last_index < 0:
        raise ValueError(f"episode {request.number} has no assistant message to judge")
    row: Json = {"id": f"{request.run}/{request.number}", "conversation": messages[: last_index + 1]}
    row |= {"reference": view.task.get("answer"), "time": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
    row |= request.model_dump(exclude_none=True) | view.row.model_dump(include={"step", "task", "reward"})
    return row


def _read_labels(path: Path) -> tuple[dict[int, Json], list[str]]:
    """Return the labels in a file by episode number, and the lines that this page did not write."""
    labels, other_lines = dict[int, Json](), list[str]()
    for line in path.read_text(encoding="utf-8").split("\n") if path.is_file() else []:
        try:
            row = json.loads(line or "null")
            labels[LabelRow(**row).number] = row
        except (ValueError, TypeError):  # pydantic's own is a ValueError
            other_lines += [line] if line.strip() else []
    return labels, other_lines
