"""Rows that feed the same tokens after the same history are computed once, and each still draws for itself."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import numpy as np
import pytest

from tests.kits.engine import KINDS, grouped_prompts, play, tiny, words, worst
from TrainingFactory.sampling import NativeEngine
from TrainingFactory.sampling.runner import Runner
from TrainingFactory.sampling.twins import find_twins
from TrainingFactory.types import Completion, SamplingParams

PROMPTS = grouped_prompts(2, 6)


def counted(engine: NativeEngine) -> list[int]:
    """Tokens that go through the layers, forward by forward."""
    fed: list[int] = []
    logits = engine._runner._compute_logits

    def count(*arguments: Any, **named: Any) -> Any:
        fed.append(len(arguments[0]))
        return logits(*arguments, **named)

    engine._runner._compute_logits = count
    return fed


def test_every_token_is_found_in_the_first_row_of_its_kind() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        counts = rng.integers(1, 4, 12)
        histories = rng.integers(0, 2, 12).astype(np.uint64) << np.uint64(40)
        marks = rng.integers(1, 3, counts.sum()).astype(np.uint64) * np.uint64(1 << 20)
        marks += np.concatenate([np.arange(count) for count in counts]).astype(np.uint64)
        starts = (counts.cumsum() - counts).tolist()
        sums = [
            int(history + marks[start : start + count].sum())
            for history, start, count in zip(histories, starts, counts, strict=True)
        ]
        twins = find_twins(histories, marks, counts)
        assert twins is not None
        leaders = [sums.index(value) for value in sums]
        assert twins.leading_rows.tolist() == [leader == row for row, leader in enumerate(leaders)]
        kept = np.flatnonzero(twins.is_leader)
        rows = zip(leaders, counts, strict=True)
        expected = [starts[leader] + i for leader, count in rows for i in range(count)]
        assert kept[twins.source_tokens].tolist() == expected
    assert find_twins(np.arange(3, dtype=np.uint64), np.zeros(3, np.uint64), np.ones(3, np.int64)) is None


@pytest.mark.parametrize(
    ("kind", "guesses"),
    # Kinds differ in how they attend, which guesses do not touch.
    [("gqa_tied", 7), ("mla_moe", 0)]
    + [pytest.param(kind, guesses, marks=pytest.mark.slow) for kind in KINDS[1:3] for guesses in (0, 7)],
)
def test_sharing_does_not_change_what_is_sampled(
    kind: str, guesses: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice in the same engine, so that there is something to guess from."""
    model = tiny(kind)
    engine = NativeEngine(model, slots=12, max_length=256, max_guesses=guesses)
    fed = counted(engine)
    played = [play(engine, PROMPTS) for _ in range(2)]
    with monkeypatch.context() as patch:
        patch.setattr(Runner, "_find_twin_rows", lambda self, plan, flat: None)
        plain = NativeEngine(model, slots=12, max_length=256, max_guesses=guesses)
        fed_alone = counted(plain)
        expected = [play(plain, PROMPTS) for _ in range(2)]
    for mine, theirs in zip(played[0] + played[1], expected[0] + expected[1], strict=True):
        assert [c.token_ids for _, c in mine] == [c.token_ids for _, c in theirs]
        assert worst(model, mine) < 1e-4
    assert sum(fed) < sum(fed_alone)


def test_a_group_that_agrees_is_fed_as_one_row() -> None:
    """Greedy rows of one prompt never part; the replies to them are alike as well."""
    model, prompt = tiny(), PROMPTS[0]
    engine = NativeEngine(model, slots=8, max_length=256, max_guesses=0)
    fed = counted(engine)
    reply = words(random.Random(3), 9)

    async def everything() -> list[list[tuple[list[int], Completion]]]:
        sessions = [engine.session() for _ in range(8)]
        params = SamplingParams(temperature=0, max_tokens=5)
        first = await asyncio.gather(*(session.sample(prompt, params) for session in sessions))
        longer = [prompt + completion.token_ids + reply for completion in first]
        second = await asyncio.gather(
            *(session.sample(ids, params) for session, ids in zip(sessions, longer, strict=True))
        )
        played = zip(longer, first, second, strict=True)
        return [[(prompt, one), (ids, two)] for ids, one, two in played]

    for turns in asyncio.run(everything()):
        assert worst(model, turns) < 1e-4
    # The first prompt is prefilled alone. The others feed its last token again, one step behind. Replies may come in
    # two steps, by what the loop has handed in, and then there are two rows.
    assert fed[:3] == [len(prompt), 2, 2]
    assert max(fed[3:]) <= 2 * (1 + len(reply))
    assert sum(fed[3:]) <= 4 * (5 + 1 + len(reply)), "of eight rows"
