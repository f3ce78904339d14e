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

FINDING_STEPS = 3  # consecutive steps before a finding is reported, and before it is reported as gone
START_STEPS = 5  # first steps of the run, used as a baseline
BASELINE_STEPS = 20  # steps before the last ones, used as a baseline
MIN_CALL_SHARE = 0.01  # share of a step's episodes that call a tool; at or below it, `no_tool_called` fires
# Common formats of a tool call: tags, special tokens, JSON, and the keywords of ReAct.
CALL_PATTERN = re.compile(
    r"<\|?/?(tool_call|function|invoke|python_tag|tool▁call)|\[TOOL_CALLS\]|\"(name|function|tool|action)\"\s*:"
    r"|^\s*Action(?: Input)?\s*:",
    re.MULTILINE,
)
StepMetrics = dict[str, float]


@dataclass(slots=True, frozen=True)
class StepWindow:
    """Metrics that a rule compares: of the latest steps, of earlier steps, and of the first steps of the run."""

    steps: Sequence[StepMetrics]  # the latest
    first_steps: Sequence[StepMetrics]
    past_steps: Sequence[StepMetrics]  # before the latest
    episodes: Sequence[Trajectory]  # of the last step
    max_logprob_diff: float
    evaluations: Sequence[StepMetrics] = ()  # the first on held-out tasks, and the latest

    def collect(self, metric: str) -> list[float]:
        """Return the metric's values in the last steps; an empty list if a step lacks the metric."""
        values = _collect(self.steps, metric)
        return values if len(values) == len(self.steps) else []

    def compute_mean(self, metric: str) -> float:
        return fmean(self.collect(metric) or [0.0])


class FindingRule(NamedTuple):
    """Rule for one kind of problem. `detect` returns a description of the problem, or None if the window does not show
    it."""

    name: str
    detect: Callable[[StepWindow], str | None]
    remedy: str


class FindingTracker:
    """Tracker that reports each finding once, until `num_steps` consecutive steps do not show it.

    `earlier_metrics` are the metrics of steps before a resume, so that a resumed run reports the same findings as an
    uninterrupted one. `num_updates` is the number of optimizer updates in a step: with more than one, a larger
    difference between the log-probs of learner and sampler is normal."""

    def __init__(
        self,
        earlier_metrics: Sequence[StepMetrics] = (),
        num_updates: int = 1,
        num_steps: int = FINDING_STEPS,
    ) -> None:
        self._num_steps = num_steps
        self._max_logprob_diff = 0.05 if num_updates == 1 else 0.2
        self._first_steps: list[StepMetrics] = []
        self._recent_steps: list[StepMetrics] = []
        self._evaluations: list[StepMetrics] = []
        self._absent_steps: dict[str, int] = {}  # name of a reported finding -> consecutive steps without it
        for metrics in earlier_metrics:
            self.observe(int(metrics["step"]), metrics, ())

    def observe(self, step: int, metrics: StepMetrics, episodes: Sequence[Trajectory]) -> list[FindingChange]:
        """Add the metrics of a step; return the findings that appeared and those that disappeared."""
        if "eval/success_low" in metrics:
            self._evaluations = [*self._evaluations[:1], metrics]
        if "seconds/step" not in metrics:  # an evaluation before the first step
            return []
        self._recent_steps = [*self._recent_steps, metrics][-(self._num_steps + BASELINE_STEPS) :]
        if len(self._first_steps) < START_STEPS:
            self._first_steps.append(metrics)
        if len(self._recent_steps) < self._num_steps:
            return []
        steps, past_steps = self._recent_steps[-self._num_steps :], self._recent_steps[: -self._num_steps]
        window = StepWindow(
            steps, self._first_steps, past_steps, episodes, self._max_logprob_diff, self._evaluations
        )
        last_window = replace(window, steps=steps[-1:])
        changes: list[FindingChange] = []
        for rule in FINDING_RULES:
            if (sentence := rule.detect(window)) is not None:
                if rule.name not in self._absent_steps:
                    changes.append(FindingChange(step, rule.name, Finding(rule.name, sentence, rule.remedy)))
                self._absent_steps[rule.name] = 0
            elif rule.name in self._absent_steps:
                # One step without the problem interrupts the windows of `num_steps` steps, but it is not a recovery.
                is_absent = rule.detect(last_window) is None
                self._absent_steps[rule.name] = self._absent_steps[rule.name] + 1 if is_absent else 0
                if self._absent_steps[rule.name] == self._num_steps:
                    del self._absent_steps[rule.name]
                    changes.append(FindingChange(step, rule.name))
        return changes


