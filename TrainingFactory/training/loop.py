"""The training loop: groups of episodes in, a better policy out, everything recorded on the way."""

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
from TrainingFactory.rollout.metrics import evaluation_metrics
from TrainingFactory.runs.devices import device_failure
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
from TrainingFactory.runs.tracking import Watcher
from TrainingFactory.tools.recording import EpisodeKey
from TrainingFactory.tools.threads import in_thread
from TrainingFactory.training.forecasts import StopForecast
from TrainingFactory.training.guards import Finding, Guards
from TrainingFactory.training.interrupts import Interrupts, Stopped
from TrainingFactory.training.ledger import Ledger
from TrainingFactory.training.reward_clock import RewardClock
from TrainingFactory.training.source import Source, StepGroups, Stream
from TrainingFactory.training.task_order import Order
from TrainingFactory.training.tokenized_dataset import TokenizedDataset
from TrainingFactory.types import Sample, SamplersLost, Task, Trajectory


class ToolCalls(Protocol):
    """The tools of a run as the loop sees them: `assembly/run_tools.py`."""

    def commit(self, trained: Callable[[EpisodeKey], bool] = ...) -> None: ...
    def drop(self, unwanted: Callable[[EpisodeKey], bool]) -> None: ...
    def metrics(self, wanted: Callable[[EpisodeKey], bool] = ...) -> dict[str, float]: ...
    def totals(self) -> dict[str, float]: ...


@dataclass(slots=True)
class Progress:
    """Tells how far a run is; a checkpoint holds it beside the weights."""

    ledger: Ledger  # of the tasks or examples
    done: int = 0  # steps
    seconds: float = 0.0  # spent so far, in earlier processes too
    unlogged: dict[str, float] | None = None  # metrics of the last step, whose evaluation was interrupted


@dataclass(slots=True)
class HeldOut:
    """Holds what the policy is measured on while it learns: tasks to play, rows to read, or both."""

    tasks: Sequence[Task] = ()
    rollouts: RolloutEngine | None = None
    clock: RewardClock | None = None
    dataset: TokenizedDataset | None = None
    record: Callable[[int, Sequence[Trajectory], dict[str, float]], None] | None = None  # of what was played


