"""GRPO's credit and loss against computations written down from the formula. Those against TRL are in
`test_grpo_trl.py`."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from tests.kits.learner import trained_values
from TrainingFactory.algorithms.grpo import GRPO
from TrainingFactory.algorithms.policy_loss import estimate_kl
from TrainingFactory.algorithms.trained_tokens import TrainedTokens
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


@pytest.mark.parametrize(
    ("options", "outcomes", "wanted"),
    [
        ({}, (1.0, 0.0, 0.0, 0.5), [0.625, -0.375, -0.375, 0.125]),
        # mean 4, squared distances 9 1 1 9: deviation sqrt(20/3)
        (
            {"scale_rewards": True},
            (1.0, 3.0, 5.0, 7.0),
            [each / math.sqrt(20 / 3) for each in (-3, -1, 1, 3)],
        ),
        ({"advantage": "rloo"}, (1.0, 0.0, 0.25, 0.5), [0.75, -1.75 / 3, -0.25, 0.25 / 3]),
    ],
)
def test_credit_is_the_distance_from_the_others(
    options: Any, outcomes: tuple[float, ...], wanted: list[float]
) -> None:
    rows = GRPO(**options).samples(group_of(*outcomes))
    assert advantages(rows) == pytest.approx(wanted)
    assert rows[0].token_ids == [1, 2, 3, 10, 20, 7, 11, 20]
    assert rows[0].loss_mask == [False] * 3 + [True] * 2 + [False] + [True] * 2


def test_step_rewards_count_and_unscored_episodes_do_not() -> None:
    group = [played(Reward(1.0, [0.5, 0.5])), played(None), played(Reward(0.0, [0.0, 1.0]))]
    assert advantages(GRPO(credit="trajectory").samples(group)) == [0.5, -0.5]


def by_turn(rows: list[Sample]) -> list[list[float]]:
    """The advantage of each turn: those of `played` have two tokens."""
    return [trained_values(row, "advantages")[::2].tolist() for row in rows]


def test_turns_are_credited_with_what_follows() -> None:
    """Three episodes of 3, 1 and 2 turns; a bonus is taken back on the last turn of the third. By hand: what a turn
    and those after it earned, less the mean of that over the other two, who earn no more after they stopped."""
    group = [
        played(Reward(1.0, [0.5, 0.0, 0.25]), turns=3),
        played(Reward(0.0, [0.5]), turns=1),
        played(Reward(0.0, [0.5, -0.5]), turns=2),
    ]
    found = by_turn(GRPO(advantage="rloo").samples(group))
    assert found[0] == pytest.approx([1.75 - (0.5 + 0.0) / 2, 1.25 - (0.0 - 0.5) / 2, 1.25 - (0.0 + 0.0) / 2])
    assert found[1] == pytest.approx([0.5 - (1.75 + 0.0) / 2])
    assert found[2] == pytest.approx([0.0 - (1.75 + 0.5) / 2, -0.5 - (1.25 + 0.0) / 2])
    # with the episode itself in the mean: the same, shorter by (n - 1) / n
    shorter = by_turn(GRPO(advantage="group").samples(group))
    assert [each for row in shorter for each in row] == pytest.approx(
        [each * 2 / 3 for row in found for each in row]
    )


def test_without_step_rewards_turns_and_episodes_get_the_same_credit() -> None:
    group = [played(Reward(float(turns % 2)), turns=turns) for turns in (1, 2, 3, 4)]
    assert by_turn(GRPO(credit="turn").samples(group)) == by_turn(GRPO(credit="trajectory").samples(group))


def test_equal_totals_can_still_teach_which_turn_was_good() -> None:
    group = [played(Reward(0.0, [1.0, 0.0])), played(Reward(0.0, [0.0, 1.0]))]
    assert by_turn(GRPO(credit="turn").samples(group)) == [[0.0, -0.5], [0.0, 0.5]]
    assert GRPO(credit="trajectory").samples(group) == []
    assert GRPO(credit="turn", scale_rewards=True).samples(group) == []  # no deviation to divide by


@pytest.mark.parametrize("advantage", ["reinforce_plus_plus", "reinforce_plus_plus_baseline"])
def test_reinforce_plus_plus_is_whitened_over_the_step(advantage: Any) -> None:
    """NumPy from the formula, over tokens of several mini-batches."""
    algorithm = GRPO(advantage=advantage)
    played_as = [[(1.0, 1), (0.0, 3), (0.5, 2)], [(3.0, 2), (0.0, 1)], [(0.2, 4), (0.0, 1), (0.0, 2)]]
    groups = [[played(Reward(value), turns=turns) for value, turns in group] for group in played_as]
    raw = []
    for group in played_as:
        mean = np.mean([value for value, _ in group]) if advantage.endswith("baseline") else 0.0
        raw += [np.full(2 * turns, value - mean) for value, turns in group]
    every = np.concatenate(raw)
    batches = [make_batch(algorithm.samples(group)) for group in groups]
    algorithm.prepare([*batches, make_batch([])], 0)
    found = np.concatenate([pack.advantages for batch in batches for pack in batch.packs])
    assert np.sort(found) == pytest.approx(np.sort((every - every.mean()) / every.std()), abs=1e-6)
    algorithm.prepare([make_batch([])], 0)  # a step without rows


def test_plain_reinforce_plus_plus_compares_with_the_whole_step() -> None:
    """So a group whose episodes all earned the same teaches, and one episode is a group."""
    algorithm = GRPO(advantage="reinforce_plus_plus")
    group = [played(Reward(0.5, [0.25, 0.0]))]
    assert by_turn(algorithm.samples(group)) == [[0.75, 0.5]]
    assert advantages(algorithm.samples(group_of(1.0, 1.0, None))) == [1.0, 1.0]
    assert advantages(algorithm.samples(group_of(0.0, 0.0))) == [0.0, 0.0]


def test_refill_can_judge_by_the_outcome_alone() -> None:
    """A group whose outcomes are equal is left out, whatever its steps and its lengths are worth."""
    steps = [played(Reward(1.0, [0.5, 0.0])), played(Reward(1.0, [0.0, 0.0]))]
    lengths = [played(Reward(1.0), turns=1), played(Reward(1.0), turns=4)]
    both: dict[str, Any] = {"overlong_length": 8, "overlong_buffer": 4}
    for group in (steps, lengths):
        assert len(GRPO(refill=2, **both).samples(group)) == 2
        assert GRPO(refill=2, refill_by="outcome", **both).samples(group) == []
    unequal = group_of(1.0, 0.0)
    assert GRPO(refill=2, refill_by="outcome").samples(unequal) == GRPO().samples(unequal)


def test_overlong_episodes_lose_reward() -> None:
    """`played` has 2 sampled tokens a turn; the penalty grows from 0 at 4 tokens to 0.5 at 8."""
    group = [played(Reward(1.0), turns=turns) for turns in (1, 2, 3, 4, 5)]
    rows = GRPO(overlong_length=8, overlong_buffer=4, overlong_penalty=0.5).samples(group)
    rewards = [1.0, 1.0, 0.75, 0.5, 0.5]
    assert advantages(rows) == pytest.approx([each - sum(rewards) / 5 for each in rewards])


@pytest.mark.parametrize("credit", ["trajectory", "turn"])
def test_rewards_that_cancel_are_zero_whatever_rounding_leaves(credit: Any) -> None:
    """0.1 + 0.2 - 0.3 is 6e-17: no reason to divide by it."""
    steps = [0.1, 0.2, -0.3]
    assert sum(steps) != 0
    group = [played(Reward(0.0, steps), turns=3), played(Reward(0.0), turns=1)]
    assert GRPO(credit=credit, scale_rewards=True).samples(group) == []
    assert bool(GRPO(credit=credit).samples(group)) == (credit == "turn")


@pytest.mark.parametrize("outcomes", [(1.0, 1.0, 1.0), (0.1 + 0.2, 0.3), (0.0, 0.0), (1.0,), (1.0, None), ()])
def test_groups_that_teach_nothing_give_no_rows(outcomes: tuple[float | None, ...]) -> None:
    assert GRPO().samples(group_of(*outcomes)) == []


def test_truncated_episodes_are_an_option() -> None:
    group = [played(Reward(1.0)), played(Reward(0.0), "truncated"), played(Reward(0.5), "max_turns")]
    assert advantages(GRPO(scale_rewards=False).samples(group)) == [0.5, -0.5, 0.0]
    # left out of training, and still part of the baseline
    kept = GRPO(scale_rewards=False, train_truncated=False).samples(group)
    assert advantages(kept) == [0.5, 0.0]


def trained_tokens(seed: int, size: int = 40) -> TrainedTokens:
    generator = torch.Generator().manual_seed(seed)
    now, sampled, reference = (-torch.rand(3, size, generator=generator) * 2).unbind()
    advantage = torch.randn(size, generator=generator)
    zeros = torch.zeros(size)
    return TrainedTokens(
        now.clone().requires_grad_(), zeros, sampled, advantage, zeros, zeros.long(), zeros[:1],
        torch.zeros(0, 2), 100, 7, 0, reference,
    )  # fmt: skip


def test_metrics_are_means_over_the_tokens_of_the_step() -> None:
    """By hand; the loss itself is compared with TRL's."""
    trained = trained_tokens(1)
    assert trained.reference_logprobs is not None
    _, figures = GRPO(clip_low=0.2, clip_high=0.5, kl=0.3).loss(trained)
    now, sampled, advantage, reference = (
        part.tolist()
        for part in (
            trained.logprobs,
            trained.sampled_logprobs,
            trained.advantages,
            trained.reference_logprobs,
        )
    )
    ratios = [math.exp(n - s) for n, s in zip(now, sampled, strict=True)]
    bound = [r > 1.5 if a > 0 else r < 0.8 or r > 3 for r, a in zip(ratios, advantage, strict=True)]
    wanted = {
        "clip_fraction": sum(bound),
        "logprob_diff": sum(abs(n - s) for n, s in zip(now, sampled, strict=True)),
        "kl": sum(math.exp(r - n) - (r - n) - 1 for n, r in zip(now, reference, strict=True)),
    }
    assert any(bound) and figures == pytest.approx({name: value / 100 for name, value in wanted.items()})


