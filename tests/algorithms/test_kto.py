"""KTO against TRL's own loss, its baseline among it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.kits.learner import far, gradients, learn, row_logprobs, samples_of, words
from tests.kits.preference import (
    Group,
    bare_trainer,
    dialogue,
    lift_by_episodes,
    model_gradients,
    moved_learner,
    padded,
    random_prompt,
)
from TrainingFactory.algorithms.kto import KTO
from TrainingFactory.data.packing import Batch, make_batch
from TrainingFactory.data.samples import find_mismatched_samples
from TrainingFactory.learning.learner import Learner
from TrainingFactory.types import Reward, Sample

ALGORITHM = KTO(beta=0.3, desirable_weight=1.5, undesirable_weight=0.7)


def examples(seed: int, count: int = 6) -> list[Group]:
    """Groups of one, with prompts of random length."""
    rng = random.Random(seed)
    head = words(rng, 30)
    rewards = [float(number % 3 > 0) for number in range(count)]
    return [[dialogue(rng, random_prompt(rng, head), rng.randrange(1, 4), reward)] for reward in rewards]


def prepared(learner: Learner, rows: list[Sample], budget: int = 10_000) -> Batch:
    batch = make_batch(rows, budget, learner.sharing, mismatched=True)
    learner.annotate(batch, ALGORITHM.needs)
    ALGORITHM.prepare([batch], 0)
    return batch


# -- examples and mismatched rows


def test_scored_episodes_are_examples_by_themselves() -> None:
    rng = random.Random(0)
    prompt = words(rng, 5)
    group = [dialogue(rng, prompt, 2, reward) for reward in (0.5, None, 1.0, 0.4)]
    group[3].reward = Reward(0.4, [0.1, 0.1])
    rows = KTO().samples(group)
    assert [row.label for row in rows] == [0.0, 1.0, 1.0]
    assert len({row.pair for row in rows}) == 3
    assert [row.label for row in KTO(threshold=-1.0).samples(group)] == [1.0] * 3


def test_answers_move_to_the_next_prompt() -> None:
    """As TRL does it: the first prompt gets the last answer, every other one that of its predecessor."""
    groups = examples(0, 4)
    rows, found = samples_of(ALGORITHM, groups), find_mismatched_samples(samples_of(ALGORITHM, groups))
    assert len(found) == 4
    for place, row in enumerate(found):
        prompt, other = groups[place][0].turns[0].prompt_ids, rows[place - 1]
        start = len(groups[place - 1][0].turns[0].prompt_ids)
        assert row.token_ids == prompt + other.token_ids[start:]
        assert row.loss_mask == [False] * len(prompt) + other.loss_mask[start:]
    assert not {row.episode for row in found} & {row.episode for row in rows}


def test_no_answer_meets_its_own_prompt() -> None:
    rng = random.Random(1)
    prompts = {name: words(rng, 8) for name in "abc"}
    rows = samples_of(ALGORITHM, [[dialogue(rng, prompts[name], 1, 1.0)] for name in "aababcc"])
    own = {tuple(row.token_ids[8:]): tuple(row.token_ids[:8]) for row in rows}
    found = find_mismatched_samples(rows)
    assert len(found) == 7 == len({tuple(row.token_ids[8:]) for row in found})
    assert all(own[tuple(row.token_ids[8:])] != tuple(row.token_ids[:8]) for row in found)
    # where one prompt has more than half of the episodes, some answers have nowhere to go
    assert len(find_mismatched_samples(rows[:2] + rows[3:4] + rows[2:3])) == 2
    assert find_mismatched_samples(rows[:2]) == [] == find_mismatched_samples([])


# -- values


def by_trl(model: Any, frozen: Any, rows: list[Sample]) -> tuple[torch.Tensor, Any]:
    from trl.trainer.kto_trainer import KTOTrainer

    trainer = bare_trainer(
        KTOTrainer, model, frozen, beta=ALGORITHM.beta, desirable_weight=ALGORITHM.desirable_weight,
        undesirable_weight=ALGORITHM.undesirable_weight, calculate_KL=True, loss_type="kto",
    )  # fmt: skip
    answers = [row.loss_mask.index(True) for row in rows]
    crossed = []  # prompts with the answer of the example before, as TRL makes them
    for place, row in enumerate(rows):
        prompt, start, other = row.token_ids[: answers[place]], answers[place - 1], rows[place - 1]
        ids, mask = prompt + other.token_ids[start:], [False] * len(prompt) + other.loss_mask[start:]
        zeros = [0.0] * len(ids)
        crossed.append(Sample(ids, mask, zeros, zeros, zeros, [0] * len(ids)))
    inputs = padded(rows) | padded(crossed, "KL_")
    inputs["label"] = torch.tensor([row.label > 0.5 for row in rows])
    loss = trainer._compute_loss(trainer.model, inputs, False)
    return loss, {name: values[-1] for name, values in trainer._metrics["train"].items()}


@pytest.mark.parametrize(("seed", "clamped"), [(0, True), (2, False)])
def test_loss_gradient_and_baseline_are_trls(seed: int, clamped: bool) -> None:
    learner, frozen = moved_learner(seed)
    rows = samples_of(ALGORITHM, examples(4))
    batch = prepared(learner, rows, 150)
    assert len(batch.packs) > 1 and len(batch.mismatched) > 1
    figures = learner.evaluate(batch, ALGORITHM.loss)
    model = learner.model.eval()
    loss, metrics = by_trl(model, frozen, rows)
    wanted = model_gradients(model, loss)
    assert (figures["kl"] == 0) == clamped and figures["kl"] == pytest.approx(
        metrics["kl"], rel=1e-5, abs=1e-6
    )
    assert figures["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert far(gradients(learner, batch, ALGORITHM.loss), wanted) < 1e-5
    assert figures["desirable"] == pytest.approx(4 / 6)
    ratios = [(row_logprobs(model, row) - row_logprobs(frozen, row)).sum().item() for row in rows]
    leads = [(r - metrics["kl"]) * (1 if row.label else -1) for r, row in zip(ratios, rows, strict=True)]
    assert figures["accuracy"] == pytest.approx(sum(lead > 0 for lead in leads) / 6)
    assert figures["rewards/margin"] == pytest.approx(0.3 * sum(leads) / 6, rel=1e-3, abs=1e-5)


def test_one_example_has_no_baseline() -> None:
    learner, _ = moved_learner()
    batch = prepared(learner, samples_of(ALGORITHM, examples(2, 1)))
    assert batch.mismatched == [] and batch.baseline == 0
    figures = learn(learner, ALGORITHM, examples(2, 1), 0, token_budget=1000)
    assert figures["rows"] == 1 and figures["kl"] == 0


@pytest.mark.slow  # DPO learns from the same episodes in test_dpo.py; the loss is checked above
def test_it_learns_from_recorded_episodes(warm: Path, recorded: Path, tmp_path: Path) -> None:
    """From episodes that are called good or bad, one by one, the model learns to look up instead of guessing."""
    gain, start, end = lift_by_episodes(warm, recorded, tmp_path, algorithm="kto", max_steps=6, batch_size=24)
    assert start["eval/rewards/margin"] == 0 and start["eval/desirable"] == pytest.approx(0.5, abs=0.05)
    assert end["eval/accuracy"] > 0.9 and end["eval/rewards/margin"] > 0.1
    assert gain > 0.1