@dataclass(slots=True)
class TrainingLoop:
    """Trains with what `trainers/training_run.py` has made. Ctrl-C and SIGTERM stop it with a checkpoint."""

    config: TrainingConfig
    total: int  # steps
    policy: Policy
    sampler: Sampler | None  # None: nothing is sampled
    counts: Callable[[], dict[str, float]]  # of the sampler, for the metrics
    source: Source
    algorithm: Algorithm  # the driver's, for credit; the policy has its own
    order: Order
    run: RunFolder
    tools: ToolCalls
    heldout: HeldOut
    guards: Guards
    doctor: RunDoctor
    watcher: Watcher
    trackers: Tracker
    interrupts: Interrupts
    progress: Progress
    stop_forecast: StopForecast
    scores: Scores = field(default_factory=Scores)
    rows: list[dict[str, float]] = field(default_factory=list)
    saved: int = -1  # the step of the last checkpoint
    phase: str = "load"

    async def train(self) -> TrainingReport:
        await self._write_status("running")
        self._warn(self.stop_forecast.warning())
        try:
            with self.interrupts.watching():
                state, reason = await self._to_the_end()
            return await self._finish(state, reason)
        except asyncio.CancelledError:
            if not self.interrupts.asked:
                raise
            return await self._finish("interrupted")  # at once: the last checkpoint is what remains
        except Exception as error:
            told = self._in_words(error)
            await self._finish("failed", str(told))
            if told is error:
                raise
            raise told from error

    def _in_words(self, error: Exception) -> Exception:
        """Return what says how to go on, where that helps; else the error itself."""
        if (told := device_failure(error)) is not None:
            at = f"in phase {self.phase}, after {self.progress.done} of {self.total} steps"
            there = "Another machine with this folder and what its config names can go on with it too"
            return ValueError(f"{at}: {told}. {there}. {self.run.mend}")
        if isinstance(error, OSError | SamplersLost):
            kind = OSError if isinstance(error, OSError) else ValueError
            return kind(f"{error}; when that is mended, go on with: {self.run.resume_command}")
        return error

    async def _to_the_end(self) -> tuple[State, str | None]:
        """Make the steps, and a checkpoint where they end early; return how they ended, and why."""
        try:
            try:
                return "finished", await self._steps()
            finally:
                await self.source.close()
        except Stopped:
            await self._save()
            return "interrupted", None
        except SamplersLost:
            await self._save()
            raise

    async def _steps(self) -> str | None:
        """Go to the end and return why that is before the last step, if it is."""
        stream = Stream(self.source, self.progress.done, self.total)
        if (lost := await self._publish()) is not None:
            raise lost
        if self.progress.done == 0 and self._evaluation_is_due():
            await self._log(0, await self.interrupts.at_once(self._evaluate()))
        if (metrics := self.progress.unlogged) is not None:
            metrics = metrics | await self.interrupts.at_once(self._evaluate())
            self.progress.unlogged = None
            await self._log(int(metrics.pop("epoch")), metrics)
        if (reason := self.scores.verdict()) is not None:  # or it was killed when it had just ended
            stream.end()
        self._begin("generate")
        first = self.progress.done  # its update may compile kernels
        async for batch in self.interrupts.over(stream):
            last = batch.step + 1 == self.total
            await self._guard(batch.step, self.guards.check(batch, last))
            self._begin("update")
            started = time.perf_counter()
            writing = asyncio.ensure_future(in_thread(self._write_episodes, batch))
            try:
                metrics = await self.policy.step(batch.rows, batch.step)
            finally:  # after a failure what is written too much is cut off as after a kill
                written = await writing
            lost = await self._publish()
            updating = time.perf_counter() - started
            await self._record(batch, metrics | written, updating)
            if batch.step > first:
                self.stop_forecast.updating = updating
                self._warn(self.stop_forecast.warning())
            if lost is not None:
                raise lost
            await self._guard(batch.step, self.guards.updated(metrics, last))
            reason = self.scores.verdict()
            await self._save_if_due(last=reason is not None)
            self.interrupts.check()
            if reason is not None:
                self.watcher.say(f"ending after step {batch.step + 1}: {reason}")
                stream.end()
            self._begin("generate")
            del batch  # its episodes need not be there while the next are played
        return reason

    def _begin(self, phase: str) -> None:
        self.phase = phase
        self.watcher.phase(phase)

    def _warn(self, warning: str | None) -> None:
        if warning is not None:
            self.watcher.say(f"WARNING {warning}")

    async def _publish(self) -> SamplersLost | None:
        """Let the sampler go on with the newest weights; what is lost by it is raised when the step is written."""
        weights = await self.policy.publish()
        try:
            if self.sampler is not None:
                await self.sampler.update(weights)
        except SamplersLost as lost:
            return lost
        return None

    async def _guard(self, step: int, finding: Finding) -> None:
        """Warn of a step that cannot be learned from; wait for what may pass, stop at what will not."""
        if finding.save:
            await self._save()
        if finding.warning is not None:
            self.watcher.say(f"WARNING step {step + 1}: {finding.warning}")
        if finding.stop is not None:
            raise ValueError(f"{finding.stop}. {self.run.mend}")
        if finding.pause:
            await self.interrupts.pause(finding.pause)

    async def _record(self, batch: StepGroups, updated: dict[str, float], updating: float) -> None:
        seconds = batch.seconds + updating
        metrics = batch.metrics | self.tools.metrics(batch.has_recorded) | updated | self.counts()
        metrics |= {
            "seconds/step": seconds,
            "seconds/generate": batch.seconds,
            "seconds/update": updating,
            "steps_per_second": 1 / seconds,
        }
        if updated["row_tokens"]:
            metrics["tokens_saved"] = 1 - updated["computed_tokens"] / updated["row_tokens"]
        epoch = batch.groups[0].place // self.order.size
        self.progress.done = batch.step + 1
        self.progress.ledger.trained(batch.groups)
        self.progress.seconds += seconds
        # Not before: a checkpoint holds the calls of steps that are done.
        await in_thread(self._write_calls, batch)
        tasks = [group.trajectories[0].task.id for group in batch.groups]
        groups = [[group.number, group.attempt, group.place] for group in batch.groups]
        row = {"step": batch.step + 1, "epoch": epoch, "tasks": tasks, "groups": groups}
        await in_thread(self.run.append, CONSUMED, row)
        try:
            if self._evaluation_is_due():
                metrics |= await self.interrupts.at_once(self._evaluate())
        except Stopped:
            # The checkpoint holds them; a resumed run evaluates again and logs them.
            self.progress.unlogged = {"epoch": epoch} | metrics
            raise
        except SamplersLost:
            await self._log(epoch, metrics)  # the step itself is done
            raise
        await self._log(epoch, metrics)
        if batch.sampled and (self._save_is_due() or self.progress.done == 1):
            await in_thread(self.trackers.episodes, self.progress.done, batch.trajectories)
        for change in self.doctor.look(self.progress.done, metrics, batch.trajectories):
            await in_thread(self.run.append, FINDINGS, change.row)
            if change.finding is not None:
                self.watcher.say(f"FINDING step {change.step}: {change.finding.text}")

    def _write_calls(self, batch: StepGroups) -> None:
        """Write the tool calls of a step, and forget those of groups that were given up."""
        self.tools.drop(lambda key: (key.step, key.task) in batch.given_up)
        self.tools.commit(batch.has_recorded)

    def _write_episodes(self, batch: StepGroups) -> dict[str, float]:
        """Write the episodes of a step, and apart those that are learned from: `kept` of all, of `kept_tasks` any."""
        if not batch.sampled:
            return {}
        if self.config.logging.save_trajectories:
            self.run.append_trajectories(batch.trajectories)
        accepted = [self.algorithm.accepted(group.trajectories) for group in batch.groups]
        kept = [group for group in accepted if group is not None]
        if not kept:
            return {}
        self.run.append_trajectories((each for group in kept for each in group), KEPT)
        return {
            "kept": sum(map(len, kept)) / len(batch.trajectories),
            "kept_tasks": sum(map(bool, kept)) / len(kept),
        }

    async def _log(self, epoch: int, metrics: dict[str, float]) -> None:
        done = self.progress.done
        await in_thread(
            self.run.append, METRICS, {"step": done, "epoch": epoch, "time": time.time()} | metrics
        )
        await self._write_status("running")
        await in_thread(self.trackers.log, done, metrics)
        self.rows.append({"step": done} | metrics)
        self.scores.add(self.rows[-1])
        self.watcher.step(done, self.total, metrics)

    # evaluation

    def _evaluation_is_due(self) -> bool:
        every, done = self.config.training.eval_every, self.progress.done
        return every is not None and (done % every == 0 or done == self.total)

    async def _evaluate(self) -> dict[str, float]:
        self._begin("evaluate")
        started = time.perf_counter()
        metrics = await self._play_heldout() if self.heldout.tasks else {}
        if self.heldout.dataset is not None:
            rows = await in_thread(self._heldout_rows, self.heldout.dataset)
            metrics |= await self.policy.evaluate(rows, self.progress.done) | self.heldout.dataset.left_out
        metrics["seconds"] = time.perf_counter() - started
        return {f"eval/{name}": value for name, value in metrics.items()}

    async def _play_heldout(self) -> dict[str, float]:
        given = self.heldout
        assert given.rollouts is not None and self.sampler is not None
        started, done = time.perf_counter(), self.progress.done
        name = f"eval-{done}"
        groups = await given.rollouts.rollout_batch(given.tasks, self.sampler, recorded_as=name)
        await in_thread(self.tools.commit, lambda key: key.step == name)
        played = [trajectory for group in groups for trajectory in group]
        metrics = self.tools.metrics(lambda key: key.step == name)
        metrics |= given.clock.spent() if given.clock is not None else {}
        if given.record is not None:
            seconds = {"seconds": time.perf_counter() - started}
            await in_thread(given.record, done, played, metrics | seconds)
        return evaluation_metrics(played) | metrics

    def _heldout_rows(self, dataset: TokenizedDataset) -> list[Sample]:
        groups = (dataset.fill(n, self.algorithm.samples(dataset.group(n))) for n in range(len(dataset)))
        return [row for group in groups for row in group]

    # checkpoints and status

    def _save_is_due(self) -> bool:
        done, asked, best = self.progress.done, self.config.logging, self.scores.best
        best_yet = asked.keep_best and best is not None and best[0] == done
        return done % asked.checkpoint_every == 0 or best_yet or done == self.total

    async def _save_if_due(self, last: bool) -> None:
        due = self._save_is_due() and not self.guards.unusable
        if due or last or self.progress.done == self.total:
            await self._save()

    async def _save(self) -> None:
        progress, keep = self.progress, self.config.logging
        if self.saved == progress.done or not progress.done:
            return
        self._begin("checkpoint")
        state = {
            "step": progress.done,
            "seconds": progress.seconds,
            **progress.ledger.state(),
            "offsets": await in_thread(self.run.offsets),
        }
        if progress.unlogged is not None:
            state["unlogged"] = progress.unlogged
        started = time.perf_counter()
        await self.policy.save(str(self.run.checkpoint_folder(progress.done)), state)
        self.saved, self.stop_forecast.saving = progress.done, time.perf_counter() - started
        self._warn(self.stop_forecast.warning())
        kept = keep.keep_checkpoints, keep.keep_every, keep.keep_best, keep.optimizer_state
        await in_thread(self.run.prune, *kept)

    async def _finish(self, state: State, reason: str | None = None) -> TrainingReport:
        with contextlib.suppress(OSError):  # a full disk may have brought us here
            await self._write_status(state, reason)
        last = self.rows[-1] if self.rows else {}
        return TrainingReport(self.run.path, self.progress.done, state, last, self.rows, self.tools.totals())

    async def _write_status(self, state: State, reason: str | None = None) -> None:
        progress = self.progress
        status = Status(state, progress.done, self.total, reason, progress.seconds)
        await in_thread(self.run.write_status, status)
