"""The examination behind `tfactory doctor`: check the config and the model, then play two groups and make one update in
a temporary folder, with the real model, tools and rewards."""

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
from TrainingFactory.apps.plan.memory import check_memory, compare_memory, suggest_options, with_changes
from TrainingFactory.apps.plan.planning import RunPlanner, find_figures
from TrainingFactory.apps.plan.shapes import ModelShape, plan_shape, read_dense_shape
from TrainingFactory.assembly import sampler as build_sampler
from TrainingFactory.assembly.folding import make_folding
from TrainingFactory.assembly.learner import make_algorithm, make_trainable
from TrainingFactory.assembly.memory import estimate_device_bytes, estimate_model_memory
from TrainingFactory.assembly.rewards import check_group_size, check_reward
from TrainingFactory.assembly.router_check import measure_router_mismatch
from TrainingFactory.assembly.trackers import check_trackers
from TrainingFactory.assembly.users import make_user
from TrainingFactory.common.event_loop import run as run_anywhere
from TrainingFactory.common.texts import pluralize
from TrainingFactory.config import TrainingConfig
from TrainingFactory.learning.forward import get_causal_lm
from TrainingFactory.learning.policy import LocalPolicy
from TrainingFactory.learning.routers import count_routing_biases, find_routers
from TrainingFactory.models import LoadedModel, TemplateChatFormat
from TrainingFactory.models.tower_shape import ImageUse
from TrainingFactory.runs.diagnosis import Diagnosis
from TrainingFactory.runs.finding_rules import FindingTracker
from TrainingFactory.runs.folder import RunFolder
from TrainingFactory.runs.tracking import Watcher
from TrainingFactory.sampling import NativeEngine
from TrainingFactory.trainers.loop_setup import count_steps, make_loop, make_task_order
from TrainingFactory.trainers.notices import list_notices, list_unused_options
from TrainingFactory.trainers.training_run import Training
from TrainingFactory.training.loop import TrainingLoop
from TrainingFactory.training.preflight import check_config, check_steps
from TrainingFactory.training.source import StepGroups
from TrainingFactory.types import Trajectory

DRY_RUN_GROUPS = 2  # groups that the dry run plays
SEED_OFFSET = 104_729  # added to the config's seed, so that a run does not replay the doctor's episodes


def examine(config: TrainingConfig, watcher: Watcher) -> Diagnosis:
    """Examine a config, or only its model if it names no environment, tools or dataset. Leave no files behind and log
    to no tracker."""
    diagnosis = Diagnosis()
    has_dataset = config.data.dataset is not None
    for notice in [*list_notices(config), *list_unused_options(config)]:
        diagnosis.add("ignored", notice, "note")
    try:
        if has_dataset or config.environment.environment_id or config.environment.command or config.tools:
            diagnosis.check("config", lambda: check_config(config, has_dataset))
            diagnosis.check("config", lambda: check_trackers(config.logging.trackers))
            diagnosis.check("config", lambda: make_folding(config))
            diagnosis.check("config", lambda: make_user(config))
            reward = diagnosis.check("config", lambda: check_reward(config))
            if KINDS[config.training.algorithm].samples:
                diagnosis.check("config", lambda: check_group_size(reward, config.training.group_size))
            with tempfile.TemporaryDirectory(prefix="tfactory-doctor-") as folder:
                dry_run = diagnosis.check("config", lambda: DryRun(config, Path(folder), watcher, diagnosis))
                if dry_run is not None:
                    run_anywhere(dry_run.play)
        else:
            diagnosis.facts["examined"] = "the model alone: the config names no environment, tools or dataset"
            diagnosis.check("model", lambda: _check_model_alone(diagnosis, config))
    except RuntimeError as error:
        if "out of memory" not in str(error):
            raise
        diagnosis.add("memory", str(error).partition("\n")[0], remedy=suggest_options(config))
    return diagnosis


def forecast(config: TrainingConfig, model_size: str | None, gpu: str) -> Diagnosis:
    """Estimate the memory of a config on a GPU type that this machine need not have, without loading a model.
    `model_size` replaces the shape of the config's model. If the config fits, add the step time of `tfactory plan`."""
    capacity = 2**30 * find_figures("native", gpu, None, ())["gpu_memory_gib"].value
    diagnosis = Diagnosis()
    shape = plan_shape(config, model_size)
    estimator = partial(_estimate_shape, shape, build_sampler.DEFAULT_MAX_LENGTH)
    active_text = f", {shape.active_weights:,} active" if shape.active_weights < shape.total_weights else ""
    if shape.tower is not None:
        active_text += f", a vision tower of {shape.tower.num_weights:,}"
        diagnosis.facts["images"] = (
            f"assumed: of model.image_tokens={config.model.image_tokens} tokens, all tokens of an update, and more "
            "than the cache holds"
        )
    diagnosis.facts["model"] = f"{shape.name}: {shape.params:,} weights{active_text}; nothing was loaded"
    compare_memory(diagnosis, config, estimator(config), capacity, f"one {gpu.upper()}", estimator)
    if KINDS[config.training.algorithm].samples and not diagnosis.failed:
        seconds = RunPlanner(config, 1, gpu, model_size).time_step(
            1, config.sampling.slots, config.optimization.effective_max_staleness
        )
        plan = f"tfactory plan CONFIG --gpus 1 --gpu {gpu}"
        plan += f" --model-size {model_size}" if model_size else ""
        diagnosis.facts["time"] = f"about {seconds:.3g} s a step, with assumed lengths and latencies: {plan}"
    return diagnosis


