"""Weights of trained tokens: k copies of a row with weight 1 / k, in one episode, are the row itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from TrainingFactory.algorithms.base import whiten_advantages
from TrainingFactory.algorithms.correction import Correction
from TrainingFactory.algorithms.grpo import GRPO
from TrainingFactory.algorithms.trained_tokens import TrainedTokens
from TrainingFactory.data.packing import Batch, make_batch
from TrainingFactory.types import Sample

ROWS = [
    Sample([1, 2, 3, 4], [False, True, True, False], [0.0, -1.0, -0.3, 0.0], [0.0, 2.0, 2.0, 0.0], [0.0] * 4, [0] * 4),
    Sample([1, 5, 6], [False, False, True], [0.0, 0.0, -0.7], [0.0, 0.0, -1.0], [0.0] * 3, [0] * 3),
]  # fmt: skip


def copied(row: Sample, times: int) -> list[Sample]:
    weights = [1 / times if mask else 0.0 for mask in row.loss_mask]
    rows = [replace(row, weights=weights) for _ in range(times)]
    for copy in rows:
        copy.episode = copy.pair = rows[0].episode
    return rows


def tokens_of(batch: Batch) -> tuple[TrainedTokens, torch.Tensor]:
    """Input of a loss; the log-probs of a model with one parameter for each token id."""
    [pack] = batch.packs
    parameters = torch.linspace(-2.0, -0.1, 8, dtype=torch.float64).requires_grad_()
    target = torch.from_numpy(pack.target)
    arrays = (pack.logprobs, pack.advantages, pack.rewards)
    sampled, advantages, rewards = (torch.from_numpy(array).double() for array in arrays)
    weights = None if pack.weights is None else torch.from_numpy(pack.weights).double()
    logprobs = parameters[target]
    trained = TrainedTokens(
        logprobs, logprobs**2, sampled, advantages, rewards, torch.from_numpy(pack.episode),
        torch.from_numpy(pack.labels), torch.from_numpy(pack.pairs), batch.token_weight,
        batch.num_episodes, batch.num_pairs,
        reference_logprobs=sampled - 0.1, old_logprobs=sampled + 0.2, weights=weights,
    )  # fmt: skip
    return trained, parameters


@pytest.mark.parametrize(
    "options",
    [
        {"kl": 0.1, "entropy": 0.2},
        {"normalization": "sequence", "ratio": "sequence"},
        {"normalization": "constant", "loss_kind": "cispo"},
        {"correction": Correction(cap=1.1, mask=(0.5, 2.0), anchored=True)},
    ],
)
def test_copies_with_shared_weight_are_one_row(options: dict[str, Any]) -> None:
    grpo, outputs = GRPO(**options), []
    for rows in (ROWS, [*copied(ROWS[0], 4), ROWS[1]]):
        trained, parameters = tokens_of(make_batch(rows))
        loss, metrics = grpo.loss(trained)
        loss.backward()
        assert parameters.grad is not None and parameters.grad.any()
        outputs.append([float(loss.detach()), *parameters.grad.tolist(), *metrics.values()])
    np.testing.assert_allclose(outputs[0], outputs[1], rtol=1e-12)


def test_counts_and_whitening_are_weighted() -> None:
    plain, weighted = make_batch(ROWS), make_batch([*copied(ROWS[0], 4), ROWS[1]])
    assert plain.packs[0].weights is None and plain.token_weight == plain.num_tokens == 3
    assert (weighted.num_tokens, weighted.token_weight, weighted.num_episodes) == (9, 3.0, 2)
    for batch in (plain, weighted):
        whiten_advantages(batch.packs)
    by_token = [dict(zip(b.packs[0].target, b.packs[0].advantages, strict=True)) for b in (plain, weighted)]
    assert by_token[0] == pytest.approx(by_token[1])
