"""Folded episodes: the estimator's mean is the exact policy gradient, and packing in trees does not change gradients.

The problem can be listed: an agent answers 0 or 1, or looks at the fact first, which costs 0.1. After a look the
conversation is folded: the agent writes a summary of one token, and the next prompt has the task, the summary and the
number of folds, but not the fact. It may look twice, so an episode has 1, 2 or 3 rows. A right answer is worth 1. A
policy has free parameters for every prompt. All groups of two episodes of a task go through `GRPO.samples`, weighted
with their probability, so means are exact and need no sampling.

The counter-examples are estimators that other systems use; each has another mean."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from types import MethodType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from tests.kits.engine import tiny
from tests.kits.learner import words
from TrainingFactory.algorithms.grpo import GRPO
from TrainingFactory.algorithms.trained_tokens import TrainedTokens
from TrainingFactory.data.packing import make_batch
from TrainingFactory.learning.forward import get_output_head, run_tree, use_trees
from TrainingFactory.types import Completion, Message, Reward, Sample, Task, Trajectory, Turn

LOOK, ZERO, ONE, KEEP_ZERO, KEEP_ONE = range(1, 6)  # what the agent samples
TASK, SUMMARY, SEEN, REQUEST = 10, 20, 30, 40  # SUMMARY + folds, SEEN + fact
COST, MAX_FOLDS, MEMBERS = 0.1, 2, 2
Prompt = tuple[int, ...]


class ListedEpisode(NamedTuple):
    chance: float
    trajectory: Trajectory


@cache
def policy(prompt: Prompt) -> dict[int, float]:
    """Return the probability of each action after a prompt: random, but the same every time."""
    if prompt[-1] == REQUEST:
        actions = (KEEP_ZERO, KEEP_ONE)
    else:
        actions = (ZERO, ONE) if SUMMARY + MAX_FOLDS in prompt else (LOOK, ZERO, ONE)
    logits = np.random.default_rng([*prompt]).normal(0, 1, len(actions))
    weights = np.exp(logits) / np.exp(logits).sum()
    return dict(zip(actions, weights.tolist(), strict=True))


def episodes_of(fact: int) -> list[ListedEpisode]:
    """Return every episode of a task and how likely it is."""

    def turn(prompt: Prompt, action: int, **fields: Any) -> Turn:
        completion = Completion([action], [float(np.log(policy(prompt)[action]))], "stop")
        return Turn(list(prompt), completion, Message("assistant"), **fields)

    def grow(
        prompt: Prompt, folds: int, turns: list[Turn], chance: float, steps: list[float]
    ) -> Iterator[ListedEpisode]:
        fold = "summary" if folds else None
        for action, share in policy(prompt).items():
            acted = [*turns, turn(prompt, action, fold=fold)]
            if action != LOOK:
                right = float(action == (ONE if fact else ZERO))
                trajectory = Trajectory(
                    Task(f"{fact}", "?"), f"{fact}", turns=acted, reward=Reward(right, [*steps, 0.0])
                )
                yield ListedEpisode(chance * share, trajectory)
                continue
            asked = (*prompt, LOOK, SEEN + fact, REQUEST)
            for kept, summary_share in policy(asked).items():
                written = [*acted, turn(asked, kept, summary=True)]
                after = (TASK, kept, SUMMARY + folds + 1)
                yield from grow(
                    after, folds + 1, written, chance * share * summary_share, [*steps, -COST, 0.0]
                )

    return list(grow((TASK,), 0, [], 1.0, []))


@cache
def listed() -> tuple[list[ListedEpisode], ...]:
    kinds = tuple(episodes_of(fact) for fact in (0, 1))
    assert all(sum(episode.chance for episode in kind) == pytest.approx(1) for kind in kinds)
    return kinds


@cache
def parameters() -> dict[tuple[Prompt, int], int]:
    prompts = {tuple(turn.prompt_ids) for kind in listed() for e in kind for turn in e.trajectory.turns}
    return {key: n for n, key in enumerate((p, action) for p in sorted(prompts) for action in policy(p))}


@cache
def score(prompt: Prompt, action: int) -> np.ndarray:
    """Return the gradient of the log-prob of an action. [parameters]"""
    gradient = np.zeros(len(parameters()))
    for other, probability in policy(prompt).items():
        gradient[parameters()[prompt, other]] = (other == action) - probability
    return gradient


def exact_gradient() -> np.ndarray:
    """Return the gradient of the mean reward: the sum over episodes of p R grad log p."""
    total = np.zeros(len(parameters()))
    for kind in listed():
        for chance, episode in kind:
            assert episode.reward is not None
            reward = episode.reward.outcome + sum(episode.reward.steps)
            slopes = [score(tuple(turn.prompt_ids), turn.completion.token_ids[0]) for turn in episode.turns]
            total += chance * reward * np.sum(slopes, axis=0) / len(listed())
    return total


def row_gradient(row: Sample) -> np.ndarray:
    """Return the sum over the trained tokens of a row of advantage times score, in the context that the row shows."""
    places = [place for place, trained in enumerate(row.loss_mask) if trained]
    slopes = [row.advantages[i] * score(tuple(row.token_ids[:i]), row.token_ids[i]) for i in places]
    return np.sum(slopes, axis=0) if slopes else np.zeros(len(parameters()))


Rows = Sequence[Sequence[Sample]]  # of each episode of a group


def mean_estimate(grpo: GRPO, estimate: Callable[[Rows, Sequence[Trajectory]], np.ndarray]) -> np.ndarray:
    """Return the exact mean of an estimator over all groups of two episodes."""
    total = np.zeros(len(parameters()))
    for kind in listed():
        for pair in product(kind, repeat=MEMBERS):
            group = [replace(episode.trajectory, member=member) for member, episode in enumerate(pair)]
            numbers: dict[int, list[Sample]] = {}
            for row in grpo.samples(group):
                numbers.setdefault(row.episode, []).append(row)
            rows = list(numbers.values()) or [[], []]  # a group without signal has no rows
            chance = float(np.prod([episode.chance for episode in pair])) / len(listed())
            total += chance * estimate(rows, group)
    return total


def once_each(rows: Rows, group: Sequence[Trajectory]) -> np.ndarray:
    """Ours: an episode counts once, however many rows it has."""
    parts = [row_gradient(row) for episode in rows for row in episode]
    return np.sum(parts, axis=0) / MEMBERS if parts else np.zeros(len(parameters()))


def row_counts_as_weights(rows: Rows, group: Sequence[Trajectory]) -> np.ndarray:
    """An episode weighs as much as it has rows."""
    counts = [len(episode) for episode in rows]
    parts = [len(episode) * row_gradient(row) for episode in rows for row in episode]
    return np.sum(parts, axis=0) / sum(counts) if parts else np.zeros(len(parameters()))


def step_per_row_number(rows: Rows, group: Sequence[Trajectory]) -> np.ndarray:
    """K optimiser steps: the first rows of all episodes, then the second ones, each step a mean over its rows."""
    total = np.zeros(len(parameters()))
    for number in range(max(len(episode) for episode in rows)):
        parts = [row_gradient(episode[number]) for episode in rows if len(episode) > number]
        total += np.mean(parts, axis=0)
    return total


def masked_summaries(rows: Rows, group: Sequence[Trajectory]) -> np.ndarray:
    parts = [np.zeros(len(parameters()))]
    for row in (row for episode in rows for row in episode):
        mask = [
            m and token not in (KEEP_ZERO, KEEP_ONE)
            for m, token in zip(row.loss_mask, row.token_ids, strict=True)
        ]
        parts.append(row_gradient(replace(row, loss_mask=mask)))
    return np.sum(parts, axis=0) / MEMBERS


def baseline_over_rows(rows: Rows, group: Sequence[Trajectory]) -> np.ndarray:
    """The mean of all rows' rewards is the baseline, so that an episode is in it as often as it has rows."""
    rewards = [e.reward.outcome + sum(e.reward.steps) for e in group if e.reward is not None]
    counts = [1 + sum(turn.fold is not None for turn in episode.turns) for episode in group]
    baseline = np.average(rewards, weights=counts)
    total = np.zeros(len(parameters()))
    for episode, reward in zip(group, rewards, strict=True):
        slopes = [score(tuple(turn.prompt_ids), turn.completion.token_ids[0]) for turn in episode.turns]
        total += (reward - baseline) * np.sum(slopes, axis=0) / MEMBERS
    return total


