"""From a trajectory to training rows. The only place that builds a loss mask."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from TrainingFactory.types import Sample, Trajectory, Turn

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
    """The turns merged into one row; another row starts only where a prompt does not continue the row so far.

    With prompt P, sampled turns A0 and A1 and the environment's tokens E0 between them:

        token_ids  P + A0 + E0 + A1
        loss_mask  0...  1...  0...  1...

    `advantages` and `rewards` have one entry per turn, zeros if not given. A turn's advantage stands on all
    its sampled tokens, its reward on the last of them. `turns="last"` trains the last turn alone, and
    `tokens="last"` the last token of each turn. `pair` and `label` are those of the rows.
    """
    count = len(trajectory.turns)
    advantages = [0.0] * count if advantages is None else advantages
    rewards = [0.0] * count if rewards is None else rewards
    if not len(advantages) == len(rewards) == count:
        raise ValueError(f"{count} turns, {len(advantages)} advantages, {len(rewards)} rewards: one per turn")
    rows: list[Sample] = []
    for number, turn in enumerate(trajectory.turns):
        written = len(rows[-1].token_ids) if rows else 0
        if not rows or turn.prompt_ids[:written] != rows[-1].token_ids:
            rows.append(_empty_row(rows, pair, label))
            written = 0
        new = len(turn.completion.token_ids)
        assert new, "a turn has sampled at least one token"
        trained = [turns == "all" or number == count - 1] * new
        if tokens == "last":
            trained[:-1] = [False] * (new - 1)
        _append(rows[-1], turn.prompt_ids[written:], turn, trained, advantages[number], rewards[number])
    return rows


def _empty_row(rows: list[Sample], pair: int, label: float) -> Sample:
    row = Sample([], [], [], [], [], [], pair=pair, label=label)
    if rows:
        row.episode, row.pair = rows[0].episode, rows[0].pair
    return row


def _append(
    row: Sample, context: list[int], turn: Turn, trained: list[bool], advantage: float, reward: float
) -> None:
    """The tokens the turn saw and the row does not have yet, then the tokens it sampled."""
    sampled = turn.completion
    known, new = len(context), len(sampled.token_ids)
    row.token_ids += context + sampled.token_ids
    row.loss_mask += [False] * known + trained
    row.logprobs += [0.0] * known + [
        value if used else 0.0 for value, used in zip(sampled.logprobs, trained, strict=True)
    ]
    row.advantages += [0.0] * known + [advantage if used else 0.0 for used in trained]
    row.rewards += [0.0] * (known + new - 1) + [reward]
    row.policy_version += [sampled.policy_version] * (known + new)
