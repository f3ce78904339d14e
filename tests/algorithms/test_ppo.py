"""PPO's credit and loss against plain float64 computations from the formulas, and who learns what from them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.kits.engine import tiny
from tests.kits.learner import samples_of
from tests.kits.ppo import make, plain, played, prepared, summed_gae
from TrainingFactory.algorithms.ppo import PPO
from TrainingFactory.algorithms.trained_tokens import TrainedTokens
from TrainingFactory.data.packing import make_batch
from TrainingFactory.learning.heads import ScalarHead
from TrainingFactory.learning.learner import Learner
from TrainingFactory.learning.optim import OptimizerOptions
from TrainingFactory.learning.step import split_minibatches
from TrainingFactory.types import Completion, Message, Reward, Status, Task, Trajectory, Turn

# -- credit


@pytest.mark.parametrize(
    "options",
    [
        {"whiten": False, "gamma": 0.97, "lam": 0.9},
        {"whiten": True},
        {"whiten": True, "gamma": 0.99, "lam": 1.0, "kl": 0.3, "kl_in": "reward"},
        {"whiten": False, "lam": 0.0, "kl": 0.3},
    ],
)
def test_credit_is_the_formula(options: dict[str, Any]) -> None:
    """Over shared prefixes, tool spans, episodes of several rows, several packs and mini-batches."""
    ppo, learner, groups = PPO(**options), make(reference=True), played(5)
    episodes = [trajectory for group in groups for trajectory in group]
    learner.model.eval()
    facts = [plain(t, learner.model, learner.reference, learner.head) for t in episodes]  # pyright: ignore[reportArgumentType]
    wanted = []
    for fact in facts:
        drift = fact["old"] - fact["reference"]
        rewards = fact["rewards"] - (ppo.kl * drift if ppo.kl_in == "reward" else 0.0)
        wanted.append(summed_gae(rewards, fact["values"], ppo.gamma, ppo.lam))
    returns = [advantage + fact["values"] for advantage, fact in zip(wanted, facts, strict=True)]
    if ppo.whiten:
        every = np.concatenate(wanted)
        wanted = [(advantage - every.mean()) / every.std() for advantage in wanted]

    rows = samples_of(ppo, groups)
    assert len(rows) > len(episodes)  # some forgot
    numbers = list(dict.fromkeys(row.episode for row in rows))
    place = {number: index for index, number in enumerate(numbers)}
    parts = split_minibatches(rows, 2, seed=1)
    seen, packs = 0, 0
    for part, batch in zip(parts, prepared(learner, ppo, rows, 2, token_budget=300), strict=True):
        for pack in batch.packs:
            packs += 1
            for episode in range(len(pack.labels)):
                mine = np.flatnonzero(pack.episode == episode)
                mine = mine[np.argsort(pack.row[mine], kind="stable")]
                index = place[part[pack.row[mine[0]]].episode]
                assert pack.values is not None and pack.returns is not None
                np.testing.assert_allclose(pack.values[mine], facts[index]["values"], atol=1e-5)
                np.testing.assert_allclose(pack.advantages[mine], wanted[index], rtol=1e-5, atol=1e-5)
                np.testing.assert_allclose(pack.returns[mine], returns[index], rtol=1e-5, atol=1e-5)
                seen += 1
        spread = np.concatenate(returns).var()
        assert batch.baseline == pytest.approx(spread, rel=1e-4) and not batch.values_only
    assert seen == len(episodes) and packs > 3


def test_which_episodes_are_learned_from() -> None:
    def episode(reward: Reward | None, status: Status = "done") -> Trajectory:
        turn = Turn([1, 2], Completion([3, 4], [-1.0, -1.0], "stop"), Message("assistant"))
        return Trajectory(Task("t", "p"), "g", turns=[turn], status=status, reward=reward)

    none = Trajectory(Task("t", "p"), "g", status="truncated", reward=Reward(0.0))
    group = [episode(Reward(1.0)), episode(None), episode(Reward(0.25, [0.5]), "truncated"), none]
    assert [row.rewards for row in PPO().samples(group)] == [[0, 0, 0, 1.0], [0, 0, 0, 0.75]]
    assert [row.rewards for row in PPO(train_truncated=False).samples(group)] == [[0, 0, 0, 1.0]]
    assert PPO().samples(group[:1])[0].loss_mask == [False, False, True, True]  # one episode is enough


def test_equal_advantages_are_not_blown_up() -> None:
    turn = Turn([1, 2], Completion([3], [-1.0], "stop"), Message("assistant"))
    same = Trajectory(Task("t", "p"), "g", turns=[turn], reward=Reward(0.1))
    learner = Learner(tiny(), OptimizerOptions(), head=ScalarHead(32))
    (batch,) = prepared(learner, PPO(), PPO().samples([same, same, same]))
    assert np.abs(batch.packs[0].advantages).max() < 1e-6
    _, figures = PPO().loss(learner._compute_trained_tokens(batch.packs[0], batch, PPO().needs))
    assert "explained_variance" not in figures
    PPO().prepare([make_batch([])], 0)  # nothing to learn from is no error


# -- the loss


def random_tokens(seed: int, size: int = 60) -> TrainedTokens:
    generator = torch.Generator().manual_seed(seed)

    def normal() -> torch.Tensor:
        return torch.randn(size, generator=generator)

    zeros = torch.zeros(size)
    sampled = -2 + 0.5 * normal()
    old_values = normal()
    return TrainedTokens(
        (sampled + 0.3 * normal()).requires_grad_(), normal().abs().requires_grad_(), sampled, normal(), zeros,
        zeros.long(), zeros[:1], torch.zeros(0, 2), 100, 7, 0, reference_logprobs=sampled + 0.2 * normal(),
        old_values=old_values, values=(old_values + 0.3 * normal()).requires_grad_(), returns=old_values + normal(),
        baseline=1.7,
    )  # fmt: skip


@pytest.mark.parametrize("value_clip", [0.2, None])
@pytest.mark.parametrize("kl_in", ["loss", "reward"])
def test_the_loss_is_the_formula(value_clip: float | None, kl_in: Any) -> None:
    trained = random_tokens(2)
    ppo = PPO(clip=0.2, value_clip=value_clip, value_weight=0.7, kl=0.3, kl_in=kl_in, entropy=0.05)
    loss, figures = ppo.loss(trained)
    loss.backward()
    now, entropy, sampled, advantage, reference, old_values, values, returns = (
        part.detach().double().numpy()  # pyright: ignore[reportOptionalMemberAccess]
        for part in (trained.logprobs, trained.entropy, trained.sampled_logprobs, trained.advantages,
                     trained.reference_logprobs, trained.old_values, trained.values, trained.returns)
    )  # fmt: skip
    total = value_loss = kl = clipped = 0.0
    slopes, value_slopes = [], []
    for t in range(len(now)):
        ratio = np.exp(now[t] - sampled[t])
        bound = ratio > 1.2 if advantage[t] > 0 else ratio < 0.8
        total -= (np.clip(ratio, 0.8, 1.2) if bound else ratio) * advantage[t]
        clipped += bound
        gap = reference[t] - now[t]
        kl += np.exp(gap) - gap - 1
        slopes.append(
            (0 if bound else -ratio * advantage[t]) + (0.3 * (1 - np.exp(gap)) if kl_in == "loss" else 0)
        )
        move, error = values[t] - old_values[t], values[t] - returns[t]
        slope, worst = error, error**2
        if value_clip is not None and abs(move) > value_clip:
            near = old_values[t] + np.sign(move) * value_clip - returns[t]
            if near**2 > worst:
                slope, worst = 0.0, near**2
        value_loss += worst / 2
        value_slopes.append(0.7 * slope)
    explained = len(now) - ((returns - old_values) ** 2).sum() / 1.7
    total += 0.7 * value_loss - 0.05 * entropy.sum() + (0.3 * kl if kl_in == "loss" else 0)
    assert loss.item() == pytest.approx(total / 100, rel=1e-5)
    wanted = {"clip_fraction": clipped, "value_loss": value_loss, "explained_variance": explained, "kl": kl}
    wanted["logprob_diff"] = np.abs(now - sampled).sum()
    assert clipped and figures == pytest.approx({name: sum_ / 100 for name, sum_ in wanted.items()}, rel=1e-5)
    for tensor, slope in (
        (trained.logprobs, slopes),
        (trained.values, value_slopes),
        (trained.entropy, [-0.05] * 60),
    ):
        assert tensor is not None and tensor.grad is not None
        np.testing.assert_allclose(tensor.grad.numpy(), np.array(slope) / 100, rtol=1e-4, atol=1e-7)
    if value_clip is not None:
        assert 0 < sum(slope == 0 for slope in value_slopes) < 60
