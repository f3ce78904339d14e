"""Routes that manage a run: annotate, rename and delete it, and evaluate or export its model in a separate process."""

from __future__ import annotations

import re
import shlex
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from TrainingFactory.apps.manage import runs as manage
from TrainingFactory.apps.views.registry import format_runs_option
from TrainingFactory.common.http.api import ApiError
from TrainingFactory.common.http.site import Site
from TrainingFactory.data.disk import open_regular_file
from TrainingFactory.runs.annotations import annotate_run, read_annotations
from TrainingFactory.runs.folder import RunFolder
from TrainingFactory.web import processes

EXPORTS_FOLDER = "exports"  # in the folder of runs: exported models
MAX_OUTPUT_BYTES = 64 << 10  # bytes at the end of a job's output that are read
Checkpoint = Annotated[str, Field(pattern=r"^(last|best|step-\d+)$")]
Count = Annotated[int, Field(ge=1)]


class AnnotationRequest(BaseModel):
    """New annotations of a run: null keeps a field, and `tags` replaces all tags."""

    archived: bool | None = None
    tags: dict[str, str] | None = None
    note: str | None = None


class RenameRequest(BaseModel):
    new_name: str


class DeleteRequest(BaseModel):
    confirm: str  # the name of the run again
    force: bool = False  # although other runs need its files


class EvaluationStart(BaseModel):
    checkpoint: Checkpoint = "last"
    tasks: Count | None = None  # number of held-out tasks; null: as in the run's own evaluations
    episodes: Count | None = None  # per task
    temperature: Annotated[float, Field(ge=0)] | None = None


class ExportStart(BaseModel):
    checkpoint: Checkpoint = "last"
    folder: str  # name of a new folder in `exports/` of the folder of runs
    merge: bool = False  # merge the adapter into its base model
    dtype: Literal["float32", "bfloat16", "float16"] | None = None


class ManagedRun(BaseModel):
    name: str
    command: str  # equivalent command


class ReferenceList(BaseModel):
    needed_by: list[str]  # runs that need files of this one
    copies: list[str]  # runs and registered models that keep what they need themselves
    bytes: int  # size of the run's folder


class JobView(BaseModel):
    number: int
    kind: Literal["eval", "export"]
    state: Literal["running", "finished", "failed"]
    command: str
    started: float  # seconds since 1970
    output: str  # last lines


class JobList(BaseModel):
    jobs: list[JobView]  # the newest first


@dataclass(slots=True)
class _Job:
    run_name: str
    kind: Literal["eval", "export"]
    command: str
    log_file: Path
    log_start: int  # byte of the log at which the job's output starts
    process: subprocess.Popen[Any]
    started: float = field(default_factory=time.time)

    def make_view(self, number: int) -> JobView:
        exit_status = self.process.poll()
        state = "running" if exit_status is None else "failed" if exit_status else "finished"
        output = processes.read_last_lines(self._read_output())
        return JobView(
            number=number, kind=self.kind, state=state, command=self.command, started=self.started, output=output
        )  # fmt: skip

    def _read_output(self) -> bytes:
        try:
            with open_regular_file(self.log_file) as file:
                log_bytes = file.seek(0, 2)
                file.seek(max(self.log_start, log_bytes - MAX_OUTPUT_BYTES))
                return file.read()
        except (OSError, ValueError):  # deleted meanwhile
            return b""