def find_unparsed_call(episodes: Sequence[Trajectory]) -> str | None:
    """Return an excerpt of the first reply that looks like a tool call but was not parsed as one."""
    for episode in episodes:
        tool_names = [re.escape(tool.name) for tool in episode.tools]
        tool_call = re.compile(rf"\b({'|'.join(tool_names)})\s*[({{]") if tool_names else CALL_PATTERN
        for turn in episode.turns:
            reply = f"{turn.message.reasoning or ''}\n{turn.message.content}"
            match = CALL_PATTERN.search(reply) or tool_call.search(reply)
            if match and not turn.message.tool_calls:
                return reply[max(0, match.start() - 20) :].strip()[:160]
    return None


def _detect_no_tool_call(window: StepWindow) -> str | None:
    if not all(row.get("tools_offered") for row in window.steps):
        return None
    if any(row.get("episodes/called", 0) > MIN_CALL_SHARE * row.get("episodes", 0) for row in window.steps):
        return None
    num_called, num_total = (sum(_collect(window.steps, name)) for name in ("episodes/called", "episodes"))
    subject = f"Only {num_called:.0f} of {num_total:.0f} episodes" if num_called else "No episode"
    example = find_unparsed_call(window.episodes)
    if example is not None:
        return f"{subject} called a tool, but this reply looks like a call that was not parsed: {example!r}"
    if not window.episodes:  # of a step that was sampled before the run resumed
        return f"{subject} called a tool"
    return f"{subject} called a tool, and no reply looks like an unparsed call"


def _detect_truncation(window: StepWindow) -> str | None:
    shares = [row["episodes/truncated"] / row["episodes"] for row in window.steps if row.get("episodes")]
    if len(shares) == len(window.steps) and min(shares) > 0.5:
        return f"{shares[-1]:.0%} of the episodes were truncated at a length limit"


def _detect_ties(window: StepWindow) -> str | None:
    rewards = [episode.reward for episode in window.episodes if episode.reward is not None]
    distinct_rewards = {(reward.outcome, *reward.steps) for reward in rewards}
    are_equal = len(distinct_rewards) < 2 and not any(row.get("reward_std", 1.0) for row in window.steps)
    is_solved = window.compute_mean("accuracy") > 0.9 and len(window.past_steps) >= START_STEPS
    if (
        is_solved
        or not window.collect("reward")
        or (not are_equal and any(row.get("rows") for row in window.steps))
    ):
        return None
    if are_equal:
        reward = window.steps[-1]["reward"]
        return f"All episodes got the same reward ({reward:g}), so all advantages are zero"
    return "In every group all episodes got the same reward, so all advantages are zero"


def _detect_wrong_rewarded(window: StepWindow) -> str | None:
    right_means, wrong_means = window.collect("reward_right"), window.collect("reward_wrong")
    pairs = zip(right_means, wrong_means, strict=True)
    if right_means and wrong_means and all(wrong > right / 2 > 0 for right, wrong in pairs):
        right, wrong = right_means[-1], wrong_means[-1]
        return f"Episodes with a wrong outcome get a mean reward of {wrong:.3g}, correct ones {right:.3g}"


def _detect_entropy_drop(window: StepWindow) -> str | None:
    entropies, first_values = window.collect("entropy"), _collect(window.first_steps, "entropy")
    if not entropies or not first_values or not window.past_steps or "reward" not in window.steps[-1]:
        return None
    accuracy = window.compute_mean("accuracy")
    if accuracy < 0.8 and max(entropies) < 0.1 * median(first_values):
        return f"Entropy fell from {median(first_values):.3g} to {entropies[-1]:.3g} at an accuracy of {accuracy:.0%}"


def _detect_length_jump(window: StepWindow) -> str | None:
    lengths, old_lengths = window.collect("length"), _collect(window.past_steps, "length")
    earlier_rewards = _collect(window.past_steps, "reward") or [0.0]
    if len(old_lengths) < START_STEPS or window.compute_mean("reward") > fmean(earlier_rewards):
        return None
    if lengths and min(lengths) > 2 * median(old_lengths):
        change = f"from {median(old_lengths):.0f} to {lengths[-1]:.0f}"
        return f"Sampled tokens per episode rose {change} without a higher reward"


