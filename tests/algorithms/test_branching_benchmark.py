"""`benchmarks.branching` in a quick form: its environments, a few steps of each arm, and its summary."""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import asdict
from pathlib import Path

import pytest

from benchmarks import branching
from benchmarks.branching import (
    ARMS,
    TUNING_SEED,
    BranchingRun,
    read_runs,
    summary,
    table,
    train,
    warm_up,
    write_page,
)
from benchmarks.branching_worlds import WORLDS, WordChat, vocabulary
from TrainingFactory.rollout import play


@pytest.mark.parametrize("world", WORLDS)
def test_experts_are_right_and_novices_often_wrong(world: str) -> None:
    chat, environment = WordChat(vocabulary()), WORLDS[world]

    async def right(messages: str, rng: random.Random) -> list[float]:
        outcomes = []
        for task in environment.tasks("train", 0, 40):
            instance = environment(task)
            played = instance.expert() if messages == "expert" else instance.novice(rng)
            trajectory = await play(instance, chat, played, max_turns=branching.MAX_TURNS)
            prompts = {token for turn in trajectory.turns for token in turn.prompt_ids}
            assert messages == "novice" or chat.ids["unknown"] not in prompts
            assert trajectory.reward is not None
            outcomes.append(trajectory.reward.outcome)
            assert len({turn.state for turn in trajectory.turns}) > 1 or len(trajectory.turns) == 1
        return outcomes

    assert set(asyncio.run(right("expert", random.Random(0)))) == {1.0}
    assert 0.05 < sum(asyncio.run(right("novice", random.Random(0)))) / 40 < 0.5


@pytest.mark.slow
def test_every_arm_trains(tmp_path: Path) -> None:
    warm_up("spoiled", tmp_path, steps=20)
    runs = [train("spoiled", arm, 0, branching.RATES[0], 1, tmp_path) for arm in ARMS]
    assert [run.steps for run in runs] == [branching.EVAL_EVERY] * 3
    assert all(0 == run.tokens[0] < run.tokens[1] and len(run.success) == 2 for run in runs)
    plain, trees, _ = runs
    assert trees.tokens[1] < 1.5 * plain.tokens[1]  # shared turns count once


def test_summary_and_page(tmp_path: Path) -> None:
    runs = []
    for arm, factor in zip(ARMS, (4, 2, 3), strict=True):
        for seed, rate in [*((seed, 1e-3) for seed in range(4)), (TUNING_SEED, 1e-3), (TUNING_SEED, 1e-4)]:
            tokens = [0, 100 * factor, 200 * factor]
            is_bad = (arm, seed) == ("plain", 3) or rate == 1e-4
            success = [0.1, 0.2, 0.3] if is_bad else [0.1, 0.7, 0.95]
            runs.append(
                BranchingRun("chain", arm, seed, rate, success, tokens, [0, 10 * factor, 20 * factor])
            )
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(asdict(run)) + "\n" for run in runs[:6]))
    (tmp_path / "b.jsonl").write_text("".join(json.dumps(asdict(run)) + "\n" for run in runs[4:]))
    merged = read_runs([tmp_path / "a.jsonl", tmp_path / "b.jsonl"])
    assert merged == runs
    result = summary(merged)
    trees = result["arms"]["chain/trees"]
    assert (trees["rate"], trees["seeds"]) == (1e-3, 4)
    assert trees["tokens"] == [400, 400, 400] and trees["tokens_ratio"] == [2, 2, 2]
    assert result["arms"]["chain/plain"]["censored"] == [3]
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- branching results -->\nold\n<!-- end of branching results -->\nafter\n")
    write_page(result, page)
    assert "old" not in page.read_text() and table(result) in page.read_text()
