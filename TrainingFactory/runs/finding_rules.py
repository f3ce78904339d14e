"""Rules that detect training problems from the metrics of a run's last steps.

A rule fires only if all of the last `steps` steps show the problem. Thresholds are relative to the run's own first
steps or to the steps just before, so that the rules work for any reward scale and any model."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import NamedTuple

from TrainingFactory.runs.findings import Finding, FindingChange
from TrainingFactory.types import Trajectory

STEPS = 3  # consecutive steps before a finding is reported, and before it is reported as gone
START_STEPS = 5  # first steps of the run, used as a baseline
BEFORE_STEPS = 20  # steps before the last ones, used as a baseline
MIN_CALLED = 0.01  # share of a step's episodes that call a tool; at or below it, `no_tool_called` fires
# Common formats of a tool call: tags, special tokens, JSON, and the keywords of ReAct.
CALL = re.compile(
    r"<\|?/?(tool_call|function|invoke|python_tag|tool▁call)|\[TOOL_CALLS\]|\"(name|function|tool|action)\"\s*:"
    r"|^\s*Action(?: Input)?\s*:",
    re.MULTILINE,
)
StepMetrics = dict[str, float]


@dataclass(slots=True, frozen=True)
class StepWindow:
    """Input of a rule: the last steps, the first steps of the run, and the steps before the last ones."""

    last: Sequence[StepMetrics]
    start: Sequence[StepMetrics]
    before: Sequence[StepMetrics]
    episodes: Sequence[Trajectory]  # of the last step
    max_logprob_diff: float

    def values(self, name: str) -> list[float]:
        """Return the metric for each of the last steps; an empty list if one of them lacks it."""
        values = _values(self.last, name)
        return values if len(values) == len(self.last) else []

    def mean(self, name: str) -> float:
        return fmean(self.values(name) or [0.0])


class FindingRule(NamedTuple):
    """Rule for one kind of problem. `detect` returns a description of the problem, or None if the window does not show
    it."""

    name: str
    detect: Callable[[StepWindow], str | None]
    remedy: str


class FindingTracker:
    """Reports each finding once, until `steps` consecutive steps do not show it.

    `earlier` are the metrics of steps before a resume, so that a resumed run reports the same findings as an
    uninterrupted one. `updates` is the number of optimizer updates in a step: with more than one, a larger difference
    between the log-probs of learner and sampler is normal."""

    def __init__(
        self, earlier_metrics: Sequence[StepMetrics] = (), updates: int = 1, steps: int = STEPS
    ) -> None:
        self._steps = steps
        self._max_logprob_diff = 0.05 if updates == 1 else 0.2
        self._start: list[StepMetrics] = []
        self._recent: list[StepMetrics] = []
        self._absent_steps: dict[str, int] = {}  # name of a reported finding -> consecutive steps without it
        for metrics in earlier_metrics:
            self.look(int(metrics["step"]), metrics, ())

    def look(self, step: int, metrics: StepMetrics, episodes: Sequence[Trajectory]) -> list[FindingChange]:
        """Add the metrics of a step; return the findings that appeared and those that disappeared."""
        if "seconds/step" not in metrics:  # an evaluation before the first step
            return []
        self._recent = [*self._recent, metrics][-(self._steps + BEFORE_STEPS) :]
        if len(self._start) < START_STEPS:
            self._start.append(metrics)
        if len(self._recent) < self._steps:
            return []
        last, earlier = self._recent[-self._steps :], self._recent[: -self._steps]
        window = StepWindow(last, self._start, earlier, episodes, self._max_logprob_diff)
        last_step = replace(window, last=last[-1:])
        changes: list[FindingChange] = []
        for rule in FINDING_RULES:
            if (sentence := rule.detect(window)) is not None:
                if rule.name not in self._absent_steps:
                    changes.append(FindingChange(step, rule.name, Finding(rule.name, sentence, rule.remedy)))
                self._absent_steps[rule.name] = 0
            elif rule.name in self._absent_steps:
                # One step without the problem interrupts the windows of `steps` steps, but it is not a recovery.
                is_absent = rule.detect(last_step) is None
                self._absent_steps[rule.name] = self._absent_steps[rule.name] + 1 if is_absent else 0
                if self._absent_steps[rule.name] == self._steps:
                    del self._absent_steps[rule.name]
                    changes.append(FindingChange(step, rule.name))
        return changes


def find_unparsed_call(episodes: Sequence[Trajectory]) -> str | None:
    """Return an excerpt of the first reply that looks like a tool call but was not parsed as one."""
    for episode in episodes:
        names = [re.escape(tool.name) for tool in episode.tools]
        tool_call = re.compile(rf"\b({'|'.join(names)})\s*[({{]") if names else CALL
        for turn in episode.turns:
            text = f"{turn.message.reasoning or ''}\n{turn.message.content}"
            if not turn.message.tool_calls and (match := CALL.search(text) or tool_call.search(text)):
                return text[max(0, match.start() - 20) :].strip()[:160]
    return None


def _no_tool_called(window: StepWindow) -> str | None:
    if not all(row.get("tools_offered") for row in window.last):
        return None
    if any(row.get("episodes/called", 0) > MIN_CALLED * row.get("episodes", 0) for row in window.last):
        return None
    called, episodes = (sum(_values(window.last, name)) for name in ("episodes/called", "episodes"))
    who = f"Only {called:.0f} of {episodes:.0f} episodes" if called else "No episode"
    example = find_unparsed_call(window.episodes)
    if example is not None:
        return f"{who} called a tool, but this reply looks like a call that was not parsed: {example!r}"
    return f"{who} called a tool, and no reply looks like an unparsed call"


def _truncated(window: StepWindow) -> str | None:
    shares = [row["episodes/truncated"] / row["episodes"] for row in window.last if row.get("episodes")]
    if len(shares) == len(window.last) and min(shares) > 0.5:
        return f"{shares[-1]:.0%} of the episodes were truncated at a length limit"


def _tied(window: StepWindow) -> str | None:
    rewards = [episode.reward for episode in window.episodes if episode.reward is not None]
    distinct = {(reward.outcome, *reward.steps) for reward in rewards}
    are_equal = len(distinct) < 2 and not any(row.get("reward_std", 1.0) for row in window.last)
    is_solved = window.mean("accuracy") > 0.9 and len(window.before) >= START_STEPS
    if (
        is_solved
        or not window.values("reward")
        or (not are_equal and any(row.get("rows") for row in window.last))
    ):
        return None
    if are_equal:
        return f"All episodes got the same reward ({window.last[-1]['reward']:g}), so all advantages are zero"
    return "In every group all episodes got the same reward, so all advantages are zero"


def _wrong_rewarded(window: StepWindow) -> str | None:
    right, wrong = window.values("reward_right"), window.values("reward_wrong")
    if right and wrong and all(bad > good / 2 > 0 for good, bad in zip(right, wrong, strict=True)):
        return f"Episodes with a wrong outcome get a mean reward of {wrong[-1]:.3g}, correct ones {right[-1]:.3g}"


def _entropy(window: StepWindow) -> str | None:
    now, start, accuracy = window.values("entropy"), _values(window.start, "entropy"), window.mean("accuracy")
    if not now or not start or not window.before or accuracy >= 0.8 or "reward" not in window.last[-1]:
        return None
    if max(now) < 0.1 * median(start):
        return f"Entropy fell from {median(start):.3g} to {now[-1]:.3g} at an accuracy of {accuracy:.0%}"


def _length(window: StepWindow) -> str | None:
    values, earlier = window.values("length"), _values(window.before, "length")
    if len(earlier) < START_STEPS or window.mean("reward") > fmean(_values(window.before, "reward") or [0.0]):
        return None
    if values and min(values) > 2 * median(earlier):
        return f"Sampled tokens per episode rose from {median(earlier):.0f} to {values[-1]:.0f} without a higher reward"


def _logprobs(window: StepWindow) -> str | None:
    # With policy lag, tokens of older weights differ anyway and importance weights correct for it.
    name = "mismatch" if "staleness_gap" in window.last[-1] else "logprob_diff"
    if (values := window.values(name)) and min(values) > (limit := window.max_logprob_diff):
        return f"Log-probs of sampler and learner differ by {values[-1]:.3g} per token (limit {limit:g})"


def _gradient(window: StepWindow) -> str | None:
    if all(row.get("skipped") for row in window.last):
        return "The gradient is not finite, so the optimizer skips every update"
    values, earlier = window.values("grad_norm"), _values(window.before, "grad_norm")
    if not values or len(earlier) < START_STEPS:
        return None
    usual = max(median(earlier), median(_values(window.start, "grad_norm") or [0.0]))
    if min(values) > 5 * usual:
        return f"The gradient norm rose from {usual:.3g} to {values[-1]:.3g}"


def _judge(window: StepWindow) -> str | None:
    totals = [row.get("judge/requests", 0.0) + row.get("judge/cached", 0.0) for row in window.last]
    failures = [sum(v for name, v in row.items() if name.startswith("judge/failed_")) for row in window.last]
    if all(total and num_failed > 0.2 * total for num_failed, total in zip(failures, totals, strict=True)):
        return f"{failures[-1]:.0f} of {totals[-1]:.0f} judge requests failed"


def _filtered(window: StepWindow) -> str | None:
    if (shares := window.values("filters/dropped")) and min(shares) > 0.5:
        return f"training.filters dropped {shares[-1]:.0%} of the episodes"


def _tool_success(window: StepWindow) -> str | None:
    now = window.values("tool_success")
    earlier = [_values(rows, "tool_success") for rows in (window.start, window.before)]
    baselines = [fmean(values) for values in earlier if values]
    if now and baselines and len(window.before) >= START_STEPS and max(now) < max(baselines) - 0.25:
        return f"The share of successful tool calls fell from {max(baselines):.0%} to {now[-1]:.0%}"


def _tools_failing(window: StepWindow) -> str | None:
    if (values := window.values("tool_success")) and max(values) < 0.1:
        return f"Only {values[-1]:.0%} of the tool calls succeeded"


def _environment_crashes(window: StepWindow) -> str | None:
    if (values := window.values("environment/crashes")) and min(values) > 0:
        return (
            f"{values[-1]:.0f} processes of the environment crashed in the last step; their episodes are lost"
        )


def _task_lost(window: StepWindow) -> str | None:
    if (values := window.values("fold/task_lost")) and min(values) > 0:
        return f"{values[-1]:.0f} folds of the last step removed the user's task from the conversation"


def _folds_every_turn(window: StepWindow) -> str | None:
    if (values := window.values("fold/every_turn")) and min(values) > 0.5:
        return (
            f"In {values[-1]:.0%} of the episodes that were folded repeatedly, every later turn was folded: each turn "
            "is a training row of its own"
        )


def _summaries_grow(window: StepWindow) -> str | None:
    values, earlier = window.values("fold/summary_tokens"), _values(window.before, "fold/summary_tokens")
    if values and len(earlier) >= START_STEPS and min(values) > 1.5 * median(earlier):
        return f"Summaries grew from {median(earlier):.0f} to {values[-1]:.0f} tokens"
    if (cut := window.values("fold/summaries_cut")) and min(cut) > 0.5:
        return f"{cut[-1]:.0%} of the summaries were cut at environment.context.summary_tokens"


def _forks_dropped(window: StepWindow) -> str | None:
    dropped = window.values("branching/dropped")
    if dropped and min(dropped) > 0:
        return f"{dropped[-1]:.0f} forks of the last step were dropped because their environment could not be forked"
    if dropped and not _values(window.last, "branching/forks"):
        return "training.branching is set, but no episode forked"


def _budget_exceeded(window: StepWindow) -> str | None:
    if ratios := window.values("budget_excess"):
        return (
            f"The largest forward pass had {ratios[-1]:.3g} times training.token_budget tokens: a row, or an episode "
            "that this algorithm trains in one pass, is longer than the budget"
        )


def _values(rows: Sequence[StepMetrics], name: str) -> list[float]:
    return [row[name] for row in rows if name in row]


FINDING_RULES = (
    FindingRule("no_tool_called", _no_tool_called, "If a reply contains a call, remove model.family so that the "
        "model's own chat format is used, or register a format. Otherwise describe in environment.system_prompt when "
        "to call a tool, or train on demonstrations first (training.algorithm=sft)."),
    FindingRule("most_truncated", _truncated, "Raise sampling.max_tokens (per turn) or model.max_length (per episode). "
        "If turns never end, the model has not learned its stop token: train on demonstrations first."),
    FindingRule("tied_groups", _tied, "Inspect episodes (tfactory runs episodes RUN). Use tasks that succeed some of "
        "the time, a reward with partial credit, a larger training.group_size, or sampling.temperature=1."),
    FindingRule("wrong_rewarded", _wrong_rewarded, "Withdraw step rewards if the outcome is wrong "
        "(reward.options.claw_back=wrong of a process_reward), lower them, or raise reward.outcome_weight."),
    FindingRule("entropy_collapse", _entropy, "Lower training.learning_rate, raise grpo.clip_high or grpo.entropy "
        "slightly, or start a new run from an earlier checkpoint (model.name=RUN@step-N)."),
    FindingRule("length_explosion", _length, "Inspect the longest episodes. Set grpo.overlong_length, or lower "
        "sampling.max_tokens."),
    FindingRule("logprob_gap", _logprobs, "Set optimization.importance_cap=2.0 or model.dtype=float32. If a step has "
        "several updates, lower training.learning_rate or training.update_epochs."),
    FindingRule("gradient_jump", _gradient, "Lower training.learning_rate or training.max_grad_norm, and start a new "
        "run from the checkpoint before the jump (model.name=RUN@step-N)."),
    FindingRule("judge_failing", _judge, "Run tfactory judge audit to see why. Check reward.options: base_url, model, "
        "timeouts, budget."),
    FindingRule("most_filtered", _filtered, "Inspect the dropped episodes (tfactory runs episodes RUN). Use the action "
        "mask or count in training.filters, or train on demonstrations first."),
    FindingRule("tool_success_falling", _tool_success, "Inspect failed calls (tfactory runs episodes RUN --worst 2). "
        "If a tool server is down, restart it. If the model writes worse calls, lower training.learning_rate or reward "
        "successful calls."),
    FindingRule("tools_failing", _tools_failing, "Call the tools by hand (tfactory tools call NAME --config CONFIG), "
        "and compare with the calls of the model."),
    FindingRule("forks_dropped", _forks_dropped, "Read the reason in the log. Give the environment an async fork() "
        "method, raise training.branching.timeout, or change where episodes fork (training.branching.at)."),
    FindingRule("budget_exceeded", _budget_exceeded, "If memory is short, lower model.max_length or "
        "environment.context.limit, or set training.gradient_checkpointing=true. Otherwise raise "
        "training.token_budget."),
    FindingRule("environment_crashes", _environment_crashes, "Read the error of a failed episode (tfactory runs "
        "episodes RUN), which ends with the stderr of the process. If memory is short, lower "
        "environment.options.episodes_per_process or environment.num_workers."),
    FindingRule("fold_loses_task", _task_lost, "Keep the user's message with the task in the list that "
        "environment.context.function returns."),
    FindingRule("folds_every_turn", _folds_every_turn, "Raise environment.context.limit, or lower keep_turns, "
        "sampling.max_reply_tokens or summary_tokens, so that several turns fit after a fold."),
    FindingRule("summaries_grow", _summaries_grow, "Ask for a short summary in environment.context.template, lower "
        "summary_tokens, or set grpo.overlong_length; a summary that is always cut needs more summary_tokens."),
)  # fmt: skip
