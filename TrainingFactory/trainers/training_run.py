"""From a config to a training run, at the edge that knows the core and everything around it."""

from __future__ import annotations

import asyncio
import shlex
import shutil
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from TrainingFactory.algorithms.kinds import KINDS
from TrainingFactory.assembly import rewards as build_rewards
from TrainingFactory.assembly import sampler as build_sampler
from TrainingFactory.assembly.environment import check_tools, make_environment
from TrainingFactory.assembly.fleet import check_engines, join_cluster, max_concurrent_episodes
from TrainingFactory.assembly.gpus import with_all_gpus
from TrainingFactory.assembly.learner import make_algorithm, references
from TrainingFactory.assembly.learner_processes import Learners, with_learners
from TrainingFactory.assembly.named_files import about_start, as_started, changed_files
from TrainingFactory.assembly.rewards import evaluation_reward
from TrainingFactory.assembly.run_tools import RunTools
from TrainingFactory.assembly.trackers import Trackers, check_trackers
from TrainingFactory.cluster.fleet import Fleet
from TrainingFactory.common.event_loop import run as run_anywhere
from TrainingFactory.config import TrainingConfig
from TrainingFactory.config.problems import Problem
from TrainingFactory.data.examples import Examples
from TrainingFactory.evaluation.requests import record_of_training
from TrainingFactory.models.names import resolve
from TrainingFactory.promotion.model_registry import ModelRegistry
from TrainingFactory.protocols import Algorithm, EnvironmentFactory, Sampler
from TrainingFactory.registry.rows import check_name
from TrainingFactory.resolve import factories
from TrainingFactory.resolve.model_names import as_started_from, check_started_from, with_model
from TrainingFactory.resolve.siblings import Allocation
from TrainingFactory.rollout import RolloutEngine
from TrainingFactory.runs.finding_rules import Table
from TrainingFactory.runs.folder import RESOLVED, RunFolder, TrainingReport, new_name
from TrainingFactory.runs.scores import Scores
from TrainingFactory.runs.tracking import PlainLines, Watcher
from TrainingFactory.tools.threads import in_thread
from TrainingFactory.trainers.resume import taken_up
from TrainingFactory.training.async_rollout import AheadSource
from TrainingFactory.training.dataset import Objects, check_same, gather
from TrainingFactory.training.forecasts import DISK_SPEED, CheckpointSpace, StopForecast
from TrainingFactory.training.guards import Guards
from TrainingFactory.training.interrupts import Interrupts
from TrainingFactory.training.ledger import Ledger
from TrainingFactory.training.loop import HeldOut, TrainingLoop
from TrainingFactory.training.preflight import check, check_steps
from TrainingFactory.training.replay_source import RecordedSource
from TrainingFactory.training.reward_clock import RewardClock
from TrainingFactory.training.source import DatasetSource, ExpertSource, SampledSource, Source
from TrainingFactory.training.task_order import Order
from TrainingFactory.training.tokenized_dataset import TokenizedDataset

if TYPE_CHECKING:
    from TrainingFactory.learning.policy import LocalPolicy
    from TrainingFactory.models import LoadedModel, TemplateChatFormat


