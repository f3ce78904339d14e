"""All that a run has to do with tools: those handed to it, what their calls share, and the recording."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from TrainingFactory.agent_api.agent_program import AgentProgram
from TrainingFactory.assembly.tools import Handed, make_tool_cache, make_tools
from TrainingFactory.config import TrainingConfig
from TrainingFactory.envs import ToolEnvironment
from TrainingFactory.protocols import ToolSource
from TrainingFactory.runs.folder import RunFolder, is_run, list_runs
from TrainingFactory.tools import AsyncToolExecutor
from TrainingFactory.tools.cache.cache import ToolCache
from TrainingFactory.tools.recording import CALLS, EpisodeKey, Recorder, recorded_tools, save_specs
from TrainingFactory.tools.runtime import ToolRuntime
from TrainingFactory.types import Task, ToolSpec


class RunTools:
    """`given` are tools as Python objects, and `cache` is the caller's instead of the config's. With `replay`, a run or
    a folder with a recording, no tool is made: the model is told what it was told then, and calls are answered as they
    were. `equip` and `close` belong to the run's event loop."""

    def __init__(
        self,
        config: TrainingConfig,
        given: Sequence[Any],
        replay: str | Path | None,
        cache: ToolCache | None = None,
    ) -> None:
        self._config, self._given = config, given
        self._recording = find_recording(replay, config.logging.output_dir) if replay is not None else None
        self._recorder = Recorder(self._recording)
        self._sources: list[ToolSource] = []
        self._program: AgentProgram | None = None
        self._specs: list[ToolSpec] = []
        self._borrowed = cache is not None
        self._cache = None if self._recording else cache or make_tool_cache(config)
        self.runtime = ToolRuntime(cache=self._cache, recorder=self._recorder)

    @property
    def wanted(self) -> bool:
        """Tell whether any are handed to the run besides those that an environment brings."""
        return bool(self._config.tools or self._given)

    @property
    def replayed(self) -> str | None:
        return str(self._recording.resolve()) if self._recording is not None else None

    @property
    def sampled_ahead(self) -> RunFolder | None:
        """Return the run that is replayed, if groups of it were sampled ahead: then their order is what it recorded."""
        if self._recording is None or not is_run(self._recording):
            return None
        run = RunFolder(self._recording)
        return run if run.config.optimization.bound and run.ledger() else None

    async def equip(self, environment: Any) -> Any:
        """Make the tools, open those that have servers, and return the environment with all of them in it."""
        if isinstance(environment, AgentProgram):
            if self._recording is not None:
                raise ValueError("a run with environment.command has no recording that could be replayed")
            await environment.endpoint.open()
            self._program = environment
            return with_tools(environment, self._given)
        if self._recording is not None:
            tools: Sequence[Handed] = recorded_tools(self._recording)
        else:
            tools = make_tools(self._config, self._given, environment)
        self._sources = [tool for tool in tools if isinstance(tool, ToolSource)]
        for source in self._sources:
            await source.open()
        episode = AsyncToolExecutor(tools)
        self._specs = [tool.spec for tool in episode.tools]
        await episode.close()
        return with_tools(environment, tools, self._config.environment.system_prompt)

    def record_to(self, folder: Path) -> None:
        """Record all calls from here on; comes after `equip`."""
        save_specs(folder, self._specs)
        self._recorder.record_to(folder)

    def commit(self, trained: Callable[[EpisodeKey], bool] = lambda _: True) -> None:
        """Write down the calls of episodes that have ended and are used; those of others wait on."""
        self._recorder.commit(trained)

    def drop(self, unwanted: Callable[[EpisodeKey], bool]) -> None:
        """Forget the calls of episodes that are not used."""
        self._recorder.drop(unwanted)
        self.runtime.metrics.drop(unwanted)

    def metrics(self, wanted: Callable[[EpisodeKey], bool] = lambda _: True) -> dict[str, float]:
        """Return the metrics of the calls of these episodes, and of the calls that programs made; nothing where no
        tool was called."""
        programs = {} if self._program is None else self._program.endpoint.metrics()
        return self.runtime.snapshot(wanted) | programs

    def totals(self) -> dict[str, float]:
        """Return those of all calls up to the last `metrics`."""
        return self.runtime.metrics.totals()

    async def close(self) -> None:
        """End servers and processes; again does nothing. Objects of the caller's open again when they are used."""
        sources, self._sources = self._sources, []
        try:
            await asyncio.gather(*(source.close() for source in sources))
            if self._program is not None:
                await self._program.endpoint.close()
        finally:
            self._recorder.close()
            if self._cache is not None:
                self._cache.flush() if self._borrowed else self._cache.close()
                self._cache = None


def with_tools(environment: Any, tools: Sequence[Handed], system_prompt: str | None = None) -> Any:
    """Return the environment with tools and a system prompt of the config's; without either, as it is."""
    if not tools and system_prompt is None:
        return environment
    name = getattr(environment, "__name__", type(environment).__name__)
    if not inspect.isclass(environment) or not issubclass(environment, ToolEnvironment):
        what = "tools" if tools else "environment.system_prompt"
        raise ValueError(f"{what} can be given to a class that inherits from ToolEnvironment; {name} is none")
    parameters = inspect.signature(environment).parameters.values()
    if tools and not any(each.name == "tools" or each.kind == each.VAR_KEYWORD for each in parameters):
        raise ValueError(
            f"{name} takes no tools: its __init__ needs a parameter `tools` that it hands on, as in "
            "def __init__(self, task, tools=()): super().__init__(task, tools)"
        )
    given: Callable[..., None] = environment.__init__
    more = {"tools": list(tools)} if tools else {}

    class Equipped(environment):
        def __init__(self, task: Task) -> None:
            given(self, task, **more)

    Equipped.__name__ = Equipped.__qualname__ = name
    if system_prompt is not None:
        Equipped.system_prompt = system_prompt
    return Equipped


def find_recording(name: str | Path, runs: str | Path) -> Path:
    """Return the folder of a recording: of a run by its name or path, or of a file of episodes."""
    path = Path(name).expanduser()
    for folder in (Path(runs).expanduser() / name, path, recording_beside(path)):
        if (folder / CALLS).is_file():
            return folder
        if is_run(folder):
            raise ValueError(
                f"run {folder.name} has no recording of its tool calls ({CALLS}); it was made with "
                "logging.record_tools=false"
            )
    known = ", ".join(run.name for run in list_runs(runs) if (run.path / CALLS).is_file()) or "none"
    raise ValueError(f"there is no recording {str(name)!r} to replay; the recorded runs in {runs}: {known}")


def recording_beside(episodes: Path) -> Path:
    """Return the folder for the tool calls of a file of episodes: that of `a/b.jsonl` is `a/b.tools`."""
    return episodes.with_name(episodes.name.removesuffix(".jsonl") + ".tools")
