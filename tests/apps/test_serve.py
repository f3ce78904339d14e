"""`tfactory serve` with the built-in model, over real HTTP on loopback."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.kits.engine import plain_logprobs
from tests.kits.serve import CHAT, events, joined, live, post, raw, tiny_chat, user
from tests.kits.waiting import HANG, wait_until
from TrainingFactory.agent_api.turns.response_text import TurnReader
from TrainingFactory.apps.serving.server import ChatServer, make_server
from TrainingFactory.config import load_config
from TrainingFactory.models import chat_format, load_model
from TrainingFactory.sampling import NativeEngine
from TrainingFactory.types import Message, SamplingParams


@pytest.fixture(scope="module")
def served() -> ChatServer:
    return make_server(load_config(None, ["sampling.slots=8", "model.max_length=600"]), "tiny", queue=32)


@pytest.fixture(scope="module")
def tiny(served: ChatServer) -> Iterator[httpx.Client]:
    with live(served) as client:
        yield client


def test_a_plain_answer(tiny: httpx.Client) -> None:
    answer = post(tiny, user(model="tiny", max_tokens=9, seed=3))
    [choice] = answer["choices"]
    assert answer["object"] == "chat.completion" and answer["model"] == "tiny"
    assert choice["message"]["role"] == "assistant" and choice["message"]["content"]
    assert choice["finish_reason"] == "length" and choice["logprobs"] is None
    prompt = tiny_chat().render([Message("user", "Where is the tower?")])
    assert [answer["usage"][f"{name}_tokens"] - len(prompt) for name in ("prompt", "total")] == [0, 9]
    models = tiny.get("/v1/models").json()
    assert [row["id"] for row in models["data"]] == ["tiny"]
    assert tiny.get("/health").json() == {
        "status": "ok",
        "model": "tiny",
        "running": 0,
        "waiting": 0,
        "refused": 0,
        "ignored": 0,
    }


def test_seeds_decide_and_choices_differ(tiny: httpx.Client) -> None:
    def texts(**fields: Any) -> list[str]:
        answer = post(tiny, user(max_completion_tokens=8, **fields))
        return [choice["message"]["content"] for choice in answer["choices"]]

    first, second = texts(n=2, seed=11)
    assert texts(n=2, seed=11) == [first, second] and first != second
    assert texts(seed=11) == [first] and texts(seed=12) != [first]
    assert len({*texts(), *texts()}) == 2  # without a seed every answer is a new one
    assert texts(temperature=0, seed=1) == texts(temperature=0, seed=2) == texts(top_k=1) == texts(top_p=1e-9)


@pytest.mark.parametrize("temperature", [0.6, 0])
def test_logprobs_are_those_of_a_plain_forward(tiny: httpx.Client, temperature: float) -> None:
    loaded = load_model("builtin:tiny")
    chat = chat_format(loaded.tokenizer, stop_ids=loaded.stop_ids)
    prompt = chat.render([Message("user", "Where is the tower?")])
    params = SamplingParams(temperature, 20, chat.stop_ids, seed=5)
    sampled = asyncio.run(NativeEngine(loaded.model, slots=1, max_length=200).sample(prompt, params))
    ids = sampled.token_ids[: 20 if sampled.finish == "length" else -1]  # the end of the turn is no text
    expected = plain_logprobs(loaded.model, prompt, ids, temperature)
    body = user(max_tokens=20, seed=5, temperature=temperature, logprobs=True, top_logprobs=0)
    given = post(tiny, body)["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in given] == [chat.decode([token]) for token in ids]
    assert [entry["logprob"] for entry in given] == pytest.approx(expected, abs=1e-4)
    streamed = joined(events(tiny, body))["logprobs"]
    assert [entry["logprob"] for entry in streamed] == pytest.approx(expected, abs=1e-4)
    assert [entry["token"] for entry in streamed] == [entry["token"] for entry in given]


def test_a_stream_says_what_the_whole_answer_says(tiny: httpx.Client) -> None:
    for seed in range(3):
        body = user(max_tokens=40, seed=seed, n=2, logprobs=True)
        answer = post(tiny, body)
        chunks = events(tiny, body | {"stream_options": {"include_usage": True}})
        assert len(chunks) > 10 and chunks[-1]["choices"] == [] and chunks[-1]["usage"] == answer["usage"]
        assert all(chunk["usage"] is None for chunk in chunks[:-1])
        for choice in answer["choices"]:
            whole = joined(chunks, choice["index"])
            assert whole["content"] == choice["message"]["content"]
            assert whole["finish_reason"] == choice["finish_reason"]
            assert len(whole["logprobs"]) == len(choice["logprobs"]["content"])


def test_stop_strings_end_the_answer_before_them(tiny: httpx.Client) -> None:
    for seed in range(6):
        text = post(tiny, user(max_tokens=40, seed=seed))["choices"][0]["message"]["content"]
        stop = text[12:15]
        body = user(max_tokens=40, seed=seed, stop=[stop, "never said"], logprobs=True)
        answer = post(tiny, body)
        [choice] = answer["choices"]
        before = text[: text.index(stop)]
        assert choice["message"]["content"] == before.strip() and choice["finish_reason"] == "stop"
        assert answer["usage"]["completion_tokens"] < 40
        told = "".join(entry["token"] for entry in choice["logprobs"]["content"]).lstrip()
        # half characters have no text of their own, so only the others can be compared
        assert told.partition("\ufffd")[0].startswith(before.partition("\ufffd")[0])
        assert len(choice["logprobs"]["content"]) <= answer["usage"]["completion_tokens"]
        chunks = events(tiny, body | {"stream_options": {"include_usage": True}})
        assert joined(chunks)["content"] == before.strip()
        same = [entry["token"] for entry in joined(chunks)["logprobs"]]
        assert same == [entry["token"] for entry in choice["logprobs"]["content"]]
        assert chunks[-1]["usage"] == answer["usage"]


def test_sixteen_at_once_are_sampled_together_and_stay_themselves(
    served: ChatServer, tiny: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    bodies = [user(f"Question {n}", max_tokens=12, seed=n) for n in range(16)]
    alone = [post(tiny, body)["choices"][0]["message"] for body in bodies]
    engine = served.model.sampler
    assert isinstance(engine, NativeEngine)
    run, go_on = engine._runner.run, threading.Event()
    monkeypatch.setattr(engine._runner, "run", lambda plan: (go_on.wait(HANG), run(plan))[1])
    with ThreadPoolExecutor(16) as pool:
        answers = [pool.submit(post, tiny, body) for body in bodies]
        try:
            wait_until(lambda: tiny.get("/health").json().items() >= {"running": 8, "waiting": 8}.items())
        finally:
            go_on.set()
        together = [answer.result(HANG)["choices"][0]["message"] for answer in answers]
    assert together == alone


def test_a_client_that_hangs_up_frees_the_engine(
    served: ChatServer, tiny: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = served.model.sampler
    assert isinstance(engine, NativeEngine)
    before, run = engine.stats.forwards, engine._runner.run
    begun, go_on = threading.Event(), threading.Event()

    def held(plan: Any) -> Any:  # the first step lasts until the client is gone
        begun.set()
        assert go_on.wait(HANG)
        return run(plan)

    monkeypatch.setattr(engine._runner, "run", held)
    with tiny.stream("POST", CHAT, json=user(max_tokens=550, n=8, stream=True)) as answer:
        lines = answer.iter_lines()  # who drops it hangs up
        next(lines)
        assert begun.wait(HANG)
    wait_until(lambda: tiny.get("/health").json()["running"] == 0)
    go_on.set()
    wait_until(lambda: engine.num_sessions == 0)
    post(tiny, user(max_tokens=2))
    assert engine.stats.forwards - before <= 5  # of the 550 that were asked for


def test_streams_of_a_deterministic_engine_are_exact() -> None:
    options = ["sampling.slots=2", "model.max_length=200", "sampling.deterministic=true"]
    with live(make_server(load_config(None, options), "tiny")) as client, ThreadPoolExecutor(5) as pool:
        bodies = [user(f"Question {n}", max_tokens=20, seed=n, logprobs=True) for n in range(5)]
        whole = [answer["choices"][0] for answer in pool.map(lambda body: post(client, body), bodies)]
        streamed = [joined(chunks) for chunks in pool.map(lambda body: events(client, body), bodies)]
    for choice, same in zip(whole, streamed, strict=True):
        assert same["content"] == choice["message"]["content"]
        assert same["logprobs"] == choice["logprobs"]["content"]  # to the last bit


def test_what_was_shown_of_a_turn_is_never_taken_back() -> None:
    chat, rng = tiny_chat(), random.Random(0)
    reader = TurnReader(chat, [], [])
    pieces = [
        "<think>",
        "</think>",
        "<think",
        " ",
        "\n",
        "stop",
        "sto",
        "123",
        "op",
        "é",
        "你",
        "<tool_call>",
    ]
    pieces += ["word", "<"]
    for _ in range(400):
        ids = raw("".join(rng.choices(pieces, k=rng.randrange(1, 14))))[:-1]
        stops = rng.sample(["stop", "op", "123", "2", "\n\n", "d<"], rng.randrange(3))
        text = reader.decode(ids)
        cut = reader.find_stop(ids, text, stops)
        whole = reader.parse_message(ids, text if cut is None else text[: cut.start])
        assert not any(stop in text[: cut.start if cut else None] for stop in stops)
        for size in range(1, len(ids)):
            so_far = reader.decode(ids[:size])
            early = reader.find_stop(ids[:size], so_far, stops)
            assert early == (cut if cut and size >= cut.num_tokens else None)
            if early is None:
                shown = reader.parse_partial(so_far, stops)
                assert whole.content.startswith(shown.content)
                assert (whole.reasoning or "").startswith(shown.reasoning or "")
