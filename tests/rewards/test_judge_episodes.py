"""Judges of groups, and judges that fail, against a real server on the loopback."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence
from typing import Any

import pytest

from tests.kits.judge import Said, finished, judge_at, judging, scored
from tests.kits.rollout import rollout
from TrainingFactory.rewards.judge.endpoints import JudgeFailure
from TrainingFactory.rewards.judge.model_judge import PairJudge, RankingJudge
from TrainingFactory.rewards.workers.process import FinishedEpisode
from TrainingFactory.types import Reward, Trajectory

pytestmark = pytest.mark.usefixtures("judge_key")


def better(prompt: str, number: int) -> str:
    """Prefers the text with the larger number in it."""
    found = re.findall(r"quality (\d+)", prompt)
    if "Winner" in prompt:
        first, second = map(int, found)
        return "Winner: tie" if first == second else f"Winner: {'A' if first > second else 'B'}"
    order = sorted(range(len(found)), key=lambda place: -int(found[place]))
    return "Ranking: " + " > ".join("ABCDEFGH"[place] for place in order)


def grouped(judge: Any, *trajectories: Trajectory) -> list[float]:
    rewards: Sequence[Reward] = asyncio.run(judge([FinishedEpisode(each) for each in trajectories]))
    return [reward.outcome for reward in rewards]


def test_a_group_is_ranked_and_compared():
    qualities = (3, 9, 1)
    group = [finished(f"quality {each}", prompt="x") for each in qualities]
    with judging(better) as server:
        ranking = judge_at(server.url, verdict="ranking", samples=3)
        assert isinstance(ranking, RankingJudge) and grouped(ranking, *group) == [0.5, 1.0, 0.0]
        shown = [re.findall(r"quality (\d+)", body["messages"][-1]["content"]) for body in server.asked]
        assert sorted(shown) == [["1", "3", "9"], ["3", "9", "1"], ["9", "1", "3"]]  # each in every place
        assert grouped(ranking, group[0], finished("", status="max_turns"), group[2]) == [1.0, 0.0, 0.0]
        with pytest.raises(ValueError, match="compares the episodes of a group"):
            grouped(ranking, group[0])
        server.asked.clear()
        pairs = judge_at(server.url, verdict="pairwise")
        assert isinstance(pairs, PairJudge) and grouped(pairs, *group) == [0.5, 1.0, 0.0]
        assert len(server.asked) == 6  # three pairs in both orders
        assert grouped(pairs, group[0], finished("", status="truncated")) == [1.0, 0.0]
        server.asked.clear()
        neighbours = judge_at(server.url, verdict="pairwise", opponents=1)
        many = [finished(f"quality {each}", prompt="x") for each in (1, 2, 3, 4)]
        assert grouped(neighbours, *many) == [0.0, 0.5, 0.5, 1.0] and len(server.asked) == 8


def test_the_place_of_a_text_decides_nothing():
    with judging("Winner: A") as server:
        group = [finished("one"), finished("two")]
        assert grouped(judge_at(server.url, verdict="pairwise"), *group) == [0.5, 0.5]


def test_a_group_without_a_verdict_gets_no_reward():
    group = [finished("quality 1"), finished("quality 2")]
    with judging("I would rather not.") as server:
        for verdict in ("ranking", "pairwise"):
            with pytest.raises(JudgeFailure):
                grouped(judge_at(server.url, verdict=verdict), *group)


def test_an_episode_without_an_answer_is_not_shown():
    with judging() as server:
        judge = judge_at(server.url)
        unfinished = [finished("half an", status="truncated"), finished(" "), finished(status="max_turns")]
        assert [each.outcome for each in scored(judge, *unfinished)] == [0.0] * 3
        assert not server.asked and judge.metrics["judge/unfinished"] == 3
        [unknown] = scored(judge, finished(status="tool_failure"))
        assert isinstance(unknown, ValueError)
        assert scored(judge_at(server.url, judge_unfinished=True), unfinished[0])[0].outcome == 0.7


def completion(content: Any, **more: Any) -> bytes:
    choice = {"message": {"role": "assistant", "content": content} | more, "finish_reason": "stop"}
    return json.dumps({"choices": [choice]}).encode()


FAULTS: list[tuple[Said, str]] = [
    ("Nice weather.", "not one line `Score: ...`"),
    (completion(None), "not one line `Score: ...`"),
    (completion(None, refusal="I cannot"), "the judge refused to answer"),
    ("Score: 11", "score is 11; it must be from 0 to 10"),
    (b'{"choices": []}', "chat completion"),
    (b'{"choices": 3}', "chat completion"),
    (completion(7), "chat completion"),
    (b"", "chat completion"),
    (b"<html>down for repairs</html>", "chat completion"),
    (b"[" * 100_000, "chat completion"),
    ((500, b'{"error": "out of memory"}'), 'status 500: {"error": "out of memory"}'),
    (429, "status 429"),
    (403, "status 403"),
    (None, "could not be reached"),  # dies before it has answered
]


@pytest.mark.parametrize(("said", "reason"), FAULTS)
def test_a_failing_judge_drops_rows_and_never_rewards_zero(said: Said, reason: str):
    """In a rollout: of each group some rows hit the fault, the others are rewarded as they should be."""
    with judging(lambda prompt, number: said if number % 2 else "Score: 9") as server:
        judge = judge_at(server.url, concurrency=1)
        groups = rollout(say=lambda *_: "ok", names=("a", "b", "c"), group_size=2, reward=judge)
    played = [each for group in groups for each in group]
    assert [each.reward.outcome for each in played if each.reward is not None] == [0.9] * 3
    errors = [str(each.error) for each in played if each.reward is None]
    assert len(errors) == 3 and sum(judge.client.usage.failures.values()) == 3
    for error in errors:
        assert error.startswith("scoring failed: ") and reason in error and "Failure" not in error


def test_a_judge_that_never_answers_is_given_up():
    with judging() as server:
        server.hang.clear()
        judge = judge_at(server.url, timeout=0.1)
        found = scored(judge, *(finished(name=str(number)) for number in range(3)))
        server.hang.set()
        assert all(each.kind == "unavailable" and "within 0.1 s" in str(each) for each in found)
        assert isinstance(scored(judge_at(server.url), finished())[0], Reward)


def test_a_judge_that_is_cut_off_or_gone():
    with judging(missing=9) as server:
        judge = judge_at(server.url, retries=1)
        found = scored(judge, finished())
        assert len(server.asked) == 2
    found += scored(judge, finished())
    for each in found:
        assert (
            each.kind == "unavailable" and "could not be reached" in str(each) and "2 attempts" in str(each)
        )
