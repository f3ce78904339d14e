"""A training run from its config to its last checkpoint. One step is a straight line; what differs between
algorithms is in the algorithm and in where the episodes come from."""

from __future__ import annotations

import asyncio
import contextlib
import time
from datetime import date
from pathlib import Path

from TrainingFactory.config import TrainingConfig
from TrainingFactory.data.examples import Examples
from TrainingFactory.protocols import EnvironmentFactory, RewardFunction
from TrainingFactory.rollout import AsyncRolloutEngine
from TrainingFactory.rollout.seeds import turn_seed
from TrainingFactory.services.build import assemble
from TrainingFactory.services.build import learner as assemble_learner
from TrainingFactory.services.build import rewards as assemble_rewards
from TrainingFactory.services.build.named_files import changed_files
from TrainingFactory.services.build.run_tools import RunTools
from TrainingFactory.services.evaluation.evaluation import evaluation_metrics, evaluation_reward
from TrainingFactory.services.evaluation.rollouts import check_tools
from TrainingFactory.services.runs.folder import (
    CONSUMED,
    METRICS,
    RunFolder,
    State,
    Status,
    TrainingReport,
    new_name,
)
from TrainingFactory.services.runs.tracking import PlainLines, Trackers, Watcher
from TrainingFactory.services.training.dataset import Objects, about_start, check_same, gather, told_left_out
from TrainingFactory.services.training.demonstrations import ExpertEpisodes, RecordedEpisodes, Recordings
from TrainingFactory.services.training.equal_rewards import EqualRewards
from TrainingFactory.services.training.guards import Unusable, without_tools
from TrainingFactory.services.training.interrupts import Interrupts
from TrainingFactory.services.training.kept import record_kept
from TrainingFactory.services.training.preflight import as_started, check, check_steps
from TrainingFactory.services.training.source import Groups, Order, RewardClock, SampledEpisodes, Source


