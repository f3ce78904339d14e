"""The environments `screen` and `charts`: pictures, tasks that the text alone cannot solve, and rewards."""

from __future__ import annotations

import asyncio
import hashlib
import io
import math
import random
from collections import Counter
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from PIL import Image as Pillow

from tests.kits.rollout import FakeChat
from TrainingFactory.assembly.environment import as_environment_factory, find_environment
from TrainingFactory.envs.builtin.charts import ChartEnvironment
from TrainingFactory.envs.builtin.drawing import COLORS, LETTER_ROWS, SHAPES, Canvas
from TrainingFactory.envs.builtin.screen import ScreenEnvironment
from TrainingFactory.rollout import play
from TrainingFactory.types import Image, Message, Task, ToolCall, Trajectory

KINDS = ["color", "shape", "label", "switch", "switches", "reveal"]
CHARTS = ["highest", "value", "color", "count"]


def screens(**options: Any) -> type[ScreenEnvironment]:
    return as_environment_factory(find_environment("screen"), options)


def charts(**options: Any) -> type[ChartEnvironment]:
    return as_environment_factory(find_environment("charts"), options)


def pixels(image: Image) -> np.ndarray:
    return np.asarray(Pillow.open(io.BytesIO(image.data)))


def shown(message: Message) -> Image:
    [(place, image)] = message.images
    assert place == 0
    return image


class SeeingChat(FakeChat):
    sees_images = True


def played(environment: ScreenEnvironment, *turns: Message) -> Trajectory:
    return asyncio.run(play(environment, SeeingChat(), turns or environment.expert()))


def outcome(trajectory: Trajectory) -> float:
    assert trajectory.reward is not None, trajectory.error
    return trajectory.reward.outcome


def tap(**arguments: int) -> Message:
    return Message("assistant", tool_calls=[ToolCall("tap", arguments)])


def test_pictures_are_the_same_pixels_on_every_machine() -> None:
    digests = [shown(task.prompt[-1]).digest for task in charts().tasks("train", 0, 8)]  # type: ignore[arg-type]
    kind = screens(kinds=KINDS, cell=32)
    digests += [kind(task).screenshot().digest for task in kind.tasks("train", 0, 12)]
    canvas = Canvas(160, 64)
    for number, shape in enumerate(SHAPES):
        canvas.draw_shape(shape, (number * 16, 0), 13, COLORS["blue"])
    for row in range(2):
        canvas.draw_text("".join(LETTER_ROWS)[row * 19 : (row + 1) * 19], (80, 24 + 20 * row), 2)
    digests.append(canvas.to_image().digest)
    digest = hashlib.sha256(" ".join(digests).encode()).hexdigest()
    assert digest == "c8526fdb030060b37df17c449d53a4b3faf0c16595b60ec9eae936e73bd0bd4d"


