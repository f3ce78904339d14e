"""Examine a config or a model before a run: check all of it, then play two groups and make one update in a folder of
their own, with the real model, tools and rewards."""

from __future__ import annotations

import tempfile
import time
from contextlib import AsyncExitStack
from datetime import date, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from TrainingFactory.algorithms.kinds import KINDS
from TrainingFactory.config import TrainingConfig
from TrainingFactory.running import run as run_anywhere
from TrainingFactory.services.build import sampler as build_sampler
from TrainingFactory.services.build.learner import make_algorithm, make_trainable
from TrainingFactory.services.build.notices import notices, unused
from TrainingFactory.services.build.rewards import check_reward
from TrainingFactory.services.build.trackers import check_trackers
from TrainingFactory.services.build.training import Training, make_loop, make_order, steps_in
from TrainingFactory.services.doctor.diagnosis import Diagnosis
from TrainingFactory.services.doctor.episodes import check_episodes, check_mask
from TrainingFactory.services.doctor.table import Table
from TrainingFactory.services.runs.folder import RunFolder
from TrainingFactory.services.runs.tracking import Watcher
from TrainingFactory.services.training.loop import TrainingLoop
from TrainingFactory.services.training.preflight import check, check_steps
from TrainingFactory.services.training.source import StepGroups
from TrainingFactory.types import Trajectory

if TYPE_CHECKING:
    from TrainingFactory.models import LoadedModel, TemplateChatFormat

GROUPS = 2  # that are played
OTHER_SEED = 104_729  # added to the config's: a run plays other episodes than the doctor


def examine(config: TrainingConfig, watcher: Watcher) -> Diagnosis:
    """Return what is found. Nothing is left behind, and no tracker is told."""
    found, name = Diagnosis(), config.training.algorithm
    for text in [*notices(config), *unused(config)]:
        found.add("ignored", text, severity="note")
    rows, group = config.data.dataset is not None, config.training.group_size
    try:
        if not (rows or config.environment.environment_id or config.tools):
            found.fact("examined", "the model alone: no environment, tools or dataset are named")
            if (only := found.tried("model", lambda: _load(config))) is not None:
                _look_at_model(found, config, *only)
            return found
        found.tried("config", lambda: check(config, rows))
        found.tried("config", lambda: check_trackers(config.logging.trackers))
        found.tried("config", lambda: check_reward(config, group if KINDS[name].samples else None))
        with tempfile.TemporaryDirectory(prefix="tfactory-doctor-") as folder:
            training = found.tried("config", lambda: DryRun(config, Path(folder), watcher))
            if training is not None:
                run_anywhere(lambda: _play(found, config, training))
    except RuntimeError as error:
        if "out of memory" not in str(error):
            raise
        found.add("memory", str(error).partition("\n")[0])
    return found


class DryRun(Training):
    """A run of one small step, whose folder is elsewhere. `loaded` and `chat` are there once the model is."""

    def __init__(self, config: TrainingConfig, folder: Path, watcher: Watcher) -> None:
        self._folder = folder
        self.loaded: LoadedModel | None = None
        self.chat: TemplateChatFormat | None = None
        super().__init__(_small(config), name="doctor", watcher=watcher)

    def new_run(self, name: str, about: dict[str, Any]) -> RunFolder:
        elsewhere = self.config.logging.model_copy(update={"output_dir": str(self._folder)})
        config = self.config.model_copy(update={"logging": elsewhere})
        return RunFolder.create(config, name, about, self.total)

    def load(self, day: date) -> tuple[LoadedModel, TemplateChatFormat]:
        self.loaded, self.chat = super().load(day)
        return self.loaded, self.chat


def _small(config: TrainingConfig) -> TrainingConfig:
    """Return the config of a step of two groups and one update; of all rows where none is sampled."""
    training = config.training
    few = min(GROUPS, training.batch_size) if KINDS[training.algorithm].samples else training.batch_size
    changed = {"batch_size": few, "minibatches": 1, "update_epochs": 1, "seed": training.seed + OTHER_SEED}
    return config.model_copy(
        update={
            "training": training.model_copy(update=changed),
            "grpo": config.grpo.model_copy(update={"refill": 0}),
            "logging": config.logging.model_copy(update={"trackers": []}),
        }
    )


