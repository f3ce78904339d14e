"""What the learner's tests share: ragged rows that begin alike, a plain per-row oracle, gradients on request."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from tests.kits.engine import VOCABULARY, tiny
from TrainingFactory.algorithms.trained_tokens import Loss
from TrainingFactory.data.packing import Batch, make_batch
from TrainingFactory.learning.learner import Learner
from TrainingFactory.learning.optim import OptimizerOptions
from TrainingFactory.learning.step import StepOptions, train_step
from TrainingFactory.protocols import Algorithm
from TrainingFactory.types import Sample, Trajectory

Gradients = dict[str, torch.Tensor]


def samples_of(algorithm: Any, groups: Sequence[Sequence[Trajectory]]) -> list[Sample]:
    return [row for group in groups for row in algorithm.samples(group)]


def sample(rng: random.Random, ids: list[int], context: int) -> Sample:
    """A row whose first `context` tokens are not trained, and some of the others are not either. The mask
    depends on the tokens alone, so that what rows share is trained in all of them or in none."""
    mask = [place >= max(1, context) and (token * 7 + place) % 5 > 0 for place, token in enumerate(ids)]
    if not any(mask):
        mask[-1] = True
    numbers = [rng.gauss(0, 1) if trained else 0.0 for trained in mask]
    logprobs = [-abs(number) - 1.0 if trained else 0.0 for number, trained in zip(numbers, mask, strict=True)]
    return Sample(list(ids), mask, logprobs, numbers, [0.0] * len(ids), [0] * len(ids))


def words(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(VOCABULARY) for _ in range(count)]


def ragged_rows(seed: int) -> list[Sample]:
    """Levels of common prefixes of random length, some of them sampled tokens; two equal rows; a row that is
    the beginning of another; a row that has nothing in common with any; in random order."""
    rng = random.Random(seed)
    rows: list[Sample] = []

    def grow(path: list[int], levels: int) -> None:
        if not levels:
            rows.append(sample(rng, path + words(rng, rng.randrange(1, 40)), context=25))
            return
        path = path + words(rng, rng.choice((2, 20, 50, 70)))
        for _ in range(rng.randrange(1, 4)):
            grow(path, levels - 1)

    for _ in range(2):
        grow(words(rng, 10), 3)
    rows.append(sample(rng, rows[0].token_ids, context=25))
    longest = max(rows, key=lambda row: len(row.token_ids))
    rows.append(sample(rng, longest.token_ids[:-5], context=25))
    rows.append(sample(rng, words(rng, 30), context=3))
    rng.shuffle(rows)
    return rows


def weighted(trained: Any) -> tuple[torch.Tensor, dict[str, float]]:
    """A loss that tells rows and tokens apart and is not linear in the log-probs."""
    return (trained.advantages * (trained.logprobs / 3).tanh()).sum() / trained.step_tokens, {}


def row_logprobs(model: Any, row: Sample, temperature: float = 1.0) -> torch.Tensor:
    """The oracle: one row, no packing, the model's own attention and logits. [trained tokens]"""
    logits = model(torch.tensor([row.token_ids]), use_cache=False).logits[0].float() / temperature
    every = torch.log_softmax(logits, -1)
    places = [place for place, trained in enumerate(row.loss_mask) if trained]
    return torch.stack([every[place - 1, row.token_ids[place]] for place in places])


def trained_values(row: Sample, name: str) -> torch.Tensor:
    pairs = zip(getattr(row, name), row.loss_mask, strict=True)
    return torch.tensor([value for value, trained in pairs if trained])


def row_gradients(
    model: Any, rows: Sequence[Sample], part: Callable[[torch.Tensor, Sample], torch.Tensor]
) -> Gradients:
    """Gradients of the sum over rows of `part(log-probs, row)`, over the number of trained tokens."""
    model.zero_grad()
    tokens = sum(sum(row.loss_mask) for row in rows)
    for row in rows:
        (part(row_logprobs(model, row), row) / tokens).backward()
    found = {name: param.grad.clone() for name, param in model.named_parameters() if param.grad is not None}
    model.zero_grad()
    return found


def weighted_part(logprobs: torch.Tensor, row: Sample) -> torch.Tensor:
    return (trained_values(row, "advantages") * (logprobs / 3).tanh()).sum()


def make_learner(model: Any = None, optimizer: OptimizerOptions | None = None, **options: Any) -> Learner:
    return Learner(model or tiny(), optimizer or OptimizerOptions(learning_rate=1e-3), **options)


def gradients(
    learner: Learner, batch: Batch, loss: Loss = weighted, needs: frozenset[str] = frozenset()
) -> Gradients:
    """What a step would be made from, without the step."""
    found: Gradients = {}
    weights = learner._weights

    def keep() -> float:
        for name, master in zip(weights.names, weights.masters, strict=True):
            if master.grad is not None:
                found[name], master.grad = master.grad, None
        return 1.0

    real, learner._step_optimizers = learner._step_optimizers, keep  # pyright: ignore[reportAttributeAccessIssue]
    learner.update(batch, loss, needs)
    learner._step_optimizers = real  # pyright: ignore[reportAttributeAccessIssue]
    return found


def batch_gradients(learner: Learner, rows: Sequence[Sample], **packing: Any) -> Gradients:
    # A tree that gives something else than rows would be noticed by the learner, which then goes by rows.
    assert learner.sharing or not packing.get("sharing", True)
    return gradients(learner, make_batch(rows, **packing))


def far(left: Gradients, right: Gradients) -> float:
    """The largest difference relative to the largest entry, over all weights."""
    assert left.keys() == right.keys()
    return max(
        float((left[name] - right[name]).abs().max() / right[name].abs().max().clamp(min=1e-12))
        for name in right
    )


def moved(model: Any, seed: int) -> Any:
    """Away from where it was."""
    noise = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for param in model.parameters():
            param += 0.02 * torch.randn(param.shape, generator=noise)
    return model


def weights_of(model: Any) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def with_values(row: Sample, **values: Any) -> Sample:
    return replace(row, **values)


def learn(
    learner: Learner,
    algorithm: Algorithm,
    groups: Sequence[Sequence[Trajectory]],
    step: int,
    **options: Any,
) -> dict[str, float]:
    """One training step over what the groups teach."""
    return train_step(learner, algorithm, samples_of(algorithm, groups), step, StepOptions(**options))
