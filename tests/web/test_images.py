"""Images of a run: what its folder keeps, what the page shows, and what its address gives away."""

from __future__ import annotations

import base64
import io
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image as Pillow

from tests.data.test_data_images import seen_episode
from tests.kits.page import Served, serving
from tests.kits.pictures import BLUE, GREEN, RED, picture
from tests.kits.registry import made_run
from TrainingFactory.apps.views.episodes import make_episode_view
from TrainingFactory.apps.views.run_report import render_run_page
from TrainingFactory.cli import show
from TrainingFactory.common.images import make_thumbnail
from TrainingFactory.data.trajectories import load_trajectories
from TrainingFactory.runs.embedded_images import EmbeddedImages
from TrainingFactory.runs.folder import CONSUMED, TRAJECTORIES, RunFolder
from TrainingFactory.runs.notebook_view import episodes_table
from TrainingFactory.types import Message, PlacedImage, ToolSpec, Trajectory

A, B, C = (picture(color) for color in (RED, GREEN, BLUE))


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    runs = tmp_path_factory.mktemp("page") / "runs"
    made_run(runs, "mine")
    RunFolder(runs / "mine").append_trajectories([seen_episode()])
    (runs.parent / "secret.png").write_bytes(A.data)
    with serving(runs) as served:
        yield served


def sources(view: dict[str, Any]) -> list[str]:
    messages = [
        *view["prompt"],
        *(row for turn in view["turns"] for row in [*turn["replies"], *turn["tool_results"]]),
    ]
    return [image["src"] for message in messages for image in message.get("images") or ()]


def test_an_episode_names_the_addresses_of_its_images(page: Served) -> None:
    view = page.get("/api/runs/mine/episodes/1")
    first, second, third = sources(view)
    assert second == third and first == f"/api/runs/mine/images/{A.digest}"
    assert view["prompt"][0]["images"][0] | {"src": ""} == {
        "place": 8, "digest": A.digest, "width": 8, "height": 6, "src": "",
    }  # fmt: skip
    answer = page.client.get(second)
    assert answer.status_code == 200 and answer.content == B.data
    assert (
        answer.headers["content-type"] == "image/png"
        and answer.headers["x-content-type-options"] == "nosniff"
    )
    assert "immutable" in answer.headers["cache-control"] and "private" in answer.headers["cache-control"]
    assert page.client.get(first, headers={"authorization": ""}).status_code == 401


@pytest.mark.parametrize(
    "name",
    [
        "..%2F..%2F..%2Fsecret", "../../../secret.png", "%2e%2e/config.yaml", "x", A.digest.upper(), A.digest[:-1],
        f"{A.digest}.png", C.digest, f"{A.digest}%00", f"{A.digest[:2]}/{A.digest}.png", "", "%2Fetc%2Fpasswd",
    ],
)  # fmt: skip
def test_other_files_are_not_given(page: Served, name: str) -> None:
    answer = page.client.get(f"/api/runs/mine/images/{name}")
    assert answer.status_code == 404, answer.text
    assert page.client.get(f"/api/runs/none/images/{A.digest}").status_code == 404


def test_links_and_damaged_files_are_not_given(page: Served) -> None:
    run = page.page.runs.folder / "mine" if page.page else Path()
    store = RunFolder(run).images
    path = store.find_path(C.digest)
    path.parent.mkdir(parents=True, exist_ok=True)
    os.symlink(run.parent.parent / "secret.png", path)
    assert page.client.get(f"/api/runs/mine/images/{C.digest}").status_code == 404
    path.unlink()
    path.write_bytes(b"<svg onload=alert(1)>")
    answer = page.client.get(f"/api/runs/mine/images/{C.digest}")
    assert answer.status_code == 500 and "damaged" in answer.text and "svg" not in answer.text
    path.unlink()


def test_an_episode_without_a_folder_carries_its_images() -> None:
    view = make_episode_view(seen_episode(), 1).model_dump()
    data = base64.b64encode(A.data).decode()
    assert (
        sources(view)[0] == f"data:image/png;base64,{data}" and "data" not in view["prompt"][0]["images"][0]
    )


def test_tools_that_take_thousandths_are_named() -> None:
    episode = seen_episode()
    thousandth = {"type": "integer", "maximum": 1000}
    episode.tools = [
        ToolSpec("tap", "", {"type": "object", "properties": {"x": thousandth, "y": thousandth}}),
        ToolSpec("click", "", {"type": "object", "properties": {"x": thousandth, "y": {"type": "integer"}}}),
        ToolSpec("wait"),
    ]
    assert make_episode_view(episode, 1).thousandths == ["tap"]
    below = {"type": "integer", "exclusiveMaximum": 1000}  # as in the environment screen
    episode.tools = [ToolSpec("tap", "", {"type": "object", "properties": {"x": below, "y": below}})]
    assert make_episode_view(episode, 1).thousandths == ["tap"]


