from __future__ import annotations

import asyncio
import math
import random
from typing import Any

import pytest

from tests.kits.rollout import Echo, call_text, rollout
from TrainingFactory.rewards import ProcessReward, Unscored, calculate_process_reward
from TrainingFactory.rewards.process_reward import PROCESS_RULES
from TrainingFactory.rollout.scoring import OpenEpisode
from TrainingFactory.types import (
    Completion,
    Message,
    Reward,
    Status,
    Task,
    ToolCall,
    ToolResult,
    ToolSpec,
    Trajectory,
    Turn,
)

QUERY = {"type": "object", "properties": {"q": {"type": "string"}}, "required": ["q"]}
SPECS = [ToolSpec("search", parameters=QUERY), ToolSpec("add")]
NOTHING = {"capped": 0.0, "clawed_back": 0.0}
THOUGHT = "I do not know where Oslo is, so I look it up"


def call(
    name: str = "search", ok: bool = True, text: str = "", error: str | None = None, **arguments: Any
) -> Turn:
    made = ToolCall(name, arguments or {"q": "oslo"}, error=error)
    result = ToolResult("4" if ok else "no", ok=ok, error=None if ok else "exception")
    return Turn(
        [1], Completion([1], [0.0], "stop"), Message("assistant", text, [made]), tool_results=[result]
    )


def says(text: str = "4", reasoning: str | None = None) -> Turn:
    return Turn([1], Completion([1], [0.0], "stop"), Message("assistant", text, reasoning=reasoning))


def played(*turns: Turn, status: Status = "done", **metadata: Any) -> Trajectory:
    return Trajectory(
        Task("t", "Find the city of Oslo", "4", metadata), "g", tools=SPECS, turns=list(turns), status=status
    )


def said(rule: str, *turns: Turn, outcome: float = 1.0, **metadata: Any) -> list[float]:
    """Return what a rule gives in each turn."""
    return calculate_process_reward(
        played(*turns, **metadata),
        {rule: 1.0},
        outcome=outcome,
        pay="per_turn",
        cap=math.inf,
        claw_back=False,
    ).steps


def test_the_right_tool():
    turns = [call(), call("add"), call("add", ok=False), call("nothing"), says()]
    assert said("correct_tool", *turns) == [1, 1, 0, 0, 0]
    assert said("correct_tool", *turns, correct_tool="add") == [0, 1, 0, 0, 0]
    assert said("correct_tool", *turns, correct_tool=["add", "search"]) == [1, 1, 0, 0, 0]
    both = call()
    both.message.tool_calls.append(ToolCall("add"))
    assert said("correct_tool", both) == [0]  # the second has no result
    both.tool_results.append(ToolResult("5"))
    assert said("correct_tool", both) == [1] and said("correct_tool", both, correct_tool="add") == [0]


def test_the_right_arguments():
    """The task may name arguments; those that it does not name are free."""
    turns = [call(q="oslo"), call(q="rome"), call(q="oslo", page=2), call("add", q="oslo")]
    expected: Any = {"name": "search", "arguments": {"q": "oslo"}}
    assert said("correct_tool", *turns, correct_tool=expected) == [1, 0, 1, 0]
    assert said("correct_tool", *turns, correct_tool=[expected, "add"]) == [1, 0, 1, 1]
    assert said("correct_tool", *turns, correct_tool={"name": "search"}) == [1, 1, 1, 0]


def test_valid_arguments():
    refused = call("add")
    refused.tool_results = [ToolResult("there is no argument q", ok=False, error="schema")]
    turns = [call(), call(q=3), call(x="oslo"), call(error="no JSON"), call("nothing"), refused, says()]
    assert said("valid_arguments", *turns) == [1, 0, 0, 0, 0, 0, 0]


def test_repeated_calls():
    turns = [call(), call(q="rome"), call(), call("add"), says()]
    assert said("no_repeated_call", *turns) == [1, 1, 0, 1, 0]
    twice = call(a=1, b=2)
    twice.message.tool_calls.append(ToolCall("search", {"b": 2, "a": 1}))
    assert said("no_repeated_call", twice) == [0]


def test_errors_that_were_recovered_from():
    turns = [call(), call(ok=False), call("add"), call(), call(), says()]
    assert said("error_recovered", *turns) == [0, 0, 0, 1, 0, 0]


