"""What came of a demo, read from the folders of its two runs: for programs, and as one HTML page for people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from TrainingFactory.apps.demo.lessons import LESSONS
from TrainingFactory.apps.reports.charts import with_mean
from TrainingFactory.apps.reports.pages import render
from TrainingFactory.common.texts import count
from TrainingFactory.data.trajectories import load_trajectories
from TrainingFactory.rollout.metrics import evaluation_metrics
from TrainingFactory.runs.episode_texts import conversation
from TrainingFactory.runs.folder import RunFolder
from TrainingFactory.types import Trajectory

HELDOUT = "heldout.jsonl"  # episodes of a run's model on held-out tasks
LEARNED = {
    "search": "to chain two lookups: first search who bought the thing, then search where the buyer lives, and only "
    "then answer",
    "calculator": "to hand the expression to the calculator as it is, and to answer with what comes back",
}


@dataclass(slots=True, frozen=True)
class Stats:
    """Sums up some episodes; `calls` counts those with so many tool calls."""

    episodes: int
    success: float
    low: float  # 95 % interval of the success
    high: float
    tool_success: float | None  # None where no tool was called
    turns: float
    calls: dict[int, int]

    @classmethod
    def of(cls, episodes: Sequence[Trajectory]) -> Stats:
        found = evaluation_metrics(episodes)
        calls = Counter(sum(len(turn.message.tool_calls) for turn in episode.turns) for episode in episodes)
        low, high = found.get("success_low", 0.0), found.get("success_high", 0.0)
        shares = found.get("success", 0.0), low, high, found.get("tool_success")
        return cls(len(episodes), *shares, found["turns"], dict(sorted(calls.items())))

    def share(self, calls: int) -> float:
        """Return the share of episodes with so many tool calls."""
        return self.calls.get(calls, 0) / self.episodes


class Trial(NamedTuple):
    """One held-out task before and after GRPO."""

    before: Trajectory
    after: Trajectory


@dataclass(slots=True, frozen=True)
class Report:
    """`folders`, `configs` and `seconds` are those of the warm start and of GRPO."""

    folders: tuple[str, str]
    configs: tuple[dict[str, Any], dict[str, Any]]
    seconds: tuple[float, float]
    versions: dict[str, str]
    before: Stats
    after: Stats
    curve: list[float]  # share of right answers by step
    trial: Trial

    @classmethod
    def read(cls, warm: RunFolder, trained: RunFolder) -> Report:
        runs = warm, trained
        before, after = (list(load_trajectories(run.path / HELDOUT)) for run in runs)
        return cls(
            folders=(str(warm.path), str(trained.path)),
            configs=(warm.config.model_dump(), trained.config.model_dump()),
            seconds=(warm.status.seconds, trained.status.seconds),
            versions=trained.about["versions"],
            before=Stats.of(before),
            after=Stats.of(after),
            curve=[row["accuracy"] for row in trained.metrics() if "accuracy" in row],
            trial=_telling(before, after),
        )

    @property
    def environment(self) -> str:
        return self.configs[1]["environment"]["environment_id"]

    def as_json(self) -> dict[str, Any]:
        row = {key: value for key, value in asdict(self).items() if key != "trial"}
        sides = {title: conversation(episode) for title, episode in self.trial._asdict().items()}
        return row | {"environment": self.environment, "example": {"task": self.trial.after.task.id} | sides}

    @property
    def learned(self) -> str:
        """Tell in a sentence what was learned; the two intervals must lie apart before anything is claimed."""
        if self.after.low > self.before.high:
            return f"It learned {LEARNED[self.environment]}."
        return "It did not get clearly better this time."

    @property
    def table(self) -> list[tuple[str, str, str]]:
        """Name, before, after."""
        usual = max(self.after.calls, key=lambda number: self.after.calls[number])
        columns = [
            (
                f"{side.success:.1%} ({side.low:.0%} to {side.high:.0%})",
                "no calls" if side.tool_success is None else f"{side.tool_success:.1%}",
                f"{side.turns:.2f}",
                f"{side.share(usual):.1%}",
            )
            for side in (self.before, self.after)
        ]
        names = ("success", "tool calls that worked", "turns an episode", f"episodes with {usual} calls")
        return list(zip(names, *columns, strict=True))

    @property
    def next_commands(self) -> list[tuple[str, str]]:
        """(command, what it does)"""
        warm, trained = self.folders
        other = next(name for name in LESSONS if name != self.environment)
        watch = f"tfactory rollout {self.environment} --split heldout --model"
        return [
            (f"{watch} {trained}/model", "watch the trained agent"),
            (f"{watch} {warm}/model", "and the one before GRPO"),
            (f"tfactory runs compare {warm} {trained}", "the two runs side by side"),
            (f"tfactory demo --env {other} --out runs/demo-{other}", "another agent"),
            ("tfactory new env NAME", "start an environment of your own"),
        ]

    def page(self) -> str:
        """Return the report as an HTML page that needs nothing beside it."""
        sides = zip(("Before", "After"), self.trial, strict=True)
        return render(
            "demo.html.jinja",
            report=self,
            config=self.configs[1],
            mistakes=LESSONS[self.environment].mistakes,
            steps=count(len(self.curve), "step"),
            stages=LESSONS[self.environment].stages(self.configs[0]["training"]["batch_size"]),
            chart=with_mean("reward", list(enumerate(self.curve, 1)), 0.0, 1.0),
            sides=[(title, conversation(episode), ending(episode)) for title, episode in sides],
            calls=sorted({*self.before.calls, *self.after.calls}),
        )


def ending(episode: Trajectory) -> str:
    if episode.status != "done":
        return f"wrong: it ended as {episode.status}, asked for was {episode.task.answer}"
    return "right" if _won(episode) else f"wrong: the answer is {episode.task.answer}"


def _telling(before: Sequence[Trajectory], after: Sequence[Trajectory]) -> Trial:
    """Choose a task that failed and then worked; if there is one, such that the failure was an orderly episode."""
    pairs = [Trial(*pair) for pair in zip(before, after, strict=True)]
    learned = [trial for trial in pairs if not _won(trial.before) and _won(trial.after)]
    orderly = [trial for trial in learned if trial.before.status == "done" and len(trial.before.turns) > 1]
    return (orderly or learned or pairs)[0]


def _won(episode: Trajectory) -> bool:
    return episode.reward is not None and episode.reward.outcome > 0