def _estimate_shape(
    shape: ModelShape, max_length: int, config: TrainingConfig, images: ImageUse | None = None
) -> dict[str, float]:
    """Return the bytes of each part of a run, computed from the model's shape. `max_length` applies if the config sets
    none."""
    length, needs = config.model.max_length or max_length, make_algorithm(config).needs
    return estimate_device_bytes(config, shape, shape.count_held(config), needs, length, shape.tower, images)


def _check_model_alone(diagnosis: Diagnosis, config: TrainingConfig) -> None:
    loaded_model = build_sampler.load(config)
    make_trainable(config, loaded_model)
    _check_model(diagnosis, config, loaded_model, build_sampler.make_chat(config, loaded_model))
    _check_memory(diagnosis, config, loaded_model)


def _check_model(
    diagnosis: Diagnosis, config: TrainingConfig, loaded_model: LoadedModel, chat: TemplateChatFormat
) -> None:
    checks.check_format(diagnosis, loaded_model, chat, config.model.family)
    checks.check_tools(diagnosis, chat, [checks.PROBE_TOOL])
    _describe_experts(diagnosis, config, loaded_model.model)


def _check_memory(
    diagnosis: Diagnosis, config: TrainingConfig, loaded_model: LoadedModel, images: ImageUse | None = None
) -> None:
    length = build_sampler.get_max_length(config, loaded_model)
    sizes = estimate_model_memory(config, loaded_model.model, make_algorithm(config).needs, length, images)
    shape = read_dense_shape(config.model.name, loaded_model.model.config.to_dict())
    estimator = None if shape is None else partial(_estimate_shape, shape, length, images=images)
    check_memory(diagnosis, config, sizes, next(loaded_model.model.parameters()).device, estimator)


def _describe_experts(diagnosis: Diagnosis, config: TrainingConfig, model: Any) -> None:
    """Report the number of experts of a model, and how training balances them."""
    routers = find_routers(get_causal_lm(model), config.training.router_aux_loss)
    if routers is None:
        return
    balance_text = "no auxiliary loss"
    if routers.coefficient:
        balance_text = f"auxiliary loss with coefficient {routers.coefficient:g}"
    bias_text = ""
    if num_biased := count_routing_biases(model):
        bias_text = f"; the biases by which {pluralize(num_biased, 'router')} choose experts stay as loaded"
    max_experts = max(module.num_experts for module in routers.layers.values())
    diagnosis.facts["experts"] = (
        f"{max_experts} in each of {pluralize(len(routers.layers), 'layer')}; {balance_text}{bias_text}"
    )


