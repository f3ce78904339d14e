"""A training run from its config to its last checkpoint. One step is a straight line; what differs between
algorithms is in the algorithm and in where the episodes come from."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

from TrainingFactory.config import TrainingConfig
from TrainingFactory.data.conversations import Conversation, load_conversations
from TrainingFactory.protocols import EnvironmentFactory, RewardFunction
from TrainingFactory.rollout import AsyncRolloutEngine
from TrainingFactory.rollout.seeds import turn_seed
from TrainingFactory.services import assemble, assemble_learner
from TrainingFactory.services.checking import check
from TrainingFactory.services.evaluation import evaluation_metrics
from TrainingFactory.services.interrupts import Interrupts
from TrainingFactory.services.rollouts import check_tools
from TrainingFactory.services.run_tools import RunTools
from TrainingFactory.services.runs import CONSUMED, METRICS, RunFolder, State, Status, new_name
from TrainingFactory.services.sources import (
    ExpertEpisodes,
    Groups,
    Order,
    RecordedEpisodes,
    RewardClock,
    SampledEpisodes,
    Source,
)
from TrainingFactory.services.tracking import PlainLines, Trackers, Watcher
from TrainingFactory.tools.tool_cache import ToolCache
from TrainingFactory.types import Task

MAX_UNUSABLE = 3  # steps in a row
MAX_WITHOUT_TOOLS = 8  # where a server is down, which may come back: after pauses of 1, 2, 4 ... seconds
LONGEST_PAUSE = 30.0


@dataclass(slots=True)
class Objects:
    """What a user hands in as Python objects instead of naming it in the config."""

    environment: EnvironmentFactory | None = None
    reward: RewardFunction | None = None
    tasks: Sequence[Task] | None = None
    conversations: Sequence[Conversation] | None = None
    tools: Sequence[Any] = ()  # tools, sources of them, or what can be made a tool
    cache: ToolCache | None = None

    @property
    def given(self) -> list[str]:
        names = ("environment", "reward", "tasks", "conversations", "tools")
        return [name for name in names if getattr(self, name)]


@dataclass(slots=True)
class TrainingReport:
    """`metrics` are those of the last step; `rows` has those of all; `tools` has those of all tool calls together,
    since the start or the last resume."""

    run: Path
    steps: int
    state: State
    metrics: dict[str, float] = field(default_factory=dict)
    rows: list[dict[str, float]] = field(default_factory=list)
    tools: dict[str, float] = field(default_factory=dict)

    @property
    def checkpoint(self) -> Path | None:
        found = RunFolder(self.run).checkpoints()
        return found[-1] if found else None


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
        self.config, self.objects = config, objects or Objects()
        self.watcher: Watcher = watcher or PlainLines()
        check(config, config.data.dataset is not None or self.objects.conversations is not None)
        self.resuming = run is not None
        if run is not None:
            replay = replay or run.about.get("replay")
        self.tools = RunTools(config, self.objects.tools, replay, self.objects.cache)
        try:
            self._gather()
            training = config.training
            size = len(self.tasks) or len(self.conversations)
            self.order = Order(size, training.batch_size, training.seed)
            self.total = training.max_steps or training.num_epochs * self.order.steps_per_epoch
            about = {"objects": self.objects.given, "replay": self.tools.replayed}
            self.run = run or RunFolder.create(config, name or new_name(config), about)
            self.run.lock()
        except BaseException:
            self.tools.close()
            raise
        self.done = 0  # steps
        self.seconds = 0.0  # spent so far, in earlier processes too
        self._checkpointed = -1
        self._unusable = 0
        self._interrupts = Interrupts(self.watcher)
        self._rows: list[dict[str, float]] = []

    def _gather(self) -> None:
        """The environment and the data."""
        data, objects = self.config.data, self.objects
        self.tasks: list[Task] = []
        self.heldout: list[Task] = []
        self.conversations = list(objects.conversations or [])
        if data.dataset is not None and not self.conversations:
            self.conversations = load_conversations(Path(data.dataset).expanduser())[: data.count]
        self.environment = objects.environment
        named = self.config.environment.environment_id is not None or self.tools.wanted
        if self.environment is None and (named or not self.conversations):
            self.environment = assemble.make_environment(self.config, self.tools.wanted)
        if self.environment is not None:
            self.environment = self.tools.equip(self.environment)
        if self.environment is not None and not self.conversations:
            self.tasks = list(objects.tasks or []) or assemble.make_tasks(
                self.config, self.environment, assemble.TRAINING_TASKS
            )
            if self.config.training.algorithm == "sft" and not hasattr(self.environment, "expert"):
                name = assemble.environment_name(self.environment)
                raise ValueError(
                    f"sft learns from demonstrations, and {name} has no method `expert` that makes them; write one, "
                    "or give a file: data.dataset=FILE.jsonl"
                )
        if self.config.training.eval_every is not None:
            if self.environment is None:
                raise ValueError("training.eval_every needs an environment to evaluate in: environment=NAME")
            self.heldout = assemble.make_heldout_tasks(self.config, self.environment)

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
            self.tools.close()
            raise
        try:
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
            self.tools.close()
            self.run.unlock()
            self.seconds += time.perf_counter() - started

    def _steps(self) -> None:
        from TrainingFactory.services.updating import learn

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
        self.engine.align()
        with self._interrupts.at_once():
            groups = self.source.groups(step, self.learner.publish)
        if (problem := self.source.unusable(groups)) is None:
            self._unusable = 0
            return groups
        self._unusable += 1
        if self._unusable == 1:
            self._checkpoint()  # if it does not get better, the run can go on from here
        self.watcher.say(f"WARNING step {step + 1}: {problem}")
        down = any(trajectory.status == "tool_failure" for group in groups for trajectory in group)
        if self._unusable >= (MAX_WITHOUT_TOOLS if down else MAX_UNUSABLE):
            raise ValueError(
                f"stopped after {self._unusable} steps from which nothing can be learned: {problem}. "
                f"Mend it, then go on with: {self.run.resume_command}"
            )
        if down and not self.tools.replayed:
            self._interrupts.pause(min(2.0 ** (self._unusable - 1), LONGEST_PAUSE))
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
        epoch = self.done // self.order.steps_per_epoch
        self.done += 1
        self.seconds += metrics["seconds/step"]
        every = self.config.training.eval_every
        if every is not None and (self.done % every == 0 or self.done == self.total):
            metrics |= self._evaluate()
        if self.config.logging.save_trajectories and isinstance(self.source, SampledEpisodes):
            self.run.append_trajectories(trajectory for group in groups for trajectory in group)
        self.run.append(CONSUMED, {"step": self.done, "epoch": epoch, "tasks": ids})
        self._log(epoch, metrics)

    def _log(self, epoch: int, metrics: dict[str, float]) -> None:
        self.run.append(METRICS, {"step": self.done, "epoch": epoch, "time": time.time()} | metrics)
        self.run.write_status(Status("running", self.done, self.total, None, self.seconds))
        self.trackers.log(self.done, metrics)
        self._rows.append({"step": self.done} | metrics)
        self.watcher.step(self.done, self.total, metrics)

    # evaluation and checkpoints

    def _evaluate_before(self) -> None:
        if self.config.training.eval_every is not None and self.done == 0:
            self._log(0, self._evaluate())

    def _evaluate(self) -> dict[str, float]:
        self.watcher.phase("evaluate")
        self.learner.model.eval()
        self.engine.align()
        started = time.perf_counter()
        groups = self.evaluation.rollout(
            self.heldout, self.learner.publish(), recorded_as=f"eval-{self.done}"
        )
        self.tools.commit()
        metrics = evaluation_metrics([trajectory for group in groups for trajectory in group])
        metrics |= self.tools.metrics()
        metrics["seconds"] = time.perf_counter() - started
        return {f"eval/{name}": value for name, value in metrics.items()}

    def _checkpoint_if_due(self) -> None:
        due = self.done % self.config.logging.checkpoint_every == 0 and not self._unusable
        if due or self.done == self.total:
            self._checkpoint()

    def _checkpoint(self) -> None:
        if self._checkpointed == self.done or not self.done:
            return
        self.watcher.phase("checkpoint")
        keep = self.config.logging
        self.run.checkpoint(self.done, self.seconds, self.learner, self.loaded.tokenizer)
        self._checkpointed = self.done
        self.run.prune(keep.keep_checkpoints, keep.keep_every)

    def _finish(self, state: State, reason: str | None = None) -> TrainingReport:
        with contextlib.suppress(OSError):  # a full disk may have brought us here
            self.run.write_status(Status(state, self.done, self.total, reason, self.seconds))
        last = self._rows[-1] if self._rows else {}
        return TrainingReport(self.run.path, self.done, state, last, self._rows, self.tools.totals())

    # set-up

    def _load(self) -> None:
        from TrainingFactory.learning.checkpoints import load_checkpoint

        config, training = self.config, self.config.training
        self.watcher.phase("load")
        self.loaded = assemble.load(config)
        assemble_learner.make_trainable(config, self.loaded)
        day = date.fromisoformat(self.run.about["day"])
        self.chat = assemble.make_chat(config, self.loaded, day)
        self.engine = assemble.make_engine(config, self.loaded, training.batch_size * training.group_size)
        self.algorithm = assemble_learner.make_algorithm(config)
        self.learner = assemble_learner.make_learner(
            config, self.loaded, self.algorithm, self.engine, self.total
        )
        self.source = self._make_source()
        offsets: dict[str, int] = {}
        if found := self.run.checkpoints():
            state = load_checkpoint(found[-1], self.learner)
            self.done, self.seconds, offsets = state["step"], state["seconds"], state["offsets"]
            self._checkpointed = self.done
        self.run.rewind(offsets)
        if config.logging.record_tools:
            self.tools.record_to(self.run.path)
        self.trackers = Trackers(self.run.path, config)
        if self.environment is not None:
            asyncio.run(check_tools(self.environment, (self.tasks or self.heldout)[0], self.chat))

    def _make_source(self) -> Source:
        config = self.config
        clock = RewardClock(self.objects.reward)
        limits = {
            "max_reply_tokens": config.sampling.max_reply_tokens,
            "max_length": assemble.max_length(config, self.loaded),
            "timeout": config.environment.episode_timeout,
        }
        if self.environment is not None:
            self.evaluation = self._rollouts(self.environment, self.objects.reward)
        if self.conversations:
            return RecordedEpisodes(self.conversations, self.order, self.chat, limits)
        assert self.environment is not None
        if config.training.algorithm == "sft":
            limits["runtime"] = self.tools.runtime
            return ExpertEpisodes(self.tasks, self.order, self.environment, self.chat, limits)
        rollouts = self._rollouts(self.environment, clock.score)
        return SampledEpisodes(self.tasks, self.order, rollouts, config.training.group_size, clock)

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