def _detect_logprob_gap(window: StepWindow) -> str | None:
    # With policy lag, tokens of older weights differ anyway and importance weights correct for it.
    metric = "mismatch" if "staleness_gap" in window.steps[-1] else "logprob_diff"
    if (gaps := window.collect(metric)) and min(gaps) > (max_gap := window.max_logprob_diff):
        return f"Log-probs of sampler and learner differ by {gaps[-1]:.3g} per token (limit {max_gap:g})"


def _detect_gradient_jump(window: StepWindow) -> str | None:
    if all(row.get("skipped") for row in window.steps):
        return "The gradient is not finite, so the optimizer skips every update"
    norms, earlier_norms = window.collect("grad_norm"), _collect(window.past_steps, "grad_norm")
    if not norms or len(earlier_norms) < START_STEPS:
        return None
    baseline = max(median(earlier_norms), median(_collect(window.first_steps, "grad_norm") or [0.0]))
    if min(norms) > 5 * baseline:
        return f"The gradient norm rose from {baseline:.3g} to {norms[-1]:.3g}"


def _detect_heldout_drop(window: StepWindow) -> str | None:
    if not window.evaluations:
        return None
    first, latest = window.evaluations[0], window.evaluations[-1]
    if latest["eval/success_high"] < first["eval/success_low"]:
        return (
            f"Success on held-out tasks fell from {first['eval/success']:.3g} to {latest['eval/success']:.3g}, and the "
            "95 % intervals do not overlap"
        )


def _detect_judge_failures(window: StepWindow) -> str | None:
    requests = [row.get("judge/requests", 0.0) + row.get("judge/cached", 0.0) for row in window.steps]
    failures = [sum(v for k, v in row.items() if k.startswith("judge/failed_")) for row in window.steps]
    if all(total and num_failed > 0.2 * total for num_failed, total in zip(failures, requests, strict=True)):
        return f"{failures[-1]:.0f} of {requests[-1]:.0f} judge requests failed"


def _detect_filtering(window: StepWindow) -> str | None:
    if (shares := window.collect("filters/dropped")) and min(shares) > 0.5:
        return f"training.filters dropped {shares[-1]:.0%} of the episodes"


def _detect_tool_success_drop(window: StepWindow) -> str | None:
    shares = window.collect("tool_success")
    earlier_shares = [_collect(rows, "tool_success") for rows in (window.first_steps, window.past_steps)]
    baselines = [fmean(shares_before) for shares_before in earlier_shares if shares_before]
    if shares and baselines and len(window.past_steps) >= START_STEPS and max(shares) < max(baselines) - 0.25:
        return f"The share of successful tool calls fell from {max(baselines):.0%} to {shares[-1]:.0%}"


def _detect_failing_tools(window: StepWindow) -> str | None:
    if (shares := window.collect("tool_success")) and max(shares) < 0.1:
        return f"Only {shares[-1]:.0%} of the tool calls succeeded"


def _detect_crashes(window: StepWindow) -> str | None:
    if (counts := window.collect("environment/crashes")) and min(counts) > 0:
        return (
            f"{counts[-1]:.0f} processes of the environment crashed in the last step; their episodes are lost"
        )


def _detect_task_loss(window: StepWindow) -> str | None:
    if (counts := window.collect("fold/task_lost")) and min(counts) > 0:
        return f"{counts[-1]:.0f} folds of the last step removed the user's task from the conversation"


def _detect_folds_every_turn(window: StepWindow) -> str | None:
    if (shares := window.collect("fold/every_turn")) and min(shares) > 0.5:
        return (
            f"In {shares[-1]:.0%} of the episodes that were folded repeatedly, every later turn was folded: each turn "
            "is a training row of its own"
        )


def _detect_summary_growth(window: StepWindow) -> str | None:
    lengths = window.collect("fold/summary_tokens")
    earlier_lengths = _collect(window.past_steps, "fold/summary_tokens")
    if lengths and len(earlier_lengths) >= START_STEPS and min(lengths) > 1.5 * median(earlier_lengths):
        return f"Summaries grew from {median(earlier_lengths):.0f} to {lengths[-1]:.0f} tokens"
    if (cut_shares := window.collect("fold/summaries_cut")) and min(cut_shares) > 0.5:
        return f"{cut_shares[-1]:.0%} of the summaries were cut at environment.context.summary_tokens"


def _detect_dropped_forks(window: StepWindow) -> str | None:
    counts = window.collect("branching/dropped")
    if counts and min(counts) > 0:
        return f"{counts[-1]:.0f} forks of the last step were dropped because their environment could not be forked"
    if counts and not _collect(window.steps, "branching/forks"):
        return "training.branching is set, but no episode forked"


