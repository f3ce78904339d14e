"""The training loop: sampling, updates, evaluation, checkpoints and logging of a run."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from TrainingFactory.config import TrainingConfig
from TrainingFactory.protocols import Algorithm, Policy, Sampler, Tracker
from TrainingFactory.rollout import RolloutEngine
from TrainingFactory.rollout.metrics import compute_evaluation_metrics
from TrainingFactory.runs.devices import describe_device_failure
from TrainingFactory.runs.findings import RunDoctor
from TrainingFactory.runs.folder import (
    CONSUMED,
    FINDINGS,
    KEPT,
    METRICS,
    RunFolder,
    State,
    Status,
    TrainingReport,
)
from TrainingFactory.runs.scores import Scores
from TrainingFactory.runs.system_metrics import SystemMonitor
from TrainingFactory.runs.tracking import Watcher
from TrainingFactory.tools.recording import EpisodeKey
from TrainingFactory.tools.threads import in_thread
from TrainingFactory.training.forecasts import StopForecast
from TrainingFactory.training.guards import GuardAction, Guards
from TrainingFactory.training.interrupts import Interrupts, StopRequested
from TrainingFactory.training.ledger import Ledger
from TrainingFactory.training.reward_clock import RewardClock
from TrainingFactory.training.source import Source, StepGroups, StepStream
from TrainingFactory.training.task_order import TaskOrder
from TrainingFactory.training.tokenized_dataset import TokenizedDataset
from TrainingFactory.types import Sample, SamplersLost, Task, Trajectory


class ToolCalls(Protocol):
    """Recording and metrics of a run's tool calls; implemented in `assembly/run_tools.py`."""

    def commit(self, is_trained: Callable[[EpisodeKey], bool] = ...) -> None: ...
    def drop(self, is_unwanted: Callable[[EpisodeKey], bool]) -> None: ...
    def metrics(self, is_included: Callable[[EpisodeKey], bool] = ...) -> dict[str, float]: ...
    def totals(self) -> dict[str, float]: ...


@dataclass(slots=True)
class Progress:
    """Progress of a run, stored in its checkpoints."""

    ledger: Ledger
    steps: int = 0  # trained steps
    seconds: float = 0.0  # training time, including earlier processes
    unlogged_metrics: dict[str, float] | None = None  # of the last step, if its evaluation was interrupted


@dataclass(slots=True)
class HeldoutData:
    """Data for evaluations during training: tasks to play, examples, or both."""

    tasks: Sequence[Task] = ()
    rollouts: RolloutEngine | None = None
    clock: RewardClock | None = None
    dataset: TokenizedDataset | None = None
    append_record: Callable[[int, Sequence[Trajectory], dict[str, float]], None] | None = None


