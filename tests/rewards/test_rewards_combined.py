from __future__ import annotations

import asyncio
import math
import re
import runpy
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.kits.rollout import Echo, rollout
from TrainingFactory.rewards.adapt import Unscored, as_reward, environment_reward, validate_reward
from TrainingFactory.rewards.combined import Combined
from TrainingFactory.rewards.rules.rule_based import make_rule
from TrainingFactory.rollout.scoring import OpenEpisode
from TrainingFactory.types import Completion, Message, Reward, Task, Trajectory, Turn

ROOT = Path(__file__).resolve().parents[2]


def episode(
    text: str = "ok", turns: int = 1, prompt: Any = "how many?", answer: Any = "ok", **metadata: Any
) -> OpenEpisode:
    task = Task("t1", prompt, answer, metadata)
    made = [
        Turn([1], Completion([5, 6], [0.0, 0.0], "stop"), Message("assistant", text)) for _ in range(turns)
    ]
    environment = Echo(task)
    return OpenEpisode(Trajectory(task, "g", turns=made), environment, environment.executor)


def score(reward: Any, *args: Any, **keywords: Any) -> Reward:
    return asyncio.run(reward(episode(*args, **keywords)))


def scored(function: Any, *args: Any, **keywords: Any) -> Reward:
    return score(as_reward(function), *args, **keywords)


async def on_loop(episode: OpenEpisode) -> float:
    return 0.5


def on_trajectory(trajectory: Any) -> float:
    return float(isinstance(trajectory, Trajectory))


def by_hint(what: Trajectory) -> bool:
    return isinstance(what, Trajectory)


class Counting:
    async def __call__(self, one: Any) -> Reward:
        return Reward(1.0, [0.25] * len(one.trajectory.turns), {"a": 1.0, "b": 2.0})


def trl(completions: list[Any], answer: list[Any], **columns: Any) -> list[float]:
    return [
        float(text == right) + level
        for text, right, level in zip(completions, answer, columns["level"], strict=True)
    ]


@pytest.mark.parametrize(
    ("function", "worth"),
    [
        (lambda episode: 2, Reward(2.0)),
        (lambda episode: episode.trajectory.answer == "ok", Reward(1.0)),
        (on_loop, Reward(0.5)),
        (on_trajectory, Reward(1.0)),
        (by_hint, Reward(1.0)),
        (Counting(), Reward(1.0, [0.25], {"a": 1.0, "b": 2.0})),
        (trl, Reward(4.0)),
        (environment_reward, Reward(1.0)),
        (make_rule("exact"), Reward(1.0, parts={"exact": 1.0})),
    ],
)
def test_any_callable_is_a_reward(function: Any, worth: Reward):
    assert scored(function, level=3) == worth


def test_trl_shape():
    seen: list[dict[str, Any]] = []

    def everything(prompts: Any, completions: Any, **columns: Any) -> list[float | None]:
        seen.append({"prompts": prompts, "completions": completions, **columns})
        return [1.0] * len(completions)

    async def few(completions: Any, level: Any) -> list[float]:
        return [float(level[0])]

    scored(everything, "yes", level=3)
    assert seen[0] == {
        "prompts": ["how many?"],
        "completions": ["yes"],
        "completion_ids": [[5, 6]],
        "answer": ["ok"],
        "task_id": ["t1"],
        "level": [3],
    }
    scored(everything, "yes", prompt=[Message("user", "hi")])
    assert seen[1]["prompts"] == [[{"role": "user", "content": "hi"}]]
    assert seen[1]["completions"] == [[{"role": "assistant", "content": "yes"}]]
    assert scored(few, level=7) == Reward(7.0)
    with pytest.raises(Unscored, match=r"few .*level, which the tasks do not have"):
        scored(few)

    def half(completions: list[str]) -> list[Any]:
        return [1.0, None, math.nan][: len(completions)]

    first, second, third = asyncio.run(as_reward(half).group([episode(), episode(), episode()]))
    assert first == Reward(1.0)
    assert isinstance(second, Unscored) and "returned None" in str(second)
    assert isinstance(third, Unscored) and "finite" in str(third)
    assert asyncio.run(as_reward(on_loop).group([episode(), episode()])) == [Reward(0.5)] * 2


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (lambda completions: [1.0, 2.0], "a list with one number for each of .* 1 episodes"),
        (lambda completions: 1.0, "a list with one number for each"),
        (lambda completions: ["1"], "returned '1'"),
        (lambda completions: [None], "returned None"),
    ],
)
def test_what_is_no_reward_is_told(function: Callable[..., Any], says: str):
    with pytest.raises(Unscored, match=says):
        scored(function)


@pytest.mark.parametrize(
    "function", [3, "exact", lambda: 1.0, lambda a, b: 1.0, Counting, lambda *, episode: 1]
)
def test_what_cannot_be_a_reward(function: Any):
    with pytest.raises(ValueError, match="must"):
        as_reward(function)


