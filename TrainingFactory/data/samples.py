"""Training rows from trajectories. No other module builds loss masks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from TrainingFactory.types import Sample, Trajectory

AllOrLast = Literal["all", "last"]


def to_samples(
    trajectory: Trajectory,
    advantages: Sequence[float] | None = None,
    rewards: Sequence[float] | None = None,
    *,
    turns: AllOrLast = "all",
    tokens: AllOrLast = "all",
    pair: int = -1,
    label: float = 0.0,
    weights: Sequence[float] | None = None,
) -> list[Sample]:
    """Merge the turns into one row. A turn starts another row only if its prompt does not continue the row so far.

        token_ids  P + A0 + E0 + A1         prompt, a sampled turn, the environment's tokens, a sampled turn
        loss_mask  0...  1...  0...  1...   `turns="last"` trains A1 alone, `tokens="last"` the last token of each turn

    `advantages` (for all sampled tokens of a turn) and `rewards` (for the last one) have one entry per turn. So have
    `weights`, for all trained tokens of a turn; a turn of weight 0, like a masked one, is context."""
    num_turns = len(trajectory.turns)
    zeros = [0.0] * num_turns
    advantages = zeros if advantages is None else advantages
    rewards = zeros if rewards is None else rewards
    rows: list[Sample] = []
    turn_values = zip(trajectory.turns, turn_spans(trajectory), advantages, rewards, strict=True)
    for index, (turn, span, advantage, reward) in enumerate(turn_values):
        if span.row == len(rows):
            rows.append(Sample([], [], [], [], [], [], pair=pair, label=label))
            rows[-1].episode, rows[-1].pair = rows[0].episode, rows[0].pair
        row, completion = rows[-1], turn.completion
        context_ids = turn.prompt_ids[len(row.token_ids) :]  # the tokens that the row does not have yet
        num_context, num_drawn = len(context_ids), len(completion.token_ids)
        assert num_drawn, "a turn has sampled at least one token"
        num_trained = 0 if turns == "last" and index < num_turns - 1 else 1 if tokens == "last" else num_drawn
        if turn.masked or (weights is not None and not weights[index]):
            num_trained = 0
        num_masked = num_context + num_drawn - num_trained  # tokens before the trained ones
        row.token_ids += context_ids + completion.token_ids
        row.loss_mask += [False] * num_masked + [True] * num_trained
        row.logprobs += [0.0] * num_masked + completion.logprobs[num_drawn - num_trained :]
        row.advantages += [0.0] * num_masked + [advantage] * num_trained
        row.rewards += [0.0] * (num_context + num_drawn - 1) + [reward]
        row.policy_version += [completion.policy_version] * num_context + completion.token_versions
        if weights is not None:
            row.weights = (row.weights or []) + [0.0] * num_masked + [weights[index]] * num_trained
    return rows


@dataclass(slots=True, frozen=True)
class Span:
    """Position of a turn's sampled tokens: `to_samples(trajectory)[row].token_ids[begin:end]`."""

    row: int
    begin: int
    end: int


def turn_spans(trajectory: Trajectory) -> list[Span]:
    spans: list[Span] = []
    row_index, previous_ids = -1, list[int]()  # previous: prompt and completion of the turn before
    for turn in trajectory.turns:
        if row_index < 0 or turn.prompt_ids[: len(previous_ids)] != previous_ids:
            row_index += 1
        previous_ids = turn.prompt_ids + turn.completion.token_ids
        spans.append(Span(row_index, len(turn.prompt_ids), len(previous_ids)))
    return spans


def find_mismatched_samples(samples: Sequence[Sample]) -> list[Sample]:
    """Pair each prompt with the answer to another prompt, as KTO's KL baseline needs it. Answers are shifted by the
    episode count of the most frequent prompt. Rows longer than every sample are left out, because they may not fit."""
    first_rows: dict[int, Sample] = {}
    for sample in samples:
        if any(sample.loss_mask):
            first_rows.setdefault(sample.episode, sample)
    rows_by_prompt: dict[tuple[int, ...], list[Sample]] = {}
    for row in first_rows.values():
        rows_by_prompt.setdefault(tuple(row.token_ids[: row.loss_mask.index(True)]), []).append(row)
    candidates = [(prompt, row) for prompt, group in rows_by_prompt.items() for row in group]
    shift = max((len(group) for group in rows_by_prompt.values()), default=0)
    max_length = max((len(sample.token_ids) for sample in samples), default=0)
    mismatched_rows = []
    for index, (prompt, _) in enumerate(candidates):
        other_prompt, answer_row = candidates[index - shift]
        if other_prompt == prompt or len(prompt) + len(answer_row.token_ids) - len(other_prompt) > max_length:
            continue
        token_ids = [*prompt, *answer_row.token_ids[len(other_prompt) :]]
        loss_mask = [False] * len(prompt) + answer_row.loss_mask[len(other_prompt) :]
        zeros = [0.0] * len(token_ids)
        mismatched_rows.append(Sample(token_ids, loss_mask, zeros, zeros, zeros, [0] * len(token_ids)))
    return mismatched_rows
