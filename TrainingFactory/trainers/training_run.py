"""A training run: from a config to a run folder with a trained model."""

from __future__ import annotations

import shlex
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from TrainingFactory.algorithms.kinds import KINDS
from TrainingFactory.assembly.environment import check_self_play, make_environment
from TrainingFactory.assembly.fleet import join_cluster
from TrainingFactory.assembly.learner_processes import Learners
from TrainingFactory.assembly.named_files import describe_start, find_changed_files
from TrainingFactory.assembly.rewards import check_tasks
from TrainingFactory.assembly.run_tools import RunTools
from TrainingFactory.assembly.sampler import check_chat_template
from TrainingFactory.assembly.vision import with_vision
from TrainingFactory.common.event_loop import run as run_loop
from TrainingFactory.config import TrainingConfig
from TrainingFactory.promotion.model_registry import ModelRegistry
from TrainingFactory.protocols import EnvironmentFactory
from TrainingFactory.resolve import factories
from TrainingFactory.runs.folder import NOTES_KEY, RunFolder, TrainingReport, pick_run_name
from TrainingFactory.runs.notebook_view import make_default_watcher
from TrainingFactory.runs.tracking import Watcher
from TrainingFactory.tools.threads import in_thread
from TrainingFactory.trainers.loop_setup import PreparedRun, count_steps, make_loop, make_task_order
from TrainingFactory.trainers.resolution import ResolvedConfig, resolve_config, validate_config
from TrainingFactory.training.dataset import UserObjects, check_data_unchanged, gather_data
from TrainingFactory.training.interrupts import Interrupts
from TrainingFactory.training.preflight import check_steps


class Training(PreparedRun):
    """A training run.

    The constructor resolves and validates everything that the config names, and creates the run folder; `train` loads
    the model and trains. `run` resumes that run. `replay` names a run (or its folder) whose recorded tool calls are
    served again; no tool is started."""

    def __init__(
        self,
        config: TrainingConfig,
        *,
        name: str | None = None,
        run: RunFolder | None = None,
        objects: UserObjects | None = None,
        watcher: Watcher | None = None,
        replay: str | Path | None = None,
    ) -> None:
        self.watcher = watcher or make_default_watcher()
        self.interrupts = Interrupts(self.watcher.say)
        self.resuming = run is not None
        if run is not None:
            replay = replay or run.run_info.get("replay")
        self.learners = Learners(config if run is None else None)
        resolved_config = resolve_config(config, run, objects or UserObjects(), self.watcher.say)
        self.written_config = resolved_config.written_config
        self.config = resolved_config.config
        self.objects = resolved_config.objects
        self.allocation = resolved_config.allocation
        try:
            reward = validate_config(resolved_config)
            self.tools = RunTools(self.config, self.objects.tools, replay, self.objects.cache)
            with factories.add_searched_places("datasets"):
                self.data = gather_data(self.config, self.objects, self._load_environment(resolved_config))
            self.config = with_vision(self.config, self.data.environment, self.data.tasks, self.data.examples)
            self.order = make_task_order(self.config, self.data.size)
            self.num_steps = count_steps(self.config, self.order)  # fewer if rows turn out to be too long
            check_steps(self.config, self.num_steps)
            train_tasks = self.data.tasks if KINDS[self.config.training.algorithm].samples else ()
            check_tasks(reward, [*train_tasks, *self.data.heldout], self.data.environment)
            check_self_play(self.config, self.data.environment, reward)
            self.tools.check_tasks([*train_tasks, *self.data.heldout])
            if run is None:
                run_info = describe_start(
                    self.written_config, objects or UserObjects(), self.tools, self.data
                )
                notes = {NOTES_KEY: resolved_config.notes}
                run = self.create_run(name or pick_run_name(self.config), run_info | notes)
            else:
                self._check_unchanged(run)
            self.run = run
            self.run.lock()
        except BaseException:
            self._release_allocation()
            raise

    def _load_environment(self, resolved_config: ResolvedConfig) -> EnvironmentFactory | None:
        """Return the environment that the config names; None if the caller gave one or the run needs none."""
        config, objects = resolved_config.config, resolved_config.objects
        if objects.environment is not None:
            return None
        has_rows = objects.examples is not None or config.data.dataset is not None
        is_environment_named = (
            bool(config.environment.environment_id or config.environment.command) or self.tools.is_needed
        )
        if has_rows and not is_environment_named:
            return None

        def add_note(text: str) -> None:
            resolved_config.notes.append(text)
            self.watcher.say(text)

        return make_environment(config, self.tools.is_needed or bool(objects.tasks), add_note)

    def _check_unchanged(self, run: RunFolder) -> None:
        check_data_unchanged(self.data, run.run_info, run.name)
        for file in find_changed_files(run.run_info):
            self.watcher.say(
                f"note: {file} has changed since run {run.name} was started; the run continues with the new version"
            )

    def create_run(self, name: str, run_info: dict[str, Any]) -> RunFolder:
        """Create the run folder. A dry run overrides this to use another place."""
        chat_template = check_chat_template(self.config)
        return RunFolder.create(self.written_config, name, run_info, self.num_steps, chat_template)

    def train(self) -> TrainingReport:
        """Train to the end, or until Ctrl-C: then a checkpoint holds the progress and `state` is interrupted."""
        return run_loop(self.train_async, self.interrupts.request_stop)

    async def train_async(self) -> TrainingReport:
        """Train on the running event loop; otherwise like `train`."""
        async with AsyncExitStack() as exit_stack:
            exit_stack.callback(self._release_allocation)
            exit_stack.callback(self.run.unlock)
            exit_stack.push_async_callback(self.tools.close)
            try:
                await join_cluster(self.config, exit_stack)
                loop = await make_loop(self, exit_stack)
            except BaseException:
                if not self.resuming:
                    self.run.discard()
                raise
            report = await loop.train()
            if report.state == "finished":
                report.version = await in_thread(self._register_model)
            await self.learners.end_ranks(report)
            return report

    def _release_allocation(self) -> None:
        if self.allocation is not None:
            self.allocation.release()

    def _register_model(self) -> str | None:
        """Register the trained model if `registry.name` is set. A failure is reported as a warning, because the run
        itself is finished."""
        registry, output_dir = self.config.registry, self.config.logging.output_dir
        if registry.name is None:
            return None
        checkpoint = f"{self.run.path}@{registry.checkpoint}"
        try:
            version = ModelRegistry(registry.path, output_dir).register(registry.name, checkpoint)
        except (ValueError, OSError) as error:
            registry_option = "" if registry.path is None else f" --registry {registry.path}"
            self.watcher.say(
                f"WARNING the run is finished but could not be registered: {error}. Fix the problem, then run: "
                f"tfactory registry register {registry.name} {shlex.quote(checkpoint)} --runs {output_dir}"
                f"{registry_option}"
            )
            return None
        self.watcher.say(f"registered as {version}")
        return str(version)


def resume(name: str, runs: str | Path = "runs", watcher: Watcher | None = None) -> Training:
    """Resume a run, given by name or folder, from its last checkpoint."""
    run = RunFolder.find(name, runs)
    if kinds := run.run_info.get("objects"):
        raise ValueError(
            f"run {run.name} was started from Python with its own {' and '.join(kinds)}; resume it there: the same "
            f"trainer with name={run.name!r} and resume=True"
        )
    return Training(run.config, run=run, watcher=watcher)
