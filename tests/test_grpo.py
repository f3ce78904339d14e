"""GRPO's credit and loss against computations written down from the formula."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch

from tests.engine_kit import tiny
from tests.learner_kit import (
    far,
    gradients,
    make_learner,
    ragged_rows,
    row_gradients,
    row_logprobs,
    trained_values,
    weights_of,
)
from TrainingFactory.algorithms.grpo import GRPO
from TrainingFactory.algorithms.trained import Trained
from TrainingFactory.data.packing import make_batch
from TrainingFactory.types import Completion, Message, Reward, Sample, Status, Task, Trajectory, Turn


def played(reward: Reward | None, status: Status = "done", turns: int = 2) -> Trajectory:
    prompt, record = [1, 2, 3], []
    for number in range(turns):
        completion = Completion([10 + number, 20], [-0.5, -0.25], "stop")
        record.append(Turn(list(prompt), completion, Message("assistant")))
        prompt = prompt + completion.token_ids + [7]
    return Trajectory(Task("t", "p"), "g", turns=record, status=status, reward=reward)


def group_of(*outcomes: float | None) -> list[Trajectory]:
    return [played(None if outcome is None else Reward(outcome)) for outcome in outcomes]


def advantages(rows: list[Sample]) -> list[float]:
    """One per row, after a look that it stands on every sampled token and nowhere else."""
    for row in rows:
        assert {
            bool(value) for value, trained in zip(row.advantages, row.loss_mask, strict=True) if not trained
        } <= {False}
        assert len(set(trained_values(row, "advantages").tolist())) == 1
    return [float(trained_values(row, "advantages")[0]) for row in rows]


def test_credit_is_the_distance_from_the_mean() -> None:
    rows = GRPO(scale_rewards=False).samples(group_of(1.0, 0.0, 0.0, 0.5))
    assert advantages(rows) == [0.625, -0.375, -0.375, 0.125]
    assert rows[0].token_ids == [1, 2, 3, 10, 20, 7, 11, 20]
    assert rows[0].loss_mask == [False] * 3 + [True] * 2 + [False] + [True] * 2


def test_credit_in_units_of_the_deviation() -> None:
    # mean 3, squared distances 4 0 4: deviation sqrt(8/3)
    rows = GRPO(scale_rewards=True).samples(group_of(1.0, 3.0, 5.0))
    assert advantages(rows) == pytest.approx([-2 / math.sqrt(8 / 3), 0.0, 2 / math.sqrt(8 / 3)])


def test_step_rewards_count_and_unscored_episodes_do_not() -> None:
    group = [played(Reward(1.0, [0.5, 0.5])), played(None), played(Reward(0.0, [0.0, 1.0]))]
    rows = GRPO(scale_rewards=False).samples(group)
    assert advantages(rows) == [0.5, -0.5]


@pytest.mark.parametrize("outcomes", [(1.0, 1.0, 1.0), (0.1 + 0.2, 0.3), (0.0, 0.0), (1.0,), (1.0, None), ()])
def test_groups_that_teach_nothing_give_no_rows(outcomes: tuple[float | None, ...]) -> None:
    assert GRPO().samples(group_of(*outcomes)) == []


def test_a_step_of_equal_rewards_leaves_the_weights() -> None:
    model: Any = tiny()
    learner, before, algorithm = make_learner(model), weights_of(model), GRPO()
    rows = [row for _ in range(3) for row in algorithm.samples(group_of(1.0, 1.0))]
    learner.update(make_batch(rows), algorithm.loss)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_truncated_episodes_are_an_option() -> None:
    group = [played(Reward(1.0)), played(Reward(0.0), "truncated"), played(Reward(0.5), "max_turns")]
    assert advantages(GRPO(scale_rewards=False).samples(group)) == [0.5, -0.5, 0.0]
    # left out of training, and still part of the baseline
    kept = GRPO(scale_rewards=False, train_truncated=False).samples(group)
    assert advantages(kept) == [0.5, 0.0]


def test_options_are_checked() -> None:
    for wrong in ({"clip_low": 0.0}, {"clip_low": 1.0}, {"clip_high": 0.0}, {"kl": -0.1}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            GRPO(**wrong)
    assert GRPO().needs == frozenset() and GRPO(kl=0.1).needs == {"reference"}


def by_hand(now: float, sampled: float, advantage: float, low: float, high: float) -> float:
    ratio = math.exp(now - sampled)
    if advantage >= 0:
        return min(ratio, 1 + high) * advantage
    return max(ratio, 1 - low) * advantage


def trained_tokens(seed: int, size: int = 40) -> Trained:
    generator = torch.Generator().manual_seed(seed)
    now, sampled, reference = (-torch.rand(3, size, generator=generator) * 2).unbind()
    advantage = torch.randn(size, generator=generator)
    zeros = torch.zeros(size)
    return Trained(
        now.clone().requires_grad_(), zeros, sampled, advantage, zeros, zeros, zeros.long(), zeros[:1],
        torch.zeros(0, 2), 100, 7, 7, 0, reference,
    )  # fmt: skip


@pytest.mark.parametrize(("low", "high"), [(0.2, 0.2), (0.2, 0.5)])
@pytest.mark.parametrize("kl", [0.0, 0.3])
def test_the_loss_is_the_formula(low: float, high: float, kl: float) -> None:
    trained = trained_tokens(1)
    assert trained.reference is not None
    loss, figures = GRPO(clip_low=low, clip_high=high, kl=kl).loss(trained)
    now, sampled, advantage, reference = (
        part.tolist() for part in (trained.logprobs, trained.sampled, trained.advantages, trained.reference)
    )
    gains = [by_hand(n, s, a, low, high) for n, s, a in zip(now, sampled, advantage, strict=True)]
    drift = [math.exp(r - n) - (r - n) - 1 for n, r in zip(now, reference, strict=True)]
    assert loss.item() == pytest.approx((-sum(gains) + kl * sum(drift)) / 100, rel=1e-5)
    ratios = [math.exp(n - s) for n, s in zip(now, sampled, strict=True)]
    bound = [r > 1 + high if a > 0 else r < 1 - low for r, a in zip(ratios, advantage, strict=True)]
    assert any(bound) and figures["clipped"] == pytest.approx(sum(bound) / 100)
    assert figures["sampler_gap"] == pytest.approx(
        sum(abs(n - s) for n, s in zip(now, sampled, strict=True)) / 100, rel=1e-5
    )
    if kl:
        assert figures["kl"] == pytest.approx(sum(drift) / 100, rel=1e-5)
    # the gradient: -A w / n where the clip does not bind, nothing where it does, and the drift's own
    loss.backward()
    wanted = [
        (0.0 if stopped else -a * r) / 100 + kl * (1 - math.exp(ref - n)) / 100
        for stopped, a, r, ref, n in zip(bound, advantage, ratios, reference, now, strict=True)
    ]
    assert trained.logprobs.grad is not None
    assert trained.logprobs.grad.tolist() == pytest.approx(wanted, rel=1e-4, abs=1e-8)


def test_clip_higher_lets_unlikely_tokens_grow_further() -> None:
    now = torch.tensor([math.log(1.25)], requires_grad=True)
    one, zero = torch.ones(1), torch.zeros(1)
    pairs = torch.zeros(0, 2)
    trained = Trained(now, zero, zero, one, zero, zero, zero.long(), zero[:1], pairs, 1, 1, 1, 0)
    for high, slope in ((0.2, 0.0), (0.28, -1.25)):
        loss, _ = GRPO(clip_high=high).loss(trained)
        (gradient,) = torch.autograd.grad(loss, now)
        assert float(gradient) == pytest.approx(slope)


def test_gradients_through_the_learner_equal_plain_rows() -> None:
    """The whole way: shared prefixes, several packs, clipping, against one row at a time."""
    model: Any = tiny()
    model.eval()
    rows, rng = [], random.Random(0)
    for row in ragged_rows(4)[:12]:  # sampled log-probs near the model's own, so that some are clipped
        own = iter(row_logprobs(model, row).tolist())
        row.logprobs = [next(own) + rng.gauss(0, 0.3) if m else 0.0 for m in row.loss_mask]
        rows.append(row)

    def part(logprobs: torch.Tensor, row: Sample) -> torch.Tensor:
        ratio = (logprobs - trained_values(row, "logprobs")).exp()
        total = torch.zeros(())
        for r, a in zip(ratio, trained_values(row, "advantages").tolist(), strict=True):
            limit = 1.28 if a > 0 else 0.8
            total = total - (r if (r < limit) == (a > 0) else torch.tensor(limit)) * a
        return total

    wanted = row_gradients(model, rows, part)
    found = gradients(make_learner(model), make_batch(rows, 300), GRPO().loss)
    assert far(found, wanted) < 1e-5
