from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest

from TrainingFactory.common.openai_format import (
    message_from_dict,
    message_to_dict,
    spec_from_dict,
    spec_to_dict,
)
from TrainingFactory.data.trajectories import (
    ENCODING_ERRORS,
    load_trajectories,
    save_trajectories,
    trajectory_from_dict,
    trajectory_to_dict,
)
from TrainingFactory.types import (
    Completion,
    Message,
    Reward,
    Task,
    ToolCall,
    ToolResult,
    ToolSpec,
    Trajectory,
    Turn,
)

ODD = 'quote " back \\ slash\nnew\u2028line\u0000 é 中 😀 \ud800 </tool_call>'


def full() -> Trajectory:
    """Every field with something in it."""
    calls = [
        ToolCall("search", {"query": ODD, "n": [1, 2.5, None]}, "call_0_0"),
        ToolCall("?", {}, "b", "bad"),
    ]
    turns = [
        Turn(
            [1, 2],
            Completion([3, 4], [-0.1, -math.pi], "stop", 5),
            Message("assistant", "", calls, reasoning="hm"),
            [Message("tool", ODD, tool_call_id="call_0_0", name="search")],
            [ToolResult(ODD, False, "timeout", True, 1 / 3)],
            {"found": 1.0},
        ),
        Turn([1, 2, 3, 4, 5], Completion([6], [-1e-17], "stop", 6), Message("assistant", "x")),
        Turn([1, 9], Completion([7], [0.0], "length", 7), Message("assistant", "", reasoning="")),
    ]
    return Trajectory(
        task=Task("t/1", [Message("user", ODD)], {"value": [1, None]}, {"key": ODD}),
        group="3/t/1",
        member=2,
        prompt=[Message("system", "s"), Message("user", ODD)],
        tools=[ToolSpec("search", "Find.", {"type": "object", "properties": {"query": {"type": "string"}}})],
        turns=turns,
        status="truncated",
        reward=Reward(0.1 + 0.2, [0.0, -1.5, 2.0], {"exact": 1.0}),
        error=ODD,
        seconds=1.25,
    )


def test_exact_round_trip(tmp_path: Path):
    plain = Trajectory(Task("a", "p"), "g", status="error", error="reset raised")
    path = tmp_path / "deep" / "file.jsonl"
    save_trajectories(path, [full(), plain])
    save_trajectories(path, [full()], append=True)
    assert list(load_trajectories(path)) == [full(), plain, full()]
    assert path.read_bytes().count(b"\n") == 3
    save_trajectories(path, [plain])
    assert list(load_trajectories(path)) == [plain]


def test_readable_without_us(tmp_path: Path):
    """Plain JSON, OpenAI-style messages, and a prompt's tokens not repeated turn by turn."""
    path = tmp_path / "file.jsonl"
    save_trajectories(path, [full()])
    row = json.loads(path.read_bytes().decode("utf-8", "surrogatepass"))
    assert row["turns"][0]["message"]["tool_calls"][0]["function"]["name"] == "search"
    assert row["turns"][0]["replies"][0]["role"] == "tool"
    assert [turn["new_ids"] for turn in row["turns"]] == [[1, 2], [5], [1, 9]]
    assert row["reward"]["outcome"] == 0.1 + 0.2
    assert "中".encode() in path.read_bytes()


def test_what_is_no_trajectory_is_told(tmp_path: Path):
    path = tmp_path / "file.jsonl"
    save_trajectories(path, [full(), full()])
    whole = path.read_bytes()
    for text, line in ((whole[:-20], 2), (b'{"task": {}}\n', 1)):
        path.write_bytes(text)
        with pytest.raises(ValueError, match=f"line {line} is not a trajectory"):
            list(load_trajectories(path))
    with pytest.raises(ValueError, match=r"task t: answer and metadata must be JSON"):
        save_trajectories(path, [Trajectory(Task("t", "p", answer=object()), "g")])


