"""Generalised advantage estimation (GAE) over sampled tokens.

    delta_t = r_t + gamma V_{t+1} - V_t
    A_t     = delta_t + gamma lam A_{t+1}

t counts sampled tokens only. Tool output belongs to the state of the next sampled token and is skipped: a turn's last
token is followed by the first token of the next turn. After an episode's last token, V and A are 0.
"""

from __future__ import annotations

import numpy as np


def compute_episode_gae(rewards: np.ndarray, values: np.ndarray, gamma: float, lam: float) -> np.ndarray:
    """Return the advantages of one episode's tokens, in order. [T], [T] -> [T], in float64"""
    values = values.astype(np.float64)
    deltas = rewards + gamma * np.append(values[1:], 0.0) - values
    advantages = np.zeros(len(deltas) + 1)
    for t in reversed(range(len(deltas))):
        advantages[t] = deltas[t] + gamma * lam * advantages[t + 1]
    return advantages[:-1]


def compute_gae(
    rewards: np.ndarray, values: np.ndarray, episodes: np.ndarray, rows: np.ndarray, gamma: float, lam: float
) -> np.ndarray:
    """Return the advantages of the tokens [M] of several episodes. `episodes` and `rows` [M] are the numbers of each
    token's episode and row; an episode's rows are numbered in chronological order."""
    advantages = np.zeros(len(rewards))
    row_order = np.lexsort((rows, episodes))  # stable
    episode_starts = np.flatnonzero(np.diff(episodes[row_order])) + 1
    for indices in np.split(row_order, episode_starts):
        advantages[indices] = compute_episode_gae(rewards[indices], values[indices], gamma, lam)
    return advantages