def test_numbers_of_other_libraries():
    np = pytest.importorskip("numpy")
    assert validate_reward(np.float32(0.5), (), "x") == Reward(0.5)
    with pytest.raises(Unscored, match="finite number"):
        validate_reward(np.ones(3), (), "x")


def test_parts_are_weighted():
    combined = Combined(
        {
            "right": (2.0, lambda episode: 1.0),
            "turns": (0.5, Counting()),
            "long": (-1.0, lambda episode: Reward(3.0, [1.0, 0.0])),
            "own": (1.0, "environment"),
        }
    )
    reward = score(combined, turns=2)
    assert reward.outcome == 2.0 * 1 + 0.5 * 1 - 3.0 + 1.0
    assert reward.steps == [0.5 * 0.25 - 1.0, 0.5 * 0.25]
    assert reward.parts == {
        "right": 1.0,
        "turns": 1.5,
        "turns/a": 1.0,
        "turns/b": 2.0,
        "long": 4.0,
        "own": 1.0,
    }
    nested = Combined({"all": (10.0, combined), "more": (1.0, on_loop)})
    assert score(nested, turns=2).outcome == 10 * 0.5 + 0.5


def test_parts_run_at_the_same_time():
    both = threading.Barrier(3, timeout=30)  # breaks, and fails the test, if one waits for another

    def waits(episode: Any) -> float:
        both.wait()
        return 1.0

    async def waits_too(episode: Any) -> float:
        await asyncio.to_thread(both.wait)
        return 1.0

    combined = Combined({"a": (1, waits), "b": (1, waits), "c": (1, waits_too)})
    assert score(combined).outcome == 3.0


def test_a_part_keeps_a_limit_of_its_own():
    assert Combined(
        {"a": (1, as_reward(lambda e: 1.0, "a", 0.1)), "b": (1, lambda e: 1.0)}, timeout=9
    ).rewards["a"].timeout == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("hint", "shape"),
    [
        ("Trajectory", "trajectory"),
        ("Trajectory | None", "trajectory"),
        ("Optional[Trajectory]", "trajectory"),
        ("list[Trajectory]", "trajectories"),
        ("Sequence[Episode]", "episodes"),
        ("tuple[Trajectory, ...]", "trajectories"),
        ("collections.abc.Iterable[types.Trajectory] | None", "trajectories"),
    ],
)
def test_hints_say_what_a_reward_takes(hint: str, shape: str):
    def reward(it: Any) -> float:
        return 1.0

    reward.__annotations__["it"] = hint
    assert as_reward(reward).signature == shape


def test_a_part_that_cannot_score_leaves_the_whole_unscored():
    asked = threading.Event()

    def fails(episode: Any) -> float:
        raise KeyError("gone")

    def hangs(episode: Any) -> float:
        asked.wait(20)
        return 1.0

    combined = Combined(
        {"fine": (1, lambda e: 1.0), "silent": (1, lambda e: None), "bad": (1, fails), "slow": (1, hangs)},
        timeout=0.2,
    )
    try:
        [[played]] = rollout(reward=combined)
    finally:
        asked.set()
    assert played.reward is None
    assert "part silent: the reward silent returned None" in str(played.error)
    assert re.search(
        r"part bad: the reward fails \(test_rewards_combined.py:\d+\) raised KeyError: 'gone'",
        str(played.error),
    )
    assert "part slow: the reward slow took longer than 0.2 s" in str(played.error)
    assert "fine" not in str(played.error)
    [[played]] = rollout(reward=Combined({"fine": (0.5, "environment")}))
    assert played.reward == Reward(0.5, [], {"fine": 1.0})


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        ({}, "at least 1 item"),
        ({"a": on_loop}, r"a\n  Input should be a valid tuple"),
        ({"a": ("1", on_loop)}, r"a\.0\n  Input should be a valid number"),
        ({"a": (True, on_loop)}, r"a\.0\n  Input should be a valid number"),
        ({"a": (math.nan, on_loop)}, "should be a finite number"),
        ({"a": (math.inf, on_loop)}, "should be a finite number"),
        ({"a": (1.0, "exact")}, "reward a is 'exact'"),
        ({"a/b": (1.0, on_loop)}, "invalid part name 'a/b'"),
        ({3: (1.0, on_loop)}, r"key\]\n  Input should be a valid string"),
    ],
)
def test_bad_parts_are_refused_when_made(parts: Any, says: str):
    with pytest.raises(ValueError, match=says):
        Combined(parts)
    with pytest.raises(ValueError, match="Input should be greater than 0"):
        Combined({"a": (1.0, on_loop)}, timeout=0)


def test_the_page_about_rewards_runs_as_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    text = (ROOT / "docs" / "REWARDS.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 5 and len(blocks[0].strip().splitlines()) < 10
    monkeypatch.chdir(tmp_path)
    Path("rewards.py").write_text("def right(completions, answer):\n    return []\n")
    Path("page.py").write_text("\n".join(blocks), encoding="utf-8")
    made = runpy.run_path("page.py", run_name="__main__")
    assert {"pool", "judges", "reward", "queries", "show_rewards"} <= made.keys()