def test_openai_messages():
    row = {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "search", "arguments": '{"query": "Oslo"}'}}
        ],
    }
    message = message_from_dict(row)
    assert message == Message("assistant", "", [ToolCall("search", {"query": "Oslo"}, "c1")])
    assert message_to_dict(message) == row | {"content": ""}
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert message_from_dict({"role": "developer", "content": parts}) == Message("system", "ab")
    assert message_from_dict({"role": "user", "content": "a"}) == Message("user", "a")
    assert message_from_dict({"role": "assistant", "content": "a", "reasoning": "r"}).reasoning == "r"


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [("{", "not valid JSON"), ("[1]", "must be a JSON object"), (3, "must be a JSON object")],
)
def test_calls_with_bad_arguments_are_kept_as_such(arguments: Any, problem: str):
    call = {"id": "c", "function": {"name": "search", "arguments": arguments}}
    [read] = message_from_dict({"role": "assistant", "tool_calls": [call]}).tool_calls
    assert read.name == "search" and read.arguments == {} and problem in str(read.error)


@pytest.mark.parametrize(
    ("read", "row"),
    [
        (message_from_dict, "text"),
        (message_from_dict, {"content": "x"}),
        (message_from_dict, {"role": "bot"}),
        (message_from_dict, {"role": "user", "content": [{"type": "image_url"}]}),
        (message_from_dict, {"role": "assistant", "tool_calls": "search"}),
        (message_from_dict, {"role": "assistant", "tool_calls": [{"function": {"arguments": "{}"}}]}),
        (spec_from_dict, {"function": {"description": "no name"}}),
    ],
)
def test_what_is_no_message_or_tool_is_refused(read: Any, row: Any):
    with pytest.raises(ValueError):
        read(row)


def test_tool_specs():
    spec = ToolSpec("search", "Find.", {"type": "object", "properties": {"q": {}}})
    assert spec_from_dict(spec_to_dict(spec)) == spec
    assert spec_from_dict({"name": "now"}) == ToolSpec("now")


def test_numbers_are_written_as_json_has_them_and_read_back_to_the_bit(tmp_path: Path):
    """Another library writes the lists of numbers: what it writes is what `json` would read from its own text."""
    rng = random.Random(0)
    values = [rng.uniform(-1, 1) * 10.0 ** rng.randrange(-320, 300) for _ in range(500)]
    values += [0.0, -0.0, 5e-324, 1e-5, -1.1920928955078125e-07, 1e16, 1e22, math.inf, -math.inf, math.nan]
    ids = [*range(len(values) - 1), 2**40]
    completion = Completion(ids, values, "stop", 3, [*range(len(values))])
    played = Trajectory(Task("a", "p", {1: "int keys become texts"}), "g")
    played.turns = [Turn([1], completion, Message("assistant", ODD))]
    save_trajectories(tmp_path / "t.jsonl", [played])
    with (tmp_path / "t.jsonl").open(encoding="utf-8", errors=ENCODING_ERRORS) as file:
        assert repr(json.load(file)) == repr(json.loads(json.dumps(trajectory_to_dict(played))))
    [read] = load_trajectories(tmp_path / "t.jsonl")
    assert read.turns[0].completion.token_ids == ids and read.turns[0].message.content == ODD
    assert list(map(repr, read.turns[0].completion.logprobs)) == list(map(repr, values))


def test_folds_and_forks_are_stored_and_left_out_where_there_are_none() -> None:
    completion = Completion([3], [-0.5], "stop")
    folded = Turn([1, 2], completion, Message("assistant", "a"), fold="window", summary=True, state="door")
    forked = Trajectory(Task("t", "p"), "g", member=4, turns=[folded], parent=1, fork_turn=1)
    assert trajectory_from_dict(trajectory_to_dict(forked)) == forked
    plain = trajectory_to_dict(Trajectory(Task("t", "p"), "g", turns=[Turn([1], completion, folded.message)]))
    assert not {"parent", "fork_turn"} & set(plain)
    assert not {"fold", "summary", "state"} & set(plain["turns"][0])