class Training:
    """Everything that can be wrong with names, files and folders shows when it is made; `train` then loads the
    model and goes to the end. With `run` it goes on with that run from its last checkpoint. With `replay` the tool
    calls are answered from the recording of that run (its name or folder), and no tool is started."""

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
        config = as_started(config, run)
        self.config, self.objects = config, objects or Objects()
        self.watcher: Watcher = watcher or PlainLines()
        check(config, config.data.dataset is not None or self.objects.examples is not None)
        self.resuming = run is not None
        if run is not None:
            replay = replay or run.about.get("replay")
        self.tools = RunTools(config, self.objects.tools, replay, self.objects.cache)
        try:
            self.data = gather(config, self.objects, self.tools)
            self._set_order(self.data.size)
            check_steps(config, self.total)
            if run is None:
                about = about_start(config, self.objects, self.tools, self.data)
                run = RunFolder.create(config, name or new_name(config), about)
            else:
                check_same(self.data, run.about, run.name)
                for file in changed_files(run.about):
                    self.watcher.say(
                        f"note: {file} has changed since run {run.name} was started; it goes on with what is there now"
                    )
            self.run = run
            self.run.lock()
        except BaseException:
            asyncio.run(self.tools.close())
            raise
        self.done = 0  # steps
        self.seconds = 0.0  # spent so far, in earlier processes too
        self._checkpointed = -1
        self._unusable = Unusable(run)
        self._equal = EqualRewards(config.reward.max_equal_steps)
        self._held = contextlib.ExitStack()  # what the reward keeps open
        self._interrupts = Interrupts(self.watcher)
        self._rows: list[dict[str, float]] = []
        if not self.resuming:
            self._write_status("running")

    def _set_order(self, size: int) -> None:
        training = self.config.training
        self.order = Order(size, training.batch_size, training.seed)
        self.total = training.max_steps or training.num_epochs * self.order.steps_per_epoch

    # the run

    def train(self) -> TrainingReport:
        """To the end, or to Ctrl-C: then what was learned is in a checkpoint and `state` is interrupted."""
        started = time.perf_counter()
        try:
            self._load()
        except BaseException:
            if not self.resuming:
                self.run.discard()
            self.run.unlock()
            self._held.close()
            asyncio.run(self.tools.close())
            raise
        try:
            self._write_status("running")
            with self._interrupts:
                self._evaluate_before()
                self._steps()
            return self._finish("finished")
        except KeyboardInterrupt:
            if self._interrupts.consistent:
                self._checkpoint()
            return self._finish("interrupted")
        except OSError as error:
            reason = f"{error}; when that is mended, go on with: {self.run.resume_command}"
            self._finish("failed", reason)
            raise OSError(reason) from error
        except Exception as error:
            self._finish("failed", str(error))
            raise
        finally:
            self.trackers.close()
            self._held.close()
            asyncio.run(self.tools.close())
            self.run.unlock()
            self.seconds += time.perf_counter() - started

    def _steps(self) -> None:
        from TrainingFactory.services.training.update import learn

        options = self.config.training
        while self.done < self.total:
            started = time.perf_counter()
            groups = self._generate(self.done)
            generated = time.perf_counter()
            self.watcher.phase("update")
            figures = learn(
                self.learner,
                self.algorithm,
                groups,
                self.done,
                token_budget=options.token_budget,
                epochs=options.update_epochs,
                minibatches=options.minibatches,
                seed=self._seed(self.done),
                references=self.references,
            )
            ended = time.perf_counter()
            metrics = self._metrics(groups, figures, generated - started, ended - generated)
            self._record(groups, metrics)
            self._checkpoint_if_due()
            if self._interrupts.asked:
                raise KeyboardInterrupt

    def _generate(self, step: int) -> Groups:
        self.watcher.phase("generate")
        self.learner.model.eval()
        if self.engine is not None:
            self.engine.align()
        with self._interrupts.at_once():
            groups = self.source.groups(step, self.learner.publish)
        if (problem := self.source.unusable(groups)) is None:
            self._unusable.steps = 0
            taught = self.source.teaching if isinstance(self.source, SampledEpisodes) else None
            if taught is not None and (problem := self._equal.problem(groups, taught)) is not None:
                self._checkpoint()
                raise ValueError(f"{problem}. {self.run.mend}")
            return groups
        self._unusable.steps += 1
        if self._unusable.steps == 1:
            self._checkpoint()  # if it does not get better, the run can go on from here
        self.watcher.say(f"WARNING step {step + 1}: {problem}")
        if (reason := self._unusable.stops(groups, problem, last=step + 1 == self.total)) is not None:
            raise ValueError(f"{reason}. {self.run.mend}")
        if without_tools(groups) and not self.tools.replayed:
            self._interrupts.pause(self._unusable.pause)
        return groups

    def _seed(self, step: int) -> int:
        """Dropout and the order of mini-batches are keyed by the step, so that a resumed run does the same."""
        import torch

        seed = turn_seed(self.config.training.seed, step, "update", 0, 0)
        torch.manual_seed(seed)
        return seed

    def _metrics(
        self, groups: Groups, figures: dict[str, float], generating: float, updating: float
    ) -> dict[str, float]:
        seconds = generating + updating
        metrics = self.source.metrics(groups, generating) | self.tools.metrics() | figures
        metrics |= {
            "seconds/step": seconds,
            "seconds/generate": generating,
            "seconds/update": updating,
            "steps_per_second": 1 / seconds,
        }
        if figures["row_tokens"]:
            metrics["tokens_saved"] = 1 - figures["computed_tokens"] / figures["row_tokens"]
        return metrics

    def _record(self, groups: Groups, metrics: dict[str, float]) -> None:
        self.tools.commit()  # not before: a checkpoint holds the calls of steps that are done
        ids = self.source.ids(self.done)
        epoch = self.order.taken // self.order.size
        self.order.taken += len(ids)
        self.done += 1
        self.seconds += metrics["seconds/step"]
        every = self.config.training.eval_every
        if every is not None and (self.done % every == 0 or self.done == self.total):
            metrics |= self._evaluate()
        if self.config.logging.save_trajectories and isinstance(self.source, SampledEpisodes):
            self.run.append_trajectories(trajectory for group in groups for trajectory in group)
        metrics |= record_kept(self.run, self.algorithm, groups)
        self.run.append(CONSUMED, {"step": self.done, "epoch": epoch, "tasks": ids})
        self._log(epoch, metrics)

    def _log(self, epoch: int, metrics: dict[str, float]) -> None:
        self.run.append(METRICS, {"step": self.done, "epoch": epoch, "time": time.time()} | metrics)
        self._write_status("running")
        self.trackers.log(self.done, metrics)
        self._rows.append({"step": self.done} | metrics)
        self.watcher.step(self.done, self.total, metrics)

    # evaluation and checkpoints

    def _evaluate_before(self) -> None:
        if self.config.training.eval_every is not None and self.done == 0:
            self._log(0, self._evaluate())

    def _evaluate(self) -> dict[str, float]:
        self.watcher.phase("evaluate")
        started = time.perf_counter()
        metrics = self._evaluate_tasks() if self.data.heldout else {}
        if self.heldout_rows is not None:
            metrics |= self._evaluate_rows(self.heldout_rows)
        metrics["seconds"] = time.perf_counter() - started
        return {f"eval/{name}": value for name, value in metrics.items()}

    def _evaluate_tasks(self) -> dict[str, float]:
        assert self.engine is not None
        self.learner.model.eval()
        self.engine.align()
        groups = self.evaluation.rollout(
            self.data.heldout, self.learner.publish(), recorded_as=f"eval-{self.done}"
        )
        self.tools.commit()
        metrics = evaluation_metrics([trajectory for group in groups for trajectory in group])
        return metrics | self.tools.metrics() | self.clock.spent()

    def _evaluate_rows(self, rows: Recordings) -> dict[str, float]:
        from TrainingFactory.services.training.update import evaluate

        groups = [rows.group(number) for number in range(len(rows))]
        budget = self.config.training.token_budget
        metrics = evaluate(
            self.learner, self.algorithm, groups, self.done, token_budget=budget, references=self.references
        )
        return metrics | rows.left_out

    def _checkpoint_if_due(self) -> None:
        due = self.done % self.config.logging.checkpoint_every == 0 and not self._unusable.steps
        if due or self.done == self.total:
            self._checkpoint()

    def _checkpoint(self) -> None:
        if self._checkpointed == self.done or not self.done:
            return
        self.watcher.phase("checkpoint")
        keep = self.config.logging
        self.run.checkpoint(self.done, self.seconds, self.learner, self.loaded.tokenizer, self.order.taken)
        self._checkpointed = self.done
        self.run.prune(keep.keep_checkpoints, keep.keep_every)

    def _finish(self, state: State, reason: str | None = None) -> TrainingReport:
        with contextlib.suppress(OSError):  # a full disk may have brought us here
            self._write_status(state, reason)
        last = self._rows[-1] if self._rows else {}
        return TrainingReport(self.run.path, self.done, state, last, self._rows, self.tools.totals())

    def _write_status(self, state: State, reason: str | None = None) -> None:
        self.run.write_status(Status(state, self.done, self.total, reason, self.seconds))

    # set-up

    def _load(self) -> None:
        from TrainingFactory.learning.checkpoints import load_checkpoint
        from TrainingFactory.services.training.update import precompute

        config, training = self.config, self.config.training
        self.watcher.phase("load")
        self.loaded = assemble.load(config)
        assemble_learner.make_trainable(config, self.loaded)
        day = date.fromisoformat(self.run.about["day"])
        self.chat = assemble.make_chat(config, self.loaded, day)
        self.engine = None  # where nothing is sampled
        if self.data.environment is not None:
            episodes = training.batch_size * training.group_size
            self.engine = assemble.make_engine(config, self.loaded, episodes)
        self.algorithm = assemble_learner.make_algorithm(config)
        recordings = self._recordings()
        self.learner = assemble_learner.make_learner(
            config, self.loaded, self.algorithm, self.engine, self.total
        )
        self.source = self._make_source(recordings)
        self.references = None
        if assemble_learner.precomputes_reference(config):
            self.watcher.phase("reference")
            rows = [each for each in (recordings, self.heldout_rows) if each is not None]
            sizes = (training.batch_size, training.token_budget)
            self.references = precompute(self.learner, self.algorithm, rows, *sizes, self.watcher.say)
        offsets: dict[str, int] = {}
        if found := self.run.checkpoints():
            state = load_checkpoint(found[-1], self.learner)
            self.done, self.seconds, offsets = state["step"], state["seconds"], state["offsets"]
            self.order.taken = state.get("taken", self.order.start(self.done))
            self._checkpointed = self.done
        self.run.rewind(offsets)
        if config.logging.record_tools:
            self.tools.record_to(self.run.path)
        self.trackers = Trackers(self.run.path, config)
        if self.data.environment is not None and (tasks := self.data.tasks or self.data.heldout):
            reward = self.objects.reward or assemble_rewards.check_reward(config)
            asyncio.run(check_tools(self.data.environment, tasks[0], self.chat, reward))

    def _recordings(self) -> Recordings | None:
        """The rows in tokens. Those that are too long are known only now, and so is how many steps there are."""
        data, self.heldout_rows = self.data, None
        if data.examples is None:
            return None
        found = self._in_tokens(data.examples, "")
        if data.heldout_examples is not None:
            self.heldout_rows = self._in_tokens(data.heldout_examples, "held-out: ")
        data.examples = data.heldout_examples = None  # their texts are not needed any more
        self._set_order(len(found))
        return found

    def _in_tokens(self, examples: Examples, which: str) -> Recordings:
        config, say = self.config, self.watcher.say
        limit = assemble.max_length(config, self.loaded)
        found = Recordings(examples, self.chat, limit, config.data.skip_bad_rows, say)
        for text in told_left_out(found.bad, found.long, found.unused):
            say(f"note: {which}{text}")
        return found

    def _make_source(self, recordings: Recordings | None) -> Source:
        config, environment, tasks = self.config, self.data.environment, self.data.tasks
        reward = self.objects.reward or assemble_rewards.make_reward(config, self._held)
        clock = self.clock = RewardClock(reward, self.watcher.say)
        limits = {
            "max_reply_tokens": config.sampling.max_reply_tokens,
            "max_length": assemble.max_length(config, self.loaded),
            "timeout": config.environment.episode_timeout,
        }
        if environment is not None:
            say = self.watcher.say if config.training.eval_every is not None else lambda _: None
            measure = RewardClock(evaluation_reward(reward, say), say)
            self.evaluation = self._rollouts(environment, measure)
        if recordings is not None:
            return RecordedEpisodes(recordings, self.order)
        assert environment is not None
        if config.training.algorithm == "sft":
            limits["runtime"] = self.tools.runtime
            return ExpertEpisodes(tasks, self.order, environment, self.chat, limits)
        rollouts = self._rollouts(environment, clock)
        return SampledEpisodes(
            tasks, self.order, rollouts, config.training.group_size, clock,
            teaches=lambda group: bool(self.algorithm.samples(group)),
            refill=config.grpo.refill if config.training.algorithm == "grpo" else 0,
            max_unscored=config.reward.max_unscored,
        )  # fmt: skip

    def _rollouts(self, environment: EnvironmentFactory, reward: RewardFunction | None) -> AsyncRolloutEngine:
        watch, runtime = self.watcher.episode, self.tools.runtime
        return assemble.make_rollouts(self.config, environment, self.chat, watch, reward, runtime)


def resume(name: str, runs: str | Path = "runs", watcher: Watcher | None = None) -> Training:
    """The run of that name or folder, from its last checkpoint."""
    run = RunFolder.find(name, runs)
    if objects := run.about.get("objects"):
        raise ValueError(
            f"run {run.name} was started from Python with its own {' and '.join(objects)}; go on with it there: "
            f"the same trainer with name={run.name!r} and resume=True"
        )
    return Training(run.config, run=run, watcher=watcher)
