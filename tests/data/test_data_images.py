"""Images in tasks and training rows, and in stored trajectories."""

from __future__ import annotations

import base64
import gc
import io
import json
import subprocess
import sys
import tracemalloc
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image as Pillow

from tests.kits.pictures import BLUE, GREEN, RED, SVG, bomb, jpeg, picture
from TrainingFactory.assembly.datasets import write_rows
from TrainingFactory.common.image_tokens import load_picture, number_image
from TrainingFactory.common.images import image_from_pillow, read_image, split_text
from TrainingFactory.data.convert import convert, get_image_path, to_swift_row
from TrainingFactory.data.datasets import DatasetRow, read_rows
from TrainingFactory.data.examples import load_examples
from TrainingFactory.data.provider_rows import to_provider_rows
from TrainingFactory.data.tasks import load_tasks
from TrainingFactory.data.trajectories import (
    CompactTrajectory,
    load_trajectories,
    save_trajectories,
    trajectory_from_dict,
    trajectory_to_dict,
)
from TrainingFactory.types import (
    Completion,
    Image,
    Message,
    PlacedImage,
    Reward,
    Task,
    ToolCall,
    ToolResult,
    Trajectory,
    Turn,
)

A, B, C = (picture(color) for color in (RED, GREEN, BLUE))


def url(image: Image) -> str:
    return f"data:image/png;base64,{base64.b64encode(image.data).decode()}"


def shown(message: Message) -> list[str | Image]:
    return split_text(message.content, message.images)


def prompt_of(row: dict[str, Any], folder: Path | None = None) -> list[list[str | Image]]:
    [task] = load_tasks([DatasetRow("row 0", row, folder=folder)])
    assert isinstance(task.prompt, list) and not {"image", "images"} & task.metadata.keys()
    return [shown(message) for message in task.prompt]


COLUMNS = {
    "bytes": A.data,
    "jpeg": jpeg(),
    "hugging face": {"bytes": A.data, "path": "elsewhere.png"},
    "path": "red.png",
    "hugging face path": {"bytes": None, "path": "red.png"},
    "data url": url(A),
    "pil": Pillow.open(io.BytesIO(A.data)),
}


@pytest.mark.parametrize("name", COLUMNS)
def test_image_columns_of_tasks(name: str, tmp_path: Path) -> None:
    (tmp_path / "red.png").write_bytes(A.data)
    expected = read_image(jpeg()) if name == "jpeg" else A
    for column, value in (("image", COLUMNS[name]), ("images", [COLUMNS[name]])):
        assert prompt_of({"prompt": "what is it?", column: value}, tmp_path) == [[expected, "what is it?"]]


def test_where_images_of_columns_are_shown() -> None:
    images = [A.data, B.data]
    assert prompt_of({"question": "compare", "images": images}) == [[A, B, "compare"]]
    assert prompt_of({"prompt": "is <image> like <image>?", "images": images}) == [
        ["is ", A, " like ", B, "?"]
    ]
    parts = [{"type": "text", "text": "<image> is "}, {"type": "image"}]
    rows = [{"role": "user", "content": parts}, {"role": "assistant", "content": "ok"}]
    rows.append({"role": "user", "content": [{"type": "image"}]})
    assert prompt_of({"prompt": rows, "images": images}) == [["<image> is ", A], ["ok"], [B]]
    system = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    assert prompt_of({"prompt": system, "image": A.data}) == [["s"], [A, "u"]]
    inline = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url(B)}}, "what?"]}]
    assert prompt_of({"prompt": inline}) == [[B, "what?"]]


def test_tasks_without_images_stay_as_they_are() -> None:
    [task] = load_tasks([{"prompt": "an <image> tag", "picture": "x.png", "images": []}])
    assert task.prompt == "an <image> tag" and task.metadata == {"picture": "x.png"}