def _detect_budget_excess(window: StepWindow) -> str | None:
    if ratios := window.collect("budget_excess"):
        return (
            f"The largest forward pass had {ratios[-1]:.3g} times training.token_budget tokens: a row, or an episode "
            "that this algorithm trains in one pass, is longer than the budget"
        )


def _collect(rows: Sequence[StepMetrics], metric: str) -> list[float]:
    return [row[metric] for row in rows if metric in row]


FINDING_RULES = (
    FindingRule("no_tool_called", _detect_no_tool_call, "If a reply contains a call, remove model.family so that the "
        "model's own chat format is used, or register a format. Otherwise describe in environment.system_prompt when "
        "to call a tool, or train on demonstrations first (training.algorithm=sft)."),
    FindingRule("most_truncated", _detect_truncation, "Raise sampling.max_tokens (per turn) or model.max_length (per "
        "episode). If turns never end, the model has not learned its stop token: train on demonstrations first."),
    FindingRule("tied_groups", _detect_ties, "Inspect episodes (tfactory runs episodes RUN). Use tasks that succeed "
        "some of the time, a reward with partial credit, a larger training.group_size, or sampling.temperature=1."),
    FindingRule("wrong_rewarded", _detect_wrong_rewarded, "Withdraw step rewards if the outcome is wrong "
        "(reward.options.claw_back=wrong of a process_reward), lower them, or raise reward.outcome_weight."),
    FindingRule("entropy_collapse", _detect_entropy_drop, "Lower training.learning_rate, raise grpo.clip_high or "
        "grpo.entropy slightly, or start a new run from an earlier checkpoint (model.name=RUN@step-N)."),
    FindingRule("length_explosion", _detect_length_jump, "Inspect the longest episodes. Set grpo.overlong_length, or "
        "lower sampling.max_tokens."),
    FindingRule("logprob_gap", _detect_logprob_gap, "Set optimization.importance_cap=2.0 or model.dtype=float32. If a "
        "step has several updates, lower training.learning_rate or training.update_epochs."),
    FindingRule("gradient_jump", _detect_gradient_jump, "Lower training.learning_rate or training.max_grad_norm, and "
        "start a new run from the checkpoint before the jump (model.name=RUN@step-N)."),
    FindingRule("heldout_falling", _detect_heldout_drop, "Stop the run, lower training.learning_rate, and start again "
        "from the model before the first step. If logprob_diff is high, set model.dtype=float32."),
    FindingRule("judge_failing", _detect_judge_failures, "Run tfactory judge audit to see why. Check reward.options: "
        "base_url, model, timeouts, budget."),
    FindingRule("most_filtered", _detect_filtering, "Inspect the dropped episodes (tfactory runs episodes RUN). Use "
        "the action mask or count in training.filters, or train on demonstrations first."),
    FindingRule("tool_success_falling", _detect_tool_success_drop, "Inspect failed calls (tfactory runs episodes RUN "
        "--worst 2). If a tool server is down, restart it. If the model writes worse calls, lower "
        "training.learning_rate or reward successful calls."),
    FindingRule("tools_failing", _detect_failing_tools, "Call the tools by hand (tfactory tools call NAME --config "
        "CONFIG), and compare with the calls of the model."),
    FindingRule("forks_dropped", _detect_dropped_forks, "Read the reason in the log. Give the environment an async "
        "fork() method, raise training.branching.timeout, or change where episodes fork (training.branching.at)."),
    FindingRule("budget_exceeded", _detect_budget_excess, "If memory is short, lower model.max_length or "
        "environment.context.limit, or set training.gradient_checkpointing=true. Otherwise raise "
        "training.token_budget."),
    FindingRule("environment_crashes", _detect_crashes, "Read the error of a failed episode (tfactory runs episodes "
        "RUN), which ends with the stderr of the process. If memory is short, lower "
        "environment.options.episodes_per_process or environment.num_workers."),
    FindingRule("fold_loses_task", _detect_task_loss, "Keep the user's message with the task in the list that "
        "environment.context.function returns."),
    FindingRule("folds_every_turn", _detect_folds_every_turn, "Raise environment.context.limit, or lower keep_turns, "
        "sampling.max_reply_tokens or summary_tokens, so that several turns fit after a fold."),
    FindingRule("summaries_grow", _detect_summary_growth, "Ask for a short summary in environment.context.template, "
        "lower summary_tokens, or set grpo.overlong_length; a summary that is always cut needs more summary_tokens."),
)  # fmt: skip