def _load(config: TrainingConfig) -> tuple[Any, Any]:
    loaded = build_sampler.load(config)
    make_trainable(config, loaded)
    return loaded, build_sampler.make_chat(config, loaded)


def _look_at_model(found: Diagnosis, config: TrainingConfig, loaded: Any, chat: Any) -> None:
    from TrainingFactory.services.doctor.memory import check_memory, estimate  # torch
    from TrainingFactory.services.doctor.template import PROBE, check_format, check_tools

    check_format(found, loaded, chat, config.model.family)
    check_tools(found, chat, [PROBE])
    limit = build_sampler.max_length(config, loaded)
    needed = estimate(config, loaded.model, make_algorithm(config).needs, limit)
    check_memory(found, needed, next(loaded.model.parameters()).device)


async def _play(found: Diagnosis, config: TrainingConfig, training: DryRun) -> None:
    """Make everything as for a run, and take its first step."""
    total = steps_in(config, make_order(config, training.data.size))
    found.tried("config", lambda: check_steps(config, total))
    async with AsyncExitStack() as held:
        held.callback(training.run.unlock)
        held.push_async_callback(training.tools.close)
        loop = None
        try:
            loop = await make_loop(training, held)
        except (ValueError, OSError) as error:
            found.add("config" if training.loaded is not None else "model", str(error))
        if training.loaded is not None:
            _look_at_model(found, config, training.loaded, training.chat)
        if loop is None:
            return
        try:
            batch = await loop.source.take(0)
        except ValueError as error:  # a demonstration that cannot be played
            found.add("episodes_fail", str(error))
            return
        _look_at_tools(found, training, batch.trajectories)
        if batch.sampled:
            check_episodes(found, batch.trajectories, *_limits(config, training))
        if not batch.sampled and loop.heldout.rollouts is not None and loop.heldout.tasks:
            assert loop.sampler is not None
            tasks = loop.heldout.tasks[:1]
            groups = await loop.heldout.rollouts.rollout_batch(tasks, loop.sampler, recorded_as="doctor")
            _look_at_tools(found, training, groups[0])
            check_episodes(found, groups[0], *_limits(config, training))
        await _learn(found, config, loop, batch, total)


def _look_at_tools(found: Diagnosis, training: DryRun, episodes: list[Trajectory]) -> None:
    from TrainingFactory.services.doctor.template import check_prompts, check_tools  # torch

    assert training.chat is not None
    check_tools(found, training.chat, episodes[0].tools)
    check_prompts(found, training.chat, episodes)


def _limits(config: TrainingConfig, training: DryRun) -> tuple[int, int]:
    """Return the tokens that a turn and an episode may have."""
    assert training.loaded is not None
    return config.sampling.max_tokens, build_sampler.max_length(config, training.loaded)


async def _learn(
    found: Diagnosis, config: TrainingConfig, loop: TrainingLoop, batch: StepGroups, total: int
) -> None:
    """Update once, and look at the step as a run would, without waiting for a second one."""
    check_mask(found, batch)
    if batch.problem is not None:
        found.add("unscored", batch.problem)
    started = time.perf_counter()
    learned = await loop.policy.step(batch.rows, 0) if batch.rows else {"rows": 0.0}
    spent = time.perf_counter() - started
    row = batch.metrics | learned | {"seconds/step": batch.seconds + spent}
    changes = Table(steps=1).look(1, row, batch.trajectories)
    found.findings += [change.finding for change in changes if change.finding is not None]
    _tell_time(found, config, batch, spent, total)


def _tell_time(found: Diagnosis, config: TrainingConfig, batch: StepGroups, spent: float, total: int) -> None:
    """Tell how long a step takes: from all groups side by side as fast as these, to one after the other."""
    training = config.training
    parts = training.batch_size / len(batch.groups)
    update = spent * parts * training.update_epochs
    ends = [batch.seconds + update, batch.seconds * parts + update]
    steps = " to ".join(dict.fromkeys(f"{seconds:.3g}" for seconds in ends))
    whole = " to ".join(dict.fromkeys(str(timedelta(seconds=round(seconds * total))) for seconds in ends))
    update_unknown = "" if batch.rows else ", without its update, for which nothing was to be learned"
    found.fact("time", f"{steps} s a step{update_unknown}; {whole} for {total} steps, without evaluations")
