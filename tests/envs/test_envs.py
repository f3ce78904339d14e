from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from tests.kits.rollout import FakeChat
from TrainingFactory.assembly.environment import as_environment_factory, load_environment_file
from TrainingFactory.envs import CalculatorEnvironment, SearchEnvironment, ToolEnvironment
from TrainingFactory.envs.builtin.text2sql import Text2SqlEnvironment
from TrainingFactory.models.words import NAMES, PLACES, THINGS
from TrainingFactory.rollout import play
from TrainingFactory.tools import tool
from TrainingFactory.types import Message, Task, ToolCall, Trajectory

BUILT_IN = [SearchEnvironment, CalculatorEnvironment, Text2SqlEnvironment]


class Weather(ToolEnvironment):
    system_prompt = "Look the city up, then answer with the number alone."

    @classmethod
    def tasks(cls, split: str, seed: int, count: int) -> Iterator[Task]:
        yield Task("oslo", "How warm is it in Oslo?", "4")

    @tool
    def temperature(self, city: str) -> str:
        """The temperature of a city in degrees Celsius."""
        time.sleep(0.02 if city == "Oslo" else 0)
        return {"Oslo": "4", "Rome": "19"}[city]


def play_out(environment: ToolEnvironment, script: Iterator[Message]) -> Trajectory:
    return asyncio.run(play(environment, FakeChat(), script))


def test_an_environment_in_a_dozen_lines():
    environment = Weather(next(iter(Weather.tasks("train", 0, 1))))
    assert asyncio.run(environment.reset()) == [
        Message("system", Weather.system_prompt),
        Message("user", "How warm is it in Oslo?"),
    ]
    calls = [
        ToolCall("temperature", {"city": "Oslo"}, "a"),
        ToolCall("temperature", {"city": "Rome"}, "b"),
        ToolCall("temperature", {"city": "Bonn"}, "c"),
        ToolCall("weather", {}, "d"),
    ]
    step = asyncio.run(environment.step(Message("assistant", tool_calls=calls)))
    assert not step.done
    assert [reply.role for reply in step.replies] == ["tool"] * 4
    assert [reply.tool_call_id for reply in step.replies] == ["a", "b", "c", "d"]
    assert [reply.name for reply in step.replies] == ["temperature"] * 3 + ["weather"]
    assert [reply.content for reply in step.replies][:2] == ["4", "19"]
    assert [result.error for result in step.tool_results] == [None, None, "exception", "unknown"]
    assert asyncio.run(environment.step(Message("assistant", "4"))).done


@pytest.mark.parametrize(
    ("said", "reward"), [("4", 1.0), (" 4\n", 1.0), ("5", 0.0), ("", 0.0), ("It is 4", 0.0)]
)
def test_the_default_reward_compares_answers(said: str, reward: float):
    for answer in ("4", "Two and two.\n#### 4"):  # the second in GSM8K's form
        trajectory = play_out(Weather(Task("oslo", "?", answer)), iter([Message("assistant", said)]))
        assert trajectory.reward is not None and trajectory.reward.outcome == reward


def test_an_answer_with_the_mark_of_gsm8k_in_it_is_right_as_a_whole():
    text = "#### Weather\nCold"
    trajectory = play_out(Weather(Task("oslo", "?", text)), iter([Message("assistant", text)]))
    assert trajectory.reward is not None and trajectory.reward.outcome == 1.0


def test_no_answer_is_not_a_zero():
    trajectory = play_out(Weather(Task("oslo", "?")), iter([Message("assistant", "4")]))
    assert trajectory.reward is None and "has no answer" in str(trajectory.error)


def test_prompts_that_are_conversations():
    told = [Message("user", "Hi"), Message("assistant", "Hello"), Message("user", "How warm is it?")]
    system = Message("system", Weather.system_prompt)
    assert asyncio.run(Weather(Task("a", told)).reset()) == [system, *told]
    own = [Message("system", "Be short."), Message("user", "How warm is it?")]
    assert asyncio.run(Weather(Task("a", own)).reset()) == own


def test_tools_of_a_class_its_bases_and_handed_in():
    @tool
    def extra() -> str:
        return "extra"

    class Better(Weather):
        @tool
        def wind(self) -> str:
            return self.task.id

    class Worse(Better):
        temperature = None  # type: ignore[assignment]

    task = Task("oslo", "?")
    assert [t.spec.name for t in Better(task, [extra]).tools] == ["temperature", "wind", "extra"]
    assert [t.spec.name for t in Worse(task).tools] == ["wind"]
    with pytest.raises(ValueError, match="same name"):
        Weather(task, [Weather(task).temperature])


