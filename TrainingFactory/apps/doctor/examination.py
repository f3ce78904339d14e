"""Examine a config or a model before a run: check all of it, then play two groups and make one update in a folder of
their own, with the real model, tools and rewards."""

from __future__ import annotations

import tempfile
import time
from contextlib import AsyncExitStack
from datetime import date, timedelta
from functools import partial
from pathlib import Path
from typing import Any

from TrainingFactory.algorithms.kinds import KINDS
from TrainingFactory.apps.doctor import checks
from TrainingFactory.apps.plan.memory import check_memory, compare_memory, estimate, needed, remedy
from TrainingFactory.apps.plan.planning import Planner, find_figures
from TrainingFactory.apps.plan.shapes import Shape, dense_shape, find_shape
from TrainingFactory.assembly import sampler as build_sampler
from TrainingFactory.assembly.learner import make_algorithm, make_trainable
from TrainingFactory.assembly.rewards import check_group, check_reward
from TrainingFactory.assembly.trackers import check_trackers
from TrainingFactory.common.event_loop import run as run_anywhere
from TrainingFactory.common.texts import count
from TrainingFactory.config import TrainingConfig
from TrainingFactory.models import LoadedModel, TemplateChatFormat
from TrainingFactory.runs.diagnosis import Diagnosis
from TrainingFactory.runs.finding_rules import Table
from TrainingFactory.runs.folder import RunFolder
from TrainingFactory.runs.tracking import Watcher
from TrainingFactory.trainers.loop_setup import make_loop, make_order, steps_in
from TrainingFactory.trainers.notices import notices, unused
from TrainingFactory.trainers.training_run import Training
from TrainingFactory.training.loop import TrainingLoop
from TrainingFactory.training.preflight import check, check_steps
from TrainingFactory.training.source import StepGroups
from TrainingFactory.types import Trajectory

GROUPS = 2  # that are played
OTHER_SEED = 104_729  # added to the config's: a run plays other episodes than the doctor


def examine(config: TrainingConfig, watcher: Watcher) -> Diagnosis:
    """Return what is found. Nothing is left behind, and no tracker is told."""
    found, rows = Diagnosis(), config.data.dataset is not None
    for text in [*notices(config), *unused(config)]:
        found.add("ignored", text, "note")
    try:
        if rows or config.environment.environment_id or config.environment.command or config.tools:
            found.tried("config", lambda: check(config, rows))
            found.tried("config", lambda: check_trackers(config.logging.trackers))
            reward = found.tried("config", lambda: check_reward(config))
            if KINDS[config.training.algorithm].samples:
                found.tried("config", lambda: check_group(reward, config.training.group_size))
            with tempfile.TemporaryDirectory(prefix="tfactory-doctor-") as folder:
                dry = found.tried("config", lambda: DryRun(config, Path(folder), watcher, found))
                if dry is not None:
                    run_anywhere(dry.play)
        else:
            found.facts["examined"] = "the model alone: no environment, tools or dataset are named"
            found.tried("model", lambda: _model_alone(found, config))
    except RuntimeError as error:
        if "out of memory" not in str(error):
            raise
        found.add("memory", str(error).partition("\n")[0], remedy=remedy(config))
    return found


def forecast(config: TrainingConfig, size: str | None, gpu: str) -> Diagnosis:
    """Return the memory that a config takes on a GPU that is not there, by the shape of its model, or of a size, and
    where it fits the seconds of a step that `tfactory plan` tells; nothing is loaded."""
    there = 2**30 * find_figures("native", gpu, None, ())["gpu_memory_gib"].value
    found, shape = Diagnosis(), find_shape(config.model.name, size)
    estimate_other = partial(_estimate_shape, shape, build_sampler.DEFAULT_MAX_LENGTH)
    found.facts["model"] = f"{shape.name}: {shape.params:,} weights; nothing was loaded"
    compare_memory(found, config, estimate_other(config), there, f"one {gpu.upper()}", estimate_other)
    if KINDS[config.training.algorithm].samples and not found.failed:
        seconds = Planner(config, 1, gpu, size).step(1, config.sampling.slots, config.optimization.bound)
        plan = f"tfactory plan CONFIG --gpus 1 --gpu {gpu}" + (f" --model-size {size}" if size else "")
        found.facts["time"] = f"about {seconds:.3g} s a step, by assumed lengths and latencies: {plan}"
    return found


def _estimate_shape(shape: Shape, max_length: int, config: TrainingConfig) -> dict[str, float]:
    """Return the bytes of a config by the shape of its model; `max_length` counts where the config has none."""
    length = config.model.max_length or max_length
    return needed(config, shape, shape.held(config), make_algorithm(config).needs, length)


def _model_alone(found: Diagnosis, config: TrainingConfig) -> None:
    loaded = build_sampler.load(config)
    make_trainable(config, loaded)
    _look_at_model(found, config, loaded, build_sampler.make_chat(config, loaded))