def test_reasoning():
    turns = [call(text=THOUGHT), call(text=THOUGHT.upper()), call(text="hm hm hm hm hm hm"), says(THOUGHT)]
    assert said("clear_reasoning", *turns) == [1, 0, 0, 0]
    assert said("clear_reasoning", says("4", reasoning=THOUGHT)) == [1]


@pytest.mark.parametrize(
    ("text", "paid"),
    [
        ("zig zag foo bar baz", 0),
        ("I will think about this one some more", 0),
        ("Oslo Oslo Oslo 1 2 3 4", 0),  # no five words
        ("Find the city of Oslo", 0),  # which is only the task again
        ("There are 1,204 people, so it is small", 1),
        ("It says rainy days, so I take a coat", 1),
        ("The name of the place is Nordre Aker now", 1),
        ("I have looked into the place and its people", 0),  # keys of the result are no values
    ],
)
def test_a_reasoning_cites_a_value(text: str, paid: int):
    looked, weather = call(), call(q="weather")
    looked.tool_results[0].content = '{"place": "Nordre Aker", "people": 1204}'
    weather.tool_results[0].content = "rainy days"
    assert said("clear_reasoning", looked, weather, call(q="more", text=text)) == [0, 0, paid]
    assert said("clear_reasoning", call(text="There are 1,204 people, so it is small"), looked) == [0, 0]


def test_a_reasoning_in_a_script_without_spaces():
    looked = call()
    looked.tool_results[0].content = "晴天"
    turns = [looked, call(q="a", text="今天是晴天所以不用带伞"), call(q="b", text="我再想一想这个问题吧")]
    assert said("clear_reasoning", *turns) == [0, 1, 0]


def test_the_shortest_path():
    turns = [call(), call(q="rome"), call("add"), says()]
    assert said("efficient_path", *turns, shortest=2) == [0, 0, 0, 0.5]
    assert said("efficient_path", *turns, shortest=9) == [0, 0, 0, 1]
    assert said("efficient_path", call(), call(), call(ok=False, q="x"), says()) == [0, 0, 0, 0.5]
    cut = calculate_process_reward(played(*turns, status="max_turns"), {"efficient_path": 1.0}, outcome=1.0)
    assert cut.steps == [0] * 4
    with pytest.raises(Unscored, match="shortest is 0"):
        said("efficient_path", says(), shortest=0)


@pytest.mark.parametrize(("outcome", "wanted"), [(0.0, 0), (-1.0, 0), (0.25, 0.25), (1.0, 1), (5.0, 1)])
def test_only_an_answer_that_is_right_was_reached_efficiently(outcome: float, wanted: float):
    """A guess in one turn is as short as can be."""
    assert said("efficient_path", says("7"), outcome=outcome) == [wanted]
    assert said("efficient_path", says("7"), outcome=outcome, shortest=3) == [wanted]
    if outcome < 1:
        assert said("efficient_path", call(), says("7"), outcome=outcome, shortest=1) == [0, wanted / 2]


@pytest.mark.parametrize("weight", [0.0, 1.0])
def test_whether_it_was_right_is_asked_of_the_outcome(weight: float):
    """Also where the outcome itself weighs nothing."""
    reward = ProcessReward(weight, {"efficient_path": 0.5}, lambda episode: episode.trajectory.answer == "ok")
    for answer, wanted in (("ok", 0.5), ("no idea", 0.0)):
        [[result]] = rollout(say=lambda *_, answer=answer: answer, reward=reward)
        assert result.reward is not None, result.error
        assert result.reward.outcome == weight * (answer == "ok") and result.reward.steps == [wanted]


def test_the_expert_says_what_is_shortest():
    class Known(Echo):
        def expert(self) -> Any:
            yield Message("assistant", tool_calls=[ToolCall("echo", {"text": "x"})])
            yield Message("assistant", "ok")

    reward = ProcessReward(step_rewards={"efficient_path": 0.6})
    [[result]] = rollout(Known, reward=reward)  # two calls, then the answer
    assert result.reward is not None
    assert result.reward.outcome == 1.0 and result.reward.steps == pytest.approx([0, 0, 0.6 * 2 / 3])
    assert result.reward.parts == pytest.approx({"outcome": 1.0, "efficient_path": 0.4} | NOTHING)