def test_tasks_in_files(tmp_path: Path) -> None:
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "red.png").write_bytes(A.data)
    (tmp_path / "t.jsonl").write_text(json.dumps({"prompt": "p", "image": "pictures/red.png"}) + "\n")
    [task] = load_tasks(tmp_path / "t.jsonl")
    assert isinstance(task.prompt, list) and shown(task.prompt[0]) == [A, "p"]
    datasets = pytest.importorskip("datasets")
    rows = {"prompt": ["p"], "images": [[{"bytes": A.data, "path": None}, {"bytes": B.data, "path": None}]]}
    features = datasets.Features(
        {"prompt": datasets.Value("string"), "images": datasets.Sequence(datasets.Image())}
    )
    dataset = datasets.Dataset.from_dict(rows, features=features)
    dataset.save_to_disk(str(tmp_path / "saved"))
    dataset.to_parquet(str(tmp_path / "t.parquet"))
    for source in (dataset, tmp_path / "saved", tmp_path / "t.parquet"):
        [task] = load_tasks(source)
        assert isinstance(task.prompt, list) and shown(task.prompt[0]) == [A, B, "p"]


MISTAKES = {
    "svg": (SVG, "not a valid image in PNG, JPEG or WebP"),
    "bomb": (bomb(6000, 5000), "6000 x 5000 pixels"),
    "missing": ("none.png", "none.png: No such file"),
    "address": ("https://example.com/x.png", "data.image_urls=true"),
    "number": (3, "it must be bytes, a path"),
    "folder": (".", "Is a directory"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_invalid_images_name_file_row_column_and_remedy(name: str, tmp_path: Path) -> None:
    value, text = MISTAKES[name]
    if isinstance(value, bytes):
        value = {"bytes": base64.b64encode(value).decode()}
        value = f"data:image/png;base64,{value['bytes']}"
    path = tmp_path / "t.jsonl"
    path.write_text('{"prompt": "fine"}\n' + json.dumps({"prompt": "p", "images": [value]}) + "\n")
    with pytest.raises(ValueError) as info:
        load_tasks(path)
    message = str(info.value)
    assert message.startswith(f'{path}, line 2 has an invalid image 0 in "images": ') and text in message
    assert "Repair or remove it" in message


def test_images_and_messages_must_match() -> None:
    with pytest.raises(ValueError, match='2 images in "images", but its messages show 1: use one <image>'):
        prompt_of({"prompt": "<image> only", "images": [A.data, B.data]})
    with pytest.raises(ValueError, match='1 images in "image", but its messages show 2'):
        prompt_of({"prompt": "<image><image>", "image": A.data})
    with pytest.raises(ValueError, match="more than 8 images in message 0"):
        prompt_of({"prompt": "many", "images": [A.data] * 9})
    with pytest.raises(ValueError, match="relative path, but the dataset is no local file"):
        prompt_of({"prompt": "p", "image": "x.png"})
    with pytest.raises(ValueError, match="assistant message has an image"):
        rows = [{"role": "user", "content": "u"}, {"role": "assistant", "content": [{"type": "image"}]}]
        load_examples([{"messages": rows, "images": [A.data]}], "sft")


def test_downloads(tmp_path: Path) -> None:
    from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
    from threading import Thread

    class Pictures(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(A.data if self.path == "/a.png" else b"x" * 10_000_001)

        def log_message(self, format: str, *args: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Pictures) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        base = f"http://127.0.0.1:{server.server_port}"
        [task] = load_tasks([{"prompt": "p", "image": f"{base}/a.png"}], image_urls=True)
        assert isinstance(task.prompt, list) and shown(task.prompt[0]) == [A, "p"]
        with pytest.raises(ValueError, match="10,000,001 bytes"):
            load_tasks([{"prompt": "p", "image": f"{base}/large"}], image_urls=True)
        server.shutdown()
    with pytest.raises(ValueError, match="cannot download"):
        load_tasks([{"prompt": "p", "image": f"{base}/a.png"}], image_urls=True)


# Training rows


def messages_of(row: dict[str, Any], form: Any) -> list[list[list[str | Image]]]:
    [example] = load_examples([row], form).usable
    return [[shown(m) for m in conversation.messages] for conversation in example.conversations]


def test_sft_rows() -> None:
    answer = {"role": "assistant", "content": "red"}
    trl = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "colour?"}]}, answer]
    assert messages_of({"messages": trl, "images": [A.data]}, "sft") == [[[A, "colour?"], ["red"]]]
    swift = [{"role": "user", "content": "<image>colour?"}, answer]
    assert messages_of({"messages": swift, "images": [A.data]}, "sft") == [[[A, "colour?"], ["red"]]]
    plain = [{"role": "user", "content": "colour?"}, answer]
    assert messages_of({"messages": plain, "images": [A.data]}, "sft") == [[[A, "colour?"], ["red"]]]
    sharegpt = [{"from": "human", "value": "<image>colour?"}, {"from": "gpt", "value": "red"}]
    assert messages_of({"conversations": sharegpt, "image": A.data}, "sft") == [[[A, "colour?"], ["red"]]]
    query = {"query": "<image>colour?", "response": "red", "images": [A.data]}
    assert messages_of(query, "sft") == [[[A, "colour?"], ["red"]]]
    pair = {"prompt": "colour?", "completion": "red", "image": A.data}
    assert messages_of(pair, "sft") == [[[A, "colour?"], ["red"]]]
    tool = [
        {"role": "user", "content": "look"},
        {"role": "tool_call", "content": '{"name": "look", "arguments": {}}'},
        {"role": "tool_response", "content": "here: <image>"},
        {"role": "assistant", "content": "red"},
    ]
    [[user, call, reply, end]] = messages_of({"messages": tool, "images": [B.data]}, "sft")
    assert (user, call, reply, end) == (["look"], [], ["here: ", B], ["red"])


