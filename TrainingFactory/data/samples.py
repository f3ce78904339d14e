"""From a trajectory to training rows. The only place that builds a loss mask."""

from __future__ import annotations

from collections.abc import Sequence

from TrainingFactory.types import Sample, Trajectory, Turn


def to_samples(
    trajectory: Trajectory, advantages: Sequence[float] | None = None, rewards: Sequence[float] | None = None
) -> list[Sample]:
    """The turns merged into one row; another row starts only where a prompt does not continue the row so far.

    With prompt P, sampled turns A0 and A1 and the environment's tokens E0 between them:

        token_ids  P + A0 + E0 + A1
        loss_mask  0...  1...  0...  1...

    `advantages` and `rewards` have one entry per turn, zeros if not given. A turn's advantage stands on all
    its sampled tokens, its reward on the last of them.
    """
    turns = trajectory.turns
    advantages = [0.0] * len(turns) if advantages is None else advantages
    rewards = [0.0] * len(turns) if rewards is None else rewards
    if not len(advantages) == len(rewards) == len(turns):
        raise ValueError(
            f"{len(turns)} turns, {len(advantages)} advantages, {len(rewards)} rewards: one per turn"
        )
    rows: list[Sample] = []
    for turn, advantage, reward in zip(turns, advantages, rewards, strict=True):
        written = len(rows[-1].token_ids) if rows else 0
        if not rows or turn.prompt_ids[:written] != rows[-1].token_ids:
            rows.append(Sample([], [], [], [], [], []))
            written = 0
        _append(rows[-1], turn.prompt_ids[written:], turn, advantage, reward)
    return rows


def _append(row: Sample, context: list[int], turn: Turn, advantage: float, reward: float) -> None:
    """The tokens the turn saw and the row does not have yet, then the tokens it sampled."""
    sampled = turn.completion
    known, new = len(context), len(sampled.token_ids)
    assert new, "a turn has sampled at least one token"
    row.token_ids += context + sampled.token_ids
    row.loss_mask += [False] * known + [True] * new
    row.logprobs += [0.0] * known + sampled.logprobs
    row.advantages += [0.0] * known + [advantage] * new
    row.rewards += [0.0] * (known + new - 1) + [reward]
    row.policy_version += [sampled.policy_version] * (known + new)
