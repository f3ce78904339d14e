"""Guessing changes how many forwards sampling takes, and never what is sampled."""

from __future__ import annotations

import asyncio
from functools import cache
from typing import Any

import numpy as np
import pytest

from tests.kits.engine import KINDS, Informed, grouped_prompts, play, tiny, worst
from TrainingFactory.sampling import NativeEngine
from TrainingFactory.sampling.drafts import DraftTable
from TrainingFactory.types import Weights

PROMPTS = grouped_prompts(3, 3)


def tokens_of(played: list[Any]) -> list[list[list[int]]]:
    return [[completion.token_ids for _, completion in turns] for turns in played]


@cache
def without_guesses(kind: str) -> tuple[Any, NativeEngine, list[Any]]:
    model = tiny(kind)
    plain = NativeEngine(model, slots=5, max_length=256, max_guesses=0)
    return model, plain, play(plain, PROMPTS)


# Those of one kind share a process of the suite, and with it what is sampled without guesses.
LIES = [(0.0, False), (0.4, False), (1.0, False), (0.2, True)]
CASES = [("gqa_tied", *lies) for lies in LIES] + [(kind, 0.4, False) for kind in KINDS if kind != "gqa_tied"]


@pytest.mark.parametrize(
    ("kind", "lies", "few_shapes"),
    [pytest.param(*case, marks=pytest.mark.xdist_group(f"guesses-{case[0]}")) for case in CASES],
)
def test_guesses_do_not_change_what_is_sampled(kind: str, lies: float, few_shapes: bool) -> None:
    """`few_shapes` is how rows are fed where CUDA graphs are used."""
    model, plain, expected = without_guesses(kind)
    engine = NativeEngine(model, slots=5, max_length=256)
    engine._planner.drafts, engine._planner.few_shapes = Informed(expected, lies), few_shapes
    engine._table.ride = 32 if few_shapes else 1
    played = play(engine, PROMPTS)
    assert tokens_of(played) == tokens_of(expected)
    assert worst(model, [turn for turns in played for turn in turns]) < 1e-4
    assert engine.stats.guessed_tokens > 100
    assert (
        engine.stats.sampled_tokens
        == plain.stats.sampled_tokens
        == sum(len(c.token_ids) for t in played for _, c in t)
    )
    if lies == 0:
        assert engine.stats.forwards < 0.6 * plain.stats.forwards


def test_limits_hold_with_guesses() -> None:
    """The other temperatures and filters go through the same rows of logits."""
    model = tiny()
    how = {"temperature": 0.7, "top_p": 0.9, "top_k": 20}
    expected = play(NativeEngine(model, slots=9, max_length=256, max_guesses=0), PROMPTS, **how)
    engine = NativeEngine(model, slots=9, max_length=256)
    engine._planner.drafts = Informed(expected, 0.2)
    assert tokens_of(play(engine, PROMPTS, **how)) == tokens_of(expected)


def test_what_comes_again_takes_fewer_forwards() -> None:
    engine = NativeEngine(tiny(), slots=9, max_length=256)
    counts = []
    for version in range(3):
        asyncio.run(engine.update(Weights(version)))
        before = engine.stats.forwards
        play(engine, PROMPTS, turns=1)
        counts.append(engine.stats.forwards - before)
    assert counts[2] < 0.7 * counts[0]


def test_trust_is_earned_and_lost() -> None:
    drafts, context = DraftTable(), np.array([[1, 2, 3]])

    def guess() -> list[int]:
        tokens, lengths = drafts.guess(context, 4)
        return tokens[0, : lengths[0]].tolist()

    assert guess() == []
    drafts.learn(context, np.array([7]))
    assert guess() == []  # seen once
    drafts.learn(context, np.array([7]))
    assert guess() == [7]  # and came true
    drafts.learn(context, np.array([8]))
    assert guess() == []
    for _ in range(2):
        drafts.learn(np.array([[2, 3, 8], [1, 2, 3], [1, 2, 3]]), np.array([9, 8, 8]))
    drafts.learn(context, np.array([8]))
    assert guess() == [8, 9]  # what follows is guessed from the guess


def test_deterministic_mode_guesses_nothing() -> None:
    engine = NativeEngine(tiny(), slots=9, max_length=256, deterministic=True)
    play(engine, PROMPTS)
    play(engine, PROMPTS)
    assert engine.stats.guessed_tokens == 0
