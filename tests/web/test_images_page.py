"""Images in the episode page, in a real Chromium: thumbnails, tap points, and the enlarged image."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.data.test_data_images import seen_episode
from tests.kits.browser import Tab
from tests.kits.page import Served, serving
from tests.kits.pictures import BLUE, GREEN, picture
from tests.kits.registry import made_run
from TrainingFactory.common.openai_format import message_to_dict
from TrainingFactory.runs.folder import RunFolder
from TrainingFactory.types import Message, PlacedImage, ToolCall, ToolSpec

pytestmark = [pytest.mark.xdist_group("browser"), pytest.mark.slow]
FIRST, SECOND = picture(GREEN, (200, 100)), picture(BLUE, (500, 400))


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    runs = tmp_path_factory.mktemp("page") / "runs"
    made_run(runs, "mine")
    episode = seen_episode()
    episode.prompt[0].content = "\U0001f600 look and tap"
    episode.prompt[0].images[0] = PlacedImage(6, FIRST)
    turn, last = episode.turns
    turn.message.tool_calls = [ToolCall("click", {"x": 50, "y": 25}, "c")]
    turn.tool_results[0].id = "c"
    for shown in (turn.replies[0], turn.tool_results[0]):
        shown.images[0] = PlacedImage(7, SECOND)
    last.message.tool_calls = [
        ToolCall("tap", {"x": 500, "y": 750}, "d"), ToolCall("click", {"x": 9999, "y": 1}, "e")
    ]  # fmt: skip
    thousandth = {"type": "integer", "maximum": 1000}
    episode.tools = [
        ToolSpec("tap", "", {"type": "object", "properties": {"x": thousandth, "y": thousandth}})
    ]
    RunFolder(runs / "mine").append_trajectories([episode])
    with serving(runs) as served:
        yield served


def test_thumbnails_and_tap_points(tab: Tab, page: Served, tmp_path: Path) -> None:
    tab.goto(f"{page.url}/#/run/mine/episodes?number=1")
    tab.wait("document.querySelectorAll('.picture img').length >= 4")
    tab.wait(
        "[...document.querySelectorAll('.picture img')].every((image) => image.complete || !image.loading)"
    )
    names = tab.run("[...document.querySelectorAll('.picture img')].map((image) => image.alt)")
    # prompt; the first call on it; the result; the second call on the result
    assert names == ["image 200×100", "image 200×100", "image 500×400", "image 500×400"]
    taps = tab.run(
        "[...document.querySelectorAll('.picture .tap')].map((tap) => [tap.style.left, tap.style.top])"
    )
    assert taps == [["25%", "25%"], ["50%", "75%"]]
    texts = tab.run("[...document.querySelectorAll('.role-user .said > *')].map((part) => part.innerText)")
    assert texts[0] == "\U0001f600 look" and texts[-1] == "\xa0and tap".replace("\xa0", " ")
    tab.run("document.querySelectorAll('.picture')[3].scrollIntoView()")
    tab.wait("document.querySelectorAll('.picture img')[3].naturalWidth === 500")
    assert tab.run("document.querySelectorAll('.picture img')[3].clientWidth") <= 320
    tab.run("document.querySelectorAll('.picture')[3].click()")
    tab.wait("document.querySelector('dialog .picture img')?.naturalWidth === 500")
    assert tab.run("document.querySelectorAll('dialog .tap').length") == 1
    tab.screenshot(tmp_path / "page.png")


def test_play_shows_where_calls_tap(tab: Tab, page: Served) -> None:
    """The conversation of the play tab, drawn by its own module: an image, a call, its result, and a call on that."""
    thousandth = {"type": "integer", "exclusiveMaximum": 1000}
    tools = [
        {"function": {"name": "tap", "parameters": {"properties": {"x": thousandth, "y": thousandth}}}},
        {"function": {"name": "click", "parameters": {"properties": {"x": {}, "y": {}}}}},
    ]
    look = Message("user", "look", images=[PlacedImage(4, FIRST)])
    first = Message("assistant", "", [ToolCall("click", {"x": 50, "y": 25}, "c")])
    seen = Message("tool", "", tool_call_id="c", images=[PlacedImage(0, SECOND)])
    last = Message("assistant", "", [ToolCall("tap", {"x": 500, "y": 750}, "d")])
    entries = json.dumps([{"message": message_to_dict(message)} for message in (look, first, seen, last)])
    tab.run(f"""
        (async () => {{
            const chat = await import("/static/chat.js");
            const {{ inThousandths }} = await import("/static/pictures.js");
            const thousandths = inThousandths({json.dumps(tools)});
            const all = chat.entriesOf({entries}, () => null, {{ thousandths, screen: undefined }}).filter(Boolean);
            const later = chat.entriesOf({entries}.slice(3), () => null,
                {{ thousandths, screen: chat.screenOf({entries}.slice(0, 3).map(({{ message }}) => message)) }});
            document.body.replaceChildren(...all, ...later);
        }})()
    """)
    names = tab.run("[...document.querySelectorAll('.picture img')].map((image) => image.alt)")
    assert names == ["image 200×100", "image 200×100", *["image 500×400"] * 3]
    taps = tab.run(
        "[...document.querySelectorAll('.picture .tap')].map((tap) => [tap.style.left, tap.style.top])"
    )
    assert taps == [["25%", "25%"], *[["50%", "75%"]] * 2]
