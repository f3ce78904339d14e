"""Generalised advantage estimation over the tokens that the policy sampled.

    delta_t = r_t + gamma V_{t+1} - V_t
    A_t     = delta_t + gamma lam A_{t+1}

t counts sampled tokens only. What a tool wrote between two of them is part of the later one's state, so it is stepped
over: after a turn's last token comes the first token of the next turn. After the last token of all, V and A are 0.
"""

from __future__ import annotations

import numpy as np


def gae(rewards: np.ndarray, values: np.ndarray, gamma: float, lam: float) -> np.ndarray:
    """Return the advantages of one episode's tokens, in order. [T], [T] -> [T], in float64"""
    expected = values.astype(np.float64)
    deltas = rewards + gamma * np.append(expected[1:], 0.0) - expected
    advantages, later = np.empty(len(deltas)), 0.0
    for place in range(len(deltas) - 1, -1, -1):
        later = advantages[place] = deltas[place] + gamma * lam * later
    return advantages


def gae_of_episodes(
    rewards: np.ndarray, values: np.ndarray, episode: np.ndarray, row: np.ndarray, gamma: float, lam: float
) -> np.ndarray:
    """Do so for many episodes [M]; rows of an episode are numbered in the order they were played."""
    advantages = np.zeros(len(rewards))
    order = np.lexsort((row, episode))  # stable
    borders = np.flatnonzero(np.diff(episode[order])) + 1
    for places in np.split(order, borders):
        advantages[places] = gae(rewards[places], values[places], gamma, lam)
    return advantages