def test_once_or_per_turn():
    turns = [call(q="a"), call(ok=False), call(q="b"), says()]
    rules = {"correct_tool": 0.5}
    assert calculate_process_reward(played(*turns), rules).steps == [0.5, 0, 0, 0]
    per_turn = calculate_process_reward(played(*turns), rules, pay="per_turn", cap=10)
    assert per_turn.steps == [0.5, 0, 0.5, 0] and per_turn.parts["correct_tool"] == 1.0
    graded = iter([0.2, 0.1, 0.6, -0.5])
    once = calculate_process_reward(
        played(*turns), {"mine": 1.0}, rules={"mine": lambda _, turn: next(graded)}
    )
    assert once.steps == pytest.approx([0.2, 0, 0.4, -0.5])


def test_the_cap_holds_after_every_turn():
    turns = [call(q=str(number)) for number in range(6)]
    reward = calculate_process_reward(
        played(*turns, says()), {"correct_tool": 0.4, "no_repeated_call": 0.1}, pay="per_turn", cap=1.2
    )
    assert reward.steps == pytest.approx([0.5, 0.5, 0.2, 0, 0, 0, 0])
    assert reward.parts["capped"] == pytest.approx(-1.8) and sum(reward.steps) == pytest.approx(1.2)
    by_default = calculate_process_reward(played(*turns, says()), {"correct_tool": 0.4}, pay="per_turn")
    assert sum(by_default.steps) == pytest.approx(0.4)  # not more than once


@pytest.mark.parametrize("status", ["max_turns", "truncated"])
def test_what_is_not_finished_gives_everything_back(status: Status):
    turns = [call(q="a"), call(q="b"), call(ok=False)]
    options: dict[str, Any] = {"step_rewards": {"correct_tool": 0.5}, "pay": "per_turn", "cap": 5.0}
    reward = calculate_process_reward(played(*turns, status=status), **options)
    assert reward.steps == [0.5, 0.5, -1.0] and sum(reward.steps) == 0
    assert reward.parts == {"outcome": 0.0, "correct_tool": 1.0, "capped": 0.0, "clawed_back": -1.0}
    kept = calculate_process_reward(played(*turns, status=status), claw_back=False, **options)
    assert kept.steps == [0.5, 0.5, 0.0]
    # What is owed is not forgiven.
    penalty = calculate_process_reward(played(*turns, status=status), {"correct_tool": -0.5}, pay="per_turn")
    assert penalty.steps == [-0.5, -0.5, 0.0]


def test_a_wrong_episode_gives_back_what_its_steps_earned_where_that_is_asked_for():
    turns, options = [call(q="a"), call(q="b"), says("7")], {"step_rewards": {"correct_tool": 0.5}}
    for outcome, claw_back, steps in (
        (0.0, True, [0.5, 0.0, 0.0]),  # a wrong episode that came to its end keeps them by default
        (0.0, "wrong", [0.5, 0.0, -0.5]),
        (-1.0, "wrong", [0.5, 0.0, -0.5]),
        (0.1, "wrong", [0.5, 0.0, 0.0]),
    ):
        reward = calculate_process_reward(played(*turns), outcome=outcome, claw_back=claw_back, **options)
        assert reward.steps == steps and reward.parts["clawed_back"] == min(0.0, steps[-1])
    for status, outcome in (("max_turns", 1.0), ("done", 0.0)):
        unfinished = calculate_process_reward(
            played(*turns, status=status), outcome=outcome, claw_back="wrong", **options
        )
        assert sum(unfinished.steps) == 0
    # The outcome is asked for that, though it has no weight.
    reward = ProcessReward(0.0, {"correct_tool": 0.5}, lambda episode: 0.0, claw_back="wrong")
    [[result]] = rollout(reward=reward)
    assert result.reward is not None and sum(result.reward.steps) == 0 and result.reward.outcome == 0


def random_turn(rng: random.Random) -> Turn:
    text = rng.choice(["", THOUGHT, f"{THOUGHT} {rng.randint(0, 3)}"])
    return call(rng.choice(["search", "add", "no"]), rng.random() < 0.7, text, q=rng.choice("abc"))


