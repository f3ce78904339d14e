"""Steps that are launched before the last one's tokens are looked at, and the layout of the GPU's kernels."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import numpy as np
import pytest

from tests.kits.engine import VOCABULARY, Informed, grouped_prompts, play, tiny, worst
from tests.kits.replays import with_plain_kernels
from TrainingFactory.sampling import NativeEngine, native
from TrainingFactory.sampling.flights import InFlightStep
from TrainingFactory.sampling.planning import PIECES, StepPlan, StepPlanner
from TrainingFactory.sampling.table import SlotTable
from TrainingFactory.sampling.tiles import plan_tiles
from TrainingFactory.types import SamplingParams, Weights

PROMPTS = grouped_prompts(3, 3)


def sampled(played: list[Any]) -> list[Any]:
    return [[(completion.token_ids, completion.finish) for _, completion in turns] for turns in played]


def count_calls(target: Any, method: str, monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """Return a list that grows with every call of the method."""
    calls: list[None] = []
    real = getattr(target, method)

    def counted(*arguments: Any) -> Any:
        calls.append(None)
        return real(*arguments)

    monkeypatch.setattr(target, method, counted)
    return calls


@pytest.mark.parametrize("guesses", [0, 7])
def test_what_is_launched_ahead_is_what_would_have_been_sampled(
    guesses: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "MAX_STEPS_AHEAD", 2)
    model = tiny()
    plain = NativeEngine(model, slots=5, max_length=256, max_guesses=0)
    ahead = NativeEngine(model, slots=5, max_length=256, max_guesses=guesses)
    ahead._runner.launches_ahead = True
    launches = count_calls(ahead._runner, "launch", monkeypatch)
    expected = play(plain, PROMPTS)
    if guesses:
        ahead._planner.drafts = Informed(expected, lies=0.4, silent=0.5)
    played = play(ahead, PROMPTS)
    assert sampled(played) == sampled(expected)
    assert max(worst(model, turns) for turns in played) < 1e-4
    assert ahead._flight is None and not ahead._table.in_flight.any()
    assert len(launches) > 10
    if guesses:
        assert ahead.stats.guessed_tokens > 100
    else:
        assert ahead.stats.guessed_tokens == 0
        assert ahead.stats.decoded_rows > plain.stats.decoded_rows  # a finished row costs wasted forwards


def test_two_tokens_of_a_launch_are_what_two_launches_would_have_sampled() -> None:
    model, seconds = tiny(), 0
    expected = play(NativeEngine(model, slots=5, max_length=256, max_guesses=0), PROMPTS)
    engine = with_plain_kernels(model, 5)
    launch = engine._runner.launch

    def counted(plan: StepPlan) -> InFlightStep:
        nonlocal seconds
        flight = launch(plan)
        seconds += len(flight.slots) - flight.num_first
        return flight

    engine._runner.launch = counted
    played = play(engine, PROMPTS)
    assert sampled(played) == sampled(expected)
    assert {completion.finish for turns in played for _, completion in turns} == {"stop", "length"}
    assert max(worst(model, turns) for turns in played) < 1e-4
    assert 3 * seconds > engine.stats.sampled_tokens  # nearly every other token is the second of its launch
    assert engine._flight is None and not engine._table.in_flight.any()


@pytest.mark.parametrize("kernels", [False, True])
def test_turns_are_cancelled_and_sessions_closed_while_a_step_is_under_way(kernels: bool) -> None:
    model = tiny()
    engine = with_plain_kernels(model, 3) if kernels else NativeEngine(model, slots=3, max_length=256)
    engine._runner.launches_ahead = True
    rng = random.Random(0)

    async def cut_short() -> None:
        session = engine.session()
        ids = [rng.randrange(VOCABULARY) for _ in range(20)]
        turn = asyncio.ensure_future(
            session.sample(ids, SamplingParams(max_tokens=200, seed=rng.randrange(99)))
        )
        await asyncio.sleep(rng.random() * 0.05)
        if rng.random() < 0.5:
            turn.cancel()
        session.close()
        await asyncio.gather(turn, return_exceptions=True)

    async def everything() -> None:
        # A request that its session's closing does not end would be waited for without end.
        await asyncio.wait_for(asyncio.gather(*[cut_short() for _ in range(12)]), 60)
        await engine.update(Weights(1))

    asyncio.run(everything())
    assert not engine._table.running.any() and not engine._table.in_flight.any() and engine.num_sessions == 0
    played = play(engine, PROMPTS)
    assert sampled(played) == sampled(play(NativeEngine(model, slots=3, max_length=256), PROMPTS))
    assert max(worst(model, turns) for turns in played) < 1e-4


def test_rows_that_begin_alike_and_chunks_are_laid_out_in_tiles() -> None:
    table = SlotTable(16, 256)
    table.head[:], table.stored[:], table.prompt_hashes[:] = 100, 110, np.arange(16) // 4
    table.stored[5] = 99  # has not all of the beginning in the cache
    plan = StepPlan(np.arange(12), 16, True, slots=np.array([13, 14]), counts=np.array([30, 3]))
    layout = plan_tiles(plan, table, 3)
    members, slots, ends, rows, leaders, shared, begins = layout.arrays
    assert (layout.chunk_tokens, layout.num_chunk_tiles, layout.num_group_tiles, layout.is_recorded) == (
        64,
        8,
        8,
        True,
    )
    members, rows = members.reshape(8, layout.tokens), rows.reshape(8, layout.tokens)
    # 21 tokens of 3 query heads fit into a tile of 64; the chunks follow the 16 rows
    assert [[token for token in tile if token >= 0] for tile in members.tolist()] == [
        list(range(16, 37)), list(range(37, 46)), [46, 47, 48], [], [], [], [], [],
    ]  # fmt: skip
    assert slots[:3].tolist() == [13, 13, 14] and (ends[:3] > 256).all()
    assert [[row for row in tile if row >= 0] for tile in rows.tolist()][:4] == [
        [0, 1, 2, 3], [4, 6, 7], [8, 9, 10, 11], [],
    ]  # fmt: skip
    assert leaders[:3].tolist() == [0, 4, 8] and shared.tolist() == [100] * 3 + [0] * 5
    assert begins.tolist() == [100] * 5 + [0] + [100] * 6 + [0] * 4
    table.prompt_hashes[:] = np.arange(16)
    assert plan_tiles(plan, table, 3).num_group_tiles == 0
    sizes = {400: 512, 600: 603, 1200: 2048, 3000: 3003}  # 603 would leave most of 2048 unused
    for tokens, extra in sizes.items():
        plan.counts = np.array([tokens, 3])
        layout = plan_tiles(plan, table, 3)
        assert (layout.chunk_tokens, layout.is_recorded) == (extra, extra in PIECES)


def test_chunks_of_a_step_that_decodes_fill_what_is_recorded() -> None:
    table = SlotTable(128, 256)
    planner = StepPlanner(table, 8192, None, 0, few_shapes=True)
    planner.tiled = True
    table.running[:], table.stored[:], table.lengths[:], table.limit[:] = True, 100, 101, 200
    for waiting, fed in ((10, 400), (25, 480), (26, 1040), (60, 2040), (102, 2040), (103, 4120)):
        table.chunked[:] = 0
        table.lengths[1 : 1 + waiting] = table.chunked[1 : 1 + waiting] = 140
        assert planner.plan(with_guesses=False).counts.sum() == fed
        table.lengths[:] = 101
