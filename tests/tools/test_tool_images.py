"""Images in tool results: from functions, MCP servers and environments to the model, the cache and recordings."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
from PIL import Image as Pillow

from tests.kits.pictures import BLUE, GREEN, RED, SVG, animated, bomb, jpeg, picture
from tests.kits.rollout import FakeChat, call_text, rollout
from tests.kits.tools import call
from TrainingFactory.common.images import ImageStore, read_image, split_text
from TrainingFactory.data.trajectories import load_trajectories, save_trajectories
from TrainingFactory.envs import ToolEnvironment
from TrainingFactory.envs.process.environment import _parse_message
from TrainingFactory.rollout.episode import announce_placeholders
from TrainingFactory.rollout.folding import ContextTurn, _replace_results
from TrainingFactory.rollout.metrics import rollout_metrics
from TrainingFactory.tools import AsyncToolExecutor, tool
from TrainingFactory.tools.cache.cache import ToolCache
from TrainingFactory.tools.decorator import as_result
from TrainingFactory.tools.mcp.content import has_images, make_tool_result
from TrainingFactory.tools.recording import (
    CALLS_FILE,
    CallPosition,
    EpisodeKey,
    Recorder,
    ReplayMismatch,
    save_specs,
)
from TrainingFactory.tools.replies import make_tool_messages
from TrainingFactory.types import Image, Message, PlacedImage, Step, ToolCall, ToolResult, ToolSpec

A, B, C = (picture(color) for color in (RED, GREEN, BLUE))


def shown(result: ToolResult | Message) -> list[str | Image]:
    return split_text(result.content, result.images)


RETURNS = {
    "image": (A, [A]),
    "bytes": (A.data, [A]),
    "jpeg": (jpeg(), [read_image(jpeg())]),
    "pil": (Pillow.new("RGB", (8, 6), RED), [A]),
    "list": (["before", A, {"x": 1}, "after"], ["before", A, '\n{"x":1}\nafter']),
    "tuple": ((A, "text", B.data), [A, "text", B]),
    "svg": (SVG, ["[image not shown: the data is not a valid image in PNG, JPEG or WebP format]"]),
    "animated": (
        [animated("WEBP"), B],
        ["[image not shown: the image is animated; only still images are supported]", B],
    ),
    "bomb": (bomb(), ["[image not shown: the image has too many pixels; at most 20,000,000 are allowed]"]),
    "other bytes": (b"abc", ['"abc"']),
    "other list": (["a", 1], ['["a",1]']),
    "result": (ToolResult("x", images=[PlacedImage(1, A)]), ["x", A]),
}


@pytest.mark.parametrize("name", RETURNS)
def test_what_functions_return(name: str) -> None:
    value, expected = RETURNS[name]
    result = as_result(value)
    assert shown(result) == expected and result.ok and result.attachments == []


def mcp(*content: dict[str, Any]) -> ToolResult:
    return make_tool_result({"content": list(content)}, None, ["sesame-1234"])


def mcp_image(data: bytes) -> dict[str, Any]:
    return {"type": "image", "mimeType": "image/png", "data": base64.b64encode(data).decode()}


def test_images_of_mcp_servers() -> None:
    text = {"type": "text", "text": "the sesame-1234 screen"}
    result = mcp(text, mcp_image(A.data), {"type": "text", "text": "end"}, mcp_image(jpeg()))
    assert shown(result) == ["the *** screen", A, "\nend", read_image(jpeg())] and result.attachments == []
    resource = {"uri": "x://y", "mimeType": "image/png", "blob": base64.b64encode(B.data).decode()}
    assert shown(mcp({"type": "resource", "resource": resource})) == [B]
    broken = mcp(mcp_image(b"\x89PNG broken"), mcp_image(SVG))
    assert (
        broken.content.count("[image not shown: the data is not a valid image") == 2
        and len(broken.attachments) == 2
    )
    audio = {"type": "audio", "mimeType": "audio/wav", "data": "AAAA"}
    assert mcp(audio).content == "[audio audio/wav, 3 bytes]" and mcp(audio).attachments == [audio]
    assert has_images({"content": [mcp_image(SVG)]}) and not has_images({"content": [text, audio]})


def test_results_are_redacted_and_cut_around_images(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THE_API_KEY", "sesame-1234")

    @tool
    def look() -> list[Any]:
        "Look."
        return ["sesame-1234", A, "x" * 200, B]

    executor = AsyncToolExecutor([look], max_output_chars=40)
    [result] = asyncio.run(executor.batch_execute([ToolCall("look")]))
    pieces = shown(result)
    assert pieces[:2] == ["***", A] and pieces[-1] is not None and B in pieces
    assert "characters cut" in result.content and "sesame" not in result.content


def test_at_most_eight_images_a_turn() -> None:
    calls = [ToolCall("look", id="a"), ToolCall("look", id="b")]
    six = [PlacedImage(0, A)] * 6
    first, second = make_tool_messages(calls, [ToolResult("", images=six), ToolResult("", images=six)])
    assert len(first.images) == 6 and len(second.images) == 2
    assert second.content.count("[image not shown: at most 8 images a turn]") == 4


# Environments


class Camera(ToolEnvironment):
    @tool
    def look(self, number: int) -> list[Any]:
        "Take a picture."
        return [f"picture {number}", (A, B, C)[number]]


class SeeingChat(FakeChat):
    """Writes an image as a private character."""

    sees_images = True

    def render(self, messages: Any, tools: Any = ()) -> list[int]:
        marked = [
            Message(m.role, "".join(p if isinstance(p, str) else "\ue000" for p in shown(m)))
            for m in messages
        ]
        return super().render(marked, tools)


def say(_: int, turn: int, prompt: str) -> str:
    return call_text("look", number=turn) if turn < 2 else prompt.replace("\n", " ")


def played(chat: FakeChat, environment: type[ToolEnvironment]) -> Any:
    [[episode]] = rollout(environment, say, chat=chat)
    return episode


def test_a_model_that_sees_gets_the_images_of_results(tmp_path: Path) -> None:
    episode = played(SeeingChat(), Camera)
    assert [shown(turn.replies[0]) for turn in episode.turns[:2]] == [["picture 0", A], ["picture 1", B]]
    assert [shown(turn.tool_results[0]) for turn in episode.turns[:2]] == [["picture 0", A], ["picture 1", B]]
    assert "\ue000" in episode.turns[-1].message.content
    assert rollout_metrics([episode])["images"] == 2 and "images/as_text" not in rollout_metrics([episode])
    save_trajectories(tmp_path / "t.jsonl", [episode])
    assert list(load_trajectories(tmp_path / "t.jsonl")) == [episode]


def test_a_model_that_reads_text_gets_placeholders(caplog: pytest.LogCaptureFixture) -> None:
    announce_placeholders.cache_clear()
    with caplog.at_level(logging.WARNING):
        episode = played(FakeChat(), Camera)
    assert [turn.replies[0].content for turn in episode.turns[:2]] == [
        "picture 0[image 8x6]",
        "picture 1[image 8x6]",
    ]
    assert not any(reply.images for turn in episode.turns for reply in turn.replies)
    assert shown(episode.turns[0].tool_results[0]) == ["picture 0", A]  # what the tool returned is kept
    assert rollout_metrics([episode])["images/as_text"] == 2
    assert sum("reads only text" in record.message for record in caplog.records) == 1


def test_an_environment_may_reply_with_images() -> None:
    class Painter(ToolEnvironment):
        count = 1

        async def step(self, message: Message) -> Step:
            if not message.tool_calls:
                return Step(done=True)
            return Step([Message("user", "see", images=[PlacedImage(3, C)] * self.count)])

    class Flood(Painter):
        count = 9

    assert shown(played(SeeingChat(), Painter).turns[0].replies[0]) == ["see", C]
    flooded = played(SeeingChat(), Flood)
    assert flooded.status == "error" and "step returned 9 images; a turn has at most 8" in flooded.error


def test_processes_send_images_as_parts_and_folding_drops_them() -> None:
    part = {"type": "image", "source": {"type": "base64", "data": base64.b64encode(A.data).decode()}}
    message = _parse_message({"role": "tool", "content": ["see", part], "tool_call_id": "c"})
    assert shown(message) == ["see", A] and message.tool_call_id == "c"
    with pytest.raises(ValueError, match="only data: URLs"):
        _parse_message(
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "/etc/passwd"}}]}
        )
    turn = _replace_results(ContextTurn(Message("assistant", "x"), [message]), "a long placeholder")
    assert shown(turn.replies[0]) == ["a long placeholder"]


# Cache, record and replay


def test_cached_results_have_their_images(tmp_path: Path) -> None:
    calls = []

    @tool(pure=True)
    def look(city: str) -> list[Any]:
        "Look."
        calls.append(city)
        return ["see", A]

    for _ in range(2):
        cache = ToolCache(tmp_path / "tools.sqlite", [look])
        result = asyncio.run(cache.execute_with_cache(call("look", city="Oslo")))
        again = asyncio.run(cache.execute_with_cache(call("look", city="Oslo")))
        assert shown(result) == shown(again) == ["see", A] and again.images[0].image.data == A.data
        cache.close()
    assert calls == ["Oslo"]


def test_recordings_hold_digests(tmp_path: Path) -> None:
    position = CallPosition(EpisodeKey(3, "a", 1), 0, 0)
    result = ToolResult("see", images=[PlacedImage(3, A)])
    recorder = Recorder()
    save_specs(tmp_path, [ToolSpec("look")])
    recorder.record_to(tmp_path)
    recorder.record(position, ToolCall("look"), result)
    recorder.commit()
    row = json.loads((tmp_path / CALLS_FILE).read_text())
    assert row["result"]["images"] == [{"place": 3, "digest": A.digest, "width": 8, "height": 6}]
    assert ImageStore(tmp_path / "images").read(A.digest) == A
    replayed = Recorder(tmp_path)
    answer = replayed.replay(position, ToolCall("look"))
    assert answer is not None and answer == result and answer.images[0].image.data == A.data
    replayed.compare_rerun(position, ToolCall("look"), result, ToolResult("see", images=[PlacedImage(3, A)]))
    with pytest.raises(ReplayMismatch, match=re.escape(B.digest)):
        replayed.compare_rerun(
            position, ToolCall("look"), result, ToolResult("see", images=[PlacedImage(3, B)])
        )
    replayed.close()
