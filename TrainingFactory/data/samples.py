"""Turn trajectories into training rows. The only place that builds a loss mask."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from TrainingFactory.types import Sample, Trajectory

Which = Literal["all", "last"]


def to_samples(
    trajectory: Trajectory,
    advantages: Sequence[float] | None = None,
    rewards: Sequence[float] | None = None,
    *,
    turns: Which = "all",
    tokens: Which = "all",
    pair: int = -1,
    label: float = 0.0,
) -> list[Sample]:
    """Merge the turns into one row; another starts only where a prompt does not continue the row so far.

        token_ids  P + A0 + E0 + A1         prompt, a sampled turn, the environment's tokens, a sampled turn
        loss_mask  0...  1...  0...  1...   `turns="last"` trains A1 alone, `tokens="last"` the last token of each turn

    `advantages` (on all sampled tokens of a turn) and `rewards` (on the last of them) have one entry per turn."""
    count = len(trajectory.turns)
    zeros, spans = [0.0] * count, turn_spans(trajectory)
    given = (zeros if advantages is None else advantages, zeros if rewards is None else rewards)
    rows: list[Sample] = []
    values = zip(trajectory.turns, spans, *given, strict=True)
    for number, (turn, span, advantage, reward) in enumerate(values):
        if span.row == len(rows):
            rows.append(Sample([], [], [], [], [], [], pair=pair, label=label))
            rows[-1].episode, rows[-1].pair = rows[0].episode, rows[0].pair
        row, sampled = rows[-1], turn.completion
        context = turn.prompt_ids[len(row.token_ids) :]  # what the turn saw and the row does not have yet
        known, new = len(context), len(sampled.token_ids)
        assert new, "a turn has sampled at least one token"
        used = 0 if turns == "last" and number < count - 1 else 1 if tokens == "last" else new
        idle = known + new - used  # tokens before those that are trained
        row.token_ids += context + sampled.token_ids
        row.loss_mask += [False] * idle + [True] * used
        row.logprobs += [0.0] * idle + sampled.logprobs[new - used :]
        row.advantages += [0.0] * idle + [advantage] * used
        row.rewards += [0.0] * (known + new - 1) + [reward]
        row.policy_version += [sampled.policy_version] * known + sampled.token_versions
    return rows


@dataclass(slots=True, frozen=True)
class Span:
    """Says where a turn's sampled tokens stand: in `to_samples(trajectory)[row].token_ids[begin:end]`."""

    row: int
    begin: int
    end: int


def turn_spans(trajectory: Trajectory) -> list[Span]:
    spans: list[Span] = []
    row, so_far = -1, list[int]()
    for turn in trajectory.turns:
        if row < 0 or turn.prompt_ids[: len(so_far)] != so_far:
            row += 1
        so_far = turn.prompt_ids + turn.completion.token_ids
        spans.append(Span(row, len(turn.prompt_ids), len(so_far)))
    return spans


def mismatched(samples: Sequence[Sample]) -> list[Sample]:
    """Return each prompt with the answer that another episode gave to another prompt. Answers move on by as many places
    as the most frequent prompt has episodes; a row longer than all given ones, which are known to fit, is left out."""
    first: dict[int, Sample] = {}
    for sample in samples:
        if any(sample.loss_mask):
            first.setdefault(sample.episode, sample)
    rows: dict[tuple[int, ...], list[Sample]] = {}
    for row in first.values():
        rows.setdefault(tuple(row.token_ids[: row.loss_mask.index(True)]), []).append(row)
    sides = [(prompt, row) for prompt, same in rows.items() for row in same]
    shift = max((len(same) for same in rows.values()), default=0)
    longest = max((len(sample.token_ids) for sample in samples), default=0)
    found = []
    for place, (prompt, _) in enumerate(sides):
        own, answer = sides[place - shift]
        if own == prompt or len(prompt) + len(answer.token_ids) - len(own) > longest:
            continue
        ids = [*prompt, *answer.token_ids[len(own) :]]
        mask = [False] * len(prompt) + answer.loss_mask[len(own) :]
        zeros = [0.0] * len(ids)
        found.append(Sample(ids, mask, zeros, zeros, zeros, [0] * len(ids)))
    return found
