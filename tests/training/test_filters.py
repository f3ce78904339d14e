"""Filters of sampled episodes: what they flag, and what a run does with it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.kits.run import Quiet, assert_same_run, brief, go_on, rows, train
from TrainingFactory.algorithms.grpo import GRPO
from TrainingFactory.algorithms.ppo import PPO
from TrainingFactory.algorithms.rft import RFT
from TrainingFactory.assembly.named_files import read_config
from TrainingFactory.data.trajectories import trajectory_from_dict, trajectory_to_dict
from TrainingFactory.runs.finding_rules import FindingTracker
from TrainingFactory.training.filters import (
    FILTERS,
    EpisodeFilters,
    compute_filter_metrics,
    find_dropped_problem,
)
from TrainingFactory.training.preflight import check_config
from TrainingFactory.types import Completion, Message, Reward, Task, ToolCall, Trajectory, Turn


def episode(*messages: Message, reward: float | None = 1.0, status: Any = "done") -> Trajectory:
    turns, ids = [], [1]
    for number, message in enumerate(messages):
        turns.append(Turn(list(ids), Completion([number + 2], [0.0], "stop"), message))
        ids += [number + 2, 0]
    scored = None if reward is None else Reward(reward)
    return Trajectory(Task("t", "?"), "g", turns=turns, status=status, reward=scored)


def say(text: str) -> Message:
    return Message("assistant", text)


def call(name: str, error: str | None = None, **arguments: Any) -> Message:
    return Message("assistant", tool_calls=[ToolCall(name, arguments, error=error)])


@pytest.mark.parametrize(
    ("name", "messages", "flags"),
    [
        ("void_turns", [say(" \n"), call("f"), say("Oslo")], [True, False, False]),
        ("repeated_calls", [call("f", a=1, b=2), call("f", a=2), call("f", b=2, a=1)], [False, False, True]),
        ("repeated_calls", [call("f", error="no JSON"), call("f", error="no JSON")], [False, False]),
        ("unreadable_calls", [call("f", error="no JSON"), call("f")], [True, False]),
    ],
)
def test_flags(name: str, messages: list[Message], flags: list[bool]) -> None:
    assert FILTERS[name](episode(*messages)) == flags


def test_calls_repeated_within_a_turn_and_truncated_episodes_are_flagged() -> None:
    twice = Message("assistant", tool_calls=[ToolCall("f", {"a": 1}), ToolCall("f", {"a": 1})])
    assert FILTERS["repeated_calls"](episode(twice)) == [True]
    assert FILTERS["truncated"](episode(say("x"), status="truncated")) is True
    assert FILTERS["truncated"](episode(say("x"))) is False


def trained_tokens(
    filters: dict[str, str], *group: Trajectory, algorithm: Any = None
) -> list[dict[int, float]]:
    """Advantage of each trained token, row by row."""
    [made] = EpisodeFilters(filters).make_groups(
        [list(group)], algorithm or GRPO(advantage="rloo"), [(0, 0, 0)]
    )
    return [
        {
            token: round(advantage, 9)
            for token, mask, advantage in zip(row.token_ids, row.loss_mask, row.advantages, strict=True)
            if mask
        }
        for row in made.rows
    ]


GROUP = (episode(say(""), say("a"), reward=3.0), episode(say("b"), reward=1.0), episode(say("c"), reward=0.0))


def test_dropped_episodes_leave_the_baseline_masked_ones_stay() -> None:
    assert trained_tokens({}, *GROUP) == [{2: 2.5, 3: 2.5}, {2: -0.5}, {2: -2.0}]
    assert trained_tokens({"void_turns": "count"}, *GROUP) == [{2: 2.5, 3: 2.5}, {2: -0.5}, {2: -2.0}]
    assert trained_tokens({"void_turns": "mask"}, *GROUP) == [{3: 2.5}, {2: -0.5}, {2: -2.0}]
    assert trained_tokens({"void_turns": "drop"}, *GROUP) == [{2: 1.0}, {2: -1.0}]


def test_masking_truncated_episodes_is_train_truncated_false() -> None:
    group = (replace(GROUP[0], status="truncated"), *GROUP[1:])
    masked = [row for row in trained_tokens({"truncated": "mask"}, *group) if row]
    grpo = GRPO(advantage="rloo", train_truncated=False)
    assert masked == trained_tokens({}, *group, algorithm=grpo)


def test_masks_with_the_other_algorithms() -> None:
    """The reward of a masked turn follows from the turns before; RFT neither trains nor stores dropped episodes."""
    late = episode(say("a"), say(""), reward=1.0)
    [group] = EpisodeFilters({"void_turns": "mask"}).make_groups([[late]], PPO(), [(0, 0, 0)])
    [row] = group.rows
    assert (row.loss_mask, row.rewards) == ([False, True, False, False], [0.0, 1.0, 0.0, 1.0])
    [group] = EpisodeFilters({"void_turns": "drop"}).make_groups([list(GROUP)], RFT(), [(0, 0, 0)])
    assert RFT().accepted(group.trajectories) == [GROUP[1]]
    assert [row.token_ids for row in group.rows] == [[1, 2]]


def test_counts_and_stored_episodes() -> None:
    filters = EpisodeFilters({"void_turns": "drop", "truncated": "count", "repeated_calls": "mask"})
    [group] = filters.make_groups([list(GROUP)], GRPO(), [(0, 0, 0)])
    shares = {"void_turns": 1 / 3, "truncated": 0, "repeated_calls": 0, "dropped": 1 / 3, "masked_turns": 0}
    assert compute_filter_metrics([group]) == pytest.approx(
        {f"filters/{name}": n for name, n in shares.items()}
    )
    stored = trajectory_from_dict(trajectory_to_dict(group.trajectories[0]))
    assert stored == group.trajectories[0] and stored.reward == Reward(3.0)
    assert stored.error == "dropped by training.filters: void_turns" and stored.turns[1].masked
    assert find_dropped_problem([group]) is None
    assert (
        filters.filter_group([stored]).counts == filters.filter_group([GROUP[0]]).counts
    )  # a replay filters again


def test_a_function_of_ones_own(tmp_path: Path) -> None:
    """Its file is found beside the config."""
    (tmp_path / "mine.py").write_text("def long(episode): return len(episode.turns) > 1\n")
    (tmp_path / "c.yaml").write_text("training: {filters: {'mine.py:long': drop}}\n")
    filters = read_config(tmp_path / "c.yaml").training.filters
    assert trained_tokens(dict(filters), *GROUP) == [{2: 1.0}, {2: -1.0}]
    assert "long" in EpisodeFilters(filters).filter_group(GROUP).counts


@pytest.mark.parametrize(
    ("body", "texts"),
    [
        ("1 / 0", ["mine.py:bad", "mine.py:2", "ZeroDivisionError"]),
        ("return [True]", ["mine.py:bad returned [True]", "2 turns", "one bool for each turn"]),
        ("return 1", ["returned 1", "return a bool"]),
    ],
)
def test_a_function_that_fails(tmp_path: Path, body: str, texts: list[str]) -> None:
    (tmp_path / "mine.py").write_text(f"def bad(episode):\n    {body}\n")
    with pytest.raises(ValueError) as error:
        EpisodeFilters({f"{tmp_path}/mine.py:bad": "drop"}).filter_group(GROUP)
    assert all(text in str(error.value) for text in texts), error.value


@pytest.mark.parametrize(
    ("training", "texts"),
    [
        ({"filters": {"void_turn": "drop"}}, ["training.filters.void_turn", "void_turns"]),
        ({"filters": {"nowhere.py:f": "drop"}}, ["training.filters", "nowhere.py"]),
        ({"filters": {"void_turns": "remove"}}, ["training.filters.void_turns", "drop", "mask", "count"]),
        ({"filters": {"void_turns": "drop"}, "algorithm": "sft"}, ["training.filters", "sft"]),
    ],
)
def test_wrong_options(tmp_path: Path, training: dict[str, Any], texts: list[str]) -> None:
    with pytest.raises(ValueError) as error:
        check_config(brief(tmp_path, training=training), is_recorded=False)
    assert all(text in str(error.value) for text in texts), error.value


def test_a_run_whose_episodes_are_all_dropped_warns_and_stops(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def every(episode): return True\n")
    watcher = Quiet()
    config = brief(tmp_path, training={"filters": {f"{tmp_path}/mine.py:every": "drop"}})
    with pytest.raises(ValueError, match=r"3 consecutive unusable steps.*dropped all 4 scored episodes"):
        train(config, "dropped", watcher)
    warnings = [text for text in watcher.said if text.startswith("WARNING") and "training.filters" in text]
    assert len(warnings) == 3 and "every flags 12" in warnings[0]
    written = rows(tmp_path / "dropped" / "metrics.jsonl")
    assert [row["filters/dropped"] for row in written] == [1.0, 1.0]
    assert not any(row["rows"] for row in written)


def test_the_doctor_reports_filters_that_drop_most() -> None:
    doctor = FindingTracker([])
    found = [
        change.name
        for step in range(3)
        for change in doctor.observe(step, {"seconds/step": 1.0, "filters/dropped": 0.75, "step": step}, [])
    ]
    assert found == ["most_filtered"]


@pytest.mark.slow
def test_a_filtered_run_resumes_to_the_same_bits(tmp_path: Path) -> None:
    config = brief(tmp_path, training={"filters": {"truncated": "drop", "void_turns": "mask"}})
    train(config, "whole")
    with pytest.raises(RuntimeError, match="broken off"):
        train(config, "parts", Quiet(fail_at=3))
    go_on(tmp_path / "parts")
    assert_same_run(tmp_path / "whole", tmp_path / "parts")
    assert any(row["filters/dropped"] > 0 for row in rows(tmp_path / "whole" / "metrics.jsonl"))
