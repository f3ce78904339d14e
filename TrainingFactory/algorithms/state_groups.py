"""State groups: a second baseline, for environments that name their states. Turns of a task's episodes that begin in
the same state are compared with each other:

    S[i, t] = V[i, t] - mean of V[j, u] over the task's turns (j, u) whose state is that of (i, t)

V is the return from the turn on. The mean is over all turns of the state, or with `excludes_own_tree` over those of
other episodes, which do not depend on the turn's action. S is 0 for a mean over no turn, or a turn without a state.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from TrainingFactory.algorithms.advantages import REWARD_TOLERANCE
from TrainingFactory.types import Trajectory


def compute_state_advantages(
    episodes: Sequence[Trajectory],
    values: np.ndarray,
    weights: np.ndarray,
    roots: Sequence[int],
    excludes_own_tree: bool,
) -> np.ndarray:
    """Return S [n, T] for the values [n, T] of turns. `weights` [n, T] are the weights of the turns in the means. A
    turn that several episodes of a tree share has weight 0 in all but one of them. `roots` [n] are equal for the
    episodes of one tree."""
    state_advantages = np.zeros(values.shape)
    turns_by_state: dict[str, list[tuple[int, int]]] = {}
    for member, episode in enumerate(episodes):
        for turn_index, turn in enumerate(episode.turns):
            if turn.state is not None and weights[member, turn_index]:
                turns_by_state.setdefault(turn.state, []).append((member, turn_index))
    tree_ids = np.asarray(roots)
    for turn_positions in turns_by_state.values():
        members, turn_indices = (np.array(indices) for indices in zip(*turn_positions, strict=True))
        state_values, state_weights = values[members, turn_indices], weights[members, turn_indices]
        pair_mask = np.ones((len(members), len(members)))
        if excludes_own_tree:
            pair_mask = (tree_ids[members][:, None] != tree_ids[members]).astype(float)
        total_weights = pair_mask @ state_weights
        mean = pair_mask @ (state_weights * state_values) / np.where(total_weights > 0, total_weights, 1.0)
        state_advantages[members, turn_indices] = np.where(total_weights > 0, state_values - mean, 0.0)
    state_advantages[np.abs(state_advantages) <= REWARD_TOLERANCE * np.abs(values).max(initial=0.0)] = 0.0
    return state_advantages
