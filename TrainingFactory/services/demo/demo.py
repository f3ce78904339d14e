"""`tfactory demo`: a tool-using agent learns end to end in minutes on a laptop.

The built-in model is made from a seed, warm-started on demonstrations of mixed quality, and trained with GRPO on
the reward alone. Before and after, it is tried on the same held-out tasks. Everything is in one folder:

    report.json  report.html      what came of it, for programs and for people
    warm_start/  model/           the model before and after GRPO
    before.jsonl  train.jsonl  after.jsonl      the episodes
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from TrainingFactory import catalog
from TrainingFactory.algorithms.grpo import GRPO
from TrainingFactory.data.packing import make_batch
from TrainingFactory.data.trajectories import save_trajectories
from TrainingFactory.learning.checkpoints import save_checkpoint
from TrainingFactory.learning.learner import Learner
from TrainingFactory.learning.optim import OptimizerOptions
from TrainingFactory.models import chat_format, load_model
from TrainingFactory.models.names import BUILTIN
from TrainingFactory.rollout import AsyncRolloutEngine
from TrainingFactory.sampling import NativeEngine
from TrainingFactory.services.demo.folder import REPORT, check, write_aside
from TrainingFactory.services.demo.report import Figures, Report, Trial, report_page
from TrainingFactory.services.demo.warm_start import DRILLS, Lessons, WarmStartPlan, demonstrate, teach
from TrainingFactory.services.evaluation.evaluation import evaluation_metrics
from TrainingFactory.services.runs.folder import fingerprint
from TrainingFactory.types import SamplingParams, Task, Trajectory

GATE = 0.3  # success under which GRPO has too little to choose from
MAX_WARM_STARTS = 3
HELDOUT_SEED = 1_000_000  # far from the seeds of training


@dataclass(slots=True, frozen=True)
class DemoPlan:
    """How much of everything; the defaults fit two cores and a few minutes."""

    warm_start: WarmStartPlan = field(default_factory=WarmStartPlan)
    steps: int = 60
    tasks_per_step: int = 8
    group_size: int = 8
    learning_rate: float = 5e-4
    # Adam's first steps are as long for noise as for signal; without a warm-up one of them can ruin everything.
    warmup_steps: int = 8
    # Hotter than the trials: slips that are rare at 1 come up often enough to be unlearned.
    temperature: float = 1.2
    heldout: int = 200
    max_tokens: int = 40  # a turn: a call is about 22
    max_turns: int = 4  # one more than it takes
    max_length: int = 512


PLANS = {
    "search": DemoPlan(),
    "calculator": DemoPlan(
        WarmStartPlan(mistakes=0.45, drill_steps=150, steps=450), max_tokens=32, max_turns=3
    ),
}

# phase, steps done, steps in all, a figure in words
OnProgress = Callable[[str, int, int, str], None]


class Demo:
    """Made before anything slow happens, so that wrong names and folders show at once."""

    def __init__(
        self,
        environment: str = "search",
        seed: int = 0,
        out: str | Path = "runs/demo",
        plan: DemoPlan | None = None,
        on_progress: OnProgress = lambda *_: None,
    ) -> None:
        check(environment, seed, out)
        self.name, self.seed, self.on_progress = environment, seed, on_progress
        self.plan = plan or PLANS[environment]
        self.environment = catalog.find("environment", environment)
        self.out = Path(out).expanduser()
        warm, plan = self.plan.warm_start, self.plan
        wanted = warm.demonstrations + plan.steps * plan.tasks_per_step
        train = list(self.environment.tasks("train", seed, wanted))
        self.shown, self.asked = train[: warm.demonstrations], train[warm.demonstrations :]
        self.heldout: list[Task] = list(self.environment.tasks("heldout", seed, plan.heldout))

    def run(self) -> Report:
        # Matrices this small are not worth a second thread, and on a busy machine waiting for it costs far more
        # than it gives. With one, the result does not depend on the number of cores either.
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return self._run()
        finally:
            torch.set_num_threads(threads)

    def _run(self) -> Report:
        started, used = time.perf_counter(), time.process_time()
        seconds: dict[str, float] = {}
        self.learner: Learner | None = None
        self.loaded = load_model(BUILTIN, seed=self.seed)
        self.chat = chat_format(self.loaded.tokenizer, stop_ids=self.loaded.stop_ids)
        # deterministic: the same seed gives the same report, on one machine with one number of threads
        self.engine = NativeEngine(
            self.loaded.model,
            slots=self.plan.tasks_per_step * self.plan.group_size,
            max_length=self.plan.max_length,
            deterministic=True,
        )
        with _clock(seconds, "warm start"):
            before = self._warm_start()
        with _clock(seconds, "GRPO"):
            curve = self._train()
        after = self._evaluate("after", "after.jsonl")
        report = Report(
            environment=self.name,
            seed=self.seed,
            before=_figures(before),
            after=_figures(after),
            curve=curve,
            trial=_telling(before, after),
            seconds=time.perf_counter() - started,
            cpu_seconds=time.process_time() - used,
            phases=seconds,
            plan=dataclasses.asdict(self.plan),
            about=fingerprint(),
        )
        self._save(report)
        return report

    def _warm_start(self) -> list[Trajectory]:
        """The held-out episodes after it. Where too little works by then, it goes on."""
        plan, rng = self.plan.warm_start, random.Random(f"demo {self.seed}")
        self.on_progress("demonstrations", 0, 1, "")
        episodes = demonstrate(self.environment, self.chat, self.shown, plan.mistakes, rng)
        self.on_progress("demonstrations", 1, 1, f"{len(episodes)} episodes")
        lessons = Lessons(self.loaded.tokenizer, episodes, DRILLS[self.name], rng)
        before: list[Trajectory] = []
        for _ in range(MAX_WARM_STARTS):
            self.learner = self._new_learner(plan.optimizer)
            teach(self.learner, lessons, plan, self._on_lesson)
            before = self._evaluate("before", "before.jsonl")
            if evaluation_metrics(before)["success"] >= GATE:
                break
            plan = dataclasses.replace(plan, drill_steps=0, steps=plan.steps // 2)
        assert self.learner is not None
        save_checkpoint(self.out / "warm_start", self.learner, self.loaded.tokenizer, {"seed": self.seed})
        return before

    def _on_lesson(self, done: int, total: int, loss: float) -> None:
        self.on_progress("warm start", done, total, f"loss {loss:.3f}")

    def _train(self) -> list[dict[str, float]]:
        plan, curve = self.plan, []
        # Not divided by the deviation: one failure in a group that otherwise succeeds would weigh too much.
        grpo = GRPO(scale_rewards=False)
        options = OptimizerOptions(
            "adamw",
            learning_rate=plan.learning_rate,
            schedule="linear",
            warmup_steps=min(plan.warmup_steps, plan.steps),
            total_steps=plan.steps,
        )
        self.learner = self._new_learner(options, plan.temperature)
        rollouts = self._rollouts(self.seed, plan.temperature)
        episodes = self.out / "train.jsonl"
        save_trajectories(episodes, [])
        for step in range(plan.steps):
            tasks = self.asked[step * plan.tasks_per_step : (step + 1) * plan.tasks_per_step]
            groups = self._roll(rollouts, tasks, plan.group_size, step)
            samples = [sample for group in groups for sample in grpo.samples(group)]
            self.learner.update(make_batch(samples), grpo.loss)
            flat = [trajectory for group in groups for trajectory in group]
            save_trajectories(episodes, flat, append=True)
            curve.append({"step": step + 1} | asdict(_figures(flat)))
            self.on_progress("GRPO", step + 1, plan.steps, f"success {curve[-1]['success']:.2f}")
        save_checkpoint(self.out / "model", self.learner, self.loaded.tokenizer, {"seed": self.seed})
        return curve

    def _new_learner(self, options: OptimizerOptions, temperature: float = 1.0) -> Learner:
        learner = Learner(self.loaded.model, options, sampler=self.engine, temperature=temperature)
        if self.learner is not None:
            learner.version = self.learner.version
        return learner

    def _rollouts(self, seed: int, temperature: float = 1.0) -> AsyncRolloutEngine:
        plan = self.plan
        params = SamplingParams(temperature=temperature, max_tokens=plan.max_tokens)
        return AsyncRolloutEngine(
            self.environment, self.chat, params, max_turns=plan.max_turns, seed=seed,
            max_concurrency=plan.tasks_per_step * plan.group_size,
        )  # fmt: skip

    def _roll(
        self, rollouts: AsyncRolloutEngine, tasks: Sequence[Task], group_size: int = 1, step: int = 0
    ) -> list[list[Trajectory]]:
        assert self.learner is not None
        self.loaded.model.eval()
        self.engine.align()
        return rollouts.rollout(tasks, self.learner.publish(), group_size, step)

    def _evaluate(self, when: str, file: str) -> list[Trajectory]:
        """The held-out tasks, once each, with random numbers that training does not use."""
        self.on_progress(f"trial {when}", 0, len(self.heldout), "")
        groups = self._roll(self._rollouts(HELDOUT_SEED + self.seed), self.heldout)
        episodes = [trajectory for group in groups for trajectory in group]
        save_trajectories(self.out / file, episodes)
        success = evaluation_metrics(episodes)["success"]
        self.on_progress(f"trial {when}", len(episodes), len(self.heldout), f"success {success:.3f}")
        return episodes

    def _save(self, report: Report) -> None:
        write_aside(self.out / "report.html", report_page(report, str(self.out)))
        rows = json.dumps(report.as_json() | {"demo": 1, "finished": True}, indent=1, ensure_ascii=False)
        write_aside(self.out / REPORT, rows)


def _figures(episodes: Sequence[Trajectory]) -> Figures:
    metrics = evaluation_metrics(episodes)
    calls = Counter(sum(len(turn.message.tool_calls) for turn in episode.turns) for episode in episodes)
    return Figures(
        episodes=len(episodes),
        success=metrics.get("success", 0.0),
        low=metrics.get("success_low", 0.0),
        high=metrics.get("success_high", 0.0),
        tool_success=metrics.get("tool_success"),
        turns=metrics["turns"],
        calls=dict(sorted(calls.items())),
    )


def _telling(before: Sequence[Trajectory], after: Sequence[Trajectory]) -> Trial:
    """A task that failed and then worked; if there is one, such that the failure was an orderly episode."""
    pairs = [Trial(*pair) for pair in zip(before, after, strict=True)]
    learned = [trial for trial in pairs if not _won(trial.before) and _won(trial.after)]
    orderly = [trial for trial in learned if trial.before.status == "done" and len(trial.before.turns) > 1]
    return (orderly or learned or pairs)[0]


def _won(episode: Trajectory) -> bool:
    return episode.reward is not None and episode.reward.outcome > 0


@contextlib.contextmanager
def _clock(seconds: dict[str, float], phase: str) -> Iterator[None]:
    started = time.perf_counter()
    yield
    seconds[phase] = round(time.perf_counter() - started, 2)