class Training:
    """A training run. What is wrong with names, files and folders shows when it is made; `train` loads the model and
    goes to the end. With `run` it goes on with that run; with `replay` the tool calls are answered from the recording
    of that run (its name or folder), and no tool is started."""

    def __init__(
        self,
        config: TrainingConfig,
        *,
        name: str | None = None,
        run: RunFolder | None = None,
        objects: Objects | None = None,
        watcher: Watcher | None = None,
        replay: str | Path | None = None,
    ) -> None:
        self.watcher: Watcher = watcher or PlainLines()
        self.interrupts = Interrupts(self.watcher.say)
        given, say = objects or Objects(), self._resolved
        self.resolved: list[str] = []  # what ids were found to be, a line each
        self.allocation = None if given.allocation is None else Allocation.of(given.allocation)
        try:
            if run is not None:
                check_started_from(run)
            self.learners = Learners(config if run is None else None)
            config = factories.by_file(as_started(config, run), say)
            self.allocation = self.allocation or factories.allocated(config, say)
            config = with_all_gpus(factories.with_machines(config, self.allocation, say), self.watcher.say)
            config = with_learners(config, self.watcher.say)
            self._prepare(config, given, name, run, replay)
        except BaseException:
            self._release()
            raise

    def _prepare(
        self,
        config: TrainingConfig,
        given: Objects,
        name: str | None,
        run: RunFolder | None,
        replay: str | Path | None,
    ) -> None:
        """Find and check everything that the run names, and make or open its folder."""
        self.written, self.objects = config, factories.with_rows(config, given, self._resolved)
        self.config = with_model(self.written) if run is None else as_started_from(run, self.written)
        asked, model = config.model.name, self.config.model
        if asked != (meant := resolve(model.name)):
            over = f" under the adapter {model.adapter}" if model.adapter else ""
            self._resolved(f"model.name {asked} is {meant}{over}")
        config = self.config
        check(config, config.data.dataset is not None or self.objects.examples is not None)
        check_engines(config)
        check_trackers(config.logging.trackers)
        check_registry(config)
        sampled = KINDS[config.training.algorithm].samples
        reward = build_rewards.check_reward(config, config.training.group_size if sampled else None)
        reward = self.objects.reward or reward
        self.resuming = run is not None
        if run is not None:
            replay = replay or run.about.get("replay")
        self.tools = RunTools(config, self.objects.tools, replay, self.objects.cache)
        with factories.told_with_places("datasets"):
            self.data = gather(config, self.objects, self._environment())
        self.order = make_order(config, self.data.size)
        self.total = steps_in(config, self.order)  # fewer, where rows turn out to be too long
        check_steps(config, self.total)
        tasks = [*(self.data.tasks if sampled else ()), *self.data.heldout]
        build_rewards.check_tasks(reward, tasks, self.data.environment)
        if run is None:
            about = about_start(self.written, given, self.tools, self.data) | {RESOLVED: self.resolved}
            run = self.new_run(name or new_name(config), about)
        else:
            check_same(self.data, run.about, run.name)
            for file in changed_files(run.about):
                self.watcher.say(
                    f"note: {file} has changed since run {run.name} was started; it goes on with what is there now"
                )
        self.run = run
        self.run.lock()

    def _resolved(self, text: str) -> None:
        """Print what an id was found to be, and keep it for the run's folder."""
        self.resolved.append(text)
        self.watcher.say(text)

    def new_run(self, name: str, about: dict[str, Any]) -> RunFolder:
        """Make the run's folder; a dry run has it elsewhere."""
        return RunFolder.create(self.written, name, about, self.total)

    def load(self, day: date) -> tuple[LoadedModel, TemplateChatFormat]:
        """Load the model as it is trained, and its chat format."""
        loaded = build_sampler.load_trained(self.config, self.watcher.say)
        return loaded, build_sampler.make_chat(self.config, loaded, day)

    def _release(self) -> None:
        if self.allocation is not None:
            self.allocation.release()

    def _environment(self) -> EnvironmentFactory | None:
        """Return the environment that the config names, where the run needs one."""
        config, given = self.config, self.objects
        if given.environment is not None:
            return None
        rows = given.examples is not None or config.data.dataset is not None
        named = (config.environment.environment_id or config.environment.command) or self.tools.wanted
        if rows and not named:
            return None
        return make_environment(config, self.tools.wanted or bool(given.tasks), self._resolved)

    def train(self) -> TrainingReport:
        """Train to the end, or to Ctrl-C: then what was learned is in a checkpoint and `state` is interrupted."""
        return run_anywhere(self.train_async, self.interrupts.ask)

    async def train_async(self) -> TrainingReport:
        """Train on the running event loop."""
        async with AsyncExitStack() as held:
            held.callback(self._release)
            held.callback(self.run.unlock)
            held.push_async_callback(self.tools.close)
            try:
                await join_cluster(self.config, held)
                loop = await make_loop(self, held)
            except BaseException:
                if not self.resuming:
                    self.run.discard()
                raise
            report = await loop.train()
            if report.state == "finished":
                report.version = await in_thread(self._register)
            await self.learners.end(report)
            return report

    def _register(self) -> str | None:
        """Register what was made, where the config asks for it. What goes wrong is said; the run is finished."""
        asked, output = self.config.registry, self.config.logging.output_dir
        if asked.name is None:
            return None
        made = f"{self.run.path}@{asked.checkpoint}"
        try:
            version = ModelRegistry(asked.path, output).register(asked.name, made)
        except (ValueError, OSError) as error:
            at = "" if asked.path is None else f" --registry {asked.path}"
            self.watcher.say(
                f"WARNING the run is finished, and could not be registered: {error}; when that is mended: tfactory "
                f"registry register {asked.name} {shlex.quote(made)} --runs {output}{at}"
            )
            return None
        self.watcher.say(f"registered as {version}")
        return str(version)


def check_registry(config: TrainingConfig) -> None:
    """Raise where a run that is to be registered could not be: before it has taken a day."""
    asked = config.registry
    if asked.name is not None:
        try:
            check_name(asked.name)
        except ValueError as error:
            raise config.wrong([Problem(("registry", "name"), str(error))]) from error
        ModelRegistry(asked.path, config.logging.output_dir).names()


