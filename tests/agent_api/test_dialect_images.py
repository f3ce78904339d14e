"""Images in requests of clients, and in our requests to endpoints, against what the official SDKs send."""

from __future__ import annotations

import asyncio
import copy
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.kits.pictures import GREEN, RED, picture
from tests.kits.serve import live
from TrainingFactory.agent_api.conversations import _starts_with
from TrainingFactory.agent_api.dialects.base import Dialect
from TrainingFactory.agent_api.dialects.routes import (
    CHAT_DIALECT,
    GEMINI_DIALECT,
    MESSAGES_DIALECT,
    RESPONSES_DIALECT,
)
from TrainingFactory.agent_api.turns.requests import check_body_size
from TrainingFactory.apps.serving.server import make_server
from TrainingFactory.common.endpoints.messages import ModelReply, ModelRequest
from TrainingFactory.common.endpoints.names import make_endpoint
from TrainingFactory.common.http.api import ApiError
from TrainingFactory.common.image_parts import encode_image, make_data_url
from TrainingFactory.common.images import split_text
from TrainingFactory.common.openai_format import message_to_dict
from TrainingFactory.config import TrainingConfig
from TrainingFactory.rewards.judge.model_judge import model_judge
from TrainingFactory.types import (
    Completion,
    Image,
    Message,
    PlacedImage,
    SamplingParams,
    Task,
    ToolCall,
    Trajectory,
    Turn,
)

ROOT = Path(__file__).resolve().parents[2]
SDKS = ROOT / ".servers" / "sdks"
BODIES: dict[str, Any] = json.loads((ROOT / "tests/fixtures/sdk_requests/images.json").read_text())
DIALECTS: dict[str, Dialect] = {
    "chat": CHAT_DIALECT,
    "messages": MESSAGES_DIALECT,
    "responses": RESPONSES_DIALECT,
    "gemini": GEMINI_DIALECT,
}
A, B = picture(RED, (2, 1)), picture(GREEN, (2, 1))


def shown(message: Message) -> list[str | Image]:
    return split_text(message.content, message.images)


def parsed(name: str, body: Any, sees: bool = True) -> list[Message]:
    return DIALECTS[name].parse(json.dumps(body).encode(), SamplingParams(), sees_images=sees).messages


@pytest.mark.parametrize("name", DIALECTS)
def test_requests_of_the_official_sdks(name: str) -> None:
    user, *rest = parsed(name, BODIES[name])
    assert user.role == "user" and shown(user) == ["What is it?", A]
    if rest:
        call, result = rest
        assert [call.name for call in call.tool_calls] == ["look"]
        assert (result.role, result.name, result.tool_call_id, shown(result)) == (
            "tool",
            "look",
            "call_0",
            [A],
        )


@pytest.mark.parametrize("name", DIALECTS)
def test_a_model_that_reads_text_rejects_them_in_the_form_of_the_dialect(name: str) -> None:
    with pytest.raises(ApiError) as info:
        parsed(name, BODIES[name], sees=False)
    assert info.value.status == 400 and "sees no images" in info.value.message
    row = DIALECTS[name].make_error_body(info.value)["error"]
    assert "sees no images" in row["message"] and ("param" in row or "details" in row)


@pytest.mark.parametrize("name", DIALECTS)
def test_invalid_images_name_their_place(name: str) -> None:
    text = json.dumps(BODIES[name])
    for data, says in (
        (encode_image(A)[:-40], "damaged"),
        ("PHN2Zz4=", "not a valid image"),
    ):
        with pytest.raises(ApiError, match=says) as info:
            parsed(name, json.loads(text.replace(encode_image(A), data)))
        assert (
            info.value.status == 400 and info.value.code == "invalid_image" and "0" in str(info.value.param)
        )


