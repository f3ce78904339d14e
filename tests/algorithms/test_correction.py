"""Weights for what the learner did not sample itself: against plain computations, and what they are good for."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from tests.kits.algorithm import batch_for, groups_of, learner_for
from tests.kits.learner import row_logprobs, samples_of, trained_values
from TrainingFactory.algorithms.correction import Correction, compute_importance_weights
from TrainingFactory.algorithms.grpo import GRPO
from TrainingFactory.algorithms.ppo import PPO
from TrainingFactory.algorithms.rft import RFT
from TrainingFactory.algorithms.trained_tokens import TrainedTokens
from TrainingFactory.learning.learner import Learner
from TrainingFactory.learning.step import StepOptions, train_step
from TrainingFactory.types import Sample

CORRECTIONS = {
    "token": Correction(cap=1.2),
    "token, masked": Correction(cap=1.2, mask=(0.8, 1.4)),
    "sequence": Correction(cap=1.5, level="sequence"),
    "sequence, masked": Correction(cap=1.5, level="sequence", mask=(0.4, 4.0)),
}


def plain_weights(ratios: np.ndarray, correction: Correction) -> np.ndarray:
    low, high = correction.mask or (-1.0, np.inf)
    return np.array([min(ratio, correction.cap) if low <= ratio <= high else 0.0 for ratio in ratios])


@cache
def played() -> tuple[Learner, list[Sample], list[np.ndarray]]:
    """Rows, and of each the gaps old - sampled, by the model's own attention."""
    learner, rows = learner_for(GRPO()), samples_of(GRPO(), groups_of())
    learner.model.eval()
    with torch.no_grad():
        gaps = [row_logprobs(learner.model, row) - trained_values(row, "logprobs") for row in rows]
    return learner, rows, [gap.double().numpy() for gap in gaps]


@pytest.mark.parametrize("budget", [1, 16_384])
@pytest.mark.parametrize("name", CORRECTIONS)
def test_the_weights_are_the_formula(name: str, budget: int) -> None:
    """Whatever is packed with what; episodes may have several rows."""
    correction = CORRECTIONS[name]
    algorithm, (learner, rows, gaps) = GRPO(correction=correction), played()
    whole = {row.episode: 0.0 for row in rows}
    for row, gap in zip(rows, gaps, strict=True):
        whole[row.episode] += gap.sum()
    assert len(whole) < len(rows)
    if correction.level == "sequence":
        gaps = [np.full(len(gap), whole[row.episode]) for row, gap in zip(rows, gaps, strict=True)]
    wanted = [plain_weights(np.exp(gap), correction) for gap in gaps]
    batch = batch_for(learner, algorithm, rows, budget)
    assert (len(batch.packs) == 1) == (budget == 16_384)
    sums = dict.fromkeys(("importance_weight", "importance_masked", "importance_capped"), 0.0)
    for pack in batch.packs:
        before, weight, metrics = compute_importance_weights(
            learner._compute_trained_tokens(pack, batch, algorithm.needs), correction
        )
        assert isinstance(weight, torch.Tensor) and not weight.requires_grad and not before.requires_grad
        for number in pack.rows:
            np.testing.assert_allclose(weight[pack.row == number], wanted[number], rtol=1e-4, err_msg=name)
        sums = {key: value + metrics[key] for key, value in sums.items()}
    every, ratios = np.concatenate(wanted), np.exp(np.concatenate(gaps))
    shares = [every.mean(), (every == 0).mean(), (every == correction.cap).mean()]
    assert list(sums.values()) == pytest.approx(shares, rel=1e-4)
    assert shares[2] and (shares[1] > 0) == (correction.mask is not None) and (ratios < 1).any()


def tokens(seed: int, size: int = 60) -> TrainedTokens:
    """Of 6 episodes, with all that the three losses ask for."""
    generator = torch.Generator().manual_seed(seed)

    def near(middle: Any, width: float) -> torch.Tensor:
        return middle + width * torch.randn(size, generator=generator)

    sampled, zeros = near(-2.0, 0.5), torch.zeros(size)
    old = near(sampled, 0.2)
    values = near(0.0, 1.0)
    return TrainedTokens(
        near(old, 0.2).requires_grad_(), zeros, sampled, near(0.0, 1.0), zeros, torch.arange(size) // 10, zeros[:6],
        torch.zeros(0, 2), 100, 7, 0, old_logprobs=old, values=values.requires_grad_(), old_values=values.detach(),
        returns=near(values.detach(), 1.0), reference_logprobs=near(old, 0.2),
    )  # fmt: skip


ALGORITHMS: dict[str, Any] = {
    "grpo": GRPO(kl=0.1),
    "cispo": GRPO(loss_kind="cispo"),
    "gspo": GRPO(ratio="sequence", normalization="sequence"),
    "ppo": PPO(kl=0.1),
    "rft": RFT(),
}