@dataclass(slots=True)
class TrainingLoop:
    """Trains with the parts assembled by `trainers/training_run.py`. On Ctrl-C and SIGTERM it saves and stops."""

    config: TrainingConfig
    num_steps: int  # steps
    policy: Policy
    sampler: Sampler | None  # None: nothing is sampled
    get_sampler_metrics: Callable[[], dict[str, float]]  # metrics of the sampler
    source: Source
    algorithm: Algorithm  # this process's own, for credit assignment; the policy has another instance
    order: TaskOrder
    run: RunFolder
    tools: ToolCalls
    heldout: HeldoutData
    guards: Guards
    doctor: RunDoctor
    watcher: Watcher
    trackers: Tracker
    interrupts: Interrupts
    progress: Progress
    stop_forecast: StopForecast
    system_monitor: SystemMonitor = field(default_factory=SystemMonitor)
    scores: Scores = field(default_factory=Scores)
    rows: list[dict[str, float]] = field(default_factory=list)
    saved_step: int = -1  # of the last checkpoint
    phase: str = "load"

    async def train(self) -> TrainingReport:
        await self._write_status("running")
        self._warn(self.stop_forecast.make_warning())
        self.system_monitor.start()
        try:
            with self.interrupts.watch_signals():
                state, reason = await self._run_steps()
            return await self._finish_run(state, reason)
        except asyncio.CancelledError:
            if not self.interrupts.is_stop_requested:
                raise
            return await self._finish_run("interrupted")  # without saving; the last checkpoint remains
        except Exception as error:
            explained_error = self._explain_failure(error)
            await self._finish_run("failed", str(explained_error))
            if explained_error is error:
                raise
            raise explained_error from error
        finally:
            self.system_monitor.close()

    def _explain_failure(self, error: Exception) -> Exception:
        """Return an error with instructions for resuming the run, if it can resume after `error`; else `error`
        itself."""
        if (problem := describe_device_failure(error)) is not None:
            progress_text = f"In phase {self.phase}, after {self.progress.steps} of {self.num_steps} steps"
            resume_hint = (
                "The run can also resume on another machine that has its folder and the files of its config"
            )
            return ValueError(f"{progress_text}: {problem}. {resume_hint}. {self.run.fix_instruction}")
        if isinstance(error, OSError | SamplersLost):
            error_type = OSError if isinstance(error, OSError) else ValueError
            return error_type(f"{error}. Fix the problem, then run: {self.run.resume_command}")
        return error

    async def _run_steps(self) -> tuple[State, str | None]:
        """Run the steps, and save a checkpoint if they are interrupted; return the final state and the reason."""
        try:
            try:
                return "finished", await self._run_remaining_steps()
            finally:
                await self.source.close()
        except StopRequested:
            await self._save_checkpoint()
            return "interrupted", None
        except SamplersLost:
            await self._save_checkpoint()
            raise

    async def _run_remaining_steps(self) -> str | None:
        """Run all remaining steps; return the reason if the run ends early."""
        stream = StepStream(self.source, self.progress.steps, self.num_steps)
        if (lost_error := await self._publish_weights()) is not None:
            raise lost_error
        if self.progress.steps == 0 and self._is_evaluation_due():
            await self._log_metrics(0, await self.interrupts.interruptible(self._evaluate_heldout()))
        if (metrics := self.progress.unlogged_metrics) is not None:
            metrics = metrics | await self.interrupts.interruptible(self._evaluate_heldout())
            self.progress.unlogged_metrics = None
            await self._log_metrics(int(metrics.pop("epoch")), metrics)
        if (reason := self.scores.find_stop_reason()) is not None:  # killed after it met its stop condition
            stream.end()
        self._begin_phase("generate")
        first_step = self.progress.steps  # not measured: its update may compile kernels
        async for batch in self.interrupts.iterate_until_stop(stream):
            is_last = batch.step + 1 == self.num_steps
            await self._act_on_guard(batch.step, self.guards.check(batch, is_last))
            self._begin_phase("update")
            start_time = time.perf_counter()
            write_task = asyncio.ensure_future(in_thread(self._write_episodes, batch))
            try:
                metrics = await self.policy.step(batch.rows, batch.step)
            finally:  # after a failure, resuming truncates the extra episodes as after a kill
                episode_metrics = await write_task
            lost_error = await self._publish_weights()
            update_seconds = time.perf_counter() - start_time
            await self._record_step(batch, metrics | episode_metrics, update_seconds)
            if batch.step > first_step:
                self.stop_forecast.update_seconds = update_seconds
                self._warn(self.stop_forecast.make_warning())
            if lost_error is not None:
                raise lost_error
            await self._act_on_guard(batch.step, self.guards.check_update(metrics, is_last))
            reason = self.scores.find_stop_reason()
            await self._save_if_due(is_last=reason is not None)
            self.interrupts.check()
            if reason is not None:
                self.watcher.say(f"Ending after step {batch.step + 1}: {reason}")
                stream.end()
            self._begin_phase("generate")
            del batch  # free its episodes while the next ones are played
        return reason

    def _begin_phase(self, phase: str) -> None:
        self.phase = phase
        self.watcher.phase(phase)

    def _warn(self, warning: str | None) -> None:
        if warning is not None:
            self.watcher.say(f"WARNING {warning}")

    async def _publish_weights(self) -> SamplersLost | None:
        """Publish the current weights to the sampler. Return a SamplersLost error instead of raising it, because the
        step must be logged first."""
        weights = await self.policy.publish()
        try:
            if self.sampler is not None:
                await self.sampler.update(weights)
        except SamplersLost as error:
            return error
        return None

    async def _act_on_guard(self, step: int, action: GuardAction) -> None:
        """Carry out the action of a guard: save, warn, stop the run, or pause."""
        if action.saves_checkpoint:
            await self._save_checkpoint()
        if action.warning is not None:
            self.watcher.say(f"WARNING step {step + 1}: {action.warning}")
        if action.stop_reason is not None:
            raise ValueError(f"{action.stop_reason}. {self.run.fix_instruction}")
        if action.pause_seconds:
            await self.interrupts.pause(action.pause_seconds)

    async def _record_step(self, batch: StepGroups, update: dict[str, float], update_seconds: float) -> None:
        step_seconds = batch.seconds + update_seconds
        metrics = batch.metrics | self.tools.metrics(batch.has_recorded) | update | self.get_sampler_metrics()
        metrics |= {
            "seconds/step": step_seconds,
            "seconds/generate": batch.seconds,
            "seconds/update": update_seconds,
            "steps_per_second": 1 / step_seconds,
        }
        if update["row_tokens"]:
            metrics["tokens_saved"] = 1 - update["computed_tokens"] / update["row_tokens"]
        epoch = batch.groups[0].position // self.order.size
        self.progress.steps = batch.step + 1
        self.progress.ledger.mark_trained(batch.groups)
        self.progress.seconds += step_seconds
        # After `done` is set: a checkpoint holds the tool calls of completed steps.
        await in_thread(self._write_calls, batch)
        task_ids = [group.trajectories[0].task.id for group in batch.groups]
        group_slots = [[group.number, group.attempt, group.position] for group in batch.groups]
        ledger_row = {"step": batch.step + 1, "epoch": epoch, "tasks": task_ids, "groups": group_slots}
        await in_thread(self.run.append, CONSUMED, ledger_row)
        try:
            if self._is_evaluation_due():
                metrics |= await self.interrupts.interruptible(self._evaluate_heldout())
        except StopRequested:
            # The checkpoint stores these metrics; a resumed run evaluates again and logs them.
            self.progress.unlogged_metrics = {"epoch": epoch} | metrics
            raise
        except SamplersLost:
            await self._log_metrics(epoch, metrics, batch.trajectories)  # the step itself is complete
            raise
        await self._log_metrics(epoch, metrics, batch.trajectories)
        if batch.is_sampled and (self._is_save_due() or self.progress.steps == 1):
            await in_thread(self.trackers.episodes, self.progress.steps, batch.trajectories)

    def _write_calls(self, batch: StepGroups) -> None:
        """Record the tool calls of a step, and drop those of discarded groups."""
        self.tools.drop(lambda key: (key.step, key.task) in batch.discarded_keys)
        self.tools.commit(batch.has_recorded)

    def _write_episodes(self, batch: StepGroups) -> dict[str, float]:
        """Write the step's episodes, and write those accepted as demonstrations to a separate file. Return the shares
        of accepted episodes and of tasks with one."""
        if not batch.is_sampled:
            return {}
        if self.config.logging.save_trajectories:
            self.run.append_trajectories(batch.trajectories)
        accepted_lists = [self.algorithm.accepted(group.trajectories) for group in batch.groups]
        accepted_groups = [group for group in accepted_lists if group is not None]
        if not accepted_groups:
            return {}
        self.run.append_trajectories((trajectory for group in accepted_groups for trajectory in group), KEPT)
        return {
            "kept": sum(map(len, accepted_groups)) / len(batch.trajectories),
            "kept_tasks": sum(map(bool, accepted_groups)) / len(accepted_groups),
        }

    async def _log_metrics(
        self, epoch: int, metrics: dict[str, float], episodes: Sequence[Trajectory] = ()
    ) -> None:
        """Log the metrics of a step, and report the findings that they show."""
        num_done = self.progress.steps
        await in_thread(
            self._write_metrics, {"step": num_done, "epoch": epoch, "time": time.time()} | metrics
        )
        await self._write_status("running")
        await in_thread(self.trackers.log, num_done, metrics)
        self.rows.append({"step": num_done} | metrics)
        self.scores.add_row(self.rows[-1])
        self.watcher.step(num_done, self.num_steps, metrics)
        for change in self.doctor.observe(num_done, metrics, episodes):
            await in_thread(self.run.append, FINDINGS, change.row)
            if change.finding is not None:
                self.watcher.say(f"FINDING step {change.step}: {change.finding.text}")

    def _write_metrics(self, row: dict[str, float]) -> None:
        self.run.append(METRICS, row | self.system_monitor.read_metrics())

    # evaluation

    def _is_evaluation_due(self) -> bool:
        eval_every, num_done = self.config.training.eval_every, self.progress.steps
        return eval_every is not None and (num_done % eval_every == 0 or num_done == self.num_steps)

    async def _evaluate_heldout(self) -> dict[str, float]:
        self._begin_phase("evaluate")
        start_time = time.perf_counter()
        metrics = await self._play_heldout() if self.heldout.tasks else {}
        if (dataset := self.heldout.dataset) is not None:
            rows = await in_thread(self._make_heldout_rows, dataset)
            metrics |= await self.policy.evaluate(rows, self.progress.steps) | dataset.skipped_row_counts
        metrics["seconds"] = time.perf_counter() - start_time
        return {f"eval/{name}": value for name, value in metrics.items()}

    async def _play_heldout(self) -> dict[str, float]:
        heldout, num_done = self.heldout, self.progress.steps
        assert heldout.rollouts is not None and self.sampler is not None
        start_time = time.perf_counter()
        step_name = f"eval-{num_done}"
        groups = await heldout.rollouts.rollout_batch(heldout.tasks, self.sampler, recording_key=step_name)
        await in_thread(self.tools.commit, lambda key: key.step == step_name)
        episodes = [trajectory for group in groups for trajectory in group]
        metrics = self.tools.metrics(lambda key: key.step == step_name)
        metrics |= heldout.clock.take_costs() if heldout.clock is not None else {}
        if heldout.append_record is not None:
            duration = {"seconds": time.perf_counter() - start_time}
            await in_thread(heldout.append_record, num_done, episodes, metrics | duration)
        return compute_evaluation_metrics(episodes) | metrics

    def _make_heldout_rows(self, dataset: TokenizedDataset) -> list[Sample]:
        groups = (dataset.fill_rows(i, self.algorithm.samples(dataset.group(i))) for i in range(len(dataset)))
        return [row for group in groups for row in group]

    # checkpoints and status

    def _is_save_due(self) -> bool:
        num_done, logging, best_score = self.progress.steps, self.config.logging, self.scores.best
        is_new_best = logging.keep_best and best_score is not None and best_score[0] == num_done
        return num_done % logging.checkpoint_every == 0 or is_new_best or num_done == self.num_steps

    async def _save_if_due(self, is_last: bool) -> None:
        is_due = self._is_save_due() and not self.guards.unusable_steps
        if is_due or is_last or self.progress.steps == self.num_steps:
            await self._save_checkpoint()

    async def _save_checkpoint(self) -> None:
        progress, logging = self.progress, self.config.logging
        if self.saved_step == progress.steps or not progress.steps:
            return
        self._begin_phase("checkpoint")
        checkpoint_state = {
            "step": progress.steps,
            "seconds": progress.seconds,
            **progress.ledger.make_state(),
            "offsets": await in_thread(self.run.sync_files),
        }
        if progress.unlogged_metrics is not None:
            checkpoint_state["unlogged"] = progress.unlogged_metrics
        start_time = time.perf_counter()
        await self.policy.save(str(self.run.checkpoint_folder(progress.steps)), checkpoint_state)
        self.saved_step, self.stop_forecast.save_seconds = progress.steps, time.perf_counter() - start_time
        self._warn(self.stop_forecast.make_warning())
        retention = logging.keep_checkpoints, logging.keep_every, logging.keep_best, logging.optimizer_state
        await in_thread(self.run.prune, *retention)

    async def _finish_run(self, state: State, reason: str | None = None) -> TrainingReport:
        with contextlib.suppress(OSError):  # the disk may be full
            await self._write_status(state, reason)
        row = self.rows[-1] if self.rows else {}
        return TrainingReport(self.run.path, self.progress.steps, state, row, self.rows, self.tools.totals())

    async def _write_status(self, state: State, reason: str | None = None) -> None:
        progress = self.progress
        status = Status(state, progress.steps, self.num_steps, reason, progress.seconds)
        await in_thread(self.run.write_status, status)
