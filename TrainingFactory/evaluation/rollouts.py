"""Run episodes without training: save each as it ends, sum them up."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from TrainingFactory.assembly import rewards as build_rewards
from TrainingFactory.assembly.environment import check_tools, make_environment
from TrainingFactory.assembly.fleet import await_engines, join_cluster
from TrainingFactory.assembly.rewards import check_group, check_reward, judge_metrics, make_reward
from TrainingFactory.assembly.run_tools import RunTools, recording_beside
from TrainingFactory.assembly.sampler import make_rollouts, make_sampler
from TrainingFactory.common.event_loop import run as run_anywhere
from TrainingFactory.config import TrainingConfig
from TrainingFactory.data.trajectories import save_trajectories
from TrainingFactory.protocols import EnvironmentFactory, RewardFunction
from TrainingFactory.resolve import factories
from TrainingFactory.resolve.model_names import with_model
from TrainingFactory.rollout import rollout_metrics
from TrainingFactory.runs.folder import not_taken, short_name
from TrainingFactory.tools.recording import CALLS
from TrainingFactory.tools.threads import in_thread
from TrainingFactory.training.dataset import Objects, make_tasks
from TrainingFactory.training.interrupts import Interrupts, Stopped
from TrainingFactory.types import Task, Trajectory


@dataclass(slots=True)
class Report:
    """What came of it; with `interrupted`, the episodes that had ended."""

    trajectories: list[Trajectory]
    metrics: dict[str, float]
    interrupted: bool = False


class Rollouts:
    """`out` is the JSONL file for the episodes, by default a new one; with logging.record_tools set to true the tool
    calls are in a folder beside it, which `replay` can name. `choose` says what of the config's reward scores them."""

    def __init__(
        self,
        config: TrainingConfig,
        out: Path | None = None,
        group_size: int = 1,
        tools: Sequence[Any] = (),
        replay: str | Path | None = None,
        choose: Callable[[RewardFunction | None], RewardFunction | None] = lambda reward: reward,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        config = factories.by_file(config, say)
        found = factories.with_rows(config, Objects(), say)
        self.config = config = with_model(config)
        self.group_size, self._choose, self._say = group_size, choose, say
        self.tools = RunTools(config, tools, replay)
        checked = check_reward(config)
        check_group(choose(checked), group_size)
        self.environment: EnvironmentFactory = make_environment(config, self.tools.wanted, say)
        with factories.told_with_places("datasets"):
            self.tasks = list(found.tasks or ()) or make_tasks(config, self.environment)
        build_rewards.check_tasks(checked, self.tasks)
        save_trajectories(os.devnull, (Trajectory(task, group="") for task in self.tasks))  # can they be?
        # Played one after the other until what has been played is enough; together all tasks.
        self.rounds: Sequence[Sequence[Task]] = [self.tasks]
        self.enough: Callable[[Sequence[Trajectory]], bool] = lambda _: False
        self.total = len(self.tasks) * group_size
        name = short_name(config.environment.environment_id or "tools")
        folder = Path(config.logging.output_dir).expanduser() / "rollouts"
        self.path = out.expanduser() if out is not None else not_taken(folder, name, ".jsonl")
        self._target = self.path.resolve()  # a link stays, what it leads to is written
        self._recording = self._new_recording()
        self._part = writable(self._target)
        self._interrupts = Interrupts(lambda _: None)
        self._ended: list[Trajectory] = []
        self._reward: RewardFunction | None = None

    def run(self, on_episode: Callable[[Trajectory], None] = lambda _: None) -> Report:
        """Sample all episodes. Ctrl-C ends it; what had ended by then is saved and reported."""
        return run_anywhere(lambda: self.run_async(on_episode), self._interrupts.ask)

    async def run_async(self, on_episode: Callable[[Trajectory], None] = lambda _: None) -> Report:
        """Sample all episodes on the running event loop."""
        started, interrupted = time.perf_counter(), False
        try:
            async with AsyncExitStack() as held:
                held.push_async_callback(self.tools.close)
                held.callback(self.tools.commit)
                with self._interrupts.watching():
                    started = await self._interrupts.at_once(self._play(held, on_episode))
        except Stopped:
            interrupted = True
        finally:
            seconds = time.perf_counter() - started
            await in_thread(self._finish)
        metrics = rollout_metrics(self._ended) | self.tools.metrics() | judge_metrics(self._reward)
        metrics |= {"seconds": seconds, "tokens_per_second": metrics["sampled_tokens"] / seconds}
        return Report(self._ended, metrics, interrupted)

    async def _play(self, held: AsyncExitStack, on_episode: Callable[[Trajectory], None]) -> float:
        """Make what the episodes need, and run them. Return when they began."""

        def ended(trajectory: Trajectory) -> None:
            self._ended.append(trajectory)
            save_trajectories(self._part, [trajectory], append=True)
            on_episode(trajectory)

        config = self.config
        await join_cluster(config, held)
        environment = await self.tools.equip(self.environment)
        chat, sampler = await in_thread(make_sampler, config, self.total, self._say)
        held.push_async_callback(sampler.close)
        await await_engines(sampler)
        made = self._reward = make_reward(config)
        await build_rewards.open_reward(made, held, self._say)
        reward = self._choose(made)
        given = config, environment, chat, ended, reward, self.tools.runtime
        engine = make_rollouts(*given, sampler=sampler)
        self._record()
        await check_tools(environment, self.tasks[0], chat, reward)
        started = time.perf_counter()
        heldout = "eval" if config.data.split == "heldout" else None
        for tasks in self.rounds:
            await engine.rollout_batch(tasks, sampler, self.group_size, recorded_as=heldout)
            if self.enough(self._ended):
                break
        return started

    def _new_recording(self) -> Path | None:
        """Return the folder to record into, if that is asked for."""
        asked = self.config.logging
        if not (asked.record_tools and "record_tools" in asked.model_fields_set):
            return None
        folder = recording_beside(self._target)
        if self.tools.replayed is not None and folder.resolve() == Path(self.tools.replayed):
            raise ValueError(
                f"the recording {folder} cannot be replayed and written at the same time; give the episodes another "
                "name with --out, or leave logging.record_tools=true out"
            )
        return folder

    def _record(self) -> None:
        if self._recording is not None:
            self._recording.mkdir(parents=True, exist_ok=True)
            (self._recording / CALLS).write_bytes(b"")  # of an earlier file of this name
            self.tools.record_to(self._recording)

    def discard(self) -> None:
        """Leave nothing behind of what was never run."""
        self._part.unlink(missing_ok=True)

    def _finish(self) -> None:
        """Write the episodes, which end in any order, in that of tasks and members."""
        order = {task.id: number for number, task in enumerate(self.tasks)}
        self._ended.sort(key=lambda trajectory: (order[trajectory.task.id], trajectory.member))
        if self._ended:
            save_trajectories(self._part, self._ended)
            os.replace(self._part, self._target)
        self.discard()


def writable(path: Path) -> Path:
    """Return the file beside `path` that grows until all is done; raise ValueError if it cannot be written."""
    if path.exists() and not path.is_file():  # it would be replaced, and a device or a pipe must not be
        raise ValueError(f"{path} is not a regular file; name one, such as episodes.jsonl")
    part = path.with_name(path.name + ".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_bytes(b"")
    except OSError as error:
        raise ValueError(f"{path} cannot be written: {error.strerror}") from error
    return part
