"""All that a run has to do with tools: those handed to it, what their calls share, and the recording."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from TrainingFactory.config import TrainingConfig
from TrainingFactory.services.build import assemble
from TrainingFactory.services.build.tool_sets import ToolSet, with_tools
from TrainingFactory.services.runs.folder import is_run, list_runs
from TrainingFactory.tools.cache.cache import ToolCache
from TrainingFactory.tools.recording import CALLS, Recorder, recorded_tools, save_specs
from TrainingFactory.tools.runtime import ToolRuntime


class RunTools:
    """`given` are tools as Python objects, and `cache` is the caller's instead of the config's. With `replay`, a run or
    a folder with a recording, no tool is made: the model is told what it was told then, and calls are answered as they
    were."""

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
        self._set = ToolSet()
        self._cache, self._borrowed = None, cache is not None
        if self._recording is None:
            self._cache = cache or assemble.make_tool_cache(config)
        self.runtime = ToolRuntime(cache=self._cache, recorder=self._recorder)

    @property
    def wanted(self) -> bool:
        """Whether any are handed to the run besides those that an environment brings."""
        return bool(self._config.tools or self._given)

    @property
    def replayed(self) -> str | None:
        return str(self._recording.resolve()) if self._recording is not None else None

    async def equip(self, environment: Any) -> Any:
        """The environment with the tools in it."""
        if self._recording is not None:
            self._set = ToolSet(recorded_tools(self._recording))
        else:
            self._set = assemble.make_tools(self._config, self._given, environment)
        return with_tools(environment, self._set.tools, self._config.environment.system_prompt)

    def record_to(self, folder: Path) -> None:
        save_specs(folder, self._set.specs())
        self._recorder.record_to(folder)

    def commit(self) -> None:
        """To be called when a batch of episodes has ended."""
        self._recorder.commit()

    def metrics(self) -> dict[str, float]:
        """Of the calls since the last time."""
        return self.runtime.snapshot()

    def totals(self) -> dict[str, float]:
        """Of all calls up to the last `metrics`."""
        return self.runtime.metrics.totals()

    async def close(self) -> None:
        """Ends servers and processes; again does nothing."""
        self._set.close()
        self._recorder.close()
        if self._cache is not None:
            self._cache.flush() if self._borrowed else self._cache.close()
            self._cache = None


def find_recording(name: str | Path, runs: str | Path) -> Path:
    """The folder of a recording: of a run by its name or path, or of a file of episodes."""
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
    """The folder for the tool calls of a file of episodes: that of `a/b.jsonl` is `a/b.tools`."""
    return episodes.with_name(episodes.name.removesuffix(".jsonl") + ".tools")