def make_order(config: TrainingConfig, size: int) -> Order:
    return Order(size, config.training.batch_size, config.training.seed, config.data.shuffle)


def steps_in(config: TrainingConfig, order: Order) -> int:
    return config.training.max_steps or config.training.num_epochs * order.steps_per_epoch


async def make_loop(training: Training, held: AsyncExitStack) -> TrainingLoop:
    """Make everything that a run needs. `held` closes at its end what is opened here."""
    config, data, run, watcher = training.config, training.data, training.run, training.watcher
    tools = training.tools
    environment = None if data.environment is None else await tools.equip(data.environment)
    watcher.phase("load")
    learners, load = training.learners, partial(training.load, date.fromisoformat(run.about["day"]))
    loaded, chat = await learners.load(load, config, held, run.path, training.interrupts)
    dataset, heldout = await in_thread(_tokenized, training, loaded, chat)
    # Only now it is known how many rows are too long.
    order = training.order if dataset is None else make_order(config, len(dataset))
    total = steps_in(config, order)
    algorithm = make_algorithm(config)
    before = tools.sampled_ahead  # the run that is trained again as it was, with nothing sampled
    own, policy = await learners.policy(loaded, algorithm, total, environment is not None and before is None)
    held.push_async_callback(policy.close)
    for each in (dataset, heldout):
        if each is not None and "precomputed" in algorithm.needs:
            each.references = await references(policy, algorithm, each, config.training.batch_size, watcher)
    ahead = config.optimization.bound > 0
    progress = await taken_up(run, policy, order, total, training.resuming, ahead, watcher.say)
    if config.logging.record_tools:
        tools.record_to(run.path)
    recorded = played = None
    if before is not None:
        recorded = RecordedSource(before, algorithm, config.reward.max_unscored, progress.done)
        total = min(total, recorded.steps)
        quiet = config.training.model_copy(update={"eval_every": None})
        config = config.model_copy(update={"training": quiet})
    if environment is not None and recorded is None:
        played = await _played(training, environment, chat, loaded, own, held)
    earlier = run.metrics()
    trackers = Trackers(run.path, config)
    held.callback(trackers.close)
    return TrainingLoop(
        config=config,
        total=total,
        policy=policy,
        sampler=None if played is None else played.sampler,
        counts=played.sampler.metrics if played is not None and isinstance(played.sampler, Fleet) else dict,
        source=recorded or _source(training, algorithm, order, progress.ledger, played, dataset, total),
        algorithm=algorithm,
        order=order,
        run=run,
        tools=tools,
        heldout=_heldout(training, played, heldout),
        guards=Guards(
            config.reward.max_equal_steps,
            scored=any("reward" in row for row in earlier),
            replayed=tools.replayed is not None,
            max_mismatch=config.optimization.max_mismatch,
        ),
        doctor=Table(earlier, config.training.update_epochs * config.training.minibatches),
        watcher=watcher,
        trackers=trackers,
        interrupts=training.interrupts,
        progress=progress,
        stop_forecast=_forecast_stop(training, own, total, earlier),
        scores=Scores.of(earlier, config.training.stop_when),
        saved=progress.done or -1,
    )


def _forecast_stop(
    training: Training, policy: LocalPolicy, total: int, earlier: list[dict[str, Any]]
) -> StopForecast:
    """Warn of checkpoints that do not fit on the disk; return how long stopping takes, by the size of one and by
    earlier updates."""
    from TrainingFactory.learning.checkpoints import checkpoint_bytes  # torch

    run, sizes = training.run, checkpoint_bytes(policy.learner)
    present = sum(path.stat().st_size for path in (run.path / "checkpoints").rglob("*") if path.is_file())
    space = CheckpointSpace(training.config.logging, total, *sizes)
    warning = space.warning(shutil.disk_usage(run.path).free + present, str(run.path))
    if warning is not None:
        training.watcher.say(f"WARNING {warning}")
    updating = earlier[-1].get("seconds/update", 0.0) if earlier else 0.0
    return StopForecast(sum(sizes) / DISK_SPEED, updating)


@dataclass(slots=True)
class _Played:
    """What it takes to play episodes: the environment with its tools, who samples, and what they are worth."""

    environment: EnvironmentFactory
    chat: TemplateChatFormat
    max_length: int
    sampler: Sampler
    clock: RewardClock  # of the reward that is learned from
    measure: RewardClock  # of what held-out tasks are measured by
    scored_by: str  # the latter in words
    gate: asyncio.Semaphore | None  # for all episodes, where some are sampled ahead