@pytest.mark.parametrize("credit", ["trajectory", "turn"])
@pytest.mark.parametrize(("baseline", "factor"), [("rloo", 1.0), ("group", (MEMBERS - 1) / MEMBERS)])
def test_the_mean_is_the_exact_gradient_with_folding(baseline: Any, factor: float, credit: Any) -> None:
    found = mean_estimate(GRPO(advantage=baseline, credit=credit), once_each)
    np.testing.assert_allclose(found, factor * exact_gradient(), atol=1e-12)


@pytest.mark.parametrize(
    "estimate", [row_counts_as_weights, step_per_row_number, masked_summaries, baseline_over_rows]
)
def test_other_systems_estimators_are_rejected(estimate: Any) -> None:
    """Another direction, not only another length."""
    found, exact = mean_estimate(GRPO(advantage="rloo", credit="trajectory"), estimate), exact_gradient()
    cosine = float(found @ exact / np.linalg.norm(found) / np.linalg.norm(exact))
    print(f"\n{estimate.__name__}: cosine with the exact gradient {cosine:.4f}")
    assert cosine < 0.9995  # means are exact: ours has 1 up to rounding


def folded_groups(seed: int) -> list[list[Trajectory]]:
    """Return random groups with folds: a folded prompt keeps the task and some sampled turns as context."""
    rng, groups = random.Random(seed), []
    for number in range(2):
        task = words(rng, 40)
        group = []
        for member in range(3):
            turns: list[Turn] = []
            prompt = list(task)
            for index in range(6):
                fold = "window" if index in (2, 4) else None
                if fold:
                    prompt = task + turns[-1].completion.token_ids + words(rng, 8)
                ids = words(rng, rng.randrange(1, 10))
                logprobs = [-rng.uniform(2, 5) for _ in ids]
                turns.append(
                    Turn(list(prompt), Completion(ids, logprobs, "stop"), Message("assistant"), fold=fold)
                )
                prompt += ids + words(rng, 6)
            reward = Reward(rng.random(), [rng.uniform(-0.1, 0.1) for _ in turns])
            group.append(Trajectory(Task(f"{number}", "?"), f"{number}", member, turns=turns, reward=reward))
        groups.append(group)
    return groups