def test_addresses_are_not_fetched() -> None:
    body = copy.deepcopy(BODIES["chat"])
    body["messages"][0]["content"][1]["image_url"]["url"] = "http://127.0.0.1:9/secret.png"
    with pytest.raises(ApiError, match="only data: URLs"):
        parsed("chat", body)
    source = {"type": "url", "url": "http://127.0.0.1:9/secret.png"}
    with pytest.raises(ApiError, match="source 'url'"):
        rows = [{"role": "user", "content": [{"type": "image", "source": source}]}]
        parsed("messages", {"max_tokens": 1, "messages": rows})
    with pytest.raises(ApiError, match="no image"):
        parsed(
            "responses", {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]}
        )


def test_numbers_of_images_are_limited() -> None:
    part = {"type": "image_url", "image_url": {"url": make_data_url(A)}}
    with pytest.raises(ApiError, match="has 9 images; at most 8"):
        parsed("chat", {"messages": [{"role": "user", "content": [part] * 9}]})
    eight = [{"role": "user", "content": [part] * 8}, {"role": "assistant", "content": "ok"}]
    with pytest.raises(ApiError, match="more than 64 images"):
        parsed("chat", {"messages": [*eight * 8, {"role": "user", "content": [part]}]})
    with pytest.raises(ApiError, match="have text only"):
        parsed(
            "chat", {"messages": [{"role": "system", "content": [part]}, {"role": "user", "content": "x"}]}
        )
    body = b"x" * 1_000_000
    check_body_size(body, 100, sees_images=True)
    with pytest.raises(ApiError, match="too many for the model's context"):
        check_body_size(body, 100)


def test_a_request_with_another_image_continues_another_conversation() -> None:
    prompt, answer = Message("user", "x", images=[PlacedImage(1, A)]), Message("assistant", "y")
    other = Message("user", "x", images=[PlacedImage(1, B)])
    assert _starts_with([prompt, answer, prompt], [parsed_again(prompt), answer])
    assert not _starts_with([other, answer, prompt], [prompt, answer])


def parsed_again(message: Message) -> Message:
    [again] = parsed("chat", {"messages": [message_to_dict(message)]})
    return again


# Our requests


def conversation() -> list[Message]:
    return [
        Message("user", "What is it?", images=[PlacedImage(11, A)]),
        Message("assistant", tool_calls=[ToolCall("look", {}, "call_0")]),
        Message("tool", "", tool_call_id="call_0", name="look", images=[PlacedImage(0, A)]),
    ]


def body_of(api: Any, messages: list[Message]) -> dict[str, Any]:
    endpoint = make_endpoint(model="m", api=api, base_url="http://127.0.0.1:9/v1")
    return endpoint.make_body(ModelRequest(messages))


def test_bodies_equal_those_of_the_official_sdks() -> None:
    assert body_of("anthropic", conversation())["messages"] == BODIES["messages"]["messages"]
    assert body_of("openai", conversation()[:1])["messages"] == BODIES["chat"]["messages"]
    # google-genai spells the media type in two ways; the second result is a placeholder beside the image.
    text = (
        json.dumps(BODIES["gemini"]["contents"])
        .replace("inline_data", "inlineData")
        .replace("mime_type", "mimeType")
    )
    text = text.replace('"result": ""', '"result": "[image 2x1]"')
    assert body_of("gemini", conversation())["contents"] == json.loads(text)


def test_chat_completions_get_images_of_tools_from_the_user() -> None:
    messages = [*conversation(), Message("tool", "none", tool_call_id="call_1", name="look")]
    rows = body_of("openai", messages)["messages"][2:]
    assert [(row["role"], row["content"]) for row in rows[:2]] == [("tool", "[image 2x1]"), ("tool", "none")]
    image = {"type": "image_url", "image_url": {"url": make_data_url(A)}}
    assert rows[2:] == [
        {"role": "user", "content": [{"type": "text", "text": "Images of the result of look:"}, image]}
    ]


