"""The tools of a run: opening and closing them, their shared runtime, and the recording of their calls."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from TrainingFactory.agent_api.agent_program import AgentProgram
from TrainingFactory.assembly.local_judge import LocalJudge
from TrainingFactory.assembly.tools import ToolOrSource, make_tool_cache, make_tools
from TrainingFactory.assembly.users import make_user
from TrainingFactory.config import TrainingConfig
from TrainingFactory.envs import ToolEnvironment
from TrainingFactory.envs.process.pool import ProcessPool
from TrainingFactory.envs.users import with_simulated_user
from TrainingFactory.envs.web_page.devtools import SharedBrowser
from TrainingFactory.protocols import ToolSource
from TrainingFactory.runs.folder import RunFolder, is_run, list_runs
from TrainingFactory.tools import AsyncToolExecutor
from TrainingFactory.tools.cache.cache import ToolCache
from TrainingFactory.tools.recording import CALLS_FILE, EpisodeKey, Recorder, load_recorded_tools, save_specs
from TrainingFactory.tools.runtime import ToolRuntime
from TrainingFactory.types import Task, ToolSpec


class RunTools:
    """The tools of a run. `user_tools` are tools as Python objects; `cache` replaces the config's. With `replay`, a run
    or a folder with a recording, no tool is started: specs and results come from the recording. Call `equip` and
    `close` on the run's event loop."""

    def __init__(
        self,
        config: TrainingConfig,
        user_tools: Sequence[Any],
        replay: str | Path | None,
        cache: ToolCache | None = None,
    ) -> None:
        self._config, self._user_tools = config, user_tools
        self._recording = find_recording(replay, config.logging.output_dir) if replay is not None else None
        self._recorder = Recorder(self._recording)
        self._tool_sources: list[ToolSource] = []
        self._program: AgentProgram | None = None
        self._get_environment_metrics: Callable[[], dict[str, float]] = dict
        self._environment_pool: ProcessPool | SharedBrowser | None = None
        self._user = make_user(config, is_replaying=self._recording is not None)
        self._specs: list[ToolSpec] = []
        self._shares_cache = cache is not None
        self._cache = None if self._recording else cache or make_tool_cache(config)
        self.runtime = ToolRuntime(cache=self._cache, recorder=self._recorder)

    @property
    def is_needed(self) -> bool:
        """Return whether the config or the caller adds tools to those of the environment."""
        return bool(self._config.tools or self._user_tools)

    @property
    def recording_path(self) -> str | None:
        return str(self._recording.resolve()) if self._recording is not None else None

    @property
    def sampled_ahead_run(self) -> RunFolder | None:
        """Return the replayed run if it used async rollouts, so that its groups are trained in their recorded order."""
        if self._recording is None or not is_run(self._recording):
            return None
        run = RunFolder(self._recording)
        return run if run.config.optimization.effective_max_staleness and run.read_ledger() else None

    async def equip(self, environment: Any) -> Any:
        """Make the tools, start their servers, and return the environment with the tools added. Start the endpoint of
        an agent program, and a simulated user that the run serves itself."""
        if isinstance(environment, AgentProgram):
            if self._recording is not None:
                raise ValueError("a run with environment.command has no recording to replay")
            await environment.endpoint.open()
            self._program = environment
            return with_tools(environment, self._user_tools)
        self._environment_pool = getattr(environment, "pool", None)
        if self._recording is not None:
            tools: Sequence[ToolOrSource] = load_recorded_tools(self._recording)
        else:
            tools = make_tools(self._config, self._user_tools, environment)
        self._tool_sources = [tool for tool in tools if isinstance(tool, ToolSource)]
        for tool_source in self._tool_sources:
            await tool_source.open()
        executor = AsyncToolExecutor(tools)
        self._specs = [tool.spec for tool in executor.tools]
        await executor.close()
        environment = with_tools(environment, tools, self._config.environment.system_prompt)
        if self._user is not None:
            model = self._user.client.model
            if isinstance(model, LocalJudge) and self._recording is None:
                await model.open()  # its start takes longer than an episode's timeout
            environment = with_simulated_user(environment, self._user)
        self._get_environment_metrics = getattr(environment, "run_metrics", dict)
        return environment

    def check_tasks(self, tasks: Sequence[Task]) -> None:
        """Raise for a task that lacks a column that the simulated user needs."""
        if self._user is not None:
            for task in tasks:
                self._user.brief.render_instructions(task)

    def record_to(self, folder: Path) -> None:
        """Record all calls from now on; call it after `equip`."""
        save_specs(folder, self._specs)
        self._recorder.record_to(folder)

    def commit(self, is_trained: Callable[[EpisodeKey], bool] = lambda _: True) -> None:
        """Write the calls of finished episodes for which `is_trained` is true; the calls of others stay in memory."""
        self._recorder.commit(is_trained)

    def drop(self, is_unwanted: Callable[[EpisodeKey], bool]) -> None:
        """Discard the recorded calls and metrics of the episodes for which `is_unwanted` is true."""
        self._recorder.drop(is_unwanted)
        self.runtime.metrics.drop(is_unwanted)

    def metrics(self, is_included: Callable[[EpisodeKey], bool] = lambda _: True) -> dict[str, float]:
        """Return the metrics of tool calls in the `is_included` episodes, the request counts of agent programs, and the
        result of the environment's class method `run_metrics`; empty if there were none."""
        program_metrics = {} if self._program is None else self._program.endpoint.pop_metrics()
        return self.runtime.snapshot(is_included) | program_metrics | self._get_environment_metrics()

    def totals(self) -> dict[str, float]:
        """Return the metrics of all tool calls up to the last call of `metrics`."""
        return self.runtime.metrics.get_totals()

    async def close(self) -> None:
        """Stop servers and processes; a second call does nothing. The caller's own tool objects open again on their
        next use."""
        tool_sources, self._tool_sources = self._tool_sources, []
        try:
            await asyncio.gather(*(tool_source.close() for tool_source in tool_sources))
            if self._program is not None:
                await self._program.endpoint.close()
            if self._environment_pool is not None:
                await self._environment_pool.close()
            if self._user is not None:
                await self._user.close()
        finally:
            self._recorder.close()
            if self._cache is not None:
                self._cache.flush() if self._shares_cache else self._cache.close()
                self._cache = None