def test_pairs() -> None:
    user = {"role": "user", "content": [{"type": "image"}, "colour?"]}
    answers = {"chosen": "red", "rejected": "blue"}
    sides = {name: [{"role": "assistant", "content": text}] for name, text in answers.items()}
    expected = [[[A, "colour?"], ["red"]], [[A, "colour?"], ["blue"]]]
    assert messages_of({"prompt": [user], **sides, "images": [A.data]}, "dpo") == expected
    whole = {name: [user, *side] for name, side in sides.items()}
    assert messages_of({**whole, "images": [A.data]}, "dpo") == expected
    assert messages_of({"prompt": [user], **whole, "images": [A.data]}, "dpo") == expected
    plain = {name: [{"role": "user", "content": "colour?"}, *side] for name, side in sides.items()}
    assert messages_of({**plain, "images": [A.data]}, "dpo") == expected
    swift = {"messages": plain["chosen"], "rejected_messages": plain["rejected"], "images": [A.data]}
    assert messages_of(swift, "dpo") == expected
    response = {"messages": plain["chosen"], "rejected_response": "blue", "images": [A.data]}
    assert messages_of(response, "dpo") == expected
    reply = {"role": "tool", "content": [{"type": "image"}]}
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "look", "arguments": "{}"}}]}
    longer = {"chosen": [call, reply, *sides["chosen"]], "rejected": [call, reply, *sides["rejected"]]}
    row = {"prompt": [user], **longer, "images": [A.data, B.data]}
    assert [side[2] for side in messages_of(row, "dpo")] == [[B], [B]]


# Stored trajectories


def seen_episode() -> Trajectory:
    """An episode with images in its task, a tool result, and the reply."""
    prompt = [Message("user", "look at and", images=[PlacedImage(8, A)])]
    result = ToolResult("clicked", images=[PlacedImage(7, B)])
    reply = Message("tool", "clicked", images=[PlacedImage(7, B)], name="click", tool_call_id="c")
    turns = [
        Turn([1, 2], Completion([3], [-0.5], "stop"), Message("assistant", "click"), [reply], [result]),
        Turn([1, 2, 3, 9], Completion([4], [-0.25], "stop"), Message("assistant", "done")),
    ]
    return Trajectory(Task("t", prompt, "done"), "0/t", 1, prompt, turns=turns, reward=Reward(1.0))


