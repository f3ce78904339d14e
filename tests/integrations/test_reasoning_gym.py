"""Tasks of the real reasoning-gym: made, parted, scored, and trained on; scorers that pay for junk are found out."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest

from tests.kits.gyms import gyms, needs_gyms
from tests.kits.rollout import FakeChat
from tests.kits.run import Quiet, rows, small, train
from TrainingFactory.common import catalog
from TrainingFactory.config import load_config
from TrainingFactory.config.loading import key_value
from TrainingFactory.data.trajectories import load_trajectories
from TrainingFactory.integrations import reasoning_gym
from TrainingFactory.rollout.scripted import play
from TrainingFactory.trainers.training_run import Training
from TrainingFactory.types import Message, Task, Trajectory

pytestmark = needs_gyms
__all__ = ["gyms"]
CONFIGS = Path(__file__).resolve().parents[2] / "configs"


def named(name: str) -> Any:
    return catalog.find("environment", f"reasoning_gym/{name}")


def answered(name: str, task: Task, text: str) -> Trajectory:
    return asyncio.run(play(named(name)(task), FakeChat(), [Message("assistant", text)]))


def outcome(name: str, task: Task, text: str) -> float:
    reward = answered(name, task, text).reward
    assert reward is not None
    return reward.outcome


def test_sums_are_made_again_and_scored() -> None:
    first, again = (list(named("chain_sum").tasks("train", 3, 20)) for _ in range(2))
    assert first == again and len({task.id for task in first}) == 20
    task = first[0]
    sum_of = str(task.prompt).rpartition(": ")[2].removesuffix(" =").split()
    value = int(sum_of[0]) + sum(
        int(sign + term) for sign, term in zip(sum_of[1::2], sum_of[2::2], strict=True)
    )
    assert task.answer == str(value)
    assert outcome("chain_sum", task, f"I add up.\n<answer> {value} </answer>") == 1
    assert outcome("chain_sum", task, str(value)) == 1
    assert outcome("chain_sum", task, f"<answer>{value + 1}</answer>") == 0


def test_the_config_of_a_second_task_trains_with_the_calculator(tmp_path: Path) -> None:
    options = {
        "model.name": "builtin:tiny", "training.max_steps": 1, "training.batch_size": 2, "training.group_size": 2,
        "training.eval_every": 1, "data.count": 4, "data.heldout_count": 2, "sampling.max_tokens": 8,
        "logging.output_dir": str(tmp_path),
    }  # fmt: skip
    given = [key_value(key, value) for key, value in options.items()]
    config = load_config(CONFIGS / "smollm2_chain_sum_grpo.yaml", given)
    report = Training(config, name="run", watcher=Quiet()).train()
    assert report.state == "finished" and report.rows[0]["eval/episodes"] == 2
    [episode, *_] = load_trajectories(report.run / "trajectories.jsonl")
    assert [tool.name for tool in episode.tools] == ["calculator"] and episode.prompt[0].role == "user"
    assert episode.reward is not None and "numeric" in episode.reward.parts


def test_splits_and_seeds_share_no_question() -> None:
    # coin_flip has so few questions that seeds alone would not part them
    for name in ("chain_sum", "coin_flip"):
        train_, heldout = ({str(t.prompt) for t in named(name).tasks(s, 0, 60)} for s in ("train", "heldout"))
        assert train_ and heldout and not train_ & heldout
    numbers = [
        task.metadata["number"] for seed in (0, 1) for task in named("chain_sum").tasks("train", seed, 9)
    ]
    assert len(set(numbers)) == 18


def test_consolation_is_no_success() -> None:
    [task] = named("power_function").tasks("train", 0, 1)
    assert outcome("power_function", task, "no idea") == 0
    assert outcome("power_function/partial", task, "no idea") == 0.01  # what the package gives to anything
    assert outcome("power_function", task, str(task.answer)) == 1


def test_a_scorer_that_pays_for_junk_is_replaced(caplog: pytest.LogCaptureFixture) -> None:
    reasoning_gym.make_environment_class.cache_clear()
    with caplog.at_level(logging.WARNING):
        [task] = named("game_of_life_halting").tasks("train", 0, 1)
    assert "1.00 of 1" in caplog.text and "compared exactly" in caplog.text
    assert outcome("game_of_life_halting", task, "whatever") == 0
    assert outcome("game_of_life_halting", task, str(task.answer)) == 1
    assert named("coin_flip").is_exact and not named("chain_sum").is_exact
    assert named("rectangle_count/partial").is_exact and not named("rectangle_count").is_exact


def test_one_without_answers_that_pays_for_junk_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    reasoning_gym.make_environment_class.cache_clear()
    dataset = reasoning_gym._load_datasets()["graph_color"]
    monkeypatch.setattr(dataset, "score_answer", lambda self, answer, entry: 1.0)
    with pytest.raises(ValueError, match=r"graph_color .* its scorer gives 1.00 of 1 to an empty"):
        named("graph_color")


def test_an_exception_is_unscored_and_never_zero() -> None:
    [task] = named("boxnet").tasks("train", 0, 1)
    played = answered("boxnet", task, "0")
    assert played.reward is None and "scoring failed" in str(played.error)


@pytest.mark.parametrize("name", ["string_insertion", "countdown", "simple_integration", "n_queens"])
def test_what_a_model_wrote_is_never_run(name: str, tmp_path: Path) -> None:
    [task] = named(name).tasks("train", 0, 1)
    code = f"__import__('pathlib').Path({str(tmp_path / 'made')!r}).touch()"
    for text in (code, f"[{code}]", repr(code), f"{code}!"):
        assert outcome(name, task, text) == 0
    assert not (tmp_path / "made").exists()
    assert outcome(name, task, str(task.answer)) == 1


def test_another_right_expression_counts() -> None:
    for task in named("countdown").tasks("train", 0, 3):
        assert outcome("countdown", task, f"0+({task.answer})-0") == 0  # numbers that were not given
        assert outcome("countdown", task, f"(({task.answer}))") == 1


def test_wrong_names() -> None:
    with pytest.raises(ValueError, match=r"no dataset 'chain_sums'; did you mean chain_sum\?"):
        named("chain_sums")
    with pytest.raises(ValueError, match=r"did you mean chain_sum/partial\?"):
        named("chain_sum/part")


def test_a_step_of_training(tmp_path: Path) -> None:
    training = {"max_steps": 1, "batch_size": 2, "group_size": 4}
    config = small(tmp_path, training=training, sampling={"max_tokens": 128})
    # which pays a little for any answer, so that an untrained model gets some at times
    run = train(config, "run", environment=named("palindrome_generation/partial")).run
    [row] = rows(run / "metrics.jsonl")
    assert 0 < row["reward"] < 1 and row["trained_episodes"] >= 4


@pytest.mark.slow
def test_every_dataset_makes_tasks_and_pays_for_its_answers() -> None:
    replaced = set()
    for name in reasoning_gym._load_datasets():
        environment = named(name)
        replaced |= {name} if environment.is_exact else set()
        [task] = environment.tasks("heldout", 0, 1)
        assert not task.answer or outcome(name, task, str(task.answer)) == 1, name
    assert replaced == {"coin_flip", "game_of_life_halting", "puzzle24"}