class ManageRoutes:
    def __init__(self, site: Site, runs_folder: Path, find_run: Callable[[str], RunFolder]) -> None:
        self._runs_folder, self._find_run = runs_folder, find_run
        self._jobs: list[_Job] = []
        self._change_lock = threading.Lock()
        site.add("GET", "/api/runs/{name}/references", self.list_references)
        site.add("GET", "/api/runs/{name}/jobs", self.list_jobs)
        for action in (self.annotate, self.rename, self.delete, self.evaluate, self.export, self.cancel):
            site.add("POST", f"/api/runs/{{name}}/{action.__name__}", action)

    def list_references(self, name: str) -> ReferenceList:
        """List what refers to a run, and the size of its folder."""
        references = manage.find_references(self._find_run(name), self._runs_folder)
        return ReferenceList(needed_by=references.needed_by, copies=references.copies, bytes=references.size)

    def annotate(self, name: str, request: AnnotationRequest) -> ManagedRun:
        """Archive a run, or replace its tags or its note."""
        run = self._find_run(name)
        removed_tags = [] if request.tags is None else read_annotations(run).tags.keys() - request.tags.keys()
        annotate_run(
            run, archived=request.archived, tags=request.tags, removed_tags=removed_tags, note=request.note
        )
        return ManagedRun(name=name, command=f"tfactory runs show {run.display_path}")

    def rename(self, name: str, request: RenameRequest) -> ManagedRun:
        """Rename a run that is not running and whose files no other run needs."""
        run = self._find_run(name)
        with self._change_lock, _raise_conflict():
            self._check_idle(name)
            renamed_run = manage.rename_run(run, request.new_name, self._runs_folder)
        arguments = shlex.join(["tfactory", "runs", "rename", name, renamed_run.name])
        return ManagedRun(name=renamed_run.name, command=arguments + format_runs_option(self._runs_folder))

    def delete(self, name: str, request: DeleteRequest) -> ManagedRun:
        """Delete a run that is not running. `force`: although other runs need its files."""
        run = self._find_run(name)
        if request.confirm != name:
            raise ApiError(f"confirm must be the name of the run, {name}", "confirm")
        with self._change_lock, _raise_conflict():
            self._check_idle(name)
            manage.delete_run(run, self._runs_folder, request.force)
        arguments = ["tfactory", "runs", "delete", name, *(["--force"] if request.force else [])]
        return ManagedRun(name=name, command=shlex.join(arguments) + format_runs_option(self._runs_folder))

    # jobs

    def list_jobs(self, name: str) -> JobList:
        """List the evaluations and exports of a run that this server has started."""
        jobs = [job.make_view(number) for number, job in enumerate(self._jobs) if job.run_name == name]
        return JobList(jobs=jobs[::-1])

    def evaluate(self, name: str, request: EvaluationStart) -> JobView:
        """Evaluate a checkpoint of a run on held-out tasks, as `tfactory eval` does."""
        options = [f"logging.output_dir={self._runs_folder.resolve()}"]
        for option in ("tasks", "episodes", "temperature"):
            if (value := getattr(request, option)) is not None:
                options += [f"--{option}", f"{value:g}"]
        return self._start_job(name, "eval", request.checkpoint, options)

    def export(self, name: str, request: ExportStart) -> JobView:
        """Export the model of a run to `exports/` in the folder of runs, as `tfactory export` does."""
        if not re.fullmatch(r"\w[\w.+-]*", request.folder):
            text = f"invalid folder name {request.folder!r}: use letters, digits and . _ + - only"
            raise ApiError(text, "folder")
        folder = (self._runs_folder / EXPORTS_FOLDER / request.folder).resolve()
        if folder.exists():
            raise ApiError(f"{folder} already exists; choose another name", "folder", status=409)
        options = ["--out", str(folder), *(["--merge"] if request.merge else [])]
        options += ["--dtype", request.dtype] if request.dtype else []
        return self._start_job(name, "export", request.checkpoint, options)

    def cancel(self, name: str) -> JobList:
        """Cancel the running evaluation and export of a run."""
        self._find_run(name)
        for job in self._list_running_jobs(name):
            job.process.terminate()
        return self.list_jobs(name)

    def _start_job(
        self, name: str, kind: Literal["eval", "export"], checkpoint: str, options: list[str]
    ) -> JobView:
        run = self._find_run(name)
        log_file = run.path / f"{kind}.log"
        arguments = [kind, f"{run.path.resolve()}@{checkpoint}", *options]
        with self._change_lock:
            if any(job.kind == kind for job in self._list_running_jobs(name)):
                raise ApiError(f"another {kind} of {name} is running; wait for it or cancel it", status=409)
            with open_regular_file(log_file, "ab") as log_stream:
                log_start = log_stream.tell()
                process = processes.launch(arguments, log_stream)
            job = _Job(name, kind, shlex.join(["tfactory", *arguments]), log_file, log_start, process)
            self._jobs.append(job)
        return job.make_view(len(self._jobs) - 1)

    def _list_running_jobs(self, name: str) -> list[_Job]:
        return [job for job in self._jobs if job.run_name == name and job.process.poll() is None]

    def _check_idle(self, name: str) -> None:
        if running_jobs := self._list_running_jobs(name):
            raise ValueError(f"run {name} is in use by its {running_jobs[0].kind}. Wait for it, or cancel it")


@contextmanager
def _raise_conflict() -> Iterator[None]:
    """Respond with status 409 if the action in the block raises ValueError."""
    try:
        yield
    except ValueError as error:
        raise ApiError(str(error), "name", status=409) from error
