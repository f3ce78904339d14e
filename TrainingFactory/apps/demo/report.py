"""The demo's report, read from the folders of its two runs: as JSON and as one HTML page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from markupsafe import escape

from TrainingFactory.apps.demo.lessons import LESSONS
from TrainingFactory.apps.reports.pages import render
from TrainingFactory.common.charts import Chart, make_mean_chart
from TrainingFactory.common.texts import pluralize
from TrainingFactory.data.trajectories import load_trajectories
from TrainingFactory.rollout.metrics import compute_evaluation_metrics
from TrainingFactory.runs.episode_texts import list_conversation_lines, list_lines_with_images
from TrainingFactory.runs.folder import RunFolder
from TrainingFactory.runs.notebook_view import render_table
from TrainingFactory.types import Trajectory

HELDOUT_FILE = "heldout.jsonl"  # in a run's folder: episodes of its model on held-out tasks
BLIND_FILE = "blind.jsonl"  # the same with empty pictures
LEARNED_SKILLS = {
    "search": "to chain two lookups: first search who bought the thing, then search where the buyer lives, and only "
    "then answer",
    "calculator": "to pass the expression to the calculator unchanged, and to answer with its result",
    "screen": "to look for the button of the named color and to tap it",
}


@dataclass(slots=True, frozen=True)
class DemoStats:
    """Summary of episodes; `calls` maps a number of tool calls to the number of such episodes."""

    episodes: int
    success: float
    low: float  # 95 % interval of the success
    high: float
    tool_success: float | None  # None: no tool was called
    turns: float
    calls: dict[int, int]

    @classmethod
    def summarize(cls, episodes: Sequence[Trajectory]) -> DemoStats:
        metrics = compute_evaluation_metrics(episodes)
        counts = Counter(sum(len(turn.message.tool_calls) for turn in episode.turns) for episode in episodes)
        low, high = metrics.get("success_low", 0.0), metrics.get("success_high", 0.0)
        shares = metrics.get("success", 0.0), low, high, metrics.get("tool_success")
        return cls(len(episodes), *shares, metrics["turns"], dict(sorted(counts.items())))

    def compute_share(self, num_calls: int) -> float:
        """Return the share of episodes with this number of tool calls."""
        return self.calls.get(num_calls, 0) / self.episodes


class Trial(NamedTuple):
    """One held-out task before and after GRPO."""

    before: Trajectory
    after: Trajectory


@dataclass(slots=True, frozen=True)
class DemoReport:
    """Results of both runs; `folders`, `configs` and `seconds` are (warm start, GRPO)."""

    folders: tuple[str, str]
    configs: tuple[dict[str, Any], dict[str, Any]] = field(repr=False)
    seconds: tuple[float, float]
    versions: dict[str, str] = field(repr=False)
    before: DemoStats
    after: DemoStats
    curve: list[float] = field(repr=False)  # share of right answers by step
    trial: Trial = field(repr=False)
    blind: DemoStats | None = None  # after GRPO, with empty pictures; None: the environment shows no images

    @classmethod
    def read(cls, warm_run: RunFolder, trained_run: RunFolder) -> DemoReport:
        runs = warm_run, trained_run
        before_episodes, after_episodes = (list(load_trajectories(run.path / HELDOUT_FILE)) for run in runs)
        blind_file = trained_run.path / BLIND_FILE
        return cls(
            folders=(str(warm_run.path), str(trained_run.path)),
            configs=(warm_run.config.model_dump(), trained_run.config.model_dump()),
            seconds=(warm_run.status.seconds, trained_run.status.seconds),
            versions=trained_run.run_info["versions"],
            before=DemoStats.summarize(before_episodes),
            after=DemoStats.summarize(after_episodes),
            blind=DemoStats.summarize(list(load_trajectories(blind_file))) if blind_file.exists() else None,
            curve=[row["accuracy"] for row in trained_run.metrics() if "accuracy" in row],
            trial=_choose_trial(before_episodes, after_episodes),
        )

    @property
    def environment(self) -> str:
        return self.configs[1]["environment"]["environment_id"]

    def as_json(self) -> dict[str, Any]:
        report = {key: value for key, value in asdict(self).items() if key != "trial"}
        if self.blind is None:
            del report["blind"]
        conversations = {
            title: list_conversation_lines(episode) for title, episode in self.trial._asdict().items()
        }
        return report | {
            "environment": self.environment,
            "example": {"task": self.trial.after.task.id} | conversations,
        }

    @property
    def learned_text(self) -> str:
        """Return a sentence on what was learned, which claims nothing unless the 95 % intervals are disjoint."""
        if self.after.low > self.before.high:
            return f"It learned {LEARNED_SKILLS[self.environment]}."
        return "It did not improve significantly this time."

    @property
    def blind_text(self) -> str:
        """Return a sentence with the trained model's success on empty pictures; empty without images."""
        if self.blind is None:
            return ""
        return f"With empty pictures, the trained model succeeds in {self.blind.success:.1%} of the held-out tasks."

    @property
    def table(self) -> list[tuple[str, str, str]]:
        """Return (name, before, after) rows."""
        num_calls = max(self.after.calls, key=lambda count: self.after.calls[count])
        columns = [
            (
                f"{stats.success:.1%} ({stats.low:.0%} to {stats.high:.0%})",
                "no calls" if stats.tool_success is None else f"{stats.tool_success:.1%}",
                f"{stats.turns:.2f}",
                f"{stats.compute_share(num_calls):.1%}",
            )
            for stats in (self.before, self.after)
        ]
        labels = ("success", "successful tool calls", "turns per episode", f"episodes with {num_calls} calls")
        return list(zip(labels, *columns, strict=True))

    @property
    def next_commands(self) -> list[tuple[str, str]]:
        """Return (command, purpose) pairs."""
        warm_run, trained_run = self.folders
        other_env = next(name for name in LESSONS if name != self.environment)
        rollout_command = f"tfactory rollout {self.environment} --split heldout --model"
        return [
            (f"{rollout_command} {trained_run}/model", "watch the trained agent"),
            (f"{rollout_command} {warm_run}/model", "watch the agent before GRPO"),
            (f"tfactory runs compare {warm_run} {trained_run}", "compare the two runs side by side"),
            (f"tfactory demo --env {other_env} --out runs/demo-{other_env}", "train another agent"),
            ("tfactory new env NAME", "create your own environment"),
        ]

    def _repr_html_(self) -> str:
        """Return the report for a notebook: before against after, and the curve of GRPO."""
        table = render_table(self.table, ("held-out tasks", "before GRPO", "after GRPO"))
        return f"<div>{table}<p>{escape(self.learned_text)}</p>{self._make_chart().draw()}</div>"

    def _make_chart(self) -> Chart:
        return make_mean_chart("share of correct answers", list(enumerate(self.curve, 1)), 0.0, 1.0)

    def render_page(self) -> str:
        """Return the report as a self-contained HTML page."""
        episodes = zip(("Before", "After"), self.trial, strict=True)
        return render(
            "demo.html.jinja",
            report=self,
            config=self.configs[1],
            mistakes=LESSONS[self.environment].novice_share,
            steps=pluralize(len(self.curve), "step"),
            stages=LESSONS[self.environment].describe_stages(self.configs[0]["training"]["batch_size"]),
            chart=self._make_chart(),
            sides=[
                (title, list_lines_with_images(episode), describe_ending(episode))
                for title, episode in episodes
            ],
            calls=sorted({*self.before.calls, *self.after.calls}),
        )


def describe_ending(episode: Trajectory) -> str:
    if episode.status != "done":
        return f"wrong: the episode ended as {episode.status}; the expected answer is {episode.task.answer}"
    return "right" if _is_solved(episode) else f"wrong: the expected answer is {episode.task.answer}"


def _choose_trial(before_episodes: Sequence[Trajectory], after_episodes: Sequence[Trajectory]) -> Trial:
    """Return a task that failed before and succeeded after; prefer a failure that ended regularly after several
    turns."""
    trials = [Trial(*pair) for pair in zip(before_episodes, after_episodes, strict=True)]
    improved_trials = [trial for trial in trials if not _is_solved(trial.before) and _is_solved(trial.after)]
    finished_trials = [
        trial for trial in improved_trials if trial.before.status == "done" and len(trial.before.turns) > 1
    ]
    return (finished_trials or improved_trials or trials)[0]


def _is_solved(episode: Trajectory) -> bool:
    return episode.reward is not None and episode.reward.outcome > 0