def with_tools(environment: Any, tools: Sequence[ToolOrSource], system_prompt: str | None = None) -> Any:
    """Return the environment class with `tools` and `system_prompt` added; unchanged without either."""
    if not tools and system_prompt is None:
        return environment
    class_name = getattr(environment, "__name__", type(environment).__name__)
    if not inspect.isclass(environment) or not issubclass(environment, ToolEnvironment):
        option = "tools" if tools else "environment.system_prompt"
        raise ValueError(f"{option} needs a class that inherits from ToolEnvironment; {class_name} does not")
    parameters = inspect.signature(environment).parameters.values()
    if tools and not any(
        parameter.name == "tools" or parameter.kind == parameter.VAR_KEYWORD for parameter in parameters
    ):
        raise ValueError(
            f"{class_name} takes no tools: its __init__ needs a parameter `tools` that it passes on, as in "
            "def __init__(self, task, tools=()): super().__init__(task, tools)"
        )
    base_init: Callable[..., None] = environment.__init__
    options = {"tools": list(tools)} if tools else {}

    class EquippedEnvironment(environment):
        def __init__(self, task: Task) -> None:
            base_init(self, task, **options)

    EquippedEnvironment.__name__ = EquippedEnvironment.__qualname__ = class_name
    if system_prompt is not None:
        EquippedEnvironment.system_prompt = system_prompt
    return EquippedEnvironment


def find_recording(run_or_folder: str | Path, runs: str | Path) -> Path:
    """Return the folder of a recording by a run's name, a path, or a file of episodes."""
    path = Path(run_or_folder).expanduser()
    for folder in (Path(runs).expanduser() / run_or_folder, path, get_recording_folder(path)):
        if (folder / CALLS_FILE).is_file():
            return folder
        if is_run(folder):
            raise ValueError(
                f"run {folder.name} has no recording of its tool calls ({CALLS_FILE}): it ran with "
                "logging.record_tools=false"
            )
    recordings = ", ".join(run.name for run in list_runs(runs) if (run.path / CALLS_FILE).is_file()) or "none"
    raise ValueError(
        f"there is no recording {str(run_or_folder)!r} to replay; the recorded runs in {runs}: {recordings}"
    )


def get_recording_folder(episodes_file: Path) -> Path:
    """Return the folder with the tool calls of a file of episodes: `a/b.tools` for `a/b.jsonl`."""
    return episodes_file.with_name(episodes_file.name.removesuffix(".jsonl") + ".tools")
