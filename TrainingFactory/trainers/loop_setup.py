"""Assemble the training loop of a run: data, policy, sampler, rewards and the source of episodes."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import date
from functools import partial
from typing import TYPE_CHECKING, Any

from TrainingFactory.algorithms.kinds import KINDS
from TrainingFactory.assembly import rewards as build_rewards
from TrainingFactory.assembly import sampler as build_sampler
from TrainingFactory.assembly.branching import count_max_leaves, make_branching
from TrainingFactory.assembly.environment import check_tools
from TrainingFactory.assembly.fleet import get_max_concurrent_episodes
from TrainingFactory.assembly.learner import compute_reference_logprobs, make_algorithm
from TrainingFactory.assembly.learner_processes import Learners
from TrainingFactory.assembly.run_tools import RunTools
from TrainingFactory.assembly.trackers import Trackers
from TrainingFactory.cluster.fleet import Fleet
from TrainingFactory.config import TrainingConfig
from TrainingFactory.data.examples import Examples
from TrainingFactory.evaluation.requests import append_training_record
from TrainingFactory.protocols import Algorithm, EnvironmentFactory, Sampler
from TrainingFactory.rollout import RolloutEngine
from TrainingFactory.rollout.branching import Branching
from TrainingFactory.runs.finding_rules import FindingTracker
from TrainingFactory.runs.folder import RunFolder
from TrainingFactory.runs.scores import Scores
from TrainingFactory.runs.tracking import Watcher
from TrainingFactory.tools.threads import in_thread
from TrainingFactory.trainers.resume import restore_progress
from TrainingFactory.training.async_rollout import AsyncSource
from TrainingFactory.training.dataset import Dataset, UserObjects
from TrainingFactory.training.filters import EpisodeFilters
from TrainingFactory.training.forecasts import DISK_BYTES_PER_SECOND, CheckpointSpace, StopForecast
from TrainingFactory.training.guards import Guards
from TrainingFactory.training.interrupts import Interrupts
from TrainingFactory.training.ledger import Ledger
from TrainingFactory.training.loop import HeldoutData, TrainingLoop
from TrainingFactory.training.replay_source import RecordedSource
from TrainingFactory.training.reward_clock import RewardClock
from TrainingFactory.training.source import DatasetSource, ExpertSource, SampledSource, Source
from TrainingFactory.training.task_order import TaskOrder
from TrainingFactory.training.tokenized_dataset import TokenizedDataset

if TYPE_CHECKING:
    from TrainingFactory.learning.policy import LocalPolicy
    from TrainingFactory.models import LoadedModel, TemplateChatFormat


class PreparedRun:
    """A resolved and validated run, from which `make_loop` builds the training loop."""

    config: TrainingConfig
    objects: UserObjects
    data: Dataset
    order: TaskOrder
    tools: RunTools
    learners: Learners
    run: RunFolder
    resuming: bool
    watcher: Watcher
    interrupts: Interrupts

    def load_model(self, day: date) -> tuple[LoadedModel, TemplateChatFormat]:
        """Load the model to train and its chat format. `day` is the date that templates print."""
        loaded_model = build_sampler.load_trainable(self.config, self.watcher.say)
        return loaded_model, build_sampler.make_chat(self.config, loaded_model, day, self.watcher.say)


def make_task_order(config: TrainingConfig, num_rows: int) -> TaskOrder:
    return TaskOrder(num_rows, config.training.batch_size, config.training.seed, config.data.shuffle)


def count_steps(config: TrainingConfig, order: TaskOrder) -> int:
    return config.training.max_steps or config.training.num_epochs * order.steps_per_epoch


async def make_loop(training: PreparedRun, exit_stack: AsyncExitStack) -> TrainingLoop:
    """Load the model and build the training loop; `exit_stack` closes their resources at the end of the run."""
    config, run, tools, watcher = training.config, training.run, training.tools, training.watcher
    environment = None if training.data.environment is None else await tools.equip(training.data.environment)
    watcher.phase("load")
    load = partial(training.load_model, date.fromisoformat(run.run_info["day"]))
    loaded_model, chat = await training.learners.load(load, config, exit_stack, run.path, training.interrupts)
    run.record_notes(loaded_model.notes)
    dataset, heldout_dataset = await in_thread(_tokenize_datasets, training, loaded_model, chat)
    # The number of rows, and with it that of steps, is known only now: rows that are too long are gone.
    order = training.order if dataset is None else make_task_order(config, len(dataset))
    num_steps = count_steps(config, order)

    algorithm = make_algorithm(config)
    replayed_run = tools.sampled_ahead_run  # set to train on recorded groups again instead of sampling
    is_sampling = environment is not None and replayed_run is None
    local_policy, policy = await training.learners.make_policies(
        loaded_model, algorithm, num_steps, is_sampling
    )
    exit_stack.push_async_callback(policy.close)
    for split in (dataset, heldout_dataset):
        if split is not None and "precomputed" in algorithm.needs:
            split.references = await compute_reference_logprobs(
                policy, algorithm, split, config.training.batch_size, watcher
            )
    is_async = config.optimization.effective_max_staleness > 0
    progress = await restore_progress(run, policy, order, num_steps, training.resuming, is_async, watcher.say)
    if config.logging.record_tools:
        tools.record_to(run.path)

    setup: RolloutSetup | None = None
    if is_sampling:
        assert environment is not None
        setup = await _make_rollout_setup(training, environment, chat, loaded_model, local_policy, exit_stack)
        if (check_every := config.training.router_check_every) is not None:
            from TrainingFactory.assembly.router_check import make_router_check  # torch

            local_policy.before_step = make_router_check(setup.sampler, local_policy, check_every).measure
    if replayed_run is None:
        source = _make_source(training, algorithm, order, progress.ledger, setup, dataset, num_steps)
    else:
        filters = EpisodeFilters(config.training.filters)
        source = RecordedSource(replayed_run, algorithm, config.reward.max_unscored, progress.steps, filters)
        num_steps = min(num_steps, source.steps)
        training_section = config.training.model_copy(update={"eval_every": None})
        config = config.model_copy(update={"training": training_section})

    earlier_metrics = run.metrics()
    trackers = Trackers(run.path, config)
    exit_stack.callback(trackers.close)
    return TrainingLoop(
        config=config,
        num_steps=num_steps,
        policy=policy,
        sampler=None if setup is None else setup.sampler,
        get_sampler_metrics=_get_sampler_metrics(setup),
        source=source,
        algorithm=algorithm,
        order=order,
        run=run,
        tools=tools,
        heldout=_make_heldout_data(training, setup, heldout_dataset),
        guards=Guards(
            config.reward.max_equal_steps,
            has_rewards=any("reward" in row for row in earlier_metrics),
            is_replay=tools.recording_path is not None,
            max_mismatch=config.optimization.max_mismatch,
            state_groups=config.grpo.state_groups if config.training.algorithm == "grpo" else 0.0,
        ),
        doctor=FindingTracker(earlier_metrics, config.training.update_epochs * config.training.minibatches),
        watcher=watcher,
        trackers=trackers,
        interrupts=training.interrupts,
        progress=progress,
        stop_forecast=_forecast_stop(training, local_policy, num_steps, earlier_metrics),
        scores=Scores.from_rows(earlier_metrics, config.training.stop_when),
        saved_step=progress.steps or -1,
    )


def _tokenize_datasets(
    training: PreparedRun, loaded_model: LoadedModel, chat: Any
) -> tuple[TokenizedDataset | None, TokenizedDataset | None]:
    """Tokenize the dataset and the held-out rows, then free their texts."""
    data, max_length = training.data, build_sampler.get_max_length(training.config, loaded_model)

    def tokenize(examples: Examples | None, prefix: str) -> TokenizedDataset | None:
        if examples is None:
            return None
        notify, skip_bad_rows = training.watcher.say, training.config.data.skip_bad_rows
        return TokenizedDataset(
            examples, chat, max_length, skip_bad_rows, lambda text: notify(f"note: {prefix}{text}")
        )

    datasets = tokenize(data.examples, ""), tokenize(data.heldout_examples, "held-out: ")
    data.examples = data.heldout_examples = None
    return datasets


@dataclass(slots=True)
class RolloutSetup:
    """The objects with which a training run plays and scores episodes."""

    environment: EnvironmentFactory
    chat: TemplateChatFormat
    max_length: int  # tokens of an episode
    sampler: Sampler
    reward: RewardClock  # for training
    heldout_reward: RewardClock  # for evaluation
    scored_by: str  # describes the reward for evaluation
    gate: asyncio.Semaphore | None  # limits concurrent episodes of all groups, with async rollouts


async def _make_rollout_setup(
    training: PreparedRun,
    environment: EnvironmentFactory,
    chat: TemplateChatFormat,
    loaded_model: LoadedModel,
    policy: LocalPolicy,
    exit_stack: AsyncExitStack,
) -> RolloutSetup:
    config, notify = training.config, training.watcher.say
    is_sampling = KINDS[config.training.algorithm].samples
    max_staleness = config.optimization.effective_max_staleness if is_sampling else 0
    max_open_episodes = config.training.batch_size * count_max_leaves(config) * (1 + max_staleness)
    log_folder = training.run.path / "engines"
    sampler = await in_thread(
        build_sampler.make_training_sampler,
        config,
        loaded_model,
        policy,
        max_open_episodes,
        max_staleness > 0,
        notify,
        log_folder,
    )
    exit_stack.push_async_callback(sampler.close)

    movable_reward = build_rewards.move_to_workers(training.objects.reward, config)
    reward = movable_reward or build_rewards.make_reward(config)
    await build_rewards.open_reward(reward, exit_stack, notify)
    is_evaluated = config.training.eval_every is not None
    heldout_reward = build_rewards.get_heldout_reward(reward, notify if is_evaluated else lambda _: None)
    if tasks := training.data.tasks or training.data.heldout:
        await check_tools(environment, tasks[0], chat, reward)

    max_episodes = get_max_concurrent_episodes(config, environment)
    if config.environment.num_workers is not None and config.compute.backend != "ray":
        notify(f"environment: at most {max_episodes} episodes at a time")
    return RolloutSetup(
        environment,
        chat,
        build_sampler.get_max_length(config, loaded_model),
        sampler,
        RewardClock(reward, notify, lambda: build_rewards.judge_metrics(reward)),
        RewardClock(heldout_reward, notify),
        build_rewards.name_scorer(config, heldout_reward),
        asyncio.Semaphore(max_episodes) if max_staleness else None,
    )


def _make_source(
    training: PreparedRun,
    algorithm: Algorithm,
    order: TaskOrder,
    ledger: Ledger,
    setup: RolloutSetup | None,
    dataset: TokenizedDataset | None,
    num_steps: int,
) -> Source:
    """Return the source of training groups: dataset rows, expert episodes, or episodes sampled by the policy."""
    config, tasks = training.config, training.data.tasks
    if dataset is not None:
        return DatasetSource(dataset, order, algorithm)
    assert setup is not None
    if KINDS[config.training.algorithm].accepts_demonstrations:
        limits = {
            "max_reply_tokens": config.sampling.max_reply_tokens,
            "max_length": setup.max_length,
            "timeout": config.environment.episode_timeout,
            "runtime": training.tools.runtime,
        }
        max_episodes = get_max_concurrent_episodes(config, setup.environment)
        return ExpertSource(tasks, order, setup.environment, setup.chat, algorithm, limits, max_episodes)
    rollouts = _make_rollouts(training, setup, setup.reward, make_branching(config))
    source_args = (tasks, order, rollouts, setup.sampler, algorithm, setup.reward, ledger)
    source_options: dict[str, Any] = {
        "group_size": config.training.group_size,
        "max_unscored": config.reward.max_unscored,
        "filters": EpisodeFilters(config.training.filters),
    }
    max_staleness = config.optimization.effective_max_staleness
    if not max_staleness:
        return SampledSource(*source_args, **source_options)
    by_arrival = config.optimization.async_order == "arrival"
    source_options |= {"max_staleness": max_staleness, "by_arrival": by_arrival, "steps": num_steps}
    return AsyncSource(*source_args, **source_options)


def _get_sampler_metrics(setup: RolloutSetup | None) -> Callable[[], dict[str, float]]:
    from TrainingFactory.sampling import NativeEngine

    if setup is None or not isinstance(setup.sampler, Fleet | NativeEngine):
        return dict
    return setup.sampler.metrics


def _make_rollouts(
    training: PreparedRun, setup: RolloutSetup, reward: RewardClock, branching: Branching | None = None
) -> RolloutEngine:
    return build_sampler.make_rollouts(
        training.config,
        setup.environment,
        setup.chat,
        training.watcher.episode,
        reward,
        training.tools.runtime,
        setup.gate,
        setup.sampler,
        branching,
    )


def _make_heldout_data(
    training: PreparedRun, setup: RolloutSetup | None, dataset: TokenizedDataset | None
) -> HeldoutData:
    if setup is None:
        return HeldoutData(dataset=dataset)
    rollouts = _make_rollouts(training, setup, setup.heldout_reward)
    tasks = training.data.heldout
    kinds = [kind for kind in training.objects.object_names if kind in ("environment", "reward", "tools")]
    append = partial(append_training_record, training.config, training.run, tasks, setup.scored_by, kinds)
    return HeldoutData(tasks, rollouts, setup.reward, dataset, append)


def _forecast_stop(
    training: PreparedRun, policy: LocalPolicy, num_steps: int, earlier_metrics: list[dict[str, Any]]
) -> StopForecast:
    """Warn if the checkpoints will not fit on the disk. Forecast how long it takes to stop the run, from the size of a
    checkpoint and the time of earlier updates."""
    from TrainingFactory.learning.checkpoints import count_checkpoint_bytes  # torch

    run, checkpoint_sizes = training.run, count_checkpoint_bytes(policy.learner)
    used_bytes = sum(path.stat().st_size for path in (run.path / "checkpoints").rglob("*") if path.is_file())
    checkpoint_space = CheckpointSpace(training.config.logging, num_steps, *checkpoint_sizes)
    warning = checkpoint_space.make_warning(shutil.disk_usage(run.path).free + used_bytes, str(run.path))
    if warning is not None:
        training.watcher.say(f"WARNING {warning}")
    update_seconds = earlier_metrics[-1].get("seconds/update", 0.0) if earlier_metrics else 0.0
    return StopForecast(sum(checkpoint_sizes) / DISK_BYTES_PER_SECOND, update_seconds)
