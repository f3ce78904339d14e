"""The API dialects: equal rows, round trips, streams, errors."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.kits.dialects import PATHS, Reply, SDKTalk, Talk, needs_sdks
from tests.kits.proxy import Talker, begin, ended, proxied
from tests.kits.serve import Script, live, script, tiny_chat
from tests.kits.waiting import HANG, wait_until
from tests.kits.warm import WARM, Homes
from TrainingFactory.agent_api.agent_endpoint import AgentEndpoint, EpisodeRequests, make_key
from TrainingFactory.agent_api.agent_program import ProgramRun, SelfScoredEpisode
from TrainingFactory.data.samples import to_samples
from TrainingFactory.models import chat_format, load_model
from TrainingFactory.rollout.episode import EpisodeRun, EpisodeSettings
from TrainingFactory.sampling import NativeEngine
from TrainingFactory.types import Message, Sample, SamplingParams, Task, ToolCall, ToolSpec, Trajectory

DIALECTS = list(PATHS)
SDKS = pytest.mark.xdist_group("sdks")  # imported by one process of the suite
WEATHER = ToolSpec("weather", "Of a city.", {"type": "object", "properties": {"city": {"type": "string"}}})
CALLS = [("weather", {"city": "Rome", "days": [1, 2.5]}), ("weather", {"city": "Łódź"})]
STOPS = {
    "chat": ("tool_calls", "stop", "length"),
    "messages": ("tool_use", "end_turn", "max_tokens"),
    "responses": ("completed", "completed", "incomplete"),
    "gemini": ("STOP", "STOP", "MAX_TOKENS"),
}
LIMITS = {"chat": "max_tokens", "messages": "max_tokens", "responses": "max_output_tokens"}


def limited(dialect: str, tokens: int) -> dict[str, Any]:
    if dialect == "gemini":
        return {"generationConfig": {"maxOutputTokens": tokens}}
    return {LIMITS[dialect]: tokens}


def by_client(*sdk_marks: Any) -> list[Any]:
    """Every dialect with plain requests, and through its SDK with and without a stream."""
    plain = [pytest.param(dialect, None, id=dialect) for dialect in DIALECTS]
    marks = [needs_sdks, pytest.mark.servers, SDKS, *sdk_marks]
    return plain + [
        pytest.param(
            dialect,
            stream,
            marks=marks if stream else [*marks, pytest.mark.slow],
            id=f"{dialect}-sdk{'-stream' * stream}",
        )
        for dialect in DIALECTS
        for stream in (False, True)
    ]


def talk_to(client: httpx.Client, dialect: str, stream: bool | None, **options: Any) -> Talk:
    if stream is None:
        return Talk(dialect, str(client.base_url), **options)
    return SDKTalk(dialect, str(client.base_url), stream=stream, **options)


def scripted(prompt: str) -> Message:
    if "<tool_response>" in prompt:
        return Message("assistant", "Sun, then rain.", reasoning="Both came.")
    calls = [ToolCall(name, arguments) for name, arguments in CALLS]
    return Message("assistant", "Let me see.", calls, reasoning="Two cities.")


@pytest.mark.parametrize(("dialect", "stream"), by_client())
def test_calls_thoughts_and_results_continue_the_sampled_tokens(
    tmp_path: Path, dialect: str, stream: bool | None
) -> None:
    sampler = Talker(scripted)
    with proxied(sampler, tmp_path / "out") as client, begin(client) as mine:
        key = mine.headers["authorization"].removeprefix("Bearer ")
        talk = talk_to(mine, dialect, stream, key=key, tools=[WEATHER])
        talk.begin([Message("system", "Be brief."), Message("user", "Weather?")])
        first = talk.answer()
        assert (first.text, first.reasoning, first.calls) == ("Let me see.", "Two cities.", CALLS)
        talk.give_results(["sun", "rain"])
        second = talk.answer()
        assert (second.text, second.reasoning, second.calls) == ("Sun, then rain.", "Both came.", [])
        assert (first.stop, second.stop) == STOPS[dialect][:2]
        talk.say("And tomorrow?")
        talk.answer()
        counts = client.get("/health").json()
        mine.post("/v1/reward", json={"reward": 1.0})
    assert counts["extended"] == 2 and counts["turns"] == 3 and "malformed" not in counts, counts
    [episode] = ended(tmp_path / "out")
    assert [turn.message.tool_calls != [] for turn in episode.turns] == [True, False, False]
    assert first.tokens == len(episode.turns[0].completion.token_ids)
    results = [(message.content, message.name) for message in episode.turns[0].replies]
    assert results == [("sun", "weather"), ("rain", "weather")]
    assert len(to_samples(episode)) == 1


class DialectEpisode(SelfScoredEpisode):
    """A client that gives the model what the native environment gave it."""

    def __init__(
        self, native: Trajectory, endpoint: AgentEndpoint, dialect: str, stream: bool | None
    ) -> None:
        super().__init__(native.task, endpoint, make_key())
        self.native, self.dialect, self.stream = native, dialect, stream

    async def run_client(self, calls: EpisodeRequests) -> None:
        await asyncio.to_thread(self._talk)

    def _talk(self) -> None:
        base_url = httpx.Client(base_url=self.endpoint.base_url.removesuffix("/v1"))
        talk = talk_to(base_url, self.dialect, self.stream, key=self.key, tools=self.native.tools)
        talk.begin(self.native.prompt)
        for turn in self.native.turns:
            reply = talk.answer()
            assert reply.calls == [(call.name, call.arguments) for call in turn.message.tool_calls]
            if turn.replies:
                talk.give_results([message.content for message in turn.replies])


def right(episode: Any) -> float:
    return float(episode.trajectory.answer == episode.task.answer)


@pytest.fixture(scope="module")
def native() -> Iterator[tuple[EpisodeSettings, NativeEngine, Trajectory]]:
    """An episode of two turns that the small warm model plays in our own environment."""
    loaded = load_model(str(WARM))
    chat = chat_format(loaded.tokenizer, stop_ids=loaded.stop_ids)
    params = SamplingParams(max_tokens=24, stop_ids=chat.stop_ids)
    settings = EpisodeSettings(Homes, chat, params, right, max_turns=3)
    engine = NativeEngine(loaded.model, slots=2, max_length=512, deterministic=True)

    async def play(task: Task) -> Trajectory:
        trajectory = Trajectory(task, group=task.id)
        run = EpisodeRun(settings, trajectory, engine.session(), engine.max_length, lambda turn: 100 + turn)
        try:
            return await run.run()
        finally:
            run.close_session()

    async def first_with_a_call() -> Trajectory:
        for task in Homes.tasks("train", 7, 12):
            episode = await play(task)
            calls = [call for turn in episode.turns for call in turn.message.tool_calls]
            if len(episode.turns) == 2 and episode.status == "done" and calls and not calls[0].error:
                return episode
        raise AssertionError("no such episode")

    yield settings, engine, asyncio.run(first_with_a_call())
    asyncio.run(engine.close())


def columns(rows: list[Sample]) -> list[Any]:
    return [(row.token_ids, row.loss_mask, row.logprobs, row.policy_version) for row in rows]


@pytest.mark.training
@pytest.mark.parametrize(("dialect", "stream"), by_client(pytest.mark.slow))
def test_rows_equal_those_of_the_native_environment(native: Any, dialect: str, stream: bool | None) -> None:
    settings, engine, episode = native

    async def play() -> Trajectory:
        endpoint = AgentEndpoint()
        await endpoint.open()
        rules = EpisodeSettings(
            lambda _: DialectEpisode(episode, endpoint, dialect, stream),
            settings.chat, settings.params, right, settings.max_turns,
        )  # fmt: skip
        turns = count(100)
        run = ProgramRun(rules, Trajectory(episode.task, group="g"), engine, lambda _: next(turns))
        try:
            return await run.run()
        finally:
            run.close_session()
            await endpoint.close()

    same = asyncio.run(play())
    assert (same.status, same.error, same.reward) == ("done", None, episode.reward)
    assert columns(to_samples(same)) == columns(to_samples(episode))


@pytest.mark.parametrize("dialect", DIALECTS)
def test_64_streams_at_once_each_get_their_own_answer(dialect: str) -> None:
    sampler = Script(lambda prompt: f"Number {prompt.rpartition('no. ')[2].split('<')[0]} of sixty-four.")
    path, extra = stream_of(dialect)

    def ask(number: int) -> str:
        talk = Talk(dialect, str(client.base_url), **extra)
        talk.say(f"no. {number}")
        lines = list(streamed(client, path, talk))
        return "".join(text_of(dialect, line) for line in lines)

    with live(sampler.server(slots=8, queue=64)) as client, ThreadPoolExecutor(64) as pool:
        answers = list(pool.map(ask, range(64)))
        state = client.get("/health").json()
    assert answers == [f"Number {number} of sixty-four." for number in range(64)]
    assert (state["running"], state["waiting"], state["refused"]) == (0, 0, 0)
    assert sampler.opened == sampler.closed == 64


def stream_of(dialect: str) -> tuple[str, dict[str, Any]]:
    if dialect == "gemini":
        return PATHS[dialect].replace(":generate", ":streamGenerate") + "?alt=sse", {}
    return PATHS[dialect], {"stream": True}


def streamed(client: httpx.Client, path: str, talk: Talk) -> Iterator[dict[str, Any]]:
    """Yield the JSON of the events."""
    with client.stream("POST", path, json=talk.body(), headers=talk.headers()) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                yield json.loads(line.removeprefix("data: "))


def text_of(dialect: str, event: dict[str, Any]) -> str:
    """The text that an event adds."""
    if dialect == "chat":
        return "".join(choice["delta"].get("content") or "" for choice in event["choices"])
    if dialect == "messages":
        return event.get("delta", {}).get("text", "")
    if dialect == "responses":
        return event["delta"] if event["type"] == "response.output_text.delta" else ""
    return "".join(part.get("text", "") for row in event["candidates"] for part in row["content"]["parts"])


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_client_that_hangs_up_mid_stream_frees_its_slot_and_trains_nothing(
    tmp_path: Path, dialect: str
) -> None:
    sampler, asked = Talker(lambda _: "A long answer. " * 4), threading.Event()
    path, extra = stream_of(dialect)
    with proxied(sampler, tmp_path / "out") as client, begin(client) as mine:
        key = mine.headers["authorization"].removeprefix("Bearer ")
        talk = Talk(dialect, str(mine.base_url), key, **extra)
        talk.say("wait")
        stop = threading.Thread(target=hang_up, args=(mine, path, talk, asked))
        stop.start()
        wait_until(lambda: sampler.waiting == 1)
        asked.set()
        stop.join(HANG)
        wait_until(lambda: sampler.waiting == 0)
        sampler.gate.set()
        wait_until(lambda: client.get("/health").json().get("aborted") == 1)
        assert "".join(text_of(dialect, event) for event in streamed(mine, path, talk)) == (
            ("A long answer. " * 4).strip()
        )
        mine.post("/v1/reward", json={"reward": 1})
    [episode] = ended(tmp_path / "out")
    assert len(episode.turns) == 1


def hang_up(client: httpx.Client, path: str, talk: Talk, asked: threading.Event) -> None:
    with client.stream("POST", path, json=talk.body(), headers=talk.headers()):
        asked.wait(HANG)


EVENTS = {
    "messages": [
        "message_start", "content_block_start", "content_block_delta", "content_block_stop",
        "content_block_start", "content_block_delta", "content_block_stop", "message_delta", "message_stop",
    ],
    "responses": [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
        "response.reasoning_text.delta", "response.reasoning_text.done", "response.content_part.done",
        "response.output_item.done", "response.output_item.added", "response.content_part.added",
        "response.output_text.delta", "response.output_text.done", "response.content_part.done",
        "response.output_item.done", "response.completed",
    ],
}  # fmt: skip


@pytest.mark.parametrize("dialect", EVENTS)
def test_a_stream_has_the_dialects_sequence_of_events(dialect: str) -> None:
    said = Message("assistant", "Rome, the old town by the river.", reasoning="Which town is it, after all?")
    path, extra = stream_of(dialect)
    with live(script(said).server()) as client:
        talk = Talk(dialect, str(client.base_url), **extra)
        talk.say("Where?")
        kinds = [event["type"] for event in streamed(client, path, talk)]
        numbers = [event.get("sequence_number") for event in streamed(client, path, talk)]
    merged = [kind for before, kind in zip([None, *kinds], kinds, strict=False) if kind != before]
    assert merged == EVENTS[dialect]
    if dialect == "responses":
        assert numbers == list(range(len(numbers)))


IMAGE = {
    "chat": {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
    "messages": {"messages": [{"role": "user", "content": [{"type": "image", "source": {"data": "x"}}]}]},
    "responses": {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
    "gemini": {"contents": [{"parts": [{"inlineData": {"mimeType": "image/png", "data": "x"}}]}]},
}
MALFORMED: list[tuple[str, dict[str, Any], str]] = [
    *((dialect, body, "[0].") for dialect, body in IMAGE.items()),
    ("messages", {"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    ("messages", {"messages": [{"role": "assistant", "content": "Ro"}]}, "messages[0].role"),
    ("messages", {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a"}]}]},
     "messages[0].content[0].tool_use_id"),
    ("messages", {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "name": "a"}]}]},
     "messages[0].content[0].id"),
    ("messages", {"max_tokens": None}, "max_tokens"),
    ("messages", {"tool_choice": {"type": "any"}}, "tool_choice.type"),
    ("messages", {"tools": [{"name": "a"}]}, "tools[0].input_schema"),
    ("responses", {"input": []}, "input"),
    ("responses", {"input": [{"type": "function_call", "name": "a", "arguments": "{"}]}, "input[0].arguments"),
    ("responses", {"input": [{"type": "function_call_output", "call_id": "a", "output": "b"}]}, "input[0].call_id"),
    ("responses", {"input": [{"type": "computer_call"}]}, "input[0].type"),
    ("responses", {"previous_response_id": "resp_1"}, "previous_response_id"),
    ("responses", {"text": {"format": {"type": "json_schema"}}}, "text.format.type"),
    ("gemini", {"contents": [{"parts": [{"functionResponse": {"name": "a"}}]}]}, "contents[0].parts[0]"),
    ("gemini", {"contents": [{"parts": [{}]}]}, "contents[0].parts[0]"),
    ("gemini", {"generationConfig": {"responseMimeType": "application/json"}}, "generation_config.response_mime_type"),
    ("gemini", {"generation_config": {"temperature": -1}}, "generation_config.temperature"),
    ("gemini", {"toolConfig": {"functionCallingConfig": {"mode": "ANY"}}}, "tool_config.function_calling_config.mode"),
]  # fmt: skip


def param_of(dialect: str, error: dict[str, Any]) -> str:
    if dialect == "gemini":
        assert (error["error"]["code"], error["error"]["status"]) == (400, "INVALID_ARGUMENT")
        return error["error"]["details"][0]["metadata"]["field"]
    assert (error["type"] == "error") if dialect == "messages" else ("type" not in error)
    assert error["error"]["type"] == "invalid_request_error"
    return error["error"]["param"]


def test_malformed_requests_get_an_error_in_the_dialects_form_that_names_the_field() -> None:
    with live(script("Rome").server()) as client:
        for dialect, change, param in MALFORMED:
            talk = Talk(dialect, str(client.base_url))
            talk.fields = change
            talk.say("Where?")
            got = client.post(PATHS[dialect], json=talk.body())
            assert got.status_code == 400, (change, got.text)
            assert param in param_of(dialect, got.json()), (change, got.text)
        assert client.get("/health").json()["refused"] == len(MALFORMED)


def test_errors_have_the_status_that_clients_expect() -> None:
    with live(script("Rome").server(), key="the-key") as client:
        for dialect in DIALECTS:
            talk = Talk(dialect, str(client.base_url), "wrong")
            talk.say("Where?")
            path = PATHS[dialect]
            refused = client.post(path, json=talk.body(), headers=talk.headers()).json()["error"]
            assert refused.get("type", refused.get("status")) in ("authentication_error", "UNAUTHENTICATED")
            talk.key = "the-key"
            other = path.replace("script", "gpt")
            body = talk.body() | ({} if dialect == "gemini" else {"model": "gpt"})
            assert client.post(other, json=body, headers=talk.headers()).status_code == 404
            talk.say("x " * 3000)
            long = client.post(path, json=talk.body(), headers=talk.headers())
            assert long.status_code == 400 and "context" in long.json()["error"]["message"]
            if dialect == "messages":  # Claude Code shortens its history when it reads this
                assert long.json()["error"]["message"].startswith("prompt is too long")
        body = {"contents": [{"parts": [{"text": "?"}]}]}
        assert client.post(f"{PATHS['gemini']}?key=the-key", json=body).status_code == 200


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_turn_that_is_cut_and_a_stop_string_are_named(dialect: str) -> None:
    stops = {"chat": "stop", "messages": "stop_sequences"}
    with live(script("Rome is old, and large.").server()) as client:
        talk = Talk(dialect, str(client.base_url), **limited(dialect, 3))
        talk.say("Where?")
        assert talk.answer().stop == STOPS[dialect][2]
        if dialect == "responses":
            return  # has no stop strings
        field = {stops.get(dialect, ""): [","]}
        talk = Talk(dialect, str(client.base_url), **(
            {"generationConfig": {"stopSequences": [","]}} if dialect == "gemini" else field
        ))  # fmt: skip
        talk.say("Where?")
        reply: Reply = talk.answer()
    assert reply.text == "Rome is old" and reply.stop in ("stop", "stop_sequence", "STOP")


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "?"}]}, "input_tokens"),
        ("/v1/responses/input_tokens", {"input": "?"}, "input_tokens"),
        ("/v1/models/script:countTokens", {"contents": [{"parts": [{"text": "?"}]}]}, "totalTokens"),
        ("/v1beta/models/script:countTokens",
         {"generateContentRequest": {"contents": {"parts": [{"text": "?"}]}}}, "totalTokens"),
    ],
)  # fmt: skip
def test_tokens_are_counted_without_sampling(path: str, body: dict[str, Any], field: str) -> None:
    sampler = script("Rome")
    with live(sampler.server()) as client:
        answer = client.post(path, json=body).json()
    assert answer[field] == len(sampler.chat.render([Message("user", "?")])) and not sampler.opened


def test_unknown_fields_and_provider_tools_are_ignored_and_counted(tmp_path: Path) -> None:
    cached = [{"type": "text", "text": "?", "cache_control": {"type": "ephemeral"}}]
    bodies = {
        "chat": {"messages": [{"role": "user", "content": cached}]},
        "messages": {"messages": [{"role": "user", "content": cached}], "max_tokens": 9},
        "responses": {"input": "?", "tools": [{"type": "web_search"}], "reasoning": {"effort": "high"}},
        "gemini": {"contents": [{"parts": [{"text": "?"}]}], "tools": [{"googleSearch": {"x": 1}}]},
    }
    with proxied(Talker(lambda _: "Rome"), tmp_path / "out") as client, begin(client) as mine:
        for number, (dialect, body) in enumerate(bodies.items()):
            answer = mine.post(PATHS[dialect], json=body)
            assert answer.status_code == 200, answer.text
            assert client.get("/health").json()["ignored"] == number + 1


def test_a_function_of_gemini_may_have_upper_case_types() -> None:
    schema = {"type": "OBJECT", "properties": {"city": {"type": "STRING", "enum": ["Rome"]}}}
    with live((sampler := script("Rome")).server()) as client:
        tools = [{"function_declarations": [{"name": "weather", "parameters": schema}]}]
        body = {"contents": [{"role": "user", "parts": [{"text": "?"}]}], "tools": tools}
        assert client.post(PATHS["gemini"], json=body).status_code == 200
    assert '{"type": "string", "enum": ["Rome"]}' in sampler.chat.decode(sampler.prompts[0])


def test_equal_ids_and_interleaved_episodes_keep_their_own_tokens(tmp_path: Path) -> None:
    """Two episodes whose clients use the same call id twice in one turn, and take turns."""

    def say(prompt: str) -> str:
        return "B" if "bravo" in prompt else "A"

    calls = [
        {"id": "same", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
        for _ in range(2)
    ]
    with proxied(Talker(say), tmp_path / "out") as client, begin(client) as first, begin(client) as second:
        for step in range(2):
            for mine, word in ((first, "alpha"), (second, "bravo")):
                messages = [
                    {"role": "user", "content": word},
                    {"role": "assistant", "tool_calls": calls},
                    *({"role": "tool", "tool_call_id": "same", "content": f"{word}{n}"} for n in range(2)),
                    {"role": "user", "content": f"step {step}"},
                ]
                answer = mine.post(PATHS["chat"], json={"messages": messages})
                assert answer.json()["choices"][0]["message"]["content"] == say(word), answer.text
        for mine in (first, second):
            mine.post("/v1/reward", json={"reward": 1.0})
    episodes = ended(tmp_path / "out")
    for episode, word, other in zip(episodes, ("alpha", "bravo"), ("bravo", "alpha"), strict=True):
        text = "".join(tiny_chat().decode(turn.prompt_ids) for turn in episode.turns)
        assert word in text and other not in text and len(episode.turns) == 2