class DryRun(Training):
    """Training run of one small step in `folder`, which adds its findings to `diagnosis`."""

    def __init__(self, config: TrainingConfig, folder: Path, watcher: Watcher, diagnosis: Diagnosis) -> None:
        self.full_config, self.diagnosis, self._folder = config, diagnosis, folder
        self.chat: Any = None  # None until the model is loaded
        self.loaded_model: LoadedModel | None = None
        self.max_tokens = 0, 0  # maximum tokens of a turn and of an episode
        super().__init__(_with_small_step(config), name="doctor", watcher=watcher)

    def create_run(self, name: str, run_info: dict[str, Any]) -> RunFolder:
        logging = self.config.logging.model_copy(update={"output_dir": str(self._folder)})
        config = self.config.model_copy(update={"logging": logging})
        return RunFolder.create(config, name, run_info, self.num_steps)

    def load_model(self, day: date) -> tuple[LoadedModel, TemplateChatFormat]:
        loaded_model, self.chat = super().load_model(day)
        self.max_tokens = (
            self.full_config.sampling.max_tokens,
            build_sampler.get_max_length(self.full_config, loaded_model),
        )
        _check_model(self.diagnosis, self.full_config, loaded_model, self.chat)
        self.loaded_model = loaded_model
        if loaded_model.vision is None:  # else the memory depends on the images of the dry run
            _check_memory(self.diagnosis, self.full_config, loaded_model)
        return loaded_model, self.chat

    async def play(self) -> None:
        """Assemble the run and execute its first step."""
        num_steps = count_steps(self.full_config, make_task_order(self.full_config, self.data.size))
        self.diagnosis.check("config", lambda: check_steps(self.full_config, num_steps))
        async with AsyncExitStack() as stack:
            stack.callback(self.run.unlock)
            stack.push_async_callback(self.tools.close)
            try:
                loop = await make_loop(self, stack)
            except (ValueError, OSError) as error:
                self.diagnosis.add("model" if self.chat is None else "config", str(error))
                return
            stack.push_async_callback(loop.source.close)
            try:
                batch = await loop.source.take(0)
            except ValueError as error:  # a demonstration cannot be replayed
                self.diagnosis.add("episodes_fail", str(error))
                return
            is_sampled = batch.is_sampled
            self._check_episodes(batch.trajectories, is_sampled)
            self._check_images(batch, num_steps)
            heldout, sampler = loop.heldout, loop.sampler
            if not is_sampled and heldout.rollouts is not None and heldout.tasks and sampler is not None:
                episodes = await heldout.rollouts.rollout_batch(
                    heldout.tasks[:1], sampler, recording_key="doctor"
                )
                self._check_episodes(episodes[0], is_sampled=True)
            await self._learn(loop, batch, num_steps)

    def _check_episodes(self, episodes: list[Trajectory], is_sampled: bool) -> None:
        checks.check_tools(self.diagnosis, self.chat, episodes[0].tools)
        checks.check_prompts(self.diagnosis, self.chat, episodes)
        if is_sampled:
            checks.check_episodes(self.diagnosis, episodes, *self.max_tokens)
            if (context := self.full_config.environment.context) is not None:
                checks.check_folding(self.diagnosis, episodes, context, self.full_config, self.max_tokens[1])

    def _check_images(self, batch: StepGroups, num_steps: int) -> None:
        """Report the images of the step, and the memory that a run with such images needs."""
        if self.loaded_model is None or self.loaded_model.vision is None:
            return
        last_turns = [episode.turns[-1] for episode in batch.trajectories if episode.turns]
        rows = [[*turn.prompt_ids, *turn.completion.token_ids] for turn in last_turns]
        rows = rows if batch.is_sampled else [row.token_ids for row in batch.rows]
        checks.describe_images(self.diagnosis, rows)
        training = self.full_config.training
        group_size = training.group_size if batch.is_sampled else 1
        images = ImageUse.measure_rows(rows, num_steps * training.batch_size * group_size)
        _check_memory(
            self.diagnosis, with_changes(self.full_config, {"model.vision": True}), self.loaded_model, images
        )

    async def _learn(self, loop: TrainingLoop, batch: StepGroups, num_steps: int) -> None:
        """Update once, apply the run's finding rules to this single step, and report the expected step time."""
        checks.check_mask(self.diagnosis, batch)
        if batch.problem is not None:
            self.diagnosis.add("unscored", batch.problem)
        policy, sampler = loop.policy, loop.sampler
        if batch.rows and isinstance(policy, LocalPolicy) and isinstance(sampler, NativeEngine):
            mismatch = await measure_router_mismatch(sampler, policy.learner, batch.rows[0])
            if mismatch is not None:
                checks.check_routers(self.diagnosis, mismatch)
        start_time = time.perf_counter()
        metrics = await loop.policy.step(batch.rows, 0) if batch.rows else {"rows": 0.0}
        update_seconds = time.perf_counter() - start_time
        metrics_row = batch.metrics | metrics | {"seconds/step": batch.seconds + update_seconds}
        changes = FindingTracker(num_steps=1).observe(1, metrics_row, batch.trajectories)
        self.diagnosis.findings += [change.finding for change in changes if change.finding is not None]
        # Fastest case: all groups of a step run in parallel at this speed. Slowest: one after the other.
        batch_scale = self.full_config.training.batch_size / len(batch.groups)
        full_update_seconds = update_seconds * batch_scale * self.full_config.training.update_epochs
        bounds = [batch.seconds + full_update_seconds, batch.seconds * batch_scale + full_update_seconds]
        step_text = " to ".join(dict.fromkeys(f"{seconds:.3g}" for seconds in bounds))
        duration_text = " to ".join(
            dict.fromkeys(str(timedelta(seconds=round(seconds * num_steps))) for seconds in bounds)
        )
        note = "" if batch.rows else ", without an update, because no row had anything to learn"
        self.diagnosis.facts["time"] = (
            f"{step_text} s a step{note}; {duration_text} for {pluralize(num_steps, 'step')}, without evaluations"
        )


def _with_small_step(config: TrainingConfig) -> TrainingConfig:
    """Return the config reduced to one update on two groups, or without sampling on a full batch. Use one learner,
    because several would compute the same and may need machines that are not available yet."""
    training = config.training
    num_groups = (
        min(DRY_RUN_GROUPS, training.batch_size) if KINDS[training.algorithm].samples else training.batch_size
    )
    overrides = {
        "batch_size": num_groups,
        "minibatches": 1,
        "update_epochs": 1,
        "seed": training.seed + SEED_OFFSET,
    }
    sections = {
        "training": training.model_copy(update=overrides),
        "grpo": config.grpo.model_copy(update={"refill": 0}),
        "logging": config.logging.model_copy(update={"trackers": []}),
        "compute": config.compute.model_copy(update={"learners": None}),
    }
    return config.model_copy(update=sections)