def float64_model() -> Any:
    """Return a model in float64; transformers' norms round to float32 inside."""

    def norm(module: Any, states: torch.Tensor) -> torch.Tensor:
        variance = states.square().mean(-1, keepdim=True) + module.variance_epsilon
        return module.weight * states * torch.rsqrt(variance)

    model = tiny().double()
    for module in model.modules():
        if hasattr(module, "variance_epsilon"):
            module.forward = MethodType(norm, module)
    return model


def test_gradients_over_the_tree_are_those_of_single_rows_in_float64() -> None:
    grpo, model = GRPO(), float64_model()
    rows = [row for group in folded_groups(0) for row in grpo.samples(group)]
    assert len(rows) == 2 * 3 * 3
    head = get_output_head(model)

    def gradient(batches: Sequence[Any], over_tree: bool) -> dict[str, torch.Tensor]:
        model.zero_grad()
        for pack in (pack for batch in batches for pack in batch.packs):
            with use_trees(model, over_tree):
                if over_tree:
                    states = run_tree(model, pack)
                else:
                    states = model.model(input_ids=torch.from_numpy(pack.token_ids)[None]).last_hidden_state[
                        0
                    ]
                logits = head(states[torch.from_numpy(pack.source)])
            logprobs = torch.log_softmax(logits, -1).gather(1, torch.from_numpy(pack.target)[:, None])[:, 0]
            advantages = torch.from_numpy(pack.advantages).double()
            (advantages * (logprobs / 3).tanh()).sum().backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    tree = make_batch(rows)
    packed = sum(len(pack.token_ids) for pack in tree.packs)
    assert packed < 0.7 * sum(pack.row_tokens for pack in tree.packs)  # the task and kept turns are shared
    together = gradient([tree], over_tree=True)
    alone = gradient([make_batch([row], sharing=False) for row in rows], over_tree=False)
    for name, value in alone.items():
        np.testing.assert_allclose(
            together[name].numpy(), value.numpy(), atol=1e-12 * float(value.abs().max()) + 1e-15
        )