@pytest.mark.parametrize("correction", CORRECTIONS.values(), ids=CORRECTIONS)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_where_the_learner_sampled_nothing_changes(name: str, correction: Correction) -> None:
    """To the last bit, in the loss and in its gradient."""
    trained = tokens(3)
    trained.old_logprobs = trained.sampled_logprobs
    found = []
    for algorithm in (ALGORITHMS[name], replace(ALGORITHMS[name], correction=correction)):
        loss, metrics = algorithm.loss(trained)
        assert metrics.get("importance_weight", 0.6) == pytest.approx(0.6)  # 60 of the step's 100 tokens
        found.append((loss.detach(), torch.autograd.grad(loss, trained.logprobs)[0]))
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])


@pytest.mark.parametrize("correction", CORRECTIONS.values(), ids=CORRECTIONS)
def test_ppo_by_hand(correction: Correction) -> None:
    """Token by token: the ratio goes by `old`, the weight falls on the policy's term alone, N counts what is masked."""
    trained = tokens(4)
    ppo = PPO(clip=0.1, clip_dual=None, value_clip=None, value_weight=0.7, correction=correction)
    loss, metrics = ppo.loss(trained)
    assert trained.old_logprobs is not None and trained.values is not None and trained.returns is not None
    slopes, value_slopes = torch.autograd.grad(loss, [trained.logprobs, trained.values])
    now, old, sampled, advantage, values, returns = (
        part.detach().double().numpy()
        for part in (trained.logprobs, trained.old_logprobs, trained.sampled_logprobs, trained.advantages,
                     trained.values, trained.returns)
    )  # fmt: skip
    total, wanted = 0.0, []
    for t in range(60):
        episode = (
            slice(t // 10 * 10, t // 10 * 10 + 10) if correction.level == "sequence" else slice(t, t + 1)
        )
        [weight] = plain_weights(np.exp([(old - sampled)[episode].sum()]), correction)
        ratio = np.exp(now[t] - old[t])
        bound = ratio > 1.1 if advantage[t] > 0 else ratio < 0.9
        total += -weight * (np.clip(ratio, 0.9, 1.1) if bound else ratio) * advantage[t]
        total += 0.7 * (values[t] - returns[t]) ** 2 / 2
        wanted.append(0.0 if bound else -weight * ratio * advantage[t])
    assert loss.item() == pytest.approx(total / 100, rel=1e-5)
    np.testing.assert_allclose(slopes, np.array(wanted) / 100, rtol=1e-4, atol=1e-8)
    np.testing.assert_allclose(value_slopes, 0.7 * (values - returns) / 100, rtol=1e-4, atol=1e-8)
    assert metrics["logprob_diff"] == pytest.approx(np.abs(now - sampled).sum() / 100, rel=1e-5)


# -- bias: all episodes of three tokens over three words, of which every prefix has logits of its own

WORDS, LENGTH = 3, 3


def listed() -> tuple[list[tuple[int, ...]], dict[tuple[int, ...], int]]:
    episodes = list(product(range(WORDS), repeat=LENGTH))
    prefixes = [prefix for size in range(LENGTH) for prefix in product(range(WORDS), repeat=size)]
    return episodes, {prefix: number for number, prefix in enumerate(prefixes)}


def logprobs(logits: torch.Tensor) -> torch.Tensor:
    """Of every token of every episode. [27, 3]"""
    episodes, place = listed()
    every = torch.log_softmax(logits, -1)
    return torch.stack([torch.stack([every[place[e[:t]], e[t]] for t in range(LENGTH)]) for e in episodes])


def mean_gradient(
    algorithm: Any, logits: torch.Tensor, sampler: torch.Tensor, rewards: torch.Tensor
) -> torch.Tensor:
    """The mean of the algorithm's gradient over all that the sampler can play. Every loss here is proportional to the
    advantage, so each episode stands there once, with its chance in the advantage."""
    logits = logits.clone().requires_grad_()
    now, sampled = logprobs(logits), logprobs(sampler)
    chances = sampled.sum(1).exp()
    number = torch.arange(len(now)).repeat_interleave(LENGTH)
    flat, zeros = now.flatten(), torch.zeros(now.numel(), dtype=torch.double)
    trained = TrainedTokens(
        flat, zeros, sampled.flatten(), (chances * rewards)[number], zeros, number, torch.zeros(len(now)),
        torch.zeros(0, 2), 1, 1, 0, old_logprobs=flat.detach(), values=zeros, old_values=zeros, returns=zeros,
    )  # fmt: skip
    return -torch.autograd.grad(algorithm.loss(trained)[0], logits)[0]


@pytest.mark.parametrize("name", ["grpo", "cispo", "ppo", "rft"])
def test_the_mean_gradient_is_nearer_the_right_one(name: str) -> None:
    """Of the mean reward under the model itself; another one samples. With the product over the episode and no cap it
    is exact. Without weights GRPO and PPO lose the tokens beyond their bounds, and RFT learns the sampler."""
    generator = torch.Generator().manual_seed(11)
    size = (len(listed()[1]), WORDS)
    logits = torch.randn(size, generator=generator, dtype=torch.double)
    sampler = logits + 0.3 * torch.randn(size, generator=generator, dtype=torch.double)
    rewards = torch.randn(WORDS**LENGTH, generator=generator, dtype=torch.double)
    rewards = rewards.abs() if name == "rft" else rewards
    algorithm = replace(ALGORITHMS[name], **({"kl": 0.0} if name in ("grpo", "ppo") else {}))
    own = logits.clone().requires_grad_()
    [exact] = torch.autograd.grad((logprobs(own).sum(1).exp() * rewards).sum(), own)

    def off(correction: Correction | None) -> float:
        found = mean_gradient(replace(algorithm, correction=correction), logits, sampler, rewards)
        return float((found - exact).norm() / exact.norm())

    plain, token, capped = off(None), off(Correction()), off(Correction(level="sequence"))
    print(f"\n{name}: off by {plain:.3f} without weights, {token:.3f} by token, {capped:.3f} by sequence")
    assert off(Correction(cap=1e6, level="sequence")) < 1e-9
    assert capped < 0.5 * token and token < (plain if name != "cispo" else 1.01 * plain)


# -- what a step measures


def test_mismatch_and_staleness_are_told_apart() -> None:
    """By the version of each token; mini-batches and packs do not matter."""
    algorithm = GRPO(correction=Correction())
    learner, rows = learner_for(algorithm), samples_of(algorithm, groups_of())
    learner.model.eval()
    fresh, stale = list[float](), list[float]()
    for number, row in enumerate(rows):
        row.policy_version = [6 + (place + number) % 2 for place in range(len(row.token_ids))]
        with torch.no_grad():
            gaps = (row_logprobs(learner.model, row) - trained_values(row, "logprobs")).abs().tolist()
        for gap, version in zip(gaps, trained_values(row, "policy_version").tolist(), strict=True):
            (fresh if version == 7 else stale).append(gap)
    found = train_step(learner, algorithm, rows, 7, StepOptions(120, epochs=2, minibatches=2))
    assert found["mismatch"] == pytest.approx(np.mean(fresh), rel=1e-4)
    assert found["mismatch_max"] == pytest.approx(max(fresh), rel=1e-4)
    assert found["staleness_gap"] == pytest.approx(np.mean(stale), rel=1e-4)
    assert "mismatch" not in train_step(learner, algorithm, rows, 8, StepOptions())
    assert not {"mismatch", "staleness_gap"} & train_step(learner, GRPO(), rows, 7, StepOptions()).keys()
    assert "mismatch" not in train_step(learner, algorithm, [], 7, StepOptions())


def test_a_token_that_older_updates_have_moved_to_the_clip_counts_no_more() -> None:
    """On the side of its advantage alone, and only where that is asked for."""
    trained = tokens(6)
    trained.sampled_logprobs = torch.full((60,), -2.0)
    trained.old_logprobs = trained.sampled_logprobs + torch.tensor([0.5, 0.5, -0.5, -0.5, 0.1, -0.1]).repeat(
        10
    )
    trained.advantages = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0, -1.0]).repeat(10)
    counts = torch.tensor([False, True, True, False, True, True]).repeat(10)
    for algorithm in (GRPO(clip_low=0.2, clip_high=0.28), PPO(clip=0.2)):
        found = []
        for anchored in (False, True):
            loss, metrics = replace(algorithm, correction=Correction(anchored=anchored)).loss(trained)
            found.append(torch.autograd.grad(loss, trained.logprobs)[0])
            assert metrics["importance_moved"] == pytest.approx(0.2 * anchored)  # 20 of the step's 100 tokens
        assert torch.equal(found[1], found[0] * counts) and not torch.equal(*found)
    loss, metrics = RFT(correction=Correction(anchored=True)).loss(trained)  # has no clip
    assert metrics["importance_moved"] == 0


def test_with_a_ratio_of_whole_episodes_their_drift_counts() -> None:
    """Noise of single tokens is far beyond bounds that are made for the mean over an episode."""
    trained = tokens(7)
    trained.old_logprobs = trained.sampled_logprobs + 0.01 * torch.tensor([1.0, -1.0]).repeat(30)
    gspo = GRPO(ratio="sequence", clip_low=3e-4, clip_high=4e-4, correction=Correction(anchored=True))
    assert gspo.loss(trained)[1]["importance_moved"] == 0
    trained.old_logprobs = trained.sampled_logprobs + 0.01 * torch.arange(60).ge(
        30
    )  # the last three episodes
    share = float((trained.advantages[30:] > 0).sum()) / trained.step_tokens
    assert gspo.loss(trained)[1]["importance_moved"] == pytest.approx(share) and share > 0