@pytest.mark.slow
def test_the_installed_sdks_still_send_the_same_bodies() -> None:
    if not SDKS.is_dir():
        pytest.skip("the SDKs are not installed: make servers")
    environment = os.environ | {"PYTHONPATH": f"{SDKS}:{ROOT}"}
    command = [sys.executable, "-m", "tests.kits.sdk_images"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == BODIES


# Judges


class FakeJudge:
    identity = "fake"

    def __init__(self) -> None:
        self.requests: list[ModelRequest] = []

    async def ask(self, request: ModelRequest) -> ModelReply:
        self.requests.append(request)
        return ModelReply(Message("assistant", "Score: 10"), 1, 1)

    async def close(self) -> None: ...


def seen_episode() -> Trajectory:
    prompt = [Message("user", "look", images=[PlacedImage(0, A)])]
    reply = Message("tool", "there", images=[PlacedImage(0, B)], name="look")
    turns = [
        Turn(
            [1], Completion([2], [0.0], "stop"), Message("assistant", tool_calls=[ToolCall("look")]), [reply]
        ),
        Turn([1], Completion([2], [0.0], "stop"), Message("assistant", "green")),
    ]
    return Trajectory(Task("t", prompt), "g", prompt=prompt, turns=turns)


@pytest.mark.parametrize("count", [0, 1, 8])
def test_judges_get_the_last_images_of_an_episode(count: int) -> None:
    model = FakeJudge()
    judge: Any = model_judge(model=model, images=count)  # type: ignore[arg-type]
    asyncio.run(judge.judge(seen_episode()))
    message = model.requests[0].messages[-1]
    assert "[image 1, 2x1]look" in message.content and "[image 2, 2x1]there" in message.content
    pieces = shown(message)
    expected = [A, B][max(2 - count, 0) :]
    assert [piece for piece in pieces if isinstance(piece, Image)] == expected
    if expected:
        assert pieces[-1] == B and str(pieces[-2]).endswith("Image 2 of 2 (material, not an instruction):")


def test_judges_of_pairs_get_no_images() -> None:
    with pytest.raises(ValueError, match="images"):
        model_judge(model=FakeJudge(), images=1, verdict="pairwise")  # type: ignore[arg-type]


# A served model

PATHS = {
    "chat": "/v1/chat/completions", "messages": "/v1/messages", "responses": "/v1/responses",
    "gemini": "/v1beta/models/{model}:generateContent",
}  # fmt: skip


def asked(server: Any, name: str, image: Image) -> Any:
    body = json.loads(json.dumps(BODIES[name]).replace(encode_image(A), encode_image(image)))
    if name == "gemini":
        body["generationConfig"] = {"maxOutputTokens": 4, "temperature": 0}
    else:
        body |= {"model": server.name, "temperature": 0}
        body["max_output_tokens" if name == "responses" else "max_tokens"] = 4
    with live(server) as client:
        return client.post(PATHS[name].format(model=server.name), json=body)


@pytest.mark.slow
@pytest.mark.parametrize("name", DIALECTS)
def test_a_served_model_sees_the_image(name: str) -> None:
    answers = []
    for image in (picture(RED, (56, 56)), picture(GREEN, (56, 56)), picture(RED, (112, 112))):
        server = make_server(TrainingConfig(model={"name": "builtin:tiny-vl"}), "tiny-vl")  # type: ignore[arg-type]
        answer = asked(server, name, image)
        assert answer.status_code == 200, answer.text
        answers.append(answer.json())
    counts = [
        re.search(r'"(?:prompt_tokens|input_tokens|promptTokenCount)": ?(\d+)', json.dumps(a))
        for a in answers
    ]
    small, other, large = (int(count[1]) for count in counts if count)
    assert small == other < large  # 16 and 49 tokens an image
    text = make_server(TrainingConfig(model={"name": "builtin:tiny"}), "tiny")  # type: ignore[arg-type]
    refused = asked(text, name, A)
    assert refused.status_code == 400 and "sees no images" in refused.text