@pytest.mark.parametrize("pay", ["once", "per_turn"])
def test_entries_do_not_change_when_the_trajectory_goes_on(pay: str):
    rng = random.Random(f"prefix {pay}")
    rules = {name: rng.uniform(-0.3, 1.0) for name in PROCESS_RULES} | {"peeks": 0.7}

    def peeks(trajectory: Trajectory, turn: int) -> float:
        """Tries everything that could tell about what comes later."""
        return len(trajectory.turns) - 1 - turn + (trajectory.status == "done") + len(trajectory.answer)

    def steps(turns: list[Turn], status: Status) -> list[float]:
        cap = 1.0 if pay == "once" else 2.0
        return calculate_process_reward(
            played(*turns, status=status), rules, pay=pay, cap=cap, rules={"peeks": peeks}
        ).steps

    clawed = 0
    for _ in range(60):
        begun = [random_turn(rng) for _ in range(rng.randint(1, 5))]
        one = steps([*begun, says("the end")], "done")
        other = steps([*begun, *(random_turn(rng) for _ in range(rng.randint(1, 5)))], "max_turns")
        assert one[: len(begun)] == other[: len(begun)]
        clawed += other[-1] < -0.01
    assert clawed > 10  # claw-backs were in play


def test_farming_earns_less_than_answering():
    worth = {}
    for pay in ("once", "per_turn"):
        reward = ProcessReward(step_rewards={"correct_tool": 0.5, "no_repeated_call": 0.3}, pay=pay)
        says_what = {
            "answers": ["!echo", "ok"],
            "answers wrongly": ["!echo", "no idea"],
            "farms": ["!echo"] * 50,
            "farms, then answers": ["!echo"] * 6 + ["ok"],
        }
        for name, script in says_what.items():

            def say(session: int, turn: int, prompt: str, script: list[str] = script) -> str:
                said = script[turn]
                return call_text("echo", text=str(turn)) if said == "!echo" else said

            [[result]] = rollout(say=say, reward=reward, max_turns=8)
            assert result.reward is not None
            worth[pay, name] = result.reward.outcome + sum(result.reward.steps)
        assert worth[pay, "farms"] == pytest.approx(0)
        assert worth[pay, "farms"] < worth[pay, "answers wrongly"] < worth[pay, "answers"]
        assert worth[pay, "farms, then answers"] <= worth[pay, "answers"] + 1e-9


def test_rules_of_ones_own():
    for value, told in ((None, "None"), ("1", "'1'"), (math.nan, "nan")):
        with pytest.raises(Unscored, match=f"the rule mine .*{told} .*at turn 0; "):
            calculate_process_reward(played(says()), {"mine": 1.0}, rules={"mine": lambda *_, v=value: v})
    with pytest.raises(Unscored, match=r"rule mine at turn 0 .* raised ZeroDivisionError"):
        calculate_process_reward(played(says()), {"mine": 1.0}, rules={"mine": lambda t, n: 1 / 0})


def test_the_outcome_is_any_reward_and_its_steps_count():
    def outcome(one: Any) -> Reward:
        return Reward(1.0, [0.1] * len(one.trajectory.turns), {"a": 1.0, "b": 0.0})

    trajectory = played(call(), says())
    environment = Echo(trajectory.task)
    episode = OpenEpisode(trajectory, environment, environment.executor)
    reward = asyncio.run(ProcessReward(2.0, {"correct_tool": 0.5}, outcome)(episode))
    assert reward.outcome == 2.0 and reward.steps == pytest.approx([0.7, 0.2])
    assert reward.parts == {"outcome": 1.2, "outcome/a": 1.0, "outcome/b": 0.0, "correct_tool": 0.5} | NOTHING
    [[result]] = rollout(reward=ProcessReward(outcome=lambda episode: None))
    assert result.reward is None and "reward outcome returned None" in str(result.error)
    with pytest.raises(Unscored, match="status tool_failure"):
        calculate_process_reward(played(says(), status="tool_failure"))


def test_an_outcome_that_counts_for_nothing_is_not_asked():
    """It may cost, and where it fails the episode would be lost for it."""
    asked: list[Any] = []

    def outcome(one: Any) -> float:
        asked.append(one)
        raise ConnectionError("the judge is away")

    [[result]] = rollout(reward=ProcessReward(0.0, {"correct_tool": 0.5}, outcome))
    assert result.reward is not None, result.error
    assert not asked and result.reward.outcome == 0.0 and result.reward.steps == [0.5, 0.0, 0.0]
    assert result.reward.parts == {"correct_tool": 0.5} | NOTHING
    [[lost]] = rollout(reward=ProcessReward(0.1, {"correct_tool": 0.5}, outcome))
    assert lost.reward is None and "the judge is away" in str(lost.error) and len(asked) == 1