def test_the_terminal_names_images(capsys: pytest.CaptureFixture[str]) -> None:
    show.print_episode(seen_episode(), "an episode")
    printed = capsys.readouterr().out
    assert (
        f"look at [image 8x6 {A.digest[:8]}]and" in printed
        and f"clicked[image 8x6 {B.digest[:8]}]" in printed
    )


def test_reports_have_small_copies(tmp_path: Path) -> None:
    shown = EmbeddedImages().render
    wide = picture(RED, (1000, 500))
    html = str(shown(Message("user", "<b>&", images=[PlacedImage(1, wide)])))
    found = re.fullmatch(
        r'&lt;<img src="data:image/jpeg;base64,([^"]+)" alt="([^"]+)"[^>]*/>b&gt;&amp;', html
    )
    assert found and found[2] == f"[image 1000x500 {wide.digest[:8]}]"
    with Pillow.open(io.BytesIO(base64.b64decode(found[1]))) as copy:
        assert (copy.format, copy.size) == ("JPEG", (320, 160))
    run = RunFolder(tmp_path / "a")
    run.append_trajectories([only(wide)])
    run.images.find_path(wide.digest).unlink()
    [episode] = load_trajectories(run.path / TRAJECTORIES)
    assert f"[image 1000x500 {wide.digest[:8]}] (image {wide.digest} cannot be read" in shown(
        episode.prompt[0]
    )


def test_a_page_has_a_limited_number_of_images() -> None:
    one = Message("user", "", images=[PlacedImage(0, picture(RED, (40, 40)))])
    images = EmbeddedImages(max_images=2)
    shown = [images.render(one) for _ in range(4)]
    assert ["<img" in html for html in shown] == [True, True, False, False]
    assert shown[2].endswith("(left out)") and images.note.startswith("2 images left out")
    size = len(make_thumbnail(one.images[0].image))
    small = EmbeddedImages(max_bytes=size + 1)
    assert "<img" in small.render(one) and "<img" not in small.render(one) and small.num_omitted == 1
    assert not EmbeddedImages().note and EmbeddedImages().render("<b>") == "&lt;b&gt;"


def test_reports_tables_and_comparisons_show_the_images_of_episodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = made_run(tmp_path, "mine")
    run.append_trajectories([seen_episode()])
    run.append(CONSUMED, {"step": 1, "tasks": ["t"]})
    html = render_run_page(run)
    assert html.count('<img src="data:image/jpeg;base64,') == 2 and "left out" not in html
    monkeypatch.setattr(EmbeddedImages.__init__, "__defaults__", (1, 9999))
    assert "1 image left out" in render_run_page(run)
    table = episodes_table([seen_episode()])._repr_html_()
    assert table.count("<img") == 1 and "1 image left out" in table


# The folder


def stored(run: RunFolder) -> set[str]:
    return {path.stem for path in run.path.glob("images/??/*.png")}


def only(image: Any) -> Trajectory:
    episode = seen_episode()
    episode.prompt[0].images[0] = PlacedImage(8, image)  # and the task's, which is the same message
    return episode


def test_resuming_removes_the_images_of_lost_episodes_only(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "a")
    run.append_trajectories([only(A)])
    offsets = run.sync_files()
    run.append_trajectories([only(C)])
    assert stored(run) == {A.digest, B.digest, C.digest}
    before = {path: path.stat().st_mtime_ns for path in run.path.glob("images/??/*.png")}
    run.rewind(offsets)
    assert stored(run) == {A.digest, B.digest}
    [episode] = load_trajectories(run.path / TRAJECTORIES)
    assert episode == only(A) and episode.prompt[0].images[0].image.data == A.data
    run.append_trajectories([only(C)])  # as the resumed run does
    assert stored(run) == {A.digest, B.digest, C.digest}
    kept = {path: path.stat().st_mtime_ns for path in before if path.stem != C.digest}
    assert kept == {path: time for path, time in before.items() if path.stem != C.digest}


def test_images_of_other_files_stay(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "a")
    run.append_trajectories([only(A)])
    run.append_trajectories([only(C)], "heldout.jsonl.part")
    assert run.remove_unused_images() == 0
    (run.path / "heldout.jsonl.part").unlink()
    assert run.remove_unused_images() == 1 and stored(run) == {A.digest, B.digest}
    assert RunFolder(tmp_path / "none").remove_unused_images() == 0
