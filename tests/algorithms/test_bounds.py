"""Losses far from where the tokens were sampled, and GSPO's credit by turn, against float64 from the formulas."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from TrainingFactory.algorithms.grpo import GRPO
from TrainingFactory.algorithms.policy_loss import estimate_kl
from TrainingFactory.algorithms.ppo import PPO
from TrainingFactory.algorithms.trained_tokens import TrainedTokens

GAPS = [-1000, -100, -20.5, -5, -0.4, -0.1, 0, 0.1, 0.5, 1.0, 1.2, 5, 19.5, 20.5, 100, 1000]


def tokens(gaps: Any, advantages: Any, episode: Any = None) -> TrainedTokens:
    """One token for each gap between the log-prob now and the sampler's, which is -1."""
    size = len(gaps)
    zeros = torch.zeros(size)
    owner = zeros.long() if episode is None else torch.tensor(episode)
    episodes = int(owner.max()) + 1
    return TrainedTokens(
        (torch.tensor(gaps, dtype=torch.float32) - 1).requires_grad_(), zeros, zeros - 1,
        torch.tensor(advantages, dtype=torch.float32), zeros, owner, torch.zeros(episodes), torch.zeros(0, 2),
        size, episodes, 0, values=zeros.clone().requires_grad_(), old_values=zeros, returns=zeros,
    )  # fmt: skip


def dual_clipped(gap: float, advantage: float, low: float, high: float, dual: float) -> tuple[float, float]:
    """Loss and slope of one token: log-ratios up to 20 either way, a negative advantage times `dual` at most."""
    inside = -20 <= gap <= 20
    ratio = math.exp(max(-20.0, min(20.0, gap)))
    most, least = (1 + high, 0.0) if advantage > 0 else (dual, 1 - low)
    held = min(max(ratio, least), most)
    return -held * advantage, -ratio * advantage if held == ratio and inside else 0.0


@pytest.mark.parametrize("advantage", [-2.0, 0.0, 1.5])
@pytest.mark.parametrize(
    ("algorithm", "low", "high", "dual"),
    [
        (GRPO(), 0.2, 0.28, 3.0),
        (GRPO(clip_dual=6.0), 0.2, 0.28, 6.0),
        (GRPO(clip_high=4.0), 0.2, 4.0, 3.0),  # the bound of negative advantages is none of positive ones
        (GRPO(clip_dual=None), 0.2, 0.28, math.inf),
        (PPO(), 0.2, 0.2, 3.0),
        (PPO(clip_dual=None), 0.2, 0.2, math.inf),
    ],
)
def test_gradients_are_bounded_however_far_a_token_moved(
    algorithm: Any, low: float, high: float, dual: float, advantage: float
) -> None:
    trained = tokens(GAPS, [advantage] * len(GAPS))
    loss, metrics = algorithm.loss(trained)
    (slope,) = torch.autograd.grad(loss, trained.logprobs)
    wanted = np.array([dual_clipped(gap, advantage, low, high, dual) for gap in GAPS]) / len(GAPS)
    assert loss.item() == pytest.approx(wanted[:, 0].sum(), rel=1e-4)
    np.testing.assert_allclose(slope.numpy(), wanted[:, 1], rtol=1e-4, atol=1e-9)
    if dual == 3.0:
        assert np.abs(slope.numpy()).max() <= 3 * abs(advantage) / len(GAPS) or high > 3
    ratios = np.exp(np.clip(GAPS, -20, 20))
    stopped = ratios > 1 + high if advantage > 0 else (ratios < 1 - low) | (ratios > dual)
    assert metrics["clip_fraction"] == pytest.approx(stopped.mean() if advantage else 0.0)


@pytest.mark.parametrize("options", [{"ratio": "sequence"}, {"loss_kind": "cispo", "clip_high": 4.0}])
@pytest.mark.parametrize("gap", [25.0, 1000.0, -1000.0])
@pytest.mark.parametrize("advantage", [-2.0, 1.0])
def test_the_relatives_stay_finite_as_well(options: Any, gap: float, advantage: float) -> None:
    trained = tokens([gap, gap], [advantage] * 2)
    (slope,) = torch.autograd.grad(GRPO(**options).loss(trained)[0], trained.logprobs)
    assert slope.abs().max() <= 5 * abs(advantage)


def test_k3_is_held_at_10() -> None:
    gaps = [-1000.0, -100.0, -21.0, -3.0, -2.6, -1.0, 0.0, 1.0, 10.0, 12.0, 25.0, 1000.0]
    now = torch.tensor(gaps, requires_grad=True)
    values = estimate_kl(now, torch.zeros(len(gaps)), "k3")
    (slope,) = torch.autograd.grad(values.sum(), now)
    plain = [math.exp(-max(gap, -20.0)) + min(gap, 20.0) - 1 for gap in gaps]
    wanted = [0.0 if value > 10 else 1 - math.exp(-gap) for gap, value in zip(gaps, plain, strict=True)]
    assert values.tolist() == pytest.approx([min(value, 10.0) for value in plain], rel=1e-5, abs=1e-6)
    assert slope.tolist() == pytest.approx(wanted, rel=1e-5, abs=1e-6)
    assert wanted[4] < -10 and wanted[3] == 0 == wanted[9]  # on either side of the bound


@pytest.mark.parametrize("normalization", ["sequence", "token"])
def test_gspo_credits_every_token_with_its_own_advantage(normalization: Any) -> None:
    """The ratio is the episode's; the gradient of a token has its own advantage, not the episode's mean."""
    rng = np.random.default_rng(0)
    episode = np.array([0] * 10 + [1] * 4 + [2] * 6)
    gaps, advantages = 0.1 * rng.standard_normal(20), rng.standard_normal(20)
    advantages[0], advantages[1:10] = 5.0, 0.0  # a call of one token, then an answer of nine
    trained = tokens(gaps, advantages, episode)
    algorithm = GRPO(ratio="sequence", normalization=normalization, clip_low=0.05, clip_high=0.02)
    loss, _ = algorithm.loss(trained)
    (slope,) = torch.autograd.grad(loss, trained.logprobs)
    total, wanted = 0.0, np.zeros(20)
    for number in range(3):
        mine = np.flatnonzero(episode == number)
        ratio = math.exp(gaps[mine].mean())
        share = 1 / (3 * len(mine)) if normalization == "sequence" else 1 / 20
        for token in mine:
            value, wanted[token] = dual_clipped(math.log(ratio), float(advantages[token]), 0.05, 0.02, 3.0)
            total += share * value
            wanted[token] *= share
    assert loss.item() == pytest.approx(total, rel=1e-5)
    np.testing.assert_allclose(slope.numpy(), wanted, rtol=1e-5, atol=1e-8)
    assert abs(wanted[0]) > 0.1 and not wanted[1:10].any()
