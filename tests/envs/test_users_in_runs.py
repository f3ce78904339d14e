"""Runs with simulated users: recording and replay, evaluation, checks before the run, and learning to ask."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kits.judge import judging
from tests.kits.lessons import evaluations, learn, warm_start
from tests.kits.run import Quiet, brief, rows, train
from tests.kits.users import STOP, Orders, config_of, obliging
from tests.kits.warm import WARM
from TrainingFactory.config import TrainingConfig
from TrainingFactory.envs import ToolEnvironment
from TrainingFactory.evaluation.rollouts import Rollouts
from TrainingFactory.trainers.training_run import Training
from TrainingFactory.training.dataset import UserObjects
from TrainingFactory.types import Message, Task


def training_config(folder: Path, url: str, **sections: Any) -> TrainingConfig:
    user = {"model": f"openai:user@{url}", "options": {"api_key_env": None, "retries": 0}, "max_turns": 2}
    return brief(
        folder,
        model={"name": str(WARM)},
        environment={"max_turns": 4, "user": user},
        data={"count": 6},
        sampling={"max_tokens": 16},
        training={"max_steps": 1, "batch_size": 2, "group_size": 2},
        **sections,
    )


class Scored(Orders):
    def reward(self, episode: Any) -> float:
        return float(sum(episode.trajectory.turns[0].completion.token_ids) % 3)


def test_a_run_records_its_user_and_replays_without_it(tmp_path: Path) -> None:
    with judging(lambda prompt, number: f"reply {len(prompt)}") as user:
        config = training_config(tmp_path, user.url)
        assert train(config, "live", environment=Scored).state == "finished"
        num_requests = len(user.asked)
    metrics = rows(tmp_path / "live" / "metrics.jsonl")
    assert sum(row["user/turns"] * row["episodes"] for row in metrics) == num_requests > 0
    assert metrics[-1]["user/requests"] == num_requests
    objects = UserObjects(environment=Scored)
    replay = str(tmp_path / "live")
    Training(config, name="again", objects=objects, watcher=Quiet(), replay=replay).train()
    live, again = (rows(tmp_path / name / "trajectories.jsonl") for name in ("live", "again"))
    assert live == again
    replayed = rows(tmp_path / "again" / "metrics.jsonl")
    assert [row["loss"] for row in replayed] == [row["loss"] for row in metrics]
    assert replayed[-1]["user/requests"] == 0.0


def test_an_evaluation_plays_with_the_user(tmp_path: Path) -> None:
    with judging(lambda prompt, number: "Go on.") as user:
        config = training_config(tmp_path, user.url)
        (tmp_path / "tasks.jsonl").write_text('{"prompt": "Hi", "goal": "Talk.", "answer": "x"}\n')
        data = config.data.model_copy(update={"tasks": str(tmp_path / "tasks.jsonl"), "count": None})
        place = config.environment.model_copy(update={"environment_id": f"{__file__}:Scored"})
        config = config.model_copy(update={"data": data, "environment": place})
        report = Rollouts(config, tmp_path / "out.jsonl", group_size=8).run()
        assert len(user.asked) == report.metrics["user/turns"] * 8 == report.metrics["user/requests"] > 0


def test_all_tasks_are_checked_before_the_run(tmp_path: Path) -> None:
    tasks = [Task("a", "?", metadata={"goal": "x"}), Task("b", "?")]
    config = training_config(tmp_path, "http://127.0.0.1:9/v1")
    with pytest.raises(ValueError, match="task b has no column `goal`"):
        train(config, "run", environment=Scored, tasks=tasks)
    assert not (tmp_path / "run").exists()


def test_an_endpoint_can_be_the_agent_too(tmp_path: Path) -> None:
    (tmp_path / "tasks.jsonl").write_text(
        '{"prompt": "Hi", "goal": "order 40 .", "answer": "It is shipped."}\n'
    )
    with judging(obliging) as user, judging("It is shipped.") as agent_model:
        teacher = {"model": "agent", "base_url": agent_model.url, "api_key_env": None}
        (tmp_path / "agent.yaml").write_text(json.dumps(teacher))
        config = TrainingConfig(
            model={"name": str(tmp_path / "agent.yaml")},
            environment={"user": config_of(user.url).environment.user},
            data={"tasks": str(tmp_path / "tasks.jsonl")},
            logging={"output_dir": str(tmp_path)},
        )
        report = Rollouts(config, tmp_path / "out.jsonl").run()
    assert (report.metrics["reward"], report.metrics["user/turns"]) == (1.0, 1.0)
    assert report.trajectories[0].turns[-1].replies == [Message("user", "Thanks!")]


@pytest.mark.slow
def test_a_model_of_the_run_can_play_the_user(tmp_path: Path) -> None:
    """The built-in model writes nonsense, and the same nonsense for the same seeds."""
    user = {
        "model": "builtin:tiny",
        "max_turns": 2,
        "options": {"options": {"max_tokens": 8, "temperature": 1.0}},
    }
    conversations = []
    for name in ("one", "two"):
        config = brief(
            tmp_path / name,
            model={"name": str(WARM)},
            environment={"max_turns": 3, "user": user},
            sampling={"max_tokens": 16},
            data={"count": 6},
            training={"max_steps": 1, "batch_size": 2, "group_size": 2},
        )
        assert train(config, "run", environment=Scored).state == "finished"
        [row] = rows(tmp_path / name / "run" / "metrics.jsonl")
        assert row["user/turns"] > 0 and row["user/requests"] == row["user/turns"] * row["episodes"]
        conversations.append(
            [
                [reply["content"] for turn in episode["turns"] for reply in turn["replies"]]
                for episode in rows(tmp_path / name / "run" / "trajectories.jsonl")
            ]
        )
    assert conversations[0] == conversations[1]
    assert len({text for conversation in conversations[0] for text in conversation}) > 1


COLOURS = ("red", "blue", "green", "white", "black", "brown")
QUESTION = "Which colour?"


class Painter(ToolEnvironment):
    """The user wants a colour and does not say which."""

    @classmethod
    def tasks(cls, split: str, seed: int, count: int) -> Iterator[Task]:
        rng = random.Random(f"{split} {seed}")
        for number in range(count):
            colour = rng.choice(COLOURS)
            yield Task(f"{split}-{number}", "Paint it.", colour, {"goal": f"The colour is {colour}."})


def customer(prompt: str, number: int) -> str:
    last = prompt.rsplit("\n", 1)[-1]
    return re.findall(r"colour is (\w+)", prompt)[0] if last == QUESTION else STOP


def paintings(count: int, asking: float) -> Iterator[list[Message]]:
    """Yield conversations. A share asks the user first; the others guess a random colour in their first turn."""
    rng = random.Random(3)
    for _ in range(count):
        colour = rng.choice(COLOURS)
        asked = rng.random() < asking
        question = [Message("assistant", QUESTION), Message("user", colour)] if asked else []
        yield [Message("user", "Paint it."), *question, Message("assistant", colour)]


@pytest.mark.slow
def test_a_policy_learns_to_ask_the_user(tmp_path: Path) -> None:
    """Who guesses is right once in six tasks; who asks is right."""
    model = warm_start(tmp_path, paintings(40 * 16, asking=0.3), batch_size=16, steps=40)
    with judging(customer) as user:
        section = config_of(user.url, max_turns=2).environment.user
        environment = {"max_turns": 3, "user": section}
        report = learn(tmp_path, model, environment, 20, max_tokens=12, of_class=Painter, batch_size=8)
    first, *_, last = evaluations(report)
    print(f"success: warm start {first:.2f}, trained {last:.2f}")
    assert last >= first + 0.3 and last >= 0.8