def test_the_estimators_of_the_distance() -> None:
    """Over all tokens of a small vocabulary: their means, and the means of their gradients, are exact."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, generator=generator, dtype=torch.float64, requires_grad=True)
    reference = torch.log_softmax(torch.randn(6, generator=generator, dtype=torch.float64), -1)

    def slope(value: torch.Tensor) -> list[float]:
        return torch.autograd.grad(value, logits, retain_graph=True)[0].tolist()

    logprobs = torch.log_softmax(logits, -1)
    weights = logprobs.exp().detach()  # how often each token is sampled
    gap = logprobs - reference
    onto_reference, from_reference = (logprobs.exp() * gap).sum(), -(reference.exp() * gap).sum()
    k1, k2, k3 = (estimate_kl(logprobs, reference, each) for each in ("k1", "k2", "k3"))
    assert k1.tolist() == pytest.approx(gap.tolist())
    assert float((weights * k1).sum().detach()) == pytest.approx(float(onto_reference.detach()))
    assert float((weights * k3).sum().detach()) == pytest.approx(float(onto_reference.detach()))
    assert k2.tolist() == pytest.approx((gap**2 / 2).tolist()) and min(k2.tolist() + k3.tolist()) >= 0
    for each in (k1, k2):
        assert slope((weights * each).sum()) == pytest.approx(slope(onto_reference))
    assert slope((weights * k3).sum()) == pytest.approx(slope(from_reference))
