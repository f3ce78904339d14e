"""Requests to a judge: endpoints, attempts, limits, the cache, the budget, the key."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import quote, quote_plus

import pytest

from tests.kits.judge import KEY, Said, finished, judge_at, judging, scored
from tests.kits.rollout import FakeChat, FakeSampler
from TrainingFactory.rewards.judge import client as judge_client
from TrainingFactory.rewards.judge.endpoints import BudgetSpent, JudgeFailure, Reply, SampledJudge
from TrainingFactory.rewards.model_judge import model_judge
from TrainingFactory.rewards.workers.finished_episode import FinishedEpisode
from TrainingFactory.tools.builtin.making import call_with
from TrainingFactory.tools.builtin.model_tools import seconds_of
from TrainingFactory.types import Message, Reward, SamplingParams

pytestmark = pytest.mark.usefixtures("judge_key")


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
    assert server.headers[0]["path"] == "/v1/messages" and server.headers[0]["x-api-key"] == "sk-other"
    assert "Authorization" not in server.headers[0]
    body = server.asked[0]
    assert body["max_tokens"] > 0 and "strict and fair judge" in body["system"]
    assert [message["role"] for message in body["messages"]] == ["user"]
    # what is refused or cut off is paid for all the same
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
    assert "its model takes 10" in str(full)


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


def test_so_many_a_second():
    async def times() -> list[float]:
        loop, arrived = asyncio.get_running_loop(), list[float]()

        class Noting:
            identity = "noting"

            async def ask(self, messages: Sequence[Message], number: int) -> Reply:
                arrived.append(loop.time())
                return Reply("Score: 5", 1, 1)

            async def check(self) -> None: ...

        judge: Any = model_judge(model=Noting(), rate=50)
        await asyncio.gather(*(judge(FinishedEpisode(finished())) for _ in range(6)))
        return arrived

    arrived = asyncio.run(times())
    assert (
        len(arrived) == 6 and arrived[-1] - arrived[0] > 0.05
    )  # five gaps of 0.02 s; without a rate at once


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
        one.close()
        again = judge_at(server.url, cache=path)
        assert [each.outcome for each in scored(again, finished())] == [
            0.1
        ]  # another process would find it too
        assert again.client.usage.cached == 1 and again.client.usage.requests == 0
        for number, options in enumerate(
            [{"model": "other"}, {"options": {"temperature": 0}}, {"rubric": "Another."}, {"verdict": "json"}]
        ):
            more = {"schema": {"properties": {"score": {}}}} if "verdict" in options else None
            other = judge_at(server.url, cache=path, verdict_options=more, **options)
            scored(other, finished())
            assert other.client.usage.requests == 1, number
            other.close()
        scored(again, finished("It is 5."))
        assert again.client.usage.requests == 1
        again.close()
    for file in tmp_path.iterdir():
        assert KEY.encode() not in file.read_bytes()


def test_equal_requests_at_the_same_time_are_made_once(tmp_path: Path):
    with judging(delay=0.05) as server:
        judge = judge_at(server.url, cache=tmp_path / "judge.sqlite")
        rewards = scored(judge, *(finished() for _ in range(5)))
        judge.close()
    assert len(server.asked) == 1 and [reward.outcome for reward in rewards] == [0.7] * 5


def test_a_budget_stops_politely(tmp_path: Path):
    prices = {"input_price": 2.0, "output_price": 50.0}  # 100 and 10 tokens: 0.0007 a request
    with judging() as server:
        for limit, made in [({"max_cost": 0.002}, 3), ({"max_tokens": 220}, 2), ({"max_requests": 4}, 4)]:
            judge = judge_at(
                server.url, concurrency=1, budget=prices | limit, cache=tmp_path / f"{made}.sqlite"
            )
            found = scored(judge, *(finished(f"Answer {number}.") for number in range(6)))
            assert [isinstance(each, Reward) for each in found] == [True] * made + [False] * (6 - made)
            assert isinstance(found[-1], BudgetSpent) and f"budget.{next(iter(limit))} is" in str(found[-1])
            assert judge.figures["judge/failed_budget"] == 6 - made
            assert judge.figures["judge/cost"] == pytest.approx(0.0007 * made)
            assert isinstance(scored(judge, finished("Answer 0."))[0], Reward)  # what is kept is still free
            judge.close()
        server.usage = None
        guessing = judge_at(server.url)
        scored(guessing, finished())
    assert guessing.client.usage.estimated == 1 and guessing.client.usage.input_tokens > 100


def test_the_key_goes_nowhere(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.DEBUG)
    with judging(lambda prompt, number: f"bad key {KEY}".encode()) as server:
        judge = judge_at(server.url)
        [error] = scored(judge, finished())
        assert (
            isinstance(error, JudgeFailure)
            and KEY not in str(error)
            and KEY not in repr(vars(judge.client.model))
        )
        monkeypatch.delenv("OPENAI_API_KEY")
        [missing] = scored(judge, finished())
    assert "OPENAI_API_KEY" in str(missing) and len(server.asked) == 1
    assert KEY not in caplog.text


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
        judge.close()
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
    arrived: list[float] = []

    def busy(prompt: str, number: int) -> Said:
        arrived.append(time.monotonic())
        return (429, 503)[number] if number < 2 else "Score: 5"

    with judging(busy, sends={"Retry-After": "0.3"}) as server:
        assert scored(judge_at(server.url, retries=2), finished())[0].outcome == 0.5
    assert all(later - earlier >= 0.29 for earlier, later in pairwise(arrived)) and len(arrived) == 3
    monkeypatch.setattr(judge_client, "LONGEST_WAIT", 0.01)
    with judging(
        lambda prompt, number: "Score: 5" if number else 503, sends={"Retry-After": "9999"}
    ) as server:
        assert scored(judge_at(server.url, retries=1), finished())[0].outcome == 0.5  # and not in three hours


def test_times_to_wait():
    soon = datetime.now(UTC) + timedelta(seconds=100)
    assert 90 < (seconds_of(format_datetime(soon, usegmt=True)) or 0) <= 100
    assert 90 < (seconds_of(soon.strftime("%A, %d-%b-%y %H:%M:%S GMT")) or 0) <= 100  # an old form
    for text, seconds in [("3", 3), ("1.5", 1.5), ("-2", 0), ("Wed, 21 Oct 2015 07:28:00 GMT", 0)]:
        assert seconds_of(text) == seconds
    for text in (None, "", "soon", "nan", "inf", "1e999", "99999999999999999999999 GMT"):
        assert seconds_of(text) is None


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"verdict": "scor"}, "did you mean score"),
        ({"api": "antropic"}, "did you mean anthropic"),
        ({"base_url": ""}, "base_url"),
        ({"base_url": "http://me:secret@host/v1"}, "no password"),
        ({"base_url": "http://secret@host/v1"}, "no password"),
        ({"base_url": "me:secret@host/v1"}, "no password"),
        ({"base_url": "https://host/v1?key=secret"}, "nothing after a ?"),
        ({"base_url": "https://host/v1#secret"}, "nothing after a ? or #"),
        ({"base_url": "http://[secret/v1"}, "base_url is no address"),
        ({"base_url": "http://host:secret/v1"}, "base_url is no address"),
        ({"base_url": "host/v1"}, "not 'host/v1'"),
        ({"api_key_env": "sk-secret-1"}, "not the key itself"),
        ({"api_key_env": "AIzaSySecret0123456789abcdef"}, "not the key itself"),
        ({"options": {"api_key": "secret"}}, "options.api_key would stand in every log"),
        ({"api_key_env": ""}, "api_key_env is the name of the environment variable"),
        ({"vote": "max"}, "vote is 'max'"),
        ({"samples": 0}, "samples is 0"),
        ({"concurrency": 0}, "concurrency is 0"),
        ({"rate": -1}, "rate is -1"),
        ({"retries": "many"}, "retries is 'many'"),
        ({"verdict_options": {"hi": 5}}, "no option 'hi'"),
        ({"verdict_options": {"low": 5, "high": 1}}, "low must be below high"),
        ({"verdict": "ranking", "verdict_options": {"low": 5}}, "has no options"),
        ({"budget": {"max_cost": 1}}, "needs the prices"),
        ({"budget": {"max": 1}}, "no option 'max'"),
        ({"opponents": 2}, "opponents is for the verdict pairwise"),
        ({"template": "{reponse}"}, "{reponse}"),
        ({"rubric": 3}, "rubric is 3; it must be a text"),
        ({"timeout": "x"}, "timeout is 'x'"),
        ({"options": [1]}, "options is [1]"),
        ({"temprature": 1}, "no option 'temprature'"),
    ],
)
def test_wrong_options_are_told_at_the_start(options: dict[str, Any], says: str):
    given = {"base_url": "http://127.0.0.1:9/v1", "model": "big"} | options
    with pytest.raises(ValueError, match=re.escape(says)) as raised:
        call_with(model_judge, given, "the judge")
    assert "secret" not in str(raised.value).lower()
