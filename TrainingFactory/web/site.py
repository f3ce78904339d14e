"""The web UI's server: its API routes, and the files of `static/`."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from socket import socket
from typing import Annotated, Any

from pydantic import BaseModel

from TrainingFactory import __version__
from TrainingFactory.apps.views import runs as views
from TrainingFactory.apps.views import shapes
from TrainingFactory.apps.views.index import Query
from TrainingFactory.apps.views.registry import format_runs_option
from TrainingFactory.common.http.api import ApiError
from TrainingFactory.common.http.site import IN_QUERY, Events, Picture, Site
from TrainingFactory.config import TrainingConfig
from TrainingFactory.config.problems import ConfigError
from TrainingFactory.data.disk import open_regular_file
from TrainingFactory.runs.folder import RunFolder
from TrainingFactory.runs.stopping import stop_run
from TrainingFactory.web import form, processes
from TrainingFactory.web.judges import JudgeRoutes
from TrainingFactory.web.live import RunEvents
from TrainingFactory.web.manage import ManageRoutes
from TrainingFactory.web.play import PlayRoutes
from TrainingFactory.web.pool import Pool
from TrainingFactory.web.registry import RegistryRoutes
from TrainingFactory.web.wizard import WizardRoutes
from TrainingFactory.web.worker import find_index

MAX_PICTURE_BYTES = 100_000_000  # bytes
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
STATIC_FOLDER = Path(__file__).with_name("static")


class SiteInfo(BaseModel):
    version: str
    runs_folder: str
    where: str  # the --runs option that a command needs to find these runs
    now: float  # seconds since 1970


class RunAction(BaseModel):
    name: str
    state: str
    command: str  # equivalent command


class Page:
    """The web UI over the folder of runs. `token` must be sent with every request; None: no authentication.
    `endpoints` are names of model endpoints that the playground may use. Each further part of the UI is a module that
    adds its own routes to this page's `site`."""

    def __init__(
        self, runs_folder: Path, host: str, token: str | None, endpoints: Sequence[str] = ()
    ) -> None:
        self.site = Site("TrainingFactory", __version__, STATIC_FOLDER, host, token)
        self.runs, self.pool = views.Runs(runs_folder), Pool()
        self.run_events = RunEvents(self.runs)
        self._stopped_processes = set[Any]()  # processes of runs that were signalled to stop
        self._stop_lock = threading.Lock()
        get, post = partial(self.site.add, "GET"), partial(self.site.add, "POST")
        get("/api/about", self.describe_site)
        get("/api/events", self.stream_events)
        get("/api/runs", self.list_runs)
        get("/api/runs/{name}", self.run)
        get("/api/runs/{name}/config", self.show_config)
        get("/api/runs/{name}/diff/{other}", self.diff_runs)
        get("/api/runs/{name}/metrics", self.read_metrics)
        get("/api/runs/{name}/log", self.read_log)
        get("/api/runs/{name}/episodes", self.list_episodes)
        get("/api/runs/{name}/episodes/{number}", self.show_episode)
        get("/api/runs/{name}/groups", self.group)
        get("/api/runs/{name}/images/{digest}", self.read_image)
        post("/api/runs/{name}/stop", self.stop)
        post("/api/runs/{name}/resume", self.resume)
        get("/api/options", form.list_options)
        get("/api/starts", self.list_starting_points)
        post("/api/check", self.check)
        post("/api/doctor", self.doctor)
        post("/api/sample", self.sample)
        post("/api/train", self.train)
        ManageRoutes(self.site, self.runs.folder, self.find_run)
        RegistryRoutes(self.site, self.runs.folder, self.pool)
        WizardRoutes(self.site, self.runs.folder, self.pool)
        PlayRoutes(self.site, self.runs, self.pool, endpoints)
        JudgeRoutes(self.site, self.runs.folder, self.find_run)
        self.site.add_files()

    async def serve(self, listener: socket, server: Any) -> None:
        """Serve the UI until Ctrl-C or SIGTERM, then end the worker processes. Runs continue."""
        self.run_events.is_stopping = lambda: server.should_exit
        # read the runs before the first request needs them
        rows_task = asyncio.create_task(asyncio.to_thread(self.runs.list_rows))
        try:
            await server.serve([listener])
        finally:
            await asyncio.gather(rows_task, return_exceptions=True)
            await self.pool.close()

    def stop_runs(self) -> int:
        """Stop the runs that this server started; each saves a checkpoint first. Return how many were running."""
        return processes.stop_runs({process.pid for process in self._stopped_processes})

    def find_run(self, name: str) -> RunFolder:
        """Return the run of that name; respond 404 if there is none. The name is never used as a path."""
        try:
            return self.runs.find(name)
        except ValueError as error:
            raise ApiError(str(error), "name", status=404, code="not_found") from None

    # runs

    def describe_site(self) -> SiteInfo:
        """Return the version and the folder of runs."""
        folder = str(self.runs.folder.resolve())
        option = format_runs_option(self.runs.folder)
        return SiteInfo(version=__version__, runs_folder=folder, where=option, now=time.time())

    def list_runs(self) -> shapes.RunList:
        """List the runs, the oldest first."""
        return shapes.RunList(runs=self.runs.list_rows())

    async def stream_events(self, run: str | None = None) -> Events:
        """Stream changes: events `runs`, and for the named run `metrics`, `log` and `findings`."""
        return self.run_events.stream(None if run is None else self.find_run(run))

    def run(self, name: str) -> shapes.RunView:
        """Show a run in full."""
        return views.make_run_view(self.find_run(name), self.runs)

    def show_config(self, name: str) -> shapes.ConfigView:
        """Show the options of a run."""
        return views.make_config_view(self.find_run(name))

    def diff_runs(self, name: str, other: str) -> shapes.RunDiff:
        """Show the options in which two runs differ."""
        return views.diff_runs([self.find_run(name), self.find_run(other)])

    def read_metrics(self, name: str, after: int = 0) -> shapes.MetricsPart:
        """Return the metrics of a run after byte `after` of their file."""
        return views.read_metrics_part(self.find_run(name), after)

    def read_log(self, name: str, after: int = 0) -> shapes.LogPart:
        """Return the log of a run after byte `after`; a negative value counts from the end."""
        return views.read_log_part(self.find_run(name), after)

    def list_episodes(self, name: str, query: Annotated[Query, IN_QUERY]) -> shapes.EpisodePage:
        """List the matching episodes of a run, page by page."""
        return find_index(self.find_run(name).path).get_page(query)

    def show_episode(self, name: str, number: int) -> shapes.EpisodeView:
        """Show an episode, by its line of trajectories.jsonl."""
        return find_index(self.find_run(name).path).get_episode(number)

    def read_image(self, name: str, digest: str) -> Picture:
        """Return an image of a run's episodes, a PNG file, by its digest."""
        run = self.find_run(name)
        try:
            path = run.images.find_path(digest)
            with open_regular_file(path) as file:
                image_bytes = file.read(MAX_PICTURE_BYTES + 1)
        except (OSError, ValueError):
            raise ApiError(
                f"run {name} has no image {digest[:80]}", "digest", status=404, code="not_found"
            ) from None
        if len(image_bytes) > MAX_PICTURE_BYTES or not image_bytes.startswith(PNG_SIGNATURE):
            raise ApiError(f"image {digest} of run {name} is damaged", "digest", status=500)
        return Picture(image_bytes)

    async def group(
        self, name: str, step: int, task: str, group: str | None = None, credit: bool = True, learner: bool = False
    ) -> shapes.GroupView:  # fmt: skip
        """Show a task's episodes in a step, of one group or of all, with the credit of each token. `learner` adds the
        learner's log-probs, if the weights that sampled the episodes are still stored."""
        path, credit_notes = self.find_run(name).path, list[str]()
        if credit:
            try:
                arguments = {"run": str(path), "step": step, "task": task, "group": group, "learner": learner}
                return shapes.GroupView(**await self.pool.ask("credit", "credit", arguments))
            except ApiError as error:
                credit_notes.append(f"token credit is not available: {error}")
        view = await asyncio.to_thread(find_index(path).get_group, step, task, group)
        return view.model_copy(update={"notes": credit_notes})

    def stop(self, name: str) -> RunAction:
        """Stop a run with a checkpoint, as by Ctrl-C. Repeated requests have no effect."""
        run = self.find_run(name)
        try:
            with self._stop_lock:
                stop_run(run, self._stopped_processes)
        except ValueError as error:
            raise ApiError(str(error), "name", status=409) from error
        return RunAction(name=name, state="stopping", command=f"tfactory runs stop {run.display_path}")

    async def resume(self, name: str) -> RunAction:
        """Resume a run from its last checkpoint, in a separate process."""
        run = self.find_run(name)
        command = await processes.resume(run)
        return RunAction(name=name, state=run.state, command=command)

    # a new run

    def list_starting_points(self) -> form.StartingPoints:
        """List the starting points of a new run."""
        return form.list_starting_points(self.runs.folder)

    def check(self, draft: form.Draft) -> form.DraftCheck:
        """Return all options of a draft, its shortest YAML, and its problems by key."""
        return form.check_draft(draft, self.runs.folder)

    async def train(self, draft: form.Draft) -> RunAction:
        """Start a run in a separate process, which outlives the server."""
        config = _read_draft(draft)
        name, command = await processes.train(form.dump_yaml(config), config, draft.name, self.runs.folder)
        return RunAction(name=name, state="running", command=command)

    async def doctor(self, draft: form.Draft) -> Events:
        """Examine a config with its model; events `told`, then `done` with `findings` and `rows`."""
        return self.pool.stream("check", "doctor", self._make_draft_arguments(draft))

    async def sample(self, draft: form.Draft) -> Events:
        """Play two episodes of a config; events `told`, then `done` with `episodes` and `notes`."""
        return self.pool.stream("check", "sample", self._make_draft_arguments(draft))

    def _make_draft_arguments(self, draft: form.Draft) -> shapes.Json:
        return {"yaml": form.dump_yaml(form.with_runs_folder(_read_draft(draft), self.runs.folder))}


def _read_draft(draft: form.Draft) -> TrainingConfig:
    try:
        return form.read_draft(draft)
    except ConfigError as error:
        problems = form.list_config_problems(error)
        text = "; ".join(f"{problem.key}: {problem.message}".removeprefix(": ") for problem in problems)
        raise ApiError(text, problems[0].key or None) from None