@pytest.mark.parametrize("normalization", ["token", "sequence", "constant"])
def test_an_episode_that_exceeds_the_token_budget_is_split_with_the_same_gradient(normalization: Any) -> None:
    """In float64, with weights as of forked episodes. Every pack keeps to the budget, and an episode counts once."""
    grpo, model = GRPO(normalization=normalization), float64_model()
    rows = [row for group in folded_groups(1) for row in grpo.samples(group)]
    for number, row in enumerate(rows):
        row.weights = [trained / (1 + number % 2) for trained in row.loss_mask]
    head, budget = get_output_head(model), max(len(row.token_ids) for row in rows)

    def gradient(batch: Any) -> torch.Tensor:
        model.zero_grad()
        for pack in batch.packs:
            with use_trees(model, True):
                logits = head(run_tree(model, pack)[torch.from_numpy(pack.source)])
            everything = torch.log_softmax(logits, -1)
            logprobs = everything.gather(1, torch.from_numpy(pack.target)[:, None])[:, 0]
            sampled, advantages, weights = (
                torch.from_numpy(values).double() for values in (pack.logprobs, pack.advantages, pack.weights)
            )
            tokens = TrainedTokens(
                logprobs, logprobs, sampled, advantages, sampled, torch.from_numpy(pack.episode),
                torch.from_numpy(pack.labels), torch.from_numpy(pack.pairs), batch.token_weight, batch.num_episodes, 0,
                weights=weights,
                episode_lengths=None if pack.lengths is None else torch.from_numpy(pack.lengths),
            )  # fmt: skip
            grpo.loss(tokens)[0].backward()
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    whole, parts = make_batch(rows), make_batch(rows, budget, splitting=True)
    assert whole.num_split_episodes == 0 and parts.num_split_episodes == 6
    assert (parts.num_episodes, parts.num_rows, parts.num_tokens) == (
        whole.num_episodes,
        whole.num_rows,
        whole.num_tokens,
    )
    assert max(len(pack.token_ids) for pack in parts.packs) <= budget
    expected = gradient(whole)
    scale = float(expected.abs().max())
    np.testing.assert_allclose(gradient(parts).numpy(), expected.numpy(), atol=1e-12 * scale)


def test_an_episode_is_split_only_if_it_must_and_may() -> None:
    rows = [row for group in folded_groups(1) for row in GRPO().samples(group)]
    assert make_batch(rows, splitting=True).num_split_episodes == 0
    budget = max(len(row.token_ids) for row in rows)
    whole = make_batch(rows, budget)
    assert whole.num_split_episodes == 0 and max(len(pack.token_ids) for pack in whole.packs) > budget
    parts = make_batch(rows, budget, sharing=False, splitting=True)
    assert parts.num_split_episodes and max(len(pack.token_ids) for pack in parts.packs) <= budget
