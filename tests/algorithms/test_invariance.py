"""For every algorithm: how the rows of a step are laid out does not change its gradient, and what the policy did not
sample has no part in it. (Two processes instead of one: `test_learner_processes.py`.)

Distances are those of `algorithm_kit.distance`: Euclidean over all weights, relative to the gradient's length."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from tests.kits.algorithm import ALGORITHMS, batch_for, distance, groups_of, learner_for, step_gradients
from tests.kits.learner import Gradients, gradients, samples_of, words
from TrainingFactory.data.samples import find_mismatched_samples
from TrainingFactory.learning.learner import Learner
from TrainingFactory.types import Sample

TOLERANCE = 1e-5
PER_TOKEN = ("logprobs", "advantages", "rewards", "policy_version")
# Tests of one algorithm share a process of the suite, and with it the gradient that they compare with.
every_algorithm = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in ALGORITHMS]
)
# The others differ from one of these token by token only, or before rows are laid out. They are laid out in one way,
# and by `make test-slow` in all.
SHAPES = ("sft", "grpo", "grpo-sequence", "grpo-constant", "reinforce++", "gspo", "grpo-importance", "ppo-head", "dpo",
          "ppo-importance", "ppo-separate", "orpo", "kto", "rft", "reward-model", "process-reward-model")  # fmt: skip


@cache
def learner_of(name: str) -> Learner:
    return learner_for(ALGORITHMS[name])


@cache
def rows_of(name: str) -> tuple[Sample, ...]:
    return tuple(samples_of(ALGORITHMS[name], groups_of(count=3)))


@cache
def wanted(name: str) -> Gradients:
    """All rows in one pack that shares prefixes."""
    found = found_with(name, rows_of(name))
    batch = batch_for(learner_of(name), ALGORITHMS[name], rows_of(name))
    assert len(batch.packs) == 1 and (name != "kto" or batch.baseline > 0.1)
    assert max(float(value.abs().max()) for value in found.values()) > 1e-4
    return found


def found_with(name: str, rows: Any, budget: int = 16_384, sharing: bool = True) -> Gradients:
    answers = find_mismatched_samples(rows_of(name))
    return step_gradients(
        learner_of(name), ALGORITHMS[name], copy.deepcopy(list(rows)), budget, sharing, answers
    )


def shuffled(rows: tuple[Sample, ...]) -> list[Sample]:
    """Rows of one episode stay in the order in which they were played."""
    episodes: dict[int, list[Sample]] = {}
    for row in rows:
        episodes.setdefault(row.episode, []).append(row)
    units = list(episodes.values())
    random.Random(5).shuffle(units)
    return [row for unit in units for row in unit]


def padded(rows: tuple[Sample, ...]) -> list[Sample]:
    """Rows without a trained token, some of them twice, and tokens of the environment after the last sampled one."""
    rng = random.Random(6)
    longer = [with_tail(row, words(rng, rng.randrange(0, 20))) for row in shuffled(rows)]
    padding = [
        replace(row, loss_mask=[False] * len(row.token_ids), episode=-n) for n, row in enumerate(longer, 2)
    ]
    return [row for pair in zip(padding, longer, strict=True) for row in pair] + padding[:3]


MIXED = "some together, in any order, with padding"
LAYOUTS: dict[str, tuple[Any, int, bool]] = {  # rows, size of a micro-batch, whether prefixes are shared
    "every episode or pair for itself": (list, 1, True),
    "no shared prefixes": (list, 2000, False),
    MIXED: (padded, 120, True),
}


def laid_out() -> Iterator[Any]:
    for name in ALGORITHMS:
        for layout in LAYOUTS:
            late = [pytest.mark.slow] if layout != MIXED and name not in SHAPES else []
            yield pytest.param(
                name, layout, id=f"{layout}-{name}", marks=[pytest.mark.xdist_group(name), *late]
            )


@pytest.mark.parametrize(("name", "layout"), list(laid_out()))
def test_any_layout_gives_the_same_gradient(name: str, layout: str) -> None:
    change, budget, sharing = LAYOUTS[layout]
    rows = change(rows_of(name))
    assert distance(found_with(name, rows, budget, sharing), wanted(name)) < TOLERANCE
    if name == "kto":
        assert len(find_mismatched_samples(rows)) == len(find_mismatched_samples(rows_of(name)))


@every_algorithm
def test_padded_rows_through_the_models_own_attention(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learner_of(name), "sharing", False)  # as for a model that cannot
    assert distance(found_with(name, rows_of(name), 2000, sharing=False), wanted(name)) < TOLERANCE


def with_tail(row: Sample, ids: list[int]) -> Sample:
    zeros, count = [0.0] * len(ids), len(ids)
    return replace(
        row,
        token_ids=row.token_ids + ids,
        loss_mask=row.loss_mask + [False] * count,
        logprobs=row.logprobs + zeros,
        advantages=row.advantages + zeros,
        rewards=row.rewards + zeros,
        policy_version=row.policy_version + [0] * count,
    )


@every_algorithm
def test_what_was_not_sampled_has_no_part(name: str) -> None:
    """Whatever stands on tokens of prompts and tools, the gradient is the same to the last bit."""
    rng, perturbed = random.Random(7), copy.deepcopy(list(rows_of(name)))
    for row in perturbed:
        for field in PER_TOKEN:
            values = getattr(row, field)
            for place, sampled in enumerate(row.loss_mask):
                if not sampled:
                    values[place] = rng.randrange(-1000, 1000)
    found = found_with(name, perturbed)
    assert all(torch.equal(found[key], value) for key, value in wanted(name).items())


@pytest.mark.parametrize("name", ["sft", "grpo", "ppo-head", "dpo", "kto"])
def test_the_model_is_asked_for_sampled_tokens_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its output gets a gradient of exactly zero at every place that predicts another token."""
    learner, algorithm, seen = learner_of(name), ALGORITHMS[name], list[torch.Tensor]()
    batch = batch_for(learner, algorithm, rows_of(name), 250)

    def states(*given: Any) -> torch.Tensor:
        seen.append(Learner.compute_states(learner, *given))
        seen[-1].retain_grad()
        return seen[-1]

    monkeypatch.setattr(learner, "compute_states", states)
    gradients(learner, batch, algorithm.loss, algorithm.needs)
    for pack, output in zip(batch.packs, seen, strict=True):
        assert output.grad is not None
        touched = output.grad.any(-1).nonzero()[:, 0].tolist()
        assert set(touched) <= set(pack.source.tolist()) and len(touched) > 0.5 * len(set(pack.source))
        assert len(set(pack.source)) < len(pack.token_ids) / 2