def test_methods_of_rl_factory_that_nothing_would_call_are_told(tmp_path: Path):
    path = tmp_path / "search.py"
    text = """from TrainingFactory.envs import ToolEnvironment

class SearchEnv(ToolEnvironment):
    def get_step_reward(self, responses, format_score=0.1):
        return 1

    def _compute_score_with_rules(self, data, tokenizer, if_val=False):
        return [[0.0]]
"""
    path.write_text(text)
    says = r"SearchEnv has _compute_score_with_rules, get_step_reward as in RL-Factory.*`reward\(self, episode\)`"
    with pytest.raises(ValueError, match=says):
        as_environment_factory(load_environment_file(str(path)))
    path.write_text(
        text + "\n    def reward(self, episode):\n        return self._compute_score_with_rules(0, 0)[0][0]\n"
    )
    assert as_environment_factory(load_environment_file(str(path))).__name__ == "SearchEnv"


def test_tasks_must_come_from_somewhere():
    with pytest.raises(ValueError, match="generates no tasks"):
        ToolEnvironment.tasks("train", 0, 1)


@pytest.mark.parametrize("environment", BUILT_IN)
def test_tasks_are_the_same_for_the_same_seed(environment: type[ToolEnvironment]):
    first = list(environment.tasks("train", 7, 50))
    assert len(first) == 50 and first == list(environment.tasks("train", 7, 50))
    assert first[:10] == list(environment.tasks("train", 7, 10))
    assert [task.prompt for task in first] != [task.prompt for task in environment.tasks("train", 8, 50)]
    assert list(environment.tasks("train", 7, 0)) == []


@pytest.mark.parametrize(("environment", "seeds"), list(zip(BUILT_IN, (8, 8, 1), strict=True)))
def test_heldout_questions_are_never_trained_on(environment: type[ToolEnvironment], seeds: int):
    train, heldout = (
        [task for seed in range(seeds) for task in environment.tasks(split, seed, 200)]
        for split in ("train", "heldout")
    )
    asked, kept = ({str(task.prompt) for task in tasks} for tasks in (train, heldout))
    assert len(asked) > 50 * seeds and len(kept) > 15 * seeds and not asked & kept
    assert len({task.id for task in [*train[:200], *heldout[:200]]}) == 400
    with pytest.raises(ValueError, match="split 'test'; use train or heldout"):
        next(iter(environment.tasks("test", 0, 1)))


@pytest.mark.parametrize(("environment", "count"), list(zip(BUILT_IN, (50, 50, 20), strict=True)))
def test_experts_are_right_and_novices_mostly_wrong(environment: type[SearchEnvironment], count: int):
    won = 0.0
    for number, task in enumerate(environment.tasks("train", 0, count)):
        expert, novice = environment(task), environment(task)
        played = play_out(expert, expert.expert())
        assert played.status == "done" and played.reward is not None and played.reward.outcome == 1.0, played
        assert all(result.ok for turn in played.turns for result in turn.tool_results)
        for turn, following in pairwise(played.turns):
            before = turn.prompt_ids + turn.completion.token_ids
            assert following.prompt_ids[: len(before)] == before
        played = play_out(novice, novice.novice(random.Random(number)))
        assert played.status == "done" and played.reward is not None
        won += played.reward.outcome
    assert won / count < 0.1


def test_search_needs_both_hops():
    for task in SearchEnvironment.tasks("train", 3, 100):
        environment, facts = SearchEnvironment(task), task.metadata
        asked = (f"{facts['seller']} {facts['thing']}", facts["buyer"].lower(), "the", facts["seller"])
        calls = [ToolCall("search", {"query": query}) for query in asked]
        first, second, nothing, broad = asyncio.run(environment.executor.batch_execute(calls))
        assert first.content == f"{facts['seller']} sold {facts['thing']} to {facts['buyer']}."
        assert second.content == f"{facts['buyer']} lives in {task.answer}."
        assert nothing.content == "Nothing found."
        assert broad.content.count(".") == 3  # both sales and the home
        assert str(task.answer) not in str(task.prompt) + first.content + broad.content
        assert facts["buyer"] not in str(task.prompt)


def test_search_is_made_of_known_words():
    words = {*NAMES, *PLACES, *THINGS}
    for task in SearchEnvironment.tasks("train", 0, 50):
        fact_words = {word for keys, _ in task.metadata["facts"] for word in keys.split()}
        assert fact_words <= words and task.answer in PLACES


def test_calculator_answers_are_whole_numbers():
    for task in CalculatorEnvironment.tasks("train", 1, 200):
        expression = task.metadata["expression"]
        left, operator, right = expression[:2], expression[2], expression[3:]
        assert 10 <= int(left) <= 99 and 10 <= int(right) <= 99
        expected = {"+": int(left) + int(right), "-": int(left) - int(right), "*": int(left) * int(right)}
        assert task.answer == str(expected[operator])
