"""Random numbers and choices, against independent computations."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from tests.kits.engine import VOCABULARY, plain_logprobs, sample_each, tiny, words
from TrainingFactory.sampling import NativeEngine
from TrainingFactory.sampling.picking import apply_filters, pick, uniforms


def test_uniforms_are_uniform_and_independent() -> None:
    seeds = np.arange(2000, dtype=np.uint64)
    table = np.stack([uniforms(seeds, np.full(2000, position)) for position in range(50)])  # [50, 2000]
    assert table.min() >= 0 and table.max() < 1
    counts, _ = np.histogram(table, bins=100, range=(0, 1))
    assert ((counts - 1000) ** 2 / 1000).sum() < 160, "chi-square of 99 degrees of freedom"
    for a, b in ((table[:, :-1], table[:, 1:]), (table[:-1], table[1:])):  # next seed, next position
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 0.015
    assert len(np.unique(table)) == table.size
    big = uniforms(np.array([2**64 - 1], np.uint64), np.array([10**6]))
    assert 0 <= big[0] < 1


@pytest.mark.parametrize("size", [5, 32, 97, 1000])
def test_pick_inverts_the_cumulative_distribution(size: int) -> None:
    torch.manual_seed(size)
    logits, uniform = torch.randn(200, size) * 3, torch.rand(200, dtype=torch.float64)
    tokens, logprobs = pick(logits, uniform)
    cumulated = torch.softmax(logits.double(), -1).cumsum(-1)
    wanted = (cumulated <= uniform[:, None]).sum(-1)
    assert torch.equal(tokens.long(), wanted)
    exact = torch.log_softmax(logits.double(), -1).gather(1, wanted[:, None])[:, 0]
    assert torch.allclose(logprobs, exact, atol=1e-5)


@pytest.mark.parametrize("size", [3, 40, 300])
def test_impossible_tokens_are_never_chosen(size: int) -> None:
    """At both ends of the unit interval, with zeros at both ends of the vocabulary."""
    ends = torch.tensor([0.0, 1 - 2.0**-40, 0.5, 1e-300], dtype=torch.float64)
    for only in range(size):
        logits = torch.full((4, size), -torch.inf)
        logits[:, only] = 1.0
        tokens, logprobs = pick(logits, ends)
        assert (tokens == only).all() and (logprobs == 0).all()


def test_rows_have_their_own_temperature() -> None:
    logits, uniform = torch.randn(4, 50) * 2, torch.rand(4, dtype=torch.float64)
    temperature = torch.tensor([0.0, 1.0, 0.3, 2.0], dtype=torch.float64)
    tokens, logprobs = pick(logits, uniform, temperature)
    assert tokens[0] == logits[0].argmax()
    for row, scale in enumerate((1.0, 1.0, 0.3, 2.0)):
        wanted = torch.log_softmax(logits[row] / scale, -1)[int(tokens[row])]
        assert logprobs[row].item() == pytest.approx(wanted.item(), abs=1e-5)
        if row:
            assert pick(logits[row : row + 1] / scale, uniform[row : row + 1])[0] == tokens[row]


def test_filters_keep_what_their_definitions_say() -> None:
    probs = torch.tensor([[0.1, 0.4, 0.05, 0.3, 0.15]])

    def kept(top_p: float = 1, top_k: int = 0, min_p: float = 0) -> list[int]:
        limits = (torch.tensor([value], dtype=torch.float64) for value in (top_p, top_k, min_p))
        return torch.nonzero(apply_filters(probs, *limits)[0])[:, 0].tolist()

    assert kept() == [0, 1, 2, 3, 4]
    assert kept(top_k=2) == [1, 3]
    assert kept(top_p=0.39) == [1] and kept(top_p=0.41) == [1, 3] and kept(top_p=0.86) == [0, 1, 3, 4]
    assert kept(min_p=0.5) == [1, 3] and kept(min_p=1) == [1]
    assert kept(top_k=3, top_p=0.5) == [1, 3], "top-p is of what top-k has left: 0.4 / 0.85 < 0.5"
    assert kept(top_p=1e-9) == [1]


def test_a_row_without_limits_is_not_touched_by_its_neighbours() -> None:
    logits, uniform = torch.randn(64, 200), torch.rand(64, dtype=torch.float64)
    top_k = torch.where(torch.arange(64) % 2 == 0, 3, 0)
    filters = (torch.ones(64), top_k, torch.zeros(64))
    assert torch.equal(pick(logits, uniform, None, filters)[:, 1::2], pick(logits, uniform)[:, 1::2])


def test_limits_restrict_the_choice_and_not_the_logprob() -> None:
    model = tiny()
    engine = NativeEngine(model, slots=32, max_length=64)
    prompt = words(random.Random(0), 12)
    with torch.no_grad():
        order = model.eval()(torch.tensor([prompt])).logits[0, -1].argsort(descending=True).tolist()

    def first_tokens(**limits: float) -> dict[int, float]:
        turns = sample_each(engine, [prompt] * 60, max_tokens=1, **limits)
        return {c.token_ids[0]: c.logprobs[0] for _, c in turns}

    free = first_tokens()
    assert len(free) > 3
    for limits in ({"top_k": 3}, {"top_p": 0.3}, {"min_p": 0.4}):
        some = first_tokens(**limits)
        assert len(some) < len(free) and set(some) == set(order[: len(some)])
        for token, logprob in some.items():
            assert logprob == pytest.approx(plain_logprobs(model, prompt, [token])[0], abs=1e-4)
    assert list(first_tokens(top_k=1)) == order[:1]


def test_samples_follow_the_softmax() -> None:
    """3000 first tokens of one prompt against the model's probabilities: a chi-square test, fixed seeds."""
    model = tiny()
    engine = NativeEngine(model, slots=100, max_length=64)
    prompt, count = words(random.Random(3), 12), 3000
    drawn = [completion.token_ids[0] for _, completion in sample_each(engine, [prompt] * count, max_tokens=1)]
    seen = np.bincount(drawn, minlength=VOCABULARY)
    with torch.no_grad():
        probs = torch.softmax(model.eval()(torch.tensor([prompt])).logits[0, -1].double(), -1).numpy()
    common = probs * count >= 5
    wanted = np.append(probs[common] * count, probs[~common].sum() * count)
    got = np.append(seen[common], seen[~common].sum())
    freedom = len(wanted) - 1
    assert ((got - wanted) ** 2 / np.maximum(wanted, 1e-9)).sum() < freedom + 4 * (2 * freedom) ** 0.5