def test_trajectories_hold_digests(tmp_path: Path) -> None:
    episode, path = seen_episode(), tmp_path / "trajectories.jsonl"
    save_trajectories(path, [episode, episode])
    text = path.read_text()
    assert (
        text.count(A.digest) == 4
        and text.count(B.digest) == 4
        and base64.b64encode(A.data).decode() not in text
    )
    assert sorted(file.stem for file in tmp_path.glob("images/??/*.png")) == sorted([A.digest, B.digest])
    read, _ = load_trajectories(path)
    assert read == episode and repr(read.prompt) == repr(episode.prompt)
    assert read.turns[0].replies[0].images[0].image.data == B.data
    [example] = load_examples(path, "sft").usable[:1]
    assert [shown(message) for message in example.conversations[0].messages] == [
        ["look at ", A, "and"], ["click"], ["clicked", B], ["done"],
    ]  # fmt: skip
    (tmp_path / "images" / A.digest[:2] / f"{A.digest}.png").unlink()
    [read, _] = load_trajectories(path)  # images are read when they are needed
    with pytest.raises(ValueError, match=f"image {A.digest} cannot be read"):
        _ = read.prompt[0].images[0].image.data


def test_an_image_of_a_prompt_that_is_in_no_message_is_stored(tmp_path: Path) -> None:
    """An agent program began a second conversation, whose messages the trajectory does not have."""
    answer = Message("assistant", "red")
    turns = [
        Turn([1, 2], Completion([3], [-1.0], "stop"), answer),
        Turn([1, *number_image(A, 5).ids, 2], Completion([4], [-1.0], "stop"), answer),
        Turn([7, *number_image(A, 5).ids, *number_image(B, 4).ids], Completion([5], [-1.0], "stop"), answer),
    ]
    episode = Trajectory(Task("t", "colour?"), "g", prompt=[Message("user", "colour?")], turns=turns)
    rows = json.loads(json.dumps(trajectory_to_dict(episode)))
    assert [[i["digest"] for i in t.get("prompt_images", ())] for t in rows["turns"]] == [
        [], [A.digest], [A.digest, B.digest],
    ]  # fmt: skip
    assert trajectory_from_dict(rows) == episode
    save_trajectories(tmp_path / "episodes.jsonl", [episode])
    assert list(load_trajectories(tmp_path / "episodes.jsonl")) == [episode]