@pytest.mark.parametrize("how", ["cell", "point"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_expert_solves_every_kind(kind: str, how: str) -> None:
    environment = screens(kinds=[kind], tap=how)
    for task in environment.tasks("heldout", 1, 3):
        assert task.metadata["kind"] == kind
        episode = played(environment(task))
        assert (outcome(episode), episode.status) == (1.0, "done")
        assert all(not isinstance(value, bytes) for value in task.metadata.values())


@pytest.mark.parametrize("kind", ["color", "shape", "label", "switch", "switches"])
def test_chance_is_the_success_of_random_taps(kind: str) -> None:
    environment = screens(kinds=[kind])
    done = [] if kind in ("color", "shape", "label") else [Message("assistant", "Done")]
    for task in environment.tasks("train", 0, 2):
        choices = [*combinations(range(1, 9), 2 if kind == "switches" else 1)]
        taps = [[tap(cell=cell) for cell in choice] for choice in choices]
        outcomes = [outcome(played(environment(task), *turns, *done)) for turns in taps]
        assert math.isclose(sum(outcomes) / len(outcomes), environment.get_chance_rate(task))


def test_the_text_says_nothing_about_the_place() -> None:
    """The most frequent solution of a prompt in training tasks solves held-out tasks no more often than chance."""
    for kind in ("color", "shape", "label", "switch"):
        environment = screens(kinds=[kind], columns=2, widgets=3)
        cells: dict[Any, Counter[int]] = {}
        for task in environment.tasks("train", 0, 600):
            cells.setdefault(task.prompt, Counter()).update(task.metadata["targets"])
        heldout = [task for task in environment.tasks("heldout", 7, 400) if task.prompt in cells]
        hits = [cells[task.prompt].most_common(1)[0][0] in task.metadata["targets"] for task in heldout]
        deviation = math.sqrt(0.25 * 0.75 / len(hits))
        assert (
            environment.get_chance_rate(heldout[0]) == 0.25 and sum(hits) / len(hits) <= 0.25 + 4 * deviation
        )


def test_blind_pictures_have_the_size_and_show_nothing() -> None:
    sees, blind = screens(kinds=KINDS), screens(kinds=KINDS, blind=True)
    images = set()
    for task, same in zip(sees.tasks("heldout", 0, 12), blind.tasks("heldout", 0, 12), strict=True):
        assert task == same
        seen, [prompt] = (
            sees(task).screenshot(),
            [shown(m) for m in asyncio.run(blind(task).reset()) if m.images],
        )
        assert (seen.width, seen.height) == (prompt.width, prompt.height) and seen != prompt
        images.add(prompt)
        if task.metadata["kind"] == "switch":
            images.add(
                shown(played(blind(task), tap(cell=1), Message("assistant", "Done")).turns[0].replies[0])
            )
    [image] = images
    assert len(np.unique(pixels(image))) == 1
    charted = {shown(task.prompt[-1]) for task in charts(blind=True).tasks("heldout", 0, 8)}  # type: ignore[arg-type]
    assert len(charted) == 1


def test_splits_are_disjoint_and_seeds_repeat() -> None:
    for environment in (screens(), charts()):
        train, heldout = (list(environment.tasks(split, 0, 100)) for split in ("train", "heldout"))
        assert train == list(environment.tasks("train", 0, 100)) != list(environment.tasks("train", 1, 100))
        layouts = [{str(task.metadata) for task in tasks} for tasks in (train, heldout)]
        assert not layouts[0] & layouts[1] and len(layouts[0]) == 100


def test_a_tap_changes_the_picture_in_its_cell() -> None:
    for kind in ("switch", "reveal"):
        environment = screens(kinds=[kind], cell=32)
        [task] = environment.tasks("train", 0, 1)
        episode = played(environment(task), tap(cell=6), Message("assistant", "Done"))
        before, after = shown(episode.prompt[-1]), shown(episode.turns[0].replies[0])
        rows, columns = np.nonzero((pixels(before) != pixels(after)).any(axis=-1))
        assert {*(rows // 32)} == {1} and {*(columns // 32)} == {1}  # the sixth cell of 4 x 2
        again = played(environment(task), tap(cell=6), tap(cell=6), Message("assistant", "Done"))
        back = shown(again.turns[1].replies[0])
        assert back == (before if kind == "switch" else after)


def test_a_switch_that_was_not_named_must_stay() -> None:
    environment = screens(kinds=["switch"])
    [task] = environment.tasks("train", 0, 1)
    [target] = [cell + 1 for cell in task.metadata["targets"]]
    other = target % 8 + 1
    done = Message("assistant", "Done")
    assert outcome(played(environment(task), tap(cell=target), tap(cell=other), done)) == 0
    assert outcome(played(environment(task), tap(cell=target), tap(cell=other), tap(cell=other), done)) == 1


def test_a_closing_screen_ends_at_the_first_tap_inside_it() -> None:
    environment = screens()
    [task] = environment.tasks("train", 0, 1)
    target = task.metadata["targets"][0] + 1
    episode = played(environment(task), tap(cell=0), tap(cell=9), tap(cell=target), tap(cell=1))
    assert (outcome(episode), len(episode.turns)) == (1.0, 3)
    assert (
        "Cells are 1 to 8" in episode.turns[0].replies[0].content and not episode.turns[0].replies[0].images
    )
    assert outcome(played(environment(task), Message("assistant", "I cannot see it."))) == 0


def test_points_are_thousandths() -> None:
    environment = screens(tap="point", columns=3, rows=2)
    [task] = environment.tasks("train", 0, 1)
    cells = {(0, 0): 0, (333, 0): 0, (334, 499): 1, (999, 499): 2, (999, 500): 5, (0, 999): 3}
    for (x, y), cell in cells.items():
        instance = environment(task)
        played(instance, tap(x=x, y=y))
        assert instance.taps == [cell]


async def test_a_fork_has_the_taps_and_goes_its_own_way() -> None:
    environment = screens(kinds=["switch"])
    [task] = environment.tasks("train", 0, 1)
    first = environment(task)
    await first.step(tap(cell=2))
    second = await first.fork()
    await second.step(tap(cell=3))
    assert (first.taps, second.taps) == ([1], [1, 2]) and first.screenshot() != second.screenshot()


@pytest.mark.parametrize(
    ("name", "options", "text"),
    [
        ("screen", {"kinds": ["colour"]}, "kinds"),
        ("screen", {"columns": 1}, "columns"),
        ("screen", {"cell": 8}, "cell"),
        ("screen", {"widgets": 9}, "more than the 4 x 2 cells"),
        ("screen", {"widgets": 1, "kinds": ["switch", "switches"]}, "set 2 or more"),
        ("screen", {"blnd": True}, "did you mean blind"),
        ("charts", {"kinds": []}, "kinds"),
        ("charts", {"scale": 0}, "scale"),
    ],
)
def test_invalid_options_are_rejected(name: str, options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        as_environment_factory(find_environment(name), options)


def read_chart(task: Task, image: Image) -> str:
    """Answer a question from the pixels alone."""
    picture, question = pixels(image), task.prompt[-1].content  # type: ignore[union-attr]
    names = {color: name for name, color in COLORS.items()}
    if "bar" in question:
        # the middle of each bar; the letters are below row 56
        heights = [
            sum(tuple(pixel) in names for pixel in picture[:56, 16 * bar + 8]) // 6 for bar in range(6)
        ]
        if "highest" in question:
            return "ABCDEF"[heights.index(max(heights))]
        return str(heights["ABCDEF".index(question.split("bar ")[1][0])])
    cells = [[Counter(map(tuple, picture[y : y + 16, x : x + 16].reshape(-1, 3).tolist())) for x in range(0, 96, 16)]
             for y in range(0, 64, 16)]  # fmt: skip
    colors = [[next(names[color] for color in cell if color in names) for cell in row] for row in cells]
    if question.startswith("Which color"):
        row, column = (int(word.strip("?,")) for word in question.split() if word.strip("?,").isdigit())
        return colors[row - 1][column - 1]
    return str(sum(row.count(question.split()[-1].strip("?")) for row in colors))


def test_the_answers_to_charts_can_be_read_from_their_pixels() -> None:
    environment = charts()
    tasks = list(environment.tasks("heldout", 0, 40))
    assert {task.metadata["kind"] for task in tasks} == set(CHARTS)
    for task in tasks:
        episode = played(environment(task))  # type: ignore[arg-type]
        assert read_chart(task, shown(episode.prompt[-1])) == task.answer and outcome(episode) == 1


def test_answers_to_charts_are_uniform() -> None:
    for kind in CHARTS:
        environment = charts(kinds=[kind])
        tasks = list(environment.tasks("train", 0, 160))
        counts = Counter(task.answer for task in tasks)
        chance = environment.get_chance_rate(tasks[0])
        assert len(counts) == round(1 / chance)
        assert max(counts.values()) / 160 <= chance + 4 * math.sqrt(chance * (1 - chance) / 160)


def test_the_novice_taps_anywhere() -> None:
    environment = screens(columns=2, rows=2)
    rng = random.Random(0)
    outcomes = [
        outcome(played(e, *e.novice(rng))) for e in map(environment, environment.tasks("train", 0, 120))
    ]
    assert abs(sum(outcomes) / 120 - 0.25) < 0.12
