"""Requests to a judge: endpoints, attempts, limits, the cache, the budget, the key."""

from __future__ import annotations

import asyncio
import json
import logging
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from urllib.parse import quote, quote_plus

import pytest

from tests.kits.judge import KEY, Said, all_scored, finished, judge_at, judging, scored
from tests.kits.rollout import FakeChat, FakeSampler
from TrainingFactory.common.endpoints.transport import parse_retry_after
from TrainingFactory.rewards.judge.endpoints import JudgeFailure, SampledJudge
from TrainingFactory.rewards.judge.model_judge import model_judge
from TrainingFactory.types import Reward, SamplingParams

pytestmark = pytest.mark.usefixtures("judge_key")


def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Note what is waited for, and do not wait."""
    waited: list[float] = []
    really = asyncio.sleep

    async def sleep(seconds: float) -> None:
        waited.append(seconds)
        await really(0)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    return waited


def test_an_anthropic_endpoint(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OTHER_KEY", "sk-other")
    with judging("Verdict: yes") as server:
        server.finish = "end_turn"
        judge = judge_at(server.url, api="anthropic", api_key_env="OTHER_KEY", verdict="yes_no")
        [reward] = scored(judge, finished())
        server.finish = "refusal"
        [refused] = scored(judge, finished())
        server.finish = "max_tokens"
        [cut] = scored(judge, finished())
    assert reward.outcome == 1.0 and refused.kind == "refused" and cut.kind == "cut"
    assert server.headers[0]["path"] == "/v1/messages"
    assert server.headers[0]["Authorization"] == "Bearer sk-other" and "x-api-key" not in server.headers[0]
    body = server.asked[0]
    assert body["max_tokens"] > 0 and "strict and fair judge" in body["system"]
    assert [message["role"] for message in body["messages"]] == ["user"]
    # what is refused or cut off costs all the same
    assert (judge.client.usage.input_tokens, judge.client.usage.output_tokens) == (300, 30)
    assert judge.client.usage.failures == {"refused": 1, "cut": 1}


def test_a_model_in_this_process():
    sampler = FakeSampler(lambda session, turn, prompt: f"Score: {session + 3}")
    local = SampledJudge(sampler, FakeChat(), SamplingParams(max_tokens=50, seed=5), "tiny")
    [reward] = scored(model_judge(model=local, samples=3, vote="median", concurrency=1), finished())
    assert reward.outcome == 0.4  # 3, 4, 5
    assert sorted(params.seed for _, _, params in sampler.requests) == [5, 6, 7]
    short = SampledJudge(sampler, FakeChat(), SamplingParams(max_tokens=4), "tiny")
    [cut] = scored(model_judge(model=short), finished())
    assert isinstance(cut, JudgeFailure) and cut.kind == "cut"
    narrow = SampledJudge(FakeSampler(lambda *_: "", 10), FakeChat(), SamplingParams(), "tiny")
    [full] = scored(model_judge(model=narrow), finished())
    assert "max_length is 10" in str(full)


def test_several_samples_and_a_vote():
    answers = ["Score: 2", "junk", "Score: 4", "Score: 4"]
    with judging(lambda prompt, number: answers[number % 4]) as server:
        for vote, value in (("mean", 1 / 3), ("median", 0.4), ("majority", 0.4)):
            judge = judge_at(server.url, samples=4, vote=vote, concurrency=1)
            [reward] = scored(judge, finished())
            assert reward.outcome == pytest.approx(value)
            assert judge.client.usage.failures == {"unreadable": 1}  # the lost sample is counted
        answers[2] = "junk"  # two of four are not enough
        [error] = scored(judge_at(server.url, samples=4, concurrency=1), finished())
    assert isinstance(error, JudgeFailure) and error.kind == "unreadable"


def test_only_what_may_pass_is_tried_again():
    for statuses, attempts, good in [
        ([429, 500, 503], 4, True),
        ([429] * 9, 4, False),
        ([400], 1, False),
        ([401], 1, False),
    ]:
        with judging(
            lambda prompt, number, s=statuses: s[number] if number < len(s) else "Score: 5"
        ) as server:
            judge = judge_at(server.url, retries=3)
            [found] = scored(judge, finished())
        assert len(server.asked) == attempts and isinstance(found, Reward) == good
        assert judge.client.usage.retries == attempts - 1
        if not good:
            assert found.kind == ("unavailable" if attempts > 1 else "error") and KEY not in str(found)


def test_so_many_at_a_time():
    with judging(delay=0.02) as server:
        rewards = scored(judge_at(server.url, concurrency=3), *(finished(name=str(n)) for n in range(12)))
    assert all(isinstance(reward, Reward) for reward in rewards) and server.most == 3


def test_so_many_a_second(monkeypatch: pytest.MonkeyPatch):
    waited = waits(monkeypatch)
    with judging() as server:
        scored(judge_at(server.url, rate=0.01), *(finished() for _ in range(3)))
    assert len(server.asked) == 3
    assert [pause > 50 for pause in waited if pause] == [
        True
    ] * 2  # gaps of 100 s, less what the requests took


def test_connections_are_kept_for_a_run_and_closed_with_it():
    """Six requests, two at a time, in each of two runs; then one in a run that does not close."""
    episodes = [finished(name=str(number)) for number in range(6)]
    with judging(keeps=True) as server:
        judge = judge_at(server.url, concurrency=2)
        for made in (2, 4):
            assert len(scored(judge, *episodes)) == 6 and server.connections == made
        asyncio.run(all_scored(judge, episodes[0]))
        assert [each.outcome for each in scored(judge, *episodes)] == [0.7] * 6
        assert server.connections == 7 and len(server.asked) == 19


def test_replies_are_kept_and_junk_is_not(tmp_path: Path):
    junk = {"on": True}
    path = tmp_path / "judge.sqlite"

    def say(prompt: str, number: int) -> str:
        return "hm" if junk["on"] else f"Score: {number}"

    with judging(say) as server:
        one = judge_at(server.url, cache=path, budget={"input_price": 1, "output_price": 10})
        [error] = scored(one, finished())
        assert isinstance(error, JudgeFailure)
        junk["on"] = False
        assert [each.outcome for each in scored(one, finished())] == [0.1]
        again = judge_at(server.url, cache=path)
        # Another process would find it too.
        assert [each.outcome for each in scored(again, finished())] == [0.1]
        assert again.client.usage.cached == 1 and again.client.usage.requests == 0
        for number, options in enumerate(
            [{"model": "other"}, {"options": {"temperature": 0}}, {"rubric": "Another."}, {"verdict": "json"}]
        ):
            more = {"schema": {"properties": {"score": {}}}} if "verdict" in options else None
            other = judge_at(server.url, cache=path, verdict_options=more, **options)
            scored(other, finished())
            assert other.client.usage.requests == 1, number
        scored(again, finished("It is 5."))
        assert again.client.usage.requests == 1
    for file in tmp_path.iterdir():
        assert KEY.encode() not in file.read_bytes()


def test_a_budget_stops_politely(tmp_path: Path):
    prices = {"input_price": 2.0, "output_price": 50.0}  # 100 and 10 tokens: 0.0007 a request
    with judging() as server:
        for limit, made in [({"max_cost": 0.002}, 3), ({"max_tokens": 220}, 2), ({"max_requests": 4}, 4)]:
            judge = judge_at(
                server.url, concurrency=1, budget=prices | limit, cache=tmp_path / f"{made}.sqlite"
            )
            found = scored(judge, *(finished(f"Answer {number}.") for number in range(6)))
            assert [isinstance(each, Reward) for each in found] == [True] * made + [False] * (6 - made)
            assert found[-1].kind == "budget" and f"budget.{next(iter(limit))} is" in str(found[-1])
            assert judge.metrics["judge/failed_budget"] == 6 - made
            assert judge.metrics["judge/cost"] == pytest.approx(0.0007 * made)
            assert isinstance(scored(judge, finished("Answer 0."))[0], Reward)  # what is kept is still free
        server.usage = None
        guessing = judge_at(server.url)
        scored(guessing, finished())
    assert guessing.client.usage.estimated == 1 and guessing.client.usage.input_tokens > 100


def test_a_key_is_read_at_each_request_and_kept_nowhere(monkeypatch: pytest.MonkeyPatch):
    with judging() as server:
        judge = judge_at(server.url)
        assert isinstance(scored(judge, finished())[0], Reward) and KEY not in repr(vars(judge.client.model))
        monkeypatch.delenv("OPENAI_API_KEY")
        [missing] = scored(judge, finished())
    assert "OPENAI_API_KEY" in str(missing) and len(server.asked) == 1


KEYS = ["sk-judge/98+76 54", "sk-judge-9876"]


@pytest.mark.parametrize("key", KEYS)
def test_a_key_that_the_server_repeats_goes_nowhere(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path, key: str
):
    caplog.set_level(logging.DEBUG, "TrainingFactory")
    monkeypatch.setenv("OPENAI_API_KEY", key)
    told = f"bad header Authorization: Bearer {key} in ?key={quote(key)}&{quote_plus(key)} {json.dumps(key)}"
    choice = {"message": {"role": "assistant", "content": f"{told}\nScore: 7"}, "finish_reason": "stop"}
    answers: list[Said] = [
        (401, told.encode()),
        (500, json.dumps({"error": told}).encode()),
        told,  # as the verdict, which cannot be read
        json.dumps({"choices": told}).encode(),
        json.dumps({"choices": [{"message": {"role": told, "content": told}}]}).encode(),
        json.dumps({"choices": [choice]}).encode(),
    ]
    file = tmp_path / "kept.sqlite"
    with judging(lambda prompt, number: answers[number]) as server:
        judge = judge_at(server.url, cache=file)
        found = [scored(judge, finished())[0] for _ in answers]
    assert all(isinstance(each, JudgeFailure) for each in found[:-1]) and found[-1].outcome == 0.7
    for written in {key, quote(key), quote_plus(key), json.dumps(key)[1:-1]}:
        assert written not in "".join(map(str, found)) + caplog.text
        assert written.encode() not in file.read_bytes()
    assert "***" in str(found[0])


@pytest.mark.parametrize("key", ["0", "x", "Score", "choices"])
def test_a_key_that_is_none_changes_no_answer(monkeypatch: pytest.MonkeyPatch, key: str):
    """Servers that need no key are given any: such a text stands in what they say, too."""
    monkeypatch.setenv("OPENAI_API_KEY", key)
    with judging("Score: 10") as server:
        assert [each.outcome for each in scored(judge_at(server.url), finished())] == [1.0]


def test_what_the_endpoint_says_about_waiting_is_heeded(monkeypatch: pytest.MonkeyPatch):
    waited = waits(monkeypatch)
    for header, pause in (("40", 40), ("9999", 120)):  # and not in three hours
        with judging(
            lambda prompt, number: 503 if number < 2 else "Score: 5", sends={"Retry-After": header}
        ) as server:
            assert scored(judge_at(server.url, retries=2), finished())[0].outcome == 0.5
        assert [each for each in waited if each >= 1] == [pause, pause]
        waited.clear()


def test_times_to_wait():
    soon = datetime.now(UTC) + timedelta(seconds=100)
    assert 90 < (parse_retry_after(format_datetime(soon, usegmt=True)) or 0) <= 100
    assert 90 < (parse_retry_after(soon.strftime("%A, %d-%b-%y %H:%M:%S GMT")) or 0) <= 100  # an old form
    for text, seconds in [("3", 3), ("1.5", 1.5), ("-2", 0), ("Wed, 21 Oct 2015 07:28:00 GMT", 0)]:
        assert parse_retry_after(text) == seconds
    for text in (None, "", "soon", "nan", "inf", "1e999", "99999999999999999999999 GMT"):
        assert parse_retry_after(text) is None
