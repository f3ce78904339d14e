"""The table of what can be seen going wrong while a run trains, from the metrics of its last steps.

Each check looks at the last `steps` rows: all of them must show it. What a step is measured against is the start of the
run or the steps before, so that runs of any reward and any model are judged by themselves."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import NamedTuple

from TrainingFactory.runs.findings import Change, Finding
from TrainingFactory.types import Trajectory

STEPS = 3  # in a row, before anything is said, and before it is gone
START, BEFORE = (
    5,
    20,
)  # steps of the start of a run, and before the last ones, that others are measured against
# What a call looks like in the forms that models have learned: tags, tokens, JSON, and the words of ReAct.
CALL = re.compile(
    r"<\|?/?(tool_call|function|invoke|python_tag|tool▁call)|\[TOOL_CALLS\]|\"(name|function|tool|action)\"\s*:"
    r"|^\s*Action(?: Input)?\s*:",
    re.MULTILINE,
)
Row = dict[str, float]
Rows = Sequence[Row]


@dataclass(slots=True, frozen=True)
class Look:
    """What a check sees: the last steps, those at the start, and those before the last."""

    last: Rows
    start: Rows
    before: Rows
    episodes: Sequence[Trajectory]  # of the last step
    logprob_bound: float

    def values(self, name: str) -> list[float]:
        """Return the metric in each of the last steps; nothing where one of them lacks it."""
        found = _values(self.last, name)
        return found if len(found) == len(self.last) else []

    def mean(self, name: str) -> float:
        return fmean(self.values(name) or [0.0])


class Check(NamedTuple):
    """One row of the table: `look` returns the sentence where it sees what `name` stands for."""

    name: str
    look: Callable[[Look], str | None]
    remedy: str


class Table:
    """Says each finding once, until it has been gone for some steps. Rows of steps that were made before are given at
    the start, so that a run that goes on says what it would have said. `updates` are those of a step: more than one
    move the learner away from what was sampled."""

    def __init__(self, earlier: Rows = (), updates: int = 1, steps: int = STEPS) -> None:
        self._steps, self._bound = steps, 0.05 if updates == 1 else 0.2
        self._start: list[Row] = []
        self._recent: list[Row] = []
        self._unseen: dict[str, int] = {}  # name of a finding that was said -> steps without it
        for row in earlier:
            self.look(int(row["step"]), row, ())

    def look(self, step: int, metrics: Row, episodes: Sequence[Trajectory]) -> list[Change]:
        """Take the metrics of a step, and return what is new in them and what is gone."""
        if "seconds/step" not in metrics:  # an evaluation before the first step
            return []
        self._recent = [*self._recent, metrics][-(self._steps + BEFORE) :]
        if len(self._start) < START:
            self._start.append(metrics)
        if len(self._recent) < self._steps:
            return []
        last, before = self._recent[-self._steps :], self._recent[: -self._steps]
        seen = Look(last, self._start, before, episodes, self._bound)
        changes: list[Change] = []
        for check in CHECKS:
            if (sentence := check.look(seen)) is not None:
                if check.name not in self._unseen:
                    changes.append(Change(step, check.name, Finding(check.name, sentence, check.remedy)))
                self._unseen[check.name] = 0
            elif check.name in self._unseen:
                self._unseen[check.name] += 1
                if self._unseen[check.name] == self._steps:
                    del self._unseen[check.name]
                    changes.append(Change(step, check.name))
        return changes


def like_a_call(episodes: Sequence[Trajectory]) -> str | None:
    """Return a text that looks like a call and was not read as one."""
    for episode in episodes:
        names = [re.escape(tool.name) for tool in episode.tools]
        named = re.compile(rf"\b({'|'.join(names)})\s*[({{]") if names else CALL
        for turn in episode.turns:
            text = f"{turn.message.reasoning or ''}\n{turn.message.content}"
            if not turn.message.tool_calls and (found := CALL.search(text) or named.search(text)):
                return text[max(0, found.start() - 20) :].strip()[:160]
    return None


def _no_tool_called(seen: Look) -> str | None:
    if not all(row.get("tools_offered") and not row.get("episodes/called") for row in seen.last):
        return None
    example = like_a_call(seen.episodes)
    told = "; no text looks like a call either"
    if example is not None:
        told = f", but this looks like a call that was not read: {example!r}"
    return f"tools are there, and no episode has called one{told}"


def _truncated(seen: Look) -> str | None:
    shares = [row["episodes/truncated"] / row["episodes"] for row in seen.last if row.get("episodes")]
    if len(shares) == len(seen.last) and min(shares) > 0.5:
        return f"{shares[-1]:.0%} of the episodes were cut off at a length limit"


def _tied(seen: Look) -> str | None:
    paid = {(each.reward.outcome, *each.reward.steps) for each in seen.episodes if each.reward is not None}
    same = len(paid) < 2 and not any(row.get("reward_std", 1.0) for row in seen.last)
    learned = seen.mean("accuracy") > 0.9 and len(seen.before) >= START
    if learned or not seen.values("reward") or (not same and any(row.get("rows") for row in seen.last)):
        return None
    who = f"all episodes were rewarded the same ({seen.last[-1]['reward']:g})"
    return f"{who if same else 'the episodes of each task were all rewarded the same'}, so that nothing can be learned"


def _wrong_rewarded(seen: Look) -> str | None:
    right, wrong = seen.values("reward_right"), seen.values("reward_wrong")
    if right and wrong and all(bad > good / 2 > 0 for good, bad in zip(right, wrong, strict=True)):
        return f"episodes with a wrong outcome earn {wrong[-1]:.3g} on average, those with a right one {right[-1]:.3g}"


def _entropy(seen: Look) -> str | None:
    now, start, won = seen.values("entropy"), _values(seen.start, "entropy"), seen.mean("accuracy")
    if not now or not start or not seen.before or won >= 0.8 or "reward" not in seen.last[-1]:
        return None
    if max(now) < 0.1 * median(start):
        return f"entropy has fallen from {median(start):.3g} to {now[-1]:.3g} with {won:.0%} rewarded"


def _length(seen: Look) -> str | None:
    now, before = seen.values("length"), _values(seen.before, "length")
    if not now or len(before) < START or seen.mean("reward") > fmean(_values(seen.before, "reward") or [0.0]):
        return None
    if min(now) > 2 * median(before):
        return f"episodes have {now[-1]:.0f} sampled tokens, before it were {median(before):.0f}, for no more reward"


def _logprobs(seen: Look) -> str | None:
    # Tokens of older weights differ anyway, and are weighted for it.
    name = "mismatch" if "staleness_gap" in seen.last[-1] else "logprob_diff"
    if (now := seen.values(name)) and min(now) > (bound := seen.logprob_bound):
        return f"log-probs of the sampler and of the learner differ by {now[-1]:.3g} a token, which is over {bound:g}"


def _gradient(seen: Look) -> str | None:
    if all(row.get("skipped") for row in seen.last):
        return "the gradient is not finite, so that no weight is changed"
    now, before = seen.values("grad_norm"), _values(seen.before, "grad_norm")
    if not now or len(before) < START:
        return None
    usual = max(median(before), median(_values(seen.start, "grad_norm") or [0.0]))
    if min(now) > 5 * usual:
        return f"the gradient norm is {now[-1]:.3g}, before it was {usual:.3g}"


def _judge(seen: Look) -> str | None:
    asked = [row.get("judge/requests", 0.0) + row.get("judge/cached", 0.0) for row in seen.last]
    failed = [sum(v for name, v in row.items() if name.startswith("judge/failed_")) for row in seen.last]
    if all(tried and lost > 0.2 * tried for lost, tried in zip(failed, asked, strict=True)):
        return f"{failed[-1]:.0f} of {asked[-1]:.0f} verdicts of the judge failed"


def _tool_success(seen: Look) -> str | None:
    now = seen.values("tool_success")
    known = [fmean(values) for rows in (seen.start, seen.before) if (values := _values(rows, "tool_success"))]
    if now and known and len(seen.before) >= START and max(now) < max(known) - 0.25:
        return f"{now[-1]:.0%} of the tool calls worked, before it were {max(known):.0%}"


def _tools_failing(seen: Look) -> str | None:
    if (now := seen.values("tool_success")) and max(now) < 0.1:
        return f"{now[-1]:.0%} of the tool calls worked"


def _values(rows: Rows, name: str) -> list[float]:
    return [row[name] for row in rows if name in row]


CHECKS = (
    Check("no_tool_called", _no_tool_called, "Where calls are not read, take the model's own chat family (leave "
          "model.family out) or register one; else train on demonstrations first (training.algorithm=sft), or say in "
          "environment.system_prompt when to call."),
    Check("most_truncated", _truncated, "Raise sampling.max_tokens (a turn) or model.max_length (an episode); where "
          "turns never end, the model has not learned its stop token: train on demonstrations first."),
    Check("tied_groups", _tied, "Look at some episodes (tfactory runs episodes RUN); take tasks that succeed now and "
          "then, a reward with more steps between wrong and right, a larger training.group_size, or "
          "sampling.temperature=1."),
    Check("wrong_rewarded", _wrong_rewarded, "Take step rewards back where the outcome is wrong "
          "(reward.options.claw_back=wrong of a process_reward), lower them, or raise reward.outcome_weight."),
    Check("entropy_collapse", _entropy, "Lower training.learning_rate, raise grpo.clip_high or grpo.entropy a little, "
          "or go back to an earlier checkpoint."),
    Check("length_explosion", _length, "Look at the longest episodes; set grpo.overlong_length, or lower "
          "sampling.max_tokens."),
    Check("logprob_gap", _logprobs, "Set optimization.importance_cap=2.0, or model.dtype=float32; where a step has "
          "several updates, lower training.learning_rate or training.update_epochs."),
    Check("gradient_jump", _gradient, "Lower training.learning_rate or training.max_grad_norm, and go on from the "
          "checkpoint before."),
    Check("judge_failing", _judge, "Look at why with tfactory judge audit; check reward.options (base_url, model, "
          "time-outs, budget)."),
    Check("tool_success_falling", _tool_success, "Look at failed calls (tfactory runs episodes RUN --worst 2): a "
          "server that is down is no fault of the model; where calls are written worse, lower "
          "training.learning_rate, or reward calls that work."),
    Check("tools_failing", _tools_failing, "Try the tools by hand (tfactory tools call NAME --config CONFIG), and look "
          "at what the model writes."),
)  # fmt: skip