def test_image_tokens_are_stored_independently_of_the_process(tmp_path: Path) -> None:
    episode, path = seen_episode(), tmp_path / "t.jsonl"
    number_image(C, 7)  # so that the numbers of the others are not the first ones
    first, second = number_image(A, 3).ids, number_image(B, 2).ids
    episode.turns[0].prompt_ids = [1, *first, 2, *first]
    episode.turns[1].prompt_ids = [*episode.turns[0].prompt_ids, 3, *second, 9]
    save_trajectories(path, [episode])
    rows = json.loads(path.read_text())["turns"]
    assert rows[0]["new_ids"] == [1, -1, -1, -1, 2, -1, -1, -1] and rows[0]["image_tokens"] == [[A.digest, 3]]
    assert rows[1]["new_ids"] == [-1, -1, 9] and rows[1]["image_tokens"] == [[B.digest, 2]]
    assert next(load_trajectories(path)) == episode
    assert trajectory_from_dict(json.loads(json.dumps(trajectory_to_dict(episode)))) == episode
    compact = CompactTrajectory.from_trajectory(episode)
    assert compact.restore() == episode
    code = f"""
from pathlib import Path
from TrainingFactory.data.trajectories import CompactTrajectory, load_trajectories
[episode] = load_trajectories(Path({str(path)!r}))
print(episode.turns[0].prompt_ids[1] != {first[0]})
print(repr(CompactTrajectory.from_trajectory(episode)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == f"True\n{compact!r}\n"


def test_trajectories_without_a_folder_hold_the_data() -> None:
    episode = seen_episode()
    row = json.loads(json.dumps(trajectory_to_dict(episode)))
    read = trajectory_from_dict(row)
    assert read == episode and read.turns[0].tool_results[0].images[0].image.data == B.data


def test_fingerprints_depend_on_images() -> None:
    from TrainingFactory.rollout.episode import _hash_state

    one, other = seen_episode(), seen_episode()
    other.prompt[0].images[0] = PlacedImage(8, C)
    assert repr(CompactTrajectory.from_trajectory(one)) != repr(CompactTrajectory.from_trajectory(other))
    assert _hash_state(None, one.task) != _hash_state(None, other.task)  # type: ignore[arg-type]


# Conversion


@pytest.mark.parametrize("layout", ["trl", "swift"])
@pytest.mark.parametrize("form", ["sft", "kto", "dpo"])
def test_converted_rows_show_the_same_images(form: Any, layout: str, tmp_path: Path) -> None:
    good, bad = seen_episode(), seen_episode()
    bad.turns[-1].message.content, bad.member, bad.reward = "wrong", 0, Reward(0.0)
    for episode in (good, bad):
        episode.turns[0].message.tool_calls = [ToolCall("click", {}, "c")]
    save_trajectories(tmp_path / "t.jsonl", [good, bad])
    result = convert(read_rows(tmp_path / "t.jsonl"), form)
    assert result.dropped.total() == 0 and set(result.images) == {get_image_path(A), get_image_path(B)}
    rows = result.rows if layout == "trl" else [to_swift_row(row) for row in result.rows]
    write_rows(tmp_path / "out" / "rows.jsonl", rows, result.images)
    assert sorted(path.stem for path in tmp_path.glob("out/images/??/*.png")) == sorted([A.digest, B.digest])
    text = (tmp_path / "out" / "rows.jsonl").read_text()
    assert (
        json.loads(text.splitlines()[0])["images"] == [get_image_path(A), get_image_path(B)]
        and A.digest in text
    )
    assert ("<image>" in text) == (layout == "swift") and "base64" not in text
    conversations = [
        c for e in load_examples(tmp_path / "out" / "rows.jsonl", form).usable for c in e.conversations
    ]
    start = [["look at ", A, "and"], ["click"], ["clicked", B]]
    seen = [[shown(message) for message in conversation.messages] for conversation in conversations]
    ends = [["done"], ["wrong"]]
    if layout == "swift":  # its text and its call are two messages of one turn
        assert all(conversation[1] == ["click"] for conversation in seen)
    assert seen == [[*start, end] for end in ends]


def test_pairs_that_saw_different_images_and_tags_in_texts_are_no_rows(tmp_path: Path) -> None:
    good, bad = seen_episode(), seen_episode()
    bad.turns[0].replies[0].images[0] = PlacedImage(7, C)
    bad.turns[-1].message.content, bad.member, bad.reward = "wrong", 0, Reward(0.0)
    save_trajectories(tmp_path / "t.jsonl", [good, bad])
    result = convert(read_rows(tmp_path / "t.jsonl"), "dpo")
    assert not result.rows and result.dropped == {"pair: the episodes saw different images": 1}
    [first, _] = convert(read_rows(tmp_path / "t.jsonl"), "sft").rows
    first["messages"][0]["content"][0]["text"] = "the tag <image>"
    with pytest.raises(ValueError, match="has the text <image>"):
        to_swift_row(first)
    dropped: Counter[str] = Counter()
    assert to_provider_rows(convert(read_rows(tmp_path / "t.jsonl"), "sft").rows, "openai", dropped) == []
    assert dropped == {"openai: the row has images, which this format does not carry": 2}


def test_image_files_take_no_memory(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (20, 256, 256, 3), np.uint8)
    for number, pixels in enumerate(noise):
        Pillow.fromarray(pixels).save(tmp_path / f"{number}.png")
    rows = [{"prompt": "?", "completion": "x", "image": f"{number}.png"} for number in range(len(noise))]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    tracemalloc.start()
    try:
        examples = load_examples(tmp_path / "rows.jsonl", "sft").usable
        gc.collect()
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    files = sum(path.stat().st_size for path in tmp_path.glob("*.png"))
    assert held < files / 10, (held, files)
    [(_, first)] = examples[0].conversations[0].messages[0].images
    assert first == image_from_pillow(Pillow.fromarray(noise[0])) and read_image(first.data) == first
    tokens = number_image(first, 3)
    assert load_picture(tokens) is first
    Pillow.fromarray(noise[1]).save(tmp_path / "0.png")
    with pytest.raises(ValueError, match=r"0\.png has changed since it was read"):
        _ = first.data
    (tmp_path / "0.png").unlink()
    with pytest.raises(ValueError, match=r"cannot read .*0\.png"):
        _ = first.data