async def _played(
    training: Training, environment: EnvironmentFactory, chat: Any, loaded: LoadedModel, policy: LocalPolicy,
    held: AsyncExitStack,
) -> _Played:  # fmt: skip
    config, say = training.config, training.watcher.say
    bound, episodes = config.optimization.bound, config.training.batch_size * config.training.group_size
    bound = bound if KINDS[config.training.algorithm].samples else 0
    engines = training.run.path / "engines"
    given = config, loaded, policy, episodes * (1 + bound), bound > 0, say, engines
    sampler = await in_thread(build_sampler.make_trained, *given)
    held.push_async_callback(sampler.close)
    given_reward = build_rewards.move_object(training.objects.reward, config)
    reward = given_reward or build_rewards.make_reward(config)
    await build_rewards.open_reward(reward, held, say)
    clock = RewardClock(reward, say, lambda: build_rewards.judge_metrics(reward))
    quiet = config.training.eval_every is None
    measured = evaluation_reward(reward, (lambda _: None) if quiet else say)
    measure = RewardClock(measured, say)
    if tasks := training.data.tasks or training.data.heldout:
        await check_tools(environment, tasks[0], chat, reward)
    limit, told = build_sampler.max_length(config, loaded), build_rewards.scored_by(config, measured)
    most = max_concurrent_episodes(config)
    if config.environment.num_workers is not None and config.compute.backend != "ray":
        say(f"environment: at most {most} episodes at a time")
    gate = asyncio.Semaphore(most) if bound else None
    return _Played(environment, chat, limit, sampler, clock, measure, told, gate)


def _source(
    training: Training,
    algorithm: Algorithm,
    order: Order,
    ledger: Ledger,
    played: _Played | None,
    dataset: TokenizedDataset | None,
    total: int,
) -> Source:
    config, tasks = training.config, training.data.tasks
    if dataset is not None:
        return DatasetSource(dataset, order, algorithm)
    assert played is not None
    if KINDS[config.training.algorithm].demonstrations:
        limits = {
            "max_reply_tokens": config.sampling.max_reply_tokens,
            "max_length": played.max_length,
            "timeout": config.environment.episode_timeout,
            "runtime": training.tools.runtime,
        }
        most = max_concurrent_episodes(config)
        return ExpertSource(tasks, order, played.environment, played.chat, algorithm, limits, most)
    given = (
        tasks,
        order,
        _rollouts(training, played, played.clock),
        played.sampler,
        algorithm,
        played.clock,
        ledger,
    )
    options = {"group_size": config.training.group_size, "max_unscored": config.reward.max_unscored}
    if not (bound := config.optimization.bound):
        return SampledSource(*given, **options)
    by_arrival = config.optimization.async_order == "arrival"
    return AheadSource(*given, **options, bound=bound, by_arrival=by_arrival, total=total)


def _rollouts(training: Training, played: _Played, reward: RewardClock) -> RolloutEngine:
    watch, runtime = training.watcher.episode, training.tools.runtime
    return build_sampler.make_rollouts(
        training.config, played.environment, played.chat, watch, reward, runtime, played.gate, played.sampler
    )


def _heldout(training: Training, played: _Played | None, dataset: TokenizedDataset | None) -> HeldOut:
    if played is None:
        return HeldOut(dataset=dataset)
    rollouts, tasks = _rollouts(training, played, played.measure), training.data.heldout
    given = [kind for kind in training.objects.given if kind in ("environment", "reward", "tools")]
    record = partial(record_of_training, training.config, training.run, tasks, played.scored_by, given)
    return HeldOut(tasks, rollouts, played.clock, dataset, record)


def _tokenized(
    training: Training, loaded: LoadedModel, chat: Any
) -> tuple[TokenizedDataset | None, TokenizedDataset | None]:
    """Write the dataset and the held-out rows in tokens. Which rows are too long is known only now."""
    data, limit = training.data, build_sampler.max_length(training.config, loaded)

    def written(examples: Examples | None, which: str) -> TokenizedDataset | None:
        if examples is None:
            return None
        say, skip = training.watcher.say, training.config.data.skip_bad_rows
        return TokenizedDataset(examples, chat, limit, skip, lambda text: say(f"note: {which}{text}"))

    found = written(data.examples, ""), written(data.heldout_examples, "held-out: ")
    data.examples = data.heldout_examples = None  # their texts are not needed any more
    return found


def resume(name: str, runs: str | Path = "runs", watcher: Watcher | None = None) -> Training:
    """Go on with the run of that name or folder, from its last checkpoint."""
    run = RunFolder.find(name, runs)
    if objects := run.about.get("objects"):
        raise ValueError(
            f"run {run.name} was started from Python with its own {' and '.join(objects)}; go on with it there: "
            f"the same trainer with name={run.name!r} and resume=True"
        )
    return Training(run.config, run=run, watcher=watcher)