def _look_at_model(
    found: Diagnosis, config: TrainingConfig, loaded: LoadedModel, chat: TemplateChatFormat
) -> None:
    checks.check_format(found, loaded, chat, config.model.family)
    checks.check_tools(found, chat, [checks.PROBE])
    limit = build_sampler.max_length(config, loaded)
    parts = estimate(config, loaded.model, make_algorithm(config).needs, limit)
    shape = dense_shape(config.model.name, loaded.model.config.to_dict())
    other = None if shape is None else partial(_estimate_shape, shape, limit)
    check_memory(found, config, parts, next(loaded.model.parameters()).device, other)


class DryRun(Training):
    """A run of one small step, whose folder is elsewhere; what it sees goes to `found`."""

    def __init__(self, asked: TrainingConfig, folder: Path, watcher: Watcher, found: Diagnosis) -> None:
        self.asked, self.found, self._folder = asked, found, folder
        self.chat: Any = None  # until the model is loaded
        self.limits = 0, 0  # tokens of a turn, and of an episode
        super().__init__(_small(asked), name="doctor", watcher=watcher)

    def new_run(self, name: str, about: dict[str, Any]) -> RunFolder:
        elsewhere = self.config.logging.model_copy(update={"output_dir": str(self._folder)})
        config = self.config.model_copy(update={"logging": elsewhere})
        return RunFolder.create(config, name, about, self.total)

    def load(self, day: date) -> tuple[LoadedModel, TemplateChatFormat]:
        loaded, self.chat = super().load(day)
        self.limits = self.asked.sampling.max_tokens, build_sampler.max_length(self.asked, loaded)
        _look_at_model(self.found, self.asked, loaded, self.chat)
        return loaded, self.chat

    async def play(self) -> None:
        """Make everything as for a run, and take its first step."""
        total = steps_in(self.asked, make_order(self.asked, self.data.size))
        self.found.tried("config", lambda: check_steps(self.asked, total))
        async with AsyncExitStack() as held:
            held.callback(self.run.unlock)
            held.push_async_callback(self.tools.close)
            try:
                loop = await make_loop(self, held)
            except (ValueError, OSError) as error:
                self.found.add("model" if self.chat is None else "config", str(error))
                return
            held.push_async_callback(loop.source.close)
            try:
                batch = await loop.source.take(0)
            except ValueError as error:  # a demonstration that cannot be played
                self.found.add("episodes_fail", str(error))
                return
            self._look_at(batch.trajectories, batch.sampled)
            heldout, sampler = loop.heldout, loop.sampler
            if not batch.sampled and heldout.rollouts is not None and heldout.tasks and sampler is not None:
                played = await heldout.rollouts.rollout_batch(
                    heldout.tasks[:1], sampler, recorded_as="doctor"
                )
                self._look_at(played[0], sampled=True)
            await self._learn(loop, batch, total)

    def _look_at(self, episodes: list[Trajectory], sampled: bool) -> None:
        checks.check_tools(self.found, self.chat, episodes[0].tools)
        checks.check_prompts(self.found, self.chat, episodes)
        if sampled:
            checks.check_episodes(self.found, episodes, *self.limits)

    async def _learn(self, loop: TrainingLoop, batch: StepGroups, total: int) -> None:
        """Update once, and look at the step as a run would, without waiting for a second one."""
        checks.check_mask(self.found, batch)
        if batch.problem is not None:
            self.found.add("unscored", batch.problem)
        started = time.perf_counter()
        learned = await loop.policy.step(batch.rows, 0) if batch.rows else {"rows": 0.0}
        spent = time.perf_counter() - started
        row = batch.metrics | learned | {"seconds/step": batch.seconds + spent}
        changes = Table(steps=1).look(1, row, batch.trajectories)
        self.found.findings += [change.finding for change in changes if change.finding is not None]
        # From all groups of a step side by side as fast as these, to one after the other.
        parts = self.asked.training.batch_size / len(batch.groups)
        update = spent * parts * self.asked.training.update_epochs
        ends = [batch.seconds + update, batch.seconds * parts + update]
        step = " to ".join(dict.fromkeys(f"{seconds:.3g}" for seconds in ends))
        whole = " to ".join(dict.fromkeys(str(timedelta(seconds=round(seconds * total))) for seconds in ends))
        unknown = "" if batch.rows else ", without its update, for which nothing was to be learned"
        self.found.facts["time"] = (
            f"{step} s a step{unknown}; {whole} for {count(total, 'step')}, without evaluations"
        )


def _small(config: TrainingConfig) -> TrainingConfig:
    """Return the config of a step of two groups and one update; of all rows where none is sampled. One process learns:
    several learn the same, and need machines that may not be there yet."""
    training = config.training
    few = min(GROUPS, training.batch_size) if KINDS[training.algorithm].samples else training.batch_size
    changed = {"batch_size": few, "minibatches": 1, "update_epochs": 1, "seed": training.seed + OTHER_SEED}
    sections = {
        "training": training.model_copy(update=changed),
        "grpo": config.grpo.model_copy(update={"refill": 0}),
        "logging": config.logging.model_copy(update={"trackers": []}),
        "compute": config.compute.model_copy(update={"learners": None}),
    }
    return config.model_copy(update=sections)
